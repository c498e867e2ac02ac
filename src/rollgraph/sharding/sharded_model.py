"""A model whose gradients and optimizer state are sharded, and whose communication runs beside its computation.

Owns when what is communicated: a bucket is reduced when its last gradient has arrived, and gathered before
the first module that reads it. `overlap.py` has the collectives and the versions, `rounds.py` the steps that are
given up, `hook_set.py` the hooks.

Between two optimizer steps every rank begins the same collectives in the same order, whatever it runs: the gathers of
all stale buckets, then the reductions of all trained ones; ranks meet for sums and comparisons before, between or after
these, not amid them. So a rank that fails knows what the others wait for. Nothing writes a parameter or a gradient
while a collective that reads or writes it is in flight.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from rollgraph.distributed.world import World
from rollgraph.graph.hooks import GraphHooks, Moment
from rollgraph.sharding.flat_buffer import FlatBuckets, ParameterSpec, plan_buckets, specs_of
from rollgraph.sharding.hook_set import HookSet, HookState, InertWhenCopied, TreeView
from rollgraph.sharding.overlap import BucketTraffic, Collectives, Reduction, StaleWeights
from rollgraph.sharding.rounds import Rounds, StepGivenUp

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
        collectives: Collectives | None = None,  # instead of those of the world's process group
    ) -> None:
        if not any(True for _ in model.parameters()):
            raise ValueError(f"{type(model).__name__} has no parameters to shard")
        if any(isinstance(h, InertWhenCopied) and not h.is_copy for h in model._state_dict_pre_hooks.values()):
            raise ValueError("the model is in a ShardedModel already: close() that one first")
        self.model, self.world = model, world
        self.collectives = collectives or Collectives(world, reduction, timeout)
        specs = specs_of(model, order)
        plan = plan_buckets(specs, ranks=world.size, bucket_bytes=bucket_bytes)
        settings = {"torch": torch.__version__, "bucket_bytes": bucket_bytes, "grad_dtype": grad_dtype}
        settings |= {"reduction": reduction, "overlap": (overlap_gather, overlap_reduce)}
        name = self._compare_with_other_ranks(settings, specs)
        self._rounds = Rounds(world, self.collectives, name) if world.size > 1 else None
        self._settling = False
        self.collectives.before_starting = self._settle
        self.collectives.before_meeting = self._before_meeting
        self.flat = FlatBuckets(model, plan, grad_dtype=grad_dtype)
        self.flat.before_reading = lambda: self.full_parameters("raise")
        self.flat.before_writing = self.land_gathers
        self.flat.before_zeroing = self._before_zeroing
        self.buckets = [
            BucketTraffic(i, b, self.flat.parameters_of(b), world, self.collectives)
            for i, b in enumerate(self.flat.buckets)
        ]
        self._trained = [bucket for bucket in self.buckets if bucket.bucket.plan.trainable]
        self._members = {b.index: set(b.parameters) for b in self.buckets}
        self._of: dict[Tensor, BucketTraffic] = {p: b for b in self.buckets for p in self._members[b.index]}
        self._overlap_gather, self._overlap_reduce = overlap_gather, overlap_reduce
        self._syncs = True
        self._arrived: set[Tensor] = set()
        self._unfinished = False  # there are gradients that finish_gradients() has not seen
        self._finished = False  # they are summed, and wait for the optimizer's step
        self.lent_to: str | None = None  # whose weights are in the model, if they are not those that are trained
        self.hooks = HookSet(model, self._choose_hooks)
        self._guards = HookSet(model, self._choose_guards)  # never paused: they only refuse
        refuse = InertWhenCopied(lambda module, prefix, keep_vars: self.full_parameters("raise"))
        land = InertWhenCopied(lambda *arguments: self.land_gathers())
        self._own_handles = [
            model.register_state_dict_pre_hook(refuse),
            model.register_load_state_dict_pre_hook(land),
            model.register_forward_pre_hook(InertWhenCopied(lambda module, args: self._follow_tree()), prepend=True),
        ]
        self._tree: TreeView | None = None
        self.hooks.enable()
        self._follow_tree()

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

    def _compare_with_other_ranks(self, settings: dict[str, Any], specs: Sequence[ParameterSpec]) -> str:
        """Raise at the first difference; gives a name for this model that all ranks know."""
        mine = [f"{name} {value}" for name, value in settings.items()]
        mine += [f"{s.name} {s.dtype} {tuple(s.shape)} {'trained' * s.trainable}" for s in specs]
        everyone = self.collectives.agree("\n".join([uuid.uuid4().hex, *mine]))
        for rank, said in enumerate(everyone):
            _, *theirs = said.split("\n")
            if theirs != mine:
                here, there = next((a, b) for a, b in _pairs(mine, theirs) if a != b)
                raise ValueError(f"rank {self.world.rank} has {here!r} where rank {rank} has {there!r}")
        return everyone[0].split("\n")[0]

    # -- parameters --------------------------------------------------------------------------------

    def gather(self) -> None:
        """Make the full parameters those of the last optimizer step."""
        self._settle()
        self._start_gathers()
        self.land_gathers()

    def _start_gathers(self) -> None:
        for bucket in self._in_forward_order():
            bucket.start_gather()

    def land_gathers(self) -> None:
        """Before parameters are written: no gather is in flight afterwards that would overwrite them."""
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
        self._follow_tree()
        if gather:
            self.gather()
        with self.hooks.paused():
            yield

    def refuse_lent(self) -> None:
        """Raise if other weights than those that are trained are in the model."""
        if self.lent_to is not None:
            raise RuntimeError(f"the weights in the model are {self.lent_to!r}, not those that are trained: leave them")

    def before_update(self) -> None:
        """The optimizer is about to write the shards."""
        self.refuse_lent()
        self.flat.check_memory()
        self.land_gathers()

    def updated(self) -> None:
        """The optimizer wrote the shards of all trained buckets, after `before_update()`."""
        for bucket in self._trained:
            bucket.updated()
            increment_version(bucket.parameters)  # so that a backward of a forward before this raises, as it should
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
        self._settle()
        if self._finished:
            raise RuntimeError(
                "the gradients are finished already: the optimizer's step or drop_gradients() comes next"
            )
        self.flat.check_memory()
        self._refuse_strangers()
        self._take_what_hooks_missed()
        self._start_gathers()
        for bucket in self._trained:
            self._start_reduce(bucket)
        self._land_reductions()
        self._refuse_given_up()
        if average:
            count = self.world.size if tokens is None else self.collectives.sum(tokens)
            for shard in self.gradient_shards():
                shard.div_(count)
        self._unfinished, self._finished = False, True

    def refuse_unfinished(self) -> None:
        """Raise if there are gradients that were not summed: a step on them would make ranks differ."""
        self._settle()
        if self._unfinished or any(parameter.grad is not None for parameter in self.flat.grad_buffers):
            raise RuntimeError("there are gradients that were not summed over ranks: finish_gradients() first")

    def _land_reductions(self) -> None:
        for bucket in self._trained:
            bucket.land_reduce()

    def _before_zeroing(self) -> None:
        self._settle()
        self._land_reductions()
        if self._finished:  # the optimizer has used them
            self._begin_round()
            if self._rounds is not None:
                self._rounds.end()

    def _take_what_hooks_missed(self) -> None:
        """Gradients of parameters that had no hook: made during a pause, or of one that was unfrozen since."""
        for parameter in self.flat.grad_buffers:
            self._accumulated(parameter, reduces=False)

    def _refuse_strangers(self) -> None:
        """A parameter that was added or unfrozen since has no place for its gradient, and would drift apart."""
        trained = self.flat.grad_buffers
        strangers = [n for n, p in self.model.named_parameters() if p.requires_grad and p not in trained]
        if strangers:
            raise RuntimeError(
                f"{', '.join(strangers[:3])} requires grad and did not when ShardedModel was made: its gradient would "
                "stay on this rank. Make the ShardedModel after the model is final"
            )

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that will not be finished, after an exception for example.

        With several ranks it waits for nobody. This rank's next collective does, until all ranks have dropped the same
        step; those that call `finish_gradients()` instead are told by `StepGivenUp`. Called again before anything else,
        it is about the same step.
        """
        for parameter in self.flat.grad_buffers:
            parameter.grad = None
        if self._rounds is None:
            self._forget_gradients()
        else:
            self._rounds.give_up(self._finished)

    def _refuse_given_up(self) -> None:
        if self._rounds is None:
            return
        try:
            self._rounds.refuse_given_up()
        except StepGivenUp:
            self.drop_gradients()
            raise

    def _settle(self) -> None:
        """If this rank gave up a step: take part in what the others may wait for, and wait until they gave it up."""
        if self._rounds is None or not self._rounds.given_up or self._settling:
            return
        self._settling = True
        try:
            self._start_gathers()
            self._rounds.wait_for_reductions()
            for bucket in self._trained:
                bucket.start_reduce()
            self._rounds.wait_for_all()
            self._forget_gradients()
            self._rounds.end()
        finally:
            self._settling = False

    def _before_meeting(self) -> None:
        """All ranks are about to wait for each other."""
        self._settle()
        self._start_gathers()

    def _forget_gradients(self) -> None:
        for bucket in self._trained:
            bucket.discard_reduce()
        self._begin_round()
        self.flat.zero_gradients()

    def _begin_round(self) -> None:
        for bucket in self._trained:
            bucket.forget_reduce()
        self._arrived.clear()
        self._unfinished = self._finished = False

    def gradient_shards(self) -> list[Tensor]:
        self._settle()
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

    def _accumulated(self, parameter: Tensor, reduces: bool = True) -> None:
        """Autograd has left a gradient: it belongs into the flat buffer. (A graph has put its own there already.)"""
        buffer = self.flat.grad_buffers.get(parameter)
        if parameter.grad is None or buffer is None:  # finish_gradients() refuses a parameter without a place
            return
        self._settle()
        self._refuse_late(parameter)
        buffer.add_(parameter.grad)
        parameter.grad = None
        self._arrive(parameter, reduces)

    def _refuse_late(self, parameter: Tensor) -> None:
        bucket = self._of[parameter]
        if bucket.reduction_began:
            raise RuntimeError(
                f"a gradient of {bucket.name} arrived after its reduction began: put all microbatches but the last "
                "inside no_sync(), and call finish_gradients() and the optimizer's step after it"
            )

    def _arrive(self, parameter: Tensor, reduces: bool = True) -> None:
        """A gradient is in the flat buffer: reduce its bucket if it was the last."""
        self._refuse_late(parameter)
        self._unfinished = True
        if not self._syncs:
            return
        self._arrived.add(parameter)
        if self._overlap_reduce and reduces:
            self._reduce_what_is_ready()

    def _reduce_what_is_ready(self) -> None:
        """In the order of buckets: all ranks must begin their collectives in the same order, whatever arrives first."""
        for bucket in self._trained:
            if not bucket.reduction_began:
                if not self._members[bucket.index] <= self._arrived:
                    return
                self._start_gathers()  # of buckets that this rank did not read
                self._start_reduce(bucket)

    def _start_reduce(self, bucket: BucketTraffic) -> None:
        if self._rounds is not None:
            self._rounds.begin_to_reduce()
        bucket.start_reduce()

    # -- hooks -------------------------------------------------------------------------------------

    def _follow_tree(self) -> None:
        """Cover modules that came into the tree, and parameters that were exchanged or unfrozen, since the last look.

        The model's own forward looks, and so does every pause.
        """
        tree = TreeView(self.model)
        if self._tree is None or tree.key != self._tree.key:
            self._tree = tree
            self._guards.enable()
            if self.hooks.state is HookState.ON:
                self.hooks.enable()

    def _own(self, module: nn.Module) -> list[Tensor]:
        return [p for p in module._parameters.values() if p is not None and p in self._of]

    def _choose_hooks(self, name: str, module: nn.Module) -> dict[Any, Callable[..., Any]]:
        own = self._own(module)
        if not own and module is not self.model:
            return {}

        def gather(module: nn.Module, args: Any) -> None:
            self.before_reading(self._own(module) or own)  # a capture puts others into their places meanwhile

        return {"forward_pre": gather, "gradient": self._accumulated}

    def _choose_guards(self, name: str, module: nn.Module) -> dict[Any, Callable[..., Any]]:
        own = self._own(module)
        if not own and module is not self.model:
            return {}

        def refuse(module: nn.Module, args: Any) -> None:
            if module not in self.hooks:  # which gather, before or after this
                self._refuse_stale(self._own(module) or own)

        return {"forward_pre": refuse}

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
        self._settle()
        if not parameters:
            return
        needed = {self._of[p].index for p in parameters}
        for bucket in self._in_forward_order():
            if bucket.index >= min(needed) - _AHEAD:
                bucket.start_gather()
        for index in needed:
            self.buckets[index].land_gather()

    def close(self) -> None:
        """Wait for what is in flight and take every hook away. The parameters stay where they are.

        After a step that was given up it waits for nothing: the other ranks may be gone.
        """
        if self._rounds is None or not self._rounds.given_up:
            self.gather()
        self.hooks.disable()
        self._guards.disable()
        for handle in self._own_handles:
            handle.remove()


def _pairs(mine: list[str], theirs: list[str]) -> Iterator[tuple[str, str]]:
    length = max(len(mine), len(theirs))
    pad = ["nothing"] * length
    return zip((mine + pad)[:length], (theirs + pad)[:length], strict=True)
