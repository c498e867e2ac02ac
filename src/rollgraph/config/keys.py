"""The configuration of a run: every key with its type, limits, default and one-line description.

Owns what can be configured and when that is wrong; whoever uses a value does not check it again. Paths are relative
to the working directory. How a file is read is `reader.py`; importing this module is instant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rollgraph.config.limits import LARGEST
from rollgraph.config.problems import ConfigError, ConfigProblem
from rollgraph.config.reader import load_tree, read_tree, to_dict, to_yaml
from rollgraph.config.schema import COMMAS, PATH, Key, Limit, keys_of, schema_of, spell

__all__ = [
    "Config",
    "ConfigError",
    "ConfigProblem",
    "Key",
    "broken_rules",
    "check_scopes",
    "json_schema",
    "list_keys",
    "load_config",
    "parse_config",
    "spell",
    "to_dict",
    "to_yaml",
]


COLDEST = 0.01  # of temperatures: logits are divided by it
Count = Annotated[int, Limit("minimum", 1)]
Natural = Annotated[int, Limit("minimum", 0)]
Layers = Annotated[Count, Limit("maximum", LARGEST["layers"])]
Width = Annotated[Count, Limit("maximum", LARGEST["hidden"])]
Heads = Annotated[Count, Limit("maximum", LARGEST["heads"])]
WidthOfMlp = Annotated[Count, Limit("maximum", LARGEST["mlp"])]
Positive = Annotated[float, Limit("exclusiveMinimum", 0)]
Warm = Annotated[float, Limit("minimum", COLDEST)]
NotNegative = Annotated[float, Limit("minimum", 0)]
Share = Annotated[float, Limit("minimum", 0), Limit("maximum", 1)]
ShareAboveZero = Annotated[float, Limit("exclusiveMinimum", 0), Limit("maximum", 1)]
Beta = Annotated[float, Limit("minimum", 0), Limit("exclusiveMaximum", 1)]
Scope = Literal["step", "layer", "attn", "mlp"]
SinkName = Literal["jsonl", "tensorboard", "wandb", "mlflow"]
Options = Mapping[str, Any]
File = Annotated[str, PATH]


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    layers: Annotated[Layers, "decoder layers"] = 2
    width: Annotated[Width, "of the hidden state"] = 64
    heads: Annotated[Heads, "attention heads"] = 4
    kv_heads: Annotated[Heads, "key/value heads, a divisor of heads"] = 2
    mlp: Annotated[WidthOfMlp, "width inside the MLP"] = 128
    max_length: Annotated[Count, "of a prompt with its completion, in tokens"] = 256


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: Annotated[File | None, "folder of a Llama, Mistral, Qwen2 or Qwen3 model; this or `tiny` is required"] = None
    tiny: Annotated[TinyModelConfig | None, "a small model with random weights, made on the spot"] = None
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], "of the weights; auto is as stored"] = "auto"
    checkpointing: Annotated[bool, "recompute activations in backward: less memory, more time"] = False


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    path: Annotated[File | None, "folder, or `bytes`; null is model.path, or `bytes` for a tiny model"] = None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: Annotated[File, "a .jsonl or .parquet file with a column `prompt`; rewards see all other columns"]
    validation: Annotated[File | None, "like train; null is no validation"] = None
    prompts_per_step: Annotated[Count, "prompts of a step, over all ranks"] = 32
    max_prompt_tokens: Annotated[Count | None, "longest prompt; null is what the model takes"] = None
    too_long: Annotated[Literal["error", "drop"], "what happens to longer prompts; dropped ones are counted"] = "error"
    chat: Annotated[bool, "put each prompt into the model's chat template"] = False
    shuffle: Annotated[bool, "a new order in every epoch, by the seed"] = True


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    name: Annotated[File, "a built-in environment, package.module:name or path/file.py:name"]
    options: Annotated[Options, "passed to it by name"] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    samples_per_prompt: Annotated[Count, "completions of each prompt: the size of a group"] = 16
    max_tokens: Annotated[Count, "longest completion"] = 512
    temperature: Annotated[Warm, "of sampling; lower ones explore nothing and overflow, 0 (greedy) included"] = 1.0
    top_k: Annotated[Natural, "keep the k most likely tokens; 0 is all"] = 0
    top_p: Annotated[ShareAboveZero, "keep the most likely tokens up to this share"] = 1.0
    min_p: Annotated[Share, "keep tokens with this share of the likeliest's probability"] = 0.0
    stop: Annotated[tuple[str, ...], "strings that end a completion"] = ()
    rows: Annotated[Count, "sequences that decode at a time"] = 256
    environment: Annotated[EnvironmentConfig | None, "several turns; null is one completion for each prompt"] = None

    @property
    def filtered(self) -> bool:
        """Drawn from some of the tokens: their log-probabilities are not the policy's."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    name: Annotated[File, "a built-in reward, package.module:function or path/file.py:function"]
    weight: Annotated[float, "its share of the sum"] = 1.0
    options: Annotated[Options, "passed to it by name"] = field(default_factory=dict)
    label: Annotated[str, "its name in metrics; empty is the function's own"] = ""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    functions: Annotated[tuple[RewardFunctionConfig, ...], "the reward is their weighted sum"] = ()
    workers: Annotated[Natural, "processes that compute rewards; 0 is in this process"] = 0
    timeout: Annotated[Positive, "seconds for one call of a function, with all its completions; needs workers"] = 10.0
    on_failure: Annotated[float, "reward where a function raises or runs out of time; such cases are counted"] = 0.0


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    name: Annotated[File, "a built-in algorithm, package.module:name or path/file.py:name"] = "grpo"
    options: Annotated[Options, "passed to it by name"] = field(default_factory=dict)
    minibatches: Annotated[Count, "optimizer steps for each pass over the rollouts"] = 1
    epochs: Annotated[Count, "passes over the rollouts of a step"] = 1
    kl_coef: Annotated[NotNegative, "weight of the KL divergence from the reference; 0 needs no reference"] = 0.0


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: Annotated[NotNegative, "learning rate after warm-up"] = 1e-6
    betas: Annotated[tuple[Beta, Beta], "decay of the first and second moment"] = (0.9, 0.999)
    eps: Annotated[Positive, "added to the denominator"] = 1e-8
    weight_decay: Annotated[NotNegative, "decoupled, as in AdamW"] = 0.0
    clip_norm: Annotated[Positive | None, "largest norm of the gradient; null does not clip"] = 1.0
    schedule: Annotated[Literal["constant", "linear", "cosine"], "of the learning rate; the others end at 0"] = (
        "constant"
    )
    warmup_steps: Annotated[Natural, "updates, of which a step can have several, in which the rate rises from 0"] = 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    token_buckets: Annotated[
        tuple[Count, ...] | None,
        "sizes of microbatches that get a graph (where a graph is less than a step, the largest); null is chosen",
    ] = None
    microbatch_tokens: Annotated[Count, "largest microbatch, where token_buckets is null"] = 16384

    @property
    def largest_bucket(self) -> int:
        return max(self.token_buckets) if self.token_buckets else self.microbatch_tokens


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    data: Annotated[File, "JSON lines with `prompt` and `completion`"]
    steps: Annotated[Count, "of supervised training, at most; its loss, too, is at rollout.temperature"] = 100
    lr: Annotated[Positive, "learning rate, constant"] = 1e-5
    batch_size: Annotated[Count, "sequences of a step"] = 32
    stop_at: Annotated[float | None, "mean reward of samples at which to stop; null takes all steps"] = None
    check_every: Annotated[Count, "steps between looks at the reward, where stop_at is given"] = 10


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    impl: Annotated[Literal["auto", "none", "cuda", "tape"], "auto is cuda on a GPU, else tape; none is eager"] = "auto"
    scope: Annotated[
        Annotated[tuple[Scope, ...], COMMAS] | None,
        "what one graph of training holds; null is step on one rank and layer on several",
    ] = None
    warmup: Annotated[Count, "runs before a capture"] = 3
    on_mismatch: Annotated[Literal["raise", "eager", "recapture"], "what a call does that does not fit its graph"] = (
        "raise"
    )


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    every: Annotated[Count, "steps from one validation to the next"] = 10
    samples: Annotated[Count, "completions of each prompt, the k of pass@k"] = 1
    temperature: Annotated[NotNegative, "of sampling; 0 takes the most likely token"] = 0.0
    max_prompts: Annotated[Count | None, "the first so many prompts; null is all"] = 256


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Annotated[Count, "steps from one checkpoint to the next; the last step always has one"] = 50
    keep_last: Annotated[Count, "latest checkpoints kept, of those that `every` asks for"] = 2
    keep_best: Annotated[Natural, "best checkpoints kept, by validation reward; a new best is saved at once"] = 1
    asynchronous: Annotated[bool, "write while training goes on"] = True
    export_at_end: Annotated[bool, "write a model folder for other tools after the last step"] = True


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    timeout: Annotated[
        Positive, "seconds that ranks wait for one another, wherever they do; then the run ends and names who is lost"
    ] = 600.0


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    cache_gib: Annotated[
        Positive | None, "of the key/value cache; null: what all rows can use, at most half of the free memory"
    ] = None
    reference: Annotated[Literal["auto", "device", "host"], "where the reference weights wait"] = "auto"
    verify_weights: Annotated[bool, "compare checksums of the policy before and after other weights are used"] = False
    logits: Annotated[
        Literal["auto", "whole", "chunks"],
        "of a microbatch: whole, from forward to backward, or chunks of 1 GiB, computed twice; "
        "auto is whole in up to an eighth of the free memory of a GPU",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    every: Annotated[Count, "steps from one line of metrics to the next"] = 1
    samples_every: Annotated[Natural, "steps from one set of sample completions to the next; 0 writes none"] = 10
    sinks: Annotated[
        tuple[SinkName, ...] | None, "where metrics go; null is jsonl, and tensorboard if it is installed"
    ] = None
    wandb: Annotated[Options, "arguments of wandb.init"] = field(default_factory=dict)
    mlflow: Annotated[Options, "tracking_uri, experiment and run_name"] = field(default_factory=dict)
    progress: Annotated[Literal["auto", "live", "plain", "none"], "auto is live in a terminal, else plain"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: Annotated[Natural, "of everything random"] = 0
    steps: Annotated[Count, "rollouts and updates"] = 100
    output: Annotated[File, "folder of the run: checkpoints, metrics, samples"] = "runs/default"
    resume: Annotated[Literal["auto", "never", "must"], "from the output folder; auto is if there is something"] = (
        "auto"
    )
    cpu_threads: Annotated[
        Count | None, "of PyTorch on a CPU; null leaves it to PyTorch, 1 is best for tiny models"
    ] = None
    model: Annotated[ModelConfig, "what is trained"] = field(default_factory=ModelConfig)
    tokenizer: Annotated[TokenizerConfig, "text to tokens"] = field(default_factory=TokenizerConfig)
    data: Annotated[DataConfig, "prompts"]
    rollout: Annotated[RolloutConfig, "how completions are sampled"] = field(default_factory=RolloutConfig)
    reward: Annotated[RewardConfig, "what a completion is worth"] = field(default_factory=RewardConfig)
    algorithm: Annotated[AlgorithmConfig, "how rewards become a loss"] = field(default_factory=AlgorithmConfig)
    optimizer: Annotated[OptimizerConfig, "AdamW"] = field(default_factory=OptimizerConfig)
    train: Annotated[TrainConfig, "microbatches"] = field(default_factory=TrainConfig)
    warm_start: Annotated[WarmStartConfig | None, "supervised training before the first step; null is none"] = None
    graph: Annotated[GraphConfig, "capture and replay"] = field(default_factory=GraphConfig)
    validation: Annotated[ValidationConfig, "on data.validation"] = field(default_factory=ValidationConfig)
    checkpoint: Annotated[CheckpointConfig, "durable state"] = field(default_factory=CheckpointConfig)
    ranks: Annotated[RanksConfig, "several processes"] = field(default_factory=RanksConfig)
    memory: Annotated[MemoryConfig, "of the device"] = field(default_factory=MemoryConfig)
    log: Annotated[LogConfig, "what people see"] = field(default_factory=LogConfig)

    @property
    def tokenizer_path(self) -> str:
        """A folder, or `bytes`."""
        return self.tokenizer.path or self.model.path or "bytes"


# Rules across keys

LEGAL_SCOPES: dict[str, tuple[Scope, ...]] = {  # a graph must end where ranks communicate: between layers or inside
    "one rank": ("step", "layer", "attn", "mlp"),
    "several ranks": ("layer", "attn", "mlp"),
}
GROUPED = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")  # a group of one would have no advantage


def check_scopes(config: Config, ranks: int) -> tuple[Scope, ...]:
    """The scopes to capture with so many ranks, none where `impl: none`; an illegal one raises."""
    legal = LEGAL_SCOPES["one rank" if ranks == 1 else "several ranks"]
    scopes = config.graph.scope or legal[:1]
    if config.model.checkpointing and "step" not in scopes:
        wrong = f"needs a graph of the whole step (one rank, graph.scope: step), not of {', '.join(scopes)}"
        raise ConfigError([ConfigProblem(wrong, "model.checkpointing")])
    if config.graph.impl == "none":
        return ()
    if illegal := [scope for scope in scopes if scope not in legal]:
        found = ", ".join(illegal)
        wrong = f"{found} is not possible with {ranks} ranks; expected {', '.join(legal)}"
        raise ConfigError([ConfigProblem(wrong, "graph.scope")])
    return scopes


def broken_rules(c: Config) -> list[tuple[str, str, str]]:
    """(rule, key, what is wrong) for each rule across keys that does not hold."""
    tiny, scope, sinks, buckets = c.model.tiny, c.graph.scope or (), c.log.sinks or (), c.train.token_buckets
    alone = c.rollout.samples_per_prompt == 1
    rollouts = c.data.prompts_per_step * c.rollout.samples_per_prompt
    updates = c.steps * c.algorithm.minibatches * c.algorithm.epochs
    longest = (c.data.max_prompt_tokens or 1) + c.rollout.max_tokens
    kl_coef, kl_option = c.algorithm.kl_coef, c.algorithm.options.get("kl_coef")
    one_kl = not kl_coef or kl_option in (None, kl_coef)
    kl_in_reward = c.algorithm.options.get("kl_in") == "reward" and (kl_coef or kl_option)
    heads_fit = tiny is None or (tiny.heads % tiny.kv_heads == 0 and tiny.width % (2 * tiny.heads) == 0)
    # fmt: off
    rules = (
        ("one_model", "model", (c.model.path is None) != (tiny is None), "give either path or tiny"),
        ("heads_fit", "model.tiny", heads_fit, "kv_heads must divide heads, and 2 x heads must divide width"),
        ("length_fits", "rollout.max_tokens", tiny is None or longest <= tiny.max_length,
         f"a prompt with its completion takes {longest} tokens or more, over model.tiny.max_length"),
        ("microbatch_fits", f"train.{'token_buckets' if buckets else 'microbatch_tokens'}",
         longest <= c.train.largest_bucket,
         f"a prompt with its completion takes {longest} tokens or more (data.max_prompt_tokens + rollout.max_tokens), "
         "over the largest microbatch"),
        ("buckets_rise", "train.token_buckets", buckets is None or (buckets and list(buckets) == sorted(set(buckets))),
         "sizes must be given in rising order"),
        ("something_rewards", "reward.functions", c.reward.functions or c.rollout.environment,
         "give a reward function or an environment"),
        ("group_compares", "rollout.samples_per_prompt", not (alone and c.algorithm.name in GROUPED),
         f"{c.algorithm.name} compares the samples of a prompt, so it needs 2 or more"),
        ("minibatches_filled", "algorithm.minibatches", c.algorithm.minibatches <= rollouts,
         f"a step has only {rollouts} rollouts"),
        ("one_kl_coef", "algorithm.kl_coef", one_kl, f"is {kl_coef:g}, and algorithm.options.kl_coef is {kl_option}"),
        ("one_kl_coef", "algorithm.options.kl_coef", one_kl, f"is {kl_option}, and algorithm.kl_coef is {kl_coef:g}"),
        ("kl_of_the_policy", "algorithm.options.kl_in", not (kl_in_reward and c.rollout.filtered),
         "with rollout.top_k, top_p or min_p, rollouts do not know the policy's log-probabilities: put KL in the loss"),
        ("warmup_ends", "optimizer.warmup_steps", c.optimizer.warmup_steps <= updates,
         f"there are {updates} updates (steps x algorithm.minibatches x algorithm.epochs)"),
        ("samples_differ", "validation.samples", c.validation.samples == 1 or c.validation.temperature > 0,
         "with validation.temperature 0 all samples are the same"),
        ("greedy_or_warm", "validation.temperature", not 0 < c.validation.temperature < COLDEST,
         f"0 takes the most likely token, anything else is {COLDEST} or more"),
        ("scope_not_empty", "graph.scope", scope or c.graph.scope is None, "name a scope, or null"),
        ("scope_without_graphs", "graph.scope", not (scope and c.graph.impl == "none"),
         "a scope makes no sense with graph.impl: none; set the scope to null"),
        ("scopes_apart", "graph.scope", len(scope) < 2 or sorted(scope) == ["attn", "mlp"],
         "one scope holds another: give step, layer, attn, mlp or attn,mlp"),
        ("sinks_differ", "log.sinks", len(set(sinks)) == len(sinks), "a sink is named twice"),
        ("wandb_used", "log.wandb", not c.log.wandb or "wandb" in sinks, "wandb is not in log.sinks"),
        ("mlflow_used", "log.mlflow", not c.log.mlflow or "mlflow" in sinks, "mlflow is not in log.sinks"),
    )
    # fmt: on
    return [(rule, key, wrong) for rule, key, holds, wrong in rules if not holds]


# Reading and describing

Rules = Callable[[Config], list[tuple[str, str, str]]]


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *more: Rules) -> Config:
    """Read a YAML file and those it names under `defaults`; `overrides` are like `rollout.temperature=0.7`, and `more`
    are rules like `broken_rules`, whose problems are given their places."""

    def rules(config: Config) -> list[tuple[str, str, str]]:
        return [problem for each in (broken_rules, *more) for problem in each(config)]

    return read_tree(Config, load_tree(Path(path)), overrides, rules)


def parse_config(text: str, overrides: Sequence[str] = (), name: str = "<text>") -> Config:
    """Like `load_config`, for the text of a file; its `defaults` are relative to the working directory."""
    return read_tree(Config, load_tree(Path(name), text), overrides, broken_rules)


def list_keys() -> Iterator[Key]:
    """Every key in the order of the sections, sections and their keys included."""
    return keys_of(Config)


def json_schema() -> dict[str, Any]:
    """For editors: completion and checks while typing."""
    schema = schema_of(Config)
    texts = {"type": "array", "items": {"type": "string"}}
    schema["properties"]["defaults"] = {
        "description": "files that this one builds on, relative to it; later ones win",
        "anyOf": [{"type": "string"}, texts],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rollgraph", **schema}
