"""Several processes on gloo. Starting them is slow, so one world runs a whole list of cases."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rollgraph.parallel.ranks.world import World


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as ranks do, so that this process has their bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _process(rank: int, size: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store)
    try:
        result = function(World(rank, size, "cpu"), *arguments)
    except Exception:
        result = traceback.format_exc()
    torch.save(result, folder / f"rank{rank}.new")
    (folder / f"rank{rank}.new").rename(folder / f"rank{rank}.pt")  # it appears at once
    while size > len(list(folder.glob("rank*.pt"))):  # no rank leaves while another may still communicate with it
        time.sleep(0.02)
    dist.destroy_process_group()


def run_world(
    size: int, folder: Path, function: Callable[..., Any], *arguments: Any, method: str = "forkserver"
) -> list[Any]:
    """Run `function(world, *arguments)` on each rank. Returns the results, or the traceback as text if it fails.

    Ranks that use a GPU are started with the method "spawn": a process cannot inherit CUDA.
    """
    folder = Path(tempfile.mkdtemp(dir=folder))  # a world must not find the addresses of the one before
    mp.start_processes(_process, (size, folder, function, arguments), nprocs=size, start_method=method)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


def run_world_with_a_loss(size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
    """The same for a function that loses one rank: returns the results of the others, and kills all processes."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    context = mp.get_context("forkserver")
    processes = [
        context.Process(target=_process, args=(rank, size, folder, function, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and sum((folder / f"rank{r}.pt").exists() for r in range(size)) < size - 1:
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.join()
    results = {rank: folder / f"rank{rank}.pt" for rank in range(size)}
    return {rank: torch.load(path, weights_only=False) for rank, path in results.items() if path.exists()}
