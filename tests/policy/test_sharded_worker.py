"""Workers with sharded parameters generate, score and train as one worker does, bit for bit."""

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
    """In a process of its own: the architecture is changed for all of it."""
    small_worker.TINY = DEEP
    settings = {"scopes": ("layer",), "reduction": "ordered", "shard": "parameters", **options}
    return make_worker(world, limits=ONE_SIZE, **settings)


def paired(call: int) -> list[Sample]:
    """Samples of 24 tokens, two of which fill a microbatch; on two ranks, each has one. They are in that order."""
    samples = make_samples(4, seed=call, lengths=[20] * 4)
    return [replace(sample, prompt=[first, *sample.prompt[1:]]) for first, sample in enumerate(samples)]


def run_phases(worker: PolicyWorker) -> list[Any]:
    """What comes out of every phase, step by step."""
    found: list[Any] = []
    for step in range(STEPS):
        rollouts = sample_rollouts(worker, 3, f"step {step}")
        worker.score(rollouts, "reference")
        found.append([(r.tokens, r.logprobs, r.reference_logprobs) for r in rollouts])
        found.append(worker.logprobs(SCORED))
        worker.train(Batch([paired(step), paired(step + 10)]), score_old=step > 0)
        found.append(parameters(worker))
    return found


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def refusals(worker: PolicyWorker) -> list[str]:
    """Why generation and scoring are refused while the full copy is not current."""
    reasons = []
    worker.train(Batch([paired(0)]))
    assert worker.engine is not None
    for call in (
        lambda: worker.engine.generate([[1, 2]], SamplingParams(max_tokens=2)),  # type: ignore[union-attr]
        lambda: worker._train_graphs.logprobs(SCORED),
    ):
        with pytest.raises(GraphError) as refused:
            call()
        reasons.append(str(refused.value))
    return reasons


def fail_on_one_rank(worker: PolicyWorker) -> list[str]:
    """What ranks raise if the backward of a layer fails on rank 1 alone; the next step is as if nothing had been."""

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


def everything(world: World, folder: Path) -> dict[str, Any]:
    """Run everything that is tested, because starting ranks is slow."""
    worker = make(world)
    assert worker.sharded.shards_parameters == (world.size > 1)
    addresses = [tensor.data_ptr() for tensor in (*worker.model.parameters(), *worker.full_model.parameters())]
    found: dict[str, Any] = {"phases": run_phases(worker), "exact": worker.is_exact}
    worker.export(folder / "exported")
    found["reference"] = worker.logprobs(SCORED, "reference")
    with worker.phases.enter("score"):
        found["in one phase"] = [worker.logprobs(SCORED, name) for name in ("policy", "reference", "policy")]
    if world.size > 1:
        found["refused"] = refusals(worker)
        generate = worker.generator(seed="of one rank")
        found["generated"] = [turn.tokens for turn in generate([([1, 2], 0)])] if world.rank == 0 else []
        found["raised"] = fail_on_one_rank(worker)
        save(folder / "checkpoint", worker.sharded, worker.optimizer)
        kept = parameters(worker)
    reset(worker)
    found["again"] = run_phases(worker)
    if world.size > 1:
        load(folder / "checkpoint", worker.sharded, worker.optimizer)
        assert torch.equal(parameters(worker), kept)
    assert not captured_again(worker)
    assert worker.pool.report().eager_runs == 0
    now = [tensor.data_ptr() for tensor in (*worker.model.parameters(), *worker.full_model.parameters())]
    assert now == addresses
    worker.close()
    assert not any(module._forward_pre_hooks for module in worker.model.modules())
    return found


def other_settings(world: World) -> dict[str, Any]:
    found = {}
    for name, options in {
        "attn,mlp": {"scopes": ("attn", "mlp")},
        "eager": {"backend": "eager"},
        "whole": {"shard": "optimizer"},
    }.items():
        worker = make(world, **options)
        found[name] = run_phases(worker)
        worker.close()
    make_model = small_worker.make_model

    def checkpointed() -> Any:
        model = make_model()
        model.checkpoint_layers(3)
        return model

    small_worker.make_model = checkpointed
    worker = make(world)
    found["checkpointing"] = run_phases(worker)
    worker.close()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    (found,) = run_world(1, folder, everything, folder)
    assert isinstance(found, dict), found
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    results = run_world(2, folder, everything, folder)
    for found in results:
        assert isinstance(found, dict), found
    return folder, results


def test_two_ranks_with_shards_do_what_one_rank_does(
    ranks: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    for found in ranks[1]:
        assert found["exact"] == alone["exact"]
        for number, (theirs, ours) in enumerate(zip(found["phases"], alone["phases"], strict=True)):
            assert same(theirs, ours), number
        assert same(found["again"], alone["again"])
        assert same(found["again"], found["phases"])


def test_the_reference_is_exchanged_by_shards(ranks: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any]) -> None:
    for found in ranks[1]:
        assert found["reference"] == alone["reference"] == alone["phases"][1]
        policy, reference, policy_again = found["in one phase"]
        assert policy == policy_again != reference == found["reference"]
        assert found["in one phase"] == alone["in one phase"]


def test_what_is_exported_is_the_whole_model(ranks: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any]) -> None:
    model = load_model(ranks[0] / "exported")
    exported = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(exported, alone["phases"][-1])


def test_generation_and_scoring_of_a_copy_that_is_not_current_are_refused(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    for found in ranks[1]:
        for reason in found["refused"]:
            assert "outside of layers of version" in reason or "do not hold layer 0" in reason


def test_a_backward_that_fails_on_one_rank_alone_is_dropped_by_all(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert [found["raised"] for found in ranks[1]] == [["StepAborted"], ["ArithmeticError"]]


def test_scopes_backends_layouts_and_checkpointing_change_no_bit(tmp_path: Path, alone: dict[str, Any]) -> None:
    for results in run_world(2, tmp_path, other_settings):
        assert isinstance(results, dict), results
        for name, found in results.items():
            assert same(found, alone["phases"]), name
