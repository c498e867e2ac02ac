"""Runs and commands with ids of the Hugging Face Hub instead of paths: a run keeps the commits of its first start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollgraph.cli import main
from rollgraph.config import Config, to_yaml
from rollgraph.model import Architecture, Decoder, save_model
from rollgraph.model.weights.adapter_files import read_base
from rollgraph.parallel.data.collectives import Collectives
from rollgraph.parallel.data.together import FailedElsewhere, run_on_some_ranks
from rollgraph.parallel.ranks.world import World
from rollgraph.rl.data.hub_pins import PINS, fetch_weights, pin_sources, share_model_folder
from rollgraph.run.model_source import read_checkpoint_config
from rollgraph.tokenizer import ByteTokenizer
from rollgraph.train import train
from tests.parallel.worlds import run_world
from tests.rl.test_hub import cache, constants, server
from tests.run.local_hub import HubCache, HubServer, read_files
from tests.test_train import assert_same_run, eager_config, write_inputs

__all__ = ["cache", "server"]
ONE = World(0, 1, "cpu")


def make_model(folder: Path, hidden: int = 16) -> Path:
    torch.manual_seed(0)
    tiny = Architecture("llama", vocabulary=259, hidden=hidden, mlp=24, layers=1, heads=2, kv_heads=1, head_dim=8)
    save_model(Decoder(tiny), folder)
    ByteTokenizer().save(folder)
    return folder


def make_dataset(folder: Path) -> dict[str, bytes]:
    """The data of `write_inputs` as a dataset repository, with the train split in two files."""
    lines = (folder / "train.jsonl").read_bytes().splitlines(keepends=True)
    return {
        "README.md": b"---\nconfigs:\n- {config_name: digits, data_files: [{split: train, path: 'data/train-*'}, "
        b"{split: test, path: data/held_out.jsonl}]}\n---\n",
        "data/train-00000-of-00002.jsonl": b"".join(lines[:10]),
        "data/train-00001-of-00002.jsonl": b"".join(lines[10:]),
        "data/held_out.jsonl": (folder / "held_out.jsonl").read_bytes(),
    }


@pytest.fixture
def folder(tmp_path: Path, cache: HubCache) -> Path:
    """A model with two commits (main is the older one) and a dataset, in the cache and as files."""
    write_inputs(tmp_path)
    make_model(tmp_path / "model")
    cache.add("org/model", read_files(make_model(tmp_path / "newer", hidden=32)))
    cache.add("org/model", read_files(tmp_path / "model"))
    cache.add("org/data", make_dataset(tmp_path), kind="dataset")
    return tmp_path


def config_of(folder: Path, output: str, model: str, train: str, validation: str, *overrides: str) -> Config:
    options = [f"output={folder / output}", f"model={{path: {model}}}", "tokenizer.path=null"]
    options += [f"data.train={train}", f"data.validation={validation}", "checkpoint.every=1", "validation.every=1"]
    options += ["optimizer.schedule=constant"]
    return eager_config(folder, *options, *overrides)


def hub_config(folder: Path, *overrides: str, output: str = "run") -> Config:
    return config_of(folder, output, "org/model", "org/data", "org/data", *overrides)


def test_a_run_keeps_its_commits(folder: Path, cache: HubCache, capsys: pytest.CaptureFixture[str]) -> None:
    """Later commits of main have a model of another size, and data that the run would refuse."""
    paths = [str(folder / name) for name in ("model", "train.jsonl", "held_out.jsonl")]
    train(config_of(folder, "expected", *paths, "steps=2"), ONE)
    train(hub_config(folder, "steps=1"), ONE)
    before = json.loads((folder / "run" / PINS).read_text())
    cache.add("org/model", read_files(folder / "newer"))
    cache.add("org/data", {"train.jsonl": b'{"prompt": "9?"}\n', "test.jsonl": b'{"prompt": "9?"}\n'}, kind="dataset")
    config = hub_config(folder, "steps=2", "log.progress=plain")
    train(config, ONE)
    assert_same_run(folder / "run", folder / "expected", 1)
    assert json.loads((folder / "run" / PINS).read_text()) == before
    commit = before["hf://org/model@main"]
    data = before["hf://datasets/org/data@main"]
    output = capsys.readouterr().out
    assert f"model.path: org/model is commit {commit}, recorded in {folder / 'run' / PINS}\n" in output
    saved = read_checkpoint_config(folder / "run" / "checkpoints" / "step_00000001")
    assert saved.model.path == f"hf://org/model@{commit}"
    assert (saved.data.train, saved.data.validation) == (
        f"hf://datasets/org/data@{data}:train",
        f"hf://datasets/org/data@{data}:test",
    )
    # A new run starts from the present commit of main.
    newer = pin_sources(replace(config, output=str(folder / "new")), ONE)
    assert newer.model.path not in (saved.model.path, "org/model")
    assert not (folder / "new").exists()


def test_commands_take_hub_ids(
    folder: Path, cache: HubCache, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "config.yaml"
    path.write_text(to_yaml(hub_config(folder, "steps=1", "checkpoint.export_at_end=true")))
    assert main(["train", str(path)]) == 0

    def answer(*words: str) -> str:
        capsys.readouterr()
        assert main([*words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    sampling = ("--prompt", "12?", "--max-tokens", "6", "--seed", "1", "--logprobs", "--quiet")
    assert answer("generate", "org/model", *sampling) == answer("generate", str(folder / "model"), *sampling)
    baseline = answer("eval", str(path), "--model", "hf://org/model")
    assert answer("eval", str(path), "--model", str(folder / "model")) == baseline
    assert "agree bit for bit" in answer("check", "--exact", "org/model", "--rows", "1", "--tokens", "64")
    # From here on, main is a model of another size. A checkpoint finds its own model from any folder.
    cache.add("org/model", read_files(folder / "newer"))
    assert "validation/reward" in answer("eval", str(path))
    shutil.copytree(folder / "run" / "checkpoints" / "step_00000000", folder / "elsewhere" / "copy")
    monkeypatch.chdir(folder / "elsewhere")
    assert answer("generate", "copy", *sampling) == answer("generate", str(folder / "run" / "model"), *sampling)
    plan = ("plan", str(path), "--device", "cpu", "--json")
    assert answer(*plan) == answer(*plan, f"model.path={folder / 'newer'}")


@pytest.mark.slow
def test_adapters_of_the_hub_find_their_base_model(
    folder: Path, cache: HubCache, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export names the id and commit of its base, and can be uploaded, loaded and trained further."""
    options = ["steps=1", "optimizer.lr=0.1", "checkpoint.export_at_end=true"]
    train(hub_config(folder, *options, "adapter={rank: 2}"), ONE)
    exported = folder / "run" / "model"
    commit = json.loads((folder / "run" / PINS).read_text())["hf://org/model@main"]
    assert read_base(exported) == ("org/model", commit)
    cache.add("org/adapter", read_files(exported))
    cache.add("org/model", read_files(folder / "newer"))  # from here on, main is a model of another size

    def answer(*words: str) -> str:
        capsys.readouterr()
        assert main([*words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    sampling = ("--prompt", "12?", "--max-tokens", "6", "--seed", "1", "--logprobs", "--quiet")
    expected = answer("generate", str(folder / "run"), *sampling)
    assert answer("generate", "org/adapter", *sampling) == expected
    path = folder / "config.yaml"
    path.write_text(to_yaml(hub_config(folder, "steps=1")))
    adapted = answer("eval", str(path), "--model", "hf://org/adapter")
    assert answer("eval", str(path), "--model", str(folder / "run")) == adapted
    pinned = [f"model={{path: org/model@{commit}}}", "adapter={path: org/adapter}"]
    train(hub_config(folder, *options, *pinned, output="second"), ONE)
    reference, adapter = (
        load_file(path / "adapter_model.safetensors") for path in (folder / "second/reference", exported)
    )
    assert all(torch.equal(reference[name], adapter[name]) for name in adapter)
    saved = read_checkpoint_config(folder / "second" / "checkpoints" / "step_00000000")
    assert saved.adapter is not None
    assert str(saved.adapter.path).startswith("hf://org/adapter@")
    assert saved.adapter.rank == 2


def test_an_unusable_id_is_refused_with_its_key_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "config.yaml"
    path.write_text(to_yaml(hub_config(folder)))
    for override, message in (
        ("model.path=org/none", "model.path: org/none: there is no such folder here, and the cache ("),
        ("tokenizer.path=hf://org/none", "tokenizer.path: hf://org/none: the cache ("),
        ("data.train=org/data:dev", "data.train: org/data:dev: has no split dev; it has train, test"),
        ("data.validation=org/none", "data.validation: org/none: there is no such file here, and the cache ("),
        ("warm_start={data: org/data:a/b}", "warm_start.data: org/data:a/b: has no config 'a'; it has digits"),
    ):
        assert main(["train", str(path), override]) == 2
        assert message in capsys.readouterr().err
        assert not (folder / "run").exists()
    (folder / "run").mkdir()
    (folder / "run" / PINS).write_text('{"hf://org/model@main": "main"}')
    assert main(["train", str(path)]) == 2
    assert f"{PINS}: hf://org/model@main: expected a commit, got 'main'" in capsys.readouterr().err


# -- several ranks ---------------------------------------------------------------------------------


def use_hub(url: str, cache: Path) -> None:
    constants.HF_HUB_CACHE = str(cache)
    constants.ENDPOINT = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"


def pinned_path(world: World, folder: Path, url: str, config: Config) -> str | None:
    """Pin and download as if each rank were the first of a machine, with its own cache."""
    use_hub(url, folder / f"cache of machine {world.rank}")
    path = pin_sources(config, world).model.path
    share_model_folder("org/model", replace(world, local_rank=0))
    return path


def fills_its_cache(world: World, folder: Path, url: str) -> bool:
    """Whether this rank of a machine downloads anything. Each rank has its own cache, to tell them apart."""
    cache = folder / f"cache of rank {world.rank}"
    use_hub(url, cache)
    fetch_weights("org/model", replace(world, local_rank=world.rank))
    return cache.exists()


def outlasts_the_timeout(world: World) -> list[str]:
    def work() -> str:
        time.sleep(12)
        return "done"

    owner = Collectives(world, timeout=10.0)  # ends its liveness check when deleted
    return run_on_some_ranks(replace(world, liveness=owner.liveness), world.rank == 0, work)


def failure(world: World, raised: BaseException) -> str:
    def fail() -> str:
        raise raised

    try:
        run_on_some_ranks(world, world.rank == 0, fail)
    except (type(raised), FailedElsewhere) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.slow
@pytest.mark.multi
def test_each_machine_downloads_once(folder: Path, server: HubServer, tmp_path: Path) -> None:
    server.repos["model", "org/model"] = read_files(folder / "model")
    files = [str(folder / "train.jsonl"), str(folder / "held_out.jsonl")]
    config = config_of(folder, "run", "org/model", *files)
    first, second = run_world(2, tmp_path, pinned_path, folder, server.url, config)
    assert first == second
    assert first.startswith("hf://org/model@")
    assert sorted(server.downloads) == sorted([*read_files(folder / "model")] * 2)
    assert run_world(2, tmp_path, fills_its_cache, folder, server.url) == [True, False]
    for raised in (OSError("no disk"), SystemExit("no disk")):
        first, second = run_world(2, tmp_path, failure, raised)
        assert first == f"{type(raised).__name__}: no disk"
        assert second == "FailedElsewhere: rank 0 failed: no disk"
    assert run_world(2, tmp_path, outlasts_the_timeout) == [["done", ""], ["done", ""]]


# -- the environment -------------------------------------------------------------------------------


@pytest.mark.slow
def test_environment_variables_locate_the_cache(folder: Path, cache: HubCache) -> None:
    home = folder / "home"
    home.mkdir()
    (home / "hub").symlink_to(cache.folder)
    command = [sys.executable, "-m", "rollgraph", "generate", "org/model", "--prompt", "a", "--max-tokens", "1"]
    for variables in ({"HF_HUB_CACHE": str(cache.folder)}, {"HF_HOME": str(home)}):
        environment = {**os.environ, **variables, "HF_HUB_OFFLINE": "1"}
        assert subprocess.run(command, env=environment, capture_output=True).returncode == 0
    environment = {**os.environ, "HF_HOME": str(folder / "none"), "HF_ENDPOINT": "http://127.0.0.1:1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "http://127.0.0.1:1 cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
