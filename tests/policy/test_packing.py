"""Packing: every sequence is somewhere, once, and every entry of a bucket says what a plain loop says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollgraph.policy.packing import STREAMS, fill, pack
from rollgraph.types import Sample


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120), st.integers(1, 9))
def test_every_index_is_in_one_group_and_groups_keep_the_limits(
    lengths: list[int], tokens: int, sequences: int
) -> None:
    groups = pack(lengths, tokens, sequences)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert 1 <= len(group) <= sequences
        assert sum(lengths[index] for index in group) <= tokens
    assert groups == pack(lengths, tokens, sequences)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 120))
def test_no_two_groups_could_have_been_one(lengths: list[int], tokens: int) -> None:
    used = sorted(sum(lengths[index] for index in group) for group in pack(lengths, tokens, len(lengths)))
    assert len(used) == 1 or used[0] + used[1] > tokens


def test_equal_lengths_stay_in_order() -> None:
    assert pack([24, 24, 24, 24], tokens=48, sequences=8) == [[0, 1], [2, 3]]
    assert pack([], tokens=48, sequences=8) == []
    assert pack([7, 0, 0], tokens=7, sequences=2) == [[0, 1], [2]]


def test_what_does_not_fit_is_refused() -> None:
    assert pack([12], tokens=12, sequences=1) == [[0]]
    with pytest.raises(ValueError, match="13 tokens does not fit a microbatch of 12"):
        pack([3, 13], tokens=12, sequences=8)


@st.composite
def sample(draw: st.DrawFn) -> Sample:
    count = draw(st.integers(0, 6))
    token = st.integers(0, 39)
    numbers = st.lists(st.floats(-4, 4, width=32), min_size=count, max_size=count)
    return Sample(
        prompt=draw(st.lists(token, min_size=1, max_size=5)),
        tokens=draw(st.lists(token, min_size=count, max_size=count)),
        advantages=draw(numbers),
        weights=draw(numbers),
        logprobs=draw(numbers),
        old_logprobs=draw(st.none() | numbers),
        reference_logprobs=draw(st.none() | numbers),
    )


def stream(sample: Sample, name: str) -> list[float]:
    values = sample.logprobs if name == "old_logprobs" and sample.old_logprobs is None else getattr(sample, name)
    return [0.0] * len(sample.tokens) if values is None else list(values)


@given(st.lists(sample(), max_size=5), st.integers(0, 30), st.integers(0, 3), st.integers(11, 60))
def test_a_bucket_holds_what_a_plain_loop_puts_there(
    samples: list[Sample], padding: int, spare: int, longest: int
) -> None:
    tokens = sum(len(s.prompt) + len(s.tokens) for s in samples) + padding
    assume(tokens)
    sequences = len(samples) + spare
    arrays = fill(samples, tokens, sequences, longest)

    expected = []  # (id, position, target, sequence, streams) of each token
    starts = []
    for number, s in enumerate(samples):
        starts.append(len(expected) + len(s.prompt) - 1)
        whole = [*s.prompt, *s.tokens]
        for place, token in enumerate(whole):
            following = whole[place + 1] if place + 1 < len(whole) else 0
            which = place + 1 - len(s.prompt)  # of the sample's own tokens, the one that follows
            known = [stream(s, name)[which] if 0 <= which < len(s.tokens) else 0.0 for name in STREAMS]
            expected.append((token, place, following, number, known))
    assert arrays.used == len(expected)
    assert arrays.starts == starts
    expected += [(0, place % longest, 0, sequences, [0.0] * len(STREAMS)) for place in range(padding)]

    columns = (arrays.ids, arrays.positions, arrays.targets, arrays.sequence, arrays.streams.T)
    assert [(*map(int, row[:4]), row[4].tolist()) for row in zip(*columns, strict=True)] == expected

    bounds = arrays.cu_seqlens.tolist()
    starting = [place for place, row in enumerate(expected) if row[1] == 0]
    assert bounds[: len(starting)] == starting
    assert set(bounds[len(starting) :]) == {tokens}  # the rest repeats the end
    assert max(np.diff(bounds), default=0) <= longest
    empty = fill([], tokens, sequences, longest)
    assert [a.shape for a in arrays.tensors] == [a.shape for a in empty.tensors]  # what a graph was captured with
    assert [a.dtype for a in arrays.tensors] == [a.dtype for a in empty.tensors]


def test_a_sample_that_cannot_be_laid_out_is_refused() -> None:
    with pytest.raises(ValueError, match="without a prompt"):
        fill([Sample([1], [2], [1.0], [1.0], [0.0]), Sample([], [3, 4], [1.0] * 2, [1.0] * 2, [0.0] * 2)], 12, 4, 12)
    with pytest.raises(ValueError, match="3 tokens has 1 advantages"):
        fill([Sample([1], [2, 3, 4], [1.0], [1.0] * 3, [0.0] * 3)], 12, 4, 12)
    with pytest.raises(ValueError, match="5 tokens is longer than 4"):
        fill([Sample([1, 2], [2, 3, 4], [1.0] * 3, [1.0] * 3, [0.0] * 3)], 12, 4, 4)
