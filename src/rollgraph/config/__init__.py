"""The configuration of a run: its keys, how a file is read, and what is wrong with one.

`keys.py` lists every key. `reader.py` turns YAML into dataclasses, `schema.py` describes them, and `limits.py` bounds
the size of a model. Importing this package is instant.
"""

from rollgraph.config.keys import (
    COLDEST,
    AlgorithmConfig,
    Config,
    ConfigError,
    ConfigProblem,
    DataConfig,
    Key,
    LogConfig,
    ModelConfig,
    RolloutConfig,
    SinkName,
    TinyModelConfig,
    broken_rules,
    check_scopes,
    json_schema,
    list_keys,
    load_config,
    parse_config,
    spell,
    to_dict,
    to_yaml,
)

__all__ = [
    "COLDEST",
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
    "json_schema",
    "list_keys",
    "load_config",
    "parse_config",
    "spell",
    "to_dict",
    "to_yaml",
]
