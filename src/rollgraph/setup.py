"""From a configuration to the parts of a run: what the loop in `train.py` is given.

Owns which class or function stands behind each key. Nothing here runs a step.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollgraph.checkpoint import Checkpoints
from rollgraph.config import Config, check_scopes
from rollgraph.inference import SamplingParams
from rollgraph.model import Architecture, Decoder, load_model
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.rl.algorithms import Algorithm, load_algorithm
from rollgraph.rl.data import PromptData, load_rows
from rollgraph.rl.environment import Environment, SingleTurn, load_environment
from rollgraph.rl.rewards import RewardFunctions
from rollgraph.sharding import constant, cosine, linear, warm_up
from rollgraph.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from rollgraph.types import Prompt, Rollout
from rollgraph.world import World

SUPERVISED = "sft"  # the loss of the warm start
POLICY_LOSS = "policy"


@dataclass
class Run:
    """The parts of a run, and what it remembers from step to step."""

    config: Config
    world: World
    tokenizer: Tokenizer
    policy: PolicyWorker
    algorithm: Algorithm
    environment: Environment
    examiner: Environment  # the same, with as many samples as a validation takes
    rewards: RewardFunctions
    data: PromptData
    validation: list[Prompt]
    checkpoints: Checkpoints
    surplus: list[list[Rollout]] = field(default_factory=list)  # groups that were sampled and not used yet
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of this step, by phase

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.world.device.startswith("cuda"):
                torch.cuda.synchronize()
            self.seconds[phase] += time.perf_counter() - start

    def on_any_rank(self, flag: bool) -> bool:
        """Whether it is set on one of them: all ranks have to do the same."""
        if self.world.size == 1:
            return flag
        return bool(self.policy.sharded.any_rank(torch.tensor(float(flag), device=self.world.device)))

    def close(self) -> None:
        with contextlib.ExitStack() as all_of_them:  # each, even if another one fails
            all_of_them.callback(self.policy.close)
            all_of_them.callback(self.rewards.close)
            all_of_them.callback(self.checkpoints.close)


def make_run(config: Config, world: World, on_capture: Callable[[str, int, int], None] | None = None) -> Run:
    """Load, allocate and capture everything; nothing has been trained."""
    torch.manual_seed(config.seed)
    scopes = check_scopes(config, world.size)
    tokenizer = make_tokenizer(config)
    model = make_model(config, tokenizer, world)
    algorithm = load_algorithm(config.algorithm.name, _algorithm_options(config))
    rewards = RewardFunctions(
        [_reward_spec(reward) for reward in config.reward.functions],
        workers=config.reward.workers,
        timeout=config.reward.timeout,
        on_failure=config.reward.on_failure,
    )
    limits = make_limits(config, model, world.size)
    data = make_data(config, tokenizer, world, limits)
    rewards.check_columns(data.columns)
    held_out = make_validation(config, tokenizer, limits, rewards)
    environment = make_environment(config, tokenizer, config.rollout.samples_per_prompt)
    policy = PolicyWorker(
        model,
        tokenizer,
        world,
        limits,
        sampling=make_sampling(config, environment),
        optimizer=optimizer_settings(config),
        clip_norm=config.optimizer.clip_norm,
        backend="eager" if config.graph.impl == "none" else config.graph.impl,
        scopes=scopes or (("step",) if world.size == 1 else ("layer",)),
        on_mismatch=config.graph.on_mismatch,
        warmup=config.graph.warmup,
        reduction="ordered" if world.device == "cpu" else "library",
    )
    if algorithm.needs_reference:
        policy.weights.save("reference", _reference_place(config, policy))
    losses = {POLICY_LOSS: (algorithm.loss, algorithm.needs_entropy)}
    if config.warm_start is not None:
        losses[SUPERVISED] = (load_algorithm(SUPERVISED).loss, False)
    policy.capture_all(losses, on_capture)
    checkpoints = Checkpoints(
        Path(config.output) / "checkpoints",
        policy.sharded,
        policy.optimizer,
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        asynchronous=config.checkpoint.asynchronous,
    )
    examiner = make_environment(config, tokenizer, config.validation.samples)
    return Run(config, world, tokenizer, policy, algorithm, environment, examiner, rewards, data, held_out, checkpoints)


def make_tokenizer(config: Config) -> Tokenizer:
    path = config.tokenizer_path
    return ByteTokenizer() if path == "bytes" else load_tokenizer(path)


def make_model(config: Config, tokenizer: Tokenizer, world: World) -> Decoder:
    dtype = None if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    if config.model.path is not None:
        return load_model(config.model.path, dtype=dtype, device=world.device, checkpointing=config.model.checkpointing)
    tiny = config.model.tiny
    assert tiny is not None, "the configuration was checked"
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
    )
    model = Decoder(architecture, checkpointing=config.model.checkpointing)
    model.reset_parameters(std=0.4 * tiny.width**-0.5)  # narrow layers learn sooner from larger weights
    return model.to(world.device, dtype or torch.float32)


def make_limits(config: Config, model: Decoder, ranks: int = 1) -> Limits:
    longest = model.architecture.max_length
    if config.data.max_prompt_tokens is not None:
        longest = min(longest, config.data.max_prompt_tokens + config.rollout.max_tokens)
    largest = max(config.train.largest_bucket, longest)
    buckets = config.train.token_buckets or tuple(
        sorted({max(longest, largest // 4), max(longest, largest // 2), largest})
    )
    samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
    on_cpu = model.embed.weight.device.type == "cpu"
    return Limits(
        max_length=longest,
        rows=max(1, min(config.rollout.rows, -(-samples // ranks))),
        token_buckets=tuple(buckets),
        tokens_per_sequence=4 if on_cpu else 32,  # on a GPU, attention looks at every place a sequence could have
        cache_bytes=int(config.memory.cache_gib * 2**30) if config.memory.cache_gib else None,
    )


def make_sampling(config: Config, environment: Environment) -> SamplingParams:
    r = config.rollout
    return SamplingParams(
        max_tokens=r.max_tokens,
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        stop=(*r.stop, *environment.stop),
    )


def make_environment(config: Config, tokenizer: Tokenizer, samples: int) -> Environment:
    given = config.rollout.environment
    if given is None:
        return SingleTurn(samples)
    return load_environment(given.name, tokenizer=tokenizer, samples_per_prompt=samples, **given.options)


def make_data(config: Config, tokenizer: Tokenizer, world: World, limits: Limits) -> PromptData:
    d = config.data
    return PromptData(
        load_rows(d.train),
        tokenizer,
        prompts_per_step=d.prompts_per_step,
        seed=config.seed,
        shuffle=d.shuffle,
        max_prompt_tokens=_longest_prompt(config, limits),
        too_long=d.too_long,
        chat=d.chat,
        rank=world.rank,
        ranks=world.size,
    )


def make_validation(config: Config, tokenizer: Tokenizer, limits: Limits, rewards: RewardFunctions) -> list[Prompt]:
    """The first prompts of the held-out file; every rank has all of them."""
    if config.data.validation is None:
        return []
    held_out = PromptData(
        load_rows(config.data.validation)[: config.validation.max_prompts],
        tokenizer,
        prompts_per_step=1,
        seed=0,
        shuffle=False,
        max_prompt_tokens=_longest_prompt(config, limits),
        too_long=config.data.too_long,
        chat=config.data.chat,
    )
    rewards.check_columns(held_out.columns)
    return [prompt for _ in range(len(held_out)) for prompt in held_out.next_prompts()]


def _longest_prompt(config: Config, limits: Limits) -> int:
    """As configured, or what leaves room for one token."""
    return config.data.max_prompt_tokens or limits.max_length - 1


def optimizer_settings(config: Config) -> dict[str, Any]:
    o = config.optimizer
    total = max(1, config.steps * config.algorithm.minibatches * config.algorithm.epochs - o.warmup_steps)
    schedule = {"constant": constant(), "linear": linear(total), "cosine": cosine(total)}[o.schedule]
    return {
        "lr": o.lr,
        "betas": o.betas,
        "eps": o.eps,
        "weight_decay": o.weight_decay,
        "schedule": warm_up(o.warmup_steps, schedule) if o.warmup_steps else schedule,
    }


def _algorithm_options(config: Config) -> Mapping[str, Any]:
    options = dict(config.algorithm.options)
    if config.algorithm.kl_coef:
        options["kl_coef"] = config.algorithm.kl_coef
    return options


def _reward_spec(reward: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(reward).items() if value not in (None, "")}


def _reference_place(config: Config, policy: PolicyWorker) -> Any:
    """On the device if there is room for it beside everything else, else in host memory."""
    if config.memory.reference != "auto" or not policy.world.device.startswith("cuda"):
        return "device" if config.memory.reference == "auto" else config.memory.reference
    free = torch.cuda.mem_get_info(policy.world.device)[0]
    return "device" if policy.sharded.plan().parameters < free // 8 else "host"
