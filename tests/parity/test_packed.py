"""The decoder gives the same results in every token layout: packed = alone, paged = packed, captured = eager.

On a CPU the tests run in float64, where layouts differ only by negligible rounding. On CUDA they run in fp32 and test
the kernels together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rollgraph.graph import capture
from rollgraph.model import Architecture, Decoder, PackedKeys, Rope, token_logprobs

WINDOW = 5
LLAMA = Architecture("llama", 61, hidden=32, mlp=48, layers=2, heads=6, kv_heads=2, head_dim=8, rope=Rope(300.0))
MODELS = {
    "llama": LLAMA,
    "windows": replace(LLAMA, family="qwen2", layers=3, windows=(None, WINDOW, 1), tied=True),
    "all windows": replace(LLAMA, family="mistral", windows=(WINDOW, WINDOW), kv_heads=6, head_dim=10),
    "norms": replace(LLAMA, family="qwen3", windows=(WINDOW, None), kv_heads=1, attention_bias=True),
}
every_model = pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS)
pytestmark = pytest.mark.usefixtures("precise")


@pytest.fixture
def precise(device: torch.device) -> Iterator[None]:
    """Make the backend's device the default, with the best precision it has."""
    if device.type == "cpu":
        torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(architecture: Architecture, *, checkpointing: bool = False) -> Decoder:
    """Build a model with random norms and biases, and weights large enough for attention to tell tokens apart."""
    torch.manual_seed(1)
    model = Decoder(architecture, checkpointing=checkpointing)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.2 if parameter.dim() > 1 else parameter + noise * 0.3)
    return model


def sequences(*lengths: int) -> list[Tensor]:
    return [torch.randint(LLAMA.vocabulary, (length,)) for length in lengths]


def packed(model: Decoder, batch: list[Tensor], empty: int = 0) -> Tensor:
    """Return the hidden states of sequences packed into one row, with `empty` additional boundaries."""
    lengths = torch.tensor([0, *(len(ids) for ids in batch)] + [0] * empty)
    positions = torch.cat([torch.arange(len(ids)) for ids in batch])
    return cast(Tensor, model(torch.cat(batch), positions, lengths.cumsum(0).int(), int(lengths.max())))


def close(left: Tensor, right: Tensor, tolerance: float = 1e-5) -> None:
    """CUDA needs a larger tolerance, because it runs in fp32 and chooses a GEMM kernel by shape."""
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance * (5 if left.is_cuda else 1e-6))


# -- packed ----------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("empty", [0, 3])
def test_packed_equals_alone(architecture: Architecture, empty: int) -> None:
    model, batch = build(architecture), sequences(3, 17, 1, WINDOW, WINDOW + 1, 2 * WINDOW)
    with torch.no_grad():
        hidden = packed(model, batch, empty)
        alone = torch.cat([packed(model, [ids]) for ids in batch])
    close(hidden, alone)
    assert alone.std() > 0.1


@every_model
def test_a_window_has_exactly_its_width(architecture: Architecture) -> None:
    """A token affects later ones exactly as far as the combined windows of all layers reach."""
    model, (ids,) = build(architecture), sequences(24)
    other_ids = torch.cat([(ids[:1] + 1) % LLAMA.vocabulary, ids[1:]])
    with torch.no_grad():
        changed = (packed(model, [ids]) != packed(model, [other_ids])).any(1)
    windows = [architecture.window(layer) for layer in range(architecture.layers)]
    reach = 24 if None in windows else 1 + sum(cast(int, window) - 1 for window in windows)
    assert changed.tolist() == [position < reach for position in range(24)]


@every_model
def test_gradients_do_not_depend_on_neighbours(architecture: Architecture) -> None:
    """The gradient of one sequence's hidden states is the same with and without others in the row."""
    model, batch = build(architecture), sequences(4, 11, 7)
    upstream = torch.randn(11, architecture.hidden)
    weights = [parameter for name, parameter in model.named_parameters() if name != "lm_head.weight"]
    alone = torch.autograd.grad(packed(model, batch[1:2]), weights, upstream)
    beside = torch.autograd.grad(packed(model, batch)[4:15], weights, upstream)
    for gradient, packed_gradient in zip(alone, beside, strict=True):
        close(gradient, packed_gradient, 1e-4)
        assert gradient.abs().max() > 1e-2


def test_padding_does_not_change_the_rest() -> None:
    """The ids and the number of padding rows do not affect the rows before them."""
    model, batch = build(LLAMA), sequences(5, 6)
    with torch.no_grad():
        expected = packed(model, batch)
        for padding in sequences(1, 9, 30):
            close(packed(model, [*batch, padding])[:11], expected)


@every_model
@pytest.mark.parametrize("empty", [0, 2])
def test_a_shared_prompt_equals_a_separate_one(architecture: Architecture, empty: int) -> None:
    """Compare hidden states and gradients. Every sequence that shares the prompt contributes to the gradients."""
    model = build(architecture)
    prompt, one, *rest = sequences(2 * WINDOW, 3, 1, WINDOW + 2, 7)
    weights = [parameter for name, parameter in model.named_parameters() if name != "lm_head.weight"]

    # The row holds another sequence, then the prompt, then three continuations.
    lengths = torch.tensor([0, len(one), len(prompt), *map(len, rest), *[0] * empty]).cumsum(0).int()
    prompt_range = range(len(one), len(one) + len(prompt))
    seen: list[list[int]] = [list(range(len(one))), list(prompt_range)]
    for start, ids in zip(lengths[2:].tolist(), rest, strict=False):
        seen.append([*prompt_range, *range(start, start + len(ids))])
    spare = 5  # keys that belong to no sequence
    keys = PackedKeys(
        torch.tensor([*chain(*seen), *[0] * spare]),
        torch.tensor([0, *map(len, seen), *[0] * empty]).cumsum(0).int(),
    )
    positions = torch.cat(
        [torch.arange(len(one)), torch.arange(len(prompt)), *(len(prompt) + torch.arange(len(ids)) for ids in rest)]
    )
    longest = len(prompt) + max(map(len, rest))
    shared = model(torch.cat([one, prompt, *rest]), positions, lengths, longest, keys)

    separate = [packed(model, [torch.cat((prompt, ids))]) for ids in rest]
    expected = torch.cat(
        [packed(model, [one]), separate[0][: len(prompt)], *(hidden[len(prompt) :] for hidden in separate)]
    )
    close(shared, expected)
    upstream = torch.randn_like(expected)
    gradients, expected_gradients = (torch.autograd.grad(hidden, weights, upstream) for hidden in (shared, expected))
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3) if ours.is_cuda else close(ours, theirs, 2e-4)
        assert theirs.abs().max() > 1e-1


# -- paged -----------------------------------------------------------------------------------------


class Cache:
    """Pages for several sequences, with blocks in random order. Entries that were never written hold `fill`."""

    def __init__(self, architecture: Architecture, capacities: list[int], block: int, fill: float = 100.0) -> None:
        a, self.block = architecture, block
        widths = [-(-capacity // block) for capacity in capacities]
        blocks = torch.randperm(sum(widths) + 4)
        self.pages = torch.full((a.layers, len(blocks), block, 2, a.kv_heads, a.head_dim), fill)
        # The table is wider than the longest sequence needs; the rest names a block that no sequence owns.
        self.table = blocks[-1].repeat(len(widths), max(widths) + 1).int()
        for row, row_blocks in enumerate(blocks[:-4].split(widths)):
            self.table[row, : len(row_blocks)] = row_blocks

    def slots(self, row: int, positions: Tensor) -> Tensor:
        return self.table[row, positions // self.block] * self.block + (positions % self.block).int()


def prefill(model: Decoder, cache: Cache, batch: list[Tensor], starts: list[int], ends: list[int], pad: int) -> None:
    """Prefill positions `starts` to `ends` of each sequence, packed, followed by `pad` rows of padding."""
    spans = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    padding = torch.zeros(pad, dtype=torch.long)
    ids = torch.cat([*(ids[span] for ids, span in zip(batch, spans, strict=True)), padding])
    nowhere = cache.table[0, -1:] * cache.block  # padding is written to a block that no sequence owns
    slots = torch.cat([*(cache.slots(row, span) for row, span in enumerate(spans)), nowhere.repeat(pad)])
    cu_seqlens = torch.tensor([0, *map(len, spans)]).cumsum(0).int()
    lengths = torch.tensor(ends).int()
    model.prefill(ids, torch.cat([*spans, padding]), slots, cache.pages, cache.table, cu_seqlens, lengths)


def decode(model: Decoder, cache: Cache, batch: list[Tensor], indices: list[int]) -> Tensor:
    """Decode one token of each sequence, at index `indices`, and return the hidden states."""
    positions = torch.tensor(indices)
    ids = torch.stack([ids[index] for ids, index in zip(batch, indices, strict=True)])
    slots = torch.cat([cache.slots(row, positions[row : row + 1]) for row in range(len(batch))])
    return model.decode(ids, positions, slots, cache.pages, cache.table, (positions + 1).int())


def compare(architecture: Architecture, block: int, fill: float) -> None:
    """Prefill each sequence in two chunks, possibly empty, then decode; compare with one packed forward."""
    model, batch = build(architecture), sequences(21, 9, 14)
    expected = packed(model, batch).split([len(ids) for ids in batch])
    cache = Cache(architecture, [len(ids) for ids in batch], block, fill)
    prompts = [len(ids) - 6 for ids in batch]
    first = [prompts[0] // 2, 0, prompts[2]]
    prefill(model, cache, batch, [0, 0, 0], first, pad=0)
    prefill(model, cache, batch, first, prompts, pad=3)
    for step in range(6):
        indices = [prompt + step for prompt in prompts]
        hidden = decode(model, cache, batch, indices)
        close(hidden, torch.stack([whole[index] for whole, index in zip(expected, indices, strict=True)]))


@every_model
@pytest.mark.parametrize("block", [1, 4, 16])
@torch.no_grad()
def test_paged_equals_packed(architecture: Architecture, block: int) -> None:
    compare(architecture, block, fill=100.0)


@every_model
@torch.no_grad()
def test_unwritten_cache_entries_may_hold_anything(architecture: Architecture) -> None:
    """They are in blocks that no sequence owns, and after the end of a sequence in its last block."""
    compare(architecture, 4, fill=torch.nan)


@every_model
@torch.no_grad()
def test_prefill_in_any_chunks_writes_the_same_cache(architecture: Architecture) -> None:
    model, batch = build(architecture), sequences(13, 8)
    once, pieces = Cache(architecture, [13, 8], 4), Cache(architecture, [13, 8], 4)
    prefill(model, once, batch, [0, 0], [13, 8], pad=0)
    for start in range(0, 13, 3):
        ends = [min(start + 3, 13), min(start + 3, 8)]
        prefill(model, pieces, batch, [start, min(start, 8)], ends, pad=1)
    for row, ids in enumerate(batch):
        written = [cache.pages.flatten(1, 2)[:, cache.slots(row, torch.arange(len(ids)))] for cache in (once, pieces)]
        close(*written)
        assert written[0].abs().max() < 100


@every_model
@torch.no_grad()
def test_decoding_may_begin_at_the_first_token(architecture: Architecture) -> None:
    """Decode without any prefill, with rows of different lengths in one batch."""
    model, batch = build(architecture), sequences(12, 12)
    expected = packed(model, batch).view(2, 12, -1)
    cache = Cache(architecture, [12, 12], 4)
    for index in range(12):
        behind = max(index - 4, 0)  # the second sequence waits at its first token
        hidden = decode(model, cache, batch, [index, behind])
        close(hidden, torch.stack([expected[0, index], expected[1, behind]]))


# -- captured --------------------------------------------------------------------------------------


def microbatch(tokens: int, *lengths: int) -> tuple[Tensor, ...]:
    """Return ids, targets, positions, cu_seqlens and weights of a fixed size; the last sequence is padding."""
    lengths = (*lengths, tokens - sum(lengths))
    ids, targets = torch.randint(LLAMA.vocabulary, (2, tokens))
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *lengths, *[0] * (5 - len(lengths))]).cumsum(0).int()
    weights = torch.where(torch.arange(tokens) < tokens - lengths[-1], torch.randn(tokens), 0)
    return ids, targets, positions, cu_seqlens, weights


@pytest.mark.parametrize(
    ("architecture", "checkpointing"),
    [
        pytest.param(
            MODELS[name], checkpointing, id=f"{name}, checkpointing={checkpointing}",
            marks=[] if checkpointing == bool(number % 2) else pytest.mark.slow,
        )
        for number, name in enumerate(MODELS)
        for checkpointing in (False, True)
    ],
)  # fmt: skip
def test_a_captured_microbatch_equals_eager(architecture: Architecture, checkpointing: bool, backend: Any) -> None:
    """One graph runs forward, log-probabilities and backward, for lengths other than those it was captured with.

    On a CPU, the results agree bit for bit.
    """
    model = build(architecture, checkpointing=checkpointing)

    def run(ids: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor, weights: Tensor) -> Tensor:
        hidden = model(ids, positions, cu_seqlens, len(ids))
        logprobs = cast(Tensor, token_logprobs(hidden, model.head_weight, targets, 0.8, chunk=7))
        (logprobs * weights).sum().backward()
        return logprobs.detach()

    graphed = capture(run, microbatch(24, 8, 9), backend=backend)
    for lengths in ((8, 9), (3, 4, 10), (23,)):
        inputs = microbatch(24, *lengths)
        results = []
        for function in (graphed, run):
            model.zero_grad()
            logprobs = function(*inputs).clone()
            results.append([logprobs, *(cast(Tensor, p.grad).clone() for p in model.parameters())])
        for replayed, eager in zip(*results, strict=True):
            torch.testing.assert_close(replayed, eager, rtol=0, atol=0 if backend == "tape" else 1e-5)
            assert bool(eager.isfinite().all())
