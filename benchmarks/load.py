"""Time how fast weights are loaded: `python benchmarks/load.py [--gib 8] [--folder /scratch] [--device cuda]`.

It writes a folder of random weights with the layers of Qwen2.5-32B, in shards of 4 GiB, and loads it. The floor is the
read speed of the disk: as many threads read the same pieces of the same files and discard them. Both are timed with an
empty page cache, and again with all files in it. The folder is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from common import QWEN_1_5B, synchronize, table

from rollgraph.model import Architecture, Decoder, load_model, save_model, weight_files
from rollgraph.model.meta import shapes_only
from rollgraph.model.weights.stream import READ_THREADS

GIB = 2**30
PIECE = 32 * 2**20
LAYER = replace(
    QWEN_1_5B, vocabulary=8192, hidden=5120, mlp=27_648, heads=40, kv_heads=8, head_dim=128, tied=False, layers=1
)


def architecture_of(gib: float) -> Architecture:
    """Return a shape whose layers take about this many GiB in bf16."""
    with shapes_only():
        each = sum(p.numel() for p in Decoder(LAYER).layers[0].parameters()) * 2  # type: ignore[index]
    return replace(LAYER, layers=max(1, round(gib * GIB / each)))


def write(folder: Path, gib: float, device: str) -> int:
    """Write the folder; return the size of its files in bytes."""
    with torch.device(device):
        model = Decoder(architecture_of(gib)).to(torch.bfloat16)
    save_model(model, folder, shard_bytes=4 * GIB)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> None:
    """Read all files piece by piece and discard them."""
    files = [path for path in weight_files(folder) if path.suffix == ".safetensors"]
    pieces = [(path, offset) for path in files for offset in range(0, path.stat().st_size, PIECE)]
    descriptors = {path: os.open(path, os.O_RDONLY) for path in files}
    buffers = [bytearray(PIECE) for _ in range(READ_THREADS)]

    def read_every(first: int) -> None:
        for path, offset in pieces[first::READ_THREADS]:
            os.preadv(descriptors[path], [buffers[first]], offset)

    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(read_every, range(READ_THREADS)))
    for descriptor in descriptors.values():
        os.close(descriptor)


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, help="folder to write the weights to; default: a temporary folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = write(folder, options.gib, options.device)
        torch.empty(1, device=options.device)  # the context
        rows = []
        for cached in (False, True):
            for what, run in (("read", read), ("load_model", lambda f: load_model(f, device=options.device))):
                if not cached:
                    forget(folder)
                taken = seconds(lambda run=run: run(folder))  # type: ignore[misc]
                state = "in the page cache" if cached else "on disk"
                rows.append((f"{what}, {state}", taken, size / GIB / taken))
        table(f"{size / GIB:.1f} GiB to {options.device}", ("", "s", "GiB/s"), rows)


if __name__ == "__main__":
    main()
