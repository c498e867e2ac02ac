"""Microbatches: packs samples into token buckets, and lays each bucket out as the input arrays of a graph.

Decides in pure Python and lays out in NumPy. Samples of one prompt share it: the prompt without its last token becomes
one sequence, which is computed once. Each sample becomes a second sequence: the prompt's last token, which predicts the
sample's first token, and then the sample's tokens. Its attention sees the keys of the shared prompt, then its own.

Example: two samples of the prompt (10, 11, 12) make three sequences in one bucket:

    tokens      10 11 | 12 a0 a1 | 12 b0
    positions    0  1 |  2  3  4 |  2  3
    keys         0  1 |  0  1 2 3 4 | 0 1 5 6    (indices of tokens; the prompt's occur again)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollgraph.types import Sample

# -- packing ---------------------------------------------------------------------------------------

PromptTokens = tuple[int, ...]


class PackedSize(NamedTuple):
    """The size of packed samples, or the capacity of a token bucket.

    `repeated_keys` counts the keys of shared prompts that occur again, once for each sample of the prompt.
    """

    tokens: int
    sequences: int
    repeated_keys: int

    def with_sample(self, prompt_tokens: int, completion_tokens: int, siblings: int) -> PackedSize:
        """The size after adding a sample of these lengths. `siblings` samples of the same prompt are packed already."""
        shared_tokens = prompt_tokens - 1  # the last one predicts the sample's first token, so each sample has its own
        if siblings == 0 or shared_tokens == 0:
            tokens = self.tokens + prompt_tokens + completion_tokens
            return PackedSize(tokens, self.sequences + 1, self.repeated_keys)
        new_sequences = 1
        new_repeats = 1
        if siblings == 1:
            # The prompt leaves the first sample's sequence and becomes a sequence of its own. That adds no token, and
            # from now on the first sample repeats the prompt's keys, too.
            new_sequences = 2
            new_repeats = 2
        return PackedSize(
            self.tokens + 1 + completion_tokens,
            self.sequences + new_sequences,
            self.repeated_keys + new_repeats * shared_tokens,
        )

    def fits(self, capacity: PackedSize) -> bool:
        return all(size <= limit for size, limit in zip(self, capacity, strict=True))


EMPTY = PackedSize(0, 0, 0)


def packed_size(samples: Iterable[Sample]) -> PackedSize:
    """The size of samples packed in this order. Samples of one prompt must be neighbours."""
    size = EMPTY
    for prompt, siblings in groupby(samples, key=prompt_of):
        for index, sample in enumerate(siblings):
            size = size.with_sample(len(prompt), len(sample.tokens), index)
    return size


@dataclass
class _Microbatch:
    size: PackedSize = EMPTY
    members: dict[PromptTokens, list[int]] = field(default_factory=dict)  # indices of samples, by prompt

    def size_with(self, prompt: PromptTokens, completion: int) -> PackedSize:
        siblings = len(self.members.get(prompt, ()))
        return self.size.with_sample(len(prompt), completion, siblings)


def pack_samples(samples: Sequence[Sample], capacity: PackedSize) -> list[list[int]]:
    """Pack samples into microbatches that fit a bucket. Returns indices of samples, those of one prompt side by side.

    First fit: prompts with the most tokens come first, and the longest samples of each prompt. A sample goes into the
    first microbatch that has its prompt and enough room, otherwise into the first one with enough room. The result
    does not depend on the order of `samples`.
    """
    by_prompt: dict[PromptTokens, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(prompt_of(sample), []).append(index)
    smallest = 1 + min((len(sample.tokens) for sample in samples), default=0)  # with less room a microbatch is full
    microbatches: list[_Microbatch] = []
    not_full: list[_Microbatch] = []

    def total_tokens(prompt: PromptTokens) -> int:
        return len(prompt) + sum(len(samples[index].tokens) for index in by_prompt[prompt])

    for prompt in sorted(by_prompt, key=lambda prompt: (-total_tokens(prompt), prompt)):
        with_prompt: list[_Microbatch] = []
        for index in _longest_first(samples, by_prompt[prompt]):
            length = len(prompt) + len(samples[index].tokens)
            if length > capacity.tokens:
                raise ValueError(f"a sequence of {length} tokens does not fit a microbatch of {capacity.tokens}")
            completion = len(samples[index].tokens)
            for microbatch in (*with_prompt, *not_full, _Microbatch()):
                size = microbatch.size_with(prompt, completion)
                if size.fits(capacity):
                    break
            if not microbatch.members:
                microbatches.append(microbatch)
                not_full.append(microbatch)
            if prompt not in microbatch.members:
                with_prompt.append(microbatch)
            microbatch.size = size
            microbatch.members.setdefault(prompt, []).append(index)
            if size.tokens + smallest > capacity.tokens:
                not_full = [candidate for candidate in not_full if candidate is not microbatch]
    return [_flatten(microbatch.members.values()) for microbatch in microbatches]


def prompt_of(sample: Sample) -> PromptTokens:
    return tuple(sample.prompt)


def _longest_first(samples: Sequence[Sample], indices: Iterable[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-len(samples[index].tokens), tuple(samples[index].tokens)))


def _flatten(lists: Iterable[list[int]]) -> list[int]:
    return [index for indices in lists for index in indices]


def shard_minibatch(minibatch: Sequence[Sample], rank: int, ranks: int) -> list[Sample]:
    """One rank's samples of a minibatch, those of one prompt side by side. Ranks get equally many, give or take one."""
    ordered = sorted(minibatch, key=lambda sample: tuple(sample.prompt))
    start = len(ordered) * rank // ranks
    end = len(ordered) * (rank + 1) // ranks
    return ordered[start:end]


def sample_to_score(prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> Sample:
    """A sample to be scored, not trained on."""
    zeros = [0.0] * len(tokens)
    return Sample(prompt, tokens, zeros, zeros, logprobs)


# -- static shapes ---------------------------------------------------------------------------------


class TokenBucket(NamedTuple):
    """The static size of a microbatch: its number of tokens, and how many of these get logits."""

    tokens: int
    logits: int

    def __str__(self) -> str:
        """Part of a graph's name, e.g. "4096" or "4096, logits of 2048"."""
        if self.logits == self.tokens:
            return str(self.tokens)
        return f"{self.tokens}, logits of {self.logits}"


@dataclass(frozen=True)
class Limits:
    """The sizes to capture graphs for, e.g. Limits(max_length=1024, rows=64, token_buckets=(4096, 8192))."""

    max_length: int  # tokens of a prompt with its completion
    validation_length: int = 0  # the same in validation, if its prompts are longer: only generation has room for them
    rows: int = 64  # sequences decoded at the same time
    token_buckets: tuple[int, ...] = (4096,)  # tokens of a microbatch, in ascending order
    tokens_per_sequence: int = 32  # a bucket holds up to tokens / tokens_per_sequence sequences
    keys_per_token: int = 1  # and up to keys_per_token * tokens repeated keys of shared prompts
    cache_bytes: int | None = None  # of the KV cache; None: half of the free memory of a GPU
    prefill_tokens: int | None = None
    pool_bytes: int = 0  # planned size of the graphs' pool on a GPU; reserved as one piece to avoid fragmentation
    whole_logits: bool | None = None  # keep the logits of a microbatch for its backward; None: if memory allows
    half_logits: bool = False  # also capture the largest bucket with logits for only half of its tokens

    @property
    def buckets(self) -> tuple[TokenBucket, ...]:
        """The sizes to capture graphs for; each computes more than the one before."""
        buckets = [TokenBucket(tokens, tokens) for tokens in self.token_buckets]
        largest = self.token_buckets[-1]
        if self.half_logits and largest > 1:
            buckets.insert(-1, TokenBucket(largest, largest // 2))
        return tuple(buckets)

    @property
    def longest_generated(self) -> int:
        """The longest sequence that can be generated, in training or in validation."""
        return max(self.max_length, self.validation_length)

    @property
    def generated_lengths(self) -> list[int]:
        """The longest sequence of each engine: one for training and, if its prompts are longer, one for validation."""
        return sorted({self.max_length, self.longest_generated})

    def capacity(self, tokens: int) -> PackedSize:
        """The capacity of a token bucket."""
        return PackedSize(tokens, max(8, tokens // self.tokens_per_sequence), tokens * self.keys_per_token)

    def longest(self, tokens: int) -> int:
        """The longest sequence in a token bucket, including padding."""
        return min(tokens, self.max_length)

    def plan(self, samples: Sequence[Sample], buckets: Sequence[TokenBucket]) -> list[tuple[list[int], TokenBucket]]:
        """Pack samples into microbatches. Returns the indices of samples in each, and the first bucket that fits."""
        planned = []
        for indices in pack_samples(samples, self.capacity(self.token_buckets[-1])):
            size = packed_size(samples[index] for index in indices)
            predicted = sum(len(samples[index].tokens) for index in indices)
            fitting = [
                bucket for bucket in buckets if predicted <= bucket.logits and size.fits(self.capacity(bucket.tokens))
            ]
            planned.append((indices, fitting[0]))
        return planned

    def collate(self, samples: Iterable[Sample], bucket: TokenBucket) -> PackedArrays:
        """One microbatch of samples, which must fit the bucket."""
        return lay_out(samples, self.capacity(bucket.tokens), self.longest(bucket.tokens), bucket.logits)

    def keeps_logits(self, vocabulary: int, free: int) -> bool:
        """Whether training keeps the logits of a whole microbatch. `free` is the free memory of the GPU; 0 on a CPU."""
        if self.whole_logits is not None:
            return self.whole_logits
        return 4 * self.token_buckets[-1] * vocabulary <= free // 8


# -- arrays ----------------------------------------------------------------------------------------
# Sequences lie one after the other. Padding fills the rest of the token bucket, as sequences after the real ones.

# The per-token values of a sample, in the order of the rows of `PackedArrays.streams`.
STREAMS = ("advantages", "weights", "logprobs", "old_logprobs", "reference_logprobs")

_NO_TOKENS = range(0)


@dataclass
class PackedArrays:
    """One microbatch. The entry of a token describes the token after it, which it predicts.

    Entry i holds token i (`ids`, `positions`) and, for the next token of the sequence, its id (`targets`) and its
    advantage, weight and log-probabilities (`streams`).
    """

    ids: np.ndarray  # [tokens] int64
    positions: np.ndarray  # [tokens] int64
    targets: np.ndarray  # [tokens] int64
    sequence: np.ndarray  # [tokens] int64: the number of the token's sequence; padding has the last number
    cu_seqlens: np.ndarray  # [sequences + 1 + sequences of padding] int32; the last entry repeats
    keys: np.ndarray  # [tokens + repeated keys] int64: the token of each key, see `model.attention.PackedKeys`
    cu_keys: np.ndarray  # int32, the shape of cu_seqlens
    streams: np.ndarray  # [len(STREAMS), tokens] float32
    starts: list[int]  # for each sample, the entry that predicts its first token
    used_tokens: int  # tokens that are not padding
    logit_rows: np.ndarray | None = None  # int64: the entries that need logits, without repeats; None: all of them

    @property
    def bucket(self) -> TokenBucket:
        tokens = len(self.ids)
        return TokenBucket(tokens, tokens if self.logit_rows is None else len(self.logit_rows))

    @property
    def tensors(self) -> tuple[np.ndarray, ...]:
        always_present = (
            self.ids, self.positions, self.targets, self.sequence, self.cu_seqlens, self.keys, self.cu_keys,
            self.streams,
        )  # fmt: skip
        return always_present if self.logit_rows is None else (*always_present, self.logit_rows)

    def to(self, device: torch.device) -> tuple[Tensor, ...]:
        """Copy the arrays to the device, from pinned memory, so that the host does not wait for a running replay."""
        host_tensors = [torch.from_numpy(array) for array in self.tensors]
        if device.type == "cuda":
            host_tensors = [tensor.pin_memory() for tensor in host_tensors]
        return tuple(tensor.to(device, non_blocking=True) for tensor in host_tensors)


def lay_out(samples: Iterable[Sample], capacity: PackedSize, longest: int, logits: int | None = None) -> PackedArrays:
    """Lay samples out in a token bucket. No sequence may be longer than `longest`, padding included.

    With `logits` below the number of tokens, only that many entries get logits: those that predict tokens of samples,
    and some others to fill up the count.
    """
    tokens = capacity.tokens
    arrays = _allocate(capacity, longest)
    writer = _SequenceWriter(arrays)
    predicts = np.zeros(tokens, np.bool_)
    for prompt, group in groupby(samples, key=prompt_of):
        siblings = list(group)
        if not prompt:
            raise ValueError("a sample has no prompt, so nothing predicts its first token")
        for sample in siblings:
            length = len(prompt) + len(sample.tokens)
            if length > longest:
                raise ValueError(f"a sample of {length} tokens is longer than the {longest} tokens attention can see")
        shared = _NO_TOKENS
        if len(siblings) > 1 and len(prompt) > 1:
            shared = writer.add_sequence(np.array(prompt), len(prompt) - 1)
        for sample in siblings:
            token_ids = np.array([*prompt, *sample.tokens])
            entries = writer.add_sequence(token_ids, len(token_ids) - len(shared), shared)
            first = entries.start + len(prompt) - len(shared) - 1
            predicts[first : first + len(sample.tokens)] = True
            _write_streams(sample, arrays, first)
    if logits is not None and logits < tokens:
        arrays.logit_rows = _choose_logit_rows(predicts, logits)
    arrays.used_tokens = writer.position
    while writer.position < tokens:
        writer.add_padding(min(longest, tokens - writer.position))
    writer.finish()
    return arrays


def _choose_logit_rows(predicts: np.ndarray, logits: int) -> np.ndarray:
    """The entries that predict a token, in ascending order, and then others until there are `logits` of them."""
    if predicts.sum() > logits:
        raise ValueError(f"samples of {predicts.sum()} tokens do not fit a microbatch with the logits of {logits}")
    return np.argsort(~predicts, kind="stable")[:logits].astype(np.int64)


def _allocate(capacity: PackedSize, longest: int) -> PackedArrays:
    tokens, sequences, repeated = capacity
    padding_sequences = -(-tokens // longest)
    bounds = sequences + 1 + padding_sequences
    return PackedArrays(
        ids=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
        targets=np.zeros(tokens, np.int64),
        sequence=np.full(tokens, sequences, np.int64),
        cu_seqlens=np.full(bounds, tokens, np.int32),
        keys=np.zeros(tokens + repeated, np.int64),
        cu_keys=np.zeros(bounds, np.int32),
        streams=np.zeros((len(STREAMS), tokens), np.float32),
        starts=[],
        used_tokens=0,
    )


class _SequenceWriter:
    """Writes one sequence after the other into the arrays."""

    def __init__(self, arrays: PackedArrays) -> None:
        self._arrays = arrays
        self._number = 0  # the next sequence
        self._key = 0  # where its keys start
        self.position = 0  # where its tokens start

    def add_sequence(self, token_ids: np.ndarray, count: int, shared: range = _NO_TOKENS) -> range:
        """Write `count` tokens, starting after the shared prompt; return the entries written.

        `shared` are the entries of the shared prompt, whose keys this sequence attends to first.
        """
        arrays = self._arrays
        entries = range(self.position, self.position + count)
        first = len(shared)
        here = slice(entries.start, entries.stop)
        arrays.ids[here] = token_ids[first : first + count]
        arrays.targets[here][: len(token_ids) - first - 1] = token_ids[first + 1 : first + 1 + count]
        arrays.positions[here] = np.arange(first, first + count)
        arrays.sequence[here] = self._number
        self._add_keys(shared, entries)
        return entries

    def add_padding(self, count: int) -> None:
        entries = range(self.position, self.position + count)
        self._arrays.positions[entries.start : entries.stop] = np.arange(count)
        self._add_keys(_NO_TOKENS, entries)

    def _add_keys(self, shared: range, entries: range) -> None:
        arrays = self._arrays
        arrays.cu_seqlens[self._number] = self.position
        arrays.cu_keys[self._number] = self._key
        for tokens in (shared, entries):
            arrays.keys[self._key : self._key + len(tokens)] = tokens
            self._key += len(tokens)
        self._number += 1
        self.position = entries.stop

    def finish(self) -> None:
        """Mark the remaining sequences of the bucket as empty: they have no keys."""
        self._arrays.cu_keys[self._number :] = self._key


def _write_streams(sample: Sample, arrays: PackedArrays, first: int) -> None:
    """Copy a sample's per-token values (`STREAMS`) into the arrays.

    `first` is the entry that predicts the sample's first token. The value of a token goes to the entry before it, which
    predicts it and has its logits.
    """
    count = len(sample.tokens)
    for row, name in enumerate(STREAMS):
        values = getattr(sample, name)
        if values is None and name == "old_logprobs":
            values = sample.logprobs  # not recomputed: those from generation are the old ones
        if values is not None:
            if len(values) != count:  # NumPy would broadcast a single value over all tokens
                raise ValueError(f"a sample of {count} tokens has {len(values)} {name}")
            arrays.streams[row, first : first + count] = values
    arrays.starts.append(first)
