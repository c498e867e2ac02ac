"""What an engine is asked and what it gives back: sampling parameters, outputs, progress."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real
from typing import Any

from rollgraph.config import COLDEST


class RequestError(ValueError):
    """A request that cannot be served; all others are."""


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    A token of `stop_ids` (or one of the tokenizer's, unless `ignore_eos`) ends a completion and is its last token.
    A string of `stop` ends it, too, also across tokens; `text` ends before it, `tokens` contain it. With temperature 0
    the most likely token is taken; others are 0.01 or more, since logits are divided by it. Filters follow the
    temperature: top_k, then top_p, then min_p. The same `seed` gives the same noise to the same request, whatever runs
    beside it; None draws one.
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
        for name, (holds, words) in _RULES.items():
            value = getattr(self, name)
            if not holds(value):
                raise ValueError(f"{name}={value!r}: {words}")

    @property
    def filtered(self) -> bool:
        """Needs more than a temperature."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0 or self.repetition_penalty != 1


def _within(value: Any, kind: type, low: float, high: float = inf) -> bool:
    of_kind = isinstance(value, kind) and not isinstance(value, bool)
    return of_kind and bool(low <= value <= high)


def _all(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes) and all(map(holds, value))


_MOST = 1e6  # of a temperature and a penalty: with it and COLDEST, logits stay far inside of fp32
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda v: _within(v, Integral, 1), "an integer, at least one sample"),
    "max_tokens": (lambda v: _within(v, Integral, 0), "an integer, not negative"),
    "temperature": (
        lambda v: _within(v, Real, 0, 0) or _within(v, Real, COLDEST, _MOST),
        f"zero (the most likely token), or from {COLDEST} to {_MOST:g}",
    ),
    "top_k": (lambda v: _within(v, Integral, 0, 2**31 - 1), "an integer, zero (all tokens) or positive, below 2**31"),
    "top_p": (lambda v: _within(v, Real, 0, 1) and v != 0, "above 0 and at most 1"),
    "min_p": (lambda v: _within(v, Real, 0, 1), "between 0 and 1"),
    "repetition_penalty": (lambda v: _within(v, Real, COLDEST, _MOST), f"from {COLDEST} to {_MOST:g}"),
    "stop": (
        lambda v: _all(v, lambda item: isinstance(item, str) and bool(item)),
        "a tuple of strings, none of them empty",
    ),
    "stop_ids": (lambda v: _all(v, lambda item: _within(item, Integral, 0)), "a tuple of token ids"),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
    "seed": (lambda v: v is None or _within(v, Integral, -inf), "an integer or None"),
}


@dataclass
class Completion:
    """One sample. `finish_reason` is "stop", "length", "abort" or "error"."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)  # under the distribution that each token was drawn from
    policy_logprobs: list[float] = field(default_factory=list)  # under the model's own, at temperature 1
    error: str | None = None


@dataclass
class Output:
    """A request: its prompt and `n` completions, or why it was refused."""

    prompt: str | None
    prompt_tokens: list[int]
    completions: list[Completion] = field(default_factory=list)
    error: str | None = None

    @property
    def done(self) -> bool:
        return all(completion.finish_reason for completion in self.completions)


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    tokens: int  # sampled so far
    running: int
    waiting: int
    finished: int  # completions


# Request, sample, token, and the text that became certain with it: no later token makes it part of a stop string.
OnToken = Callable[[Output, int, int, str], None]
