"""Greedy generation matches transformers, on folders that transformers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollgraph.inference import Engine, SamplingParams
from rollgraph.model import load_model

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 24},
    "Mistral": {"sliding_window": 9},
}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in ("Qwen2", "Mistral") else pytest.mark.slow) for name in FAMILIES]
)
def test_greedy_generations_are_identical(family: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    peer = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # make the tokens vary, and let biases and norms matter
        for name, parameter in peer.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif "embed" not in name:  # a tied embedding would repeat its input forever
                parameter.mul_(8)
    peer.save_pretrained(tmp_path)
    prompts = [torch.randint(0, 131, (length,)).tolist() for length in (1, 5, 24, 40)]
    engine = Engine(load_model(tmp_path), rows=4, max_length=96, block_size=8, prefill_tokens=32, filters=False)
    ours = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32))
    assert len({token for output in ours for token in output.completions[0].tokens}) > 8  # not stuck in a loop
    for prompt, output in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
        assert output.completions[0].tokens == theirs[0, len(prompt) :].tolist()
