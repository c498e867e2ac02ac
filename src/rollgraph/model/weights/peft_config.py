"""PEFT's `adapter_config.json` and `LoraConfig`: which adapter they describe, and which modules of a model it changes.

A field that changes what the adapter computes, and that the decoder does not support, is an error that names it. So is
an unknown field that is set: a later version of PEFT may compute something else with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollgraph.errors import InvalidInput
from rollgraph.model.architecture import Architecture
from rollgraph.model.field_kinds import FLAG, POSITIVE, TEXT, FieldKind, positive_int
from rollgraph.model.lora import TARGETS, AdapterSpec

ADAPTER_CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"  # PEFT's name for every linear layer but the head
_TARGETS_OF_PEFT = ("q_proj", "v_proj")  # where a LoraConfig names none
_WITHOUT_EFFECT = (  # fields that do not change what the stored adapter computes
    "auto_mapping",
    "ensure_weight_tying",  # for modules whose own fields are refused
    "eva_config",
    "fan_in_fan_out",  # PEFT ignores it for linear layers
    "inference_mode",
    "layers_pattern",  # only tells where layers_to_transform counts
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
)
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")  # the others change the base model as well
_NAMES = FieldKind(
    "a string or a list of strings",
    lambda v: isinstance(v, str) or (isinstance(v, list) and all(isinstance(item, str) for item in v)),
)
_ANY = FieldKind("anything", lambda v: True)
_FRACTION = FieldKind("a number of at least 0 and below 1", lambda v: type(v) in (int, float) and 0 <= v < 1)


class AdapterFileError(InvalidInput):
    """An adapter that is incomplete, not supported, or of another model; `location` is its folder or a file in it.

    Nothing was loaded.
    """


@dataclass(frozen=True)
class StoredAdapter:
    """The content of an adapter_config.json."""

    spec: AdapterSpec
    base: str | None  # path or hub id of the model that was adapted
    revision: str | None = None  # of that model on the hub


def projection_shapes(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """The linear layers of a model except its head: Hugging Face's name, outputs and inputs."""
    a = architecture
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    of_layer = {
        "self_attn.q_proj": (q, a.hidden),
        "self_attn.k_proj": (kv, a.hidden),
        "self_attn.v_proj": (kv, a.hidden),
        "self_attn.o_proj": (a.hidden, q),
        "mlp.gate_proj": (a.mlp, a.hidden),
        "mlp.up_proj": (a.mlp, a.hidden),
        "mlp.down_proj": (a.hidden, a.mlp),
    }
    return {f"model.layers.{i}.{name}": shape for i in range(a.layers) for name, shape in of_layer.items()}


# -- reading ---------------------------------------------------------------------------------------


def parse_adapter_config(content: Mapping[str, Any], architecture: Architecture, location: str) -> StoredAdapter:
    """Read the content of an adapter_config.json; `location` names the file in errors."""
    fields = _Fields(content, location)
    lora = _read_lora(fields)
    base = fields.take("base_model_name_or_path", TEXT, None)
    revision = fields.take("revision", TEXT, None)
    targets = _read_targets(fields, architecture)
    fields.refuse_unread()
    return StoredAdapter(AdapterSpec(targets=targets, **lora), base or None, revision)


def read_lora_config(config: Any) -> dict[str, Any]:
    """The settings of a new adapter from a `LoraConfig` of PEFT, by our names."""
    fields = _Fields(config.to_dict(), type(config).__name__)
    lora = _read_lora(fields)
    targets = fields.take("target_modules", _ANY, _TARGETS_OF_PEFT)
    if targets == ALL_LINEAR:
        targets = TARGETS
    if isinstance(targets, str) or not set(targets) <= set(TARGETS):
        raise fields.refuse("target_modules", targets, f"expected {ALL_LINEAR!r} or some of {', '.join(TARGETS)}")
    initialization = fields.take("init_lora_weights", _ANY, True)
    if initialization is not True:
        raise fields.refuse("init_lora_weights", initialization, "a new adapter begins as PEFT's default, True")
    for name in ("base_model_name_or_path", "revision"):  # the run names its model
        fields.take(name, _ANY, None)
    fields.refuse_unread()
    return {**lora, "targets": [target for target in TARGETS if target in targets]}


def _read_lora(fields: _Fields) -> dict[str, Any]:
    """The settings of plain LoRA, by our names."""
    kind = fields.take("peft_type", TEXT)
    if kind != "LORA":
        raise fields.refuse("peft_type", kind, "only LORA is supported")
    task = fields.take("task_type", TEXT, None)
    if task not in (None, "CAUSAL_LM"):
        raise fields.refuse("task_type", task, "only CAUSAL_LM is supported")
    return {
        "rank": fields.take("r", positive_int("rank")),
        "alpha": float(fields.take("lora_alpha", POSITIVE)),
        "dropout": float(fields.take("lora_dropout", _FRACTION, 0.0)),
        "rslora": fields.take("use_rslora", FLAG, False),
    }


class _Fields:
    """The fields of a file that have not been read yet."""

    def __init__(self, content: Mapping[str, Any], location: str) -> None:
        self._unread = dict(content)
        self._location = location

    def take(self, name: str, kind: FieldKind, *default: Any) -> Any:
        """Remove a field and return its value. Null, or no such field, means the default if there is one."""
        value = self._unread.pop(name, None)
        if value is None and default:
            return default[0]
        if value is None:
            raise AdapterFileError(f"there is no {name}", location=self._location)
        if not kind.accepts(value):
            raise self.refuse(name, value, f"must be {kind.description}")
        return value

    def refuse(self, name: str, value: Any, why: str) -> AdapterFileError:
        return AdapterFileError(f"{name}={value!r:.80}: {why}", location=self._location)

    def refuse_unread(self) -> None:
        """Raise if any other field asks for more than plain LoRA."""
        initialization = self._unread.pop("init_lora_weights", True)
        if initialization not in _INITIALIZATIONS:
            raise self.refuse("init_lora_weights", initialization, "this initialization changes the base model as well")
        bias = self._unread.pop("bias", "none")
        if bias not in (None, "none"):
            raise self.refuse("bias", bias, "biases are not adapted; only 'none' is supported")
        for name, value in self._unread.items():
            if name not in _WITHOUT_EFFECT and value not in (None, False, 0, "", [], {}):
                raise self.refuse(name, value, "is not supported: an adapter is plain LoRA, the same in all layers")


def _read_targets(fields: _Fields, architecture: Architecture) -> tuple[str, ...]:
    """The adapted projections, by the last part of their names; each must be adapted in all layers."""
    modules = fields.take("target_modules", _NAMES)
    excluded = fields.take("exclude_modules", _NAMES, [])
    projections = list(projection_shapes(architecture))
    not_adaptable = ["lm_head", "model.embed_tokens"]
    chosen = [
        name for name in (*projections, *not_adaptable) if _matches(modules, name) and not _matches(excluded, name)
    ]
    if modules == ALL_LINEAR:
        chosen = [name for name in projections if not _matches(excluded, name)]
    if not chosen:
        raise fields.refuse("target_modules", modules, "names no linear layer of the model")
    if unsupported := next((name for name in chosen if name in not_adaptable), None):
        raise fields.refuse(
            "target_modules", modules, f"{unsupported} is not adapted, only projections inside layers are"
        )
    targets = tuple(dict.fromkeys(_short(name) for name in projections if name in set(chosen)))
    if len(chosen) != len(targets) * architecture.layers:
        missing = next(name for name in projections if _short(name) in targets and name not in chosen)
        why = f"{missing} is left out, but a projection is adapted in all layers or in none"
        raise fields.refuse("target_modules", modules, why)
    return targets


def _matches(pattern: str | Iterable[str], name: str) -> bool:
    """Whether PEFT would adapt a module: a string is a regular expression, a list holds names or ends of names."""
    if isinstance(pattern, str):
        try:
            return re.fullmatch(pattern, name) is not None
        except re.error:
            return False
    return any(name == end or name.endswith(f".{end}") for end in pattern)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


# -- writing ---------------------------------------------------------------------------------------


def format_adapter_config(config: StoredAdapter) -> dict[str, Any]:
    """The content of an adapter_config.json, with the fields that tools other than PEFT require."""
    spec = config.spec
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "revision": config.revision,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rslora,
        "target_modules": list(spec.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
    }
