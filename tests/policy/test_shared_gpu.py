"""Two workers that share a GPU learn the same as one: streams, overlap and graphs of several ranks, on one GPU.

Their collectives are staged, as with `ranks.backend: gloo`. The same tests run on a CPU with the same copies.
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
from tests.policy.test_sharded_worker import run_phases, same
from tests.policy.test_tensor_parallel_worker import connected, gradient_pieces, on_policy_batch, sample_and_score

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
    """The results of a function on ranks that share this device. If it fails, the assertion shows its traceback."""
    method = "forkserver" if device == "cpu" else "spawn"
    results = run_world(ranks, folder, on_device, device, folder, function, arguments, method=method)
    for result in results:
        assert not isinstance(result, str), result
    return results


def on_device(world: World, device: str, folder: Path, function: Any, arguments: tuple[Any, ...]) -> Any:
    os.environ["ROLLGRAPH_CACHE"] = str(folder)  # all ranks use the GEMM algorithms that the first one chose
    if device != "cpu":
        torch.cuda.set_device(device)
    return on_host(function(replace(world, device=device, staged=world.size > 1), *arguments))


def on_host(result: Any) -> Any:
    """A result with its tensors in host memory, because other processes cannot open memory of a GPU."""
    if isinstance(result, Tensor):
        return result.cpu()
    if isinstance(result, dict):
        return {key: on_host(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return type(result)(map(on_host, result))
    return result


def differences(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    """Where two results differ, and by how much."""
    if isinstance(ours, list | tuple):
        if len(theirs) != len(ours):
            yield f"{path}: {len(theirs)} entries instead of {len(ours)}"
        for index, (one, other) in enumerate(zip(theirs, ours, strict=False)):
            yield from differences(one, other, f"{path}[{index}]")
    elif not same(theirs, ours):
        if isinstance(ours, Tensor):
            error = (theirs.double() - ours.double()).abs()
            yield f"{path}: {int((error > 0).sum())} of {error.numel()} entries differ by up to {error.max():.3g}"
        else:
            yield f"{path}: {theirs!r} instead of {ours!r}"


# -- gradients, optimizer and parameters in shards -------------------------------------------------


def take_steps(world: World, shard: str) -> dict[str, Any]:
    """The results of three steps, with a graph for each layer."""
    make_model = small_worker.make_model
    dtype = torch.float32 if world.device == "cpu" else torch.bfloat16
    small_worker.TINY = DEEP
    small_worker.make_model = lambda: make_model().to(world.device, dtype)
    settings = {"scopes": ("layer",), "reduction": "ordered", "exact": "must"}
    worker = make_worker(world, limits=ONE_SIZE, shard=shard, **settings)  # type: ignore[arg-type]
    results = {"backend": worker.backend_name, "exact": worker.is_exact, "initial": parameters(worker)}
    results["phases"] = run_phases(worker)
    results["drawn and scored"] = sample_and_score(worker, "again")[1:]
    report = worker.pool.report()
    results["captures"] = {graph.captures for graph in report.graphs if graph.captures or graph.replays}
    results["eager"] = report.eager_runs
    worker.close()
    return results


@pytest.fixture(scope="module")
def alone(device: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shared")
    return folder, run_on(device, 1, folder, take_steps, "optimizer")[0]


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_two_ranks_of_one_device_equal_one_rank(device: str, alone: tuple[Path, dict[str, Any]], shard: str) -> None:
    """Bit for bit: samples, log-probabilities of policy and reference, and all weights after each of three steps."""
    folder, one = alone
    for rank, result in enumerate(run_on(device, 2, folder, take_steps, shard)):
        assert result["backend"] == one["backend"] == ("tape" if device == "cpu" else "cuda")
        assert list(differences(result["phases"], one["phases"], f"rank {rank}")) == []
        assert result["captures"] == {1}, "captured again"
        assert result["eager"] == 0
        assert result["exact"]
        drawn, scored = result["drawn and scored"]
        assert drawn == scored
    assert not torch.equal(one["phases"][-1], one["initial"])  # training changed the weights


# -- tensor parallel -------------------------------------------------------------------------------


def make_tensor_parallel(world: World, ranks: int, **options: Any) -> PolicyWorker:
    """A worker in fp32, without graphs, in a tensor parallel group of `ranks` ranks."""
    small_worker.TINY = SHAPE
    groups = ParallelGroups(world, ranks)
    model = small_worker.make_model()
    if groups.group is not None:
        model = shard_model(model, groups.group)
    model = model.to(world.device)
    settings = {"backend": "eager", "exact": "must", "warmup": 1, "verify_weights": True} | options
    worker = PolicyWorker(
        model,
        None,
        groups.data,
        ONE_SIZE,
        tensor=groups.peers(model),
        reduction="ordered",
        sampling=SamplingParams(max_tokens=12),
        optimizer={"lr": RATE, "weight_decay": DECAY},
        **settings,
    )
    worker.weights.save("reference")
    worker.capture_all({"policy": (ALGORITHM.loss, False)})
    return worker


def run_tensor_parallel(world: World) -> dict[str, Any]:
    if world.size == 1:
        return train_tensor_parallel(world)
    with connected(world) as connected_world:
        results = train_tensor_parallel(connected_world)
        with pytest.raises(ValueError, match="no CUDA graph can contain") as refused:
            make_tensor_parallel(connected_world, 2, backend="cuda")
        return results | {"refused": str(refused.value)}


def train_tensor_parallel(world: World) -> dict[str, Any]:
    worker = make_tensor_parallel(world, world.size)
    results: dict[str, Any] = {"exact": worker.is_exact, "sampled": sample_and_score(worker, "a")}
    results["metrics"] = worker.train(make_batch(1, 6))
    results["gradient"] = gradient_pieces(worker)
    results["on-policy"] = worker.train(on_policy_batch(worker, "b"))
    results["weights"] = {name: parameter.detach() for name, parameter in worker.model.named_parameters()}
    results["graphs"] = {reason for graph in worker.pool.report().graphs for reason in graph.eager_runs}
    worker.close()
    return results


def test_two_ranks_of_one_device_form_a_tensor_parallel_group(device: str, tmp_path: Path) -> None:
    """Their phases agree bit for bit. With one rank they agree up to rounding, as on CPUs."""
    (one,) = run_on(device, 1, tmp_path, run_tensor_parallel)
    gradient = {name: value for (name, _), value in one["gradient"].items()}
    both = run_on(device, 2, tmp_path, run_tensor_parallel)
    for rank, result in enumerate(both):
        tokens, drawn, scored = result["sampled"]
        assert result["exact"]
        assert drawn == scored
        assert (tokens, drawn) == both[0]["sampled"][:2]
        assert result["on-policy"]["policy/token_mult_prob_error_max"] == 1.0
        assert result["on-policy"] == both[0]["on-policy"]
        assert result["graphs"] == {"backend is eager"}  # reported, not silent
        pieces = parameter_shards(SHAPE, rank, 2)
        for name in one["metrics"].keys() - {"tokens/padding"}:
            assert result["metrics"][name] == pytest.approx(one["metrics"][name], rel=4e-6, abs=2e-6), name
        for (name, start), part in result["gradient"].items():
            whole = slice_shard(gradient[name].view(pieces[name].full_shape), pieces[name]).flatten()
            torch.testing.assert_close(
                part,
                whole[start : start + len(part)],
                rtol=0,
                atol=1e-6,
                msg=lambda message, name=name: f"{name}: {message}",
            )
        for name, value in result["weights"].items():
            if pieces[name].is_full:
                assert torch.equal(value, both[0]["weights"][name]), name
