"""Time norm, rotary heads and SwiGLU: `python benchmarks/pointwise.py` on a machine with a CUDA device.

It times our kernels, the same formulas under `torch.compile` and, if they are installed, Liger's kernels, for forward
and for forward + backward, in the shape of Qwen2.5-1.5B. The floor reads or writes every input, output and gradient
once. Rotary heads turn the qkv projection into queries, keys and values; values need no copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import BYTES_PER_SECOND, QWEN_1_5B, device_time, table
from torch import Tensor
from torch.nn import functional

from rollgraph.model.layers import add_norm, swiglu

EPS = 1e-6
Operation = Callable[..., Any]


def plain_add_norm(stream: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    stream = stream + update
    wide = stream.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(stream.dtype), stream


def split_heads(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run our kernel. It is imported late, because it needs Triton."""
    from rollgraph.model.kernels.heads import SplitHeads

    return SplitHeads.apply(qkv, cos, sin, None, None, EPS, QWEN_1_5B.heads, QWEN_1_5B.kv_heads)


def views(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each [tokens, heads, head_dim], as views of the projection."""
    a = QWEN_1_5B
    q, k, v = qkv.unflatten(1, (-1, a.head_dim)).split((a.heads, a.kv_heads, a.kv_heads), 1)
    return q, k, v


def plain_split_heads(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = views(qkv)
    return plain_rotate(q, cos, sin), plain_rotate(k, cos, sin), v


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def liger() -> dict[str, Operation]:
    """Adapt Liger's kernels to our arguments. Its rotary kernel takes heads first, and cosines as wide as a head."""
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction
    except ImportError as error:
        print(f"Liger is not timed: {error}")
        return {}

    def rotate_views(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = views(qkv)
        wide = [torch.cat((x, x), -1)[None] for x in (cos, sin)]
        q, k, *_ = LigerRopeFunction.apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *wide)
        return q, k, v

    return {
        "add + norm": lambda x, update, weight: LigerFusedAddRMSNormFunction.apply(update, x, weight, EPS),
        "rotary": rotate_views,
        "SwiGLU": LigerFusedGateUpSiLUMulFunction.apply,
    }


def measure(operation: Operation, inputs: Sequence[Tensor], backward: bool) -> float:
    """Return the milliseconds of forward, or of forward + backward, in a graph, so that host time does not count."""
    leaves = [x for x in inputs if x.requires_grad]

    def forward() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(backward):
            found = operation(*inputs)
        return found if isinstance(found, tuple) else (found,)

    gradients = [torch.randn_like(output) for output in forward()]

    def run() -> None:
        outputs = forward()
        if backward:
            torch.autograd.grad(outputs, leaves, gradients)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return device_time(graph.replay)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/pointwise.py needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    a, tokens = QWEN_1_5B, options.tokens

    def values(*shape: int, grad: bool = True) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

    angles = [torch.rand(tokens, a.head_dim // 2, device="cuda") for _ in range(2)]
    hidden = tokens * a.hidden * 2
    rotated = tokens * (a.heads + a.kv_heads) * a.head_dim * 2
    width = (a.heads + 2 * a.kv_heads) * a.head_dim
    # The inputs of each case, and the bytes that forward and backward move.
    cases: dict[str, tuple[list[Tensor], int, int]] = {
        "add + norm": ([values(tokens, a.hidden), values(tokens, a.hidden), values(a.hidden)], 4 * hidden, 4 * hidden),
        "rotary": ([values(tokens, width), *angles], 2 * rotated, 2 * tokens * width * 2),
        "SwiGLU": ([values(tokens, 2 * a.mlp)], 3 * tokens * a.mlp * 2, 5 * tokens * a.mlp * 2),
    }
    ways: dict[str, dict[str, Operation]] = {
        "rollgraph": {
            "add + norm": lambda x, update, weight: add_norm(x, update, weight, EPS),
            "rotary": split_heads,
            "SwiGLU": swiglu,
        },
        "torch.compile": {
            "add + norm": torch.compile(plain_add_norm),
            "rotary": torch.compile(plain_split_heads),
            "SwiGLU": torch.compile(plain_swiglu),
        },
        "Liger": liger(),
    }
    rows: list[tuple[Any, ...]] = []
    for case, (inputs, forward, backward) in cases.items():
        for way, operations in ways.items():
            if case in operations:
                times = []
                for both in (False, True):
                    fresh = [
                        x.detach().clone().requires_grad_(x.requires_grad) for x in inputs
                    ]  # Liger writes in place
                    times.append(1e3 * measure(operations[case], fresh, both))
                rows.append((f"{case}, {way}", *times))
        floor = [1e6 * moved / BYTES_PER_SECOND for moved in (forward, forward + backward)]
        rows.append((f"{case}, floor", *floor))
    table(f"{tokens} tokens, µs", ("", "forward", "forward + backward"), rows)


if __name__ == "__main__":
    main()
