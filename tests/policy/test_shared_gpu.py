"""Two workers that share a GPU learn what one worker does: streams, overlap and graphs of several ranks, on one GPU.

They exchange through host memory, as `ranks.backend: gloo` has it. The same tests run on a CPU with the same copies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.inference import SamplingParams
from rollgraph.model.tensor_shards import parameter_shards, shard_model, slice_shard
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PolicyWorker
from rollgraph.policy.worker import ParallelGroups
from tests.parallel.worlds import run_world
from tests.policy import small_worker
from tests.policy.small_worker import ALGORITHM, DECAY, LIMITS, RATE, make_batch, make_worker, parameters
from tests.policy.test_divided_worker import moments, own_batch, rescored, watching
from tests.policy.test_sharded_worker import run_phases, same

pytestmark = [pytest.mark.multi, pytest.mark.timeout(900)]

SHAPE = replace(small_worker.TINY, hidden=32, mlp=64, head_dim=16)
DEEP = replace(SHAPE, layers=5)  # more than there are slots
ONE_SIZE = replace(LIMITS, token_buckets=(48,), cache_bytes=1 << 19)


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run_on(device: str, ranks: int, folder: Path, function: Any, *arguments: Any) -> list[Any]:
    """What a function returns on ranks that all have this device; its traceback is shown if it fails."""
    method = "forkserver" if device == "cpu" else "spawn"
    found = run_world(ranks, folder, on_device, device, folder, function, arguments, method=method)
    for result in found:
        assert not isinstance(result, str), result
    return found


def on_device(world: World, device: str, folder: Path, function: Any, arguments: tuple[Any, ...]) -> Any:
    os.environ["ROLLGRAPH_CACHE"] = str(folder)  # all ranks multiply in the ways that the first one found
    if device != "cpu":
        torch.cuda.set_device(device)
    return on_host(function(replace(world, device=device, staged=world.size > 1), *arguments))


def on_host(found: Any) -> Any:
    """The same without memory of a GPU, which other processes cannot open."""
    if isinstance(found, Tensor):
        return found.cpu()
    if isinstance(found, dict):
        return {key: on_host(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(map(on_host, found))
    return found


def differences(theirs: Any, ours: Any, place: str = "") -> Iterator[str]:
    """Where two results differ, and by how much."""
    if isinstance(ours, list | tuple):
        if len(theirs) != len(ours):
            yield f"{place}: {len(theirs)} entries instead of {len(ours)}"
        for index, (one, other) in enumerate(zip(theirs, ours, strict=False)):
            yield from differences(one, other, f"{place}[{index}]")
    elif not same(theirs, ours):
        if isinstance(ours, Tensor):
            apart = (theirs.double() - ours.double()).abs()
            yield f"{place}: {int((apart > 0).sum())} of {apart.numel()} entries differ by up to {apart.max():.3g}"
        else:
            yield f"{place}: {theirs!r} instead of {ours!r}"


# -- gradients, optimizer and parameters in shards -------------------------------------------------


def take_steps(world: World, shard: str) -> dict[str, Any]:
    """Everything that comes out of three steps, with a graph for each layer."""
    make_model = small_worker.make_model
    dtype = torch.float32 if world.device == "cpu" else torch.bfloat16
    small_worker.TINY = DEEP
    small_worker.make_model = lambda: make_model().to(world.device, dtype)
    settings = {"scopes": ("layer",), "reduction": "ordered", "exact": "must"}
    worker = make_worker(world, limits=ONE_SIZE, shard=shard, **settings)  # type: ignore[arg-type]
    found = {"backend": worker.backend_name, "exact": worker.is_exact, "initial": parameters(worker)}
    found["phases"] = run_phases(worker)
    found["drawn and scored"] = rescored(worker, "again")[1:]
    report = worker.pool.report()
    found["captures"] = {graph.captures for graph in report.graphs if graph.captures or graph.replays}
    found["eager"] = report.eager_runs
    worker.close()
    return found


@pytest.fixture(scope="module")
def alone(device: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shared")
    return folder, run_on(device, 1, folder, take_steps, "optimizer")[0]


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_two_ranks_of_one_device_do_what_one_rank_does(
    device: str, alone: tuple[Path, dict[str, Any]], shard: str
) -> None:
    """Bit for bit: samples, log-probabilities under policy and reference, and all weights after each of three steps."""
    folder, one = alone
    for rank, found in enumerate(run_on(device, 2, folder, take_steps, shard)):
        assert found["backend"] == one["backend"] == ("tape" if device == "cpu" else "cuda")
        assert list(differences(found["phases"], one["phases"], f"rank {rank}")) == []
        assert found["captures"] == {1}, "captured again"
        assert found["eager"] == 0
        assert found["exact"]
        drawn, scored = found["drawn and scored"]
        assert drawn == scored
    assert not torch.equal(one["phases"][-1], one["initial"])  # there was something to learn


# -- divided layers --------------------------------------------------------------------------------


def make_divided(world: World, ranks: int, **options: Any) -> PolicyWorker:
    """A worker in fp32, without graphs, with layers divided among so many ranks."""
    small_worker.TINY = SHAPE
    division = ParallelGroups(world, ranks)
    model = small_worker.make_model()
    if division.group is not None:
        model = shard_model(model, division.group)
    model = model.to(world.device)
    settings = {"backend": "eager", "exact": "must", "warmup": 1, "verify_weights": True} | options
    worker = PolicyWorker(
        model,
        None,
        division.data,
        ONE_SIZE,
        tensor=division.peers(model),
        reduction="ordered",
        sampling=SamplingParams(max_tokens=12),
        optimizer={"lr": RATE, "weight_decay": DECAY},
        **settings,
    )
    worker.weights.save("reference")
    worker.capture_all({"policy": (ALGORITHM.loss, False)})
    return worker


def divide(world: World) -> dict[str, Any]:
    if world.size == 1:
        return learn_divided(world)
    with watching(world) as watched:
        found = learn_divided(watched)
        with pytest.raises(ValueError, match="no CUDA graph can contain") as refused:
            make_divided(watched, 2, backend="cuda")
        return found | {"refused": str(refused.value)}


def learn_divided(world: World) -> dict[str, Any]:
    worker = make_divided(world, world.size)
    found: dict[str, Any] = {"exact": worker.is_exact, "sampled": rescored(worker, "a")}
    found["metrics"] = worker.train(make_batch(1, 6))
    found["gradient"] = moments(worker)
    found["own"] = worker.train(own_batch(worker, "b"))
    found["weights"] = {name: parameter.detach() for name, parameter in worker.model.named_parameters()}
    found["graphs"] = {reason for graph in worker.pool.report().graphs for reason in graph.eager_runs}
    worker.close()
    return found


def test_two_ranks_of_one_device_divide_layers(device: str, tmp_path: Path) -> None:
    """Their phases agree bit for bit; with one rank, they agree up to rounding, as on CPUs."""
    (one,) = run_on(device, 1, tmp_path, divide)
    gradient = {name: value for (name, _), value in one["gradient"].items()}
    both = run_on(device, 2, tmp_path, divide)
    for rank, found in enumerate(both):
        tokens, drawn, scored = found["sampled"]
        assert found["exact"]
        assert drawn == scored
        assert (tokens, drawn) == both[0]["sampled"][:2]
        assert found["own"]["policy/token_mult_prob_error_max"] == 1.0
        assert found["own"] == both[0]["own"]
        assert found["graphs"] == {"backend is eager"}  # said, not silent
        pieces = parameter_shards(SHAPE, rank, 2)
        for name in one["metrics"].keys() - {"tokens/padding"}:
            assert found["metrics"][name] == pytest.approx(one["metrics"][name], rel=4e-6, abs=2e-6), name
        for (name, start), part in found["gradient"].items():
            whole = slice_shard(gradient[name].view(pieces[name].full_shape), pieces[name]).flatten()
            torch.testing.assert_close(
                part, whole[start : start + len(part)], rtol=0, atol=1e-6, msg=lambda told, name=name: f"{name}: {told}"
            )
        for name, value in found["weights"].items():
            if pieces[name].is_full:
                assert torch.equal(value, both[0]["weights"][name]), name
