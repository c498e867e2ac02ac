"""The memory of the paged key/value cache: how much there is, and moving blocks of it. `blocks.py` says whose it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollgraph.model.architecture import Architecture


@dataclass(frozen=True)
class CachePlan:
    """How much a cache takes, known before any of it is allocated."""

    architecture: Architecture
    dtype: torch.dtype
    block_size: int
    blocks: int

    @classmethod
    def within(cls, architecture: Architecture, dtype: torch.dtype, block_size: int, nbytes: int) -> CachePlan:
        """As many blocks as fit."""
        one = cls(architecture, dtype, block_size, 1).nbytes
        return cls(architecture, dtype, block_size, nbytes // one)

    @property
    def shape(self) -> tuple[int, ...]:
        a = self.architecture
        return (a.layers, self.blocks, self.block_size, 2, a.kv_heads, a.head_dim)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def tokens(self) -> int:
        """How many fit; block 0 is where idle rows write."""
        return (self.blocks - 1) * self.block_size

    def allocate(self, device: torch.device) -> Tensor:
        """The pages, [layers, blocks, block_size, 2, kv_heads, head_dim]: keys, then values."""
        if self.blocks < 2:
            raise ValueError(f"a cache of {self.blocks} blocks holds nothing: at least 2 are needed")
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def copy_blocks(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """In all layers, at once: no source is a target."""
    pages.index_copy_(1, targets.long(), pages.index_select(1, sources))
