"""The scheduler in chosen situations, on a simulated device that checks every block it reads."""

from __future__ import annotations

from typing import Any

import pytest

from rollgraph.inference.scheduler import GO, IDLE, NO_ROW, RequestState, Scheduler, Sequence, SequenceError
from tests.inference.simulated_engine import OPTIONS, count_prefilled, engine_with, finish_all


def test_a_prompt_sampled_16_times_is_prefilled_once() -> None:
    engine = engine_with(prefill_tokens=10)
    prompt = tuple(range(100, 111))  # 10 positions to prefill: two full blocks and a tail of two
    group = [engine.add(prompt, max_tokens=9) for _ in range(16)]
    step = engine.turn()
    assert step is not None
    assert step.starts == group
    assert [(chunk.start, chunk.tokens) for chunk in step.chunks] == [(0, prompt[:-1])]
    tail = group[0].blocks[2]
    assert step.copies == [(tail, sequence.blocks[2]) for sequence in group[1:]]
    assert all(sequence.blocks[:2] == group[0].blocks[:2] for sequence in group)
    finish_all(engine)
    assert count_prefilled(engine) == len(prompt) - 1
    assert len({tuple(sequence.generated) for sequence in group}) == 16


def test_a_group_larger_than_the_rows_is_prefilled_once_too() -> None:
    """The first of the group has finished long before the last starts: copies of its tail have replaced it."""
    engine = engine_with(max_rows=3, buckets=(3,))
    prompt = tuple(range(100, 111))
    for i in range(16):
        engine.add(prompt, max_tokens=3 + 2 * i % 7)
    finish_all(engine)
    assert count_prefilled(engine) == len(prompt) - 1
    assert sum(len(step.copies) for step in engine.steps) == 15


def test_a_group_whose_members_end_together_is_prefilled_once() -> None:
    engine = engine_with(max_rows=4, buckets=(4,))
    prompt = tuple(range(100, 111))
    for _ in range(16):
        engine.add(prompt, max_tokens=5)
    finish_all(engine)
    assert count_prefilled(engine) == len(prompt) - 1


def test_retained_blocks_are_released_when_a_waiting_sequence_needs_them() -> None:
    """They are retained for sequences that may share them, and released if there is no room otherwise."""
    engine = engine_with(blocks=5, max_rows=2, buckets=(2,))
    for first in range(6):
        engine.add(tuple(range(20 * first, 20 * first + 11)), max_tokens=5)
    finish_all(engine)


def test_a_prompt_that_ends_with_a_block_is_shared_without_a_copy() -> None:
    engine = engine_with(prefill_tokens=8)  # the first sequence takes all of it; the others need none
    group = [engine.add(tuple(range(9)), max_tokens=9) for _ in range(4)]
    step = engine.turn()
    assert step is not None
    assert (len(step.chunks), step.copies, step.starts) == (1, [], group)
    assert len({block for sequence in group for block in sequence.blocks}) == 2 + 4
    finish_all(engine)


def test_prompts_of_one_step_share_the_blocks_that_it_computes() -> None:
    engine = engine_with()
    engine.add((1, 2, 3, 4, 5, 6, 7, 8, 9), max_tokens=3)
    engine.add((1, 2, 3, 4, 5, 6, 7, 8, 10, 11), max_tokens=3)
    step = engine.turn()
    assert step is not None
    assert [(chunk.start, len(chunk.tokens)) for chunk in step.chunks] == [(0, 8), (8, 1)]
    finish_all(engine)


def test_a_prefix_that_is_no_longer_held_is_computed_again() -> None:
    engine = engine_with()
    for _ in range(2):
        engine.add(tuple(range(9)), max_tokens=2)
        finish_all(engine)
    assert count_prefilled(engine) == 16


def test_one_token_needs_no_prefill() -> None:
    engine = engine_with()
    sequence = engine.add((5,), max_tokens=1)
    step = engine.turn()
    assert step is not None
    assert (step.chunks, step.starts, step.rows, step.orders) == ([], [sequence], [sequence], [GO])
    finish_all(engine)


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    engine = engine_with(prefill_tokens=6)
    short = engine.add((1, 2), max_tokens=20)
    engine.turn()
    long, late = engine.add(tuple(range(10, 30)), max_tokens=4), engine.add((1, 2), max_tokens=4)
    steps = [step for step in (engine.turn() for _ in range(4)) if step]
    assert [[(c.sequence, c.start, len(c.tokens)) for c in step.chunks] for step in steps] == [
        [(long, 0, 6)],
        [(long, 6, 6)],
        [(long, 12, 6)],
        [(long, 18, 1)],  # `late` follows, and copies its only position from `short`
    ]
    assert [step.rows for step in steps[:3]] == [
        [short]
    ] * 3  # a row that is still prefilling does not enlarge the bucket
    assert steps[3].starts == [long, late]
    assert steps[3].rows == [short, long, late, None]
    assert steps[3].orders[3] == IDLE
    finish_all(engine)


def test_chunks_of_a_step_are_limited_in_number() -> None:
    engine = engine_with(prefill_sequences=2)
    sequences = [engine.add((i, i, i), max_tokens=2) for i in range(5)]
    for started in (2, 4, 5):
        engine.turn()
        assert [s.state for s in sequences[started:]] == [RequestState.WAITING] * (5 - started)
    assert [step.starts for step in engine.steps] == [sequences[:2], sequences[2:4], sequences[4:]]
    finish_all(engine)


def test_a_full_cache_preempts_the_latest_sequence_and_later_resumes_it() -> None:
    engine = engine_with(blocks=8, max_rows=3, buckets=(1, 2, 3), max_length=24)
    first, second, third = (engine.add((i, i, i), max_tokens=18) for i in range(3))
    while not (steps := [step for step in engine.steps if step.preempted]):
        assert engine.turn()
    assert steps[0].preempted == [third]
    assert (third.state, third.row, third.blocks) == (RequestState.WAITING, NO_ROW, [])
    kept = third.tokens
    assert len(kept) > 3
    while third.state is RequestState.WAITING:
        step = engine.turn()
    assert step is not None
    assert [(chunk.sequence, chunk.start) for chunk in step.chunks] == [(third, 0)]
    assert step.chunks[0].tokens[: len(kept)] == kept[: len(step.chunks[0].tokens)]
    finish_all(engine)
    ends = {s: next(i for i, step in enumerate(reversed(engine.steps)) if s in step.rows) for s in engine.sequences}
    assert ends[first] > ends[second] > ends[third]


def test_a_preempted_sequence_is_not_overtaken() -> None:
    engine = engine_with(blocks=7, max_rows=3, buckets=(3,), max_length=20)
    first, second = (engine.add((i, i, i), max_tokens=16) for i in range(2))
    while second.in_flight or not second.generated or second.state is RequestState.RUNNING:
        assert engine.turn()
    small = engine.add((7,), max_tokens=1)
    assert engine.scheduler.blocks.free >= 2  # enough for the small one
    while second.state is RequestState.WAITING:
        assert small.state is RequestState.WAITING
        engine.turn()
    assert first.state is RequestState.FINISHED
    finish_all(engine)


def test_a_preempted_sequence_waits_for_its_tokens_in_flight() -> None:
    engine = engine_with(blocks=4, block_size=2, max_rows=2, buckets=(2,), max_length=7)
    first, second = engine.add((1,), max_tokens=6), engine.add((2,), max_tokens=6)
    for _ in range(3):
        assert engine.launch()
    assert (second.state, second.in_flight, second.generated) == (RequestState.WAITING, 2, [])
    engine.scheduler.finish(first, "abort")  # now there is room, but its tokens in flight are not known yet
    assert engine.launch() is None
    engine.land()
    assert engine.launch() is None
    engine.land()
    step = engine.launch()
    assert step is not None
    assert step.starts == [second]
    assert [chunk.tokens for chunk in step.chunks] == [(2, second.generated[0])]
    finish_all(engine)


def test_a_token_in_flight_can_end_a_preempted_sequence() -> None:
    engine = engine_with(blocks=4, block_size=1, max_rows=2, buckets=(2,), max_length=4)
    engine.add((1,), max_tokens=3)
    second = engine.add((2,), max_tokens=2)
    for _ in range(3):
        engine.launch()
    assert (second.state, second.in_flight) == (RequestState.WAITING, 1)
    engine.check_state()
    finish_all(engine)


def test_a_newcomer_leaves_a_block_for_every_sequence_that_will_need_one() -> None:
    engine = engine_with(blocks=6, block_size=4)
    first, second = engine.add((1, 2), max_tokens=4), engine.add((1, 2, 3, 4, 5), max_tokens=5)
    third = engine.add((3,), max_tokens=1)
    engine.turn()
    assert [s.state for s in (first, second, third)] == [
        RequestState.RUNNING,
        RequestState.RUNNING,
        RequestState.WAITING,
    ]
    assert engine.scheduler.blocks.free == 2
    finish_all(engine)
    assert not any(step.preempted for step in engine.steps)


def test_sequences_that_have_all_their_blocks_fill_the_cache() -> None:
    engine = engine_with(blocks=5, block_size=4, max_rows=4, buckets=(1, 2, 4))
    sequences = [engine.add((i,), max_tokens=3) for i in range(4)]
    engine.turn()
    assert all(sequence.state is RequestState.RUNNING for sequence in sequences)
    finish_all(engine)
    assert not any(step.preempted for step in engine.steps)


def test_rows_are_compacted_into_the_smallest_bucket() -> None:
    engine = engine_with(max_rows=4, buckets=(1, 2, 4))
    sequences = [engine.add((i, i, i), max_tokens=12) for i in range(4)]
    step = engine.turn()
    assert step is not None
    assert [sequence.row for sequence in sequences] == [0, 1, 2, 3]
    engine.scheduler.finish(sequences[1], "abort")
    step = engine.turn()
    assert step is not None
    assert (step.moves, step.bucket, step.orders) == ([], 4, [GO, IDLE, GO, GO])
    engine.scheduler.finish(sequences[0], "abort")
    step = engine.turn()
    assert step is not None
    assert (step.moves, step.rows) == ([(2, 0), (3, 1)], sequences[2:])
    engine.scheduler.finish(sequences[2], "abort")
    step = engine.turn()
    assert step is not None
    assert (step.moves, step.rows) == ([(1, 0)], sequences[3:])
    finish_all(engine)


def test_a_row_that_has_not_started_is_moved_without_the_device() -> None:
    engine = engine_with(max_rows=2, buckets=(1, 2), prefill_tokens=4)
    first, second = engine.add((1,), max_tokens=12), engine.add(tuple(range(12)), max_tokens=3)
    engine.turn()
    assert (second.state, second.row) == (RequestState.PREFILLING, 1)
    engine.scheduler.finish(first, "abort")
    while second.state is RequestState.PREFILLING:
        step = engine.turn()
        assert step is not None
        assert (step.moves, step.bucket) == ([], int(second.state is RequestState.RUNNING))
    assert second.row == 0
    finish_all(engine)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 4, "sequence 7: the prompt is empty"),
        ((1,), 0, "sequence 7: max_tokens = 0: must be at least 1"),
        ((1,) * 64, 4, "sequence 7: a prompt of 64 tokens leaves no room in max_length = 64"),
        ((1,) * 10, 8, "sequence 7: a prompt of 10 tokens with 8 to generate needs 5 blocks; the cache has 4"),
        ((1,) * 10, 99, "sequence 7: a prompt of 10 tokens with 54 to generate needs 16 blocks; the cache has 4"),
    ],
)
def test_a_sequence_that_could_never_run_is_refused(prompt: tuple[int, ...], max_tokens: int, message: str) -> None:
    scheduler = Scheduler(**{**OPTIONS, "blocks": 5})
    sequence = Sequence(7, prompt, max_tokens)
    with pytest.raises(SequenceError, match=message) as caught:
        scheduler.add(sequence)
    assert (caught.value.sequence_id, f"sequence 7: {caught.value.reason}") == (7, message)
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    assert sequence.max_computed == 0


def test_a_sequence_that_just_fits_is_accepted() -> None:
    """10 + 7 tokens take 4 blocks of 4: the last token is never fed."""
    engine = engine_with(blocks=5)
    sequence = engine.add((1,) * 10, max_tokens=7)
    finish_all(engine)
    assert len(sequence.generated) == 7


def test_a_sequence_is_added_once() -> None:
    engine = engine_with()
    sequence = engine.add((1, 2), max_tokens=2)
    with pytest.raises(ValueError, match="sequence 0 has been added before"):
        engine.scheduler.add(sequence)
    finish_all(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": ()}, "buckets"),
        ({"buckets": (4, 8)}, "max_rows = 16"),
        ({"buckets": (8, 4, 16)}, "ascend"),
        ({"buckets": (0, 16)}, "ascend"),
        ({"prefill_tokens": 0}, "prefill_tokens = 0"),
        ({"prefill_sequences": 0}, "prefill_sequences = 0"),
        ({"blocks": 1}, "1 blocks"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(**{**OPTIONS, **changes})


def test_the_smallest_cache_serves_requests_one_after_another() -> None:
    engine = engine_with(blocks=5, max_length=17)
    sequences = [engine.add((i,) * 10, max_tokens=7) for i in range(12)]
    done: list[Sequence] = []
    while engine.scheduler.has_work:
        assert engine.scheduler.running <= 1
        engine.turn()
        done += [s for s in sequences if s.state is RequestState.FINISHED and s not in done]
    assert done == sequences
    finish_all(engine)


@pytest.mark.parametrize(("max_tokens", "max_length", "count"), [(3, 64, 3), (50, 6, 4)])
def test_no_token_is_sampled_beyond_the_limit(max_tokens: int, max_length: int, count: int) -> None:
    engine = engine_with(max_length=max_length)
    sequence = engine.add((1, 2), max_tokens=max_tokens)
    for _ in range(count):
        assert engine.launch()
    assert sequence.in_flight == count
    assert engine.launch() is None  # no token is known yet, but enough are in flight
    for _ in range(count - 1):
        engine.land()
    assert sequence.state is RequestState.RUNNING
    engine.land()
    assert (sequence.state, sequence.finish_reason, len(sequence.generated)) == (RequestState.FINISHED, "length", count)
    finish_all(engine)


def test_a_row_at_its_limit_is_idle_until_its_tokens_arrive() -> None:
    engine = engine_with(max_rows=2, buckets=(2,))
    engine.add((1, 2), max_tokens=1)
    running = engine.add((3, 4), max_tokens=9)
    engine.launch()
    step = engine.launch()
    assert step is not None
    assert (step.rows, step.orders) == ([None, running], [IDLE, GO])
    finish_all(engine)


def test_an_abort_in_flight_drops_the_token_and_frees_row_and_blocks() -> None:
    engine = engine_with(blocks=5, max_rows=1, buckets=(1,))
    first = engine.add((1,) * 9, max_tokens=8)
    engine.launch()
    engine.launch()
    engine.scheduler.finish(first, "abort")
    engine.scheduler.finish(first, "stop")
    assert first.finish_reason == "abort"
    assert engine.scheduler.blocks.free == 4
    second = engine.add((2,) * 9, max_tokens=8)  # takes the row and the blocks that a step in flight writes to
    engine.launch()
    assert (second.row, second.in_flight) == (0, 1)
    finish_all(engine)
    assert (first.generated, len(second.generated)) == ([], 8)


def test_an_abort_during_prefill_keeps_blocks_that_others_can_share() -> None:
    engine = engine_with(prefill_tokens=4)
    prompt = tuple(range(50, 70))
    older = engine.add(prompt[:9], max_tokens=20)
    while older.state is not RequestState.RUNNING:
        engine.turn()
    aborted, younger = engine.add(prompt, max_tokens=5), engine.add(prompt, max_tokens=5)
    engine.turn()
    assert (aborted.state, aborted.computed) == (RequestState.PREFILLING, 12)
    assert aborted.blocks[:2] == older.blocks[:2]
    shareable = aborted.blocks[:3]
    engine.scheduler.finish(aborted, "abort")
    engine.check_state()
    step = engine.turn()
    assert step is not None
    assert [(c.sequence, c.start) for c in step.chunks] == [(younger, 12)]  # shares the computed blocks
    assert younger.blocks[:3] == shareable
    finish_all(engine)


def test_an_abort_during_prefill_frees_blocks_if_no_sequence_waits() -> None:
    engine = engine_with(prefill_tokens=4)
    prompt = tuple(range(50, 70))
    aborted = engine.add(prompt, max_tokens=5)
    engine.turn()
    engine.scheduler.finish(aborted, "abort")
    engine.check_end()
    younger = engine.add(prompt, max_tokens=5)
    step = engine.turn()
    assert step is not None
    assert [(c.sequence, c.start) for c in step.chunks] == [(younger, 0)]
    finish_all(engine)


def test_an_abort_leaves_the_queue_in_order() -> None:
    engine = engine_with(max_rows=1, buckets=(1,))
    sequences = [engine.add((i, i), max_tokens=2) for i in range(4)]
    engine.turn()
    engine.scheduler.finish(sequences[2], "abort")
    finish_all(engine)
    assert [s for step in engine.steps for s in step.starts] == [sequences[0], sequences[1], sequences[3]]


def test_the_number_of_tokens_must_match_the_step() -> None:
    scheduler = Scheduler(**OPTIONS)
    scheduler.add(Sequence(0, (1,), 4))
    step = scheduler.schedule()
    assert step is not None
    with pytest.raises(ValueError, match="2 tokens for a step of 1 rows"):
        scheduler.update(step, [1, 2])
