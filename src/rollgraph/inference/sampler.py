"""Sampling: from logits to one token for each row, with its log-probabilities. No host read, no global generator.

Noise is a function of (seed, position, vocabulary id) and of nothing else: given equal logits, a request draws the
same tokens whatever shares its batch, before and after a preemption, in the plain and in the filtered variant. A
token is drawn as the largest of logit / temperature + Gumbel noise. On CUDA the plain variant is one pass over the
logits, in `sampling_kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK16, _MASK17 = 0xFFFF, 0x1FFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)  # odd multipliers of the mixing function, as signed 32 bits
_OTHER = 0x5BD1E995


@dataclass
class Rows:
    """How to sample each row; tensors of [rows] unless said otherwise."""

    seed: Tensor  # int32, [rows, 2]
    temperature: Tensor  # float32; 0 takes the most likely token
    position: Tensor  # int32, the place of the token to be drawn in its sequence
    top_k: Tensor  # int32; 0 keeps all
    top_p: Tensor  # float32; 1 keeps all
    min_p: Tensor  # float32; 0 keeps all
    penalty: Tensor  # float32; 1 changes nothing


@dataclass
class Drawn:
    """Tensors of [rows]. A row whose logits are not finite, also at its temperature, has token -1."""

    token: Tensor  # int32
    logprob: Tensor  # float32, under the distribution it was drawn from (0 where the most likely one was taken)
    policy_logprob: Tensor  # float32, under softmax(logits)


def sample(logits: Tensor, rows: Rows) -> Drawn:
    """Draw at a temperature, without filters. `logits` is [rows, vocabulary] in fp32."""
    if logits.is_cuda:
        from rollgraph.inference.sampling_kernels import draw

        return Drawn(*draw(logits, rows.seed, rows.position, rows.temperature))
    scaled, greedy = _scale(logits, rows.temperature)
    ids = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32).expand_as(logits)
    scores = torch.where(greedy, scaled, scaled + gumbel(rows.seed, rows.position, ids))
    token = scores.argmax(-1)
    return _finish(logits, scaled, scaled.logsumexp(-1), greedy, token, token)


def sample_filtered(logits: Tensor, rows: Rows, history: Tensor) -> Drawn:
    """Draw with a repetition penalty and from what top-k, top-p and min-p leave over, in this order.

    `history`, [rows, places], has the tokens at the places before `rows.position`. Filters follow the temperature.
    """
    raw = logits
    logits = penalize(logits, rows, history)
    scaled, greedy = _scale(logits, rows.temperature)
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    k = torch.where(rows.top_k > 0, rows.top_k, logits.shape[1])[:, None]
    kept = ordered.masked_fill(rank >= k, -torch.inf)
    share = kept.softmax(-1)
    before = share.cumsum(-1) - share
    top_p = rows.top_p[:, None]
    enough = (before >= top_p) & (top_p < 1)  # shares are rounded: those before the tail may add up to 1
    unlikely = kept < kept[:, :1] + rows.min_p[:, None].log()
    kept = kept.masked_fill((enough | unlikely) & (rank > 0), -torch.inf)
    scores = torch.where(greedy, kept, kept + gumbel(rows.seed, rows.position, ids.to(torch.int32)))
    place = scores.argmax(-1)
    token = ids.gather(1, place[:, None])[:, 0]
    return _finish(raw, kept, kept.logsumexp(-1), greedy, token, place)


def penalize(logits: Tensor, rows: Rows, history: Tensor) -> Tensor:
    """Make every token that a sequence contains less likely: positive logits shrink, negative ones grow."""
    places = torch.arange(history.shape[1], device=history.device)
    first = history[:, :1]  # stands in for the places that are not there yet
    seen = torch.where(places < rows.position[:, None], history, first).long()
    found = logits.gather(1, seen)
    penalty = rows.penalty[:, None]
    return logits.scatter(1, seen, torch.where(found > 0, found / penalty, found * penalty))


def gumbel(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, [rows, ids], keyed by (seed, position, vocabulary id)."""
    low, high = seed.unbind(1)
    first = _mix(_mix(_mix(low) ^ high) + position)
    second = _mix(_mix(_mix(high ^ _OTHER) ^ low) + position)  # two keys: 64 bits tell rows and positions apart
    bits = _mix(_mix(ids ^ first[:, None]) + second[:, None])
    uniform = ((bits.long() & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    uniform = uniform.clamp_max(1 - 2.0**-24)
    small = uniform * (1 + uniform * (0.5 + uniform / 3))  # of -log(1 - u), where 1 - u would lose the digits of u
    return -torch.where(uniform < 2.0**-8, small, -(1 - uniform).log()).log()


def _mix(x: Tensor) -> Tensor:
    """Spread the bits of 32-bit integers: a change of one changes half of the result. Products wrap around."""
    x = (x ^ ((x >> 16) & _MASK16)) * _FIRST
    x = (x ^ ((x >> 15) & _MASK17)) * _SECOND
    return x ^ ((x >> 16) & _MASK16)


def _scale(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    greedy = temperature[:, None] == 0
    return logits * torch.where(greedy, 1.0, 1 / temperature[:, None]), greedy


def _finish(raw: Tensor, scaled: Tensor, normalizer: Tensor, greedy: Tensor, token: Tensor, place: Tensor) -> Drawn:
    """`place` is where the token stands in `scaled`."""
    policy = raw.gather(1, token[:, None])[:, 0] - raw.logsumexp(-1)
    logprob = torch.where(greedy[:, 0], 0.0, scaled.gather(1, place[:, None])[:, 0] - normalizer)
    token = torch.where(policy.isfinite() & logprob.isfinite(), token, -1).to(torch.int32)
    return Drawn(token, logprob, policy)
