"""Packing: which sequences share a microbatch, and the arrays of static shape that a graph takes.

Pure Python and NumPy. Sequences lie one after the other; what is left of a bucket is padding, in sequences of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rollgraph.types import Sample

STREAMS = ("advantages", "weights", "logprobs", "old_logprobs", "reference_logprobs")


def pack(lengths: Sequence[int], tokens: int, sequences: int) -> list[list[int]]:
    """Indices in groups of at most `tokens` tokens and `sequences` sequences: longest first, into the first that fits.

    >>> pack([5, 9, 3, 6], tokens=12, sequences=8)
    [[1, 2], [3, 0]]
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > tokens:
            raise ValueError(f"a sequence of {length} tokens does not fit a microbatch of {tokens}")
        place = next((g for g, left in enumerate(room) if left >= length and len(groups[g]) < sequences), None)
        if place is None:
            groups.append([])
            room.append(tokens)
            place = len(groups) - 1
        groups[place].append(index)
        room[place] -= length
    return groups


@dataclass
class Arrays:
    """A packed microbatch. The entry of a token says what is known of the one after it, which it predicts."""

    ids: np.ndarray  # [tokens] int64
    positions: np.ndarray  # [tokens] int64
    targets: np.ndarray  # [tokens] int64
    sequence: np.ndarray  # [tokens] int64; padding has the last number
    cu_seqlens: np.ndarray  # [sequences + 1 + pieces of padding] int32; the last entry repeats
    streams: np.ndarray  # [len(STREAMS), tokens] float32
    starts: list[int]  # where each sequence's entries for its own tokens begin
    used: int  # tokens that are not padding

    @property
    def tensors(self) -> tuple[np.ndarray, ...]:
        return (self.ids, self.positions, self.targets, self.sequence, self.cu_seqlens, self.streams)


def fill(samples: Iterable[Sample], tokens: int, sequences: int, longest: int) -> Arrays:
    """Lay samples out in a bucket. No sequence is longer than `longest`, padding is cut into as many as it takes."""
    arrays = Arrays(
        ids=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
        targets=np.zeros(tokens, np.int64),
        sequence=np.full(tokens, sequences, np.int64),
        cu_seqlens=np.full(sequences + 1 + -(-tokens // longest), tokens, np.int32),
        streams=np.zeros((len(STREAMS), tokens), np.float32),
        starts=[],
        used=0,
    )
    at = 0
    for number, sample in enumerate(samples):
        prompt, count = len(sample.prompt), len(sample.tokens)
        if not prompt:
            raise ValueError("a sample without a prompt: nothing predicts its first token")
        if prompt + count > longest:
            raise ValueError(f"a sample of {prompt + count} tokens is longer than {longest}, which attention looks at")
        whole, end, first = np.array([*sample.prompt, *sample.tokens]), at + prompt + count, at + prompt - 1
        arrays.ids[at:end] = whole
        arrays.positions[at:end] = np.arange(prompt + count)
        arrays.targets[at : end - 1] = whole[1:]
        arrays.sequence[at:end] = number
        arrays.cu_seqlens[number] = at
        for row, name in enumerate(STREAMS):
            values = getattr(sample, name)
            if values is None and name == "old_logprobs":
                values = sample.logprobs
            if values is not None:
                if len(values) != count:  # NumPy would spread a single one over all tokens
                    raise ValueError(f"a sample of {count} tokens has {len(values)} {name}")
                arrays.streams[row, first : first + count] = values
        arrays.starts.append(first)
        at = end
    for number, start in enumerate(range(at, tokens, longest), len(arrays.starts)):
        arrays.cu_seqlens[number] = start
        arrays.positions[start : start + longest] = np.arange(min(longest, tokens - start))
    arrays.used = at
    return arrays
