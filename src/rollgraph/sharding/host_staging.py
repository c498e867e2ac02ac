"""Collectives of ranks that share a GPU: their tensors pass through host memory, where gloo exchanges them.

NCCL refuses two ranks on one GPU, and gloo knows few collectives of CUDA tensors. So the host waits until the device
has computed what is given, exchanges a copy of it while the device goes on, and copies the result back once somebody
waits for it. All of it happens in the thread and on the stream of the caller: collectives are started in the order of
the program, as on a CPU, and what the stream is given after the wait reads the result.

It is slower than NCCL, because the host does not run ahead of the device. On a CPU the same copies are made, so that
tests run this without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostStaging:
    """Copies of the two tensors of one collective. `given` is complete, and `output` is filled by the collective.

    PyTorch does not give their pinned memory to anybody else before the copies from it are made.
    """

    def __init__(self, output: Tensor, given: Tensor) -> None:
        if given.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot contain an exchange through host memory, as ranks that share a GPU make it"
            )
        self._target = output
        self.output = _allocate_like(output)
        self.given = _allocate_like(given)
        self.given.copy_(given)  # blocks until the stream has computed it

    def copy_back(self) -> None:
        """Let the current stream copy the result to where it belongs. The collective is complete."""
        self._target.copy_(self.output, non_blocking=True)


def _allocate_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
