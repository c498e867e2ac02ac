"""Checks, for one model on one device, whether generation and training compute the same bits, and where they part.

The same random sequences run packed, as for training, and through a paged cache, as for generation, in two ways:

- Operation by operation. Each gets the inputs that it had in the packed run, so that an operation which differs does
  not make those after it differ too. One layer at a time runs in all steps, so only its values are in memory.
- From end to end, with the functions that a run calls: what the sampler says of the tokens that it draws is compared
  with what scoring and a training forward say of them.

Values are compared as `torch.equal` does, except that NaN equals NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollgraph.inference import defaults
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.inference.sampler import Drawn, Rows, sample
from rollgraph.model import Decoder, token_logprobs
from rollgraph.model.attention import paged_decode, paged_prefill
from rollgraph.model.decoder import Attention, DecoderLayer
from rollgraph.model.logprobs import chunk_rows
from rollgraph.model.pointwise import add_norm, rotary_angles
from rollgraph.model.product_probe import ProductReport, clear_routes
from rollgraph.policy.agreement_layout import PagedStep, TokenLayouts
from rollgraph.policy.exactness import make_exact
from rollgraph.policy.limits import Limits

OF_A_LAYER = ("attention norm", "qkv", "attention", "out", "residual", "mlp norm", "gate_up", "swiglu", "down")
AFTER_THE_LAYERS = ("final norm", "logits", "log-probability")
OPERATIONS = OF_A_LAYER + AFTER_THE_LAYERS

OnValue = Callable[[str, Tensor], None]  # called with an operation and its result


class OperationDifference(NamedTuple):
    """The first step in which an operation differs from the packed run, although its inputs do not."""

    operation: str
    layer: int  # the number of layers, if it comes after them
    phase: str  # prefill or decode
    rows: int  # tokens of the step
    position: int  # in its sequence, of the first token with a difference
    differing: int  # values, of all tokens of the step
    values: int
    largest: float


@dataclass
class LogprobDifferences:
    """How the log-probabilities of sampled tokens compare with those of another phase, from end to end."""

    tokens: int = 0
    differing: int = 0
    largest: float = 0.0


@dataclass
class AgreementReport:
    """What was run, and what differs."""

    layers: int
    tokens: int
    row_counts: tuple[int, ...]  # of decode steps
    prefill_sizes: tuple[int, ...]
    products: ProductReport | None  # None: they were left to the library
    differences: list[OperationDifference]  # at most one for each operation and layer, in the order of the computation
    logprobs: dict[str, LogprobDifferences]  # by phase

    @property
    def agrees(self) -> bool:
        return not self.differences and not any(found.differing for found in self.logprobs.values())

    def differing_layers(self, operation: str) -> int:
        return sum(difference.operation == operation for difference in self.differences)


def check_agreement(model: Decoder, limits: Limits, routed: bool = True) -> AgreementReport:
    """Choose the ways of all products as a run would, or leave them to the library; then compare the phases.

    `limits` have one token bucket. Raises a ValueError if its sizes do not allow a check, or if logits are not finite.
    """
    device = model.embed.weight.device
    prefill_tokens = limits.prefill_tokens or defaults.sizes_on(device.type).prefill_tokens
    layouts = TokenLayouts(model.architecture.vocabulary, limits, prefill_tokens, device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    whole_logits = limits.keeps_logits(model.architecture.vocabulary, free)
    products = None
    if routed:
        products = make_exact(model, limits, limits.buckets, whole_logits, must=False)
    else:
        clear_routes(model)
    row_counts = defaults.row_buckets(limits.rows)
    prefill_steps = list(layouts.prefill_steps())
    return AgreementReport(
        layers=model.architecture.layers,
        tokens=layouts.tokens,
        row_counts=row_counts,
        prefill_sizes=tuple(sorted({len(step.ids) for step in prefill_steps})),
        products=products,
        differences=compare_operations(model, layouts, prefill_steps, row_counts),
        logprobs=compare_logprobs(model, layouts, prefill_steps, row_counts, whole_logits),
    )


# -- operation by operation --------------------------------------------------------------------------------------------


class _Comparison:
    """Compares results with those of the packed run, and keeps what differs first in each layer and operation."""

    def __init__(self) -> None:
        self.layer = 0
        self._found: dict[tuple[int, int], OperationDifference] = {}

    def compare(self, operation: str, value: Tensor, expected: Tensor, step: PagedStep) -> None:
        """Note a difference, and replace the value, in place, by what was expected."""
        value = value[: step.used]
        expected = expected[: step.used]
        wrong = (value != expected) & ~(value.isnan() & expected.isnan())
        if not wrong.any():
            return
        key = (self.layer, OPERATIONS.index(operation))
        if key not in self._found:
            first = int(wrong.reshape(len(wrong), -1).any(1).nonzero()[0])
            self._found[key] = OperationDifference(
                operation, self.layer, step.phase, len(step.ids), int(step.positions[first]), int(wrong.sum()),
                wrong.numel(), float((value.double() - expected.double()).abs().max()),
            )  # fmt: skip
        value.copy_(expected)

    def differences(self) -> list[OperationDifference]:
        return [self._found[key] for key in sorted(self._found)]


@torch.no_grad()
def compare_operations(
    model: Decoder, layouts: TokenLayouts, prefill_steps: Sequence[PagedStep], row_counts: Sequence[int]
) -> list[OperationDifference]:
    """What differs if every operation of a paged step has the inputs of the packed run."""
    a = model.architecture
    decode_steps = {rows: list(layouts.decode_steps(rows)) for rows in row_counts}
    steps = [*prefill_steps, *(step for found in decode_steps.values() for step in found)]
    comparison = _Comparison()
    residual = model.embed(layouts.ids)
    update = torch.zeros_like(residual)
    cos, sin = rotary_angles(layouts.positions, model.frequencies, model.rope_factor)
    pages = residual.new_zeros((layouts.blocks, defaults.BLOCK_SIZE, 2, a.kv_heads, a.head_dim))
    for number, layer in enumerate(model.layers):
        comparison.layer = number
        packed: dict[str, Tensor] = {}
        with _watched(layer, partial(_keep, packed)):
            outputs = layer(residual, update, cos, sin, layouts.cu_seqlens, layouts.longest, layouts.keys)
        packed["residual"] = outputs[0]
        for step in steps:
            at = step.entries
            compare = partial(_compare_at, comparison, packed, step)
            with _watched(layer, compare):
                summed, _ = layer.run(residual[at], update[at], cos[at], sin[at], partial(_attend, step, pages))
            compare("residual", summed)
        residual, update = outputs
    comparison.layer = a.layers
    _compare_ends(model, layouts, residual, update, decode_steps, comparison)
    return comparison.differences()


def _compare_ends(
    model: Decoder, layouts: TokenLayouts, residual: Tensor, update: Tensor, steps: dict[int, list[PagedStep]],
    comparison: _Comparison,
) -> None:  # fmt: skip
    """What comes after the layers, in decode steps: prefill ends with them."""
    eps = model.architecture.norm_eps
    hidden, _ = add_norm(residual, update, model.norm, eps)
    decoded = layouts.decoded_entries()
    expected = _logits_at(model, hidden, decoded)
    for of_rows in steps.values():
        draws = []
        for step in of_rows:
            normed, _ = add_norm(residual[step.entries], update[step.entries], model.norm, eps)
            comparison.compare("final norm", normed, hidden[step.entries], step)
            logits = model.logits(normed)
            comparison.compare("logits", logits, expected[torch.searchsorted(decoded, step.entries)], step)
            draws.append(_draw(logits, step))
        scored = _score(model, hidden, _targets(of_rows, draws, layouts.tokens))
        for step, drawn in zip(of_rows, draws, strict=True):
            comparison.compare("log-probability", drawn.logprob, scored[step.entries], step)


@contextmanager
def _watched(layer: DecoderLayer, on_value: OnValue) -> Iterator[None]:
    """Call `on_value` with what goes into each product of a layer, and with what comes out of it."""
    products = (
        (layer.attention.qkv, "attention norm", "qkv"),
        (layer.attention.out, "attention", "out"),
        (layer.mlp.gate_up, "mlp norm", "gate_up"),
        (layer.mlp.down, "swiglu", "down"),
    )

    def watch_input(operation: str, module: Any, inputs: tuple[Any, ...]) -> None:
        on_value(operation, inputs[0])

    def watch_output(operation: str, module: Any, inputs: Any, output: Tensor) -> None:
        on_value(operation, output)

    handles = []
    try:
        for linear, before, after in products:
            handles.append(linear.register_forward_pre_hook(partial(watch_input, before)))
            handles.append(linear.register_forward_hook(partial(watch_output, after)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep(packed: dict[str, Tensor], operation: str, value: Tensor) -> None:
    packed[operation] = value.clone()


def _compare_at(
    comparison: _Comparison, packed: dict[str, Tensor], step: PagedStep, operation: str, value: Tensor
) -> None:
    comparison.compare(operation, value, packed[operation][step.entries], step)


def _attend(step: PagedStep, pages: Tensor, attention: Attention, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = attention.split_and_store(qkv, cos, sin, step.slots, pages)
    if step.phase == "prefill":
        return paged_prefill(q, pages, step.table, step.cu_seqlens, step.lengths, attention.window)
    return paged_decode(q, pages, step.table, step.lengths, attention.window)


def _logits_at(model: Decoder, hidden: Tensor, entries: Tensor) -> Tensor:
    """The logits of some tokens, computed for all tokens in the chunks that scoring has."""
    chunk = chunk_rows(len(hidden), model.architecture.vocabulary)
    found = []
    for first in range(0, len(hidden), chunk):
        inside = entries[(entries >= first) & (entries < first + chunk)]
        found.append(model.logits(hidden[first : first + chunk])[inside - first])
    return torch.cat(found)


# -- from end to end ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def compare_logprobs(
    model: Decoder, layouts: TokenLayouts, prefill_steps: Sequence[PagedStep], row_counts: Sequence[int],
    whole_logits: bool,
) -> dict[str, LogprobDifferences]:  # fmt: skip
    """Decode at all numbers of rows, and compare the sampler's log-probabilities with those of scoring and training."""
    packed = (layouts.ids, layouts.positions, layouts.cu_seqlens, layouts.longest, layouts.keys)
    scoring = model(*packed)
    with torch.enable_grad():
        training = model(*packed).detach()
    weight = model.embed.weight
    plan = CachePlan(model.architecture, weight.dtype, defaults.BLOCK_SIZE, layouts.blocks)
    pages = plan.allocate(weight.device)
    for step in prefill_steps:
        model.prefill(step.ids, step.positions, step.slots, pages, step.table, step.cu_seqlens, step.lengths)
    found = {"scoring": LogprobDifferences(), "training": LogprobDifferences()}
    for rows in row_counts:
        steps = list(layouts.decode_steps(rows))
        draws = []
        for step in steps:
            hidden = model.decode(step.ids, step.positions, step.slots, pages, step.table, step.lengths)
            draws.append(_draw(model.logits(hidden), step))
        targets = _targets(steps, draws, layouts.tokens)
        chunk = layouts.tokens if whole_logits else None
        _count(found["scoring"], _score(model, scoring, targets), targets, steps, draws)
        _count(found["training"], _score(model, training, targets, chunk), targets, steps, draws)
    return found


def _draw(logits: Tensor, step: PagedStep) -> Drawn:
    """Sample a token in each row. Rows of the same sequence have the same noise, hence draw the same token."""
    ones = torch.ones(len(logits), device=logits.device)
    seeds = torch.zeros((len(logits), 2), dtype=torch.int32, device=logits.device)
    rows = Rows(
        seed=seeds, temperature=ones, position=step.positions + 1, top_k=seeds[:, 0], top_p=ones, min_p=0 * ones,
        penalty=ones,
    )  # fmt: skip
    drawn = sample(logits, rows)
    if bool((drawn.token < 0).any()):
        raise ValueError("the model's logits are not finite")
    return drawn


def _targets(steps: Sequence[PagedStep], draws: Sequence[Drawn], tokens: int) -> Tensor:
    """The tokens that were drawn, where the packed layout predicts them; 0 elsewhere."""
    targets = torch.zeros(tokens, dtype=torch.int64, device=steps[0].entries.device)
    for step, drawn in zip(steps, draws, strict=True):
        targets[step.entries] = drawn.token.long()
    return targets


def _score(model: Decoder, hidden: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    scored = token_logprobs(hidden, model.head_weight, targets, chunk=chunk, routes=model.head_routes)
    assert isinstance(scored, Tensor)
    return scored


def _count(
    found: LogprobDifferences, scored: Tensor, targets: Tensor, steps: Sequence[PagedStep], draws: Sequence[Drawn]
) -> None:
    """Add up differences. A row that drew another token than another row of the same sequence differs, too."""
    for step, drawn in zip(steps, draws, strict=True):
        same = targets[step.entries] == drawn.token
        difference = torch.where(same, scored[step.entries] - drawn.logprob, 0.0).abs()
        found.tokens += len(same)
        found.differing += int((~same | (difference != 0)).sum())
        found.largest = max(found.largest, float(difference.max()))
