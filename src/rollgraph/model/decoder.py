"""The decoder of the Llama and Qwen family, written once for training, scoring, prefill and decode.

The tokens of all sequences are packed into one row. Projections of the same input are fused into one parameter, which
makes fewer and larger matrix products. Parameter names are the keys of checkpoints; `hf_weights.py` maps Hugging Face's
tensors to them:

    attention_norm  input_layernorm             attention.qkv  self_attn.{q,k,v}_proj   mlp.gate_up  mlp.{gate,up}_proj
    mlp_norm        post_attention_layernorm    attention.out  self_attn.o_proj         mlp.down     mlp.down_proj

Layers pass on the residual stream as a pair (residual, update) that is not added yet, so that the addition and the norm
that follows it are one kernel.

With a `TensorGroup`, the ranks of that group divide the heads and the width of the MLP among themselves; what stands
between attention and MLP, and before and after all layers, each of them has and computes whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from rollgraph.model.adapters import Adaptable
from rollgraph.model.architecture import Architecture
from rollgraph.model.attention import Keys, packed_attention, paged_decode, paged_prefill
from rollgraph.model.embedding import Embedding
from rollgraph.model.linear import Linear, Shared, Unexpanded, expand
from rollgraph.model.pointwise import add_norm, norm, rotary_angles, rotate, swiglu
from rollgraph.model.products import Routes, gate, multiply, padded_rows
from rollgraph.model.recompute import recompute
from rollgraph.model.tensor_group import TensorGroup

Angles = tuple[Tensor, Tensor]  # rotary cos and sin

# Called with a layer's attention module, its projected qkv, cos and sin; gives the mixed values.
Attend = Callable[["Attention", Tensor | Unexpanded, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self, architecture: Architecture, layer: int, group: TensorGroup | None, repeats: int) -> None:
        """`repeats` is how many ranks of the group have the same key/value heads."""
        super().__init__()
        a = architecture
        self.group = group
        self.recomputes = False  # its activations, in the backward pass, by itself
        self.heads = a.heads
        self.kv_heads = a.kv_heads
        self.head_dim = a.head_dim
        self.window = a.window(layer)
        self.eps = a.norm_eps
        shared = None
        if group is not None and repeats > 1:
            first = group.rank // repeats * repeats
            shared = Shared(group, a.heads * a.head_dim, range(first, first + repeats))
        outputs = (a.heads + 2 * a.kv_heads) * a.head_dim
        self.qkv = Linear(a.hidden, outputs, bias=a.qkv_bias, outputs_of=group, shared=shared)
        self.out = Linear(a.heads * a.head_dim, a.hidden, bias=a.output_bias, sums_over=group)
        self.q_norm = nn.Parameter(torch.ones(a.head_dim)) if a.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(a.head_dim)) if a.qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_length: int, keys: Keys | None = None
    ) -> Tensor:
        """Attention over packed sequences."""
        if self.recomputes and torch.is_grad_enabled():
            return recompute(self, self._run_packed, x, cos, sin, cu_seqlens, max_length, keys)
        return self._run_packed(x, cos, sin, cu_seqlens, max_length, keys)

    def _run_packed(
        self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_length: int, keys: Keys | None
    ) -> Tensor:
        return self.run(x, cos, sin, partial(_attend_packed, cu_seqlens, max_length, keys))

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Project, attend as `attend` does, and project back."""
        if self.group is not None:
            x = self.group.enter(x)
        mixed = attend(self, self.qkv(x, defer=self.q_norm is None), cos, sin)
        projected: Tensor = self.out(mixed.flatten(1))
        return projected

    def _head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights that queries and keys are normed with. All heads have the same, on whichever rank they are."""
        if self.group is None or self.q_norm is None or self.k_norm is None or not torch.is_grad_enabled():
            return self.q_norm, self.k_norm
        q_norm, k_norm = self.group.enter(torch.stack((self.q_norm, self.k_norm))).unbind()
        return q_norm, k_norm

    def split(self, qkv: Tensor | Unexpanded, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed and rotated, and values: [tokens, heads, head_dim]."""
        if isinstance(qkv, Unexpanded):
            qkv = expand(qkv)
        q_norm, k_norm = self._head_norms()
        if qkv.is_cuda:
            from rollgraph.model.head_kernels import SplitHeads

            heads: tuple[Tensor, Tensor, Tensor] = SplitHeads.apply(  # type: ignore[no-untyped-call]
                qkv, cos, sin, q_norm, k_norm, self.eps, self.heads, self.kv_heads
            )
            return heads
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = qkv.view(len(qkv), sum(sizes), self.head_dim).split(sizes, 1)
        if q_norm is not None and k_norm is not None:
            q = norm(q, q_norm, self.eps)
            k = norm(k, k_norm, self.eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def split_and_store(
        self, qkv: Tensor | Unexpanded, cos: Tensor, sin: Tensor, slots: Tensor, pages: Tensor
    ) -> Tensor:
        """The queries; keys and values are written to `slots` of this layer's pages."""
        if isinstance(qkv, Unexpanded):
            from rollgraph.model.adapted_head_kernels import rotate_and_store_adapted

            return rotate_and_store_adapted(qkv, cos, sin, slots, pages, self.heads)
        if qkv.is_cuda:
            from rollgraph.model.head_kernels import rotate_and_store

            weights = None
            if self.q_norm is not None and self.k_norm is not None:
                weights = (self.q_norm, self.k_norm)
            chained = self.qkv.starts_next(len(qkv))
            return rotate_and_store(qkv, cos, sin, weights, self.eps, slots, pages, self.heads, chained=chained)
        q, k, v = self.split(qkv, cos, sin)
        pages.flatten(0, 1).index_copy_(0, slots.long(), torch.stack((k, v), 1))
        return q


class MLP(nn.Module):
    def __init__(self, architecture: Architecture, group: TensorGroup | None) -> None:
        super().__init__()
        a = architecture
        self.group = group
        self.recomputes = False  # its activations, in the backward pass, by itself
        self.gate_up = Linear(a.hidden, 2 * a.mlp, bias=a.mlp_bias, outputs_of=group)
        self.down = Linear(a.mlp, a.hidden, bias=a.mlp_bias, sums_over=group)
        self.gated_routes: Routes = {}  # of products that end with SwiGLU

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes and torch.is_grad_enabled():
            return recompute(self, self._run, x)
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        if self.group is not None:
            x = self.group.enter(x)
        projected: Tensor = self.down(self._activate(x), len(x))
        return projected

    def _activate(self, x: Tensor) -> Tensor:
        """SwiGLU of gate and up, which may have more rows than x: those that `down` is padded to."""
        rows = len(x)
        gated = self.gated_routes.get(rows)
        if gated is not None and self.gate_up.adapter is None and not torch.is_grad_enabled():
            return gate(x, self.gate_up.weight, self.gate_up.bias, gated)
        gate_up = self.gate_up(x, defer=True)
        return swiglu(gate_up, padded_rows(self.down.routes, rows), chained=self.gate_up.starts_next(rows))


class DecoderLayer(nn.Module):
    """One layer. It is the unit of communication and, with several ranks, of capture."""

    def __init__(self, architecture: Architecture, layer: int, group: TensorGroup | None, repeats: int) -> None:
        super().__init__()
        a = architecture
        self.recomputes = False  # its activations, in the backward pass, all at once
        self.eps = a.norm_eps
        self.attention_norm = nn.Parameter(torch.ones(a.hidden))
        self.attention = Attention(a, layer, group, repeats)
        self.mlp_norm = nn.Parameter(torch.ones(a.hidden))
        self.mlp = MLP(a, group)

    def forward(
        self, residual: Tensor, update: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_length: int,
        keys: Keys | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Over packed sequences. Gives the residual stream without this layer's last update, and that update."""
        if self.recomputes and torch.is_grad_enabled():
            return recompute(self, self._run_packed, residual, update, cos, sin, cu_seqlens, max_length, keys)
        return self._run_packed(residual, update, cos, sin, cu_seqlens, max_length, keys)

    def _run_packed(
        self, residual: Tensor, update: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_length: int,
        keys: Keys | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, residual = add_norm(
            residual, update, self.attention_norm, self.eps, chained=self.mlp.down.starts_next(len(update))
        )
        x = self.attention(x, cos, sin, cu_seqlens, max_length, keys)
        x, residual = add_norm(residual, x, self.mlp_norm, self.eps, chained=self.attention.out.starts_next(len(x)))
        return residual, self.mlp(x)

    def run(self, residual: Tensor, update: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Like `forward`, but with the given attention."""
        x, residual = add_norm(
            residual, update, self.attention_norm, self.eps, chained=self.mlp.down.starts_next(len(update))
        )
        x = self.attention.run(x, cos, sin, attend)
        x, residual = add_norm(residual, x, self.mlp_norm, self.eps, chained=self.attention.out.starts_next(len(x)))
        return residual, self.mlp(x)


class Decoder(Adaptable):
    """A causal language model up to its last hidden states; `head_weight` turns them into logits.

    The activations of the first `checkpointing` layers are computed again in the backward pass instead of being kept.
    With a `group`, `architecture` is what this rank computes, and `whole` what all ranks of the group compute together;
    weights that are drawn here are not pieces of those that a whole model would draw: see `division.py`.
    """

    frequencies: Tensor

    def __init__(self, architecture: Architecture, *, checkpointing: int = 0, group: TensorGroup | None = None) -> None:
        super().__init__()
        self.whole = architecture
        self.group = group
        repeats = 1
        a = architecture
        if group is not None:
            a = architecture.divided(group.size)
            repeats = a.kv_heads * group.size // architecture.kv_heads
        self.architecture = a
        self.embed = Embedding(a.vocabulary, a.hidden)
        layers = nn.ModuleList(DecoderLayer(a, layer, group, repeats) for layer in range(a.layers))
        self.layers: Iterable[DecoderLayer] = layers  # type: ignore[assignment]
        self.checkpoint_layers(checkpointing)
        self.norm = nn.Parameter(torch.ones(a.hidden))
        self.head = None if a.tied else nn.Linear(a.hidden, a.vocabulary, bias=False)
        self.head_routes: Routes = {}
        frequencies, self.rope_factor = a.frequencies()
        self.register_buffer("frequencies", frequencies.to(self.embed.weight.device), persistent=False)
        self.reset_parameters()

    def checkpoint_layers(self, count: int, *, parts: bool = False) -> None:
        """Recompute the activations of the first `count` layers, or of all if it is True.

        The backward of the first layers comes last, when the activations of the others are gone. With `parts`,
        attention and MLP are recomputed by themselves, as graphs of these parts need it.
        """
        if count is True:
            count = self.architecture.layers
        if not 0 <= count <= self.architecture.layers:
            raise ValueError(f"checkpointing={count}: the model has {self.architecture.layers} layers")
        self.checkpointing = int(count)
        for index, layer in enumerate(self.layers):
            layer.recomputes = index < count and not parts
            layer.attention.recomputes = layer.mlp.recomputes = index < count and parts

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw random weights, as a model of this family has before its training."""
        if self.embed.weight.is_meta:
            return  # there are no values to draw
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the output head, [vocabulary, hidden]."""
        return self.embed.weight if self.head is None else self.head.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Keep the rotary frequencies in fp32 under `.to(bfloat16)`: half precision cannot tell positions apart."""
        if self.adapters is not None:  # a weight is a view of the matrix that is multiplied with
            raise RuntimeError("the model has adapters: move or convert it before you attach them")
        exact = self.frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.frequencies.dtype != torch.float32:
            self.frequencies = exact.to(self.frequencies.device)
        return self

    def forward(
        self, input_ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_length: int, keys: Keys | None = None
    ) -> Tensor:
        """Hidden states, [tokens, hidden], of packed sequences, none of which is longer than `max_length`.

        With `keys`, sequences can share a prompt.
        """
        residual, update, cos, sin = self._begin(input_ids, positions)
        for layer in self.layers:
            residual, update = layer(residual, update, cos, sin, cu_seqlens, max_length, keys)
        return self._end(residual, update)

    def prefill(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, pages: Iterable[Tensor], table: Tensor,
        cu_seqlens: Tensor, lengths: Tensor,
    ) -> None:  # fmt: skip
        """Write the keys and values of packed tokens to the cache. `pages` are those of all layers."""
        residual, update, cos, sin = self._begin(input_ids, positions)
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            attend = partial(_attend_prefill, slots, layer_pages, table, cu_seqlens, lengths)
            residual, update = layer.run(residual, update, cos, sin, attend)

    def decode(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, pages: Iterable[Tensor], table: Tensor,
        lengths: Tensor, angles: Angles | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states of one new token in each row, [rows, hidden]. Its keys and values go to the cache.

        `angles` are those of the positions, if the caller knows them already.
        """
        residual, update, cos, sin = self._begin(input_ids, positions, angles)
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            attend = partial(_attend_decode, slots, layer_pages, table, lengths)
            residual, update = layer.run(residual, update, cos, sin, attend)
        return self._end(residual, update)

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, vocabulary] in fp32."""
        return multiply(hidden, self.head_weight, None, self.head_routes, wide=True)

    def angles(self, positions: Tensor) -> Angles:
        """Rotary cos and sin, [tokens, head_dim / 2]."""
        return rotary_angles(positions, self.frequencies, self.rope_factor)

    def _begin(
        self, input_ids: Tensor, positions: Tensor, angles: Angles | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream, an update of zero, and the rotary cos and sin."""
        residual = self.embed(input_ids)
        cos, sin = angles or self.angles(positions)
        return residual, torch.zeros_like(residual), cos, sin

    def _end(self, residual: Tensor, update: Tensor) -> Tensor:
        normed, _ = add_norm(residual, update, self.norm, self.architecture.norm_eps)
        return normed


def _attend_packed(
    cu_seqlens: Tensor,
    max_length: int,
    keys: Keys | None,
    attention: Attention,
    qkv: Tensor | Unexpanded,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    q, k, v = attention.split(qkv, cos, sin)
    return packed_attention(q, k, v, cu_seqlens, max_length, attention.window, keys)


def _attend_prefill(
    slots: Tensor, pages: Tensor, table: Tensor, cu_seqlens: Tensor, lengths: Tensor, attention: Attention,
    qkv: Tensor | Unexpanded, cos: Tensor, sin: Tensor,
) -> Tensor:  # fmt: skip
    q = attention.split_and_store(qkv, cos, sin, slots, pages)
    return paged_prefill(q, pages, table, cu_seqlens, lengths, attention.window)


def _attend_decode(
    slots: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, attention: Attention,
    qkv: Tensor | Unexpanded, cos: Tensor, sin: Tensor,
) -> Tensor:  # fmt: skip
    if isinstance(qkv, Tensor) and qkv.is_cuda and attention.q_norm is None:
        from rollgraph.model.decode_kernels import Unrotated, decode

        chained = attention.qkv.starts_next(len(qkv))
        unrotated = Unrotated(qkv.contiguous(), cos, sin, slots, attention.heads, chained)
        return decode(unrotated, pages, table, lengths, attention.window)
    q = attention.split_and_store(qkv, cos, sin, slots, pages)
    return paged_decode(q, pages, table, lengths, attention.window)
