"""Automatic token buckets are as large as a minibatch can fill, and no larger."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollgraph.config import Config, parse_config
from rollgraph.inputs.shapes import ROUNDING, make_limits
from rollgraph.model import Architecture
from rollgraph.policy import Limits
from rollgraph.policy.microbatch import pack_samples, packed_size
from rollgraph.rl.algorithms.batch import split_minibatches
from rollgraph.types import Sample

ARCHITECTURE = Architecture("llama", vocabulary=64, hidden=32, mlp=64, layers=1, heads=2, kv_heads=1, head_dim=16)
SMALL = """
model: {tiny: {max_length: 512}}
data: {train: t.jsonl, prompts_per_step: 8, max_prompt_tokens: 16}
rollout: {samples_per_prompt: 4, max_tokens: 48}
reward: {functions: [{name: exact_match}]}
"""


def limits_of(*overrides: str, ranks: int = 1) -> Limits:
    return make_limits(parse_config(SMALL, overrides), ARCHITECTURE, "cpu", ranks)


def largest_bucket(*overrides: str, ranks: int = 1) -> int:
    return limits_of(*overrides, ranks=ranks).token_buckets[-1]


def test_the_largest_bucket_holds_the_largest_minibatch() -> None:
    shared = 8 * (16 + 48) + 24 * (1 + 48)  # 8 prompts, each with a sample, and 24 more samples
    assert shared <= largest_bucket() < shared + ROUNDING
    assert largest_bucket() <= 8 * 4 * (16 + 48)


def test_buckets_are_a_half_and_a_quarter_of_the_largest() -> None:
    largest = largest_bucket()
    assert limits_of().token_buckets == (largest // 4, largest // 2, largest)


@pytest.mark.parametrize("overrides", [("algorithm.minibatches=4",), ("data.prompts_per_step=2",)])
def test_smaller_minibatches_have_smaller_buckets(overrides: tuple[str, ...]) -> None:
    assert largest_bucket(*overrides) < largest_bucket() / 2


def test_ranks_divide_a_minibatch() -> None:
    assert largest_bucket(ranks=4) < largest_bucket() / 2


def test_no_bucket_is_too_small_for_the_longest_sequence() -> None:
    tiny = ("data.prompts_per_step=1", "rollout.samples_per_prompt=2", "rollout.max_tokens=400")
    assert limits_of(*tiny, "algorithm.minibatches=2").token_buckets == (416, 448)
    assert min(limits_of("data.max_prompt_tokens=null").token_buckets) >= 512


def test_microbatch_tokens_limits_the_largest_bucket() -> None:
    assert largest_bucket("train.microbatch_tokens=512") == 512
    assert largest_bucket("data.prompts_per_step=4096") == 16384


def test_explicit_buckets_are_kept() -> None:
    assert limits_of("train.token_buckets=[4096, 8192]").token_buckets == (4096, 8192)


def test_a_minibatch_of_the_warm_start_fits_the_largest_bucket(tmp_path: Path) -> None:
    warm = f"warm_start={{data: {tmp_path / 'd.jsonl'}, batch_size: 100}}"
    assert largest_bucket(warm) == 100 * (16 + 48)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("minibatches", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("prompt", "completion"), [(16, 48), (60, 4), (1, 20)])
def test_every_rank_gets_its_share_of_a_minibatch_as_one_microbatch(
    device: str, minibatches: int, ranks: int, prompt: int, completion: int
) -> None:
    lengths = (f"data.max_prompt_tokens={prompt}", f"rollout.max_tokens={completion}")
    config = parse_config(SMALL, (*lengths, f"algorithm.minibatches={minibatches}"))
    limits = make_limits(config, ARCHITECTURE, device, ranks)
    room = limits.capacity(limits.token_buckets[-1])._replace(sequences=10_000)
    for seed in range(5):
        for share in shares(config, prompt, completion, ranks, seed):
            assert packed_size(share).fits(room)
            assert len(pack_samples(share, room)) == 1


def shares(config: Config, prompt: int, completion: int, ranks: int, seed: int) -> list[Sequence[Sample]]:
    """The samples of each rank in each minibatch. All sequences are as long as allowed."""
    generator = random.Random(seed)
    samples = []
    for _ in range(config.data.prompts_per_step):
        tokens = [generator.randrange(1000) for _ in range(prompt)]
        ones = [1.0] * completion
        samples += [Sample(tokens, [1] * completion, ones, ones, ones)] * config.rollout.samples_per_prompt
    rank_samples: list[Sequence[Sample]] = []
    for part in split_minibatches(len(samples), config.algorithm.minibatches, seed):
        ordered = sorted((samples[index] for index in part), key=lambda sample: tuple(sample.prompt))
        bounds = [len(ordered) * rank // ranks for rank in range(ranks + 1)]
        rank_samples += [ordered[bounds[rank] : bounds[rank + 1]] for rank in range(ranks)]
    return rank_samples


def test_half_logits_is_on_if_at_most_half_of_the_tokens_have_logits() -> None:
    """Four samples have 4 * 48 logit rows, and 4 + P - 1 tokens without logits."""
    assert limits_of("data.max_prompt_tokens=189").half_logits  # 192 of 384
    assert not limits_of("data.max_prompt_tokens=188").half_logits
    assert limits_of(
        "rollout.samples_per_prompt=1", "data.max_prompt_tokens=48", "algorithm.name=reinforce_pp"
    ).half_logits
    assert not limits_of("data.max_prompt_tokens=null").half_logits
    assert limits_of("data.max_prompt_tokens=null", "train.half_logits=true").half_logits
    assert not limits_of("data.max_prompt_tokens=189", "train.half_logits=false").half_logits
