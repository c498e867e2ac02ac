"""The files of a run that hold completions: demonstrations, preferences, and the data of a warm start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollgraph.config import Config, ConfigError
from rollgraph.distributed.world import World
from rollgraph.rl.data import DataError
from rollgraph.rl.demonstrations import WrittenData, load_written
from rollgraph.rl.environment import Environment
from rollgraph.run.given import NOTHING, Given, read_held_out_rows, read_training_rows
from rollgraph.run.hub_cache import TRAIN
from rollgraph.run.key_errors import about
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import Rollout


def load_training_rows(
    config: Config, tokenizer: Tokenizer, world: World, source: str, most: int, given: Given = NOTHING
) -> WrittenData:
    settings = config.data
    rows = read_training_rows(config, given)
    with about("data"):
        return load_written(
            rows,
            tokenizer,
            source,
            most=most,
            prompts_per_step=settings.prompts_per_step,
            seed=config.seed,
            shuffle=settings.shuffle,
            max_prompt_tokens=settings.max_prompt_tokens,
            too_long=settings.too_long,
            chat=settings.chat,
            rank=world.rank,
            ranks=world.size,
        )


def load_validation_rows(
    config: Config, tokenizer: Tokenizer, source: str, most: int, given: Given = NOTHING
) -> WrittenData | None:
    """The first rows of the validation file; every rank has all of them."""
    settings = config.data
    rows = read_held_out_rows(config, given)
    if rows is None:
        return None
    with about("data"):
        return load_written(
            rows,
            tokenizer,
            source,
            most=most,
            prompts_per_step=1,
            seed=0,
            shuffle=False,
            max_prompt_tokens=settings.max_prompt_tokens,
            too_long=settings.too_long,
            chat=settings.chat,
        )


def load_warm_start(
    config: Config, tokenizer: Tokenizer, world: World, most: int, given: Given = NOTHING, *, environment: Environment
) -> WrittenData | None:
    """The demonstrations of the warm start, which become text as the prompts of the environment do.

    One that is too long is an error, whatever `data.too_long` says.
    """
    settings = config.warm_start
    if settings is None:
        return None
    if settings.batch_size < world.size:
        raise ConfigError([f"warm_start.batch_size: each of {world.size} ranks needs at least one sequence"])
    with about("warm_start.data"):
        try:
            return load_written(
                given.read(settings.data, TRAIN),
                tokenizer,
                "demonstrations",
                most=most,
                prompts_per_step=settings.batch_size,
                seed=config.seed,
                **chat_settings(config, environment),
                rank=world.rank,
                ranks=world.size,
            )
        except DataError as error:  # its own arguments are not keys of `warm_start`
            raise DataError(error.detail, place=error.place) from error


def chat_settings(config: Config, environment: Environment) -> dict[str, Any]:
    """How prompts become text. In an environment of messages they are chats, and show the policy its tools."""
    return {"chat": config.data.chat, "tools": getattr(environment, "tools", None)}


def share_of(rollouts: Sequence[Rollout], world: World) -> list[Rollout]:
    """The groups that this rank scores."""
    return [rollout for rollout in rollouts if rollout.group % world.size == world.rank]
