"""Sampling: from logits to one token for each row, with its log-probabilities.

We sample by the Gumbel-max trick: the largest log-weight + Gumbel noise is a draw in proportion to the weights. First
we draw a part of the vocabulary (`model/arithmetic.py`) by the sum of its weights, then a token of that part by logit /
temperature. The distribution is that of a draw from all tokens at once, but most tokens need no noise.

Noise is a function of (seed, position, id of the token or part) and nothing else; no global generator is used. Given
equal logits, a request therefore draws the same tokens whatever else is in its batch, before and after a preemption,
with and without filters. Nothing here reads a value on the host. On CUDA, sampling without filters is one pass over the
logits, in `kernels.py`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rollgraph.model.arithmetic import PART, part_count
from rollgraph.model.logprobs import reduce_logits
from rollgraph.model.operators import as_array, operator

_MASK16 = 0xFFFF
_MASK17 = 0x1FFFF
_MIX_1 = 0x7FEB352D  # multipliers of the mixing function: odd, as signed 32-bit numbers
_MIX_2 = 0x846CA68B - (1 << 32)
_KEY_SALT = 0x5BD1E995  # makes the second key of a row differ from the first


@dataclass
class SamplingTensors:
    """The sampling parameters of each row. Tensors are [rows] unless stated otherwise."""

    seed: Tensor  # int32, [rows, 2]
    temperature: Tensor  # float32; 0 takes the most likely token
    position: Tensor  # int32, the position of the token to be drawn
    top_k: Tensor  # int32; 0 keeps all
    top_p: Tensor  # float32; 1 keeps all
    min_p: Tensor  # float32; 0 keeps all
    penalty: Tensor  # float32; 1 changes nothing


@dataclass
class SamplerOutput:
    """The drawn tokens, [rows]. A token is -1 if the logits, or logits / temperature, are not finite."""

    token: Tensor  # int32
    logprob: Tensor  # float32, under the distribution it was drawn from; 0 in greedy rows
    policy_logprob: Tensor  # float32, under softmax(logits)

    def write_to(self, results: Tensor) -> None:
        """Write the tokens and the bits of both log-probabilities to `results`, [rows, 3] int32."""
        results[:, 0] = self.token
        results[:, 1:] = torch.stack((self.logprob, self.policy_logprob), 1).view(torch.int32)

    @classmethod
    def read_from(cls, results: Tensor) -> SamplerOutput:
        _, logprob, policy_logprob = results.view(torch.float32).unbind(1)
        return cls(results[:, 0], logprob, policy_logprob)


def sample(logits: Tensor, sampling: SamplingTensors) -> SamplerOutput:
    """Draw at a temperature, without filters. `logits` is [rows, vocabulary] in fp32."""
    results = torch.empty((len(logits), 3), dtype=torch.int32, device=logits.device)
    sample_into(results, logits, sampling)
    return SamplerOutput.read_from(results)


def sample_into(results: Tensor, logits: Tensor, sampling: SamplingTensors, *, pdl: bool = False) -> None:
    """`sample`, with what `SamplerOutput.write_to` writes as the result.

    `pdl` says that the kernel before, which computes the logits, triggers programmatic dependent launch.
    """
    if logits.is_cuda:
        from rollgraph.inference.kernels import sample_rows

        sample_rows(results, logits, sampling.seed, sampling.position, sampling.temperature, pdl)
    else:
        _sample_unfiltered(logits, sampling).write_to(results)


def _sample_unfiltered(logits: Tensor, sampling: SamplingTensors) -> SamplerOutput:
    greedy = sampling.temperature == 0
    scale = _scales(sampling.temperature)
    token = _draw(logits * scale, sampling)
    return _finish(logits, token, greedy, reduce_logits(logits, scale, token)[0])


def sample_filtered(logits: Tensor, sampling: SamplingTensors, history: Tensor) -> SamplerOutput:
    """Apply the repetition penalty, the temperature, top-k, top-p and min-p, in this order, and draw.

    `history`, [rows, positions], holds the tokens at the positions before `sampling.position`.
    """
    unfiltered = logits
    logits = penalize(logits, sampling, history)
    greedy = sampling.temperature == 0
    scaled = logits * _scales(sampling.temperature)
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    k = torch.where(sampling.top_k > 0, sampling.top_k, logits.shape[1])[:, None]
    masked = ordered.masked_fill(rank >= k, -torch.inf)
    probability = masked.softmax(-1)
    before = probability.cumsum(-1) - probability
    top_p = sampling.top_p[:, None]
    # Probabilities are rounded and may add up to 1 before the tail; a top_p of 1 must still keep the tail.
    outside_top_p = (before >= top_p) & (top_p < 1)
    below_min_p = masked < masked[:, :1] + sampling.min_p[:, None].log()
    masked = masked.masked_fill((outside_top_p | below_min_p) & (rank > 0), -torch.inf)
    masked = torch.empty_like(masked).scatter_(1, ids, masked)  # back in the order of the vocabulary
    token = _draw(masked, sampling)
    logprob = reduce_logits(masked, torch.ones_like(masked[:, :1]), token)[0]
    filtered = _finish(unfiltered, token, greedy, logprob)
    plain = sample(unfiltered, sampling)  # a row without filters gets the same token as in a batch without filters
    uses_filters = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0) | (sampling.penalty != 1)
    return SamplerOutput(
        torch.where(uses_filters, filtered.token, plain.token),
        torch.where(uses_filters, filtered.logprob, plain.logprob),
        torch.where(uses_filters, filtered.policy_logprob, plain.policy_logprob),
    )


def penalize(logits: Tensor, sampling: SamplingTensors, history: Tensor) -> Tensor:
    """Make the tokens of a sequence less likely to repeat: divide positive logits, multiply negative ones."""
    positions = torch.arange(history.shape[1], device=history.device)
    first = history[:, :1]  # stands in for positions that do not exist yet
    seen = torch.where(positions < sampling.position[:, None], history, first).long()
    seen_logits = logits.gather(1, seen)
    penalty = sampling.penalty[:, None]
    return logits.scatter(1, seen, torch.where(seen_logits > 0, seen_logits / penalty, seen_logits * penalty))


def sample_seed(seed: int, index: int) -> tuple[int, int]:
    """The two signed 32-bit numbers that seed sample `index` of a request."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    low, high = struct.unpack("=ii", digest)
    return low, high


def _draw(scaled: Tensor, sampling: SamplingTensors) -> Tensor:
    """The tokens, [rows], drawn from softmax(scaled): a part of each row, and a token of that part."""
    vocabulary = scaled.shape[1]
    count = part_count(vocabulary)
    if count == 1:
        return _pick(scaled, torch.arange(vocabulary, device=scaled.device, dtype=torch.int32), sampling)
    padded = functional.pad(scaled, (0, count * PART - vocabulary), value=-torch.inf).unflatten(1, (count, PART))
    weights = torch.where(sampling.temperature[:, None] == 0, padded.amax(-1), padded.logsumexp(-1))
    # The ids of parts count down from -1: their noise must differ from that of any token.
    part = _pick(weights, ~torch.arange(count, device=scaled.device, dtype=torch.int32), sampling)[:, None]
    part_start = part * PART
    inside = padded.gather(1, part[:, :, None].expand(-1, 1, PART))[:, 0]
    ids = part_start.int() + torch.arange(PART, device=scaled.device, dtype=torch.int32)
    return part_start[:, 0] + _pick(inside, ids, sampling)


def _pick(scores: Tensor, ids: Tensor, sampling: SamplingTensors) -> Tensor:
    """The index, [rows], of the largest score + noise, and of the first largest score in greedy rows."""
    if not scores.is_cuda:
        return pick_on_cpu(scores, ids, sampling.seed, sampling.position, sampling.temperature)
    noisy = scores + gumbel(sampling.seed, sampling.position, ids)
    return torch.where(sampling.temperature[:, None] == 0, scores, noisy).argmax(-1)


@operator(lambda scores, *_: scores.new_empty(len(scores), dtype=torch.int64))
def pick_on_cpu(scores: Tensor, ids: Tensor, seed: Tensor, position: Tensor, temperature: Tensor) -> Tensor:
    """See `_pick`."""
    from rollgraph.inference.cpu_sampling import pick

    picked = torch.empty(len(scores), dtype=torch.int64)
    ids = ids if ids.dim() > 1 else ids[None]
    pick(*map(as_array, (scores, ids, seed, position, temperature, picked)))
    return picked


def gumbel(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, [rows, ids], keyed by (seed, position, id). `ids` are [ids] or [rows, ids], in int32."""
    low, high = seed.unbind(1)
    # With a single key of 32 bits, some rows and positions would have equal keys, and so draw with the same noise.
    first_key = _mix(_mix(_mix(low) ^ high) + position)
    second_key = _mix(_mix(_mix(high ^ _KEY_SALT) ^ low) + position)
    bits = _mix(_mix(ids ^ first_key[:, None]) + second_key[:, None])
    uniform = ((bits.long() & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    uniform = uniform.clamp_max(1 - 2.0**-24)  # the largest values round to 1, where log(1 - u) is -inf
    # -log(1 - u) as a series for small u, where 1 - u would lose the digits of u.
    small = uniform * (1 + uniform * (0.5 + uniform / 3))
    return -torch.where(uniform < 2.0**-8, small, -(1 - uniform).log()).log()


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of 32-bit integers: flipping one input bit flips about half of the output. Products wrap around."""
    x = (x ^ ((x >> 16) & _MASK16)) * _MIX_1
    x = (x ^ ((x >> 15) & _MASK17)) * _MIX_2
    return x ^ ((x >> 16) & _MASK16)


def _scales(temperature: Tensor) -> Tensor:
    """1 / temperature, [rows, 1], and 1 in greedy rows. Training scales by the same factor."""
    return torch.where(temperature == 0, 1.0, temperature.reciprocal())[:, None]


def _finish(logits: Tensor, token: Tensor, greedy: Tensor, logprob: Tensor) -> SamplerOutput:
    """Add the log-probability under the policy, and set the token to -1 if the logits are not finite."""
    policy = reduce_logits(logits, torch.ones_like(logits[:, :1]), token)[0]
    logprob = torch.where(greedy, 0.0, logprob)
    token = torch.where(policy.isfinite() & logprob.isfinite(), token, -1).to(torch.int32)
    return SamplerOutput(token, logprob, policy)
