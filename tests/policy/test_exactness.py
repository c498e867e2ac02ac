"""Generation, scoring and training give a token the same log-probability, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.inference import Engine, SamplingParams
from rollgraph.inference import sizes as default_sizes
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.model import Architecture, Decoder, Rope
from rollgraph.model.gemm import autotune, matmul
from rollgraph.model.gemm.autotune import autotune_gemms, clear_gemm_algos
from rollgraph.model.gemm.matmul import TORCH_GEMM
from rollgraph.model.layers import Linear, swiglu
from rollgraph.model.logprobs import reduce_logits
from rollgraph.model.lora import AdapterSpec, attach
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits, PolicyWorker, exactness, train_graphs
from rollgraph.policy.exactness import ExactnessError, attention_agrees, describe_exactness, make_exact
from rollgraph.policy.microbatch import TokenBucket
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.turns import Turn
from rollgraph.types import Batch, Sample

LLAMA = Architecture("llama", vocabulary=96, hidden=64, mlp=96, layers=2, heads=4, kv_heads=2, head_dim=16)
ARCHITECTURES = {
    "groups of 2": LLAMA,
    "groups of 7, a bias": replace(
        LLAMA, family="qwen2", heads=7, kv_heads=1, hidden=112, attention_bias=True, tied=True
    ),
    "head norms": replace(LLAMA, family="qwen3", head_dim=32),
    "a window": replace(LLAMA, family="mistral", windows=(20, None)),
    "odd sizes": replace(LLAMA, hidden=72, mlp=104, heads=3, kv_heads=3, head_dim=24, vocabulary=99),
    "many layers": replace(LLAMA, layers=4, rope=Rope(theta=500.0)),
}
LIMITS = Limits(max_length=160, rows=8, token_buckets=(256, 512), cache_bytes=1 << 22, prefill_tokens=64)
ROW_COUNTS = (1, 2, 3, 4, 8, 16, 24, 32, 64)
KINDS = [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)]

each_device = pytest.mark.parametrize(("device", "dtype"), KINDS, ids=str)


def decoder(architecture: Architecture, device: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """A model whose weights are large enough that tokens differ in probability."""
    torch.manual_seed(0)
    model = Decoder(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return model.to(device, dtype)


def adapt(model: Decoder, spec: AdapterSpec) -> None:
    """Attach adapters whose output is about as large as that of the base."""
    attach(model, spec, seed=0)
    assert model.adapters is not None
    for _, _, b in model.adapters.projections():
        b.uniform_(-0.2, 0.2)


def worker_of(architecture: Architecture, device: str, dtype: torch.dtype, **changes: Any) -> PolicyWorker:
    """A captured worker that must be exact. Skips the test if PyTorch's attention on this CPU cannot be."""
    temperature = changes.pop("temperature", 1.0)
    algorithm = changes.pop("algorithm", GRPO())
    spec = changes.pop("adapter", None)
    model = decoder(architecture, device, dtype)
    if spec is not None:
        adapt(model, spec)
    worker = PolicyWorker(
        model, None, World(0, 1, device), replace(LIMITS, **changes),
        sampling=SamplingParams(max_tokens=24, temperature=temperature), optimizer={"lr": 1e-2}, warmup=1, exact="must",
    )  # fmt: skip
    if spec is not None:
        worker.adapted.name_base("reference")
    try:
        worker.capture_all({"policy": (algorithm.loss, False)})
    except ExactnessError as error:
        if device == "cpu" and worker.gemm_report is None and "attention" in str(error):
            pytest.skip(str(error))
        raise
    return worker


def make_requests(vocabulary: int) -> list[tuple[list[int], int]]:
    """Prompts of several lengths, some of which are shared, each with a key."""
    generator = torch.Generator().manual_seed(1)
    prompts: list[tuple[list[int], int]] = []
    for length in (1, 3, 120, 17, 65):
        prompt = torch.randint(vocabulary, (length,), generator=generator).tolist()
        prompts += [(prompt, len(prompts) + copy) for copy in range(3 if length in (3, 65) else 1)]
    return prompts


def samples_of(requests: list[tuple[list[int], int]], turns: list[Turn]) -> list[Sample]:
    samples = []
    for (prompt, key), turn in zip(requests, turns, strict=True):
        count = len(turn.tokens)
        advantages = torch.full((count,), 1.0 if key % 2 else -1.0).numpy()
        samples.append(Sample(prompt, turn.tokens, advantages, advantages**2 / count, turn.logprobs))
    return samples


def check_agreement(worker: PolicyWorker, requests: list[tuple[list[int], int]], seed: str) -> list[Sample]:
    """Generate and score; return the samples."""
    samples = samples_of(requests, worker.generate(requests, seed=seed))
    for sample, scored in zip(samples, worker.logprobs(samples), strict=True):
        assert list(sample.logprobs) == scored
    return samples


def cases() -> Iterator[Any]:
    for name in ARCHITECTURES:
        marks = [] if name in ("groups of 7, a bias", "a window") else [pytest.mark.slow]
        yield pytest.param(name, "cpu", torch.float32, id=f"{name}, cpu", marks=marks)
        yield pytest.param(name, "cuda", torch.bfloat16, id=f"{name}, cuda", marks=pytest.mark.gpu)
    yield pytest.param("head norms", "cpu", torch.bfloat16, id="head norms, cpu, bf16")


@pytest.mark.parametrize(("name", "device", "dtype"), list(cases()))
def test_sampled_logprobs_equal_those_of_scoring_and_training(name: str, device: str, dtype: torch.dtype) -> None:
    """Before and after updates, with shared prompts, and with prompts that are prefilled in chunks."""
    architecture = ARCHITECTURES[name]
    worker = worker_of(architecture, device, dtype)
    assert worker.is_exact
    requests = make_requests(architecture.vocabulary)
    for step in range(2):
        metrics = worker.train(Batch([check_agreement(worker, requests, f"step {step}")]))
        assert metrics["policy/token_mult_prob_error"] == 1.0
        assert metrics["policy/token_mult_prob_error_max"] == 1.0
    worker.close()


ADAPTED = (
    ("groups of 7, a bias", AdapterSpec(rank=4, alpha=8.0)),
    ("head norms", AdapterSpec(rank=20, alpha=8.0, targets=("k_proj", "up_proj", "down_proj"))),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spec"), ADAPTED, ids=["all targets", "some targets"])
@each_device
def test_adapters_keep_generation_and_training_equal(
    name: str, spec: AdapterSpec, device: str, dtype: torch.dtype
) -> None:
    architecture = ARCHITECTURES[name]
    worker = worker_of(architecture, device, dtype, adapter=spec)
    assert worker.is_exact
    requests = make_requests(architecture.vocabulary)
    for step in range(2):
        samples = check_agreement(worker, requests, f"step {step}")
        for sample, reference in zip(samples, worker.logprobs(samples, "reference"), strict=True):
            assert list(sample.logprobs) != reference
        metrics = worker.train(Batch([samples]))
        assert metrics["policy/token_mult_prob_error"] == 1.0
        assert metrics["policy/token_mult_prob_error_max"] == 1.0
    with worker.adapted.use("reference"):
        turns = worker.generate(requests, seed="base")
    assert worker.logprobs(samples_of(requests, turns), "reference") == [list(turn.logprobs) for turn in turns]
    worker.close()


@pytest.mark.slow
@each_device
def test_a_small_cache_changes_no_sample_at_another_temperature(device: str, dtype: torch.dtype) -> None:
    requests = make_requests(LLAMA.vocabulary)
    block = CachePlan(LLAMA, dtype, default_sizes.BLOCK_SIZE, 1).nbytes
    small = worker_of(LLAMA, device, dtype, temperature=0.7, cache_bytes=16 * block)
    samples = check_agreement(small, requests, "seed")
    small.close()
    large = worker_of(LLAMA, device, dtype, temperature=0.7)
    for one, other in zip(samples, check_agreement(large, requests, "seed"), strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs
    large.close()


@each_device
def test_the_first_ratio_and_the_importance_weight_are_exactly_one(device: str, dtype: torch.dtype) -> None:
    """Without scoring, the old log-probabilities are those of the rollout."""
    worker = worker_of(LLAMA, device, dtype, algorithm=GRPO(importance_cap=2.0))
    samples = samples_of(make_requests(LLAMA.vocabulary), worker.generate(make_requests(LLAMA.vocabulary), seed="seed"))
    metrics = worker.train(Batch([samples]))
    assert metrics["policy/ratio"] == 1.0
    assert metrics["policy/importance"] == 1.0
    assert metrics["policy/rollout_kl"] == 0.0
    worker.close()


@pytest.mark.slow
@each_device
def test_a_sample_does_not_depend_on_its_batch(device: str, dtype: torch.dtype) -> None:
    """Alone or with others, in any order, with other row counts and other prefill steps."""
    requests = make_requests(LLAMA.vocabulary)
    params = [SamplingParams(max_tokens=20, seed=key) for _, key in requests]
    prompts = [prompt for prompt, _ in requests]

    def generate(indices: Sequence[int], **settings: int) -> dict[int, Any]:
        sizes = {"rows": 8, "max_length": 160, "prefill_tokens": 64, "block_size": 16} | settings
        model = decoder(LLAMA, device, dtype)
        autotune_gemms(model, ROW_COUNTS, ROW_COUNTS, at_any_cost=True)  # all engines have the same reference
        engine = Engine(model, filters=False, exact=False, **sizes)  # type: ignore[arg-type]
        outputs = engine.generate([prompts[i] for i in indices], [params[i] for i in indices])
        return {
            i: [(c.tokens, c.logprobs) for c in output.completions] for i, output in zip(indices, outputs, strict=True)
        }

    all_indices = range(len(requests))
    expected = generate(all_indices)
    assert generate(list(reversed(all_indices))) == expected
    assert generate(all_indices, rows=3, prefill_tokens=24, block_size=4) == expected
    assert generate(all_indices, cache_bytes=CachePlan(LLAMA, dtype, 16, 14).nbytes) == expected
    for i in (0, 4):
        assert generate([i], rows=1) == {i: expected[i]}


# -- GEMM autotune -----------------------------------------------------------------------------------------------------


def split_few_rows(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Emulate a library that sums the two halves of K separately if there are at most `most` rows."""
    multiply = matmul._torch_matmul

    def library(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool) -> Tensor:
        if len(x) > most:
            return multiply(x, weight, bias, wide)
        half = x.shape[1] // 2
        return multiply(x[:, :half], weight[:, :half], bias, wide) + multiply(x[:, half:], weight[:, half:], None, wide)

    monkeypatch.setattr(matmul, "_torch_matmul", library)


def logits_of(model: Decoder, rows: int) -> Tensor:
    x = torch.randn(64, model.architecture.hidden, generator=torch.Generator().manual_seed(0))
    return model.logits(x[:rows])


def test_gemms_that_the_library_splits_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    split_few_rows(monkeypatch, most=6)
    model = decoder(LLAMA, "cpu")
    assert not torch.equal(logits_of(model, 4), logits_of(model, 64)[:4])
    report = autotune_gemms(model, ROW_COUNTS, ROW_COUNTS)
    assert report.exact
    assert torch.equal(logits_of(model, 4), logits_of(model, 64)[:4])
    assert all(algo == TORCH_GEMM for algo in (report.algos[shape][32] for shape in report.algos))
    assert len(report.lines()) == len(report.algos)
    assert "4: torch, padded to 8 rows" in report.lines()[0]
    clear_gemm_algos(model)
    assert not torch.equal(logits_of(model, 4), logits_of(model, 64)[:4])


def test_gemms_that_cannot_be_exact_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GEMM with the most rows is the reference, and none with fewer rows agrees with it."""
    split_few_rows(monkeypatch, most=max(ROW_COUNTS) - 1)
    monkeypatch.setattr(autotune, "_other_candidates", lambda device, count, agreeing: [])
    model = decoder(LLAMA, "cpu")
    report = autotune_gemms(model, ROW_COUNTS, ROW_COUNTS)
    assert not report.exact
    assert "differ by rounding here" in describe_exactness(report)
    assert "with 1 rows" in describe_exactness(report)
    assert not logits_of(model, 4).isnan().any()


def test_must_takes_the_fixed_order_matmul_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    split_few_rows(monkeypatch, most=max(ROW_COUNTS) - 1)
    monkeypatch.setattr(autotune, "_other_candidates", lambda device, count, agreeing: [])
    model = decoder(LLAMA, "cpu")
    report = autotune_gemms(model, ROW_COUNTS, ROW_COUNTS, at_any_cost=True)
    assert report.exact
    assert torch.equal(logits_of(model, 4), logits_of(model, 64)[:4])

    monkeypatch.setattr(matmul, "_torch_matmul", lambda x, weight, bias, wide: torch.randn(len(x), len(weight)))
    limits = Limits(max_length=32, rows=2, token_buckets=(64,), prefill_tokens=32)
    with pytest.raises(ExactnessError, match="exact: must, but generation and training differ"):
        make_exact(model, limits, limits.buckets, whole_logits=True, must=True)


def test_gradients_are_equal_with_every_gemm_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    layer = Linear(12, 7, bias=True).double()
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    for algo in (matmul.GemmAlgo("torch", 8), matmul.GemmAlgo("fixed"), matmul.GemmAlgo("biased", 16)):
        layer.algos = {5: algo}
        gradients = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        for actual, reference in zip(gradients, expected, strict=True):
            torch.testing.assert_close(actual, reference)


# -- rows that depend on the row count in plain PyTorch ----------------------------------------------------------------


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Three threads split work at offsets that are not multiples of a vector."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_of_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(341, 2 * 1000, generator=torch.Generator().manual_seed(0))).to(dtype)
    separate = torch.cat([swiglu(row) for row in gate_up.split(1)])
    assert torch.equal(swiglu(gate_up), separate)


def test_gradients_of_swiglu() -> None:
    gate_up = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, gate_up)
    extreme = torch.tensor([[-1e4, 1e4, 1.0, 1.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(swiglu(extreme).sum(), extreme)
    assert gradient.tolist() == [[0.0, 1.0, 0.0, 1e4]]


@pytest.mark.usefixtures("three_threads")
def test_the_normalizer_of_a_row_does_not_depend_on_the_others() -> None:
    """PyTorch divides the sum of a single long row among threads."""
    logits = torch.randn(40, 40_000, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(40, 1)
    targets = torch.arange(40)
    together = reduce_logits(logits, ones, targets, entropy=True)
    for count in (1, 2):
        parts = zip(logits.split(count), ones.split(count), targets.split(count), strict=True)
        separate = [reduce_logits(*part, entropy=True) for part in parts]
        for one, others in zip(together, zip(*separate, strict=True), strict=True):
            assert torch.equal(one, torch.cat(others))


# -- where the contract ends -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_greedy_samples_are_not_exact() -> None:
    """They are drawn with probability 1, and training has a temperature."""
    worker = worker_of(LLAMA, "cpu", torch.float32, temperature=0.0)
    assert not worker.is_exact
    worker.close()


def test_off_clears_the_gemm_algorithms_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    split_few_rows(monkeypatch, most=6)
    model = decoder(LLAMA, "cpu")
    autotune_gemms(model, ROW_COUNTS, ROW_COUNTS)
    worker = PolicyWorker(
        model, None, World(0, 1, "cpu"), LIMITS, sampling=SamplingParams(), optimizer={"lr": 1e-2}, warmup=1,
        backend="eager", exact="off",
    )  # fmt: skip
    worker.capture_all({"policy": (GRPO().loss, False)})
    assert not model.head_algos
    assert not any(layer.mlp.down_proj.algos for layer in model.layers)
    worker.close()


def test_engines_with_different_row_counts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    split_few_rows(monkeypatch, most=6)
    logits = []
    for rows in (1, 8):
        model = decoder(LLAMA, "cpu")
        Engine(model, rows=rows, max_length=32, prefill_tokens=64, filters=False, backend="eager")
        logits.append(logits_of(model, 1))
    assert torch.equal(*logits)


def test_the_smallest_difference_shows() -> None:
    """In fp32, exp of a difference of 1e-9 is 1."""
    logprobs = torch.tensor([-0.01, -2.0, -3.0])
    weights = torch.tensor([1.0, 1.0, 0.0])
    assert train_graphs._agreement(logprobs, logprobs, weights).tolist() == [2.0, 2.0, 1.0]
    next_up = torch.nextafter(logprobs, torch.zeros(3))
    assert train_graphs._agreement(logprobs, next_up, weights)[2] > 1


def test_gemm_algorithms_are_not_cached_without_a_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container may run as a user that is not in its list of users."""
    monkeypatch.delenv("ROLLGRAPH_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert autotune.cache_path() is None
    monkeypatch.setenv("ROLLGRAPH_CACHE", str(tmp_path))
    assert autotune.cache_path() == tmp_path / "gemm_algos.json"


def test_attention_that_depends_on_the_row_count_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = exactness.paged_decode

    def decode(q: Tensor, *rest: Any) -> Tensor:
        out = plain(q, *rest)
        return out * (1 + 1e-6) if len(q) == 2 else out

    assert attention_agrees(decoder(LLAMA, "cpu"), (1, 2, 4)) or pytest.skip("attention does not agree here")
    monkeypatch.setattr(exactness, "paged_decode", decode)
    exactness._attention_agrees.cache_clear()
    model = decoder(LLAMA, "cpu")
    assert not attention_agrees(model, (1, 2, 4))
    report = make_exact(model, LIMITS, [TokenBucket(256, 256)], whole_logits=True, must=False)
    assert "attention of few rows is not that of many" in describe_exactness(report)
    exactness._attention_agrees.cache_clear()
