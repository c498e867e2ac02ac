"""The decoder's logits equal those of Hugging Face, for model folders written by transformers and by us.

Biases, norms and window sizes are chosen so that leaving one out would change the logits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.model import Architecture, Decoder, Rope, load_model, load_weights, save_model

transformers = pytest.importorskip("transformers")

WINDOW = 5
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **options}}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, all heads": ("Llama", {"num_key_value_heads": 4}),
    "llama, one key head": ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, bias of attention": ("Llama", {"attention_bias": True}),
    "llama, bias of the mlp": ("Llama", {"mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 24}),
    "llama, linear": ("Llama", rope("linear", factor=3.0)),
    "llama, llama3": ("Llama", rope("llama3", **LLAMA3)),
    "llama, yarn": ("Llama", rope("yarn", **YARN)),
    "llama, yarn with options": (
        "Llama",
        rope("yarn", **YARN, beta_fast=8.0, beta_slow=2.0, mscale=1.0, mscale_all_dim=0.5, truncate=False),
    ),
    "llama, yarn by lengths": ("Llama", rope("yarn", **{**YARN, "factor": None})),
    "llama, yarn with a factor": ("Llama", rope("yarn", **YARN, attention_factor=1.3)),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2, window unused": ("Qwen2", {"use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3, wide heads, biases": ("Qwen3", {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, chosen windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral, window": ("Mistral", {"sliding_window": WINDOW}),
    "mistral, a switch it does not have": ("Mistral", {"sliding_window": WINDOW, "use_sliding_window": False}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "mistral, wide heads": ("Mistral", {"sliding_window": WINDOW + 1, "head_dim": 16}),
}


def write(name: str, folder: Path, **saving: Any) -> Any:
    """Write a folder with transformers and return its model."""
    family, options = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **options})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            offset = 1.0 if "norm" in key else 0.0
            parameter.copy_(offset + torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
    model.save_pretrained(folder, **saving)
    return model


def read(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


def theirs(model: Any, sequences: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(ids[None]).logits[0] for ids in sequences])


def ours(model: Decoder, sequences: Sequence[Tensor], empty: int = 0) -> Tensor:
    """Return the logits of all sequences packed into one row, with `empty` additional boundaries."""
    lengths = torch.tensor([0, *(len(ids) for ids in sequences)] + [0] * empty)
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    with torch.no_grad():
        cu_seqlens = lengths.cumsum(0).int()
        return model.logits(model(torch.cat(list(sequences)), positions, cu_seqlens, int(lengths.max())))


def sequences(*lengths: int) -> list[Tensor]:
    return [torch.randint(SMALL["vocab_size"], (length,)) for length in lengths]


def max_difference(left: Tensor, right: Tensor) -> float:
    assert left.shape == right.shape
    return float((left - right).abs().max())


def state(model: Decoder) -> dict[str, Tensor]:
    return {**model.state_dict(), "frequencies": model.frequencies}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# `test_older_configs_mean_the_same` reads and writes the other variants of llama, too.
QUICK = {
    "llama", "llama, tied", "llama, one key head", "llama, yarn with options", "qwen2", "qwen2, windows",
    "qwen3, wide heads, biases", "qwen3, chosen windows", "mistral, window", "mistral, no window",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_logits_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    """Compare one sequence, and several with padding; then read back our folder, with one file and with several."""
    peer = write(name, tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    batch = sequences(3 * WINDOW, 1, 40, WINDOW, WINDOW + 1)
    padding = torch.zeros(6, dtype=torch.long)
    expected = theirs(peer, [*batch, padding])
    assert expected.std() > 0.1  # the logits vary
    assert max_difference(ours(model, [*batch, padding], empty=2), expected) < 1e-5
    assert max_difference(ours(model, batch[2:3]), theirs(peer, batch[2:3])) < 1e-5

    for folder, shard_bytes in ((tmp_path / "whole", 10**9), (tmp_path / "sharded", 4000)):
        save_model(model, folder, shard_bytes=shard_bytes)
        assert (len(list(folder.glob("*.safetensors"))) == 1) == (shard_bytes == 10**9)
        again = load_model(folder)
        assert again.architecture == model.architecture
        assert same(state(again), state(model))
        assert max_difference(theirs(read(folder), [*batch, padding]), expected) < 1e-5


def test_sharded_folders_of_transformers_are_read(tmp_path: Path) -> None:
    peer = write("qwen2", tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    batch = sequences(20, 9)
    assert max_difference(ours(load_model(tmp_path), batch), theirs(peer, batch)) < 1e-5


def test_a_model_takes_other_weights_in_place(tmp_path: Path) -> None:
    write("qwen3", tmp_path / "one")
    peer = write("qwen3", tmp_path / "two")
    model, batch = load_model(tmp_path / "one"), sequences(12)
    assert max_difference(ours(model, batch), theirs(peer, batch)) > 0.1
    load_weights(model, tmp_path / "two")
    assert max_difference(ours(model, batch), theirs(peer, batch)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_and_written_unchanged(dtype: torch.dtype, tmp_path: Path) -> None:
    peer = write("llama, biases", tmp_path / "float")
    peer.to(dtype).save_pretrained(tmp_path / "half")
    model = load_model(tmp_path / "half")
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    assert model.frequencies.dtype == torch.float32
    save_model(model, tmp_path / "ours")
    again = read(tmp_path / "ours")
    assert again.dtype == dtype
    assert same(again.state_dict(), peer.state_dict())
    batch = sequences(20)
    wide = load_model(tmp_path / "half", dtype=torch.float32)
    assert max_difference(ours(wide, batch), theirs(read(tmp_path / "half", dtype=torch.float32), batch)) < 1e-5


def test_other_config_fields_are_kept(tmp_path: Path) -> None:
    write("qwen2, windows", tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    config |= {"eos_token_id": [7, 8], "torch_dtype": "float16"}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    save_model(load_model(tmp_path / "theirs", dtype=torch.bfloat16), tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    lost = {key: value for key, value in config.items() if written.get(key) != value}
    assert lost == {"dtype": "float32", "torch_dtype": "float16"}
    assert written["dtype"] == "bfloat16"


def change(path: Path, *without: str, **more: Any) -> dict[str, Any]:
    """Remove settings from a config.json and add others; return the removed ones."""
    config = json.loads(path.read_text())
    removed = {key: config.pop(key) for key in without}
    path.write_text(json.dumps({**config, **more}))
    return removed


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("llama, ")])
def test_older_configs_mean_the_same(name: str, tmp_path: Path) -> None:
    """Files older than `rope_parameters` have `rope_theta`, and `rope_scaling` with a `type`."""
    peer, batch = write(name, tmp_path / "theirs"), sequences(30)
    config = tmp_path / "theirs" / "config.json"
    options = change(config, "rope_parameters")["rope_parameters"]
    theta, kind = options.pop("rope_theta"), options.pop("rope_type")
    change(config, rope_theta=theta, rope_scaling={"type": kind, **options} if options else None)
    model = load_model(tmp_path / "theirs")
    assert max_difference(ours(model, batch), theirs(peer, batch)) < 1e-5
    save_model(model, tmp_path / "ours")
    change(tmp_path / "ours" / "config.json", "rope_parameters")  # as for a transformers too old to know it
    assert max_difference(theirs(read(tmp_path / "ours"), batch), theirs(peer, batch)) < 1e-5


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 900.0}], ids=["no theta", "a theta"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize(("kind", "options"), [("linear", {"factor": 3.0}), ("llama3", LLAMA3), ("yarn", YARN)])
def test_rope_scaling_beside_rope_parameters_means_the_same(
    kind: str, options: dict[str, Any], spelling: str, theta: dict[str, float], tmp_path: Path
) -> None:
    """A user may add the scaling that an older README asks for to a new file."""
    peer, batch = write("llama", tmp_path), sequences(40)
    change(tmp_path / "config.json", rope_scaling={spelling: kind, **options}, **theta)
    expected = theirs(read(tmp_path), batch)
    assert max_difference(theirs(peer, batch), expected) > 1e-3
    assert max_difference(ours(load_model(tmp_path), batch), expected) < 1e-5


def test_yarn_frequencies_equal_those_of_transformers() -> None:
    """They agree bit for bit, even if the range to blend is empty or ends before it begins."""
    choose = random.Random(0)
    inverted = empty = 0
    for _ in range(500):
        head_dim = choose.choice([2, 8, 24, 64, 128])
        options = {
            "factor": choose.choice([0.5, 1.0, choose.uniform(1, 64)]),
            "original_max_position_embeddings": int(2 ** choose.uniform(0, 20)),
            "beta_fast": choose.choice([0, 1.0, choose.uniform(0.01, 100)]),
            "beta_slow": choose.choice([0, 32.0, choose.uniform(0.01, 100)]),
            "truncate": choose.random() < 0.5,
        }
        theta = choose.choice([1e4, choose.uniform(1.5, 1e7)])
        config = transformers.LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "yarn", "rope_theta": theta, **options},
        )
        expected, scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
        rope = Rope(theta, "yarn", options)
        frequencies, attention_factor = rope.frequencies(head_dim, 4096)
        assert torch.equal(frequencies, expected), (theta, head_dim, options)
        assert attention_factor == scale
        low, high = rope._yarn_range(options["original_max_position_embeddings"], head_dim)
        inverted += low > high
        empty += high - low == pytest.approx(0.001)
    assert inverted > 50
    assert empty > 5


@pytest.mark.parametrize("name", ["llama, llama3", "llama, yarn"])
def test_an_original_length_outside_the_rope_options_takes_precedence(name: str, tmp_path: Path) -> None:
    peer, batch = write(name, tmp_path), sequences(30)
    change(tmp_path / "config.json", original_max_position_embeddings=16)
    expected = theirs(read(tmp_path), batch)
    assert max_difference(theirs(peer, batch), expected) > 1e-3
    assert max_difference(ours(load_model(tmp_path), batch), expected) < 1e-5


@pytest.mark.parametrize("options", [{}, {"use_sliding_window": True}])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_defaults_equal_those_of_transformers(family: str, options: dict[str, Any]) -> None:
    fields = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 40, **options}
    fields |= {"num_attention_heads": 32, "num_hidden_layers": 30}
    full = getattr(transformers, f"{family}Config")(**fields).to_dict()
    assert Architecture.from_config({"model_type": family.lower(), **fields}) == Architecture.from_config(full)
