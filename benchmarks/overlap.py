"""Measure how much communication overlap hides: `python benchmarks/overlap.py`.

It times a step of a stack of layers, with and without overlapped gathers and reductions, in several processes on gloo.
A delay per byte simulates a network of `--gigabits`. The delay starts with the collective, so work in the meantime
hides it. On several GPUs, run `torchrun --nproc-per-node N benchmarks/overlap.py --nccl`, which adds no delay.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from rollgraph.parallel.data.collectives import PendingCollective
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World


def slowed(
    start: Callable[..., PendingCollective], seconds_per_byte: float, link: dict[str, float]
) -> Callable[..., PendingCollective]:
    """Make a collective take as long as on a slow network that carries one collective at a time."""

    def call(full: Tensor, shard: Tensor, what: str) -> PendingCollective:
        begins = max(time.perf_counter(), link.get("free", 0.0))
        link["free"] = deadline = begins + (full.nbytes - shard.nbytes) * seconds_per_byte
        pending = start(full, shard, what)
        completed = pending.wait

        def wait() -> None:
            completed()
            time.sleep(max(0.0, deadline - time.perf_counter()))

        pending.wait = wait
        return pending

    return call


def step_time(world: World, overlap: bool, seconds_per_byte: float, options: argparse.Namespace) -> float:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(options.width, options.width), nn.GELU()) for _ in range(options.layers)]
    model = nn.Sequential(*layers).to(world.device)
    sharded = ShardedModel(
        model, world, overlap_gather=overlap, overlap_reduce=overlap, bucket_bytes=4 * options.width**2
    )
    if seconds_per_byte:
        link: dict[str, float] = {}
        for name in ("gather", "reduce"):
            setattr(sharded.collectives, name, slowed(getattr(sharded.collectives, name), seconds_per_byte, link))
    optimizer, x = ShardedAdamW(sharded, 1e-3), torch.randn(options.batch, options.width, device=world.device)
    times = []
    for _ in range(options.steps):
        if world.size > 1:
            dist.barrier(world.group)
        start = time.perf_counter()
        model(x).square().mean().backward()
        sharded.gradients.finish()
        optimizer.step()
        if world.device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    sharded.close()
    return statistics.median(times[2:]) * 1e3


def measure(rank: int, store: str | None, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if store is None:
        dist.init_process_group("nccl")
        world = World.current()
        torch.cuda.set_device(world.device)
    else:
        files = dist.FileStore(store, options.ranks)
        dist.init_process_group("gloo", rank=rank, world_size=options.ranks, store=files)
        world = World(rank, options.ranks, "cpu")
    delay = 0.0 if store is None else 8 / (options.gigabits * 1e9)
    alone = World(0, 1, world.device)
    ways = ((alone, False, 0.0), (world, False, delay), (world, True, delay))
    rounds = [[step_time(*way, options) for way in ways] for _ in range(options.rounds)]  # alternate: machines drift
    bare, off, on = (statistics.median(times) for times in zip(*rounds, strict=True))
    if rank == 0:
        where = torch.cuda.get_device_name() if store is None else f"gloo at {options.gigabits} Gbit/s, one thread each"
        print(f"{world.size} ranks, {where}, torch {torch.__version__}")
        print(f"{options.layers} layers of {options.width} x {options.width}, batch {options.batch}")
        for name, value in (("one rank, no communication", bare), ("overlap off", off), ("overlap on", on)):
            print(f"  {name:28}{value:8.1f} ms")
        print(f"  {'communication hidden':28}{(off - on) / (off - bare):8.0%}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabits", type=float, default=1.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nccl", action="store_true", help="run under torchrun, with one GPU per rank")
    options: Any = parser.parse_args()
    if options.nccl:
        measure(int(os.environ["RANK"]), None, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (os.path.join(folder, "store"), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
