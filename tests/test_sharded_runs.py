"""Runs with `shard: parameters` on gloo have the bits of runs with whole parameters, resume in any layout, and survive
kills."""

from __future__ import annotations

import os
import signal
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollgraph.config import Config
from rollgraph.model import load_model
from rollgraph.parallel.ranks.world import World
from rollgraph.train import train
from tests.parallel.worlds import run_world
from tests.test_kills import a_save, a_step, assert_same, begin, finish, kill_rank
from tests.test_train import config_of, folder, metrics_of

__all__ = ["folder"]

pytestmark = [pytest.mark.multi, pytest.mark.slow]

LAYERS = "model.tiny.layers=4"  # more than the ring has slots
SHARDED = "shard=parameters"


def train_on_a_rank(world: World, config: Config, output: Path) -> None:
    """Train as the command does, with the rank in the environment."""
    os.environ["RANK"] = str(world.rank)
    with output.open("a") as file, redirect_stdout(file):
        train(config, world)


def run(folder: Path, name: str, ranks: int, *overrides: str) -> Path:
    config = config_of(folder, LAYERS, f"output={folder / name}", *overrides)
    results = run_world(ranks, folder, train_on_a_rank, config, folder / "output")
    assert results == [None] * ranks, results
    return folder / name


def assert_same_run(first: Path, second: Path, steps: int) -> None:
    """Compare metrics and exported models."""
    assert metrics_of(first) == metrics_of(second)
    assert [entry["step"] for entry in metrics_of(first)] == list(range(steps))
    ours, theirs = (dict(load_model(path / "model").named_parameters()) for path in (first, second))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("graphs", ["auto", "none"])
def test_sharded_parameters_give_the_bits_of_whole_ones(folder: Path, graphs: str) -> None:
    """With a KL term, so that the reference is swapped in at each step, and with validation and saves."""
    options = [f"graph.impl={graphs}", "checkpoint={every: 2, export_at_end: true}"]
    sharded = run(folder, "sharded", 2, SHARDED, *options)
    whole = run(folder, "whole", 2, *options)
    assert_same_run(sharded, whole, 4)
    alone = metrics_of(run(folder, "alone", 1, SHARDED, *options))
    assert alone[0]["reward"] == pytest.approx(metrics_of(sharded)[0]["reward"])  # the same samples
    assert alone[3]["loss"] == pytest.approx(metrics_of(sharded)[3]["loss"], abs=1e-4)


def test_a_model_loaded_in_shards_trains_with_the_same_bits(folder: Path) -> None:
    exported = run(folder, "start", 1, "steps=1", "checkpoint={every: 1, export_at_end: true}") / "model"
    options = [f"model={{path: {exported}}}", "tokenizer.path=bytes", "checkpoint={every: 2, export_at_end: true}"]
    runs = []
    for name, shard in (("sharded", SHARDED), ("whole", "shard=optimizer")):
        config = config_of(folder, f"output={folder / name}", shard, "graph.impl=none", *options)
        results = run_world(3, folder, train_on_a_rank, config, folder / "output")
        assert results == [None] * 3, results
        runs.append(folder / name)
    assert_same_run(*runs, 4)


def test_a_run_resumes_with_another_layout_and_number_of_ranks(folder: Path) -> None:
    """One rank, then three with shards, two with shards, and two with whole parameters."""
    stages = [(1, SHARDED), (3, SHARDED), (2, SHARDED), (2, "shard=optimizer")]
    options = ["optimizer.schedule=constant", "graph.impl=none", "checkpoint={every: 1, export_at_end: true}"]
    for name in ("sharded", "whole"):
        for steps, (ranks, shard) in enumerate(stages, 1):
            layout = shard if name == "sharded" else "shard=optimizer"
            run(folder, name, ranks, layout, f"steps={steps}", *options)
    assert_same_run(folder / "sharded", folder / "whole", len(stages))


@pytest.mark.timeout(1200)
def test_a_killed_rank_is_named_and_the_run_resumes_exactly(folder: Path) -> None:
    options = [LAYERS, SHARDED]
    finish(begin(folder, folder / "undisturbed", "graph.impl=none", *options))
    output = folder / "killed"
    assert kill_rank(begin(folder, output, *options), a_save(output, 0), victim=1, signal_number=signal.SIGKILL)
    assert kill_rank(begin(folder, output, *options), a_step(output, 1, 0), victim=0, signal_number=signal.SIGKILL)
    finish(begin(folder, output, *options))
    assert_same(folder / "undisturbed", output)


# -- adapters ---------------------------------------------------------------------------------------

ADAPTER = "adapter={rank: 2, alpha: 8}"


def assert_same_adapter(first: Path, second: Path, steps: int) -> None:
    assert metrics_of(first) == metrics_of(second)
    assert [entry["step"] for entry in metrics_of(first)] == list(range(steps))
    ours, theirs = (load_file(path / "model" / "adapter_model.safetensors") for path in (first, second))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    base, their_base = (load_file(path / "base" / "model.safetensors") for path in (first, second))
    assert all(torch.equal(base[name], their_base[name]) for name in base)


@pytest.mark.parametrize("graphs", ["auto", "none"])
def test_a_sharded_base_gives_the_bits_of_a_whole_one(folder: Path, graphs: str) -> None:
    """With a KL term, so that the base scores in each step. The folder `base` is written from shards."""
    options = [ADAPTER, "optimizer.lr=0.1", f"graph.impl={graphs}", "checkpoint={every: 2, export_at_end: true}"]
    sharded = run(folder, "sharded", 2, SHARDED, *options)
    whole = run(folder, "whole", 2, *options)
    assert_same_adapter(sharded, whole, 4)
    assert metrics_of(run(folder, "alone", 1, *options))[0]["reward"] == pytest.approx(metrics_of(sharded)[0]["reward"])


def test_adapters_resume_with_another_layout_and_number_of_ranks(folder: Path) -> None:
    """One rank, then three with shards, two with shards, and two with a whole base. The base is loaded each time."""
    stages = [(1, SHARDED), (3, SHARDED), (2, SHARDED), (2, "shard=optimizer")]
    options = [ADAPTER, "optimizer={schedule: constant, lr: 0.1}", "checkpoint={every: 1, export_at_end: true}"]
    for name in ("sharded", "whole"):
        for steps, (ranks, shard) in enumerate(stages, 1):
            layout = shard if name == "sharded" else "shard=optimizer"
            run(folder, name, ranks, layout, f"steps={steps}", "graph.impl=none", *options)
    assert_same_adapter(folder / "sharded", folder / "whole", len(stages))


def test_a_sharded_adapter_to_start_from_is_the_reference(folder: Path) -> None:
    """It has a weight slot, because it is not the base. A resumed run reads it from the run folder."""
    start = run(folder, "start", 1, ADAPTER, "optimizer.lr=0.1", "checkpoint.export_at_end=true", "steps=1")
    sources = [
        f"model={{path: {start / 'base'}}}",
        f"adapter={{path: {start / 'model'}}}",
        "optimizer.schedule=constant",
    ]
    options = [*sources, "graph.impl=none", "checkpoint={every: 1, export_at_end: true}"]
    for name, layout in (("sharded", SHARDED), ("whole", "shard=optimizer")):
        for steps in (1, 2):
            run(folder, name, 2, layout, f"steps={steps}", *options)
    assert metrics_of(folder / "sharded") == metrics_of(folder / "whole")
    for folder_name in ("model", "reference"):
        ours, theirs = (load_file(folder / n / folder_name / "adapter_model.safetensors") for n in ("sharded", "whole"))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
