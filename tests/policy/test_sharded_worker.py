"""Workers with sharded parameters generate, score and train like one worker, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.checkpoint.load import load
from rollgraph.checkpoint.write import save
from rollgraph.graph import GraphError
from rollgraph.inference import SamplingParams
from rollgraph.model import load_model
from rollgraph.parallel.data.together import StepAborted
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PolicyWorker
from rollgraph.types import Batch, Sample
from tests.parallel.worlds import run_world
from tests.policy import small_worker
from tests.policy.small_worker import (
    LIMITS,
    captured_again,
    make_samples,
    make_worker,
    parameters,
    reset,
    sample_rollouts,
)

pytestmark = [pytest.mark.multi, pytest.mark.slow]

DEEP = replace(small_worker.TINY, layers=5)  # more than there are slots
ONE_SIZE = replace(LIMITS, token_buckets=(48,))
STEPS = 3
SCORED = make_samples(4, seed=9)


def make(world: World, **options: Any) -> PolicyWorker:
    """A worker in a process of its own, because this changes the architecture of the whole process."""
    small_worker.TINY = DEEP
    settings = {"scopes": ("layer",), "reduction": "ordered", "shard": "parameters", **options}
    return make_worker(world, limits=ONE_SIZE, **settings)


def paired(call: int) -> list[Sample]:
    """Samples of 24 tokens. Two fill a microbatch, so that two ranks have one each, in this order."""
    samples = make_samples(4, seed=call, lengths=[20] * 4)
    return [replace(sample, prompt=[first, *sample.prompt[1:]]) for first, sample in enumerate(samples)]


def run_phases(worker: PolicyWorker) -> list[Any]:
    """The results of every phase, step by step."""
    results: list[Any] = []
    for step in range(STEPS):
        rollouts = sample_rollouts(worker, 3, f"step {step}")
        worker.score(rollouts, "reference")
        results.append([(r.tokens, r.logprobs, r.reference_logprobs) for r in rollouts])
        results.append(worker.logprobs(SCORED))
        worker.train(Batch([paired(step), paired(step + 10)]), score_old=step > 0)
        results.append(parameters(worker))
    return results


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def refusals(worker: PolicyWorker) -> list[str]:
    """The reasons why generation and scoring are refused while the full model is stale."""
    reasons = []
    worker.train(Batch([paired(0)]))
    assert worker.engine is not None
    for call in (
        lambda: worker.engine.generate([[1, 2]], SamplingParams(max_tokens=2)),  # type: ignore[union-attr]
        lambda: worker.train_graphs.logprobs(SCORED),
    ):
        with pytest.raises(GraphError) as refused:
            call()
        reasons.append(str(refused.value))
    return reasons


def fail_on_one_rank(worker: PolicyWorker) -> list[str]:
    """The exception of each rank if the backward of a layer fails on rank 1 alone. The weights stay as they were."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError("the backward failed")

    before = parameters(worker)
    layer = list(worker.model.layers)[2]
    original = layer.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        residual, update = original(*args, **kwargs)
        residual.register_hook(fail)
        return residual, update

    if worker.world.rank == 1:
        layer.forward = failing  # type: ignore[method-assign]
    with pytest.raises((ArithmeticError, StepAborted)) as raised:
        worker.train(Batch([paired(0)]))
    layer.forward = original  # type: ignore[method-assign]
    assert torch.equal(parameters(worker), before)
    return [type(raised.value).__name__]


def run_all(world: World, folder: Path) -> dict[str, Any]:
    """Run everything that the tests check, because starting ranks is slow."""
    worker = make(world)
    assert worker.sharded.shards_parameters == (world.size > 1)
    addresses = [tensor.data_ptr() for tensor in (*worker.model.parameters(), *worker.full_model.parameters())]
    results: dict[str, Any] = {"phases": run_phases(worker), "exact": worker.is_exact}
    worker.export(folder / "exported")
    results["reference"] = worker.logprobs(SCORED, "reference")
    with worker.phases.enter("score"):
        results["in one phase"] = [worker.logprobs(SCORED, name) for name in ("policy", "reference", "policy")]
    if world.size > 1:
        results["refused"] = refusals(worker)
        generate = worker.generator(seed="of one rank")
        results["generated"] = [turn.tokens for turn in generate([([1, 2], 0)])] if world.rank == 0 else []
        results["raised"] = fail_on_one_rank(worker)
        save(folder / "checkpoint", worker.sharded, worker.optimizer)
        trained = parameters(worker)
    reset(worker)
    results["again"] = run_phases(worker)
    if world.size > 1:
        load(folder / "checkpoint", worker.sharded, worker.optimizer)
        assert torch.equal(parameters(worker), trained)
    assert not captured_again(worker)
    assert worker.pool.report().eager_runs == 0
    new_addresses = [tensor.data_ptr() for tensor in (*worker.model.parameters(), *worker.full_model.parameters())]
    assert new_addresses == addresses
    worker.close()
    assert not any(module._forward_pre_hooks for module in worker.model.modules())
    return results


def other_settings(world: World) -> dict[str, Any]:
    results = {}
    for name, options in {
        "attn,mlp": {"scopes": ("attn", "mlp")},
        "eager": {"backend": "eager"},
        "whole": {"shard": "optimizer"},
    }.items():
        worker = make(world, **options)
        results[name] = run_phases(worker)
        worker.close()
    make_model = small_worker.make_model

    def checkpointed() -> Any:
        model = make_model()
        model.checkpoint_layers(3)
        return model

    small_worker.make_model = checkpointed
    worker = make(world)
    results["checkpointing"] = run_phases(worker)
    worker.close()
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    (result,) = run_world(1, folder, run_all, folder)
    assert isinstance(result, dict), result
    return result


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    results = run_world(2, folder, run_all, folder)
    for result in results:
        assert isinstance(result, dict), result
    return folder, results


def test_two_ranks_with_shards_equal_one_rank(ranks: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any]) -> None:
    for result in ranks[1]:
        assert result["exact"] == alone["exact"]
        for number, (theirs, ours) in enumerate(zip(result["phases"], alone["phases"], strict=True)):
            assert same(theirs, ours), number
        assert same(result["again"], alone["again"])
        assert same(result["again"], result["phases"])


def test_the_reference_is_exchanged_by_shards(ranks: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any]) -> None:
    for result in ranks[1]:
        assert result["reference"] == alone["reference"] == alone["phases"][1]
        policy, reference, policy_again = result["in one phase"]
        assert policy == policy_again != reference == result["reference"]
        assert result["in one phase"] == alone["in one phase"]


def test_the_export_is_the_full_model(ranks: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any]) -> None:
    model = load_model(ranks[0] / "exported")
    exported = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(exported, alone["phases"][-1])


def test_generation_and_scoring_with_a_stale_full_model_are_refused(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    for result in ranks[1]:
        for reason in result["refused"]:
            assert "outside of layers of version" in reason or "do not hold layer 0" in reason


def test_a_backward_that_fails_on_one_rank_is_dropped_by_all(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert [result["raised"] for result in ranks[1]] == [["StepAborted"], ["ArithmeticError"]]


def test_scopes_backends_layouts_and_checkpointing_change_no_bit(tmp_path: Path, alone: dict[str, Any]) -> None:
    for results in run_world(2, tmp_path, other_settings):
        assert isinstance(results, dict), results
        for name, result in results.items():
            assert same(result, alone["phases"]), name
