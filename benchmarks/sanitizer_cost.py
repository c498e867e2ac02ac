"""What the sanitizer costs: `python benchmarks/sanitizer_cost.py`, on a CPU or a CUDA device.

The training step of examples/captured_training.py, each way in a process of its own: time for a step, time to capture,
and the most memory that the process had (on CUDA, that the allocator had).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from rollgraph.graph import capture, sanitize

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.captured_training import Reverser, Trainer, make_batch

WAYS = ("eager", "captured", "sanitized, not compared", "sanitized")


def measure(way: str, steps: int, batch: int) -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    trainer = Trainer(Reverser().to(device), device)
    ids = make_batch(torch.Generator().manual_seed(1), batch, device)
    watched = sanitize(compare=way == "sanitized") if way.startswith("sanitized") else nullcontext()
    with watched as findings:
        start = time.perf_counter()
        step = trainer.step if way == "eager" else capture(trainer.step, (ids,))
        seconds = time.perf_counter() - start
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step(ids)["loss"].item()
            times.append(time.perf_counter() - start)
    if findings is not None and len(findings):
        raise SystemExit(f"not clean:\n{findings}")
    peak = (
        torch.cuda.max_memory_reserved()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return {"step": statistics.median(times) * 1e3, "capture": seconds * 1e3, "peak": peak / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # one of them, in this process
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.steps, options.batch)))
        return
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, batch {options.batch}")
    print(f"{'':26}{'step, ms':>10}{'capture, ms':>13}{'peak, MiB':>11}")
    for way in WAYS:
        sizes = ["--steps", str(options.steps), "--batch", str(options.batch)]
        command = [sys.executable, __file__, "--way", way, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        print(f"{way:26}{found['step']:10.1f}{found['capture']:13.0f}{found['peak']:11.0f}")


if __name__ == "__main__":
    main()
