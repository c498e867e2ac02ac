"""The static shapes of a run, and that everything fits them: prompts, completions, turns, microbatches, the cache."""

from __future__ import annotations

import torch

from rollgraph.config import Config, ConfigError
from rollgraph.inference.defaults import BLOCK_SIZE, ON_CPU, ON_CUDA
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.model import Architecture
from rollgraph.policy import Limits
from rollgraph.rl.data import PromptData
from rollgraph.rl.environment import find_budget
from rollgraph.run.key_errors import about


def completion_tokens(config: Config) -> tuple[str, int]:
    """What can follow a prompt, and the key that says so: a completion, or all turns with their replies."""
    given = config.rollout.environment
    if given is not None:
        with about("rollout.environment"):
            budget = find_budget(given.name, given.options)
        if budget is not None:
            return "rollout.environment.options.max_tokens", budget
    return "rollout.max_tokens", config.rollout.max_tokens


def make_limits(config: Config, architecture: Architecture, device: str, ranks: int = 1) -> Limits:
    """The static shapes of a run."""
    key, after = completion_tokens(config)
    longest, prompt = architecture.max_length, config.data.max_prompt_tokens
    if (prompt or 1) + after > longest:
        most = (
            "model.tiny.max_length is" if config.model.tiny else f"the model of model.path ({config.model.path}) takes"
        )
        told = f"data.max_prompt_tokens ({prompt})" if prompt else "a prompt"
        raise ConfigError([f"{key}: {told} and {after} tokens after it do not fit: {most} {longest}"])
    if prompt is not None:
        longest = min(longest, prompt + after)
    largest = max(config.train.largest_bucket, longest)
    buckets = config.train.token_buckets or sorted({max(longest, largest // 4), max(longest, largest // 2), largest})
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    on_cpu = device == "cpu"
    return Limits(
        max_length=longest,
        rows=max(1, min(config.rollout.rows, -(-samples // ranks))),
        token_buckets=tuple(buckets),
        tokens_per_sequence=4 if on_cpu else 32,  # on a GPU, attention looks at every place a sequence could have
        cache_bytes=int(config.memory.cache_gib * 2**30) if config.memory.cache_gib else None,
        prefill_tokens=(ON_CPU if on_cpu else ON_CUDA).prefill_tokens,
        whole_logits={"auto": None, "whole": True, "chunks": False}[config.memory.logits],
    )


def longest_prompt(config: Config, limits: Limits) -> int:
    """As configured, or what leaves room for all turns, or for one token of a completion."""
    key, after = completion_tokens(config)
    return config.data.max_prompt_tokens or limits.max_length - (1 if key == "rollout.max_tokens" else after)


def check_cache(config: Config, limits: Limits, architecture: Architecture, dtype: str | None) -> None:
    """A cache that was given a size has to hold one sequence, however long."""
    if limits.cache_bytes is None or dtype is None:
        return
    plan = CachePlan.within(architecture, getattr(torch, dtype), BLOCK_SIZE, limits.cache_bytes)
    if plan.tokens < limits.max_length:
        least = CachePlan(architecture, plan.dtype, BLOCK_SIZE, 1 - -limits.max_length // BLOCK_SIZE).nbytes / 2**30
        raise ConfigError(
            [
                f"memory.cache_gib: {config.memory.cache_gib:g} hold {max(0, plan.tokens)} tokens, but a prompt with "
                f"its completion can have {limits.max_length}: give {least:.2g} or more, or a smaller "
                "data.max_prompt_tokens"
            ]
        )


def check_buckets(config: Config, limits: Limits, data: PromptData, held_out: PromptData | None) -> None:
    """The longest sequence that can come has to fit a microbatch: it is never split."""
    key, after = completion_tokens(config)
    longest = min(max(data.longest, held_out.longest if held_out else 0) + after, limits.max_length)
    if longest > limits.token_buckets[-1]:
        raise ConfigError(
            [
                f"train.token_buckets: the largest holds {limits.token_buckets[-1]} tokens, but the longest prompt "
                f"with {key} ({after}) takes {longest}"
            ]
        )
