"""A worker whose KV cache lies over its gradients equals one with a separate cache, bit for bit."""

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
    workers = (make_worker(limits=ROOMY), make_separate(limits=ROOMY))
    yield workers
    for worker in workers:
        worker.close()


def make_separate(**options: Any) -> PolicyWorker:
    """A worker whose cache has separate memory."""
    with pytest.MonkeyPatch.context() as patch:
        share_nothing(patch)
        return make_worker(**options)


def pages(worker: PolicyWorker) -> list[Tensor]:
    assert worker.engine is not None
    return worker.engine._graphs.pages


def shared_layers(worker: PolicyWorker) -> int:
    """How many layers have their pages in the memory of the gradients."""
    storage = worker.sharded.flat.gradient_memory.untyped_storage().data_ptr()
    return sum(layer.untyped_storage().data_ptr() == storage for layer in pages(worker))


def addresses(worker: PolicyWorker) -> list[int]:
    tensors = [*pages(worker), *worker.sharded.flat.grad_buffers.values()]
    return [tensor.data_ptr() for tensor in tensors]


def run_round(worker: PolicyWorker, number: int) -> list[Any]:
    """Run a step with a validation before and after it, and return all results."""
    results: list[Any] = []
    results.append(worker.generate([([3, 4], 0), ([5], 1)], seed="validate", params=SamplingParams(max_tokens=8)))
    rollouts = roll_out(worker, 8, str(number))
    worker.score(rollouts)
    batch = ALGORITHM.make_batch(rollouts, minibatches=2) if number % 2 else ALGORITHM.make_batch(rollouts)
    results.append(worker.train(batch, score_old=number == 2))
    results.append(worker.train(make_batch(1, 6, number)))  # twice, with no generation between
    results.append(worker.generate([([3, 4], 0), ([5], 1)], seed="validate"))
    results.append(worker.logprobs(make_samples(3, number)))
    results += [[rollout.to_dict() for rollout in rollouts], parameters(worker).tolist()]
    return results


def test_rounds_of_all_phases_have_the_same_bits_with_and_without_sharing(
    pair: tuple[PolicyWorker, PolicyWorker],
) -> None:
    sharing, separate = pair
    assert (shared_layers(sharing), shared_layers(separate)) == (1, 0)  # the second layer does not fit
    addresses_before = addresses(sharing)
    for number in range(4):
        assert run_round(sharing, number) == run_round(separate, number)
    assert not captured_again(sharing)
    assert sharing.pool.report().eager_runs == 0
    assert addresses(sharing) == addresses_before


def test_generation_is_refused_while_gradients_wait_for_the_optimizer(pair: tuple[PolicyWorker, PolicyWorker]) -> None:
    sharing = pair[0]
    results = []
    for worker in pair:
        steps = worker.train_graphs
        ((_, bucket),) = worker.limits.plan(make_samples(4), steps.buckets)
        arrays = worker.limits.collate(make_samples(4), bucket)
        with worker.phases.enter("train"):  # as in a custom loop, which accumulates over several phases
            steps.train("policy", arrays, last=False)
        if worker is sharing:
            with pytest.raises(GradientsInUse, match=r"gradients.drop\(\) first"):
                worker.generate([([1, 2], 0)], seed="s")
        else:
            worker.generate([([1, 2], 0)], seed="s")
        worker.logprobs(make_samples(2))  # scoring does not touch them
        with worker.phases.enter("train"):
            steps.train("policy", arrays, last=True)
            worker.sharded.gradients.finish(average=False)
            if worker is sharing:  # reduced, but not used yet
                with pytest.raises(RuntimeError, match="optimizer has not used"):
                    worker.sharded.gradients.lend()
            worker.optimizer.step()
        results.append((parameters(worker), worker.generate([([1, 2], 0)], seed="s")))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def interrupt(*progress: int) -> None:
    raise KeyboardInterrupt


def test_a_failed_training_leaves_the_memory_to_generation(pair: tuple[PolicyWorker, PolicyWorker]) -> None:
    sharing, separate = pair
    for worker in pair:
        with pytest.raises(KeyboardInterrupt):
            worker.train(make_batch(1, 4), on_progress=interrupt)  # after the first microbatch
    assert run_round(sharing, 9) == run_round(separate, 9)


def test_uses_of_the_memory_outside_of_their_phase_are_refused(pair: tuple[PolicyWorker, PolicyWorker]) -> None:
    sharing, _ = pair
    assert sharing.engine is not None
    steps = sharing.train_graphs
    ((_, bucket),) = sharing.limits.plan(make_samples(4), steps.buckets)
    arrays = sharing.limits.collate(make_samples(4), bucket)
    sharing.generate([([1, 2], 0)], seed="s")
    refused = pytest.raises(RuntimeError, match=r'with policy.phases.enter\("train"\)')
    with refused:
        steps.train("policy", arrays, last=True)
    uses: list[Callable[[], Any]] = [
        sharing.optimizer.step, sharing.sharded.gradients.shards, sharing.sharded.gradients.finish,
        sharing.sharded.gradients.norm,
        lambda: sharing.model.embed_tokens.weight.sum().backward(),
    ]  # fmt: skip
    before = parameters(sharing)
    for use in uses:
        with refused:
            use()
    assert torch.equal(parameters(sharing), before)
    sharing.model.embed_tokens.weight.grad = None
    sharing.sharded.gradients.drop()  # there are none: the cache stays as it is
    assert sharing.memory.gradients_are_lent()
    sharing.train(make_batch(1, 4))
    with pytest.raises(GraphError, match="enter the phase generate first"):
        sharing.engine.generate([[1, 2]], SamplingParams(max_tokens=3))
    assert sharing.generate([([1, 2], 0)], seed="s")[0].tokens


def test_requests_continue_unchanged_after_another_phase(pair: tuple[PolicyWorker, PolicyWorker]) -> None:
    sharing = pair[0]
    for worker in pair:
        worker.sharded.flat.load(dict(pair[0].model.state_dict()))
    results = []
    for worker in pair:
        engine = worker.engine
        assert engine is not None
        params = SamplingParams(max_tokens=10, temperature=1.0, seed=3, n=2)
        with worker.phases.enter("generate"):
            outputs = [engine.submit([first, 2, 3], params) for first in range(4)]  # more than there are rows
            for _ in range(4):
                engine.step()
        if worker is sharing:
            worker.logprobs(make_samples(3))
            with worker.phases.enter("train"):
                worker.sharded.flat.gradient_memory.fill_(torch.nan)
                worker.sharded.gradients.drop()
        with worker.phases.enter("generate"):
            while engine.step():
                pass
        assert engine.progress().running == engine.progress().waiting == 0
        results.append([[completion.tokens for completion in output.completions] for output in outputs])
    assert results[0] == results[1]
    assert all(len(tokens) == 10 for output in results[0] for tokens in output)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"backend": "eager"}, {"scopes": ("layer",)}, {"scopes": ("attn", "mlp")}])
def test_other_backends_and_scopes_share_memory(options: dict[str, Any]) -> None:
    sharing, separate = make_worker(limits=ROOMY, **options), make_separate(limits=ROOMY, **options)
    assert shared_layers(sharing) == 1
    for number in range(3):
        assert run_round(sharing, number) == run_round(separate, number)
    sharing.close()
    separate.close()


def test_a_failing_loss_leaves_gradients_of_zero() -> None:
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
