"""Workers that divide layers among themselves, on gloo, learn what one worker does, and their phases agree exactly."""

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
Whole = dict[str, Tensor]


def make(
    world: World, ranks: int, model: Decoder | None = None, limits: Limits = ONE_SIZE, **options: Any
) -> PolicyWorker:
    """A worker with layers divided among so many ranks."""
    division = ParallelGroups(world, ranks)
    model = model or make_model()
    if division.group is not None:
        model = shard_model(model, division.group)
    settings = {
        "optimizer": {"lr": RATE, "weight_decay": DECAY},
        "warmup": 1,
        "verify_weights": True,
        "reduction": "ordered",
        "scopes": ("step",) if division.data.size == 1 else ("layer",),
        "sampling": SamplingParams(max_tokens=12),
    } | options
    worker = PolicyWorker(
        model,
        None,
        division.data,
        limits,
        tensor=division.peers(model),
        **settings,  # type: ignore[arg-type]
    )
    worker.weights.save("reference")
    worker.capture_all({"policy": (ALGORITHM.loss, False)})
    return worker


def moments(worker: PolicyWorker) -> dict[tuple[str, int], Tensor]:
    """This rank's pieces of the gradient that the first step saw, by name and start."""
    pieces = worker.optimizer.parameter_states
    return {(piece.parameter.name, piece.start): piece.state["exp_avg"].clone() / 0.1 for piece in pieces}


def whole_gradient(worker: PolicyWorker) -> dict[str, Tensor]:
    """Of a worker that is alone: each parameter's gradient, flat."""
    return {name: gradient for (name, _), gradient in moments(worker).items()}


def weights(worker: PolicyWorker) -> Whole:
    worker.sharded.require_full_parameters("gather")
    return {name: parameter.detach().clone() for name, parameter in worker.model.named_parameters()}


def rescored(worker: PolicyWorker, seed: str) -> tuple[Any, Any, Any]:
    """Tokens, the log-probabilities they were drawn with, and those that scoring gives them."""
    rollouts = sample_rollouts(worker, 4, seed)
    zeros = [[0.0] * len(rollout.tokens) for rollout in rollouts]
    samples = [Sample(r.prompt.tokens, r.tokens, z, z, z) for r, z in zip(rollouts, zeros, strict=True)]
    return [r.tokens for r in rollouts], [r.logprobs for r in rollouts], worker.logprobs(samples)


def own_batch(worker: PolicyWorker, seed: str) -> Batch:
    """What the policy has sampled, to be trained on."""
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


def everything(alone: World, ranks: int, folder: Path) -> dict[str, Any]:
    with watching(alone) as world:
        return run_everything(world, ranks, folder)


@contextmanager
def watching(world: World) -> Iterator[World]:
    """The ranks know of each other, as those of a run do."""
    together = Collectives(world)
    yield replace(world, liveness=together.liveness)


def run_everything(world: World, ranks: int, folder: Path) -> dict[str, Any]:
    worker = make(world, ranks)
    found: dict[str, Any] = {"exact": worker.is_exact}
    found["sampled"] = rescored(worker, "a")
    found["metrics"] = worker.train(make_batch(1, 6))
    found["gradient"] = moments(worker)
    batch = own_batch(worker, "b")
    found["own"] = worker.train(batch)
    found["reference"] = worker.logprobs(make_batch(1, 2).samples, "reference")
    write.save(folder / "checkpoint", worker.sharded, worker.optimizer)
    found["weights"] = weights(worker)
    worker.export(folder / "model")
    found["next"] = worker.train(make_batch(1, 6, seed=3)), weights(worker)
    load.load(folder / "checkpoint", worker.sharded, worker.optimizer)
    found["next again"] = worker.train(make_batch(1, 6, seed=3)), weights(worker)
    found["captured again"], found["eager runs"] = captured_again(worker), worker.pool.report().eager_runs
    worker.close()
    for count in (1, TINY.layers):
        model = make_model()
        model.checkpoint_layers(count)
        again = make(world, ranks, model)
        again.train(make_batch(1, 6))
        again.train(batch)
        found[f"recomputing {count}"] = weights(again)
        again.close()
    return found


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "2 x 2 ranks"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    found = run_world(request.param, folder, everything, 2, folder)
    for result in found:
        assert isinstance(result, dict), result
    return folder, found


def test_generation_scoring_and_training_agree_bit_for_bit(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, found = ranks
    for result in found:
        tokens, drawn, scored = result["sampled"]
        assert result["exact"]
        assert drawn == scored
        assert (tokens, drawn) == found[0]["sampled"][:2]
        assert result["own"]["policy/token_mult_prob_error_max"] == 1.0
        assert result["own"] == found[0]["own"]
        assert not result["captured again"]
        assert result["eager runs"] == 0


def test_ranks_learn_what_one_rank_learns(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, found = ranks
    alone = make(ALONE, 1)
    metrics = alone.train(make_batch(1, 6))
    gradient = whole_gradient(alone)
    for rank, result in enumerate(found):
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


def test_what_all_ranks_have_stays_the_same(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, found = ranks
    for rank, result in enumerate(found):
        pieces = parameter_shards(TINY, rank % 2, 2)
        for name, value in result["next"][1].items():
            if pieces[name].is_full:
                assert torch.equal(value, found[0]["next"][1][name]), name
        shared = [other["next"][1]["layers.0.self_attn.qkv_proj.weight"][8:] for other in (result, found[0])]
        assert torch.equal(*shared)  # one key/value head


def test_recomputed_activations_change_no_bit(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, found = ranks
    for result in found:
        for count in (1, TINY.layers):
            for name, value in result[f"recomputing {count}"].items():
                assert torch.equal(value, result["weights"][name]), name


def test_a_loaded_checkpoint_goes_on_with_the_same_bits(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, found = ranks
    for result in found:
        (metrics, after), (metrics_again, after_again) = result["next"], result["next again"]
        assert metrics == metrics_again
        for name, value in after.items():
            assert torch.equal(value, after_again[name]), name


def join_pieces(found: list[dict[str, Any]]) -> Whole:
    """The whole weights, from those of the first two ranks."""
    whole = {name: torch.full(piece.full_shape, torch.nan) for name, piece in parameter_shards(TINY, 0, 2).items()}
    for rank, result in enumerate(found[:2]):
        for name, piece in parameter_shards(TINY, rank, 2).items():
            parts = result["weights"][name].split([stop - start for start, stop in piece.ranges], piece.axis)
            for part, (start, stop) in zip(parts, piece.ranges, strict=True):
                whole[name].narrow(piece.axis, start, stop - start).copy_(part)
    return whole


def test_the_export_is_an_ordinary_model(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = ranks
    model = load_model(folder / "model")
    assert model.full_architecture == TINY
    for name, value in join_pieces(found).items():
        assert torch.equal(model.get_parameter(name), value), name


def load_and_save(world: World, ranks: int, source: Path, target: Path) -> tuple[Whole, dict[str, float]]:
    """The weights of a checkpoint, and the metrics of a step after it."""
    with watching(world) as watched:
        worker = make(watched, ranks)
        load.load(source, worker.sharded, worker.optimizer)
        write.save(target, worker.sharded, worker.optimizer)
        loaded = weights(worker)
        return loaded, worker.train(make_batch(1, 6, seed=3))


def saved_state(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Every field of the state of each parameter, whole, in a checkpoint of one rank."""
    from safetensors.torch import load_file

    found = {}
    for name, tensor in load_file(folder / "rank0.safetensors").items():
        field, _, parameter = name.partition("/")
        found[field, parameter] = tensor
    return found


def test_a_checkpoint_passes_from_divided_layers_to_whole_ones_and_back(
    ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, found = ranks
    loaded, metrics = load_and_save(ALONE, 1, folder / "checkpoint", tmp_path / "whole")
    for name, value in join_pieces(found).items():
        assert torch.equal(loaded[name], value), name
    for name in ("loss", "optimizer/grad_norm"):
        assert metrics[name] == pytest.approx(found[0]["next"][0][name], rel=4e-6, abs=2e-6)
    model = make_model()
    load.load_parameters(folder / "checkpoint", model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded[name]), name

    back = run_world(2, tmp_path, load_and_save, 2, tmp_path / "whole", tmp_path / "divided")
    for result, before in zip(back, found, strict=False):
        assert isinstance(result, tuple), result
        for name, value in result[0].items():
            assert torch.equal(value, before["weights"][name]), name
    load_and_save(ALONE, 1, tmp_path / "divided", tmp_path / "whole again")
    first, second = saved_state(tmp_path / "whole"), saved_state(tmp_path / "whole again")
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


def save_in_fewer_bits(alone: World, folder: Path) -> None:
    with watching(alone) as world:
        worker = make(world, 2, optimizer={"lr": RATE, "state": "int8"})
        worker.train(make_batch(1, 6))
        worker.train(make_batch(1, 6, seed=1))
        write.save(folder / "int8", worker.sharded, worker.optimizer)
        worker.close()
        same = make(world, 2)  # with moments in fp32
        load.load(folder / "int8", same.sharded, same.optimizer)
        write.save(folder / "fp32", same.sharded, same.optimizer)


def test_moments_in_fewer_bits_pass_to_another_division(tmp_path: Path) -> None:
    """Those of the same division are converted piece by piece, those of another one element by element."""
    found = run_world(2, tmp_path, save_in_fewer_bits, tmp_path)
    assert found == [None, None], found
    load_and_save(ALONE, 1, tmp_path / "int8", tmp_path / "from int8")
    load_and_save(ALONE, 1, tmp_path / "fp32", tmp_path / "from fp32")
    first, second = saved_state(tmp_path / "from int8"), saved_state(tmp_path / "from fp32")
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key
    assert any(tensor.abs().max() > 0 for (field, _), tensor in first.items() if field == "exp_avg")
