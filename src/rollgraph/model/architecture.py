"""The architecture record: all that tells one model of the Llama and Qwen family from another.

Owns how a Hugging Face `config.json` is read and written. A setting that would change what the model
computes and that the decoder does not know is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor

from rollgraph.config.limits import LARGEST

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
_DEFAULTS: dict[str, dict[str, Any]] = {  # what transformers takes where config.json says nothing
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}

_Kind = tuple[str, Callable[[Any], bool]]  # of a field in config.json: in words, and as a test
_HUGE = 1e300  # JSON has integers that no float can hold


def _count(what: str) -> _Kind:
    most = LARGEST[what]
    return f"a positive integer up to {most}", lambda v: type(v) is int and 0 < v <= most


_TEXT: _Kind = ("a string", lambda v: isinstance(v, str))
_TEXTS: _Kind = ("a list of strings", lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v))
_FLAG: _Kind = ("true or false", lambda v: isinstance(v, bool))
_NATURAL: _Kind = ("an integer that is not negative", lambda v: type(v) is int and v >= 0)
_POSITIVE: _Kind = ("a positive number", lambda v: type(v) in (int, float) and 0 < v < _HUGE)
_POSITIVE_OR_NULL: _Kind = ("a positive number or null", lambda v: v is None or _POSITIVE[1](v))
_NOT_NEGATIVE: _Kind = ("a number that is not negative", lambda v: type(v) in (int, float) and 0 <= v < _HUGE)
_ABOVE_ONE: _Kind = ("a number above 1", lambda v: type(v) in (int, float) and 1 < v < _HUGE)
_OPTIONS: _Kind = (
    "an object with the options of all layers",
    lambda v: isinstance(v, Mapping) and not any(isinstance(item, Mapping) for item in v.values()),
)
_ROPE: dict[str, dict[str, tuple[Any, ...]]] = {  # options of each kind; one without a default must be there
    "default": {},
    "linear": {"factor": (_POSITIVE,)},
    "llama3": {
        "factor": (_POSITIVE,),
        "low_freq_factor": (_POSITIVE,),
        "high_freq_factor": (_POSITIVE,),
        "original_max_position_embeddings": (_POSITIVE, None),
    },
    "yarn": {
        "factor": (_POSITIVE_OR_NULL,),
        "original_max_position_embeddings": (_POSITIVE, None),
        "beta_fast": (_NOT_NEGATIVE, None),
        "beta_slow": (_NOT_NEGATIVE, None),
        "attention_factor": (_NOT_NEGATIVE, None),
        "mscale": (_NOT_NEGATIVE, None),
        "mscale_all_dim": (_NOT_NEGATIVE, None),
        "truncate": (_FLAG, True),
    },
}


class ArchitectureError(ValueError):
    """A config.json that the decoder cannot be built from."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base, and how frequencies are scaled for longer contexts."""

    theta: float = 10_000.0
    kind: str = "default"  # default, linear, llama3 or yarn
    options: Mapping[str, Any] = field(default_factory=dict)  # by Hugging Face's names

    def frequencies(self, head_dim: int, max_length: int) -> tuple[Tensor, float]:
        """The frequency of each pair of dimensions, [head_dim / 2], and the factor of cosine and sine."""
        plain = 1.0 / self._periods(head_dim)
        if self.kind == "default":
            return plain, 1.0
        original = float(self.options.get("original_max_position_embeddings") or max_length)
        factor = float(self.options["factor"] or max_length / original)
        if self.kind == "linear":
            return plain / factor, 1.0
        if self.kind == "llama3":
            return self._llama3(plain, factor, original), 1.0
        return self._yarn(factor, original, head_dim)

    def _periods(self, head_dim: int) -> Tensor:
        return self.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)

    def _llama3(self, plain: Tensor, factor: float, original: float) -> Tensor:
        """Slow frequencies are stretched, fast ones kept, those between are blended."""
        low, high = float(self.options["low_freq_factor"]), float(self.options["high_freq_factor"])
        wavelength = 2 * pi / plain
        kept = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * plain / factor + kept * plain

    def _yarn(self, factor: float, original: float, head_dim: int) -> tuple[Tensor, float]:
        """Every operation in transformers' order, so that frequencies have its bits."""
        low, high = self._yarn_range(original, head_dim)
        ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
        kept = 1 - ramp
        periods = self._periods(head_dim)
        frequencies = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
        scale = self.options.get("attention_factor")
        if scale is None:
            scale = _yarn_scale(factor, self.options.get("mscale"), self.options.get("mscale_all_dim"))
        return frequencies, float(scale)

    def _yarn_range(self, original: float, head_dim: int) -> tuple[float, float]:
        """Where blending begins and ends. The end can lie before the beginning, where the original length is short or
        `beta_slow` is the larger one: then the slow frequencies are kept, and the fast ones are stretched."""

        def dimension(rotations: float) -> float:
            return head_dim * log(original / (rotations * 2 * pi)) / (2 * log(self.theta))

        low = dimension(float(self.options.get("beta_fast") or 32))
        high = dimension(float(self.options.get("beta_slow") or 1))
        if self.options.get("truncate", True):
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return (low, high) if low != high else (low, high + 0.001)


def _yarn_scale(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


@dataclass(frozen=True)
class Architecture:
    """What a decoder is made of.

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
    tied: bool = False
    attention_bias: bool = False  # of queries, keys and values (Qwen2 always has it) and, in Llama, of the output
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()  # for each layer, how far back it sees; empty: everything
    extras: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the rest of config.json, kept for saving

    def __post_init__(self) -> None:
        if self.family not in _CLASSES:
            raise ArchitectureError(f"unknown family {self.family!r}: expected one of {', '.join(_CLASSES)}")
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

    def frequencies(self) -> tuple[Tensor, float]:
        return self.rope.frequencies(self.head_dim, self.max_length)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read Hugging Face's `config.json`."""
        if not isinstance(config, Mapping):
            raise ArchitectureError("config.json holds no JSON object")
        rest = dict(config)
        family, named = _take(rest, "model_type", _TEXT, None), _take(rest, "architectures", _TEXTS, None)
        if family not in _CLASSES:
            name = named[0] if named else family
            raise ArchitectureError(f"unknown architecture {name!r:.80}: known are {', '.join(_CLASSES.values())}")
        rest = {**_DEFAULTS[family], **rest}
        _refuse_unknown(rest)
        try:
            heads = _take(rest, "num_attention_heads", _count("heads"))
            layers = _take(rest, "num_hidden_layers", _count("layers"))
            hidden = _take(rest, "hidden_size", _count("hidden"))
            return cls(
                family=family,
                vocabulary=_take(rest, "vocab_size", _count("vocabulary")),
                hidden=hidden,
                mlp=_take(rest, "intermediate_size", _count("mlp")),
                layers=layers,
                heads=heads,
                kv_heads=_take(rest, "num_key_value_heads", _count("heads"), None) or heads,
                head_dim=_take(rest, "head_dim", _count("head_dim"), None) or hidden // heads,
                norm_eps=_take(rest, "rms_norm_eps", _NOT_NEGATIVE, 1e-6),
                rope=_read_rope(rest),
                max_length=_take(rest, "max_position_embeddings", _count("length")),
                tied=_take(rest, "tie_word_embeddings", _FLAG, False),
                attention_bias=_take(rest, "attention_bias", _FLAG, False) if family in ("llama", "qwen3") else False,
                mlp_bias=_take(rest, "mlp_bias", _FLAG, False) if family == "llama" else False,
                windows=_read_windows(family, layers, rest),
                extras=rest,
            )
        except KeyError as error:
            raise ArchitectureError(f"config.json has no {error.args[0]!r}") from None

    def to_config(self) -> dict[str, Any]:
        """Hugging Face's `config.json`, with whatever else was in the one that was read."""
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
            "rope_theta": self.rope.theta,  # here, and rope_scaling: for readers older than rope_parameters
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
            raise ArchitectureError(f"config.json holds one window size, not {sorted(sizes)}")
        if self.family not in _WINDOWED:
            if sizes:
                raise ArchitectureError(f"a config.json of {self.family} cannot say that there are windows")
            return {}
        config: dict[str, Any] = {"sliding_window": next(iter(sizes), None)}
        if self.family != "mistral":
            config["use_sliding_window"] = bool(sizes)
            kinds = ["full_attention" if self.window(i) is None else "sliding_attention" for i in range(self.layers)]
            config["layer_types"] = kinds
            # For readers that know no layer_types: the first layers see everything.
            config["max_window_layers"] = kinds.index("sliding_attention") if sizes else self.layers
        return config


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    """Settings under which the decoder would compute something else than the model."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ArchitectureError(f"hidden_act={config['hidden_act']!r:.80}: the decoder knows silu")
    if config.get("quantization_config"):
        raise ArchitectureError("the weights are quantized (quantization_config): load an unquantized model")
    if config.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ArchitectureError(
            f"partial_rotary_factor={config['partial_rotary_factor']!r:.80}: the decoder rotates all"
        )
    if config.get("attention_dropout"):
        raise ArchitectureError(f"attention_dropout={config['attention_dropout']!r:.80}: the decoder has no dropout")


def _take(fields: dict[str, Any], name: str, kind: _Kind, *default: Any) -> Any:
    """Take a field of config.json out of the others. KeyError if it is not there and there is no default; null is
    allowed where it is the default."""
    value = fields.pop(name, *default)
    words, test = kind
    if not test(value) and not (value is None and default == (None,)):
        raise ArchitectureError(f"config.json: {name}={value!r:.80}, not {words}")
    return value


def _read_rope(rest: dict[str, Any]) -> Rope:
    """`rope_parameters` of newer files, or `rope_theta` and `rope_scaling` of older ones.

    As in transformers, a `rope_scaling` takes the place of `rope_parameters`, with all that they say.
    """
    newer, older = (_take(rest, name, _OPTIONS, None) for name in ("rope_parameters", "rope_scaling"))
    beside = _take(rest, "rope_theta", _ABOVE_ONE, None)
    options = dict(older or newer or {})
    theta = float(_take(options, "rope_theta", _ABOVE_ONE, None) or beside or 10_000.0)
    named = options.pop("type", None)
    kind = options.pop("rope_type", None) or named or "default"
    if kind not in list(_ROPE):
        raise ArchitectureError(f"rope_type={kind!r:.80}: the decoder knows default, linear, llama3 and yarn")
    if options.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise ArchitectureError("partial_rotary_factor: the decoder rotates all dimensions")
    if kind in ("llama3", "yarn"):
        length = _take(rest, "original_max_position_embeddings", _POSITIVE, None)
        options |= {"original_max_position_embeddings": length} if length else {}
    for name, expected in _ROPE[kind].items():
        _take(dict(options), name, *expected)
    return Rope(theta, kind, options if kind != "default" else {})


def _read_windows(family: str, layers: int, rest: dict[str, Any]) -> tuple[int | None, ...]:
    names = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
    said = {name: rest.pop(name) for name in names if name in rest}
    if family not in _WINDOWED or not (family == "mistral" or _take(said, "use_sliding_window", _FLAG, False)):
        return ()
    size = _take(said, "sliding_window", _count("length"), None)
    first = _take(said, "max_window_layers", _NATURAL, 0)
    kinds = _take(said, "layer_types", _TEXTS, None)
    if size is None:
        return ()
    if kinds is None:
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if set(kinds) - {"full_attention", "sliding_attention"}:
        raise ArchitectureError(
            f"layer_types: the decoder knows full_attention and sliding_attention, not {kinds!r:.80}"
        )
    if family == "mistral" and "full_attention" in kinds:
        raise ArchitectureError("layer_types: with a sliding_window, all layers of a Mistral have it")
    windows = tuple(size if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()
