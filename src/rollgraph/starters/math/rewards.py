"""Reward functions of config.yaml, besides the built-in `math_verify`, which checks the answer."""

from __future__ import annotations

import re

BOX = re.compile(r"\\boxed\{[^{}]+\}")


def boxed(completions: list[str], **columns: object) -> list[float]:
    """1 if there is exactly one final answer, in the format that the prompt asks for."""
    return [float(len(BOX.findall(text)) == 1) for text in completions]


def letters(completions: list[str], **columns: object) -> list[float]:
    """The fraction of ASCII letters: a reward for trial.yaml, whose model has random weights."""
    return [sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text)) for text in completions]
