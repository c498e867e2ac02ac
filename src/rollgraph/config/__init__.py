"""The configuration of a run: its keys, reading it from YAML, and checking it.

`keys.py` lists every key, and `rules.py` the combinations of keys that make no sense. `yaml_tree.py` parses a file, and
`merging.py` merges it with the files it builds on. `reader.py` turns the result into dataclasses, whose types
`fields.py` describes. `names.py` maps the keys of other frameworks to ours. Importing this package is instant.
"""

from rollgraph.config.fields import ConfigError, ConfigProblem, Key, describe_type
from rollgraph.config.keys import (
    DEFAULT_MICROBATCH_TOKENS,
    MIN_TEMPERATURE,
    AdapterConfig,
    AlgorithmConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    RolloutConfig,
    SinkName,
    TinyModelConfig,
)
from rollgraph.config.loading import config_from_keywords, json_schema, list_keys, load_config, parse_config
from rollgraph.config.names import with_new_names
from rollgraph.config.rules import broken_rules, capture_scopes, training_scopes
from rollgraph.config.yaml_tree import to_dict, to_yaml

__all__ = [
    "DEFAULT_MICROBATCH_TOKENS",
    "MIN_TEMPERATURE",
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
    "capture_scopes",
    "config_from_keywords",
    "describe_type",
    "json_schema",
    "list_keys",
    "load_config",
    "parse_config",
    "to_dict",
    "to_yaml",
    "training_scopes",
    "with_new_names",
]
