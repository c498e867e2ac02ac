"""Classes and functions as arguments, in place of import paths: runs resume with them, and ranks get them."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollgraph import Trainer
from rollgraph.cli import main
from rollgraph.config import ConfigError, to_yaml
from rollgraph.config.fields import ObjectPath
from rollgraph.config.keys import AdapterConfig, EnvironmentConfig
from rollgraph.errors import InvalidInput
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.environment import MultiTurn
from rollgraph.rl.paths import LoadError, load_object

ROOT = Path(__file__).parents[1]


class Game:
    """The state of an episode."""

    def __init__(self, prompt: object) -> None:
        self.prompt = prompt

    def reply(self, messages: object, prompt: object) -> None:
        pass


# A program that defines a game in several turns, an algorithm and a reward.
PROGRAM = """
import os
import signal
import sys
import time
from pathlib import Path

from rollgraph import Trainer
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.chat import Chat


class Guess:
    def __init__(self, prompt):
        self.turns = 0

    def reply(self, messages, prompt):
        self.turns += 1
        return [{"role": "user", "content": "again"}] if self.turns < 2 else None


class Bold(GRPO):
    def advantages(self, rollouts, rewards):
        return [2 * advantage for advantage in super().advantages(rollouts, rewards)]


class Other(Bold):
    pass


def letters(completions, **columns):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def kill(step, metrics):
    if os.environ["KILL"] == str(step):
        while not list(Path("killed/checkpoints").glob("step_????????/manifest.json")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    output, algorithm, *rest = sys.argv[1:]
    trainer = Trainer(
        model={"tiny": {"layers": 1, "width": 8, "heads": 1, "kv_heads": 1, "mlp": 8, "max_length": 512}},
        train=[{"prompt": f"{number}+1="} for number in range(6)],
        rewards=[letters],
        algorithm=globals().get(algorithm, algorithm),
        environment=None if rest else {"name": Chat, "options": {"episode": Guess, "max_tokens": 64}},
        callbacks=kill,
        output=output,
        prompts_per_step=2,
        max_prompt_tokens=256,
        samples_per_prompt=2,
        max_tokens=3,
        rows=4,
        token_buckets=[1280],
        cache_gib=0.01,
        cpu_threads=1,
        progress="none",
        sinks=["jsonl"],
        checkpoint_every=1,
        lr=1e-2,
        graph={"impl": "none", "warmup": 1},
        reward_workers=2,
    )
    trainer.train(steps=4).close()
"""


def run_program(folder: Path, *arguments: str, launcher: tuple[str, ...] = (), kill_after: int | None = None) -> Any:
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "KILL": str(kill_after)}
    command = [sys.executable, *launcher, "program.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def rewards_of(run: Path) -> list[float]:
    return [json.loads(line)["reward"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.multi
def test_a_killed_program_resumes_with_its_objects(tmp_path: Path) -> None:
    whole = run_program(tmp_path, "whole", "Bold")
    assert whole.returncode == 0, whole.stderr
    assert run_program(tmp_path, "killed", "Bold", kill_after=1).returncode == -signal.SIGKILL
    changed = run_program(tmp_path, "killed", "Other")
    assert "algorithm.name: __main__:Bold → __main__:Other" in changed.stderr
    without_environment = run_program(tmp_path, "killed", "Bold", "no environment")
    assert "rollout.environment: {" in without_environment.stderr
    resumed = run_program(tmp_path, "killed", "Bold")
    assert resumed.returncode == 0, resumed.stderr
    assert rewards_of(tmp_path / "killed") == rewards_of(tmp_path / "whole")
    saved = [file for file in (tmp_path / "whole" / "checkpoints").rglob("*") if file.is_file()]
    assert {file.suffix for file in saved} <= {".json", ".safetensors"}


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_get_the_objects_of_their_program(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    completed = run_program(tmp_path, "run", "Bold", launcher=launcher)
    assert completed.returncode == 0, completed.stderr
    assert len(rewards_of(tmp_path / "run")) == 4


TINY = {"tiny": {"layers": 1, "width": 8, "heads": 1, "kv_heads": 1, "mlp": 8, "max_length": 16}}


def make_trainer(output: Path, **arguments: Any) -> Trainer:
    settings = {
        "model": TINY,
        "train": [{"prompt": "1+1="}],
        "output": output,
        "prompts_per_step": 1,
        "max_prompt_tokens": 4,
        "samples_per_prompt": 2,
        "max_tokens": 3,
        "rows": 2,
        "token_buckets": [64],
        "cache_gib": 0.001,
        "cpu_threads": 1,
        "progress": "none",
        "sinks": ["jsonl"],
        "graph": {"impl": "none", "warmup": 1},
    }
    return Trainer(**{**settings, "rewards": [("length", 1.0, {"limit": 3})], **arguments})


def test_local_classes_and_functions_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(text: str, prompt: object) -> None:
        pass

    class Bold(GRPO):
        pass

    class Game(MultiTurn):
        pass

    environment = {"name": Game, "options": {"reply": reply, "max_turns": 2, "max_tokens": 6}}
    trainer = make_trainer(tmp_path, environment=environment, algorithm={"name": Bold, "kl_coef": 0.1}, stop=["\n"])
    trainer.train(steps=1).close()
    with trainer.open(steps=2) as (run, _):
        assert (type(run.inputs.algorithm), type(run.inputs.environment)) == (Bold, Game)
    path = f"{__name__}:test_local_classes_and_functions_are_accepted.<locals>."
    written = (tmp_path / "config.yaml").read_text()
    assert f"name: {path}Game\n" in written
    assert f"reply: {path}reply\n" in written
    assert main(["train", str(tmp_path / "config.yaml"), "steps=3"]) == 2
    assert "it is defined in a Python program, so run that" in capsys.readouterr().err


def test_an_environment_may_be_a_callable_or_a_name(tmp_path: Path) -> None:
    make = partial(MultiTurn, reply=lambda text, prompt: None, max_turns=1, max_tokens=4)
    config = make_trainer(tmp_path, environment=make).config
    assert config.rollout.environment is not None
    assert config.rollout.environment.name == "rollgraph.rl.environment:MultiTurn"
    assert load_object(config.rollout.environment.name) is make
    chat = make_trainer(tmp_path, episode=Game).config.rollout.environment
    assert chat == EnvironmentConfig(name="rollgraph.rl.chat:Chat", options={"episode": f"{__name__}:Game"})
    with pytest.raises(InvalidInput, match="episode: is an option of the environment"):
        make_trainer(tmp_path, episode=Game, environment=make)
    with (
        pytest.raises(LoadError, match=r"Game.*missing a required argument: 'prompt'.*is the option `episode` of"),
        make_trainer(tmp_path, environment=Game).open(steps=1),
    ):
        pass
    named = make_trainer(tmp_path, environment="rollgraph.rl.calculator:calculator").config
    assert named.rollout.environment is not None
    with pytest.raises(ConfigError, match=r"argument lr: optimizer\.lr: expected text, a number, .* got a function"):
        make_trainer(tmp_path, lr=lambda step: 1e-3)


def test_an_adapter_may_be_a_config_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    peft_config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(tmp_path, adapter=peft_config)
    assert trainer.config.adapter == AdapterConfig(rank=4, alpha=8.0, targets=("v_proj", "down_proj"))
    with trainer.train(steps=1):
        written = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (4, 8)
    default = make_trainer(tmp_path, adapter=peft.LoraConfig(use_rslora=True)).config.adapter
    assert default == AdapterConfig(rank=8, alpha=8.0, targets=("q_proj", "v_proj"), rslora=True)
    everything = make_trainer(tmp_path, adapter=peft.LoraConfig(target_modules="all-linear")).config.adapter
    assert everything == AdapterConfig(rank=8, alpha=8.0)


@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"bias": "all"}, {"target_modules": ["lm_head"]}, {"init_lora_weights": "gaussian"}],
    ids=str,
)
def test_unsupported_settings_of_peft_are_named(tmp_path: Path, settings: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(InvalidInput, match=f"LoraConfig: {next(iter(settings))}="):
        make_trainer(tmp_path, adapter=peft.LoraConfig(**settings))


def test_a_callback_of_transformers_sees_steps_and_stops_the_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    events: list[tuple[Any, ...]] = []

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            events.append(("begin", args.output_dir, state.max_steps))

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            events.append((state.global_step, logs["reward"]))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> Any:
            events.append(("evaluate", metrics["eval_reward"]))
            control.should_training_stop = state.global_step == 2
            return control

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            events.append(("end", state.global_step))

    trainer = make_trainer(tmp_path, callbacks=Watch(), validation=[{"prompt": "2+2="}], validation_every=2)
    with trainer.train(steps=4) as run:
        assert not run.finished
        rows = {row["step"]: row for row in run.metrics}
    assert events == [
        ("begin", str(tmp_path), 4),
        (1, rows[0]["reward"]),
        (2, rows[1]["reward"]),
        ("evaluate", rows[1]["validation/reward"]),
        ("end", 2),
    ]


def test_a_pickled_object_path_is_text() -> None:
    path = ObjectPath(GRPO)
    assert path == "rollgraph.rl.algorithms.grpo:GRPO"
    assert copy.deepcopy(path) is path
    assert type(pickle.loads(pickle.dumps(path))) is str
    config = make_trainer(Path("unused"), algorithm=GRPO).config
    assert "name: rollgraph.rl.algorithms.grpo:GRPO\n" in to_yaml(config)
