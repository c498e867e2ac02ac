"""Flat buffers: the parameters of a bucket in one allocation, all gradients in another, at addresses that never move.

Owns the memory. Loading, taking a snapshot and restoring it copy into the same place. Knows nothing about communication
or hooks; code that changes the contents in the background sets the `before_...` callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollgraph.sharding.bucket_plan import BucketPlan, ParameterSlice, ParameterSpec, specs_of


@dataclass(frozen=True)
class Bucket:
    """The memory of one bucket."""

    plan: BucketPlan
    parameters: Tensor  # [numel]
    gradients: Tensor | None  # [numel]; None if the parameters are frozen

    def shard(self, rank: int) -> Tensor:
        """The part of the parameters that a rank owns."""
        return self.parameters.narrow(0, rank * self.plan.shard_numel, self.plan.shard_numel)

    def gradient_shard(self, rank: int) -> Tensor:
        if self.gradients is None:
            raise ValueError("a frozen bucket has no gradients")
        return self.gradients.narrow(0, rank * self.plan.shard_numel, self.plan.shard_numel)


Snapshot = tuple[Tensor, ...]  # the parameters of each bucket


class FlatBuckets:
    """The buckets of a model. Creating them moves the model's parameters into them, once and for all."""

    def __init__(
        self, model: nn.Module, plan: Sequence[BucketPlan], *, grad_dtype: torch.dtype = torch.float32
    ) -> None:
        self._model = model
        by_name = dict(model.named_parameters(remove_duplicate=False))
        _check_plan(plan, specs_of(model))
        devices = {parameter.device for parameter in by_name.values()}
        if len(devices) != 1:
            raise ValueError(f"the parameters are on {len(devices)} devices; move the model to one device first")
        (device,) = devices
        trained = sum(bucket_plan.numel for bucket_plan in plan if bucket_plan.trainable)
        self.gradient_memory = torch.zeros(
            trained, dtype=grad_dtype, device=device
        )  # of all buckets, one after another
        self.buckets = _make_buckets(plan, self.gradient_memory)
        # Called before the contents are read, written or zeroed. Code that changes them in the background sets these.
        self.before_reading: Callable[[], None] = _do_nothing
        self.before_writing: Callable[[], None] = _do_nothing
        self.before_zeroing: Callable[[], None] = _do_nothing
        self._views: dict[str, tuple[Tensor, Tensor]] = {}  # first name -> parameter, its view of the buffer
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
        for bucket in self.buckets:
            for slot in bucket.plan.slots:
                yield bucket, slot

    def parameters_of(self, bucket: Bucket) -> list[Tensor]:
        return [self._views[slot.parameter.name][0] for slot in bucket.plan.slots]

    def check(self) -> None:
        """Raise if a parameter was moved to other memory, or was replaced by another parameter."""
        by_name = dict(self._model.named_parameters(remove_duplicate=False))
        for _, slot in self._slots():
            parameter, _ = self._views[slot.parameter.name]
            for name in slot.parameter.names:
                if by_name.get(name) is not parameter:
                    raise RuntimeError(f"{name} was replaced by another parameter: copy into it instead")
        self.check_memory()

    def check_memory(self) -> None:
        """Raise if a parameter was moved to other memory: changes of the buffers would not reach it."""
        for name, (parameter, view) in self._views.items():
            if parameter.data_ptr() != view.data_ptr() or not _same_layout(parameter, view):
                raise RuntimeError(
                    f"{name} left its flat buffer (`.data =` or `.to()`?), so it is neither trained nor communicated: "
                    "copy into the parameter, and move or convert the model before you shard it"
                )

    def zero_gradients(self) -> None:
        self.before_zeroing()
        self.gradient_memory.zero_()

    # -- weights -----------------------------------------------------------------------------------

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights by name into the buffers. Nothing changes unless all of them fit."""
        self._check_weights(weights)
        self.check_memory()
        self.before_writing()
        with torch.no_grad():
            for _, slot in self._slots():
                given = [name for name in slot.parameter.names if name in weights]
                _, view = self._views[slot.parameter.name]
                view.copy_(weights[given[0]])

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
        """A copy of all parameters."""
        self.check_memory()
        self.before_reading()
        return tuple(bucket.parameters.clone() for bucket in self.buckets)

    def restore(self, snapshot: Snapshot) -> None:
        """Copy the parameters of a snapshot back into the buffers."""
        given = [(saved.shape, saved.dtype) for saved in snapshot]
        expected = [(bucket.parameters.shape, bucket.parameters.dtype) for bucket in self.buckets]
        if given != expected:
            raise ValueError("the snapshot belongs to another model or plan")
        self.check_memory()
        self.before_writing()
        for bucket, saved in zip(self.buckets, snapshot, strict=True):
            bucket.parameters.copy_(saved)


def _do_nothing() -> None:
    pass


def _make_buckets(plan: Iterable[BucketPlan], gradient_memory: Tensor) -> list[Bucket]:
    buckets = []
    start = 0
    for bucket_plan in plan:
        parameters = torch.zeros(bucket_plan.numel, dtype=bucket_plan.dtype, device=gradient_memory.device)
        gradients = None
        if bucket_plan.trainable:
            gradients = gradient_memory.narrow(0, start, bucket_plan.numel)
            start += bucket_plan.numel
        buckets.append(Bucket(bucket_plan, parameters, gradients))
    return buckets


def _same_layout(left: Tensor, right: Tensor) -> bool:
    return (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)


def _view(flat: Tensor, slot: ParameterSlice) -> Tensor:
    return flat.narrow(0, slot.start, slot.numel).view(slot.parameter.shape)


def _check_plan(plan: Iterable[BucketPlan], specs: Sequence[ParameterSpec]) -> None:
    planned = {slot.parameter.name: slot.parameter for bucket in plan for slot in bucket.slots}
    found = {spec.name: spec for spec in specs}
    if planned != found:
        different = sorted(name for name in planned.keys() | found.keys() if planned.get(name) != found.get(name))
        raise ValueError(f"the plan belongs to another model; they differ in {', '.join(different[:5])}")
