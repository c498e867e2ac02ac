"""Ids of the Hugging Face Hub: their spelling, their files, and their error messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgraph.rl.data import hub
from rollgraph.rl.data.dataset_splits import SplitError, choose_split
from rollgraph.rl.data.hub import (
    TRAIN_SPLITS,
    VALIDATION_SPLITS,
    HubError,
    HubId,
    RepoKind,
    data_files,
    find_hub_id,
    model_folder,
)
from rollgraph.rl.data.rows import load_rows
from tests.run.local_hub import HubCache, HubServer, commit_of

constants = pytest.importorskip("huggingface_hub.constants")
ROW = b'{"prompt": "%d?"}\n'
COMMIT = 40 * "a"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return HubCache(tmp_path / "cache")


@pytest.fixture
def server(cache: HubCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that can be reached, with an empty cache."""
    server = HubServer()
    with server.running():
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield server


# -- ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B", "model", "hf://Qwen/Qwen2.5-0.5B@main"),
        ("hf://Qwen/Qwen2.5-0.5B@v1.0", "model", "hf://Qwen/Qwen2.5-0.5B@v1.0"),
        (f"org/name@{COMMIT}", "model", f"hf://org/name@{COMMIT}"),
        ("openai/gsm8k", "dataset", "hf://datasets/openai/gsm8k@main"),
        ("hf://openai/gsm8k:main/test", "dataset", "hf://datasets/openai/gsm8k@main:main/test"),
        ("hf://datasets/a/b@refs/convert/parquet:test", "dataset", "hf://datasets/a/b@refs/convert/parquet:test"),
    ],
)
def test_an_id_is_shown_in_its_full_spelling(text: str, kind: RepoKind, expected: str) -> None:
    hub_id = find_hub_id(text, kind)
    assert hub_id is not None
    assert str(hub_id) == expected
    again = find_hub_id(expected, kind)
    assert again is not None
    assert str(again) == expected
    assert hub_id.is_pinned == (COMMIT in text)


@pytest.mark.parametrize("text", ["bytes", "model", "a/b/c", "./a/b", "../b", "/a/b", "a//b", "a/b:c", "a b/c", "-a/b"])
def test_other_texts_are_paths_of_models(text: str) -> None:
    assert find_hub_id(text, "model") is None


@pytest.mark.parametrize("text", ["a/b.jsonl", "data/train.parquet", "train.jsonl", "a/b:", "a/b:c/d/e", "a/b@"])
def test_other_texts_are_paths_of_data(text: str) -> None:
    assert find_hub_id(text, "dataset") is None


def test_an_existing_path_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(find_hub_id("org/name", "model"), HubId)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_hub_id("org/name", "model") is None
    assert model_folder("org/name", weights=True) == Path("org/name")
    (tmp_path / "org" / "data").write_bytes(ROW % 1)
    assert data_files("org/data") == [Path("org/data")]
    assert isinstance(find_hub_id("hf://org/name", "model"), HubId)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("hf://name", "model", "hf://name: expected hf://org/name or org/name@revision"),
        ("hf://datasets/org/name", "model", "hf://datasets/org/name: expected hf://org/name or"),
        ("hf://org/name:train", "model", "hf://org/name:train: expected hf://org/name or"),
        ("hf://org/name:a/b/c", "dataset", "expected hf://datasets/org/name, org/name:split or org/name@revision:"),
    ],
)
def test_a_misspelt_id_is_refused(text: str, kind: RepoKind, message: str) -> None:
    with pytest.raises(HubError, match=f"^.*{message}"):
        find_hub_id(text, kind)


# -- splits ----------------------------------------------------------------------------------------

CARD = """---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train-*
  - {split: test, path: ["main/test-*", "more/**/*.jsonl"]}
- config_name: other
  data_dir: other
- {config_name: table, data_files: table.csv}
---
# A dataset
"""
FILES = [
    "README.md",
    "main/test-00000-of-00001.parquet",
    "main/train-00000-of-00002.parquet",
    "main/train-00001-of-00002.parquet",
    "more/a/b/c.jsonl",
    "more/d.jsonl",
    "other/dev.jsonl",
    "other/training_1.jsonl",
    "table.csv",
]


@pytest.mark.parametrize(
    ("card", "files", "config", "names", "split", "expected"),
    [
        (CARD, FILES, None, TRAIN_SPLITS, "train", FILES[2:4]),
        (CARD, FILES, "main", VALIDATION_SPLITS, "test", [FILES[1], *FILES[4:6]]),
        (CARD, FILES, "other", TRAIN_SPLITS, "train", ["other/training_1.jsonl"]),
        (CARD, FILES, "other", VALIDATION_SPLITS, "validation", ["other/dev.jsonl"]),
        ("", ["b.jsonl", "a.jsonl", "README.md"], None, TRAIN_SPLITS, "train", ["a.jsonl", "b.jsonl"]),
        ("# no header", ["test.jsonl", "my_train-file.jsonl"], None, TRAIN_SPLITS, "train", ["my_train-file.jsonl"]),
        ("", ["train/0.jsonl", "val/0.jsonl", "test/0.jsonl"], None, VALIDATION_SPLITS, "validation", ["val/0.jsonl"]),
        (
            "",
            ["main/train/0.parquet", "extra/train/0.parquet"],
            "main",
            TRAIN_SPLITS,
            "train",
            ["main/train/0.parquet"],
        ),
        (
            "",
            ["data/train_sft-00000-of-00001.parquet", "data/train_dpo-00000-of-00001.parquet"],
            None,
            ("train_sft",),
            "train_sft",
            ["data/train_sft-00000-of-00001.parquet"],
        ),
    ],
)
def test_a_split_has_its_files(
    card: str, files: list[str], config: str | None, names: tuple[str, ...], split: str, expected: list[str]
) -> None:
    chosen_split = choose_split(files, card, config, names)
    assert (chosen_split.name, list(chosen_split.files)) == (split, expected)


@pytest.mark.parametrize(
    ("card", "files", "config", "names", "message"),
    [
        (CARD, FILES, "mian", TRAIN_SPLITS, "has no config 'mian'; it has main, other, table; did you mean 'main'?"),
        (
            CARD.replace("  default: true\n", ""),
            FILES,
            None,
            TRAIN_SPLITS,
            "has the configs main, other, table: name one",
        ),
        (CARD, FILES, None, ("val",), "has no split val; it has train, test: name one, as in org/name:train"),
        (CARD, FILES, "table", TRAIN_SPLITS, "only .jsonl, .ndjson, .parquet files are read, and it has table.csv; "),
        ("", ["train.jsonl"], None, VALIDATION_SPLITS, "has no split validation or test; it has train: name one"),
        ("", ["README.md", "a.py"], None, TRAIN_SPLITS, "it has no data files; "),
        (
            "",
            ["a.csv", "b.json", "c.arrow", "d.csv"],
            None,
            TRAIN_SPLITS,
            "a.csv, b.json, c.arrow and 1 more; the hub's own",
        ),
        (
            "",
            ["de/train.jsonl", "en/train.jsonl"],
            None,
            TRAIN_SPLITS,
            "has files of train in several folders (de, en): name",
        ),
        ("", ["de/train.jsonl", "en/train.jsonl"], "fr", TRAIN_SPLITS, "has no folder 'fr'; it has de, en"),
        ("", FILES[1:3], "main", TRAIN_SPLITS, "only 1 of 2 files of main/train are there: download it again"),
        (
            "---\nconfigs: [\n---\n",
            ["a.jsonl"],
            None,
            TRAIN_SPLITS,
            "the YAML at the top of its README.md cannot be read",
        ),
    ],
)
def test_a_split_that_cannot_be_used_is_refused(
    card: str, files: list[str], config: str | None, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SplitError) as caught:
        choose_split(files, card, config, names)
    assert message in str(caught.value)


# -- downloads -------------------------------------------------------------------------------------


def test_a_download_takes_only_the_files_that_are_read_and_only_once(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = b'{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    settings = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors.index.json": index}
    weights = {"one.safetensors": b"1", "two.safetensors": b"2"}
    server.repos["model", "a/b"] = {**settings, **weights, "three.safetensors": b"3", "model.bin": b"4", "x.md": b""}
    folder = model_folder("a/b")
    assert folder.name == commit_of(server.repos["model", "a/b"])
    assert sorted(server.downloads) == sorted(settings)
    server.downloads.clear()
    assert model_folder("a/b", weights=True) == folder
    assert sorted(server.downloads) == sorted(weights)
    data = {"train.jsonl": ROW % 1, "test.jsonl": ROW % 2, "other.csv": b""}
    server.repos["dataset", "a/b"] = {**data, ".gitattributes": b"*"}
    server.downloads.clear()
    (rows,) = load_rows(*data_files("a/b"))
    assert rows.prompt == "1?"
    assert sorted(server.downloads) == [".gitattributes", "train.jsonl"]
    server.downloads.clear()
    data_files("a/b")
    model_folder("a/b", weights=True)
    assert server.downloads == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder("a/b", weights=True) == folder
    assert load_rows(*data_files("hf://a/b:train")) == [rows]
    with pytest.raises(HubError, match=r"a/b:test: .* does not have all its files, and HF_HUB_OFFLINE forbids"):
        data_files("a/b:test")


def test_weights_in_other_formats_are_refused(server: HubServer) -> None:
    server.repos["model", "a/b"] = {"config.json": b"{}", "pytorch_model.bin": b"1"}
    with pytest.raises(HubError, match=r"a/b: there is no model.safetensors; only weights in safetensors are loaded"):
        model_folder("a/b", weights=True)
    assert server.downloads == ["config.json"]


def test_a_long_download_reports_its_progress(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_FIRST_NOTE", 0.01)
    server.repos["model", "a/b"] = {"config.json": b"{}"}
    server.may_send.clear()
    notes = []

    def note(text: str) -> None:
        notes.append(text)
        server.may_send.set()

    folder = model_folder("a/b", note=note)
    assert notes[0] == f"downloading hf://a/b@main: 0.00 GB in {folder.parents[1]}"


# -- errors ----------------------------------------------------------------------------------------


def test_each_refusal_of_the_hub_has_its_message(server: HubServer) -> None:
    server.repos["model", "a/b"] = {"config.json": b"{}"}
    server.gated.add("a/b")
    with pytest.raises(HubError) as caught:
        model_folder("a/b")
    assert str(caught.value) == (
        f"a/b: its authors ask you to accept their terms: do so at {server.url}/a/b, then set HF_TOKEN"
    )
    with pytest.raises(HubError, match="a/b@v9: there is no revision 'v9'"):
        model_folder("a/b@v9")
    unknown = "the hub has no model of this name, or it is private and needs HF_TOKEN"
    with pytest.raises(HubError, match=f"^a/mine: there is no such folder here, and {unknown}$"):
        model_folder("a/mine")
    with pytest.raises(
        HubError, match=r"^a/b--c: there is no such folder here, and this is not a valid id of the hub: "
    ):
        model_folder("a/b--c")
    with pytest.raises(HubError, match=f"^hf://a/c: {unknown}$"):
        model_folder("hf://a/c")
    with pytest.raises(HubError, match=r"^a/c: there is no such file here, and the hub has no dataset of this name"):
        data_files("a/c")


@pytest.mark.parametrize("name", ["runs/mine", "demo/run", "demo/a--b"])
def test_the_error_of_a_missing_run_does_not_mention_the_hub(
    name: str, server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    with pytest.raises(HubError) as caught:
        model_folder(name)
    assert str(caught.value) == f"{name}: there is no such folder (in {tmp_path})"


def test_an_unreachable_hub_is_an_error_unless_the_cache_has_the_files(
    cache: HubCache, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nothing listens there
    beginning = f"there is no such folder here, and the cache ({cache.folder}) does not have all its files, and"
    with pytest.raises(HubError) as caught:
        model_folder("a/b")
    assert str(caught.value).startswith(f"a/b: {beginning} http://127.0.0.1:1 cannot be reached (")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError) as caught:
        model_folder("a/b")
    assert str(caught.value) == f"a/b: {beginning} HF_HUB_OFFLINE forbids downloading them"
    cache.add("a/b", {"config.json": b"{}"})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert (model_folder("a/b") / "config.json").read_bytes() == b"{}"  # cached files are used


def test_an_incomplete_split_in_the_cache_is_refused(cache: HubCache) -> None:
    """Caches of older versions of huggingface_hub have no list of the files of a repository."""
    cache.add("a/b", {"data/train-00001-of-00002.jsonl": ROW % 1}, kind="dataset")
    with pytest.raises(HubError, match=r"a/b: only 1 of 2 files of data/train are there: .* cannot be reached"):
        data_files("a/b")


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    with pytest.raises(HubError, match=r"^a/b: there is no such folder here, and .*; pip install 'rollgraph\[hub\]'$"):
        model_folder("a/b")
