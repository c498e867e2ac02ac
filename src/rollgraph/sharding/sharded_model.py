"""A model whose gradients and optimizer state are sharded, and whose communication overlaps with computation.

Owns the parts: flat buffers, hooks, gathers and reductions. `parameter_gathers.py` decides when a bucket is gathered,
`gradient_reductions.py` when it is reduced, and `model_hooks.py` which modules ask for that. If the parameters are
sharded, too, `ring.py` and `ring_gradients.py` decide instead, and ranks start what the modules they run ask for;
`held_parameters.py` has what differs then.

Otherwise, between two optimizer steps, every rank starts the same collectives in the same order, whatever it runs: the
gathers of all stale buckets, then the reductions of all trained ones. Collectives that block all ranks (sums, exchanged
strings) come before, between or after these, never among them. So a rank that fails knows what the others wait for.
Nothing writes a parameter or a gradient while a collective in flight reads or writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from rollgraph.distributed.world import World
from rollgraph.graph.hooks import GraphHooks, Guard
from rollgraph.sharding.bucket_plan import BUCKET_BYTES, plan_buckets, specs_of
from rollgraph.sharding.bucket_sync import BucketSync, StaleWeights
from rollgraph.sharding.collectives import Collectives, Reduction
from rollgraph.sharding.flat_buffer import FlatBuckets
from rollgraph.sharding.frozen_parts import FrozenParts, FrozenTensors, find_frozen, frozen_specs
from rollgraph.sharding.full_copy import Allocate, allocate_zeros
from rollgraph.sharding.gradient_reductions import GradientReductions
from rollgraph.sharding.held_parameters import HeldParameters, RingParameters, WholeParameters
from rollgraph.sharding.hook_set import HookSet
from rollgraph.sharding.model_hooks import ModelHooks, is_sharded
from rollgraph.sharding.ring import Ring
from rollgraph.sharding.ring_gradients import RingReductions
from rollgraph.sharding.ring_plan import SLOTS, RingPlan, names_in, plan_ring, plan_units
from rollgraph.sharding.same_model import check_same_on_all_ranks
from rollgraph.sharding.state_memory import MemoryPlan, Offload, StateFormat, plan_memory
from rollgraph.sharding.step_abort import StepAborts
from rollgraph.sharding.tensor_peers import TensorPeers

Sharded = Literal["optimizer", "parameters"]


class ShardedModel:
    """Data parallel over `world`: full parameters on every rank, gradients reduced into shards.

    With `shard="parameters"` each rank keeps a shard of the parameters, too. `units`, the layers in the order of a
    forward, are gathered into a ring of `slots` when they run, with what is `frozen` in them. With one rank there is
    nothing to divide, and the layout is that of "optimizer".

    Call the model itself as before. One step is: forward and backward of each microbatch (all but the last inside
    `no_sync()`), `finish_gradients()`, the optimizer's step. `order` names the parameters in the order in which a
    forward reaches them (see `execution_order`); the default is the order in which they were registered. `collectives`
    replaces those of the world's process group. With `tensor`, other ranks divide each layer with this one, and the
    ranks of `world` are those that have the same pieces of it.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        overlap_gather: bool = True,
        overlap_reduce: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        grad_dtype: torch.dtype = torch.float32,
        reduction: Reduction = "library",
        timeout: float = 600.0,
        order: Sequence[str] = (),
        collectives: Collectives | None = None,
        shard: Sharded = "optimizer",
        units: Sequence[nn.Module] = (),
        slots: int = SLOTS,
        frozen: FrozenParts | None = None,
        tensor: TensorPeers | None = None,
    ) -> None:
        if next(model.parameters(), None) is None:
            raise ValueError(f"{type(model).__name__} has no parameters to shard")
        if is_sharded(model):
            raise ValueError("the model is in a ShardedModel already: close() that one first")
        self.model = model
        self.world = world
        self.collectives = collectives or Collectives(world, reduction, timeout)
        self.tensor = tensor
        self.swapped_in: str | None = None  # the weight slot in the model, if it does not hold the trained weights
        self._overlap_gather = overlap_gather
        self._grad_dtype = grad_dtype
        specs = specs_of(model, order)
        self._ring_plan: RingPlan | None = None
        beside: list[FrozenTensors] = []  # the frozen tensors of each unit
        if shard == "parameters" and world.size > 1:
            beside = find_frozen(frozen, units)
            also = [frozen_specs(tensors) for tensors in beside]
            self._ring_plan = plan_units(specs, names_in(model, units), ranks=world.size, slots=slots, frozen=also)
            specs = [*specs, *chain.from_iterable(also)]
        else:
            units = ()
        settings = {
            "torch": torch.__version__,
            "bucket_bytes": bucket_bytes,
            "grad_dtype": grad_dtype,
            "reduction": reduction,
            "overlap": (overlap_gather, overlap_reduce),
            "shard": (shard, len(units), slots),
        }
        self._agree_on_model = partial(check_same_on_all_ranks, self.collectives, world.rank, settings, specs)
        aborts = self._begin_aborts()

        plan = self._ring_plan or plan_buckets(specs, ranks=world.size, bucket_bytes=bucket_bytes)
        every = {name: tensors for of_unit in beside for name, tensors in of_unit.items()}
        self.flat = FlatBuckets(model, plan, grad_dtype=grad_dtype, rank=world.rank, frozen=every)
        self.has_copies = self._ring_plan is not None  # what reads all parameters at once reads a full copy of them
        self._parameters: HeldParameters
        self._gradients: GradientReductions
        if self._ring_plan is None:
            buckets = [
                BucketSync(index, bucket, self.flat.parameters_of(bucket), world, self.collectives)
                for index, bucket in enumerate(self.flat.buckets)
            ]
            trained = [bucket for bucket in buckets if bucket.bucket.plan.trainable]
            whole = WholeParameters(model, buckets)
            self._parameters = whole
            self._gradients = GradientReductions(
                self.flat, trained, whole.gathers, world, self.collectives, overlap=overlap_reduce, aborts=aborts,
                tensor=tensor,
            )  # fmt: skip
            self.flat.before_reading = lambda: self.require_full_parameters("raise")
        else:
            overlap = (overlap_gather, overlap_reduce)
            refreshes = [] if frozen is None else [frozen.refresh(unit) for unit in units]
            ring = Ring(self._ring_plan, self.flat, world, self.collectives, overlap, beside, refreshes)
            self._parameters = RingParameters(model, ring, world, self.collectives, units, frozen)
            self._gradients = RingReductions(self.flat, ring, world, self.collectives, aborts)
            self.flat.after_writing = ring.after_writing
        self.collectives.before_starting = self._gradients.join_abort
        self.collectives.before_blocking = self._before_blocking
        self.flat.before_writing = self.wait_for_gathers
        self.flat.before_zeroing = self._gradients.before_zeroing
        self._model_hooks = ModelHooks(model, self._parameters.known, self, units)

    def _begin_aborts(self) -> StepAborts | None:
        name = self._agree_on_model()
        return StepAborts(self.world, self.collectives, name) if self.world.size > 1 else None

    def rejoin(self, world: World) -> None:
        """Go on with the ranks of the next attempt, as the same rank of as many, after the last one was left broken.

        What was in flight is forgotten. All memory stays where it is, so graphs stay valid, but what is in it may be of
        half a step: load a checkpoint next.
        """
        self.abandon()
        self.collectives.rejoin(world)
        self.world = world
        self._gradients.rejoin(self._begin_aborts)

    def abandon(self) -> None:
        """Forget what was in flight when the ranks of an attempt were lost: nothing waits for it any more."""
        self._parameters.abandon()

    @property
    def hooks(self) -> HookSet:
        """The hooks that gather and reduce."""
        return self._model_hooks.hooks

    def plan(self, state: StateFormat = "fp32", offload: Offload = "none") -> MemoryPlan:
        """The memory on this rank, with optimizer state of this format in this place."""
        if self._ring_plan is not None:
            return plan_ring(self._ring_plan, self._grad_dtype, state, offload)
        return plan_memory((bucket.plan for bucket in self.flat.buckets), self._grad_dtype, state, offload)

    def close(self) -> None:
        """Wait for what is in flight, unless a step was aborted (other ranks may be gone), and remove all hooks."""
        if not self._gradients.aborted:
            self._before_blocking()
            self.wait_for_gathers()
        self._model_hooks.remove()

    # -- parameters --------------------------------------------------------------------------------

    def gather(self) -> None:
        """Bring the full parameters up to date with the last optimizer step; with a ring, those of the full copy."""
        self._before_blocking()
        self.wait_for_gathers()
        self._parameters.complete()

    def _before_blocking(self) -> None:
        """All ranks are about to wait for each other: take part in everything that comes before."""
        self._gradients.join_abort()
        self._parameters.start()

    def wait_for_gathers(self) -> None:
        """Call this before parameters are written: afterwards no gather in flight can overwrite them."""
        if self._parameters.catches_up:
            self._gradients.join_abort()
        self._parameters.wait()

    def ensure_gathered(self, parameters: Sequence[Tensor]) -> None:
        """Call this before reading a parameter directly. Modules do it in a hook."""
        self._gradients.join_abort()
        self._parameters.ensure(parameters)

    def enter_unit(self, parameters: Sequence[Tensor], toward: int) -> None:
        """A unit, or a part of it, with these parameters is about to run forward or backward."""
        self._gradients.join_abort()
        self._parameters.enter(parameters, toward)

    def stale(self) -> str | None:
        """Why parameters must not be read now, None if they may. As a guard of a graph, no pause switches it off."""
        return self._parameters.stale()

    def raise_if_stale(self, parameters: Sequence[Tensor]) -> None:
        self._parameters.raise_if_stale(parameters)

    def require_full_parameters(self, if_stale: Literal["raise", "gather"]) -> None:
        """Call this before reading all parameters, for generation, scoring, export or a checkpoint."""
        if if_stale == "gather":
            self.gather()
            return
        reason = self.stale()
        if reason is not None:
            raise StaleWeights(f"{reason}: call gather() first")

    def make_reader(self, allocate: Allocate = allocate_zeros) -> nn.Module:
        """What reads all parameters at once after `gather()`: the model, or a full copy of it in memory of its own."""
        return self._parameters.make_reader(allocate)

    def refresh_copy(self) -> None:
        """Bring a full copy up to date, if there is one."""
        if self.has_copies:
            self.gather()

    @contextmanager
    def writing_reader(self) -> Iterator[None]:
        """Inside, weights of `make_reader()` are written, alike on all ranks: they are the model's from then on."""
        self.refresh_copy()
        try:
            yield
        except BaseException:
            self.forget_copy()
            raise
        self.wait_for_gathers()
        self._parameters.keep_reader()

    def forget_copy(self) -> None:
        """Let the memory of a full copy hold something else, until the next `gather()`."""
        self._parameters.forget_reader()

    def before_exchange(self) -> None:
        """Every rank is about to exchange what it keeps of the parameters, `kept` of each bucket, for others."""
        self._before_blocking()
        self.wait_for_gathers()

    def after_exchange(self) -> None:
        """Every rank has exchanged what it keeps of the parameters: shards have to be gathered anew."""
        self._parameters.after_exchange()

    def before_state_dict(self) -> None:
        self._parameters.refuse_state_dict("and take its state_dict()")
        self.require_full_parameters("raise")

    def before_load_state_dict(self) -> None:
        self._parameters.refuse_state_dict("or use flat.load()")
        self.wait_for_gathers()

    @contextmanager
    def paused(self, gather: bool) -> Iterator[None]:
        """Run no hook inside. With `gather`, the full parameters are gathered first; without, stale ones raise."""
        self._model_hooks.follow_tree()
        if gather:
            self.gather()
        with self.hooks.paused():
            yield

    # -- the optimizer's step ----------------------------------------------------------------------

    def raise_if_swapped(self) -> None:
        """Raise if the model holds other weights than those that are trained."""
        if self.swapped_in is not None:
            raise RuntimeError(
                f"the weights in the model are {self.swapped_in!r}, not the trained ones: leave that slot"
            )

    def before_update(self) -> None:
        """The optimizer is about to write the shards."""
        self.raise_if_swapped()
        self.flat.check_memory()
        self.wait_for_gathers()

    def after_update(self) -> None:
        """The optimizer has written the shards of all trained buckets, after `before_update()`."""
        if not self._parameters.after_update(self._gradients.buckets, ahead=self._overlap_gather):
            self.gather()

    # -- gradients ---------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients are only accumulated inside, not reduced."""
        return self._gradients.no_sync()

    def accumulate_gradient(self, parameter: Tensor) -> None:
        """Autograd has left a gradient in `parameter.grad`."""
        self._gradients.accumulate(parameter)

    def gradient_arrived(self, parameter: Tensor) -> None:
        """A graph has added a gradient to the flat buffer."""
        self._gradients.arrive(parameter)

    def expect_gradients(self) -> None:
        """A graph of a whole step is about to add gradients of all parameters to the flat buffer."""
        self._gradients.expect_all()

    def finish_gradients(self, *, tokens: Tensor | None = None, average: bool = True) -> None:
        """Reduce what has not been reduced yet, wait, and average over the ranks, or over the `tokens` of all ranks.

        Without `average` the sums stay as they are, for a loss whose weights add up over all ranks.
        """
        self._gradients.finish(self.model, tokens, average)

    def raise_if_unfinished(self) -> None:
        """Raise if there are gradients that were not reduced: a step on them would make the ranks diverge."""
        self._gradients.raise_if_unfinished()

    def drop_gradients(self) -> None:
        """Drop the gradients of a step that will not be finished, for example after an exception.

        With several ranks this waits for no one. The next collective of this rank waits until all ranks have dropped
        the same step; ranks that call `finish_gradients()` instead raise `StepAborted`. A second call before anything
        else refers to the same step.
        """
        self._gradients.drop()

    @property
    def has_gradients(self) -> bool:
        """Whether the flat buffer has gradients that the optimizer has not used."""
        return self._gradients.pending

    def lend_gradients(self) -> None:
        """Let `flat.gradient_memory` hold something else. Until it is taken back, whatever uses gradients raises."""
        self._gradients.lend()

    def take_back_gradients(self) -> None:
        """Zero the gradients and use their memory for them again, if it was lent."""
        self._gradients.take_back()

    def gradient_shards(self) -> list[Tensor]:
        """This rank's part of the gradients, one tensor per bucket."""
        return self._gradients.shards()

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients over all ranks, after `finish_gradients()`."""
        return self._gradients.norm()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm they had."""
        return self._gradients.clip(max_norm)

    def any_rank(self, flag: Tensor) -> Tensor:
        """1 if the flag is set on any rank, otherwise 0."""
        what = "an agreement of all ranks"
        total = self.collectives.sum(flag.float(), what)
        if self.tensor is not None:
            total = self.tensor.sum(total, what)
        return (total > 0).float()

    def exchange_text(self, text: str) -> list[str]:
        """What each of all ranks passed, in their order."""
        texts = self.collectives.all_gather_text(text)
        return texts if self.tensor is None else self.tensor.exchange_columns(texts)

    @property
    def rank(self) -> int:
        """Among all ranks: also those that divide layers with this one."""
        return self.world.rank if self.tensor is None else self.world.rank * self.tensor.size + self.tensor.rank

    @property
    def ranks(self) -> int:
        """How many there are in all."""
        return self.world.size * self.tensor_parallel

    @property
    def tensor_parallel(self) -> int:
        """How many ranks divide each layer."""
        return 1 if self.tensor is None else self.tensor.size

    def graph_hooks(self, module: nn.Module) -> GraphHooks:
        """Hooks for a graph of `module` that was captured with `grad_buffers=self.flat.grad_buffers`.

        They gather before its forward and reduce after its backward. Nothing of that is recorded. The gradients of
        warm-up and capture are rolled back, so only replays reduce.
        """
        return self._model_hooks.graph_hooks(module)

    def graph_guards(self, module: nn.Module) -> list[Guard]:
        """Guards of a graph of `module`, for `make_graphed_callables`: its slot holds what it is bound to."""
        return self._parameters.guards_of(module)
