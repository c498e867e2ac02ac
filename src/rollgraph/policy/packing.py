"""Packing: which samples share a microbatch, and the arrays of static shape that a graph takes.

Pure Python and NumPy. Sequences lie one after the other; what is left of a bucket is padding, in sequences of its own.
Samples of one prompt share it: the prompt but for its last token is a sequence that is computed once, and a sample is
that last token, which predicts its first one, and its own tokens, with the keys of the prompt in front of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from rollgraph.types import Sample

STREAMS = ("advantages", "weights", "logprobs", "old_logprobs", "reference_logprobs")


class Size(NamedTuple):
    """What samples take of a bucket: tokens, sequences, and keys that are there once more for a shared prompt."""

    tokens: int
    sequences: int
    repeated: int

    def plus(self, prompt: int, count: int, already: int) -> Size:
        """With another sample: `count` tokens after a prompt, of which there are `already` so many samples."""
        if not already or prompt == 1:
            return Size(self.tokens + prompt + count, self.sequences + 1, self.repeated)
        shared = already == 1  # only now does the prompt become a sequence, for two
        return Size(self.tokens + 1 + count, self.sequences + 1 + shared, self.repeated + (1 + shared) * (prompt - 1))

    def fits(self, tokens: int, sequences: int) -> bool:
        return self.tokens <= tokens and self.sequences <= sequences and self.repeated <= tokens


NOTHING = Size(0, 0, 0)


def measure(samples: Iterable[Sample]) -> Size:
    """What they take in the order they are given, in which samples of one prompt are to be neighbours."""
    size = NOTHING
    for prompt, together in groupby(samples, key=_prompt):
        for already, sample in enumerate(together):
            size = size.plus(len(prompt), len(sample.tokens), already)
    return size


@dataclass
class _Group:
    size: Size = NOTHING
    members: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


def pack(samples: Sequence[Sample], tokens: int, sequences: int) -> list[list[int]]:
    """Indices in groups that fit a bucket, in the order they lie there: samples of one prompt side by side.

    Prompts with most to do come first, their longest samples first, each into the first group that has its prompt and
    room, else into the first that has room. The order of `samples` makes no difference to what lies where.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(_prompt(sample), []).append(index)
    least = min((len(sample.tokens) for sample in samples), default=0) + 1  # a group with less room than that is full
    groups: list[_Group] = []
    open_groups: list[_Group] = []
    for prompt, indices in sorted(by_prompt.items(), key=lambda one: (-_work(samples, *one), one[0])):
        with_prompt: list[_Group] = []
        for index in sorted(indices, key=lambda i: (-len(samples[i].tokens), tuple(samples[i].tokens))):
            count = len(samples[index].tokens)
            if len(prompt) + count > tokens:
                raise ValueError(f"a sequence of {len(prompt) + count} tokens does not fit a microbatch of {tokens}")
            for group in (*with_prompt, *open_groups, _Group()):
                already = len(group.members.get(prompt, ()))
                size = group.size.plus(len(prompt), count, already)
                if size.fits(tokens, sequences):
                    break
            if not group.members:
                groups.append(group)
                open_groups.append(group)
            if not already:
                with_prompt.append(group)
            group.size = size
            group.members.setdefault(prompt, []).append(index)
            if size.tokens + least > tokens:
                open_groups = [one for one in open_groups if one is not group]
    return [[index for indices in group.members.values() for index in indices] for group in groups]


def _prompt(sample: Sample) -> tuple[int, ...]:
    return tuple(sample.prompt)


def _work(samples: Sequence[Sample], prompt: tuple[int, ...], indices: Sequence[int]) -> int:
    return len(prompt) + sum(len(samples[index].tokens) for index in indices)


@dataclass
class Arrays:
    """A packed microbatch. The entry of a token says what is known of the one after it, which it predicts."""

    ids: np.ndarray  # [tokens] int64
    positions: np.ndarray  # [tokens] int64
    targets: np.ndarray  # [tokens] int64
    sequence: np.ndarray  # [tokens] int64; padding has the last number
    cu_seqlens: np.ndarray  # [sequences + 1 + pieces of padding] int32; the last entry repeats
    keys: np.ndarray  # [2 * tokens] int64: the token that each key is of, see `model.attention.Keys`
    cu_keys: np.ndarray  # as many as cu_seqlens, int32
    streams: np.ndarray  # [len(STREAMS), tokens] float32
    starts: list[int]  # where each sample's entries for its own tokens begin
    used: int  # tokens that are not padding

    @property
    def tensors(self) -> tuple[np.ndarray, ...]:
        return (
            self.ids, self.positions, self.targets, self.sequence, self.cu_seqlens, self.keys, self.cu_keys,
            self.streams,
        )  # fmt: skip


def fill(samples: Iterable[Sample], tokens: int, sequences: int, longest: int) -> Arrays:
    """Lay samples out in a bucket. No sequence is longer than `longest`, padding is cut into as many as it takes."""
    bounds = sequences + 1 + -(-tokens // longest)
    arrays = Arrays(
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
    place = _Place(arrays)
    for prompt, together in groupby(samples, key=_prompt):
        same = list(together)
        if not prompt:
            raise ValueError("a sample without a prompt: nothing predicts its first token")
        for sample in same:
            if len(prompt) + len(sample.tokens) > longest:
                raise ValueError(
                    f"a sample of {len(prompt) + len(sample.tokens)} tokens is longer than {longest}, which attention "
                    "looks at"
                )
        shared = range(0)
        if len(same) > 1 and len(prompt) > 1:
            shared = place.sequence(np.array(prompt), len(prompt) - 1)
        for sample in same:
            whole = np.array([*prompt, *sample.tokens])
            lies = place.sequence(whole, len(whole) - len(shared), shared)
            _put(sample, arrays, lies.start + len(prompt) - len(shared) - 1)
    arrays.used = place.at
    while place.at < tokens:
        place.padding(min(longest, tokens - place.at))
    place.end()
    return arrays


class _Place:
    """Where the next sequence goes."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays, self._number, self._key, self.at = arrays, 0, 0, 0

    def sequence(self, whole: np.ndarray, count: int, shared: range = range(0)) -> range:
        """The `count` tokens of `whole` after those that are shared; gives where they lie."""
        arrays, lies, first = self._arrays, range(self.at, self.at + count), len(shared)
        here = slice(lies.start, lies.stop)
        arrays.ids[here] = whole[first : first + count]
        arrays.targets[here][: len(whole) - first - 1] = whole[first + 1 : first + 1 + count]
        arrays.positions[here] = np.arange(first, first + count)
        arrays.sequence[here] = self._number
        self._keys(shared, lies)
        return lies

    def padding(self, count: int) -> None:
        lies = range(self.at, self.at + count)
        self._arrays.positions[lies.start : lies.stop] = np.arange(count)
        self._keys(range(0), lies)

    def _keys(self, shared: range, lies: range) -> None:
        arrays = self._arrays
        arrays.cu_seqlens[self._number], arrays.cu_keys[self._number] = self.at, self._key
        for tokens in (shared, lies):
            arrays.keys[self._key : self._key + len(tokens)] = tokens
            self._key += len(tokens)
        self._number += 1
        self.at = lies.stop

    def end(self) -> None:
        """No further sequence has keys."""
        self._arrays.cu_keys[self._number :] = self._key


def _put(sample: Sample, arrays: Arrays, first: int) -> None:
    """What is known of the tokens of a sample, at the entries that predict them."""
    count = len(sample.tokens)
    for row, name in enumerate(STREAMS):
        values = getattr(sample, name)
        if values is None and name == "old_logprobs":
            values = sample.logprobs
        if values is not None:
            if len(values) != count:  # NumPy would spread a single one over all tokens
                raise ValueError(f"a sample of {count} tokens has {len(values)} {name}")
            arrays.streams[row, first : first + count] = values
    arrays.starts.append(first)
