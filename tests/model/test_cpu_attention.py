"""Attention on a CPU: correct, with the same bits in every layout, beside any neighbours, on any number of threads.

The bits do not depend on the processor either: they are compared with those of code compiled for a generic one.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rollgraph.inference.sampler import pick_on_cpu
from rollgraph.model.attention import PackedKeys, masked_attention, packed_attention, paged_decode, paged_prefill
from rollgraph.model.layers import norm, rotate, swiglu
from tests.model.test_attention_kernels import Cache, share

SHAPES = [(2, 2, 4), (6, 2, 16), (6, 1, 10), (3, 3, 64)]  # heads, key heads, dimensions of a head
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_window = pytest.mark.parametrize("window", [None, 1, 5, 64])


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def make_packed(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[list[Tensor], Tensor, PackedKeys]:
    """Queries, keys and values of a lone sequence, of two groups that share a prompt, and of padding."""
    heads, kv_heads, dim = shape
    cu_seqlens, keys = share(70, [(66, [1, 130]), (1, [40]), (9, [3, 64, 2])], empty=2)
    tokens = int(cu_seqlens[-1])
    return [torch.randn(tokens, n, dim).to(dtype) for n in (heads, kv_heads, kv_heads)], cu_seqlens, keys


@every_window
@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_results_and_gradients_equal_float64(
    dtype: torch.dtype, shape: tuple[int, int, int], window: int | None
) -> None:
    """They equal those of a masked attention in float64, up to the rounding of the returned numbers."""
    inputs, cu_seqlens, keys = make_packed(shape, dtype)
    leaves = [x.requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = packed_attention(*leaves, cu_seqlens, 200, window, keys)
    expected = masked_attention(*wide, cu_seqlens, *keys, window)
    upstream = torch.randn(out.shape).to(dtype)
    results = [out, *torch.autograd.grad(out, leaves, upstream)]
    expected_results = [expected, *torch.autograd.grad(expected, wide, upstream.double())]
    tolerance = 4 * max(torch.finfo(dtype).eps, 1e-12)
    for result, exact in zip(results, expected_results, strict=True):
        assert result.dtype == dtype
        assert (result.double() - exact).norm() <= tolerance * max(exact.norm(), upstream.double().norm() / 8)


@every_window
@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("threads")
def test_layouts_have_the_same_bits(dtype: torch.dtype, shape: tuple[int, int, int], window: int | None) -> None:
    """Decode, prefill in chunks, and packed with and without a shared prompt."""
    heads, kv_heads, dim = shape
    cache = Cache(lengths := (1, 64, 65, 150, 40), 16, kv_heads, dim, spare=2)
    pages = cache.pages.to(dtype)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    q = torch.randn(int(bounds[-1]), heads, dim).to(dtype)
    k, v = (
        torch.cat(
            [pages[cache.table[i, torch.arange(n) // 16], torch.arange(n) % 16, index] for i, n in enumerate(lengths)]
        )
        for index in (0, 1)
    )
    packed = packed_attention(q, k, v, bounds, max(lengths), window)

    decoded = paged_decode(q[bounds[1:].long() - 1], pages, cache.table, cache.lengths, window)
    assert torch.equal(decoded, packed[bounds[1:].long() - 1])
    late = [torch.arange(n // 3, n) + int(start) for n, start in zip(lengths, bounds, strict=False)]
    chunks = torch.tensor([0, *map(len, late)]).cumsum(0).int()
    padded = torch.cat((q[torch.cat(late)], torch.full((3, heads, dim), torch.nan).to(dtype)))
    prefilled = paged_prefill(padded, pages, cache.table, chunks, cache.lengths, window)
    assert torch.equal(prefilled[:-3], packed[torch.cat(late)])
    assert not prefilled[-3:].any()

    span = slice(int(bounds[3]), int(bounds[4]))
    shared, tokens = 50, torch.arange(150)
    keys = PackedKeys(torch.cat((tokens[:shared], tokens)), torch.tensor([0, shared, shared + 150]).int())
    shared_prompt_out = packed_attention(
        q[span], k[span], v[span], torch.tensor([0, shared, 150]).int(), 150, window, keys
    )
    assert torch.equal(shared_prompt_out, packed[span])


@pytest.mark.usefixtures("threads")
def test_later_tokens_do_not_matter() -> None:
    """Nor do tokens before the window, whatever they hold. Only queries that attend to a NaN see it."""
    q, k, v = (torch.randn(100, 2, 8) for _ in range(3))
    bounds = torch.tensor([0, 100]).int()
    before = packed_attention(q, k, v, bounds, 100, 7)
    for x in (q, k, v):
        x[40] = torch.nan
        after = packed_attention(q, k, v, bounds, 100, 7)
        x[40] = torch.randn(2, 8)
        touched = torch.arange(100) == 40 if x is q else (torch.arange(100) >= 40) & (torch.arange(100) < 47)
        assert after[touched].isnan().all()
        assert torch.equal(after[~touched], before[~touched])
        before = packed_attention(q, k, v, bounds, 100, 7)


def test_any_number_of_threads_has_the_same_bits() -> None:
    digests = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        digests.append(digest())
    torch.set_num_threads(before)
    assert digests[1:] == digests[:-1]


def digest() -> str:
    """A digest of results and gradients, from inputs that are the same on every machine."""
    inputs, cu_seqlens, keys = make_packed((6, 2, 16), torch.float32)
    count = [torch.arange(x.numel()).view(x.shape) for x in inputs]
    q, k, v = ((n * 7919 % 1013 / 256 - 2).requires_grad_() for n in count)
    out = packed_attention(q, k, v, cu_seqlens, 200, 100, keys)
    turned = torch.linspace(-1, 1, len(q) * 8).view(len(q), 8)
    rotated = rotate(q, turned, turned)
    between = swiglu(norm(rotated.flatten(1), torch.ones(96), 1e-5))
    results = [out, between, *torch.autograd.grad((out, between), (q, k, v), (out.detach(), between.detach()))]
    seeds = torch.arange(2 * len(q)).int().view(-1, 2)
    results.append(pick_on_cpu(q[:, 0], torch.arange(16).int(), seeds, seeds[:, 0], torch.ones(len(q))))
    return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in results)).hexdigest()


@pytest.mark.slow
def test_processors_have_the_same_bits() -> None:
    """Compile for a generic processor of this kind, in a separate process."""
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    program = f"from {__name__} import digest; print(digest())"
    environment = {**os.environ, **generic, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert printed.split() == [digest()]
