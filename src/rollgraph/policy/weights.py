"""Weight slots: named sets of weights for one model, such as the policy and its reference, swapped in and out in place.

The slot `policy` is the model itself, whose memory the graphs point to. Every other slot is a snapshot on the device or
in host memory. `use` swaps a slot and the policy in place, bucket by bucket, so it needs memory for one more bucket
(two for a slot in host memory, whose copies overlap). On leaving, the policy is restored bit for bit. Addresses never
change, so no graph has to be captured again. If parameters are sharded, so are slots: shards are swapped, and full
parameters are gathered anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from rollgraph.graph.hooks import Guard
from rollgraph.model.lora import Adapters, frozen_tensors, make_lora_a_copier
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.fsdp.layout import FrozenParts

# -- swaps with pinned host memory -----------------------------------------------------------------


class HostSwap:
    """Swaps buckets on the device with slots in host memory, through two buffers on the device. Never blocks the host.

    The bucket is copied to a buffer, overwritten from the slot, and then copied from the buffer to the slot while the
    next bucket is on its way in.
    """

    def __init__(self, buckets: Sequence[Tensor]) -> None:
        self._device = buckets[0].device
        largest = max(bucket.nbytes for bucket in buckets)
        self._inward = torch.cuda.Stream(self._device)
        self._outward = torch.cuda.Stream(self._device)
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._buffers]

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Order the swaps inside after the work queued on the current stream, and before its later work."""
        current = torch.cuda.current_stream(self._device)
        self._inward.wait_stream(current)
        self._inward.wait_stream(self._outward)  # a slot may still be written to
        try:
            yield
        finally:
            current.wait_stream(self._inward)

    def swap(self, index: int, bucket: Tensor, slot: Tensor) -> None:
        buffer_index = index % len(self._buffers)
        backup = self._buffers[buffer_index][: bucket.nbytes].view(bucket.dtype)
        with torch.cuda.stream(self._inward):
            self._inward.wait_event(self._free[buffer_index])
            backup.copy_(bucket)
            try:
                bucket.copy_(slot, non_blocking=True)
                self._outward.wait_stream(self._inward)
                with torch.cuda.stream(self._outward):
                    slot.copy_(backup, non_blocking=True)
            except BaseException:
                bucket.copy_(backup)
                raise
        self._free[buffer_index].record(self._outward)

    def synchronize(self) -> None:
        """Block the host until all slots are written."""
        self._outward.synchronize()


# -- slots -----------------------------------------------------------------------------------------

POLICY = "policy"
Location = Literal["device", "host"]


class SlotError(RuntimeError):
    """A weight slot does not exist, cannot be used now, or has changed."""


class WeightSlots:
    """The slots of a model. `verify` compares checksums of the policy before and after each use of another slot."""

    def __init__(self, model: ShardedModel, *, verify: bool = False) -> None:
        self._model = model
        self._verify = verify
        self._slots: dict[str, list[Tensor]] = {}
        self._host_swap: HostSwap | None = None  # created for the first slot in host memory
        self.current = POLICY  # the slot whose weights are in the model now

    def __contains__(self, name: str) -> bool:
        return name == POLICY or name in self._slots

    def save(self, name: str, location: Location = "device") -> None:
        """Copy the current policy to a slot. A new slot is allocated at `location`; an existing one stays in place."""
        if name == POLICY:
            raise SlotError(f"{POLICY!r} is the model itself: save it under another name")
        if self.current != POLICY:
            raise SlotError(f"cannot save the policy as {name!r} while {self.current!r} is in the model")
        self._model.flat.check_memory()  # raises if a parameter has left its bucket, whose copy would miss it
        self._model.before_resident_access()
        buckets = self._buckets()
        if name not in self._slots:
            self._slots[name] = self._allocate(buckets, location)
        if self._host_swap is not None:
            self._host_swap.synchronize()  # the last swap may still be writing to the slot
        for slot, bucket in zip(self._slots[name], buckets, strict=True):
            slot.copy_(bucket)

    def _buckets(self) -> list[Tensor]:
        return [bucket.resident for bucket in self._model.flat.buckets]

    def _allocate(self, buckets: list[Tensor], location: Location) -> list[Tensor]:
        if location == "device" or not buckets[0].is_cuda:
            return [torch.empty_like(bucket) for bucket in buckets]
        if self._host_swap is None:
            self._host_swap = HostSwap(buckets)
        return [torch.empty_like(bucket, device="cpu", pin_memory=True) for bucket in buckets]

    def drop(self, name: str) -> None:
        """Free the memory of a slot."""
        if name == self.current:
            raise SlotError(f"{name!r} is in the model now")
        self._slots.pop(name, None)

    def nbytes(self, location: Location) -> int:
        """The total size of all slots on the device, or of all in host memory."""
        device = self._model.flat.buckets[0].resident.device
        total = 0
        for slot in self._slots.values():
            for tensor in slot:
                if (tensor.device == device) == (location == "device"):
                    total += tensor.nbytes
        return total

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Swap the weights of a slot into the model; on leaving, restore the policy, exception or not."""
        if name == self.current:
            self._model.refresh_full_parameters()
            yield
            return
        if self.current != POLICY:
            raise SlotError(f"{self.current!r} is in the model: leave it before you use {name!r}")
        if name not in self._slots:
            raise SlotError(f"there is no slot {name!r}: save() it first (slots: {', '.join(self._slots) or 'none'})")
        self._model.flat.check_memory()
        self._model.before_resident_access()
        before = self.checksum() if self._verify else None
        swapped = 0
        try:
            with self._copies(name):
                for index in range(len(self._slots[name])):
                    self._swap(name, index)
                    swapped = index + 1
            self._model.gathers.after_writing()
            self._model.refresh_full_parameters()
            self.current = name
            self._model.swapped_in = name
            yield
        finally:
            with self._copies(name):
                for index in range(swapped):
                    self._swap(name, index)
            self._model.gathers.after_writing()
            self.current = POLICY
            self._model.swapped_in = None
            if before is not None and self.checksum() != before:
                raise SlotError(f"the policy is not what it was before {name!r} was used")

    def _copies(self, name: str) -> AbstractContextManager[None]:
        """A context in which swaps are ordered with other work on the device."""
        host_swap = self._host_swap_of(name)
        return nullcontext() if host_swap is None else host_swap.ordered()

    def _host_swap_of(self, name: str) -> HostSwap | None:
        """The swapper of a slot in host memory; None for a slot on the device."""
        on_device = self._slots[name][0].device == self._model.flat.buckets[0].resident.device
        return None if on_device else self._host_swap

    def _swap(self, name: str, index: int) -> None:
        """Swap the weights of a bucket and of a slot. If that fails, the bucket is unchanged."""
        bucket = self._model.flat.buckets[index].resident
        slot = self._slots[name][index]
        host_swap = self._host_swap_of(name)
        if host_swap is not None:
            host_swap.swap(index, bucket, slot)
            return
        backup = bucket.clone()
        try:
            bucket.copy_(slot)
            slot.copy_(backup)
        except BaseException:
            bucket.copy_(backup)
            raise

    def checksum(self) -> int:
        """A checksum of all weights in the model now."""
        total = 0
        for bucket in self._model.flat.buckets:
            bits = bucket.resident.view(torch.uint8).view(-1, 8).view(torch.int64).reshape(-1)
            bits = bits ^ (bits >> 32 & 0xFFFFFFFF)  # differences in the high bits alone would overflow
            positions = torch.arange(1, bits.numel() + 1, device=bits.device)
            total = (total * 31 + int((bits * (2 * positions + 1)).sum())) % (1 << 64)
        return total


# -- adapters --------------------------------------------------------------------------------------
# The matmuls of an adapted layer read copies of A, which must follow every change of the parameters: an optimizer step,
# a gather, a slot swapped in, a checkpoint. They are refreshed when a phase begins, around the use of a slot and before
# a minibatch. If a refresh were missing here, a guard would notice before the graph runs. For a model without adapters,
# nothing here does anything.
#
# If parameters are sharded, so is the base, and A is copied as part of gathering a layer: nothing else writes to the
# memory in which layers take turns. The guards are then those of the ring and of the full parameters.

SHARDED_BASE = FrozenParts(frozen_tensors, make_lora_a_copier)  # the frozen tensors of layers with adapters


class AdaptedWeights:
    """The weights that a worker computes with: slots, plus adapters switched on or off."""

    def __init__(self, adapters: Adapters | None, sharded: ShardedModel, slots: WeightSlots) -> None:
        self._adapters = adapters
        self._sharded = sharded
        self._slots = slots
        self._base: str | None = None  # the name under which the base scores, if it has one
        self.copy_guards: list[Guard] = []  # of graphs whose parameters a hook gathers: only copies of A can be stale
        if adapters is not None and sharded.shards_parameters:
            adapters.leave_copies_to_gathers()
        elif adapters is not None:
            adapters.watch([bucket.parameters for bucket in sharded.flat.buckets])
            self.copy_guards.append(adapters.stale)
        self.guards: list[Guard] = [sharded.gathers.stale, *self.copy_guards]  # of all other graphs

    def __contains__(self, name: str) -> bool:
        return name == self._base or name in self._slots

    def name_base(self, name: str) -> None:
        """Let the base, without its adapters, score under this name. It then needs no slot."""
        if self._adapters is None:
            raise ValueError("the model has no adapters: save() its weights to a slot")
        if name in self._slots:
            raise SlotError(f"{name!r} is a slot already: give the base another name")
        self._base = name

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Compute with the weights of this name; on leaving, with the previous ones, exception or not."""
        if name == self._base and self._adapters is not None:
            self._sharded.refresh_full_parameters()
            with self._adapters.off():
                yield
            return
        if self._adapters is not None and not self._adapters.enabled:
            raise SlotError(f"the adapters are switched off: leave the base before you use {name!r}")
        try:
            with self._slots.use(name):
                self.refresh()
                yield
        finally:
            self.refresh()

    def refresh(self) -> None:
        """Gather the parameters of all ranks and copy A where the matmuls read it."""
        if self._adapters is not None and not self._sharded.shards_parameters:
            self._sharded.gather()
            self._adapters.refresh()

    def not_the_policy(self) -> str | None:
        """A guard of training: the weights in the model are not the policy's."""
        if self._slots.current != POLICY:
            return f"the weights in the model are {self._slots.current!r}"
        if self._adapters is not None and not self._adapters.enabled:
            return "the adapters are switched off"
        return None

    @contextmanager
    def gathered_and_paused(self) -> Iterator[None]:
        """Gather the full parameters and copy A; run no hooks inside."""
        with self._sharded.paused(gather=True):
            self.refresh()
            yield
