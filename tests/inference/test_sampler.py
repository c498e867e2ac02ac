"""Filters, each compared with an independent computation of its distribution, and noise that only its key decides."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rollgraph.inference.sampler import SamplerOutput, SamplingTensors, gumbel, pick_on_cpu, sample, sample_filtered
from rollgraph.model.arithmetic import PART, part_count
from tests.interpreter import run_interpreted

DRAWS = 40_000
LOGITS = torch.tensor([2.0, 1.5, 1.4, 0.3, 0.0, -0.5, -1.0, -2.0, -2.5, -6.0])


def make_rows(
    count: int,
    device: str = "cpu",
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    penalty: float = 1.0,
    position: int = 3,
) -> SamplingTensors:
    """Rows that differ only in their seed."""
    seeds = torch.stack((torch.arange(count), torch.arange(count) // 7), 1)
    return SamplingTensors(
        seed=seeds.to(device, torch.int32),
        temperature=torch.full((count,), temperature, device=device),
        position=torch.full((count,), position, dtype=torch.int32, device=device),
        top_k=torch.full((count,), top_k, dtype=torch.int32, device=device),
        top_p=torch.full((count,), top_p, device=device),
        min_p=torch.full((count,), min_p, device=device),
        penalty=torch.full((count,), penalty, device=device),
    )


def exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, seen: list[int]
) -> np.ndarray:
    """The distribution by definition, token by token, in float64."""
    logits = [float(x) for x in LOGITS]
    for token in set(seen):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    weights = {token: math.exp(x / temperature) for token, x in enumerate(logits)}
    if top_k:
        weights = dict(sorted(weights.items(), key=lambda item: -item[1])[:top_k])
    kept, share, total = {}, 0.0, sum(weights.values())
    for token, weight in sorted(weights.items(), key=lambda item: -item[1]):
        if share < top_p:
            kept[token] = weight
        share += weight / total
    likeliest = max(kept.values())
    kept = {token: weight for token, weight in kept.items() if weight >= min_p * likeliest}
    result = np.zeros(len(logits))
    for token, weight in kept.items():
        result[token] = weight / sum(kept.values())
    return result


def assert_fits(tokens: Tensor, expected: np.ndarray) -> None:
    """Chi-squared test: impossible tokens are never drawn, and the others fit at the 0.01% level."""
    counts = np.bincount(tokens.cpu().numpy(), minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    expected_counts = expected[likely] * len(tokens)
    statistic = ((counts[likely] - expected_counts) ** 2 / expected_counts).sum()
    freedom = likely.sum() - 1
    critical = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty
    assert statistic < critical


FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_k": 3, "temperature": 2.0},
    {"top_p": 0.7},
    {"top_p": 0.9, "temperature": 1.7},
    {"min_p": 0.2},
    {"min_p": 0.05, "temperature": 0.8},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.3, "temperature": 1.4},
    {"penalty": 1.8},
    {"penalty": 0.7, "top_p": 0.95},
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_samples_follow_the_exact_distribution(filters: dict[str, float], device: str) -> None:
    rows, seen = make_rows(DRAWS, device, **filters), [0, 3, 3]
    logits = LOGITS.to(device).expand(DRAWS, -1).contiguous()
    history = torch.tensor([*seen, 9, 9], dtype=torch.int32, device=device).expand(DRAWS, -1)
    drawn = sample_filtered(logits, rows, history)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0} | filters
    expected = exact_distribution(**settings, seen=seen)
    assert_fits(drawn.token, expected)
    with np.errstate(divide="ignore"):
        logs = torch.from_numpy(np.log(expected))
    expected_logprobs = logs[drawn.token.cpu().long()].float()
    torch.testing.assert_close(drawn.logprob.cpu(), expected_logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        drawn.policy_logprob.cpu(), LOGITS.log_softmax(0)[drawn.token.cpu().long()], rtol=0, atol=1e-5
    )
    if set(filters) <= {"temperature"}:
        plain = sample(logits, rows)
        assert torch.equal(plain.token, drawn.token)  # the same noise, so the same tokens
        torch.testing.assert_close(plain.logprob, drawn.logprob, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_samples_from_several_parts_follow_the_exact_distribution(temperature: float, device: str) -> None:
    """Few likely tokens in one part, many unlikely ones in the next, and a third that is short and rare."""
    likely = [0, 17, PART - 1, PART + 3, 2 * PART, 2 * PART + 99]
    logits = torch.full((2 * PART + 100,), -9.0)
    logits[PART : 2 * PART] = -7.5
    logits[likely] = torch.tensor([1.0, 0.2, -1.0, 0.7, -1.2, -3.0])
    classes = torch.arange(len(logits)) // PART  # each likely token is a class, and the rest of each part is another
    classes[likely] = torch.arange(3, 3 + len(likely))
    weights = (logits.double() / temperature).softmax(0)
    expected = torch.zeros(3 + len(likely), dtype=torch.float64).index_add(0, classes, weights)
    rows = make_rows(8000, device, temperature=temperature)
    drawn = []
    for begin in range(0, 8000, 1000):
        chunk = SamplingTensors(**{name: tensor[begin : begin + 1000] for name, tensor in vars(rows).items()})
        drawn.append(sample(logits.to(device).expand(1000, -1).contiguous(), chunk))
    tokens = torch.cat([part.token.cpu().long() for part in drawn])
    assert_fits(classes[tokens], expected.numpy())
    others = tokens[classes[tokens] == 1] - PART  # equally likely, except for the one that is a class of its own
    assert_fits(others // 512, np.array([511, *[512] * 7]) / 4095)
    logprobs = torch.cat([part.logprob.cpu() for part in drawn])
    torch.testing.assert_close(logprobs, weights.log()[tokens].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parts_of_impossible_tokens_are_never_drawn(device: str) -> None:
    logits = torch.randn(400, 3 * PART + 10, generator=torch.Generator().manual_seed(0))
    for row, possible in enumerate((slice(0, PART), slice(PART, 2 * PART), slice(3 * PART, None), slice(-1, None))):
        kept = logits[row::4, possible].clone()
        logits[row::4] = -math.inf
        logits[row::4, possible] = kept
    rows = make_rows(400, device, temperature=1.5)
    rows.temperature[200:] = 0
    for top_k in (0, 5):
        rows.top_k[:] = top_k
        drawn = sample_filtered(logits.to(device), rows, torch.zeros((400, 4), dtype=torch.int32, device=device))
        tokens = drawn.token.cpu().long()
        assert torch.all(tokens >= 0)
        assert torch.all(logits.gather(1, tokens[:, None]).isfinite())
        assert torch.equal(tokens[200:], logits[200:].argmax(-1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_first_of_equally_likely_tokens_is_taken_at_temperature_zero(device: str) -> None:
    logits = torch.zeros(3, 2 * PART + 10, device=device)
    logits[1, [PART + 5, PART + 9, 2 * PART + 1]] = 1.0
    logits[2, [PART - 1, PART]] = 1.0
    rows = make_rows(3, device, temperature=0.0)
    for top_k in (0, 4):
        rows.top_k[:] = top_k
        drawn = sample_filtered(logits, rows, torch.zeros((3, 4), dtype=torch.int32, device=device))
        assert drawn.token.tolist() == [0, PART + 5, PART - 1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("filters", [{"top_k": 9000}, {"min_p": 1e-30}], ids=str)
def test_filters_that_keep_everything_draw_the_same_tokens(filters: dict[str, float], device: str) -> None:
    logits = 2 * torch.randn(40, 9000, generator=torch.Generator().manual_seed(2)).to(device)
    rows = make_rows(40, device, temperature=1.4, **filters)
    rows.temperature[::8] = 0
    plain = sample(logits, rows)
    filtered = sample_filtered(logits, rows, torch.zeros((40, 4), dtype=torch.int32, device=device))
    assert (plain.token // PART).unique().tolist() == [0, 1, 2]
    assert torch.equal(filtered.token, plain.token)
    torch.testing.assert_close(filtered.logprob, plain.logprob, rtol=0, atol=1e-5)


def test_a_tiny_top_p_keeps_one_token() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0], [50.0, 0.0, 0.0]])
    drawn = sample_filtered(logits, make_rows(2, top_p=1e-6), torch.zeros(2, 4, dtype=torch.int32))
    assert drawn.token.tolist() == [0, 0]
    assert drawn.logprob.tolist() == [0.0, 0.0]


def test_a_top_p_of_one_keeps_the_tail() -> None:
    """A token so unlikely that the others add up to 1 after rounding can still be drawn, as without filters."""
    many = make_rows(2411, min_p=1e-30)  # a filter that keeps everything
    rows = SamplingTensors(
        **{name: tensor[2410:] for name, tensor in vars(many).items()}
    )  # unusually large and small noise
    noise = gumbel(rows.seed, rows.position, torch.arange(PART, dtype=torch.int32))[0]
    spread = noise.max() - noise.min()
    assert spread > 18
    logits = torch.full((1, len(noise)), -50.0)
    logits[0, noise.argmin()], logits[0, noise.argmax()] = 0.0, 0.1 - spread
    for drawn in (sample(logits, rows), sample_filtered(logits, rows, torch.zeros(1, 4, dtype=torch.int32))):
        assert drawn.token == noise.argmax()
        torch.testing.assert_close(drawn.logprob, (0.1 - spread)[None])


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    for drawn in (
        sample(logits, make_rows(50, temperature=0.0)),
        sample_filtered(logits, make_rows(50, temperature=0.0, top_p=0.5), torch.zeros(50, 4, dtype=torch.int32)),
    ):
        assert torch.equal(drawn.token.long(), logits.argmax(-1))
        assert torch.all(drawn.logprob == 0)
        torch.testing.assert_close(drawn.policy_logprob, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("vocabulary", [20, 2 * PART + 20])
def test_non_finite_logits_give_token_minus_one(vocabulary: int) -> None:
    logits = torch.zeros(5, vocabulary)
    logits[1, 7], logits[2, :], logits[3, 7] = math.nan, -math.inf, math.inf
    logits[4, :-1] = -math.inf  # one token is left
    for drawn in (
        sample(logits, make_rows(5)),
        sample_filtered(logits, make_rows(5, top_k=9), torch.zeros(5, 4).int()),
    ):
        assert drawn.token.tolist()[1:] == [-1, -1, -1, vocabulary - 1]
        assert drawn.token[0] >= 0


@pytest.mark.parametrize("extreme", [{"temperature": 2e-38}, {"penalty": 1e-39}], ids=str)
def test_logits_that_overflow_at_the_temperature_give_token_minus_one(extreme: dict[str, float]) -> None:
    logits = LOGITS.expand(2, -1) * 10
    rows, mild = make_rows(2, **extreme), make_rows(2)
    for name in extreme:
        getattr(rows, name)[1:] = getattr(mild, name)[1:]
    outputs = [sample_filtered(logits, rows, torch.zeros(2, 4).int())]
    outputs += [sample(logits, rows)] if "temperature" in extreme else []
    for drawn in outputs:
        assert drawn.token[0] == -1
        assert drawn.token[1] >= 0


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    """A row draws the same in any batch, and another position or seed gives other noise."""
    rows = make_rows(6)
    for vocabulary in (40, 9000):
        logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(1))
        alone = [
            sample(logits[i : i + 1], SamplingTensors(**{k: v[i : i + 1] for k, v in vars(rows).items()}))
            for i in range(6)
        ]
        assert sample(logits, rows).token.tolist() == [int(drawn.token) for drawn in alone]
    ids = torch.arange(1000, dtype=torch.int32).expand(1, -1)
    base = gumbel(torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32), ids)
    for seed, position in (((1, 3), 5), ((2, 2), 5), ((1, 2), 6), ((2, 1), 5)):
        other = gumbel(torch.tensor([seed], dtype=torch.int32), torch.tensor([position], dtype=torch.int32), ids)
        assert abs(np.corrcoef(base[0], other[0])[0, 1]) < 0.12
        assert not np.isin(other.numpy(), base.numpy()).any()  # not a permutation of the same noise


@pytest.mark.parametrize("ids", [torch.arange(-300, 300).int(), torch.arange(1200).int().view(2, 600)])
def test_the_cpu_picks_the_largest_noisy_score(ids: Tensor) -> None:
    scores = torch.randn(2, 600)
    seed, position = torch.tensor([[1, -2], [3, 4]]).int(), torch.tensor([5, 70_000]).int()
    noisy = scores.double() + gumbel(seed, position, ids)
    picked = pick_on_cpu(scores, ids, seed, position, torch.ones(2))
    assert ((noisy.amax(1) - noisy.gather(1, picked[:, None])[:, 0]) <= 1e-5).all()  # a tie may go either way
    greedy = pick_on_cpu(scores, ids, seed, position, torch.zeros(2))
    assert torch.equal(greedy, scores.argmax(1))


def test_noise_is_gumbel() -> None:
    """Compare with the distribution function. It is finite everywhere."""
    seeds = torch.stack((torch.arange(500), torch.zeros(500)), 1).int()
    noise = gumbel(
        seeds, torch.full((500,), 9, dtype=torch.int32), torch.arange(400, dtype=torch.int32).expand(500, -1)
    )
    assert noise.isfinite().all()
    uniform = np.sort(np.exp(-np.exp(-noise.double().numpy().ravel())))
    distance = np.abs(uniform - np.arange(1, uniform.size + 1) / uniform.size).max()
    assert distance < 1.95 / math.sqrt(uniform.size)  # Kolmogorov and Smirnov, 0.1% level


def compare_kernel(device: str) -> None:
    """The Triton kernel and plain PyTorch draw the same tokens."""
    from rollgraph.inference.kernels import sample_rows
    from rollgraph.model.kernels.logprobs import fused_logprobs

    for vocabulary in (300, 5000, 9001):
        logits = torch.randn(16, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
        logits[0, 9], logits[1, 7], logits[2, -1], logits[3] = 100.0, math.nan, math.inf, -math.inf
        logits[4, 100:], logits[5, :-100] = -math.inf, -math.inf
        logits[6] = logits[6].round()  # equal logits, in several parts, of a greedy row
        rows = make_rows(16)
        rows.temperature = torch.tensor([2e-38, 2, 1, 1, 1.3, 0.8, 0, 0, 1, 1, 0.5, 0.7, 1.2, 1.5, 2, 3])
        scale = torch.where(rows.temperature == 0, 1.0, rows.temperature.reciprocal())
        results = torch.empty((16, 3), dtype=torch.int32, device=device)
        sample_rows(results, *(t.to(device) for t in (logits, rows.seed, rows.position, rows.temperature)))
        ours = SamplerOutput.read_from(results)
        plain = sample(logits, rows)
        assert ours.token.tolist() == plain.token.tolist()
        assert ours.token[:4].tolist() == [-1] * 4  # the first row overflows at its temperature
        assert len((ours.token[4:] // PART).unique()) == part_count(vocabulary)
        torch.testing.assert_close(ours.logprob.cpu()[4:], plain.logprob[4:], rtol=0, atol=2e-5)
        torch.testing.assert_close(ours.policy_logprob.cpu()[4:], plain.policy_logprob[4:], rtol=0, atol=2e-5)
        drawn = ours.token[8:].contiguous()  # without greedy rows, whose tokens are certain
        for logprobs, factor in ((ours.logprob, scale), (ours.policy_logprob, torch.ones(16))):
            trained, _, _ = fused_logprobs(logits[8:].to(device), factor[8:, None].to(device), drawn, False)
            assert torch.equal(logprobs[8:], trained)


def test_the_kernel_draws_the_same_tokens_as_pytorch() -> None:
    """In Triton's interpreter, which must be selected before Triton is imported."""
    run_interpreted(compare_kernel)


@pytest.mark.gpu
def test_the_kernel_draws_the_same_tokens_as_pytorch_on_cuda() -> None:
    compare_kernel("cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_row_without_filters_ignores_the_filters_of_other_rows(device: str) -> None:
    logits = 3 * torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)).to(device)
    rows = make_rows(8, device, temperature=0.7)
    rows.temperature[6] = 0
    expected = sample(logits, rows)
    for setting, value in ((rows.top_k, 3), (rows.top_p, 0.5), (rows.min_p, 0.1), (rows.penalty, 1.3)):
        setting[0] = value
    drawn = sample_filtered(logits, rows, torch.zeros((8, 9), dtype=torch.int32, device=device))
    assert torch.equal(drawn.token[1:], expected.token[1:])
    assert torch.equal(drawn.logprob[1:], expected.logprob[1:])
    assert torch.equal(drawn.policy_logprob[1:], expected.policy_logprob[1:])
