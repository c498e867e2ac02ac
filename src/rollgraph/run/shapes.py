"""The static shapes of a run: limits of prompts and sequences, and whether microbatches and the cache can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollgraph.config import MICROBATCH_TOKENS, Config, ConfigError
from rollgraph.inference.defaults import BLOCK_SIZE, sizes_on
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.model import Architecture
from rollgraph.policy import Limits
from rollgraph.rl.data import PromptData
from rollgraph.rl.environment import find_budget
from rollgraph.run.key_errors import about

ROUNDING = 64  # automatic token buckets are multiples of it, so that their quarters suit matrix products


def completion_tokens(config: Config) -> tuple[str, int]:
    """The key that limits what follows a prompt, and the limit: of a completion, or of all turns with their replies."""
    given = config.rollout.environment
    if given is not None:
        with about("rollout.environment"):
            budget = find_budget(given.name, given.options)
        if budget is not None:
            return "rollout.environment.options.max_tokens", budget
    return "rollout.max_tokens", config.rollout.max_tokens


def make_limits(config: Config, architecture: Architecture, device: str, ranks: int = 1) -> Limits:
    key, after = completion_tokens(config)
    longest = architecture.max_length
    prompt = config.data.max_prompt_tokens
    if (prompt or 1) + after > longest:
        limit = f"the model of model.path ({config.model.path}) takes {longest}"
        if config.model.tiny:
            limit = f"model.tiny.max_length is {longest}"
        before = f"data.max_prompt_tokens ({prompt})" if prompt else "a prompt"
        raise ConfigError([f"{key}: {before} and {after} tokens after it do not fit: {limit}"])
    if prompt is not None:
        longest = min(longest, prompt + after)
    buckets = config.train.token_buckets or automatic_buckets(
        config, longest, most_tokens(config, longest, after, ranks)
    )
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    rows = max(1, min(config.rollout.rows, -(-samples // ranks)))
    long_prompts = False
    if prompt is not None:
        siblings = config.rollout.samples_per_prompt
        packed = prompt - 1 + siblings * (1 + after)  # all share the prompt, but for its last token
        long_prompts = 2 * siblings * after <= packed
    return _limits(config, device, longest, rows, buckets, long_prompts)


def written_limits(
    config: Config, longest: int, per_prompt: int, device: str, ranks: int = 1, long_prompts: bool = False
) -> Limits:
    """The limits of a run that samples nothing: rows with so many completions each, none longer than `longest`.

    `long_prompts` says whether completions are at most half of the data.
    """
    samples = -(-config.data.prompts_per_step * per_prompt // config.algorithm.minibatches)
    tokens = max(-(-samples // ranks), _warm_start_samples(config, ranks)) * longest
    buckets = config.train.token_buckets or automatic_buckets(config, longest, tokens)
    return _limits(config, device, longest, 1, buckets, long_prompts)


def longest_written(config: Config, architecture: Architecture) -> int:
    """The most tokens that a prompt may have together with a completion that was written for it."""
    largest = config.train.largest_bucket
    given = config.data.max_tokens or min(architecture.max_length, largest or MICROBATCH_TOKENS)
    if given > min(architecture.max_length, largest or given):
        wrong = f"{given} tokens do not fit: the model takes {architecture.max_length}"
        raise ConfigError([f"data.max_tokens: {wrong}, and the largest microbatch {largest or 'as many'}"])
    return given


def recomputed_layers(config: Config, architecture: Architecture) -> int:
    """How many layers compute their activations again in the backward pass."""
    given = config.model.checkpointing
    if isinstance(given, bool):
        return architecture.layers if given else 0
    if given == "auto":
        return 0
    if given > architecture.layers:
        wrong = f"{given} layers, but the model has {architecture.layers}: true means all of them"
        raise ConfigError([f"model.checkpointing: {wrong}"])
    return given


def _limits(config: Config, device: str, longest: int, rows: int, buckets: Sequence[int], long_prompts: bool) -> Limits:
    on_cpu = device == "cpu"
    if config.train.long_prompts != "auto":
        long_prompts = config.train.long_prompts
    return Limits(
        max_length=longest,
        rows=rows,
        token_buckets=tuple(buckets),
        tokens_per_sequence=4 if on_cpu else 32,  # on a GPU, attention looks at every slot that a sequence could have
        prefill_tokens=sizes_on("cpu" if on_cpu else "cuda").prefill_tokens,
        long_prompts=long_prompts,
        **memory_limits(config),
    )


def memory_limits(config: Config) -> dict[str, Any]:
    """The fields of Limits that say nothing about lengths."""
    return {
        "cache_bytes": int(config.memory.cache_gib * 2**30) if config.memory.cache_gib else None,
        "whole_logits": {"auto": None, "whole": True, "chunks": False}[config.memory.logits],
    }


def automatic_buckets(config: Config, longest: int, tokens: int) -> list[int]:
    """A largest bucket, its half and its quarter; none is too small for the longest sequence.

    The largest has `train.microbatch_tokens`, or fewer if a minibatch has at most `tokens`: a graph computes all the
    tokens of its bucket, padding included, and needs memory for them.
    """
    filled = -(-tokens // ROUNDING) * ROUNDING
    largest = max(longest, min(config.train.microbatch_tokens or MICROBATCH_TOKENS, filled))
    return sorted({max(longest, largest // 4), max(longest, largest // 2), largest})


def most_tokens(config: Config, longest: int, after: int, ranks: int) -> int:
    """The most tokens of a bucket that a rank's share of any minibatch can fill, the warm start's included.

    The samples of a prompt share it. Samples are shuffled into minibatches, so all prompts of a step can meet in one of
    them; only if there is a single minibatch do ranks divide the prompts among themselves.
    """
    settings = config.algorithm
    prompts, siblings = config.data.prompts_per_step, config.rollout.samples_per_prompt
    samples = -(-prompts * siblings // settings.minibatches)
    samples = -(-samples // ranks)
    prompts = min(prompts, samples)
    if settings.minibatches == 1:
        prompts = min(prompts, samples // siblings + 2)  # a rank's share may begin and end inside a group
    tokens = prompts * longest + (samples - prompts) * (1 + after)
    if samples > prompts:  # a bucket has as many keys again for prompts that are shared
        tokens = max(tokens, samples * (longest - after - 1))
    return max(tokens, _warm_start_samples(config, ranks) * longest)


def _warm_start_samples(config: Config, ranks: int) -> int:
    """The most samples of a rank in a step of the warm start."""
    return 0 if config.warm_start is None else -(-config.warm_start.batch_size // ranks)


def longest_prompt(config: Config, limits: Limits) -> int:
    """The configured limit, or else what leaves room for all turns of an environment or one token of a completion."""
    if config.data.max_prompt_tokens:
        return config.data.max_prompt_tokens
    key, after = completion_tokens(config)
    if key == "rollout.max_tokens":
        return limits.max_length - 1
    return limits.max_length - after


def check_cache(config: Config, limits: Limits, architecture: Architecture, dtype: str | None) -> None:
    """Refuse a cache that cannot hold one sequence of the greatest length."""
    if limits.cache_bytes is None or dtype is None:
        return
    plan = CachePlan.within(architecture, getattr(torch, dtype), BLOCK_SIZE, limits.cache_bytes)
    if plan.tokens < limits.max_length:
        least = CachePlan(architecture, plan.dtype, BLOCK_SIZE, 1 - -limits.max_length // BLOCK_SIZE).nbytes / 2**30
        raise ConfigError(
            [
                f"memory.cache_gib: {config.memory.cache_gib:g} GiB hold {max(0, plan.tokens)} tokens, but a prompt "
                f"with its completion may have {limits.max_length}: set {least:.2g} or more, or a smaller "
                "data.max_prompt_tokens"
            ]
        )


def check_buckets(config: Config, limits: Limits, data: PromptData, held_out: PromptData | None) -> None:
    """Refuse token buckets that cannot hold the longest sequence: a sequence is never split."""
    key, after = completion_tokens(config)
    longest_prompt = data.longest
    if held_out is not None:
        longest_prompt = max(longest_prompt, held_out.longest)
    longest = min(longest_prompt + after, limits.max_length)
    if longest > limits.token_buckets[-1]:
        raise ConfigError(
            [
                f"train.token_buckets: the largest holds {limits.token_buckets[-1]} tokens, but the longest prompt "
                f"with {key} ({after}) takes {longest}"
            ]
        )
