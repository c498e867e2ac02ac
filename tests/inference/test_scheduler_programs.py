"""The scheduler under random programs of requests, steps, stops and aborts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollgraph.inference.scheduler import RequestState
from tests.inference.simulated_engine import SimulatedEngine


class Program(RuleBasedStateMachine):
    """Requests that share prefixes, steps, late results, stops and aborts, in any order, in a tiny cache."""

    @initialize(data=st.data())
    def configure(self, data: st.DataObject) -> None:
        size, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
        max_length = data.draw(st.sampled_from([2, 5, 9, 14, 20]))
        fewest = 1 + -(-(max_length - 1) // size)  # blocks that the longest request needs
        self.engine = SimulatedEngine(
            blocks=max(2, fewest + data.draw(st.integers(-1, 6))),
            block_size=size,
            max_rows=rows,
            buckets=data.draw(st.sampled_from([(*range(1, rows + 1),), (rows,), (*range(1, rows, 2), rows)])),
            prefill_tokens=data.draw(st.integers(1, 12)),
            prefill_sequences=data.draw(st.integers(1, 3)),
            max_length=max_length,
        )

    @rule(data=st.data(), max_tokens=st.integers(0, 12), copies=st.integers(1, 4), stops=st.booleans())
    def add(self, data: st.DataObject, max_tokens: int, copies: int, stops: bool) -> None:
        """Add a prompt that is new, or that continues the tokens of another request, one or several times."""
        options, histories = self.engine.options, [s.tokens for s in self.engine.sequences]
        beginning = data.draw(st.sampled_from([(), *histories]))
        cut = data.draw(st.integers(0, len(beginning)))
        prompt = beginning[: len(beginning) - cut] + tuple(data.draw(st.lists(st.integers(0, 1), max_size=7)))
        positions = len(prompt) + min(max_tokens, options["max_length"] - len(prompt)) - 1
        fits = -(-positions // options["block_size"]) < options["blocks"]
        for _ in range(copies):
            if prompt and len(prompt) < options["max_length"] and max_tokens and fits:
                sequence = self.engine.add(prompt, max_tokens)
                if stops:
                    self.engine.stopping.add(sequence.id)
            else:
                with pytest.raises(ValueError, match="sequence"):
                    self.engine.add(prompt, max_tokens)

    @rule(times=st.integers(1, 6))
    def turn(self, times: int) -> None:
        for _ in range(times):
            self.engine.turn()

    @precondition(lambda self: len(self.engine.launched) < 3)
    @rule()
    def launch(self) -> None:
        self.engine.launch()

    @precondition(lambda self: self.engine.launched)
    @rule()
    def land(self) -> None:
        self.engine.land()

    @precondition(lambda self: self.engine.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.engine.sequences))
        reason = sequence.finish_reason or "abort"
        self.engine.scheduler.finish(sequence, "abort")
        assert (sequence.state, sequence.finish_reason) == (RequestState.FINISHED, reason)

    @invariant()
    def state(self) -> None:
        self.engine.check_state()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()
            self.engine.check_end()


def test_random_programs_keep_every_invariant() -> None:
    examples = max(200, 3 * settings().max_examples)  # programs are cheap: 600 in `make test-all`
    run_state_machine_as_test(Program, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))
