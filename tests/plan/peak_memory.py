"""A program for `test_peak_memory.py`: two steps of a run, in a separate process.

Prints, as JSON, the resident bytes before the run, the peak, and the planned bytes.
"""

from __future__ import annotations

import json
import sys

from rollgraph.config import load_config
from rollgraph.parallel.ranks.world import World
from rollgraph.plan.report import make_plan
from rollgraph.run.step_log import peak_resident_bytes, resident_bytes
from rollgraph.train import train


def main() -> None:
    config = load_config(sys.argv[1])
    planned = make_plan(config, device="cpu").peak
    tiny = "model.tiny={layers: 1, width: 32, heads: 2, kv_heads: 1, mlp: 64, max_length: 128}"
    train(load_config(sys.argv[1], [tiny, f"output={config.output}/tiny"]), World(0, 1, "cpu"))
    before = resident_bytes()  # includes libraries and compiled kernels
    train(config, World(0, 1, "cpu"))
    peak = peak_resident_bytes()
    print(json.dumps({"before": before, "peak": peak, "planned": planned}))


if __name__ == "__main__":
    main()
