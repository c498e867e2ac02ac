"""Whole runs of the chat example, with a user who always asks again."""

from __future__ import annotations

import json
import runpy
import string
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollgraph.config import Config, load_config
from rollgraph.inputs.inputs import check_inputs
from rollgraph.rl.data.python_objects import NO_OBJECTS
from rollgraph.rl.paths import LoadError
from rollgraph.run.outcome import TrainedRun
from rollgraph.run.setup import make_run
from rollgraph.train import train
from rollgraph.types import Rollout
from tests.test_train import ONE, metrics_of

ROOT = Path(__file__).parents[2]
ENDS = list(string.ascii_letters)  # a tiny model seldom samples eos: its turns end at a letter
ASKS = """
def again(messages, prompt):
    assert prompt.columns["answer"]
    return [{"role": "user", "content": "again"}]

async def rate(messages, prompt):
    return len(messages[-2]["content"]) % 3

def broken(messages, prompt):
    raise OSError("no disk")
"""


def example(folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], *overrides: str) -> Config:
    monkeypatch.chdir(ROOT)
    script = runpy.run_path("examples/calculator_chat.py")
    script["main"](folder / "data")
    (folder / "asks.py").write_text(ASKS)
    settings = [f"output={folder / 'run'}", "graph.impl=none", "log.progress=plain", "log.sinks=[jsonl]"]
    settings += [f"data.train={folder / 'data' / 'train.jsonl'}", "data.validation=null", "rollout.max_tokens=12"]
    settings += [f"rollout.environment.options.{name}={json.dumps(value)}" for name, value in options.items()]
    return load_config(ROOT / "examples" / "calculator_chat.yaml", [*settings, *overrides])


def test_a_run_learns_from_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = tmp_path / "asks.py"
    options = {"reply": f"{asks}:again", "reward": f"{asks}:rate", "stop": ENDS}
    trained: list[list[Rollout]] = []
    plain = train.__globals__["make_batch"]

    def make_batch(run: Any, rollouts: list[Rollout], step: int) -> Any:
        trained.append(rollouts)
        return plain(run, rollouts, step)

    monkeypatch.setitem(train.__globals__, "make_batch", make_batch)
    train(example(tmp_path, monkeypatch, options, "steps=1", "graph.exact=must"), ONE)
    rollouts = [rollout for step in trained for rollout in step]
    assert any(len(rollout.spans) > 2 for rollout in rollouts)
    for rollout in rollouts:
        assert '"name": "calculate"' in rollout.prompt.text
        assert rollout.reward == sum(span.reward for span in rollout.spans)
        assert len(rollout.messages) == len(rollout.spans)
        assert {message["content"] for message in rollout.messages if message["role"] == "user"} <= {"again"}
    for row in metrics_of(tmp_path / "run"):  # training has the log-probabilities that the turns were sampled with
        assert row["policy/token_mult_prob_error_max"] == 1.0
        assert row["rewards/environment"] == row["reward"]


@pytest.mark.slow
def test_a_reply_that_always_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"reply": f"{tmp_path / 'asks.py'}:broken", "stop": ENDS}
    with pytest.raises(RuntimeError, match="every rollout failed"):
        train(example(tmp_path, monkeypatch, options, "rollout.max_tokens=160"), ONE)
    assert f"the environment failed: OSError: no disk ({tmp_path / 'asks.py'}:10)" in capsys.readouterr().out


def test_mistakes_are_reported_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in [
        ({"tools": ["rollgraph.rl.calculator:calculat"]}, r"rollout\.environment: .*did you mean 'calculate'"),
        ({"tools": [{"name": "f"}]}, r"rollout\.environment\.options\.tools: .* is neither a function nor a schema"),
        ({"reward": f"{tmp_path / 'asks.py'}:rat"}, "did you mean 'rate'"),
        (
            {"reply": "rollgraph.rl.calculator:evaluate_expression"},
            r"rollout\.environment\.options\.reply: is called as",
        ),
    ]:
        with pytest.raises(LoadError, match=message):
            check_inputs(example(tmp_path, monkeypatch, options), ONE)


def test_a_program_prompts_the_policy_as_the_environment_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat template shows the tools, and every prompt is a chat."""
    run = make_run(example(tmp_path, monkeypatch, {}), ONE)
    with TrainedRun(run.config, ONE, NO_OBJECTS, run, ExitStack()) as trained:
        prompt = run.inputs.data.next_prompts()[0]
        assert prompt.messages is not None
        assert "calculate" in prompt.text
        prompts: list[list[int]] = []
        monkeypatch.setattr(trained.policy.engine, "generate", lambda tokens, params: prompts.extend(tokens) or [])
        assert trained.generate([prompt.messages]) == []
        assert prompts == [list(prompt.tokens)]
