"""How PyTorch's CUDA allocator is told to take memory from the pool of captured graphs, outside a capture.

Owns these calls and how long a pool lives without a graph. Knows nothing of arenas, graphs or what the memory is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PoolHandle = tuple[int, int]  # what torch.cuda.graph_pool_handle() returns


def with_index(device: torch.device) -> torch.device:
    """The device with its number: `cuda` is the current one."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def allocating_from(device: int, handle: PoolHandle) -> Iterator[None]:
    """What the current stream allocates inside comes from the pool, in any thread: a backward has its own ones."""
    torch.cuda.empty_cache()  # the allocator does not do it inside, not even if memory runs out
    torch._C._cuda_beginAllocateCurrentStreamToPool(device, handle)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, handle)
        torch._C._cuda_releasePool(device, handle)  # to begin counts as a use


def keep_pool(device: int, handle: PoolHandle) -> None:
    """Keep a pool alive without a graph, until `let_pool_go`. The current stream must be one that can be captured."""
    torch._C._cuda_beginAllocateCurrentStreamToPool(device, handle)
    torch._C._cuda_endAllocateToPool(device, handle)


def let_pool_go(device: int, handle: PoolHandle) -> None:
    torch._C._cuda_releasePool(device, handle)
