"""Code shared by the benchmarks: tables, timing and model shapes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from rollgraph.model import Architecture, Decoder, Rope

# Measured ceilings of one NVIDIA H200: a device-to-device copy, and a GEMM in bf16.
BYTES_PER_SECOND = 4.28e12
FLOPS_PER_SECOND = 785e12

QWEN_1_5B = Architecture(
    family="qwen2",
    vocabulary=151_936,
    hidden=1536,
    mlp=8960,
    layers=28,
    heads=12,
    kv_heads=2,
    head_dim=128,
    rope=Rope(theta=1_000_000.0),
    max_length=32_768,
    tied=True,
)

QWEN_7B = Architecture(
    family="qwen2",
    vocabulary=152_064,
    hidden=3584,
    mlp=18_944,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    rope=Rope(theta=1_000_000.0),
    max_length=32_768,
    tied=False,
)


def transformers_config(architecture: Architecture) -> Any:
    """Return the same shape as a `transformers` configuration, which vLLM and TRL read, too."""
    from transformers import Qwen2Config

    a = architecture
    return Qwen2Config(
        vocab_size=a.vocabulary,
        hidden_size=a.hidden,
        intermediate_size=a.mlp,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        max_position_embeddings=a.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": a.rope.theta},
        tie_word_embeddings=a.tied,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )


def random_decoder(architecture: Architecture = QWEN_1_5B) -> Decoder:
    """Create a decoder on the GPU with random weights in bf16."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Decoder(architecture).to(torch.bfloat16)


def device_time(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median milliseconds of a call, measured with CUDA events."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def sample_without_flashinfer() -> None:
    """If FlashInfer is not installed, tell vLLM's sampler to do without it. Call this before importing vLLM."""
    if find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table(title: str, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    cells = [header, *[tuple(f"{c:.2f}" if isinstance(c, float) else str(c) for c in row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}")
    for row in cells:
        print(
            "  "
            + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        )
