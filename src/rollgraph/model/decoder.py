"""The decoder of the Llama and Qwen family, written once for training, scoring, prefill and decode.

Tokens of all sequences lie in one packed row. The projections of queries, keys and values are one parameter, and so
are those of gate and up: fewer, larger matrix products. `hf_weights.py` knows where Hugging Face's tensors are in them.
The residual stream travels as a pair (stream, update), so that adding and norming are one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollgraph.model.architecture import Architecture
from rollgraph.model.attention import Keys, packed_attention, paged_decode, paged_prefill
from rollgraph.model.logprobs import full_logits
from rollgraph.model.pointwise import add_norm, norm, rotary_angles, rotate, swiglu

Attend = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]  # layer's attention, qkv, cos, sin -> mixed values


class Attention(nn.Module):
    def __init__(self, architecture: Architecture, layer: int) -> None:
        super().__init__()
        a = architecture
        self.heads, self.kv_heads, self.head_dim = a.heads, a.kv_heads, a.head_dim
        self.window, self.eps = a.window(layer), a.norm_eps
        self.qkv = nn.Linear(a.hidden, (a.heads + 2 * a.kv_heads) * a.head_dim, bias=a.qkv_bias)
        self.out = nn.Linear(a.heads * a.head_dim, a.hidden, bias=a.output_bias)
        self.q_norm = nn.Parameter(torch.ones(a.head_dim)) if a.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(a.head_dim)) if a.qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_length: int, keys: Keys | None = None
    ) -> Tensor:
        """Over packed sequences."""
        return self.run(x, cos, sin, partial(_packed, cu_seqlens, max_length, keys))

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.out(attend(self, self.qkv(x), cos, sin).flatten(1))

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed and rotated, and values: [tokens, heads, head_dim]."""
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = qkv.view(len(qkv), sum(sizes), self.head_dim).split(sizes, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = norm(q, self.q_norm, self.eps), norm(k, self.k_norm, self.eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def split_and_store(self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pages: Tensor) -> Tensor:
        """The queries; keys and values go to `slots` of this layer's pages."""
        if qkv.is_cuda:
            from rollgraph.model.paged_kernels import rotate_and_store

            weights = (self.q_norm, self.k_norm) if self.q_norm is not None and self.k_norm is not None else None
            return rotate_and_store(qkv, cos, sin, weights, self.eps, slots, pages, self.heads)
        q, k, v = self.split(qkv, cos, sin)
        pages.flatten(0, 1).index_copy_(0, slots.long(), torch.stack((k, v), 1))
        return q


class MLP(nn.Module):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = architecture
        self.gate_up = nn.Linear(a.hidden, 2 * a.mlp, bias=a.mlp_bias)
        self.down = nn.Linear(a.mlp, a.hidden, bias=a.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


class Layer(nn.Module):
    """One layer: a unit of communication, and of capture where there are several ranks."""

    def __init__(self, architecture: Architecture, layer: int) -> None:
        super().__init__()
        a = architecture
        self.eps = a.norm_eps
        self.attention_norm = nn.Parameter(torch.ones(a.hidden))
        self.attention = Attention(a, layer)
        self.mlp_norm = nn.Parameter(torch.ones(a.hidden))
        self.mlp = MLP(a)

    def forward(
        self, stream: Tensor, update: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_length: int,
        keys: Keys | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Over packed sequences: the stream before the last update, and that update."""
        x, stream = add_norm(stream, update, self.attention_norm, self.eps)
        x, stream = add_norm(stream, self.attention(x, cos, sin, cu_seqlens, max_length, keys), self.mlp_norm, self.eps)
        return stream, self.mlp(x)

    def run(self, stream: Tensor, update: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """The same with another attention."""
        x, stream = add_norm(stream, update, self.attention_norm, self.eps)
        x, stream = add_norm(stream, self.attention.run(x, cos, sin, attend), self.mlp_norm, self.eps)
        return stream, self.mlp(x)


class Decoder(nn.Module):
    """A causal language model without its last matrix product: hidden states, and the weight that makes logits.

    `checkpointing` computes each layer's activations again in backward instead of keeping them.
    """

    frequencies: Tensor

    def __init__(self, architecture: Architecture, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.architecture = a = architecture
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(a.vocabulary, a.hidden)
        self.layers: Iterable[Layer] = nn.ModuleList(Layer(a, i) for i in range(a.layers))  # type: ignore[assignment]
        self.norm = nn.Parameter(torch.ones(a.hidden))
        self.head = None if a.tied else nn.Linear(a.hidden, a.vocabulary, bias=False)
        frequencies, self.rope_factor = a.frequencies()
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Random weights, as models of this family start with."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def head_weight(self) -> Tensor:
        """What turns a hidden state into logits, [vocabulary, hidden]."""
        return self.embed.weight if self.head is None else self.head.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """`.to(bfloat16)` leaves the rotary frequencies in fp32: half of it cannot tell positions apart."""
        exact = self.frequencies
        super()._apply(fn, recurse)
        if self.frequencies.dtype != torch.float32:
            self.frequencies = exact.to(self.frequencies.device)
        return self

    def forward(
        self, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_length: int, keys: Keys | None = None
    ) -> Tensor:
        """Hidden states, [tokens, hidden], of packed sequences. `max_length` bounds the longest of them.

        With `keys`, sequences may share the tokens they begin with.
        """
        stream, update, cos, sin = self._begin(ids, positions)
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                stream, update = checkpoint(
                    layer, stream, update, cos, sin, cu_seqlens, max_length, keys,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                stream, update = layer(stream, update, cos, sin, cu_seqlens, max_length, keys)
        return self._end(stream, update)

    def prefill(
        self, ids: Tensor, positions: Tensor, slots: Tensor, pages: Tensor, table: Tensor, cu_seqlens: Tensor,
        lengths: Tensor,
    ) -> None:  # fmt: skip
        """Put keys and values of packed tokens into the cache, `pages` of all layers."""
        stream, update, cos, sin = self._begin(ids, positions)
        for layer, own in zip(self.layers, pages, strict=True):
            attend = partial(_prefill, slots, own, table, cu_seqlens, lengths)
            stream, update = layer.run(stream, update, cos, sin, attend)

    def decode(
        self, ids: Tensor, positions: Tensor, slots: Tensor, pages: Tensor, table: Tensor, lengths: Tensor
    ) -> Tensor:
        """Hidden states of one new token for each row, [rows, hidden]; its keys and values go to the cache."""
        stream, update, cos, sin = self._begin(ids, positions)
        for layer, own in zip(self.layers, pages, strict=True):
            stream, update = layer.run(stream, update, cos, sin, partial(_decode, slots, own, table, lengths))
        return self._end(stream, update)

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, vocabulary] in fp32."""
        return full_logits(hidden, self.head_weight)

    def _begin(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        stream = self.embed(ids)
        return stream, torch.zeros_like(stream), *rotary_angles(positions, self.frequencies, self.rope_factor)

    def _end(self, stream: Tensor, update: Tensor) -> Tensor:
        return add_norm(stream, update, self.norm, self.architecture.norm_eps)[0]


def _packed(
    cu_seqlens: Tensor, max_length: int, keys: Keys | None, attention: Attention, qkv: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    q, k, v = attention.split(qkv, cos, sin)
    return packed_attention(q, k, v, cu_seqlens, max_length, attention.window, keys)


def _prefill(
    slots: Tensor, pages: Tensor, table: Tensor, cu_seqlens: Tensor, lengths: Tensor, attention: Attention, qkv: Tensor,
    cos: Tensor, sin: Tensor,
) -> Tensor:  # fmt: skip
    q = attention.split_and_store(qkv, cos, sin, slots, pages)
    return paged_prefill(q, pages, table, cu_seqlens, lengths, attention.window)


def _decode(
    slots: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, attention: Attention, qkv: Tensor, cos: Tensor,
    sin: Tensor,
) -> Tensor:  # fmt: skip
    q = attention.split_and_store(qkv, cos, sin, slots, pages)
    return paged_decode(q, pages, table, lengths, attention.window)
