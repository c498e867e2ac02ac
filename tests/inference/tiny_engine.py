"""A tiny model and its engine."""

from __future__ import annotations

import torch

from rollgraph.inference import Engine, Output
from rollgraph.model import Architecture, Decoder
from rollgraph.tokenizer import ByteTokenizer

TINY = Architecture(
    "qwen3",
    vocabulary=264,  # more than the tokenizer has
    hidden=32,
    mlp=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    windows=(None, 6),
)


def make_model(device: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return model.to(device)


def make_engine(model: Decoder, **options: object) -> Engine:
    settings = {"rows": 4, "max_length": 96, "block_size": 4, "prefill_tokens": 16} | options
    return Engine(model, ByteTokenizer(), **settings)  # type: ignore[arg-type]


def tokens_of(outputs: list[Output]) -> list[list[list[int]]]:
    return [[completion.tokens for completion in output.completions] for output in outputs]
