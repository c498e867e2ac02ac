"""Generation with the model that trains: continuous batching over a paged cache and captured steps."""

from rollgraph.inference.engine import Engine
from rollgraph.inference.requests import Completion, Output, Progress, RequestError, SamplingParams

__all__ = ["Completion", "Engine", "Output", "Progress", "RequestError", "SamplingParams"]
