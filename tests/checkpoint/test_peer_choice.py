"""Which state can be restored from the memory of the remaining ranks, for any set of lost ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollgraph.checkpoint.peer_choice import (
    CopyTransfer,
    Holding,
    Recovery,
    Version,
    choose_distance,
    choose_recovery,
    plan_transfers,
)

OLD, NEW = Version(2, 6), Version(2, 7)


@st.composite
def losses(draw: st.DrawFn) -> tuple[int, int, set[int], set[int], set[int]]:
    """Ranks, the distance to a neighbour, lost ranks, and ranks whose newest state is copied and has arrived."""
    ranks = draw(st.integers(2, 7))
    some = st.sets(st.integers(0, ranks - 1))
    copied = draw(some)
    return ranks, draw(st.integers(1, ranks - 1)), draw(some), copied, draw(some) & copied


@given(losses())
def test_the_newest_complete_state_is_chosen(case: tuple[int, int, set[int], set[int], set[int]]) -> None:
    ranks, distance, lost, copied, arrived = case
    holdings: dict[int, list[Holding]] = {rank: [] for rank in range(ranks)}
    for owner in range(ranks):
        neighbour = (owner + distance) % ranks
        holdings[owner] += [Holding(owner, OLD), *([Holding(owner, NEW)] if owner in copied else [])]
        holdings[neighbour] += [Holding(owner, OLD), *([Holding(owner, NEW)] if owner in arrived else [])]
    for rank in lost:
        holdings[rank] = []
    recovery = choose_recovery(ranks, holdings)

    survives = [owner not in lost or (owner + distance) % ranks not in lost for owner in range(ranks)]
    new_survives = []
    for owner in range(ranks):
        by_itself = owner not in lost and owner in copied
        new_survives.append(by_itself or (owner in arrived and (owner + distance) % ranks not in lost))
    if all(new_survives):
        assert recovery is not None
        assert recovery.version == NEW
    elif all(survives):  # a rank drops an older state only once the newer one has arrived everywhere
        assert recovery is not None
        assert recovery.version == OLD
    else:
        assert recovery is None
        return
    for owner, holder in enumerate(recovery.holders):
        assert Holding(owner, recovery.version) in holdings[holder]
        if Holding(owner, recovery.version) in holdings[owner]:
            assert holder == owner
    for transfer in plan_transfers(recovery, holdings, distance):
        copy = Holding(transfer.owner, recovery.version)
        assert copy in holdings[transfer.sender]
        assert copy not in holdings[transfer.receiver]
        holdings[transfer.receiver].append(copy)
    for lost_next in range(ranks):  # whichever rank is lost next, the same state can be restored
        remaining = {rank: [] if rank == lost_next else holdings[rank] for rank in holdings}
        second_recovery = choose_recovery(ranks, remaining)
        assert second_recovery is not None
        assert second_recovery.version == recovery.version


def test_states_of_different_attempts_are_not_mixed() -> None:
    """Step 7 was repeated. On a GPU, its bits may differ."""
    first, again = Version(0, 7), Version(1, 7)
    holdings = {0: [Holding(0, first), Holding(0, again)], 1: [Holding(1, first)]}
    assert choose_recovery(2, holdings) == Recovery(first, (0, 1))
    holdings[1].append(Holding(1, again))
    assert choose_recovery(2, holdings) == Recovery(again, (0, 1))


def test_a_later_attempt_is_newer_than_more_steps() -> None:
    """The later attempt resumed from a checkpoint, so the states of the earlier one are obsolete."""
    holdings = {rank: [Holding(rank, Version(0, 9)), Holding(rank, Version(1, 6))] for rank in range(2)}
    recovery = choose_recovery(2, holdings)
    assert recovery is not None
    assert recovery.version == Version(1, 6)


def test_neighbours_are_on_other_nodes_where_possible() -> None:
    assert choose_distance(["a", "a"]) == 1
    assert choose_distance(["a", "b", "c"]) == 1
    assert choose_distance(["a", "a", "b", "b"]) == 2
    assert choose_distance([node for node in "abc" for _ in range(8)]) == 8
    assert choose_distance(["a", "a", "a", "b"]) == 1  # some neighbours share a node in any case


def test_a_lost_node_loses_no_state() -> None:
    nodes = [node for node in "abc" for _ in range(4)]
    distance = choose_distance(nodes)
    for lost_node in "abc":
        holdings = {}
        for rank in range(12):
            is_alive = nodes[rank] != lost_node
            holdings[rank] = [Holding(rank, NEW), Holding((rank - distance) % 12, NEW)] if is_alive else []
        recovery = choose_recovery(12, holdings)
        assert recovery is not None
        lost = [rank for rank in range(12) if nodes[rank] == lost_node]
        for rank in lost:
            assert recovery.holders[rank] == (rank + distance) % 12


def test_a_replaced_rank_gets_its_state_and_the_copy_that_it_held() -> None:
    holdings = {0: [Holding(0, NEW), Holding(2, NEW)], 1: [], 2: [Holding(2, NEW), Holding(1, NEW)]}
    recovery = choose_recovery(3, holdings)
    assert recovery == Recovery(NEW, (0, 2, 2))
    assert plan_transfers(recovery, holdings, 1) == [CopyTransfer(0, 1, 0), CopyTransfer(2, 1, 1)]
