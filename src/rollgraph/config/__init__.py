"""The configuration of a run: its keys, how a file is read, and what is wrong with one.

`keys.py` lists every key and `rules.py` the combinations that make no sense. A file is parsed by `yaml_tree.py`, merged
with those it builds on by `inheritance.py`, and turned into dataclasses by `reader.py`; `field_types.py` describes
their types. Importing this package is instant.
"""

from rollgraph.config.field_types import Key, spell
from rollgraph.config.key_types import COLDEST, SinkName
from rollgraph.config.keys import (
    MICROBATCH_TOKENS,
    AdapterConfig,
    AlgorithmConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    RolloutConfig,
    TinyModelConfig,
)
from rollgraph.config.keywords import config_from_keywords
from rollgraph.config.loading import json_schema, list_keys, load_config, parse_config
from rollgraph.config.printing import to_dict, to_yaml
from rollgraph.config.problems import ConfigError, ConfigProblem
from rollgraph.config.rules import broken_rules, check_scopes, training_scopes

__all__ = [
    "COLDEST",
    "MICROBATCH_TOKENS",
    "AdapterConfig",
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "ConfigProblem",
    "DataConfig",
    "Key",
    "LogConfig",
    "ModelConfig",
    "RolloutConfig",
    "SinkName",
    "TinyModelConfig",
    "broken_rules",
    "check_scopes",
    "config_from_keywords",
    "json_schema",
    "list_keys",
    "load_config",
    "parse_config",
    "spell",
    "to_dict",
    "to_yaml",
    "training_scopes",
]
