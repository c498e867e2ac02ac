"""Weights: how much one token of a sequence counts in the loss of a minibatch.

Each function takes the number of tokens of each sequence that are trained on. A sequence without any has weight 0 and
is not counted as a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence


def sequence_means(lengths: Sequence[int]) -> list[float]:
    """The mean over sequences of the mean over tokens."""
    count = _count(lengths)
    return [1 / (count * length) if length else 0.0 for length in lengths]


def sequence_sums(lengths: Sequence[int], divisor: int = 1) -> list[float]:
    """The mean over sequences of the sum over tokens, divided by a constant."""
    count = _count(lengths)
    return [1 / (count * divisor) if length else 0.0 for length in lengths]


def token_mean(lengths: Sequence[int]) -> list[float]:
    """The mean over all tokens."""
    total = sum(lengths)
    return [1 / total if length else 0.0 for length in lengths]


def _count(lengths: Sequence[int]) -> int:
    return sum(1 for length in lengths if length)
