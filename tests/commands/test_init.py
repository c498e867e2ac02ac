"""`rollgraph init` and the files of its starters. `tests/test_wheel.py` trains with all of them."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollgraph.cli import main
from rollgraph.commands.init import STARTERS
from rollgraph.config import load_config, to_dict
from rollgraph.inputs.built_in_names import find_name_problems
from rollgraph.rl.environment import MultiTurn
from rollgraph.rl.turns import Turn
from rollgraph.tokenizer import ByteTokenizer
from rollgraph.types import Prompt

SOURCE = Path(__file__).parents[2] / "src" / "rollgraph" / "starters"
NEXT = {
    "quickstart": "rollgraph train config.yaml",
    "math": "pip install 'rollgraph[math]' && rollgraph train trial.yaml",
    "tools": "rollgraph train trial.yaml",
}


@pytest.fixture(scope="module")
def starters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of each starter. Tests only read it."""
    folder = tmp_path_factory.mktemp("starters")
    for name in STARTERS:
        assert main(["init", name, str(folder / name)]) == 0
    return folder


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", STARTERS)
def test_init_lists_its_files_and_the_next_command_and_overwrites_none(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/rollgraph"])
    monkeypatch.setattr(shutil, "which", lambda program: f"/somewhere/{program}")
    folder = tmp_path / "two words"
    assert main(["init", name, str(folder)]) == 0
    first, *listed, following = capsys.readouterr().out.splitlines()
    written = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert first == f"wrote to {folder}:"
    assert {folder / line.strip() for line in listed} == written.keys()
    assert {"README.md", "config.yaml", "rewards.py", "make_data.py", "data/train.jsonl"} <= set(map(str.strip, listed))
    assert following == f"next: cd '{folder}' && {NEXT[name]}"

    (folder / "rewards.py").write_text("mine")
    assert main(["init", name, str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"rollgraph init: {folder}: is not empty, and nothing is overwritten; choose another folder\n"
    )
    assert {path for path in folder.rglob("*") if path.is_file()} == written.keys()
    assert (folder / "rewards.py").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["init", "tools", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"rollgraph init: {tmp_path / 'file'}: Not a directory\n"
    with pytest.raises(SystemExit):
        main(["init", "nothing", str(tmp_path / "new")])
    assert "quickstart" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", sorted(SOURCE.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_configurations_load_and_name_existing_files(
    path: Path, starters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(starters / path.parent.name)
    config = load_config(path.name, (), find_name_problems)
    assert Path(config.data.train).is_file()
    assert Path(str(config.data.validation)).is_file()
    assert len(Path("README.md").read_text().splitlines()) == 3


@pytest.mark.parametrize("name", STARTERS)
def test_data_is_reproducible_and_held_out_prompts_are_not_trained_on(
    name: str, starters: Path, tmp_path: Path
) -> None:
    make = runpy.run_path(str(SOURCE / name / "make_data.py"))["main"]
    make(tmp_path / "again")
    make(tmp_path / "other", seed=1)
    data = starters / name / "data"
    for file in data.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
        assert (tmp_path / "other" / file.name).read_bytes() != file.read_bytes()
    train, held_out = ({row["prompt"] for row in read_rows(data / f"{part}.jsonl")} for part in ("train", "held_out"))
    assert train
    assert held_out
    assert not train & held_out


# -- math ------------------------------------------------------------------------------------------

QUESTIONS = [
    {"question": "How many?", "answer": "First 1 + 1 = <<1+1=2>>2.\n#### 1,234"},
    {"question": "How much?", "answer": "Half of it.\n#### -5"},
]
PROMPTS = [
    {"prompt": f"{question} Think step by step, and put the final answer in \\boxed{{}}.", "answer": answer}
    for question, answer in (("How many?", "1234"), ("How much?", "-5"))
]


def test_answers_of_generated_problems_are_right(starters: Path) -> None:
    """Recompute some of them from the numbers in the prompt."""
    rows = read_rows(starters / "math" / "data" / "train.jsonl")
    checked = 0
    for row in rows:
        numbers = [int(word) for word in row["prompt"].split() if word.isdigit()]
        if "marbles" in row["prompt"]:
            more, count, each = numbers
            assert int(row["answer"]) == more + count * each
            checked += 1
        elif "seats" in row["prompt"]:
            count, each, empty = numbers
            assert int(row["answer"]) == count * each - empty > 0
            checked += 1
    assert checked > 100


def test_gsm8k_is_read_from_local_files(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    folder = tmp_path / "gsm8k"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    parquet.write_table(pyarrow.Table.from_pylist(QUESTIONS), folder / "test-00000-of-00001.parquet")
    runpy.run_path(str(SOURCE / "math" / "make_data.py"))["main"](tmp_path / "data", str(folder))
    assert read_rows(tmp_path / "data" / "train.jsonl") == PROMPTS
    assert read_rows(tmp_path / "data" / "held_out.jsonl") == PROMPTS


def test_gsm8k_comes_from_the_hub_cache_or_is_generated_offline(
    starters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    command = [sys.executable, str(SOURCE / "math" / "make_data.py")]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], cwd=tmp_path, text=True, capture_output=True, timeout=300)

    offline = run()
    assert (offline.returncode, offline.stdout.partition(" (")[0]) == (0, "cannot get openai/gsm8k"), offline.stderr
    assert read_rows(tmp_path / "data" / "train.jsonl") == read_rows(starters / "math" / "data" / "train.jsonl")

    cached = tmp_path / "hub" / "hub" / "datasets--openai--gsm8k"
    files = cached / "snapshots" / ("0" * 40) / "main"
    files.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    for part in ("train", "test"):
        (files / f"{part}-00000-of-00001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    process = run("openai/gsm8k")
    assert (process.returncode, process.stdout) == (0, ""), process.stderr
    assert read_rows(tmp_path / "data" / "train.jsonl") == PROMPTS


def test_the_script_and_the_config_are_the_same_run(starters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for the name of the reward function."""
    folder = starters / "math"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "rewards", SimpleNamespace(**runpy.run_path(str(folder / "rewards.py"))))
    ours = to_dict(runpy.run_path(str(folder / "train.py"))["make_trainer"]().config)
    theirs = to_dict(load_config(folder / "config.yaml"))
    for config in (ours, theirs):
        correct, boxed = config["reward"].pop("functions")
        assert (correct["name"], correct["label"], boxed["weight"]) == ("math_verify", "correct", 0.1)
    assert ours == theirs


def test_exactly_one_boxed_answer_is_rewarded() -> None:
    boxed = runpy.run_path(str(SOURCE / "math" / "rewards.py"))["boxed"]
    texts = [r"So \boxed{72}.", r"\boxed{}", "72", r"\boxed{1} or \boxed{2}"]
    assert boxed(completions=texts, answer=["72"] * 4) == [1.0, 0.0, 0.0, 0.0]


# -- quickstart and tools --------------------------------------------------------------------------


def test_the_quickstart_rewards_the_exact_sum() -> None:
    exact = runpy.run_path(str(SOURCE / "quickstart" / "rewards.py"))["exact"]
    assert exact(completions=["46", " 46\n", "46!", "4"], answer=["46"] * 4) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["math", "tools"])
def test_random_weights_earn_a_reward_in_a_trial(name: str) -> None:
    letters = runpy.run_path(str(SOURCE / name / "rewards.py"))["letters"]
    assert letters(completions=["ab1é", "", "12"], answer=["1"] * 3) == [0.5, 0.0, 0.0]


def test_the_tool_is_called_in_turns_and_rewarded() -> None:
    """Two calls, of which the first one fails, by a policy that follows a script."""
    tokenizer = ByteTokenizer()
    reply = runpy.run_path(str(SOURCE / "tools" / "tools.py"))["reply"]
    rewards = runpy.run_path(str(SOURCE / "tools" / "rewards.py"))
    environment = MultiTurn(tokenizer, reply, samples_per_prompt=1, max_turns=4, max_tokens=200, stop=["</calc>"])
    script = iter(["Let me see: <calc>6 times 7</calc>", " again: <calc>6*7</calc>", " so it is 42."])

    def generate(requests: list[tuple[list[int], int]]) -> list[Turn]:
        turns = []
        for _ in requests:
            tokens = tokenizer.encode(text := next(script))
            turns.append(Turn(tokens, [0.0] * len(tokens), text, "stop"))
        return turns

    (rollout,) = environment.run(generate, [Prompt(0, tuple(tokenizer.encode("6*7?")), "6*7?", {"answer": "42"})])
    assert rollout.text == (
        "Let me see: <calc>6 times 7</calc><result>error: only numbers, + - * / // % ** and ( )</result>"
        " again: <calc>6*7</calc><result>42</result> so it is 42."
    )
    texts = [
        rollout.text,
        "It is 42.",
        "<calc>6*7</calc><result>42</result>",
        "<calc>x</calc><result>error: x</result> 42",
    ]
    assert rewards["right"](completions=texts, answer=["42"] * 4) == [1.0, 1.0, 0.0, 1.0]
    assert rewards["called"](completions=texts, answer=["42"] * 4) == [1.0, 0.0, 1.0, 0.0]
