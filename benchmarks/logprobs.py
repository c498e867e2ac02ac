"""Time forward + backward of token log-probabilities: `python benchmarks/logprobs.py` on a machine with a CUDA device.

S sequences of 512 tokens run through a model in the shape of Qwen2.5-1.5B in bf16, with the whole microbatch as one
graph. Gradients are added to those of earlier microbatches in fp32, as in training. The same run times transformers
(eager) and, if it is installed, megatron-core with its local graphs, and computes the floor: 6 operations per parameter
and token.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
from common import FLOPS_PER_SECOND, QWEN_1_5B, device_time, random_decoder, table
from torch import Tensor

from rollgraph.graph import GraphPool, capture
from rollgraph.model import Decoder, token_logprobs
from rollgraph.sharding import add_gradients

LENGTH = 512


def ours(model: Decoder, buffers: dict[Tensor, Tensor], sequences: int, backend: Any) -> Callable[[], object]:
    tokens = sequences * LENGTH
    ids = torch.randint(0, QWEN_1_5B.vocabulary, (tokens,), device="cuda")
    positions = torch.arange(LENGTH, device="cuda").repeat(sequences)
    cu_seqlens = torch.arange(0, tokens + 1, LENGTH, dtype=torch.int32, device="cuda")
    weights = torch.full((tokens,), -1.0 / tokens, device="cuda")

    def step(ids: Tensor, positions: Tensor, cu_seqlens: Tensor, weights: Tensor) -> Tensor:
        hidden = model(ids, positions, cu_seqlens, LENGTH)
        # One chunk keeps the logits, as training does if memory allows.
        logprobs = token_logprobs(hidden, model.head_weight, ids.roll(-1), chunk=tokens)
        loss = (logprobs * weights).sum()
        add_gradients(loss, buffers)
        return loss

    inputs = (ids, positions, cu_seqlens, weights)
    graph = capture(step, inputs, pool=GraphPool(), backend=backend)
    return lambda: graph(*inputs)


def scoring(model: Decoder, sequences: int) -> Callable[[], object]:
    tokens = sequences * LENGTH
    ids = torch.randint(0, QWEN_1_5B.vocabulary, (tokens,), device="cuda")
    positions = torch.arange(LENGTH, device="cuda").repeat(sequences)
    cu_seqlens = torch.arange(0, tokens + 1, LENGTH, dtype=torch.int32, device="cuda")

    @torch.no_grad()
    def score(ids: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Any:
        return token_logprobs(model(ids, positions, cu_seqlens, LENGTH), model.head_weight, ids.roll(-1))

    graph = capture(score, (ids, positions, cu_seqlens), pool=GraphPool(), backend="cuda")
    return lambda: graph(ids, positions, cu_seqlens)


def transformers_eager(sequences: int) -> Callable[[], object]:
    from generate import make_transformers

    model = make_transformers().train()
    ids = torch.randint(0, QWEN_1_5B.vocabulary, (sequences, LENGTH), device="cuda")

    def step() -> None:
        logits = model(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1).flatten())
        loss.backward()

    return step


def megatron_local_graphs(sequences: int) -> Callable[[], object] | None:
    try:
        from megatron_peer import make_step
    except ImportError as error:
        print(f"megatron-core is not timed: {error}")
        return None
    return make_step(QWEN_1_5B, sequences, LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--alone", action="store_true", help="time only rollgraph with graphs")
    parser.add_argument("--profile", action="store_true", help="show where the time goes at the last size")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/logprobs.py needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    model = random_decoder()
    parameters = sum(p.numel() for p in model.parameters())
    buffers: dict[Tensor, Tensor] = {p: torch.zeros(p.shape, device="cuda") for p in model.parameters()}
    found: list[tuple[str, int, float]] = []
    for sequences in options.sequences:
        for name, backend in (("rollgraph", "cuda"), ("rollgraph, eager backend", "eager")):
            if name == "rollgraph" or not options.alone:
                run = ours(model, buffers, sequences, backend)
                found.append((name, sequences, device_time(run, 10)))
                if options.profile and backend == "cuda" and sequences == options.sequences[-1]:
                    profile(run)
                del run
                gc.collect()
        found.append(("rollgraph, forward only", sequences, device_time(scoring(model, sequences), 10)))
    del model, buffers
    gc.collect()
    torch.cuda.empty_cache()
    for sequences in options.sequences if not options.alone else ():
        found.append(("transformers, eager", sequences, device_time(transformers_eager(sequences), 5)))
        gc.collect()
        torch.cuda.empty_cache()
    if not options.alone and (step := megatron_local_graphs(1)) is not None:
        found.append(("megatron-core, cuda_graph_impl=local", 1, device_time(step, 10)))
    rows: list[tuple[Any, ...]] = []
    for sequences in options.sequences:
        floor = 6e3 * parameters * sequences * LENGTH / FLOPS_PER_SECOND
        own = [(name, ms) for name, s, ms in found if s == sequences]
        rows += [(name, sequences, ms, ms / (floor / 3 if "forward only" in name else floor)) for name, ms in own]
        rows.append(("floor", sequences, floor, 1.0))
    table(f"forward + backward, S sequences of {LENGTH}", ("", "S", "ms", "x floor"), rows)


def profile(run: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    rows = [(e.key[:90], e.count // 3, e.self_device_time_total / 3e3) for e in events[:16]]
    table("where the time goes", ("kernel", "launches", "ms"), rows)


if __name__ == "__main__":
    main()
