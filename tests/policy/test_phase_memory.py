"""Shared memory: in any order of events, no phase reads what another one wrote there, and no gradient is lost."""

from __future__ import annotations

from itertools import product

import pytest

from rollgraph.policy.phases import GradientsInUse, PhaseMemory

EVENTS = ("generate", "score", "train", "save", "update", "drop")


class Simulation:
    """The contents of two pieces of memory. The cache lies over both; scoring and training overwrite the pool's."""

    def __init__(self, over_gradients: bool) -> None:
        self.memory = PhaseMemory(self, lambda: None)
        self.memory.share(self.forget_cache, over_gradients=over_gradients)
        self.over_gradients = over_gradients
        self.gradients = 0  # how many microbatches were added
        self.garbage_in_gradients = False
        self.expected = 0  # how many should have been added
        self.lent = False
        self.cached = False  # the engine believes that the cache holds keys
        self.keys_intact = False

    # -- called by PhaseMemory

    @property
    def has_pending(self) -> bool:
        return self.gradients > 0

    def lend(self) -> None:
        assert not self.lent
        assert not self.gradients
        self.lent = True

    def take_back(self) -> None:
        assert self.lent
        self.lent = False
        self.garbage_in_gradients = False

    def forget_cache(self) -> None:
        self.cached = False

    # -- events

    def happen(self, event: str) -> None:
        if event in ("update", "drop"):
            if self.memory.gradients_are_lent() is None:  # otherwise parallel/ refuses it
                self.gradients = self.expected = 0
            return
        if event == "generate" and self.over_gradients and self.gradients:
            with pytest.raises(GradientsInUse, match="optimizer has not used"):
                self.memory.enter(event)
            return
        self.memory.enter(event)
        getattr(self, event)()

    def generate(self) -> None:
        assert self.memory.cache_is_gone() is None
        assert self.keys_intact or not self.cached
        if self.over_gradients:
            assert self.lent
            self.garbage_in_gradients = True
        self.cached = self.keys_intact = True

    def score(self) -> None:
        assert self.memory.cache_is_gone() is not None
        self.keys_intact = False

    def train(self) -> None:
        assert self.memory.gradients_are_lent() is None
        assert self.memory.cache_is_gone() is not None
        assert not self.garbage_in_gradients
        self.keys_intact = False
        self.gradients += 1
        self.expected += 1

    def save(self) -> None:
        pass


@pytest.mark.parametrize("over_gradients", [True, False])
def test_no_order_of_events_loses_a_gradient(over_gradients: bool) -> None:
    for events in product(EVENTS, repeat=5):
        simulation = Simulation(over_gradients)
        for event in events:
            simulation.happen(event)
            assert simulation.gradients == simulation.expected


def test_a_refused_phase_changes_nothing() -> None:
    simulation = Simulation(over_gradients=True)
    for event in ("generate", "train"):
        simulation.happen(event)
    before = dict(vars(simulation)), dict(vars(simulation.memory))
    with pytest.raises(GradientsInUse):
        simulation.memory.enter("generate")
    assert (dict(vars(simulation)), dict(vars(simulation.memory))) == before


def test_without_a_cache_nothing_is_lent_and_nothing_refused() -> None:
    simulation = Simulation(over_gradients=True)
    simulation.memory = PhaseMemory(simulation, lambda: None)
    simulation.gradients = 1
    for phase in ("generate", "score", "train", "generate"):
        simulation.memory.enter(phase)
        assert (simulation.memory.cache_is_gone(), simulation.memory.gradients_are_lent()) == (None, None)
    assert not simulation.lent
