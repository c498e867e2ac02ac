"""What a run is given, read and checked before anything is allocated: text, data, rewards, lengths, the algorithm.

Owns which class or function stands behind these keys, and that what is wrong with them is said in a second, by the
names people wrote: keys, not arguments. The model is known by its shape alone here.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollgraph.config import Config, ConfigError, check_scopes
from rollgraph.distributed.world import World
from rollgraph.inference import SamplingParams
from rollgraph.model import Architecture, hf_weights
from rollgraph.policy import Limits
from rollgraph.rl.algorithms import Algorithm, load_algorithm
from rollgraph.rl.data import DataError, PromptData, Row, load_rows
from rollgraph.rl.environment import Environment, SingleTurn, load_environment
from rollgraph.rl.rewards import RewardFunctions
from rollgraph.run.checkpoints import CheckpointError, Saved, find_complete, none_whole
from rollgraph.run.key_errors import about
from rollgraph.run.shapes import check_buckets, check_cache, longest_prompt, make_limits
from rollgraph.sharding.shard_files import read_states
from rollgraph.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from rollgraph.types import Prompt


@dataclass
class Inputs:
    """Everything but the model and what is made of it."""

    scopes: tuple[str, ...]
    tokenizer: Tokenizer
    algorithm: Algorithm
    environment: Environment
    examiner: Environment  # the same, with as many samples as a validation takes
    sampling: SamplingParams
    limits: Limits
    rewards: RewardFunctions
    data: PromptData
    validation: list[Prompt]
    left_out: int  # prompts of the held-out file that are no part of `validation`
    demonstrations: list[Row]  # of the warm start


def check_inputs(config: Config, world: World, *, resumes: bool = False) -> Inputs:
    """Read everything that is cheap to read; what cannot be trained on raises here, before a model is loaded.

    With `resumes` the run goes on from its checkpoints, so these are looked at, too.
    """
    saved = find_saved(config) if resumes else None
    check_device(config, world)
    scopes = check_scopes(config, world.size) or (("step",) if world.size == 1 else ("layer",))
    with about("tokenizer.path"):
        tokenizer = make_tokenizer(config)
    architecture, dtype = read_architecture(config, tokenizer)
    check_vocabulary(config, tokenizer, architecture)
    algorithm = make_algorithm(config)
    environment = make_environment(config, tokenizer, config.rollout.samples_per_prompt)
    examiner = make_environment(config, tokenizer, config.validation.samples)
    sampling = make_sampling(config, environment)
    limits = make_limits(config, architecture, world.device, world.size)
    check_cache(config, limits, architecture, dtype)
    demonstrations = load_demonstrations(config, tokenizer, limits)
    with ExitStack() as undo:
        rewards = make_rewards(config, environment)
        undo.callback(rewards.close)
        data = make_data(config, tokenizer, world, limits)
        held_out = make_held_out(config, tokenizer, limits)
        check_buckets(config, limits, data, held_out)
        if saved is not None:
            check_saved(saved, data)
        with about("reward"):
            for each in filter(None, (data, held_out)):
                rewards.check_columns(each.columns)
        undo.pop_all()
    validation = [prompt for _ in range(len(held_out)) for prompt in held_out.next_prompts()] if held_out else []
    return Inputs(
        scopes=scopes,
        tokenizer=tokenizer,
        algorithm=algorithm,
        environment=environment,
        examiner=examiner,
        sampling=sampling,
        limits=limits,
        rewards=rewards,
        data=data,
        validation=validation,
        left_out=held_out.dropped if held_out else 0,
        demonstrations=demonstrations,
    )


# -- the output folder -----------------------------------------------------------------------------


def find_saved(config: Config) -> Saved | None:
    """The newest checkpoint, where `resume` allows one. Nothing begins over checkpoints that are all broken."""
    folder, broken = Path(config.output) / "checkpoints", list[str]()
    found = find_complete(folder, on_broken=lambda path, error: broken.append(str(error))) if folder.is_dir() else []
    if config.resume == "never" and (found or broken):
        raise CheckpointError(f"resume: never, but {folder} has checkpoints: choose another output")
    if broken and not found:
        raise none_whole(folder, broken)
    if config.resume == "must" and not found:
        raise CheckpointError(f"resume: must, but {folder} has no whole checkpoint")
    return found[-1] if found else None


def check_saved(saved: Saved, data: PromptData) -> None:
    """A checkpoint belongs to its data."""
    try:
        state = read_states(saved.path)[0]
    except CheckpointError:
        return  # an older one may be whole, which is found out when they are verified
    try:
        data.check_state(state["data"])
    except DataError as error:
        raise DataError(
            f"data.train, seed and data.shuffle belong to {saved.path}: {error}; give another output"
        ) from None


# -- device, text and model ------------------------------------------------------------------------


def check_device(config: Config, world: World) -> None:
    if config.graph.impl == "cuda" and not world.device.startswith("cuda"):
        raise ConfigError([f"graph.impl: cuda needs a CUDA device, and this is on {world.device}: use auto or tape"])


def make_tokenizer(config: Config) -> Tokenizer:
    path = config.tokenizer_path
    return ByteTokenizer() if path == "bytes" else load_tokenizer(path)


def read_architecture(config: Config, tokenizer: Tokenizer | None) -> tuple[Architecture, str | None]:
    """Of the model that will be loaded, or made for this tokenizer; and its dtype, as far as a file says it."""
    tiny, given = config.model.tiny, None if config.model.dtype == "auto" else config.model.dtype
    if tiny is not None:
        assert tokenizer is not None, "a tiny model has the vocabulary of its tokenizer"
        # Written with the model: where they are missing, other tools assume some of their own.
        special = (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id), ("pad", tokenizer.pad_id))
        architecture = Architecture(
            "llama",
            vocabulary=tokenizer.vocab_size,
            hidden=tiny.width,
            mlp=tiny.mlp,
            layers=tiny.layers,
            heads=tiny.heads,
            kv_heads=tiny.kv_heads,
            head_dim=tiny.width // tiny.heads,
            max_length=tiny.max_length,
            extras={f"{name}_token_id": id for name, id in special if id is not None},
        )
        return architecture, given or "float32"
    assert config.model.path is not None, "the configuration was checked"
    source = Path(config.model.path)
    with about("model.path"):
        architecture = hf_weights.read_architecture(source)
        return architecture, given or hf_weights.read_dtype(source)


def check_vocabulary(config: Config, tokenizer: Tokenizer, architecture: Architecture) -> None:
    """A model may have more ids than its tokenizer, whose ids it must all have."""
    if tokenizer.vocab_size > architecture.vocabulary:
        raise ValueError(
            f"tokenizer.path: the tokenizer of {config.tokenizer_path} has ids up to {tokenizer.vocab_size - 1}, but "
            f"the model of model.path ({config.model.path}) has a vocabulary of {architecture.vocabulary}"
        )


# -- data ------------------------------------------------------------------------------------------


def make_data(config: Config, tokenizer: Tokenizer, world: World, limits: Limits) -> PromptData:
    d = config.data
    with about("data.train"):
        rows = load_rows(d.train)
    with about("data", "prompts_per_step", "max_prompt_tokens", "too_long"):
        return PromptData(
            rows,
            tokenizer,
            prompts_per_step=d.prompts_per_step,
            seed=config.seed,
            shuffle=d.shuffle,
            max_prompt_tokens=longest_prompt(config, limits),
            too_long=d.too_long,
            chat=d.chat,
            rank=world.rank,
            ranks=world.size,
        )


def make_held_out(config: Config, tokenizer: Tokenizer, limits: Limits) -> PromptData | None:
    """The first prompts of the held-out file; every rank has all of them."""
    if config.data.validation is None:
        return None
    with about("data.validation"):
        rows = load_rows(config.data.validation)[: config.validation.max_prompts]
    with about("data", "max_prompt_tokens", "too_long"):
        return PromptData(
            rows,
            tokenizer,
            prompts_per_step=1,
            seed=0,
            shuffle=False,
            max_prompt_tokens=longest_prompt(config, limits),
            too_long=config.data.too_long,
            chat=config.data.chat,
        )


def load_demonstrations(config: Config, tokenizer: Tokenizer, limits: Limits) -> list[Row]:
    """The rows of the warm start, each short enough."""
    if config.warm_start is None:
        return []
    most = min(limits.max_length, limits.token_buckets[-1])
    with about("warm_start.data"):
        rows = load_rows(config.warm_start.data)
        for row in rows:
            completion = row.columns.get("completion")
            if not isinstance(row.prompt, str) or not isinstance(completion, str):
                raise DataError("a warm start needs `prompt` and `completion`, both text", place=row.place)
            try:
                count = len(tokenizer.encode(row.prompt)) + len(tokenizer.encode(completion, special=False)) + 1
            except ValueError as error:
                raise DataError(str(error), place=row.place) from error
            if count > most:
                raise DataError(f"{count} tokens, and a sequence of this run has {most} at most", place=row.place)
    return rows


# -- rewards, environment, sampling, algorithm ------------------------------------------------------


def make_rewards(config: Config, environment: Environment) -> RewardFunctions:
    given, adds = config.rollout.environment, getattr(environment, "gives_rewards", False)
    if not config.reward.functions and not adds:
        gives = f"{given.name} gives none itself (it has no `gives_rewards = True`)" if given else "there is no other"
        raise ConfigError([f"reward.functions: is empty, and rollout.environment: {gives}"])
    with about("reward"):
        return RewardFunctions(
            [_reward_spec(reward) for reward in config.reward.functions],
            workers=config.reward.workers if config.reward.functions else 0,
            timeout=config.reward.timeout,
            on_failure=config.reward.on_failure,
            adds=adds,
        )


def _reward_spec(reward: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(reward).items() if value not in (None, "")}


def make_environment(config: Config, tokenizer: Tokenizer, samples: int) -> Environment:
    given = config.rollout.environment
    if given is None:
        return SingleTurn(samples)
    with about("rollout.environment.options", *given.options):
        return load_environment(given.name, tokenizer=tokenizer, samples_per_prompt=samples, **given.options)


def make_sampling(config: Config, environment: Environment) -> SamplingParams:
    r = config.rollout
    with about("rollout", "max_tokens", "temperature", "top_k", "top_p", "min_p", "stop"):
        return SamplingParams(
            max_tokens=r.max_tokens,
            temperature=r.temperature,
            top_k=r.top_k,
            top_p=r.top_p,
            min_p=r.min_p,
            stop=(*r.stop, *environment.stop),
        )


def make_algorithm(config: Config) -> Algorithm:
    options = dict(config.algorithm.options)
    if config.algorithm.kl_coef:
        options["kl_coef"] = config.algorithm.kl_coef
    with about("algorithm.options", *options):
        return load_algorithm(config.algorithm.name, options)


def scores_old(config: Config, algorithm: Algorithm) -> bool:
    """Whether the policy is scored before it is trained.

    What rollouts know of their log-probabilities does for one update, unless they were drawn from some of the tokens.
    """
    several = config.algorithm.minibatches * config.algorithm.epochs > 1
    return algorithm.needs_old_logprobs or several or config.rollout.filtered
