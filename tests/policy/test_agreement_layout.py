"""Prefill and decode steps have the tokens of the packed layout, each once and in order."""

from __future__ import annotations

import pytest
import torch

from rollgraph.policy import Limits
from rollgraph.policy.agreement import MicrobatchTooSmall, PagedStep, TokenLayouts, draw_samples

LIMITS = Limits(max_length=96, rows=9, token_buckets=(384,))


def layouts_of(limits: Limits) -> TokenLayouts:
    return TokenLayouts(50, limits, 200, torch.device("cpu"))


def used_slots(steps: list[PagedStep]) -> list[int]:
    return [slot for step in steps for slot in step.slots[: step.used].tolist()]


def test_steps_have_the_tokens_and_positions_of_their_entries() -> None:
    layouts = layouts_of(LIMITS)
    steps = [*layouts.prefill_steps(), *layouts.decode_steps(9)]
    for step in steps:
        used = slice(step.used)
        assert torch.equal(layouts.ids[step.entries[used]], step.ids[used].long())
        assert torch.equal(layouts.positions[step.entries[used]], step.positions[used].long())
    assert len(set(used_slots(steps))) == len(used_slots(steps))
    assert min(used_slots(steps)) >= 16  # block 0 is for padding
    assert {len(step.ids) for step in steps} == {64, 200, 9}


def test_every_position_is_prefilled_or_decoded() -> None:
    layouts = layouts_of(LIMITS)
    of_rows = [layouts.samples[row % len(layouts.samples)] for row in range(9)]
    assert len(layouts.samples) < 9  # rows have to share sequences
    assert len(used_slots(list(layouts.prefill_steps()))) == sum(len(sample.prompt) - 1 for sample in of_rows)
    assert len(used_slots(list(layouts.decode_steps(9)))) == sum(len(sample.tokens) for sample in of_rows)
    entries = {entry for step in layouts.decode_steps(9) for entry in step.entries.tolist()}
    assert sorted(entries) == layouts.decoded_entries().tolist()


def test_prompts_are_shared_and_have_several_lengths() -> None:
    samples = draw_samples(50, Limits(max_length=96, rows=64, token_buckets=(4096,)))
    prompts = {tuple(sample.prompt) for sample in samples}
    assert len(samples) == 64
    assert len(prompts) == 16
    assert len({len(prompt) for prompt in prompts}) == 8
    assert max(len(sample.prompt) + len(sample.tokens) for sample in samples) == 96


@pytest.mark.parametrize(("length", "rows"), [(2, 1), (3, 4), (17, 2)])
def test_short_sequences_still_fill_every_row(length: int, rows: int) -> None:
    layouts = layouts_of(Limits(max_length=length, rows=rows, token_buckets=(64,)))
    assert all(step.used == rows for step in layouts.decode_steps(rows))
    assert len(layouts.samples) >= 2


def test_a_microbatch_that_is_too_small_is_refused() -> None:
    with pytest.raises(MicrobatchTooSmall, match=r"two sequences of 100 tokens .* need a microbatch of 166 tokens"):
        draw_samples(50, Limits(max_length=100, rows=8, token_buckets=(120,)))
