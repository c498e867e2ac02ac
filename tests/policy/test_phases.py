"""The phase machine: each transition does exactly the work it needs, and leaving restores the former state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollgraph.policy import PhaseError, Phases
from rollgraph.policy.phases import IDLE, PHASES, READ_PHASES


class CountedActions:
    """Phase actions that only count the calls."""

    def __init__(self) -> None:
        self.pauses = self.gathers = self.drops = 0
        self.unreachable = False  # whether gathers fail

    @contextmanager
    def gathered_and_paused(self) -> Iterator[None]:
        if self.unreachable:
            raise ConnectionError("a rank is lost")
        self.gathers += 1
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def drop_gradients(self) -> None:
        self.drops += 1


def phases_with(actions: CountedActions) -> Phases:
    return Phases(actions.gathered_and_paused, actions.drop_gradients)


class EnteringAndLeaving(RuleBasedStateMachine):
    """Any sequence of nested entries and exits, compared with a stack of names."""

    def __init__(self) -> None:
        super().__init__()
        self.actions = CountedActions()
        self.phases = phases_with(self.actions)
        self.open: list[tuple[str, AbstractContextManager[None]]] = []
        self.gathers = self.drops = 0
        self.entered = dict.fromkeys(PHASES, 0)

    @property
    def current(self) -> str:
        return self.open[0][0] if self.open else IDLE

    @rule(phase=st.sampled_from(PHASES))
    def enter(self, phase: str) -> None:
        context = self.phases.enter(phase)
        if self.current not in (IDLE, phase):
            with pytest.raises(PhaseError, match=f"cannot {phase} during {self.current}"):
                context.__enter__()
            return
        if self.current == IDLE:
            self.entered[phase] += 1
            self.gathers += phase in READ_PHASES
        context.__enter__()
        self.open.append((phase, context))

    @rule(name=st.sampled_from(["idle", "Train", ""]))
    def enter_an_unknown_phase(self, name: str) -> None:
        with pytest.raises(PhaseError, match=r"there is no phase .*generate, score, save, train"):
            self.phases.enter(name).__enter__()

    @precondition(lambda self: self.current == IDLE)
    @rule(phase=st.sampled_from(READ_PHASES))
    def enter_while_a_rank_is_lost(self, phase: str) -> None:
        self.actions.unreachable = True
        with pytest.raises(ConnectionError):
            self.phases.enter(phase).__enter__()
        self.actions.unreachable = False

    @precondition(lambda self: self.open)
    @rule()
    def leave(self) -> None:
        self.open.pop()[1].__exit__(None, None, None)

    @precondition(lambda self: self.open)
    @rule(error=st.sampled_from([ValueError(), KeyboardInterrupt()]), levels=st.integers(1, 3))
    def fail(self, error: BaseException, levels: int) -> None:
        """Raise an exception that propagates through the innermost contexts."""
        for _ in range(min(levels, len(self.open))):
            phase, context = self.open.pop()
            self.drops += phase == "train"
            assert not context.__exit__(type(error), error, None)  # it is not swallowed

    @invariant()
    def the_machine_is_in_the_phase_on_the_stack(self) -> None:
        assert self.phases.current == self.current
        assert self.actions.pauses == (self.current in READ_PHASES)
        assert self.actions.gathers == self.gathers
        assert self.actions.drops == self.drops
        assert {phase: self.phases.entered[phase] for phase in PHASES} == self.entered

    def teardown(self) -> None:
        while self.open:
            self.leave()
        self.the_machine_is_in_the_phase_on_the_stack()


TestEnteringAndLeaving = EnteringAndLeaving.TestCase


def test_entering_the_current_phase_again_gathers_nothing() -> None:
    actions = CountedActions()
    phases = phases_with(actions)
    with ExitStack() as many:
        for _ in range(5):
            many.enter_context(phases.enter("score"))
        assert (actions.gathers, actions.pauses) == (1, 1)
    assert (phases.current, actions.pauses) == (IDLE, 0)


def test_a_refused_entry_does_not_change_the_current_phase() -> None:
    actions = CountedActions()
    phases = phases_with(actions)
    with phases.enter("train"):
        refused = pytest.raises(PhaseError, match="cannot generate during train: leave that phase first")
        with refused, phases.enter("generate"):
            pytest.fail("entered")
        assert (phases.current, actions.pauses, actions.gathers, actions.drops) == ("train", 0, 0, 0)
    assert actions.drops == 0  # training itself did not fail


def test_a_failed_train_phase_drops_gradients_inside_another_one() -> None:
    actions = CountedActions()
    phases = phases_with(actions)
    with phases.enter("train"):
        with pytest.raises(ValueError, match="half of the gradients"), phases.enter("train"):
            raise ValueError("only half of the gradients exist")
        assert (phases.current, actions.drops) == ("train", 1)
    assert (phases.current, actions.drops) == (IDLE, 1)


def test_a_failed_train_ends_even_if_its_gradients_cannot_be_dropped() -> None:
    class Lost(CountedActions):
        def drop_gradients(self) -> None:
            raise ConnectionError("a rank is lost")

    phases = phases_with(Lost())
    with pytest.raises(ConnectionError), phases.enter("train"):
        raise ValueError
    assert phases.current == IDLE


class Interrupted(Counter[str]):
    """Ctrl-C while a phase is being entered."""

    def __setitem__(self, phase: str, times: int) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_on_entry_leaves_the_machine_idle(phase: str) -> None:
    actions = CountedActions()
    phases = phases_with(actions)
    phases.entered = Interrupted()
    with pytest.raises(KeyboardInterrupt), phases.enter(phase):
        pass
    assert (phases.current, actions.pauses) == (IDLE, 0)
