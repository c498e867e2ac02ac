"""Finds out, on this device with this library, how each product of a model gets the same bits at any number of rows.

For every shape of weight, products of all row counts that will be used are compared with the product of the most rows.
Where they differ, other ways are tried, and the fastest one that agrees is taken. `route_cache.py` keeps what was found
for the next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from rollgraph.model.cublas_offers import LibraryProduct, ProductKind
from rollgraph.model.decoder import Decoder
from rollgraph.model.kernel_compilation import compiling_together
from rollgraph.model.library_choice import choose, find_choice
from rollgraph.model.pointwise import swiglu
from rollgraph.model.product_trials import device_time, draw_factors, lasting_times, row_digests, run_if_it_fits
from rollgraph.model.products import LIBRARY, Route, Routes, compute, gate, offers_of
from rollgraph.model.route_cache import RouteCache

_CANDIDATE_PADDINGS = 3  # how many larger row counts are tried as paddings
_FEW_ROWS = 64  # up to so many, our kernels may be faster than a library that agrees
_FEW_OFFERS = 4  # of short products, of which there are many, and whose first offers are good guesses
_SAVED_MS = 0.001  # by a kernel of ours in a decode step, because it and the one after it start early
_LEAST_TILES = 3  # along K: deeper ones take memory that the next kernel needs to start early, and save nothing
_SHORT_ROWS = 1024  # with more, a product takes long enough for the device's clock to fall

OnProbe = Callable[[str, int, int], None]  # called with the next shape, how many are done, and of how many


class ProductShape(NamedTuple):
    """What a library chooses its algorithm by, beside the number of rows."""

    columns: int
    depth: int
    biased: bool
    wide: bool  # the result is fp32 although the weight is not
    gated: bool = False  # it ends with SwiGLU

    def __str__(self) -> str:
        return f"{self.depth}x{self.columns}{' + bias' if self.biased else ''}{', gated' if self.gated else ''}"


@dataclass
class ProductReport:
    """What the probes found. `inexact` has the shapes and row counts for which no way agrees."""

    routes: dict[ProductShape, dict[int, Route]] = field(default_factory=dict)
    inexact: dict[ProductShape, list[int]] = field(default_factory=dict)
    attention_agrees: bool = True  # set by who has compared it, see `attention_probe.py`
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        return self.attention_agrees and not self.inexact

    def lines(self) -> list[str]:
        """One line for each shape whose products are not all the library's own."""
        found = []
        for shape, routes in self.routes.items():
            special = [f"{rows}: {route}" for rows, route in sorted(routes.items()) if route != LIBRARY]
            if special:
                found.append(f"{shape}  " + "; ".join(special))
        return found


def set_routes(
    model: Decoder,
    row_counts: Sequence[int],
    head_counts: Sequence[int],
    *,
    trained: Sequence[int] = (),
    at_any_cost: bool = False,
    on_probe: OnProbe | None = None,
) -> ProductReport:
    """Choose the routes of all products of a model for these numbers of rows, of which the largest is the reference.

    `head_counts` are the numbers of rows that get logits. `trained` are numbers of rows, of both, that get gradients.
    `at_any_cost` allows slower ways for the largest number of rows too, if the library's do not agree among themselves.
    """
    started = time.perf_counter()
    cache = RouteCache(model.embed.weight, at_any_cost)
    report = ProductReport()
    shapes = list(_shapes(model))
    counts_of = {shape: sorted(set(head_counts if shape.wide else row_counts)) for shape, *_ in shapes}
    known = {shape: cache.get(shape, counts) for shape, counts in counts_of.items()}
    if on_probe is not None:
        on_probe(str(shapes[0][0]), 0, len(shapes))
    with compiling_together():
        for shape, weight, bias, _ in shapes:
            if weight.is_cuda and known[shape] is None:
                _launch_candidates(shape, weight, bias, counts_of[shape])
    for done, (shape, weight, bias, setters) in enumerate(shapes):
        if on_probe is not None:
            on_probe(str(shape), done, len(shapes))
        counts = counts_of[shape]
        routes = known[shape]
        if routes is None:
            if shape.gated:
                routes = _find_gated_routes(weight, bias, counts, report.routes[shape._replace(gated=False)])
            else:
                routes = _find_routes(weight, bias, shape, counts, at_any_cost)
            cache.put(shape, counts, routes)
        report.routes[shape] = routes
        missing = [rows for rows in counts if rows not in routes]
        if missing and not shape.gated:
            report.inexact[shape] = missing
        for set_routes_of in setters:
            set_routes_of(routes)
        if weight.is_cuda and not shape.gated:
            for rows in sorted({*counts} & {*trained}):
                _choose_gradients(cache, shape, weight, rows)
    cache.save()
    if model.embed.weight.is_cuda:
        torch.cuda.empty_cache()  # a key/value cache takes a share of what is free, which the probe must not change
    report.seconds = time.perf_counter() - started
    return report


@torch.no_grad()
def _launch_candidates(shape: ProductShape, weight: Tensor, bias: Tensor | None, counts: Sequence[int]) -> None:
    """Launch all kernels of ours that will be tried out for a shape."""
    for count in counts:
        x = weight.new_zeros(min(count, 4 * _FEW_ROWS), shape.depth)  # there is no kernel of ours to try with more rows
        if shape.gated:
            for route in _gated_tilings(count):
                run_if_it_fits(partial(gate, x, weight, bias, route))
        elif count <= _FEW_ROWS:
            for route in _tilings(weight, count):
                run_if_it_fits(partial(compute, x, weight, bias, route, count, shape.wide))


def _choose_gradients(cache: RouteCache, shape: ProductShape, weight: Tensor, rows: int) -> None:
    """Choose how the gradients of a product are computed. That of a weight is not needed if the weight is frozen."""
    kinds: list[ProductKind] = ["input gradient"]
    if weight.requires_grad:
        kinds.append("weight gradient")
    for kind in kinds:
        product = LibraryProduct(kind, rows, shape.columns, shape.depth, weight.dtype)
        found = cache.get(product, [rows])
        if found is None:
            index = find_choice(product, weight.device)
            found = {} if index is None else {rows: Route("offered", tiling=index)}
            cache.put(product, [rows], found)
        choose(product, weight.device, found[rows].tiling if found else None)


def clear_routes(model: Decoder) -> None:
    """Leave all products to the library."""
    for _, _, _, setters in _shapes(model):
        for set_routes_of in setters:
            set_routes_of({})


_Setter = Callable[[Routes], None]


def _shapes(model: Decoder) -> Iterator[tuple[ProductShape, Tensor, Tensor | None, list[_Setter]]]:
    """Every distinct shape, a weight and a bias of that shape, and functions that set the routes of all of them.

    The gated shape of a weight comes after the one that is not.
    """
    by_shape: dict[ProductShape, tuple[Tensor, Tensor | None, list[_Setter]]] = {}

    def add(weight: Tensor, bias: Tensor | None, wide: bool, setter: _Setter, gated: bool = False) -> None:
        columns, depth = weight.shape
        shape = ProductShape(columns, depth, bias is not None, wide, gated)
        by_shape.setdefault(shape, (weight, bias, []))[2].append(setter)

    for layer in model.layers:
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
            add(*linear.multiplied, False, partial(setattr, linear, "routes"))
            if linear.adapter is not None and not linear.lora_b.is_cuda:  # there, a kernel of our own multiplies with B
                for up in linear.expanding_weights():
                    add(up, None, False, partial(linear.adapter.routes.__setitem__, len(up)))
        if layer.mlp.gate_up.adapter is None and layer.mlp.gate_up.weight.is_cuda:
            add(*layer.mlp.gate_up.multiplied, False, partial(setattr, layer.mlp, "gated_routes"), gated=True)
    add(model.head_weight, None, True, partial(setattr, model, "head_routes"))
    for shape, (weight, bias, setters) in by_shape.items():
        yield shape, weight, bias, setters


@torch.no_grad()
def _find_routes(
    like: Tensor, like_bias: Tensor | None, shape: ProductShape, counts: Sequence[int], at_any_cost: bool
) -> dict[int, Route]:
    """Routes of all row counts, as far as there are any that agree."""
    generator = torch.Generator(like.device).manual_seed(0)
    most = counts[-1]
    x, weight, bias = draw_factors(like, like_bias, most, generator)

    def run(count: int, route: Route) -> Tensor:
        """The product of the last `count` rows, which are elsewhere in the product of all."""
        return compute(x[most - count :], weight, bias, route, count, shape.wide)

    def agrees(count: int, route: Route) -> bool:
        found = run_if_it_fits(partial(run, count, route))
        return found is not None and torch.equal(row_digests(found), expected[most - count :])

    expected = row_digests(compute(x, weight, bias, LIBRARY, most, shape.wide))
    order = torch.randperm(most, generator=generator, device=like.device)
    shuffled = row_digests(compute(x[order], weight, bias, LIBRARY, most, shape.wide))
    consistent = torch.equal(shuffled, expected[order])
    routes: dict[int, Route] = {}
    agreeing: list[int] = []
    if consistent:
        for count in reversed(counts):
            candidates = []
            if agrees(count, LIBRARY):
                agreeing.append(count)
                candidates.append(LIBRARY)
                others = []
                if _FEW_ROWS < count <= _SHORT_ROWS or count == most:  # these take much of a run's time
                    others += _offered(like, shape, count)
                if like.is_cuda and count <= _FEW_ROWS:
                    others += _tilings(like, count)
            else:
                others = _offered(like, shape, count) + _candidates(like, count, agreeing)
            candidates += [route for route in others if agrees(count, route)]
            if candidates:
                routes[count] = _fastest(candidates, partial(run, count), like.device, count > _SHORT_ROWS)
    if len(routes) < len(counts) and at_any_cost:
        routes = {count: _tilings(like, count)[-1] for count in counts}
        expected = row_digests(run(most, routes[most]))
        if not all(agrees(count, routes[count]) for count in counts):
            return {}
    return routes


@torch.no_grad()
def _find_gated_routes(
    like: Tensor, like_bias: Tensor | None, counts: Sequence[int], plain: Mapping[int, Route]
) -> dict[int, Route]:
    """Routes that end with SwiGLU, where they agree with a product and SwiGLU, and are faster than `plain` routes."""
    most = counts[-1]
    if most not in plain:
        return {}
    x, weight, bias = draw_factors(like, like_bias, most, torch.Generator(like.device).manual_seed(0))
    weights = (weight, weight.clone())
    expected = swiglu(compute(x, weight, bias, plain[most], most, wide=False))
    routes = {}
    for count in counts:
        own = x[most - count :].contiguous()
        before = plain.get(count)
        if before is None:
            continue
        ways: dict[Route | None, Callable[[Tensor], Tensor]] = {}
        for route in _gated_tilings(count):
            way = partial(gate, own, bias=bias, route=route)
            found = run_if_it_fits(partial(way, weight))
            if found is not None and torch.equal(found, expected[most - count :]):
                ways[route] = way
        if ways:
            ways[None] = partial(_gate_separately, own, bias=bias, route=before)
            times = {route: _time_in_turns(way, weights) for route, way in ways.items()}
            fastest = min(times, key=times.__getitem__)
            if fastest is not None:
                routes[count] = fastest
    return routes


def _time_in_turns(way: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> float:
    """The time of a product whose weight is in no cache, as in a decode step: several weights take turns."""
    turns = cycle(weights)
    return device_time(lambda: way(next(turns)))


def _gated_tilings(count: int) -> list[Route]:
    """The gated way, in the tilings that suit a number of rows, if there are any."""
    from rollgraph.model.matmul_kernels import GATED_TILINGS

    return [Route("gated", tiling=i) for i, tiling in enumerate(GATED_TILINGS) if tiling.rows == _tile_rows(count)]


def _gate_separately(x: Tensor, weight: Tensor, bias: Tensor | None, route: Route) -> Tensor:
    return swiglu(compute(x, weight, bias, route, len(x), wide=False), chained=route.way == "fixed")


def _offered(like: Tensor, shape: ProductShape, count: int) -> list[Route]:
    """What cuBLAS offers. None of it splits the sum along K, which is what the library's own choice may do."""
    if not like.is_cuda:
        return []
    found = offers_of(count, like, shape.wide, shape.biased)
    if count <= _SHORT_ROWS:
        found = found[:_FEW_OFFERS]
    return [Route("offered", tiling=i) for i in range(len(found))]


def _candidates(like: Tensor, count: int, agreeing: Sequence[int]) -> list[Route]:
    """Ways other than the library's own. `agreeing` are larger row counts whose library product agrees."""
    paddings = sorted(agreeing)[:_CANDIDATE_PADDINGS]
    found = [Route("library", rows) for rows in paddings]
    if not like.is_cuda:
        found += [Route("library", rows) for rows in (4, 8, _next_multiple(count, 16)) if rows > count]
    return found + _tilings(like, count)


def _tilings(weight: Tensor, count: int) -> list[Route]:
    """The fixed way, in the tilings that suit a number of rows and the depth of a weight."""
    if not weight.is_cuda:
        return [Route("fixed")]
    from rollgraph.model.matmul_kernels import TILINGS

    suited = [i for i, tiling in enumerate(TILINGS) if tiling.rows == _tile_rows(count)]
    shallow = [i for i in suited if _LEAST_TILES * TILINGS[i].depth <= weight.shape[1]]
    return [Route("fixed", tiling=i) for i in shallow or suited]


def _tile_rows(count: int) -> int:
    """The rows of a tile that suit a number of rows: 16, 64, or 128 if there are many."""
    if count > 4 * _FEW_ROWS:
        return 128
    return 16 if count <= 16 else _FEW_ROWS  # tiles of 32 rows are slower than half-empty ones of 64


def _next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor


def _fastest(candidates: Sequence[Route], run: Callable[[Route], Tensor], device: torch.device, lasting: bool) -> Route:
    """On CUDA, the candidate that takes the least time; elsewhere the first."""
    if len(candidates) == 1 or device.type != "cuda":
        return candidates[0]
    calls = [partial(run, route) for route in candidates]
    times = lasting_times(calls) if lasting else [device_time(call) for call in calls]
    costs = [taken - _SAVED_MS * (route.way == "fixed") for route, taken in zip(candidates, times, strict=True)]
    return candidates[costs.index(min(costs))]
