"""What a completion is worth. Each column of the data is an argument: `answer` is a list, like `completions`."""

from __future__ import annotations


def exact(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]
