"""The paged KV cache: how many blocks fit into memory, and their pages. `blocks.py` decides who owns a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollgraph.inference.sizes import CPU_CACHE_BYTES
from rollgraph.model.architecture import Architecture
from rollgraph.model.decoder import Decoder


@dataclass(frozen=True)
class CachePlan:
    """The size of a KV cache, before it is allocated."""

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
        """The shape of one layer's pages: [blocks, tokens of a block, keys and values, heads, head_dim]."""
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
        """How many tokens the cache holds, without block 0, to which idle rows write."""
        return (self.blocks - 1) * self.block_size

    def allocate(self, device: torch.device) -> list[Tensor]:
        """Allocate the pages of each layer."""
        if self.blocks < 2:
            raise ValueError(f"a cache needs at least 2 blocks, not {self.blocks}")
        return [torch.zeros(self.shape, dtype=self.dtype, device=device) for _ in range(self.architecture.layers)]

    def layers_that_fit(self, nbytes: int) -> int:
        """How many layers have pages that fit into `nbytes`."""
        return min(self.architecture.layers, nbytes // self.layer_nbytes)

    def pages_over(self, memory: Tensor) -> list[Tensor]:
        """The pages of the first layers, as views into `memory`, [elements]: as many layers as fit."""
        flat = memory.view(self.dtype)
        size = torch.Size(self.shape).numel()
        return [
            flat.narrow(0, layer * size, size).view(self.shape) for layer in range(self.layers_that_fit(memory.nbytes))
        ]


def usable_blocks(rows: int, max_length: int, block_size: int, longest: int = 0) -> int:
    """The most blocks that can be in use: by all rows, or by one longer sequence; plus block 0 for idle rows."""
    return max(rows * -(-max_length // block_size), -(-longest // block_size)) + 1


def plan_cache(
    model: Decoder, *, rows: int, max_length: int, block_size: int, nbytes: int | None, longest: int = 0
) -> CachePlan:
    """Plan as many blocks as `rows` sequences of `max_length` can use, but no more than fit into `nbytes`.

    Without `nbytes`, the limit is 80% of the free memory of a GPU, or a fixed size on a CPU.
    """
    architecture, dtype, device = model.architecture, model.embed_tokens.weight.dtype, model.embed_tokens.weight.device
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
    usable = usable_blocks(rows, max_length, block_size, longest)
    return CachePlan(architecture, dtype, block_size, min(plan.blocks, usable))


def copy_blocks(pages: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copy blocks in all layers. No source may be a target."""
    targets = targets.long()
    for layer in pages:
        layer.index_copy_(0, targets, layer.index_select(0, sources))
