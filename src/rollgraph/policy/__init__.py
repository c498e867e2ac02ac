"""The policy: weight slots, phases, and the worker that generates, scores and trains. Read `worker.py` first."""

from rollgraph.policy.microbatch import Limits
from rollgraph.policy.phases import GradientsInUse, PhaseError, Phases
from rollgraph.policy.weights import SlotError, WeightSlots
from rollgraph.policy.worker import PolicyWorker

__all__ = ["GradientsInUse", "Limits", "PhaseError", "Phases", "PolicyWorker", "SlotError", "WeightSlots"]
