"""The memory of the paged key/value cache: how large it is, and copying blocks within it.

`blocks.py` decides which sequence owns which block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollgraph.inference.defaults import CPU_CACHE_BYTES
from rollgraph.model.architecture import Architecture
from rollgraph.model.decoder import Decoder


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
        """Of the pages of one layer: keys first, then values."""
        a = self.architecture
        return (self.blocks, self.block_size, 2, a.kv_heads, a.head_dim)

    @property
    def layer_nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.architecture.layers * self.layer_nbytes

    @property
    def tokens(self) -> int:
        """How many tokens the cache holds. Block 0 is not counted: idle rows write there."""
        return (self.blocks - 1) * self.block_size

    def allocate(self, device: torch.device) -> list[Tensor]:
        """Allocate the pages of each layer."""
        if self.blocks < 2:
            raise ValueError(f"a cache needs at least 2 blocks, not {self.blocks}")
        return [torch.zeros(self.shape, dtype=self.dtype, device=device) for _ in range(self.architecture.layers)]

    def layers_within(self, nbytes: int) -> int:
        """For how many layers so much memory is enough."""
        return min(self.architecture.layers, nbytes // self.layer_nbytes)

    def lay_over(self, memory: Tensor) -> list[Tensor]:
        """The pages of as many layers, from the first one on, as fit into the memory of another tensor, [elements]."""
        flat = memory.view(self.dtype)
        size = torch.Size(self.shape).numel()
        return [
            flat.narrow(0, layer * size, size).view(self.shape) for layer in range(self.layers_within(memory.nbytes))
        ]


def plan_cache(model: Decoder, *, rows: int, max_length: int, block_size: int, nbytes: int | None) -> CachePlan:
    """Plan as many blocks as `rows` sequences of `max_length` could ever use, but no more than fit into `nbytes`.

    Without `nbytes`, the limit is most of the free memory of a GPU, or a fixed size on a CPU.
    """
    architecture, dtype, device = model.architecture, model.embed.weight.dtype, model.embed.weight.device
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


def copy_blocks(pages: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copy blocks in all layers. No source may be a target."""
    targets = targets.long()
    for layer in pages:
        layer.index_copy_(0, targets, layer.index_select(0, sources))
