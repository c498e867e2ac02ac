"""What a process keeps from one attempt of a run to the next: its right to the run's folder, the policy, and state.

A policy takes long to make: weights are loaded, memory is allocated, graphs are captured. After another rank was lost,
all of that is still good, and a checkpoint is loaded into the same memory; or, with `checkpoint.peers`, the state that
the ranks hold in theirs. Nothing here communicates.
"""

from __future__ import annotations

import gc

from rollgraph.config import Config
from rollgraph.distributed.world import World
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.run.folder_lock import Claim
from rollgraph.sharding.peer_copies import PeerCopies

MadeFor = tuple[Config, Limits]  # a policy serves another attempt if both are the same


class Tenure:
    """`run` is hexadecimal, the same for all attempts and ranks of a run, and no other run has the same."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.copies = PeerCopies()
        self._policy: PolicyWorker | None = None
        self._made_for: MadeFor | None = None

    def claim(self, world: World) -> Claim:
        return Claim(self.run, world.attempt)

    def keep(self, policy: PolicyWorker, made_for: MadeFor) -> None:
        """Keep a policy with all its graphs, in place of closing it."""
        self._policy = policy
        self._made_for = made_for

    def settle(self, seconds: float) -> bool:
        """Whether nobody writes to the memory of the policy any more; waits so long for the last one to stop."""
        return self._policy is None or self._policy.sharded.collectives.settle(seconds)

    def take(self, made_for: MadeFor) -> PolicyWorker | None:
        """The policy that was kept, if it is of use; otherwise its memory is freed, and there is none.

        One that divides layers with other ranks is of no use: its graphs hold exchanges with these, and a rank that is
        new cannot capture without them.
        """
        policy, self._policy = self._policy, None
        gc.collect()  # what an exception held on to, such as a forward whose backward never came
        if policy is not None and (self._made_for != made_for or policy.sharded.tensor is not None):
            _discard(policy)
            return None
        return policy

    def give_up_policy(self) -> None:
        """Free it. Copies of state stay."""
        if self._policy is not None:
            _discard(self._policy)
        self._policy = None


def _discard(policy: PolicyWorker) -> None:
    """Close a policy whose other ranks may be gone."""
    policy.sharded.abandon()
    policy.close()
