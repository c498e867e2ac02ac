"""Sharded data parallel: flat parameters, and hooks that can be trusted."""

from rollgraph.sharding.flat_buffer import BucketPlan, FlatBuckets, plan_buckets, specs_of
from rollgraph.sharding.hook_set import HookSet, State

__all__ = ["BucketPlan", "FlatBuckets", "HookSet", "State", "plan_buckets", "specs_of"]
