"""Which neighbour keeps a copy of a rank's state, and which state can be restored after ranks were lost.

Each rank's state of a step has two copies: in the rank itself and in a neighbour. The states of all ranks after the
same step form a state of the run. An attempt takes each step once, so states of the same attempt and step belong
together. A step that is repeated in a later attempt leads to another state. Touches no tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Version:
    """The state of a run after a step of an attempt. A later attempt is always newer."""

    attempt: int
    step: int


@dataclass(frozen=True)
class Holding:
    """A complete copy of one rank's state, e.g. Holding(owner=1, version=Version(0, 7))."""

    owner: int
    version: Version


@dataclass(frozen=True)
class Recovery:
    """The state to restore and, for each rank, a holder of its part: the rank itself, if possible."""

    version: Version
    holders: tuple[int, ...]


@dataclass(frozen=True)
class CopyTransfer:
    """A transfer of a copy of the state of `owner` between two ranks."""

    sender: int
    receiver: int
    owner: int


def choose_recovery(ranks: int, holdings: Mapping[int, Collection[Holding]]) -> Recovery | None:
    """The newest state of which some rank has a copy of each part; None if there is none.

    `holdings` has the copies in the memory of each rank. A rank that was replaced has none.
    """
    holders: dict[Holding, int] = {}
    for rank in sorted(holdings):
        for holding in holdings[rank]:
            if holding not in holders or holding.owner == rank:
                holders[holding] = rank
    versions = {holding.version for holding in holders}
    for version in sorted(versions, reverse=True):
        parts = [Holding(owner, version) for owner in range(ranks)]
        if all(part in holders for part in parts):
            return Recovery(version, tuple(holders[part] for part in parts))
    return None


def plan_transfers(
    recovery: Recovery, holdings: Mapping[int, Collection[Holding]], distance: int
) -> list[CopyTransfer]:
    """The transfers after which each rank and its neighbour have copies of the rank's part again."""
    ranks = len(recovery.holders)
    transfers = []
    for owner, holder in enumerate(recovery.holders):
        for receiver in (owner, (owner + distance) % ranks):
            if Holding(owner, recovery.version) not in holdings[receiver]:
                transfers.append(CopyTransfer(holder, receiver, owner))
    return transfers


def choose_distance(nodes: Sequence[str]) -> int:
    """The distance from each rank to the neighbour that keeps its copy. `nodes` has the node of each rank.

    This is the smallest distance to another node, so that losing a node costs no more than losing a rank. With nodes of
    different sizes, as many neighbours as possible are on another node.
    """
    ranks = len(nodes)

    def on_same_node(distance: int) -> int:
        return sum(nodes[rank] == nodes[(rank + distance) % ranks] for rank in range(ranks))

    return min(range(1, ranks), key=lambda distance: (on_same_node(distance), distance))
