"""Tensor parallelism, as data parallel sharding and checkpoints see it."""
