"""The kernels of attention and heads equal the plain versions in `attention.py` and `layers.py`.

Without a GPU they run in Triton's interpreter, which must be selected before Triton is imported. So a test starts this
file as a program, which runs all cases and prints the result of each. With a GPU, they run compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import pytest
import torch
from torch import Tensor

from rollgraph.model.attention import PackedKeys, masked_attention, packed_attention, paged_decode, paged_prefill
from rollgraph.model.layers import norm, rotary_angles, rotate
from tests.interpreter import ENVIRONMENT, require_interpreter

Case = Callable[[torch.device, torch.dtype], None]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # bf16 has 8 bits
HEADS = [(2, 2), (6, 2), (6, 1)]  # and key/value heads: groups of 1, 3 and 6


def close(actual: Tensor, expected: Tensor, times: float = 1) -> None:
    """Compare with a result in fp32 of a CPU, within the tolerance of the dtype of `actual`."""
    tolerance = times * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float().cpu(), expected, rtol=tolerance, atol=tolerance)


class Cache:
    """Random keys and values of sequences in shuffled blocks; NaN everywhere else."""

    def __init__(self, lengths: Sequence[int], block: int, kv_heads: int, dim: int, spare: int = 0) -> None:
        widths = [-(-length // block) for length in lengths]
        blocks = torch.randperm(sum(widths) + 3)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.pages = torch.full((len(blocks), block, 2, kv_heads, dim), torch.nan)
        self.table = blocks[-1].repeat(len(lengths), max(widths) + spare).int()  # unused entries: a block of NaN
        for row, blocks_of_row in enumerate(blocks[:-3].split(widths)):
            self.table[row, : len(blocks_of_row)] = blocks_of_row
            positions = torch.arange(lengths[row])
            self.pages[self.table[row, positions // block], positions % block] = torch.randn(
                len(positions), 2, kv_heads, dim
            )

    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return self.pages.to(device, dtype), self.table.to(device), self.lengths.to(device)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The pages for the CPU: rounded like the kernel's, with zeros where nothing may be read."""
        return self.pages.to(dtype).float().nan_to_num(0.0)


def check_decode(
    dim: int, heads: tuple[int, int], block: int, window: int | None, lengths: Sequence[int], split: bool | None,
    device: torch.device, dtype: torch.dtype,
) -> None:  # fmt: skip
    from rollgraph.model.kernels.attention import decode

    cache = Cache(lengths, block, heads[1], dim, spare=2)
    q = torch.randn(len(lengths), heads[0], dim).to(dtype)
    pages, table, ends = cache.on(device, dtype)
    out = decode(q.to(device), pages, table, ends, window, split)
    close(out, paged_decode(q.float(), cache.plain(dtype), cache.table, cache.lengths, window))


def check_unrotated_decode(
    dim: int, heads: tuple[int, int], lengths: Sequence[int], split: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """One kernel that rotates and attends has the bits of two kernels, in its results and in the cache."""
    from rollgraph.model.kernels.attention import UnrotatedQKV, decode
    from rollgraph.model.kernels.heads import rotate_and_store

    block, (heads_q, heads_kv) = 16, heads
    cache = Cache(lengths, block, heads_kv, dim, spare=1)
    pages, table, ends = cache.on(device, dtype)
    last = cache.lengths.long() - 1
    slots = (cache.table[torch.arange(len(lengths)), last // block] * block + last % block).int().to(device)
    pages.flatten(0, 1)[slots.long()] = torch.nan  # not written yet: the step itself writes it
    qkv = torch.randn(len(lengths), (heads_q + 2 * heads_kv) * dim).to(device, dtype)
    cos, sin = (x.to(device) for x in rotary_angles(last, torch.rand(dim // 2), 1.2))
    expected_pages = pages.clone()
    q = rotate_and_store(qkv, cos, sin, None, 1e-5, slots, expected_pages, heads_q)
    expected = decode(q, expected_pages, table, ends, None, split)
    out = decode(UnrotatedQKV(qkv, cos, sin, slots, heads_q), pages, table, ends, None, split)
    assert torch.equal(out, expected)
    assert out.isfinite().all()
    assert torch.equal(pages.nan_to_num(7.0), expected_pages.nan_to_num(7.0))


def check_prefill(
    dim: int, heads: tuple[int, int], block: int, window: int | None, spans: Sequence[tuple[int, int]],
    device: torch.device, dtype: torch.dtype,
) -> None:  # fmt: skip
    """`spans` are (number of earlier positions, number of queries) of each sequence."""
    from rollgraph.model.kernels.attention import prefill

    cache = Cache([start + count for start, count in spans], block, heads[1], dim, spare=1)
    cu_seqlens = torch.tensor([0, *(count for _, count in spans)]).cumsum(0).int()
    q = torch.randn(int(cu_seqlens[-1]) + 3, heads[0], dim).to(dtype)  # and three rows of padding
    pages, table, ends = cache.on(device, dtype)
    out = prefill(q.to(device), pages, table, cu_seqlens.to(device), ends, window)
    close(out, paged_prefill(q.float(), cache.plain(dtype), cache.table, cu_seqlens, cache.lengths, window))
    assert not out[-3:].any()


def check_store(
    dim: int, heads: tuple[int, int], normed: bool, slots_dtype: torch.dtype, device: torch.device, dtype: torch.dtype
) -> None:
    """Check the queries and the entries written to the cache, and that no other entry changes."""
    from rollgraph.model.kernels.heads import rotate_and_store

    tokens, block, (heads_q, heads_kv) = 7, 4, heads
    qkv = torch.randn(tokens, (heads_q + 2 * heads_kv) * dim).to(dtype)
    q_weight, k_weight = (torch.randn(2, dim) + 1).to(dtype)
    cos, sin = rotary_angles(torch.randint(1000, (tokens,)), torch.rand(dim // 2), 1.2)
    slots = torch.randperm(5 * block)[:tokens].to(slots_dtype)
    pages = torch.randn(5, block, 2, heads_kv, dim).to(dtype)
    q, k, v = qkv.float().view(tokens, -1, dim).split((heads_q, heads_kv, heads_kv), 1)
    if normed:
        q, k = norm(q, q_weight.float(), 1e-5), norm(k, k_weight.float(), 1e-5)
    expected = pages.float().clone()
    expected.view(-1, 2, heads_kv, dim)[slots.long()] = torch.stack((rotate(k, cos, sin), v), 1)

    written = pages.to(device, copy=True)
    weights = (q_weight.to(device), k_weight.to(device)) if normed else None
    rotated = rotate_and_store(
        qkv.to(device), cos.to(device), sin.to(device), weights, 1e-5, slots.to(device), written, heads_q
    )
    close(rotated, rotate(q, cos, sin))
    close(written, expected)
    untouched = torch.ones(5 * block, dtype=torch.bool)
    untouched[slots.long()] = False
    assert torch.equal(written.cpu().flatten(0, 1)[untouched], pages.flatten(0, 1)[untouched])


def check_split(dim: int, heads: tuple[int, int], normed: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Check queries, keys and values of training, their gradients, and that the cache would hold the same bits."""
    from rollgraph.model.kernels.heads import SplitHeads, rotate_and_store

    tokens, (heads_q, heads_kv) = 9, heads
    qkv = torch.randn(tokens, (heads_q + 2 * heads_kv) * dim).to(dtype)
    weights = (torch.randn(2, dim) + 1).to(dtype)
    cos, sin = rotary_angles(torch.randint(1000, (tokens,)), torch.rand(dim // 2), 1.2)

    plain = [x.float().requires_grad_() for x in (qkv, *weights)]
    q, k, v = plain[0].view(tokens, -1, dim).split((heads_q, heads_kv, heads_kv), 1)
    if normed:
        q, k = norm(q, plain[1], 1e-5), norm(k, plain[2], 1e-5)
    expected = (rotate(q, cos, sin), rotate(k, cos, sin), v)
    upstream = [torch.randn_like(x).to(dtype) for x in expected]
    leaves = plain if normed else plain[:1]
    expected_gradients = torch.autograd.grad(expected, leaves, [x.float() for x in upstream])

    ours = [x.to(device).requires_grad_() for x in (qkv, *weights)]
    norms = ours[1:] if normed else [None, None]
    heads_out = SplitHeads.apply(ours[0], cos.to(device), sin.to(device), *norms, 1e-5, heads_q, heads_kv)
    gradients = torch.autograd.grad(heads_out, ours if normed else ours[:1], [x.to(device) for x in upstream])
    for one, other in zip((*heads_out, *gradients), (*expected, *expected_gradients), strict=True):
        close(one.detach(), other.detach(), times=4)  # a gradient of a weight is a sum over tokens and heads

    pages = torch.zeros((tokens, 1, 2, heads_kv, dim), dtype=dtype, device=device)
    slots = torch.arange(tokens, device=device, dtype=torch.int32)
    stored = rotate_and_store(
        ours[0].detach(), cos.to(device), sin.to(device), tuple(x.detach() for x in norms) if normed else None, 1e-5,
        slots, pages, heads_q,
    )  # fmt: skip
    assert torch.equal(stored, heads_out[0])
    assert torch.equal(pages[:, 0, 0], heads_out[1])
    assert torch.equal(pages[:, 0, 1], heads_out[2])


def share(lone: int, groups: Sequence[tuple[int, Sequence[int]]], empty: int) -> tuple[Tensor, PackedKeys]:
    """Bounds and keys of a lone sequence, then of groups of a shared prompt and the sequences that share it.

    Some keys at the end belong to no sequence.
    """
    seen, bounds = [list(range(lone))], [0, lone]
    for shared, lengths in groups:
        first = list(range(bounds[-1], bounds[-1] + shared))
        seen.append(first)
        bounds.append(bounds[-1] + shared)
        for count in lengths:
            seen.append([*first, *range(bounds[-1], bounds[-1] + count)])
            bounds.append(bounds[-1] + count)
    ends = torch.tensor([0, *map(len, seen), *[0] * empty]).cumsum(0).int()
    cu_seqlens = torch.tensor([*bounds, *[bounds[-1]] * empty]).int()
    return cu_seqlens, PackedKeys(torch.tensor([*chain(*seen), *[0] * 9]), ends)


def check_same_bits(
    dim: int, heads: tuple[int, int], window: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Decode with and without parts, prefill in chunks, and packed with and without a shared prompt: equal bits."""
    from rollgraph.model.kernels.attention import decode, packed, prefill

    lengths, block = (1, 64, 65, 300, 520, 40), 16
    cache = Cache(lengths, block, heads[1], dim, spare=1)
    pages, table, ends = cache.on(device, dtype)
    positions = [torch.arange(length) for length in lengths]
    slots = [cache.table[row, at // block] * block + at % block for row, at in enumerate(positions)]
    memory = pages.flatten(0, 1)[torch.cat(slots).to(device)]
    k, v = memory[:, 0].contiguous(), memory[:, 1].contiguous()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    q = torch.randn(sum(lengths), heads[0], dim).to(device, dtype)
    expected, _ = packed(q, k, v, cu_seqlens, cu_seqlens, cu_seqlens, window, max(lengths))
    assert torch.equal(prefill(q, pages, table, cu_seqlens, ends, window), expected)

    row_of = torch.cat([torch.full_like(at, row) for row, at in enumerate(positions)])
    position = torch.cat(positions)
    batch_indices = torch.randperm(len(q))[:200]
    for split in (False, True):
        for batch in (batch_indices, batch_indices[:1]):
            rows = row_of[batch].to(device)
            out = decode(q[batch.to(device)], pages, table[rows], (position[batch] + 1).int().to(device), window, split)
            assert torch.equal(out, expected[batch.to(device)])

    # The last two thirds of each sequence as a chunk. Then a whole sequence that shares its first third as a prompt.
    starts = [length // 3 for length in lengths]
    late = torch.cat([start + torch.arange(length - start) for start, length in zip(starts, lengths, strict=True)])
    counts = [length - start for start, length in zip(starts, lengths, strict=True)]
    rows = late + cu_seqlens.cpu()[:-1].repeat_interleave(torch.tensor(counts))
    bounds = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    assert torch.equal(prefill(q[rows.to(device)], pages, table, bounds, ends, window), expected[rows.to(device)])
    first, full_length = int(cu_seqlens[3]), lengths[3]
    shared = full_length // 3
    tokens = torch.arange(full_length)
    cu_rows = torch.tensor([0, shared, full_length]).int().to(device)
    keys = torch.cat((tokens[:shared], tokens)).to(device)
    cu_keys = torch.tensor([0, shared, shared + full_length]).int().to(device)
    span = slice(first, first + full_length)
    shared_qkv = (q[span].contiguous(), k[span].contiguous(), v[span].contiguous())
    out, _ = packed(*shared_qkv, cu_rows, keys, cu_keys, window, full_length)
    assert torch.equal(out, expected[span])


def check_backward(
    dim: int, heads: tuple[int, int], window: int | None, shares: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Check the gradients against those of a masked attention in float64, and that a second run has the same bits."""
    from rollgraph.model.kernels.attention import packed
    from rollgraph.model.kernels.attention_backward import packed_backward

    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("in fp32, the backward is that of a masked attention")
    cu_seqlens, keys = share(70, [(66, [1, 130]), (1, [40]), (9, [3, 64, 2])], empty=2)
    if not shares:
        keys = PackedKeys(cu_seqlens, cu_seqlens)
    tokens = int(cu_seqlens[-1])
    q, k, v, upstream = (torch.randn(tokens, n, dim).to(dtype) for n in (heads[0], heads[1], heads[1], heads[0]))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(masked_attention(*wide, cu_seqlens, *keys, window), wide, upstream.double())
    layout = [x.to(device) for x in (cu_seqlens, *keys)]
    ours = [x.to(device) for x in (q, k, v)]
    out, normalizers = packed(*ours, *layout, window, tokens)
    for parts in {1, heads[0] // heads[1], None}:
        gradients, repeated = (
            packed_backward(upstream.to(device), *ours, *layout, out, normalizers, window, shares, parts)
            for _ in range(2)
        )
        for name, gradient, repeated_gradient, exact in zip("qkv", gradients, repeated, expected, strict=True):
            assert gradient.dtype == dtype
            assert torch.equal(gradient, repeated_gradient), (name, parts)
            error = (gradient.double().cpu() - exact).norm() / exact.norm()
            assert error < TOLERANCE[dtype], (name, parts, float(error))


def check_shared_keys(
    dim: int, kv_heads: int, groups: Sequence[tuple[int, Sequence[int]]], empty: int, device: torch.device,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Gradients of keys that belong to no sequence may hold anything, and are not added to any token."""
    from rollgraph.model.kernels.attention_backward import sum_over_copies

    cu_seqlens, keys = share(3, groups, empty)
    used, tokens = int(keys.cu_seqlens[-1]), int(cu_seqlens[-1])
    gradients = [torch.randn(len(keys.tokens), kv_heads, dim).to(dtype) for _ in range(2)]
    for gradient in gradients:
        gradient[used:] = torch.nan
    layout = [x.to(device) for x in (keys.tokens, cu_seqlens, keys.cu_seqlens)]
    all_sums = sum_over_copies(*(gradient.to(device) for gradient in gradients), *layout, tokens, dtype)
    for sums, gradient in zip(all_sums, gradients, strict=True):
        expected = torch.zeros(tokens, kv_heads, dim).index_add_(0, keys.tokens[:used], gradient[:used].float())
        close(sums, expected)


def make_cases() -> tuple[dict[str, Case], list[str]]:
    """All cases, and the names of those that also run in the interpreter.

    The interpreter is slow, so its cases cover every value, but not every pair of values.
    """
    cases: dict[str, Case] = {}
    only_compiled: set[str] = set()
    borders = (1, 5, 6, 63, 64, 65, 129)  # of a window of 5, and of a tile of 64 keys
    spans = ((0, 65), (5, 0), (3, 64), (100, 2))  # and of a tile of 64 queries
    for i, dim in enumerate((16, 24, 64)):
        for j, heads in enumerate(HEADS):
            for k, (window, block) in enumerate(((None, 4), (5, 16), (None, 16), (5, 4))):
                shape = (dim, heads, block, window)
                name = f"dim {dim}, heads {heads[0]}/{heads[1]}, block {block}, window {window}"
                cases[f"decode, {name}"] = partial(check_decode, *shape, borders, False)
                cases[f"prefill, {name}"] = partial(check_prefill, *shape, spans)
                if (i + j + k) % 4:
                    only_compiled |= {f"decode, {name}", f"prefill, {name}"}
            for normed, dtype in ((False, torch.int32), (True, torch.int64)):
                store = partial(check_store, dim, heads, normed, dtype)
                cases[f"store, dim {dim}, heads {heads[0]}/{heads[1]}, {normed=}"] = store
                split_heads = partial(check_split, dim, heads, normed)
                cases[f"split, dim {dim}, heads {heads[0]}/{heads[1]}, {normed=}"] = split_heads
    for lengths in ((1,), (65,), (1025,), (64, 321), (1024, 3), (256, 257)):
        for window in (None, 5, 400):
            for split in (False, True):
                several = partial(check_decode, 24, (3, 1), 16, window, lengths, split)
                cases[f"decode in several parts, {split=}, lengths {lengths}, window {window}"] = several
    for dim, heads in ((24, (2, 2)), (64, (7, 1)), (128, (12, 2))):
        for split in (False, True):
            unrotated = partial(check_unrotated_decode, dim, heads, (1, 64, 65, 700, 513), split)
            cases[f"unrotated decode, dim {dim}, heads {heads[0]}/{heads[1]}, {split=}"] = unrotated
    many = [1 + i * 37 % 200 for i in range(300)]  # more programs than a GPU runs at the same time
    for kind, rows in (("many", many), ("few", many[:3])):
        cases[f"decode, {kind} rows"] = partial(check_decode, 64, (6, 2), 16, None, rows, None)
    only_compiled.add("decode, many rows")
    for kv_heads, groups in ((2, [(5, [1, 4, 2]), (1, [7]), (9, [1] * 6)]), (1, []), (3, [(4, [3, 3])] * 5)):
        for empty in (0, 3):
            shared = partial(check_shared_keys, 24, kv_heads, groups, empty)
            cases[f"shared keys, {kv_heads} heads, {len(groups)} groups, {empty} empty"] = shared
    for dim, heads, window in ((64, (6, 2), None), (128, (12, 2), None), (24, (2, 2), 100), (64, (7, 1), 70)):
        same_bits = partial(check_same_bits, dim, heads, window)
        cases[f"same bits, dim {dim}, heads {heads[0]}/{heads[1]}, window {window}"] = same_bits
        # The interpreter's GEMMs are NumPy's, whose bits do depend on the number of rows.
        only_compiled.add(f"same bits, dim {dim}, heads {heads[0]}/{heads[1]}, window {window}")
    for dim, heads, window in ((64, (6, 2), None), (128, (4, 2), 70), (24, (2, 2), None), (160, (3, 1), 9)):
        for shares in (False, True):
            name = f"backward, dim {dim}, heads {heads[0]}/{heads[1]}, window {window}, {shares=}"
            cases[name] = partial(check_backward, dim, heads, window, shares)
            if dim in (128, 160) and not shares:
                only_compiled.add(name)
    cases["prefill, nothing but padding"] = partial(check_prefill, 16, (2, 2), 4, None, ((4, 0), (1, 0)))
    return cases, [name for name in cases if name not in only_compiled]


CASES, INTERPRETED = make_cases()


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """The error of each case in Triton's interpreter; empty if it passed."""
    require_interpreter()
    done = subprocess.run(
        [sys.executable, __file__], env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, str] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, interpreted: dict[str, str]) -> None:
    if interpreted[name]:
        pytest.fail(interpreted[name], pytrace=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, dtype: torch.dtype) -> None:
    CASES[name](torch.device("cuda"), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_attention_on_cuda(heads: tuple[int, int], window: int | None, dtype: torch.dtype) -> None:
    """Compare forward and backward, whose kernels are ours (bf16) or those of masked attention (fp32), with a CPU."""
    lengths, dim = (1, 65, 3, 130, 7), 64
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths, 0, 0]).cumsum(0).int()
    q, k, v, upstream = (torch.randn(tokens, n, dim).to(dtype) for n in (heads[0], heads[1], heads[1], heads[0]))
    results = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float32)):
        inputs = [t.to(device, kind).requires_grad_() for t in (q, k, v)]
        out = packed_attention(*inputs, cu_seqlens.to(device), max(lengths), window)
        results.append([out, *torch.autograd.grad(out, inputs, upstream.to(device, kind))])
    for actual, expected in zip(*results, strict=True):
        close(actual.detach(), expected.detach(), times=2)  # gradients are sums over many queries


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_attention_with_shared_keys_on_cuda(heads: tuple[int, int], window: int | None) -> None:
    """Compare the backward over repeated keys with that over single keys on a CPU."""
    shared, lengths, dim = 70, (1, 65, 3, 40), 64
    cu_seqlens, keys = share(6, [(shared, lengths), (4, (2,))], empty=2)
    tokens, dtype = int(cu_seqlens[-1]), torch.bfloat16
    q, k, v, upstream = (torch.randn(tokens, n, dim).to(dtype) for n in (heads[0], heads[1], heads[1], heads[0]))
    results = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float32)):
        inputs = [t.to(device, kind).requires_grad_() for t in (q, k, v)]
        layout = PackedKeys(*(t.to(device) for t in keys))
        out = packed_attention(*inputs, cu_seqlens.to(device), shared + max(lengths), window, layout)
        results.append([out, *torch.autograd.grad(out, inputs, upstream.to(device, kind))])
    for actual, expected in zip(*results, strict=True):
        close(actual.detach(), expected.detach(), times=2)


def main() -> None:
    results = {}
    for name in INTERPRETED:
        torch.manual_seed(0)
        try:
            CASES[name](torch.device("cpu"), torch.float32)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
