"""Sampling: from logits to one token for each row, with its log-probabilities.

The largest of log-weight + Gumbel noise is a draw by weight. A part of the vocabulary (`model/vocabulary_parts.py`) is
drawn in this way by the sum of its weights, and then one of its tokens by logit / temperature: the distribution is that
of a draw from all tokens at once, and most of them need no noise.

Noise is a function of (seed, position, id of the token or part) and of nothing else, and no global generator is used.
Given equal logits, a request therefore draws the same tokens whatever else is in its batch, before and after a
preemption, with and without filters. Nothing here reads a value on the host. On CUDA, sampling without filters is one
pass over the logits, in `sampling_kernels.py`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rollgraph.model.logprobs import reduce_logits
from rollgraph.model.vocabulary_parts import PART, part_count

_MASK16 = 0xFFFF
_MASK17 = 0x1FFFF
_FIRST = 0x7FEB352D  # odd multipliers of the mixing function, as signed 32-bit numbers
_SECOND = 0x846CA68B - (1 << 32)
_OTHER = 0x5BD1E995


@dataclass
class Rows:
    """How to sample each row. Tensors are [rows] unless stated otherwise."""

    seed: Tensor  # int32, [rows, 2]
    temperature: Tensor  # float32; 0 takes the most likely token
    position: Tensor  # int32, the position in its sequence of the token to be drawn
    top_k: Tensor  # int32; 0 keeps all
    top_p: Tensor  # float32; 1 keeps all
    min_p: Tensor  # float32; 0 keeps all
    penalty: Tensor  # float32; 1 changes nothing


@dataclass
class Drawn:
    """Tensors of [rows]. The token is -1 where logits, or logits divided by the temperature, are not finite."""

    token: Tensor  # int32
    logprob: Tensor  # float32, under the distribution it was drawn from (0 if the most likely token was taken)
    policy_logprob: Tensor  # float32, under softmax(logits)

    def write_to(self, results: Tensor) -> None:
        """Write tokens and the bits of both log-probabilities to `results`, [rows, 3] int32."""
        results[:, 0] = self.token
        results[:, 1:] = torch.stack((self.logprob, self.policy_logprob), 1).view(torch.int32)

    @classmethod
    def read_from(cls, results: Tensor) -> Drawn:
        _, logprob, policy_logprob = results.view(torch.float32).unbind(1)
        return cls(results[:, 0], logprob, policy_logprob)


def sample(logits: Tensor, rows: Rows) -> Drawn:
    """Draw at a temperature, without filters. `logits` is [rows, vocabulary] in fp32."""
    results = torch.empty((len(logits), 3), dtype=torch.int32, device=logits.device)
    sample_into(results, logits, rows)
    return Drawn.read_from(results)


def sample_into(results: Tensor, logits: Tensor, rows: Rows, *, chained: bool = False) -> None:
    """`sample`, with what `Drawn.write_to` writes as the result.

    `chained` says that the logits come from a kernel that lets the next one start early.
    """
    if logits.is_cuda:
        from rollgraph.inference.sampling_kernels import draw

        draw(results, logits, rows.seed, rows.position, rows.temperature, chained)
    else:
        _sample_plainly(logits, rows).write_to(results)


def _sample_plainly(logits: Tensor, rows: Rows) -> Drawn:
    greedy = rows.temperature == 0
    scale = _scales(rows.temperature)
    token = _draw(logits * scale, rows)
    return _finish(logits, token, greedy, reduce_logits(logits, scale, token)[0])


def sample_filtered(logits: Tensor, rows: Rows, history: Tensor) -> Drawn:
    """Apply the repetition penalty, the temperature, top-k, top-p and min-p, in this order, and draw from what is left.

    `history`, [rows, places], holds the tokens at the positions before `rows.position`.
    """
    raw = logits
    logits = penalize(logits, rows, history)
    greedy = rows.temperature == 0
    scaled = logits * _scales(rows.temperature)
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    k = torch.where(rows.top_k > 0, rows.top_k, logits.shape[1])[:, None]
    kept = ordered.masked_fill(rank >= k, -torch.inf)
    share = kept.softmax(-1)
    before = share.cumsum(-1) - share
    top_p = rows.top_p[:, None]
    # Shares are rounded, so those before the tail may already add up to 1; a top_p of 1 must still keep the tail.
    enough = (before >= top_p) & (top_p < 1)
    unlikely = kept < kept[:, :1] + rows.min_p[:, None].log()
    kept = kept.masked_fill((enough | unlikely) & (rank > 0), -torch.inf)
    kept = torch.empty_like(kept).scatter_(1, ids, kept)  # in the order of the vocabulary again
    token = _draw(kept, rows)
    logprob = reduce_logits(kept, torch.ones_like(kept[:, :1]), token)[0]
    filtered = _finish(raw, token, greedy, logprob)
    plain = sample(raw, rows)  # a row without filters gets what it would get in a batch without filters
    uses = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0) | (rows.penalty != 1)
    return Drawn(
        torch.where(uses, filtered.token, plain.token),
        torch.where(uses, filtered.logprob, plain.logprob),
        torch.where(uses, filtered.policy_logprob, plain.policy_logprob),
    )


def penalize(logits: Tensor, rows: Rows, history: Tensor) -> Tensor:
    """Make every token that a sequence contains less likely: divide positive logits, multiply negative ones."""
    places = torch.arange(history.shape[1], device=history.device)
    first = history[:, :1]  # stands in for positions that do not exist yet
    seen = torch.where(places < rows.position[:, None], history, first).long()
    found = logits.gather(1, seen)
    penalty = rows.penalty[:, None]
    return logits.scatter(1, seen, torch.where(found > 0, found / penalty, found * penalty))


def sample_seed(seed: int, index: int) -> tuple[int, int]:
    """The two signed 32-bit numbers that seed sample `index` of a request."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    low, high = struct.unpack("=ii", digest)
    return low, high


def _draw(scaled: Tensor, rows: Rows) -> Tensor:
    """The tokens, [rows], drawn from softmax(scaled): a part of each row, and a token of that part."""
    vocabulary = scaled.shape[1]
    count = part_count(vocabulary)
    if count == 1:
        return _pick(scaled, torch.arange(vocabulary, device=scaled.device, dtype=torch.int32), rows)
    padded = functional.pad(scaled, (0, count * PART - vocabulary), value=-torch.inf).unflatten(1, (count, PART))
    weights = torch.where(rows.temperature[:, None] == 0, padded.amax(-1), padded.logsumexp(-1))
    # Parts count down from -1, because noise of their own needs ids that no token has.
    part = _pick(weights, ~torch.arange(count, device=scaled.device, dtype=torch.int32), rows)[:, None]
    begin = part * PART
    inside = padded.gather(1, part[:, :, None].expand(-1, 1, PART))[:, 0]
    ids = begin.int() + torch.arange(PART, device=scaled.device, dtype=torch.int32)
    return begin[:, 0] + _pick(inside, ids, rows)


def _pick(scores: Tensor, ids: Tensor, rows: Rows) -> Tensor:
    """The places, [rows], of the largest of scores + noise, and of the first largest score in greedy rows."""
    noisy = scores + gumbel(rows.seed, rows.position, ids)
    return torch.where(rows.temperature[:, None] == 0, scores, noisy).argmax(-1)


def gumbel(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, [rows, ids], keyed by (seed, position, id). `ids` are [ids] or [rows, ids], in int32."""
    low, high = seed.unbind(1)
    # Two keys, because it takes 64 bits to tell all rows and positions apart.
    first = _mix(_mix(_mix(low) ^ high) + position)
    second = _mix(_mix(_mix(high ^ _OTHER) ^ low) + position)
    bits = _mix(_mix(ids ^ first[:, None]) + second[:, None])
    uniform = ((bits.long() & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    uniform = uniform.clamp_max(1 - 2.0**-24)
    # -log(1 - u) as a series for small u, where 1 - u would lose the digits of u.
    small = uniform * (1 + uniform * (0.5 + uniform / 3))
    return -torch.where(uniform < 2.0**-8, small, -(1 - uniform).log()).log()


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of 32-bit integers: flipping one input bit flips about half of the output. Products wrap around."""
    x = (x ^ ((x >> 16) & _MASK16)) * _FIRST
    x = (x ^ ((x >> 15) & _MASK17)) * _SECOND
    return x ^ ((x >> 16) & _MASK16)


def _scales(temperature: Tensor) -> Tensor:
    """1 / temperature, [rows, 1], and 1 in greedy rows. Training divides by the temperature in the same way."""
    return torch.where(temperature == 0, 1.0, temperature.reciprocal())[:, None]


def _finish(logits: Tensor, token: Tensor, greedy: Tensor, logprob: Tensor) -> Drawn:
    """Add the log-probability under the policy, and mark tokens that are drawn from numbers that are not finite."""
    policy = reduce_logits(logits, torch.ones_like(logits[:, :1]), token)[0]
    logprob = torch.where(greedy, 0.0, logprob)
    token = torch.where(policy.isfinite() & logprob.isfinite(), token, -1).to(torch.int32)
    return Drawn(token, logprob, policy)
