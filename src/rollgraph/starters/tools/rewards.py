"""What a completion is worth. A completion has all turns: what the model wrote, and the results that it read."""

from __future__ import annotations

import re

RESULT = re.compile(r"<result>-?\d[^<]*</result>")


def right(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 if the model ends with the answer in its own words, after the last result."""
    scores = []
    for text, wanted in zip(completions, answer, strict=True):
        numbers = re.findall(r"\d+", text.rpartition("</result>")[2].replace(",", ""))
        scores.append(float(numbers[-1:] == [wanted]))
    return scores


def called(completions: list[str], **columns: object) -> list[float]:
    """1 if the calculator was used and gave a number."""
    return [float(RESULT.search(text) is not None) for text in completions]
