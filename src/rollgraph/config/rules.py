"""Rules across several keys: combinations that make no sense, and the graph scopes that a number of ranks allows."""

from __future__ import annotations

from collections.abc import Iterator

from rollgraph.config.fields import ConfigError, ConfigProblem, keys_of
from rollgraph.config.keys import MIN_TEMPERATURE, Config, Scope
from rollgraph.config.names import GROUP_RELATIVE, SINGLE_UPDATE, SUPERVISED, WITH_TEACHER
from rollgraph.config.reader import BrokenRule
from rollgraph.errors import suggest

LEGAL_SCOPES: dict[str, tuple[Scope, ...]] = {  # a graph ends where ranks communicate
    "one rank": ("step", "layer", "attn", "mlp"),
    "several ranks": ("layer", "attn", "mlp"),
}


def capture_scopes(config: Config, ranks: int) -> tuple[Scope, ...]:
    """The scopes to capture with this many ranks, none with `graph.impl: none`. Raises if a scope is not possible."""
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
    """The scopes that a training step is split into, captured or not."""
    return capture_scopes(config, ranks) or LEGAL_SCOPES["one rank" if ranks == 1 else "several ranks"][:1]


def broken_rules(config: Config) -> list[BrokenRule]:
    """(rule, key, message) for each broken rule."""
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
        *_tensor_parallel_rules(config),
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
        message = "training drops inputs at random (adapter.dropout) and generation does not, so their logprobs differ"
        yield "exact_without_dropout", "graph.exact", message
    if adapter.dropout and config.model.checkpointing not in ("auto", 0):
        message = "recomputed activations would drop other inputs (adapter.dropout)"
        yield "checkpointing_without_dropout", "model.checkpointing", message


def _length_rules(config: Config) -> Iterator[BrokenRule]:
    tiny = config.model.tiny
    buckets = config.train.token_buckets
    longest = (config.data.max_prompt_tokens or 1) + config.rollout.max_tokens
    if config.algorithm.name in SUPERVISED:
        longest = config.data.max_tokens or 1
    requirement = f"a prompt with its completion takes at least {longest} tokens"
    supervised = config.algorithm.name in SUPERVISED
    limit = "data.max_tokens" if supervised else "rollout.max_tokens"
    if tiny is not None and longest > tiny.max_length:
        yield "length_fits", limit, f"{requirement}, but model.tiny.max_length is {tiny.max_length}"
    largest = config.train.largest_bucket
    if largest is not None and longest > largest:
        key = "train.token_buckets" if buckets else "train.microbatch_tokens"
        message = (
            f"{requirement} (data.max_prompt_tokens + rollout.max_tokens), but the largest microbatch has {largest}"
        )
        if supervised:
            message = f"{requirement} (data.max_tokens), but the largest microbatch has {largest}"
        yield "microbatch_fits", key, message
    if buckets is not None and (not buckets or list(buckets) != sorted(set(buckets))):
        yield "buckets_rise", "train.token_buckets", "sizes must be in increasing order, and there must be at least one"


def _rollout_rules(config: Config) -> Iterator[BrokenRule]:
    is_custom = ":" in config.algorithm.name  # its needs are known only once it is loaded
    rewards = config.reward.functions or config.rollout.environment
    mixes_reward = config.algorithm.name in WITH_TEACHER and config.algorithm.options.get("reward_coef")
    needs_no_reward = config.algorithm.name in WITH_TEACHER and not mixes_reward
    if not (rewards or is_custom or needs_no_reward or config.algorithm.name in SUPERVISED):
        yield "something_rewards", "reward.functions", "give a reward function or an environment"
    if config.rollout.samples_per_prompt == 1 and (mixes_reward or config.algorithm.name in GROUP_RELATIVE):
        message = f"{config.algorithm.name} compares the samples of a prompt, so it needs 2 or more"
        yield "group_compares", "rollout.samples_per_prompt", message
    rollouts = config.data.prompts_per_step
    if config.algorithm.name not in SUPERVISED:
        rollouts *= config.rollout.samples_per_prompt
    if config.algorithm.minibatches > rollouts:
        yield "minibatches_filled", "algorithm.minibatches", f"a step has only {rollouts} rollouts"


def _supervised_rules(config: Config) -> Iterator[BrokenRule]:
    name = config.algorithm.name
    if name in SUPERVISED:
        reason = f"{name} learns from completions in the data and samples nothing"
        if config.reward.functions:
            yield "rewards_used", "reward.functions", f"{reason}, so there is nothing to reward; leave it out"
        if config.rollout.environment is not None:
            yield "environment_used", "rollout.environment", f"{reason}; leave it out"
        if config.warm_start is not None and config.warm_start.stop_at is not None:
            yield "rewards_used", "warm_start.stop_at", f"{reason}, so no reward can be reached"
    elif config.data.max_tokens is not None and ":" not in name:
        message = f"{name} samples completions, which rollout.max_tokens limits"
        yield "max_tokens_used", "data.max_tokens", message
    updates = config.algorithm.minibatches * config.algorithm.epochs
    if name in SINGLE_UPDATE and updates > 1:
        key = "algorithm.minibatches" if config.algorithm.minibatches > 1 else "algorithm.epochs"
        message = f"{name} scores its rows under the policy before an update, so a step is one update"
        yield "one_update", key, f"{message}; use data.prompts_per_step to set its size"


def _teacher_rules(config: Config) -> Iterator[BrokenRule]:
    name = config.algorithm.name
    if name in WITH_TEACHER:
        if config.algorithm.teacher is None:
            yield "teacher_given", "algorithm.teacher", f"{name} needs the folder of a teacher"
        if config.rollout.filtered:
            message = "rollout.top_k, top_p and min_p change the distribution, so samples are not the policy's own"
            yield "samples_of_the_policy", "algorithm.name", message
    elif config.algorithm.teacher is not None and ":" not in name:
        yield "teacher_used", "algorithm.teacher", f"{name} has no teacher; use distillation"


def _kl_rules(config: Config) -> Iterator[BrokenRule]:
    coefficient = config.algorithm.kl_coef
    option = config.algorithm.options.get("kl_coef")
    if coefficient and option not in (None, coefficient):
        message = f"is {coefficient:g}, but algorithm.options.kl_coef is {option}"
        yield "one_kl_coef", "algorithm.kl_coef", message
        message = f"is {option}, but algorithm.kl_coef is {coefficient:g}"
        yield "one_kl_coef", "algorithm.options.kl_coef", message
    in_reward = config.algorithm.options.get("kl_in") == "reward"
    if in_reward and (coefficient or option) and config.rollout.filtered:
        message = (
            "with rollout.top_k, top_p or min_p, the sampler's log-probabilities are not the policy's own; "
            "put the KL term in the loss"
        )
        yield "kl_of_the_policy", "algorithm.options.kl_in", message


def _exactness_rules(config: Config) -> Iterator[BrokenRule]:
    if config.graph.exact == "must" and config.rollout.filtered:
        message = (
            "with rollout.top_k, top_p or min_p, the sampler normalizes over the remaining tokens only, so its "
            "log-probabilities differ from those of training"
        )
        yield "exact_without_filters", "graph.exact", message


def _schedule_rules(config: Config) -> Iterator[BrokenRule]:
    updates = config.steps * config.algorithm.minibatches * config.algorithm.epochs
    if config.optimizer.warmup_steps > updates:
        message = f"there are only {updates} updates (steps x algorithm.minibatches x algorithm.epochs)"
        yield "warmup_ends", "optimizer.warmup_steps", message
    temperature = config.validation.temperature
    if config.validation.samples > 1 and temperature == 0:
        message = "with validation.temperature 0, all samples of a prompt are the same"
        yield "samples_differ", "validation.samples", message
    if 0 < temperature < MIN_TEMPERATURE:
        message = f"use 0 for the most likely token, or {MIN_TEMPERATURE} or more"
        yield "greedy_or_warm", "validation.temperature", message


def _graph_rules(config: Config) -> Iterator[BrokenRule]:
    scope = config.graph.scope
    if scope is None:
        return
    if not scope:
        yield "scope_not_empty", "graph.scope", "name a scope, or null"
    if scope and config.graph.impl == "none":
        message = "a scope makes no sense with graph.impl: none; set the scope to null"
        yield "scope_without_graphs", "graph.scope", message
    if len(scope) > 1 and sorted(scope) != ["attn", "mlp"]:
        message = "one scope contains another; give step, layer, attn, mlp or attn,mlp"
        yield "scopes_apart", "graph.scope", message


def _shard_rules(config: Config) -> Iterator[BrokenRule]:
    if config.shard != "parameters":
        return
    if config.tensor_parallel > 1:
        message = "tensor_parallel shards the parameters already; use shard: optimizer, or tensor_parallel: 1"
        yield "divided_once", "shard", message


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
        message = "each GPU has one rank (cluster.gpus_per_node); set that to 0 for ranks on CPUs, or leave this out"
        yield "one_rank_per_gpu", "cluster.ranks_per_node", message
    if config.reward.place == "cluster" and not config.reward.workers:
        message = "needs reward.workers: the number of processes on the cluster that compute rewards for each rank"
        yield "cluster_workers", "reward.place", message
    peers = config.checkpoint.peers
    if peers and cluster.engine == "none":
        message = "needs cluster.engine: ray; other launchers replace all processes and lose their memory"
        yield "peers_survive", "checkpoint.peers", message
    elif peers and cluster.ranks <= peers:
        message = f"needs at least {peers + 1} ranks, but the cluster has {cluster.ranks} (cluster.nodes)"
        yield "peers_exist", "checkpoint.peers", message


def _tensor_parallel_rules(config: Config) -> Iterator[BrokenRule]:
    if config.tensor_parallel == 1:
        return
    on_node = config.cluster.ranks_on_node
    if config.cluster.engine != "none" and on_node % config.tensor_parallel:
        message = f"ranks of a tensor parallel group must be on one node, and each has {on_node}: use a divisor of that"
        yield "groups_on_nodes", "tensor_parallel", message
    if config.checkpoint.peers:
        message = "in-memory copies on other ranks do not support tensor_parallel; set this to 0"
        yield "peers_without_division", "checkpoint.peers", message


def _resume_rules(config: Config) -> Iterator[BrokenRule]:
    known = [*(key.name for key in keys_of(Config)), "arithmetic"]
    for name in config.allow_changes:
        if name not in known:
            yield "known_changes", "allow_changes", f"there is no key {name!r}{suggest(name, known)}"
