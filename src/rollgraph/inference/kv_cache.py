"""The memory of the paged key/value cache: how large it is, and copying blocks within it.

`blocks.py` decides which sequence owns which block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollgraph.inference.defaults import CPU_CACHE_BYTES
from rollgraph.model.architecture import Architecture


@dataclass(frozen=True)
class CachePlan:
    """The size of a cache, known before any of it is allocated."""

    architecture: Architecture
    dtype: torch.dtype
    block_size: int
    blocks: int

    @classmethod
    def within(cls, architecture: Architecture, dtype: torch.dtype, block_size: int, nbytes: int) -> CachePlan:
        """Plan as many blocks as fit into `nbytes`."""
        one_block = cls(architecture, dtype, block_size, 1).nbytes
        return cls(architecture, dtype, block_size, nbytes // one_block)

    @property
    def shape(self) -> tuple[int, ...]:
        a = self.architecture
        return (a.layers, self.blocks, self.block_size, 2, a.kv_heads, a.head_dim)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def tokens(self) -> int:
        """How many tokens the cache holds. Block 0 is not counted: idle rows write there."""
        return (self.blocks - 1) * self.block_size

    def allocate(self, device: torch.device) -> Tensor:
        """Allocate the pages, [layers, blocks, block_size, 2, kv_heads, head_dim]: keys first, then values."""
        if self.blocks < 2:
            raise ValueError(f"a cache needs at least 2 blocks, not {self.blocks}")
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def plan_cache(
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rows: int,
    max_length: int,
    block_size: int,
    nbytes: int | None,
) -> CachePlan:
    """Plan as many blocks as `rows` sequences of `max_length` could ever use, but no more than fit into `nbytes`.

    Without `nbytes`, the limit is most of the free memory of a GPU, or a fixed size on a CPU.
    """
    if nbytes is None:
        nbytes = CPU_CACHE_BYTES
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            nbytes = free * 8 // 10
    plan = CachePlan.within(architecture, dtype, block_size, nbytes)
    if plan.blocks < 2:
        one_block = CachePlan(architecture, dtype, block_size, 1).nbytes
        raise ValueError(
            f"cache_bytes={nbytes}: one block takes {one_block} bytes, and a cache needs at least 2 blocks"
        )
    usable = rows * -(-max_length // block_size) + 1
    return CachePlan(architecture, dtype, block_size, min(plan.blocks, usable))


def copy_blocks(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy blocks in all layers at once. No source may be a target."""
    pages.index_copy_(1, targets.long(), pages.index_select(1, sources))
