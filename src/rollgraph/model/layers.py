"""The layers of the decoder: linear layers with LoRA, the embedding, RMS norm, rotary positions, SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rollgraph.graph.direct_sums import direct_sum_for
from rollgraph.model.gemm.matmul import TORCH_GEMM, GemmAlgo, GemmAlgos, input_gradient, matmul, matmul_with_algo
from rollgraph.model.kernels.cpu_operators import Normalized, Rotated, Silu
from rollgraph.model.lora_layer import LinearAdapter, LoRAProjection, add_lora_by_matmul, lora_b_weight, lora_backward
from rollgraph.model.tensor_parallel import TensorParallelGroup

# -- linear layers ---------------------------------------------------------------------------------
# A layer fuses several projections (q, k and v, or gate and up), and each may have a LoRA adapter. All A matrices
# are stacked below W in one matrix, `base_and_a`, so that one GEMM computes the base and x A^T. `add_lora` then adds
# scale (x A^T) B^T to the base, in fp32 and rounded once. With an adapter, the base is a buffer and gets no gradient.
# `lora.py` owns the adapters of a whole model.
#
# Under tensor parallelism a layer is column parallel (each rank has some of the outputs) or row parallel (each rank has
# some of the inputs, and the results are summed over the ranks).

_ALIGNMENT = 16  # the rows of `base_and_a` are padded to a multiple of this: cuBLAS and kernels then read faster


class PendingLoRA(NamedTuple):
    """The output of a layer whose LoRA up-projection, (x A^T) B^T, is still to be added by the kernel that reads it."""

    base_and_xa: Tensor  # [rows, outputs + rank of all projections, padded]: x W^T, then x A^T
    b: Tensor  # [rank, outputs of all projections]
    adapter: LinearAdapter
    pdl: bool = False  # the kernel that wrote `base_and_xa` triggers PDL; see `model/kernels/launch.py`


class ReplicatedRows(NamedTuple):
    """Weight rows that several ranks of a group replicate: key/value heads, when there are more ranks than heads.

    Each rank uses them for other query heads, so their gradients are summed over these ranks.
    """

    group: TensorParallelGroup
    first: int  # row from which on rows are replicated
    ranks: range


class Linear(nn.Linear):
    """A linear layer whose GEMM algorithm depends on the number of rows. Layers of one shape share their `algos`.

    With `row_parallel_group`, this rank has some of the inputs; with `column_parallel_group`, some of the outputs. In a
    column parallel layer A is replicated, in a row parallel one B is.

    `lora_a` has the rows of all projections, [rank of all projections, inputs]. `lora_b` is transposed, [rank, outputs
    of all projections], as kernels read it.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        *,
        row_parallel_group: TensorParallelGroup | None = None,
        column_parallel_group: TensorParallelGroup | None = None,
        replicated_rows: ReplicatedRows | None = None,
    ) -> None:
        super().__init__(inputs, outputs, bias)
        self.algos: GemmAlgos = {}
        self.row_parallel_group = row_parallel_group
        self.column_parallel_group = column_parallel_group
        self.replicated_rows = replicated_rows
        self.adapter: LinearAdapter | None = None

    def triggers_pdl(self, rows: int) -> bool:
        """Whether the forward of this many rows ends with a kernel of ours, which lets the next one start early."""
        if self.adapter is not None:
            return True
        return self.row_parallel_group is None and self.algos.get(rows, TORCH_GEMM).kind == "fixed"

    @property
    def gemm_weights(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of the GEMM that `algos` are for."""
        if self.adapter is None:
            return self.weight, None if self.row_parallel_group is not None else self.bias
        return self.adapter.base_and_a, self.adapter.bias

    def forward(  # type: ignore[override]
        self, x: Tensor, rows: int | None = None, *, defer_lora: bool = False
    ) -> Tensor | PendingLoRA:
        """The output of the first `rows` rows; see `matmul`.

        With `defer_lora`, the caller also accepts a `PendingLoRA`. It gets one on CUDA if there is an adapter.
        """
        if self.adapter is None:
            return self._without_adapter(x, rows)
        base_and_xa = self.base_and_xa(x, rows)
        pdl = self.algos.get(len(base_and_xa), TORCH_GEMM).kind == "fixed" and self.row_parallel_group is None
        pending = PendingLoRA(base_and_xa, self.lora_b, self.adapter, pdl)
        return pending if defer_lora and x.is_cuda else add_lora(pending)

    def _without_adapter(self, x: Tensor, rows: int | None) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.replicated_rows is not None:
            weight = self.replicated_rows.group.copy_rows_to_ranks(
                weight, self.replicated_rows.first, self.replicated_rows.ranks
            )
            if bias is not None:
                bias = self.replicated_rows.group.copy_rows_to_ranks(
                    bias, self.replicated_rows.first, self.replicated_rows.ranks
                )
        if self.row_parallel_group is None:
            return matmul(x, weight, bias, self.algos, rows=rows)
        out = self.row_parallel_group.all_reduce(matmul(x, weight, None, self.algos, rows=rows))
        return out if bias is None else out + bias

    def base_and_xa(self, x: Tensor, rows: int | None = None) -> Tensor:
        """x W^T, then x A^T of all projections, side by side."""
        assert self.adapter is not None
        adapter = self.adapter
        count = len(x) if rows is None else rows
        if adapter.dropout and torch.is_grad_enabled():
            return self._with_dropout(x[:count], adapter)
        algo = self.algos.get(count, TORCH_GEMM)
        a: Tensor = (
            self.lora_a if self.column_parallel_group is None else self.column_parallel_group.copy_to_ranks(self.lora_a)
        )
        out: Tensor = _BaseAndXA.apply(x, a, adapter, algo, count)  # type: ignore[no-untyped-call]
        return out if self.row_parallel_group is None else self.row_parallel_group.all_reduce(out)

    def _with_dropout(self, x: Tensor, adapter: LinearAdapter) -> Tensor:
        bias = None if adapter.bias is None else self.bias  # of a row parallel layer, rank 0 alone adds it
        base = functional.linear(x, self.weight, bias)
        a: Tensor = (
            self.lora_a if self.column_parallel_group is None else self.column_parallel_group.copy_to_ranks(self.lora_a)
        )
        xa = functional.linear(self._dropout(x, adapter.dropout), a)
        padding = len(adapter.base_and_a) - adapter.xa_columns.stop
        out = torch.cat((base, functional.pad(xa, (0, padding))), 1)
        return out if self.row_parallel_group is None else self.row_parallel_group.all_reduce(out)

    def _dropout(self, x: Tensor, rate: float) -> Tensor:
        """LoRA dropout. Tensor parallel ranks draw from equal generators, and drop what a single rank would.

        In a row parallel layer each rank draws for all inputs and takes its shard, so the generators stay equal.
        """
        group = self.row_parallel_group
        if group is None:
            return functional.dropout(x, rate)
        mask = functional.dropout(x.new_ones(len(x), x.shape[1] * group.size), rate)
        return x * (mask.chunk(group.size, 1)[group.rank] != 0) / (1 - rate)  # no factor that bf16 would round

    def lora_b_weights(self) -> Iterator[Tensor]:
        """B of each projection, [outputs, rank], in the dtype that a CPU multiplies it in."""
        assert self.adapter is not None
        for projection in self.adapter.projections:
            yield lora_b_weight(self.lora_b, projection)

    def attach_adapter(self, columns: Sequence[slice], a: Tensor, scale: Tensor, dropout: float) -> None:
        """Give the projections with these outputs adapters: `a` is A of all of them, and every B is zero.

        The weight and the bias keep their values. They become buffers, in other memory.
        """
        rank = len(a) // len(columns)
        outputs, inputs = self.weight.shape
        padded = -(-(outputs + len(a)) // _ALIGNMENT) * _ALIGNMENT
        projections = []
        width = 0
        for index, projection in enumerate(columns):
            start = outputs + index * rank
            end = width + projection.stop - projection.start
            projections.append(LoRAProjection(projection, slice(start, start + rank), slice(width, end)))
            width = end
        base_and_a = self.weight.new_zeros(padded, inputs)
        base_and_a[:outputs] = self.weight.detach()
        bias = None
        if self.bias is not None:
            bias = functional.pad(self.bias.detach(), (0, padded - outputs))
        del self.weight, self.bias
        self.register_buffer("weight", base_and_a[:outputs], persistent=False)
        self.register_buffer("bias", None if bias is None else bias[:outputs], persistent=False)
        self.lora_a = nn.Parameter(a.to(base_and_a))
        self.lora_b = nn.Parameter(base_and_a.new_zeros(rank, width))
        if self.row_parallel_group is not None and self.row_parallel_group.rank > 0:
            bias = None  # rank 0 alone adds it
        self.adapter = LinearAdapter(tuple(projections), rank, outputs, base_and_a, bias, scale, dropout)


class _BaseAndXA(torch.autograd.Function):
    """The GEMM with `base_and_a`. Only x and A get gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, adapter: LinearAdapter, algo: GemmAlgo, count: int) -> Tensor:
        ctx.save_for_backward(x, adapter.base_and_a)
        ctx.adapter = adapter
        ctx.count = count
        return matmul_with_algo(
            x if algo != TORCH_GEMM else x[:count], adapter.base_and_a, adapter.bias, algo, count, fp32_out=False
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, base_and_a = ctx.saved_tensors
        d_x = d_a = None
        if ctx.needs_input_grad[0]:
            d_x = input_gradient(d_out, base_and_a)
            if len(x) > ctx.count:
                d_x = functional.pad(d_x, (0, 0, 0, len(x) - ctx.count))
        if ctx.needs_input_grad[1]:
            d_a = d_out[:, ctx.adapter.xa_columns].t() @ x[: ctx.count]
        return d_x, d_a, None, None, None


def add_lora(pending: PendingLoRA) -> Tensor:
    """Base + scale (x A^T) B^T, [rows, outputs]."""
    base_and_xa, b, adapter, pdl = pending
    if not torch.is_grad_enabled():
        return _add_lora(base_and_xa, b, adapter, pdl)
    out: Tensor = _AddLoRA.apply(base_and_xa, b, adapter.scale, adapter)  # type: ignore[no-untyped-call]
    return out


def _add_lora(base_and_xa: Tensor, b: Tensor, adapter: LinearAdapter, pdl: bool = False) -> Tensor:
    if not base_and_xa.is_cuda:
        return add_lora_by_matmul(base_and_xa, b, adapter)
    from rollgraph.model.kernels import lora

    return lora.fused_add_lora(base_and_xa, b, adapter, pdl)


class _AddLoRA(torch.autograd.Function):
    """See `add_lora`."""

    @staticmethod
    def forward(ctx: Any, base_and_xa: Tensor, b: Tensor, scale: Tensor, adapter: LinearAdapter) -> Tensor:
        # A copy, because a view would keep all of `base_and_xa` alive until the backward.
        ctx.save_for_backward(base_and_xa[:, adapter.xa_columns].clone(), b, scale)
        ctx.adapter = adapter
        return _add_lora(base_and_xa, b, adapter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        xa, b, scale = ctx.saved_tensors
        adapter = ctx.adapter
        d_base_and_xa = d_out.new_empty(len(d_out), len(adapter.base_and_a))
        d_base_and_xa[:, : adapter.outputs] = d_out
        d_b = lora_backward(d_base_and_xa, xa, b, scale, adapter)
        return d_base_and_xa, d_b, None, None


# -- the embedding ---------------------------------------------------------------------------------
# Its gradient has one row per token of the vocabulary, and a microbatch changes a few thousand of them. Where gradients
# are summed in fp32, we add these rows to the sum and never allocate the full gradient.


class Embedding(nn.Embedding):
    """The weight's row of each of `ids`, [tokens]."""

    def forward(self, ids: Tensor) -> Tensor:
        if not (self.weight.is_cuda and self.weight.requires_grad and torch.is_grad_enabled()):
            return super().forward(ids)
        rows: Tensor = _Rows.apply(ids, self.weight)  # type: ignore[no-untyped-call]
        return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # the parameter itself, for its direct gradient sum
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        total = direct_sum_for(ctx.weight, d_rows.dtype)
        if total is None:
            return None, torch.ops.aten.embedding_dense_backward(d_rows, ids, len(ctx.weight), -1, False)
        from rollgraph.model.kernels.pointwise import add_to_rows

        add_to_rows(total.buffer(), ids, d_rows)
        return None, total.placeholder()


# -- norms, rotary positions, SwiGLU ---------------------------------------------------------------
# Each is one kernel: they are bound by memory bandwidth, and a chain of PyTorch operations would read and write the
# same memory many times. The kernels are in `model/kernels/cpu_kernels.py` for a CPU, and in
# `model/kernels/pointwise.py` for a GPU. On a GPU, a kernel of `model/kernels/heads.py` norms and rotates the heads.


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    x_fp32 = _to_fp32_or_more(x)
    if x.is_cuda:
        x_fp32 = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    else:
        x_fp32 = Normalized.apply(x_fp32, eps)  # type: ignore[no-untyped-call]
    return weight * x_fp32.to(x.dtype)


def _to_fp32_or_more(x: Tensor) -> Tensor:
    """Convert to fp32; fp64 stays fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def add_norm(
    residual: Tensor, update: Tensor, weight: Tensor, eps: float, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Add an update to the residual stream. Returns the norm of the sum, and the sum.

    `pdl` says that the kernel that wrote the update triggers PDL; see `model/kernels/launch.py`.
    """
    if residual.is_cuda:
        from rollgraph.model.kernels.pointwise import AddNorm

        outputs: tuple[Tensor, Tensor] = AddNorm.apply(residual, update, weight, eps, pdl)  # type: ignore[no-untyped-call]
        return outputs
    residual = residual + update
    return norm(residual, weight, eps), residual


def swiglu(gate_up: Tensor | PendingLoRA, rows: int = 0, *, pdl: bool = False) -> Tensor:
    """`silu(gate) * up`, where gate and up are the two halves of the last dimension.

    On CUDA, the result is padded to `rows` rows, so that a padded GEMM after it needs no copy. The padding is
    uninitialized. `pdl` is as for `add_norm`; a `PendingLoRA` has it as a field.
    """
    activated: Tensor
    if isinstance(gate_up, PendingLoRA):
        from rollgraph.model.kernels.lora import AdaptedSwiGLU

        base_and_xa, b, adapter, gate_up_pdl = gate_up
        padded = max(rows, len(base_and_xa))
        activated = AdaptedSwiGLU.apply(base_and_xa, b, adapter.scale, adapter, padded, gate_up_pdl)  # type: ignore[no-untyped-call]
        return activated
    if gate_up.is_cuda:
        from rollgraph.model.kernels.pointwise import SwiGLU

        activated = SwiGLU.apply(gate_up, max(rows, len(gate_up)), pdl)  # type: ignore[no-untyped-call]
        return activated
    gate, up = gate_up.chunk(2, -1)
    silu: Tensor = Silu.apply(_to_fp32_or_more(gate))  # type: ignore[no-untyped-call]
    return silu.to(gate.dtype) * up


def rotary_angles(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine for each position, [tokens, head_dim / 2] in fp32."""
    angles = positions[:, None].float() * frequencies
    cos = angles.cos()
    sin = angles.sin()
    if factor == 1.0:
        return cos, sin
    return cos * factor, sin * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x, [tokens, heads, head_dim]."""
    if not x.is_cuda:
        rotated: Tensor = Rotated.apply(_to_fp32_or_more(x), cos, sin)  # type: ignore[no-untyped-call]
        return rotated.to(x.dtype)
    first, second = _to_fp32_or_more(x).chunk(2, -1)
    cos = cos[:, None]
    sin = sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
