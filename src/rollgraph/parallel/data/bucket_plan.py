"""The plan of flat buffers and optimizer state: the layout of buckets, and bytes per rank.

Touches no memory. `flat_buffer.py` and `parallel/optim/state.py` allocate it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

# -- buckets ---------------------------------------------------------------------------------------

ALIGNMENT = 256  # bytes: every parameter and every shard starts at a multiple of it
ALIGNED_ELEMENTS = 64  # and at a multiple of this many elements, whatever the dtype

BUCKET_BYTES = 64 * 2**20  # the default size of a bucket


@dataclass(frozen=True)
class ParameterSpec:
    """Name, shape and dtype of a parameter. A tied parameter has several `names`."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class ParameterSlice:
    """The position of a parameter in its bucket, in elements."""

    parameter: ParameterSpec
    start: int

    @property
    def numel(self) -> int:
        return self.parameter.shape.numel()


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: parameters in the order in which their gradients arrive, padded to shards of equal size."""

    slots: tuple[ParameterSlice, ...]
    dtype: torch.dtype
    trainable: bool
    numel: int
    ranks: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.ranks

    def owned(self, rank: int) -> Iterator[tuple[ParameterSlice, int, int]]:
        """The parts of parameters in a rank's shard: each parameter with start and end of its part in the shard."""
        first = rank * self.shard_numel
        for slot in self.slots:
            start = max(slot.start - first, 0)
            end = min(slot.start + slot.numel - first, self.shard_numel)
            if start < end:
                yield slot, start, end

    def nbytes(self, grad_dtype: torch.dtype) -> int:
        """Bytes of parameters and gradients on each rank."""
        itemsize = self.dtype.itemsize
        if self.trainable:
            itemsize += grad_dtype.itemsize
        return self.numel * itemsize


def specs_of(model: nn.Module, order: Sequence[str] = ()) -> list[ParameterSpec]:
    """Each parameter of a model once: those named in `order` first, then the others in the order of registration."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    specs = [
        ParameterSpec(tuple(names_of_one), parameter.shape, parameter.dtype, parameter.requires_grad)
        for parameter, names_of_one in names.items()
    ]
    position = {name: index for index, name in enumerate(order)}
    last = len(position)
    return sorted(specs, key=lambda spec: min(position.get(name, last) for name in spec.names))


def execution_order(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """The names of the parameters in the order in which a forward reaches their modules."""
    reached: dict[nn.Module, None] = {}

    def note(module: nn.Module, _: Any) -> None:
        reached.setdefault(module)

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    module_names = {module: name for name, module in model.named_modules()}
    order = []
    for module in reached:
        for name, _ in module.named_parameters(recurse=False):
            order.append(f"{module_names[module]}.{name}".removeprefix("."))
    return order


def plan_buckets(parameters: Sequence[ParameterSpec], *, ranks: int, bucket_bytes: int) -> tuple[BucketPlan, ...]:
    """Assign parameters, given in the order of execution, to buckets in the order in which backward reaches them.

    All parameters of a bucket have the same dtype. A bucket is closed once it has `bucket_bytes`. Trained and frozen
    parameters are in different buckets.
    """
    if ranks < 1 or bucket_bytes < 1:
        raise ValueError(f"ranks={ranks}, bucket_bytes={bucket_bytes}: both must be positive")
    open_buckets: dict[tuple[torch.dtype, bool], list[ParameterSlice]] = {}
    closed: list[BucketPlan] = []
    for parameter in reversed(parameters):
        key = (parameter.dtype, parameter.trainable)
        slots = open_buckets.setdefault(key, [])
        start = 0
        if slots:
            start = _round_up(slots[-1].start + slots[-1].numel, _aligned_elements(parameter.dtype))
        slots.append(ParameterSlice(parameter, start))
        if (start + parameter.shape.numel()) * parameter.dtype.itemsize >= bucket_bytes:
            closed.append(_close_bucket(open_buckets.pop(key), ranks))
    for slots in open_buckets.values():
        closed.append(_close_bucket(slots, ranks))
    return tuple(closed)


def _close_bucket(slots: list[ParameterSlice], ranks: int) -> BucketPlan:
    last = slots[-1]
    dtype = last.parameter.dtype
    used = max(1, last.start + last.numel)
    numel = _round_up(used, ranks * _aligned_elements(dtype))
    return BucketPlan(tuple(slots), dtype, last.parameter.trainable, numel, ranks)


def _aligned_elements(dtype: torch.dtype) -> int:
    return max(ALIGNED_ELEMENTS, ALIGNMENT // dtype.itemsize)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


# -- optimizer state -------------------------------------------------------------------------------
# Owns the formats of optimizer state and the sizes of chunks.

StateFormat = Literal["fp32", "bf16", "int8"]  # of the two moments; the master weights are always fp32
Offload = Literal["none", "host"]

BLOCK = ALIGNED_ELEMENTS  # elements of int8 state that share an exponent; a block never spans two parameters or shards
CHUNK = 2**22  # elements that are streamed, quantised or summed at a time
STREAM_BUFFERS = 3  # one chunk is read, one updated and one written at the same time


@dataclass(frozen=True)
class StateField:
    """One tensor of a shard's state, with an entry per element or per block of elements."""

    name: str
    dtype: torch.dtype
    elements_per_entry: int = 1
    initial: int = 0  # the value of an entry before the first update

    def entries(self, elements: int) -> int:
        return -(-elements // self.elements_per_entry)

    def nbytes(self, elements: int) -> int:
        return self.entries(elements) * self.dtype.itemsize


MASTER = StateField("master", torch.float32)

# An int8 code covers the octave of the largest value in its block and this many octaves below it. The lowest exponents
# of a block, in fp32 encoding, keep every value of a code a normal number.
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
    """All fields of a shard, in the order of their memory."""
    return (MASTER, *MOMENT_FIELDS[state])


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of the optimizer on one rank."""

    device: int  # state that stays on the device
    host: int  # state in pinned host memory
    streaming: int  # buffers on the device: chunks of state from the host, and decoded fp32 moments
    snapshot: int  # host memory from the first checkpoint on; state on the host needs no copy


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank. Shards have the same size on all ranks."""

    parameters: int
    gradients: int
    optimizer: OptimizerMemory

    @property
    def total(self) -> int:
        """Bytes that are always on the device."""
        return self.parameters + self.gradients + self.optimizer.device + self.optimizer.streaming


def plan_memory(
    buckets: Iterable[BucketPlan], grad_dtype: torch.dtype, state: StateFormat = "fp32", offload: Offload = "none"
) -> MemoryPlan:
    """The memory of a model in these buckets, with AdamW."""
    buckets = tuple(buckets)
    parameters = sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets)
    gradients = sum(bucket.numel * grad_dtype.itemsize for bucket in buckets if bucket.trainable)
    return MemoryPlan(parameters, gradients, plan_optimizer(buckets, state, offload))


def plan_optimizer(buckets: Iterable[BucketPlan], state: StateFormat, offload: Offload) -> OptimizerMemory:
    """The memory of AdamW for these buckets, with state in this format, on the device or on the host."""
    shards = [bucket.shard_numel for bucket in buckets if bucket.trainable]
    state_bytes = sum(field.nbytes(numel) for numel in shards for field in state_fields(state))
    chunk = chunk_elements(shards)
    # Both moments of a chunk in fp32. On a CPU, rounding allocates a few more such tensors, which are not counted.
    decoded = 0 if state == "fp32" else 2 * chunk * torch.float32.itemsize
    if offload == "none":
        return OptimizerMemory(device=state_bytes, host=0, streaming=decoded, snapshot=state_bytes)
    buffers = STREAM_BUFFERS * sum(field.nbytes(chunk) for field in state_fields(state))
    return OptimizerMemory(device=0, host=state_bytes, streaming=buffers + decoded, snapshot=0)


def chunk_elements(shards: Iterable[int]) -> int:
    """The elements of the largest chunk. `shards` has the number of elements of each shard."""
    return min(CHUNK, max(shards, default=0))
