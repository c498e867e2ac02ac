"""Text generation with the model being trained: continuous batching over a paged KV cache, in captured steps."""

from rollgraph.inference.engine import Engine
from rollgraph.inference.requests import Completion, Output, Progress, RequestError, SamplingParams

__all__ = ["Completion", "Engine", "Output", "Progress", "RequestError", "SamplingParams"]
