"""The ways that cuBLAS knows to compute one product, in the order in which it would take them.

PyTorch takes the first, which is a guess. Under lasting load, others take up to 17% less time, because they need less
power. Only ways without a workspace are asked for: streams have nothing to share then, and none of them splits a sum
along K.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, of all operands
_MOST_OFFERS = 16
_COMPUTE_FP32 = 68
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS, _BIAS_TYPE = 3, 4, 7, 8, 26  # attributes of a product
_WITH_BIAS = 4
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # preferences

ProductKind = Literal["forward", "input gradient", "weight gradient"]


class LibraryProduct(NamedTuple):
    """A product of a layer with a weight of [columns, depth].

    - forward: x of [rows, depth] times the weight; with `wide`, in fp32.
    - input gradient: the gradient of [rows, columns] times the weight.
    - weight gradient: that gradient times x, added to a sum in fp32.
    """

    kind: ProductKind
    rows: int
    columns: int
    depth: int
    dtype: torch.dtype
    wide: bool = False
    biased: bool = False


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, eq=False)
class Offer:
    """One way to compute a product."""

    product: LibraryProduct
    descriptors: tuple[Any, ...]  # of the product and its matrices
    algorithm: Any
    handle: Any

    def run(self, one: Tensor, other: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Write the product to `out`, or add it if it is the gradient of a weight.

        `one` and `other` are x and the weight, or the gradient and the weight, or the gradient and x.
        """
        self._refuse_others(one, other)
        product, left, right, result = self.descriptors
        one, other = _aligned(one), _aligned(other)
        if bias is not None:
            bias = _aligned(bias)
            _set(product, _BIAS, ctypes.c_void_p(bias.data_ptr()))
        factor = ctypes.c_float(1.0)
        added = ctypes.c_float(1.0 if self.product.kind == "weight gradient" else 0.0)
        target = ctypes.c_void_p(out.data_ptr())
        _check(
            _library().cublasLtMatmul(
                self.handle, product, ctypes.byref(factor), ctypes.c_void_p(other.data_ptr()), left,
                ctypes.c_void_p(one.data_ptr()), right, ctypes.byref(added), target, result, target, result,
                ctypes.byref(self.algorithm), None, ctypes.c_size_t(0),
                ctypes.c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
            )
        )  # fmt: skip

    def _refuse_others(self, one: Tensor, other: Tensor) -> None:
        """Raise if these are not the operands of the product: cuBLAS would read whatever is there."""
        kind, rows, columns, depth, dtype, *_ = self.product
        shapes = {
            "forward": ((rows, depth), (columns, depth)),
            "input gradient": ((rows, columns), (columns, depth)),
            "weight gradient": ((rows, columns), (rows, depth)),
        }[kind]
        if (one.shape, other.shape) != shapes or not one.dtype == other.dtype == dtype:
            given = f"{tuple(one.shape)} in {one.dtype} and {tuple(other.shape)} in {other.dtype}"
            raise ValueError(f"a product ({kind}) of {shapes[0]} and {shapes[1]} in {dtype} was given {given}")


@cache
def offers(product: LibraryProduct, device: torch.device) -> tuple[Offer, ...]:
    """All ways that cuBLAS offers for a product on a device; none if it cannot be asked, or has none."""
    if product.dtype not in (torch.float16, torch.bfloat16) or _library() is None:
        return ()
    if any(size * product.dtype.itemsize % _ALIGNMENT for size in (product.columns, product.depth)):
        return ()
    rows, columns, depth = product.rows, product.columns, product.depth
    narrow, wide = _TYPES[product.dtype], _TYPES[torch.float32]
    # cuBLAS counts columns first, so a matrix of [rows, columns] is one of [columns, rows] to it.
    weight, x, gradient = (depth, columns), (depth, rows), (columns, rows)
    left, right, result = {
        "forward": (weight, x, gradient),
        "input gradient": (weight, gradient, x),
        "weight gradient": (x, gradient, weight),
    }[product.kind]
    to_fp32 = product.wide or product.kind == "weight gradient"
    with torch.cuda.device(device):
        handle = _handle(device)
        descriptors = (
            _describe(product),
            _layout(narrow, *left),
            _layout(narrow, *right),
            _layout(wide if to_fp32 else narrow, *result),
        )
        found = _ask(handle, *descriptors)
    return tuple(Offer(product, descriptors, heuristic.algorithm, handle) for heuristic in found)


def _aligned(operand: Tensor) -> Tensor:
    """The operand as cuBLAS was told that it is: a copy, if its rows do not follow each other or begin anywhere."""
    if operand.is_contiguous() and operand.data_ptr() % _ALIGNMENT == 0:
        return operand
    return operand.clone(memory_format=torch.contiguous_format)


def _describe(product: LibraryProduct) -> Any:
    made = ctypes.c_void_p()
    _check(_library().cublasLtMatmulDescCreate(ctypes.byref(made), _COMPUTE_FP32, _TYPES[torch.float32]))
    _set(made, _TRANSPOSE_A, ctypes.c_int(product.kind == "forward"))
    _set(made, _TRANSPOSE_B, ctypes.c_int(product.kind == "weight gradient"))
    if product.biased:
        _set(made, _EPILOGUE, ctypes.c_int(_WITH_BIAS))
        _set(made, _BIAS_TYPE, ctypes.c_int(_TYPES[product.dtype]))
    return made


def _set(descriptor: Any, attribute: int, value: Any) -> None:
    _check(_library().cublasLtMatmulDescSetAttribute(descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value)))


def _layout(kind: int, rows: int, columns: int) -> Any:
    made = ctypes.c_void_p()
    size = ctypes.c_uint64
    _check(
        _library().cublasLtMatrixLayoutCreate(ctypes.byref(made), kind, size(rows), size(columns), ctypes.c_int64(rows))
    )
    return made


def _ask(handle: Any, product: Any, left: Any, right: Any, result: Any) -> list[_Heuristic]:
    library = _library()
    preference = ctypes.c_void_p()
    _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    wanted = [(_WORKSPACE, ctypes.c_uint64(0)), (_REDUCTIONS, ctypes.c_uint32(0))]
    wanted += [(attribute, ctypes.c_uint32(_ALIGNMENT)) for attribute in _ALIGNMENTS]
    for attribute, value in wanted:
        _check(
            library.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
            )
        )
    found = (_Heuristic * _MOST_OFFERS)()
    count = ctypes.c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        handle, product, left, right, result, result, preference, _MOST_OFFERS, found, ctypes.byref(count)
    )
    _check(library.cublasLtMatmulPreferenceDestroy(preference))
    if status:  # it knows no way
        return []
    return [heuristic for heuristic in found[: count.value] if not heuristic.state and not heuristic.workspace]


@cache
def _handle(device: torch.device) -> Any:
    made = ctypes.c_void_p()
    _check(_library().cublasLtCreate(ctypes.byref(made)))
    return made


@cache
def _library() -> Any:
    """The library that PyTorch has loaded, or None."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS returned status {status}")
