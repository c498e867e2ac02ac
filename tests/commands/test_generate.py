"""`rollgraph generate` as a user runs it."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from rollgraph.cli import main
from rollgraph.inference import Engine
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


def test_prompts_on_the_command_line_are_completed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(folder), "--prompt", "abc", "--prompt", "Grüße", "-n", "2", "--max-tokens", "5"]
    assert main([*arguments, "--seed", "3"]) == 0
    output = capsys.readouterr()
    first, second = lines(output.out)
    assert (first["prompt"], second["prompt"]) == ("abc", "Grüße")
    assert len(first["completions"]) == 2  # type: ignore[arg-type]
    assert "4/4" in output.err
    assert "tokens/s" in output.err
    assert main([*arguments, "--seed", "3", "--quiet"]) == 0
    quiet_output = capsys.readouterr()
    assert quiet_output.out == output.out
    assert quiet_output.err == ""


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
        ("not json\n", "in.jsonl:1: is not JSON"),
        ('{"text": "x"}\n', "in.jsonl:1: expected an object"),
        ("", "no prompts"),
        ('{"prompt": "x"}\n{"prompt": 5}\n', "in.jsonl:2: expected a string as `prompt`"),
        ('{"messages": []}\n', "in.jsonl:1: expected a string as `prompt`, or a list of `messages`"),
        ('{"messages": null}\n', "or a list of `messages`"),
        ('{"messages": [5]}\n', "in.jsonl:1: expected a string as"),
        ('{"prompt": "x"}\n{"prompt": "a\\ud83d"}\n', "in.jsonl:2: `prompt` or `messages` has half a surrogate pair"),
        (
            '{"messages": [{"role": "user", "content": "a\\ud83d"}]}\n',
            "in.jsonl:1: `prompt` or `messages` has half a surrogate pair",
        ),
        (
            '{"prompt": "x"}\n\n{"prompt": "x", "a": {"b": 1, "b": 2}}\n',
            "in.jsonl:3: cannot be read: duplicate key 'b'",
        ),
        (
            b'{"prompt": "x"}\n{"prompt": "\xff"}\n',
            "in.jsonl:2: is not JSON: not UTF-8, 'utf-8' codec can't decode byte 0xff",
        ),
        ('{"prompt": "x", "a": ' + 200 * "[" + 200 * "]" + "}\n", "in.jsonl:1: cannot be read: lists and objects"),
        ('{"prompt": "x", "a": ' + 100_000 * "[" + "\n", "in.jsonl:1: "),
        (
            '{"prompt": "x", "a": ' + 5000 * "1" + "}\n",
            "in.jsonl:1: cannot be read: a number has more than 4300 digits",
        ),
    ],
    ids=range(14),
)
def test_an_error_in_a_file_names_its_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes, message: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["generate", str(folder), "--prompts", str(tmp_path / "in.jsonl")]) == 2
    assert message in capsys.readouterr().err


def test_an_invalid_argument_is_reported_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([str(folder / "nowhere"), "--prompt", "x"], "nowhere"),
        ([str(folder), "--prompt", "x", "--top-p", "2"], "top_p: must be above 0 and at most 1, got 2.0"),
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


def test_a_field_that_is_not_valid_text_is_copied_unchanged(folder: Path, tmp_path: Path) -> None:
    """UTF-8 cannot encode half a surrogate pair, but JSON can spell it. A byte order mark is skipped."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        '{"prompt": "one", "id": "ü"}',
        '{"prompt": "two", "id": "a\\ud83d", "more": ["\\udc00"]}',
        '{"prompt": "3"}',
    ]
    source.write_bytes(b"\xef\xbb\xbf" + "\n".join(rows).encode())
    options = ["--prompts", str(source), "--out", str(target), "--max-tokens", "2"]
    assert main(["generate", str(folder), *options]) == 0
    written = target.read_text(encoding="utf-8")
    entries = lines(written)
    assert all(entry.pop("completions") for entry in entries)
    assert entries == list(map(json.loads, rows))
    assert '"id": "ü"' in written


def test_standard_output_that_cannot_encode_a_line_gets_escapes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["generate", str(folder), "--prompt", "Grüße", "--max-tokens", "2", "--quiet"]) == 0
    assert json.loads(written.getvalue())["prompt"] == "Grüße"


@pytest.fixture
def without_unknown(folder: Path, tmp_path: Path) -> Path:
    """A model whose tokenizer raises a bare Exception for characters outside its vocabulary."""
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0], ["b", -2.0]], "byte_fallback": False}
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": model}))
    return path


def test_a_prompt_that_cannot_be_encoded_does_not_affect_others(
    without_unknown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "ab"}\n\n{"prompt": "xyz"}\n{"prompt": "ba"}\n')
    options = [str(without_unknown), "--prompts", str(tmp_path / "in.jsonl"), "--max-tokens", "2", "--quiet"]
    assert main(["generate", *options]) == 1
    output = capsys.readouterr()
    first, second, third = lines(output.out)
    assert "completions" in first
    assert "completions" in third
    assert second["error"] == "cannot encode 'xyz': Encountered an unknown token but `unk_id` is missing"
    assert f"{tmp_path / 'in.jsonl'}:3: cannot encode 'xyz'" in output.err
    (tmp_path / "in.jsonl").write_text('{"prompt": "xyz"}\n')
    assert main(["generate", *options]) == 2  # no prompt is left, so the model is not even loaded
    assert "in.jsonl:1: cannot encode 'xyz'" in capsys.readouterr().err


def test_finished_prompts_are_written_when_the_command_fails(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a prompt before them is not finished: the second is refused at once, and the first never ends."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    steps = iter(range(3))
    step = Engine.step

    def interrupted(engine: Engine) -> bool:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    options = ["--prompts", str(tmp_path / "in.jsonl"), "--max-tokens", "50", "--ignore-eos", "--quiet"]
    assert main(["generate", str(folder), *options]) == 130
    assert lines(capsys.readouterr().out) == [{"prompt": "", "error": "the prompt is empty"}]
