"""Weight slots: named sets of weights for one model.

`policy` is what is in the model, and what the graphs point to. Every other slot, such as the reference policy, is a
snapshot on the device or in host memory. `use` exchanges the two in place, bucket by bucket, so it needs memory for one
more bucket (two for a slot in host memory, whose copies overlap). On leaving, the policy is what it was, bit for bit.
Addresses never move, so no graph has to be captured again. If parameters are sharded, so are slots: shards are
exchanged, and what was gathered from them is gathered anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from rollgraph.policy.host_exchange import HostExchange
from rollgraph.sharding import ShardedModel

POLICY = "policy"
Place = Literal["device", "host"]


class SlotError(RuntimeError):
    """A weight slot does not exist, cannot be used now, or has changed."""


class WeightSlots:
    """The slots of a model. `verify` compares checksums of the policy before and after each use of another slot."""

    def __init__(self, model: ShardedModel, *, verify: bool = False) -> None:
        self._model = model
        self._verify = verify
        self._slots: dict[str, list[Tensor]] = {}
        self._host_exchange: HostExchange | None = None  # created for the first slot in host memory
        self.current = POLICY  # the slot whose weights are in the model now

    def __contains__(self, name: str) -> bool:
        return name == POLICY or name in self._slots

    def save(self, name: str, place: Place = "device") -> None:
        """Copy the policy, as it is now, to a slot. The memory of a slot is allocated once."""
        if name == POLICY:
            raise SlotError(f"{POLICY!r} is the model itself: save it under another name")
        if self.current != POLICY:
            raise SlotError(f"cannot save the policy as {name!r} while {self.current!r} is in the model")
        self._model.flat.check_memory()
        self._model.before_exchange()
        buckets = self._buckets()
        if name not in self._slots:
            self._slots[name] = self._allocate(buckets, place)
        if self._host_exchange is not None:
            self._host_exchange.synchronize()
        for slot, bucket in zip(self._slots[name], buckets, strict=True):
            slot.copy_(bucket)

    def _buckets(self) -> list[Tensor]:
        return [bucket.kept for bucket in self._model.flat.buckets]

    def _allocate(self, buckets: list[Tensor], place: Place) -> list[Tensor]:
        if place == "device" or not buckets[0].is_cuda:
            return [torch.empty_like(bucket) for bucket in buckets]
        if self._host_exchange is None:
            self._host_exchange = HostExchange(buckets)
        return [torch.empty_like(bucket, device="cpu", pin_memory=True) for bucket in buckets]

    def drop(self, name: str) -> None:
        """Free the memory of a slot."""
        if name == self.current:
            raise SlotError(f"{name!r} is in the model now")
        self._slots.pop(name, None)

    def nbytes(self, place: Place) -> int:
        """The bytes of all slots on the device or in host memory."""
        device = self._model.flat.buckets[0].kept.device
        total = 0
        for slot in self._slots.values():
            for tensor in slot:
                if (tensor.device == device) == (place == "device"):
                    total += tensor.nbytes
        return total

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Put the weights of a slot into the model; afterwards restore those it had before, exception or not."""
        if name == self.current:
            self._model.refresh_copy()
            yield
            return
        if self.current != POLICY:
            raise SlotError(f"{self.current!r} is in the model: leave it before you use {name!r}")
        if name not in self._slots:
            raise SlotError(f"there is no slot {name!r}: save() it first (slots: {', '.join(self._slots) or 'none'})")
        self._model.flat.check_memory()
        self._model.before_exchange()
        before = self.checksum() if self._verify else None
        exchanged = 0
        try:
            with self._copies(name):
                for index in range(len(self._slots[name])):
                    self._exchange(name, index)
                    exchanged = index + 1
            self._model.after_exchange()
            self._model.refresh_copy()
            self.current = name
            self._model.swapped_in = name
            yield
        finally:
            with self._copies(name):
                for index in range(exchanged):
                    self._exchange(name, index)
            self._model.after_exchange()
            self.current = POLICY
            self._model.swapped_in = None
            if before is not None and self.checksum() != before:
                raise SlotError(f"the policy is not what it was before {name!r} was used")

    def _copies(self, name: str) -> AbstractContextManager[None]:
        """A context for exchanges, which keeps their order with other work on the device."""
        exchange = self._exchange_of(name)
        return nullcontext() if exchange is None else exchange.ordered()

    def _exchange_of(self, name: str) -> HostExchange | None:
        """How to exchange with a slot in host memory; None for a slot on the device."""
        on_device = self._slots[name][0].device == self._model.flat.buckets[0].kept.device
        return None if on_device else self._host_exchange

    def _exchange(self, name: str, index: int) -> None:
        """Swap the weights of a bucket and of a slot. If that fails, the bucket keeps its own."""
        bucket = self._model.flat.buckets[index].kept
        slot = self._slots[name][index]
        host_exchange = self._exchange_of(name)
        if host_exchange is not None:
            host_exchange.exchange(index, bucket, slot)
            return
        kept = bucket.clone()
        try:
            bucket.copy_(slot)
            slot.copy_(kept)
        except BaseException:
            bucket.copy_(kept)
            raise

    def checksum(self) -> int:
        """A checksum of all bits that are in the model now."""
        total = 0
        for bucket in self._model.flat.buckets:
            bits = bucket.kept.view(torch.uint8).view(-1, 8).view(torch.int64).reshape(-1)
            bits = bits ^ (bits >> 32 & 0xFFFFFFFF)  # so that no difference is in the high bits alone, which overflow
            positions = torch.arange(1, bits.numel() + 1, device=bits.device)
            total = (total * 31 + int((bits * (2 * positions + 1)).sum())) % (1 << 64)
        return total
