"""What is written about each token of a sample: how likely it was, how strongly it was encouraged, what changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollgraph.types import Rollout

TokenTexts = Callable[[Sequence[int]], list[str]]  # the text of each token; together they are the text of all
DIGITS = 5  # of a number; more than a colour can show

NO_REFERENCE = "the reference policy did not score this sample; it does with algorithm.kl_coef"
NOT_TRAINED = "this sample was not trained on"


@dataclass(frozen=True)
class SampleDetails:
    """What is known of a rollout beside itself. Streams have one entry for each of its tokens."""

    advantages: Sequence[float] | None = None
    updated_logprobs: Sequence[float] | None = None  # after the update of the step
    entropies: Sequence[float] | None = None  # after it, too
    left_out: str = ""  # why it is not trained on; empty if it is


@dataclass(frozen=True)
class TokenColumns:
    """Values by name, and for those that are absent, why."""

    values: dict[str, list[float | None]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, column: Sequence[float] | None, sampled: Sequence[bool], why_not: str) -> None:
        """Tokens that the policy did not sample have no value."""
        if column is None:
            self.absent[name] = why_not
        else:
            self.values[name] = [_rounded(value) if on else None for value, on in zip(column, sampled, strict=True)]


def describe_tokens(rollout: Rollout, texts: TokenTexts, longest: int, details: SampleDetails) -> dict[str, Any]:
    """The columns of a rollout's tokens, as JSON can hold them.

    `kl` is the logarithm of policy / reference, the contribution of the token to the KL; `ratio` is what the update of
    the step made of the token's probability, and `entropy` is that of the policy after the update.
    """
    if len(rollout.tokens) > longest:
        return {"absent": {"text": f"it has more than {longest} tokens, the limit of log.token_values"}}
    columns = TokenColumns()
    drawn = rollout.logprobs
    columns.add("logprob", drawn, rollout.sampled, "")
    columns.add("advantage", details.advantages, rollout.sampled, NOT_TRAINED)
    ratio = None
    if details.updated_logprobs is not None:
        ratio = [_exp(new - old) for new, old in zip(details.updated_logprobs, drawn, strict=True)]
    columns.add("ratio", ratio, rollout.sampled, NOT_TRAINED)
    kl = None
    if rollout.reference_logprobs is not None:
        kl = [mine - theirs for mine, theirs in zip(drawn, rollout.reference_logprobs, strict=True)]
    columns.add("kl", kl, rollout.sampled, NO_REFERENCE)
    columns.add("entropy", details.entropies, rollout.sampled, NOT_TRAINED)
    return {"text": texts(rollout.tokens), **columns.values, "absent": columns.absent}


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
