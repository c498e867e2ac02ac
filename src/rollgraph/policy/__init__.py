"""The policy: weight slots, phases, and the worker that generates, scores and trains. Start with `worker.py`."""

from rollgraph.policy.limits import Limits
from rollgraph.policy.phase_memory import GradientsInUse
from rollgraph.policy.phases import PhaseError, Phases
from rollgraph.policy.weights import SlotError, WeightSlots
from rollgraph.policy.worker import PolicyWorker

__all__ = ["GradientsInUse", "Limits", "PhaseError", "Phases", "PolicyWorker", "SlotError", "WeightSlots"]
