"""The sizes that an engine uses unless its caller chooses others, and the sizes that it captures graphs for.

The memory plan of a run imports them from here, so that what it adds up is what the engine allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 16  # tokens per block of the key/value cache
MAX_LENGTH = 4096  # tokens of a prompt and its completion together
PREFILL_SEQUENCES = 64  # sequences in one prefill step, at most
REFERENCE_ROWS = 64  # the logits of fewer rows are computed like those of so many
CPU_CACHE_BYTES = 2**30  # size of the key/value cache on a CPU; on a GPU it depends on the free memory


@dataclass(frozen=True)
class EngineSizes:
    """Sizes that depend on the kind of device."""

    rows: int  # sequences that decode at the same time
    prefill_tokens: int  # tokens of the largest prefill step


_ON_CPU = EngineSizes(rows=16, prefill_tokens=512)
_ON_CUDA = EngineSizes(rows=256, prefill_tokens=8192)


def sizes_on(device_type: str) -> EngineSizes:
    """The sizes on a kind of device: "cpu" or "cuda"."""
    return _ON_CUDA if device_type == "cuda" else _ON_CPU


def row_buckets(rows: int) -> tuple[int, ...]:
    """The numbers of rows that decode graphs are captured for: 1, 2, 4, ... and `rows`."""
    return _powers(rows, first=1, factor=2)


def prefill_buckets(prefill_tokens: int) -> tuple[int, ...]:
    """The numbers of tokens that prefill graphs are captured for: 64, 256, 1024, ... and `prefill_tokens`."""
    return _powers(prefill_tokens, first=64, factor=4)


def product_rows(rows: int, prefill_tokens: int) -> tuple[int, ...]:
    """All numbers of rows that matrix products of an engine have; only those of `row_buckets` get logits."""
    return (*row_buckets(rows), *prefill_buckets(prefill_tokens))


def _powers(largest: int, *, first: int, factor: int) -> tuple[int, ...]:
    sizes = []
    size = first
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)
