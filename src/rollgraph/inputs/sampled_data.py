"""The data of a run that samples: prompts for training and validation, the warm start's rows, and prompt lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollgraph.checkpoint.changes import read_newest_state
from rollgraph.checkpoint.keep import SavedCheckpoint
from rollgraph.config import Config
from rollgraph.config.fields import name_key_in_errors
from rollgraph.inference.sizes import BLOCK_SIZE
from rollgraph.inputs.shapes import PromptLengths, check_token_buckets, completion_limit, make_limits, max_prompt_length
from rollgraph.model import Architecture
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits
from rollgraph.rl.data.demonstrations import OfflineData, chat_settings, load_warm_start
from rollgraph.rl.data.hub import read_training_rows, read_validation_rows
from rollgraph.rl.data.prompts import OnProgress, PromptData
from rollgraph.rl.data.python_objects import NO_OBJECTS, PythonObjects
from rollgraph.rl.environment import Environment
from rollgraph.tokenizer import Tokenizer

# -- lengths of prompts ----------------------------------------------------------------------------
# Owns the rule: the longest training prompt determines all training shapes, once. Checkpoints record it, so a resumed
# run has the same shapes. A checkpoint without it belongs to a run whose prompts may be as long as the model takes.
# Validation prompts never affect training shapes. If they are longer, generation alone has room for them.

PROMPT_TOKENS = "measured_prompt_tokens"  # in the state of a checkpoint


def infers_prompt_limit(config: Config) -> bool:
    """Whether the prompt limit comes from the data.

    It cannot if an environment does not say how many tokens may follow a prompt: then the model's length is the limit.
    """
    if config.data.max_prompt_tokens is not None:
        return False
    return config.rollout.environment is None or completion_limit(config)[0] != "rollout.max_tokens"


def read_prompt_lengths(saved: SavedCheckpoint) -> PromptLengths | None:
    """The lengths that the run measured when it began; None if it measured none."""
    state = read_newest_state(saved) or {}
    tokens = state.get(PROMPT_TOKENS)
    return None if tokens is None else PromptLengths(tokens)


def training_prompt_lengths(
    config: Config, data: PromptData, warm_start: OfflineData | None, max_prompt: int
) -> PromptLengths:
    """Room for the longest prompt and, together with a completion, for the longest row of the warm start."""
    longest = data.longest_prompt
    if warm_start is not None:
        longest = max(longest, warm_start.completions.longest_sequence - completion_limit(config)[1])
    return PromptLengths(round_up(longest, max_prompt))


def round_up(tokens: int, limit: int) -> int:
    """Round up to whole KV cache blocks, so that slightly different data gives the same shapes."""
    return min(-(-tokens // BLOCK_SIZE) * BLOCK_SIZE, limit)


def describe_prompt_lengths(lengths: PromptLengths, data: PromptData) -> str:
    """The chosen limit and its reason, for the terminal."""
    text = (
        f"data.max_prompt_tokens: {lengths.training} (the longest of {len(data):,} prompts has {data.longest_prompt})"
    )
    if lengths.validation > lengths.training:
        text += f"; {lengths.validation} in validation"
    return text


# -- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampledData:
    """The data of a run that samples, and the shapes it needs."""

    training: PromptData
    validation: PromptData | None
    warm_start: OfflineData | None
    prompt_lengths: PromptLengths | None
    limits: Limits


def read_data(
    config: Config,
    world: World,
    tokenizer: Tokenizer,
    architecture: Architecture,
    environment: Environment,
    *,
    has_rewards: bool,
    objects: PythonObjects = NO_OBJECTS,
    resume_from: SavedCheckpoint | None = None,
    on_progress: OnProgress | None = None,
) -> SampledData:
    """Read and encode all rows.

    If prompt lengths come from the data, a resumed run takes them from its checkpoint. With rewards, validation only
    generates; without, its samples are also scored, so they must fit the training shapes.
    """
    max_prompt = max_prompt_length(config, architecture.max_length)
    lengths = None
    if resume_from is not None and infers_prompt_limit(config):
        lengths = read_prompt_lengths(resume_from)
    limits = make_limits(config, architecture, world.device, world.size, lengths)
    max_tokens = min(limits.max_length, limits.token_buckets[-1])
    warm_start = load_warm_start(config, tokenizer, world, max_tokens, objects, environment=environment)
    longest_allowed = max_prompt if lengths is None else lengths.training
    training = load_training_prompts(config, tokenizer, world, longest_allowed, environment, objects, on_progress)
    if resume_from is None and infers_prompt_limit(config):
        lengths = training_prompt_lengths(config, training, warm_start, max_prompt)
    longest_allowed = max_prompt if lengths is None or has_rewards else lengths.training
    validation = load_validation_prompts(config, tokenizer, longest_allowed, environment, objects)
    if lengths is not None and validation is not None:
        lengths = replace(lengths, validation=round_up(validation.longest_prompt, max_prompt))
    limits = make_limits(config, architecture, world.device, world.size, lengths)
    scored = (
        [training.longest_prompt]
        if has_rewards or validation is None
        else [training.longest_prompt, validation.longest_prompt]
    )
    check_token_buckets(config, limits, max(scored))
    return SampledData(training, validation, warm_start, lengths, limits)


def load_training_prompts(
    config: Config,
    tokenizer: Tokenizer,
    world: World,
    max_prompt_tokens: int,
    environment: Environment,
    objects: PythonObjects,
    on_progress: OnProgress | None,
) -> PromptData:
    """The prompts to train on; none may be longer than `max_prompt_tokens`."""
    settings = config.data
    rows = read_training_rows(config, objects)
    with name_key_in_errors("data"):
        return PromptData(
            rows,
            tokenizer,
            prompts_per_step=settings.prompts_per_step,
            seed=config.seed,
            shuffle=settings.shuffle,
            max_prompt_tokens=max_prompt_tokens,
            too_long=settings.too_long,
            **chat_settings(config, environment),
            rank=world.rank,
            ranks=world.size,
            on_progress=on_progress,
        )


def load_validation_prompts(
    config: Config, tokenizer: Tokenizer, max_prompt_tokens: int, environment: Environment, objects: PythonObjects
) -> PromptData | None:
    """The first prompts of the validation data; every rank loads all of them."""
    rows = read_validation_rows(config, objects)
    if rows is None:
        return None
    with name_key_in_errors("data"):
        return PromptData(
            rows,
            tokenizer,
            prompts_per_step=1,
            seed=0,
            shuffle=False,
            max_prompt_tokens=max_prompt_tokens,
            too_long=config.data.too_long,
            **chat_settings(config, environment),
        )
