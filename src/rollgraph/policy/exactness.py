"""Makes generation and training agree, bit for bit.

The arithmetic of attention, norms, rotations and log-probabilities is the same in all phases, whatever is done here.
What remains are matrix products, for which a library may choose another order of summation at another number of rows:
`model/product_probe.py` finds a way around that for the numbers of rows that a worker uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollgraph.errors import UserError
from rollgraph.inference import defaults
from rollgraph.model import Decoder
from rollgraph.model.attention_probe import attention_agrees
from rollgraph.model.logprobs import logit_rows
from rollgraph.model.product_probe import OnProbe, ProductReport, set_routes
from rollgraph.policy.limits import Limits, TokenBucket

Exactness = Literal["auto", "must", "off"]


class ExactnessError(UserError, RuntimeError):
    """Generation and training have to agree, and cannot."""


def make_exact(
    model: Decoder,
    limits: Limits,
    buckets: Sequence[TokenBucket],
    whole_logits: bool,
    must: bool,
    on_probe: OnProbe | None = None,
) -> ProductReport:
    """Choose how each product of the model is computed. With `must`, slow ways are allowed, and failure is an error."""
    prefill_tokens = limits.prefill_tokens or defaults.sizes_on(model.embed.weight.device.type).prefill_tokens
    logits = set(defaults.row_buckets(limits.rows))
    largest = buckets[-1].tokens  # most microbatches have it
    trained = {largest}
    for bucket in buckets:
        scored = logit_rows(bucket.logits, model.architecture.vocabulary)
        kept = {bucket.logits} if whole_logits else scored
        logits |= scored | kept
        if bucket.tokens == largest:
            trained |= kept
    rows = (*defaults.product_rows(limits.rows, prefill_tokens), *(bucket.tokens for bucket in buckets))
    report = set_routes(model, rows, sorted(logits), trained=sorted(trained), at_any_cost=must, on_probe=on_probe)
    report.attention_agrees = attention_agrees(model, defaults.row_buckets(limits.rows))
    if must and not report.exact:
        raise ExactnessError(f"exact: must, but {describe(report)}")
    return report


def describe(report: ProductReport) -> str:
    """One line about what was found."""
    if not report.attention_agrees:
        return "generation and training differ by rounding here: attention of few rows is not that of many"
    if not report.exact:
        shapes = ", ".join(f"{shape} with {min(rows)} rows" for shape, rows in report.inexact.items())
        return f"generation and training differ by rounding here: no way was found to compute {shapes} like many rows"
    return "generation and training agree bit for bit"
