from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollgraph.config import Config, parse_config
from rollgraph.plan.choose import (
    MEMORY_KEYS,
    Choice,
    MemoryBudget,
    MemorySettings,
    choose_settings,
    value_of,
    with_values,
)
from rollgraph.plan.memory import GIB, peak_bytes, plan_lines
from rollgraph.plan.run_shape import RunShape, make_run_shape
from rollgraph.plan.suggest import suggest_settings
from rollgraph.plan.time import Speed
from tests.plan.test_memory_plan import RUN

COMMON = {"model_type": "qwen2", "max_position_embeddings": 32768, "dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064},
}  # fmt: skip
FEW = (40, 139)
DEVICES = (4, 8, 12, 16, 24, 32, 40, 48, 60, 64, 80, 96, 139, 180, 260)
ADAPTED = ["adapter.rank=32"]
KINDS = [
    ("1.5b", []),
    ("7b", []),
    ("1.5b", ADAPTED),
    ("7b", ADAPTED),
    ("32b", ADAPTED),
    ("7b", ["optimizer.state=int8"]),
]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def make_config(folder: Path, shape: str, *overrides: str) -> Config:
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    return parse_config(RUN.format(folder=folder), overrides)


def choose_on(config: Config, shape: RunShape, device: float, host: float | None = 1000) -> Choice:
    return choose_settings(config, shape, MemoryBudget(int(device * GIB), None if host is None else int(host * GIB)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), KINDS, ids=lambda value: str(value))
def test_choices_over_a_grid_of_devices_and_hosts(tmp_path: Path, name: str, overrides: Sequence[str]) -> None:
    assert_grid(make_config(tmp_path, name, *overrides), DEVICES, (16, 64, 120, 400))


def test_a_choice_fits_and_more_memory_is_never_slower(tmp_path: Path) -> None:
    assert_grid(make_config(tmp_path, "1.5b"), FEW, (16, 120))


def assert_grid(config: Config, devices: Sequence[int], hosts: Sequence[int]) -> None:
    """Choices fit where they say so, and time never rises with memory. Devices and hosts are of increasing size."""
    shape = make_run_shape(config)
    with_smaller_host = dict.fromkeys(devices, float("inf"))
    best_time = float("inf")
    for host in hosts:
        best_time = float("inf")
        for device in devices:
            choice = choose_on(config, shape, device, host)
            lines = plan_lines(choice.config, shape)
            fits = peak_bytes(lines) + choice.budget.reserve <= device * GIB and peak_bytes(lines, "host") <= host * GIB
            assert fits == choice.fits
            time = choice.settings.time.total if choice.fits else float("inf")
            assert time <= best_time
            assert time <= with_smaller_host[device]
            best_time = with_smaller_host[device] = time
    assert best_time < float("inf")


def test_nothing_that_fits_is_faster(tmp_path: Path) -> None:
    """Compared with a grid over all keys but the size of the cache."""
    config = make_config(tmp_path, "1.5b")
    shape = make_run_shape(config)
    choice = choose_on(config, shape, 38)
    assert choice.fits
    cache_gib = choice.config.memory.cache_gib
    grid = itertools.product(
        (1024, 4096, 8192, 16384), ("whole", "chunks"), range(0, 29, 7), ("none", "host"),
        ("device", "host"),
    )  # fmt: skip
    for tokens, logits, layers, offload, reference in grid:
        values = (tokens, logits, layers, offload, reference, cache_gib)
        alternative = MemorySettings(with_values(config, dict(zip(MEMORY_KEYS, values, strict=True))), shape, Speed())
        if choice.budget.fits(alternative.lines):
            assert alternative.time.total >= choice.settings.time.total


WRITTEN: dict[str, list[Any]] = {
    "train.microbatch_tokens": [512, 16384],
    "memory.logits": ["whole", "chunks"],
    "model.checkpointing": [0, 5, True, False],
    "optimizer.offload": ["none", "host"],
    "memory.reference": ["device", "host"],
    "memory.cache_gib": [0.5, 3.0],
}


def test_settings_of_the_user_are_kept(tmp_path: Path) -> None:
    config = make_config(tmp_path, "1.5b")
    shape = make_run_shape(config)
    pairs = [(key, value) for key, values in WRITTEN.items() for value in values]
    for (key, value), device in itertools.product(pairs, (12, 60)):
        choice = choose_on(with_values(config, {key: value}), shape, device)
        assert value_of(choice.config, key) == value
        assert key not in choice.reasons
        unchosen = {name: value_of(choice.config, name) for name in MEMORY_KEYS if name not in choice.reasons}
        assert unchosen == {key: value}


def test_a_choice_leaves_nothing_to_choose(tmp_path: Path) -> None:
    config = make_config(tmp_path, "1.5b")
    shape = make_run_shape(config)
    first = choose_on(config, shape, 30)
    assert list(first.values) == list(MEMORY_KEYS)
    second = choose_on(first.config, shape, 30)
    assert (second.config, second.reasons, second.fits) == (first.config, {}, True)
    assert choose_settings(config, shape, MemoryBudget()).values == {  # without a limit
        "train.microbatch_tokens": 16384,
        "memory.logits": "whole",
        "model.checkpointing": 0,
        "optimizer.offload": "none",
        "memory.reference": "device",
        "memory.cache_gib": pytest.approx(7.0, rel=1e-3),
    }


def test_keys_without_effect_are_not_chosen(tmp_path: Path) -> None:
    adapted = make_config(tmp_path, "1.5b", *ADAPTED)
    assert "memory.reference" not in choose_on(adapted, make_run_shape(adapted), 30).reasons  # it is the base
    buckets = make_config(tmp_path, "1.5b", "train.token_buckets=[2048]")
    assert "train.microbatch_tokens" not in choose_on(buckets, make_run_shape(buckets), 139).reasons


def test_a_reason_names_the_memory_of_the_better_value(tmp_path: Path) -> None:
    config = make_config(tmp_path, "7b")
    shape = make_run_shape(config)
    choice = choose_on(config, shape, 139)
    reason = choice.reasons["optimizer.offload"]
    on_device = with_values(choice.config, {"optimizer.offload": "none"})
    needed = (peak_bytes(plan_lines(on_device, shape)) + choice.budget.reserve) / GIB
    assert reason.startswith(f"none would need {needed:.2f} GiB on the device")
    assert choice.reasons["memory.reference"] == "the weights fit on the device"


@pytest.mark.slow
def test_a_small_cache_decodes_fewer_rows_at_a_time(tmp_path: Path) -> None:
    config = make_config(tmp_path, "32b", *ADAPTED)
    shape = make_run_shape(config)
    large, small = choose_on(config, shape, 160), choose_on(config, shape, 100)
    assert small.fits
    assert (small.config.memory.cache_gib or 0) < (large.config.memory.cache_gib or 0)
    assert "64.00 GiB would need" in small.reasons["memory.cache_gib"]
    assert small.settings.time.floor["decode"] > large.settings.time.floor["decode"]
    assert small.budget.fits(small.settings.lines)
    larger = (small.config.memory.cache_gib or 0) + 0.5
    assert not small.budget.fits(small.settings.with_values({"memory.cache_gib": larger}).lines)


@pytest.mark.slow
def test_host_memory_limits_offloading(tmp_path: Path) -> None:
    config = make_config(tmp_path, "7b")
    shape = make_run_shape(config)
    assert choose_on(config, shape, 139, host=100).fits
    refused = choose_on(config, shape, 139, host=50)
    assert not refused.fits  # the host would need room for 85 GiB of state
    smaller = with_values(config, {"optimizer.state": "int8"})
    assert choose_on(smaller, shape, 139, host=50).fits


@pytest.mark.parametrize(
    ("name", "device", "overrides", "nearest"),
    [
        pytest.param("1.5b", 9, [], "adapter: {rank: 32}"),
        slow("7b", 40, [], "adapter: {rank: 32}"),
        slow("7b", 90, ["train.microbatch_tokens=16384", "model.checkpointing=0"], "train.microbatch_tokens: null"),
        slow("7b", 60, ["optimizer.offload=none"], "optimizer.offload: auto"),
        slow("1.5b", 14, ["optimizer.offload=none", "memory.logits=whole"], "optimizer.offload: auto"),
        slow("1.5b", 20, ["data.max_prompt_tokens=null", "adapter.rank=8"], "rollout.rows: 16"),
        slow("1.5b", 8, ["data.max_prompt_tokens=null", "adapter.rank=8"], "data.max_prompt_tokens: "),
    ],
)
def test_a_refusal_names_a_setting_that_fits(
    tmp_path: Path, name: str, device: int, overrides: Sequence[str], nearest: str
) -> None:
    config = make_config(tmp_path, name, *overrides)
    budget = MemoryBudget(device * GIB, 200 * GIB)
    shape = make_run_shape(config)
    assert not choose_settings(config, shape, budget).fits
    suggestions = suggest_settings(config, shape, budget)
    assert suggestions[0].setting.startswith(nearest)
    for remedy in suggestions:
        written = re.split(r", (?=[a-z_.]+: )", remedy.setting)
        changed = parse_config(
            RUN.format(folder=tmp_path), [*overrides, *(text.replace(": ", "=", 1) for text in written)]
        )
        choice = choose_settings(changed, make_run_shape(changed), budget)
        assert choice.fits
        assert remedy.required_bytes == peak_bytes(choice.settings.lines) + budget.reserve <= device * GIB


def test_a_model_that_fits_with_no_setting_has_no_suggestions(tmp_path: Path) -> None:
    config = make_config(tmp_path, "1.5b", *ADAPTED)
    shape = make_run_shape(config)
    budget = MemoryBudget(2 * GIB)
    assert not choose_settings(config, shape, budget).fits
    assert suggest_settings(config, shape, budget) == []


def test_the_defaults_of_a_cpu_are_kept_if_they_fit(tmp_path: Path) -> None:
    config = replace(make_config(tmp_path, "1.5b"), seed=3)
    shape = make_run_shape(config, device="cpu")
    for device in (None, 400 * GIB):
        choice = choose_settings(config, shape, MemoryBudget(device))
        assert (choice.config, choice.reasons) == (config, {})
    small = choose_settings(config, shape, MemoryBudget(60 * GIB))
    assert small.fits
    assert peak_bytes(small.settings.lines) < 60 * GIB
    assert set(small.reasons) == set(MEMORY_KEYS) - {
        "optimizer.offload",
        "memory.reference",
    }  # a CPU has only one memory
