"""Whatever a user's files contain, a command names the bad file in one line, and does not hang.

Tables of odd values are given to every command that reads them. A traceback fails these tests as an exception. A
command that blocks on a pipe, or loops over a huge number of layers, fails by the time limit of the suite.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgraph.checkpoint.format import CheckpointError, read_manifest
from rollgraph.cli import main
from rollgraph.files import MAX_NESTING
from rollgraph.model import Architecture, Decoder, ModelFileError, load_model, save_model
from rollgraph.tokenizer import ByteTokenizer

RUN = """\
model: {path: MODEL}
data: {train: nowhere.jsonl, max_prompt_tokens: 8}
rollout: {max_tokens: 8}
reward: {functions: [{name: exact_match}]}
"""
HUGE = "9" * 400  # too large for a float
DIGITS = "9" * 5000  # too long for int()
DEEP = "[" * 300 + "]" * 300
LEVELS = 40


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "a model"
    sizes = {"hidden": 16, "mlp": 16, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 8, "max_length": 64}
    save_model(Decoder(Architecture("llama", vocabulary=259, **sizes)), folder)
    ByteTokenizer().save(folder)
    return folder


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`output` is `runs/default` here: tests that run at the same time must not share it."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "a model"))


def run_file(model: Path, name: str = "run.yaml") -> Path:
    path = model.parent / name
    path.write_text(RUN.replace("MODEL", json.dumps(str(model))))
    return path


def assert_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *parts: str) -> None:
    """Check that the command exits with 2 after one short line that contains all of `parts`."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    line = next((line for line in lines if all(part in line for part in parts)), None)
    assert line is not None, (parts, lines)
    assert len(line) < 1000


# -- YAML ------------------------------------------------------------------------------------------

ALIASES = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, LEVELS))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, LEVELS))
YAML = {
    "an alias bomb": ALIASES,
    "a bomb of merges": MERGES,
    "a list in itself": "a: &a [*a]\n",
    "deep lists": f"a: {DEEP}\n",
    "deep keys": "".join(" " * i + "a:\n" for i in range(MAX_NESTING + 5)),
    "many digits": f"a: {DIGITS}\n",
    "a tag": "a: !!python/name:os.system x\n",
    "a list as a key": "? [a]\n: 1\n",
    "a NUL": "a: b\0c\n",
    "a NUL in defaults": 'defaults: "b\\0c"\n',
    "no UTF-8": b"a: \xff\n",
}
COMMANDS = [["config"], ["plan"], ["train"], ["eval"], ["export", "--to", "target"], ["config", "import"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("content", YAML.values(), ids=YAML.keys())
def test_bad_configurations_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes, command: list[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(capsys, [*command, str(path)], str(path))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "NUL", "long name", "defaults", "loop"])
def test_configurations_that_are_no_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, command: list[str]
) -> None:
    path, message = tmp_path / "bad.yaml", str(tmp_path / "bad.yaml")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "NUL":
        path, message = tmp_path / "a\0b", "a path cannot hold a NUL character"
    elif kind == "long name":
        path, message = tmp_path / ("a" * 300), "cannot be read: File name too long"
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.write_text("defaults: pipe.yaml\n")
        os.mkfifo(tmp_path / "pipe.yaml")
        message = f"{path}:1: defaults: {tmp_path / 'pipe.yaml'}: is a named pipe"
    assert_refused(capsys, [*command, str(path)], message)


def test_a_file_listed_twice_in_defaults_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(LEVELS):
        (tmp_path / f"{i}.yaml").write_text(f"defaults: [{i + 1}.yaml, {i + 1}.yaml]\nsteps: {LEVELS - i}\n")
    (tmp_path / f"{LEVELS}.yaml").write_text(RUN)
    assert main(["config", str(tmp_path / "0.yaml")]) == 0
    assert f"steps: {LEVELS}" in capsys.readouterr().out


PATHS = ["output", "model.path", "tokenizer.path", "data.train", "data.validation", "warm_start.data"]
PATHS += ["algorithm.name", "rollout.environment.name"]


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize("command", COMMANDS[:-1], ids=" ".join)
def test_paths_with_a_nul_character_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], command: list[str], key: str
) -> None:
    arguments = [*command, str(run_file(model)), f'{key}="a\\0b"', "warm_start.steps=1"]
    assert_refused(capsys, arguments, f"{key}: a path cannot hold a NUL character")


@pytest.mark.parametrize("key", ["seed", "rollout.rows", "optimizer.lr", "model.tiny.layers"])
@pytest.mark.parametrize("value", [str(2**63), HUGE, DIGITS], ids=["2^63", "HUGE", "DIGITS"])
def test_bad_numbers_in_a_configuration_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    path = run_file(model)
    message = "has more than 4300 digits" if value is DIGITS else f"{key}: "
    assert_refused(capsys, ["plan", str(path), f"{key}={value}"], message)


@pytest.mark.parametrize("key", ["layers", "width", "heads", "mlp"])
def test_bad_sizes_of_a_tiny_model_are_refused(model: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    arguments = ["plan", str(run_file(model)), "model.path=null", f"model.tiny.{key}=2147483648"]
    assert_refused(capsys, arguments, f"model.tiny.{key}: expected whole number ≥ 1 and ≤ ", "got 2147483648")


# -- interpolations --------------------------------------------------------------------------------

THEIRS = {
    "texts": ("a0: aaaaaaaaaa\n", "a{n}: ${{a{m}}}${{a{m}}}\n", "stands for a text of more than"),
    "mappings": ("a0: {x: 1}\n", "a{n}: {{p: '${{a{m}}}', q: '${{a{m}}}'}}\n", "interpolations stand for more than"),
    "products": ("a0: 10\n", "a{n}: ${{mul:${{a{m}}},${{a{m}}}}}\n", "is larger than 2^63 - 1"),
}


@pytest.mark.parametrize(("first", "next_one", "message"), THEIRS.values(), ids=THEIRS.keys())
def test_exponentially_growing_interpolations_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: str, next_one: str, message: str
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(first + "".join(next_one.format(n=n, m=n - 1) for n in range(1, LEVELS)))
    assert_refused(capsys, ["config", "import", str(path)], str(path), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: ${mul:abc,100000000000}\n", ":1: a: ${mul:abc,100000000000}: expected a number"),
        ("a: " + "${" * 2000 + "}" * 2000 + "\n", ":1: a: interpolations are nested too deeply"),
        (f"a: ${{mul:{DIGITS},2}}\n", ":1: a: 999"),
        ("a: 0x" + "f" * 5000 + "\n", ":1: '0xfff"),
        ("b: 1\na: !!int abc\n", ":2: 'abc' is not a valid int"),
        ("a: !!bool abc\n", ":1: 'abc' is not a valid bool"),
        ("a: !!float abc\n", ":1: 'abc' is not a valid float"),
    ],
    ids=["text times number", "deep", "digits", "hexadecimal", "int", "bool", "float"],
)
def test_odd_values_in_an_imported_config_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    assert_refused(capsys, ["config", "import", str(path)], f"{path}{message}")


def test_an_interpolated_value_is_computed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without caching, this would take 2^99 steps. The file is valid YAML, but no GRPO config."""
    path = tmp_path / "theirs.yaml"
    path.write_text("a0: 7\n" + "".join(f"a{n}: ${{max:${{a{n - 1}}},${{a{n - 1}}}}}\n" for n in range(1, 100)))
    assert_refused(capsys, ["config", "import", str(path)], "not a GRPO config")


def test_bad_output_paths_of_an_import_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = Path(__file__).parent / "compat" / "data"
    source = next(iter(sorted(theirs.rglob("*grpo*.yaml"))))
    assert_refused(capsys, ["config", "import", str(source), "-o", str(tmp_path / "a\0b")], "a path cannot hold a NUL")
    shared = tmp_path / "shared"
    (tmp_path / "link.yaml").symlink_to(shared)
    assert_refused(capsys, ["config", "import", str(source), "-o", str(tmp_path / "link.yaml")], "exists")
    assert not shared.exists()


# -- model folders ---------------------------------------------------------------------------------

SIZES = ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"]
SIZES += ["num_key_value_heads", "head_dim", "max_position_embeddings"]
ODD: list[tuple[str, Any]] = [(name, value) for name in SIZES for value in (2**31, 2**63, 10**400, {})]
ODD += [(name, 10**400) for name in ("rms_norm_eps", "rope_theta")]
ODD += [("rope_scaling", {"type": "yarn", "factor": 10**400}), ("model_type", {}), ("architectures", 3)]
ODD += [("hidden_act", {}), ("tie_word_embeddings", 1), ("partial_rotary_factor", [[]])]


@pytest.mark.parametrize("command", ["generate", "plan"])
@pytest.mark.parametrize(("key", "value"), ODD, ids=lambda value: f"{value!r:.20}")
def test_bad_values_in_config_json_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any, command: str
) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    message = "factor" if key == "rope_scaling" else key
    assert_refused(capsys, command_with(model, command), str(model), message)


def command_with(model: Path, command: str) -> list[str]:
    if command == "generate":
        return ["generate", str(model), "--prompt", "a", "--device", "cpu", "--quiet"]
    return [command, str(run_file(model)), *(["model.dtype=auto"] if command == "plan" else [])]


CONTENT: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{'a': 1}",
    "no UTF-8": b'{"a": "\xff"}',
    "a list": b"[]",
    "deep": f'{{"a": {DEEP}}}'.encode(),
    "very deep": b"[" * 200_000,
    "digits": f'{{"a": {DIGITS}}}'.encode(),
}
FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"]
READS = [("generate", name) for name in FILES] + [("plan", "config.json"), ("train", "config.json")]


@pytest.mark.parametrize(("command", "name"), READS)
@pytest.mark.parametrize("content", CONTENT.values(), ids=CONTENT.keys())
def test_bad_json_files_of_a_model_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], content: bytes, name: str, command: str
) -> None:
    (model / name).write_bytes(content)
    assert_refused(capsys, command_with(model, command), str(model / name))


@pytest.mark.parametrize(
    ("command", "name"), [*READS, ("generate", "tokenizer.json"), ("generate", "model.safetensors")]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_model_files_that_are_no_regular_files_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str, command: str
) -> None:
    path = model / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert_refused(capsys, command_with(model, command), str(path), "not a regular file")


@pytest.mark.parametrize("dtype", ["int8", "auto", "__class__", 7, {"a": 1}, ["float32"], True, "nn"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("command", ["plan", "train"])
def test_an_unknown_dtype_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], command: str, key: str, dtype: Any
) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text())
    del config["dtype"]
    path.write_text(json.dumps(config | {key: dtype}))
    arguments = command_with(model, command)
    assert_refused(capsys, arguments, f"model.path: {path}: dtype={dtype!r}: must be one of")
    if command == "plan":
        assert main([*arguments[:-1], "model.dtype=float32"]) == 0, "the dtype of the file is not read"


# -- weights ---------------------------------------------------------------------------------------


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def tensor(dtype: Any = "F32", shape: Any = (1,), ends: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": ends}


WEIGHTS = {
    "odd dtype": header(a=tensor("Q7")) + bytes(4),
    "a number as dtype": header(a=tensor(7)) + bytes(4),
    "integers": header(a=tensor("I32")) + bytes(4),
    "2^63": header(a=tensor(shape=[2**63])) + bytes(4),
    "2^64": header(a=tensor(shape=[2**64])) + bytes(4),
    "a huge shape": header(a=tensor(shape=[10**400])) + bytes(4),
    "a product over 2^64": header(a=tensor(shape=[2**40, 2**40])) + bytes(4),
    "offsets": header(a=tensor(ends=[2**63, 2**64])) + bytes(4),
    "a deep header": struct.pack("<Q", len(DEEP)) + DEEP.encode(),
    "digits": header(a=tensor(shape=[int("9" * 4000)])) + bytes(4),
    "a long header": struct.pack("<Q", 2**63) + b"{}",
    "nothing": b"",
}


@pytest.mark.parametrize("content", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_bad_headers_of_weights_are_refused(model: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert_refused(capsys, command_with(model, "generate"), str(model / "model.safetensors"))


def split_weights(model: Path) -> Path:
    """Save the weights in several files, and return the path of their index."""
    whole = load_model(model)
    save_model(whole, model, shard_bytes=4096)
    return model / "model.safetensors.index.json"


@pytest.mark.parametrize("content", CONTENT.values(), ids=CONTENT.keys())
def test_bad_indexes_of_weights_are_refused(model: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = split_weights(model)
    path.write_bytes(content)
    assert_refused(capsys, command_with(model, "generate"), str(path))


@pytest.mark.parametrize("name", ["../outside.safetensors", "ABSOLUTE", "a/b.safetensors", "..", "", "a\0b", "..\\b"])
def test_an_index_may_only_name_files_beside_it(model: Path, name: str) -> None:
    path = split_weights(model)
    index = json.loads(path.read_text())
    shard = sorted(set(index["weight_map"].values()))[0]
    outside = model.parent / "outside.safetensors"
    shutil.move(model / shard, outside)
    (model / "a").mkdir()
    shutil.copy(outside, model / "a" / "b.safetensors")
    file_name = str(outside) if name == "ABSOLUTE" else name
    weight_map = {key: file_name if file == shard else file for key, file in index["weight_map"].items()}
    path.write_text(json.dumps(index | {"weight_map": weight_map}))
    with pytest.raises(ModelFileError, match="weight_map may only name files in its own folder, not"):
        load_model(model)


def test_an_index_may_name_links(model: Path) -> None:
    """As in a download cache, whose files are links."""
    expected = load_model(model).norm
    path = split_weights(model)
    blobs = model.parent / "blobs"
    blobs.mkdir()
    for number, shard in enumerate(sorted(set(json.loads(path.read_text())["weight_map"].values()))):
        shutil.move(model / shard, blobs / str(number))
        (model / shard).symlink_to(f"../blobs/{number}")
    assert torch.equal(load_model(model).norm, expected)


LINKED = ["config.json.incomplete", "model.safetensors.incomplete", "config.json", "model.safetensors"]


@pytest.mark.parametrize("name", LINKED)
def test_weights_are_not_written_through_links(model: Path, tmp_path: Path, name: str) -> None:
    loaded, target, theirs = load_model(model), tmp_path / "target", tmp_path / "theirs"
    theirs.write_text("theirs")
    target.mkdir()
    (target / name).symlink_to(theirs)
    save_model(loaded, target)
    assert theirs.read_text() == "theirs"
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert not any(path.is_symlink() for path in target.iterdir())
    assert torch.equal(load_model(target).norm, loaded.norm)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", CONTENT.values(), ids=CONTENT.keys())
def test_bad_manifests_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json|has format None"):
        read_manifest(tmp_path)


def test_a_pipe_as_manifest_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json is a named pipe, not a regular file"):
        read_manifest(tmp_path)


def test_a_bad_path_for_an_export_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(
        capsys, ["export", str(run_file(model)), "--to", "a\0b"], "--to", "a path cannot hold a NUL character"
    )
