"""Time forward + backward of token log-probabilities: `python benchmarks/logprobs.py` on a machine with a CUDA device.

S sequences of 512 tokens run through a model in the shape of Qwen2.5-1.5B in bf16, with the whole microbatch as one
graph. As in training, gradients accumulate in fp32 and GEMMs are autotuned. The same run times transformers (eager)
and, if it is installed, megatron-core with its local graphs. It computes two floors: 6 FLOPs per parameter and token,
and the same with attention, whose share grows with `--length`.
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
from rollgraph.model.gemm.autotune import autotune_gemms
from rollgraph.policy.train_graphs import add_gradients


def inputs_of(sequences: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and sequence boundaries."""
    tokens = sequences * length
    ids = torch.randint(0, QWEN_1_5B.vocabulary, (tokens,), device="cuda")
    positions = torch.arange(length, device="cuda").repeat(sequences)
    return ids, positions, torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")


def ours(
    model: Decoder, buffers: dict[Tensor, Tensor], sequences: int, length: int, backend: Any
) -> Callable[[], object]:
    tokens = sequences * length
    autotune_gemms(model, [tokens], [tokens], grad_row_counts=[tokens])
    weights = torch.full((tokens,), -1.0 / tokens, device="cuda")

    def step(ids: Tensor, positions: Tensor, cu_seqlens: Tensor, weights: Tensor) -> Tensor:
        hidden = model(ids, positions, cu_seqlens, length)
        # One chunk keeps the logits, as training does if memory allows.
        logprobs = token_logprobs(hidden, model.head_weight, ids.roll(-1), chunk=tokens, algos=model.head_algos)
        loss = (logprobs * weights).sum()
        add_gradients(loss, buffers)
        return loss

    inputs = (*inputs_of(sequences, length), weights)
    graph = capture(step, inputs, pool=GraphPool(), backend=backend)
    return lambda: graph(*inputs)


def scoring(model: Decoder, sequences: int, length: int) -> Callable[[], object]:
    @torch.no_grad()
    def score(ids: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Any:
        return token_logprobs(model(ids, positions, cu_seqlens, length), model.head_weight, ids.roll(-1))

    inputs = inputs_of(sequences, length)
    graph = capture(score, inputs, pool=GraphPool(), backend="cuda")
    return lambda: graph(*inputs)


def transformers_eager(sequences: int, length: int) -> Callable[[], object]:
    from generate import make_transformers

    model = make_transformers().train()
    ids = torch.randint(0, QWEN_1_5B.vocabulary, (sequences, length), device="cuda")

    def step() -> None:
        logits = model(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1).flatten())
        loss.backward()

    return step


def megatron_local_graphs(sequences: int, length: int) -> Callable[[], object] | None:
    try:
        from megatron_peer import make_step
    except ImportError as error:
        print(f"megatron-core is not timed: {error}")
        return None
    return make_step(QWEN_1_5B, sequences, length)


def floor_ms(parameters: int, sequences: int, length: int, attention: bool) -> float:
    """Forward is a third of it. Attention computes half of all token pairs; its backward takes 2.5 times as much."""
    a = QWEN_1_5B
    operations = 6.0 * parameters * sequences * length
    if attention:
        operations += 3.5 * 2 * a.layers * a.heads * a.head_dim * sequences * length**2
    return 1e3 * operations / FLOPS_PER_SECOND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
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
                run = ours(model, buffers, sequences, options.length, backend)
                found.append((name, sequences, device_time(run, 10)))
                if options.profile and backend == "cuda" and sequences == options.sequences[-1]:
                    profile(run)
                del run
                gc.collect()
        found.append(("rollgraph, forward only", sequences, device_time(scoring(model, sequences, options.length), 10)))
    del model, buffers
    gc.collect()
    torch.cuda.empty_cache()
    for sequences in options.sequences if not options.alone else ():
        run = transformers_eager(sequences, options.length)
        found.append(("transformers, eager", sequences, device_time(run, 5)))
        del run
        gc.collect()
        torch.cuda.empty_cache()
    if not options.alone and (step := megatron_local_graphs(1, options.length)) is not None:
        found.append(("megatron-core, cuda_graph_impl=local", 1, device_time(step, 10)))
    rows: list[tuple[Any, ...]] = []
    for sequences in options.sequences:
        floor = floor_ms(parameters, sequences, options.length, attention=False)
        whole = floor_ms(parameters, sequences, options.length, attention=True)
        own = [(name, ms) for name, s, ms in found if s == sequences]
        rows += [(name, sequences, ms, ms / (floor / 3 if "forward only" in name else floor)) for name, ms in own]
        rows.append(("floor", sequences, floor, 1.0))
        rows.append(("floor, with attention", sequences, whole, whole / floor))
    table(f"forward + backward, S sequences of {options.length}", ("", "S", "ms", "x floor"), rows)


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
