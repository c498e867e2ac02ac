"""Algorithms against formulas that loop over sequences and tokens, and properties for any rollouts.

The formulas share no code with the library. Packed streams hold NaN and infinities wherever a weight is 0.
"""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from rollgraph.graph import capture
from rollgraph.rl.algorithms import ALGORITHMS as BUILT_IN
from rollgraph.rl.algorithms import PolicyGradient, load_algorithm
from rollgraph.rl.algorithms.dapo import overlong_punishment
from rollgraph.rl.algorithms.grpo import GRPO
from rollgraph.rl.losses import TokenStreams
from rollgraph.types import Batch, Prompt, Rollout, Sample

MAX_TOKENS = 12
REQUIRED: dict[str, dict[str, Any]] = {"dr_grpo": {"max_tokens": MAX_TOKENS}}
ALGORITHMS = [name for name in BUILT_IN if name not in ("dpo", "distillation")]  # these have tests of their own
REWARDED = [name for name in ALGORITHMS if name != "sft"]


def load(name: str, **settings: Any) -> Any:
    return load_algorithm(name, REQUIRED.get(name, {}) | settings)


# Rollouts, and policies that differ from the one that sampled them.


def make_rollouts(seed: int, groups: int = 3, size: int = 4) -> list[Rollout]:
    """Rollouts of ragged lengths, with some inserted tokens and some equal rewards."""
    rng = random.Random(seed)
    rollouts = []
    for group in range(groups):
        prompt = Prompt(id=100 + group, tokens=tuple(range(rng.randint(1, 4))), text="")
        for _ in range(size):
            length = rng.randint(1, MAX_TOKENS - 2)
            sampled = [rng.random() < 0.8 for _ in range(length - 1)] + [True]
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    tokens=[rng.randrange(50) for _ in range(length)],
                    sampled=sampled,
                    logprobs=[-3 * rng.random() if on else 0.0 for on in sampled],
                    reward=rng.choice([0.0, 0.5, 1.0, rng.random()]),
                    reference_logprobs=[-3 * rng.random() for _ in sampled],
                    group=group,
                )
            )
    rng.shuffle(rollouts)
    return rollouts


@dataclass
class Case:
    """Rollouts, and the log-probabilities and entropy that a step sees for each of their tokens."""

    rollouts: list[Rollout]
    policy: list[list[Tensor]]  # scalars that require grad
    old: list[list[float]]
    entropy: list[list[float]]

    @staticmethod
    def make(seed: int, spread: float = 0.3, old: bool = False) -> Case:
        rng, rollouts = random.Random(seed + 1), make_rollouts(seed)
        olds = [[x + old * rng.gauss(0, 0.5) for x in rollout.logprobs] for rollout in rollouts]
        policy = [
            [torch.tensor(x + rng.gauss(0, spread), dtype=torch.float64).requires_grad_() for x in row] for row in olds
        ]
        return Case(rollouts, policy, olds, [[rng.random() for _ in row] for row in olds])

    def gradients(self) -> list[list[float]]:
        return [[0.0 if x.grad is None else x.grad.item() for x in row] for row in self.policy]


@dataclass
class Packed:
    streams: TokenStreams
    positions: list[list[int]]  # of the tokens of each sample


def pack(case: Case, samples: Sequence[Sample], seed: int, dtype: torch.dtype = torch.float64) -> Packed:
    """Samples in random order, with prompts before them and padding between them, both full of garbage."""
    rng = random.Random(seed)
    numbers = {id(rollout.tokens): i for i, rollout in enumerate(case.rollouts)}
    rows: list[tuple[float, ...]] = []
    positions: list[list[int]] = [[] for _ in samples]

    def waste(count: int, sequence: int) -> None:
        for _ in range(count):
            junk = [rng.choice([-math.inf, math.inf, math.nan, 1e30]) for _ in range(6)]
            rows.append((*junk, 0.0, sequence))

    for sequence, index in enumerate(rng.sample(range(len(samples)), len(samples))):
        sample = samples[index]
        number = numbers[id(sample.tokens)]
        waste(rng.randint(0, 3), len(samples))
        waste(len(sample.prompt), sequence)
        for t, weight in enumerate(sample.weights):
            positions[index].append(len(rows))
            reference = 0.0 if sample.reference_logprobs is None else sample.reference_logprobs[t]
            logprob = 0.0 if sample.logprobs is None else sample.logprobs[t]
            policy, old, entropy = case.policy[number][t].item(), case.old[number][t], case.entropy[number][t]
            rows.append((policy, old, logprob, sample.advantages[t], reference, entropy, weight, float(sequence)))
    waste(rng.randint(1, 5), len(samples))
    columns = [torch.tensor(column, dtype=dtype) for column in zip(*rows, strict=True)]
    policy_, old_, rollout, advantages, reference_, entropy_, weights, sequence_ = columns
    streams = TokenStreams(
        logprobs=policy_.requires_grad_(),
        old_logprobs=old_,
        rollout_logprobs=rollout,
        advantages=advantages,
        weights=weights,
        sequence=sequence_.long(),
        sequences=len(samples) + 1,
        entropy=entropy_,
        reference_logprobs=reference_,
    )
    return Packed(streams, positions)


def run(algorithm: Any, packed: Packed) -> tuple[float, list[list[float]], dict[str, float]]:
    """The loss, its gradient for each token of each sample, and the metrics."""
    loss, metrics = algorithm.loss(packed.streams)
    loss.backward()
    gradient = packed.streams.logprobs.grad
    assert gradient is not None
    outside = torch.ones(len(gradient), dtype=torch.bool)
    outside[[position for row in packed.positions for position in row]] = False
    assert (gradient[outside] == 0).all()
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())
    numbers = {name: value.item() for name, value in metrics.items()}
    return loss.item(), [[gradient[i].item() for i in row] for row in packed.positions], numbers


def rollout_indices(case: Case, samples: Sequence[Sample]) -> list[int]:
    """The index of the rollout of each sample."""
    numbers = {id(rollout.tokens): i for i, rollout in enumerate(case.rollouts)}
    return [numbers[id(sample.tokens)] for sample in samples]


def assert_matches(case: Case, algorithm: Any, expected: Tensor, seed: int = 0) -> None:
    samples = algorithm.make_batch(case.rollouts, seed=seed).samples
    loss, gradients, _ = run(algorithm, pack(case, samples, seed))
    expected.backward()
    expected_gradients = case.gradients()
    assert loss == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
    for number, gradient in zip(rollout_indices(case, samples), gradients, strict=True):
        assert gradient == pytest.approx(expected_gradients[number], rel=1e-9, abs=1e-12)
    assert any(x for row in expected_gradients for x in row)


# The formulas.


def sampled(rollout: Rollout) -> list[int]:
    return [t for t, on in enumerate(rollout.sampled) if on]


def rewards_like(case: Case, rollout: Rollout, reward: Callable[[Rollout], float] = lambda r: r.reward) -> list[float]:
    return [reward(peer) for peer in case.rollouts if peer.group == rollout.group]


def group_relative(rewards: list[float], reward: float) -> float:
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1))
    return (reward - mean) / (std + 1e-6)


def ppo(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    inside = ratio if 1 - low <= ratio <= 1 + high else ratio.new_tensor(1 - low if ratio < 1 else 1 + high)
    plain, clipped = ratio * advantage, inside * advantage
    return -(plain if plain < clipped else clipped)


def expect_grpo(case: Case) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, rollout in enumerate(case.rollouts):
        advantage = group_relative(rewards_like(case, rollout), rollout.reward)
        for t in sampled(rollout):
            ratio = torch.exp(case.policy[i][t] - case.old[i][t])
            total = total + ppo(ratio, advantage, 0.2, 0.2) / len(sampled(rollout)) / len(case.rollouts)
    return total


def expect_dr_grpo(case: Case) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, rollout in enumerate(case.rollouts):
        rewards = rewards_like(case, rollout)
        advantage = rollout.reward - sum(rewards) / len(rewards)
        for t in sampled(rollout):
            ratio = torch.exp(case.policy[i][t] - case.old[i][t])
            total = total + ppo(ratio, advantage, 0.2, 0.2) / MAX_TOKENS / len(case.rollouts)
    return total


def expect_rloo(case: Case) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, rollout in enumerate(case.rollouts):
        others = [r.reward for r in case.rollouts if r.group == rollout.group and r is not rollout]
        advantage = rollout.reward - sum(others) / len(others)
        for t in sampled(rollout):
            ratio = torch.exp(case.policy[i][t] - case.old[i][t])
            total = total + ppo(ratio, advantage, 0.2, 0.2) / len(case.rollouts)
    return total


def expect_reinforce_pp(case: Case) -> Tensor:
    everything = [rollout.reward for rollout in case.rollouts for _ in sampled(rollout)]
    mean = sum(everything) / len(everything)
    std = math.sqrt(sum((x - mean) ** 2 for x in everything) / len(everything))
    total = torch.zeros((), dtype=torch.float64)
    for i, rollout in enumerate(case.rollouts):
        for t in sampled(rollout):
            ratio = torch.exp(case.policy[i][t] - case.old[i][t])
            total = total + ppo(ratio, (rollout.reward - mean) / (std + 1e-6), 0.2, 0.2) / len(everything)
    return total


def expect_dapo(case: Case) -> Tensor:
    def shaped(rollout: Rollout) -> float:  # max_tokens 12, buffer 6
        length = len(rollout.tokens)
        return rollout.reward + (0 if length <= 6 else (6 - length) / 6 if length <= 12 else -1)

    count = sum(len(sampled(rollout)) for rollout in case.rollouts)
    total = torch.zeros((), dtype=torch.float64)
    for i, rollout in enumerate(case.rollouts):
        advantage = group_relative(rewards_like(case, rollout, shaped), shaped(rollout))
        for t in sampled(rollout):
            total = total + ppo(torch.exp(case.policy[i][t] - case.old[i][t]), advantage, 0.2, 0.28) / count
    return total


def expect_gspo(case: Case) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, rollout in enumerate(case.rollouts):
        advantage = group_relative(rewards_like(case, rollout), rollout.reward)
        log_ratio = torch.zeros((), dtype=torch.float64)
        for t in sampled(rollout):
            log_ratio = log_ratio + (case.policy[i][t] - case.old[i][t]) / len(sampled(rollout))
        total = total + ppo(torch.exp(log_ratio), advantage, 0.1, 0.15) / len(case.rollouts)
    return total


def expect_cispo(case: Case) -> Tensor:
    count = sum(len(sampled(rollout)) for rollout in case.rollouts)
    total = torch.zeros((), dtype=torch.float64)
    for i, rollout in enumerate(case.rollouts):
        advantage = group_relative(rewards_like(case, rollout), rollout.reward)
        for t in sampled(rollout):
            ratio = math.exp(case.policy[i][t].item() - case.old[i][t])
            total = total - min(max(ratio, 0.9), 1.2) * advantage * case.policy[i][t] / count
    return total


def expect_sft(case: Case) -> Tensor:
    count = sum(len(sampled(rollout)) for rollout in case.rollouts)
    total = torch.zeros((), dtype=torch.float64)
    for i, rollout in enumerate(case.rollouts):
        for t in sampled(rollout):
            total = total - case.policy[i][t] / count
    return total


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Case], Tensor]]] = {
    "grpo": ({}, expect_grpo),
    "dr_grpo": ({}, expect_dr_grpo),
    "rloo": ({}, expect_rloo),
    "reinforce_pp": ({}, expect_reinforce_pp),
    "dapo": ({"max_tokens": 12, "overlong_buffer": 6}, expect_dapo),
    "gspo": ({"clip_low": 0.1, "clip_high": 0.15}, expect_gspo),
    "cispo": ({"clip_low": 0.1, "clip_high": 0.2}, expect_cispo),
    "sft": ({}, expect_sft),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_match_the_formula(name: str, seed: int) -> None:
    settings, formula = FORMULAS[name]
    case = Case.make(seed)
    assert_matches(case, load(name, **settings), formula(case), seed)


def test_reinforce_pp_with_a_group_baseline() -> None:
    case = Case.make(1)
    centered = copy.deepcopy(case.rollouts)
    for rollout in centered:
        rewards = rewards_like(case, rollout)
        rollout.reward -= sum(rewards) / len(rewards)
    expected = expect_reinforce_pp(Case(centered, case.policy, case.old, case.entropy))
    assert_matches(case, load("reinforce_pp", group_baseline=True), expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_all_terms_of_the_loss_together(estimator: str, kl_in: str) -> None:
    case = Case.make(5, spread=0.8, old=True)
    total = torch.zeros((), dtype=torch.float64)

    def shaped(rollout: Rollout) -> float:
        assert rollout.reference_logprobs is not None
        r = [rollout.reference_logprobs[t] - rollout.logprobs[t] for t in sampled(rollout)]
        each = {"k1": [-x for x in r], "k2": [x * x / 2 for x in r], "k3": [math.exp(x) - x - 1 for x in r]}
        return rollout.reward - (0.1 * sum(each[estimator]) if kl_in == "reward" else 0)

    for i, rollout in enumerate(case.rollouts):
        advantage = group_relative(rewards_like(case, rollout, shaped), shaped(rollout))
        for t in sampled(rollout):
            p, old, reference = case.policy[i][t], case.old[i][t], (rollout.reference_logprobs or [])[t]
            ratio = torch.exp(p - old)
            term = ppo(ratio, advantage, 0.1, 0.3)
            if advantage < 0 and ratio > 1.5:
                term = ratio.new_tensor(-1.5 * advantage)
            term = term * min(math.exp(old - rollout.logprobs[t]), 1.2)
            r = reference - p
            kl = {"k1": -r, "k2": r * r / 2, "k3": torch.exp(r) - r - 1}[estimator]
            term = term + (0.1 * kl if kl_in == "loss" else 0) - 0.01 * case.entropy[i][t]
            total = total + term / len(sampled(rollout)) / len(case.rollouts)
    common = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5, "importance_cap": 1.2, "entropy_coef": 0.01}
    algorithm = load("grpo", kl_coef=0.1, kl_estimator=estimator, kl_in=kl_in, **common)
    assert (algorithm.needs_reference, algorithm.needs_entropy, algorithm.needs_old_logprobs) == (True, True, True)
    assert_matches(case, algorithm, total)


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp"])
def test_kl_in_the_reward_uses_k1_by_default(name: str) -> None:
    case = Case.make(5)
    rollout = case.rollouts[0]
    r = [(rollout.reference_logprobs or [])[t] - rollout.logprobs[t] for t in sampled(rollout)]
    shaped = load(name, kl_coef=0.1).shaped_reward(rollout)
    assert shaped == pytest.approx(rollout.reward + 0.1 * sum(r), rel=1e-12)
    shaped = load(name, kl_coef=0.1, kl_estimator="k2").shaped_reward(rollout)
    assert shaped == pytest.approx(rollout.reward - 0.05 * sum(x * x for x in r), rel=1e-12)
    rollout.sampled = [False] * len(rollout.tokens)
    assert load(name, kl_coef=0.1).shaped_reward(rollout) == rollout.reward


def test_metrics_are_weighted_sums() -> None:
    case = Case.make(6, spread=0.6, old=True)
    algorithm = load("grpo", kl_coef=0.1, entropy_coef=0.01, importance_cap=1.2, dual_clip=1.3)
    loss, _, metrics = run(algorithm, pack(case, algorithm.make_batch(case.rollouts).samples, 0))
    expected: dict[str, float] = defaultdict(float)
    for i, rollout in enumerate(case.rollouts):
        advantage = group_relative(rewards_like(case, rollout), rollout.reward)
        for t in sampled(rollout):
            policy, old, entropy = case.policy[i][t].item(), case.old[i][t], case.entropy[i][t]
            ratio, to_reference = math.exp(policy - old), (rollout.reference_logprobs or [])[t] - policy
            values = {
                "weight": 1,
                "ratio": ratio,
                "clipped_low": advantage < 0 and ratio < 0.8,
                "clipped_high": advantage > 0 and ratio > 1.2,
                "clipped_dual": advantage < 0 and ratio > 1.3,
                "importance": min(math.exp(old - rollout.logprobs[t]), 1.2),
                "rollout_kl": math.exp(policy - rollout.logprobs[t]) - (policy - rollout.logprobs[t]) - 1,
                "kl": math.exp(to_reference) - to_reference - 1,
                "entropy": entropy,
            }
            for name, value in values.items():
                expected[name] += value / len(sampled(rollout)) / len(case.rollouts)
    assert all(expected.values())
    assert metrics == pytest.approx({"loss": loss, **expected})


def test_the_gradient_of_the_entropy_is_minus_its_coefficient() -> None:
    case, algorithm = Case.make(2), load("dapo", entropy_coef=0.25)
    streams = pack(case, algorithm.make_batch(case.rollouts).samples, 0).streams
    assert streams.entropy is not None
    streams.entropy.requires_grad_()
    loss, _ = algorithm.loss(streams)
    (gradient,) = torch.autograd.grad(loss, streams.entropy)
    torch.testing.assert_close(gradient, -0.25 * streams.weights)


def test_without_a_coefficient_the_entropy_is_estimated_from_samples() -> None:
    """The estimate is a metric and no part of the loss."""
    case, algorithm = Case.make(2), load("dapo")
    packed = pack(case, algorithm.make_batch(case.rollouts).samples, 0)
    exact = algorithm.loss(packed.streams)
    estimated = algorithm.loss(replace(packed.streams, entropy=None))
    live = packed.streams.weights != 0
    surprise = -(packed.streams.weights * packed.streams.logprobs)[live].sum()
    assert estimated[1]["entropy"].item() == pytest.approx(surprise.item())
    assert exact[1]["entropy"].item() != pytest.approx(surprise.item())
    assert estimated[0].item() == exact[0].item()


# Properties of every algorithm.


def everything_on(name: str) -> Any:
    if name == "sft":
        return load(name)
    dual = {} if name == "cispo" else {"dual_clip": 1.4}
    return load(name, kl_coef=0.1, entropy_coef=0.01, importance_cap=1.5, **dual)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_microbatches_add_up(name: str) -> None:
    case, algorithm, rng = Case.make(7, old=True), everything_on(name), random.Random(8)
    samples = algorithm.make_batch(case.rollouts).samples
    loss, gradients, metrics = run(algorithm, pack(case, samples, 0))
    parts: dict[int, list[int]] = defaultdict(list)
    for index in range(len(samples)):
        parts[rng.randrange(4)].append(index)
    assert len(parts) > 2
    summed: dict[str, float] = defaultdict(float)
    for part in parts.values():
        part_loss, part_gradients, part_metrics = run(
            algorithm, pack(case, [samples[i] for i in part], rng.randrange(99))
        )
        assert [gradients[i] for i in part] == [pytest.approx(row, rel=1e-12) for row in part_gradients]
        summed["total"] += part_loss
        for key, value in part_metrics.items():
            summed[key] += value
    assert summed.pop("total") == pytest.approx(loss, rel=1e-12)
    assert summed == pytest.approx(metrics, rel=1e-12)


@pytest.mark.parametrize("name", REWARDED)
def test_the_first_step_is_plain_policy_gradient(name: str) -> None:
    """Before any update, the policy equals the one that sampled, and may equal the reference policy."""
    case = Case.make(3, spread=0.0)
    for rollout in case.rollouts:
        rollout.reference_logprobs = rollout.logprobs
    algorithm = everything_on(name)
    samples = algorithm.make_batch(case.rollouts).samples
    packed = pack(case, samples, 0)
    _, gradients, metrics = run(algorithm, packed)
    for sample, row in zip(samples, gradients, strict=True):
        plain = [-weight * advantage for weight, advantage in zip(sample.weights, sample.advantages, strict=True)]
        # gspo sums a sequence's weights and divides by their number again
        assert row == (pytest.approx(plain, rel=1e-12) if name == "gspo" else plain)
    assert metrics["ratio"] == metrics["weight"] == metrics["importance"]
    assert metrics["kl"] == metrics["rollout_kl"] == 0
    assert not any(value for key, value in metrics.items() if key.startswith("clipped"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_captured_loss_is_bit_equal_to_eager(name: str) -> None:
    algorithm, case = everything_on(name), Case.make(4, old=True)
    first = pack(case, algorithm.make_batch(case.rollouts).samples, 0, torch.float32).streams
    second = replace(
        first,
        logprobs=first.logprobs * 0.8,
        advantages=1 - first.advantages,
        weights=torch.where(torch.arange(len(first.weights)) % 3 == 0, 0.0, first.weights),
    )
    names = [field.name for field in fields(TokenStreams) if field.name != "sequences"]

    def step(*tensors: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        streams = TokenStreams(sequences=first.sequences, **dict(zip(names, tensors, strict=True)))
        streams.logprobs = streams.logprobs.detach().requires_grad_()
        loss, metrics = algorithm.loss(streams)
        (gradient,) = torch.autograd.grad(loss, streams.logprobs)
        return loss.detach(), gradient, list(metrics.values())

    inputs = [tuple(getattr(streams, name).detach() for name in names) for streams in (first, second)]
    graph = capture(step, inputs[0], backend="tape")
    losses = []
    for tensors in (*inputs, inputs[0]):
        loss, gradient, metrics = graph(*tensors)
        eager_loss, eager_gradient, eager_metrics = step(*tensors)
        assert torch.equal(loss, eager_loss)
        assert torch.equal(gradient, eager_gradient)
        assert all(torch.equal(a, b) for a, b in zip(metrics, eager_metrics, strict=True))
        losses.append(loss.item())
    assert graph.record.replays == 3
    assert losses[0] == losses[2] != losses[1]
    assert all(map(math.isfinite, losses))


# Advantages.

rewards_of_groups = st.lists(
    st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=6), min_size=1, max_size=4
)


def rollouts_of(groups: list[list[float]]) -> list[Rollout]:
    prompt = Prompt(id=1, tokens=(1,), text="")
    return [
        Rollout(prompt, list(range(i + 1)), [True] * (i + 1), [-1.0] * (i + 1), reward=reward, group=group)
        for group, rewards in enumerate(groups)
        for i, reward in enumerate(rewards)
    ]


def advantages_of(algorithm: Any, rollouts: list[Rollout]) -> list[float]:
    """One advantage for each rollout, in order."""
    advantages = {id(s.tokens): s.advantages[-1] for s in algorithm.make_batch(rollouts).samples}
    return [advantages[id(rollout.tokens)] for rollout in rollouts]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo"])
@given(groups=rewards_of_groups)
def test_advantages_of_a_group_have_mean_zero(name: str, groups: list[list[float]]) -> None:
    rollouts = rollouts_of(groups)
    by_group: dict[int, list[float]] = defaultdict(list)
    for rollout, advantage in zip(rollouts, advantages_of(load(name), rollouts), strict=True):
        by_group[rollout.group].append(advantage)
    for rewards, advantages in zip(groups, by_group.values(), strict=True):
        assert sum(advantages) == pytest.approx(0, abs=1e-9)
        if len(set(rewards)) == 1:
            assert set(advantages) == {0.0}
        else:
            assert advantages.index(max(advantages)) == rewards.index(max(rewards))


@given(groups=rewards_of_groups)
def test_reinforce_pp_normalizes_advantages_over_the_tokens_of_a_batch(groups: list[list[float]]) -> None:
    rollouts = rollouts_of(groups)
    advantages = advantages_of(load("reinforce_pp"), rollouts)
    tokens = [a for rollout, a in zip(rollouts, advantages, strict=True) for _ in rollout.tokens]
    assert sum(tokens) == pytest.approx(0, abs=1e-6)
    if len({rollout.reward for rollout in rollouts}) > 1:
        assert sum(a * a for a in tokens) / len(tokens) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("name", REWARDED)
@given(groups=rewards_of_groups, shift=st.floats(-3, 3), seed=st.integers(0, 99))
@examples(max_examples=40)
def test_advantages_do_not_depend_on_a_shift_or_the_order(
    name: str, groups: list[list[float]], shift: float, seed: int
) -> None:
    algorithm, rollouts = load(name), rollouts_of(groups)
    before = advantages_of(algorithm, rollouts)
    for rollout in rollouts:
        rollout.reward += shift
    order = random.Random(seed).sample(range(len(rollouts)), len(rollouts))
    after = advantages_of(algorithm, [rollouts[i] for i in order])
    assert after == pytest.approx([before[i] for i in order], rel=1e-6, abs=1e-6)


def test_equal_rewards_have_advantage_zero_even_if_their_mean_is_rounded() -> None:
    rewards = [0.1] * 3
    assert math.fsum(rewards) / 3 != 0.1
    for name in REWARDED:
        assert set(advantages_of(load(name), rollouts_of([rewards]))) == {0.0}


def test_a_group_of_one_has_no_advantage() -> None:
    alone = rollouts_of([[1.0], [0.0, 1.0]])
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo"):
        assert advantages_of(load(name), alone)[0] == 0
    with pytest.raises(ValueError, match="prompt 1 has one; sample 2 or more"):
        load("rloo").make_batch(alone)
    alone[2].finish_reason = "error"  # its partner failed, which is no reason to stop a run
    assert advantages_of(load("rloo"), alone[1:]) == [0, 0]


def test_settings_of_advantages_and_unscored_rollouts() -> None:
    rollouts = rollouts_of([[0.0, 1.0]])
    assert advantages_of(load("grpo", normalize_std=False), rollouts) == [-0.5, 0.5]
    assert advantages_of(load("rloo"), rollouts) == [-1, 1]
    rollouts[0].reward = math.nan
    with pytest.raises(ValueError, match="reward of a rollout of prompt 1 is nan"):
        load("grpo").make_batch(rollouts)
    with pytest.raises(ValueError, match="scored by the reference policy before make_batch"):
        load("rloo", kl_coef=0.1).make_batch(rollouts_of([[0.0, 1.0]]))


# Weights and minibatches.


def totals(batch: Batch) -> list[float]:
    return [math.fsum(w for sample in minibatch for w in sample.weights) for minibatch in batch.minibatches]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_minibatches_are_a_deterministic_partition(name: str) -> None:
    rollouts, algorithm = make_rollouts(1, groups=3, size=5), load(name)
    batch, again, reshuffled = (algorithm.make_batch(rollouts, minibatches=4, seed=seed) for seed in (1, 1, 2))
    assert batch == again
    assert batch != reshuffled
    assert sorted(map(len, batch.minibatches)) == [3, 4, 4, 4]
    assert sorted(id(s.tokens) for s in batch.samples) == sorted(id(r.tokens) for r in rollouts)
    for minibatch, total in zip(batch.minibatches, totals(batch), strict=True):
        tokens = sum(weight != 0 for sample in minibatch for weight in sample.weights)
        expected = {"dr_grpo": tokens / len(minibatch) / MAX_TOKENS, "rloo": tokens / len(minibatch)}.get(name, 1)
        assert total == pytest.approx(expected)
    with pytest.raises(ValueError, match="15 samples do not fill 16 minibatches"):
        algorithm.make_batch(rollouts, minibatches=16)


@pytest.mark.parametrize("name", REWARDED)
def test_failed_rollouts_do_not_affect_the_others(name: str) -> None:
    """They change neither advantages nor weights of the others."""
    rollouts, algorithm = make_rollouts(2), load(name)
    failed = [copy.deepcopy(rollouts[0]) for _ in range(2)]
    for rollout, reason in zip(failed, ("error", "abort"), strict=True):
        rollout.finish_reason, rollout.reward = reason, math.nan
    plain = {id(s.tokens): s for s in algorithm.make_batch(rollouts).samples}
    batch = algorithm.make_batch([*rollouts, *failed])
    assert all(s == plain[id(s.tokens)] for s in batch.samples if id(s.tokens) in plain)
    assert not any(w or a for s in batch.samples if id(s.tokens) not in plain for w in s.weights for a in s.advantages)
    assert batch.metrics["failures/rollouts"] == pytest.approx(2 / 14)
    assert all(map(math.isfinite, batch.metrics.values()))


def test_truncated_rollouts_can_be_masked() -> None:
    rollouts = make_rollouts(3)
    rollouts[0].finish_reason = "length"
    keeping, masking = (load("dapo", mask_truncated=m) for m in (False, True))
    kept, masked = keeping.make_batch(rollouts), masking.make_batch(rollouts)
    assert all(any(s.weights) for s in kept.samples)
    assert [s.tokens for s in masked.samples if not any(s.weights)] == [rollouts[0].tokens]
    assert totals(masked) == pytest.approx([1])
    # its reward still counts among its group's
    assert advantages_of(keeping, rollouts)[1:] == advantages_of(masking, rollouts)[1:]


def test_a_batch_of_failures_has_zero_loss() -> None:
    case = Case.make(1)
    for rollout in case.rollouts:
        rollout.finish_reason = "error"
    for name in ALGORITHMS:
        algorithm = everything_on(name)
        loss, gradients, metrics = run(algorithm, pack(case, algorithm.make_batch(case.rollouts).samples, 0))
        assert loss == 0
        assert not any(x for row in gradients for x in row)
        assert not any(metrics.values())


def test_only_sampled_tokens_count() -> None:
    rollouts = make_rollouts(5)
    assert not all(all(rollout.sampled) for rollout in rollouts)
    for name in ALGORITHMS:
        for sample in load(name).make_batch(rollouts).samples:
            (rollout,) = (r for r in rollouts if r.tokens is sample.tokens)
            assert [w > 0 for w in sample.weights] == rollout.sampled
            assert sample.prompt == rollout.prompt.tokens
            assert sample.logprobs is (None if name == "sft" else rollout.logprobs)  # a demonstration was not sampled
            assert sample.reference_logprobs is rollout.reference_logprobs
    rollouts[0].logprobs = rollouts[0].logprobs[1:]
    with pytest.raises(ValueError, match="entries in `sampled`"):
        load("grpo").make_batch(rollouts)


def test_metrics_of_a_batch() -> None:
    rollouts = rollouts_of([[0.0, 1.0], [1.0, 1.0]])
    rollouts[0].rewards, rollouts[1].rewards = {"right": 0.0, "short": 1.0}, {"right": 1.0, "short": 0.0}
    rollouts[3].finish_reason = "length"
    metrics = load("dapo", max_tokens=2, overlong_buffer=1).make_batch(rollouts).metrics
    size = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert metrics == pytest.approx(
        {
            "reward": 0.75,
            "reward/std": math.sqrt(3) / 4,
            "rewards/right": 0.5,  # over the rollouts that have it
            "rewards/short": 0.5,
            "length/mean": 1.5,
            "length/min": 1,
            "length/max": 2,
            "length/truncated": 0.25,
            "failures/rollouts": 0,
            "reward/shaped": 0.25,
            "advantage/abs_mean": size / 2,  # shaped rewards are 0, 0 and 1, 0
            "advantage/abs_max": size,
        }
    )


# DAPO.


def test_dynamic_sampling_drops_groups_of_equal_rewards() -> None:
    even, uneven = rollouts_of([[1.0, 1.0, 1.0]]), rollouts_of([[1.0, 0.0, 1.0]])
    dapo = load("dapo", max_tokens=3, overlong_buffer=2)
    assert not dapo.keeps(even)  # although their lengths would be punished differently
    assert dapo.keeps(uneven)
    uneven[1].finish_reason = "error"
    assert not dapo.keeps(uneven)
    assert load("dapo", dynamic_sampling=False).keeps(even)
    assert all(load(name).keeps(even) for name in ALGORITHMS if name != "dapo")
    assert not load("grpo", dynamic_sampling=True).keeps(even)


@pytest.mark.parametrize(
    ("length", "punishment"), [(0, 0), (79, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (101, -1)]
)
def test_overlong_punishment(length: int, punishment: float) -> None:
    assert overlong_punishment(length, 100, 20) == pytest.approx(punishment)


# Loading.


@dataclass(frozen=True)
class Custom:
    """A custom algorithm, loaded by its import path."""

    scale: float = 1.0
    source = "policy"
    needs_rewards = True
    needs_reference = needs_entropy = needs_old_logprobs = False

    def keeps(self, group: Sequence[Rollout]) -> bool:
        return True

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        return Batch([])

    def loss(self, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        return self.scale * streams.logprobs.sum(), {}


class WithoutRewards(GRPO):
    def advantages(self, rollouts: Any) -> list[float]:  # type: ignore[override]
        return [0.0] * len(rollouts)


class WithoutSeed(Custom):
    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1) -> Batch:  # type: ignore[override]
        return Batch([])


class WithoutAnswer(Custom):
    needs_entropy = None  # type: ignore[assignment]


def test_a_custom_algorithm_is_loaded_by_its_path() -> None:
    loaded = load_algorithm(f"{__name__}:Custom", {"scale": 2.0})
    assert isinstance(loaded, Custom)
    assert loaded.scale == 2


def test_the_documented_custom_algorithm_works(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (tmp_path / "bold.py").write_text(text.split("```python")[-1].split("```")[0], encoding="utf-8")
    bold = load_algorithm(f"{tmp_path}/bold.py:Bold", {"boost": 3, "normalize_std": False})
    assert advantages_of(bold, rollouts_of([[0.0, 1.0]])) == [-0.5, 1.5]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gpro", {}, "no algorithm 'gpro'; did you mean 'grpo'"),
        ("dr-grpo", {}, "did you mean 'dr_grpo'"),
        (
            "grpo",
            {"clip_hgih": 1, "kl_coef": 0},
            "clip_hgih: algorithm 'grpo' has no such setting; did you mean 'clip_high'",
        ),
        ("sft", {"kl_coef": 0.1}, "kl_coef: algorithm 'sft' has no such setting"),
        ("dr_grpo", {}, "max_tokens: required by algorithm 'dr_grpo', but missing"),
        ("dr_grpo", {"max_tokens": 0}, "max_tokens: expected 1 or more, got 0"),
        ("grpo", {"kl_estimator": "k4"}, "kl_estimator: expected k1 or k2 or k3, got 'k4'"),
        ("grpo", {"kl_in": "both"}, "kl_in: expected loss or reward, got 'both'"),
        ("grpo", {"clip_low": 2}, "clip_low: expected a number from 0 to 1, got 2"),
        ("grpo", {"clip_high": -1}, "clip_high: expected .*, got -1"),
        ("grpo", {"kl_coef": math.nan}, "kl_coef: expected .*, got nan"),
        ("grpo", {"dual_clip": 1}, "dual_clip: expected a number above 1, or none, got 1"),
        ("grpo", {"importance_cap": 0}, "importance_cap: expected a number above 0, or none, got 0"),
        ("grpo", {"kl_coef": "1e-3"}, "kl_coef: expected a number, got '1e-3'$"),
        ("grpo", {"entropy_coef": True}, "entropy_coef: expected a number, got True$"),
        ("grpo", {"importance_cap": "none"}, "importance_cap: expected a number or none, got 'none'"),
        ("grpo", {"mask_truncated": 1}, "mask_truncated: expected true or false, got 1"),
        ("dr_grpo", {"max_tokens": 10.5}, "max_tokens: expected a whole number, got 10.5"),
        ("cispo", {"dual_clip": 2.0}, "cispo clips every ratio"),
        ("dapo", {"overlong_buffer": 5}, "overlong_buffer: expected 1 to max_tokens=None, got 5"),
        ("dapo", {"overlong_buffer": 5, "max_tokens": 4}, "overlong_buffer: expected 1 to max_tokens=4, got 5"),
        ("no.such.module:Name", {}, "there is no module 'no'"),
        ("math:Name", {}, "math has no 'Name'"),
        ("math:pi", {}, "is a float, not a class or function"),
        (f"{__name__}:Custom", {"scael": 1}, "scael: algorithm .* has no such setting; did you mean 'scale'"),
        (f"{__name__}:WithoutSeed", {}, "make_batch.rollouts, minibatches=, seed=.: .*'seed'"),
        (f"{__name__}:WithoutAnswer", {}, "must have `needs_entropy`, True or False"),
        (f"{__name__}:WithoutRewards", {}, r"called as advantages\(rollouts, rewards\): too many positional arguments"),
        ("fractions:Fraction", {}, "must have `source`, one of policy, demonstrations, pairs"),
    ],
)
def test_an_algorithm_that_cannot_be_loaded_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_algorithm(name, settings)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("grpo", 0.2, 0.2), ("dapo", 0.2, 0.28), ("gspo", 3e-4, 4e-4), ("cispo", 1.0, 4.0)]
)
def test_clips_match_the_papers(name: str, low: float, high: float) -> None:
    assert (load(name).clip_low, load(name).clip_high) == (low, high)


def test_settings_can_be_compared_but_not_changed() -> None:
    assert load("grpo", clip_high=0.3) == load("grpo", clip_high=0.3) != load("grpo")
    algorithm = load("grpo")
    assert isinstance(algorithm, PolicyGradient)
    with pytest.raises(FrozenInstanceError):
        algorithm.clip_high = 0.3  # type: ignore[misc]
    assert not any((algorithm.needs_reference, algorithm.needs_entropy, algorithm.needs_old_logprobs))


# TRL, for algorithms that it defines like rollgraph.

SAME_IN_TRL = {  # our algorithm and its settings; TRL's loss type, and settings that differ from the common ones
    "grpo": ("grpo", {}, "grpo", {}),
    "grpo, all terms": (
        "grpo",
        {"kl_coef": 0.1, "dual_clip": 1.5, "importance_cap": 1.3, "clip_high": 0.28},
        "grpo",
        {"beta": 0.1, "delta": 1.5, "use_vllm": True, "epsilon_high": 0.28},
    ),
    "dr_grpo": ("dr_grpo", {"kl_coef": 0.1}, "dr_grpo", {"beta": 0.1}),
    "dapo": ("dapo", {}, "dapo", {"epsilon_high": 0.28}),
    "dapo, as bnpo": ("dapo", {"clip_high": 0.2}, "bnpo", {}),
    "gspo": ("gspo", {}, "grpo", {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}),
    "cispo": ("cispo", {"clip_high": 0.5}, "cispo", {"epsilon_high": 1.5}),  # TRL's is the bound itself
}


@pytest.mark.parametrize("which", SAME_IN_TRL)
def test_trl_has_the_same_loss(which: str) -> None:
    pytest.importorskip("trl")
    from trl import GRPOTrainer

    name, settings, loss_type, trl_settings = SAME_IN_TRL[which]
    case, algorithm = Case.make(9, old="importance_cap" in settings), load(name, **settings)
    samples = algorithm.make_batch(case.rollouts).samples
    loss, gradients, metrics = run(algorithm, pack(case, samples, 0))

    width = max(len(sample.tokens) for sample in samples)
    numbers = rollout_indices(case, samples)

    def pad(rows: list[Any]) -> Tensor:
        return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)

    policy = pad([[x.item() for x in case.policy[i]] for i in numbers]).requires_grad_()
    old, sampled_ = pad([case.old[i] for i in numbers]), pad([case.rollouts[i].sampled for i in numbers])
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    one_process = SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (policy, torch.zeros_like(old), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, _entropy_bonus_enabled=False,
        importance_sampling_level="token", beta=0.0, epsilon_low=0.2, epsilon_high=0.2, loss_type=loss_type,
        use_vllm=False, vllm_importance_sampling_correction=True, max_completion_length=MAX_TOKENS,
        current_gradient_accumulation_steps=1, model=SimpleNamespace(training=True), accelerator=one_process,
        args=SimpleNamespace(delta=trl_settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    vars(trainer).update(trl_settings)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": sampled_,
        "advantages": torch.tensor([sample.advantages[-1] for sample in samples], dtype=torch.float64),
        "old_per_token_logps": old,
        "ref_per_token_logps": pad([case.rollouts[i].reference_logprobs for i in numbers]),
        "importance_sampling_ratio": torch.exp(old - pad([sample.logprobs for sample in samples])).clamp(max=1.3),
        "num_items_in_batch": sampled_.sum(),
    }  # fmt: skip
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), rel=1e-12, abs=1e-15)
    assert policy.grad is not None
    for row, their_row in zip(gradients, policy.grad.tolist(), strict=True):
        assert row == pytest.approx(their_row[: len(row)], rel=1e-12, abs=1e-15)
    if loss_type in ("dapo", "bnpo"):  # TRL's fractions are over tokens, as are these algorithms'
        their_metrics = trainer._metrics["train"]
        assert [metrics["clipped_low"]] == pytest.approx(their_metrics["clip_ratio/low_mean"])
        assert [metrics["clipped_high"]] == pytest.approx(their_metrics["clip_ratio/high_mean"])
