"""Triton kernels of `codecs.py`: each encodes or decodes both moments of a chunk in one pass over memory.

They are bitwise equal to the PyTorch versions. Random bits are computed where they are used, and never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollgraph.parallel.data.bucket_plan import BLOCK, LOWEST_SIGNED, LOWEST_UNSIGNED, SIGNED_OCTAVES, UNSIGNED_OCTAVES

_BLOCKS = 16  # blocks per program
_TILE = 2048  # elements per program, for bf16


@triton.jit
def _random_bits(offsets, salt, first):
    """The lower and upper half of a hash; see `RoundingNoise`."""
    bits = (offsets + tl.load(salt) + first).to(tl.uint32, bitcast=True)
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    bits = bits ^ (bits >> 16)
    return (bits & 0xFFFF).to(tl.int32), (bits >> 16).to(tl.int32)


@triton.jit
def _count_steps(values, noise, LOWEST: tl.constexpr):
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    steps = (bits + (noise << 4)) >> 20
    exponents = tl.minimum(tl.maximum(tl.max(steps, 1) >> 3, LOWEST), 254)
    return steps, exponents


@triton.jit
def _encode_int8_kernel(
    exp_avg, exp_avg_sq, salt, first, codes, codes_sq, exponents, exponents_sq, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LOWEST: tl.constexpr, LOWEST_SQ: tl.constexpr,
    OCTAVES: tl.constexpr, OCTAVES_SQ: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = block[:, None] < blocks
    lower, upper = _random_bits(offsets, salt, first)

    values = tl.load(exp_avg + offsets, mask=inside, other=0.0)
    steps, shared = _count_steps(values, lower, LOWEST)
    steps = steps - ((shared - OCTAVES) * 8)[:, None]
    power = (shared << 23).to(tl.float32, bitcast=True)
    smallest = power * (1.125 / (1 << OCTAVES))
    below = tl.abs(values) > lower.to(tl.float32) * (smallest / 65536.0)[:, None]
    steps = tl.where(steps < 1, below.to(tl.int32), tl.minimum(steps, 127))
    tl.store(codes + offsets, tl.where(values < 0, -steps, steps).to(tl.int8), mask=inside)
    tl.store(exponents + block, shared.to(tl.uint8), mask=block < blocks)

    values = tl.load(exp_avg_sq + offsets, mask=inside, other=0.0)
    steps, shared = _count_steps(values, upper, LOWEST_SQ)
    steps = steps - ((shared - OCTAVES_SQ) * 8)[:, None]
    steps = tl.where(values > 0, tl.minimum(tl.maximum(steps, 1), 255), 0)
    tl.store(codes_sq + offsets, steps.to(tl.uint8), mask=inside)
    tl.store(exponents_sq + block, shared.to(tl.uint8), mask=block < blocks)


@triton.jit
def _value_of(codes, shared, OCTAVES: tl.constexpr):
    bits = (codes + ((shared - OCTAVES) * 8)[:, None]) << 20
    return tl.where(codes > 0, bits.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def _decode_int8_kernel(
    codes, codes_sq, exponents, exponents_sq, exp_avg, exp_avg_sq, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, OCTAVES: tl.constexpr, OCTAVES_SQ: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = block[:, None] < blocks
    code = tl.load(codes + offsets, mask=inside, other=0).to(tl.int32)
    shared = tl.load(exponents + block, mask=block < blocks, other=OCTAVES).to(tl.int32)
    value = _value_of(tl.abs(code), shared, OCTAVES)
    tl.store(exp_avg + offsets, tl.where(code < 0, -value, value), mask=inside)
    code = tl.load(codes_sq + offsets, mask=inside, other=0).to(tl.int32)
    shared = tl.load(exponents_sq + block, mask=block < blocks, other=OCTAVES_SQ).to(tl.int32)
    tl.store(exp_avg_sq + offsets, _value_of(code, shared, OCTAVES_SQ), mask=inside)


@triton.jit
def _encode_bf16_kernel(exp_avg, exp_avg_sq, salt, first, codes, codes_sq, elements, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = offsets < elements
    lower, upper = _random_bits(offsets, salt, first)
    bits = tl.load(exp_avg + offsets, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    tl.store(codes + offsets, ((bits + lower) >> 16).to(tl.int16), mask=inside)
    bits = tl.load(exp_avg_sq + offsets, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    tl.store(codes_sq + offsets, ((bits + upper) >> 16).to(tl.int16), mask=inside)


def encode_int8(exp_avg: Tensor, exp_avg_sq: Tensor, salt: Tensor, first: int, fields: Mapping[str, Tensor]) -> None:
    """Encode moments in blocks. For `salt` and `first` see `RoundingNoise`."""
    blocks = exp_avg.numel() // BLOCK
    _grid(_encode_int8_kernel, blocks, _BLOCKS)(
        exp_avg, exp_avg_sq, salt, first, fields["exp_avg"], fields["exp_avg_sq"],
        fields["exp_avg_exponents"], fields["exp_avg_sq_exponents"], blocks,
        BLOCK=BLOCK, BLOCKS=_BLOCKS, LOWEST=LOWEST_SIGNED, LOWEST_SQ=LOWEST_UNSIGNED,
        OCTAVES=SIGNED_OCTAVES, OCTAVES_SQ=UNSIGNED_OCTAVES,
    )  # fmt: skip


def decode_int8(fields: Mapping[str, Tensor], exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    blocks = exp_avg.numel() // BLOCK
    _grid(_decode_int8_kernel, blocks, _BLOCKS)(
        fields["exp_avg"], fields["exp_avg_sq"], fields["exp_avg_exponents"], fields["exp_avg_sq_exponents"],
        exp_avg, exp_avg_sq, blocks,
        BLOCK=BLOCK, BLOCKS=_BLOCKS, OCTAVES=SIGNED_OCTAVES, OCTAVES_SQ=UNSIGNED_OCTAVES,
    )  # fmt: skip


def encode_bf16(exp_avg: Tensor, exp_avg_sq: Tensor, salt: Tensor, first: int, fields: Mapping[str, Tensor]) -> None:
    codes, codes_sq = (fields[name].view(torch.int16) for name in ("exp_avg", "exp_avg_sq"))
    elements = exp_avg.numel()
    _grid(_encode_bf16_kernel, elements, _TILE)(exp_avg, exp_avg_sq, salt, first, codes, codes_sq, elements, TILE=_TILE)


def _grid(kernel: Any, count: int, per_program: int) -> Any:
    return kernel[(triton.cdiv(count, per_program),)]
