"""The configuration of a run: every key with its type, limits, default and one-line description, and a strict loader.

Owns what can be configured and when that is wrong; whoever uses a value does not check it again. Paths are relative
to the working directory. PyYAML is imported when a file is read, so importing this module is instant.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

SYMBOLS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {  # by their names in a JSON schema
    "minimum": ("≥", operator.ge),
    "exclusiveMinimum": (">", operator.gt),
    "maximum": ("≤", operator.le),
    "exclusiveMaximum": ("<", operator.lt),
}


class Limit(NamedTuple):
    word: str
    bound: float

    def __str__(self) -> str:
        return f"{SYMBOLS[self.word][0]} {self.bound:g}"

    def holds(self, value: Any) -> bool:
        return SYMBOLS[self.word][1](value, self.bound)


COLDEST = 0.01  # of temperatures: logits are divided by it
COMMAS = "may be written as text with commas"
Count = Annotated[int, Limit("minimum", 1)]
Natural = Annotated[int, Limit("minimum", 0)]
Positive = Annotated[float, Limit("exclusiveMinimum", 0)]
Warm = Annotated[float, Limit("minimum", COLDEST)]
NotNegative = Annotated[float, Limit("minimum", 0)]
Share = Annotated[float, Limit("minimum", 0), Limit("maximum", 1)]
ShareAboveZero = Annotated[float, Limit("exclusiveMinimum", 0), Limit("maximum", 1)]
Beta = Annotated[float, Limit("minimum", 0), Limit("exclusiveMaximum", 1)]
Scope = Literal["step", "layer", "attn", "mlp"]
SinkName = Literal["jsonl", "tensorboard", "wandb", "mlflow"]
Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tiny:
    layers: Annotated[Count, "decoder layers"] = 2
    width: Annotated[Count, "of the hidden state"] = 64
    heads: Annotated[Count, "attention heads"] = 4
    kv_heads: Annotated[Count, "key/value heads, a divisor of heads"] = 2
    mlp: Annotated[Count, "width inside the MLP"] = 128
    max_length: Annotated[Count, "of a prompt with its completion, in tokens"] = 256


@dataclass(frozen=True, kw_only=True)
class Model:
    path: Annotated[str | None, "folder of a Llama, Mistral, Qwen2 or Qwen3 model; this or `tiny` is required"] = None
    tiny: Annotated[Tiny | None, "a small model with random weights, made on the spot"] = None
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], "of the weights; auto is as stored"] = "auto"
    checkpointing: Annotated[bool, "recompute activations in backward: less memory, more time"] = False


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    path: Annotated[str | None, "folder, or `bytes`; null is model.path, or `bytes` for a tiny model"] = None


@dataclass(frozen=True, kw_only=True)
class Data:
    train: Annotated[str, "a .jsonl or .parquet file with a column `prompt`; rewards see all other columns"]
    validation: Annotated[str | None, "like train; null is no validation"] = None
    prompts_per_step: Annotated[Count, "prompts of a step, over all ranks"] = 32
    max_prompt_tokens: Annotated[Count | None, "longest prompt; null is what the model takes"] = None
    too_long: Annotated[Literal["error", "drop"], "what happens to longer prompts; dropped ones are counted"] = "error"
    chat: Annotated[bool, "put each prompt into the model's chat template"] = False
    shuffle: Annotated[bool, "a new order in every epoch, by the seed"] = True


@dataclass(frozen=True, kw_only=True)
class Environment:
    name: Annotated[str, "a built-in environment, package.module:name or path/file.py:name"]
    options: Annotated[Options, "passed to it by name"] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    samples_per_prompt: Annotated[Count, "completions of each prompt: the size of a group"] = 16
    max_tokens: Annotated[Count, "longest completion"] = 512
    temperature: Annotated[Warm, "of sampling; lower ones explore nothing and overflow, 0 (greedy) included"] = 1.0
    top_k: Annotated[Natural, "keep the k most likely tokens; 0 is all"] = 0
    top_p: Annotated[ShareAboveZero, "keep the most likely tokens up to this share"] = 1.0
    min_p: Annotated[Share, "keep tokens with this share of the likeliest's probability"] = 0.0
    stop: Annotated[tuple[str, ...], "strings that end a completion"] = ()
    rows: Annotated[Count, "sequences that decode at a time"] = 256
    environment: Annotated[Environment | None, "several turns; null is one completion for each prompt"] = None


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    name: Annotated[str, "a built-in reward, package.module:function or path/file.py:function"]
    weight: Annotated[float, "its share of the sum"] = 1.0
    options: Annotated[Options, "passed to it by name"] = field(default_factory=dict)
    label: Annotated[str, "its name in metrics; empty is the function's own"] = ""


@dataclass(frozen=True, kw_only=True)
class Reward:
    functions: Annotated[tuple[RewardFunction, ...], "the reward is their weighted sum"] = ()
    workers: Annotated[Natural, "processes that compute rewards; 0 is in this process"] = 0
    timeout: Annotated[Positive, "seconds for one call of a function, with all its completions; needs workers"] = 10.0
    on_failure: Annotated[float, "reward where a function raises or runs out of time; such cases are counted"] = 0.0


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    name: Annotated[str, "a built-in algorithm, package.module:name or path/file.py:name"] = "grpo"
    options: Annotated[Options, "passed to it by name"] = field(default_factory=dict)
    minibatches: Annotated[Count, "optimizer steps for each pass over the rollouts"] = 1
    epochs: Annotated[Count, "passes over the rollouts of a step"] = 1
    kl_coef: Annotated[NotNegative, "weight of the KL divergence from the reference; 0 needs no reference"] = 0.0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: Annotated[NotNegative, "learning rate after warm-up"] = 1e-6
    betas: Annotated[tuple[Beta, Beta], "decay of the first and second moment"] = (0.9, 0.999)
    eps: Annotated[Positive, "added to the denominator"] = 1e-8
    weight_decay: Annotated[NotNegative, "decoupled, as in AdamW"] = 0.0
    clip_norm: Annotated[Positive | None, "largest norm of the gradient; null does not clip"] = 1.0
    schedule: Annotated[Literal["constant", "linear", "cosine"], "of the learning rate; the others end at 0"] = (
        "constant"
    )
    warmup_steps: Annotated[Natural, "steps in which the learning rate rises from 0"] = 0


@dataclass(frozen=True, kw_only=True)
class Train:
    token_buckets: Annotated[tuple[Count, ...] | None, "sizes of microbatches that get a graph; null is chosen"] = None
    microbatch_tokens: Annotated[Count, "largest microbatch, where token_buckets is null"] = 16384

    @property
    def largest_bucket(self) -> int:
        return max(self.token_buckets) if self.token_buckets else self.microbatch_tokens


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    data: Annotated[str, "JSON lines with `prompt` and `completion`"]
    steps: Annotated[Count, "of supervised training, at most"] = 100
    lr: Annotated[Positive, "learning rate, constant"] = 1e-5
    batch_size: Annotated[Count, "sequences of a step"] = 32
    stop_at: Annotated[float | None, "mean reward of samples at which to stop; null takes all steps"] = None
    check_every: Annotated[Count, "steps between looks at the reward, where stop_at is given"] = 10


@dataclass(frozen=True, kw_only=True)
class Graph:
    impl: Annotated[Literal["auto", "none", "cuda", "tape"], "auto is cuda on a GPU, else tape; none is eager"] = "auto"
    scope: Annotated[
        Annotated[tuple[Scope, ...], COMMAS] | None,
        "what one graph of training holds; null is step on one rank and layer on several",
    ] = None
    warmup: Annotated[Natural, "runs before a capture"] = 3
    on_mismatch: Annotated[Literal["raise", "eager", "recapture"], "what a call does that does not fit its graph"] = (
        "raise"
    )


@dataclass(frozen=True, kw_only=True)
class Validation:
    every: Annotated[Count, "steps from one validation to the next"] = 10
    samples: Annotated[Count, "completions of each prompt, the k of pass@k"] = 1
    temperature: Annotated[NotNegative, "of sampling; 0 takes the most likely token"] = 0.0
    max_prompts: Annotated[Count | None, "the first so many prompts; null is all"] = 256


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every: Annotated[Count, "steps from one checkpoint to the next; the last step always has one"] = 50
    keep_last: Annotated[Count, "latest checkpoints kept"] = 2
    keep_best: Annotated[Natural, "best checkpoints kept, by validation reward"] = 1
    asynchronous: Annotated[bool, "write while training goes on"] = True
    export_at_end: Annotated[bool, "write a model folder for other tools after the last step"] = True


@dataclass(frozen=True, kw_only=True)
class Memory:
    cache_gib: Annotated[Positive | None, "of the key/value cache; null goes by what is free"] = None
    reference: Annotated[Literal["auto", "device", "host"], "where the reference weights wait"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Log:
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
    output: Annotated[str, "folder of the run: checkpoints, metrics, samples"] = "runs/default"
    resume: Annotated[Literal["auto", "never", "must"], "from the output folder; auto is if there is something"] = (
        "auto"
    )
    model: Annotated[Model, "what is trained"] = field(default_factory=Model)
    tokenizer: Annotated[Tokenizer, "text to tokens"] = field(default_factory=Tokenizer)
    data: Annotated[Data, "prompts"]
    rollout: Annotated[Rollout, "how completions are sampled"] = field(default_factory=Rollout)
    reward: Annotated[Reward, "what a completion is worth"] = field(default_factory=Reward)
    algorithm: Annotated[Algorithm, "how rewards become a loss"] = field(default_factory=Algorithm)
    optimizer: Annotated[Optimizer, "AdamW"] = field(default_factory=Optimizer)
    train: Annotated[Train, "microbatches"] = field(default_factory=Train)
    warm_start: Annotated[WarmStart | None, "supervised training before the first step; null is none"] = None
    graph: Annotated[Graph, "capture and replay"] = field(default_factory=Graph)
    validation: Annotated[Validation, "on data.validation"] = field(default_factory=Validation)
    checkpoint: Annotated[Checkpoint, "durable state"] = field(default_factory=Checkpoint)
    memory: Annotated[Memory, "of the device"] = field(default_factory=Memory)
    log: Annotated[Log, "what people see"] = field(default_factory=Log)

    @property
    def tokenizer_path(self) -> str:
        """A folder, or `bytes`."""
        return self.tokenizer.path or self.model.path or "bytes"


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line for each problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


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
        raise ConfigError([f"model.checkpointing: {wrong}"])
    if config.graph.impl == "none":
        return ()
    if illegal := [scope for scope in scopes if scope not in legal]:
        found = ", ".join(illegal)
        raise ConfigError([f"graph.scope: {found} is not possible with {ranks} ranks; expected {', '.join(legal)}"])
    return scopes


def broken_rules(c: Config) -> list[tuple[str, str, str]]:
    """(rule, key, what is wrong) for each rule across keys that does not hold."""
    tiny, scope, sinks, buckets = c.model.tiny, c.graph.scope or (), c.log.sinks or (), c.train.token_buckets
    alone = c.rollout.samples_per_prompt == 1
    rollouts = c.data.prompts_per_step * c.rollout.samples_per_prompt
    longest = (c.data.max_prompt_tokens or 1) + c.rollout.max_tokens
    kl_coef, kl_option = c.algorithm.kl_coef, c.algorithm.options.get("kl_coef")
    one_kl = not kl_coef or kl_option in (None, kl_coef)
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
        ("warmup_ends", "optimizer.warmup_steps", c.optimizer.warmup_steps <= c.steps, f"there are {c.steps} steps"),
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


# Reading


class Node(NamedTuple):
    """A value of the file, and where it stands: `run.yaml:3`, or `override 'steps=3'`."""

    value: Any  # None, bool, int, float, str, list[Node] or dict[str, Node]
    place: str


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and those it names under `defaults`; `overrides` are like `rollout.temperature=0.7`."""
    return _finish(_load(Path(path), None, ()), overrides)


def parse_config(text: str, overrides: Sequence[str] = (), name: str = "<text>") -> Config:
    """Like `load_config`, for the text of a file; its `defaults` are relative to the working directory."""
    return _finish(_load(Path(name), text, ()), overrides)


def _load(path: Path, text: str | None, above: tuple[Path, ...]) -> Node:
    if text is None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"]) from None
    tree = _compose(text, f"{path}:{{line}}")
    if tree.value is None:  # an empty file
        tree = Node({}, tree.place)
    if not isinstance(tree.value, dict):
        raise ConfigError([f"{tree.place}: expected keys, got {_got(tree)}"])
    bases = tree.value.pop("defaults", Node([], tree.place))
    above = (*above, path.resolve())
    merged = Node({}, tree.place)
    for base in bases.value if isinstance(bases.value, list) else [bases]:
        if not isinstance(base.value, str):
            raise ConfigError([f"{base.place}: defaults: expected the path of a file, got {_got(base)}"])
        other = path.parent / base.value
        if other.resolve() in above:
            chain = " -> ".join(step.name for step in (*above, other))
            raise ConfigError([f"{base.place}: defaults: files name each other: {chain}"])
        if not other.is_file():
            raise ConfigError([f"{base.place}: defaults: there is no file {other}"])
        merged = _merge(merged, _load(other, None, above))
    return _merge(merged, tree)


def _compose(text: str, place: str) -> Node:
    """The tree of a text; `place` may have a {line}."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    problems: list[str] = []

    def at(mark: Any) -> str:
        return place.replace("{line}", str(mark.line + 1 if mark else 1))

    def convert(node: Any) -> Node:
        here = at(node.start_mark)
        if not re.fullmatch(r"tag:yaml\.org,2002:[a-z]+", node.tag):
            problems.append(f"{here}: the tag {node.tag} is not supported")
        if isinstance(node, yaml.ScalarNode):
            return Node(_scalar(node.value) if node.style is None else node.value, here)
        if isinstance(node, yaml.SequenceNode):
            return Node([convert(item) for item in node.value], here)
        found: dict[str, Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in found:
                wrong = f"{key.value}: given twice" if isinstance(key, yaml.ScalarNode) else "a key must be text"
                problems.append(f"{at(key.start_mark)}: {wrong}")
                continue
            # A value may start on a later line than its key, which is where people look.
            found[key.value] = convert(value)._replace(place=at(key.start_mark))
        return Node(found, here)

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = Node(None, at(None)) if root is None else convert(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([f"{at(error.problem_mark)}: not YAML: {error.problem}"]) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError([f"{at(None)}: not YAML: {error}"]) from None
    if problems:
        raise ConfigError(problems)
    return tree


def _scalar(text: str) -> Any:
    """The value of an unquoted word, by YAML 1.2: unlike PyYAML, 1e-6 is a number, and `no` and `on` are text."""
    if text in ("true", "false"):
        return text == "true"
    if text in ("", "~", "null"):
        return None
    if re.fullmatch(r"[-+]?[0-9][0-9_]*", text) and not text.endswith("_") and "__" not in text:
        return int(text)
    if re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text) and math.isfinite(float(text)):
        return float(text)
    return text


def _merge(base: Node, top: Node) -> Node:
    """Mappings key by key; anything else is replaced."""
    if not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    both = {name: _merge(base.value[name], node) if name in base.value else node for name, node in top.value.items()}
    return Node({**base.value, **both}, top.place)


def _put(tree: Node, names: Sequence[str], leaf: Node) -> Node:
    if not names:
        return leaf
    inside, place = (tree.value, tree.place) if isinstance(tree.value, dict) else ({}, leaf.place)
    below = _put(inside.get(names[0], Node({}, leaf.place)), names[1:], leaf)
    return Node({**inside, names[0]: below}, place)


def _finish(tree: Node, overrides: Sequence[str]) -> Config:
    reader = _Reader()
    for override in overrides:
        key, equals, text = override.partition("=")
        names = key.strip().split(".")
        try:
            if not equals or not all(names):
                raise ConfigError([f"override {override!r}: expected key=value"])
            tree = _put(tree, names, _compose(text, f"override {override!r}"))
        except ConfigError as error:
            reader.problems += error.problems
    config: Config = reader.section(Config, tree, "")
    if not reader.problems:
        reader.problems += [
            f"{reader.place(key)}: {key}: {wrong} [{rule}]" for rule, key, wrong in broken_rules(config)
        ]
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


_WRONG = object()


class _Reader:
    """Turns nodes into dataclasses, collecting what is wrong on the way."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.places: dict[str, str] = {}

    def place(self, key: str) -> str:
        while key not in self.places:
            key = key.rpartition(".")[0]
        return self.places[key]

    def section(self, kind: Any, node: Node, key: str) -> Any:
        self.places[key] = node.place
        hints, dot = _hints(kind), f"{key}." if key else ""
        before = len(self.problems)
        for name in [name for name in node.value if name not in hints]:
            self.problems.append(f"{node.value[name].place}: {dot}{name}: unknown key; {_nearest(name, dot, hints)}")
        values = {}
        for item in fields(kind):
            inner, _ = _unwrap(hints[item.name])
            if item.name in node.value:
                values[item.name] = self.read(hints[item.name], node.value[item.name], dot + item.name)
            elif is_dataclass(inner):
                values[item.name] = self.section(inner, Node({}, node.place), dot + item.name)
            elif item.default is MISSING and item.default_factory is MISSING:
                self.problems.append(f"{node.place}: {dot}{item.name}: required, but missing")
        return kind(**values) if len(self.problems) == before else _WRONG

    def read(self, kind: Any, node: Node, key: str) -> Any:
        self.places[key] = node.place
        before = len(self.problems)
        value = self._convert(kind, node, key)
        if value is _WRONG and len(self.problems) == before:
            self.problems.append(f"{node.place}: {key}: expected {spell(kind)}, got {_got(node)}")
        return value

    def _convert(self, kind: Any, node: Node, key: str) -> Any:
        kind, notes = _unwrap(kind)
        origin, args, value = get_origin(kind), get_args(kind), node.value
        if origin in (Union, UnionType):
            return None if value is None else self._convert(args[0], node, key)
        if is_dataclass(kind):
            return self.section(kind, node, key) if isinstance(value, dict) else _WRONG
        if origin is tuple:
            if COMMAS in notes and isinstance(value, str):
                value = [Node(part.strip(), node.place) for part in value.split(",")]
            fixed = args[-1] is not Ellipsis
            if not isinstance(value, list) or (fixed and len(value) != len(args)):
                return _WRONG
            kinds = args if fixed else args[:1] * len(value)
            return tuple(self.read(*pair, f"{key}[{i}]") for i, pair in enumerate(zip(kinds, value, strict=True)))
        if origin is Mapping:
            return self._mapping(node, key) if isinstance(value, dict) else _WRONG
        if origin is Literal:
            return value if value in args else _WRONG
        if kind is float and type(value) is int:
            value = float(value)
        limits = [note for note in notes if isinstance(note, Limit)]
        return value if type(value) is kind and all(limit.holds(value) for limit in limits) else _WRONG

    def _mapping(self, node: Node, key: str) -> Any:
        """Of any keys; rules can be about some of them."""
        self.places |= {f"{key}.{name}": inner.place for name, inner in node.value.items()}
        return _plain(node)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _unwrap(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind, getattr(kind, "__metadata__", ())


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {name: _plain(inner) for name, inner in node.value.items()}
    return [_plain(inner) for inner in node.value] if isinstance(node.value, list) else node.value


def _nearest(name: str, dot: str, names: Mapping[str, Any]) -> str:
    import difflib

    if near := difflib.get_close_matches(name, names, 1):
        return f"did you mean {dot}{near[0]}?"
    elsewhere = {key.name.rpartition(".")[2]: key.name for key in reversed(list(list_keys()))}
    if near := difflib.get_close_matches(name, elsewhere, 1, 0.8):
        return f"did you mean {elsewhere[near[0]]}?"
    return f"expected one of {', '.join(names)}"


def _got(node: Node) -> str:
    if isinstance(node.value, str):
        return f"the text {node.value!r}"
    if isinstance(node.value, list):
        return f"a list of {len(node.value)}"
    return "a mapping" if isinstance(node.value, dict) else json.dumps(node.value)


# Describing


class Key(NamedTuple):
    name: str  # with dots, like rollout.temperature; reward.functions[].name inside a list
    kind: Any
    default: Any  # MISSING where a value is required
    text: str


def list_keys(kind: Any = Config, before: str = "") -> Iterator[Key]:
    """Every key in the order of the sections, sections and their keys included."""
    hints = _hints(kind)
    for item in fields(kind):
        hint, name = hints[item.name], before + item.name
        inner, notes = _unwrap(hint)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        yield Key(name, hint, default, notes[-1])
        args = [inner, *get_args(inner)]
        for section in (arg for arg in args if is_dataclass(arg)):
            yield from list_keys(section, name + ("[]." if get_origin(inner) is tuple else "."))


def spell(kind: Any) -> str:
    """A type in words: `whole number ≥ 1 or null`."""
    kind, notes = _unwrap(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return f"{spell(args[0])} or null"
    if origin is tuple:
        words = f"list of {spell(args[0])}" if args[-1] is Ellipsis else f"list of {len(args)}: {spell(args[0])}"
    elif origin is Literal:
        words = " | ".join(args)
    else:
        named = {int: "whole number", float: "number", bool: "true or false", str: "text", Mapping: "mapping"}
        words = named.get(origin or kind, "section")
    limits = " and ".join(str(note) for note in notes if isinstance(note, Limit))
    return f"{words} {limits}" if limits else words


def to_dict(config: Any) -> dict[str, Any]:
    """Of dicts, lists, strings and numbers: what JSON and YAML can hold."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(inner) for name, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, tuple | list) else value

    return {name: plain(value) for name, value in asdict(config).items()}


def to_yaml(config: Config) -> str:
    """The resolved configuration; reading it gives an equal one."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, unused-ignore]
        def represent_text(self, text: str) -> Any:
            style = "'" if _scalar(text) != text else None  # or it would be read as a number
            if not text.isprintable():
                style = '"'  # the only one that keeps every kind of line break
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, Dumper.represent_text)
    return str(yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


def json_schema() -> dict[str, Any]:
    """For editors: completion and checks while typing."""
    schema = _schema(Config)
    texts = {"type": "array", "items": {"type": "string"}}
    schema["properties"]["defaults"] = {
        "description": "files that this one builds on, relative to it; later ones win",
        "anyOf": [{"type": "string"}, texts],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rollgraph", **schema}


def _schema(kind: Any) -> dict[str, Any]:
    kind, notes = _unwrap(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(args[0]), {"type": "null"}]}
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        # `required` is left out: a file may leave to its defaults or to overrides what it does not say.
        properties = {}
        for item in fields(kind):
            properties[item.name] = _schema(hints[item.name]) | {"description": _unwrap(hints[item.name])[1][-1]}
            if item.default is not MISSING:
                properties[item.name]["default"] = list(item.default) if type(item.default) is tuple else item.default
        return {"type": "object", "additionalProperties": False, "properties": properties}
    if origin is tuple:
        schema: dict[str, Any] = {"type": "array", "items": _schema(args[0])}
        if args[-1] is not Ellipsis:
            schema |= {"minItems": len(args), "maxItems": len(args)}
        return {"anyOf": [schema, {"type": "string"}]} if COMMAS in notes else schema
    if origin is Literal:
        return {"enum": list(args)}
    word = {int: "integer", float: "number", bool: "boolean", str: "string"}.get(kind, "object")
    return {"type": word, **{note.word: note.bound for note in notes if isinstance(note, Limit)}}
