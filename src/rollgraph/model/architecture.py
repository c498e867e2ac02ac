"""The architecture record: the sizes and options of one model of the family, and Hugging Face's names of its tensors.

Owns how a Hugging Face `config.json` is read and written. A setting that changes what the model computes, and that the
decoder does not support, is an error; it is never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rollgraph.model.field_kinds import (
    FLAG,
    NATURAL,
    NOT_NEGATIVE,
    TEXT,
    TEXTS,
    ArchitectureError,
    positive_int,
    take_field,
)
from rollgraph.model.rope import Rope, read_rope

# -- the record ------------------------------------------------------------------------------------

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_WINDOWED = ("mistral", "qwen2", "qwen3")
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {  # what transformers assumes for absent fields
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
_FULL = "full_attention"
_SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Architecture:
    """The sizes and options of a decoder.

    >>> Architecture("qwen2", vocabulary=512, hidden=64, mlp=128, layers=2, heads=4, kv_heads=2, head_dim=16)
    """

    family: str
    vocabulary: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    max_length: int = 4096
    tied: bool = False  # the embedding is also the output head
    attention_bias: bool = False  # for queries, keys and values (Qwen2 always has it) and, in Llama, the output
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; None, or an empty tuple: full attention
    extras: Mapping[str, Any] = field(default_factory=dict, compare=False)  # other fields of config.json, for saving

    def __post_init__(self) -> None:
        if self.family not in _CLASSES:
            raise ArchitectureError(f"unknown family {self.family!r}; expected one of {', '.join(_CLASSES)}")
        if self.heads % self.kv_heads:
            raise ArchitectureError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 2 or self.head_dim < 2:
            raise ArchitectureError(f"rotary positions need an even head_dim, not {self.head_dim}")
        if self.windows and len(self.windows) != self.layers:
            raise ArchitectureError(f"{len(self.windows)} windows for {self.layers} layers")

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.family == "qwen2"

    @property
    def output_bias(self) -> bool:
        return self.attention_bias and self.family in ("llama", "qwen3")

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def why_indivisible(self, ranks: int) -> str | None:
        """Why the layers cannot be sharded over this many tensor parallel ranks; None if they can."""
        if self.heads % ranks or self.mlp % ranks:
            return f"{ranks} must divide the {self.heads} heads and the MLP's width of {self.mlp}"
        if self.kv_heads % ranks and ranks % self.kv_heads:
            return f"{ranks} must divide the {self.kv_heads} key/value heads, or be a multiple of them"
        return None

    def sharded(self, ranks: int) -> Architecture:
        """The sizes of one tensor parallel rank. With more ranks than key/value heads, some have the same ones."""
        if problem := self.why_indivisible(ranks):
            raise ArchitectureError(f"the layers cannot be sharded: {problem}")
        kv_heads = max(1, self.kv_heads // ranks)
        return replace(self, heads=self.heads // ranks, kv_heads=kv_heads, mlp=self.mlp // ranks)

    def frequencies(self) -> tuple[Tensor, float]:
        return self.rope.frequencies(self.head_dim, self.max_length)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read a Hugging Face `config.json`."""
        if not isinstance(config, Mapping):
            raise ArchitectureError("config.json does not hold a JSON object")
        unread = dict(config)
        family = take_field(unread, "model_type", TEXT, None)
        classes = take_field(unread, "architectures", TEXTS, None)
        if family not in _CLASSES:
            name = classes[0] if classes else family
            raise ArchitectureError(f"unknown architecture {name!r:.80}; supported: {', '.join(_CLASSES.values())}")
        unread = {**_DEFAULTS[family], **unread}
        _refuse_unsupported(unread)
        heads = take_field(unread, "num_attention_heads", positive_int("heads"))
        layers = take_field(unread, "num_hidden_layers", positive_int("layers"))
        hidden = take_field(unread, "hidden_size", positive_int("hidden"))
        attention_bias = family in ("llama", "qwen3") and take_field(unread, "attention_bias", FLAG, False)
        mlp_bias = family == "llama" and take_field(unread, "mlp_bias", FLAG, False)
        return cls(
            family=family,
            vocabulary=take_field(unread, "vocab_size", positive_int("vocabulary")),
            hidden=hidden,
            mlp=take_field(unread, "intermediate_size", positive_int("mlp")),
            layers=layers,
            heads=heads,
            kv_heads=take_field(unread, "num_key_value_heads", positive_int("heads"), None) or heads,
            head_dim=take_field(unread, "head_dim", positive_int("head_dim"), None) or hidden // heads,
            norm_eps=take_field(unread, "rms_norm_eps", NOT_NEGATIVE, 1e-6),
            rope=read_rope(unread),
            max_length=take_field(unread, "max_position_embeddings", positive_int("length")),
            tied=take_field(unread, "tie_word_embeddings", FLAG, False),
            attention_bias=attention_bias,
            mlp_bias=mlp_bias,
            windows=_read_windows(family, layers, unread),
            extras=unread,
        )

    def to_config(self) -> dict[str, Any]:
        """A Hugging Face `config.json`, with the fields of the original that the decoder does not use."""
        rope = {"rope_type": self.rope.kind, **self.rope.options}
        config: dict[str, Any] = {
            **self.extras,
            "architectures": [_CLASSES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_length,
            "tie_word_embeddings": self.tied,
            "rope_parameters": {"rope_theta": self.rope.theta, **rope},
            "rope_theta": self.rope.theta,  # this and rope_scaling are for readers older than rope_parameters
        }
        if self.rope.kind != "default":
            config["rope_scaling"] = rope
        if self.family in ("llama", "qwen3"):
            config["attention_bias"] = self.attention_bias
        if self.family == "llama":
            config["mlp_bias"] = self.mlp_bias
        return config | self._window_config()

    def _window_config(self) -> dict[str, Any]:
        sizes = {window for window in self.windows if window is not None}
        if len(sizes) > 1:
            raise ArchitectureError(f"config.json can hold only one window size, not {sorted(sizes)}")
        if self.family not in _WINDOWED:
            if sizes:
                raise ArchitectureError(f"the config.json of a {self.family} model cannot describe windows")
            return {}
        config: dict[str, Any] = {"sliding_window": next(iter(sizes), None)}
        if self.family != "mistral":
            kinds = [_FULL if self.window(layer) is None else _SLIDING for layer in range(self.layers)]
            config["use_sliding_window"] = bool(sizes)
            config["layer_types"] = kinds
            # For readers that do not know layer_types: the number of layers before the first one with a window.
            config["max_window_layers"] = kinds.index(_SLIDING) if sizes else self.layers
        return config


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Refuse settings that the decoder does not support and that change the result."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ArchitectureError(f"hidden_act={config['hidden_act']!r:.80} is not supported; only silu is")
    if config.get("quantization_config"):
        raise ArchitectureError("the weights are quantized (quantization_config); load an unquantized model")
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        factor = config["partial_rotary_factor"]
        raise ArchitectureError(
            f"partial_rotary_factor={factor!r:.80} is not supported: the decoder rotates all dimensions"
        )
    if config.get("attention_dropout"):
        dropout = config["attention_dropout"]
        raise ArchitectureError(f"attention_dropout={dropout!r:.80} is not supported: the decoder has no dropout")


def _read_windows(family: str, layers: int, unread: dict[str, Any]) -> tuple[int | None, ...]:
    """Remove the fields about sliding windows from a config.json; return the window of each layer, or ()."""
    names = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
    fields = {name: unread.pop(name) for name in names if name in unread}
    if family not in _WINDOWED:
        return ()
    if family != "mistral" and not take_field(fields, "use_sliding_window", FLAG, False):
        return ()
    size = take_field(fields, "sliding_window", positive_int("length"), None)
    first = take_field(fields, "max_window_layers", NATURAL, 0)
    kinds = take_field(fields, "layer_types", TEXTS, None)
    if size is None:
        return ()
    if kinds is None:
        kinds = [_FULL if layer < first else _SLIDING for layer in range(layers)]
    if set(kinds) - {_FULL, _SLIDING}:
        raise ArchitectureError(f"layer_types: only {_FULL} and {_SLIDING} are supported, not {kinds!r:.80}")
    if family == "mistral" and _FULL in kinds:
        raise ArchitectureError("layer_types: a Mistral model with a sliding_window has it in all layers")
    if _SLIDING not in kinds:
        return ()
    return tuple(size if kind == _SLIDING else None for kind in kinds)


# -- Hugging Face's names of tensors ---------------------------------------------------------------


def hf_tensor_map(architecture: Architecture) -> dict[str, tuple[str, slice]]:
    """Hugging Face's tensors by name: the decoder's parameter that holds each, and its rows there.

    For example, "model.layers.0.mlp.up_proj.weight" maps to ("layers.0.mlp.gate_up_proj.weight", slice(mlp, 2 * mlp)).
    """
    a = architecture
    q = a.heads * a.head_dim
    kv = a.kv_heads * a.head_dim
    all_rows = slice(None)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if a.qk_norm:
        norms += ["self_attn.q_norm", "self_attn.k_norm"]
    projections = (
        ("self_attn.q_proj", "self_attn.qkv_proj", slice(q), a.qkv_bias),
        ("self_attn.k_proj", "self_attn.qkv_proj", slice(q, q + kv), a.qkv_bias),
        ("self_attn.v_proj", "self_attn.qkv_proj", slice(q + kv, q + 2 * kv), a.qkv_bias),
        ("self_attn.o_proj", "self_attn.o_proj", all_rows, a.output_bias),
        ("mlp.gate_proj", "mlp.gate_up_proj", slice(a.mlp), a.mlp_bias),
        ("mlp.up_proj", "mlp.gate_up_proj", slice(a.mlp, 2 * a.mlp), a.mlp_bias),
        ("mlp.down_proj", "mlp.down_proj", all_rows, a.mlp_bias),
    )
    tensor_map = {"model.embed_tokens.weight": ("embed_tokens.weight", all_rows)}
    for i in range(a.layers):
        for norm in norms:
            tensor_map[f"model.layers.{i}.{norm}.weight"] = (f"layers.{i}.{norm}", all_rows)
        for theirs, ours, rows, has_bias in projections:
            tensor_map[f"model.layers.{i}.{theirs}.weight"] = (f"layers.{i}.{ours}.weight", rows)
            if has_bias:
                tensor_map[f"model.layers.{i}.{theirs}.bias"] = (f"layers.{i}.{ours}.bias", rows)
    tensor_map["model.norm.weight"] = ("norm", all_rows)
    if not a.tied:
        tensor_map["lm_head.weight"] = ("lm_head.weight", all_rows)
    return tensor_map
