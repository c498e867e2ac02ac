"""The policy: weight slots, phases, and the worker that generates, scores and trains."""

from rollgraph.policy.phases import PhaseError, Phases
from rollgraph.policy.weights import WeightsError, WeightSlots
from rollgraph.policy.worker import Limits, PolicyWorker

__all__ = ["Limits", "PhaseError", "Phases", "PolicyWorker", "WeightSlots", "WeightsError"]
