"""Runs with translated configs do what `rollgraph config import` says about their keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped, unused-ignore]

from rollgraph.compat.nemo import Status, Translation, import_nemo
from rollgraph.compat.nemo.keys import TABLE, Ignored, To, Unless
from rollgraph.compat.nemo.translation import MLFLOW_KEYS
from rollgraph.config import Config, LogConfig, list_keys, load_config
from rollgraph.log import check_sinks
from rollgraph.log.metrics import SinkError
from rollgraph.parallel.ranks.world import World
from rollgraph.rl.algorithms import ALGORITHMS, settings_of
from rollgraph.rl.losses import k1, k2, k3
from rollgraph.train import train

DATA = Path(__file__).parent / "data"
SMALL = {
    "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 3},
    "policy": {
        "model_name": "m",
        "max_total_sequence_length": 10,
        "tokenizer": {"chat_template": None},
        "generation": {"max_new_tokens": 4},
    },
    "data": {"max_input_seq_length": 6, "train": {"data_path": "train.jsonl"}},
}
# Values for all translated keys. Each is valid and differs from rollgraph's default.
VALUES = {
    "grpo.num_prompts_per_step": 6,
    "grpo.num_generations_per_prompt": 5,
    "grpo.max_num_steps": 7,
    "grpo.seed": 11,
    "grpo.max_val_samples": 99,
    "grpo.overlong_filtering": True,
    "grpo.use_dynamic_sampling": True,
    "loss_fn.reference_policy_kl_penalty": 0.03,
    "loss_fn.reference_policy_kl_type": "k2",
    "loss_fn.ratio_clip_min": 0.1,
    "loss_fn.ratio_clip_max": 0.3,
    "loss_fn.ratio_clip_c": 3.0,
    "checkpointing.checkpoint_dir": "results/here",
    "checkpointing.keep_top_k": 4,
    "policy.generation.temperature": 0.7,
    "policy.generation.top_p": 0.9,
    "policy.generation.top_k": 50,
    "policy.generation.stop_strings": ["</answer>"],
    "data.shuffle": False,
    "env.math.num_workers": 2,
}


def write_theirs(folder: Path, changes: Mapping[str, Any]) -> Path:
    """Write the small NeMo-RL config with changed values, by dotted key."""
    whole: dict[str, Any] = json.loads(json.dumps(SMALL))
    for key, value in changes.items():
        *sections, name = key.split(".")
        node = whole
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(whole))
    return path


def load_translated(folder: Path, changes: Mapping[str, Any], *overrides: str) -> tuple[Config, Translation]:
    """Import, write the result and load it, as `rollgraph config import` and `rollgraph train` do."""
    translation = import_nemo(write_theirs(folder, changes))
    ours = folder / "ours.yaml"
    ours.write_text(translation.to_yaml())
    return load_config(ours, overrides), translation


def line_of(translation: Translation, key: str) -> tuple[Status, str]:
    (line,) = [line for line in translation.lines if line.key == key]
    return line.status, line.text


def value_at(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return list(value) if isinstance(value, tuple) else value


# Translated keys


def test_every_translated_key_has_a_value_here() -> None:
    assert {pattern for pattern, rule in TABLE if isinstance(rule, To)} == VALUES.keys()


@pytest.mark.parametrize("key", VALUES)
def test_a_translated_value_is_in_the_config(tmp_path: Path, key: str) -> None:
    rule = dict(TABLE)[key]
    assert isinstance(rule, To)
    config, translation = load_translated(tmp_path, {key: VALUES[key]})
    assert line_of(translation, key)[0] is Status.TRANSLATED
    assert value_at(config, rule.key) == rule.convert(VALUES[key])
    default = {item.name: item.default for item in list_keys()}.get(rule.key)
    assert value_at(config, rule.key) != default  # otherwise the test would pass without a translation


# Reasons


def all_reasons() -> list[str]:
    reasons = [rule.reason for _, rule in TABLE if isinstance(rule, Ignored | Unless)]
    for path in sorted(DATA.glob("*.yaml")):
        reasons += [line.text for line in import_nemo(path).lines]
    return reasons


def test_reasons_name_existing_keys() -> None:
    names = {key.name for key in list_keys()}
    sections = "|".join(sorted({name for name in names if "." not in name}))
    mentioned = set()
    for reason in all_reasons():
        mentioned |= set(re.findall(rf"(?<![\w./])(?:{sections})\.[a-z_.]*[a-z]", reason))
    # Any name may follow these, or the key is NeMo-RL's.
    prefixes = ("algorithm.options.", "log.wandb.", "log.mlflow.", "data.train.", "policy.")
    assert {"memory.logits", "rollout.rows", "validation.every"} <= mentioned
    assert {key for key in mentioned - names if not key.startswith(prefixes)} == set()


def test_the_documentation_names_existing_keys() -> None:
    """The second column of the table in docs/migrating_nemo_rl.md."""
    known = {key.name for key in list_keys()}
    for make in ALGORITHMS.values():
        known |= settings_of(make).keys()
    text = (Path(__file__).parents[2] / "docs" / "migrating_nemo_rl.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| NeMo-RL | rollgraph | |\n")
    rows = [line.split("|") for line in table.partition("\n\n")[0].splitlines()[1:]]
    documented = set()
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row[2]):
            documented.add(name.partition(":")[0].removeprefix("algorithm.options."))
    assert len(documented) > 30
    assert documented - known == set()


def test_kl_terms_clamp_the_log_ratio() -> None:
    """Our clamps, which are the reasons for ignoring `kl_input_clamp_value` and `kl_output_clamp_value`."""
    policy, near, far = torch.zeros(1), torch.full((1,), 20.0), torch.full((1,), 50.0)
    assert k3(policy, far) == k3(policy, near)
    assert k3(policy, near) > 10  # NeMo-RL's usual output clamp
    assert k1(policy, far).abs() > k1(policy, near).abs()
    assert k2(policy, far) > k2(policy, near)


def test_only_options_of_the_mlflow_sink_are_translated(tmp_path: Path) -> None:
    check_sinks(LogConfig(sinks=("jsonl",), mlflow=dict.fromkeys(MLFLOW_KEYS.values(), "x")))
    with pytest.raises(SinkError, match="unknown options: artifact_location"):
        check_sinks(LogConfig(sinks=("jsonl",), mlflow={"artifact_location": "x"}))
    keys = {f"logger.mlflow.{name}": "x" for name in (*MLFLOW_KEYS, "artifact_location")}
    config, translation = load_translated(tmp_path, {"logger.mlflow_enabled": True, **keys})
    check_sinks(replace(config.log, sinks=("jsonl",)))
    assert config.log.mlflow == dict.fromkeys(MLFLOW_KEYS.values(), "x")
    assert line_of(translation, "logger.mlflow.artifact_location")[0] is Status.UNSUPPORTED


# Schedules


def test_a_warm_up_may_take_all_updates_of_the_run(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "policy.train_global_batch_size": 8,  # two minibatches of the 16 samples
        "policy.scheduler": [{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 5}}],
    }
    config, translation = load_translated(tmp_path, changes)
    assert (config.steps, config.algorithm.minibatches, config.optimizer.warmup_steps) == (3, 2, 5)
    assert not any("warmup_steps" in text for text in translation.to_do)
    changes["policy.scheduler"][0]["kwargs"]["total_iters"] = 7
    config, translation = load_translated(tmp_path, changes)
    assert config.optimizer.warmup_steps == 6
    assert "optimizer.warmup_steps was 7, more than the 6 updates of the run" in translation.to_do


@pytest.mark.parametrize(
    ("name", "arguments", "status", "schedule"),
    [
        ("ConstantLR", {"factor": 1.0, "total_iters": 10}, Status.TRANSLATED, "constant"),
        ("ConstantLR", {"factor": 0.5, "total_iters": 10}, Status.UNSUPPORTED, "constant"),
        ("ConstantLR", {}, Status.UNSUPPORTED, "constant"),  # PyTorch's default factor is a third
        ("LinearLR", {"end_factor": 0.1, "total_iters": 2}, Status.UNSUPPORTED, "constant"),
        ("CosineAnnealingLR", {"T_max": 10}, Status.TRANSLATED, "cosine"),
        ("CosineAnnealingLR", {"T_max": 10, "eta_min": 1e-7}, Status.TRANSLATED, "cosine"),
        ("StepLR", {"step_size": 10}, Status.UNSUPPORTED, "constant"),
    ],
)
def test_schedules_are_translated_or_unsupported(
    tmp_path: Path, name: str, arguments: dict[str, Any], status: Status, schedule: str
) -> None:
    stage = {"name": f"torch.optim.lr_scheduler.{name}", "kwargs": arguments}
    config, translation = load_translated(tmp_path, {"policy.scheduler": [stage]})
    actual_status, text = line_of(translation, "policy.scheduler")
    assert (actual_status, config.optimizer.schedule) == (status, schedule)
    assert ("eta_min" in text) is ("eta_min" in arguments)


# Whole runs


def run_translated(folder: Path, changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train a tiny model with a translated config, and return the metrics of each step."""
    rows = "".join(json.dumps({"prompt": f"{number:02}?"}) + "\n" for number in range(20))
    (folder / "train.jsonl").write_text(rows)
    (folder / "held_out.jsonl").write_text(rows)
    (folder / "rewards.py").write_text(
        "def even(prompts, completions, **columns):\n"
        "    return [sum(b % 2 == 0 for b in c.encode()) / max(1, len(c.encode())) for c in completions]\n"
    )
    paths = {
        "data.train.data_path": str(folder / "train.jsonl"),
        "data.validation.data_path": str(folder / "held_out.jsonl"),
        "checkpointing.checkpoint_dir": str(folder / "run"),
    }
    config, _ = load_translated(
        folder,
        {**paths, **changes},
        "model.path=null",
        "model.tiny={layers: 1, width: 16, heads: 2, kv_heads: 1, mlp: 24, max_length: 16}",
        f"reward.functions=[{{name: '{folder / 'rewards.py'}:even'}}]",
        "optimizer.lr=0.01",
        "train.token_buckets=[96]",
        "rollout.rows=8",
        "graph.impl=none",
        "validation.temperature=1.0",
        "checkpoint.export_at_end=false",
        "memory.cache_gib=0.001",
        "log.progress=none",
        "log.sinks=[jsonl]",
    )
    train(config, World(rank=0, size=1, device="cpu"))
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("flag", ["val_at_start", "val_at_end"])
def test_validation_only_at_the_start_and_at_the_end(tmp_path: Path, flag: str) -> None:
    steps = run_translated(tmp_path, {"grpo.val_period": 0, f"grpo.{flag}": True})
    assert [values["step"] for values in steps] == [-1, 0, 1, 2]
    assert [values["step"] for values in steps if "validation/reward" in values] == [-1, 2]
    translation = import_nemo(tmp_path / "theirs.yaml")
    assert line_of(translation, f"grpo.{flag}")[0] is Status.IGNORED  # train does it in any case
    assert "validates before the first step and after the last" in line_of(translation, f"grpo.{flag}")[1]


def test_without_checkpointing_only_the_last_step_is_saved(tmp_path: Path) -> None:
    """Even if validation could find a new best model in every step."""
    changes = {"grpo.val_period": 1, "checkpointing.enabled": False, "checkpointing.keep_top_k": 3}
    steps = run_translated(tmp_path, changes)
    assert [values["step"] for values in steps if "validation/reward" in values] == [-1, 0, 1, 2]
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert [int(re.sub(r"\D", "", name)) for name in saved] == [2]
