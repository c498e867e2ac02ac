"""Products of random numbers, to try out ways to compute them: whether they fit a device, and how long they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_REPEATS = 10  # calls in one timed graph
_DIGESTED_ELEMENTS = 2**24  # of a product, at a time
_BLOCK_MS = 6.0  # of equal calls on end
_ROUNDS = 3  # of blocks of all calls; the first warms the device up
_HOPELESS = 1.25  # times the fastest: such a call is not timed again
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
    """The milliseconds of a call on the device, without that of its launch."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            call()
    graph.replay()
    return _time_block(graph.replay, 1) / _REPEATS


def lasting_times(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The milliseconds of each call while the device has been busy for long.

    A device that is busy on end lowers its clock to the power that it may take, so that a kernel that is the fastest
    for a moment need not be the fastest in a run. Blocks of equal calls take turns.
    """
    times = []
    for call in calls:
        call()
        times.append(_time_block(call, 1))
    hopeful = [i for i, taken in enumerate(times) if taken < _HOPELESS * min(times)]
    counts = {i: max(1, round(_BLOCK_MS / times[i])) for i in hopeful}
    found: dict[int, list[float]] = {i: [] for i in hopeful}
    for _ in range(_ROUNDS):
        for i in hopeful:
            found[i].append(_time_block(calls[i], counts[i]))
    for i in hopeful:
        times[i] = min(found[i][1:])
    return times


def _time_block(call: Callable[[], object], count: int) -> float:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


def row_digests(product: Tensor) -> Tensor:
    """A number for each row, [rows] int64, that tells rows apart by any of their bits.

    The logits of many rows take gigabytes. With digests, only one product exists at a time.
    """
    whole_numbers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = product.view(whole_numbers[product.element_size()])
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, product.shape[1:], generator=generator).mul_(2).add_(1).to(product.device)
    rows = max(1, _DIGESTED_ELEMENTS // product.shape[1])
    return torch.cat([(part * factors).sum(1) for part in bits.split(rows)])
