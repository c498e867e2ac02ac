"""Time a whole GRPO step: `python benchmarks/grpo_step.py` on a machine with a CUDA device; `--tiny` runs it anywhere.

The step is that of `examples/grpo_math_1b.yaml`: 32 prompts x 16 samples, prompts of 128 tokens, 384 new tokens, KL to
a reference, one update, random bf16 weights in the shape of Qwen2.5-1.5B. One run times rollgraph by phase, with graphs
and on the eager backend, and computes the floor. After a warm-up step, the fastest of `--repeats` steps counts. With
`--trl`, the run also times TRL's GRPOTrainer, which must be installed: `defaults` and `fastest` generate with
transformers, `vllm` and `vllm-uncorrected` with vLLM in the same process. Their settings are in `trl_peer.py`.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import trl_peer
from apart import run_apart, seconds_of_process
from common import BYTES_PER_SECOND, FLOPS_PER_SECOND, QWEN_1_5B, synchronize, table
from phase_profile import PhaseProfile

from rollgraph.inference import SamplingParams
from rollgraph.model import Architecture, Decoder
from rollgraph.model.meta import shapes_only
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.rl.environment import SingleTurn
from rollgraph.types import Prompt

TINY = Architecture("llama", vocabulary=300, hidden=32, mlp=64, layers=2, heads=2, kv_heads=1, head_dim=16)
PHASES = ("generate", "score", "train")
SWITCHING = "of which switching"


class Clock:
    """Sums the seconds of each phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*PHASES, SWITCHING), 0.0)

    @contextmanager
    def phase(self, name: str) -> Any:
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        self.seconds[name] += time.perf_counter() - start


class StartClock:
    """Splits the seconds from process start to the end of the first step into parts."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._part = "imports and weights"
        self._since = 0.0

    def enter(self, phase: str, part: str = "", done: int = 0, total: int = 0) -> None:
        """Start a part. `capture_all` calls this for every graph."""
        now = seconds_of_process()
        self.seconds[self._part] += now - self._since
        self._part = {"probe": "autotuning GEMMs"}.get(phase, f"captures of {phase}" if part else phase)
        self._since = now


def make_worker(
    architecture: Architecture, options: argparse.Namespace, backend: Any, start: StartClock
) -> tuple[PolicyWorker, Any]:
    device = "cuda:0" if torch.cuda.is_available() and not options.tiny else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(architecture).to(torch.float32 if device == "cpu" else torch.bfloat16)
    algorithm = load_algorithm("grpo", {"kl_coef": 0.01})
    longest = options.prompt + options.new
    largest = max(longest, options.bucket)
    worker = PolicyWorker(
        model,
        None,
        World(0, 1, device),
        Limits(
            max_length=longest,
            rows=options.prompts * options.samples,
            token_buckets=tuple(sorted({max(longest, largest // part) for part in (4, 2, 1)})),
            cache_bytes=options.cache_gib << 30 if device != "cpu" else 64 << 20,
            half_logits=options.half_logits,
        ),
        sampling=SamplingParams(max_tokens=options.new),
        optimizer={"lr": 1e-6},
        backend=backend,
    )
    worker.weights.save("reference")
    worker.capture_all({"policy": (algorithm.loss, False)}, start.enter)
    return worker, algorithm


def run_step(
    worker: PolicyWorker, algorithm: Any, options: argparse.Namespace, step: int, clock: Clock | PhaseProfile
) -> dict[str, float]:
    """Take one step as `train.py` does, with a random reward; return the training metrics."""
    generator = torch.Generator().manual_seed(step)
    vocabulary = worker.model.architecture.vocabulary
    ids = torch.randint(0, vocabulary, (options.prompts, options.prompt), generator=generator).tolist()
    prompts = [Prompt(i, tuple(tokens), "") for i, tokens in enumerate(ids)]
    with clock.phase("generate"):
        rollouts = SingleTurn(options.samples).run(lambda requests: worker.generate(requests, seed=str(step)), prompts)
    for rollout, reward in zip(rollouts, torch.rand(len(rollouts), generator=generator).tolist(), strict=True):
        rollout.reward = reward
    with clock.phase("score"):
        worker.score(rollouts, "reference")
    batch = algorithm.make_batch(rollouts)
    with clock.phase("train"):
        learned = worker.train(batch)
    with clock.phase(SWITCHING):  # enter the same phases again, without work in them
        with worker.phases.enter("generate"):
            pass
        with worker.phases.enter("score"), worker.weights.use("reference"):
            pass
        with worker.phases.enter("train"):
            pass
    return learned


def measure(
    architecture: Architecture, options: argparse.Namespace, backend: Any
) -> tuple[dict[str, float], Counter[str]]:
    """Return the seconds of each phase of the fastest step, and of each part from process start to the first step."""
    start = StartClock()
    worker, algorithm = make_worker(architecture, options, backend, start)
    start.enter("the first step")
    run_step(worker, algorithm, options, 0, Clock())
    start.enter("")
    found = []
    for step in range(1, 1 + options.repeats):
        clock = Clock()
        learned = run_step(worker, algorithm, options, step, clock)
        found.append(clock.seconds)
        error = learned["policy/token_mult_prob_error"], learned["policy/token_mult_prob_error_max"]
        print(f"{backend}: probability ratio of generation and training: mean {error[0]}, largest {error[1]}")
    if options.profile:
        profile = PhaseProfile()
        run_step(worker, algorithm, options, 1 + options.repeats, profile)
        profile.print()
    report = worker.pool.report()
    print(f"{backend}: {report.captures} captures, {report.replays} replays, {report.eager_runs} eager runs")
    worker.close()
    return min(found, key=lambda seconds: sum(seconds[phase] for phase in PHASES)), start.seconds


def floor(architecture: Architecture, options: argparse.Namespace) -> dict[str, float]:
    with shapes_only():
        parameters = sum(p.numel() for p in Decoder(architecture).parameters())
    a, sequences = architecture, options.prompts * options.samples
    tokens = sequences * (options.prompt + options.new)
    place = 2 * a.layers * 2 * a.kv_heads * a.head_dim
    decode = 0.0
    for length in range(options.prompt, options.prompt + options.new):
        moved = (2 * parameters + sequences * length * place) / BYTES_PER_SECOND
        decode += max(moved, 2 * parameters * sequences / FLOPS_PER_SECOND)
    prefill = 2 * parameters * sequences * options.prompt / FLOPS_PER_SECOND
    return {
        "generate": decode + prefill,
        "score": 2 * parameters * tokens / FLOPS_PER_SECOND,
        "train": 6 * parameters * tokens / FLOPS_PER_SECOND,
        SWITCHING: 0.0,
    }


def time_trl(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a step of TRL with each of the chosen settings, in separate processes."""
    chosen = options.trl
    if find_spec("vllm") is None:
        chosen = [name for name in chosen if "use_vllm" not in trl_peer.SETTINGS[name]]
    if chosen != options.trl:
        print("vLLM is not installed, so TRL with vLLM is skipped: pip install vllm==0.25.1")
    if find_spec("trl") is None:
        print("TRL is not installed, so it is skipped: pip install trl==1.16.0")
        return []
    found = []
    with tempfile.TemporaryDirectory() as folder:
        trl_peer.write_model(folder)
        torch.cuda.empty_cache()
        for name in chosen:
            arguments = [folder, name]
            for size in ("prompts", "samples", "prompt", "new", "repeats"):
                arguments += [f"--{size}", str(getattr(options, size))]
            print(f"== TRL, {name}", flush=True)
            found += run_apart(trl_peer.__file__, arguments, limit_s=options.limit_s, quiet=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--new", type=int, default=384, help="new tokens per sample")
    parser.add_argument("--bucket", type=int, default=16384, help="tokens per microbatch")
    parser.add_argument("--half-logits", action="store_true", help="logits for half of the tokens if that is enough")
    parser.add_argument("--cache-gib", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="number of steps; the fastest counts")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, to test this benchmark")
    parser.add_argument("--trl", nargs="*", choices=list(trl_peer.SETTINGS), help="also time TRL, with these settings")
    parser.add_argument("--limit-s", type=float, default=400, help="time limit of TRL with one of them, in seconds")
    parser.add_argument(
        "--profile", action="store_true", help="take one more step and show where the time of each phase goes"
    )
    parser.add_argument("--alone", action="store_true", help="do not time the eager backend")
    options = parser.parse_args()
    architecture = QWEN_1_5B
    if options.trl == []:
        options.trl = ["defaults"]
    if options.profile and (options.tiny or not torch.cuda.is_available()):
        raise SystemExit("--profile shows the time of CUDA kernels: it needs a CUDA device, and no --tiny")
    if options.trl and not torch.cuda.is_available():
        raise SystemExit("--trl needs a CUDA device: TRL trains the 1.5B model in bf16, even with --tiny")
    if options.tiny:
        architecture = TINY
        options.prompts, options.samples, options.prompt, options.new, options.bucket = 4, 4, 12, 8, 96
    elif not torch.cuda.is_available():
        raise SystemExit("benchmarks/grpo_step.py needs a CUDA device, or --tiny")
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    found, start = {}, {}
    found["rollgraph"], own_start = measure(architecture, options, "auto")
    start["rollgraph"] = own_start.total()
    gc.collect()
    if not options.alone:
        found["rollgraph, graph.impl: none"], _ = measure(architecture, options, "eager")
    found["floor"] = floor(architecture, options)
    lowest = sum(found["floor"].values())  # of the phases; switching has no floor
    rows: list[tuple[Any, ...]] = [
        (name, *seconds.values(), total := sum(seconds[phase] for phase in PHASES), total / lowest)
        for name, seconds in found.items()
    ]
    if options.trl:
        gc.collect()
        torch.cuda.empty_cache()
        for theirs in time_trl(options):
            print(f"{theirs['name']}: {theirs['settings']}")
            rows.append((theirs["name"], "-", "-", "-", "-", theirs["step"], theirs["step"] / lowest))
            start[theirs["name"]] = theirs["start"]
    title = f"a GRPO step, {options.prompts} x {options.samples}, {options.prompt} + {options.new} tokens, seconds"
    table(title, ("", *PHASES, SWITCHING, "step", "x floor"), rows)
    table("start to first step, with imports, weights and captures", ("", "seconds"), list(start.items()))
    table("where rollgraph's start goes", ("", "seconds"), list(own_start.items()))


if __name__ == "__main__":
    main()
