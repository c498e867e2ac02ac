"""Configuration changes on resume: fixed keys, allowed changes, and other spellings of the same value."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rollgraph.checkpoint.changes import (
    FIXED,
    FIXED_ALONE,
    FIXED_CONTENT,
    IGNORED,
    Change,
    ChangedConfig,
    arithmetic_on,
    find_changes,
)
from rollgraph.config import Config, list_keys, parse_config, to_dict, with_new_names
from rollgraph.model.arithmetic import ARITHMETIC
from rollgraph.train import train
from tests.test_train import ONE, eager_config, flip, folder, rows_of

__all__ = ["folder"]

BASE = """
model: {tiny: {}}
data: {train: train.jsonl}
rollout: {max_tokens: 32}
reward: {functions: [{name: exact_match}, {name: length, options: {limit: 9}}]}
"""


def changes_of(*overrides: str, prints: tuple[dict[str, str], dict[str, str]] = ({}, {})) -> list[Change]:
    """Compare the configuration in a checkpoint with one that has these overrides."""
    old, new = parse_config(BASE), parse_config(BASE, overrides)
    return find_changes(json.loads(json.dumps(to_dict(old))), to_dict(new), *prints)


def test_a_configuration_has_not_changed_if_nothing_was_overridden() -> None:
    assert changes_of() == []
    assert changes_of("output=elsewhere", "resume=must", "allow_changes=algorithm,data.train") == []


@pytest.mark.parametrize(
    ("override", "message", "fixed"),
    [
        ("seed=1", "seed: 0 → 1", True),
        ("model.tiny.layers=3", "model.tiny.layers: 2 → 3", True),
        ("model.dtype=float32", "model.dtype: auto → float32", True),
        ("data.chat=true", "data.chat: false → true", True),
        ("rollout.environment={name: 'a:b'}", 'rollout.environment: null → {"name": "a:b", "options": {}}', True),
        ("reward.functions=[{name: exact_match}]",
         'reward.functions[1]: {"name": "length", "weight": 1.0, "options": {"limit": 9}, "label": ""} → null', True),
        ("algorithm.name=dapo", "algorithm.name: grpo → dapo", True),
        ("algorithm.options={clip_high: 0.3}", "algorithm.options.clip_high: null → 0.3", True),
        ("algorithm.kl_coef=0.1", "algorithm.kl_coef: 0.0 → 0.1", True),
        ("steps=7", "steps: 100 → 7", False),
        ("optimizer.lr=0.5", "optimizer.lr: 1e-06 → 0.5", False),
        ("rollout.temperature=0.5", "rollout.temperature: 1.0 → 0.5", False),
        ("data.validation=held.jsonl", "data.validation: null → held.jsonl", False),
        ("log.sinks=[jsonl]", 'log.sinks: null → ["jsonl"]', False),
        ("algorithm.minibatches=2", "algorithm.minibatches: 1 → 2", False),
        ("model.checkpointing=true", "model.checkpointing: auto → true", False),
    ],
)  # fmt: skip
def test_changes_are_reported_and_keys_that_shape_learning_are_fixed(override: str, message: str, fixed: bool) -> None:
    (change,) = changes_of(override)
    assert (str(change), change.is_fixed) == (message, fixed)


def test_adding_a_warm_start_is_fixed_but_its_settings_may_change() -> None:
    with_one = to_dict(parse_config(BASE, ["warm_start={data: w.jsonl}"]))
    longer = to_dict(parse_config(BASE, ["warm_start={data: w.jsonl, steps: 7}"]))
    (added,) = find_changes(to_dict(parse_config(BASE)), with_one, {}, {})
    (changed,) = find_changes(with_one, longer, {}, {})
    assert (added.key, added.is_fixed) == ("warm_start", True)
    assert (changed.key, changed.is_fixed) == ("warm_start.steps", False)


def test_content_decides_whether_a_path_has_changed() -> None:
    moved = ["data.train=moved.jsonl"]
    assert changes_of(*moved, prints=({"data.train": "x"}, {"data.train": "x"})) == []
    (replaced,) = changes_of(*moved, prints=({"data.train": "x"}, {"data.train": "y"}))
    assert (replaced.old, replaced.new, replaced.is_fixed) == ("train.jsonl", "moved.jsonl", True)
    (edited,) = changes_of(prints=({"data.train": "x"}, {"data.train": "y"}))
    assert str(edited) == "data.train: the content of train.jsonl has changed"
    assert edited.is_fixed
    key = "reward.functions[1].name"
    (code,) = changes_of(prints=({key: "x"}, {key: "y"}))
    assert (str(code), code.is_fixed) == (f"{key}: the content of length has changed", False)  # people repair rewards


def test_an_error_names_every_refused_change_and_how_to_allow_it() -> None:
    changes = changes_of("algorithm={name: dapo, options: {clip_low: 0.1}}", "reward.functions=[{name: exact_match}]")
    error = ChangedConfig(Path("run/step_1"), changes)
    assert error.keys == ["reward.functions", "algorithm.name", "algorithm.options"]
    assert "algorithm.name: grpo → dapo; algorithm.options.clip_low: null → 0.1" in str(error)
    assert str(error).endswith("add allow_changes=reward.functions,algorithm.name,algorithm.options")


def test_the_tables_name_keys_that_exist() -> None:
    known = {key.name for key in list_keys()}
    assert known | {"arithmetic"} >= {*FIXED, *FIXED_ALONE, *FIXED_CONTENT, *IGNORED}


# Whole runs.


def starts_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "starts.jsonl").read_text().splitlines()]


def test_a_run_records_each_of_its_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other algorithm options are refused until they are allowed. Moved files are no change."""
    run = folder / "run"
    plain = ["data.validation=null", "checkpoint.every=1", "log.progress=plain"]
    train(eager_config(folder, *plain, "steps=1"), ONE)
    first = run / "starts.jsonl"
    before = first.read_bytes()
    with pytest.raises(ChangedConfig, match=r"algorithm\.options\.clip_high: null → 0\.3\. .*add allow_changes="):
        train(eager_config(folder, *plain, "steps=2", "algorithm.options={kl_coef: 0.05, clip_high: 0.3}"), ONE)
    assert first.read_bytes() == before  # a refused start is not recorded

    moved = folder / "moved"
    moved.mkdir()
    for name in ("train.jsonl", "rewards.py"):
        shutil.move(folder / name, moved / name)
    monkeypatch.chdir(moved)
    spelled = ["data.train=train.jsonl", "reward.functions=[{name: './rewards.py:even'}]"]
    capsys.readouterr()
    train(eager_config(folder, *plain, *spelled, "steps=2", "optimizer.lr=0.5"), ONE)
    assert "changed since then: steps: 1 → 2; optimizer.lr: 0.01 → 0.5\n" in capsys.readouterr().out

    allowed = ["algorithm.options={kl_coef: 0.05, clip_high: 0.3}", "seed=1", "allow_changes=algorithm,seed"]
    train(eager_config(folder, *plain, *spelled, *allowed, "steps=3"), ONE)
    assert [row["step"] for row in rows_of(run)] == [0, 1, 2]

    one, two, three = starts_of(run)
    assert before == (json.dumps(one, ensure_ascii=False) + "\n").encode()
    assert [start["first_step"] for start in (one, two, three)] == [0, 1, 2]
    assert [start["seed"] for start in (one, two, three)] == [0, 0, 1]
    assert one["changes"] == []
    assert two["changes"][1] == {"key": "optimizer.lr", "old": 0.01, "new": 0.5}
    assert {"key": "algorithm.options.clip_high", "old": None, "new": 0.3} in three["changes"]
    assert one["fingerprints"]["data.train"] == three["fingerprints"]["data.train"]
    assert one["versions"].keys() == {"rollgraph", "python", "torch", "cuda", "platform"}
    assert one["device"]
    assert one["command"] == shlex.join(sys.orig_argv)
    last = parse_config((run / "config.yaml").read_text())
    assert last == eager_config(folder, *plain, *spelled, *allowed, "steps=3")


def test_allowed_new_data_begins_at_its_first_prompt(folder: Path) -> None:
    plain = ["data.validation=null", "data.shuffle=false", "log.samples_every=1", "log.sample_groups=9"]
    train(eager_config(folder, *plain, "steps=1"), ONE)
    (folder / "other.jsonl").write_text("".join(f'{{"prompt": "o{i}?"}}\n' for i in range(9)))
    new_data = [*plain, f"data.train={folder / 'other.jsonl'}", "steps=2"]
    with pytest.raises(ChangedConfig, match=r"train\.jsonl → .*other\.jsonl"):
        train(eager_config(folder, *new_data), ONE)
    train(eager_config(folder, *new_data, "allow_changes=data.train"), ONE)
    rows = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    assert sorted({row["prompt"] for row in rows if row["step"] == 1}) == ["o0?", "o1?", "o2?", "o3?"]


def test_another_model_is_refused_but_a_copy_is_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With KL, the model is also the reference policy, so an allowed new model becomes the new reference."""
    train(eager_config(folder, "steps=1", f"output={folder / 'tiny'}", "data.validation=null"), ONE)
    model, copied = folder / "tiny" / "reference", folder / "copied"
    plain = ["tokenizer.path=bytes", "data.validation=null", "log.progress=plain"]
    train(eager_config(folder, *plain, f"model={{path: {model}}}", "steps=1"), ONE)
    shutil.copytree(model, copied)
    train(eager_config(folder, *plain, f"model={{path: {copied}}}", "steps=2"), ONE)
    weights = copied / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    changed = folder / "changed"
    copied.rename(changed)
    with pytest.raises(ChangedConfig, match=r"model\.path: .*copied → .*changed"):
        train(eager_config(folder, *plain, f"model={{path: {changed}}}", "steps=3"), ONE)
    train(eager_config(folder, *plain, f"model={{path: {changed}}}", "steps=3", "allow_changes=model"), ONE)
    assert f"{changed} is the reference policy from now on" in capsys.readouterr().out
    train(eager_config(folder, *plain, f"model={{path: {changed}}}", "steps=4"), ONE)  # and stays so
    assert rows_of(folder / "run")[-1]["step"] == 3


def test_a_damaged_checkpoint_does_not_hide_a_change(folder: Path) -> None:
    """The run would resume from the checkpoint before it, so the configuration of that one is compared."""
    plain = ["data.validation=null", "checkpoint.every=1"]
    train(eager_config(folder, *plain, "steps=2"), ONE)
    flip(folder / "run" / "checkpoints" / "step_00000001" / "state.json")
    with pytest.raises(ChangedConfig, match=r"algorithm\.options\.kl_coef: 0\.05 → 0\.1"):
        train(eager_config(folder, *plain, "steps=3", "algorithm.options={kl_coef: 0.1}"), ONE)


def test_resuming_with_other_arithmetic_is_refused_unless_allowed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(eager_config(folder, "data.validation=null", "checkpoint.every=1", "steps=1"), ONE)
    version = ARITHMETIC["cpu"]
    monkeypatch.setitem(ARITHMETIC, "cpu", version + 1)
    monkeypatch.setitem(ARITHMETIC, "cuda", ARITHMETIC["cuda"] + 1)
    with pytest.raises(ChangedConfig, match=rf"arithmetic\.cpu: {version} → {version + 1}\. .*=arithmetic$"):
        train(eager_config(folder, "data.validation=null", "steps=2"), ONE)
    train(eager_config(folder, "data.validation=null", "steps=2", "allow_changes=arithmetic"), ONE)
    assert len(starts_of(folder / "run")) == 2


def test_renamed_keys_of_an_old_checkpoint_are_no_change() -> None:
    config = {"seed": 0, "train": {"half_logits": "auto", "token_buckets": None}}
    saved = {"seed": 0, "train": {"long_prompts": "auto", "token_buckets": None}}
    assert with_new_names(saved) == with_new_names(config) == config
    assert list(find_changes(with_new_names(saved), config, {}, {})) == []


def test_a_checkpoint_without_arithmetic_has_the_first() -> None:
    assert arithmetic_on("cuda:3", {}) == {"cuda": 1}


def test_starts_are_not_recorded_through_a_link(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "mine").write_text("years of work")
    for name in ("config.yaml", "starts.jsonl"):
        os.symlink(folder / "mine", folder / "run" / name)
    with pytest.raises(ValueError, match=r"starts\.jsonl: is a link; links are not written through"):
        train(eager_config(folder, "steps=1", "data.validation=null"), ONE)
    assert (folder / "mine").read_text() == "years of work"


def test_keys_in_allow_changes_must_exist() -> None:
    with pytest.raises(ValueError, match=r"allow_changes: there is no key 'algoritm'; did you mean 'algorithm'"):
        parse_config(BASE, ["allow_changes=algoritm"])
    config: Config = parse_config(BASE, ["allow_changes=algorithm,data.train"])
    assert config.allow_changes == ("algorithm", "data.train")
