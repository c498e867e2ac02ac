"""Host memory that a device reads and writes directly, of exactly the size that is needed.

PyTorch's own allocator of pinned memory may round each request up to a power of two, which for the state of a large
model is tens of GiB. Here all tensors lie in one mapping, whose pages are locked at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes: every tensor starts at a multiple of this


class PinningError(RuntimeError):
    """The system did not lock as much host memory as is needed."""

    def __init__(self, nbytes: int, code: int) -> None:
        super().__init__(
            f"{nbytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {code}): "
            "is there as much, and does the container allow it?"
        )
        self.nbytes = nbytes
        self.code = code


def allocate_on_host(sizes: Sequence[tuple[int, torch.dtype]], device: torch.device | str) -> list[Tensor]:
    """Tensors of zeros in host memory, given by their numbers of entries; pinned if the device is a GPU."""
    if torch.device(device).type != "cuda":
        return [torch.zeros(entries, dtype=dtype) for entries, dtype in sizes]
    starts = []
    total = 0
    for entries, dtype in sizes:
        starts.append(total)
        total += -(-entries * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    whole = _map_and_pin(total)
    tensors = []
    for (entries, dtype), start in zip(sizes, starts, strict=True):
        tensors.append(whole[start : start + entries * dtype.itemsize].view(dtype))
    return tensors


def _map_and_pin(nbytes: int) -> Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = _PinnedMapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel may know neither
        memory.madvise(mmap.MADV_DONTFORK)  # a forked process would make the pages copies on write
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
    memory.pin(whole.data_ptr(), nbytes)
    return whole


class _PinnedMapping(mmap.mmap):
    """A mapping whose pages are unlocked before it is unmapped."""

    address = 0  # of the pages that are locked

    def pin(self, address: int, nbytes: int) -> None:
        self._runtime = torch.cuda.cudart()
        code = int(self._runtime.cudaHostRegister(address, nbytes, 0))
        if code:
            raise PinningError(nbytes, code)
        self.address = address

    def __del__(self) -> None:
        if self.address:
            self._runtime.cudaHostUnregister(self.address)
