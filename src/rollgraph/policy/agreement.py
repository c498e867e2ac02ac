"""Checks whether generation and training compute the same bits, for one model on one device, or where they differ.

The same random sequences run packed, as in training, and through a paged cache, as in generation. They are compared in
two ways:

- Operation by operation. Each operation gets the inputs that it had in the packed run, so a difference does not spread
  to later operations. Layers run one after the other, each in all steps, so only one layer's values are in memory.
- End to end, with the functions that a run calls: the sampler's log-probabilities are compared with those of scoring
  and of a training forward.

Values are compared as `torch.equal` does, except that NaN equals NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollgraph.inference import sampler, sizes
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.inference.sampler import SamplerOutput, SamplingTensors
from rollgraph.model import Decoder, PackedKeys, token_logprobs
from rollgraph.model.attention import paged_decode, paged_prefill
from rollgraph.model.decoder import Attention, DecoderLayer
from rollgraph.model.gemm.autotune import GemmReport, clear_gemm_algos
from rollgraph.model.layers import add_norm, rotary_angles
from rollgraph.model.logprobs import tokens_per_chunk
from rollgraph.policy.exactness import make_exact
from rollgraph.policy.microbatch import Limits, TokenBucket, packed_size
from rollgraph.types import Sample

# -- the same sequences in both layouts ------------------------------------------------------------
# Nothing in this part knows what a model computes.

DECODED = 16  # tokens to decode in each sequence: enough for every row to reach a new block of the cache
SIBLINGS = 4  # sequences that share a prompt


class MicrobatchTooSmall(ValueError):
    """The microbatch has no room for two sequences."""


class PagedStep(NamedTuple):
    """One prefill or decode step through the paged cache. Tensors are int32 unless stated otherwise."""

    phase: str  # "prefill" or "decode"
    used: int  # the first `used` tokens count; the others are padding
    entries: Tensor  # [tokens] int64: the index of each token in the packed layout; 0 for padding
    ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: Tensor  # [tokens]
    table: Tensor  # [sequences, blocks]; in a decode step, each row is a sequence
    lengths: Tensor  # [sequences]
    cu_seqlens: Tensor  # [sequences + 1]; used by prefill only


class _TokenRange(NamedTuple):
    """Tokens `start` to `stop - 1` of the sequence in a row."""

    row: int
    start: int
    stop: int


class TokenLayouts:
    """Random sequences that fill a microbatch, in the packed and in the paged layout.

    There may be fewer sequences than rows of the cache; row i then holds sequence i modulo their number.
    """

    def __init__(self, vocabulary: int, limits: Limits, prefill_tokens: int, device: torch.device) -> None:
        self._rows = limits.rows
        self._prefill_tokens = prefill_tokens
        self._device = device
        self.tokens = limits.token_buckets[-1]
        self.longest = limits.longest(self.tokens)
        self.samples = draw_samples(vocabulary, limits)
        arrays = limits.collate(self.samples, TokenBucket(self.tokens, self.tokens))
        self._token_ids = [np.array([*sample.prompt, *sample.tokens]) for sample in self.samples]
        self._entries = []  # for each sequence, the index of each token in the packed layout
        for sample, start in zip(self.samples, arrays.starts, strict=True):
            first = arrays.cu_keys[arrays.sequence[start]]
            self._entries.append(arrays.keys[first : first + len(sample.prompt) + len(sample.tokens)])
        self.ids = self._upload(arrays.ids)
        self.positions = self._upload(arrays.positions)
        self.cu_seqlens = self._upload(arrays.cu_seqlens)
        self.keys = PackedKeys(self._upload(arrays.keys), self._upload(arrays.cu_keys))
        # The blocks of a row are in random order. Block 0 is for padding.
        blocks_of_row = -(-limits.max_length // sizes.BLOCK_SIZE)
        self.blocks = self._rows * blocks_of_row + 1
        shuffled = np.random.default_rng(0).permutation(self.blocks - 1) + 1
        self._table = shuffled.reshape(self._rows, blocks_of_row)

    def prefill_steps(self) -> Iterator[PagedStep]:
        """All prompts without their last tokens, in steps of all sizes. A prompt may continue in the next step."""
        steps = cycle(sizes.prefill_buckets(self._prefill_tokens))
        size = next(steps)
        ranges: list[_TokenRange] = []
        remaining = size
        for row in range(self._rows):
            start = 0
            end = self._prompt_length(row) - 1
            while start < end:
                stop = min(end, start + remaining)
                ranges.append(_TokenRange(row, start, stop))
                remaining -= stop - start
                start = stop
                if remaining == 0:
                    yield self._step("prefill", ranges, size)
                    size = next(steps)
                    ranges = []
                    remaining = size
        if ranges:
            yield self._step("prefill", ranges, size)

    def decode_steps(self, rows: int) -> Iterator[PagedStep]:
        """The last token of each prompt and the tokens after it, in the first `rows` rows."""
        for index in range(len(self.samples[0].tokens)):
            ranges = []
            for row in range(rows):
                position = self._prompt_length(row) - 1 + index
                ranges.append(_TokenRange(row, position, position + 1))
            yield self._step("decode", ranges, rows)

    def decoded_entries(self) -> Tensor:
        """The indices of the decoded tokens in the packed layout, in ascending order."""
        decoded = []
        for sample, entries in zip(self.samples, self._entries, strict=True):
            decoded.append(entries[len(sample.prompt) - 1 : -1])
        return self._upload(np.sort(np.concatenate(decoded)))

    def _sequence_of(self, row: int) -> int:
        return row % len(self.samples)

    def _prompt_length(self, row: int) -> int:
        return len(self.samples[self._sequence_of(row)].prompt)

    def _step(self, phase: str, ranges: list[_TokenRange], size: int) -> PagedStep:
        """Lay token ranges out one after the other in a step of `size` tokens."""
        entries = np.zeros(size, np.int64)
        ids, positions, slots = np.zeros((3, size), np.int32)
        bounds = [0]
        for row, start, stop in ranges:
            here = slice(bounds[-1], bounds[-1] + stop - start)
            token_positions = np.arange(start, stop)
            sequence = self._sequence_of(row)
            entries[here] = self._entries[sequence][token_positions]
            ids[here] = self._token_ids[sequence][token_positions]
            positions[here] = token_positions
            slots[here] = self._table[row, token_positions // sizes.BLOCK_SIZE] * sizes.BLOCK_SIZE
            slots[here] += (token_positions % sizes.BLOCK_SIZE).astype(np.int32)
            bounds.append(here.stop)
        table = self._table[[tokens.row for tokens in ranges]].astype(np.int32)
        lengths = np.array([tokens.stop for tokens in ranges], np.int32)
        arrays: tuple[np.ndarray, ...] = (entries, ids, positions, slots, table, lengths, np.array(bounds, np.int32))
        return PagedStep(phase, bounds[-1], *map(self._upload, arrays))

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def draw_samples(vocabulary: int, limits: Limits) -> list[Sample]:
    """Samples of random tokens, at most one per row. Prompts have several lengths; `SIBLINGS` samples share each."""
    tokens = limits.token_buckets[-1]
    random = np.random.default_rng(0)
    decoded = min(DECODED, limits.max_length // 2)
    longest = limits.max_length - decoded
    samples: list[Sample] = []
    prompt: list[int] = []
    for index in count():
        if index % SIBLINGS == 0:
            eighths = 8 - 3 * (index // SIBLINGS) % 8  # 8, 5, 2, 7, 4, 1, 6, 3
            prompt = random.integers(vocabulary, size=max(1, longest * eighths // 8)).tolist()
        completion = random.integers(vocabulary, size=decoded).tolist()
        unused = [0.0] * decoded
        sample = Sample(prompt, completion, advantages=unused, weights=unused, logprobs=unused)
        if not packed_size([*samples, sample]).fits(limits.capacity(tokens)):
            break
        samples.append(sample)
        if len(samples) >= max(2, limits.rows):
            break
    if len(samples) < 2:
        two = packed_size([sample, sample])
        needed = max(two.tokens, -(-two.repeated_keys // limits.keys_per_token))
        raise MicrobatchTooSmall(
            f"two sequences of {limits.max_length} tokens that share a prompt need a microbatch of {needed} tokens, "
            f"but it has {tokens}"
        )
    return samples


# -- the check -------------------------------------------------------------------------------------

LAYER_OPERATIONS = ("attention norm", "qkv", "attention", "out", "residual", "mlp norm", "gate_up", "swiglu", "down")
FINAL_OPERATIONS = ("final norm", "logits", "log-probability")
OPERATIONS = LAYER_OPERATIONS + FINAL_OPERATIONS

OnValue = Callable[[str, Tensor], None]  # called with the name of an operation and its result


class OperationDifference(NamedTuple):
    """The first step in which an operation differs from the packed run although its inputs are equal."""

    operation: str  # one of `OPERATIONS`
    layer: int  # for an operation after the layers, the number of layers
    phase: str  # "prefill" or "decode"
    rows: int  # tokens of the step
    position: int  # of the first token that differs, in its sequence
    differing: int  # values that differ, over all tokens of the step
    values: int  # values compared
    largest: float  # absolute difference


@dataclass
class LogprobDifferences:
    """How the sampler's log-probabilities differ from those of another phase, end to end."""

    tokens: int = 0
    differing: int = 0
    largest: float = 0.0


@dataclass
class AgreementReport:
    """The sizes that were run, and the differences found."""

    layers: int
    tokens: int
    row_counts: tuple[int, ...]  # of decode steps
    prefill_sizes: tuple[int, ...]
    gemm_report: GemmReport | None  # None: algorithms were left to the library
    differences: list[OperationDifference]  # at most one per operation and layer, in order of execution
    logprobs: dict[str, LogprobDifferences]  # by phase

    @property
    def agrees(self) -> bool:
        return not self.differences and not any(counts.differing for counts in self.logprobs.values())

    def differing_layers(self, operation: str) -> int:
        """In how many layers an operation differs."""
        return sum(difference.operation == operation for difference in self.differences)


def check_agreement(model: Decoder, limits: Limits, select_algos: bool = True) -> AgreementReport:
    """Choose GEMM algorithms as a run would, or leave them to the library; then compare generation with training.

    `limits` has one token bucket. Raises ValueError if its sizes do not allow a check, or if logits are not finite.
    """
    device = model.embed_tokens.weight.device
    prefill_tokens = limits.prefill_tokens or sizes.default_sizes(device.type).prefill_tokens
    layouts = TokenLayouts(model.architecture.vocabulary, limits, prefill_tokens, device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    whole_logits = limits.keeps_logits(model.architecture.vocabulary, free)
    gemm_report = None
    if select_algos:
        gemm_report = make_exact(model, limits, limits.buckets, whole_logits, must=False)
    else:
        clear_gemm_algos(model)
    row_counts = sizes.row_buckets(limits.rows)
    prefill_steps = list(layouts.prefill_steps())
    return AgreementReport(
        layers=model.architecture.layers,
        tokens=layouts.tokens,
        row_counts=row_counts,
        prefill_sizes=tuple(sorted({len(step.ids) for step in prefill_steps})),
        gemm_report=gemm_report,
        differences=compare_operations(model, layouts, prefill_steps, row_counts),
        logprobs=compare_logprobs(model, layouts, prefill_steps, row_counts, whole_logits),
    )


# -- operation by operation ------------------------------------------------------------------------


class _Comparison:
    """Compares results with those of the packed run, and records the first difference of each operation and layer."""

    def __init__(self) -> None:
        self.layer = 0
        self._first_differences: dict[tuple[int, int], OperationDifference] = {}

    def compare(self, operation: str, value: Tensor, expected: Tensor, step: PagedStep) -> None:
        """Record a difference, and overwrite `value` in place with `expected`."""
        value = value[: step.used]
        expected = expected[: step.used]
        differs = (value != expected) & ~(value.isnan() & expected.isnan())
        if not differs.any():
            return
        key = (self.layer, OPERATIONS.index(operation))
        if key not in self._first_differences:
            first = int(differs.reshape(len(differs), -1).any(1).nonzero()[0])
            self._first_differences[key] = OperationDifference(
                operation, self.layer, step.phase, len(step.ids), int(step.positions[first]), int(differs.sum()),
                differs.numel(), float((value.double() - expected.double()).abs().max()),
            )  # fmt: skip
        value.copy_(expected)

    def differences(self) -> list[OperationDifference]:
        return [self._first_differences[key] for key in sorted(self._first_differences)]


@torch.no_grad()
def compare_operations(
    model: Decoder, layouts: TokenLayouts, prefill_steps: Sequence[PagedStep], row_counts: Sequence[int]
) -> list[OperationDifference]:
    """The operations that differ if each operation of a paged step gets the inputs of the packed run."""
    a = model.architecture
    decode_steps = {rows: list(layouts.decode_steps(rows)) for rows in row_counts}
    steps = [*prefill_steps, *(step for steps_of_rows in decode_steps.values() for step in steps_of_rows)]
    comparison = _Comparison()
    residual = model.embed_tokens(layouts.ids)
    update = torch.zeros_like(residual)
    cos, sin = rotary_angles(layouts.positions, model.frequencies, model.rope_factor)
    pages = residual.new_zeros((layouts.blocks, sizes.BLOCK_SIZE, 2, a.kv_heads, a.head_dim))
    for number, layer in enumerate(model.layers):
        comparison.layer = number
        packed: dict[str, Tensor] = {}
        with _hook_operations(layer, partial(_store, packed)):
            outputs = layer(residual, update, cos, sin, layouts.cu_seqlens, layouts.longest, layouts.keys)
        packed["residual"] = outputs[0]
        for step in steps:
            at = step.entries
            compare = partial(_compare_at, comparison, packed, step)
            with _hook_operations(layer, compare):
                summed, _ = layer.run(residual[at], update[at], cos[at], sin[at], partial(_attend, step, pages))
            compare("residual", summed)
        residual, update = outputs
    comparison.layer = a.layers
    _compare_after_layers(model, layouts, residual, update, decode_steps, comparison)
    return comparison.differences()


def _compare_after_layers(
    model: Decoder, layouts: TokenLayouts, residual: Tensor, update: Tensor, steps: dict[int, list[PagedStep]],
    comparison: _Comparison,
) -> None:  # fmt: skip
    """Compare the operations after the layers, in decode steps; prefill ends with the layers."""
    eps = model.architecture.norm_eps
    hidden, _ = add_norm(residual, update, model.norm, eps)
    decoded = layouts.decoded_entries()
    expected = _logits_at(model, hidden, decoded)
    for steps_of_rows in steps.values():
        draws = []
        for step in steps_of_rows:
            normed, _ = add_norm(residual[step.entries], update[step.entries], model.norm, eps)
            comparison.compare("final norm", normed, hidden[step.entries], step)
            logits = model.logits(normed)
            comparison.compare("logits", logits, expected[torch.searchsorted(decoded, step.entries)], step)
            draws.append(_draw(logits, step))
        scored = _score(model, hidden, _targets(steps_of_rows, draws, layouts.tokens))
        for step, drawn in zip(steps_of_rows, draws, strict=True):
            comparison.compare("log-probability", drawn.logprob, scored[step.entries], step)


@contextmanager
def _hook_operations(layer: DecoderLayer, on_value: OnValue) -> Iterator[None]:
    """Call `on_value` with the input and the output of each matmul of a layer."""
    linears = (
        (layer.self_attn.qkv_proj, "attention norm", "qkv"),
        (layer.self_attn.o_proj, "attention", "out"),
        (layer.mlp.gate_up_proj, "mlp norm", "gate_up"),
        (layer.mlp.down_proj, "swiglu", "down"),
    )

    def watch_input(operation: str, module: Any, inputs: tuple[Any, ...]) -> None:
        on_value(operation, inputs[0])

    def watch_output(operation: str, module: Any, inputs: Any, output: Tensor) -> None:
        on_value(operation, output)

    handles = []
    try:
        for linear, before, after in linears:
            handles.append(linear.register_forward_pre_hook(partial(watch_input, before)))
            handles.append(linear.register_forward_hook(partial(watch_output, after)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _store(packed: dict[str, Tensor], operation: str, value: Tensor) -> None:
    packed[operation] = value.clone()


def _compare_at(
    comparison: _Comparison, packed: dict[str, Tensor], step: PagedStep, operation: str, value: Tensor
) -> None:
    comparison.compare(operation, value, packed[operation][step.entries], step)


def _attend(step: PagedStep, pages: Tensor, attention: Attention, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = attention.split_heads_and_store(qkv, cos, sin, step.slots, pages)
    if step.phase == "prefill":
        return paged_prefill(q, pages, step.table, step.cu_seqlens, step.lengths, attention.window)
    return paged_decode(q, pages, step.table, step.lengths, attention.window)


def _logits_at(model: Decoder, hidden: Tensor, entries: Tensor) -> Tensor:
    """The logits of some tokens, computed in the chunks that scoring uses."""
    chunk = tokens_per_chunk(len(hidden), model.architecture.vocabulary)
    logits = []
    for first in range(0, len(hidden), chunk):
        inside = entries[(entries >= first) & (entries < first + chunk)]
        logits.append(model.logits(hidden[first : first + chunk])[inside - first])
    return torch.cat(logits)


# -- end to end ------------------------------------------------------------------------------------


@torch.no_grad()
def compare_logprobs(
    model: Decoder, layouts: TokenLayouts, prefill_steps: Sequence[PagedStep], row_counts: Sequence[int],
    whole_logits: bool,
) -> dict[str, LogprobDifferences]:  # fmt: skip
    """Decode with each number of rows, and compare the sampler's log-probabilities with scoring and training."""
    packed = (layouts.ids, layouts.positions, layouts.cu_seqlens, layouts.longest, layouts.keys)
    scoring = model(*packed)
    with torch.enable_grad():
        training = model(*packed).detach()
    weight = model.embed_tokens.weight
    plan = CachePlan(model.architecture, weight.dtype, sizes.BLOCK_SIZE, layouts.blocks)
    pages = plan.allocate(weight.device)
    for step in prefill_steps:
        model.prefill(step.ids, step.positions, step.slots, pages, step.table, step.cu_seqlens, step.lengths)
    differences = {"scoring": LogprobDifferences(), "training": LogprobDifferences()}
    for rows in row_counts:
        steps = list(layouts.decode_steps(rows))
        draws = []
        for step in steps:
            hidden = model.decode(step.ids, step.positions, step.slots, pages, step.table, step.lengths)
            draws.append(_draw(model.logits(hidden), step))
        targets = _targets(steps, draws, layouts.tokens)
        chunk = layouts.tokens if whole_logits else None
        _count_differences(differences["scoring"], _score(model, scoring, targets), targets, steps, draws)
        _count_differences(differences["training"], _score(model, training, targets, chunk), targets, steps, draws)
    return differences


def _draw(logits: Tensor, step: PagedStep) -> SamplerOutput:
    """Sample a token in each row. Rows with the same sequence have the same noise, so they draw the same token."""
    ones = torch.ones(len(logits), device=logits.device)
    seeds = torch.zeros((len(logits), 2), dtype=torch.int32, device=logits.device)
    sampling = SamplingTensors(  # temperature 1, no filters
        seed=seeds,
        temperature=ones,
        position=step.positions + 1,
        top_k=torch.zeros(len(logits), dtype=torch.int32, device=logits.device),
        top_p=ones,
        min_p=torch.zeros_like(ones),
        penalty=ones,
    )
    drawn = sampler.sample(logits, sampling)
    if bool((drawn.token < 0).any()):
        raise ValueError("the model's logits are not finite")
    return drawn


def _targets(steps: Sequence[PagedStep], draws: Sequence[SamplerOutput], tokens: int) -> Tensor:
    """The drawn tokens, at the entries of the packed layout that predict them; 0 elsewhere."""
    targets = torch.zeros(tokens, dtype=torch.int64, device=steps[0].entries.device)
    for step, drawn in zip(steps, draws, strict=True):
        targets[step.entries] = drawn.token.long()
    return targets


def _score(model: Decoder, hidden: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    scored = token_logprobs(hidden, model.head_weight, targets, chunk=chunk, algos=model.head_algos)
    assert isinstance(scored, Tensor)
    return scored


def _count_differences(
    differences: LogprobDifferences,
    scored: Tensor,
    targets: Tensor,
    steps: Sequence[PagedStep],
    draws: Sequence[SamplerOutput],
) -> None:
    """Add up differences. Rows of the same sequence that drew different tokens count as different, too."""
    for step, drawn in zip(steps, draws, strict=True):
        same = targets[step.entries] == drawn.token
        difference = torch.where(same, scored[step.entries] - drawn.logprob, 0.0).abs()
        differences.tokens += len(same)
        differences.differing += int((~same | (difference != 0)).sum())
        differences.largest = max(differences.largest, float(difference.max()))
