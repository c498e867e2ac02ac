"""Check that generation and training agree, and measure the cost: `python benchmarks/exactness.py` on a CUDA device.

For each model shape, with random weights in bf16, requests of mixed lengths start and end at different times, some
share a prompt, and long prompts are prefilled in chunks. The log-probability of every sampled token is compared bit for
bit with the one that scoring computes, before and after updates. Then a decode step is timed with autotuned GEMMs
(`exact: auto`) and with the library's default GEMMs (`exact: off`). `--tiny` runs it anywhere.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from typing import Any

import torch
from common import QWEN_1_5B, synchronize, table

from rollgraph.inference import Engine, SamplingParams
from rollgraph.model import Architecture, Decoder, Rope
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.types import Batch, Sample

TINY = Architecture("llama", vocabulary=300, hidden=64, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=16)
LLAMA_1B = Architecture(
    "llama", vocabulary=128_256, hidden=2048, mlp=8192, layers=16, heads=32, kv_heads=8, head_dim=64,
    rope=Rope(theta=500_000.0), max_length=131_072, tied=True,
)  # fmt: skip
SHAPES = {
    "Qwen2.5-1.5B": QWEN_1_5B,
    "Qwen2.5-0.5B": replace(QWEN_1_5B, hidden=896, mlp=4864, layers=24, heads=14, head_dim=64),
    "Llama-3.2-1B": LLAMA_1B,
    "Qwen3-0.6B": replace(
        QWEN_1_5B, family="qwen3", hidden=1024, mlp=3072, heads=16, kv_heads=8, head_dim=128
    ),
    "Mistral-7B, window 1024": replace(
        LLAMA_1B, family="mistral", vocabulary=32_000, hidden=4096, mlp=14_336, layers=32, head_dim=128, tied=False,
        windows=(1024,) * 32,
    ),
    "Qwen2.5-7B": replace(
        QWEN_1_5B, vocabulary=152_064, hidden=3584, mlp=18_944, heads=28, kv_heads=4, tied=False
    ),
}  # fmt: skip


def decoder(architecture: Architecture, device: str) -> Decoder:
    """Create a model whose random weights are large enough to prefer some tokens."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(architecture)
        model.reset_parameters(std=0.04)
        return model.to(torch.float32 if device == "cpu" else torch.bfloat16)


def make_worker(architecture: Architecture, options: argparse.Namespace, device: str) -> PolicyWorker:
    worker = PolicyWorker(
        decoder(architecture, device), None, World(0, 1, device),
        Limits(
            max_length=options.context,
            rows=options.rows,
            token_buckets=(max(options.context, options.bucket),),
            cache_bytes=options.cache_mib << 20,
            prefill_tokens=options.prefill,
        ),
        sampling=SamplingParams(max_tokens=options.new, temperature=options.temperature),
        optimizer={"lr": 1e-5},
        exact="must",
    )  # fmt: skip
    worker.capture_all({"policy": (load_algorithm("grpo").loss, False)})
    return worker


def requests(vocabulary: int, options: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Create prompts of all lengths that leave room for new tokens. Every fourth prompt has four samples."""
    generator = torch.Generator().manual_seed(0)
    found: list[tuple[list[int], int]] = []
    while len(found) < options.requests:
        most = options.context - options.new
        share = torch.rand((), generator=generator).item() ** 3  # more short prompts than long ones
        length = most if not found else 1 + int((most - 1) * share)
        prompt = torch.randint(vocabulary, (length,), generator=generator).tolist()
        found += [(prompt, len(found) + copy) for copy in range(4 if len(found) % 4 == 0 else 1)]
    return found


def compare(
    worker: PolicyWorker, asked: list[tuple[list[int], int]], seed: str
) -> tuple[int, int, float, list[Sample]]:
    """Return how many tokens were sampled, how many are equal, the largest difference, and the samples."""
    samples = []
    for (prompt, key), turn in zip(asked, worker.generate(asked, seed=seed), strict=True):
        count = len(turn.tokens)
        advantage = 1.0 if key % 2 else -1.0
        samples.append(Sample(prompt, turn.tokens, [advantage] * count, [1 / count] * count, turn.logprobs))
    equal = tokens = 0
    largest = 0.0
    for sample, scored in zip(samples, worker.logprobs(samples), strict=True):
        for one, other in zip(sample.logprobs, scored, strict=True):
            tokens += 1
            equal += one == other
            largest = max(largest, abs(one - other))
    return tokens, equal, largest, samples


def check(name: str, architecture: Architecture, options: argparse.Namespace, device: str) -> tuple[Any, ...]:
    worker = make_worker(architecture, options, device)
    assert worker.gemm_report is not None
    asked = requests(architecture.vocabulary, options)
    tokens, equal, largest, samples = compare(worker, asked, "before")
    worst = 1.0
    for _ in range(options.updates):
        worst = max(worst, worker.train(Batch([samples]))["policy/token_mult_prob_error_max"])
        for sample, scored in zip(samples, worker.logprobs(samples), strict=True):
            sample.logprobs = scored
    after = compare(worker, asked, "after")
    seconds = worker.gemm_report.seconds
    for line in worker.gemm_report.lines():
        print(f"  {name}: {line}")
    worker.close()
    return (
        name, tokens + after[0], f"{100 * (equal + after[1]) / (tokens + after[0]):.3f}%", max(largest, after[2]),
        worst, seconds,
    )  # fmt: skip


def time_decode(architecture: Architecture, rows: int, exact: bool, device: str) -> float:
    """Return the milliseconds of a decode step, with prompts of 128 tokens."""
    model = decoder(architecture, device)
    engine = Engine(model, rows=rows, max_length=256, cache_bytes=8 << 30, filters=False, exact=exact)
    prompts = torch.randint(architecture.vocabulary, (rows, 128), generator=torch.Generator().manual_seed(0)).tolist()
    best = float("inf")
    for _ in range(3):
        outputs = [engine.submit(prompt, SamplingParams(max_tokens=64)) for prompt in prompts]
        last = outputs[-1].completions[0].tokens
        while not last:
            engine.step()
        synchronize()
        start, known = time.perf_counter(), len(last)
        while len(outputs[0].completions[0].tokens) < 64:
            engine.step()
        synchronize()
        best = min(best, (time.perf_counter() - start) / (len(last) - known) * 1e3)
        while engine.step():
            pass
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES)[:4], help="model shapes")
    parser.add_argument(
        "--layers", type=int, help="use only this many layers: a 7B model does not fit with its optimizer"
    )
    parser.add_argument("--rows", type=int, default=512, help="sequences that decode at the same time")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--context", type=int, default=1024, help="longest prompt with its completion, in tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens to sample for each request")
    parser.add_argument("--bucket", type=int, default=16384, help="tokens of a microbatch")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of a prefill step")
    parser.add_argument("--cache-mib", type=int, default=16 << 10, help="a small cache forces preemption")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--updates", type=int, default=2, help="updates before the second comparison")
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 64, 512], help="row counts to time")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    options = parser.parse_args()
    device = "cuda:0"
    shapes = {name: SHAPES[name] for name in options.shapes}
    if options.tiny:
        device, shapes = "cpu", {"tiny": TINY}
        options.rows, options.requests, options.context, options.new, options.bucket = 8, 20, 96, 16, 512
        options.prefill, options.cache_mib, options.decode = 64, 16, []
    elif not torch.cuda.is_available():
        raise SystemExit("benchmarks/exactness.py needs a CUDA device; --tiny runs it on a CPU")
    rows = []
    for name, architecture in shapes.items():
        if options.layers is not None:
            kept = architecture.windows[: options.layers]
            architecture = replace(architecture, layers=options.layers, windows=kept)
        rows.append(check(name, architecture, options, device))
        gc.collect()
    header = ("", "tokens", "equal", "largest difference", "largest ratio in training", "autotuning, s")
    table(f"sampled against scored, temperature {options.temperature}", header, rows)
    if options.decode:
        timed = []
        for count in options.decode:
            plain = time_decode(QWEN_1_5B, count, False, device)
            gc.collect()
            exact = time_decode(QWEN_1_5B, count, True, device)
            gc.collect()
            timed.append((f"{count} rows", plain, exact, exact / plain))
        table("decode step of Qwen2.5-1.5B, ms", ("", "exact: off", "exact: auto", "ratio"), timed)


if __name__ == "__main__":
    main()
