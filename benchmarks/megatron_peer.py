"""megatron-core's GPT model with its local CUDA graphs, in one process, as a peer for `logprobs.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import create_cudagraphs
from megatron.core.transformer.transformer_config import TransformerConfig

from rollgraph.model import Architecture


def make_step(a: Architecture, sequences: int, length: int) -> Callable[[], object]:
    """Return a function that runs forward + backward of the loss of `sequences` sequences, through captured layers."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0, use_cudagraphable_rng=True)
    config = TransformerConfig(
        num_layers=a.layers,
        hidden_size=a.hidden,
        ffn_hidden_size=a.mlp,
        num_attention_heads=a.heads,
        num_query_groups=a.kv_heads,
        kv_channels=a.head_dim,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        normalization="RMSNorm",
        layernorm_epsilon=a.norm_eps,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        cuda_graph_impl="local",
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=a.vocabulary,
        max_sequence_length=length,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    model = model.cuda().train()
    ids = torch.randint(0, a.vocabulary, (sequences, length), device="cuda")
    positions = torch.arange(length, device="cuda").expand(sequences, -1)

    def step() -> None:
        model(ids, positions, None, labels=ids.roll(-1, 1)).mean().backward()
        create_cudagraphs()  # captures after the first step; later calls do nothing

    return step
