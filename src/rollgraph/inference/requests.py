"""What goes into an engine and what comes out: sampling parameters, outputs, progress."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real
from typing import Any

from rollgraph.config import COLDEST
from rollgraph.errors import InvalidInput


class RequestError(ValueError):
    """This request cannot be served. Other requests are not affected."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    - A token in `stop_ids`, or one of the tokenizer's stop tokens unless `ignore_eos` is set, ends a completion and
      is its last token.
    - A string in `stop` also ends it, even if it spans several tokens. `text` ends before the string; `tokens`
      includes it.
    - `temperature` 0 takes the most likely token. Any other value must be at least 0.01, because logits are divided
      by it.
    - Filters apply after the temperature: first top_k, then top_p, then min_p.
    - The same `seed` gives a request the same noise, whatever else is in the batch. None draws a random seed.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (is_valid, expected) in _RULES.items():
            value = getattr(self, name)
            if not is_valid(value):
                raise InvalidInput(f"must be {expected}, got {value!r}", argument=name)

    @property
    def filtered(self) -> bool:
        """Whether sampling needs more than a temperature."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0 or self.repetition_penalty != 1


def _within(value: Any, kind: type, low: float, high: float = inf) -> bool:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    return is_number and bool(low <= value <= high)


def _all(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes) and all(map(is_valid, value))


# The largest temperature and penalty. With it, and COLDEST as the smallest, logits stay well inside the range of fp32.
_LARGEST = 1e6

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda v: _within(v, Integral, 1), "a positive integer"),
    "max_tokens": (lambda v: _within(v, Integral, 0), "an integer of at least 0"),
    "temperature": (
        lambda v: _within(v, Real, 0, 0) or _within(v, Real, COLDEST, _LARGEST),
        f"0 (take the most likely token) or between {COLDEST} and {_LARGEST:g}",
    ),
    "top_k": (lambda v: _within(v, Integral, 0, 2**31 - 1), "0 (keep all tokens) or a positive integer below 2**31"),
    "top_p": (lambda v: _within(v, Real, 0, 1) and v != 0, "above 0 and at most 1"),
    "min_p": (lambda v: _within(v, Real, 0, 1), "between 0 and 1"),
    "repetition_penalty": (
        lambda v: _within(v, Real, COLDEST, _LARGEST),
        f"between {COLDEST} and {_LARGEST:g}",
    ),
    "stop": (
        lambda v: _all(v, lambda item: isinstance(item, str) and bool(item)),
        "a tuple of non-empty strings",
    ),
    "stop_ids": (lambda v: _all(v, lambda item: _within(item, Integral, 0)), "a tuple of token ids"),
    "ignore_eos": (lambda v: isinstance(v, bool), "True or False"),
    "seed": (lambda v: v is None or _within(v, Integral, -inf), "an integer or None"),
}


@dataclass
class Completion:
    """One sample. `finish_reason` is "stop", "length", "abort" or "error", or None while it is running."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)  # under the distribution that each token was drawn from
    policy_logprobs: list[float] = field(default_factory=list)  # under the model itself, at temperature 1
    error: str | None = None


@dataclass
class Output:
    """The result of one request: its prompt and `n` completions, or the reason why it was refused."""

    prompt: str | None
    prompt_tokens: list[int]
    completions: list[Completion] = field(default_factory=list)
    error: str | None = None

    @property
    def done(self) -> bool:
        return all(completion.finish_reason for completion in self.completions)


@dataclass(frozen=True)
class Progress:
    """How far generation has come."""

    tokens: int  # sampled so far
    running: int  # sequences that have a row
    waiting: int  # sequences that wait for a row
    finished: int  # completions


# Called with the request, the index of the sample, its new token, and the text that is now final: no later token can
# change this text or make it part of a stop string.
OnToken = Callable[[Output, int, int, str], None]
