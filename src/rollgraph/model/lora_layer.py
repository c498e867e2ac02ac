"""The LoRA of one fused layer: which of its projections have an adapter, and their arithmetic in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rollgraph.model.gemm.matmul import GemmAlgos, matmul


class LoRAProjection(NamedTuple):
    """A projection of a fused layer that has an adapter, and where its columns are, e.g. q in qkv."""

    columns: slice  # its outputs, in the base
    xa_columns: slice  # its x A^T, in the output of the GEMM with `base_and_a`
    b_columns: slice  # its B, in `lora_b`


@dataclass
class LinearAdapter:
    """The adapter of a layer, apart from its parameters `lora_a` and `lora_b`."""

    projections: tuple[LoRAProjection, ...]
    rank: int
    outputs: int  # of the base
    base_and_a: Tensor  # [outputs + rank of all projections, padded; inputs]: W, then a copy of A, then zeros
    bias: Tensor | None  # of `base_and_a`
    scale: Tensor  # shared by all layers; 0 switches the adapter off
    dropout: float
    algos: dict[int, GemmAlgos] = field(default_factory=dict)  # of the GEMMs with B on a CPU, by its number of outputs

    @property
    def xa_columns(self) -> slice:
        """The x A^T of all projections, in the output of the GEMM with `base_and_a`."""
        return slice(self.outputs, self.outputs + self.rank * len(self.projections))

    @property
    def a_rows(self) -> slice:
        """The rows of all A in `base_and_a`. Its product with them is `xa_columns`."""
        return self.xa_columns


def lora_backward(d_base_and_xa: Tensor, xa: Tensor, b: Tensor, scale: Tensor, adapter: LinearAdapter) -> Tensor:
    """The gradient of B. That of x A^T is written to `d_base_and_xa`, which holds that of the base already."""
    d_b = torch.empty_like(b)
    d_base_and_xa[:, adapter.xa_columns.stop :] = 0
    scaled_b = b * scale
    scaled_xa = xa * scale
    for projection in adapter.projections:
        d_out = d_base_and_xa[:, projection.columns]
        own_xa = scaled_xa[
            :, projection.xa_columns.start - adapter.outputs : projection.xa_columns.stop - adapter.outputs
        ]
        torch.mm(d_out, scaled_b[:, projection.b_columns].t(), out=d_base_and_xa[:, projection.xa_columns])
        torch.mm(own_xa.t(), d_out, out=d_b[:, projection.b_columns])
    return d_b


def lora_b_weight(b: Tensor, projection: LoRAProjection) -> Tensor:
    """B of a projection, [outputs, rank], in the dtype that a CPU multiplies it in."""
    return b[:, projection.b_columns].t().to(torch.promote_types(b.dtype, torch.float32)).contiguous()


def add_lora_by_matmul(base_and_xa: Tensor, b: Tensor, adapter: LinearAdapter) -> Tensor:
    """Base + scale (x A^T) B^T, [rows, outputs], in plain PyTorch."""
    dtype = torch.promote_types(base_and_xa.dtype, torch.float32)
    out = base_and_xa[:, : adapter.outputs].clone()
    for projection in adapter.projections:
        base = base_and_xa[:, projection.columns]
        xa = base_and_xa[:, projection.xa_columns].to(dtype).contiguous()
        b_weight = lora_b_weight(b, projection)
        delta = matmul(xa, b_weight, None, adapter.algos.get(len(b_weight), {}))
        total = (base.to(dtype) + adapter.scale * delta).to(base.dtype)
        out[:, projection.columns] = torch.where(adapter.scale == 0, base, total)
    return out
