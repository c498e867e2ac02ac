"""The static shapes of everything that a worker captures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class TokenBucket(NamedTuple):
    """The size of a microbatch: all of its tokens, and those of them that have logits."""

    tokens: int
    logits: int

    def __str__(self) -> str:
        """As the name of a graph has it."""
        if self.logits == self.tokens:
            return str(self.tokens)
        return f"{self.tokens}, logits of {self.logits}"


@dataclass(frozen=True)
class Limits:
    """Sizes that graphs are captured for, e.g. Limits(max_length=1024, rows=64, token_buckets=(4096, 8192))."""

    max_length: int  # tokens of a prompt with its completion
    rows: int = 64  # sequences that are decoded at the same time
    token_buckets: tuple[int, ...] = (4096,)  # tokens of a microbatch, in ascending order
    tokens_per_sequence: int = 32  # a bucket has room for tokens / tokens_per_sequence sequences
    cache_bytes: int | None = None  # of the KV cache; None: half of the free memory of a GPU
    prefill_tokens: int | None = None
    pool_bytes: int = 0  # that graphs are expected to need on a GPU: taken in one piece, so that none of it is lost
    whole_logits: bool | None = None  # keep the logits of a microbatch for its backward; None: if memory allows
    long_prompts: bool = False  # the largest bucket also has graphs in which only half of the tokens have logits

    @property
    def buckets(self) -> tuple[TokenBucket, ...]:
        """The sizes that graphs are captured for; each computes more than the one before."""
        found = [TokenBucket(tokens, tokens) for tokens in self.token_buckets]
        largest = self.token_buckets[-1]
        if self.long_prompts and largest > 1:
            found.insert(-1, TokenBucket(largest, largest // 2))
        return tuple(found)

    def sequences(self, tokens: int) -> int:
        """How many sequences a token bucket has room for."""
        return max(8, tokens // self.tokens_per_sequence)

    def longest(self, tokens: int) -> int:
        """The longest sequence in a token bucket, including padding."""
        return min(tokens, self.max_length)

    def keeps_logits(self, vocabulary: int, free: int) -> bool:
        """Whether training keeps the logits of a whole microbatch, with `free` bytes on the GPU; 0 on a CPU."""
        if self.whole_logits is not None:
            return self.whole_logits
        return 4 * self.token_buckets[-1] * vocabulary <= free // 8
