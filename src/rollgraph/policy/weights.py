"""Weight slots: named sets of weights for the one model there is.

`policy` is what the graphs point to. Any other slot is a snapshot, on the device or in host memory. `use` exchanges
the two in place, bucket by bucket, so that it needs room for one bucket more, and on leaving the policy is, bit for
bit, what it was. Addresses never move, so no graph has to be captured again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from rollgraph.sharding import ShardedModel

POLICY = "policy"
Place = Literal["device", "host"]


class WeightsError(RuntimeError):
    """Weights were asked for that are not there, or are not what they were."""


class WeightSlots:
    """The slots of a model. `verify` compares checksums of the policy before and after each exchange."""

    def __init__(self, model: ShardedModel, *, verify: bool = False) -> None:
        self._model, self._verify = model, verify
        self._slots: dict[str, list[Tensor]] = {}
        self.current = POLICY  # whose weights are in the model now

    def __contains__(self, name: str) -> bool:
        return name == POLICY or name in self._slots

    def save(self, name: str, place: Place = "device") -> None:
        """Keep the policy as it is now under a name, in memory that is allocated once."""
        if name == POLICY:
            raise WeightsError(f"{POLICY!r} is the model itself: keep it under another name")
        if self.current != POLICY:
            raise WeightsError(f"cannot keep the policy as {name!r} while {self.current!r} is in the model")
        self._model.full_parameters("gather")
        buckets = [bucket.parameters for bucket in self._model.flat.buckets]
        if name not in self._slots:
            host = place == "host" and buckets[0].is_cuda
            self._slots[name] = [
                torch.empty_like(b, device="cpu", pin_memory=True) if host else torch.empty_like(b) for b in buckets
            ]
        for slot, bucket in zip(self._slots[name], buckets, strict=True):
            slot.copy_(bucket, non_blocking=True)
        _wait(buckets[0])

    def drop(self, name: str) -> None:
        if name == self.current:
            raise WeightsError(f"{name!r} is in the model now")
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
            raise WeightsError(f"{self.current!r} is in the model: leave it before {name!r}")
        if name not in self._slots:
            raise WeightsError(
                f"there is no slot {name!r}: save() it first (there are: {', '.join(self._slots) or 'none'})"
            )
        self._model.full_parameters("gather")
        before = self.checksum() if self._verify else None
        done = 0
        try:
            for index in range(len(self._slots[name])):
                self._exchange(name, index)
                done = index + 1
            self.current = name
            yield
        finally:
            for index in range(done):
                self._exchange(name, index)
            self.current = POLICY
            if before is not None and self.checksum() != before:
                raise WeightsError(f"the policy is not what it was before {name!r} was used")

    def _exchange(self, name: str, index: int) -> None:
        """The bucket's weights and the slot's change places; if they cannot, the bucket's stay."""
        bucket, slot = self._model.flat.buckets[index].parameters, self._slots[name][index]
        kept = bucket.clone()
        try:
            bucket.copy_(slot, non_blocking=True)
            slot.copy_(kept, non_blocking=True)
            _wait(bucket)
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


def _wait(tensor: Tensor) -> None:
    """A host copy that is under way must be done before either side is written again."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
