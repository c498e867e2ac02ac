"""PEFT's `adapter_config.json`: which adapter it describes, and which modules of a model that adapter changes.

A field that would change what the adapter computes, and that the decoder does not support, is an error that names it.
So is a field that nobody here knows and that is set: a later version of PEFT may compute something else with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollgraph.errors import InvalidInput
from rollgraph.model.adapters import AdapterSpec
from rollgraph.model.architecture import Architecture
from rollgraph.model.config_fields import FLAG, POSITIVE, TEXT, FieldKind, count

ADAPTER_CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"  # PEFT's name for every linear layer but the head
_WITHOUT_EFFECT = (  # whatever they hold, the stored adapter computes the same
    "auto_mapping",
    "ensure_weight_tying",  # of modules that are refused by their own fields
    "eva_config",
    "fan_in_fan_out",  # PEFT ignores it for linear layers
    "inference_mode",
    "layers_pattern",  # says where layers_to_transform counts
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
)
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")  # others have changed the base as well
_NAMES = FieldKind(
    "a string or a list of strings",
    lambda v: isinstance(v, str) or (isinstance(v, list) and all(isinstance(item, str) for item in v)),
)
_SHARE = FieldKind("a number of at least 0 and below 1", lambda v: type(v) in (int, float) and 0 <= v < 1)


class AdapterFileError(InvalidInput):
    """An adapter that is incomplete, not supported, or of another model; `place` is its folder or a file in it.

    Nothing was loaded.
    """


@dataclass(frozen=True)
class StoredAdapter:
    """What an adapter_config.json says."""

    spec: AdapterSpec
    base: str | None  # path or hub id of the model that was adapted
    revision: str | None = None  # of that model on the hub


def projection_shapes(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """The linear layers of a model but for its head: Hugging Face's name of each, its outputs and its inputs."""
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


def parse_adapter_config(content: Mapping[str, Any], architecture: Architecture, place: str) -> StoredAdapter:
    """Read the content of an adapter_config.json; `place` names the file in errors."""
    fields = _Fields(content, place)
    kind = fields.take("peft_type", TEXT)
    if kind != "LORA":
        raise fields.refuse("peft_type", kind, "only LORA is supported")
    task = fields.take("task_type", TEXT, None)
    if task not in (None, "CAUSAL_LM"):
        raise fields.refuse("task_type", task, "only CAUSAL_LM is supported")
    rank = fields.take("r", count("rank"))
    alpha = fields.take("lora_alpha", POSITIVE)
    dropout = fields.take("lora_dropout", _SHARE, 0.0)
    rslora = fields.take("use_rslora", FLAG, False)
    base = fields.take("base_model_name_or_path", TEXT, None)
    revision = fields.take("revision", TEXT, None)
    targets = _read_targets(fields, architecture)
    fields.refuse_the_rest()
    return StoredAdapter(AdapterSpec(rank, float(alpha), targets, float(dropout), rslora), base or None, revision)


class _Fields:
    """The fields of a file that nobody has looked at yet."""

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        self._left = dict(content)
        self._place = place

    def take(self, name: str, kind: FieldKind, *default: Any) -> Any:
        """Remove a field and give its value. Null, or no such field, means the default if there is one."""
        value = self._left.pop(name, None)
        if value is None and default:
            return default[0]
        if value is None:
            raise AdapterFileError(f"there is no {name}", place=self._place)
        if not kind.accepts(value):
            raise self.refuse(name, value, f"must be {kind.words}")
        return value

    def refuse(self, name: str, value: Any, why: str) -> AdapterFileError:
        return AdapterFileError(f"{name}={value!r:.80}: {why}", place=self._place)

    def refuse_the_rest(self) -> None:
        """Raise if any other field says that the adapter is more than plain LoRA."""
        began = self._left.pop("init_lora_weights", True)
        if began not in _INITIALIZATIONS:
            raise self.refuse("init_lora_weights", began, "this initialization changes the base model as well")
        bias = self._left.pop("bias", "none")
        if bias not in (None, "none"):
            raise self.refuse("bias", bias, "biases are not adapted; only 'none' is supported")
        for name, value in self._left.items():
            if name not in _WITHOUT_EFFECT and value not in (None, False, 0, "", [], {}):
                raise self.refuse(name, value, "is not supported: an adapter is plain LoRA, the same in all layers")


def _read_targets(fields: _Fields, architecture: Architecture) -> tuple[str, ...]:
    """The projections that are adapted, by the last part of their names; each must be adapted in all layers."""
    wanted = fields.take("target_modules", _NAMES)
    without = fields.take("exclude_modules", _NAMES, [])
    projections = list(projection_shapes(architecture))
    others = ["lm_head", "model.embed_tokens"]
    chosen = [name for name in (*projections, *others) if _matches(wanted, name) and not _matches(without, name)]
    if wanted == ALL_LINEAR:
        chosen = [name for name in projections if not _matches(without, name)]
    if not chosen:
        raise fields.refuse("target_modules", wanted, "names no linear layer of the model")
    if other := next((name for name in chosen if name in others), None):
        raise fields.refuse("target_modules", wanted, f"{other} is not adapted, only projections inside layers are")
    targets = tuple(dict.fromkeys(_short(name) for name in projections if name in set(chosen)))
    if len(chosen) != len(targets) * architecture.layers:
        missing = next(name for name in projections if _short(name) in targets and name not in chosen)
        why = f"{missing} is left out, but a projection is adapted in all layers or in none"
        raise fields.refuse("target_modules", wanted, why)
    return targets


def _matches(wanted: str | Iterable[str], name: str) -> bool:
    """Whether PEFT would choose a module: a string is a regular expression, a list holds names or ends of names."""
    if isinstance(wanted, str):
        try:
            return re.fullmatch(wanted, name) is not None
        except re.error:
            return False
    return any(name == end or name.endswith(f".{end}") for end in wanted)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


# -- writing ---------------------------------------------------------------------------------------


def format_adapter_config(config: StoredAdapter) -> dict[str, Any]:
    """The content of an adapter_config.json, with what tools besides PEFT ask for."""
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
