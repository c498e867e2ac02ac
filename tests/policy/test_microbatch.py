"""Packing puts every sample into one microbatch, and the arrays equal those that a plain loop fills."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollgraph.policy.microbatch import STREAMS, PackedSize, lay_out, pack_samples, packed_size
from rollgraph.types import Sample


def of_lengths(*lengths: int, prompt: int = 1) -> list[Sample]:
    """Samples that share no prompt."""
    return [
        Sample([100 + i] * prompt, [i] * (length - prompt), *[[0.0] * (length - prompt)] * 3)
        for i, length in enumerate(lengths)
    ]


def count_packed(samples: list[Sample]) -> tuple[int, int, int]:
    """Tokens, sequences and repeated keys, counted in the filled arrays."""
    arrays = lay_out(samples, PackedSize(10_000, 1_000, 10_000), 10_000)
    sequences = len(set(arrays.sequence[: arrays.used_tokens].tolist()))
    return arrays.used_tokens, sequences, int(arrays.cu_keys[sequences]) - arrays.used_tokens


@st.composite
def samples_of_few_prompts(draw: st.DrawFn) -> list[Sample]:
    prompts = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4))
    counts = draw(st.lists(st.tuples(st.sampled_from(prompts), st.integers(0, 30)), max_size=40))
    return [Sample(prompt, [i] * count, *[[0.0] * count] * 3) for i, (prompt, count) in enumerate(counts)]


@given(samples_of_few_prompts(), st.integers(50, 120), st.integers(3, 9), st.randoms())
def test_every_sample_is_in_one_microbatch_within_the_limits(
    samples: list[Sample], tokens: int, sequences: int, random: Random
) -> None:
    groups = pack_samples(samples, PackedSize(tokens, sequences, tokens))
    assert sorted(index for group in groups for index in group) == list(range(len(samples)))
    for group in groups:
        members = [samples[index] for index in group]
        assert count_packed(members) == packed_size(members)
        used, count, repeated = packed_size(members)
        assert used <= tokens
        assert 1 <= count <= sequences
        assert repeated <= tokens  # so that the keys have room
    shuffled = random.sample(samples, len(samples))
    assert [
        [shuffled[i] for i in group] for group in pack_samples(shuffled, PackedSize(tokens, sequences, tokens))
    ] == [[samples[i] for i in group] for group in groups]


@given(samples_of_few_prompts(), st.integers(50, 120))
def test_samples_of_one_prompt_are_neighbours(samples: list[Sample], tokens: int) -> None:
    for group in pack_samples(samples, PackedSize(tokens, 100, tokens)):
        prompts = [tuple(samples[index].prompt) for index in group]
        assert len([prompt for prompt, _ in groupby(prompts)]) == len(set(prompts))


def test_samples_that_share_a_prompt_compute_it_once() -> None:
    samples = [Sample(list(range(100)), [i] * 50, *[[0.0] * 50] * 3) for i in range(4)]
    assert packed_size(samples) == (99 + 4 * 51, 5, 4 * 99)
    assert pack_samples(samples, PackedSize(400, 8, 400)) == [[0, 1, 2, 3]]
    assert pack_samples(samples, PackedSize(290, 8, 290)) == [[0, 1], [2, 3]]  # three would repeat too many keys
    assert pack_samples(samples, PackedSize(400, 3, 400)) == [[0, 1], [2, 3]]


def test_the_longest_samples_come_first() -> None:
    assert pack_samples(of_lengths(5, 9, 3, 6), PackedSize(12, 8, 12)) == [[1, 2], [3, 0]]
    assert pack_samples(of_lengths(24, 24, 24, 24), PackedSize(48, 8, 48)) == [[0, 1], [2, 3]]
    assert pack_samples([], PackedSize(48, 8, 48)) == []
    assert pack_samples(of_lengths(7, 1, 1), PackedSize(8, 1, 8)) == [[0], [1], [2]]


def test_a_sample_that_does_not_fit_is_refused() -> None:
    assert pack_samples(of_lengths(12), PackedSize(12, 1, 12)) == [[0]]
    with pytest.raises(ValueError, match="13 tokens does not fit a microbatch of 12"):
        pack_samples(of_lengths(3, 13), PackedSize(12, 8, 12))


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


@given(
    st.lists(st.tuples(sample(), st.integers(0, 2)), max_size=4), st.integers(0, 30), st.integers(0, 3),
    st.integers(11, 60),
)  # fmt: skip
def test_the_arrays_equal_those_that_a_plain_loop_fills(
    families: list[tuple[Sample, int]], padding: int, spare: int, longest: int
) -> None:
    """The first sample of a family is followed by others of its prompt, each one token shorter than the one before."""
    samples = [cut(one, less) for one, others in families for less in range(others + 1)]
    size = packed_size(samples)
    tokens, sequences = size.tokens + padding, size.sequences + spare
    assume(tokens and size.repeated_keys <= tokens)
    arrays = lay_out(samples, PackedSize(tokens, sequences, tokens), longest)

    expected = []  # (id, position, target, sequence, streams) of each token
    keys = []  # for each sequence, the tokens its attention sees
    starts = []
    for prompt, family in groupby(samples, key=lambda one: list(one.prompt)):
        members = list(family)
        shared: list[int] = []
        if len(members) > 1 and len(prompt) > 1:
            shared = list(range(len(expected), len(expected) + len(prompt) - 1))
            expected += [(prompt[at], at, prompt[at + 1], len(keys), [0.0] * len(STREAMS)) for at in range(len(shared))]
            keys.append(shared)
        for s in members:
            whole = [*s.prompt, *s.tokens]
            keys.append([*shared, *range(len(expected), len(expected) + len(whole) - len(shared))])
            for position in range(len(shared), len(whole)):
                following = whole[position + 1] if position + 1 < len(whole) else 0
                index = position + 1 - len(prompt)  # of the following token among the sample's
                if index == 0:
                    starts.append(len(expected))
                stream_values = [stream(s, name)[index] if 0 <= index < len(s.tokens) else 0.0 for name in STREAMS]
                expected.append((whole[position], position, following, len(keys) - 1, stream_values))
    assert arrays.used_tokens == len(expected)
    assert arrays.starts == starts
    for at in range(0, padding, longest):
        keys.append([len(expected) + at + position for position in range(min(longest, padding - at))])
    expected += [(0, position % longest, 0, sequences, [0.0] * len(STREAMS)) for position in range(padding)]

    columns = (arrays.ids, arrays.positions, arrays.targets, arrays.sequence, arrays.streams.T)
    assert [(*map(int, row[:4]), row[4].tolist()) for row in zip(*columns, strict=True)] == expected

    bounds, key_bounds = arrays.cu_seqlens.tolist(), arrays.cu_keys.tolist()
    assert [arrays.keys[a:b].tolist() for a, b in pairwise(key_bounds)][: len(keys)] == keys
    assert set(key_bounds[len(keys) :]) == {sum(map(len, keys))}  # the rest has none
    row_ranges = [range(a, b) for a, b in pairwise(bounds)][: len(keys)]
    assert all(list(rows) == seen[len(seen) - len(rows) :] for rows, seen in zip(row_ranges, keys, strict=True))
    assert set(bounds[len(keys) :]) == {tokens}
    assert max(np.diff(key_bounds), default=0) <= longest
    empty = lay_out([], PackedSize(tokens, sequences, tokens), longest)
    assert [a.shape for a in arrays.tensors] == [a.shape for a in empty.tensors]  # those of a captured graph
    assert [a.dtype for a in arrays.tensors] == [a.dtype for a in empty.tensors]


def cut(sample: Sample, less: int) -> Sample:
    """The sample without its last `less` tokens."""
    end = max(0, len(sample.tokens) - less)
    values = {name: getattr(sample, name) for name in (*STREAMS, "tokens")}
    return replace(sample, **{name: None if value is None else value[:end] for name, value in values.items()})


def test_malformed_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="has no prompt"):
        lay_out(
            [Sample([1], [2], [1.0], [1.0], [0.0]), Sample([], [3, 4], [1.0] * 2, [1.0] * 2, [0.0] * 2)],
            PackedSize(12, 4, 12),
            12,
        )
    with pytest.raises(ValueError, match="3 tokens has 1 advantages"):
        lay_out([Sample([1], [2, 3, 4], [1.0], [1.0] * 3, [0.0] * 3)], PackedSize(12, 4, 12), 12)
    with pytest.raises(ValueError, match="5 tokens is longer than the 4"):
        lay_out([Sample([1, 2], [2, 3, 4], [1.0] * 3, [1.0] * 3, [0.0] * 3)], PackedSize(12, 4, 12), 4)


@given(samples_of_few_prompts(), st.integers(0, 50), st.data())
def test_all_entries_that_predict_a_sample_have_logits(
    samples: list[Sample], padding: int, data: st.DataObject
) -> None:
    ordered = sorted(samples, key=lambda one: list(one.prompt))
    size = packed_size(ordered)
    tokens = max(size.tokens, size.repeated_keys) + padding
    completion_tokens = sum(len(one.tokens) for one in ordered)
    assume(tokens > max(1, completion_tokens))
    logits = data.draw(st.integers(max(1, completion_tokens), tokens - 1))
    arrays = lay_out(ordered, PackedSize(tokens, size.sequences, tokens), 50, logits)
    assert arrays.logit_rows is not None
    logit_rows = arrays.logit_rows.tolist()
    assert (arrays.logit_rows.dtype, arrays.bucket) == (np.int64, (tokens, logits))
    assert len(set(logit_rows)) == len(logit_rows) == logits
    assert set(logit_rows) <= set(range(tokens))
    predicting = []
    for start, one in zip(arrays.starts, ordered, strict=True):
        predicting += range(start, start + len(one.tokens))
    assert logit_rows[:completion_tokens] == predicting
    everything = lay_out(ordered, PackedSize(tokens, size.sequences, tokens), 50, tokens)
    assert everything.logit_rows is None
    assert everything.bucket == (tokens, tokens)
    for with_half, with_all in zip(arrays.tensors, everything.tensors, strict=False):  # all but the logit rows
        assert np.array_equal(with_half, with_all)
    assert len(arrays.tensors) == len(everything.tensors) + 1


def test_more_tokens_than_logits_are_refused() -> None:
    samples = of_lengths(7, 7, prompt=2)
    assert lay_out(samples, PackedSize(20, 4, 20), 20, logits=10).bucket == (20, 10)
    with pytest.raises(ValueError, match="samples of 10 tokens do not fit a microbatch with the logits of 9"):
        lay_out(samples, PackedSize(20, 4, 20), 20, logits=9)
