"""Measure the cost of the sanitizer: `python benchmarks/sanitizer_cost.py`, on a CPU or a CUDA device.

It runs the training step of examples/captured_training.py in every mode, each in its own process, and prints the step
time, the capture time and the peak memory of the process (on CUDA, of the caching allocator).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from rollgraph.graph import capture, sanitize
from rollgraph.run.step_log import peak_resident_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.captured_training import Reverser, Trainer, make_batch

MODES = ("eager", "captured", "sanitized, not compared", "sanitized")


def measure(mode: str, steps: int, batch: int) -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    trainer = Trainer(Reverser().to(device), device)
    ids = make_batch(torch.Generator().manual_seed(1), batch, device)
    sanitizer: AbstractContextManager[Any] = nullcontext()
    if mode.startswith("sanitized"):
        sanitizer = sanitize(compare=mode == "sanitized")
    with sanitizer as findings:
        start = time.perf_counter()
        step = trainer.step if mode == "eager" else capture(trainer.step, (ids,))
        capture_seconds = time.perf_counter() - start
        step_seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            step(ids)["loss"].item()
            step_seconds.append(time.perf_counter() - start)
    if findings is not None and len(findings):
        raise SystemExit(f"the sanitizer has findings on the benchmark itself:\n{findings}")
    return {
        "step": statistics.median(step_seconds) * 1e3,
        "capture": capture_seconds * 1e3,
        "peak": peak_bytes(device) / 2**20,
    }


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    return peak_resident_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)  # measure one mode in this process
    options = parser.parse_args()
    if options.mode:
        print(json.dumps(measure(options.mode, options.steps, options.batch)))
        return
    device = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, batch {options.batch}")
    print(f"{'':26}{'step, ms':>10}{'capture, ms':>13}{'peak, MiB':>11}")
    for mode in MODES:
        sizes = ["--steps", str(options.steps), "--batch", str(options.batch)]
        command = [sys.executable, __file__, "--mode", mode, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        print(f"{mode:26}{found['step']:10.1f}{found['capture']:13.0f}{found['peak']:11.0f}")


if __name__ == "__main__":
    main()
