"""Flat buffers: the parameters of a bucket in one allocation, all gradients in another, at fixed addresses.

Owns the memory. A rank keeps all parameters of a bucket or, with sharded parameters, its shard; then
`parallel/fsdp/layout.py` has the layout. Loading weights and restoring a snapshot copy into the same memory. Knows
nothing about communication or hooks: code that changes the contents in the background passes callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from rollgraph.parallel.data.bucket_plan import BucketPlan, ParameterSlice, ParameterSpec, specs_of
from rollgraph.parallel.fsdp.layout import FrozenTensors, RingPlan, frozen_specs, views_of


@dataclass(frozen=True)
class Bucket:
    """The memory of one bucket.

    In a ring, other buckets use the memory of `parameters` and `gradients`, too. Then the shards of this rank have
    their own memory, `shard_memory` and `gradient_shard_memory`. Otherwise these are None, and a shard is a part of the
    bucket.
    """

    plan: BucketPlan
    parameters: Tensor  # [numel]
    gradients: Tensor | None  # [numel]; None if the parameters are frozen
    shard_memory: Tensor | None = None  # [shard_numel]
    gradient_shard_memory: Tensor | None = None  # [shard_numel]

    def shard(self, rank: int) -> Tensor:
        """This rank's shard of the parameters."""
        if self.shard_memory is not None:
            return self.shard_memory
        return self.parameters.narrow(0, rank * self.plan.shard_numel, self.plan.shard_numel)

    def gradient_shard(self, rank: int) -> Tensor:
        if self.gradient_shard_memory is not None:
            return self.gradient_shard_memory
        if self.gradients is None:
            raise ValueError("a frozen bucket has no gradients")
        return self.gradients.narrow(0, rank * self.plan.shard_numel, self.plan.shard_numel)

    @property
    def resident(self) -> Tensor:
        """The parameters that a rank keeps between uses: all of them, or its shard."""
        return self.parameters if self.shard_memory is None else self.shard_memory


Snapshot = tuple[Tensor, ...]  # the resident parameters of each bucket
# The resident part of each parameter, by its first name: its first element in the flattened parameter, and its memory.
ResidentParts = dict[str, tuple[int, Tensor]]


def _do_nothing() -> None:
    pass


class FlatBuckets:
    """The buckets of a model. Creating them moves the model's parameters into them, once and for all.

    With a `RingPlan`, this rank keeps shards, and a parameter has its values only while its slot holds its unit. The
    same is true of the `frozen` tensors of layers, which are in separate buckets. The callbacks are called before or
    after the weights are read or written, and before the gradients are zeroed.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Sequence[BucketPlan] | RingPlan,
        *,
        grad_dtype: torch.dtype = torch.float32,
        rank: int = 0,
        frozen: FrozenTensors = MappingProxyType({}),
        before_reading: Callable[[], None] = _do_nothing,
        before_writing: Callable[[], None] = _do_nothing,
        after_writing: Callable[[], None] = _do_nothing,
        before_zeroing: Callable[[], None] = _do_nothing,
    ) -> None:
        self.model = model
        self._rank = rank
        by_name = dict(model.named_parameters(remove_duplicate=False))
        _check_plan(plan.buckets if isinstance(plan, RingPlan) else plan, specs_of(model))
        _check_plan(plan.frozen if isinstance(plan, RingPlan) else (), frozen_specs(frozen))
        devices = {parameter.device for parameter in by_name.values()}
        if len(devices) != 1:
            raise ValueError(f"the parameters are on {len(devices)} devices; move the model to one device first")
        (device,) = devices
        self.frozen_buckets: list[Bucket] = []
        if isinstance(plan, RingPlan):
            self.buckets, self.frozen_buckets, self.gradient_memory = _make_ring(plan, grad_dtype, device, rank)
        else:
            self.buckets, self.gradient_memory = _make_buckets(plan, grad_dtype, device)
        self._before_reading = before_reading
        self._before_writing = before_writing
        self._after_writing = after_writing
        self._before_zeroing = before_zeroing
        self._views: dict[str, tuple[Tensor, Tensor]] = {}  # first name -> parameter, its view of the buffer
        self.grad_buffers: dict[Tensor, Tensor] = {}  # parameter -> its view of the gradients, for the graphs
        for bucket, slot in self._slots():
            parameter = by_name[slot.parameter.name]
            view = _view(bucket.parameters, slot)
            self._store(bucket, slot, view, parameter)
            parameter.data = view
            self._views[slot.parameter.name] = (parameter, view)
            if bucket.gradients is not None:
                self.grad_buffers[parameter] = _view(bucket.gradients, slot)
        for bucket in self.frozen_buckets:
            for slot in bucket.plan.slots:
                self._move_frozen(bucket, slot, frozen[slot.parameter.name])

    def _move_frozen(self, bucket: Bucket, slot: ParameterSlice, tensors: Sequence[Tensor]) -> None:
        view = _view(bucket.parameters, slot)
        self._store(bucket, slot, view, tensors[0])
        for number, (tensor, moved) in enumerate(zip(tensors, views_of(view, tensors), strict=True)):
            tensor.data = moved
            self._views[f"{slot.parameter.name} ({number})"] = (tensor, moved)

    def _slots(self) -> Iterator[tuple[Bucket, ParameterSlice]]:
        for bucket in self.buckets:
            for slot in bucket.plan.slots:
                yield bucket, slot

    @torch.no_grad()
    def _store(self, bucket: Bucket, slot: ParameterSlice, view: Tensor, value: Tensor) -> None:
        """Copy a parameter to the resident memory of this rank."""
        if bucket.shard_memory is None or _within(bucket.shard_memory, bucket.parameters):
            view.copy_(value)
            return
        flat = value.reshape(-1)
        for owned, start, end in bucket.plan.owned(self._rank):
            if owned is slot:
                first = self._rank * bucket.plan.shard_numel + start - slot.start
                bucket.shard_memory[start:end].copy_(flat[first : first + end - start])

    def parameters_of(self, bucket: Bucket) -> list[Tensor]:
        return [self._views[slot.parameter.name][0] for slot in bucket.plan.slots]

    def check(self) -> None:
        """Raise if a parameter was moved to other memory or replaced by another parameter."""
        by_name = dict(self.model.named_parameters(remove_duplicate=False))
        for _, slot in self._slots():
            parameter, _ = self._views[slot.parameter.name]
            for name in slot.parameter.names:
                if by_name.get(name) is not parameter:
                    raise RuntimeError(f"{name} was replaced by another parameter: copy into it instead")
        self.check_memory()

    def check_memory(self) -> None:
        """Raise if a parameter was moved to other memory: it would no longer follow the buffers."""
        for name, (parameter, view) in self._views.items():
            if parameter.data_ptr() != view.data_ptr() or not _same_layout(parameter, view):
                raise RuntimeError(
                    f"{name} left its flat buffer (`.data =` or `.to()`?), so it is neither trained nor communicated: "
                    "copy into the parameter, and move or convert the model before you shard it"
                )

    def zero_gradients(self) -> None:
        self._before_zeroing()
        self.gradient_memory.zero_()

    # -- weights -----------------------------------------------------------------------------------

    def fill(self, write: Callable[[ResidentParts], None]) -> None:
        """Let `write` fill the resident memory of this rank. All ranks do this, each with its own parts."""
        self.check_memory()
        self._before_writing()
        write(self._resident_parts())
        self._after_writing()

    def _resident_parts(self) -> ResidentParts:
        parts: ResidentParts = {}
        for bucket in self.buckets:
            if bucket.shard_memory is None:
                for slot in bucket.plan.slots:
                    parts[slot.parameter.name] = (0, bucket.parameters.narrow(0, slot.start, slot.numel))
                continue
            shard = self._rank * bucket.plan.shard_numel
            for slot, start, end in bucket.plan.owned(self._rank):
                parts[slot.parameter.name] = (shard + start - slot.start, bucket.shard_memory[start:end])
        return parts

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights by name into the buffers. Nothing changes unless all of them fit."""
        self._check_weights(weights)
        self.check_memory()
        self._before_writing()
        for bucket, slot in self._slots():
            names = [name for name in slot.parameter.names if name in weights]
            _, view = self._views[slot.parameter.name]
            self._store(bucket, slot, view, weights[names[0]])
        self._after_writing()

    def _check_weights(self, weights: Mapping[str, Tensor]) -> None:
        known: dict[str, ParameterSpec] = {}
        missing = []
        for _, slot in self._slots():
            known |= dict.fromkeys(slot.parameter.names, slot.parameter)
            if not any(name in weights for name in slot.parameter.names):
                missing.append(slot.parameter.name)
        unexpected = []
        misshapen = []
        for name, tensor in weights.items():
            if name not in known:
                unexpected.append(name)
            elif tensor.shape != known[name].shape:
                misshapen.append(f"{name} {tuple(tensor.shape)} instead of {tuple(known[name].shape)}")
        problems = []
        for problem, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen)):
            if names:
                problems.append(f"{problem}: {', '.join(names)}")
        if problems:
            raise ValueError("the weights do not fit the model: " + "; ".join(problems))

    def snapshot(self) -> Snapshot:
        """A copy of this rank's resident parameters."""
        self.check_memory()
        self._before_reading()
        return tuple(bucket.resident.clone() for bucket in self.buckets)

    def restore(self, snapshot: Snapshot) -> None:
        """Copy the parameters of a snapshot back into the buffers."""
        layout = [(saved.shape, saved.dtype) for saved in snapshot]
        expected = [(bucket.resident.shape, bucket.resident.dtype) for bucket in self.buckets]
        if layout != expected:
            raise ValueError("the snapshot belongs to another model or plan")
        self.check_memory()
        self._before_writing()
        for bucket, saved in zip(self.buckets, snapshot, strict=True):
            bucket.resident.copy_(saved)
        self._after_writing()


def _make_buckets(
    plan: Sequence[BucketPlan], grad_dtype: torch.dtype, device: torch.device
) -> tuple[list[Bucket], Tensor]:
    """Buckets of replicated parameters, and the contiguous memory of all gradients."""
    trained = sum(bucket_plan.numel for bucket_plan in plan if bucket_plan.trainable)
    gradient_memory = torch.zeros(trained, dtype=grad_dtype, device=device)
    buckets = []
    start = 0
    for bucket_plan in plan:
        parameters = torch.zeros(bucket_plan.numel, dtype=bucket_plan.dtype, device=device)
        gradients = None
        if bucket_plan.trainable:
            gradients = gradient_memory.narrow(0, start, bucket_plan.numel)
            start += bucket_plan.numel
        buckets.append(Bucket(bucket_plan, parameters, gradients))
    return buckets, gradient_memory


def _make_ring(
    plan: RingPlan, grad_dtype: torch.dtype, device: torch.device, rank: int
) -> tuple[list[Bucket], list[Bucket], Tensor]:
    """Buckets of parameters and of frozen tensors in slots, with their shards, and the memory of all gradients.

    The memory of gradients has those of all slots, followed by those of all shards.
    """
    slots = range(plan.num_slots)
    memory = [torch.zeros(plan.slot_nbytes(slot), dtype=torch.uint8, device=device) for slot in slots]
    sizes = [plan.slot_gradients(slot) for slot in slots]
    shards = sum(bucket.shard_numel for bucket in plan.buckets if bucket.trainable)
    gradient_memory = torch.zeros(sum(sizes) + shards, dtype=grad_dtype, device=device)
    next_shard = sum(sizes)
    buckets: list[Bucket] = []
    frozen: list[Bucket] = []
    for index, unit in enumerate(plan.units):
        start = 0
        gradient_start = sum(sizes[: unit.slot])
        for bucket in (*unit.buckets, *unit.frozen):
            nbytes = bucket.numel * bucket.dtype.itemsize
            parameters = memory[unit.slot][start : start + nbytes].view(bucket.dtype)
            start += nbytes
            shard_memory: Tensor | None = None  # of frozen root parameters: no other bucket uses their slot
            if index < plan.num_layers:
                shard_memory = torch.zeros(bucket.shard_numel, dtype=bucket.dtype, device=device)
            elif bucket.trainable:
                shard_memory = parameters.narrow(0, rank * bucket.shard_numel, bucket.shard_numel)
            gradients = gradient_shard_memory = None
            if bucket.trainable:
                gradients = gradient_memory.narrow(0, gradient_start, bucket.numel)
                gradient_start += bucket.numel
                gradient_shard_memory = gradient_memory.narrow(0, next_shard, bucket.shard_numel)
                next_shard += bucket.shard_numel
            bucket_memory = Bucket(bucket, parameters, gradients, shard_memory, gradient_shard_memory)
            (frozen if bucket in unit.frozen else buckets).append(bucket_memory)
    return buckets, frozen, gradient_memory


def _within(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _same_layout(left: Tensor, right: Tensor) -> bool:
    return (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)


def _view(flat: Tensor, slot: ParameterSlice) -> Tensor:
    return flat.narrow(0, slot.start, slot.numel).view(slot.parameter.shape)


def _check_plan(plan: Iterable[BucketPlan], specs: Sequence[ParameterSpec]) -> None:
    planned = {slot.parameter.name: slot.parameter for bucket in plan for slot in bucket.slots}
    actual = {spec.name: spec for spec in specs}
    if planned != actual:
        different = sorted(name for name in planned.keys() | actual.keys() if planned.get(name) != actual.get(name))
        raise ValueError(f"the plan belongs to another model; they differ in {', '.join(different[:5])}")
