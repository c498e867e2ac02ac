"""Weight slots: named sets of weights for the one model there is.

`policy` is what the graphs point to. Any other slot is a snapshot, on the device or in host memory. `use` exchanges
the two in place, bucket by bucket, so that it needs room for one bucket more (two, with a slot in host memory, whose
copies run beside each other), and on leaving the policy is, bit for bit, what it was. Addresses never move, so no graph
has to be captured again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from rollgraph.sharding import ShardedModel

POLICY = "policy"
Place = Literal["device", "host"]


class SlotError(RuntimeError):
    """Weights were asked for that are not there, or are not what they were."""


class WeightSlots:
    """The slots of a model. `verify` compares checksums of the policy before and after each exchange."""

    def __init__(self, model: ShardedModel, *, verify: bool = False) -> None:
        self._model, self._verify = model, verify
        self._slots: dict[str, list[Tensor]] = {}
        self._lanes: _Lanes | None = None  # made for the first slot in host memory
        self.current = POLICY  # whose weights are in the model now

    def __contains__(self, name: str) -> bool:
        return name == POLICY or name in self._slots

    def save(self, name: str, place: Place = "device") -> None:
        """Keep the policy as it is now under a name, in memory that is allocated once."""
        if name == POLICY:
            raise SlotError(f"{POLICY!r} is the model itself: keep it under another name")
        if self.current != POLICY:
            raise SlotError(f"cannot keep the policy as {name!r} while {self.current!r} is in the model")
        self._model.flat.check_memory()
        self._model.full_parameters("gather")
        buckets = [bucket.parameters for bucket in self._model.flat.buckets]
        if name not in self._slots:
            host = place == "host" and buckets[0].is_cuda
            self._slots[name] = [
                torch.empty_like(b, device="cpu", pin_memory=True) if host else torch.empty_like(b) for b in buckets
            ]
            if host and self._lanes is None:
                self._lanes = _Lanes(buckets)
        if self._lanes is not None:
            self._lanes.finish()
        for slot, bucket in zip(self._slots[name], buckets, strict=True):
            slot.copy_(bucket)

    def drop(self, name: str) -> None:
        if name == self.current:
            raise SlotError(f"{name!r} is in the model now")
        self._slots.pop(name, None)

    def nbytes(self, place: Place) -> int:
        """Of all slots in one place."""
        on_device = self._model.flat.buckets[0].parameters.device
        return sum(
            t.nbytes for slot in self._slots.values() for t in slot if (t.device == on_device) == (place == "device")
        )

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """The model has the weights of a slot inside; afterwards those it had before, exception or not."""
        if name == self.current:
            yield
            return
        if self.current != POLICY:
            raise SlotError(f"{self.current!r} is in the model: leave it before {name!r}")
        if name not in self._slots:
            raise SlotError(
                f"there is no slot {name!r}: save() it first (there are: {', '.join(self._slots) or 'none'})"
            )
        self._model.flat.check_memory()
        self._model.full_parameters("gather")
        before = self.checksum() if self._verify else None
        done = 0
        try:
            with self._copies(name):
                for index in range(len(self._slots[name])):
                    self._exchange(name, index)
                    done = index + 1
            self.current = self._model.lent_to = name
            yield
        finally:
            with self._copies(name):
                for index in range(done):
                    self._exchange(name, index)
            self.current, self._model.lent_to = POLICY, None
            if before is not None and self.checksum() != before:
                raise SlotError(f"the policy is not what it was before {name!r} was used")

    def _copies(self, name: str) -> AbstractContextManager[None]:
        """Around exchanges: what came before them, and what comes after, keeps its order with the copies."""
        return self._lanes.ordered() if self._lanes is not None and self._in_host_memory(name) else nullcontext()

    def _in_host_memory(self, name: str) -> bool:
        return self._slots[name][0].device != self._model.flat.buckets[0].parameters.device

    def _exchange(self, name: str, index: int) -> None:
        """The bucket's weights and the slot's change places; if they cannot, the bucket's stay."""
        bucket, slot = self._model.flat.buckets[index].parameters, self._slots[name][index]
        if self._lanes is not None and self._in_host_memory(name):
            self._lanes.exchange(index, bucket, slot)
            return
        kept = bucket.clone()
        try:
            bucket.copy_(slot)
            slot.copy_(kept)
        except BaseException:
            bucket.copy_(kept)
            raise

    def checksum(self) -> int:
        """Of all bits that are in the model now."""
        total = 0
        for bucket in self._model.flat.buckets:
            bits = bucket.parameters.view(torch.uint8).view(-1, 8).view(torch.int64).reshape(-1)
            bits = bits ^ (bits >> 32 & 0xFFFFFFFF)  # so that no difference is in the high bits alone, which overflow
            places = torch.arange(1, bits.numel() + 1, device=bits.device)
            total = (total * 31 + int((bits * (2 * places + 1)).sum())) % (1 << 64)
        return total


class _Lanes:
    """Exchanges with pinned host memory, on two side streams: a bucket goes out while the next one comes in.

    A bucket that goes out waits in one of two buffers. Nothing here waits on the host.
    """

    def __init__(self, buckets: Sequence[Tensor]) -> None:
        self._device, most = buckets[0].device, max(bucket.nbytes for bucket in buckets)
        self._inward, self._outward = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._buffers = [torch.empty(most, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._buffers]

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """What the current stream has to do comes first, and what it is given afterwards finds the weights there."""
        current = torch.cuda.current_stream(self._device)
        self._inward.wait_stream(current)
        self._inward.wait_stream(self._outward)  # a slot that is still being written
        try:
            yield
        finally:
            current.wait_stream(self._inward)

    def exchange(self, index: int, bucket: Tensor, slot: Tensor) -> None:
        turn = index % len(self._buffers)
        kept = self._buffers[turn][: bucket.nbytes].view(bucket.dtype)
        with torch.cuda.stream(self._inward):
            self._inward.wait_event(self._free[turn])
            kept.copy_(bucket)
            try:
                bucket.copy_(slot, non_blocking=True)
                self._outward.wait_stream(self._inward)
                with torch.cuda.stream(self._outward):
                    slot.copy_(kept, non_blocking=True)
            except BaseException:
                bucket.copy_(kept)
                raise
        self._free[turn].record(self._outward)

    def finish(self) -> None:
        """Until no slot is being written."""
        self._outward.synchronize()
