"""Runs that learn from offline data: SFT on demonstrations, DPO on preference pairs."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph import Trainer
from rollgraph.checkpoint.format import checkpoint_key
from rollgraph.checkpoint.start import MODEL
from rollgraph.cli import main
from rollgraph.config import Config, ConfigError, parse_config, to_yaml
from rollgraph.model import Decoder, load_model
from rollgraph.plan.report import make_plan
from rollgraph.plan.time import Speed
from rollgraph.rl.data.rows import DataError
from rollgraph.train import train
from rollgraph.types import Rollout
from tests.parallel.worlds import run_world
from tests.test_train import ONE, assert_same_run, metrics_of, train_on_a_rank, weights_of

SMALL = """
steps: 4
model:
  tiny: {layers: 1, width: 16, heads: 2, kv_heads: 1, mlp: 24, max_length: 64}
data: {prompts_per_step: 4, chat: true}
algorithm: {name: sft}
optimizer: {lr: 1e-2}
train: {token_buckets: [96, 192]}
validation: {every: 2}
checkpoint: {every: 2}
log: {progress: none, sinks: [jsonl]}
graph: {impl: none}
"""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Demonstrations as prompt and completion or as messages, and preference pairs."""
    texts = [{"prompt": f"{i:02}?", "completion": "even" if i % 2 == 0 else "odd"} for i in range(10)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "what"},
                {"role": "user", "content": "tell"},
                {"role": "assistant", "content": "odd" if i % 2 else "even"},
            ]
        }
        for i in range(5)
    ]
    pairs = [{"prompt": f"{i}?", "chosen": "yes" * (1 + i % 2), "rejected": "no"} for i in range(8)]
    write_rows(tmp_path / "train.jsonl", [*texts, *chats])
    write_rows(tmp_path / "held_out.jsonl", [texts[3], chats[2], texts[6]])
    write_rows(tmp_path / "pairs.jsonl", pairs)
    return tmp_path


def config_of(folder: Path, *overrides: str) -> Config:
    files = [f"output={folder / 'run'}", f"data.train={folder / 'train.jsonl'}"]
    return parse_config(SMALL, [*files, f"data.validation={folder / 'held_out.jsonl'}", *overrides])


def dpo_config(folder: Path, *overrides: str) -> Config:
    pairs = [f"data.{name}={folder / 'pairs.jsonl'}" for name in ("train", "validation")]
    return config_of(folder, *pairs, "algorithm.name=dpo", *overrides)


def plain_logprobs(model: Decoder, rollout: Rollout) -> Tensor:
    """The log-probabilities of trained tokens, without packing, chunks or graphs."""
    whole = torch.tensor([*rollout.prompt.tokens, *rollout.tokens])
    length = len(whole)
    hidden = model(whole, torch.arange(length), torch.tensor([0, length], dtype=torch.int32), length)
    logprobs = (hidden[:-1] @ model.head_weight.t()).log_softmax(-1)
    token_logprobs = logprobs[torch.arange(length - 1), whole[1:]][len(rollout.prompt.tokens) - 1 :]
    return token_logprobs[torch.tensor(rollout.sampled)]


def test_sft_learns_demonstrations_and_samples_nothing(folder: Path) -> None:
    run = train(config_of(folder, "steps=12", "validation.every=12", "checkpoint.every=12"), ONE)
    assert run is not None
    assert run.policy.engine is None  # neither a KV cache nor graphs of generation
    first, *_, last = metrics_of(folder / "run")
    assert last["loss"] < 0.6 * first["loss"]
    assert last["data/epoch"] == pytest.approx(12 * 4 / 15)
    assert first["tokens/trained"] > 0
    assert not {"reward", "token_mult_prob_error", "policy/token_mult_prob_error"} & first.keys()
    model = load_model(folder / "run" / MODEL).double()
    logprobs = torch.cat([plain_logprobs(model, rollout) for rollout in run.inputs.offline_validation])
    assert last["validation/loss"] == pytest.approx(-logprobs.mean().item(), rel=1e-5)
    assert last["validation/perplexity"] == pytest.approx(math.exp(last["validation/loss"]))


def test_the_sft_gradient_is_that_of_the_mean_over_assistant_tokens(folder: Path) -> None:
    """All rows are one batch. Adam's first moment holds the gradient, which is not clipped."""
    options = ["steps=1", "data.prompts_per_step=15", "optimizer.clip_norm=null", "data.validation=null"]
    run = train(config_of(folder, *options), ONE)
    assert run is not None
    reference = load_model(folder / "run" / "reference").double()
    rollouts = run.inputs.offline_data.all_rollouts() if run.inputs.offline_data else []
    (-torch.cat([plain_logprobs(reference, rollout) for rollout in rollouts[:15]])).mean().backward()
    assert_gradients(run, reference, first_moment=0.1)


def assert_gradients(run: Any, model: Decoder, first_moment: float) -> None:
    """Compare the last gradient, from Adam's first moment. The tolerance is relative to the largest element."""
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(gradient.abs().max() for gradient in expected.values())
    for piece in run.policy.optimizer.parameter_states:
        expected_gradient = expected[piece.parameter.name].flatten()[piece.start : piece.start + piece.master.numel()]
        actual = piece.state["exp_avg"].double() / first_moment
        torch.testing.assert_close(actual, expected_gradient, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("options", ["{beta: 0.5}", "{beta: 0.3, label_smoothing: 0.2}", "{beta: 2.0, loss_type: ipo}"])
def test_the_dpo_gradient_is_that_of_its_loss(folder: Path, options: str) -> None:
    """Of the second update, when policy and reference differ. The formulas are TRL's, in float64."""
    settings = ["data.prompts_per_step=8", "steps=2", "optimizer.clip_norm=null", "checkpoint.every=1"]
    settings += ["checkpoint.keep_last=5", "data.shuffle=false", "optimizer.betas=[0.0, 0.999]"]
    run = train(dpo_config(folder, f"algorithm.options={options}", *settings), ONE)
    assert run is not None
    assert run.inputs.offline_data is not None
    policy = load_model(folder / "run" / "reference").double()
    reference = copy.deepcopy(policy)
    saved = weights_of(folder / "run", 0)
    for name, parameter in policy.named_parameters():
        parameter.data.copy_(saved[f"master/{checkpoint_key(name)}"].view_as(parameter))
    loss, metrics = plain_dpo(policy, reference, run.inputs.offline_validation, run.inputs.algorithm)
    loss.backward()
    logged = metrics_of(folder / "run")[1]
    for name, value in metrics.items():
        assert logged[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert_gradients(run, policy, first_moment=1.0)


def plain_dpo(policy: Decoder, reference: Decoder, rollouts: Any, dpo: Any) -> tuple[Tensor, dict[str, float]]:
    ipo = dpo.loss_type == "ipo"

    def sequence_logprob(model: Decoder, rollout: Rollout) -> Tensor:
        logprobs = plain_logprobs(model, rollout)
        return logprobs.mean() if ipo else logprobs.sum()

    losses, chosen, rejected = [], [], []
    for good, bad in zip(rollouts[::2], rollouts[1::2], strict=True):
        with torch.no_grad():
            reference_logprobs = sequence_logprob(reference, good), sequence_logprob(reference, bad)
        ratios = (
            sequence_logprob(policy, good) - reference_logprobs[0],
            sequence_logprob(policy, bad) - reference_logprobs[1],
        )
        logits = ratios[0] - ratios[1]
        log_sigmoid = torch.nn.functional.logsigmoid
        if ipo:
            losses.append((logits - 1 / (2 * dpo.beta)) ** 2)
        else:
            chosen_loss = -log_sigmoid(dpo.beta * logits) * (1 - dpo.label_smoothing)
            losses.append(chosen_loss - log_sigmoid(-dpo.beta * logits) * dpo.label_smoothing)
        chosen.append(dpo.beta * ratios[0].detach())
        rejected.append(dpo.beta * ratios[1].detach())
    good_rewards, bad_rewards = torch.stack(chosen), torch.stack(rejected)
    loss = torch.stack(losses).mean()
    return loss, {
        "loss": loss.item(),
        "rewards/chosen": good_rewards.mean().item(),
        "rewards/rejected": bad_rewards.mean().item(),
        "rewards/margins": (good_rewards - bad_rewards).mean().item(),
        "rewards/accuracies": (good_rewards > bad_rewards).double().mean().item(),
    }


def test_the_dpo_loss_starts_at_log_2_and_falls(folder: Path) -> None:
    train(dpo_config(folder, "steps=10", "validation.every=10", "algorithm.options.beta=0.5"), ONE)
    first, *_, last = metrics_of(folder / "run")
    assert first["loss"] == pytest.approx(math.log(2))
    assert first["rewards/margins"] == 0.0
    assert last["loss"] < 0.5
    assert last["validation/loss"] < 0.5
    assert last["validation/rewards/accuracies"] == 1.0


def test_eval_prints_the_validation_loss(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(folder)
    train(config, ONE)
    (folder / "config.yaml").write_text(to_yaml(config))
    assert main(["eval", str(folder / "config.yaml")]) == 0
    assert json.loads(capsys.readouterr().out)["validation/loss"] == metrics_of(folder / "run")[-1]["validation/loss"]


@pytest.mark.parametrize("make", [config_of, pytest.param(dpo_config, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_same_run(folder: Path, make: Any) -> None:
    train(make(folder, "steps=6"), ONE)
    halves = f"output={folder / 'halves'}"
    train(make(folder, "steps=4", halves), ONE)
    train(make(folder, "steps=6", halves, "resume=must"), ONE)
    assert_same_run(folder / "run", folder / "halves", step=5)


def test_graphs_change_nothing(folder: Path) -> None:
    train(dpo_config(folder, "steps=2"), ONE)
    train(dpo_config(folder, "steps=2", "graph={warmup: 1}", f"output={folder / 'graphs'}"), ONE)
    assert_same_run(folder / "run", folder / "graphs", step=1)
    report = json.loads((folder / "graphs" / "graphs.json").read_text())
    assert {graph["name"].split()[0] for graph in report["graphs"]} == {"score", "train"}


def test_the_best_checkpoint_has_the_lowest_validation_loss(folder: Path) -> None:
    options = ["steps=6", "validation.every=1", "checkpoint.every=6", "optimizer.lr=0.3"]
    run = train(config_of(folder, *options), ONE)
    assert run is not None
    losses = [entry["validation/loss"] for entry in metrics_of(folder / "run")]
    best = run.checkpoints.best()
    assert best is not None
    assert best.step == losses.index(min(losses))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.functions=[{name: exact_match}]"], r"reward\.functions: sft learns from completions in the data"),
        (["rollout.environment={name: 'a:b'}"], r"rollout\.environment: sft learns from completions in the data"),
        (["algorithm.name=dpo", "algorithm.minibatches=2"], r"algorithm\.minibatches: dpo scores .* one update"),
        (["algorithm.name=dpo", "algorithm.epochs=2"], r"algorithm\.epochs: dpo scores .* one update"),
        (["warm_start={data: w, stop_at: 0.5}"], r"warm_start\.stop_at: .* no reward can be reached"),
        (["data.max_tokens=100"], r"data\.max_tokens: .* at least 100 tokens, but model\.tiny\.max_length is 64"),
        (["algorithm.name=grpo", "data.max_tokens=10", "reward.functions=[{name: length}]"],
         r"data\.max_tokens: grpo samples completions"),
    ],
)  # fmt: skip
def test_contradictory_settings_are_refused(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(folder, *overrides)


def test_incomplete_rows_are_named_by_file_and_line(folder: Path) -> None:
    write_rows(folder / "bare.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a"}])
    with pytest.raises(DataError, match=r"data: .*bare\.jsonl:2: a demonstration needs `prompt` and `completion`"):
        train(config_of(folder, f"data.train={folder / 'bare.jsonl'}"), ONE)
    with pytest.raises(DataError, match=r"data: .*train\.jsonl:1: the column 'chosen' is missing"):
        train(config_of(folder, "algorithm.name=dpo"), ONE)
    with pytest.raises(
        DataError, match=r"data\.max_tokens: .*jsonl:1: the prompt with .* or set data\.too_long='drop'"
    ):
        train(config_of(folder, "data.max_tokens=9"), ONE)


def test_the_plan_of_a_supervised_run_has_no_cache(folder: Path) -> None:
    config = config_of(folder, "data.max_tokens=48")
    speed = Speed(1.0, 0.1)
    plan = make_plan(config, device="cpu", speed=speed)
    names = {line.name for line in plan.lines}
    assert not any("cache" in name or "decode" in name or "prefill" in name for name in names)
    assert plan.floor is not None
    assert plan.floor.repeated.keys() == {"train"}
    with_reference = make_plan(dpo_config(folder), device="cpu", speed=speed)
    assert with_reference.floor is not None
    assert {"policy", "reference"} < with_reference.floor.repeated.keys()


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("make", [config_of, dpo_config])
@pytest.mark.parametrize("impl", ["tape", "none"])
def test_activation_checkpointing_changes_no_bit(folder: Path, make: Any, impl: str) -> None:
    options = ["steps=2", "model.tiny.layers=2", f"graph.impl={impl}"]
    for name, checkpointing in (("kept", "auto"), ("one", "1"), ("all", "true")):
        config = make(folder, *options, f"model.checkpointing={checkpointing}", f"output={folder / name}")
        train(config, ONE)
        two_ranks = replace(config, output=str(folder / f"{name} on two"))
        assert run_world(2, folder, train_on_a_rank, two_ranks, folder / "output") == [None, None]
    for name in ("one", "all"):
        assert_same_run(folder / name, folder / "kept", 1)
        assert_same_run(folder / f"{name} on two", folder / "kept on two", 1)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("make", [config_of, dpo_config])
def test_two_ranks_learn_what_one_rank_learns(folder: Path, make: Any) -> None:
    """Each has its share of the rows, also of the three held-out ones, and metrics are those of all rows."""
    warm = f"warm_start={{data: {folder / 'train.jsonl'}, steps: 3, batch_size: 3, lr: 1e-3}}"
    options = ["data.prompts_per_step=5", "optimizer.lr=1e-3", "graph.exact=off", warm]
    train(make(folder, *options), ONE)
    two_ranks = make(folder, *options, f"output={folder / 'both'}")
    assert run_world(2, folder, train_on_a_rank, two_ranks, folder / "output") == [None, None]
    for alone, together in zip(metrics_of(folder / "run"), metrics_of(folder / "both"), strict=True):
        assert together.keys() == alone.keys()
        for name in alone.keys() & {"loss", "validation/loss", "tokens/trained", "data/epoch", "rewards/margins"}:
            assert together[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5), name


def test_supervised_training_from_python(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    settings = {"data": {"chat": True, "prompts_per_step": 4}, "graph": {"impl": "none"}, "log": {"progress": "none"}}
    tiny = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp": 24, "max_length": 64}
    with Trainer(
        train=rows, validation=rows[:3], algorithm="sft", output=folder / "run", model={"tiny": tiny}, **settings
    ) as trainer:
        run = trainer.train(steps=2)
        assert run.evaluate()["validation/loss"] == run.metrics[-1]["validation/loss"]
        assert run.evaluate(rows[5:9])["validation/loss"] != run.evaluate()["validation/loss"]
        with pytest.raises(ValueError, match="sft samples nothing, so this run cannot"):
            run.generate("2?")
