"""A model whose gradients and optimizer state are sharded, and whose communication runs beside its computation.

Owns when what is communicated: a bucket is reduced when its last gradient has arrived, and gathered before
the first module that reads it. `overlap.py` has the collectives and the versions, `hook_set.py` the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rollgraph.graph.hooks import GraphHooks, Moment
from rollgraph.sharding.flat_buffer import FlatBuckets, ParameterSpec, plan_buckets, specs_of
from rollgraph.sharding.hook_set import HookSet, InertWhenCopied
from rollgraph.sharding.overlap import BucketTraffic, Collectives, Reduction, StaleWeights
from rollgraph.world import World

_AHEAD = 2  # buckets that are gathered before they are asked for


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on this rank."""

    parameters: int
    gradients: int
    optimizer: int  # fp32: the master weights of the shards, and two moments without padding

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


class ShardedModel:
    """Data parallel over `world`: full parameters everywhere, gradients summed into shards.

    Call the model itself as before. One step is: forward and backward of each microbatch (all but the last inside
    `no_sync()`), `finish_gradients()`, the optimizer's step. `order` names parameters as a forward reaches them
    (`execution_order` finds it); by default they are taken as they were registered.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        overlap_gather: bool = True,
        overlap_reduce: bool = True,
        bucket_bytes: int = 64 * 2**20,
        grad_dtype: torch.dtype = torch.float32,
        reduction: Reduction = "library",
        timeout: float = 600.0,
        order: Sequence[str] = (),
    ) -> None:
        if not any(True for _ in model.parameters()):
            raise ValueError(f"{type(model).__name__} has no parameters to shard")
        if any(isinstance(h, InertWhenCopied) and not h.is_copy for h in model._state_dict_pre_hooks.values()):
            raise ValueError("the model is in a ShardedModel already: close() that one first")
        self.model, self.world = model, world
        self.collectives = Collectives(world, reduction, timeout)
        specs = specs_of(model, order)
        plan = plan_buckets(specs, ranks=world.size, bucket_bytes=bucket_bytes)
        settings = {"torch": torch.__version__, "bucket_bytes": bucket_bytes, "grad_dtype": grad_dtype}
        settings |= {"reduction": reduction, "overlap": (overlap_gather, overlap_reduce)}
        self._compare_with_other_ranks(settings, specs)
        self.flat = FlatBuckets(model, plan, grad_dtype=grad_dtype)
        self.buckets = [BucketTraffic(i, b, world, self.collectives) for i, b in enumerate(self.flat.buckets)]
        self._trained = [bucket for bucket in self.buckets if bucket.bucket.plan.trainable]
        self._members = {b.index: set(self.flat.parameters_of(b.bucket)) for b in self.buckets}
        self._of: dict[Tensor, BucketTraffic] = {p: b for b in self.buckets for p in self._members[b.index]}
        self._overlap_gather, self._overlap_reduce = overlap_gather, overlap_reduce
        self._syncs = True
        self._arrived: set[Tensor] = set()
        self._reduced: set[int] = set()
        self.hooks = HookSet(model, self._choose_hooks)
        self._guards = HookSet(model, self._choose_guards)  # never paused: they only refuse
        self._guards.enable()
        refuse = InertWhenCopied(lambda module, prefix, keep_vars: self.full_parameters("raise"))
        self._export_guard = model.register_state_dict_pre_hook(refuse)
        self.hooks.enable()

    # -- what is known -----------------------------------------------------------------------------

    def plan(self) -> MemoryPlan:
        plans = [bucket.plan for bucket in self.flat.buckets]
        parameters = sum(p.numel * p.dtype.itemsize for p in plans)
        gradients = sum(b.gradients.nbytes for b in self.flat.buckets if b.gradients is not None)
        trained = [p for p in plans if p.trainable]
        moments = sum(2 * 4 * (end - start) for p in trained for _, start, end in p.owned(self.world.rank))
        return MemoryPlan(parameters, gradients, sum(4 * p.shard_numel for p in trained) + moments)

    def stale(self) -> str | None:
        """Why parameters must not be read now, if so: a guard for graphs, which no pause can switch off."""
        return next((reason for bucket in self.buckets if (reason := bucket.stale) is not None), None)

    def _compare_with_other_ranks(self, settings: dict[str, Any], specs: Sequence[ParameterSpec]) -> None:
        mine = [f"{name} {value}" for name, value in settings.items()]
        mine += [f"{s.name} {s.dtype} {tuple(s.shape)} {'trained' * s.trainable}" for s in specs]
        for rank, said in enumerate(self.collectives.agree("\n".join(mine))):
            theirs = said.split("\n")
            if theirs != mine:
                here, there = next((a, b) for a, b in _pairs(mine, theirs) if a != b)
                raise ValueError(f"rank {self.world.rank} has {here!r} where rank {rank} has {there!r}")

    # -- parameters --------------------------------------------------------------------------------

    def gather(self) -> None:
        """Make the full parameters those of the last optimizer step."""
        for bucket in self._in_forward_order():
            bucket.start_gather()
        for bucket in self._in_forward_order():
            bucket.land_gather()

    def full_parameters(self, otherwise: Literal["raise", "gather"]) -> None:
        """Before they are read for generation, scoring, export or a checkpoint."""
        if otherwise == "gather":
            self.gather()
        elif (reason := self.stale()) is not None:
            raise StaleWeights(f"{reason}: gather() first")

    @contextmanager
    def paused(self, gather: bool) -> Iterator[None]:
        """No hook runs inside. With `gather`, parameters are made whole first; if not, reading stale ones raises."""
        if gather:
            self.gather()
        with self.hooks.paused():
            yield

    def updated(self) -> None:
        """The optimizer wrote the shards of all trained buckets."""
        for bucket in self._trained:
            bucket.updated()
        if self._overlap_gather:
            for bucket in self._in_forward_order()[:_AHEAD]:
                bucket.start_gather()
        else:
            self.gather()

    def _in_forward_order(self) -> list[BucketTraffic]:
        return self.buckets[::-1]

    # -- gradients ---------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients only accumulate inside."""
        found, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = found

    def finish_gradients(self, *, tokens: Tensor | None = None, average: bool = True) -> None:
        """Sum what has not been summed yet, wait, and average: by ranks, or by the tokens of all ranks.

        Without `average` the sums stay as they are, for a loss whose weights add up over all ranks.
        """
        self._refuse_strangers()
        for bucket in self._trained:
            if bucket.index not in self._reduced:
                bucket.start_reduce()
        for bucket in self._trained:
            bucket.land_reduce()
        if average:
            count = self.world.size if tokens is None else self.collectives.sum(tokens)
            for shard in self.gradient_shards():
                shard.div_(count)
        self._arrived.clear()
        self._reduced.clear()

    def _refuse_strangers(self) -> None:
        """A parameter that was added or unfrozen since has no place for its gradient, and would drift apart."""
        trained = set().union(*(self._members[bucket.index] for bucket in self._trained))
        strangers = [n for n, p in self.model.named_parameters() if p.requires_grad and p not in trained]
        if strangers:
            raise RuntimeError(
                f"{', '.join(strangers[:3])} requires grad and did not when ShardedModel was made: its gradient would "
                "stay on this rank. Make the ShardedModel after the model is final"
            )

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that will not be finished, after an exception for example."""
        for bucket in self.buckets:
            bucket.land_reduce()
        self._arrived.clear()
        self._reduced.clear()
        self.flat.zero_gradients()

    def gradient_shards(self) -> list[Tensor]:
        return [b.gradient_shard(self.world.rank) for b in self.flat.buckets if b.gradients is not None]

    def gradient_norm(self) -> Tensor:
        """Of all gradients, over all ranks. After finish_gradients()."""
        squares = torch.stack([shard.double().square().sum() for shard in self.gradient_shards()]).sum()
        return self.collectives.sum(squares).sqrt().float()

    def any_rank(self, flag: Tensor) -> Tensor:
        """1 if the flag is set on any rank, else 0."""
        return (self.collectives.sum(flag.float()) > 0).float()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients so that their norm is at most `max_norm`; gives the norm they had."""
        norm = self.gradient_norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for shard in self.gradient_shards():
            shard.mul_(factor)
        return norm

    def _accumulated(self, parameter: Tensor) -> None:
        """Autograd has left a gradient: it belongs into the flat buffer. (A graph has put its own there already.)"""
        if parameter.grad is not None:
            self.flat.grad_buffers[parameter].add_(parameter.grad)
            parameter.grad = None
            self._arrive(parameter)

    def _arrive(self, parameter: Tensor) -> None:
        """A gradient is in the flat buffer: reduce its bucket if it was the last."""
        bucket = self._of[parameter]
        if bucket.index in self._reduced:
            raise RuntimeError(
                f"a gradient of {bucket.name} arrived after its reduction began: put all microbatches but the last "
                "inside no_sync(), and call finish_gradients() after it"
            )
        if not self._syncs:
            return
        self._arrived.add(parameter)
        if self._overlap_reduce:
            self._reduce_what_is_ready()

    def _reduce_what_is_ready(self) -> None:
        """In the order of buckets: all ranks must begin their collectives in the same order, whatever arrives first."""
        for bucket in self._trained:
            if bucket.index not in self._reduced:
                if not self._members[bucket.index] <= self._arrived:
                    return
                self._reduced.add(bucket.index)
                bucket.start_reduce()

    # -- hooks -------------------------------------------------------------------------------------

    def _choose_hooks(self, name: str, module: nn.Module) -> dict[Any, Callable[..., Any]]:
        own = [p for p in module.parameters(recurse=False) if p in self._of]
        hooks: dict[Any, Callable[..., Any]] = {}
        if own:
            hooks["forward_pre"] = lambda module, args: self.before_reading(own)
        if any(p.requires_grad for p in own):
            hooks["gradient"] = self._accumulated
        return hooks

    def _choose_guards(self, name: str, module: nn.Module) -> dict[Any, Callable[..., Any]]:
        own = [p for p in module.parameters(recurse=False) if p in self._of]
        return {"forward_pre": lambda module, args: self._refuse_stale(own)} if own else {}

    def _refuse_stale(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if (reason := self._of[parameter].stale) is not None:
                raise StaleWeights(f"{reason}: gather() first")

    def graph_hooks(self, module: nn.Module) -> GraphHooks:
        """For a graph of this module that has `grad_buffers=self.flat.grad_buffers`: gather before it, reduce after it.

        Nothing of it is recorded. Gradients of warm-up and capture are rolled back, so only replays reduce.
        """
        own = [p for p in module.parameters() if p in self._of]

        def before(target: Any, args: Any, kwargs: Any) -> None:
            self.before_reading(own)

        def after(target: Any) -> None:
            for parameter in own:
                if parameter.requires_grad:
                    self._arrive(parameter)

        everywhere: tuple[Moment, ...] = ("warmup", "capture", "replay")
        return GraphHooks([before], (), (), [after], when={"pre_forward": everywhere, "post_backward": ("replay",)})

    def before_reading(self, parameters: Sequence[Tensor]) -> None:
        """Parameters are about to be read: their buckets must be here, and the next ones on their way.

        Modules call it by their hooks; who reads a parameter without calling its module calls it himself. Gathers
        begin in the order of a forward, whichever module asks first: it is the same on all ranks.
        """
        needed = {self._of[p].index for p in parameters}
        for bucket in self._in_forward_order():
            if bucket.index >= min(needed) - _AHEAD:
                bucket.start_gather()
        for index in needed:
            self.buckets[index].land_gather()

    def close(self) -> None:
        """Wait for what is in flight and take every hook away. The parameters stay where they are."""
        self.gather()
        self.hooks.disable()
        self._guards.disable()
        self._export_guard.remove()


def _pairs(mine: list[str], theirs: list[str]) -> Iterator[tuple[str, str]]:
    length = max(len(mine), len(theirs))
    pad = ["nothing"] * length
    return zip((mine + pad)[:length], (theirs + pad)[:length], strict=True)
