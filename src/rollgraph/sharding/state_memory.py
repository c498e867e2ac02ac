"""What the optimizer keeps for each parameter, and the memory that takes, on the device and on the host.

Owns the formats of optimizer state and the sizes of chunks, and touches no memory. `optimizer_state.py` allocates what
is planned here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from rollgraph.sharding.bucket_plan import ALIGNED_ELEMENTS, BucketPlan

StateFormat = Literal["fp32", "bf16", "int8"]  # of the two moments; the master weights are fp32 in all of them
Offload = Literal["none", "host"]

BLOCK = ALIGNED_ELEMENTS  # elements of int8 state with a common exponent: a block never spans parameters or shards
CHUNK = 2**22  # elements that are streamed, quantised or summed at a time
STREAM_BUFFERS = 3  # a chunk is read, one is updated and one is written at the same time


@dataclass(frozen=True)
class StateField:
    """One of the tensors that hold the state of a shard: an entry for each element, or for each block of them."""

    name: str
    dtype: torch.dtype
    elements_per_entry: int = 1
    initial: int = 0  # what an entry is before the first update

    def entries(self, elements: int) -> int:
        return -(-elements // self.elements_per_entry)

    def nbytes(self, elements: int) -> int:
        return self.entries(elements) * self.dtype.itemsize


MASTER = StateField("master", torch.float32)

# The smallest exponents of a block, as fp32 spells them: everything that a code of the block means is then a normal
# number. An int8 code has octaves below that of the largest value in its block, as many as named here.
SIGNED_OCTAVES = 15
UNSIGNED_OCTAVES = 31
LOWEST_SIGNED = SIGNED_OCTAVES + 1
LOWEST_UNSIGNED = UNSIGNED_OCTAVES + 1

MOMENT_FIELDS: dict[StateFormat, tuple[StateField, ...]] = {
    "fp32": (StateField("exp_avg", torch.float32), StateField("exp_avg_sq", torch.float32)),
    "bf16": (StateField("exp_avg", torch.bfloat16), StateField("exp_avg_sq", torch.bfloat16)),
    "int8": (
        StateField("exp_avg", torch.int8),
        StateField("exp_avg_sq", torch.uint8),
        StateField("exp_avg_exponents", torch.uint8, BLOCK, LOWEST_SIGNED),
        StateField("exp_avg_sq_exponents", torch.uint8, BLOCK, LOWEST_UNSIGNED),
    ),
}


def state_fields(state: StateFormat) -> tuple[StateField, ...]:
    """All fields of a shard, in the order in which they lie in memory."""
    return (MASTER, *MOMENT_FIELDS[state])


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of the optimizer on one rank."""

    device: int  # state that stays on the device
    host: int  # state in pinned host memory
    streaming: int  # buffers on the device through which chunks pass: from the host, and moments in fp32
    snapshot: int  # on the host, from the first checkpoint on; state on the host needs no copy


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank. All ranks have shards of one size."""

    parameters: int
    gradients: int
    optimizer: OptimizerMemory

    @property
    def total(self) -> int:
        """What is on the device all the time."""
        return self.parameters + self.gradients + self.optimizer.device + self.optimizer.streaming


def plan_memory(
    buckets: Iterable[BucketPlan], grad_dtype: torch.dtype, state: StateFormat = "fp32", offload: Offload = "none"
) -> MemoryPlan:
    """The memory of a model with AdamW whose parameters lie in these buckets."""
    buckets = tuple(buckets)
    parameters = sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets)
    gradients = sum(bucket.numel * grad_dtype.itemsize for bucket in buckets if bucket.trainable)
    return MemoryPlan(parameters, gradients, plan_optimizer(buckets, state, offload))


def plan_optimizer(buckets: Iterable[BucketPlan], state: StateFormat, offload: Offload) -> OptimizerMemory:
    """The memory of AdamW for these buckets, with state of this format, on the device or on the host."""
    shards = [bucket.shard_numel for bucket in buckets if bucket.trainable]
    kept = sum(field.nbytes(numel) for numel in shards for field in state_fields(state))
    chunk = chunk_elements(shards)
    decoded = 0 if state == "fp32" else 2 * MASTER.nbytes(chunk)  # on a CPU, rounding makes a few more such tensors
    if offload == "none":
        return OptimizerMemory(device=kept, host=0, streaming=decoded, snapshot=kept)
    buffers = STREAM_BUFFERS * sum(field.nbytes(chunk) for field in state_fields(state))
    return OptimizerMemory(device=0, host=kept, streaming=buffers + decoded, snapshot=0)


def chunk_elements(shards: Iterable[int]) -> int:
    """The elements of the largest chunk of shards with these numbers of elements."""
    return min(CHUNK, max(shards, default=0))
