"""Reward functions of config.yaml. A completion has all turns: the model's text, and the results that it read."""

from __future__ import annotations

import re

RESULT = re.compile(r"<result>-?\d[^<]*</result>")


def right(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 if the model itself writes the answer, after the last result."""
    scores = []
    for text, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"\d+", text.rpartition("</result>")[2].replace(",", ""))
        scores.append(float(numbers[-1:] == [expected]))
    return scores


def called(completions: list[str], **columns: object) -> list[float]:
    """1 if the model used the calculator and got a number."""
    return [float(RESULT.search(text) is not None) for text in completions]


def letters(completions: list[str], **columns: object) -> list[float]:
    """The fraction of ASCII letters: a reward for trial.yaml, whose model has random weights."""
    return [sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text)) for text in completions]
