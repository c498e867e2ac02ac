"""Requests and results of an engine: sampling parameters, outputs, progress, and streamed text."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real
from typing import Any

from rollgraph.config import MIN_TEMPERATURE
from rollgraph.errors import InvalidInput
from rollgraph.tokenizer import Detokenizer

# -- requests and outputs --------------------------------------------------------------------------


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
    - With the same `seed`, a request gets the same noise, whatever else is in the batch. None draws a random seed.
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


# The largest temperature and penalty. With these bounds, logits stay well inside the range of fp32.
_LARGEST = 1e6

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda v: _within(v, Integral, 1), "a positive integer"),
    "max_tokens": (lambda v: _within(v, Integral, 0), "an integer of at least 0"),
    "temperature": (
        lambda v: _within(v, Real, 0, 0) or _within(v, Real, MIN_TEMPERATURE, _LARGEST),
        f"0 (take the most likely token) or between {MIN_TEMPERATURE} and {_LARGEST:g}",
    ),
    "top_k": (lambda v: _within(v, Integral, 0, 2**31 - 1), "0 (keep all tokens) or a positive integer below 2**31"),
    "top_p": (lambda v: _within(v, Real, 0, 1) and v != 0, "above 0 and at most 1"),
    "min_p": (lambda v: _within(v, Real, 0, 1), "between 0 and 1"),
    "repetition_penalty": (
        lambda v: _within(v, Real, MIN_TEMPERATURE, _LARGEST),
        f"between {MIN_TEMPERATURE} and {_LARGEST:g}",
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
    logprobs: list[float] = field(default_factory=list)  # under the distribution the token was drawn from
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
    running: int  # sequences with a row
    waiting: int  # sequences waiting for a row
    finished: int  # completions


# Called with the request, the index of the sample, its new token, and the text that is now final: no later token can
# change this text or make it part of a stop string.
OnToken = Callable[[Output, int, int, str], None]


# -- streamed text ---------------------------------------------------------------------------------
# Knows nothing of requests, sequences or steps.


class TextStream:
    """The text of a growing completion, cut at stop strings.

    `text` is all text so far. `push` returns each part of it once, as soon as no later token can change it.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self.text = ""
        self.stopped = False  # whether a stop string is complete
        self._detokenizer = detokenizer
        self._stops = stops
        self._longest_stop = max(map(len, stops), default=0)
        self._emitted = 0  # characters of the text that `push` has returned

    def push(self, token: int | None, *, last: bool) -> str:
        """Add a token, or None for an id without text, and return the text that is now final.

        `last` says that no token follows.
        """
        before = len(self.text)
        if token is not None:
            self.text += self._detokenizer.push(token)
        if last:
            self.text += self._detokenizer.finish()
        self._cut_at_stop(before, last)
        final = len(self.text)
        if not self.stopped and not last:
            final -= max((_overlap(self.text, stop) for stop in self._stops), default=0)
        new = self.text[self._emitted : final]
        self._emitted = final
        return new

    def finish(self) -> None:
        """End the text: add the characters that the detokenizer holds back."""
        self.text += self._detokenizer.finish()

    def _cut_at_stop(self, before: int, last: bool) -> None:
        """Search for a stop string in the text from `before` on and in the characters the detokenizer holds back."""
        text = self.text
        if self._stops and not last:
            text += self._detokenizer.pending()
        indices = [text.find(stop, max(0, before - self._longest_stop)) for stop in self._stops]
        matches = [index for index in indices if index >= 0]
        if matches:
            self.text = text[: min(matches)]
            self.stopped = True


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop string."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
