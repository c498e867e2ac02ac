"""`rollgraph.Trainer` gives the run of the command, and reports wrong arguments before it writes anything."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollgraph import Trainer
from rollgraph.cli import main
from rollgraph.config import ConfigError, config_from_keywords, to_yaml
from rollgraph.config.loading import argument_key, list_keys
from rollgraph.errors import InvalidInput
from rollgraph.rl.data.python_objects import read_rows
from rollgraph.rl.data.rows import DataError
from rollgraph.rl.paths import LoadError, load_object

TINY = {"tiny": {"layers": 1, "width": 8, "heads": 1, "kv_heads": 1, "mlp": 8, "max_length": 16}}
ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(6)]
SMALL: dict[str, Any] = {
    "prompts_per_step": 2,
    "max_prompt_tokens": 6,
    "samples_per_prompt": 2,
    "max_tokens": 3,
    "rows": 4,
    "token_buckets": [64],
    "cache_gib": 0.001,
    "cpu_threads": 1,
    "progress": "none",
    "sinks": ["jsonl"],
    "checkpoint_every": 2,
    "lr": 1e-2,
    "graph": {"impl": "none", "warmup": 1},
}


def letters(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Reward different characters."""
    return [len(set(text)) / 10 for text in completions]


def small_trainer(output: Path, **arguments: Any) -> Trainer:
    defaults = {"model": TINY, "train": ROWS, "rewards": [letters], "output": output, **SMALL, **arguments}
    return Trainer(**defaults)


# -- a run -----------------------------------------------------------------------------------------


def test_more_steps_continue_a_run_exactly(tmp_path: Path) -> None:
    steps_seen: list[int] = []
    answers_seen: list[str] = []

    def note_answers(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        answers_seen.extend(answer)
        return letters(completions, answer)

    shared = {"rewards": [{"function": note_answers, "label": "letters"}], "max_prompts": 2}
    options = {"validation": iter(ROWS[:2]), **shared, "callbacks": [lambda step, metrics: steps_seen.append(step)]}
    trainer = small_trainer(tmp_path / "twice", **options)
    trainer.train(steps=2)
    run = trainer.train(steps=4)
    assert steps_seen == [0, 1, 2, 3]
    assert [row["step"] for row in run.metrics if row["step"] >= 0] == [0, 1, 2, 3]
    assert {row["prompt"] for row in run.samples} <= {row["prompt"] for row in ROWS}

    whole = small_trainer(tmp_path / "once", validation=ROWS[:2], **shared).train(steps=4)
    ours, theirs = run.policy.model.state_dict(), whole.policy.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert run.generate("1+1=", seed=3) == whole.generate(["1+1="], seed=3)[0]
    assert run.evaluate(ROWS[2:]) == whole.evaluate(ROWS[2:])
    answers_seen.clear()
    run.evaluate(iter(ROWS))  # all rows, though validation uses only two
    assert answers_seen == [row["answer"] for row in ROWS]

    finished = small_trainer(tmp_path / "twice", validation=ROWS[:2], **shared)
    reopened = finished.train(steps=4)  # its last checkpoint is loaded
    assert run.finished
    assert reopened.finished
    assert reopened.generate("1+1=", seed=3) == run.generate("1+1=", seed=3)
    assert reopened.evaluate() == run.evaluate()
    exported = reopened.export(tmp_path / "exported")
    config = json.loads((exported / "config.json").read_text())
    assert config["hidden_size"] == 8
    for each in (run, whole, reopened):
        each.close()
    assert len(reopened.metrics) == len(run.metrics)


@pytest.mark.slow
def test_activation_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    model = {"tiny": {**TINY["tiny"], "layers": 2}}
    weights = []
    for checkpointing, count in (("auto", 0), (1, 1), (True, 2)):
        settings = {"model": {**model, "checkpointing": checkpointing}, "kl_coef": 0.1, "graph": {"warmup": 1}}
        with small_trainer(tmp_path / str(checkpointing), **settings).train(steps=2) as run:
            assert run.policy.model.checkpointing == count
            weights.append([parameter.detach().clone() for parameter in run.policy.model.parameters()])
    for recomputed in weights[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(recomputed, weights[0], strict=True))


def test_generate_takes_chats_and_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1="}]
    model = {"tiny": {**TINY["tiny"], "max_length": 48}}
    with small_trainer(tmp_path, model=model, max_prompt_tokens=32).train(steps=1) as run:
        answer = run.generate(chat, seed=3)
        assert isinstance(answer, str)
        assert run.generate([chat], seed=3) == [answer]
        with pytest.raises(InvalidInput, match="n: each prompt gets one completion"):
            run.generate("1+1=", n=2)
        with pytest.raises(
            InvalidInput, match=r"prompts: expected text, or messages with a role and a content, got \{"
        ):
            run.generate([{"content": "1+1="}])
        with pytest.raises(InvalidInput, match="prompts: one has 36 tokens, and this run has room for 35, completion"):
            run.generate("1" * 36)


def test_generate_builds_prompts_as_the_environment_does(tmp_path: Path) -> None:
    options = {"tools": ["rollgraph.rl.calculator:calculate"], "max_turns": 1, "max_tokens": 3}
    settings = {
        "environment": {"name": "rollgraph.rl.chat:Chat", "options": options},
        "model": {"tiny": {**TINY["tiny"], "max_length": 640}},
        "max_prompt_tokens": 636,
        "token_buckets": [704],
        "rewards": [("length", 1.0, {"limit": 3})],
    }
    with small_trainer(tmp_path, **settings).train(steps=1) as run:
        assert run.policy.engine is not None
        sample = run.samples[0]
        prompt = ROWS[sample["prompt_id"]]["prompt"]
        assert '"name": "calculate"' in sample["prompt"]
        tokens = run.policy.tokenizer.encode(sample["prompt"], special=False)
        with run.policy.phases.enter("generate"):
            (expected,) = run.policy.engine.generate([tokens], replace(run.policy.sampling, seed=3))
        assert run.generate(prompt, seed=3) == expected.completions[0].text


def test_a_run_from_python_equals_that_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    trainer = small_trainer(tmp_path / "program", train=iter(ROWS), rewards=[(letters, 0.5)], algorithm="dapo")
    with trainer.train(steps=3) as run:
        ours = run.metrics
    functions = [{"name": "tests.test_trainer:letters", "weight": 0.5}]
    config = small_trainer(
        tmp_path / "command", train=tmp_path / "train.jsonl", rewards=functions, algorithm="dapo", steps=3
    ).config
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    theirs = [json.loads(line) for line in (tmp_path / "command" / "metrics.jsonl").read_text().splitlines()]
    timed = "speed/"
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert {k: v for k, v in our_row.items() if timed not in k} == {
            k: v for k, v in their_row.items() if timed not in k
        }


RANKS = """
import json, sys
from pathlib import Path
from rollgraph.parallel.ranks.world import World
from tests.test_trainer import ROWS, small_trainer

output = Path(sys.argv[1])
trainer = small_trainer(output / "run", validation=ROWS[:3], callbacks=[lambda step, metrics: step == 1])
for step in trainer:
    if World.current().rank == 1:
        break  # stops the other rank as well
run = trainer.train(steps=5)  # rank 0 stops it after the second step
results = {"evaluation": run.evaluate(ROWS), "text": run.generate("1+1=", seed=1), "steps": len(run.metrics)}
run.export(output / "exported")
(output / f"rank{World.current().rank}.json").write_text(json.dumps(results))
trainer.close()
"""


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_train_stop_and_evaluate_together(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "script.py", "."]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["steps"] == 3  # with the validation before the first one
    assert (tmp_path / "exported" / "config.json").exists()


def test_a_loop_over_steps_that_ends_early_is_saved(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, steps=3)
    for step in trainer:
        assert math.isfinite(step.metrics["reward"])
        break
    with pytest.raises(RuntimeError, match="has not ended yet"):
        _ = trainer.run
    assert [number for number, _ in trainer] == [1, 2]
    assert [row["step"] for row in trainer.run.metrics] == [0, 1, 2]
    trainer.close()


@pytest.mark.parametrize("how", ["returns True", "returns a True of NumPy", "calls stop"])
def test_a_callback_stops_the_run(tmp_path: Path, how: str) -> None:
    def callback(step: int, metrics: dict[str, float]) -> Any:
        if step != 1:
            return metrics["reward"]  # only True stops
        if how == "calls stop":
            return trainer.stop()
        return True if how == "returns True" else np.mean([metrics["reward"]]) >= 0

    trainer = small_trainer(tmp_path, steps=10, callbacks=callback)
    with trainer.train() as run:
        assert [row["step"] for row in run.metrics] == [0, 1]
        assert not run.finished
        assert run.generate(["1+1=", "2+1="], temperature=0.0)
    assert (tmp_path / "checkpoints" / "step_00000001").is_dir()


def test_a_run_can_be_used_until_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"tiny": {**TINY["tiny"], "max_length": 48}}
    trainer = small_trainer(Path("run"), model=model, max_prompt_tokens=40)
    numbers = []
    for step in trainer:
        numbers.append(step.number)
        trainer.stop()  # between two steps
    assert numbers == [0]
    run = trainer.run
    chat = [{"role": "user", "content": "1"}]
    assert run.generate(chat, seed=1) == run.generate([chat], seed=1)[0]
    with pytest.raises(InvalidInput, match="n: each prompt gets one completion"):
        run.generate("1+1=", n=2)
    with pytest.raises(InvalidInput, match=r"prompts: expected text, or messages with a role and a content, got None"):
        run.generate(["1+1=", None])  # type: ignore[list-item]
    trained = weakref.ref(run.policy.model)
    run.close()
    gc.collect()
    assert trained() is None
    with pytest.raises(RuntimeError, match="this run is closed"):  # another run may have taken more steps
        run.generate("1+1=")
    monkeypatch.chdir("/")
    assert len(run.metrics) == 1


def test_ctrl_c_saves_the_run(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        press = [lambda step, metrics: signal.raise_signal(signal.SIGINT)]
        with pytest.raises(KeyboardInterrupt):
            small_trainer(tmp_path, callbacks=press).train(steps=9)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000000"]


def test_invalid_unicode_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a surrogate pair in a column, and a byte in a command that is not UTF-8."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "\udcff.py"])
    rows = [{**row, "answer": "\ud800"} for row in ROWS]
    with small_trainer(tmp_path, train=rows).train(steps=1) as run:
        assert run.samples[0]["columns"] == {"answer": "\ud800"}
    assert json.loads((tmp_path / "starts.jsonl").read_text())["command"] == "python '\udcff.py'"


class Table:
    """Iterates like a DataFrame of pandas: over the names of columns."""

    def __iter__(self) -> Iterator[str]:
        return iter(ROWS[0])

    def itertuples(self) -> Iterator[Any]:
        raise NotImplementedError

    def to_dict(self, orient: str) -> list[dict[str, str]]:
        assert orient == "records"
        return ROWS


def test_rows_may_be_tables_and_arrays() -> None:
    assert read_rows(Table(), "train") == read_rows(ROWS, "train")
    chat = [{"role": "user", "content": "1+1="}]
    _, rows = read_rows([{"messages": np.array(chat)}, {"prompt": tuple(chat)}], "train")
    assert rows is not None
    assert [row.prompt for row in rows] == [chat, chat]


def test_endless_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgraph.rl.data.python_objects.MAX_UNSIZED_ROWS", 6)
    assert read_rows(iter(ROWS), "train") == read_rows(ROWS, "train")
    with pytest.raises(DataError, match=r"^train: no end after 6 rows, .*: give itertools\.islice\(rows, n\) or"):
        read_rows(itertools.cycle(ROWS), "train")


def test_a_partial_has_the_name_of_its_function(tmp_path: Path) -> None:
    """A resumed run with a partial of another function is therefore recognized as changed."""
    (function,) = small_trainer(tmp_path, rewards=partial(letters)).config.reward.functions
    assert (function.name, function.label) == ("tests.test_trainer:letters", "letters")


def test_the_command_refuses_a_config_with_objects_of_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_trainer(tmp_path / "run").config
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "data.train: python:train: a Python program gave these rows: run it again" in capsys.readouterr().err
    with pytest.raises(LoadError, match="it is defined in a Python program, so run that"):
        load_object("__main__:defined_in_a_notebook")


def test_a_stop_before_the_first_step_is_kept(tmp_path: Path) -> None:
    is_stopped: list[bool] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        if not is_stopped:
            is_stopped.append(True)
            trainer.stop()  # in the validation before the first step
        return [float(len(text)) for text in completions]

    trainer = small_trainer(tmp_path, rewards=reward, validation=ROWS[:2])
    with trainer.train(steps=5) as run:
        assert [row["step"] for row in run.metrics] == [-1]
        assert not run.finished


def test_a_failing_callback_loses_no_step(tmp_path: Path) -> None:
    def callback(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise KeyError("plot")

    with pytest.raises(KeyError, match="plot"):
        small_trainer(tmp_path, callbacks=[callback]).train(steps=10)
    assert (tmp_path / "checkpoints" / "step_00000002").is_dir()


def test_a_custom_loop_is_logged_and_saved(tmp_path: Path) -> None:
    """The loop of docs/python_api.md."""
    from rollgraph.run.saving import save_after_step, saved_on_error

    trainer = small_trainer(tmp_path, algorithm={"name": "grpo", "kl_coef": 0.1})
    with trainer.open(steps=2) as (run, steps), run.log.writing(steps.start), saved_on_error(run):
        for step in steps:
            generate = partial(run.policy.generate, seed=f"mine/{step}")
            rollouts = run.inputs.environment.run(generate, run.inputs.data.next_prompts())
            run.inputs.rewards.score(rollouts)
            run.policy.score(rollouts, "reference")
            batch = run.inputs.algorithm.make_batch(rollouts)
            learned = run.policy.train(batch)
            run.progress.finish_step(step, run.policy.optimizer.steps)
            run.log.write(step, rollouts, batch, learned)
            save_after_step(run, step, score=None, stopping=False)
    with trainer.train(steps=3) as run_after:
        assert [row["step"] for row in run_after.metrics] == [0, 1, 2]
        assert all(math.isfinite(row["loss"]) for row in run_after.metrics)


def test_a_model_and_a_tokenizer_of_transformers_are_trained_as_a_copy(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3}, unk_token="c"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=4, num_key_value_heads=1, max_position_embeddings=16, **shape)
    model = transformers.LlamaForCausalLM(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = [{"prompt": "a b", "answer": "a"}, {"prompt": "b a", "answer": "b"}]
    trainer = small_trainer(tmp_path, model=(model, tokenizer), train=rows, max_prompt_tokens=4)
    with trainer.train(steps=1) as run:
        ours = run.policy.model.embed_tokens.weight
        assert not torch.equal(ours, before["model.embed_tokens.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # the run trains a copy
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    kl = {"algorithm": {"name": "grpo", "kl_coef": 0.1}, "allow_changes": ["algorithm"]}
    trainer = small_trainer(tmp_path, model=(model, tokenizer), train=rows, max_prompt_tokens=4, **kl)
    with trainer.open(steps=2) as (resumed, steps):
        assert steps == range(1, 2)
        assert not torch.equal(resumed.policy.model.embed_tokens.weight, torch.zeros(4, 16))


# -- arguments -------------------------------------------------------------------------------------


def test_arguments_are_names_of_keys() -> None:
    assert argument_key("max_tokens") == "rollout.max_tokens"
    assert argument_key("lr") == "optimizer.lr"
    assert argument_key("temperature") == "rollout.temperature"
    assert argument_key("checkpoint_every") == "checkpoint.every"
    assert argument_key("validation_temperature") == "validation.temperature"
    assert argument_key("steps") == "steps"
    assert argument_key("optimizer.lr") == "optimizer.lr"
    for key in list_keys():
        if "[]" not in key.name:
            assert argument_key(key.name.replace(".", "_")) == key.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_token": 3}, "argument max_token: there is no such key; did you mean max_tokens"),
        ({"learning_rate": 3}, "argument learning_rate: there is no such key; GRPOConfig's learning_rate is lr here"),
        ({"eps": 0.2}, r"argument eps: optimizer.eps: expected number > 0 and ≤ 0.01, got 0.2; this is Adam's"),
        (
            {"clip_low": 0.1},
            'argument clip_low: there is no such key; did you mean algorithm_options={"clip_low": ...}',
        ),
        ({"algorithm_options": {"epsilon": 0.2}}, "GRPOConfig's epsilon is algorithm.options.clip_low and"),
        ({"every": 3}, "argument every: several sections have this key; write validation_every or checkpoint_every"),
        ({"samples_per_prompt": 1}, "argument samples_per_prompt: rollout.samples_per_prompt: grpo compares"),
        ({"max_tokens": "many"}, "argument max_tokens: rollout.max_tokens: expected whole number ≥ 1, got the text"),
        ({"lr": math.nan}, "argument lr: optimizer.lr: expected a finite number, got nan"),
        ({"lr": b"1"}, "argument lr: optimizer.lr: expected text, a number, a list or a mapping, got a bytes"),
        ({"optimizer": {"lr": 1e-3}}, "argument (lr|optimizer): optimizer.lr: also given by argument (optimizer|lr)"),
        ({"optimizer": {"rate": 1e-3}}, "argument optimizer: optimizer.rate: unknown key"),
        ({"rewards": ["exakt"]}, "there is no reward 'exakt'"),
        ({"rewards": []}, "reward.functions: give a reward function or an environment"),
        ({"rewards": ["length", "length"]}, "two rewards are called 'length'; give one of them another label"),
        ({"algorithm": "grop"}, "there is no algorithm 'grop'; did you mean 'grpo'"),
        ({"algorithm": "ppo"}, "there is no algorithm 'ppo'; it is not supported: it needs a critic"),
        ({"train": None}, "data.train: required, but missing"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_trainer(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": {"train": ROWS, "test": ROWS}}, "train: expected rows, got a mapping with 'train', 'test'"),
        ({"train": []}, "train: there are no rows"),
        ({"train": 5}, "train: expected a path, or rows such as a list of dicts, got a int"),
        ({"train": [{"question": "?"}]}, "train:1: expected either 'prompt' or 'messages', got 'question'"),
        ({"train": {"prompt": ["?"]}}, "train: expected rows, got a mapping with 'prompt'; give a list with one dict"),
        ({"train": [{"prompt": "?", 0: 1}]}, "train:1: the name of a column must be text, got 0"),
        ({"callbacks": [print, 3]}, r"callbacks: expected a function of \(step, metrics\), got 3"),
        ({"rewards": None}, "rewards: expected a list of rewards, got None"),
        ({"rewards": [3]}, "rewards: expected the name of a reward, or a function, got 3"),
        ({"model": 3}, "model: expected a folder, a hub id"),
        ({"callbacks": [lambda step: None]}, "callbacks: expected a function of .*too many positional arguments"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),  # the repr of a function has an address
)
def test_a_wrong_object_is_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        small_trainer(tmp_path, **arguments)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_keywords({"stepps": 3, "max_tokn": 1})
    assert len(caught.value.problems) == 2
