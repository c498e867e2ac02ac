"""Rules that involve several keys: combinations that make no sense, and which graph scopes fit a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from rollgraph.config.algorithm_names import GROUP_RELATIVE, ONE_UPDATE, SUPERVISED, TAUGHT
from rollgraph.config.field_types import keys_of
from rollgraph.config.key_types import COLDEST, Scope
from rollgraph.config.keys import Config
from rollgraph.config.problems import ConfigError, ConfigProblem
from rollgraph.config.reader import BrokenRule
from rollgraph.errors import suggest

LEGAL_SCOPES: dict[str, tuple[Scope, ...]] = {  # a graph must end where ranks communicate: between layers or inside
    "one rank": ("step", "layer", "attn", "mlp"),
    "several ranks": ("layer", "attn", "mlp"),
}


def check_scopes(config: Config, ranks: int) -> tuple[Scope, ...]:
    """The scopes to capture with this many ranks; none with `graph.impl: none`. Raises if a scope is not possible."""
    legal = LEGAL_SCOPES["one rank" if ranks == 1 else "several ranks"]
    scopes = config.graph.scope or legal[:1]
    if config.graph.impl == "none":
        return ()
    illegal = [scope for scope in scopes if scope not in legal]
    if illegal:
        detail = f"{', '.join(illegal)} is not possible with {ranks} ranks; expected {', '.join(legal)}"
        raise ConfigError([ConfigProblem(detail, "graph.scope")])
    return scopes


def training_scopes(config: Config, ranks: int) -> tuple[Scope, ...]:
    """The scopes into which a training step is divided, captured or not."""
    return check_scopes(config, ranks) or LEGAL_SCOPES["one rank" if ranks == 1 else "several ranks"][:1]


def broken_rules(config: Config) -> list[BrokenRule]:
    """(rule, key, what is wrong) for each rule that does not hold."""
    return [
        *_model_rules(config),
        *_adapter_rules(config),
        *_length_rules(config),
        *_rollout_rules(config),
        *_supervised_rules(config),
        *_teacher_rules(config),
        *_kl_rules(config),
        *_exactness_rules(config),
        *_schedule_rules(config),
        *_graph_rules(config),
        *_shard_rules(config),
        *_log_rules(config),
        *_cluster_rules(config),
        *_division_rules(config),
        *_resume_rules(config),
    ]


def _model_rules(config: Config) -> Iterator[BrokenRule]:
    tiny = config.model.tiny
    if (config.model.path is None) == (tiny is None):
        yield "one_model", "model", "give either path or tiny"
    if tiny is not None and (tiny.heads % tiny.kv_heads or tiny.width % (2 * tiny.heads)):
        yield "heads_fit", "model.tiny", "kv_heads must divide heads, and 2 x heads must divide width"


def _adapter_rules(config: Config) -> Iterator[BrokenRule]:
    adapter = config.adapter
    if adapter is None:
        return
    if not adapter.targets:
        yield "adapter_has_targets", "adapter.targets", "name at least one projection"
    if len(set(adapter.targets)) < len(adapter.targets):
        yield "targets_differ", "adapter.targets", "a projection is named twice"
    if adapter.dropout and config.graph.exact == "must":
        wrong = "training leaves out inputs that generation has (adapter.dropout), so their log-probabilities differ"
        yield "exact_without_dropout", "graph.exact", wrong
    if adapter.dropout and config.model.checkpointing not in ("auto", 0):
        wrong = "activations that are computed again would leave out other inputs (adapter.dropout)"
        yield "checkpointing_without_dropout", "model.checkpointing", wrong


def _length_rules(config: Config) -> Iterator[BrokenRule]:
    tiny = config.model.tiny
    buckets = config.train.token_buckets
    longest = (config.data.max_prompt_tokens or 1) + config.rollout.max_tokens
    if config.algorithm.name in SUPERVISED:
        longest = config.data.max_tokens or 1
    takes = f"a prompt with its completion takes at least {longest} tokens"
    supervised = config.algorithm.name in SUPERVISED
    limit = "data.max_tokens" if supervised else "rollout.max_tokens"
    if tiny is not None and longest > tiny.max_length:
        yield "length_fits", limit, f"{takes}, but model.tiny.max_length is {tiny.max_length}"
    largest = config.train.largest_bucket
    if largest is not None and longest > largest:
        key = "train.token_buckets" if buckets else "train.microbatch_tokens"
        wrong = f"{takes} (data.max_prompt_tokens + rollout.max_tokens), but the largest microbatch has {largest}"
        if supervised:
            wrong = f"{takes} (data.max_tokens), but the largest microbatch has {largest}"
        yield "microbatch_fits", key, wrong
    if buckets is not None and (not buckets or list(buckets) != sorted(set(buckets))):
        yield "buckets_rise", "train.token_buckets", "sizes must be in increasing order, and there must be at least one"


def _rollout_rules(config: Config) -> Iterator[BrokenRule]:
    own = ":" in config.algorithm.name  # known once it is loaded
    rewards = config.reward.functions or config.rollout.environment
    mixed = config.algorithm.name in TAUGHT and config.algorithm.options.get("reward_coef")
    taught = config.algorithm.name in TAUGHT and not mixed
    if not (rewards or own or taught or config.algorithm.name in SUPERVISED):
        yield "something_rewards", "reward.functions", "give a reward function or an environment"
    if config.rollout.samples_per_prompt == 1 and (mixed or config.algorithm.name in GROUP_RELATIVE):
        wrong = f"{config.algorithm.name} compares the samples of a prompt, so it needs 2 or more"
        yield "group_compares", "rollout.samples_per_prompt", wrong
    rollouts = config.data.prompts_per_step
    if config.algorithm.name not in SUPERVISED:
        rollouts *= config.rollout.samples_per_prompt
    if config.algorithm.minibatches > rollouts:
        yield "minibatches_filled", "algorithm.minibatches", f"a step has only {rollouts} rollouts"


def _supervised_rules(config: Config) -> Iterator[BrokenRule]:
    name = config.algorithm.name
    if name in SUPERVISED:
        unused = f"{name} learns from what the data holds and samples nothing"
        if config.reward.functions:
            yield "rewards_used", "reward.functions", f"{unused}, so there is nothing to reward; leave it out"
        if config.rollout.environment is not None:
            yield "environment_used", "rollout.environment", f"{unused}; leave it out"
        if config.warm_start is not None and config.warm_start.stop_at is not None:
            yield "rewards_used", "warm_start.stop_at", f"{unused}, so no reward can be reached"
    elif config.data.max_tokens is not None and ":" not in name:
        wrong = f"{name} samples completions, which rollout.max_tokens limits"
        yield "max_tokens_used", "data.max_tokens", wrong
    updates = config.algorithm.minibatches * config.algorithm.epochs
    if name in ONE_UPDATE and updates > 1:
        key = "algorithm.minibatches" if config.algorithm.minibatches > 1 else "algorithm.epochs"
        wrong = f"{name} scores its rows under the policy before an update, so a step is one update"
        yield "one_update", key, f"{wrong}; use data.prompts_per_step to set its size"


def _teacher_rules(config: Config) -> Iterator[BrokenRule]:
    name = config.algorithm.name
    if name in TAUGHT:
        if config.algorithm.teacher is None:
            yield "teacher_given", "algorithm.teacher", f"{name} needs the folder of a teacher"
        if config.rollout.filtered:
            wrong = "with rollout.top_k, top_p or min_p, samples are not compared with the teacher as the policy's own"
            yield "samples_of_the_policy", "algorithm.name", wrong
    elif config.algorithm.teacher is not None and ":" not in name:
        yield "teacher_used", "algorithm.teacher", f"{name} has no teacher; use distillation"


def _kl_rules(config: Config) -> Iterator[BrokenRule]:
    coefficient = config.algorithm.kl_coef
    option = config.algorithm.options.get("kl_coef")
    if coefficient and option not in (None, coefficient):
        wrong = f"is {coefficient:g}, but algorithm.options.kl_coef is {option}"
        yield "one_kl_coef", "algorithm.kl_coef", wrong
        wrong = f"is {option}, but algorithm.kl_coef is {coefficient:g}"
        yield "one_kl_coef", "algorithm.options.kl_coef", wrong
    in_reward = config.algorithm.options.get("kl_in") == "reward"
    if in_reward and (coefficient or option) and config.rollout.filtered:
        wrong = (
            "with rollout.top_k, top_p or min_p, rollouts do not have the policy's own log-probabilities; "
            "put the KL term in the loss"
        )
        yield "kl_of_the_policy", "algorithm.options.kl_in", wrong


def _exactness_rules(config: Config) -> Iterator[BrokenRule]:
    if config.graph.exact == "must" and config.rollout.filtered:
        wrong = (
            "with rollout.top_k, top_p or min_p, the sampler's log-probabilities are of the tokens that the filter "
            "leaves, so those of training differ"
        )
        yield "exact_without_filters", "graph.exact", wrong


def _schedule_rules(config: Config) -> Iterator[BrokenRule]:
    updates = config.steps * config.algorithm.minibatches * config.algorithm.epochs
    if config.optimizer.warmup_steps > updates:
        wrong = f"there are only {updates} updates (steps x algorithm.minibatches x algorithm.epochs)"
        yield "warmup_ends", "optimizer.warmup_steps", wrong
    temperature = config.validation.temperature
    if config.validation.samples > 1 and temperature == 0:
        wrong = "with validation.temperature 0, all samples of a prompt are the same"
        yield "samples_differ", "validation.samples", wrong
    if 0 < temperature < COLDEST:
        wrong = f"use 0 for the most likely token, or {COLDEST} or more"
        yield "greedy_or_warm", "validation.temperature", wrong


def _graph_rules(config: Config) -> Iterator[BrokenRule]:
    scope = config.graph.scope
    if scope is None:
        return
    if not scope:
        yield "scope_not_empty", "graph.scope", "name a scope, or null"
    if scope and config.graph.impl == "none":
        wrong = "a scope makes no sense with graph.impl: none; set the scope to null"
        yield "scope_without_graphs", "graph.scope", wrong
    if len(scope) > 1 and sorted(scope) != ["attn", "mlp"]:
        wrong = "one scope contains another; give step, layer, attn, mlp or attn,mlp"
        yield "scopes_apart", "graph.scope", wrong


def _shard_rules(config: Config) -> Iterator[BrokenRule]:
    if config.shard != "parameters":
        return
    if config.tensor_parallel > 1:
        wrong = "each layer is divided already (tensor_parallel); use shard: optimizer, or tensor_parallel: 1"
        yield "divided_once", "shard", wrong


def _log_rules(config: Config) -> Iterator[BrokenRule]:
    sinks = config.log.sinks or ()
    if len(set(sinks)) < len(sinks):
        yield "sinks_differ", "log.sinks", "a sink is named twice"
    if config.log.wandb and "wandb" not in sinks:
        yield "wandb_used", "log.wandb", "wandb is not in log.sinks"
    if config.log.mlflow and "mlflow" not in sinks:
        yield "mlflow_used", "log.mlflow", "mlflow is not in log.sinks"


def _cluster_rules(config: Config) -> Iterator[BrokenRule]:
    cluster = config.cluster
    if cluster.gpus_per_node and cluster.ranks_per_node > 1:
        wrong = "each GPU has one rank (cluster.gpus_per_node); set that to 0 for ranks on CPUs, or leave this out"
        yield "one_rank_per_gpu", "cluster.ranks_per_node", wrong
    if config.reward.place == "cluster" and not config.reward.workers:
        wrong = "needs reward.workers: the number of processes on the cluster that compute rewards for each rank"
        yield "cluster_workers", "reward.place", wrong
    peers = config.checkpoint.peers
    if peers and cluster.engine == "none":
        wrong = "needs cluster.engine: ray; whoever else starts the ranks replaces all processes, with their memory"
        yield "peers_survive", "checkpoint.peers", wrong
    elif peers and cluster.ranks <= peers:
        wrong = f"needs at least {peers + 1} ranks, but the cluster has {cluster.ranks} (cluster.nodes)"
        yield "peers_exist", "checkpoint.peers", wrong


def _division_rules(config: Config) -> Iterator[BrokenRule]:
    if config.tensor_parallel == 1:
        return
    on_node = config.cluster.ranks_on_node
    if config.cluster.engine != "none" and on_node % config.tensor_parallel:
        wrong = f"ranks that divide layers have to be on one node, and each has {on_node}: use a divisor of that"
        yield "groups_on_nodes", "tensor_parallel", wrong
    if config.checkpoint.peers:
        wrong = "ranks keep whole shards of each other, not of layers that they divide; set this to 0"
        yield "peers_without_division", "checkpoint.peers", wrong


def _resume_rules(config: Config) -> Iterator[BrokenRule]:
    known = [key.name for key in keys_of(Config)]
    for name in config.allow_changes:
        if name not in known:
            yield "known_changes", "allow_changes", f"there is no key {name!r}{suggest(name, known)}"
