"""Time generation in the shape of Qwen2.5-1.5B: `python benchmarks/generate.py` on a machine with a CUDA device.

Prompts have 128 tokens and get 64 new ones by plain temperature sampling; weights are random bf16. Decode steps are
timed while all rows run, and the whole run with its prefill is timed, too. The same run times `transformers` with a
static cache and compilation, and computes the floor: the larger of bytes over memory bandwidth and FLOPs over the
throughput of the matrix units. `--profile` shows where the time of a step goes.

`--vllm` compares with vLLM instead, with each system in separate processes: decode steps, rollouts of 32 x 16 samples
in the shapes of Qwen2.5-1.5B and 7B, and long rollouts. `--only` chooses some of these; `rollouts.py` defines them.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import rollouts
import torch
from apart import seconds_of_process
from common import (
    BYTES_PER_SECOND,
    FLOPS_PER_SECOND,
    QWEN_1_5B,
    random_decoder,
    synchronize,
    table,
    transformers_config,
)
from rollout_tables import compare_with_vllm

from rollgraph.inference import Engine, SamplingParams

PROMPT, NEW = 128, 64


def floor_ms(batch: int, parameters: int) -> float:
    """Read the weights once, and keys and values of the average length once; 2 FLOPs per parameter and row."""
    a = QWEN_1_5B
    cache = batch * (PROMPT + NEW / 2) * a.layers * 2 * a.kv_heads * a.head_dim * 2
    return 1e3 * max((2 * parameters + cache) / BYTES_PER_SECOND, 2 * parameters * batch / FLOPS_PER_SECOND)


def prompts_of(batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, QWEN_1_5B.vocabulary, (batch, PROMPT), generator=generator).tolist()


def time_ours(engine: Engine, batch: int) -> tuple[float, float]:
    """Return the milliseconds of a decode step with all rows running, and of the whole run."""
    params = SamplingParams(max_tokens=NEW)

    def run() -> tuple[float, float]:
        outputs = [engine.submit(prompt, params) for prompt in prompts_of(batch)]
        last = outputs[-1].completions[0].tokens
        synchronize()
        start = time.perf_counter()
        while not last:  # until all rows decode
            engine.step()
        begin, known = time.perf_counter(), len(last)
        while len(outputs[0].completions[0].tokens) < NEW:  # until one row is done
            engine.step()
        step = (time.perf_counter() - begin) / (len(last) - known)
        while engine.step():
            pass
        return step * 1e3, (time.perf_counter() - start) * 1e3

    steps, wholes = zip(*(run() for _ in range(3)), strict=True)
    return min(steps), min(wholes)


def time_transformers(model: Any, batch: int) -> tuple[float, float]:
    ids = torch.tensor(prompts_of(batch), device="cuda")

    def run(new: int) -> float:
        synchronize()
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            cache_implementation="static",
            pad_token_id=0,
        )
        synchronize()
        return (time.perf_counter() - start) * 1e3

    run(NEW)  # the first run compiles
    run(NEW)
    whole = min(run(NEW) for _ in range(3))
    first = min(run(1) for _ in range(2))
    return (whole - first) / (NEW - 1), whole


def make_transformers() -> Any:
    from transformers import Qwen2ForCausalLM

    with torch.device("cuda"):
        return Qwen2ForCausalLM(transformers_config(QWEN_1_5B)).to(torch.bfloat16).eval()


def profile(engine: Engine, batch: int) -> None:
    """Print the kernels of a decode step by device time."""
    outputs = [engine.submit(prompt, SamplingParams(max_tokens=NEW)) for prompt in prompts_of(batch)]
    while len(outputs[-1].completions[0].tokens) < 4:
        engine.step()
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(16):
            engine.step()
        synchronize()
    engine.reset()
    events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    rows = [(e.key[:90], e.count // 16, e.self_device_time_total / 16) for e in events[:14]]
    table(f"where the time of a step with {batch} rows goes", ("kernel", "launches", "µs"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--alone", action="store_true", help="do not time transformers")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--vllm", action="store_true", help="compare with vLLM instead of transformers")
    parser.add_argument("--only", nargs="+", choices=rollouts.PARTS, default=rollouts.PARTS, help="parts of --vllm")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each part of --vllm; the fastest counts")
    parser.add_argument("--limit-s", type=float, default=400, help="time limit of one process of --vllm, in seconds")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/generate.py needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.vllm:
        compare_with_vllm(options.only, options.repeats, options.limit_s)
        return
    model = random_decoder()
    parameters = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    engine = Engine(model, rows=max(options.batches), max_length=PROMPT + NEW, cache_bytes=16 << 30, filters=False)
    synchronize()
    print(f"captured {len(engine.pool.graphs)} graphs in {time.perf_counter() - start:.1f} s")
    engine.generate(prompts_of(1), SamplingParams(max_tokens=NEW))
    print(f"start to first step: {seconds_of_process():.1f} s, with imports, captures and {NEW} tokens for one prompt")
    ours = {batch: time_ours(engine, batch) for batch in options.batches}
    if options.profile:
        for batch in options.batches:
            profile(engine, batch)
    theirs = {}
    if not options.alone:
        del engine
        torch.cuda.empty_cache()
        peer = make_transformers()
        theirs = {batch: time_transformers(peer, batch) for batch in options.batches}
    rows: list[tuple[Any, ...]] = []
    for batch in options.batches:
        floor = floor_ms(batch, parameters)
        step, whole = ours[batch]
        rows.append((f"rollgraph, batch {batch}", step, batch * 1e3 / step, step / floor, whole, whole / NEW))
        if theirs:
            step, whole = theirs[batch]
            rows.append((f"transformers, batch {batch}", step, batch * 1e3 / step, step / floor, whole, whole / NEW))
        rows.append((f"floor, batch {batch}", floor, batch * 1e3 / floor, 1.0, "-", "-"))
    header = ("", "decode, ms/step", "tokens/s", "x floor", "whole run, ms", "whole run / steps, ms")
    table(f"prompt {PROMPT}, {NEW} new tokens", header, rows)
    if theirs:
        rows = [
            (f"batch {b}", theirs[b][0] / ours[b][0], theirs[b][1] / NEW / ours[b][0], theirs[b][1] / ours[b][1])
            for b in options.batches
        ]
        header = ("", "decode step", "their whole run / steps / our decode step", "whole run")
        table("speedup over transformers", header, rows)


if __name__ == "__main__":
    main()
