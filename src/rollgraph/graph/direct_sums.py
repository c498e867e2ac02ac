"""Gradients that are added to their sum by what makes them.

A weight's gradient is a matrix product, and a library can add a product to a matrix: rounded once, without writing the
gradient and reading it again. Kernels can do the same with other gradients. So while a backward runs whose gradients
are added up in buffers, each parameter knows its buffer, and the function that makes its gradient may add it there.
Autograd gets a stand-in for such a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

_NAME = "direct_sum"  # of the attribute of a parameter
_HALF = (torch.bfloat16, torch.float16)


class DirectSum:
    """The buffer of one parameter, in one backward."""

    def __init__(self, buffer: Tensor, stand_in: Tensor) -> None:
        self._buffer = buffer
        self._stand_in = stand_in
        self._has_stood_in = False

    def takes(self, gradient: torch.dtype) -> bool:
        """Whether a gradient of this dtype can be added directly: on CUDA, from half precision to fp32."""
        buffer = self._buffer
        return buffer.is_cuda and buffer.dtype == torch.float32 and buffer.is_contiguous() and gradient in _HALF

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add `left @ right`."""
        torch.addmm(self._buffer, left, right, out_dtype=torch.float32, out=self._buffer)

    def buffer(self) -> Tensor:
        """For a kernel that adds to it by itself. PyTorch's dispatcher has to see that: see `undo_log.py`."""
        return self._buffer

    def placeholder(self) -> Tensor | None:
        """What autograd is given in the place of a gradient that was added: a stand-in, and nothing after the first.

        A parameter that is used in several places has several gradients, and autograd would add up their stand-ins.
        """
        if self._has_stood_in:
            return None
        self._has_stood_in = True
        return self._stand_in.expand(self._buffer.shape)

    def add(self, gradient: Tensor) -> Tensor:
        """Add what autograd has found, unless it is a stand-in; returns what autograd may keep in its place."""
        if gradient.data_ptr() != self._stand_in.data_ptr():
            self._buffer.add_(gradient)
        return self._stand_in.expand(self._buffer.shape)


@contextmanager
def direct_sums(buffers: Mapping[Tensor, Tensor]) -> Iterator[Mapping[Tensor, DirectSum]]:
    """Let each of these parameters know its buffer, and give the sums of all of them.

    A parameter with a tensor hook does not learn of it: the hook has to see the gradient, and may change it.
    """
    stand_ins: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    sums: dict[Tensor, DirectSum] = {}
    for parameter, buffer in buffers.items():
        kind = (parameter.dtype, parameter.device)
        if kind not in stand_ins:
            stand_ins[kind] = parameter.new_zeros(())
        sums[parameter] = DirectSum(buffer, stand_ins[kind])
    before = {parameter: direct_sum_of(parameter) for parameter in sums}
    try:
        for parameter, own in sums.items():
            set_direct_sum(parameter, None if parameter._backward_hooks else own)
        yield sums
    finally:
        for parameter, earlier in before.items():
            set_direct_sum(parameter, earlier)


def direct_sum_of(parameter: Tensor) -> DirectSum | None:
    """Where the gradient of a parameter is added up in the backward that runs now, if it is."""
    found: DirectSum | None = getattr(parameter, _NAME, None)
    return found


def direct_sum_for(parameter: Tensor, gradient: torch.dtype) -> DirectSum | None:
    """The same, if a gradient of this dtype can be added there directly."""
    found = direct_sum_of(parameter)
    return found if found is not None and found.takes(gradient) else None


def set_direct_sum(parameter: Tensor, own: DirectSum | None) -> None:
    if own is not None:
        setattr(parameter, _NAME, own)
    elif hasattr(parameter, _NAME):
        delattr(parameter, _NAME)
