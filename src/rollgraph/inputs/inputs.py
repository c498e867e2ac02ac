"""The inputs of a run: tokenizer, data, rewards, shapes and algorithm, read and checked before anything is allocated.

Maps the keys of a configuration to classes and functions, and reports mistakes within a second, by the keys that people
wrote. Only the architecture of the model is known here, not its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollgraph.checkpoint.changes import Change, check_changes, fingerprint_inputs
from rollgraph.checkpoint.keep import SavedCheckpoint
from rollgraph.checkpoint.start import check_data
from rollgraph.config import Config, ConfigError, ConfigProblem, training_scopes
from rollgraph.config.fields import name_key_in_errors
from rollgraph.inference import SamplingParams
from rollgraph.inputs.sampled_data import infers_prompt_limit, load_validation_prompts, read_data
from rollgraph.inputs.shapes import (
    PromptLengths,
    check_cache_size,
    check_rank_count,
    check_teacher,
    check_tensor_parallel,
    max_offline_tokens,
    max_prompt_length,
    offline_limits,
    recomputed_layers,
)
from rollgraph.model import Architecture
from rollgraph.model.weights import hf
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits
from rollgraph.rl.algorithms import Algorithm, load_algorithm
from rollgraph.rl.data.demonstrations import (
    COMPLETION_COLUMNS,
    OfflineData,
    load_offline_training_data,
    load_offline_validation_data,
    load_warm_start,
)
from rollgraph.rl.data.hub import model_folder
from rollgraph.rl.data.prompts import OnProgress, PromptData
from rollgraph.rl.data.python_objects import NO_OBJECTS, PythonObjects
from rollgraph.rl.environment import Environment, SingleTurn, load_environment
from rollgraph.rl.rewards.pool import PoolFactory, WorkerPool
from rollgraph.rl.rewards.ray_pool import ClusterPool
from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from rollgraph.types import Prompt, Rollout


@dataclass(frozen=True)
class Inputs:
    """Everything a run needs except the model and what is built from it."""

    scopes: tuple[str, ...]
    tokenizer: Tokenizer
    algorithm: Algorithm
    environment: Environment
    validation_environment: Environment  # the same environment with `validation.samples` samples per prompt
    sampling: SamplingParams
    limits: Limits
    rewards: RewardFunctions
    data: PromptData
    validation: list[Prompt]
    dropped_validation_prompts: int  # because they are too long
    warm_start: OfflineData | None
    prompt_lengths: PromptLengths | None = None  # None: the configuration or the model limits prompts
    teacher: Architecture | None = None
    has_rewards: bool = False  # from reward functions or the environment
    offline_data: OfflineData | None = None  # for algorithms that sample nothing; `data` holds its prompts
    offline_validation: tuple[Rollout, ...] = ()  # the validation rows of such an algorithm
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of the files behind the paths, by key
    changes: Sequence[Change] = ()  # since the checkpoint that the run resumes from

    @property
    def max_prompt_tokens(self) -> int | None:
        """The limit that was inferred from the data; None if it was not."""
        return None if self.prompt_lengths is None else self.prompt_lengths.training

    @property
    def can_validate(self) -> bool:
        return bool(self.validation or self.offline_validation)


@dataclass(frozen=True)
class _CommonInputs:
    """Inputs that do not depend on where the data comes from."""

    scopes: tuple[str, ...]
    tokenizer: Tokenizer
    architecture: Architecture
    dtype: str | None
    algorithm: Algorithm
    resume_from: SavedCheckpoint | None = None
    on_progress: OnProgress | None = None


def check_inputs(
    config: Config,
    world: World,
    resume_from: SavedCheckpoint | None = None,
    objects: PythonObjects = NO_OBJECTS,
    on_progress: OnProgress | None = None,
) -> Inputs:
    """Read everything that is cheap to read. Raises for inputs that cannot be trained on, before a model is loaded.

    When resuming, settings and data must be as they were when the checkpoint `resume_from` was saved, except for
    changes that are allowed. `on_progress` gets the number of encoded rows and the number of all rows.
    """
    check_device(config, world.device)
    check_rank_count(config, world.size)
    world = world.data_parallel_world(config.tensor_parallel)
    scopes = training_scopes(config, world.size)
    with name_key_in_errors("model.path" if config.tokenizer.path is None else "tokenizer.path"):
        tokenizer = make_tokenizer(config)
    architecture, dtype = resolve_architecture(config, tokenizer)
    check_vocabulary(config, tokenizer, architecture)
    check_tensor_parallel(config, architecture, world.staged)
    recomputed_layers(config, architecture)  # raises if the model has fewer
    common = _CommonInputs(scopes, tokenizer, architecture, dtype, make_algorithm(config), resume_from, on_progress)
    read_inputs = _read_offline_data if common.algorithm.source in COMPLETION_COLUMNS else _read_prompt_data
    inputs = read_inputs(config, world, common, objects)
    with ExitStack() as undo:
        undo.callback(inputs.rewards.close)
        fingerprints = fingerprint_inputs(config, inputs.data)
        changes: Sequence[Change] = ()
        if resume_from is not None:
            changes = check_changes(resume_from, config, fingerprints, world.device)
            check_data(resume_from, config, inputs.data, inputs.warm_start)
        undo.pop_all()
    return replace(inputs, fingerprints=fingerprints, changes=changes)


def _read_prompt_data(config: Config, world: World, common: _CommonInputs, objects: PythonObjects) -> Inputs:
    """The inputs of an online algorithm: it learns from samples of the policy."""
    tokenizer, architecture = common.tokenizer, common.architecture
    environment = make_environment(config, tokenizer, config.rollout.samples_per_prompt)
    validation_environment = make_environment(config, tokenizer, config.validation.samples)
    sampling = make_sampling(config, environment)
    with ExitStack() as undo:
        rewards = make_rewards(config, environment, common.algorithm, objects)
        undo.callback(rewards.close)
        has_rewards = gives_rewards(config, environment)
        data = read_data(
            config,
            world,
            tokenizer,
            architecture,
            environment,
            has_rewards=has_rewards,
            objects=objects,
            resume_from=common.resume_from,
            on_progress=common.on_progress,
        )
        check_cache_size(config, data.limits, architecture.sharded(config.tensor_parallel), common.dtype)
        teacher = check_teacher(config, tokenizer, architecture, data.limits.max_length)
        with name_key_in_errors("reward"):
            for prompts in filter(None, (data.training, data.validation)):
                rewards.check_columns(prompts.columns)
        undo.pop_all()
    return Inputs(
        scopes=common.scopes,
        tokenizer=tokenizer,
        algorithm=common.algorithm,
        environment=environment,
        validation_environment=validation_environment,
        sampling=sampling,
        limits=data.limits,
        rewards=rewards,
        data=data.training,
        validation=_all_prompts(data.validation) if data.validation else [],
        dropped_validation_prompts=data.validation.dropped if data.validation else 0,
        warm_start=data.warm_start,
        prompt_lengths=data.prompt_lengths,
        teacher=teacher,
        has_rewards=has_rewards,
    )


def measure_prompt_lengths(config: Config) -> PromptLengths | None:
    """The prompt lengths that a fresh run would measure.

    None if it would not measure any, or if its data is not on this machine.
    """
    algorithm = make_algorithm(config)
    files = filter(None, (config.data.train, config.data.validation))
    if (
        algorithm.source in COMPLETION_COLUMNS
        or not infers_prompt_limit(config)
        or not all(Path(file).is_file() for file in files)
    ):
        return None
    tokenizer = make_tokenizer(config)
    architecture, _ = resolve_architecture(config, tokenizer)
    environment = make_environment(config, tokenizer, config.rollout.samples_per_prompt)
    has_rewards = gives_rewards(config, environment)
    return read_data(
        config, World(0, 1, "cpu"), tokenizer, architecture, environment, has_rewards=has_rewards
    ).prompt_lengths


def _read_offline_data(config: Config, world: World, common: _CommonInputs, objects: PythonObjects) -> Inputs:
    """The inputs of an offline algorithm: it learns from completions in the data, and samples and rewards nothing."""
    if config.reward.functions or config.rollout.environment is not None:
        key = "reward.functions" if config.reward.functions else "rollout.environment"
        raise ConfigError([f"{key}: {config.algorithm.name} samples nothing, so there is nothing to reward"])
    tokenizer, source = common.tokenizer, common.algorithm.source
    max_tokens = max_offline_tokens(config, common.architecture)
    offline_data = load_offline_training_data(config, tokenizer, world, source, max_tokens, objects)
    validation = load_offline_validation_data(config, tokenizer, source, max_tokens, objects)
    no_sampling = SingleTurn(1)
    warm_start = load_warm_start(config, tokenizer, world, max_tokens, objects, environment=no_sampling)
    longest = max(
        split.completions.longest_sequence for split in (offline_data, validation, warm_start) if split is not None
    )
    half_logits = 2 * offline_data.completions.completion_tokens <= offline_data.completions.total_tokens
    return Inputs(
        scopes=common.scopes,
        tokenizer=tokenizer,
        algorithm=common.algorithm,
        environment=no_sampling,
        validation_environment=no_sampling,
        sampling=SamplingParams(),  # a loss has the temperature 1
        limits=offline_limits(config, longest, len(COMPLETION_COLUMNS[source]), world.device, world.size, half_logits),
        rewards=RewardFunctions((), includes_environment=True),
        data=offline_data.prompts,
        validation=[],
        dropped_validation_prompts=validation.prompts.dropped if validation else 0,
        warm_start=warm_start,
        offline_data=offline_data,
        offline_validation=tuple(validation.all_rollouts()) if validation else (),
    )


def replace_validation_data(config: Config, inputs: Inputs, objects: PythonObjects) -> Inputs:
    """The inputs of a run with the validation data of another configuration."""
    if inputs.offline_data is not None:
        max_tokens = min(inputs.limits.max_length, inputs.limits.token_buckets[-1])
        offline_data = load_offline_validation_data(
            config, inputs.tokenizer, inputs.algorithm.source, max_tokens, objects
        )
        assert offline_data is not None, "the configuration names validation data"
        return replace(
            inputs,
            offline_validation=tuple(offline_data.all_rollouts()),
            dropped_validation_prompts=offline_data.prompts.dropped,
        )
    max_prompt_tokens = max_prompt_length(config, inputs.limits.max_length)
    if inputs.prompt_lengths is not None:
        max_prompt_tokens = inputs.prompt_lengths.longest if inputs.has_rewards else inputs.prompt_lengths.training
    validation = load_validation_prompts(config, inputs.tokenizer, max_prompt_tokens, inputs.environment, objects)
    assert validation is not None, "the configuration names validation data"
    with name_key_in_errors("reward"):
        inputs.rewards.check_columns(validation.columns)
    return replace(inputs, validation=_all_prompts(validation), dropped_validation_prompts=validation.dropped)


def _all_prompts(data: PromptData) -> list[Prompt]:
    return [prompt for _ in range(len(data)) for prompt in data.next_prompts()]


# -- device, text and model ------------------------------------------------------------------------


def check_device(config: Config, device: str) -> None:
    if config.graph.impl == "cuda" and not device.startswith("cuda"):
        raise ConfigError([f"graph.impl: cuda needs a CUDA device, but this run is on {device}: use auto or tape"])
    if config.optimizer.offload == "host" and not device.startswith("cuda"):
        problem = f"host needs a CUDA device; this run is on {device}, whose memory is the host's: use auto or none"
        raise ConfigError([ConfigProblem(problem, "optimizer.offload", rule="offload_from_a_device")])


def make_tokenizer(config: Config) -> Tokenizer:
    path = config.tokenizer_path
    return ByteTokenizer() if path == "bytes" else load_tokenizer(model_folder(path))


def resolve_architecture(config: Config, tokenizer: Tokenizer | None) -> tuple[Architecture, str | None]:
    """The model's architecture and, if known, its dtype: read from its folder, or built for a tiny model."""
    tiny = config.model.tiny
    dtype = None if config.model.dtype == "auto" else config.model.dtype
    if tiny is not None:
        assert tokenizer is not None, "a tiny model has the vocabulary of its tokenizer"
        # Saved with the exported model: without them, other tools would assume ids of their own.
        special_ids = (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id), ("pad", tokenizer.pad_id))
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
            extras={f"{name}_token_id": id for name, id in special_ids if id is not None},
        )
        return architecture, dtype or "float32"
    assert config.model.path is not None, "the configuration was checked"
    with name_key_in_errors("model.path"):
        source = model_folder(config.model.path)
        architecture = hf.read_architecture(source)
        return architecture, dtype or hf.read_dtype(source)


def check_vocabulary(config: Config, tokenizer: Tokenizer, architecture: Architecture) -> None:
    """Refuse a tokenizer with ids beyond the vocabulary of the model. The model may have more."""
    if tokenizer.vocab_size > architecture.vocabulary:
        raise ValueError(
            f"tokenizer.path: the tokenizer of {config.tokenizer_path} has ids up to {tokenizer.vocab_size - 1}, but "
            f"the model of model.path ({config.model.path}) has a vocabulary of {architecture.vocabulary}"
        )


# -- rewards, environment, sampling, algorithm ------------------------------------------------------


def gives_rewards(config: Config, environment: Environment) -> bool:
    return bool(config.reward.functions) or getattr(environment, "gives_rewards", False)


def make_rewards(
    config: Config, environment: Environment, algorithm: Algorithm, objects: PythonObjects = NO_OBJECTS
) -> RewardFunctions:
    settings = config.rollout.environment
    includes_environment = getattr(environment, "gives_rewards", False)
    if not gives_rewards(config, environment):
        if not algorithm.needs_rewards:
            return RewardFunctions((), includes_environment=True)  # never called
        reason = "there is no rollout.environment that gives rewards"
        if settings is not None:
            reason = f"rollout.environment {settings.name} gives no rewards (it does not set `gives_rewards = True`)"
        raise ConfigError([f"reward.functions: is empty, and {reason}"])
    with name_key_in_errors("reward"):
        return RewardFunctions(
            [_reward_spec(reward, objects.rewards.get(i)) for i, reward in enumerate(config.reward.functions)],
            workers=config.reward.workers if config.reward.functions else 0,
            timeout=config.reward.timeout,
            on_failure=config.reward.on_failure,
            chat=config.reward.chat,
            includes_environment=includes_environment,
            make_pool=_make_pool(config),
        )


def _make_pool(config: Config) -> PoolFactory:
    if config.reward.place == "local":
        return WorkerPool
    return partial(ClusterPool, address=config.cluster.address)


def _reward_spec(reward: Any, function: Any) -> dict[str, Any]:
    """The settings of a reward function, and the function itself if it is a Python object."""
    spec = {**vars(reward), "function": function}
    return {key: value for key, value in spec.items() if value not in (None, "")}


def make_environment(config: Config, tokenizer: Tokenizer, samples: int) -> Environment:
    settings = config.rollout.environment
    if settings is None:
        return SingleTurn(samples)
    with name_key_in_errors("rollout.environment.options"):
        return load_environment(settings.name, tokenizer=tokenizer, samples_per_prompt=samples, **settings.options)


def make_sampling(config: Config, environment: Environment) -> SamplingParams:
    rollout = config.rollout
    with name_key_in_errors("rollout"):
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
    with name_key_in_errors("algorithm.options"):
        return load_algorithm(config.algorithm.name, options)


def recomputes_old_logprobs(config: Config, algorithm: Algorithm, is_exact: bool) -> bool:
    """Whether training recomputes the old log-probabilities first.

    With top-k, top-p or min-p it always does. Otherwise the log-probabilities of the rollouts serve if generation and
    training are exact, and also for a single update, unless the algorithm asks for old log-probabilities.
    """
    if algorithm.source in COMPLETION_COLUMNS:
        return False  # no policy sampled these tokens
    several_updates = config.algorithm.minibatches * config.algorithm.epochs > 1
    return config.rollout.filtered or (not is_exact and (several_updates or algorithm.needs_old_logprobs))
