"""Where the pages of a worker's key/value cache lie: over the gradients first, then in the pool of graphs.

Owns the layout. `phase_memory.py` says when the pages may be used.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollgraph.graph import GraphPool
from rollgraph.inference.defaults import BLOCK_SIZE
from rollgraph.inference.kv_cache import CachePlan, plan_cache
from rollgraph.model import Decoder
from rollgraph.policy.limits import Limits


@dataclass(frozen=True)
class CacheLayout:
    """The cache of a worker, before it exists. `gradients` is the memory of all gradients, [elements]."""

    plan: CachePlan
    gradients: Tensor

    @classmethod
    def within(cls, model: Decoder, limits: Limits, gradients: Tensor, free: int | None) -> CacheLayout:
        """Lay out a cache of the size that the limits name.

        If they name none: as large as the gradients and half of the `free` bytes on the GPU, or, on a CPU, what an
        engine takes. The other half is for activations, as far as they need more than the pages.
        """
        nbytes = limits.cache_bytes
        if nbytes is None and free is not None:
            nbytes = gradients.nbytes + free // 2
        rows, length = limits.rows, limits.max_length
        return cls(plan_cache(model, rows=rows, max_length=length, block_size=BLOCK_SIZE, nbytes=nbytes), gradients)

    @property
    def over_gradients(self) -> int:
        """How many layers have their pages over the gradients."""
        return self.plan.layers_within(self.gradients.nbytes)

    @property
    def in_pool_nbytes(self) -> int:
        return (self.plan.architecture.layers - self.over_gradients) * self.plan.layer_nbytes

    def make_pages(self, pool: GraphPool) -> list[Tensor]:
        """The pages of each layer. Call this when the graphs that may overwrite them are captured."""
        pages = self.plan.lay_over(self.gradients)
        while len(pages) < self.plan.architecture.layers:
            pages.append(pool.allocate(self.plan.shape, self.plan.dtype, self.gradients.device))
        return pages
