"""Log-probabilities of given tokens, without a matrix of logits.

Logits of a vocabulary of 150,000 for 262,144 tokens would take 160 GB. They are made for a chunk of tokens at a
time, reduced to one number for each token, and made again in backward. Those of a single chunk are kept for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 28  # logits that exist at a time: 1 GiB of them in fp32


def token_logprobs(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    entropy: bool = False,
    chunk: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of `targets`, [tokens], under softmax(hidden @ lm_head.T / temperature), in fp32.

    `hidden` is [tokens, hidden], `lm_head` [vocabulary, hidden]. `temperature` may be a tensor, one for all or one for
    each token; it has no gradient, and there are no second derivatives. With `entropy`, also the entropy of each
    distribution. `chunk` is how many tokens have logits at a time; if that is all of them, backward has them still.
    Where `hidden` is float64, so is all the rest. A target outside of the vocabulary is an error on a CPU; on CUDA,
    which cannot stop for it, its log-probability and gradients are NaN.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        if temperature.requires_grad and torch.is_grad_enabled():
            raise ValueError("temperature requires a gradient, which token_logprobs does not compute: detach it")
    else:  # filled in by a kernel: a CUDA graph cannot hold a copy from the host
        temperature = torch.full((), temperature, dtype=wide, device=hidden.device)
    scale = temperature.to(hidden.device, wide).reciprocal().expand(hidden.shape[0])[:, None]
    chunk = chunk or max(1, CHUNK_ELEMENTS // lm_head.shape[0])
    logprobs, entropies = _TokenLogprobs.apply(hidden, lm_head, targets.contiguous(), scale, entropy, chunk)
    return (logprobs, entropies) if entropy else logprobs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, targets: Tensor, scale: Tensor, entropy: bool, chunk: int
    ) -> tuple[Tensor, Tensor | None]:
        kept: list[Tensor] = []
        parts = []
        for part, part_scale, wanted in zip(hidden.split(chunk), scale.split(chunk), targets.split(chunk), strict=True):
            logits = full_logits(part, lm_head)
            parts.append(_reduce(logits, part_scale, wanted, entropy))
            if chunk >= len(hidden):
                kept.append(logits)
        logprobs, normalizers, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, lm_head, targets, scale, normalizers, entropies, *kept)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropies if entropy else None

    @staticmethod
    def backward(ctx: Any, for_logprobs: Tensor | None, for_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # by create_graph=True; the logits have no graph to differentiate through
            raise RuntimeError("token_logprobs has no second derivative: backward with create_graph=True is refused")
        hidden, lm_head, *saved = ctx.saved_tensors
        rows, kept = saved[:4], saved[4:]
        zero = rows[2].new_zeros(())
        rows += [zero.expand_as(rows[2]) if g is None else g for g in (for_logprobs, for_entropies)]
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        hidden_parts, head_grad = [], None
        for part, *of_rows in zip(*(t.split(ctx.chunk) for t in (hidden, *rows)), strict=True):
            logits = kept[0] if kept else full_logits(part, lm_head)
            d_logits = _gradient(logits, part.dtype, for_entropies is not None, *of_rows)
            if wants_hidden:
                hidden_parts.append(d_logits @ lm_head)
            if wants_head:
                head_grad = _accumulate(head_grad, d_logits, part, ctx.chunk < hidden.shape[0])
        hidden_grad = torch.cat(hidden_parts) if wants_hidden else None
        return hidden_grad, head_grad.to(lm_head.dtype) if head_grad is not None else None, None, None, None, None


def full_logits(hidden: Tensor, lm_head: Tensor) -> Tensor:
    """Logits in fp32. On CUDA, as they leave the accumulators: half precision would put errors of percents in
    probabilities. A CPU has them rounded to the dtype of the model first."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32)
    return (hidden @ lm_head.t()).to(torch.promote_types(hidden.dtype, torch.float32))


def _accumulate(total: Tensor | None, d_logits: Tensor, hidden: Tensor, several: bool) -> Tensor:
    """The head's gradient of one more chunk; sums of several are kept in fp32."""
    if not several:
        return d_logits.t() @ hidden
    if hidden.is_cuda and hidden.dtype != torch.float32:
        if total is None:
            return torch.mm(d_logits.t(), hidden, out_dtype=torch.float32)
        return torch.addmm(total, d_logits.t(), hidden, out_dtype=torch.float32, out=total)
    part = (d_logits.t() @ hidden).to(torch.promote_types(hidden.dtype, torch.float32))
    return part if total is None else total.add_(part)


def _reduce(logits: Tensor, scale: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, normalizer and entropy of each row."""
    if logits.is_cuda:
        from rollgraph.model.logprob_kernels import reduce

        return reduce(logits, scale, targets, entropy)
    scaled = logits * scale
    normalizer = scaled.logsumexp(-1)
    logprob = scaled.gather(-1, targets[:, None].long()).squeeze(-1) - normalizer
    if not entropy:
        return logprob, normalizer, normalizer
    log_p = scaled - normalizer[:, None]
    return logprob, normalizer, -(log_p.exp() * log_p).sum(-1)


def _gradient(
    logits: Tensor,
    dtype: torch.dtype,
    through_entropy: bool,
    targets: Tensor,
    scale: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    for_logprob: Tensor,
    for_entropy: Tensor,
) -> Tensor:
    """The gradient of the logits: of a log-probability, onehot - p; of the entropy, -p (log p + entropy)."""
    if logits.is_cuda:
        from rollgraph.model import logprob_kernels

        rows = (targets, scale, normalizer, entropy, for_logprob, for_entropy)
        return logprob_kernels.gradient(logits, dtype, through_entropy, *rows)
    log_p = logits * scale - normalizer[:, None]
    p = log_p.exp()
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = for_logprob[:, None] * (torch.where(hit, 1.0, 0.0) - p)
    if through_entropy:
        gradient = gradient - for_entropy[:, None] * p * (log_p + entropy[:, None])
    return (gradient * scale).to(dtype)
