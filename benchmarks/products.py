"""Time the GEMMs of a decoder: `python benchmarks/products.py` on a machine with a CUDA device.

For each GEMM of a layer and for the head, at several row counts, it times PyTorch, the fastest cuBLAS algorithm and the
fastest of our kernels, the last two with the bits of the GEMM with many rows. `--gradients` adds the gradients of a
microbatch. GEMMs with many rows take turns in blocks of several milliseconds, because a device lowers its clock under
sustained load; those with few rows are timed in a graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from common import FLOPS_PER_SECOND, QWEN_1_5B, QWEN_7B, table
from torch import Tensor

from rollgraph.model import Architecture
from rollgraph.model.gemm.candidates import (
    GemmKind,
    GemmProblem,
    cublas_algos,
    device_time,
    run_if_it_fits,
    sustained_times,
)
from rollgraph.model.gemm.matmul import TORCH_GEMM, GemmAlgo, forward_cublas_algos, matmul_with_algo

BF16 = torch.bfloat16
FEW_ROWS = 1024  # up to this many, GEMMs are timed in a graph


def shapes_of(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Return the output and input size of each GEMM."""
    a = architecture
    return {
        "qkv": ((a.heads + 2 * a.kv_heads) * a.head_dim, a.hidden),
        "out": (a.hidden, a.heads * a.head_dim),
        "gate and up": (2 * a.mlp, a.hidden),
        "down": (a.hidden, a.mlp),
        "head": (a.vocabulary, a.hidden),
    }


def times_of(calls: list[Callable[[], Tensor]], rows: int) -> list[float]:
    """Return the microseconds of each call."""
    if rows > FEW_ROWS:
        return [1e3 * milliseconds for milliseconds in sustained_times(calls)]
    return [1e3 * min(device_time(call) for _ in range(3)) for call in calls]


def time_forward(columns: int, depth: int, rows: int, wide: bool) -> tuple[float, float, float]:
    """Return the times of the library, the best cuBLAS algorithm and our best kernel; infinity where there is none.

    An algorithm or a kernel counts only if its rows have the bits of the GEMM with many rows.
    """
    from rollgraph.model.kernels.matmul import TILINGS

    x = torch.randn(max(rows, FEW_ROWS), depth, device="cuda").to(BF16)
    weight = (torch.randn(columns, depth, device="cuda") * depth**-0.5).to(BF16)
    expected = matmul_with_algo(x, weight, None, TORCH_GEMM, len(x), wide)[:rows]
    x = x[:rows]
    offered = [
        GemmAlgo("cublas", variant=i) for i in range(len(forward_cublas_algos(rows, weight, wide, has_bias=False)))
    ]
    own = [GemmAlgo("fixed", variant=i) for i, tiling in enumerate(TILINGS) if rows <= 256 or tiling.rows == 128]
    ways: list[tuple[str, Callable[[], Tensor]]] = [
        ("library", partial(matmul_with_algo, x, weight, None, TORCH_GEMM, rows, wide))
    ]
    for kind, algos in (("offered", offered), ("own", own)):
        for algo in algos:
            call = partial(matmul_with_algo, x, weight, None, algo, rows, wide)
            found = run_if_it_fits(call)
            if found is not None and torch.equal(found, expected):
                ways.append((kind, call))
    best = {"library": float("inf"), "offered": float("inf"), "own": float("inf")}
    for (kind, _), taken in zip(ways, times_of([call for _, call in ways], rows), strict=True):
        best[kind] = min(best[kind], taken)
    return best["library"], best["offered"], best["own"]


def time_gradient(kind: GemmKind, columns: int, depth: int, rows: int) -> tuple[float, float]:
    """Return the times of the library and the best cuBLAS algorithm."""
    d_out = torch.randn((rows, columns), dtype=BF16, device="cuda")
    if kind == "input gradient":
        other = torch.randn((columns, depth), dtype=BF16, device="cuda")
        out = torch.empty((rows, depth), dtype=BF16, device="cuda")
        library = partial(torch.mm, d_out, other, out=out)
    else:
        other = torch.randn((rows, depth), dtype=BF16, device="cuda")
        out = torch.zeros((columns, depth), device="cuda")
        library = partial(torch.addmm, out, d_out.t(), other, out_dtype=torch.float32, out=out)
    found = cublas_algos(GemmProblem(kind, rows, columns, depth, BF16), out.device)
    calls = [library, *(partial(offer.run, d_out, other, out) for offer in found)]
    first, *others = sustained_times(calls)
    return 1e3 * first, 1e3 * min(others, default=float("inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("1.5b", "7b"), default="1.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512, 16_384])
    parser.add_argument("--gradients", action="store_true", help="also time gradients, at the last number of rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/products.py needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    shapes = shapes_of({"1.5b": QWEN_1_5B, "7b": QWEN_7B}[options.shape])
    found: list[tuple[object, ...]] = []
    with torch.no_grad():
        for name, (columns, depth) in shapes.items():
            for rows in options.rows:
                times = time_forward(columns, depth, rows, wide=name == "head")
                found.append((name, rows, *times, 2e6 * rows * columns * depth / FLOPS_PER_SECOND))
    header = ("", "rows", "PyTorch", "cuBLAS, best", "ours, best", "operations / 785 TFLOP/s")
    table("GEMMs with the same bits, µs", header, found)
    if options.gradients:
        found = []
        kinds: tuple[GemmKind, ...] = ("input gradient", "weight gradient")
        for name, (columns, depth) in shapes.items():
            for kind in kinds:
                rows = options.rows[-1]
                with torch.no_grad():
                    times = time_gradient(kind, columns, depth, rows)
                found.append((f"{name}, {kind}", *times, 2e6 * rows * columns * depth / FLOPS_PER_SECOND))
        header = ("", "PyTorch", "cuBLAS, best", "operations / 785 TFLOP/s")
        table(f"gradients, {options.rows[-1]} rows, µs", header, found)


if __name__ == "__main__":
    main()
