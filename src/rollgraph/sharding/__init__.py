"""Sharded data parallel: flat parameters, hooks that can be trusted, and communication that overlaps with computation.

`sharded_model.py` is where to start reading; `checkpoint_writer.py` and `checkpoint_loader.py` save and load it.
"""

from rollgraph.sharding.bucket_plan import BUCKET_BYTES, BucketPlan, execution_order, plan_buckets, specs_of
from rollgraph.sharding.bucket_sync import StaleWeights
from rollgraph.sharding.checkpoint_loader import load
from rollgraph.sharding.checkpoint_writer import save
from rollgraph.sharding.collectives import Collectives, CommunicationError
from rollgraph.sharding.flat_buffer import FlatBuckets
from rollgraph.sharding.frozen_parts import FrozenParts, find_frozen, frozen_specs
from rollgraph.sharding.gradient_sums import add_gradients
from rollgraph.sharding.hook_set import HookSet, HookState
from rollgraph.sharding.manifest import CheckpointError
from rollgraph.sharding.optimizer import ShardedAdamW
from rollgraph.sharding.ring_plan import RingPlan, names_in, plan_ring, plan_units
from rollgraph.sharding.schedules import constant, cosine, linear, warm_up
from rollgraph.sharding.sharded_model import Sharded, ShardedModel
from rollgraph.sharding.state_memory import (
    MemoryPlan,
    Offload,
    OptimizerMemory,
    StateFormat,
    plan_memory,
    plan_optimizer,
)
from rollgraph.sharding.step_abort import StepAborted

__all__ = [
    "BUCKET_BYTES",
    "BucketPlan",
    "CheckpointError",
    "Collectives",
    "CommunicationError",
    "FlatBuckets",
    "FrozenParts",
    "HookSet",
    "HookState",
    "MemoryPlan",
    "Offload",
    "OptimizerMemory",
    "RingPlan",
    "Sharded",
    "ShardedAdamW",
    "ShardedModel",
    "StaleWeights",
    "StateFormat",
    "StepAborted",
    "add_gradients",
    "constant",
    "cosine",
    "execution_order",
    "find_frozen",
    "frozen_specs",
    "linear",
    "load",
    "names_in",
    "plan_buckets",
    "plan_memory",
    "plan_optimizer",
    "plan_ring",
    "plan_units",
    "save",
    "specs_of",
    "warm_up",
]
