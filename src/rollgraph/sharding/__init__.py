"""Sharded data parallel: flat parameters, hooks that can be trusted, and communication beside computation."""

from rollgraph.sharding.flat_buffer import BucketPlan, FlatBuckets, execution_order, plan_buckets, specs_of
from rollgraph.sharding.hook_set import HookSet, HookState
from rollgraph.sharding.optimizer import ShardedAdamW, constant, cosine, linear, warm_up
from rollgraph.sharding.overlap import Collectives, CommunicationError, StaleWeights
from rollgraph.sharding.rounds import StepGivenUp
from rollgraph.sharding.shard_files import CheckpointError, load, save
from rollgraph.sharding.sharded_model import MemoryPlan, ShardedModel

__all__ = [
    "BucketPlan",
    "CheckpointError",
    "Collectives",
    "CommunicationError",
    "FlatBuckets",
    "HookSet",
    "HookState",
    "MemoryPlan",
    "ShardedAdamW",
    "ShardedModel",
    "StaleWeights",
    "StepGivenUp",
    "constant",
    "cosine",
    "execution_order",
    "linear",
    "load",
    "plan_buckets",
    "save",
    "specs_of",
    "warm_up",
]
