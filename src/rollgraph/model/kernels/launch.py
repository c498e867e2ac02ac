"""Launching Triton kernels: early, by programmatic dependent launch (PDL), and compiling them in parallel."""

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

# -- programmatic dependent launch -----------------------------------------------------------------
# A kernel triggers PDL by `gdc_launch_dependents`: the next kernel may start while it still runs. The next kernel loads
# its weights, waits for the results of the one before (`gdc_wait`), and goes on. A CUDA graph captures this. After a
# cuBLAS kernel, which does not trigger PDL, waiting this way costs time instead.


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether the device supports PDL: NVIDIA GPUs since Hopper."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


# -- compiling together ----------------------------------------------------------------------------
# Triton compiles each kernel at its first launch, one by one.

_MAX_THREADS = 16  # beyond that, they wait for the GIL
_UNINITIALIZED = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)


@contextmanager
def compiling_together(package: str = __name__.partition(".")[0]) -> Iterator[None]:
    """Inside, kernels of the package that are not compiled yet are not launched. At the end, all of them are compiled.

    So results that are computed inside mean nothing: repeat the launches afterwards. An operation may use a result as
    an index, so `torch.empty` returns zeros inside. Kernels of other packages are launched as usual: code that times
    them, to choose among them, would measure nothing. Does nothing without Triton or before CUDA was initialized.
    """
    runtime = _triton_runtime()
    if runtime is None:
        yield
        return
    threads = _threads(torch.cuda.current_device())
    compilations: dict[tuple[str, str, str], Future[None]] = {}

    def defer_compilation(*, key: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **_: Any) -> bool:
        """Called by Triton before it compiles. True means: neither compile nor launch."""
        if is_manual_warmup or fn.module.partition(".")[0] != package:  # the former comes from `_compile`
            return False
        identity = (fn.module, fn.name, key)
        if identity not in compilations:
            compilations[identity] = threads.submit(_compile, fn.jit_function, compile["specialization_data"])
        return True

    old_hook = runtime.jit_cache_hook
    runtime.jit_cache_hook = defer_compilation
    try:
        with _ZeroedMemory():
            yield
        wait(compilations.values())  # errors are raised again at the launch
    finally:
        runtime.jit_cache_hook = old_hook


@cache
def _threads(device: int) -> ThreadPoolExecutor:
    """Threads that compile for a device. They are kept: ending a thread that has used CUDA takes milliseconds."""
    count = min(_MAX_THREADS, os.cpu_count() or 1)
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
    """Compile a kernel and its launcher, `run`, and load the kernel onto the device."""
    _ = kernel.preload(specialization).run


class _ZeroedMemory(TorchFunctionMode):
    """Fills uninitialized tensors with zeros."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNINITIALIZED:
            result.zero_()
        return result
