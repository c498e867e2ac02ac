"""Measure what a replay costs: `make bench`, or `python benchmarks/graph_overhead.py` on a machine with a CUDA device.

1. Host time of a replay with all checks on, compared with torch.cuda.make_graphed_callables, for a layer of 12
   parameters.
2. Memory of a 28-layer chain in one pool, compared with the same peer.
3. Forward + backward of a decoder in the shape of Qwen2.5-1.5B at 512 tokens, on the eager and the cuda backend, per
   layer and as a whole.

Without a CUDA device, it times only the first part: the tape against eager.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import device_time, synchronize, table
from torch import Tensor, nn

from rollgraph.graph import GraphPool, capture, make_graphed_callables


class Layer(nn.Module):
    """A decoder layer with grouped-query attention, attention bias and SwiGLU: 12 parameters."""

    def __init__(self, hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, heads * head_dim)
        self.k, self.v = nn.Linear(hidden, kv_heads * head_dim), nn.Linear(hidden, kv_heads * head_dim)
        self.o = nn.Linear(heads * head_dim, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, mlp, bias=False), nn.Linear(hidden, mlp, bias=False)
        self.down = nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [sequences, tokens, hidden]
        batch, tokens, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            projection(h).view(batch, tokens, heads, self.head_dim).transpose(1, 2)
            for projection, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, tokens, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, mlp, heads, kv_heads, 128) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)  # tied
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def host_times(runs: list[Callable[[], object]], calls: int = 50, repeats: int = 60) -> list[float]:
    """Return the median host time of each call in µs. Batches alternate, and the device's queue drains in between."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, of in zip(runs, times, strict=True):
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            of.append((time.perf_counter() - start) / calls * 1e6)
    return [statistics.median(of[3:]) for of in times]


INFERENCE = "forward, no gradients"
ACCUMULATING = "forward + backward, accumulating"


def replays(graph: Callable[..., Any], device: str) -> dict[str, Callable[[], object]]:
    """Return replays of one small layer: inference, and training with gradients that are None or already exist."""
    torch.manual_seed(0)
    sample, batch = torch.randn(1, 16, 64, device=device), torch.randn(1, 16, 64, device=device)
    with torch.no_grad():
        frozen = graph(Layer(64, 128, 4, 2, 16).to(device).requires_grad_(False), (sample,))
    layer = Layer(64, 128, 4, 2, 16).to(device)
    graphed = graph(layer, (sample.clone().requires_grad_(),))
    x, gradient = torch.randn_like(sample, requires_grad=True), torch.randn_like(sample)
    parameters = [x, *layer.parameters()]

    def both() -> None:
        graphed(x).backward(gradient)

    def fresh() -> None:
        for parameter in parameters:
            parameter.grad = None
        both()

    return {
        INFERENCE: lambda: frozen(batch),
        "forward, training": lambda: graphed(x),
        "forward + backward, gradients None": fresh,
        ACCUMULATING: both,
    }


def with_gradient_buffers(layer: nn.Module, samples: tuple[Tensor, ...]) -> Any:
    """Graph a layer that accumulates gradients inside its backward graph."""
    return make_graphed_callables(
        layer, samples, grad_buffers={p: torch.zeros_like(p) for p in layer.parameters() if p.requires_grad}
    )


def measure_replay(peer: Callable[..., Any], device: str) -> None:
    ours, theirs, buffered = (replays(graph, device) for graph in (make_graphed_callables, peer, with_gradient_buffers))
    rows = []
    for name, run in ours.items():
        with torch.set_grad_enabled(name != INFERENCE):
            mine, other = host_times([run, theirs[name]])
        rows.append((name, mine, other, mine / other))
    mine, other = host_times([buffered[ACCUMULATING], theirs[ACCUMULATING]])
    rows.append((f"{ACCUMULATING} into buffers", mine, other, mine / other))
    table("host time of a replay, µs", ("layer of 12 parameters", "rollgraph", "peer", "ratio"), rows)


def used_memory(build: Callable[[], object]) -> float:
    """Return the device memory, in MiB, that is still in use after building and running."""
    gc.collect()
    torch.cuda.empty_cache()
    synchronize()
    before = torch.cuda.mem_get_info()[0]
    kept = build()
    synchronize()
    torch.cuda.empty_cache()
    used = (before - torch.cuda.mem_get_info()[0]) / 2**20
    del kept
    return used


def chain_memory(graph: Callable[..., Any], layers: int, tokens: int, hidden: int, mlp: int) -> float:
    """Return the MiB of a chain of layers, each a graph in one pool, after two steps, with gradients of the second."""

    def build() -> object:
        stack = [Layer(hidden, mlp, hidden // 128, 2, 128).to("cuda", torch.bfloat16) for _ in range(layers)]
        samples = tuple(
            (torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True),) for _ in stack
        )
        graphed = graph(tuple(stack), samples)
        x = torch.randn_like(samples[0][0])
        for _ in range(2):
            for parameter in (p for layer in stack for p in layer.parameters()):
                parameter.grad = None
            out = x
            for layer in graphed:
                out = layer(out)
            out.sum().backward()
        return stack, graphed

    return used_memory(build)


def measure_chain_memory(layers: int = 28, tokens: int = 512) -> None:
    for graph in (torch.cuda.make_graphed_callables, make_graphed_callables):
        chain_memory(graph, 1, tokens, 1536, 8960)  # load kernels and workspaces before counting
    theirs = chain_memory(torch.cuda.make_graphed_callables, layers, tokens, 1536, 8960)
    ours = chain_memory(make_graphed_callables, layers, tokens, 1536, 8960)
    rows = [("weights, gradients, static inputs, graphs", ours, theirs, ours / theirs)]
    table(f"memory of a {layers}-layer chain, MiB", ("", "rollgraph", "torch.cuda", "ratio"), rows)


def measure_decoder(layers: int, tokens: int) -> None:
    torch.manual_seed(0)
    model = Decoder(layers, 1536, 8960, 12, 2, 151_936).to("cuda", torch.bfloat16)
    ids = torch.randint(0, 151_936, (1, tokens), device="cuda")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(ids: Tensor) -> Tensor:
        loss = model(ids)
        loss.backward()
        return loss

    rows = []
    for backend in ("eager", "cuda"):
        pool = GraphPool()
        whole = capture(step, (ids,), pool=pool, backend=backend)
        rows.append((f"whole step, {backend} backend", device_time(lambda w=whole: w(ids))))
        pool.reset()
    sample = torch.randn(1, tokens, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    buffers = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.layers.parameters()}
    for backend, given in (("eager", None), ("cuda", None), ("cuda", buffers)):
        pool = GraphPool()
        make_graphed_callables(
            tuple(model.layers), ((sample,),) * layers, pool=pool, backend=backend, grad_buffers=given
        )
        name = f"per layer, {backend} backend" + (", fp32 gradient buffers" if given else "")
        rows.append((name, device_time(lambda: step(ids))))
        pool.reset()
    floor = 6 * sum(p.numel() for p in model.parameters()) * tokens / 785e12 * 1e3
    rows = [(name, ms, ms / floor) for name, ms in rows]
    table(
        f"forward + backward, {layers} layers, {tokens} tokens", ("", "ms", "x floor"), [*rows, ("floor", floor, 1.0)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("replay", "memory", "decoder"), help="run one part")
    chosen = parser.parse_args().only
    if not torch.cuda.is_available():
        print(f"no CUDA device, so this compares the tape with eager; torch {torch.__version__}")
        measure_replay(lambda layer, _: layer, "cpu")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if chosen in (None, "replay"):
        measure_replay(torch.cuda.make_graphed_callables, "cuda")
    if chosen in (None, "memory"):
        measure_chain_memory()
    if chosen in (None, "decoder"):
        measure_decoder(28, 512)


if __name__ == "__main__":
    main()
