"""What can be restored from the memory of the ranks that are left, for every set of ranks that may be lost."""

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
def test_the_newest_whole_state_is_found(case: tuple[int, int, set[int], set[int], set[int]]) -> None:
    ranks, distance, lost, copied, arrived = case
    holdings: dict[int, list[Holding]] = {rank: [] for rank in range(ranks)}
    for owner in range(ranks):
        neighbour = (owner + distance) % ranks
        holdings[owner] += [Holding(owner, OLD), *([Holding(owner, NEW)] if owner in copied else [])]
        holdings[neighbour] += [Holding(owner, OLD), *([Holding(owner, NEW)] if owner in arrived else [])]
    for rank in lost:
        holdings[rank] = []
    found = choose_recovery(ranks, holdings)

    survives = [owner not in lost or (owner + distance) % ranks not in lost for owner in range(ranks)]
    new_survives = []
    for owner in range(ranks):
        by_itself = owner not in lost and owner in copied
        new_survives.append(by_itself or (owner in arrived and (owner + distance) % ranks not in lost))
    if all(new_survives):
        assert found is not None
        assert found.version == NEW
    elif all(survives):  # the two-phase exchange: an older state is given up only for one that arrived everywhere
        assert found is not None
        assert found.version == OLD
    else:
        assert found is None
        return
    for owner, holder in enumerate(found.holders):
        assert Holding(owner, found.version) in holdings[holder]
        if Holding(owner, found.version) in holdings[owner]:
            assert holder == owner
    for transfer in plan_transfers(found, holdings, distance):
        copy = Holding(transfer.owner, found.version)
        assert copy in holdings[transfer.sender]
        assert copy not in holdings[transfer.receiver]
        holdings[transfer.receiver].append(copy)
    for lost_next in range(ranks):  # whoever it is, the same state can be restored again
        left = {rank: [] if rank == lost_next else holdings[rank] for rank in holdings}
        again = choose_recovery(ranks, left)
        assert again is not None
        assert again.version == found.version


def test_states_of_different_attempts_are_not_mixed() -> None:
    """Step 7 was taken again: on a GPU, that does not give the same bits."""
    first, again = Version(0, 7), Version(1, 7)
    holdings = {0: [Holding(0, first), Holding(0, again)], 1: [Holding(1, first)]}
    assert choose_recovery(2, holdings) == Recovery(first, (0, 1))
    holdings[1].append(Holding(1, again))
    assert choose_recovery(2, holdings) == Recovery(again, (0, 1))


def test_a_later_attempt_is_newer_than_more_steps() -> None:
    """It went back to a checkpoint because no newer state was whole; what is left of that is of no use any more."""
    holdings = {rank: [Holding(rank, Version(0, 9)), Holding(rank, Version(1, 6))] for rank in range(2)}
    found = choose_recovery(2, holdings)
    assert found is not None
    assert found.version == Version(1, 6)


def test_neighbours_are_on_other_nodes_where_that_can_be() -> None:
    assert choose_distance(["a", "a"]) == 1
    assert choose_distance(["a", "b", "c"]) == 1
    assert choose_distance(["a", "a", "b", "b"]) == 2
    assert choose_distance([node for node in "abc" for _ in range(8)]) == 8
    assert choose_distance(["a", "a", "a", "b"]) == 1  # somebody's is on the same node in any case


def test_a_lost_node_costs_nothing() -> None:
    nodes = [node for node in "abc" for _ in range(4)]
    distance = choose_distance(nodes)
    for gone in "abc":
        holdings = {}
        for rank in range(12):
            left = nodes[rank] != gone
            holdings[rank] = [Holding(rank, NEW), Holding((rank - distance) % 12, NEW)] if left else []
        found = choose_recovery(12, holdings)
        assert found is not None
        lost = [rank for rank in range(12) if nodes[rank] == gone]
        for rank in lost:
            assert found.holders[rank] == (rank + distance) % 12


def test_what_a_lost_rank_held_is_held_again() -> None:
    holdings = {0: [Holding(0, NEW), Holding(2, NEW)], 1: [], 2: [Holding(2, NEW), Holding(1, NEW)]}
    found = choose_recovery(3, holdings)
    assert found == Recovery(NEW, (0, 2, 2))
    assert plan_transfers(found, holdings, 1) == [CopyTransfer(0, 1, 0), CopyTransfer(2, 1, 1)]
