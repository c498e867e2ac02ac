"""Candidates for one GEMM: the algorithms of cuBLASLt, and the trials on random operands that compare and time them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# -- algorithms of cuBLAS --------------------------------------------------------------------------
# PyTorch takes the first one, which is the guess of a heuristic. Under sustained load, others take up to 17% less time,
# because they need less power. We only ask for algorithms without a workspace: streams then share nothing, and no
# algorithm splits the sum along K.

_ALIGNMENT = 16  # bytes, of all operands
_MAX_ALGOS = 16
_COMPUTE_FP32 = 68
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS, _BIAS_TYPE = 3, 4, 7, 8, 26  # attributes of a matmul descriptor
_WITH_BIAS = 4
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # preferences

GemmKind = Literal["forward", "input gradient", "weight gradient"]


class GemmProblem(NamedTuple):
    """One GEMM of a layer whose weight is [columns, depth].

    - forward: x of [rows, depth] times the weight; with `fp32_out`, the result is fp32.
    - input gradient: the output's gradient of [rows, columns] times the weight.
    - weight gradient: the output's gradient times x, added to a sum in fp32.
    """

    kind: GemmKind
    rows: int
    columns: int
    depth: int
    dtype: torch.dtype
    fp32_out: bool = False
    has_bias: bool = False


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
class CublasAlgo:
    """One cuBLASLt algorithm for one problem, ready to launch."""

    problem: GemmProblem
    descriptors: tuple[Any, ...]  # of the matmul, of both operands, of the result
    algorithm: Any
    handle: Any

    def run(self, first: Tensor, second: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Write the result to `out`; a weight gradient is added to it.

        `first` and `second` are x and the weight, or d_out and the weight, or d_out and x.
        """
        self._check_operands(first, second)
        descriptor, left, right, result = self.descriptors
        first, second = _aligned(first), _aligned(second)
        if bias is not None:
            bias = _aligned(bias)
            _set(descriptor, _BIAS, ctypes.c_void_p(bias.data_ptr()))
        alpha = ctypes.c_float(1.0)
        beta = ctypes.c_float(1.0 if self.problem.kind == "weight gradient" else 0.0)
        target = ctypes.c_void_p(out.data_ptr())
        _check(
            _cublas().cublasLtMatmul(
                self.handle, descriptor, ctypes.byref(alpha), ctypes.c_void_p(second.data_ptr()), left,
                ctypes.c_void_p(first.data_ptr()), right, ctypes.byref(beta), target, result, target, result,
                ctypes.byref(self.algorithm), None, ctypes.c_size_t(0),
                ctypes.c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
            )
        )  # fmt: skip

    def _check_operands(self, first: Tensor, second: Tensor) -> None:
        """Raise if these are not the operands of the problem: cuBLAS gets bare addresses and would read anything."""
        kind, rows, columns, depth, dtype, *_ = self.problem
        shapes = {
            "forward": ((rows, depth), (columns, depth)),
            "input gradient": ((rows, columns), (columns, depth)),
            "weight gradient": ((rows, columns), (rows, depth)),
        }[kind]
        if (first.shape, second.shape) != shapes or not first.dtype == second.dtype == dtype:
            operands = f"{tuple(first.shape)} in {first.dtype} and {tuple(second.shape)} in {second.dtype}"
            raise ValueError(f"a GEMM ({kind}) of {shapes[0]} and {shapes[1]} in {dtype} was called with {operands}")


@cache
def cublas_algos(problem: GemmProblem, device: torch.device) -> tuple[CublasAlgo, ...]:
    """All cuBLAS algorithms for a problem on a device. Empty where cuBLAS is absent or the problem is not supported."""
    if problem.dtype not in (torch.float16, torch.bfloat16) or _cublas() is None:
        return ()
    if any(size * problem.dtype.itemsize % _ALIGNMENT for size in (problem.columns, problem.depth)):
        return ()
    rows, columns, depth = problem.rows, problem.columns, problem.depth
    half_type, fp32_type = _TYPES[problem.dtype], _TYPES[torch.float32]
    # cuBLAS is column-major: it sees a matrix of [rows, columns] as one of [columns, rows].
    weight, x, gradient = (depth, columns), (depth, rows), (columns, rows)
    left, right, result = {
        "forward": (weight, x, gradient),
        "input gradient": (weight, gradient, x),
        "weight gradient": (x, gradient, weight),
    }[problem.kind]
    to_fp32 = problem.fp32_out or problem.kind == "weight gradient"
    with torch.cuda.device(device):
        handle = _handle(device)
        descriptors = (
            _matmul_descriptor(problem),
            _matrix_layout(half_type, *left),
            _matrix_layout(half_type, *right),
            _matrix_layout(fp32_type if to_fp32 else half_type, *result),
        )
        heuristics = _query_algorithms(handle, *descriptors)
    return tuple(CublasAlgo(problem, descriptors, heuristic.algorithm, handle) for heuristic in heuristics)


def _aligned(operand: Tensor) -> Tensor:
    """The operand, contiguous and aligned as its descriptor promises; a copy if it is not."""
    if operand.is_contiguous() and operand.data_ptr() % _ALIGNMENT == 0:
        return operand
    return operand.clone(memory_format=torch.contiguous_format)


def _matmul_descriptor(problem: GemmProblem) -> Any:
    descriptor = ctypes.c_void_p()
    _check(_cublas().cublasLtMatmulDescCreate(ctypes.byref(descriptor), _COMPUTE_FP32, _TYPES[torch.float32]))
    _set(descriptor, _TRANSPOSE_A, ctypes.c_int(problem.kind == "forward"))
    _set(descriptor, _TRANSPOSE_B, ctypes.c_int(problem.kind == "weight gradient"))
    if problem.has_bias:
        _set(descriptor, _EPILOGUE, ctypes.c_int(_WITH_BIAS))
        _set(descriptor, _BIAS_TYPE, ctypes.c_int(_TYPES[problem.dtype]))
    return descriptor


def _set(descriptor: Any, attribute: int, value: Any) -> None:
    _check(_cublas().cublasLtMatmulDescSetAttribute(descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value)))


def _matrix_layout(dtype: int, rows: int, columns: int) -> Any:
    layout = ctypes.c_void_p()
    size = ctypes.c_uint64
    _check(
        _cublas().cublasLtMatrixLayoutCreate(
            ctypes.byref(layout), dtype, size(rows), size(columns), ctypes.c_int64(rows)
        )
    )
    return layout


def _query_algorithms(handle: Any, descriptor: Any, left: Any, right: Any, result: Any) -> list[_Heuristic]:
    library = _cublas()
    preference = ctypes.c_void_p()
    _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    attributes = [(_WORKSPACE, ctypes.c_uint64(0)), (_REDUCTIONS, ctypes.c_uint32(0))]
    attributes += [(attribute, ctypes.c_uint32(_ALIGNMENT)) for attribute in _ALIGNMENTS]
    for attribute, value in attributes:
        _check(
            library.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
            )
        )
    heuristics = (_Heuristic * _MAX_ALGOS)()
    count = ctypes.c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        handle, descriptor, left, right, result, result, preference, _MAX_ALGOS, heuristics, ctypes.byref(count)
    )
    _check(library.cublasLtMatmulPreferenceDestroy(preference))
    if status:  # no algorithm supports the problem
        return []
    return [heuristic for heuristic in heuristics[: count.value] if not heuristic.state and not heuristic.workspace]


@cache
def _handle(device: torch.device) -> Any:
    handle = ctypes.c_void_p()
    _check(_cublas().cublasLtCreate(ctypes.byref(handle)))
    return handle


@cache
def _cublas() -> Any:
    """The cuBLASLt that PyTorch has loaded, or None."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS returned status {status}")


# -- trials ----------------------------------------------------------------------------------------

_REPEATS = 10  # calls in one timed graph
_DIGESTED_ELEMENTS = 2**24  # of a matrix, at a time
_BLOCK_MS = 6.0  # length of a block of back-to-back calls
_ROUNDS = 3  # of blocks of all calls; the first warms the device up
_HOPELESS = 1.25  # a call that takes this many times the fastest is not timed again
_CANCELLING_PAIRS = 4
_CANCELLING_SIZE = 2.0**12  # how much larger cancelling terms are than others


def draw_operands(
    like: Tensor, like_bias: Tensor | None, rows: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random x, [rows, depth], weight, [columns, depth], and bias."""

    def draw(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float32, device=like.device, generator=generator).to(like.dtype)

    columns, depth = like.shape
    x = draw(rows, depth)
    weight = draw(columns, depth) * depth**-0.5
    bias = draw(columns) if like_bias is not None else None
    _add_cancelling_terms(x, weight, generator)
    return x, weight, bias


def _add_cancelling_terms(x: Tensor, weight: Tensor, generator: torch.Generator) -> None:
    """Make some terms of every sum along K large, in pairs that cancel each other.

    How many bits the other terms lose depends on the order of additions. So another order shows in the result, even
    after it was rounded to half precision.
    """
    depth = x.shape[1]
    pairs = min(_CANCELLING_PAIRS, depth // 2)
    shuffled = torch.randperm(depth, generator=generator, device=x.device)
    positive = shuffled[:pairs]
    negative = shuffled[pairs : 2 * pairs]
    weight[:, negative] = weight[:, positive]
    x[:, positive] *= _CANCELLING_SIZE
    x[:, negative] = -x[:, positive]


def run_if_it_fits(call: Callable[[], Tensor]) -> Tensor | None:
    """The result of a call, or None if a kernel of ours needs more shared memory than the device has."""
    try:
        return call()
    except Exception as error:
        if type(error).__name__ != "OutOfResources":  # Triton's, which need not be installed
            raise
        return None


def device_time(call: Callable[[], Tensor]) -> float:
    """The milliseconds that a call takes on the device, launch time excluded."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            call()
    graph.replay()
    return _time_block(graph.replay, 1) / _REPEATS


def sustained_times(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The milliseconds of each call under sustained load.

    A device that stays busy lowers its clock to stay within its power limit. So the fastest kernel of a short test need
    not be the fastest in a run. Blocks of back-to-back calls take turns.
    """
    times = []
    for call in calls:
        call()
        times.append(_time_block(call, 1))
    hopeful = [i for i, milliseconds in enumerate(times) if milliseconds < _HOPELESS * min(times)]
    counts = {i: max(1, round(_BLOCK_MS / times[i])) for i in hopeful}
    block_times: dict[int, list[float]] = {i: [] for i in hopeful}
    for _ in range(_ROUNDS):
        for i in hopeful:
            block_times[i].append(_time_block(calls[i], counts[i]))
    for i in hopeful:
        times[i] = min(block_times[i][1:])
    return times


def _time_block(call: Callable[[], object], count: int) -> float:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


def row_digests(matrix: Tensor) -> Tensor:
    """A hash of the bits of each row, [rows] int64.

    The logits of many rows take gigabytes. With digests, only one such matrix exists at a time.
    """
    integer_types = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = matrix.view(integer_types[matrix.element_size()])
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, matrix.shape[1:], generator=generator).mul_(2).add_(1).to(matrix.device)
    rows = max(1, _DIGESTED_ELEMENTS // matrix.shape[1])
    return torch.cat([(part * factors).sum(1) for part in bits.split(rows)])
