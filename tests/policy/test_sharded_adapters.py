"""Workers with adapters on a sharded base equal one worker, bit for bit."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rollgraph.checkpoint.load import load
from rollgraph.checkpoint.write import save
from rollgraph.graph import StaleGraph
from rollgraph.graph.hooks import GraphHooks
from rollgraph.model import load_model
from rollgraph.model.lora import AdapterSpec, attach
from rollgraph.model.weights.adapter_files import load_adapter
from rollgraph.model.weights.hf import parameter_views
from rollgraph.parallel.data.gathers import StaleWeights
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PolicyWorker
from rollgraph.types import Batch
from tests.parallel.worlds import run_world
from tests.policy import small_worker
from tests.policy.small_worker import LIMITS, captured_again, make_samples, make_worker, parameters, sample_rollouts
from tests.policy.test_sharded_worker import DEEP, fail_on_one_rank, paired, refusals, same

pytestmark = [pytest.mark.multi, pytest.mark.slow]

SPEC = AdapterSpec(rank=3, alpha=3.0)
MLP_ONLY = replace(SPEC, targets=("down_proj",))
BIASED = replace(DEEP, family="qwen2", attention_bias=True)
ONE_SIZE = replace(LIMITS, token_buckets=(48,))
STEPS = 3
SCORED = make_samples(4, seed=9)
make_base_model = small_worker.make_model
GRAPH_HOOKS: list[GraphHooks] = []  # of all graphs of this process


def make(
    world: World, *, spec: AdapterSpec = SPEC, biased: bool = False, recomputed: int = 0, **options: Any
) -> PolicyWorker:
    """A worker in a process of its own, because this replaces the model of the whole process."""
    small_worker.TINY = BIASED if biased else DEEP

    def make_model() -> Any:
        model = make_base_model()
        model.checkpoint_layers(recomputed)
        return model

    small_worker.make_model = make_model
    ShardedModel.graph_hooks = record_graph_hooks  # type: ignore[method-assign]
    settings = {"scopes": ("layer",), "reduction": "ordered", "shard": "parameters", **options}
    return make_worker(world, limits=ONE_SIZE, adapter=spec, **settings)


make_graph_hooks = ShardedModel.graph_hooks


def record_graph_hooks(sharded: ShardedModel, module: nn.Module) -> GraphHooks:
    GRAPH_HOOKS.append(make_graph_hooks(sharded, module))
    return GRAPH_HOOKS[-1]


def batch(step: int, ranks: int) -> Batch:
    """Two samples for each rank, which fill a microbatch. A single rank runs the microbatches in the order of ranks."""
    return Batch(
        [(paired(step) + paired(step + 20))[: 2 * ranks], (paired(step + 10) + paired(step + 30))[: 2 * ranks]]
    )


def run_phases(worker: PolicyWorker, ranks: int) -> list[Any]:
    """The results of every phase, step by step."""
    results: list[Any] = []
    for step in range(STEPS):
        rollouts = sample_rollouts(worker, 3, f"step {step}")
        worker.score(rollouts, "reference")
        results.append([(r.tokens, r.logprobs, r.reference_logprobs) for r in rollouts])
        results.append(worker.logprobs(SCORED))
        worker.train(batch(step, ranks), score_old=step > 0)
        results.append(parameters(worker))
    return results


SETTINGS: dict[str, dict[str, Any]] = {
    "layers": {},
    "recomputed": {"recomputed": 3},
    "biases": {"biased": True},
    "eager": {"backend": "eager"},
    "attn, mlp": {"scopes": ("attn", "mlp")},
    "nothing to train in attentions": {"scopes": ("attn", "mlp"), "spec": MLP_ONLY},
    "nothing to train in attentions, eager": {"backend": "eager", "spec": MLP_ONLY},
    "recomputed parts": {"scopes": ("attn", "mlp"), "recomputed": 5},
}


def all_settings(world: World, ranks: int) -> dict[str, Any]:
    results = {}
    for name, options in SETTINGS.items():
        worker = make(world, **options)
        assert worker.sharded.shards_parameters == (world.size > 1)
        results[name] = run_phases(worker, ranks)
        report = worker.pool.report()
        assert report.eager_runs == 0 or options.get("backend") == "eager"
        worker.close()
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_a_sharded_base_equal_one_rank(ranks: int, tmp_path: Path) -> None:
    """With tape graphs and without, with biases, and with layers and their parts recomputed."""
    (alone,) = run_world(1, tmp_path, all_settings, ranks)
    assert isinstance(alone, dict), alone
    for result in run_world(ranks, tmp_path, all_settings, ranks):
        assert isinstance(result, dict), result
        for name, expected in alone.items():
            for number, (theirs, ours) in enumerate(zip(result[name], expected, strict=True)):
                assert same(theirs, ours), (name, number)


# -- one pair of ranks, shared by all tests below ----------------------------------------------------


def check_base(worker: PolicyWorker) -> None:
    """Check that the base of the full model has its initial weights."""
    with worker.phases.enter("save"):
        initial = parameter_views(make_base_model())
        for name, view in parameter_views(worker.full_model).items():
            assert torch.equal(view, initial[name]), name


def score_slots(worker: PolicyWorker) -> list[Any]:
    """Log-probabilities with slots and with the base, in one phase, in which only `use` gathers the full model."""
    worker.weights.save("start")
    assert worker.weights.nbytes("device") == sum(bucket.resident.nbytes for bucket in worker.sharded.flat.buckets)
    names = ("policy", "reference", "start", "reference", "policy")
    before = [worker.logprobs(SCORED, name) for name in names]
    assert before[0] == before[2] == before[4] != before[1] == before[3]
    worker.train(batch(50, 2))
    with worker.phases.enter("score"):
        after = [worker.logprobs(SCORED, name) for name in names]
    assert after[1] == after[3] == before[1]
    assert after[2] == before[0] != after[0] == after[4]
    worker.weights.drop("start")
    return after


def missing_gathers(worker: PolicyWorker) -> list[str]:
    """Why the graph of a layer, or of an attention without trained weights, refuses to run without a gather."""
    worker.train(batch(51, 2))
    worker.sharded.ensure_gathered(list(worker.model.layers[3].parameters()))
    worker.sharded.ensure_gathered(list(worker.model.layers[4].parameters()))
    attention = "attn" in worker._capture_settings.scopes
    layer = worker.model.layers[2]
    _, samples = worker.train_graphs._list_modules(ONE_SIZE.token_buckets[-1])
    target, arguments = (layer.self_attn, samples[4]) if attention else (layer, samples[2])
    reasons = []
    with ExitStack() as paused:
        for hooks in GRAPH_HOOKS:
            paused.enter_context(hooks.paused())
        for call in (target, target.forward):  # a hook of the module refuses the first, a guard of the graph the second
            with worker.sharded.paused(gather=False), pytest.raises((StaleGraph, StaleWeights)) as refused:
                call(*arguments)
            reasons.append(str(refused.value))
    return reasons


def load_into_full_model(worker: PolicyWorker, folder: Path) -> None:
    """Weights written to the full model stay, whatever its memory held before."""
    worker.train(batch(52, 2))
    worker.sharded.gathers.invalidate_full_parameters()
    with torch.no_grad():
        for tensor in worker.full_model.layers.parameters():
            tensor.fill_(7.0)
    with worker.sharded.writing_full_model():
        load_adapter(worker.full_model, folder / "exported")
    check_base(worker)


def run_all(world: World, folder: Path) -> dict[str, Any]:
    """Run everything that the tests check, because starting ranks is slow."""
    worker = make(world)
    models = (worker.model, worker.full_model)
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    addresses = [tensor.data_ptr() for tensor in tensors]
    results: dict[str, Any] = {"phases": run_phases(worker, 2), "slots": score_slots(worker)}
    check_base(worker)
    if world.size > 1:
        assert worker.model.adapters is not None
        assert worker.full_model.adapters is not worker.model.adapters
        results["stale"] = refusals(worker)
        results["missing"] = missing_gathers(worker)
        results["raised"] = fail_on_one_rank(worker)
        trained = parameters(worker)
        save(folder / "checkpoint", worker.sharded, worker.optimizer)
        worker.export(folder / "exported")
        worker.export(folder / "merged", merge=True)
        worker.sharded.exchange_text("written")
        results["before"] = (trained, worker.logprobs(SCORED))
        load_into_full_model(worker, folder)
        results["loaded"] = (parameters(worker), worker.logprobs(SCORED))
        worker.train(batch(53, 2))
        load(folder / "checkpoint", worker.sharded, worker.optimizer)
        results["resumed"] = (parameters(worker), worker.logprobs(SCORED))
    assert not captured_again(worker)
    assert worker.pool.report().eager_runs == 0
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    worker.sharded.flat.check()
    worker.close()
    if world.size > 1:
        parts = make(world, spec=MLP_ONLY, scopes=("attn", "mlp"))
        results["missing in a part"] = missing_gathers(parts)
        parts.close()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    results = run_world(2, folder, run_all, folder)
    for result in results:
        assert isinstance(result, dict), result
    return folder, results


Results = tuple[Path, list[dict[str, Any]]]


def test_the_base_and_slots_of_adapters_score_the_same_as_on_one_rank(ranks: Results, tmp_path: Path) -> None:
    """After all updates the base is still the initial one, and a slot holds only adapters."""
    (alone,) = run_world(1, tmp_path, run_all, tmp_path)
    assert isinstance(alone, dict), alone
    for result in ranks[1]:
        assert same(result["phases"], alone["phases"])
        assert result["slots"] == alone["slots"]


def test_a_stale_full_model_is_refused(ranks: Results) -> None:
    for result in ranks[1]:
        for reason in result["stale"]:
            assert "do not hold layer 0" in reason


def test_a_layer_whose_base_is_not_in_its_slot_is_refused(ranks: Results) -> None:
    """Even if nothing is trained there: an attention with a frozen base would read that of another layer."""
    for result in ranks[1]:
        for reasons in (result["missing"], result["missing in a part"]):
            assert len(reasons) == 2
            for reason in reasons:
                assert "slot 0 holds layer 4, not layer 2" in reason


def test_a_backward_that_fails_on_one_rank_is_dropped_by_all(ranks: Results) -> None:
    assert [result["raised"] for result in ranks[1]] == [["StepAborted"], ["ArithmeticError"]]


def test_checkpoints_and_exports_are_complete(ranks: Results) -> None:
    folder, results = ranks
    for result in results:
        for restored in (result["loaded"], result["resumed"]):
            assert same(list(restored), list(result["before"]))
    expected = make_deep()
    load_adapter(expected, folder / "exported")
    exported = torch.cat([parameter.detach().flatten() for parameter in expected.parameters()])
    assert torch.equal(exported, results[0]["before"][0])
    assert expected.adapters is not None
    merged = parameter_views(load_model(folder / "merged"))
    for name, weight in expected.adapters.merged_weights():
        assert torch.equal(merged[name], weight), name


def make_deep() -> Any:
    small_worker.TINY, before = DEEP, small_worker.TINY
    try:
        model = make_base_model()
    finally:
        small_worker.TINY = before
    attach(model, SPEC, seed=0)
    return model
