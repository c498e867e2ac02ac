"""A program for `test_peak_memory.py`: two steps of a run, in a process of its own.

Prints, as JSON, the bytes that the process had before the run, the most that it had, and what was planned.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch

from rollgraph.config import load_config
from rollgraph.distributed.world import World
from rollgraph.run.plan import make_plan
from rollgraph.train import train


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    config = load_config(sys.argv[1])
    planned = make_plan(config, device="cpu").peak
    numbers = torch.randn(64, 64, requires_grad=True)
    (numbers @ numbers).sum().backward()  # the libraries allocate what they need once
    before = resident_bytes()
    train(config, World(0, 1, "cpu"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"before": before, "peak": peak, "planned": planned}))


if __name__ == "__main__":
    main()
