"""Guides for new users: all their commands and snippets are executed, in order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from rollgraph.model import Architecture, Decoder, save_model
from rollgraph.tokenizer import ByteTokenizer
from tests.test_train import assert_same_run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
NAME = re.compile(r"# (\w+\.(?:py|yaml))\n")
# Replaces the download of the page with a tiny random model of that name.
DOWNLOAD = """#!/bin/sh
[ "$1 $3" = "download --local-dir" ] && mkdir -p "$(dirname "$4")" && cp -R "{model}" "$4"
"""
ROLLGRAPH = '#!/bin/sh\nexec "{python}" -m rollgraph "$@"\n'
PYTHON = '#!/bin/sh\nexec "{python}" "$@"\n'


def blocks_of(page: str) -> list[tuple[str, str]]:
    """The language and the text of each code block."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def write_tiny_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    tiny = Architecture("qwen2", vocabulary=259, hidden=32, mlp=48, layers=1, heads=2, kv_heads=1, head_dim=16)
    save_model(Decoder(tiny), folder)
    ByteTokenizer().save(folder)


def write_files(page: str, folder: Path) -> None:
    """Write the blocks of a page that begin with a file name."""
    for _, text in blocks_of(page):
        if name := NAME.match(text):
            (folder / name[1]).write_text(text)


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Reader:
    """A user who follows a page in an empty folder, with the commands that it needs."""

    def __init__(self, folder: Path, tools: Path) -> None:
        self.folder = folder
        tools.mkdir()
        write_tiny_model(tools / "model")
        for name, text in (("hf", DOWNLOAD), ("rollgraph", ROLLGRAPH), ("python", PYTHON)):
            write_program(tools / name, text.format(python=sys.executable, model=str(tools / "model")))
        self.environment = {**os.environ, "PATH": os.pathsep.join([str(tools), os.environ["PATH"]])}

    def follow(self, page: str) -> str:
        """Execute all blocks, and return the output of the commands."""
        output = ""
        for language, text in blocks_of(page):
            if name := NAME.match(text):
                (self.folder / name[1]).write_text(text)
            elif language == "bash":
                output += self.run(["bash", "-euo", "pipefail", "-c", text])
            elif language == "python":
                output += self.run([sys.executable, "-c", text])
            else:
                assert language == "text", f"a block of {page} is neither executed nor marked as output: {text}"
        return output

    def run(self, command: list[str]) -> str:
        completed = subprocess.run(
            command, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, check=True, timeout=900
        )
        return completed.stdout


@pytest.mark.slow
def test_the_first_run_page_trains_a_model_that_has_learned(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    output = Reader(home, tmp_path / "tools").follow("first_run.md")
    metrics = [json.loads(line) for line in (home / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics] == list(range(-1, 64))  # the untrained model, 60 steps, and 4 more
    assert metrics[0]["validation/reward"] < 0.3
    assert metrics[-1]["validation/reward"] > 0.8  # on held-out words
    answers = [json.loads(line) for line in output.splitlines() if line.startswith('{"prompt": "Shout river:"')]
    texts = "".join(completion["text"] for completion in answers[0]["completions"])
    assert sum(character.isupper() for character in texts) > len(texts) / 2
    scores = [json.loads(line) for line in output.splitlines() if line.startswith('{"validation/')]
    assert len(scores) == 3  # the first run, the untrained model, and the second run
    assert scores[1].keys() == scores[2].keys() > {"validation/rewards/right_case", "validation/rewards/says_word"}
    for folder in ("exported", "runs/own_model/model"):
        assert (home / folder / "model.safetensors").exists()


@pytest.mark.slow
def test_the_loop_of_the_python_page_resumes_exactly(tmp_path: Path) -> None:
    for name, parts in (("whole", [3]), ("stopped", [2, 3])):
        folder = tmp_path / name
        write_tiny_model(folder / "models" / "Qwen2.5-0.5B-Instruct")
        write_files("first_run.md", folder)
        write_files("python_api.md", folder)
        small = "max_prompt_tokens=32, rows=64, token_buckets=[512]"
        for steps in parts:
            program = f"import make_data, own_loop; own_loop.main({steps}, {small})"
            subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, timeout=900)
    assert_same_run(tmp_path / "whole" / "runs/own_loop", tmp_path / "stopped" / "runs/own_loop", 2)


def test_the_installation_page_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == project["optional-dependencies"].keys()
