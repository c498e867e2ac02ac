"""Log-probabilities of target tokens, without holding the logits of all tokens at once.

On CUDA, logits are the fp32 accumulators of the GEMM: rounding them to half precision would change probabilities by
several percent. On a CPU they are first rounded to the dtype of the model.

The fp32 logits of 262,144 tokens over a vocabulary of 150,000 would take 160 GB. We compute them for one chunk of
tokens at a time, reduce them to one number per token, and recompute them in the backward pass. If there is only one
chunk, its logits are kept for the backward pass instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollgraph.graph.direct_sums import direct_sum_for
from rollgraph.model.gemm.matmul import GemmAlgos, add_weight_gradient, input_gradient, matmul

NO_ALGOS: GemmAlgos = {}
CHUNK_ELEMENTS = 1 << 28  # logits that exist at a time: 1 GiB in fp32


def token_logprobs(
    hidden: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    entropy: bool = False,
    chunk: int | None = None,
    algos: GemmAlgos = NO_ALGOS,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of each of `targets`, [tokens], under softmax(hidden @ lm_head.T / temperature), in fp32.

    - `hidden` is [tokens, hidden], `lm_head` is [vocabulary, hidden]. If `hidden` is float64, so is everything else.
    - `temperature` may be a tensor, with one value for all tokens or one for each. It gets no gradient.
    - `entropy=True` also returns the entropy of each distribution.
    - `chunk` is the number of tokens that have logits at a time. If it covers all tokens, their logits are kept for the
      backward pass.
    - `algos` are the GEMM algorithms of the output head; see `model/gemm/matmul.py`.

    There are no second derivatives. A target outside the vocabulary is an error on a CPU. CUDA cannot raise it: there,
    its log-probability and gradients are NaN.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        if temperature.requires_grad and torch.is_grad_enabled():
            raise ValueError("temperature requires a gradient, which token_logprobs does not compute; detach it")
    else:  # filled by a kernel: a CUDA graph cannot capture a copy from the host
        temperature = torch.full((), temperature, dtype=dtype, device=hidden.device)
    scale = temperature.to(hidden.device, dtype).reciprocal().expand(hidden.shape[0])[:, None]
    chunk = chunk or tokens_per_chunk(len(hidden), lm_head.shape[0])
    outputs: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, lm_head, targets.contiguous(), scale, entropy, chunk, algos
    )
    return outputs if entropy else outputs[0]


class _TokenLogprobs(torch.autograd.Function):
    """(log-probabilities, entropies or None) of all tokens, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, lm_head: Tensor, targets: Tensor, scale: Tensor, entropy: bool, chunk: int,
        algos: GemmAlgos,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        saved_logits: list[Tensor] = []
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        chunks = zip(hidden.split(chunk), scale.split(chunk), targets.split(chunk), strict=True)
        for chunk_hidden, chunk_scale, chunk_targets in chunks:
            logits = matmul(chunk_hidden, lm_head, None, algos, fp32_out=True)
            parts.append(reduce_logits(logits, chunk_scale, chunk_targets, entropy))
            if chunk >= len(hidden):
                saved_logits.append(logits)
        logprobs = torch.cat([part[0] for part in parts])
        normalizers = torch.cat([part[1] for part in parts])
        entropies = torch.cat([part[2] for part in parts])
        ctx.save_for_backward(hidden, lm_head, targets, scale, normalizers, entropies, *saved_logits)
        ctx.lm_head = lm_head  # the parameter itself, for its direct gradient sum
        ctx.chunk = chunk
        ctx.algos = algos
        ctx.set_materialize_grads(False)
        return logprobs, entropies if entropy else None

    @staticmethod
    def backward(ctx: Any, for_logprobs: Tensor | None, for_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; the recomputed logits have no autograd graph
            raise RuntimeError("token_logprobs has no second derivative; do not call backward with create_graph=True")
        hidden, lm_head, targets, scale, normalizers, entropies, *saved_logits = ctx.saved_tensors
        through_entropy = for_entropies is not None
        zeros = normalizers.new_zeros(()).expand_as(normalizers)
        if for_logprobs is None:
            for_logprobs = zeros
        if for_entropies is None:
            for_entropies = zeros
        needs_hidden_grad, needs_head_grad = ctx.needs_input_grad[:2]
        has_several_chunks = ctx.chunk < hidden.shape[0]
        total = direct_sum_for(ctx.lm_head, hidden.dtype) if needs_head_grad else None
        hidden_parts: list[Tensor] = []
        head_grad: Tensor | None = None
        per_token = (hidden, targets, scale, normalizers, entropies, for_logprobs, for_entropies)
        for chunk_hidden, *rows in zip(*(tensor.split(ctx.chunk) for tensor in per_token), strict=True):
            logits = saved_logits[0] if saved_logits else matmul(chunk_hidden, lm_head, None, ctx.algos, fp32_out=True)
            d_logits = _gradient(logits, chunk_hidden.dtype, through_entropy, *rows)
            if needs_hidden_grad:
                hidden_parts.append(input_gradient(d_logits, lm_head))
            if total is not None:
                add_weight_gradient(total, d_logits, chunk_hidden)
            elif needs_head_grad:
                head_grad = _accumulate(head_grad, d_logits, chunk_hidden, has_several_chunks)
        hidden_grad = torch.cat(hidden_parts) if needs_hidden_grad else None
        if total is not None:
            head_grad = total.placeholder()
        elif head_grad is not None:
            head_grad = head_grad.to(lm_head.dtype)
        return hidden_grad, head_grad, None, None, None, None, None


def chunk_sizes(tokens: int, vocabulary: int) -> set[int]:
    """The sizes of all chunks, where the caller sets no `chunk`."""
    chunk = tokens_per_chunk(tokens, vocabulary)
    return {chunk, tokens % chunk or chunk}


def tokens_per_chunk(tokens: int, vocabulary: int) -> int:
    """The default of `chunk`: as few chunks as the memory allows, all of about the same size."""
    max_tokens = max(1, CHUNK_ELEMENTS // vocabulary)
    chunks = -(-tokens // max_tokens)
    return -(-tokens // max(1, chunks))


def _accumulate(total: Tensor | None, d_logits: Tensor, hidden: Tensor, has_several_chunks: bool) -> Tensor:
    """Add the gradient of the output head for one more chunk. The sum over several chunks is fp32."""
    if not has_several_chunks:
        return d_logits.t() @ hidden
    if hidden.is_cuda and hidden.dtype != torch.float32:
        if total is None:
            return torch.mm(d_logits.t(), hidden, out_dtype=torch.float32)
        return torch.addmm(total, d_logits.t(), hidden, out_dtype=torch.float32, out=total)
    part = (d_logits.t() @ hidden).to(torch.promote_types(hidden.dtype, torch.float32))
    if total is None:
        return part
    return total.add_(part)


def reduce_logits(
    logits: Tensor, scale: Tensor, targets: Tensor, entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of the target, the logsumexp and, with `entropy`, the entropy of each row.

    `scale`, [rows, 1], is 1 / temperature. The sampler of the inference engine uses this reduction too.
    """
    if logits.is_cuda:
        from rollgraph.model.kernels.logprobs import fused_logprobs

        return fused_logprobs(logits, scale, targets, entropy)
    if len(logits) == 1:  # PyTorch would split a single row over threads, and add up in another order
        twice = reduce_logits(logits.repeat(2, 1), scale.repeat(2, 1), targets.repeat(2), entropy)
        return twice[0][:1], twice[1][:1], twice[2][:1]
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
    """The gradient of the logits: onehot - p for a log-probability, -p (log p + entropy) for the entropy."""
    if logits.is_cuda:
        from rollgraph.model.kernels import logprobs as logprob_kernels

        rows = (targets, scale, normalizer, entropy, for_logprob, for_entropy)
        return logprob_kernels.fused_logprobs_backward(logits, dtype, through_entropy, *rows)
    log_p = logits * scale - normalizer[:, None]
    p = log_p.exp()
    one_hot = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = for_logprob[:, None] * (torch.where(one_hot, 1.0, 0.0) - p)
    if through_entropy:
        gradient = gradient - for_entropy[:, None] * p * (log_p + entropy[:, None])
    return (gradient * scale).to(dtype)
