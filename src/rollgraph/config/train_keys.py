"""The section `train` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rollgraph.config.key_types import Count


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    token_buckets: Annotated[
        tuple[Count, ...] | None,
        "Microbatch sizes, in tokens, that get a graph of their own (only the largest if a graph is less than a step). "
        "null: `microbatch_tokens`, or what a minibatch can fill if that is less, its half and its quarter.",
    ] = None
    microbatch_tokens: Annotated[
        Count | None,
        "Largest microbatch, in tokens, if `token_buckets` is null. null: 16,384, or what fits into memory.",
    ] = None
    long_prompts: Annotated[
        Literal["auto"] | bool,
        "Compute logits for only half of the tokens of a largest microbatch where completions are no more than that. "
        "It takes one more graph for scoring and for each loss. auto: if completions are at most half of the tokens "
        "when prompts and completions are as long as allowed or, for `sft` and `dpo`, in the data.",
    ] = "auto"

    @property
    def largest_bucket(self) -> int | None:
        """None if it is not configured."""
        return max(self.token_buckets) if self.token_buckets else self.microbatch_tokens
