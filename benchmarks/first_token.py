"""Time the first token of a cold `rollgraph generate` on a GPU: `python benchmarks/first_token.py`.

The model has random bf16 weights in the shape of Qwen2.5-1.5B. Each start is a separate process. The first one has to
compile kernels and autotune GEMMs; the later ones find its results on disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from apart import report, run_apart, seconds_of_process
from common import random_decoder, table

from rollgraph.model import save_model
from rollgraph.tokenizer import ByteTokenizer

PROMPT = "What is 6 * 7? Give only the answer."
COLUMNS = ("start", "weights loaded, s", "first token, s", "between, s")


def write(folder: Path) -> None:
    ByteTokenizer().save(folder)
    save_model(random_decoder(), folder)


def start(folder: str) -> None:
    """Generate one token, and report when the weights were loaded and when the token was ready."""
    from rollgraph.cli import main as rollgraph
    from rollgraph.run.model_source import StoredModel

    load = StoredModel.load
    loaded = 0.0

    def timed_load(self: StoredModel, *arguments: Any) -> Any:
        nonlocal loaded
        model = load(self, *arguments)
        torch.cuda.synchronize()
        loaded = seconds_of_process()
        return model

    StoredModel.load = timed_load  # type: ignore[method-assign]
    assert rollgraph(["generate", folder, "--prompt", PROMPT, "--max-tokens", "1", "--quiet"]) == 0
    report({"loaded": loaded, "token": seconds_of_process()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=3, help="number of starts; the first has empty caches")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # arguments of a measuring process
    options = parser.parse_args()
    if options.measure:
        start(options.measure)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        write(folder)
        caches = {"TRITON_CACHE_DIR": f"{scratch}/triton", "ROLLGRAPH_CACHE": f"{scratch}/rollgraph"}
        rows = []
        for number in range(1, options.starts + 1):
            for seen in run_apart(__file__, ["--measure", str(folder)], environment=caches):
                rows.append((str(number), seen["loaded"], seen["token"], seen["token"] - seen["loaded"]))
    table(f"first token, {torch.cuda.get_device_name()}, Python {sys.version.split()[0]}", COLUMNS, rows)


if __name__ == "__main__":
    main()
