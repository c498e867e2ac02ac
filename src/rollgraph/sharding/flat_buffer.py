"""Flat buffers: the parameters of a bucket in one allocation, their gradients in another, at addresses that never move.

Owns the layout (a plan that touches no tensor), the memory, and what may be done to it: load, snapshot and
restore are copies into the same place. Knows nothing of ranks that talk to each other, nor of hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 256  # bytes: where a parameter starts, and a shard


@dataclass(frozen=True)
class ParameterSpec:
    """What the layout needs to know of a parameter. `names` are all it has, where it is tied."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class ParameterSlice:
    """A parameter's place in its bucket, in elements."""

    parameter: ParameterSpec
    start: int

    @property
    def numel(self) -> int:
        return self.parameter.shape.numel()


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: slots in the order in which gradients arrive, and a size that every rank gets an equal part of."""

    slots: tuple[ParameterSlice, ...]
    dtype: torch.dtype
    trainable: bool
    numel: int
    ranks: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.ranks

    def owned(self, rank: int) -> Iterator[tuple[ParameterSlice, int, int]]:
        """The parts of parameters in a rank's shard: the slot, and where its part starts and ends in the shard."""
        first = rank * self.shard_numel
        for slot in self.slots:
            start, end = max(slot.start - first, 0), min(slot.start + slot.numel - first, self.shard_numel)
            if start < end:
                yield slot, start, end

    def nbytes(self, grad_dtype: torch.dtype) -> int:
        """Parameters and gradients, on each rank."""
        return self.numel * (self.dtype.itemsize + (grad_dtype.itemsize if self.trainable else 0))


def specs_of(model: nn.Module, order: Sequence[str] = ()) -> list[ParameterSpec]:
    """The parameters of a model, each once: those named in `order` first, then the others as they were registered."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    specs = [ParameterSpec(tuple(n), p.shape, p.dtype, p.requires_grad) for p, n in names.items()]
    place = {name: index for index, name in enumerate(order)}
    return sorted(specs, key=lambda spec: min(place.get(name, len(place)) for name in spec.names))


def execution_order(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """The names of parameters in the order in which a forward reaches their modules."""
    reached: dict[nn.Module, None] = {}
    handles = [m.register_forward_pre_hook(lambda module, _: reached.setdefault(module)) for m in model.modules()]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    names = {module: name for name, module in model.named_modules()}
    return [
        f"{names[module]}.{name}".removeprefix(".")
        for module in reached
        for name, _ in module.named_parameters(recurse=False)
    ]


def plan_buckets(parameters: Sequence[ParameterSpec], *, ranks: int, bucket_bytes: int) -> tuple[BucketPlan, ...]:
    """Cut parameters, given in the order of execution, into buckets in the order in which backward reaches them.

    A bucket holds one dtype, and is closed once it has `bucket_bytes`; frozen parameters have buckets of their own.
    """
    if ranks < 1 or bucket_bytes < 1:
        raise ValueError(f"ranks={ranks}, bucket_bytes={bucket_bytes}: both must be positive")
    open_buckets: dict[tuple[torch.dtype, bool], list[ParameterSlice]] = {}
    closed: list[BucketPlan] = []
    for parameter in reversed(parameters):
        key = (parameter.dtype, parameter.trainable)
        slots = open_buckets.setdefault(key, [])
        unit = _aligned_elements(parameter.dtype)
        start = _round_up(slots[-1].start + slots[-1].numel, unit) if slots else 0
        slots.append(ParameterSlice(parameter, start))
        if (start + parameter.shape.numel()) * parameter.dtype.itemsize >= bucket_bytes:
            closed.append(_close(open_buckets.pop(key), ranks))
    return (*closed, *(_close(slots, ranks) for slots in open_buckets.values()))


def _close(slots: list[ParameterSlice], ranks: int) -> BucketPlan:
    last, dtype = slots[-1], slots[-1].parameter.dtype
    numel = _round_up(max(1, last.start + last.numel), ranks * _aligned_elements(dtype))
    return BucketPlan(tuple(slots), dtype, last.parameter.trainable, numel, ranks)


def _aligned_elements(dtype: torch.dtype) -> int:
    return max(1, ALIGNMENT // dtype.itemsize)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True)
class Bucket:
    """The memory of one bucket."""

    plan: BucketPlan
    parameters: Tensor  # [numel]
    gradients: Tensor | None  # [numel], None if frozen

    def shard(self, rank: int) -> Tensor:
        """The part of the parameters that a rank owns."""
        return self.parameters.narrow(0, rank * self.plan.shard_numel, self.plan.shard_numel)

    def gradient_shard(self, rank: int) -> Tensor:
        if self.gradients is None:
            raise ValueError("a frozen bucket has no gradients")
        return self.gradients.narrow(0, rank * self.plan.shard_numel, self.plan.shard_numel)


Snapshot = tuple[Tensor, ...]  # the parameters of each bucket


class FlatBuckets:
    """The buckets of a model. Making it moves the model's parameters into them, once and for good."""

    def __init__(
        self, model: nn.Module, plan: Sequence[BucketPlan], *, grad_dtype: torch.dtype = torch.float32
    ) -> None:
        self._model = model
        by_name = dict(model.named_parameters(remove_duplicate=False))
        _check_plan(plan, specs_of(model))
        devices = {parameter.device for parameter in by_name.values()}
        if len(devices) != 1:
            raise ValueError(f"the parameters are on {len(devices)} devices; move the model to one first")
        (device,) = devices
        self.buckets = [
            Bucket(
                bucket,
                torch.zeros(bucket.numel, dtype=bucket.dtype, device=device),
                torch.zeros(bucket.numel, dtype=grad_dtype, device=device) if bucket.trainable else None,
            )
            for bucket in plan
        ]
        # Somebody who moves the buffers' contents in the background stops here, before they are read or written.
        self.before_reading: Callable[[], None] = _nothing
        self.before_writing: Callable[[], None] = _nothing
        self.before_zeroing: Callable[[], None] = _nothing
        self._views: dict[str, tuple[Tensor, Tensor]] = {}  # first name -> parameter and its view of the buffer
        self.grad_buffers: dict[Tensor, Tensor] = {}  # parameter -> its view of the gradients, for the graphs
        for bucket, slot in self._slots():
            parameter = by_name[slot.parameter.name]
            view = _view(bucket.parameters, slot)
            with torch.no_grad():
                view.copy_(parameter)
            parameter.data = view
            self._views[slot.parameter.name] = (parameter, view)
            if bucket.gradients is not None:
                self.grad_buffers[parameter] = _view(bucket.gradients, slot)

    def _slots(self) -> Iterator[tuple[Bucket, ParameterSlice]]:
        return ((bucket, slot) for bucket in self.buckets for slot in bucket.plan.slots)

    def parameters_of(self, bucket: Bucket) -> list[Tensor]:
        return [self._views[slot.parameter.name][0] for slot in bucket.plan.slots]

    def check(self) -> None:
        """Raise if a parameter was given other memory, or another parameter took its place."""
        by_name = dict(self._model.named_parameters(remove_duplicate=False))
        for _, slot in self._slots():
            parameter, _ = self._views[slot.parameter.name]
            for name in slot.parameter.names:
                if by_name.get(name) is not parameter:
                    raise RuntimeError(f"{name} is not the parameter it was: copy into it instead of replacing it")
        self.check_memory()

    def check_memory(self) -> None:
        """Raise if a parameter was given other memory: what is done to the buffers would not reach it."""
        for name, (parameter, view) in self._views.items():
            if parameter.data_ptr() != view.data_ptr() or not _same_layout(parameter, view):
                raise RuntimeError(
                    f"{name} left its flat buffer (`.data =`, `.to()`?), so that it is neither trained nor exchanged: "
                    "copy into the parameter, and move or convert the model before it is sharded"
                )

    def zero_gradients(self) -> None:
        self.before_zeroing()
        for bucket in self.buckets:
            if bucket.gradients is not None:
                bucket.gradients.zero_()

    # -- weights -----------------------------------------------------------------------------------

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights by name into their places. Nothing is changed unless every one of them fits."""
        known = {name: slot.parameter for _, slot in self._slots() for name in slot.parameter.names}
        missing = [s.parameter.name for _, s in self._slots() if not any(n in weights for n in s.parameter.names)]
        extra = [name for name in weights if name not in known]
        shaped = [
            f"{name} {tuple(tensor.shape)} instead of {tuple(known[name].shape)}"
            for name, tensor in weights.items()
            if name in known and tensor.shape != known[name].shape
        ]
        problems = [
            f"{what}: {', '.join(found)}"
            for what, found in (("missing", missing), ("unexpected", extra), ("of another shape", shaped))
            if found
        ]
        if problems:
            raise ValueError("weights do not fit: " + "; ".join(problems))
        self.check_memory()
        self.before_writing()
        with torch.no_grad():
            for _, slot in self._slots():
                name = next(n for n in slot.parameter.names if n in weights)
                self._views[slot.parameter.name][1].copy_(weights[name])

    def snapshot(self) -> Snapshot:
        """A copy of all parameters."""
        self.check_memory()
        self.before_reading()
        return tuple(bucket.parameters.clone() for bucket in self.buckets)

    def restore(self, snapshot: Snapshot) -> None:
        """Parameters as they were, in the same memory."""
        fits = [(s.shape, s.dtype) for s in snapshot] == [
            (b.parameters.shape, b.parameters.dtype) for b in self.buckets
        ]
        if not fits:
            raise ValueError("the snapshot is of another model or plan")
        self.check_memory()
        self.before_writing()
        for bucket, saved in zip(self.buckets, snapshot, strict=True):
            bucket.parameters.copy_(saved)


def _nothing() -> None:
    pass


def _same_layout(left: Tensor, right: Tensor) -> bool:
    return (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)


def _view(flat: Tensor, slot: ParameterSlice) -> Tensor:
    return flat.narrow(0, slot.start, slot.numel).view(slot.parameter.shape)


def _check_plan(plan: Iterable[BucketPlan], specs: Sequence[ParameterSpec]) -> None:
    planned = {slot.parameter.name: slot.parameter for bucket in plan for slot in bucket.slots}
    found = {spec.name: spec for spec in specs}
    if planned != found:
        different = sorted(name for name in planned.keys() | found.keys() if planned.get(name) != found.get(name))
        raise ValueError(f"the plan is not that of this model: {', '.join(different[:5])}")
