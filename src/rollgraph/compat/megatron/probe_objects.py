"""The smallest real objects on which probes can run the real code, without a GPU or a process group."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class LoneGroup:
    """Stands in for a process group of one, for code that only asks for its size and rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@contextmanager
def quietly() -> Iterator[None]:
    """Silence Megatron's logs and warnings about a probe's objects, which would look as if they were the user's."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("megatron.") and isinstance(logger, logging.Logger) and not logger.disabled
    ]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.disabled = False


def make_config() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    with quietly():
        return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


def wrap_ddp(module: nn.Module) -> Any:
    """Megatron's DDP with forward pre-hooks, around a module without parameters to allocate or gather."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    group = LoneGroup()
    names = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp", "tp", "pp", "ep")
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    groups = SimpleNamespace(**dict.fromkeys(names, group))
    with quietly():
        return DistributedDataParallel(make_config(), settings, module, pg_collection=groups)


def make_runner(need_backward: bool = False) -> Any:
    """A graph runner of `x * 2`, as a graph manager makes it at the first call of its module."""
    from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

    module: Any = nn.Identity()
    module.config = make_config()
    return _CudaGraphRunner(module, None, [torch.zeros(2)], {}, lambda x: x * 2, need_backward)


class GcStandIn:
    """`gc` without collections, which take longer than everything else that a probe does."""

    def collect(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)


class TorchStandIn:
    """`torch` without what needs a GPU or a process group: capture records nothing, and the rank is 1."""

    def __init__(self) -> None:
        self.distributed = SimpleNamespace(get_rank=lambda *group: 1)
        self.cuda = CudaStandIn()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class CudaStandIn:
    CUDAGraph = type("GraphStandIn", (), {"register_generator_state": lambda self, state: None})

    class graph:
        def __init__(self, *arguments: Any, **settings: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *exception: Any) -> None: ...

    def synchronize(self) -> None: ...

    def device_count(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)
