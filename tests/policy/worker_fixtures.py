"""Workers that several tests share: one with a graph of the whole step, one eager, one with graphs of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rollgraph.model import Decoder
from rollgraph.policy import PolicyWorker
from rollgraph.rl.losses import TokenStreams
from rollgraph.types import Batch, Rollout, Sample
from tests.policy.small_worker import (
    ALGORITHM,
    captured_again,
    make_worker,
    parameters,
    reset,
)


class Breakable:
    """GRPO's loss until it is told to fail. It runs in Python only if it is not part of a graph."""

    def __init__(self) -> None:
        self.calls_left: float = math.inf

    def __call__(self, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ArithmeticError("the loss failed")
        return ALGORITHM.loss(streams)


BREAKABLE = {"eager": Breakable(), "layer": Breakable()}


MAKERS: dict[str, Callable[[], PolicyWorker]] = {
    "graph": lambda: make_worker(),
    "eager": lambda: make_worker(backend="eager", loss=BREAKABLE["eager"]),
    "layer": lambda: make_worker(scopes=("layer",), loss=BREAKABLE["layer"]),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, PolicyWorker]]:
    by_name: dict[str, PolicyWorker] = {}
    yield by_name
    for worker in by_name.values():
        worker.close()


@pytest.fixture
def get(workers: dict[str, PolicyWorker]) -> Iterator[Callable[[str], PolicyWorker]]:
    """Get a worker by name, in its initial state; after the test, check that it is idle and captured nothing twice."""
    used: dict[str, PolicyWorker] = {}

    def get(name: str) -> PolicyWorker:
        worker = workers[name] = workers.get(name) or MAKERS[name]()
        reset(worker)
        used[name] = worker
        return worker

    yield get
    for name, worker in used.items():
        assert not captured_again(worker)
        assert worker.pool.report().eager_runs == 0 or name == "eager"
        assert worker.phases.current == "idle"
        assert worker.weights.current == "policy"
        with worker.phases.enter("train"):
            assert all(not shard.any() for shard in worker.sharded.gradients.shards())
        assert all(parameter.grad is None for parameter in worker.model.parameters())


@pytest.fixture
def worker(get: Callable[[str], PolicyWorker]) -> PolicyWorker:
    return get("graph")


def bare(rollout: Rollout) -> Sample:
    zeros = [0.0] * len(rollout.tokens)
    return Sample(rollout.prompt.tokens, rollout.tokens, zeros, zeros, zeros)


def flat(values: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in values for value in row])


def rollout_logprobs(rollouts: list[Rollout]) -> Tensor:
    return flat([rollout.logprobs for rollout in rollouts])


def plain_loss(model: Decoder, sample: Sample) -> Tensor:
    """The GRPO loss of one sample, written out, in the precision of the model."""
    whole = torch.tensor([*sample.prompt, *sample.tokens])
    length = len(whole)
    hidden = model(whole, torch.arange(length), torch.tensor([0, length], dtype=torch.int32), length)
    all_logprobs = (hidden[:-1] @ model.head_weight.t()).log_softmax(-1)
    logprobs = all_logprobs[torch.arange(length - 1), whole[1:]][len(sample.prompt) - 1 :]
    advantages, weights = torch.tensor(sample.advantages), torch.tensor(sample.weights)
    ratio = (logprobs - torch.tensor(sample.logprobs)).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    r = torch.tensor(sample.reference_logprobs) - logprobs
    return (weights * (-gain + 0.04 * (r.exp() - r - 1))).sum()


def train_once(worker: PolicyWorker, batch: Batch) -> Tensor:
    reset(worker)
    worker.train(batch)
    return parameters(worker)
