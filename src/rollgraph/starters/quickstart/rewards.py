"""The reward function of config.yaml. Each column of the data is an argument: `answer` is a list, as `completions`."""

from __future__ import annotations


def exact(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    return [float(text.strip() == expected) for text, expected in zip(completions, answer, strict=True)]
