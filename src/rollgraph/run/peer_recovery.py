"""After ranks were lost: whether the run goes on with what the others hold in memory, or with what is on the disk.

`sharding/peer_choice.py` decides what the ranks still hold, from what each of them says.
"""

from __future__ import annotations

import json

from rollgraph.distributed.world import World
from rollgraph.run.resume import Finished, Fresh, FromPeers, Resume, Start
from rollgraph.sharding import Collectives
from rollgraph.sharding.peer_choice import Holding, Version, choose_distance, choose_recovery, plan_transfers
from rollgraph.sharding.peer_copies import PeerCopies
from rollgraph.sharding.peer_exchange import spread


def prefer_peers(start: Start, copies: PeerCopies, world: World) -> Start:
    """Start with what the ranks hold, if that is whole and no older than what is on the disk. All ranks call it.

    Each rank then has a copy of its own part, and its neighbour another one.
    """
    assert world.liveness is not None, "a single rank has no neighbour"
    collectives = Collectives(world)
    copies.prepare(world.size)
    mine = [(one.owner, one.version.attempt, one.version.step) for one in copies.held()]
    on_disk = start.newest.step if isinstance(start, Resume | Finished) else -1
    finished = isinstance(start, Finished)
    about_me = json.dumps([mine, on_disk, finished, world.liveness.node])
    theirs, steps_on_disk, finishes, nodes = zip(*map(json.loads, collectives.all_gather_text(about_me)), strict=True)
    held = {}
    for rank, holdings in enumerate(theirs):
        held[rank] = [Holding(owner, Version(attempt, step)) for owner, attempt, step in holdings]
    recovery = choose_recovery(world.size, held)
    if recovery is None or finishes[0] or recovery.version.step < steps_on_disk[0]:  # rank 0 decides for all
        return start
    transfers = plan_transfers(recovery, held, choose_distance(nodes))
    with world.in_phase("bring back state"):
        spread(copies, recovery.version, transfers, collectives, world.device)
    return FromPeers(recovery.version, None if isinstance(start, Fresh | FromPeers) else start.newest)
