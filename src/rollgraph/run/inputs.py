"""The inputs of a run: tokenizer, data, rewards, shapes and algorithm, read and checked before anything is allocated.

Owns which class or function stands behind these keys, and reports mistakes within a second, by the keys that people
wrote. Of the model, only the shape is known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rollgraph.cluster.reward_pool import ClusterPool
from rollgraph.config import Config, ConfigError, ConfigProblem, training_scopes
from rollgraph.distributed.world import World
from rollgraph.inference import SamplingParams
from rollgraph.model import Architecture, hf_weights
from rollgraph.policy import Limits
from rollgraph.rl.algorithms import Algorithm, load_algorithm
from rollgraph.rl.data import PromptData
from rollgraph.rl.demonstrations import COLUMNS, WrittenData
from rollgraph.rl.environment import Environment, SingleTurn, load_environment
from rollgraph.rl.rewards import RewardFunctions
from rollgraph.rl.workers import MakePool, WorkerPool
from rollgraph.run.checkpoints import Saved
from rollgraph.run.config_changes import Change, check_changes
from rollgraph.run.demonstrations import chat_settings, load_training_rows, load_validation_rows, load_warm_start
from rollgraph.run.fingerprints import fingerprint_inputs
from rollgraph.run.given import NOTHING, Given, read_held_out_rows, read_training_rows
from rollgraph.run.hub_cache import model_folder
from rollgraph.run.key_errors import about
from rollgraph.run.layer_checks import check_division, check_groups
from rollgraph.run.resume import check_data
from rollgraph.run.shapes import (
    check_buckets,
    check_cache,
    longest_prompt,
    longest_written,
    make_limits,
    recomputed_layers,
    written_limits,
)
from rollgraph.run.teacher import check_teacher
from rollgraph.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from rollgraph.types import Prompt, Rollout


@dataclass(frozen=True)
class Inputs:
    """Everything but the model and what is made from it."""

    scopes: tuple[str, ...]
    tokenizer: Tokenizer
    algorithm: Algorithm
    environment: Environment
    examiner: Environment  # the same environment, with as many samples per prompt as validation takes
    sampling: SamplingParams
    limits: Limits
    rewards: RewardFunctions
    data: PromptData
    validation: list[Prompt]
    left_out: int  # prompts of the validation file that are too long
    warm_start: WrittenData | None
    teacher: Architecture | None = None
    rewarded: bool = False  # whether anything gives rewards to samples
    written: WrittenData | None = None  # what an algorithm that samples nothing learns from; `data` has its prompts
    examples: tuple[Rollout, ...] = ()  # of the validation file, for such an algorithm
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of what stands behind the paths, by key
    changes: Sequence[Change] = ()  # since the checkpoint that the run goes on from

    @property
    def can_validate(self) -> bool:
        return bool(self.validation or self.examples)


@dataclass(frozen=True)
class _Basis:
    """What every run has."""

    scopes: tuple[str, ...]
    tokenizer: Tokenizer
    architecture: Architecture
    dtype: str | None
    algorithm: Algorithm


def check_inputs(config: Config, world: World, resume_from: Saved | None = None, given: Given = NOTHING) -> Inputs:
    """Read everything that is cheap to read. What cannot be trained on raises here, before a model is loaded.

    What a run keeps must be as it was when the checkpoint `resume_from` was saved, unless it may change.
    """
    check_device(config, world.device)
    check_groups(config, world.size)
    world = world.sharing_data(config.tensor_parallel)
    scopes = training_scopes(config, world.size)
    with about("model.path" if config.tokenizer.path is None else "tokenizer.path"):
        tokenizer = make_tokenizer(config)
    architecture, dtype = read_architecture(config, tokenizer)
    check_vocabulary(config, tokenizer, architecture)
    check_division(config, architecture, world.staged)
    recomputed_layers(config, architecture)  # refuses more than there are
    basis = _Basis(scopes, tokenizer, architecture, dtype, make_algorithm(config))
    read = _read_written if basis.algorithm.source in COLUMNS else _read_prompts
    inputs = read(config, world, basis, given)
    with ExitStack() as undo:
        undo.callback(inputs.rewards.close)
        fingerprints = fingerprint_inputs(config, inputs.data)
        changes: Sequence[Change] = ()
        if resume_from is not None:
            changes = check_changes(resume_from, config, fingerprints)
            check_data(resume_from, config, inputs.data, inputs.warm_start)
        undo.pop_all()
    return replace(inputs, fingerprints=fingerprints, changes=changes)


def _read_prompts(config: Config, world: World, basis: _Basis, given: Given) -> Inputs:
    """The inputs of an algorithm that learns from samples of the policy."""
    tokenizer, architecture = basis.tokenizer, basis.architecture
    environment = make_environment(config, tokenizer, config.rollout.samples_per_prompt)
    examiner = make_environment(config, tokenizer, config.validation.samples)
    sampling = make_sampling(config, environment)
    limits = make_limits(config, architecture, world.device, world.size)
    check_cache(config, limits, architecture.divided(config.tensor_parallel), basis.dtype)
    teacher = check_teacher(config, tokenizer, architecture, limits.max_length)
    most = min(limits.max_length, limits.token_buckets[-1])
    warm_start = load_warm_start(config, tokenizer, world, most, given, environment=environment)
    with ExitStack() as undo:
        rewards = make_rewards(config, environment, basis.algorithm, given)
        undo.callback(rewards.close)
        data = make_data(config, tokenizer, world, limits, environment, given)
        held_out = make_held_out(config, tokenizer, limits, environment, given)
        check_buckets(config, limits, data, held_out)
        with about("reward"):
            for each in filter(None, (data, held_out)):
                rewards.check_columns(each.columns)
        undo.pop_all()
    return Inputs(
        scopes=basis.scopes,
        tokenizer=tokenizer,
        algorithm=basis.algorithm,
        environment=environment,
        examiner=examiner,
        sampling=sampling,
        limits=limits,
        rewards=rewards,
        data=data,
        validation=_all_prompts(held_out) if held_out else [],
        left_out=held_out.dropped if held_out else 0,
        warm_start=warm_start,
        teacher=teacher,
        rewarded=gives_rewards(config, environment),
    )


def _read_written(config: Config, world: World, basis: _Basis, given: Given) -> Inputs:
    """The inputs of an algorithm that learns from what the data holds: nothing is sampled, and nothing rewarded."""
    if config.reward.functions or config.rollout.environment is not None:
        key = "reward.functions" if config.reward.functions else "rollout.environment"
        raise ConfigError([f"{key}: {config.algorithm.name} samples nothing, so there is nothing to reward"])
    tokenizer, source = basis.tokenizer, basis.algorithm.source
    most = longest_written(config, basis.architecture)
    written = load_training_rows(config, tokenizer, world, source, most, given)
    held_out = load_validation_rows(config, tokenizer, source, most, given)
    nothing = SingleTurn(1)
    warm_start = load_warm_start(config, tokenizer, world, most, given, environment=nothing)
    longest = max(data.completions.longest for data in (written, held_out, warm_start) if data is not None)
    long_prompts = 2 * written.completions.written <= written.completions.tokens
    return Inputs(
        scopes=basis.scopes,
        tokenizer=tokenizer,
        algorithm=basis.algorithm,
        environment=nothing,
        examiner=nothing,
        sampling=SamplingParams(),  # a loss has the temperature 1
        limits=written_limits(config, longest, len(COLUMNS[source]), world.device, world.size, long_prompts),
        rewards=RewardFunctions((), adds=True),
        data=written.prompts,
        validation=[],
        left_out=held_out.prompts.dropped if held_out else 0,
        warm_start=warm_start,
        written=written,
        examples=tuple(held_out.all_rollouts()) if held_out else (),
    )


def with_validation(config: Config, inputs: Inputs, given: Given) -> Inputs:
    """The inputs of a run with the validation data of another configuration."""
    if inputs.written is not None:
        most = min(inputs.limits.max_length, inputs.limits.token_buckets[-1])
        written = load_validation_rows(config, inputs.tokenizer, inputs.algorithm.source, most, given)
        assert written is not None, "the configuration names validation data"
        return replace(inputs, examples=tuple(written.all_rollouts()), left_out=written.prompts.dropped)
    held_out = make_held_out(config, inputs.tokenizer, inputs.limits, inputs.environment, given)
    assert held_out is not None, "the configuration names validation data"
    with about("reward"):
        inputs.rewards.check_columns(held_out.columns)
    return replace(inputs, validation=_all_prompts(held_out), left_out=held_out.dropped)


def _all_prompts(data: PromptData) -> list[Prompt]:
    return [prompt for _ in range(len(data)) for prompt in data.next_prompts()]


# -- device, text and model ------------------------------------------------------------------------


def check_device(config: Config, device: str) -> None:
    if config.graph.impl == "cuda" and not device.startswith("cuda"):
        raise ConfigError([f"graph.impl: cuda needs a CUDA device, but this run is on {device}: use auto or tape"])
    if config.optimizer.offload == "host" and not device.startswith("cuda"):
        wrong = f"host needs a CUDA device; this run is on {device}, whose memory is the host's: use auto or none"
        raise ConfigError([ConfigProblem(wrong, "optimizer.offload", rule="offload_from_a_device")])


def make_tokenizer(config: Config) -> Tokenizer:
    path = config.tokenizer_path
    return ByteTokenizer() if path == "bytes" else load_tokenizer(model_folder(path))


def read_architecture(config: Config, tokenizer: Tokenizer | None) -> tuple[Architecture, str | None]:
    """The architecture and, if known, the dtype of the model that will be loaded, or made for this tokenizer."""
    tiny = config.model.tiny
    given = None if config.model.dtype == "auto" else config.model.dtype
    if tiny is not None:
        assert tokenizer is not None, "a tiny model has the vocabulary of its tokenizer"
        # These are exported with the model: without them, other tools assume ids of their own.
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
    with about("model.path"):
        source = model_folder(config.model.path)
        architecture = hf_weights.read_architecture(source)
        return architecture, given or hf_weights.read_dtype(source)


def check_vocabulary(config: Config, tokenizer: Tokenizer, architecture: Architecture) -> None:
    """Refuse a tokenizer with ids that the model does not have; the model may have more."""
    if tokenizer.vocab_size > architecture.vocabulary:
        raise ValueError(
            f"tokenizer.path: the tokenizer of {config.tokenizer_path} has ids up to {tokenizer.vocab_size - 1}, but "
            f"the model of model.path ({config.model.path}) has a vocabulary of {architecture.vocabulary}"
        )


# -- data ------------------------------------------------------------------------------------------


def make_data(
    config: Config,
    tokenizer: Tokenizer,
    world: World,
    limits: Limits,
    environment: Environment,
    given: Given = NOTHING,
) -> PromptData:
    settings = config.data
    rows = read_training_rows(config, given)
    with about("data"):
        return PromptData(
            rows,
            tokenizer,
            prompts_per_step=settings.prompts_per_step,
            seed=config.seed,
            shuffle=settings.shuffle,
            max_prompt_tokens=longest_prompt(config, limits),
            too_long=settings.too_long,
            **chat_settings(config, environment),
            rank=world.rank,
            ranks=world.size,
        )


def make_held_out(
    config: Config, tokenizer: Tokenizer, limits: Limits, environment: Environment, given: Given = NOTHING
) -> PromptData | None:
    """The first prompts of the validation file; every rank has all of them."""
    rows = read_held_out_rows(config, given)
    if rows is None:
        return None
    with about("data"):
        return PromptData(
            rows,
            tokenizer,
            prompts_per_step=1,
            seed=0,
            shuffle=False,
            max_prompt_tokens=longest_prompt(config, limits),
            too_long=config.data.too_long,
            **chat_settings(config, environment),
        )


# -- rewards, environment, sampling, algorithm ------------------------------------------------------


def gives_rewards(config: Config, environment: Environment) -> bool:
    return bool(config.reward.functions) or getattr(environment, "gives_rewards", False)


def make_rewards(
    config: Config, environment: Environment, algorithm: Algorithm, given: Given = NOTHING
) -> RewardFunctions:
    chosen = config.rollout.environment
    adds = getattr(environment, "gives_rewards", False)
    if not gives_rewards(config, environment):
        if not algorithm.needs_rewards:
            return RewardFunctions((), adds=True)  # never called
        reason = "there is no rollout.environment that gives rewards"
        if chosen is not None:
            reason = f"rollout.environment {chosen.name} gives no rewards (it does not set `gives_rewards = True`)"
        raise ConfigError([f"reward.functions: is empty, and {reason}"])
    with about("reward"):
        return RewardFunctions(
            [_reward_spec(reward, given.rewards.get(i)) for i, reward in enumerate(config.reward.functions)],
            workers=config.reward.workers if config.reward.functions else 0,
            timeout=config.reward.timeout,
            on_failure=config.reward.on_failure,
            chat=config.reward.chat,
            adds=adds,
            make_pool=_make_pool(config),
        )


def _make_pool(config: Config) -> MakePool:
    if config.reward.place == "local":
        return WorkerPool
    return partial(ClusterPool, address=config.cluster.address)


def _reward_spec(reward: Any, function: Any) -> dict[str, Any]:
    """What the configuration says of a reward, and the function itself if a program gave it."""
    spec = {**vars(reward), "function": function}
    return {key: value for key, value in spec.items() if value not in (None, "")}


def make_environment(config: Config, tokenizer: Tokenizer, samples: int) -> Environment:
    given = config.rollout.environment
    if given is None:
        return SingleTurn(samples)
    with about("rollout.environment.options"):
        return load_environment(given.name, tokenizer=tokenizer, samples_per_prompt=samples, **given.options)


def make_sampling(config: Config, environment: Environment) -> SamplingParams:
    rollout = config.rollout
    with about("rollout"):
        return SamplingParams(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            stop=(*rollout.stop, *environment.stop),
            stop_ids=getattr(environment, "stop_ids", ()),
        )


def make_algorithm(config: Config) -> Algorithm:
    options = dict(config.algorithm.options)
    if config.algorithm.kl_coef:
        options["kl_coef"] = config.algorithm.kl_coef
    with about("algorithm.options"):
        return load_algorithm(config.algorithm.name, options)


def scores_old(config: Config, algorithm: Algorithm, exact: bool) -> bool:
    """Whether old log-probabilities are computed before training.

    If generation and training agree, they are those of the rollouts. Otherwise those of the rollouts will do for a
    single update, unless sampling was restricted to some of the tokens.
    """
    if algorithm.source in COLUMNS:
        return False  # nobody drew the tokens
    several = config.algorithm.minibatches * config.algorithm.epochs > 1
    return config.rollout.filtered or (not exact and (several or algorithm.needs_old_logprobs))
