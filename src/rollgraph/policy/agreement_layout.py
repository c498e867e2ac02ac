"""The same random sequences in both layouts: packed, as for training, and step by step through a paged cache.

`agreement_check.py` runs them. Nothing here knows what a model computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, cycle
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollgraph.inference import defaults
from rollgraph.model import Keys
from rollgraph.policy.limits import Limits
from rollgraph.policy.packed_arrays import fill
from rollgraph.policy.packing import measure
from rollgraph.types import Sample

DECODED = 16  # tokens of each sequence that are decoded, so that every row gets to a new block of the cache
SIBLINGS = 4  # sequences that share a prompt


class MicrobatchTooSmall(ValueError):
    """Not even two sequences fit into it."""


class PagedStep(NamedTuple):
    """Tokens that go through the cache together, int32. The first `used` of them count; the others are padding."""

    phase: str  # prefill or decode
    used: int
    entries: Tensor  # [tokens] int64: where each token is in the packed layout; 0 for padding
    ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]
    table: Tensor  # [sequences, blocks]; a sequence of a decode step is a row
    lengths: Tensor  # [sequences]
    cu_seqlens: Tensor  # [sequences + 1]; only prefill needs it


class _Piece(NamedTuple):
    """Some neighbouring tokens of the sequence in a row."""

    row: int
    start: int
    stop: int


class TokenLayouts:
    """As many different sequences as fit into a microbatch. Rows of the cache take turns in using them."""

    def __init__(self, vocabulary: int, limits: Limits, prefill_tokens: int, device: torch.device) -> None:
        self._rows = limits.rows
        self._prefill_tokens = prefill_tokens
        self._device = device
        self.tokens = limits.token_buckets[-1]
        self.longest = limits.longest(self.tokens)
        self.samples = draw_samples(vocabulary, limits)
        arrays = fill(self.samples, self.tokens, limits.sequences(self.tokens), self.longest)
        self._wholes = [np.array([*sample.prompt, *sample.tokens]) for sample in self.samples]
        self._entries = []  # for each sequence, where each of its tokens is in the packed layout
        for sample, start in zip(self.samples, arrays.starts, strict=True):
            first = arrays.cu_keys[arrays.sequence[start]]
            self._entries.append(arrays.keys[first : first + len(sample.prompt) + len(sample.tokens)])
        self.ids = self._upload(arrays.ids)
        self.positions = self._upload(arrays.positions)
        self.cu_seqlens = self._upload(arrays.cu_seqlens)
        self.keys = Keys(self._upload(arrays.keys), self._upload(arrays.cu_keys))
        # Rows own blocks in no particular order. Block 0 is for padding.
        blocks_of_row = -(-limits.max_length // defaults.BLOCK_SIZE)
        self.blocks = self._rows * blocks_of_row + 1
        shuffled = np.random.default_rng(0).permutation(self.blocks - 1) + 1
        self._table = shuffled.reshape(self._rows, blocks_of_row)

    def prefill_steps(self) -> Iterator[PagedStep]:
        """All prompts but their last tokens, in steps of all sizes. A prompt goes on where the step before ended."""
        sizes = cycle(defaults.prefill_buckets(self._prefill_tokens))
        size = next(sizes)
        pieces: list[_Piece] = []
        room = size
        for row in range(self._rows):
            start = 0
            end = self._prompt_length(row) - 1
            while start < end:
                stop = min(end, start + room)
                pieces.append(_Piece(row, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield self._step("prefill", pieces, size)
                    size = next(sizes)
                    pieces = []
                    room = size
        if pieces:
            yield self._step("prefill", pieces, size)

    def decode_steps(self, rows: int) -> Iterator[PagedStep]:
        """The last token of each prompt and the tokens after it, in the first `rows` rows."""
        for index in range(len(self.samples[0].tokens)):
            pieces = []
            for row in range(rows):
                position = self._prompt_length(row) - 1 + index
                pieces.append(_Piece(row, position, position + 1))
            yield self._step("decode", pieces, rows)

    def decoded_entries(self) -> Tensor:
        """Where the tokens that are decoded are in the packed layout, in ascending order."""
        found = []
        for sample, entries in zip(self.samples, self._entries, strict=True):
            found.append(entries[len(sample.prompt) - 1 : -1])
        return self._upload(np.sort(np.concatenate(found)))

    def _sequence_of(self, row: int) -> int:
        return row % len(self.samples)

    def _prompt_length(self, row: int) -> int:
        return len(self.samples[self._sequence_of(row)].prompt)

    def _step(self, phase: str, pieces: list[_Piece], size: int) -> PagedStep:
        """Lay pieces out one after the other in a step of `size` tokens."""
        entries = np.zeros(size, np.int64)
        ids, positions, slots = np.zeros((3, size), np.int32)
        bounds = [0]
        for row, start, stop in pieces:
            here = slice(bounds[-1], bounds[-1] + stop - start)
            places = np.arange(start, stop)
            sequence = self._sequence_of(row)
            entries[here] = self._entries[sequence][places]
            ids[here] = self._wholes[sequence][places]
            positions[here] = places
            slots[here] = self._table[row, places // defaults.BLOCK_SIZE] * defaults.BLOCK_SIZE
            slots[here] += (places % defaults.BLOCK_SIZE).astype(np.int32)
            bounds.append(here.stop)
        table = self._table[[piece.row for piece in pieces]].astype(np.int32)
        lengths = np.array([piece.stop for piece in pieces], np.int32)
        arrays: tuple[np.ndarray, ...] = (entries, ids, positions, slots, table, lengths, np.array(bounds, np.int32))
        return PagedStep(phase, bounds[-1], *map(self._upload, arrays))

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def draw_samples(vocabulary: int, limits: Limits) -> list[Sample]:
    """Sequences of random tokens, at most one for each row. Prompts have several lengths and are shared by some."""
    tokens = limits.token_buckets[-1]
    random = np.random.default_rng(0)
    decoded = min(DECODED, limits.max_length // 2)
    longest = limits.max_length - decoded
    samples: list[Sample] = []
    prompt: list[int] = []
    for index in count():
        if index % SIBLINGS == 0:
            eighths = 8 - 3 * (index // SIBLINGS) % 8  # 8, 5, 2, 7, 4, 1, 6, 3
            prompt = random.integers(vocabulary, size=max(1, longest * eighths // 8)).tolist()
        completion = random.integers(vocabulary, size=decoded).tolist()
        unused = [0.0] * decoded
        sample = Sample(prompt, completion, advantages=unused, weights=unused, logprobs=unused)
        if not measure([*samples, sample]).fits(tokens, limits.sequences(tokens)):
            break
        samples.append(sample)
        if len(samples) >= max(2, limits.rows):
            break
    if len(samples) < 2:
        two = measure([sample, sample])
        needed = max(two.tokens, two.repeated)
        raise MicrobatchTooSmall(
            f"two sequences of {limits.max_length} tokens that share a prompt need a microbatch of {needed} tokens, "
            f"but it has {tokens}"
        )
    return samples
