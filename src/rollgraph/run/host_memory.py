"""Memory of a CPU run that is free, and that the C library would rather keep.

A capture makes and frees tensors of all sizes between objects that stay. glibc takes tensors of up to 32 MiB from its
heap, where a single object that stays keeps everything below it: after the captures, a process could hold twice what it
uses. Tensors that are mapped one by one are returned when they are freed, but that makes each of them slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# From glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_MIB = 2**20


@contextmanager
def returning_freed_memory(device: str) -> Iterator[None]:
    """Inside, large tensors on a CPU return to the system when they are freed. Elsewhere than on glibc, do nothing."""
    libc = ctypes.CDLL(None)
    if device != "cpu" or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _MIB)
    try:
        yield
    finally:  # the most that glibc itself would choose after some time
        libc.mallopt(_MMAP_THRESHOLD, 32 * _MIB)
        libc.mallopt(_TRIM_THRESHOLD, 64 * _MIB)
        libc.malloc_trim(0)
