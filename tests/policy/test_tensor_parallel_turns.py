"""Environments on tensor parallel ranks: every engine gets the requests and steps of the first rank's."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from rollgraph.inference import SamplingParams
from rollgraph.parallel.tensor.peers import TensorPeers
from rollgraph.policy import PolicyWorker
from rollgraph.policy.generate import TurnGenerator, run_on_tensor_group
from rollgraph.rl.environment import MultiTurn, SingleTurn
from rollgraph.rl.turns import Generate, open_session
from rollgraph.tokenizer import ByteTokenizer
from rollgraph.types import Prompt, Rollout
from tests.policy.small_worker import make_worker

PROMPTS = [Prompt(id, tokens, "") for id, tokens in enumerate([(1, 2), (3,), (4, 5, 6)])]
PATIENCE = 120  # seconds


class Peers:
    """Connects two ranks that are threads. The engine of each has a full model, so that it can run on its own."""

    def __init__(self, rank: int, texts: queue.SimpleQueue[str]) -> None:
        self.rank = rank
        self._texts = texts

    def broadcast_text(self, text: str) -> None:
        self._texts.put(text)

    def receive_text(self) -> str:
        return self._texts.get(timeout=PATIENCE)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[PolicyWorker]]:
    pair = [make_worker(backend="eager", reference=False) for _ in range(2)]
    yield pair
    for worker in pair:
        worker.close()


def generator(worker: PolicyWorker) -> TurnGenerator:
    return worker.generator(seed="s", params=SamplingParams(max_tokens=9, stop_ids=tuple(range(13))))


def record_calls(worker: PolicyWorker, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the requests and steps of an engine, in order."""
    assert worker.engine is not None
    calls: list[Any] = []
    submit, step = worker.engine.submit, worker.engine.step

    def submitted(prompt: Any, params: SamplingParams, **options: Any) -> Any:
        output = submit(prompt, params, **options)
        calls.append((list(prompt), params))
        return output

    def stepped() -> bool:
        calls.append("step")
        return step()

    monkeypatch.setattr(worker.engine, "submit", submitted)
    monkeypatch.setattr(worker.engine, "step", stepped)
    return calls


def run_both(
    workers: list[PolicyWorker], environment: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Rollout], list[list[Any]]]:
    """The rollouts of the first rank, and the calls of each engine."""
    texts: queue.SimpleQueue[str] = queue.SimpleQueue()
    peers = [cast(TensorPeers, Peers(rank, texts)) for rank in range(2)]
    calls = [record_calls(worker, monkeypatch) for worker in workers]
    second_rollouts: list[Any] = []
    thread = threading.Thread(
        target=lambda: second_rollouts.append(
            run_on_tensor_group(environment, generator(workers[1]), PROMPTS, peers[1])
        ),
        daemon=True,
    )
    thread.start()
    rollouts = run_on_tensor_group(environment, generator(workers[0]), PROMPTS, peers[0])
    thread.join(PATIENCE)
    assert second_rollouts == [[]]
    return rollouts, calls


class Mixed:
    """Requests turns in every way, including some that are refused."""

    stop: tuple[str, ...] = ()

    def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
        generate([([1, 2], 1)])
        with pytest.raises(ValueError, match="cannot be continued"):
            generate([([1, 2], 1), ([99999], 2)])
        with open_session(generate) as session:
            session.submit([1, 2, 3], 3)
            with pytest.raises(ValueError, match="cannot be continued"):
                session.submit([99999], 4)
            session.step()
            session.submit([4], 5)
            generate([([1], 6)])
            session.step()
        turns = generate([([7], 7)])
        return [Rollout(prompts[0], list(turns[0].tokens), [True] * len(turns[0].tokens), list(turns[0].logprobs))]


def roll(text: str, prompt: Prompt) -> str | None:
    return random.choice(["\x01\x02", "\x03", None])


@pytest.mark.parametrize("kind", ["single", "multi", "mixed"])
def test_both_engines_get_the_same_calls(
    workers: list[PolicyWorker], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = {
        "single": SingleTurn(2),
        "multi": MultiTurn(ByteTokenizer(), roll, samples_per_prompt=3, max_turns=4, max_tokens=24),
        "mixed": Mixed(),
    }
    rollouts, (first, second) = run_both(workers, environments[kind], monkeypatch)
    assert rollouts
    assert all(rollout.tokens for rollout in rollouts)
    assert first == second
    assert "step" in first


def test_after_an_exception_in_a_session_no_turn_can_be_requested(workers: list[PolicyWorker]) -> None:
    class Failing(Mixed):
        def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
            with pytest.raises(KeyError), open_session(generate):
                raise KeyError
            generate([([1], 1)])
            return []

    peers = cast(TensorPeers, Peers(0, queue.SimpleQueue()))
    with pytest.raises(RuntimeError, match="other ranks of the group are still in it"):
        run_on_tensor_group(Failing(), generator(workers[0]), PROMPTS, peers)


def test_without_tensor_parallelism_a_rank_runs_the_environment_itself(workers: list[PolicyWorker]) -> None:
    environment = SingleTurn(2)
    expected = environment.run(generator(workers[0]), PROMPTS)
    assert run_on_tensor_group(environment, generator(workers[0]), PROMPTS, None) == expected
