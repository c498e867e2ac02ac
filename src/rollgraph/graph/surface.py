"""The surface of a graph: the properties of a call that must match the capture for a replay to be right.

Owns the comparison of a call with the captured one, the exact copy of arguments into static tensors, and the detection
of arguments that such a copy cannot replace. Arguments are never broadcast, cast or ignored.
"""

from __future__ import annotations

import enum
import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from rollgraph.graph.errors import CaptureError, ReplayMismatch

_STRIDED = torch.strided
_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_active_transform = torch._C._functorch.peek_interpreter_stack
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice, torch.dtype, torch.device,
    torch.Size, torch.layout, torch.memory_format, torch.Generator, torch.nn.Module, type,
)  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor argument. Values, strides and requires_grad may vary."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}[{', '.join(map(str, self.shape))}]@{self.device}"


class _Constant(NamedTuple):
    value: Any


Modes = tuple[bool, bool, torch.dtype | None, torch.dtype | None]


def current_modes() -> Modes:
    """Grad mode, inference mode, and the autocast dtypes of the GPU and the CPU (None when off)."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
    )


class Surface:
    """Structure, shapes, dtypes, devices, constants and modes of one captured call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._tree = pytree.tree_flatten((args, _sorted(kwargs)))
        reason = transform_problem(leaves)
        if reason is not None:
            raise CaptureError(reason)
        paths, _ = pytree.tree_flatten_with_path((args, _sorted(kwargs)))
        self._names = [_argument_name(path) for path, _ in paths]
        self._expected = [self._expectation(leaf, name) for leaf, name in zip(leaves, self._names, strict=True)]
        self._checks: list[Any] = []  # the same values, in the form that `bind` compares fastest
        for expected in self._expected:
            if isinstance(expected, TensorSpec):
                self._checks.append((expected.shape, expected.dtype, expected.device))
            else:
                self._checks.append(_Constant(expected))
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        # If all arguments are positional and none is a container, a call needs no flattening.
        self._is_flat = not kwargs and len(args) == len(leaves) and all(map(is_, args, leaves))
        self._all_tensors = all(self._is_tensor)
        self.tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.names = [n for n, is_tensor in zip(self._names, self._is_tensor, strict=True) if is_tensor]
        self.modes = current_modes()
        self._keywords = list(kwargs)

    @staticmethod
    def _expectation(leaf: Any, name: str) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided:
                raise CaptureError(f"argument {name} has layout {leaf.layout}; a graph takes strided tensors only")
            return TensorSpec.of(leaf)
        if isinstance(leaf, _CONSTANTS) or inspect.isroutine(leaf):
            return leaf
        raise CaptureError(
            f"argument {name} is a {type(leaf).__name__}, which a graph would silently freeze: pass tensors, numbers "
            "or containers of them, or register the type with torch.utils._pytree.register_pytree_node"
        )

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the captured call, with `tensors` in place of its tensors."""
        remaining = iter(tensors)
        leaves = [
            next(remaining) if is_tensor else constant
            for is_tensor, constant in zip(self._is_tensor, self._expected, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return args, {key: kwargs[key] for key in self._keywords}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        """The tensors of a call, in order. Raises ReplayMismatch with the difference if the call does not fit."""
        grad, inference, cuda_autocast, cpu_autocast = self.modes
        if (
            _grad_enabled() is not grad
            or _inference() is not inference
            or ((cuda_autocast or cpu_autocast or _any_autocast()) and current_modes() != self.modes)
        ):
            modes = _describe_modes(current_modes())
            raise ReplayMismatch(f"captured with {_describe_modes(self.modes)}, called with {modes}")
        leaves: Sequence[Any] = args
        if kwargs or not self._is_flat or len(args) != len(self._expected):
            leaves, tree = pytree.tree_flatten((args, _sorted(kwargs)))
            if tree != self._tree:
                raise ReplayMismatch(self._structure_difference(args, kwargs))
        if forward_ad._current_level >= 0 or _active_transform() is not None:
            reason = transform_problem(leaves)
            if reason is not None:
                raise ReplayMismatch(reason)
        for leaf, expected in zip(leaves, self._checks):  # noqa: B905 equal trees have equally many leaves
            if expected.__class__ is tuple:
                shape, dtype, device = expected
                if (
                    not isinstance(leaf, Tensor)
                    or leaf.shape != shape
                    or leaf.dtype is not dtype
                    or leaf.device != device
                    or leaf.layout is not _STRIDED
                ):
                    raise ReplayMismatch(self._difference(leaves))
            elif leaf is not expected.value and not same_constant(leaf, expected.value):
                raise ReplayMismatch(self._difference(leaves), frozen_value=True)
        if self._all_tensors:
            return leaves
        return [leaf for leaf, is_tensor in zip(leaves, self._is_tensor, strict=True) if is_tensor]

    def fast_bind(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Tensor]]:
        """`bind`, or a faster function if the captured call had one tensor: it compares with values in its closure."""
        bind = self.bind
        grad, inference, cuda_autocast, cpu_autocast = self.modes
        if not (self._is_flat and self._all_tensors and len(self._checks) == 1) or cuda_autocast or cpu_autocast:
            return bind
        ((shape, dtype, device),) = self._checks

        def bind_one_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
            if len(args) == 1 and not kwargs:
                tensor = args[0]
                if (
                    isinstance(tensor, Tensor)
                    and tensor.dtype is dtype
                    and tensor.shape == shape
                    and tensor.device == device
                    and tensor.layout is _STRIDED
                    and _grad_enabled() is grad
                    and _inference() is inference
                    and not _any_autocast()
                    and forward_ad._current_level < 0
                    and _active_transform() is None
                ):
                    return args
            return bind(args, kwargs)

        return bind_one_tensor

    def _difference(self, leaves: Sequence[Any]) -> str:
        for leaf, expected, name in zip(leaves, self._expected, self._names, strict=True):
            if not isinstance(expected, TensorSpec):
                if leaf is not expected and not same_constant(leaf, expected):
                    return (
                        f"argument {name} was frozen as {expected!r} at capture and is {leaf!r} now; "
                        "pass what varies as a tensor"
                    )
            elif not isinstance(leaf, Tensor):
                return f"argument {name}: captured as {expected}, called with {type(leaf).__name__} {leaf!r}"
            elif leaf.layout is not _STRIDED:
                return f"argument {name}: captured as {expected}, called with layout {leaf.layout}"
            elif TensorSpec.of(leaf) != expected:
                return f"argument {name}: captured as {expected}, called with {TensorSpec.of(leaf)}"
        raise AssertionError("no difference")

    def _structure_difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        paths, _ = pytree.tree_flatten_with_path((args, _sorted(kwargs)))
        names = [_argument_name(path) for path, _ in paths]
        missing = [name for name in self._names if name not in names]
        extra = [name for name in names if name not in self._names]
        parts = []
        if missing:
            parts.append(f"missing {', '.join(missing)}")
        if extra:
            parts.append(f"unexpected {', '.join(extra)}")
        return "arguments differ from the captured call: " + ("; ".join(parts) or "other containers")

    def __str__(self) -> str:
        parts = []
        for name, expected in zip(self._names, self._expected, strict=True):
            if isinstance(expected, TensorSpec):
                parts.append(f"{name}: {expected}")
            else:
                parts.append(f"{name}={expected!r}")
        return f"({', '.join(parts)})"


class StaticTensors:
    """The tensors from which a graph reads its inputs, at addresses that never change."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._memory = [t.detach() for t in tensors]  # copying into a leaf that requires grad costs more
        self._ranges = [(t.data_ptr(), t.data_ptr() + max(1, t.untyped_storage().nbytes())) for t in tensors]
        self._low = min((start for start, _ in self._ranges), default=0)
        self._high = max((end for _, end in self._ranges), default=0)

    def fill(self, sources: Sequence[Tensor]) -> None:
        """Copy the values exactly. Skip a source only if it already is the static tensor (same address and strides)."""
        low, high = self._low, self._high
        for source in sources:
            if low <= source.data_ptr() < high:
                self._fill_with_aliases(sources)
                return
        for static, source in zip(self._memory, sources):  # noqa: B905 bind() has counted them
            static.copy_(source)

    def _fill_with_aliases(self, sources: Sequence[Tensor]) -> None:
        """Fill when a source may lie in the memory of any static tensor."""
        pending = []
        for static, source in zip(self._memory, sources, strict=True):
            address = source.data_ptr()
            lies_in_static = any(start <= address < end for start, end in self._ranges)
            is_own_static = lies_in_static and address == static.data_ptr() and source.stride() == static.stride()
            if is_own_static and not source.is_conj() and not source.is_neg():
                continue
            pending.append((static, source.clone() if lies_in_static else source))
        for static, source in pending:
            static.copy_(source)

    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors)


Span = tuple[int, int]  # the first address, and the one after the last


class InputHazards:
    """For each input, the memory that the function writes before it last reads that input.

    If an argument lies there, eager reads the new value, but a graph reads a static copy of the old value.
    """

    def __init__(self, names: Sequence[str] = (), spans: Sequence[Iterable[Span]] = ()) -> None:
        self._inputs: list[tuple[int, str, list[int], list[int]]] = []
        for index, (name, written) in enumerate(zip(names, spans, strict=True)):
            starts, ends = _merged(written)
            if starts:
                self._inputs.append((index, name, starts, ends))

    def __bool__(self) -> bool:
        return bool(self._inputs)

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raise ReplayMismatch if an input lies in memory that the function writes before it reads that input."""
        for index, name, starts, ends in self._inputs:
            low, high = memory_span(inputs[index])
            span = bisect_left(starts, high) - 1  # the last span that starts before the end of the input
            if span >= 0 and ends[span] > low:
                raise ReplayMismatch(
                    f"argument {name} lies in memory that the function writes before it reads the argument, but a "
                    "graph reads a copy from before that write. Pass a clone, or let the function reach the tensor "
                    "from outside its arguments"
                )


def _merged(spans: Iterable[Span]) -> tuple[list[int], list[int]]:
    """Merge spans that touch; return sorted starts and ends."""
    starts: list[int] = []
    ends: list[int] = []
    for start, end in sorted(spans):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    return starts, ends


def memory_span(tensor: Tensor) -> Span:
    """The memory from a tensor's first element to its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * tensor.element_size()


def transform_problem(leaves: Iterable[Any]) -> str | None:
    """Return why a graph cannot take these arguments if a transform differentiates or batches through the call."""
    if _active_transform() is not None:
        return (
            "called inside a torch.func transform (vmap, grad, jvp, ...), which a graph cannot follow: transform the "
            "original function, or switch the graph off around it"
        )
    if forward_ad._current_level < 0:
        return None
    if any(forward_ad.unpack_dual(leaf).tangent is not None for leaf in leaves if isinstance(leaf, Tensor)):
        return (
            "an argument has a forward-mode tangent, which a graph does not pass on: call the original function, or "
            "switch the graph off around it"
        )
    return None


def static_copy(sample: Tensor) -> Tensor:
    """A static tensor for a sample: a copy, so that replays never write the user's tensor."""
    return sample.detach().clone().requires_grad_(sample.requires_grad)


def _sorted(kwargs: dict[str, Any]) -> dict[str, Any]:
    if len(kwargs) < 2:
        return kwargs
    return dict(sorted(kwargs.items()))


def same_constant(constant: Any, expected: Any) -> bool:
    """Whether a graph captured with the `expected` constant is right for this one."""
    if type(constant) is not type(expected):
        return False
    if isinstance(expected, (torch.nn.Module, torch.Generator, type)) or inspect.isfunction(expected):
        return False  # these compare by identity, and `is` already said no
    if isinstance(expected, (float, complex)):
        return repr(constant) == repr(expected)  # NaN equals NaN here, and 0.0 is not -0.0
    return bool(constant == expected)


def _argument_name(path: tuple[Any, ...]) -> str:
    """`0`, `0['mask']` or `scale`: the position or keyword, then the path inside it."""
    top = path[1]
    path_inside = pytree.keystr(path[2:])
    if isinstance(top, pytree.SequenceKey):
        return f"{top.idx}{path_inside}"
    return f"{top.key}{path_inside}"


def _describe_modes(modes: Modes) -> str:
    grad, inference, cuda_autocast, cpu_autocast = modes
    if inference:
        parts = ["inference mode"]
    else:
        parts = ["grad on" if grad else "grad off"]
    for device, dtype in (("cuda", cuda_autocast), ("cpu", cpu_autocast)):
        if dtype:
            parts.append(f"autocast({device}, {dtype})")
    return ", ".join(parts)
