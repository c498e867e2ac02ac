"""Which neighbour keeps a rank's state, and which state can be restored after ranks were lost. Touches no tensor.

A rank's state of one step is held twice: by the rank itself and by a neighbour. Together with the states of all other
ranks at the same step it is a state of the run. Ranks of one attempt take each step once, so states of the same attempt
and step belong together; a step that was taken again in a later attempt is another state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Version:
    """Which state of a run: the one after this step, as this attempt took it. A later attempt is always newer."""

    attempt: int
    step: int


@dataclass(frozen=True)
class Holding:
    """A whole copy of one rank's state, e.g. Holding(owner=1, version=Version(0, 7))."""

    owner: int
    version: Version


@dataclass(frozen=True)
class Recovery:
    """The state to restore, and a rank that holds each rank's part: the rank itself, if it does."""

    version: Version
    holders: tuple[int, ...]


@dataclass(frozen=True)
class CopyTransfer:
    """A copy of the state of `owner` that goes from one rank to another."""

    sender: int
    receiver: int
    owner: int


def choose_recovery(ranks: int, held: Mapping[int, Collection[Holding]]) -> Recovery | None:
    """The newest state of which every rank's part is held by somebody; None if there is none.

    `held` says what each rank has in its memory; one that was replaced has nothing.
    """
    holders: dict[Holding, int] = {}
    for rank in sorted(held):
        for holding in held[rank]:
            if holding not in holders or holding.owner == rank:
                holders[holding] = rank
    versions = {holding.version for holding in holders}
    for version in sorted(versions, reverse=True):
        parts = [Holding(owner, version) for owner in range(ranks)]
        if all(part in holders for part in parts):
            return Recovery(version, tuple(holders[part] for part in parts))
    return None


def plan_transfers(recovery: Recovery, held: Mapping[int, Collection[Holding]], distance: int) -> list[CopyTransfer]:
    """What has to go where, so that each rank and its neighbour have its part of a state again."""
    ranks = len(recovery.holders)
    transfers = []
    for owner, holder in enumerate(recovery.holders):
        for place in (owner, (owner + distance) % ranks):
            if Holding(owner, recovery.version) not in held[place]:
                transfers.append(CopyTransfer(holder, place, owner))
    return transfers


def choose_distance(nodes: Sequence[str]) -> int:
    """How far it is from each rank to the one that keeps its state, given the node of each rank.

    The nearest on another node: then a lost node costs no more than a lost rank. With nodes of different sizes, as many
    as possible are on another one.
    """
    ranks = len(nodes)

    def on_same_node(distance: int) -> int:
        return sum(nodes[rank] == nodes[(rank + distance) % ranks] for rank in range(ranks))

    return min(range(1, ranks), key=lambda distance: (on_same_node(distance), distance))
