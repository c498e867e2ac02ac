"""Sizes of the engine: its defaults, and the row counts ("buckets") that it captures graphs for."""

from __future__ import annotations

from dataclasses import dataclass

# The memory plan of a run imports these, so that it counts exactly what the engine allocates.

BLOCK_SIZE = 16  # tokens per block of the KV cache
MAX_LENGTH = 4096  # tokens of a prompt and its completion together
PREFILL_SEQUENCES = 64  # sequences in one prefill step, at most
REFERENCE_ROWS = 64  # the logits of fewer rows get the same bits as those of this many
CPU_CACHE_BYTES = 2**30  # size of the KV cache on a CPU; on a GPU it depends on the free memory


@dataclass(frozen=True)
class EngineSizes:
    """Sizes that depend on the kind of device."""

    rows: int  # sequences decoded at the same time
    prefill_tokens: int  # tokens of the largest prefill step


_CPU_SIZES = EngineSizes(rows=16, prefill_tokens=512)
_CUDA_SIZES = EngineSizes(rows=256, prefill_tokens=8192)


def default_sizes(device_type: str) -> EngineSizes:
    """The default sizes for a type of device: "cpu" or "cuda"."""
    return _CUDA_SIZES if device_type == "cuda" else _CPU_SIZES


def row_buckets(rows: int) -> tuple[int, ...]:
    """The batch sizes of decode graphs: 1, 2, 4, ... and `rows`."""
    return _powers(rows, first=1, factor=2)


def prefill_buckets(prefill_tokens: int) -> tuple[int, ...]:
    """The token counts of prefill graphs: 64, 256, 1024, ... and `prefill_tokens`."""
    return _powers(prefill_tokens, first=64, factor=4)


def gemm_rows(rows: int, prefill_tokens: int) -> tuple[int, ...]:
    """All numbers of rows in an engine's matmuls. The head runs only with those of `row_buckets`."""
    return (*row_buckets(rows), *prefill_buckets(prefill_tokens))


def _powers(largest: int, *, first: int, factor: int) -> tuple[int, ...]:
    sizes = []
    size = first
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)
