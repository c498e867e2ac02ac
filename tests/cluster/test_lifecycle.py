"""The decisions of the driver, on a cluster in memory: no order of losses leads to a deadlock, a stale write or a lost
step.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollgraph.cluster.lifecycle import Phase
from tests.cluster.simulated_cluster import TIMEOUTS, SimulatedCluster, SimulatedWorker

RANKS, NODES, STEPS = 3, 4, 6


def start_run(**options: Any) -> SimulatedCluster:
    """A run whose first attempt has taken two steps."""
    cluster = SimulatedCluster(RANKS, NODES, STEPS, **options)
    advance_to(cluster, 2)
    return cluster


def advance_to(cluster: SimulatedCluster, saved: int) -> None:
    for _ in range(100):
        if cluster.folder.saved >= saved:
            return
        cluster.find_room()
        for worker in list(cluster.workers.values()):
            cluster.obey(worker)
            cluster.deliver(worker)
        cluster.take_step(cluster.lifecycle.attempt)
    raise AssertionError(f"no step {saved}: {cluster.lifecycle.slots}")


def worker_of(cluster: SimulatedCluster, rank: int) -> SimulatedWorker:
    return cluster.workers[cluster.lifecycle.slots[rank].worker]


@pytest.mark.parametrize("rank", range(RANKS))
def test_only_the_lost_rank_gets_a_new_worker(rank: int) -> None:
    cluster = start_run()
    before = [slot.worker for slot in cluster.lifecycle.slots]
    cluster.kill(worker_of(cluster, rank))
    cluster.run_undisturbed()
    after = [slot.worker for slot in cluster.lifecycle.slots]
    assert [old == new for old, new in zip(before, after, strict=True)] == [other != rank for other in range(RANKS)]
    assert cluster.lifecycle.code == 0
    assert cluster.folder.writers == [1, 1, 2, 2, 2, 2]
    assert f"rank {rank} on node{rank} was lost: killed" in cluster.lines


def test_a_hung_rank_is_replaced_once_the_others_report_it() -> None:
    cluster = start_run()
    hung = worker_of(cluster, 1)
    hung.hung = True
    cluster.run_undisturbed()
    assert not hung.alive
    assert cluster.folder.saved == STEPS
    assert cluster.now < TIMEOUTS.heartbeat  # the others reported it before its heartbeat timed out


def test_a_run_without_a_spare_node_waits_and_names_the_rank() -> None:
    cluster = start_run()
    cluster.nodes["node3"] = False
    cluster.lose_node("node1")
    for _ in range(100):
        for worker in list(cluster.workers.values()):
            cluster.answer(worker)
            cluster.obey(worker)
            cluster.deliver(worker)
        cluster.find_room()
        cluster.pass_time(1.0)
    assert cluster.lifecycle.phase is Phase.PLACING
    assert set(cluster.waiting_ranks) == {(1,)}
    assert len(cluster.waiting_ranks) >= 5
    cluster.run_undisturbed()
    assert cluster.folder.saved == STEPS


def test_a_user_error_ends_the_run_and_names_the_rank_that_raised_it() -> None:
    cluster = start_run()
    cluster.user_error = "reward.functions: no such file"
    cluster.run_undisturbed()
    assert cluster.lifecycle.code == 2
    assert cluster.lifecycle.verdict == "rank 1 on node1 failed: reward.functions: no such file"
    assert cluster.lifecycle.attempt == 1


def test_a_run_that_never_finishes_a_step_gives_up() -> None:
    cluster = SimulatedCluster(RANKS, NODES, STEPS, max_attempts=3)
    for _ in range(100):
        cluster.find_room()
        for worker in list(cluster.workers.values()):
            cluster.obey(worker)
            cluster.deliver(worker)
        victim = worker_of(cluster, 2)
        if victim.attempt:
            cluster.kill(victim)
            cluster.take_step(cluster.lifecycle.attempt)
        if cluster.over:
            break
    assert cluster.lifecycle.code == 75
    assert cluster.lifecycle.attempt == 4
    assert "4 attempts in a row without a finished step" in cluster.lifecycle.verdict


def test_a_worker_that_cannot_be_started_ends_the_run_with_the_reason() -> None:
    cluster = SimulatedCluster(RANKS, NODES, STEPS, max_attempts=3)
    for _ in range(4):
        cluster.kill(worker_of(cluster, 0))
        for worker in list(cluster.workers.values()):
            cluster.deliver(worker)
    assert cluster.over
    assert "could not be started" in cluster.lifecycle.verdict
    assert "killed" in cluster.lifecycle.verdict


def test_a_rank_0_cut_off_during_a_save_cannot_finish_it_later() -> None:
    cluster = start_run()
    old = worker_of(cluster, 0)
    cluster.cut_off(old)
    advance_to(cluster, 3)
    assert old.alive
    assert not cluster.write_late(old)
    cluster.run_undisturbed()
    assert cluster.folder.writers == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("moment", [0, 1])
def test_a_request_to_stop_ends_the_run_saved(moment: int) -> None:
    cluster = start_run() if moment else SimulatedCluster(RANKS, NODES, STEPS)
    cluster.carry_out(cluster.lifecycle.stop(cluster.now))
    cluster.run_undisturbed()
    assert cluster.lifecycle.code == 0
    assert cluster.lifecycle.verdict.startswith("stopped")
    assert cluster.folder.saved == 2 * moment


class RandomLosses(RuleBasedStateMachine):
    """Events, losses and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = SimulatedCluster(RANKS, NODES, STEPS)
        self.attempts = 0

    def pick(self, index: int) -> SimulatedWorker:
        workers = [worker for worker in self.cluster.workers.values() if worker.alive or worker.outbox]
        return workers[index % len(workers)] if workers else next(iter(self.cluster.workers.values()))

    @rule()
    def find_room(self) -> None:
        self.cluster.find_room()

    @rule(index=st.integers(0, 5))
    def obey(self, index: int) -> None:
        self.cluster.obey(self.pick(index))

    @rule(index=st.integers(0, 5))
    def deliver(self, index: int) -> None:
        self.cluster.deliver(self.pick(index))

    @rule(back=st.integers(0, 1))
    def take_step(self, back: int) -> None:
        self.cluster.take_step(self.cluster.lifecycle.attempt - back)

    @rule(rounds=st.integers(1, 6))
    def advance(self, rounds: int) -> None:
        """Let several rounds go well, so that long runs make progress."""
        for _ in range(rounds):
            self.cluster.find_room()
            for worker in list(self.cluster.workers.values()):
                self.cluster.answer(worker)
                self.cluster.obey(worker)
                self.cluster.deliver(worker)
            self.cluster.take_step(self.cluster.lifecycle.attempt)

    @rule(index=st.integers(0, 5))
    def kill(self, index: int) -> None:
        self.cluster.kill(self.pick(index))

    @rule(index=st.integers(0, 5))
    def hang(self, index: int) -> None:
        self.pick(index).hung = True

    @rule(index=st.integers(0, 5))
    def cut_off(self, index: int) -> None:
        self.cluster.cut_off(self.pick(index))

    @rule(index=st.integers(0, 9))
    def write_late(self, index: int) -> None:
        workers = [worker for worker in self.cluster.workers.values() if worker.cut_off]
        if workers:
            worker = workers[index % len(workers)]
            is_newest = worker.last_attempt == self.cluster.folder.attempt
            assert not self.cluster.write_late(worker) or is_newest

    @precondition(lambda self: sum(self.cluster.nodes.values()) > 1)
    @rule(index=st.integers(0, 5))
    def lose_node(self, index: int) -> None:
        alive = [node for node, is_alive in self.cluster.nodes.items() if is_alive]
        self.cluster.lose_node(alive[index % len(alive)])

    @rule()
    def add_node(self) -> None:
        self.cluster.nodes[f"added{len(self.cluster.nodes)}"] = True

    @rule(seconds=st.sampled_from([0.1, 3.0, 12.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)

    @invariant()
    def attempts_only_grow(self) -> None:
        attempt = self.cluster.lifecycle.attempt
        assert attempt >= self.attempts
        self.attempts = attempt

    @invariant()
    def each_rank_has_one_worker(self) -> None:
        slots = self.cluster.lifecycle.slots
        assert [slot.rank for slot in slots] == list(range(RANKS))
        assert len({slot.worker for slot in slots}) == RANKS

    def teardown(self) -> None:
        for worker in self.cluster.workers.values():
            worker.stopping = False
        self.cluster.run_undisturbed()
        assert self.cluster.lifecycle.code == 0, self.cluster.lifecycle.verdict
        assert self.cluster.folder.saved == STEPS


def run_random(runs: int, transitions: int) -> None:
    run_state_machine_as_test(
        RandomLosses, settings=settings(max_examples=runs, stateful_step_count=transitions, deadline=None)
    )


def test_a_few_hundred_random_transitions() -> None:
    run_random(runs=8, transitions=40)


@pytest.mark.slow
def test_ten_thousand_random_transitions() -> None:
    run_random(runs=200, transitions=50)
