"""A worker whose cache lies over its gradients does what one with a cache of its own does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.graph import GraphError
from rollgraph.inference import SamplingParams
from rollgraph.policy import GradientsInUse, PolicyWorker
from rollgraph.types import Batch
from tests.policy.small_worker import (
    ALGORITHM,
    ALONE,
    LIMITS,
    captured_again,
    make_batch,
    make_model,
    make_samples,
    make_worker,
    parameters,
    share_nothing,
)
from tests.policy.small_worker import sample_rollouts as roll_out

ROOMY = replace(LIMITS, token_buckets=(96,))


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[PolicyWorker, PolicyWorker]]:
    """A worker that shares memory, and one that does not."""
    workers = (make_worker(limits=ROOMY), make_apart(limits=ROOMY))
    yield workers
    for worker in workers:
        worker.close()


def make_apart(**options: Any) -> PolicyWorker:
    """A worker whose cache has memory of its own."""
    with pytest.MonkeyPatch.context() as patch:
        share_nothing(patch)
        return make_worker(**options)


def pages(worker: PolicyWorker) -> list[Tensor]:
    assert worker.engine is not None
    return worker.engine._graphs.pages


def shared(worker: PolicyWorker) -> int:
    """How many layers have their pages in the memory of the gradients."""
    storage = worker.sharded.flat.gradient_memory.untyped_storage().data_ptr()
    return sum(layer.untyped_storage().data_ptr() == storage for layer in pages(worker))


def addresses(worker: PolicyWorker) -> list[int]:
    tensors = [*pages(worker), *worker.sharded.flat.grad_buffers.values()]
    return [tensor.data_ptr() for tensor in tensors]


def round_of(worker: PolicyWorker, number: int) -> list[Any]:
    """A step with a validation before and after it; everything that it computes."""
    found: list[Any] = []
    found.append(worker.generate([([3, 4], 0), ([5], 1)], seed="validate", params=SamplingParams(max_tokens=8)))
    rollouts = roll_out(worker, 8, str(number))
    worker.score(rollouts)
    batch = ALGORITHM.make_batch(rollouts, minibatches=2) if number % 2 else ALGORITHM.make_batch(rollouts)
    found.append(worker.train(batch, score_old=number == 2))
    found.append(worker.train(make_batch(1, 6, number)))  # twice, with no generation between
    found.append(worker.generate([([3, 4], 0), ([5], 1)], seed="validate"))
    found.append(worker.logprobs(make_samples(3, number)))
    found += [[rollout.to_dict() for rollout in rollouts], parameters(worker).tolist()]
    return found


def test_rounds_of_all_phases_have_the_same_bits_with_and_without_sharing(
    pair: tuple[PolicyWorker, PolicyWorker],
) -> None:
    ours, apart = pair
    assert (shared(ours), shared(apart)) == (1, 0)  # the second layer does not fit
    places = addresses(ours)
    for number in range(4):
        assert round_of(ours, number) == round_of(apart, number)
    assert not captured_again(ours)
    assert ours.pool.report().eager_runs == 0
    assert addresses(ours) == places


def test_generation_is_refused_while_gradients_wait_and_they_are_kept(pair: tuple[PolicyWorker, PolicyWorker]) -> None:
    ours = pair[0]
    found = []
    for worker in pair:
        steps = worker._train_graphs
        ((_, bucket),) = worker.limits.plan(make_samples(4), steps.buckets)
        arrays = worker.limits.collate(make_samples(4), bucket)
        with worker.phases.enter("train"):  # a loop of one's own, which accumulates over several phases
            steps.train("policy", arrays, last=False)
        if worker is ours:
            with pytest.raises(GradientsInUse, match=r"gradients.drop\(\) first"):
                worker.generate([([1, 2], 0)], seed="s")
        else:
            worker.generate([([1, 2], 0)], seed="s")
        worker.logprobs(make_samples(2))  # scoring does not touch them
        with worker.phases.enter("train"):
            steps.train("policy", arrays, last=True)
            worker.sharded.gradients.finish(average=False)
            if worker is ours:  # reduced, but not used yet
                with pytest.raises(RuntimeError, match="optimizer has not used"):
                    worker.sharded.gradients.lend()
            worker.optimizer.step()
        found.append((parameters(worker), worker.generate([([1, 2], 0)], seed="s")))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def interrupt(*progress: int) -> None:
    raise KeyboardInterrupt


def test_a_training_that_fails_leaves_the_memory_to_generation(pair: tuple[PolicyWorker, PolicyWorker]) -> None:
    ours, apart = pair
    for worker in pair:
        with pytest.raises(KeyboardInterrupt):
            worker.train(make_batch(1, 4), on_progress=interrupt)  # after the first microbatch
    assert round_of(ours, 9) == round_of(apart, 9)


def test_outside_of_its_phase_nobody_uses_the_memory(pair: tuple[PolicyWorker, PolicyWorker]) -> None:
    ours, _ = pair
    assert ours.engine is not None
    steps = ours._train_graphs
    ((_, bucket),) = ours.limits.plan(make_samples(4), steps.buckets)
    arrays = ours.limits.collate(make_samples(4), bucket)
    ours.generate([([1, 2], 0)], seed="s")
    refused = pytest.raises(RuntimeError, match=r'with policy.phases.enter\("train"\)')
    with refused:
        steps.train("policy", arrays, last=True)
    uses: list[Callable[[], Any]] = [
        ours.optimizer.step, ours.sharded.gradients.shards, ours.sharded.gradients.finish, ours.sharded.gradients.norm,
        lambda: ours.model.embed_tokens.weight.sum().backward(),
    ]  # fmt: skip
    before = parameters(ours)
    for use in uses:
        with refused:
            use()
    assert torch.equal(parameters(ours), before)
    ours.model.embed_tokens.weight.grad = None
    ours.sharded.gradients.drop()  # of no step: the cache stays as it is
    assert ours.memory.gradients_are_lent()
    ours.train(make_batch(1, 4))
    with pytest.raises(GraphError, match="enter the phase generate first"):
        ours.engine.generate([[1, 2]], SamplingParams(max_tokens=3))
    assert ours.generate([([1, 2], 0)], seed="s")[0].tokens


def test_requests_that_another_phase_interrupts_go_on_as_if_it_had_not(pair: tuple[PolicyWorker, PolicyWorker]) -> None:
    ours = pair[0]
    for worker in pair:
        worker.sharded.flat.load(dict(pair[0].model.state_dict()))
    found = []
    for worker in pair:
        engine = worker.engine
        assert engine is not None
        params = SamplingParams(max_tokens=10, temperature=1.0, seed=3, n=2)
        with worker.phases.enter("generate"):
            outputs = [engine.submit([first, 2, 3], params) for first in range(4)]  # more than there are rows
            for _ in range(4):
                engine.step()
        if worker is ours:
            worker.logprobs(make_samples(3))
            with worker.phases.enter("train"):
                worker.sharded.flat.gradient_memory.fill_(torch.nan)
                worker.sharded.gradients.drop()
        with worker.phases.enter("generate"):
            while engine.step():
                pass
        assert engine.progress().running == engine.progress().waiting == 0
        found.append([[completion.tokens for completion in output.completions] for output in outputs])
    assert found[0] == found[1]
    assert all(len(tokens) == 10 for output in found[0] for tokens in output)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"backend": "eager"}, {"scopes": ("layer",)}, {"scopes": ("attn", "mlp")}])
def test_other_backends_and_scopes_share_memory_too(options: dict[str, Any]) -> None:
    ours, apart = make_worker(limits=ROOMY, **options), make_apart(limits=ROOMY, **options)
    assert shared(ours) == 1
    for number in range(3):
        assert round_of(ours, number) == round_of(apart, number)
    ours.close()
    apart.close()


def test_a_loss_that_fails_leaves_gradients_of_zero() -> None:
    def broken(streams: Any) -> Any:
        raise ArithmeticError("the loss is broken")

    sampling = SamplingParams(max_tokens=4)
    worker = PolicyWorker(make_model(), None, ALONE, ROOMY, sampling=sampling, optimizer={"lr": 0.1})
    worker.capture_all({"policy": (ALGORITHM.loss, False), "broken": (broken, False)})
    batch = Batch([[replace(sample, reference_logprobs=None) for sample in make_samples(2)]])
    with pytest.raises(GraphError, match="the loss is broken"):
        worker.train(batch, "broken")
    assert not worker.sharded.flat.gradient_memory.any()
    worker.train(batch)
    worker.close()
