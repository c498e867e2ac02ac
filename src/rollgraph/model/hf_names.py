"""Hugging Face's names of a model's tensors, and where the decoder, which fuses some of them, has each."""

from __future__ import annotations

from rollgraph.model.architecture import Architecture


def tensor_places(architecture: Architecture) -> dict[str, tuple[str, slice]]:
    """Where each of Hugging Face's tensors is: the name of the decoder's parameter, and the rows of it."""
    a = architecture
    q = a.heads * a.head_dim
    kv = a.kv_heads * a.head_dim
    all_rows = slice(None)
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    if a.qk_norm:
        norms |= {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
    projections = (
        ("self_attn.q_proj", "attention.qkv", slice(q), a.qkv_bias),
        ("self_attn.k_proj", "attention.qkv", slice(q, q + kv), a.qkv_bias),
        ("self_attn.v_proj", "attention.qkv", slice(q + kv, q + 2 * kv), a.qkv_bias),
        ("self_attn.o_proj", "attention.out", all_rows, a.output_bias),
        ("mlp.gate_proj", "mlp.gate_up", slice(a.mlp), a.mlp_bias),
        ("mlp.up_proj", "mlp.gate_up", slice(a.mlp, 2 * a.mlp), a.mlp_bias),
        ("mlp.down_proj", "mlp.down", all_rows, a.mlp_bias),
    )
    places = {"model.embed_tokens.weight": ("embed.weight", all_rows)}
    for i in range(a.layers):
        for theirs, ours in norms.items():
            places[f"model.layers.{i}.{theirs}.weight"] = (f"layers.{i}.{ours}", all_rows)
        for theirs, ours, rows, has_bias in projections:
            places[f"model.layers.{i}.{theirs}.weight"] = (f"layers.{i}.{ours}.weight", rows)
            if has_bias:
                places[f"model.layers.{i}.{theirs}.bias"] = (f"layers.{i}.{ours}.bias", rows)
    places["model.norm.weight"] = ("norm", all_rows)
    if not a.tied:
        places["lm_head.weight"] = ("head.weight", all_rows)
    return places
