"""The static shapes of a run, and whether its parts fit together: token buckets, tensor parallelism, a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rollgraph.config import DEFAULT_MICROBATCH_TOKENS, Config, ConfigError
from rollgraph.config.fields import ConfigProblem, name_key_in_errors
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.inference.sizes import BLOCK_SIZE, default_sizes
from rollgraph.model import Architecture, Decoder
from rollgraph.model.meta import shapes_only
from rollgraph.model.weights import hf
from rollgraph.policy import Limits
from rollgraph.rl.data.hub import model_folder
from rollgraph.rl.environment import find_max_tokens
from rollgraph.tokenizer import Tokenizer, load_tokenizer

# -- shapes ----------------------------------------------------------------------------------------

ROUNDING = 64  # automatic token buckets are multiples of it, so that their quarters suit matrix products


@dataclass(frozen=True)
class PromptLengths:
    """The longest prompts of the data, in tokens; measured if `data.max_prompt_tokens` is not set.

    >>> PromptLengths(training=48, validation=112)
    """

    training: int
    validation: int = 0

    @property
    def longest(self) -> int:
        return max(self.training, self.validation)


def completion_limit(config: Config) -> tuple[str, int]:
    """The key that limits the tokens after a prompt, and its value: for a completion, or for all turns and replies."""
    environment = config.rollout.environment
    if environment is not None:
        with name_key_in_errors("rollout.environment"):
            max_tokens = find_max_tokens(environment.name, environment.options)
        if max_tokens is not None:
            return "rollout.environment.options.max_tokens", max_tokens
    return "rollout.max_tokens", config.rollout.max_tokens


def make_limits(
    config: Config, architecture: Architecture, device: str, ranks: int = 1, prompt_lengths: PromptLengths | None = None
) -> Limits:
    """The limits of a run that samples. Prompts without a configured or measured limit may fill the whole model."""
    key, completion_tokens = completion_limit(config)
    longest = architecture.max_length
    prompt_tokens = config.data.max_prompt_tokens
    if (prompt_tokens or 1) + completion_tokens > longest:
        limit = f"the model of model.path ({config.model.path}) takes {longest}"
        if config.model.tiny:
            limit = f"model.tiny.max_length is {longest}"
        prefix = f"data.max_prompt_tokens ({prompt_tokens})" if prompt_tokens else "a prompt"
        raise ConfigError([f"{key}: {prefix} and {completion_tokens} tokens after it do not fit: {limit}"])
    validation_length = 0
    if prompt_lengths is not None:
        prompt_tokens = prompt_lengths.training
        if prompt_lengths.validation > prompt_tokens:
            validation_length = min(longest, prompt_lengths.validation + completion_tokens)
    if prompt_tokens is not None:
        longest = min(longest, prompt_tokens + completion_tokens)
    buckets = config.train.token_buckets or default_token_buckets(
        config, longest, max_minibatch_tokens(config, longest, completion_tokens, ranks, device)
    )
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    rows = max(1, min(config.rollout.rows, -(-samples // ranks)))
    half_logits = False
    if prompt_tokens is not None:
        group_size = config.rollout.samples_per_prompt
        packed_tokens = prompt_tokens - 1 + group_size * (1 + completion_tokens)  # all but its last token are shared
        half_logits = 2 * group_size * completion_tokens <= packed_tokens
    limits = _build_limits(config, device, longest, rows, buckets, half_logits)
    return replace(limits, validation_length=validation_length)


def offline_limits(
    config: Config, longest: int, completions_per_row: int, device: str, ranks: int = 1, half_logits: bool = False
) -> Limits:
    """The limits of a run that samples nothing. No row with a completion is longer than `longest` tokens.

    `half_logits` says whether completions make up at most half of the tokens.
    """
    samples = -(-config.data.prompts_per_step * completions_per_row // config.algorithm.minibatches)
    tokens = max(-(-samples // ranks), _warm_start_batch(config, ranks)) * longest
    buckets = config.train.token_buckets or default_token_buckets(config, longest, tokens)
    return _build_limits(config, device, longest, 1, buckets, half_logits)


def max_offline_tokens(config: Config, architecture: Architecture) -> int:
    """The most tokens that a prompt and its completion from the data may have together."""
    largest = config.train.largest_bucket
    max_tokens = config.data.max_tokens or min(architecture.max_length, largest or DEFAULT_MICROBATCH_TOKENS)
    if max_tokens > min(architecture.max_length, largest or max_tokens):
        reason = f"{max_tokens} tokens do not fit: the model takes {architecture.max_length}"
        raise ConfigError([f"data.max_tokens: {reason}, and the largest microbatch {largest or 'as many'}"])
    return max_tokens


def recomputed_layers(config: Config, architecture: Architecture) -> int:
    """The number of layers with activation recomputation (activation checkpointing)."""
    checkpointing = config.model.checkpointing
    if isinstance(checkpointing, bool):
        return architecture.layers if checkpointing else 0
    if checkpointing == "auto":
        return 0
    if checkpointing > architecture.layers:
        reason = f"{checkpointing} layers, but the model has {architecture.layers}: true means all of them"
        raise ConfigError([f"model.checkpointing: {reason}"])
    return checkpointing


def _build_limits(
    config: Config, device: str, longest: int, rows: int, buckets: Sequence[int], half_logits: bool
) -> Limits:
    on_cpu = device == "cpu"
    if config.train.half_logits != "auto":
        half_logits = config.train.half_logits
    return Limits(
        max_length=longest,
        rows=rows,
        token_buckets=tuple(buckets),
        tokens_per_sequence=4 if on_cpu else 32,  # on a GPU, attention visits every possible sequence slot
        keys_per_token=keys_per_token(device),
        prefill_tokens=default_sizes("cpu" if on_cpu else "cuda").prefill_tokens,
        half_logits=half_logits,
        **memory_limits(config),
    )


def memory_limits(config: Config) -> dict[str, Any]:
    """The fields of Limits that limit memory, not lengths."""
    return {
        "cache_bytes": int(config.memory.cache_gib * 2**30) if config.memory.cache_gib else None,
        "whole_logits": {"auto": None, "whole": True, "chunks": False}[config.memory.logits],
    }


def default_token_buckets(config: Config, longest: int, tokens: int) -> list[int]:
    """The largest bucket, half of it and a quarter of it; each holds at least the longest sequence.

    The largest has `train.microbatch_tokens`, or fewer if no minibatch has more than `tokens`: a graph always computes
    all tokens of its bucket, padding included, and needs memory for them.
    """
    padded_tokens = -(-tokens // ROUNDING) * ROUNDING
    largest = max(longest, min(config.train.microbatch_tokens or DEFAULT_MICROBATCH_TOKENS, padded_tokens))
    return sorted({max(longest, largest // 4), max(longest, largest // 2), largest})


def keys_per_token(device: str) -> int:
    """Attention keys per packed token.

    On a GPU, a shared prompt key has a separate gradient for each sample that shares it; on a CPU it costs an index.
    """
    return 8 if device == "cpu" else 1


def max_minibatch_tokens(config: Config, longest: int, completion_tokens: int, ranks: int, device: str) -> int:
    """An upper bound on the tokens that one rank packs from one minibatch, including those of the warm start.

    Samples of a prompt share its tokens. They are shuffled into minibatches, so one minibatch may hold all prompts of
    the step. With a single minibatch, each rank takes consecutive samples and so only its share of the prompts.
    """
    settings = config.algorithm
    prompts, group_size = config.data.prompts_per_step, config.rollout.samples_per_prompt
    samples = -(-prompts * group_size // settings.minibatches)
    samples = -(-samples // ranks)
    prompts = min(prompts, samples)
    if settings.minibatches == 1:
        prompts = min(prompts, samples // group_size + 2)  # a rank's share may begin and end inside a group
    tokens = prompts * longest + (samples - prompts) * (1 + completion_tokens)
    if samples > prompts:
        tokens = max(tokens, samples * (longest - completion_tokens - 1) // keys_per_token(device))
    return max(tokens, _warm_start_batch(config, ranks) * longest)


def _warm_start_batch(config: Config, ranks: int) -> int:
    """The most samples that one rank trains on in a step of the warm start."""
    return 0 if config.warm_start is None else -(-config.warm_start.batch_size // ranks)


def max_prompt_length(config: Config, longest: int) -> int:
    """The configured limit; without one, leave room in the longest sequence for all turns or for one sampled token."""
    if config.data.max_prompt_tokens:
        return config.data.max_prompt_tokens
    key, completion_tokens = completion_limit(config)
    return longest - (1 if key == "rollout.max_tokens" else completion_tokens)


def check_cache_size(config: Config, limits: Limits, architecture: Architecture, dtype: str | None) -> None:
    """Refuse a KV cache that cannot hold one sequence of the maximum length."""
    if limits.cache_bytes is None or dtype is None:
        return
    plan = CachePlan.within(architecture, getattr(torch, dtype), BLOCK_SIZE, limits.cache_bytes)
    longest = limits.longest_generated
    if plan.tokens < longest:
        least = CachePlan(architecture, plan.dtype, BLOCK_SIZE, 1 - -longest // BLOCK_SIZE).nbytes / 2**30
        raise ConfigError(
            [
                f"memory.cache_gib: {config.memory.cache_gib:g} GiB hold {max(0, plan.tokens)} tokens, but a prompt "
                f"with its completion may have {longest}: set {least:.2g} or more, or a smaller "
                "data.max_prompt_tokens"
            ]
        )


def check_token_buckets(config: Config, limits: Limits, longest_prompt: int) -> None:
    """Refuse token buckets that cannot hold the longest sequence: sequences are never split."""
    key, completion_tokens = completion_limit(config)
    longest = min(longest_prompt + completion_tokens, limits.max_length)
    if longest > limits.token_buckets[-1]:
        raise ConfigError(
            [
                f"train.token_buckets: the largest holds {limits.token_buckets[-1]} tokens, but the longest prompt "
                f"with {key} ({completion_tokens}) takes {longest}"
            ]
        )


# -- tensor parallelism ----------------------------------------------------------------------------
# Each impossible combination has a named rule.

_TENSOR_PARALLEL = "tensor_parallel"


def check_rank_count(config: Config, ranks: int) -> None:
    """Refuse a number of ranks that does not divide into tensor parallel groups."""
    if ranks % config.tensor_parallel:
        reason = (
            f"{config.tensor_parallel} must divide the number of ranks, {ranks}: start another number, or set it to 1"
        )
        raise ConfigError([ConfigProblem(reason, _TENSOR_PARALLEL, rule="ranks_form_groups")])


def stages_through_host(config: Config, ranks: int, device: str) -> bool:
    """Whether collectives between this many ranks pass through host memory; `parallel/ranks/join.py` owns the rule."""
    return device.startswith("cuda") and ranks > 1 and config.ranks.backend == "gloo"


def check_tensor_parallel(config: Config, architecture: Architecture, staged: bool) -> None:
    """Refuse a tensor parallel size that the model or the run cannot have."""
    if problem := find_tensor_parallel_problem(config, architecture, staged):
        raise ConfigError([problem])


def find_tensor_parallel_problem(config: Config, architecture: Architecture, staged: bool) -> ConfigProblem | None:
    """The reason why tensor parallelism is impossible; None if it is possible.

    Shards would differ in size, ranks would share key/value heads that have adapters, or graphs would contain
    collectives that are `staged` through host memory.
    """
    if reason := architecture.why_indivisible(config.tensor_parallel):
        return ConfigProblem(reason, _TENSOR_PARALLEL, rule="layers_divide")
    if config.adapter is not None and config.tensor_parallel > architecture.kv_heads:
        reason = f"with adapters, ranks cannot share the {architecture.kv_heads} key/value heads: use at most as many"
        return ConfigProblem(reason, _TENSOR_PARALLEL, rule="adapters_of_own_heads")
    if staged and config.tensor_parallel > 1 and config.graph.impl != "none":
        reason = (
            "with ranks.backend: gloo, tensor parallel collectives pass through host memory, which no CUDA graph can "
            "contain: set this to none, to run eagerly"
        )
        return ConfigProblem(reason, "graph.impl", rule="exchanges_in_graphs")
    return None


# -- a teacher -------------------------------------------------------------------------------------
# A teacher with the policy's architecture is loaded into the weight slot of the reference policy. Any other teacher is
# a second, frozen model with its own graphs for scoring.


def read_teacher(config: Config) -> Architecture | None:
    if config.algorithm.teacher is None:
        return None
    with name_key_in_errors("algorithm.teacher"):
        return hf.read_architecture(model_folder(config.algorithm.teacher))


def teacher_on_meta(config: Config) -> Decoder | None:
    """The teacher on the meta device, for the memory plan."""
    architecture = read_teacher(config)
    if architecture is None:
        return None
    assert config.algorithm.teacher is not None
    dtype = hf.read_dtype(model_folder(config.algorithm.teacher)) or "bfloat16"
    with shapes_only():
        return Decoder(architecture).to(dtype=getattr(torch, dtype))


def check_teacher(config: Config, tokenizer: Tokenizer, policy: Architecture, longest: int) -> Architecture | None:
    """The architecture of the teacher; raises if it cannot score the policy's tokens, or sequences of this length."""
    teacher = read_teacher(config)
    if teacher is None:
        return None
    folder = config.algorithm.teacher
    assert folder is not None
    with name_key_in_errors("algorithm.teacher"):
        vocab = load_tokenizer(model_folder(folder)).vocab
    if vocab != tokenizer.vocab:
        raise ConfigError(
            [f"algorithm.teacher: {folder} has another tokenizer: {_vocab_difference(vocab, tokenizer.vocab)}"]
        )
    if teacher.vocabulary < policy.vocabulary:
        reason = f"{folder} has a vocabulary of {teacher.vocabulary}, but the policy may sample {policy.vocabulary} ids"
        raise ConfigError([f"algorithm.teacher: {reason}"])
    if teacher.max_length < longest:
        reason = f"{folder} takes {teacher.max_length} tokens, but a prompt with its completion may have {longest}"
        raise ConfigError([f"algorithm.teacher: {reason}"])
    return teacher


def _vocab_difference(teacher_vocab: dict[str, int], policy_vocab: dict[str, int]) -> str:
    for token, number in sorted(policy_vocab.items(), key=lambda entry: entry[1]):
        if teacher_vocab.get(token) != number:
            return f"{token!r} is {teacher_vocab.get(token, 'absent')} there and {number} here"
    return f"it has {len(teacher_vocab)} tokens, and that of this run has {len(policy_vocab)}"
