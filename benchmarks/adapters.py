"""Measure the cost of adapters in the shape of Qwen2.5-1.5B: `python benchmarks/adapters.py` on a CUDA device.

Weights are random, in bf16; adapters have rank 32, in all linear layers, with nonzero B. One run times a decode step
with and without adapters at several row counts, and forward + backward of a microbatch with full training and with
adapters. It also counts for how many sampled tokens generation, scoring and training compute the same log-probability
bit for bit. `--profile` shows where the time of a decode step goes. `--tiny` runs it anywhere.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import QWEN_1_5B, synchronize, table

from rollgraph.inference import Engine, SamplingParams
from rollgraph.model import Architecture, Decoder, token_logprobs
from rollgraph.model.lora import AdapterSpec, attach
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.types import Batch, Sample

TINY = Architecture("qwen2", vocabulary=300, hidden=64, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=16)


def make_model(architecture: Architecture, device: str, spec: AdapterSpec | None) -> Decoder:
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(architecture)
        model.reset_parameters(std=0.04)
        model = model.to(torch.float32 if device == "cpu" else torch.bfloat16)
    if spec is not None:
        attach(model, spec, seed=0)
        assert model.adapters is not None
        for _, _, b in model.adapters.projections():
            b.normal_(std=0.05)
    return model


# -- decode ------------------------------------------------------------------------------------------------------------


def make_engine(model: Decoder, options: argparse.Namespace) -> Engine:
    length = options.prompt + options.new
    cache = options.cache_mib << 20
    return Engine(model, rows=max(options.rows), max_length=length, cache_bytes=cache, filters=False)


def start(engine: Engine, rows: int, options: argparse.Namespace) -> list[Any]:
    generator = torch.Generator().manual_seed(rows)
    vocabulary = engine.model.architecture.vocabulary
    prompts = torch.randint(vocabulary, (rows, options.prompt), generator=generator).tolist()
    outputs = [engine.submit(prompt, SamplingParams(max_tokens=options.new)) for prompt in prompts]
    while not outputs[-1].completions[0].tokens:  # until all rows decode
        engine.step()
    synchronize()
    return outputs


def time_decode(engine: Engine, rows: int, options: argparse.Namespace) -> float:
    """Return the milliseconds of a decode step while all rows run."""
    outputs = start(engine, rows, options)
    last = outputs[-1].completions[0].tokens
    begin, known = time.perf_counter(), len(last)
    while len(outputs[0].completions[0].tokens) < options.new:
        engine.step()
    synchronize()
    taken = (time.perf_counter() - begin) / (len(last) - known)
    while engine.step():
        pass
    return taken * 1e3


def compare_decode(options: argparse.Namespace, device: str) -> None:
    """Alternate between the two engines and take the best time of each."""
    plain, adapted = (make_engine(make_model(options.shape, device, spec), options) for spec in (None, options.spec))
    found = []
    for rows in options.rows:
        times: dict[Engine, list[float]] = {plain: [], adapted: []}
        for _ in range(options.repeats):
            for engine, own in times.items():
                own.append(time_decode(engine, rows, options))
        without, with_adapters = min(times[plain]), min(times[adapted])
        found.append((rows, without, with_adapters, f"{with_adapters / without:.3f}"))
    table("a decode step, ms", ("rows", "without", "with adapters", "ratio"), found)
    if options.profile:
        for rows in options.rows:
            for name, engine in (("without adapters", plain), ("with adapters", adapted)):
                profile(engine, rows, name, options)


def profile(engine: Engine, rows: int, name: str, options: argparse.Namespace) -> None:
    start(engine, rows, options)
    show_kernels(f"a decode step with {rows} rows, {name}", engine.step, 16)
    engine.reset()


def show_kernels(title: str, step: Callable[[], object], steps: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    lines = [(event.key[:90], event.count // steps, event.self_device_time_total / steps) for event in events[:24]]
    lines.append(("all", "", sum(event.self_device_time_total for event in events) / steps))
    table(title, ("kernel", "launches", "µs"), lines)


# -- training ----------------------------------------------------------------------------------------------------------


def time_training(options: argparse.Namespace, device: str) -> None:
    tokens = options.sequences * options.length
    ids = torch.randint(options.shape.vocabulary, (tokens,), device=device)
    positions = torch.arange(options.length, device=device).repeat(options.sequences)
    cuts = torch.arange(0, tokens + 1, options.length, dtype=torch.int32, device=device)
    found = []
    for name, spec in (("full", None), ("adapters", options.spec)):
        model = make_model(options.shape, device, spec)
        parameters = list(model.parameters())

        def step(model: Decoder = model, parameters: list[Any] = parameters) -> None:
            hidden = model(ids, positions, cuts, options.length)
            logprobs = token_logprobs(hidden, model.head_weight, ids)
            assert isinstance(logprobs, torch.Tensor)
            torch.autograd.grad(logprobs.sum(), parameters)

        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step = graphed(step)
        taken = median_ms(step)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        count = sum(parameter.numel() for parameter in parameters) / 1e6
        found.append((name, count, taken, peak))
        if options.profile and device == "cuda":
            show_kernels(f"forward and backward, {name}", step, 4)
        del model, parameters, step
    title = f"forward and backward of {options.sequences} x {options.length} tokens"
    table(title, ("training", "parameters, M", "ms", "peak, GiB"), found)
    print(f"  adapters / full: {found[1][2] / found[0][2]:.3f}")


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """Capture the step as one CUDA graph, as a run does."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def median_ms(run: Callable[[], None], repeats: int = 10) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


# -- agreement ---------------------------------------------------------------------------------------------------------


def check_agreement(options: argparse.Namespace, device: str) -> None:
    rows = max(options.rows)
    limits = Limits(
        max_length=options.prompt + options.new,
        rows=rows,
        token_buckets=(options.sequences * options.length,),
        cache_bytes=options.cache_mib << 20,
        prefill_tokens=options.prefill,
    )
    sampling = SamplingParams(max_tokens=options.new)
    worker = PolicyWorker(
        make_model(options.shape, device, options.spec), None, World(0, 1, device), limits, sampling=sampling,
        optimizer={"lr": 1e-4}, exact="must",
    )  # fmt: skip
    worker.adapted.name_base("reference")
    worker.capture_all({"policy": (load_algorithm("grpo").loss, False)})
    generator = torch.Generator().manual_seed(0)
    asked = []
    for key in range(2 * rows):  # more requests than rows, of mixed lengths, so that the row count keeps changing
        length = 1 + int(torch.randint(options.prompt, (), generator=generator))
        asked.append((torch.randint(options.shape.vocabulary, (length,), generator=generator).tolist(), key))
    found = []
    for name in ("before an update", "after an update"):
        samples = []
        for (prompt, key), turn in zip(asked, worker.generate(asked, seed=name), strict=True):
            count = len(turn.tokens)
            advantages = [1.0 if key % 2 else -1.0] * count
            samples.append(Sample(prompt, turn.tokens, advantages, [1 / count] * count, turn.logprobs))
        scored = worker.logprobs(samples)
        pairs = [
            pair for sample, own in zip(samples, scored, strict=True) for pair in zip(sample.logprobs, own, strict=True)
        ]
        equal = sum(one == other for one, other in pairs)
        reference = worker.logprobs(samples, "reference")
        same_as_base = sum(sample.logprobs == own for sample, own in zip(samples, reference, strict=True))
        for sample, own in zip(samples, reference, strict=True):
            sample.reference_logprobs = own
        metrics = worker.train(Batch([samples]))
        worst = metrics["policy/token_mult_prob_error_max"]
        found.append((name, len(pairs), f"{100 * equal / len(pairs):.3f}%", worst, same_as_base))
    worker.close()
    header = ("", "tokens", "scored equal", "largest exp |difference| in training", "samples equal to the base's")
    table("agreement of generation, scoring and training", header, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--parts", nargs="+", default=["decode", "training", "agreement"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    sizes = {"prompt": 128, "new": 64, "sequences": 16, "length": 512, "prefill": 2048, "cache_mib": 8192, "repeats": 5}
    options.shape = QWEN_1_5B
    if options.tiny:
        options.shape = TINY
        options.rows = [1, 4]
        sizes = {"prompt": 24, "new": 40, "sequences": 4, "length": 64, "prefill": 64, "cache_mib": 8, "repeats": 2}
    vars(options).update(sizes)
    options.spec = AdapterSpec(rank=options.rank, alpha=float(options.rank))
    device = "cpu" if options.tiny or not torch.cuda.is_available() else "cuda"
    if not options.tiny and device == "cpu":
        raise SystemExit("benchmarks/adapters.py needs a CUDA device, or --tiny")
    where = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    print(f"{where}, torch {torch.__version__}, rank {options.rank}")
    parts = {"agreement": check_agreement, "decode": compare_decode, "training": time_training}
    for part, run in parts.items():
        if part in options.parts:
            run(options, device)
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
