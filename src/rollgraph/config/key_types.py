"""The types that configuration keys have in common: numbers with limits, paths, and sets of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from rollgraph.config.field_types import PATH, Limit
from rollgraph.config.limits import LARGEST

COLDEST = 0.01  # the lowest temperature: logits are divided by it
Count = Annotated[int, Limit("minimum", 1)]
Natural = Annotated[int, Limit("minimum", 0)]
Neighbours = Annotated[Natural, Limit("maximum", 1)]
Layers = Annotated[Count, Limit("maximum", LARGEST["layers"])]
Width = Annotated[Count, Limit("maximum", LARGEST["hidden"])]
Heads = Annotated[Count, Limit("maximum", LARGEST["heads"])]
WidthOfMlp = Annotated[Count, Limit("maximum", LARGEST["mlp"])]
Positive = Annotated[float, Limit("exclusiveMinimum", 0)]
Temperature = Annotated[float, Limit("minimum", COLDEST)]
NotNegative = Annotated[float, Limit("minimum", 0)]
Share = Annotated[float, Limit("minimum", 0), Limit("maximum", 1)]
ShareAboveZero = Annotated[float, Limit("exclusiveMinimum", 0), Limit("maximum", 1)]
Beta = Annotated[float, Limit("minimum", 0), Limit("exclusiveMaximum", 1)]
Rank = Annotated[Count, Limit("maximum", LARGEST["rank"])]
Scope = Literal["step", "layer", "attn", "mlp"]
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SinkName = Literal["jsonl", "tensorboard", "wandb", "mlflow"]
Options = Mapping[str, Any]
File = Annotated[str, PATH]
