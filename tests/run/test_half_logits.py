"""Half logits, for runs whose prompts are longer than their completions: when they are used, exactness, and plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollgraph.checkpoint.start import REPORT
from rollgraph.config import Config, ConfigError, parse_config
from rollgraph.plan.report import Plan, make_plan
from rollgraph.train import train
from tests.parallel.worlds import run_world
from tests.test_train import ONE, metrics_of, rows_of, train_on_a_rank

SMALL = """
steps: 3
model:
  tiny: {layers: 1, width: 16, heads: 2, kv_heads: 1, mlp: 24, max_length: 32}
data: {prompts_per_step: 4, max_prompt_tokens: 24}
rollout: {samples_per_prompt: 2, max_tokens: 4, rows: 8}
reward:
  functions: [{name: "REWARD"}]
algorithm: {minibatches: 1, options: {kl_coef: 0.05}}
optimizer: {lr: 1e-2}
train: {token_buckets: [48, 96]}
checkpoint: {every: 3, export_at_end: false}
memory: {cache_gib: 0.001}
log: {progress: none, sinks: [jsonl]}
graph: {warmup: 1, exact: must}
"""
WRITTEN = """
steps: 2
model:
  tiny: {layers: 1, width: 16, heads: 2, kv_heads: 1, mlp: 24, max_length: 64}
data: {prompts_per_step: 4}
algorithm: {name: sft}
checkpoint: {export_at_end: false}
log: {progress: none, sinks: [jsonl]}
graph: {warmup: 1}
"""
QWEN_0_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
PLANNED = """
data: {{train: t.jsonl, prompts_per_step: 128, max_prompt_tokens: 2048}}
rollout: {{samples_per_prompt: 2, max_tokens: 512, rows: 256}}
reward: {{functions: [{{name: exact_match}}]}}
algorithm: {{kl_coef: 0.01}}
model: {{path: {folder}}}
"""


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sampling_run(folder: Path, *overrides: str) -> Config:
    write_rows(folder, [{"prompt": f"what comes after {i:02}?"} for i in range(12)])  # 20 tokens
    (folder / "rewards.py").write_text(
        "def even(prompts, completions, **columns):\n"
        "    return [sum(b % 2 == 0 for b in text.encode()) for text in completions]\n"
    )
    paths = [f"output={folder / 'run'}", f"data.train={folder / 'train.jsonl'}"]
    return parse_config(SMALL.replace("REWARD", f"{folder / 'rewards.py'}:even"), [*paths, *overrides])


def written_run(folder: Path, *overrides: str, text: str = WRITTEN) -> Config:
    return parse_config(text, [f"output={folder / 'run'}", f"data.train={folder / 'train.jsonl'}", *overrides])


def graphs_of(output: Path) -> list[dict[str, Any]]:
    graphs: list[dict[str, Any]] = json.loads((output / REPORT).read_text())["graphs"]
    return graphs


def replays_of(output: Path) -> dict[str, int]:
    return {graph["name"]: graph["replays"] for graph in graphs_of(output)}


def assert_exact_steps(output: Path) -> None:
    steps = metrics_of(output)
    assert len(steps) == 3
    for step in steps:
        assert step["policy/token_mult_prob_error"] == step["policy/token_mult_prob_error_max"] == 1.0
        assert step["optimizer/grad_norm"] > 0
        assert step["optimizer/skipped_steps"] == 0


# -- whole runs ------------------------------------------------------------------------------------


def test_a_run_with_half_logits_is_exact_and_captures_each_graph_once(tmp_path: Path) -> None:
    """Four prompts with two samples each fill more than one microbatch of 96 tokens in each step."""
    run = train(sampling_run(tmp_path), ONE)
    assert run is not None
    assert run.policy.limits.half_logits
    assert all((graph["captures"], graph["eager_runs"]) == (1, {}) for graph in graphs_of(tmp_path / "run"))
    replays = replays_of(tmp_path / "run")
    assert replays["train 96, logits of 48"] >= 2  # of three steps, the first is the capture
    assert replays["score 96, logits of 48"] >= 2
    assert "train 96" not in replays
    assert_exact_steps(tmp_path / "run")


def test_half_logits_give_the_metrics_of_all_logits(tmp_path: Path) -> None:
    """Generation does not depend on the setting, so both runs train on the same samples."""
    rows = []
    for setting in ("true", "false"):
        output = tmp_path / setting
        output.mkdir()
        train(sampling_run(output, f"train.half_logits={setting}", "steps=1", "checkpoint.every=1"), ONE)
        rows.append(rows_of(output / "run")[-1])
    half, whole = rows
    assert half.keys() == whole.keys()
    for name in ("reward", "loss", "policy/kl", "policy/ratio", "optimizer/grad_norm", "tokens/train"):
        assert half[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("more", "long"), [(0, True), (1, False)])
def test_sft_uses_half_logits_if_at_most_half_of_its_tokens_are_completions(
    tmp_path: Path, more: int, long: bool
) -> None:
    """A token that ends the completion belongs to it."""
    rows = [{"prompt": f"{i}" * 12, "completion": "c" * 11} for i in range(7)]
    write_rows(tmp_path, [*rows, {"prompt": "p" * 12, "completion": "c" * (11 + more)}])
    run = train(written_run(tmp_path), ONE)
    assert run is not None
    completions = run.inputs.offline_data.completions  # type: ignore[union-attr]
    assert (completions.completion_tokens, completions.total_tokens) == (8 * 12 + more, 8 * 24 + more)
    assert run.policy.limits.half_logits == long
    assert any("logits of" in name for name in replays_of(tmp_path / "run")) == long


def test_dpo_has_the_same_loss_with_half_logits(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"prompt": f"p{i}" * 9, "chosen": "yes", "rejected": "no"} for i in range(8)])
    metrics = []
    for setting in ("auto", "false"):
        options = ["algorithm.name=dpo", f"train.half_logits={setting}", f"output={tmp_path / setting}"]
        run = train(written_run(tmp_path, *options), ONE)
        assert run is not None
        assert run.policy.limits.half_logits == (setting == "auto")
        metrics.append(metrics_of(tmp_path / setting))
    for half, whole in zip(*metrics, strict=True):
        assert half["loss"] == pytest.approx(whole["loss"], rel=1e-4)


@pytest.mark.multi
@pytest.mark.parametrize("layout", [pytest.param("shard=parameters", marks=pytest.mark.slow), "tensor_parallel=2"])
def test_several_ranks_are_exact_with_half_logits(tmp_path: Path, layout: str) -> None:
    config = sampling_run(tmp_path, layout, "cpu_threads=1")
    assert run_world(2, tmp_path, train_on_a_rank, config, tmp_path / "shown.txt") == [None, None]
    assert_exact_steps(tmp_path / "run")
    replays = replays_of(tmp_path / "run")
    assert replays["score 96, logits of 48"] >= 2  # besides the capture
    assert "score 96" not in replays


# -- the plan --------------------------------------------------------------------------------------


def planned(folder: Path, *overrides: str, **options: Any) -> Plan:
    (folder / "config.json").write_text(json.dumps(QWEN_0_5B))
    return make_plan(parse_config(PLANNED.format(folder=folder), overrides), **options)


def test_half_logits_add_only_graphs_to_the_plan(tmp_path: Path) -> None:
    half, whole = (planned(tmp_path, f"train.half_logits={setting}") for setting in ("auto", "false"))
    more = 4 * 24 * (48 << 10)  # for each layer: scoring, and training with its backward
    for half_line, whole_line in zip(half.lines, whole.lines, strict=True):
        assert half_line.nbytes - whole_line.nbytes == (more if half_line.name == "graphs and libraries" else 0)


def test_a_plan_counts_the_head_only_for_completions(tmp_path: Path) -> None:
    half, whole = (planned(tmp_path, f"train.half_logits={setting}").floor for setting in ("true", "false"))
    assert half is not None
    assert whole is not None
    prompts = 128 * 2048
    saved = 2 * 151936 * 896 * prompts / 785e12
    assert whole.shared["reference"] - half.shared["reference"] == pytest.approx(saved)
    assert whole.shared["train"] - half.shared["train"] == pytest.approx(3 * saved)
    assert whole.repeated["train"] - half.repeated["train"] == pytest.approx(2 * 3 * saved)
    assert half.shared["decode"] == whole.shared["decode"]


# -- the key ---------------------------------------------------------------------------------------


def test_an_unknown_value_of_half_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.half_logits: .*auto"):
        sampling_run(tmp_path, "train.half_logits=sometimes")


def test_graphs_of_layers_use_half_logits_too(tmp_path: Path) -> None:
    train(sampling_run(tmp_path, "graph.scope=layer"), ONE)
    assert replays_of(tmp_path / "run")["score 96, logits of 48"] >= 3
    assert_exact_steps(tmp_path / "run")
