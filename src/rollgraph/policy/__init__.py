"""The policy: weight slots, phases, and the worker that generates, scores and trains. Start with `worker.py`."""

from rollgraph.policy.limits import Limits
from rollgraph.policy.phases import PhaseError, Phases
from rollgraph.policy.weights import SlotError, WeightSlots
from rollgraph.policy.worker import PolicyWorker

__all__ = ["Limits", "PhaseError", "Phases", "PolicyWorker", "SlotError", "WeightSlots"]
