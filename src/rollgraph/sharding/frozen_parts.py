"""What the units of a ring have beside their parameters: tensors that nobody trains, such as the base of adapters.

They are gathered with the parameters, and have no gradients and no optimizer state. No checkpoint has them, so whoever
creates the model loads them. Sharding does not know what they are for; whoever knows the model gives it `FrozenParts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from rollgraph.sharding.bucket_plan import ParameterSpec

FrozenTensors = Mapping[str, Sequence[Tensor]]  # by name: a tensor, and then views of it, which go where it goes


class FrozenParts(NamedTuple):
    """Two functions of a unit, or of a copy of one."""

    tensors: Callable[[nn.Module], FrozenTensors]
    # What it returns is called whenever the unit has been gathered, and computes in it what depends on its parameters.
    refresh: Callable[[nn.Module], Callable[[], object]]


def find_frozen(parts: FrozenParts | None, units: Sequence[nn.Module]) -> list[FrozenTensors]:
    """The frozen tensors of each unit, by names that no other unit has, and no parameter."""
    if parts is None:
        return [{} for _ in units]
    found: list[FrozenTensors] = []
    for index, unit in enumerate(units):
        found.append({f"layer {index}: {name}": tensors for name, tensors in parts.tensors(unit).items()})
    return found


def frozen_specs(frozen: FrozenTensors) -> list[ParameterSpec]:
    """What a layout needs to know about frozen tensors, which may be on the meta device."""
    specs = []
    for name, (tensor, *_) in frozen.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous: it cannot be divided among ranks")
        specs.append(ParameterSpec((name,), tensor.shape, tensor.dtype, trainable=False))
    return specs


def views_of(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of other memory of the first tensor's size, each as it is in these tensors, of which it is the first."""
    start = memory.storage_offset() - tensors[0].storage_offset()
    return [memory.as_strided(each.shape, each.stride(), start + each.storage_offset()) for each in tensors]
