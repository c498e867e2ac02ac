"""`rollgraph generate` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rollgraph.cli import main
from rollgraph.model import Architecture, Decoder, save_model
from rollgraph.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tiny = Architecture("llama", vocabulary=259, hidden=32, mlp=48, layers=1, heads=2, kv_heads=1, head_dim=16)
    save_model(Decoder(tiny), path)
    ByteTokenizer().save(path)
    return path


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(folder), "--prompt", "abc", "--prompt", "Grüße", "-n", "2", "--max-tokens", "5"]
    assert main([*arguments, "--seed", "3"]) == 0
    found = capsys.readouterr()
    first, second = lines(found.out)
    assert (first["prompt"], second["prompt"]) == ("abc", "Grüße")
    assert len(first["completions"]) == 2  # type: ignore[arg-type]
    assert "4/4" in found.err
    assert "tokens/s" in found.err
    assert main([*arguments, "--seed", "3", "--quiet"]) == 0
    again = capsys.readouterr()
    assert again.out == found.out
    assert again.err == ""


def test_prompts_from_a_file_keep_their_other_fields(folder: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "one", "answer": 42}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": ""}]
    source.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    options = ["--prompts", str(source), "--out", str(target), "--logprobs", "--max-tokens", "4", "--top-k", "9"]
    assert main(["generate", str(folder), *options]) == 1  # one of them was refused
    first, second, third = lines(target.read_text())
    assert first["answer"] == 42
    (completion,) = first["completions"]  # type: ignore[misc]
    assert len(completion["tokens"]) == len(completion["logprobs"]) == len(completion["policy_logprobs"]) == 4
    assert second["messages"] == rows[1]["messages"]
    assert third == {"prompt": "", "error": "the prompt is empty"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", "in.jsonl:1: not JSON"),
        ('{"text": "x"}\n', "in.jsonl:1: expected an object"),
        ("", "no prompts"),
        ('{"prompt": "x"}\n{"prompt": 5}\n', "in.jsonl:2: expected a text as `prompt`"),
        ('{"messages": []}\n', "in.jsonl:1: expected a text as `prompt`, or a list of `messages`"),
        ('{"messages": null}\n', "or a list of `messages`"),
        ('{"messages": [5]}\n', "in.jsonl:1: expected a text as"),
        ('{"prompt": "x"}\n{"prompt": "a\\ud83d"}\n', "prompt 2: "),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    assert main(["generate", str(folder), "--prompts", str(tmp_path / "in.jsonl")]) == 2
    assert message in capsys.readouterr().err


def test_what_is_missing_or_wrong_is_said_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([str(folder / "nowhere"), "--prompt", "x"], "nowhere"),
        ([str(folder), "--prompt", "x", "--top-p", "2"], "top_p=2.0"),
        ([str(folder), "--prompts", str(folder / "none.jsonl")], "none.jsonl"),
        ([str(folder), "--prompt", "x", "--device", "banana"], "--device banana: expected cuda or cpu"),
        ([str(folder), "--prompt", "x", "--cache-gib", "0"], "--cache-gib 0"),
        ([str(folder / "nowhere"), "--prompt", "x", "--out", str(folder / "no" / "where")], "no/where"),
    ):
        assert main(["generate", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("rollgraph generate: ")
        assert "Traceback" not in error
