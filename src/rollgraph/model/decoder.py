"""The decoder of the Llama and Qwen family, written once for training, scoring, prefill and decode.

The tokens of all sequences are packed into one row. Projections of the same input are fused into one parameter, for
fewer and larger matmuls. Parts have Hugging Face's names, and vLLM's where they are fused: `qkv_proj` has the rows of
q_proj, k_proj and v_proj, `gate_up_proj` those of gate_proj and up_proj. Norms are plain parameters, not modules.

Layers pass on the residual stream as a pair (residual, update), not yet summed, so that one kernel does the
addition and the norm after it.

With a `TensorParallelGroup`, heads and the width of the MLP are sharded over its ranks. Everything else (the residual
stream, norms, the embedding, the output head) is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from rollgraph.model.architecture import Architecture
from rollgraph.model.attention import PackedKeys, packed_attention, paged_decode, paged_prefill
from rollgraph.model.gemm.matmul import GemmAlgos, matmul, matmul_swiglu, padded_row_count
from rollgraph.model.layers import (
    Embedding,
    Linear,
    PendingLoRA,
    ReplicatedRows,
    add_lora,
    add_norm,
    norm,
    rotary_angles,
    rotate,
    swiglu,
)
from rollgraph.model.lora import Adaptable
from rollgraph.model.recompute import recompute
from rollgraph.model.tensor_parallel import TensorParallelGroup

Angles = tuple[Tensor, Tensor]  # rotary cos and sin

# Called with a layer's attention module, its projected qkv, cos and sin; returns the attention output of each head.
Attend = Callable[["Attention", Tensor | PendingLoRA, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    def __init__(
        self, architecture: Architecture, layer: int, group: TensorParallelGroup | None, kv_replicas: int
    ) -> None:
        """`kv_replicas` is how many ranks of the group have the same key/value heads."""
        super().__init__()
        a = architecture
        self.group = group
        self.recomputes = False  # this submodule's activations, separately, in the backward pass
        self.heads = a.heads
        self.kv_heads = a.kv_heads
        self.head_dim = a.head_dim
        self.window = a.window(layer)
        self.eps = a.norm_eps
        replicated_rows = None
        if group is not None and kv_replicas > 1:
            first = group.rank // kv_replicas * kv_replicas
            replicated_rows = ReplicatedRows(group, a.heads * a.head_dim, range(first, first + kv_replicas))
        outputs = (a.heads + 2 * a.kv_heads) * a.head_dim
        self.qkv_proj = Linear(
            a.hidden, outputs, bias=a.qkv_bias, column_parallel_group=group, replicated_rows=replicated_rows
        )
        self.o_proj = Linear(a.heads * a.head_dim, a.hidden, bias=a.output_bias, row_parallel_group=group)
        self.q_norm = nn.Parameter(torch.ones(a.head_dim)) if a.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(a.head_dim)) if a.qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_length: int, keys: PackedKeys | None = None
    ) -> Tensor:
        """Attention over packed sequences."""
        if self.recomputes and torch.is_grad_enabled():
            return recompute(self, self._run_packed, x, cos, sin, cu_seqlens, max_length, keys)
        return self._run_packed(x, cos, sin, cu_seqlens, max_length, keys)

    def _run_packed(
        self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_length: int, keys: PackedKeys | None
    ) -> Tensor:
        return self.run(x, cos, sin, partial(_attend_packed, cu_seqlens, max_length, keys))

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Project to q, k and v, call `attend`, and project back."""
        if self.group is not None:
            x = self.group.copy_to_ranks(x)
        heads = attend(self, self.qkv_proj(x, defer_lora=self.q_norm is None), cos, sin)
        projected: Tensor = self.o_proj(heads.flatten(1))
        return projected

    def _head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the query and key norms. All heads on all ranks share them, so their gradients are summed."""
        if self.group is None or self.q_norm is None or self.k_norm is None or not torch.is_grad_enabled():
            return self.q_norm, self.k_norm
        q_norm, k_norm = self.group.copy_to_ranks(torch.stack((self.q_norm, self.k_norm))).unbind()
        return q_norm, k_norm

    def split_heads(self, qkv: Tensor | PendingLoRA, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed and rotated, and values, each [tokens, heads, head_dim]."""
        if isinstance(qkv, PendingLoRA):
            qkv = add_lora(qkv)
        q_norm, k_norm = self._head_norms()
        if qkv.is_cuda:
            from rollgraph.model.kernels.heads import SplitHeads

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

    def split_heads_and_store(
        self, qkv: Tensor | PendingLoRA, cos: Tensor, sin: Tensor, slots: Tensor, pages: Tensor
    ) -> Tensor:
        """Return the queries, and write keys and values to `slots` of this layer's pages."""
        if isinstance(qkv, PendingLoRA):
            from rollgraph.model.kernels.heads import rotate_and_store_adapted

            return rotate_and_store_adapted(qkv, cos, sin, slots, pages, self.heads)
        if qkv.is_cuda:
            from rollgraph.model.kernels.heads import rotate_and_store

            weights = None
            if self.q_norm is not None and self.k_norm is not None:
                weights = (self.q_norm, self.k_norm)
            pdl = self.qkv_proj.triggers_pdl(len(qkv))
            return rotate_and_store(qkv, cos, sin, weights, self.eps, slots, pages, self.heads, pdl=pdl)
        q, k, v = self.split_heads(qkv, cos, sin)
        pages.flatten(0, 1).index_copy_(0, slots.long(), torch.stack((k, v), 1))
        return q


class MLP(nn.Module):
    def __init__(self, architecture: Architecture, group: TensorParallelGroup | None) -> None:
        super().__init__()
        a = architecture
        self.group = group
        self.recomputes = False  # this submodule's activations, separately, in the backward pass
        self.gate_up_proj = Linear(a.hidden, 2 * a.mlp, bias=a.mlp_bias, column_parallel_group=group)
        self.down_proj = Linear(a.mlp, a.hidden, bias=a.mlp_bias, row_parallel_group=group)
        self.swiglu_algos: GemmAlgos = {}  # of the gate_up GEMMs that end with SwiGLU

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes and torch.is_grad_enabled():
            return recompute(self, self._run, x)
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        if self.group is not None:
            x = self.group.copy_to_ranks(x)
        projected: Tensor = self.down_proj(self._activate(x), len(x))
        return projected

    def _activate(self, x: Tensor) -> Tensor:
        """SwiGLU of gate and up. It may be padded to the rows of the GEMM of `down`."""
        rows = len(x)
        swiglu_algo = self.swiglu_algos.get(rows)
        if swiglu_algo is not None and self.gate_up_proj.adapter is None and not torch.is_grad_enabled():
            return matmul_swiglu(x, self.gate_up_proj.weight, self.gate_up_proj.bias, swiglu_algo)
        gate_up = self.gate_up_proj(x, defer_lora=True)
        return swiglu(gate_up, padded_row_count(self.down_proj.algos, rows), pdl=self.gate_up_proj.triggers_pdl(rows))


class DecoderLayer(nn.Module):
    """One transformer layer: the unit of communication and, with several ranks, of capture."""

    def __init__(
        self, architecture: Architecture, layer: int, group: TensorParallelGroup | None, kv_replicas: int
    ) -> None:
        super().__init__()
        a = architecture
        self.recomputes = False  # all its activations, in the backward pass
        self.eps = a.norm_eps
        self.input_layernorm = nn.Parameter(torch.ones(a.hidden))
        self.self_attn = Attention(a, layer, group, kv_replicas)
        self.post_attention_layernorm = nn.Parameter(torch.ones(a.hidden))
        self.mlp = MLP(a, group)

    def forward(
        self, residual: Tensor, update: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_length: int,
        keys: PackedKeys | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run packed sequences. Returns the residual stream without this layer's last update, and that update."""
        if self.recomputes and torch.is_grad_enabled():
            return recompute(self, self._run_packed, residual, update, cos, sin, cu_seqlens, max_length, keys)
        return self._run_packed(residual, update, cos, sin, cu_seqlens, max_length, keys)

    def _run_packed(
        self, residual: Tensor, update: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_length: int,
        keys: PackedKeys | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, residual = self._add_and_norm(residual, update)
        x = self.self_attn(x, cos, sin, cu_seqlens, max_length, keys)
        pdl = self.self_attn.o_proj.triggers_pdl(len(x))
        x, residual = add_norm(residual, x, self.post_attention_layernorm, self.eps, pdl=pdl)
        return residual, self.mlp(x)

    def _add_and_norm(self, residual: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """The norm before attention, and the sum. `update` comes from the down_proj of the layer before."""
        pdl = self.mlp.down_proj.triggers_pdl(len(update))  # ours, which ends with the same kernel as that one
        return add_norm(residual, update, self.input_layernorm, self.eps, pdl=pdl)

    def run(self, residual: Tensor, update: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Like `forward`, with `attend` as the attention."""
        x, residual = self._add_and_norm(residual, update)
        x = self.self_attn.run(x, cos, sin, attend)
        pdl = self.self_attn.o_proj.triggers_pdl(len(x))
        x, residual = add_norm(residual, x, self.post_attention_layernorm, self.eps, pdl=pdl)
        return residual, self.mlp(x)


class Decoder(Adaptable):
    """A causal language model up to its last hidden states; `head_weight` turns them into logits.

    The activations of the first `checkpointing` layers are recomputed in the backward pass instead of being kept. With
    a `group`, `architecture` has the sizes of this rank's shard, and `full_architecture` those of the unsharded model.
    Random weights that are drawn here are not shards of what an unsharded model would draw: see `tensor_shards.py`.
    """

    frequencies: Tensor

    def __init__(
        self, architecture: Architecture, *, checkpointing: int = 0, group: TensorParallelGroup | None = None
    ) -> None:
        super().__init__()
        self.full_architecture = architecture
        self.group = group
        kv_replicas = 1
        a = architecture
        if group is not None:
            a = architecture.sharded(group.size)
            kv_replicas = a.kv_heads * group.size // architecture.kv_heads
        self.architecture = a
        self.embed_tokens = Embedding(a.vocabulary, a.hidden)
        layers = nn.ModuleList(DecoderLayer(a, layer, group, kv_replicas) for layer in range(a.layers))
        self.layers: Iterable[DecoderLayer] = layers  # type: ignore[assignment]
        self.checkpoint_layers(checkpointing)
        self.norm = nn.Parameter(torch.ones(a.hidden))
        self.lm_head = None if a.tied else nn.Linear(a.hidden, a.vocabulary, bias=False)
        self.head_algos: GemmAlgos = {}
        frequencies, self.rope_factor = a.frequencies()
        self.register_buffer("frequencies", frequencies.to(self.embed_tokens.weight.device), persistent=False)
        self.reset_parameters()

    def checkpoint_layers(self, count: int, *, per_submodule: bool = False) -> None:
        """Recompute the activations of the first `count` layers, or of all if it is True.

        The backward of the first layers comes last, when the activations of the others are freed. With
        `per_submodule`, attention and MLP are recomputed separately, as separate graphs of them need it.
        """
        if count is True:
            count = self.architecture.layers
        if not 0 <= count <= self.architecture.layers:
            raise ValueError(f"checkpointing={count}: the model has {self.architecture.layers} layers")
        self.checkpointing = int(count)
        for index, layer in enumerate(self.layers):
            layer.recomputes = index < count and not per_submodule
            layer.self_attn.recomputes = layer.mlp.recomputes = index < count and per_submodule

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw random weights, as for pretraining."""
        if self.embed_tokens.weight.is_meta:
            return  # it has no memory
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the output head, [vocabulary, hidden]."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Keep the rotary frequencies in fp32 under `.to(bfloat16)`: half precision cannot tell positions apart."""
        if self.adapters is not None:  # each weight is a view of its `base_and_a`
            raise RuntimeError("the model has adapters: move or convert it before you attach them")
        fp32_frequencies = self.frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.frequencies.dtype != torch.float32:
            self.frequencies = fp32_frequencies.to(self.frequencies.device)
        return self

    def forward(
        self, input_ids: Tensor, positions: Tensor, cu_seqlens: Tensor, max_length: int, keys: PackedKeys | None = None
    ) -> Tensor:
        """Hidden states, [tokens, hidden], of packed sequences of at most `max_length` tokens.

        With `keys`, sequences can share a prompt.
        """
        residual, update, cos, sin = self._embed_tokens(input_ids, positions)
        for layer in self.layers:
            residual, update = layer(residual, update, cos, sin, cu_seqlens, max_length, keys)
        return self._final_norm(residual, update)

    def prefill(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, pages: Iterable[Tensor], table: Tensor,
        cu_seqlens: Tensor, lengths: Tensor,
    ) -> None:  # fmt: skip
        """Write the keys and values of packed tokens to the cache. `pages` has those of each layer."""
        residual, update, cos, sin = self._embed_tokens(input_ids, positions)
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            attend = partial(_attend_prefill, slots, layer_pages, table, cu_seqlens, lengths)
            residual, update = layer.run(residual, update, cos, sin, attend)

    def decode(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, pages: Iterable[Tensor], table: Tensor,
        lengths: Tensor, angles: Angles | None = None,
    ) -> Tensor:  # fmt: skip
        """Final hidden states of one new token per row, [rows, hidden]. Writes its keys and values to the cache.

        `lengths` include the new token. Pass `angles` if the positions' rotary cos and sin are already computed.
        """
        residual, update, cos, sin = self._embed_tokens(input_ids, positions, angles)
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            attend = partial(_attend_decode, slots, layer_pages, table, lengths)
            residual, update = layer.run(residual, update, cos, sin, attend)
        return self._final_norm(residual, update)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, [tokens, vocabulary] in fp32 or more."""
        return matmul(hidden, self.head_weight, None, self.head_algos, fp32_out=True)

    def angles(self, positions: Tensor) -> Angles:
        """Rotary cos and sin, [tokens, head_dim / 2]."""
        return rotary_angles(positions, self.frequencies, self.rope_factor)

    def _embed_tokens(
        self, input_ids: Tensor, positions: Tensor, angles: Angles | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream, an update of zero, and the rotary cos and sin."""
        residual = self.embed_tokens(input_ids)
        cos, sin = angles or self.angles(positions)
        return residual, torch.zeros_like(residual), cos, sin

    def _final_norm(self, residual: Tensor, update: Tensor) -> Tensor:
        normed, _ = add_norm(residual, update, self.norm, self.architecture.norm_eps)
        return normed


def _attend_packed(
    cu_seqlens: Tensor,
    max_length: int,
    keys: PackedKeys | None,
    attention: Attention,
    qkv: Tensor | PendingLoRA,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    q, k, v = attention.split_heads(qkv, cos, sin)
    return packed_attention(q, k, v, cu_seqlens, max_length, attention.window, keys)


def _attend_prefill(
    slots: Tensor, pages: Tensor, table: Tensor, cu_seqlens: Tensor, lengths: Tensor, attention: Attention,
    qkv: Tensor | PendingLoRA, cos: Tensor, sin: Tensor,
) -> Tensor:  # fmt: skip
    q = attention.split_heads_and_store(qkv, cos, sin, slots, pages)
    return paged_prefill(q, pages, table, cu_seqlens, lengths, attention.window)


def _attend_decode(
    slots: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, attention: Attention,
    qkv: Tensor | PendingLoRA, cos: Tensor, sin: Tensor,
) -> Tensor:  # fmt: skip
    if isinstance(qkv, Tensor) and qkv.is_cuda and attention.q_norm is None:
        from rollgraph.model.kernels.attention import UnrotatedQKV, decode

        pdl = attention.qkv_proj.triggers_pdl(len(qkv))
        unrotated_qkv = UnrotatedQKV(qkv.contiguous(), cos, sin, slots, attention.heads, pdl)
        return decode(unrotated_qkv, pages, table, lengths, attention.window)
    q = attention.split_heads_and_store(qkv, cos, sin, slots, pages)
    return paged_decode(q, pages, table, lengths, attention.window)
