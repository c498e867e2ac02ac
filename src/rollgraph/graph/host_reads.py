"""Host reads: what brings a tensor's values to Python, and why a capture refuses it.

A recording runs once, so a Python decision on a value would be frozen in every replay. Both recording backends refuse
such reads: the dispatcher sees operations, and `HostReads` sees methods that never reach it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollgraph.graph.errors import HostReadError, here
from rollgraph.graph.state.undo_log import tensors_in

_READING_METHODS = {
    getattr(Tensor, name): name
    for name in (
        "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__",
        "__repr__", "__format__", "__contains__", "__dlpack__", "apply_", "map_", "map2_",
    )
}  # fmt: skip
_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class HostReads(TorchFunctionMode):
    """Refuses host reads that bypass the dispatcher: `.tolist()`, `.numpy()`, `bool()`, printing, `apply_`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = reads_on_host(func, args)
        if read is not None:
            _refuse(read)
        return func(*args, **(kwargs or {}))


def reads_on_host(func: Any, args: tuple[Any, ...]) -> str | None:
    """The name of `func` if it reads values on the host without the dispatcher, else None."""
    name = _READING_METHODS.get(getattr(func, "__wrapped__", func))  # the undo log wraps some of them
    if name is not None:
        return f"Tensor.{name}"
    if func in _CONSTRUCTORS and any(map(_lists_tensors, args)):
        return f"{func.__name__} of a list of tensors"
    if func in (torch.tensor_split, Tensor.tensor_split) and any(isinstance(a, Tensor) for a in args[1:]):
        return "tensor_split by a tensor"
    return None


def _lists_tensors(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and bool(tensors_in(argument))


@contextmanager
def refusing_host_reads() -> Iterator[None]:
    """Enter HostReads in forward and backward. PyTorch disables the mode around `backward`; we enable it again."""
    engine = torch.autograd._engine_run_backward

    def run_refusing(*args: Any, **kwargs: Any) -> Any:
        with HostReads():
            return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = run_refusing
    try:
        with HostReads():
            yield
    finally:
        torch.autograd._engine_run_backward = engine


def refuse_host_read(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise HostReadError if an operation's result, or its shape, depends on values read on the host."""
    tags = func.tags
    if func._schema.name == "aten::_pack_padded_sequence":
        _refuse(str(func))
    if torch.Tag.data_dependent_output in tags:
        _refuse(str(func))
    if torch.Tag.dynamic_output_shape in tags and _shape_depends_on_values(func, args, kwargs):
        _refuse(str(func))
    if func._schema.name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        accumulates = len(args) > 3 and args[3]
        if by_mask and (accumulates or args[2].numel() != 1):  # a scalar is a masked fill
            _refuse(f"{func} with a boolean mask")


def refuse_copy_to_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise HostReadError for a copy into pageable memory, which CUDA cannot capture."""
    name = func._schema.name
    sources = args[1:2] if "copy_" in name else args[:1]
    source = next(iter(tensors_in(sources)), None)
    if source is None or not source.is_cuda:
        return
    device = kwargs.get("device")
    if name == "aten::_to_copy" and device is not None and device.type == "cpu" and not kwargs.get("pin_memory"):
        _refuse(f"{func} to the CPU")
    if name == "aten::copy_" and args[0].device.type == "cpu" and not args[0].is_pinned():
        _refuse(f"{func} to the CPU")


def _shape_depends_on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    name = func._schema.name
    if name == "aten::index":
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    return True


def _refuse(operation: str) -> None:
    raise HostReadError(
        f"{operation} at {here()} reads tensor values on the host: a replay would not run it again. "
        "Keep the value in a tensor (torch.where, masked arithmetic), or move the read out of the captured function"
        + optimizer_hint(),
        operation=operation,
    )


def optimizer_hint() -> str:
    """A hint for the error message if an optimizer is running."""
    in_optimizer = any("/torch/optim/" in frame.filename for frame in traceback.extract_stack())
    if not in_optimizer:
        return ""
    return "; optimizers need fused=True on a CPU and capturable=True on a GPU"
