"""The sizes that an engine uses unless its caller chooses others.

The memory plan of a run imports them from here, so that what it adds up is what the engine allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 16  # tokens per block of the key/value cache
MAX_LENGTH = 4096  # tokens of a prompt and its completion together
PREFILL_SEQUENCES = 64  # sequences that one prefill step can hold


@dataclass(frozen=True)
class EngineSizes:
    """Sizes that depend on the kind of device."""

    rows: int  # sequences that decode at the same time
    prefill_tokens: int  # tokens of the largest prefill step


ON_CPU = EngineSizes(rows=16, prefill_tokens=512)
ON_CUDA = EngineSizes(rows=256, prefill_tokens=8192)


def bucket_sizes(largest: int, *, first: int, factor: int) -> tuple[int, ...]:
    """The sizes to capture graphs for: first, first * factor, and so on, up to `largest`."""
    sizes = []
    size = first
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)
