"""Adapters of PEFT and ours compute the same logits, whoever wrote them.

Logits are compared in float32, with the bound of the tests of base models: transformers normalizes in float32 whatever
the dtype. Adapters are random and large, so that leaving one out would change the logits by far more. Stored tensors
are compared bit for bit, and merged weights in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollgraph.model import Decoder, load_model, save_model
from rollgraph.model.lora import AdapterSpec, attach
from rollgraph.model.weights.adapter_files import ADAPTER_WEIGHTS, load_adapter, read_adapter, read_base, save_adapter
from tests.parity.test_huggingface import max_difference, ours, read, sequences, theirs, write

peft = pytest.importorskip("peft")

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOME = r".*\.(self_attn\.(q|v)|mlp\.down)_proj"


def adapted(folder: Path, spec: AdapterSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our model of a folder with random adapters."""
    model = load_model(folder, dtype=dtype)
    attach(model, spec, seed=0)
    assert model.adapters is not None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, a, b in model.adapters.projections():
            a.copy_(torch.randn(a.shape, generator=generator) * 0.2)
            b.copy_(torch.randn(b.shape, generator=generator) * 0.2)
    model.adapters.refresh()
    return model


def wrapped(peer: Any, **settings: Any) -> Any:
    """A model of transformers with PEFT's adapters, which are random rather than zero."""
    settings = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM", **settings}
    model = peft.get_peft_model(peer, peft.LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize(
    ("name", "settings", "targets"),
    [
        ("llama, biases", {"target_modules": "all-linear"}, ALL),
        ("qwen2, tied", {"target_modules": ["q_proj", "mlp.down_proj", "c_attn"]}, ("q_proj", "down_proj")),
        ("qwen3", {"target_modules": SOME, "use_rslora": True}, ("q_proj", "v_proj", "down_proj")),
    ],
    ids=["all-linear", "a list", "an expression"],
)
def test_adapters_of_peft_have_the_same_logits_here(
    name: str, settings: dict[str, Any], targets: tuple[str, ...], tmp_path: Path
) -> None:
    peer, batch = write(name, tmp_path / "base"), sequences(20, 9, 1)
    plain = theirs(peer, batch)
    model = wrapped(peer, **settings)
    model.save_pretrained(tmp_path / "adapter")
    expected = theirs(model, batch)
    assert max_difference(expected, plain) > 0.1

    decoder = load_model(tmp_path / "base")
    stored = read_adapter(tmp_path / "adapter", decoder.architecture)
    assert stored.spec == AdapterSpec(rank=4, alpha=8, targets=targets, rslora=bool(settings.get("use_rslora")))
    attach(decoder, stored.spec, seed=0)
    load_adapter(decoder, tmp_path / "adapter")
    assert max_difference(ours(decoder, batch), expected) < 1e-5
    assert decoder.adapters is not None
    with decoder.adapters.off():
        assert max_difference(ours(decoder, batch), plain) < 1e-5


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("qwen2", AdapterSpec(rank=4, alpha=6.5, targets=ALL)),
        ("llama", AdapterSpec(rank=2, alpha=4, targets=("k_proj", "up_proj", "o_proj"), rslora=True)),
    ],
    ids=["all", "some, rslora"],
)
def test_our_adapters_have_the_same_logits_in_peft(name: str, spec: AdapterSpec, tmp_path: Path) -> None:
    peer, batch = write(name, tmp_path / "base"), sequences(20, 9, 1)
    plain = theirs(peer, batch)
    decoder = adapted(tmp_path / "base", spec)
    save_adapter(decoder, tmp_path / "adapter", base=str(tmp_path / "base"))
    assert read_base(tmp_path / "adapter") == (str(tmp_path / "base"), None)
    expected = ours(decoder, batch)
    assert max_difference(expected, plain) > 0.1

    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="eager").eval()
    assert max_difference(theirs(model, batch), expected) < 1e-5
    model.save_pretrained(tmp_path / "again")
    written, again = (load_file(tmp_path / folder / ADAPTER_WEIGHTS) for folder in ("adapter", "again"))
    assert written.keys() == again.keys()
    assert all(torch.equal(written[key], again[key]) for key in written)

    save_model(decoder, tmp_path / "merged", merge=True)
    assert max_difference(theirs(read(tmp_path / "merged"), batch), expected) < 1e-5


def test_merged_weights_equal_those_of_peft(tmp_path: Path) -> None:
    """In float64, only the order of additions can make a difference."""
    write("qwen3", tmp_path / "base").double().save_pretrained(tmp_path / "wide")
    decoder = adapted(tmp_path / "wide", AdapterSpec(rank=4, alpha=8, targets=ALL), torch.float64)
    save_adapter(decoder, tmp_path / "adapter", base=str(tmp_path / "wide"))
    save_model(decoder, tmp_path / "merged", merge=True)
    base = read(tmp_path / "wide", dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = model.merge_and_unload().state_dict()
    weights: dict[str, Tensor] = load_file(tmp_path / "merged" / "model.safetensors")
    assert weights.keys() == merged.keys()
    before = load_file(tmp_path / "wide" / "model.safetensors")
    for key, tensor in weights.items():
        assert max_difference(tensor, merged[key]) < 1e-13
        assert torch.equal(tensor, before[key]) == (not key.endswith("_proj.weight"))
