"""Measure the memory and time of a GRPO step, and compare them with the plan: `python benchmarks/memory.py --list`.

A step of 32 prompts x 16 samples, 128 + 384 tokens, KL to a reference, random bf16 weights in the shape of a Qwen2.5
model. Weights are created on the device; after that, plan and set-up are those of `rollgraph train`. Without arguments,
all six configurations run, each in a separate process:

    python benchmarks/memory.py                          all six; with --only NAME [NAME ...], some of them
    python benchmarks/memory.py --shape 7b --rank 32     one configuration of your own
    python benchmarks/memory.py --tiny                   a tiny model on a CPU, to test this benchmark

The plan chooses every setting that no argument names. `--plan` only prints the plans, on any machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from apart import report, run_apart
from common import synchronize, table

from rollgraph.config import Config, parse_config
from rollgraph.model import Decoder
from rollgraph.model.meta import shapes_only
from rollgraph.model.weights.hf import read_architecture
from rollgraph.parallel.ranks.world import World
from rollgraph.plan import chosen_memory
from rollgraph.plan.choose import MemoryBudget
from rollgraph.plan.memory import GIB, PHASES, format_bytes
from rollgraph.plan.report import Plan, make_plan
from rollgraph.rl.environment import SingleTurn
from rollgraph.run.setup import Run, make_run
from rollgraph.types import Prompt

SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False},
}  # fmt: skip
COMMON = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
LORA = ["--rank", "32"]
CONFIGURATIONS: dict[str, list[str]] = {
    "full 1.5b": ["--shape", "1.5b"],
    "full 7b": ["--shape", "7b"],
    "lora 1.5b": ["--shape", "1.5b", *LORA, "--limit-gib", "16"],
    "lora 7b": ["--shape", "7b", *LORA, "--limit-gib", "45"],
    "lora 32b": ["--shape", "32b", *LORA],
    "full 1.5b, int8, recomputed": ["--shape", "1.5b", "--state", "int8", "--checkpointing", "true"],
}
RUN = """
steps: 4
output: {folder}/run
model: {{path: {folder}}}
tokenizer: {{path: bytes}}
data: {{train: {folder}/prompts.jsonl, prompts_per_step: {prompts}, max_prompt_tokens: {prompt}}}
rollout: {{samples_per_prompt: {samples}, max_tokens: {new}, rows: {rows}}}
reward: {{functions: [{{name: length, options: {{target: 1}}}}]}}
algorithm: {{kl_coef: 0.01}}
log: {{sinks: [], progress: none}}
"""
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors


def make_config(folder: Path, options: argparse.Namespace) -> Config:
    """Write the files of a run, without weights, and return its configuration."""
    dtype = "float32" if options.tiny else "bfloat16"
    (folder / "config.json").write_text(json.dumps({**COMMON, **SHAPES[options.shape], "torch_dtype": dtype}))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n' * options.prompts)
    text = RUN.format(folder=folder, rows=options.prompts * options.samples, **vars(options))
    settings = {
        "adapter.rank": options.rank,
        "optimizer.state": options.state,
        "optimizer.offload": options.offload,
        "model.checkpointing": options.checkpointing,
        "train.microbatch_tokens": options.tokens,
        "memory.logits": options.logits,
        "memory.reference": options.reference,
        "memory.cache_gib": options.cache_gib,
    }
    written = [f"{key}={value}" for key, value in settings.items() if value is not None]
    return parse_config(text, [*written, *options.overrides])


def random_model(
    folder: Path,
    *,
    dtype: torch.dtype | None,
    device: str,
    checkpointing: int,
    on_bytes: Any = None,
    group: None = None,
) -> Decoder:
    """Replaces `load_model`: random weights that exist once, on the device alone."""
    architecture = read_architecture(folder)
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    with shapes_only():
        model = Decoder(architecture, checkpointing=checkpointing).to(dtype=dtype)
    model.to_empty(device=device)
    model.frequencies.copy_(architecture.frequencies()[0])
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("norm"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(std=0.02)
    return model


class DeviceMemory:
    """The peak memory of this process on its device, without that of an idle context."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.free, self.idle = 0, 0
        if device != "cpu":
            torch.zeros(1, device=device)
            self.free, total = torch.cuda.mem_get_info(device)
            self.idle = total - self.free

    def peaks(self) -> dict[str, int]:
        """The peaks of the allocator, which keeps the memory of graphs, and the memory of libraries and the driver."""
        if self.device == "cpu":
            return {"reserved": 0, "allocated": 0, "outside": 0, "peak": 0}
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.max_memory_reserved(self.device)
        outside = max(0, total - free - self.idle - torch.cuda.memory_reserved(self.device))
        allocated = torch.cuda.max_memory_allocated(self.device)
        return {"reserved": reserved, "allocated": allocated, "outside": outside, "peak": reserved + outside}


def show_segments() -> None:
    """Print the allocator's segments, inside and outside the pool of the graphs."""
    rows = []
    for segment in torch.cuda.memory_snapshot():
        pool = "graphs" if tuple(segment["segment_pool_id"]) != (0, 0) else "-"
        sizes = sorted((block["size"] for block in segment["blocks"] if block["state"] != "inactive"), reverse=True)
        largest = " ".join(f"{size / 2**20:.1f}" for size in sizes[:6])
        rows.append((pool, segment["total_size"] / 2**20, segment["allocated_size"] / 2**20, len(sizes), largest))
    rows.sort(key=lambda row: -row[1])
    held = torch.cuda.memory_reserved() / GIB
    table(f"segments, {held:.2f} GiB", ("pool", "MiB", "in use", "blocks", "largest blocks, MiB"), rows[:40])
    print(f"  and {len(rows) - 40} more with {sum(row[1] for row in rows[40:]):.0f} MiB" if len(rows) > 40 else "")


def take_step(run: Run, options: argparse.Namespace, step: int) -> dict[str, float]:
    """Take a step as `train.py` does, with a random reward; return the seconds of its phases."""
    policy = run.policy
    generator = torch.Generator().manual_seed(step)
    vocabulary = policy.model.architecture.vocabulary
    ids = torch.randint(0, vocabulary, (options.prompts, options.prompt), generator=generator).tolist()
    prompts = [Prompt(number, tuple(tokens), "") for number, tokens in enumerate(ids)]
    params = replace(policy.sampling, ignore_eos=True)
    seconds = {}
    start = time.perf_counter()

    def note(phase: str) -> None:
        nonlocal start
        synchronize()
        seconds[phase] = time.perf_counter() - start
        start = time.perf_counter()

    generate = policy.generator(seed=str(step), params=params)
    rollouts = SingleTurn(options.samples).run(generate, prompts)
    for rollout, reward in zip(rollouts, torch.rand(len(rollouts), generator=generator).tolist(), strict=True):
        rollout.reward = reward
    note("generate")
    policy.score(rollouts, "reference")
    note("score")
    learned = policy.train(run.inputs.algorithm.make_batch(rollouts, minibatches=1, seed=step))
    note("train")
    assert all(len(rollout.tokens) == options.new for rollout in rollouts)
    seconds["largest ratio"] = learned["policy/token_mult_prob_error_max"]
    return seconds


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Plan, set up and take steps in this process."""
    device = "cpu" if options.tiny else "cuda:0"
    memory = DeviceMemory(device)
    budget = chosen_memory.find_memory_budget(World(0, 1, device))
    if options.limit_gib is not None:
        budget = MemoryBudget(int(options.limit_gib * GIB), budget.host)
    chosen_memory.find_memory_budget = lambda world: budget  # type: ignore[assignment]
    torch.cuda.reset_peak_memory_stats = lambda device=None: None  # keep the peak of all phases
    with tempfile.TemporaryDirectory() as name:
        config = make_config(Path(name), options)
        plan = _plan(config, budget, device)
        print(describe(plan), flush=True)
        if plan.fits is False:
            return {"name": options.name, "misfit": plan.misfit}
        started = time.perf_counter()
        run = make_run(config, World(0, 1, device), writes=False, load=random_model)
        synchronize()
        setup = time.perf_counter() - started
        after_setup = memory.peaks()
        print(f"set-up: {setup:.1f} s; {_described(after_setup)}", flush=True)
        if options.segments:
            show_segments()
        steps = []
        for step in range(options.steps):
            steps.append(take_step(run, options, step))
            shown = ", ".join(f"{phase} {value:.2f}" for phase, value in steps[-1].items())
            print(f"step {step}: {shown} s; {_described(memory.peaks())}", flush=True)
        report = run.policy.pool.report()
        print(f"{report.captures} captures, {report.replays} replays, {report.eager_runs} eager runs", flush=True)
        run.close()
    assert plan.floor is not None
    found = {"name": options.name, "planned": plan.peak, "setup": setup, "after_setup": after_setup}
    return {**found, **memory.peaks(), "seconds": steps[-1], "floor": sum(plan.floor.shared.values())}


def _plan(config: Config, budget: MemoryBudget, device: str) -> Plan:
    if device == "cpu":
        from rollgraph.plan.time import Speed

        return make_plan(config, device="cpu", speed=Speed(0.1, 0.01))
    return make_plan(config, device_bytes=budget.device, host_bytes=budget.host)


def describe(plan: Plan) -> str:
    """Return a short form of the plan: the choices, each line and the totals."""
    rows = [f"  {line.name:26} {format_bytes(line.nbytes):>11}  {line.where:6}  {', '.join(line.phases)}"
            for line in plan.lines if line.nbytes]  # fmt: skip
    sums = ", ".join(f"{phase} {format_bytes(plan.total(phase))}" for phase in PHASES)
    chosen = [f"  {line}" for line in plan.choice.describe()]
    return "\n".join(
        [*chosen, *rows, f"  planned: {sums}; host {format_bytes(plan.total('train', 'host'))}", plan.misfit]
    )


def _described(peaks: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in peaks.items())


def show(results: list[dict[str, Any]]) -> None:
    rows: list[tuple[Any, ...]] = []
    for found in results:
        if "seconds" not in found:
            rows.append((found["name"], *[found.get("misfit", "failed")[:60]], *["-"] * 8))
            continue
        seconds = found["seconds"]
        step = sum(seconds[phase] for phase in PHASES)
        ratio = found["planned"] / found["peak"] if found["peak"] else float("nan")
        sizes = (found["planned"] / GIB, found["peak"] / GIB, ratio)
        times = (*(seconds[phase] for phase in PHASES), step, step / found["floor"], found["setup"])
        rows.append((found["name"], *sizes, *times))
    header = ("", "planned GiB", "measured GiB", "planned / measured", *PHASES, "step, s", "x floor", "set-up, s")
    table("memory and time of a GRPO step", header, rows)


def measure_each(names: list[str], extra: list[str], limit_s: float) -> list[dict[str, Any]]:
    """Run each configuration in a separate process, so that memory one leaves behind does not count for the next."""
    results = []
    for name in names:
        print(f"== {name}", flush=True)
        arguments = ["--name", name, *CONFIGURATIONS[name], *extra]
        found = run_apart(__file__, arguments, limit_s=limit_s)
        results.append(found[-1] if found else {"name": name})
    return results


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"], help="one configuration")
    parser.add_argument("--name", default="", help="its name in the table")
    parser.add_argument("--rank", type=int, help="train adapters of this rank instead of all weights")
    parser.add_argument("--state", choices=("fp32", "bf16", "int8"), help="optimizer.state")
    parser.add_argument("--offload", choices=("none", "host"), help="optimizer.offload")
    parser.add_argument("--checkpointing", help="model.checkpointing")
    parser.add_argument("--tokens", type=int, help="train.microbatch_tokens")
    parser.add_argument("--logits", choices=("whole", "chunks"), help="memory.logits")
    parser.add_argument("--reference", choices=("device", "host"), help="memory.reference")
    parser.add_argument("--cache-gib", type=float, help="memory.cache_gib")
    parser.add_argument("--limit-gib", type=float, help="limit on the device memory")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--new", type=int, default=384, help="new tokens per sample")
    parser.add_argument("--steps", type=int, default=2, help="number of steps; the last one is timed")
    parser.add_argument("--limit-s", type=float, default=400, help="time limit of one configuration, in seconds")
    parser.add_argument("--segments", action="store_true", help="list the allocator's segments after the set-up")
    parser.add_argument("--only", nargs="+", choices=list(CONFIGURATIONS), help="run only these configurations")
    parser.add_argument("--list", action="store_true", help="list the configurations and their arguments")
    parser.add_argument("--plan", action="store_true", help="only print the plans, for a device of --limit-gib")
    parser.add_argument("--host-gib", type=float, default=120, help="host memory, for --plan")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("overrides", nargs="*", help="other keys, e.g. graph.exact=off")
    return parser.parse_args(arguments)


def show_plan(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        config = make_config(Path(name), options)
        nbytes = int((options.limit_gib or 139.0) * GIB)
        print(describe(make_plan(config, device_bytes=nbytes, host_bytes=int(options.host_gib * GIB))), flush=True)


def main() -> None:
    options = parse()
    if options.list:
        for name, arguments in CONFIGURATIONS.items():
            print(f"{name}: {' '.join(arguments)}")
        return
    if options.tiny:
        options.shape = "tiny"
        options.prompts, options.samples, options.prompt, options.new = 2, 4, 12, 8
    if options.plan:
        for name in options.only or CONFIGURATIONS:
            print(f"== {name}")
            show_plan(parse(CONFIGURATIONS[name]))
        return
    if options.shape is not None:
        found = measure(options)
        report(found)
        if not options.name:
            show([found])
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/memory.py needs a CUDA device, or --plan, or --tiny")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    extra = ["--steps", str(options.steps), *(["--segments"] if options.segments else []), *options.overrides]
    show(measure_each(options.only or list(CONFIGURATIONS), extra, options.limit_s))


if __name__ == "__main__":
    main()
