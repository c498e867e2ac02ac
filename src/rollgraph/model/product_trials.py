"""Products of random numbers, to try out ways to compute them: whether they fit a device, and how long they take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_REPEATS = 10  # calls in one timed graph
_CANCELLING_PAIRS = 4
_CANCELLING_SIZE = 2.0**12  # how much larger cancelling terms are than others


def draw_factors(
    like: Tensor, like_bias: Tensor | None, rows: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random x, weight and bias."""

    def draw(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float32, device=like.device, generator=generator).to(like.dtype)

    columns, depth = like.shape
    x = draw(rows, depth)
    weight = draw(columns, depth) * depth**-0.5
    bias = draw(columns) if like_bias is not None else None
    _add_cancelling_terms(x, weight, generator)
    return x, weight, bias


def _add_cancelling_terms(x: Tensor, weight: Tensor, generator: torch.Generator) -> None:
    """Add pairs of large terms to every sum along K that cancel each other.

    How much of the other terms is lost depends on what was added up before, so that another order shows in the result,
    even after it was rounded to half precision.
    """
    depth = x.shape[1]
    pairs = min(_CANCELLING_PAIRS, depth // 2)
    places = torch.randperm(depth, generator=generator, device=x.device)
    one = places[:pairs]
    other = places[pairs : 2 * pairs]
    weight[:, other] = weight[:, one]
    x[:, one] *= _CANCELLING_SIZE
    x[:, other] = -x[:, one]


def run_if_it_fits(call: Callable[[], Tensor]) -> Tensor | None:
    """The result of a call, or None if a kernel of ours needs more fast memory than the device has."""
    try:
        return call()
    except Exception as error:
        if type(error).__name__ != "OutOfResources":  # Triton's, which need not be installed
            raise
        return None


def device_time(call: Callable[[], Tensor]) -> float:
    """The time of a call on the device, without that of its launch."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            call()
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
