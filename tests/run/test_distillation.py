"""On-policy distillation: a teacher scores each token that the policy samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollgraph.checkpoint.format import CheckpointError
from rollgraph.config import Config, ConfigError, parse_config
from rollgraph.model import Architecture, Decoder, load_model, save_model
from rollgraph.plan.report import make_plan
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.run.rollouts import collect_rollouts
from rollgraph.run.setup import make_run
from rollgraph.tokenizer import ByteTokenizer, Tokenizer
from rollgraph.train import train
from rollgraph.types import Prompt, Rollout
from tests.rl.test_demonstrations import merging_tokenizer
from tests.run.test_supervised import plain_logprobs, write_rows
from tests.test_train import ONE, assert_same_run, metrics_of

SMALL = """
steps: 3
model: {path: MODEL}
data: {prompts_per_step: 4, max_prompt_tokens: 4}
rollout: {samples_per_prompt: 2, max_tokens: 6, rows: 8}
algorithm: {name: distillation}
optimizer: {lr: 1e-2}
train: {token_buckets: [96]}
checkpoint: {every: 2, export_at_end: false}
memory: {cache_gib: 0.001}
log: {progress: none, sinks: [jsonl]}
graph: {impl: none}
"""


def make_model(folder: Path, seed: int, *, layers: int = 1, vocabulary: int = 259, length: int = 16) -> Path:
    """A model whose tokens differ in probability, and its tokenizer."""
    torch.manual_seed(seed)
    architecture = Architecture(
        "llama", vocabulary=vocabulary, hidden=16, mlp=24, layers=layers, heads=2, kv_heads=1, head_dim=8,
        max_length=length,
    )  # fmt: skip
    model = Decoder(architecture)
    model.reset_parameters(std=0.3)
    save_model(model, folder)
    ByteTokenizer().save(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "student", 0)
    make_model(tmp_path / "same", 1)
    make_model(tmp_path / "larger", 2, layers=2)
    write_rows(tmp_path / "train.jsonl", [{"prompt": f"{i}?", "answer": "4"} for i in range(8)])
    return tmp_path


def config_of(folder: Path, teacher: str, *overrides: str) -> Config:
    paths = [
        f"output={folder / 'run'}",
        f"data.train={folder / 'train.jsonl'}",
        f"algorithm.teacher={folder / teacher}",
    ]
    return parse_config(SMALL.replace("MODEL", str(folder / "student")), [*paths, *overrides])


def test_advantages_are_differences_of_log_probabilities() -> None:
    rollout = Rollout(
        Prompt(0, (1,), ""), [5, 6, 7], [True, False, True], [-1.0, 0.0, -3.0], reference_logprobs=[-0.5, 0.0, -7.0]
    )
    second_rollout = Rollout(Prompt(0, (1,), ""), [5], [True], [-2.0], reward=1.0, reference_logprobs=[-2.25])
    (sample, _) = sorted(
        load_algorithm("distillation").make_batch([rollout, second_rollout]).samples, key=lambda s: s.rollout
    )
    assert sample.advantages == [0.5, 0.0, -4.0]
    assert sample.weights == pytest.approx([1 / 3, 0.0, 1 / 3])
    mixed = load_algorithm("distillation", {"reward_coef": 0.5})
    assert (mixed.needs_rewards, mixed.needs_reference) == (True, True)
    first, second = sorted(mixed.make_batch([rollout, second_rollout]).samples, key=lambda s: s.rollout)
    normalized = 0.5**0.5  # (r - mean) / std of rewards 0 and 1
    assert first.advantages == pytest.approx([0.5 - 0.5 * normalized, 0.0, -4.0 - 0.5 * normalized], abs=1e-5)
    assert second.advantages == pytest.approx([-0.25 + 0.5 * normalized], abs=1e-5)
    assert mixed.examine([rollout, second_rollout])["teacher/kl"] == pytest.approx((-0.5 + 4.0 + 0.25) / 3)


@pytest.mark.parametrize("teacher", ["same", "larger"])
def test_teacher_scores_equal_those_of_its_model_folder(folder: Path, teacher: str) -> None:
    from rollgraph.run.reference import set_reference

    run = make_run(config_of(folder, teacher), ONE)
    try:
        set_reference(run)
        before = run.policy.weights.checksum()
        rollouts = collect_rollouts(run, 0)
        assert run.policy.weights.checksum() == before
    finally:
        run.close()
    plain = load_model(folder / teacher).double()
    for rollout in rollouts:
        assert rollout.reference_logprobs == pytest.approx(plain_logprobs(plain, rollout).tolist(), rel=1e-4)
        assert rollout.reference_logprobs != pytest.approx(rollout.logprobs, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["same", "larger"])
def test_the_kl_divergence_from_the_teacher_falls(folder: Path, teacher: str) -> None:
    options = ["steps=20", "rollout.samples_per_prompt=16", "rollout.rows=64", "checkpoint.every=20"]
    train(config_of(folder, teacher, *options, "optimizer.lr=3e-2", "train.token_buckets=[512]"), ONE)
    values = [entry["teacher/kl"] for entry in metrics_of(folder / "run")]
    assert sum(values[-4:]) < 0.75 * sum(values[:4])
    assert "reward" not in metrics_of(folder / "run")[0]


@pytest.mark.slow
def test_graphs_and_resuming_change_nothing_and_a_changed_teacher_is_refused(folder: Path) -> None:
    rewarded = ["reward.functions=[{name: length, options: {limit: 3}}]", "algorithm.options.reward_coef=0.5"]
    train(config_of(folder, "larger", *rewarded), ONE)
    second = [*rewarded, f"output={folder / 'other'}", "graph={warmup: 1}"]
    train(config_of(folder, "larger", *second, "steps=2"), ONE)
    train(config_of(folder, "larger", *second, "resume=must"), ONE)
    assert_same_run(folder / "run", folder / "other", step=2)
    make_model(folder / "larger", 9, layers=2)
    with pytest.raises(CheckpointError, match=r"larger.*holds the reference policy"):
        train(config_of(folder, "larger", *second, "steps=4"), ONE)


def test_validation_without_rewards_measures_the_kl_from_the_teacher(folder: Path) -> None:
    train(config_of(folder, "same", f"data.validation={folder / 'train.jsonl'}", "validation.every=3"), ONE)
    assert metrics_of(folder / "run")[-1]["validation/teacher/kl"] > 0


def make_foreign_teacher(folder: Path) -> Tokenizer:
    make_model(folder / "foreign", 1)
    for path in (folder / "foreign").glob("tokenizer*"):
        path.unlink()
    tokenizer = merging_tokenizer()
    tokenizer.save(folder / "foreign")
    return tokenizer


def test_an_unsuitable_teacher_is_refused(folder: Path) -> None:
    make_foreign_teacher(folder)
    with pytest.raises(ConfigError, match=r"algorithm\.teacher: .*foreign has another tokenizer: .* is absent there"):
        train(config_of(folder, "foreign"), ONE)
    make_model(folder / "narrow", 1, vocabulary=200)
    with pytest.raises(ConfigError, match=r"algorithm\.teacher: .*narrow has a vocabulary of 200, but .* 259 ids"):
        train(config_of(folder, "narrow"), ONE)
    make_model(folder / "short", 1, length=8)
    with pytest.raises(ConfigError, match=r"algorithm\.teacher: .*short takes 8 tokens, but .* may have 10"):
        train(config_of(folder, "short"), ONE)
    with pytest.raises(ValueError, match=r"algorithm\.teacher: .*nowhere is not a folder"):
        train(config_of(folder, "nowhere"), ONE)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.teacher=null"], r"algorithm\.teacher: distillation needs the folder of a teacher"),
        (["rollout.top_p=0.5"], r"rollout\.top_k, top_p and min_p change the distribution"),
        (["algorithm.options.reward_coef=1.0"], r"reward\.functions: give a reward function"),
        (["algorithm.options.reward_coef=1.0", "reward.functions=[{name: exact_match}]",
          "rollout.samples_per_prompt=1"], r"rollout\.samples_per_prompt: distillation compares the samples"),
        (["algorithm.name=grpo", "reward.functions=[{name: exact_match}]"], r"algorithm\.teacher: grpo has no teacher"),
    ],
)  # fmt: skip
def test_contradictory_settings_are_refused(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(folder, "same", *overrides)


def test_the_plan_counts_the_teacher(folder: Path) -> None:
    def reference(teacher: str) -> dict[str, int]:
        plan = make_plan(config_of(folder, teacher), device="cpu")
        return {line.name: line.nbytes for line in plan.lines if line.name in ("reference", "teacher")}

    student = sum(parameter.nbytes for parameter in load_model(folder / "student").parameters())
    assert reference("same")["reference"] == pytest.approx(student, rel=0.05)  # flat buckets have padding
    larger = sum(parameter.nbytes for parameter in load_model(folder / "larger").parameters())
    assert reference("larger") == {"teacher": larger}
