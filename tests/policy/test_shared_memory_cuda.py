"""Memory that phases share on a GPU: the bits are those without sharing, and the cache needs no extra memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rollgraph.graph.pool import pool_segments
from rollgraph.inference import SamplingParams
from rollgraph.model import Architecture, Decoder
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.types import Batch
from tests.policy.small_worker import ALGORITHM, make_samples, parameters, share_nothing
from tests.policy.small_worker import sample_rollouts as roll_out

pytestmark = pytest.mark.gpu

WIDE = Architecture("qwen2", vocabulary=16000, hidden=512, mlp=2048, layers=6, heads=8, kv_heads=4, head_dim=64)
LIMITS = Limits(
    max_length=1024, rows=256, token_buckets=(2048, 8192), cache_bytes=768 << 20, prefill_tokens=512, whole_logits=True
)


@pytest.fixture
def open_workers() -> Iterator[list[PolicyWorker]]:
    workers: list[PolicyWorker] = []
    yield workers
    for worker in workers:
        worker.close()
    workers.clear()
    torch.cuda.empty_cache()


def make(open_workers: list[PolicyWorker], *, shares: bool, limits: Limits = LIMITS, **options: object) -> PolicyWorker:
    torch.manual_seed(0)
    model = Decoder(WIDE)
    model.reset_parameters(std=0.05)
    sampling = SamplingParams(max_tokens=24)
    worker = PolicyWorker(
        model.to("cuda:0", torch.bfloat16), None, World(0, 1, "cuda:0"), limits, sampling=sampling,
        optimizer={"lr": 1e-3}, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    open_workers.append(worker)
    worker.weights.save("reference")
    with pytest.MonkeyPatch.context() as patch:
        if not shares:
            share_nothing(patch)
        worker.capture_all({"policy": (ALGORITHM.loss, False)})
    return worker


def step(worker: PolicyWorker, seed: str) -> tuple[object, ...]:
    """A step, and a validation after it."""
    rollouts = roll_out(worker, 32, seed, 24)
    worker.score(rollouts)
    metrics = worker.train(ALGORITHM.make_batch(rollouts))
    turns = worker.generate([([3, 4], 0), ([5], 1)], seed="validate")
    return [(r.tokens, r.logprobs, r.reference_logprobs) for r in rollouts], metrics, turns


@pytest.mark.parametrize("scopes", [("step",), ("layer",)])
def test_steps_have_the_same_bits_with_and_without_sharing(
    open_workers: list[PolicyWorker], scopes: tuple[str, ...]
) -> None:
    results, trained = [], []
    for shares in (True, False):
        worker = make(open_workers, shares=shares, scopes=scopes)
        captures = worker.pool.report().captures
        assert worker.engine is not None
        addresses = [layer.data_ptr() for layer in worker.engine._graphs.pages]
        results.append([step(worker, str(number)) for number in range(4)])
        trained.append(parameters(worker).cpu())
        report = worker.pool.report()
        assert (report.captures, report.eager_runs) == (captures, 0)
        assert [layer.data_ptr() for layer in worker.engine._graphs.pages] == addresses
    assert results[0] == results[1]
    assert torch.equal(*trained)


def test_no_phase_reads_what_another_one_wrote(open_workers: list[PolicyWorker]) -> None:
    """Pages full of NaN change no bit, and neither do gradients that lie over written pages."""
    results = []
    for poisoned in (True, False):
        worker = make(open_workers, shares=True)
        assert worker.engine is not None
        rounds = []
        for number in range(2):
            if poisoned:
                with worker.phases.enter("generate"):
                    for layer in worker.engine._graphs.pages:
                        layer.fill_(torch.nan)
            rounds.append(step(worker, str(number)))
            rounds.append((worker.train(Batch([make_samples(6)])),))
        results.append((rounds, parameters(worker).cpu().tolist()))
    assert results[0] == results[1]


def test_the_cache_takes_no_extra_memory(open_workers: list[PolicyWorker]) -> None:
    """The pool is reserved at once, at the size that scoring and training need, as in a run."""
    reserved: dict[bool, int] = {}
    peaks: dict[bool, int] = {}
    limits = LIMITS
    gc.collect()  # workers of earlier tests
    for shares in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        worker = make(open_workers, shares=shares, limits=limits, exact="off")
        torch.cuda.empty_cache()
        limits = replace(LIMITS, pool_bytes=sum(size for _, size in pool_segments(worker.pool.arena)))
        reserved[shares] = torch.cuda.memory_reserved() - before
        peaks[shares] = torch.cuda.max_memory_reserved() - before
        assert worker.engine is not None
        cache = worker.engine.plan.nbytes
        gradients = worker.sharded.flat.gradient_memory
        over_gradients = [page for page in worker.engine._graphs.pages if _within(page, gradients)]
        assert len(over_gradients) == (worker.engine.plan.layers_that_fit(gradients.nbytes) if shares else 0)
        in_pool = [page for page in worker.engine._graphs.pages if _in_pool(page, worker)]
        assert len(over_gradients) + len(in_pool) == (WIDE.layers if shares else 0)
        print(f"{shares=}: reserved {reserved[shares] >> 20} MiB, peak {peaks[shares] >> 20} MiB, cache {cache >> 20}")
    assert cache > 500 << 20
    assert 0 < len(worker.engine.plan.pages_over(gradients)) < WIDE.layers
    assert reserved[True] <= reserved[False] - 0.8 * cache
    assert peaks[True] <= peaks[False] - 0.8 * cache


def test_the_pool_is_hardly_larger_than_a_very_large_cache(open_workers: list[PolicyWorker]) -> None:
    """Then training needs no extra memory."""
    large = replace(LIMITS, cache_bytes=6 << 30, rows=2048, token_buckets=(2048,))
    worker = make(open_workers, shares=True, limits=large, exact="off")
    assert worker.engine is not None
    plan = worker.engine.plan
    in_pool = plan.nbytes - plan.layers_that_fit(worker.sharded.flat.gradient_memory.nbytes) * plan.layer_nbytes
    segments = sum(size for _, size in pool_segments(worker.pool.arena))
    print(f"pages in the pool {in_pool >> 20} MiB, pool {segments >> 20} MiB")
    assert in_pool > 2 << 30
    assert segments < in_pool + (1 << 30)  # logits and temporaries of decoding
    step(worker, "a")


def _within(page: torch.Tensor, memory: torch.Tensor) -> bool:
    return memory.data_ptr() <= page.data_ptr() < memory.data_ptr() + memory.nbytes


def _in_pool(page: torch.Tensor, worker: PolicyWorker) -> bool:
    return any(start <= page.data_ptr() < start + size for start, size in pool_segments(worker.pool.arena))
