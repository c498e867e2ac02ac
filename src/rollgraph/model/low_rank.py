"""Low-rank adapters of one fused layer: which of its parts have one, and their arithmetic in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rollgraph.model.products import Routes, multiply


class Part(NamedTuple):
    """A projection in a fused one that has an adapter."""

    columns: slice  # its outputs in the fused product
    low: slice  # x A^T in the extended product
    up: slice  # its columns in `lora_b`


@dataclass
class LinearAdapter:
    """What the adapter of a layer has beside its parameters."""

    parts: tuple[Part, ...]
    rank: int
    outputs: int  # of the base
    extended: Tensor  # [outputs + rank of all parts, padded; inputs]: W, then a copy of A, then zeros
    bias: Tensor | None  # of `extended`
    scale: Tensor  # shared by all layers; 0 switches the adapter off
    dropout: float
    routes: dict[int, Routes] = field(default_factory=dict)  # of the products with B on a CPU, by its number of outputs

    @property
    def low(self) -> slice:
        """x A^T of all parts in the extended product."""
        return slice(self.outputs, self.outputs + self.rank * len(self.parts))


def expand_backward(d_product: Tensor, low: Tensor, b: Tensor, scale: Tensor, adapter: LinearAdapter) -> Tensor:
    """The gradient of B. That of x A^T is written beside that of the base, which `d_product` has already."""
    d_b = torch.empty_like(b)
    d_product[:, adapter.low.stop :] = 0
    for part in adapter.parts:
        d_part = d_product[:, part.columns]
        own = low[:, part.low.start - adapter.outputs : part.low.stop - adapter.outputs]
        d_product[:, part.low] = (d_part @ b[:, part.up].t()) * scale
        d_b[:, part.up] = (own.t() @ d_part) * scale
    return d_b


def expanding_weight(b: Tensor, part: Part) -> Tensor:
    """B of a part, [outputs, rank], in the dtype that it is multiplied in on a CPU."""
    return b[:, part.up].t().to(torch.promote_types(b.dtype, torch.float32)).contiguous()


def expand_by_products(product: Tensor, b: Tensor, adapter: LinearAdapter) -> Tensor:
    """The base of an extended product plus what the adapter adds to it, [rows, outputs]."""
    wide = torch.promote_types(product.dtype, torch.float32)
    out = product[:, : adapter.outputs].clone()
    for part in adapter.parts:
        base = product[:, part.columns]
        low = product[:, part.low].to(wide).contiguous()
        up = expanding_weight(b, part)
        added = multiply(low, up, None, adapter.routes.get(len(up), {}))
        total = (base.to(wide) + adapter.scale * added).to(base.dtype)
        out[:, part.columns] = torch.where(adapter.scale == 0, base, total)
    return out
