"""The architecture record: every setting of a config.json is read, written back, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rollgraph.model import Architecture, ArchitectureError, Rope

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = Architecture("llama", 97, hidden=64, mlp=80, layers=3, heads=4, kv_heads=2, head_dim=16, max_length=2048)
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def read(**changes: Any) -> Architecture:
    return Architecture.from_config({**CONFIG, **changes})


def test_reads_every_field() -> None:
    assert read() == LLAMA
    assert read(num_key_value_heads=None).kv_heads == 4
    assert read(head_dim=24).head_dim == 24
    assert read(rms_norm_eps=1e-5, max_position_embeddings=64) == replace(LLAMA, norm_eps=1e-5, max_length=64)
    assert read(tie_word_embeddings=True).tied
    assert read(rope_theta=5e5).rope == Rope(5e5)
    assert read(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rope_theta=7.0).rope == Rope(5e5)
    linear = Rope(1e4, "linear", {"factor": 2.0})
    for kind in ({"type": "linear"}, {"rope_type": "linear"}, {"type": "ignored", "rope_type": "linear"}):
        assert read(rope_scaling={**kind, "factor": 2.0}).rope == linear


def test_rope_scaling_replaces_rope_parameters() -> None:
    """This includes their theta: the one at the top level counts then."""
    newer = {"rope_type": "default", "rope_theta": 5e5}
    older = {"type": "linear", "factor": 2.0}
    assert read(rope_parameters=newer, rope_scaling=older).rope == Rope(1e4, "linear", {"factor": 2.0})
    assert read(rope_parameters=newer, rope_scaling=older, rope_theta=7.0).rope.theta == 7.0
    assert read(rope_parameters=newer, rope_scaling={**older, "rope_theta": 9.0}, rope_theta=7.0).rope.theta == 9.0
    assert read(rope_parameters=newer, rope_scaling=None).rope == Rope(5e5)
    assert read(rope_parameters=newer, rope_scaling={}).rope == Rope(5e5)
    with pytest.raises(ArchitectureError, match="rope_type='su'"):
        read(rope_parameters=newer, rope_scaling={"type": "su", "factor": 2.0})


@pytest.mark.parametrize(
    ("family", "settings", "biases"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen2", {"attention_bias": False, "mlp_bias": True}, (True, False, False)),
        ("qwen3", {}, (False, False, False)),
        ("qwen3", {"attention_bias": True, "mlp_bias": True}, (True, True, False)),
    ],
)
def test_which_projections_have_biases(family: str, settings: dict[str, Any], biases: tuple[bool, ...]) -> None:
    """Biases of queries, keys and values, of the attention output, and of the mlp differ between families."""
    architecture = read(model_type=family, **settings)
    assert (architecture.qkv_bias, architecture.output_bias, architecture.mlp_bias) == biases
    assert architecture.qk_norm == (family == "qwen3")


MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("llama", {}, ()),
        ("mistral", {}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {"use_sliding_window": False}, (8, 8, 8)),
        ("llama", {"sliding_window": 0}, ()),
        ("qwen2", {}, ()),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, (None, None, 8)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3}, ()),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, ()),
        ("qwen3", {"use_sliding_window": True, "layer_types": MIXED}, (8, None, 8)),
        ("qwen3", {"use_sliding_window": False, "layer_types": MIXED}, ()),
    ],
)
def test_windows_of_each_family(family: str, settings: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    architecture = read(**{"model_type": family, "sliding_window": 8, **settings})
    assert architecture.windows == windows
    assert [architecture.window(layer) for layer in range(3)] == list(windows or (None, None, None))


EXAMPLES = {
    "llama": replace(LLAMA, attention_bias=True, mlp_bias=True, tied=True),
    "llama3": replace(LLAMA, rope=Rope(5e5, "llama3", LLAMA3)),
    "yarn": replace(LLAMA, rope=Rope(1e6, "yarn", YARN), family="qwen3", attention_bias=True, head_dim=24),
    "linear": replace(LLAMA, rope=Rope(1e4, "linear", {"factor": 2.0}), norm_eps=1e-5, max_length=77),
    "mistral": replace(LLAMA, family="mistral", windows=(8, 8, 8)),
    "mistral, no windows": replace(LLAMA, family="mistral", kv_heads=4),
    "qwen2": replace(LLAMA, family="qwen2"),
    "qwen3": replace(LLAMA, family="qwen3", windows=(None, 8, None)),
}


@pytest.mark.parametrize("architecture", EXAMPLES.values(), ids=EXAMPLES)
def test_a_written_config_reads_back_unchanged(architecture: Architecture) -> None:
    config = architecture.to_config()
    reread = Architecture.from_config(config)
    assert reread == architecture
    assert reread.to_config() == config


def test_unknown_fields_are_kept() -> None:
    more = {"bos_token_id": 1, "eos_token_id": [2, 3], "transformers_version": "4.44.0", "attention_dropout": 0.0}
    written = read(**more, rope_theta=7.0).to_config()
    assert more.items() <= written.items()
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert read(**more) == read()  # and they are not compared


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt2"}, "unknown architecture 'gpt2'; supported: LlamaForCausalLM, Mistral"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'"),
        ({"model_type": None}, "unknown architecture None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "config.json has no 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "config.json has no 'low_freq_factor'"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 key/value heads"),
        ({"head_dim": 15}, "even head_dim, not 15"),
        (
            {
                "model_type": "mistral",
                "sliding_window": 8,
                "layer_types": ["full_attention", *["sliding_attention"] * 2],
            },
            "a Mistral model with a sliding_window has it in all layers",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["linear_attention"] * 3},
            "layer_types: only full_attention and sliding_attention are supported",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
            "2 windows for 3 layers",
        ),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ArchitectureError, match=match):
        read(**changes)


WINDOWED = {"model_type": "qwen3", "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": ["llama"]}, r"model_type=\['llama'\]: must be a string"),
        ({"model_type": "gpt2", "architectures": 5}, "architectures=5: must be a list of strings"),
        ({"num_attention_heads": "4"}, "num_attention_heads='4': must be a positive integer"),
        ({"hidden_size": None}, "hidden_size=None: must be a positive integer"),
        ({"hidden_size": 64.0}, r"hidden_size=64\.0: must be a positive integer"),
        ({"vocab_size": True}, "vocab_size=True: must be a positive integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1: must be"),
        ({"intermediate_size": []}, r"intermediate_size=\[\]: must be"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: must be"),
        ({"head_dim": "16"}, "head_dim='16': must be"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0: must be"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None: must be a number of at least 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': must be true or false"),
        ({"attention_bias": None}, "attention_bias=None: must be true or false"),
        ({"mlp_bias": 0}, "mlp_bias=0: must be true or false"),
        ({**WINDOWED, "sliding_window": "8"}, "sliding_window='8': must be"),
        ({**WINDOWED, "max_window_layers": None}, "max_window_layers=None: must be an integer"),
        ({**WINDOWED, "layer_types": [None, 1, {}]}, "layer_types=.*: must be a list of strings"),
        ({"model_type": "qwen2", "use_sliding_window": "no"}, "use_sliding_window='no': must be true or false"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4': must be a number above 1"),
        ({"rope_parameters": {"rope_theta": -1.0}}, r"rope_theta=-1\.0: must be a number above 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn': must be an object"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters=.*: must be .* for all layers",
        ),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_type=\['yarn'\]"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "factor=None: must be a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor=0: must be a positive number or null"),
        ({"rope_scaling": {"type": "yarn"}}, "has no 'factor'"),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_fast": "32"}}, "beta_fast='32': must be a number"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": 1}}, "truncate=1: must be true or false"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": None}}, "low_freq_factor=None: must be"),
        (
            {"rope_scaling": {"type": "yarn", **YARN}, "original_max_position_embeddings": "32"},
            "original_max_position_embeddings='32': must be a positive number",
        ),
    ],
)
def test_fields_of_the_wrong_type_are_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ArchitectureError, match=f"^config.json:? .*{match}" if "rope_type" not in match else match):
        read(**changes)


def test_a_config_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(ArchitectureError, match=r"config\.json does not hold a JSON object"):
        Architecture.from_config([])  # type: ignore[arg-type]


def test_fewer_dimensions_than_heads_are_refused() -> None:
    with pytest.raises(ArchitectureError, match="even head_dim, not 0"):
        read(hidden_size=2)


@pytest.mark.parametrize("key", [key for key in CONFIG if key not in ("model_type", "num_key_value_heads")])
def test_a_missing_required_field_is_named(key: str) -> None:
    with pytest.raises(ArchitectureError, match=f"config.json has no '{key}'"):
        Architecture.from_config({k: v for k, v in CONFIG.items() if k != key})


def test_windows_that_config_json_cannot_describe_are_refused() -> None:
    with pytest.raises(ArchitectureError, match=r"only one window size, not \[4, 8\]"):
        replace(LLAMA, family="qwen2", windows=(4, 8, None)).to_config()
    with pytest.raises(ArchitectureError, match=r"config\.json of a llama model cannot describe windows"):
        replace(LLAMA, windows=(4, 4, 4)).to_config()
    with pytest.raises(ArchitectureError, match="unknown family 'gpt2'"):
        replace(LLAMA, family="gpt2")


def test_rope_scaling_slows_frequencies() -> None:
    """The first pair turns once in 2π positions, whatever the base. Scaling slows pairs down, slow ones more."""
    plain, factor = LLAMA.frequencies()
    assert plain.dtype == torch.float32
    assert plain.shape == (8,)
    assert (plain[0], factor) == (1.0, 1.0)
    torch.testing.assert_close(plain[-1], torch.tensor(1e4 ** (-14 / 16)))
    halved, _ = Rope(1e4, "linear", {"factor": 2.0}).frequencies(16, 64)
    assert torch.equal(halved, plain / 2)
    by_lengths = Rope(1e4, "yarn", {**YARN, "factor": None}).frequencies(16, 128)
    assert torch.equal(by_lengths[0], Rope(1e4, "yarn", YARN).frequencies(16, 128)[0])
    for kind, options in (("llama3", LLAMA3), ("yarn", YARN)):
        scaled, factor = Rope(1e4, kind, options).frequencies(16, 64)
        slower = plain / scaled
        assert slower[0] == 1.0
        torch.testing.assert_close(slower[-1], torch.tensor(options["factor"]))
        assert bool((slower.diff() >= -1e-6).all())
        assert (factor == 1.0) == (kind == "llama3")
