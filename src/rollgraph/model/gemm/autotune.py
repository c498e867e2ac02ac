"""GEMM autotune: finds, for each GEMM, the fastest algorithm that gives every row the same bits at any row count.

For every weight shape, we run the GEMM with each row count that will occur, and compare it with the GEMM of the most
rows. Where PyTorch's bits differ, we try other algorithms. The fastest one that agrees wins, and a file caches it for
the next start.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollgraph.files import write_atomically
from rollgraph.model.decoder import Decoder
from rollgraph.model.gemm.candidates import (
    GemmKind,
    GemmProblem,
    device_time,
    draw_operands,
    row_digests,
    run_if_it_fits,
    sustained_times,
)
from rollgraph.model.gemm.matmul import (
    TORCH_GEMM,
    GemmAlgo,
    GemmAlgos,
    find_gradient_algo,
    forward_cublas_algos,
    matmul_swiglu,
    matmul_with_algo,
    set_gradient_algo,
)
from rollgraph.model.kernels.launch import compiling_together
from rollgraph.model.layers import swiglu

# -- the cache on disk -----------------------------------------------------------------------------
# `ROLLGRAPH_CACHE` names its folder.

_AUTOTUNE_VERSION = 6  # raise it when the autotune or an algorithm changes: older entries are then ignored


class GemmCache:
    """The algorithms by device, versions of the libraries, dtype of the weights, weight shape and row counts."""

    def __init__(self, weight: Tensor, at_any_cost: bool) -> None:
        self._key = [_AUTOTUNE_VERSION, _device_name(weight.device), *_versions(), str(weight.dtype), at_any_cost]
        self._path: Path | None = None
        self._entries: dict[str, list[tuple[int, GemmAlgo]]] = {}
        self._changed = False
        if weight.device.type == "cuda":  # elsewhere autotuning is too quick to be worth caching
            self._path = cache_path()
        if self._path is not None:
            self._entries = self._read(self._path)

    @staticmethod
    def _read(path: Path) -> dict[str, list[tuple[int, GemmAlgo]]]:
        """The entries of the file, or none: an unreadable cache is no reason to stop."""
        try:
            stored = json.loads(path.read_text())
            return {
                key: [
                    (int(rows), GemmAlgo(str(kind), int(padded), int(variant)))  # type: ignore[arg-type]
                    for rows, (kind, padded, variant) in entries
                ]
                for key, entries in stored.items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def get(self, shape: tuple[Any, ...], counts: Sequence[int]) -> dict[int, GemmAlgo] | None:
        entries = self._entries.get(self._key_of(shape, counts))
        return None if entries is None else dict(entries)

    def put(self, shape: tuple[Any, ...], counts: Sequence[int], algos: dict[int, GemmAlgo]) -> None:
        self._entries[self._key_of(shape, counts)] = list(algos.items())
        self._changed = True

    def _key_of(self, shape: tuple[Any, ...], counts: Sequence[int]) -> str:
        return json.dumps([*self._key, list(shape), list(counts)], default=str)

    def save(self) -> None:
        if self._path is None or not self._changed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(self._entries, indent=1))
        except OSError:
            return


def cache_path() -> Path | None:
    """The file of the cache; None if the user has no home, as in some containers."""
    folder = os.environ.get("ROLLGRAPH_CACHE")
    if folder:
        return Path(folder) / "gemm_algos.json"
    try:
        return Path.home() / ".cache" / "rollgraph" / "gemm_algos.json"
    except RuntimeError:
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def _versions() -> list[str]:
    try:
        import triton

        kernels = str(triton.__version__)
    except ImportError:
        kernels = ""
    return [torch.__version__, str(torch.version.cuda), str(torch.backends.cuda.preferred_blas_library()), kernels]


# -- the search ------------------------------------------------------------------------------------

_CANDIDATE_PADDINGS = 3  # how many larger row counts are tried as paddings
_FEW_ROWS = 64  # up to this many rows, our kernels may be faster than a cuBLAS that agrees
_MAX_SHORT_ALGOS = 4  # cuBLAS algorithms tried for few rows: there are many such GEMMs, and the first guesses are good
_PDL_SAVING_MS = 0.001  # per launch of our kernels in a decode step; not part of the measured times
_MIN_TILES = 3  # along K: deeper tiles take shared memory that PDL needs for the next kernel, and save nothing
_SHORT_ROWS = 1024  # with more, a GEMM takes long enough for the device's clock to fall

OnAutotune = Callable[[str, int, int], None]  # called with the next shape, the number of shapes done, and of all


class GemmShape(NamedTuple):
    """What a BLAS library picks its algorithm by, apart from the number of rows."""

    columns: int
    depth: int
    has_bias: bool
    fp32_out: bool  # the result is fp32 although the weight is not
    has_swiglu: bool = False  # the kernel ends with SwiGLU

    def __str__(self) -> str:
        return f"{self.depth}x{self.columns}{' + bias' if self.has_bias else ''}{', swiglu' if self.has_swiglu else ''}"


@dataclass
class GemmReport:
    """The result of an autotune. `inexact` has the shapes and row counts for which no algorithm agrees."""

    algos: dict[GemmShape, dict[int, GemmAlgo]] = field(default_factory=dict)
    inexact: dict[GemmShape, list[int]] = field(default_factory=dict)
    attention_agrees: bool = True  # set by `policy/exactness.py`, which compares it
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        return self.attention_agrees and not self.inexact

    def lines(self) -> list[str]:
        """One line for each shape for which some row count does not use PyTorch's GEMM."""
        lines = []
        for shape, algos in self.algos.items():
            special = [f"{rows}: {algo}" for rows, algo in sorted(algos.items()) if algo != TORCH_GEMM]
            if special:
                lines.append(f"{shape}  " + "; ".join(special))
        return lines


def autotune_gemms(
    model: Decoder,
    row_counts: Sequence[int],
    logit_row_counts: Sequence[int],
    *,
    grad_row_counts: Sequence[int] = (),
    at_any_cost: bool = False,
    on_autotune: OnAutotune | None = None,
) -> GemmReport:
    """Set the algorithms of all GEMMs of a model for these row counts, the largest of which is the reference.

    `logit_row_counts` are those of the output head. `grad_row_counts` are the counts, from either list, that also run a
    backward. With `at_any_cost`, the largest row count may get a slower algorithm too, if PyTorch's GEMM does not agree
    with itself.
    """
    started = time.perf_counter()
    cache = GemmCache(model.embed_tokens.weight, at_any_cost)
    report = GemmReport()
    shapes = list(_gemm_shapes(model))
    counts_of = {shape: sorted(set(logit_row_counts if shape.fp32_out else row_counts)) for shape, *_ in shapes}
    cached = {shape: cache.get(shape, counts) for shape, counts in counts_of.items()}
    if on_autotune is not None:
        on_autotune(str(shapes[0][0]), 0, len(shapes))
    with compiling_together():
        for shape, weight, bias, _ in shapes:
            if weight.is_cuda and cached[shape] is None:
                _launch_candidates(shape, weight, bias, counts_of[shape])
    for done, (shape, weight, bias, setters) in enumerate(shapes):
        if on_autotune is not None:
            on_autotune(str(shape), done, len(shapes))
        counts = counts_of[shape]
        algos = cached[shape]
        if algos is None:
            if shape.has_swiglu:
                algos = _find_swiglu_algos(weight, bias, counts, report.algos[shape._replace(has_swiglu=False)])
            else:
                algos = _find_algos(weight, bias, shape, counts, at_any_cost)
            cache.put(shape, counts, algos)
        report.algos[shape] = algos
        missing = [rows for rows in counts if rows not in algos]
        if missing and not shape.has_swiglu:
            report.inexact[shape] = missing
        for set_algos in setters:
            set_algos(algos)
        if weight.is_cuda and not shape.has_swiglu:
            for rows in sorted({*counts} & {*grad_row_counts}):
                _set_gradient_algos(cache, shape, weight, rows)
    cache.save()
    if model.embed_tokens.weight.is_cuda:
        torch.cuda.empty_cache()  # the size of a KV cache depends on the free memory, which we must not change
    report.seconds = time.perf_counter() - started
    return report


@torch.no_grad()
def _launch_candidates(shape: GemmShape, weight: Tensor, bias: Tensor | None, counts: Sequence[int]) -> None:
    """Launch all Triton kernels that the search will try for a shape, so that they compile together."""
    for count in counts:
        x = weight.new_zeros(min(count, 4 * _FEW_ROWS), shape.depth)  # with more rows, no kernel of ours is tried
        if shape.has_swiglu:
            for algo in _swiglu_tilings(count):
                run_if_it_fits(partial(matmul_swiglu, x, weight, bias, algo))
        elif count <= _FEW_ROWS:
            for algo in _tilings(weight, count):
                run_if_it_fits(partial(matmul_with_algo, x, weight, bias, algo, count, shape.fp32_out))


def _set_gradient_algos(cache: GemmCache, shape: GemmShape, weight: Tensor, rows: int) -> None:
    """Set the cuBLAS algorithms of the gradients of a GEMM. A frozen weight needs no gradient."""
    kinds: list[GemmKind] = ["input gradient"]
    if weight.requires_grad:
        kinds.append("weight gradient")
    for kind in kinds:
        problem = GemmProblem(kind, rows, shape.columns, shape.depth, weight.dtype)
        algos = cache.get(problem, [rows])
        if algos is None:
            index = find_gradient_algo(problem, weight.device)
            algos = {} if index is None else {rows: GemmAlgo("cublas", variant=index)}
            cache.put(problem, [rows], algos)
        set_gradient_algo(problem, weight.device, algos[rows].variant if algos else None)


def clear_gemm_algos(model: Decoder) -> None:
    """Compute all GEMMs as PyTorch does."""
    for _, _, _, setters in _gemm_shapes(model):
        for set_algos in setters:
            set_algos({})


_Setter = Callable[[GemmAlgos], None]


def _gemm_shapes(model: Decoder) -> Iterator[tuple[GemmShape, Tensor, Tensor | None, list[_Setter]]]:
    """Every distinct shape, a weight and a bias of that shape, and functions that set the algorithms of all of them.

    The shape with SwiGLU comes after the same shape without.
    """
    by_shape: dict[GemmShape, tuple[Tensor, Tensor | None, list[_Setter]]] = {}

    def add(weight: Tensor, bias: Tensor | None, fp32_out: bool, setter: _Setter, has_swiglu: bool = False) -> None:
        columns, depth = weight.shape
        shape = GemmShape(columns, depth, bias is not None, fp32_out, has_swiglu)
        by_shape.setdefault(shape, (weight, bias, []))[2].append(setter)

    for layer in model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            add(*linear.gemm_weights, False, partial(setattr, linear, "algos"))
            if linear.adapter is not None and not linear.lora_b.is_cuda:  # on CUDA, a Triton kernel multiplies with B
                for b in linear.lora_b_weights():
                    add(b, None, False, partial(linear.adapter.algos.__setitem__, len(b)))
        gate_up = layer.mlp.gate_up_proj
        if gate_up.adapter is None and gate_up.weight.is_cuda:
            add(*gate_up.gemm_weights, False, partial(setattr, layer.mlp, "swiglu_algos"), has_swiglu=True)
    add(model.head_weight, None, True, partial(setattr, model, "head_algos"))
    for shape, (weight, bias, setters) in by_shape.items():
        yield shape, weight, bias, setters


@torch.no_grad()
def _find_algos(
    like: Tensor, like_bias: Tensor | None, shape: GemmShape, counts: Sequence[int], at_any_cost: bool
) -> dict[int, GemmAlgo]:
    """The algorithm of each row count. A row count for which none agrees is missing."""
    generator = torch.Generator(like.device).manual_seed(0)
    max_rows = counts[-1]
    x, weight, bias = draw_operands(like, like_bias, max_rows, generator)

    def run(count: int, algo: GemmAlgo) -> Tensor:
        """The GEMM of the last `count` rows, which have other positions in the GEMM of all rows."""
        return matmul_with_algo(x[max_rows - count :], weight, bias, algo, count, shape.fp32_out)

    def agrees(count: int, algo: GemmAlgo) -> bool:
        out = run_if_it_fits(partial(run, count, algo))
        return out is not None and torch.equal(row_digests(out), expected[max_rows - count :])

    expected = row_digests(matmul_with_algo(x, weight, bias, TORCH_GEMM, max_rows, shape.fp32_out))
    order = torch.randperm(max_rows, generator=generator, device=like.device)
    shuffled = row_digests(matmul_with_algo(x[order], weight, bias, TORCH_GEMM, max_rows, shape.fp32_out))
    consistent = torch.equal(shuffled, expected[order])
    algos: dict[int, GemmAlgo] = {}
    agreeing: list[int] = []
    if consistent:
        for count in reversed(counts):
            candidates = []
            if count == max_rows or agrees(count, TORCH_GEMM):  # the most rows are what the others are compared with
                agreeing.append(count)
                candidates.append(TORCH_GEMM)
                alternatives = []
                if _FEW_ROWS < count <= _SHORT_ROWS or count == max_rows:  # these row counts take much of a run's time
                    alternatives += _cublas_candidates(like, shape, count)
                if like.is_cuda and count <= _FEW_ROWS:
                    alternatives += _tilings(like, count)
            else:
                alternatives = _cublas_candidates(like, shape, count) + _other_candidates(like, count, agreeing)
            candidates += [algo for algo in alternatives if agrees(count, algo)]
            if candidates:
                algos[count] = _fastest(candidates, partial(run, count), like.device, count > _SHORT_ROWS)
    if len(algos) < len(counts) and at_any_cost:
        algos = {count: _tilings(like, count)[-1] for count in counts}
        expected = row_digests(run(max_rows, algos[max_rows]))
        if not all(agrees(count, algos[count]) for count in counts):
            return {}
    return algos


@torch.no_grad()
def _find_swiglu_algos(
    like: Tensor, like_bias: Tensor | None, counts: Sequence[int], plain_algos: Mapping[int, GemmAlgo]
) -> dict[int, GemmAlgo]:
    """Algorithms that end with SwiGLU, where they are exact and faster than a GEMM by `plain_algos` and then SwiGLU."""
    max_rows = counts[-1]
    if max_rows not in plain_algos:
        return {}
    x, weight, bias = draw_operands(like, like_bias, max_rows, torch.Generator(like.device).manual_seed(0))
    weights = (weight, weight.clone())
    expected = swiglu(matmul_with_algo(x, weight, bias, plain_algos[max_rows], max_rows, fp32_out=False))
    algos = {}
    for count in counts:
        last_rows = x[max_rows - count :].contiguous()
        plain = plain_algos.get(count)
        if plain is None:
            continue
        candidates: dict[GemmAlgo | None, Callable[[Tensor], Tensor]] = {}
        for algo in _swiglu_tilings(count):
            run = partial(matmul_swiglu, last_rows, bias=bias, algo=algo)
            out = run_if_it_fits(partial(run, weight))
            if out is not None and torch.equal(out, expected[max_rows - count :]):
                candidates[algo] = run
        if candidates:
            candidates[None] = partial(_matmul_then_swiglu, last_rows, bias=bias, algo=plain)
            times = {algo: _time_with_cold_weights(run, weights) for algo, run in candidates.items()}
            fastest = min(times, key=times.__getitem__)
            if fastest is not None:
                algos[count] = fastest
    return algos


def _time_with_cold_weights(run: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> float:
    """The time of a GEMM whose weight is in no cache, as in a decode step: several weights take turns."""
    turns = cycle(weights)
    return device_time(lambda: run(next(turns)))


def _swiglu_tilings(count: int) -> list[GemmAlgo]:
    """The swiglu algorithms whose tiling suits a number of rows; there may be none."""
    from rollgraph.model.kernels.matmul import SWIGLU_TILINGS

    return [
        GemmAlgo("swiglu", variant=i) for i, tiling in enumerate(SWIGLU_TILINGS) if tiling.rows == _tile_rows(count)
    ]


def _matmul_then_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None, algo: GemmAlgo) -> Tensor:
    return swiglu(matmul_with_algo(x, weight, bias, algo, len(x), fp32_out=False), pdl=algo.kind == "fixed")


def _cublas_candidates(like: Tensor, shape: GemmShape, count: int) -> list[GemmAlgo]:
    """The cuBLAS algorithms. None of them splits the sum along K, as PyTorch's choice may do."""
    if not like.is_cuda:
        return []
    cublas_algos = forward_cublas_algos(count, like, shape.fp32_out, shape.has_bias)
    if count <= _SHORT_ROWS:
        cublas_algos = cublas_algos[:_MAX_SHORT_ALGOS]
    return [GemmAlgo("cublas", variant=i) for i in range(len(cublas_algos))]


def _other_candidates(like: Tensor, count: int, agreeing: Sequence[int]) -> list[GemmAlgo]:
    """PyTorch's GEMM with padding, and our kernels. `agreeing` are larger row counts at which PyTorch's GEMM agrees."""
    paddings = sorted(agreeing)[:_CANDIDATE_PADDINGS]
    padded = [GemmAlgo("torch", rows) for rows in paddings]
    if not like.is_cuda:
        padded += [GemmAlgo("torch", rows) for rows in (4, 8, _next_multiple(count, 16)) if rows > count]
    return padded + _tilings(like, count)


def _tilings(weight: Tensor, count: int) -> list[GemmAlgo]:
    """The fixed-order algorithms whose tiling suits a number of rows and the depth of a weight."""
    if not weight.is_cuda:
        return [GemmAlgo("fixed")]
    from rollgraph.model.kernels.matmul import TILINGS

    suited = [i for i, tiling in enumerate(TILINGS) if tiling.rows == _tile_rows(count)]
    shallow = [i for i in suited if _MIN_TILES * TILINGS[i].depth <= weight.shape[1]]
    return [GemmAlgo("fixed", variant=i) for i in shallow or suited]


def _tile_rows(count: int) -> int:
    """The tile height for a number of rows: 16, 64, or 128 if there are many."""
    if count > 4 * _FEW_ROWS:
        return 128
    return 16 if count <= 16 else _FEW_ROWS  # tiles of 32 rows are slower than half-empty ones of 64


def _next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor


def _fastest(
    candidates: Sequence[GemmAlgo], run: Callable[[GemmAlgo], Tensor], device: torch.device, under_load: bool
) -> GemmAlgo:
    """On CUDA, the fastest candidate, counting what PDL saves our own kernels ("fixed"); elsewhere the first.

    With `under_load`, candidates are timed under sustained load, where the device lowers its clock.
    """
    if len(candidates) == 1 or device.type != "cuda":
        return candidates[0]
    calls = [partial(run, algo) for algo in candidates]
    times = sustained_times(calls) if under_load else [device_time(call) for call in calls]
    costs = [
        milliseconds - _PDL_SAVING_MS * (algo.kind == "fixed")
        for algo, milliseconds in zip(candidates, times, strict=True)
    ]
    return candidates[costs.index(min(costs))]
