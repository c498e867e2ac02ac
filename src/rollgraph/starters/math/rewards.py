"""What a completion is worth, besides a right answer, which the built-in reward `math_verify` finds."""

from __future__ import annotations

import re

BOX = re.compile(r"\\boxed\{[^{}]+\}")


def boxed(completions: list[str], **columns: object) -> list[float]:
    """1 if there is one final answer, in the form that the prompt asks for."""
    return [float(len(BOX.findall(text)) == 1) for text in completions]
