"""Direct sums: gradient accumulation fused into the kernel that computes the gradient (Megatron: `main_grad`).

The gradient of a weight is a GEMM, and a GEMM can accumulate into its output: rounded once, without writing the
gradient and reading it again. Other kernels can do the same. So while a backward accumulates gradients in buffers, each
parameter has its buffer as an attribute, and the function that computes its gradient may add to that buffer. Autograd
gets a placeholder in place of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

_NAME = "direct_sum"  # the attribute of a parameter
_HALF = (torch.bfloat16, torch.float16)


class DirectSum:
    """The gradient buffer of one parameter during one backward."""

    def __init__(self, buffer: Tensor, placeholder: Tensor) -> None:
        self._buffer = buffer
        self._placeholder = placeholder
        self._gave_placeholder = False

    def supports_dtype(self, grad_dtype: torch.dtype) -> bool:
        """Whether a gradient of this dtype can be added directly: on CUDA, from half precision to fp32."""
        buffer = self._buffer
        return buffer.is_cuda and buffer.dtype == torch.float32 and buffer.is_contiguous() and grad_dtype in _HALF

    def add_matmul(self, lhs: Tensor, rhs: Tensor) -> None:
        """Add `lhs @ rhs`."""
        torch.addmm(self._buffer, lhs, rhs, out_dtype=torch.float32, out=self._buffer)

    def buffer(self) -> Tensor:
        """The buffer, for a kernel that adds to it.

        PyTorch's dispatcher must see that write: see `graph/state/undo_log.py`.
        """
        return self._buffer

    def placeholder(self) -> Tensor | None:
        """The value to return to autograd for a gradient that was added: a placeholder the first time, then None.

        A parameter with several uses has several gradients, and autograd would add up their placeholders.
        """
        if self._gave_placeholder:
            return None
        self._gave_placeholder = True
        return self._placeholder.expand(self._buffer.shape)

    def add(self, gradient: Tensor) -> Tensor:
        """Add a gradient from autograd unless it is the placeholder. Return the value that autograd may keep."""
        if gradient.data_ptr() != self._placeholder.data_ptr():
            self._buffer.add_(gradient)
        return self._placeholder.expand(self._buffer.shape)


@contextmanager
def direct_sums(buffers: Mapping[Tensor, Tensor]) -> Iterator[Mapping[Tensor, DirectSum]]:
    """Set the direct sum of each parameter inside, and yield them all.

    A parameter with a tensor hook gets none: the hook must see the gradient, and may change it.
    """
    placeholders: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    sums: dict[Tensor, DirectSum] = {}
    for parameter, buffer in buffers.items():
        kind = (parameter.dtype, parameter.device)
        if kind not in placeholders:
            placeholders[kind] = parameter.new_zeros(())
        sums[parameter] = DirectSum(buffer, placeholders[kind])
    previous_sums = {parameter: direct_sum_of(parameter) for parameter in sums}
    try:
        for parameter, direct_sum in sums.items():
            set_direct_sum(parameter, None if parameter._backward_hooks else direct_sum)
        yield sums
    finally:
        for parameter, previous_sum in previous_sums.items():
            set_direct_sum(parameter, previous_sum)


def direct_sum_of(parameter: Tensor) -> DirectSum | None:
    """The direct sum of a parameter in the backward that is running, if it has one."""
    direct_sum: DirectSum | None = getattr(parameter, _NAME, None)
    return direct_sum


def direct_sum_for(parameter: Tensor, grad_dtype: torch.dtype) -> DirectSum | None:
    """The direct sum of a parameter if a gradient of this dtype can be added directly."""
    direct_sum = direct_sum_of(parameter)
    return direct_sum if direct_sum is not None and direct_sum.supports_dtype(grad_dtype) else None


def set_direct_sum(parameter: Tensor, direct_sum: DirectSum | None) -> None:
    if direct_sum is not None:
        setattr(parameter, _NAME, direct_sum)
    elif hasattr(parameter, _NAME):
        delattr(parameter, _NAME)
