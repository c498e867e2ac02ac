"""`rollgraph config`: the resolved configuration, its problems, its schema and the table of its keys."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollgraph.cli import main
from rollgraph.commands import config as command
from rollgraph.config import load_config
from rollgraph.config.names import ALGORITHM_PATHS, GROUP_RELATIVE
from rollgraph.rl.algorithms import ALGORITHMS as registry

DOCS = Path(__file__).parents[2] / "docs" / "config.md"


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["config", *arguments])
    exit_code: int = options.run(options)
    return exit_code


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train: t}\nreward: {functions: [{name: exact_match}]}\n")
    return path


def test_config_ends_quietly_when_its_output_is_closed() -> None:
    words = [sys.executable, "-m", "rollgraph", "config", "--schema"]
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_config_prints_the_resolved_configuration(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(run_file), "steps=7", "graph.scope=attn,mlp") == 0
    resolved = run_file.with_name("resolved.yaml")
    resolved.write_text(capsys.readouterr().out)
    assert load_config(resolved) == load_config(run_file, ["steps=7", "graph.scope=attn,mlp"])


def test_every_problem_is_one_line(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(run_file), "steps=0", "sed=1") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "override 'sed=1': sed: unknown key; did you mean seed?",
        "override 'steps=0': steps: expected whole number ≥ 1, got 0",
    ]


def test_names_and_options_of_built_ins_are_checked(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file.write_text(
        "model: {path: m}\ndata: {train: t}\n"
        "algorithm:\n  name: grpo\n  options:\n    kl_coef: 0.1\n    clip_lo: 0.1\n"
        "reward:\n  functions:\n    - name: exact_macth\n    - name: exact_match\n      options: {colum: a}\n"
        "    - {name: 'nowhere:f', options: {a: 1}}\n"
    )
    for main_command in ("config", "train"):
        assert main([main_command, str(run_file)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 3
        assert f"{run_file}:7: algorithm.options.clip_lo: algorithm 'grpo' has no such setting" in lines[0]
        assert f"{run_file}:10: reward.functions[0].name: there is no reward 'exact_macth'; did you mean" in lines[1]
        assert f"{run_file}:12: reward.functions[1].options.colum: reward 'exact_match' has no such option" in lines[2]
    assert main(["config", str(run_file), "algorithm.name=grop", "reward.functions=[{name: exact_match}]"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("override 'algorithm.name=grop': algorithm.name: there is no algorithm 'grop'")


def test_every_algorithm_name_can_be_loaded() -> None:
    assert set(ALGORITHM_PATHS) == set(registry)
    assert set(registry) >= GROUP_RELATIVE


def test_a_configuration_without_options_needs_no_pytorch(run_file: Path) -> None:
    program = "import sys; from rollgraph.cli import main\n"
    program += f"assert main(['config', {str(run_file)!r}]) == 0\nassert 'torch' not in sys.modules"
    source = str(Path(__file__).parents[2] / "src")
    process = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": source}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("arguments", [(), ("steps=1",)])
def test_config_needs_a_file(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*arguments) == 2
    assert "expected the YAML file of a run" in capsys.readouterr().err


def test_config_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--schema") == 0
    assert json.loads(capsys.readouterr().out)["properties"]["steps"]["minimum"] == 1


def test_the_documentation_has_the_current_table_of_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--keys") == 0
    text, _, tables = DOCS.read_text(encoding="utf-8").partition("## All keys\n\n")
    assert tables == capsys.readouterr().out, (
        "replace the tables of docs/config.md by those of `rollgraph config --keys`"
    )
    assert "did you mean" in text
