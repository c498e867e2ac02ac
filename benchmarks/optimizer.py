"""Measure an optimizer step: `python benchmarks/optimizer.py` for 1.5B parameters on a GPU.

It times a step for each format of the optimizer state, on the device and on the host. The floor is the time to move
the bytes of state, gradients and weights through device memory, and those of an offloaded state over the bus, in both
directions at once. Both bandwidths are measured in the same run. `--tiny` runs a small model, also on a CPU, which has
no such bus.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from common import random_decoder, synchronize, table
from torch import nn

from rollgraph.parallel.data.bucket_plan import Offload, StateFormat
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.optim.state import CopyStreams, allocate_on_host
from rollgraph.parallel.ranks.world import World

FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16", "int8")


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the mean time of several calls in a row, until all the work they started is done."""
    run()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return (time.perf_counter() - start) / repeats


def measure_memory(device: torch.device, nbytes: int) -> float:
    """Return the bytes per second of a copy on the device, counting reads and writes."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds(lambda: target.copy_(source), 10)


def measure_bus(device: torch.device, nbytes: int) -> float:
    """Return the bytes per second in each direction while both are busy."""
    sizes = [(nbytes, torch.uint8)] * 2
    host_in, host_out = allocate_on_host(sizes, device)
    device_in, device_out = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    streams = CopyStreams(2, device)

    def both() -> None:
        streams.read(0, [(host_in, device_in)])
        streams.write(1, [(device_out, host_out)])

    return nbytes / seconds(both, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model of a million parameters, on any device")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    model = nn.Sequential(nn.Linear(1024, 1024)).to(device, torch.bfloat16) if options.tiny else random_decoder()
    sharded = ShardedModel(model, World(0, 1, name))
    for gradients in sharded.gradients.shards():
        gradients.normal_()
    size = 2**20 if options.tiny else 2**30
    memory = measure_memory(device, size)
    bus = measure_bus(device, size) if device.type == "cuda" else None
    places: tuple[Offload, ...] = ("none",) if bus is None else ("none", "host")
    parameters = sum(bucket.plan.shard_numel for bucket in sharded.flat.buckets)
    rows = []
    for offload in places:
        for state in FORMATS:
            optimizer = ShardedAdamW(sharded, 1e-6, state=state, offload=offload)
            plan = sharded.plan(state, offload).optimizer
            kept = plan.device + plan.host
            traffic = 2 * kept + (4 + 2) * parameters  # reads gradients, writes weights in bf16
            floor = traffic / memory
            if bus is not None and offload == "host":
                floor = max(floor, kept / bus)
            taken = seconds(optimizer.update, options.repeats)
            rows.append(
                (f"{state}, {offload}", plan.device / 1e9, plan.host / 1e9, taken * 1e3, floor * 1e3, taken / floor)
            )
            del optimizer
    over_bus = "" if bus is None else f", bus {bus / 1e9:.1f} GB/s in each direction"
    table(
        f"an optimizer step over {parameters / 1e6:.1f}M parameters; memory {memory / 1e12:.2f} TB/s{over_bus}",
        ("state, offload", "device GB", "host GB", "ms", "floor ms", "x floor"),
        rows,
    )


if __name__ == "__main__":
    main()
