"""Tensor parallel workers, on gloo, learn the same as one worker, and their phases agree exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.checkpoint import load, write
from rollgraph.inference import SamplingParams
from rollgraph.model import Decoder, load_model
from rollgraph.model.tensor_shards import parameter_shards, shard_model, slice_shard
from rollgraph.parallel.data.collectives import Collectives
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.policy.worker import ParallelGroups
from rollgraph.types import Batch, Sample
from tests.parallel.worlds import run_world
from tests.policy.small_worker import (
    ALGORITHM,
    ALONE,
    DECAY,
    LIMITS,
    RATE,
    TINY,
    assert_equal_up_to_rounding,
    captured_again,
    make_batch,
    make_model,
    sample_rollouts,
)

pytestmark = [pytest.mark.multi, pytest.mark.slow]

ONE_SIZE = replace(LIMITS, token_buckets=(48,))
Weights = dict[str, Tensor]


def make(
    world: World, ranks: int, model: Decoder | None = None, limits: Limits = ONE_SIZE, **options: Any
) -> PolicyWorker:
    """A worker in a tensor parallel group of `ranks` ranks."""
    groups = ParallelGroups(world, ranks)
    model = model or make_model()
    if groups.group is not None:
        model = shard_model(model, groups.group)
    settings = {
        "optimizer": {"lr": RATE, "weight_decay": DECAY},
        "warmup": 1,
        "verify_weights": True,
        "reduction": "ordered",
        "scopes": ("step",) if groups.data.size == 1 else ("layer",),
        "sampling": SamplingParams(max_tokens=12),
    } | options
    worker = PolicyWorker(
        model,
        None,
        groups.data,
        limits,
        tensor=groups.peers(model),
        **settings,  # type: ignore[arg-type]
    )
    worker.weights.save("reference")
    worker.capture_all({"policy": (ALGORITHM.loss, False)})
    return worker


def gradient_pieces(worker: PolicyWorker) -> dict[tuple[str, int], Tensor]:
    """This rank's pieces of the gradient of the first step, by name and start."""
    pieces = worker.optimizer.parameter_states
    return {(piece.parameter.name, piece.start): piece.state["exp_avg"].clone() / 0.1 for piece in pieces}


def whole_gradient(worker: PolicyWorker) -> dict[str, Tensor]:
    """The flat gradient of each parameter, of a worker without other ranks."""
    return {name: gradient for (name, _), gradient in gradient_pieces(worker).items()}


def weights(worker: PolicyWorker) -> Weights:
    worker.sharded.require_full_parameters("gather")
    return {name: parameter.detach().clone() for name, parameter in worker.model.named_parameters()}


def sample_and_score(worker: PolicyWorker, seed: str) -> tuple[Any, Any, Any]:
    """Sampled tokens, and their log-probabilities from sampling and from scoring."""
    rollouts = sample_rollouts(worker, 4, seed)
    zeros = [[0.0] * len(rollout.tokens) for rollout in rollouts]
    samples = [Sample(r.prompt.tokens, r.tokens, z, z, z) for r, z in zip(rollouts, zeros, strict=True)]
    return [r.tokens for r in rollouts], [r.logprobs for r in rollouts], worker.logprobs(samples)


def on_policy_batch(worker: PolicyWorker, seed: str) -> Batch:
    """A batch that the policy has just sampled."""
    rollouts = sample_rollouts(worker, 4, seed)
    worker.score(rollouts, "reference")
    samples = []
    for rollout in rollouts:
        length = len(rollout.tokens)
        samples.append(
            Sample(
                rollout.prompt.tokens,
                rollout.tokens,
                [rollout.reward - 3] * length,
                [0.02] * length,
                rollout.logprobs,
                None,
                rollout.reference_logprobs,
            )
        )
    return Batch([samples])


def run_all(unconnected: World, ranks: int, folder: Path) -> dict[str, Any]:
    with connected(unconnected) as world:
        return run_all_connected(world, ranks, folder)


@contextmanager
def connected(world: World) -> Iterator[World]:
    """The world with liveness, by which the ranks watch each other, as in a run."""
    together = Collectives(world)
    yield replace(world, liveness=together.liveness)


def run_all_connected(world: World, ranks: int, folder: Path) -> dict[str, Any]:
    worker = make(world, ranks)
    results: dict[str, Any] = {"exact": worker.is_exact}
    results["sampled"] = sample_and_score(worker, "a")
    results["metrics"] = worker.train(make_batch(1, 6))
    results["gradient"] = gradient_pieces(worker)
    sampled_batch = on_policy_batch(worker, "b")
    results["on-policy"] = worker.train(sampled_batch)
    results["reference"] = worker.logprobs(make_batch(1, 2).samples, "reference")
    write.save(folder / "checkpoint", worker.sharded, worker.optimizer)
    results["weights"] = weights(worker)
    worker.export(folder / "model")
    results["next"] = worker.train(make_batch(1, 6, seed=3)), weights(worker)
    load.load(folder / "checkpoint", worker.sharded, worker.optimizer)
    results["next again"] = worker.train(make_batch(1, 6, seed=3)), weights(worker)
    results["captured again"], results["eager runs"] = captured_again(worker), worker.pool.report().eager_runs
    worker.close()
    for count in (1, TINY.layers):
        model = make_model()
        model.checkpoint_layers(count)
        recomputing = make(world, ranks, model)
        recomputing.train(make_batch(1, 6))
        recomputing.train(sampled_batch)
        results[f"recomputing {count}"] = weights(recomputing)
        recomputing.close()
    return results


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "2 x 2 ranks"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    results = run_world(request.param, folder, run_all, 2, folder)
    for result in results:
        assert isinstance(result, dict), result
    return folder, results


def test_generation_scoring_and_training_agree_bit_for_bit(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = ranks
    for result in results:
        tokens, drawn, scored = result["sampled"]
        assert result["exact"]
        assert drawn == scored
        assert (tokens, drawn) == results[0]["sampled"][:2]
        assert result["on-policy"]["policy/token_mult_prob_error_max"] == 1.0
        assert result["on-policy"] == results[0]["on-policy"]
        assert not result["captured again"]
        assert result["eager runs"] == 0


def test_ranks_learn_the_same_as_one_rank(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = ranks
    single = make(ALONE, 1)
    metrics = single.train(make_batch(1, 6))
    gradient = whole_gradient(single)
    for rank, result in enumerate(results):
        pieces = parameter_shards(TINY, rank % 2, 2)
        for name in metrics.keys() - {"tokens/padding"}:
            # Log-probabilities around -5 are rounded to 5e-7; some metrics are exponentials of their differences.
            assert result["metrics"][name] == pytest.approx(metrics[name], rel=4e-6, abs=2e-6), name
        for (name, start), part in result["gradient"].items():
            expected = slice_shard(gradient[name].view(pieces[name].full_shape), pieces[name]).flatten()[
                start : start + len(part)
            ]
            torch.testing.assert_close(part, expected, rtol=0, atol=1e-6)
    head = gradient["lm_head.weight"]
    assert_equal_up_to_rounding(head, head)  # large enough to tell them apart


def test_replicated_weights_stay_equal_on_all_ranks(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = ranks
    for rank, result in enumerate(results):
        pieces = parameter_shards(TINY, rank % 2, 2)
        for name, value in result["next"][1].items():
            if pieces[name].is_full:
                assert torch.equal(value, results[0]["next"][1][name]), name
        shared = [one["next"][1]["layers.0.self_attn.qkv_proj.weight"][8:] for one in (result, results[0])]
        assert torch.equal(*shared)  # one key/value head


def test_recomputed_activations_change_no_bit(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = ranks
    for result in results:
        for count in (1, TINY.layers):
            for name, value in result[f"recomputing {count}"].items():
                assert torch.equal(value, result["weights"][name]), name


def test_a_loaded_checkpoint_continues_with_the_same_bits(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, results = ranks
    for result in results:
        (metrics, after), (metrics_again, after_again) = result["next"], result["next again"]
        assert metrics == metrics_again
        for name, value in after.items():
            assert torch.equal(value, after_again[name]), name


def join_pieces(results: list[dict[str, Any]]) -> Weights:
    """The full weights, joined from those of the first two ranks."""
    full = {name: torch.full(piece.full_shape, torch.nan) for name, piece in parameter_shards(TINY, 0, 2).items()}
    for rank, result in enumerate(results[:2]):
        for name, piece in parameter_shards(TINY, rank, 2).items():
            parts = result["weights"][name].split([stop - start for start, stop in piece.ranges], piece.axis)
            for part, (start, stop) in zip(parts, piece.ranges, strict=True):
                full[name].narrow(piece.axis, start, stop - start).copy_(part)
    return full


def test_the_export_is_an_unsharded_model(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = ranks
    model = load_model(folder / "model")
    assert model.full_architecture == TINY
    for name, value in join_pieces(results).items():
        assert torch.equal(model.get_parameter(name), value), name


def load_and_save(world: World, ranks: int, source: Path, target: Path) -> tuple[Weights, dict[str, float]]:
    """The weights of a checkpoint, and the metrics of a step after it."""
    with connected(world) as connected_world:
        worker = make(connected_world, ranks)
        load.load(source, worker.sharded, worker.optimizer)
        write.save(target, worker.sharded, worker.optimizer)
        loaded = weights(worker)
        return loaded, worker.train(make_batch(1, 6, seed=3))


def saved_state(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Every field of the state of each parameter, from a checkpoint of one rank."""
    from safetensors.torch import load_file

    state = {}
    for name, tensor in load_file(folder / "rank0.safetensors").items():
        field, _, parameter = name.partition("/")
        state[field, parameter] = tensor
    return state


def test_a_checkpoint_passes_from_tensor_parallel_ranks_to_one_and_back(
    ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, results = ranks
    loaded, metrics = load_and_save(ALONE, 1, folder / "checkpoint", tmp_path / "whole")
    for name, value in join_pieces(results).items():
        assert torch.equal(loaded[name], value), name
    for name in ("loss", "optimizer/grad_norm"):
        assert metrics[name] == pytest.approx(results[0]["next"][0][name], rel=4e-6, abs=2e-6)
    model = make_model()
    load.load_parameters(folder / "checkpoint", model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded[name]), name

    back = run_world(2, tmp_path, load_and_save, 2, tmp_path / "whole", tmp_path / "divided")
    for result, before in zip(back, results, strict=False):
        assert isinstance(result, tuple), result
        for name, value in result[0].items():
            assert torch.equal(value, before["weights"][name]), name
    load_and_save(ALONE, 1, tmp_path / "divided", tmp_path / "whole again")
    first, second = saved_state(tmp_path / "whole"), saved_state(tmp_path / "whole again")
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


def save_int8_moments(unconnected: World, folder: Path) -> None:
    with connected(unconnected) as world:
        worker = make(world, 2, optimizer={"lr": RATE, "state": "int8"})
        worker.train(make_batch(1, 6))
        worker.train(make_batch(1, 6, seed=1))
        write.save(folder / "int8", worker.sharded, worker.optimizer)
        worker.close()
        fp32_worker = make(world, 2)  # with moments in fp32
        load.load(folder / "int8", fp32_worker.sharded, fp32_worker.optimizer)
        write.save(folder / "fp32", fp32_worker.sharded, fp32_worker.optimizer)


def test_int8_moments_pass_to_another_tensor_parallel_size(tmp_path: Path) -> None:
    """At the same size they are converted piece by piece, at another size element by element."""
    results = run_world(2, tmp_path, save_int8_moments, tmp_path)
    assert results == [None, None], results
    load_and_save(ALONE, 1, tmp_path / "int8", tmp_path / "from int8")
    load_and_save(ALONE, 1, tmp_path / "fp32", tmp_path / "from fp32")
    first, second = saved_state(tmp_path / "from int8"), saved_state(tmp_path / "from fp32")
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key
    assert any(tensor.abs().max() > 0 for (field, _), tensor in first.items() if field == "exp_avg")
