"""A packed microbatch as arrays of static shape, which a graph takes as its inputs.

Pure NumPy. Sequences lie one after the other. The rest of the token bucket is padding, in sequences of its own.
`packing.py` decides which samples share a microbatch, and explains shared prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rollgraph.policy.limits import TokenBucket
from rollgraph.policy.packing import prompt_of
from rollgraph.types import Sample

# What a sample knows about each of its tokens, in the order of the rows of `PackedArrays.streams`.
STREAMS = ("advantages", "weights", "logprobs", "old_logprobs", "reference_logprobs")

_NO_TOKENS = range(0)


@dataclass
class PackedArrays:
    """One microbatch. The entry of a token describes the token after it, which it predicts."""

    ids: np.ndarray  # [tokens] int64
    positions: np.ndarray  # [tokens] int64
    targets: np.ndarray  # [tokens] int64
    sequence: np.ndarray  # [tokens] int64: the number of the token's sequence; padding has the last number
    cu_seqlens: np.ndarray  # [sequences + 1 + sequences of padding] int32; the last entry repeats
    keys: np.ndarray  # [2 * tokens] int64: which token each key belongs to, see `model.attention.Keys`
    cu_keys: np.ndarray  # the shape of cu_seqlens, int32
    streams: np.ndarray  # [len(STREAMS), tokens] float32
    starts: list[int]  # for each sample, the entry that predicts its first token
    used: int  # tokens that are not padding
    asked: np.ndarray | None = None  # int64: different entries, which have logits; None: all of them have

    @property
    def bucket(self) -> TokenBucket:
        tokens = len(self.ids)
        return TokenBucket(tokens, tokens if self.asked is None else len(self.asked))

    @property
    def tensors(self) -> tuple[np.ndarray, ...]:
        always = (
            self.ids, self.positions, self.targets, self.sequence, self.cu_seqlens, self.keys, self.cu_keys,
            self.streams,
        )  # fmt: skip
        return always if self.asked is None else (*always, self.asked)


def fill(
    samples: Iterable[Sample], tokens: int, sequences: int, longest: int, logits: int | None = None
) -> PackedArrays:
    """Lay samples out in a token bucket. No sequence is longer than `longest`; padding is divided accordingly.

    If fewer than all tokens have `logits`, these are the ones that predict tokens of samples, and some others.
    """
    arrays = _allocate(tokens, sequences, longest)
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
            whole = np.array([*prompt, *sample.tokens])
            own = writer.add_sequence(whole, len(whole) - len(shared), shared)
            first = own.start + len(prompt) - len(shared) - 1
            predicts[first : first + len(sample.tokens)] = True
            _write_streams(sample, arrays, first)
    if logits is not None and logits < tokens:
        arrays.asked = _choose_asked(predicts, logits)
    arrays.used = writer.position
    while writer.position < tokens:
        writer.add_padding(min(longest, tokens - writer.position))
    writer.finish()
    return arrays


def _choose_asked(predicts: np.ndarray, logits: int) -> np.ndarray:
    """The entries that predict something, in ascending order, and as many others as are missing."""
    if predicts.sum() > logits:
        raise ValueError(f"samples of {predicts.sum()} tokens do not fit a microbatch with the logits of {logits}")
    return np.argsort(~predicts, kind="stable")[:logits].astype(np.int64)


def _allocate(tokens: int, sequences: int, longest: int) -> PackedArrays:
    padding_sequences = -(-tokens // longest)
    bounds = sequences + 1 + padding_sequences
    return PackedArrays(
        ids=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
        targets=np.zeros(tokens, np.int64),
        sequence=np.full(tokens, sequences, np.int64),
        cu_seqlens=np.full(bounds, tokens, np.int32),
        keys=np.zeros(2 * tokens, np.int64),
        cu_keys=np.zeros(bounds, np.int32),
        streams=np.zeros((len(STREAMS), tokens), np.float32),
        starts=[],
        used=0,
    )


class _SequenceWriter:
    """Writes one sequence after the other into the arrays."""

    def __init__(self, arrays: PackedArrays) -> None:
        self._arrays = arrays
        self._number = 0  # of the next sequence
        self._key = 0  # where its keys start
        self.position = 0  # where its tokens start

    def add_sequence(self, whole: np.ndarray, count: int, shared: range = _NO_TOKENS) -> range:
        """Write `count` tokens of `whole`, after those that are shared; return where they lie."""
        arrays = self._arrays
        own = range(self.position, self.position + count)
        first = len(shared)
        here = slice(own.start, own.stop)
        arrays.ids[here] = whole[first : first + count]
        arrays.targets[here][: len(whole) - first - 1] = whole[first + 1 : first + 1 + count]
        arrays.positions[here] = np.arange(first, first + count)
        arrays.sequence[here] = self._number
        self._add_keys(shared, own)
        return own

    def add_padding(self, count: int) -> None:
        own = range(self.position, self.position + count)
        self._arrays.positions[own.start : own.stop] = np.arange(count)
        self._add_keys(_NO_TOKENS, own)

    def _add_keys(self, shared: range, own: range) -> None:
        arrays = self._arrays
        arrays.cu_seqlens[self._number] = self.position
        arrays.cu_keys[self._number] = self._key
        for tokens in (shared, own):
            arrays.keys[self._key : self._key + len(tokens)] = tokens
            self._key += len(tokens)
        self._number += 1
        self.position = own.stop

    def finish(self) -> None:
        """The remaining sequences have no keys."""
        self._arrays.cu_keys[self._number :] = self._key


def _write_streams(sample: Sample, arrays: PackedArrays, first: int) -> None:
    """Write what is known about a sample's tokens to the entries that predict them."""
    count = len(sample.tokens)
    for row, name in enumerate(STREAMS):
        values = getattr(sample, name)
        if values is None and name == "old_logprobs":
            values = sample.logprobs
        if values is not None:
            if len(values) != count:  # NumPy would broadcast a single value over all tokens
                raise ValueError(f"a sample of {count} tokens has {len(values)} {name}")
            arrays.streams[row, first : first + count] = values
    arrays.starts.append(first)
