"""Compiles Triton kernels side by side. Left alone, Triton compiles each when it is first launched, one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MOST_THREADS = 16  # beyond that, they wait for each other's Python
_UNINITIALIZED = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)


@contextmanager
def compiling_together(package: str = __name__.partition(".")[0]) -> Iterator[None]:
    """Inside, a kernel of the package that has yet to be compiled is not launched. At the end, all such are compiled.

    So a result made inside means nothing: do the same again afterwards. What a kernel did not write may be an index for
    the next operation, so that `torch.empty` gives zeros inside. Kernels of others are launched as ever: whoever times
    them to choose among them would time nothing. Does nothing without Triton, or if nothing has used a CUDA device yet.
    """
    runtime = _triton_runtime()
    if runtime is None:
        yield
        return
    threads = _threads(torch.cuda.current_device())
    found: dict[tuple[str, str, str], Future[None]] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **_: Any) -> bool:
        """Called by Triton before it compiles. True means: neither compile nor launch."""
        if is_manual_warmup or fn.module.partition(".")[0] != package:  # the former is asked for by `_compile`
            return False
        known = (fn.module, fn.name, key)
        if known not in found:
            found[known] = threads.submit(_compile, fn.jit_function, compile["specialization_data"])
        return True

    before = runtime.jit_cache_hook
    runtime.jit_cache_hook = note
    try:
        with _ZeroedMemory():
            yield
        wait(found.values())  # not their results: what cannot be compiled is refused again when it is launched
    finally:
        runtime.jit_cache_hook = before


@cache
def _threads(device: int) -> ThreadPoolExecutor:
    """Threads that compile for a device. They last: to end a thread that has used CUDA takes milliseconds."""
    count = min(_MOST_THREADS, os.cpu_count() or 1)
    return ThreadPoolExecutor(count, "compile", torch.cuda.set_device, (device,))


def _triton_runtime() -> Any:
    """Triton's hooks, or None where it compiles nothing for CUDA."""
    if not torch.cuda.is_initialized() or torch.version.hip is not None:
        return None
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.runtime


def _compile(kernel: Any, specialization: str) -> None:
    """Compile a kernel and load it onto the device. `run` is what launches it, which Triton compiles too."""
    _ = kernel.preload(specialization).run


class _ZeroedMemory(TorchFunctionMode):
    """Fills memory with zeros that an operation would hand out as it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNINITIALIZED:
            result.zero_()
        return result
