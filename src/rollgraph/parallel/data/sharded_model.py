"""A model whose gradients and optimizer state are sharded, and whose communication overlaps with computation.

Owns the parts: flat buffers, hooks, gathers and reductions. `gathers.py` decides when a bucket is gathered,
`reductions.py` when it is reduced, and `hooks.py` which modules trigger that.

With replicated parameters, every rank starts the same collectives in the same order between two optimizer steps,
whatever it runs: the gathers of all stale buckets, then the reductions of all trained ones. Collectives that block all
ranks (sums, exchanged strings) come before, between or after these, never among them. So a rank that fails knows what
the others wait for. Nothing writes a parameter or a gradient while a collective in flight reads or writes it.

With sharded parameters, `parallel/fsdp/ring.py` decides instead, and a rank starts collectives as it runs layers.
`parallel/fsdp/full_parameters.py` has the differences.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rollgraph.graph.hooks import GraphHooks
from rollgraph.parallel.data.bucket_plan import (
    BUCKET_BYTES,
    MemoryPlan,
    Offload,
    ParameterSpec,
    StateFormat,
    plan_buckets,
    plan_memory,
    specs_of,
)
from rollgraph.parallel.data.collectives import Collectives, Reduction
from rollgraph.parallel.data.flat_buffer import FlatBuckets
from rollgraph.parallel.data.gathers import BucketSync, ParameterGathers, StaleWeights
from rollgraph.parallel.data.hooks import HookSet, ModelHooks, is_sharded
from rollgraph.parallel.data.reductions import GradientReductions
from rollgraph.parallel.data.together import StepAborts
from rollgraph.parallel.fsdp.full_parameters import (
    Allocate,
    Gathers,
    RingGathers,
    allocate_zeros,
)
from rollgraph.parallel.fsdp.layout import (
    SLOTS,
    FrozenParts,
    FrozenTensors,
    RingPlan,
    find_frozen,
    frozen_specs,
    names_in,
    plan_ring,
    plan_units,
)
from rollgraph.parallel.fsdp.ring import Ring, RingReductions
from rollgraph.parallel.ranks.world import World
from rollgraph.parallel.tensor.peers import TensorPeers

# -- the same model on all ranks -------------------------------------------------------------------
# Checked before any memory is allocated.


def check_same_on_all_ranks(
    collectives: Collectives, rank: int, settings: Mapping[str, Any], parameters: Sequence[ParameterSpec]
) -> str:
    """Raise if settings or parameters differ between ranks. Returns a unique name for this model, the same on all."""
    own_lines = [f"{name} {value}" for name, value in settings.items()]
    for spec in parameters:
        trained = "trained" if spec.trainable else ""
        own_lines.append(f"{spec.name} {spec.dtype} {tuple(spec.shape)} {trained}")
    names = []
    for peer, text in enumerate(collectives.all_gather_text("\n".join([uuid.uuid4().hex, *own_lines]))):
        name, *peer_lines = text.split("\n")
        names.append(name)
        for here, there in zip_longest(own_lines, peer_lines, fillvalue="nothing"):
            if here != there:
                raise ValueError(f"rank {rank} has {here!r} where rank {peer} has {there!r}")
    return names[0]


# -- the model -------------------------------------------------------------------------------------

Sharded = Literal["optimizer", "parameters"]


class ShardedModel:
    """Sharded data parallelism over `world`.

    `shard="optimizer"`, as ZeRO-2: replicated parameters, gradients that are reduced to shards, and sharded optimizer
    state. `shard="parameters"`, as FSDP or ZeRO-3: sharded parameters, too. Then `units`, the layers in the order of a
    forward, are gathered into a ring of `slots` when they run, with their `frozen` tensors. With a single rank there is
    nothing to shard, and the layout is that of "optimizer".

    Call the model itself as before. A step consists of forward and backward of each microbatch (all but the last one
    inside `gradients.no_sync()`), `gradients.finish()`, and the optimizer's step. `order` names the parameters in the
    order in which a forward reaches them (see `execution_order`); the default is the order of registration.
    `collectives` replaces those of the world's process group. `tensor` is this rank's tensor parallel group; `world`
    then consists of the ranks with the same tensor parallel shards.
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
        self.swapped_in: str | None = None  # the weight slot in the model, unless it holds the trained weights
        self._overlap_gather = overlap_gather
        self._grad_dtype = grad_dtype
        specs = specs_of(model, order)
        self._ring_plan: RingPlan | None = None
        frozen_by_unit: list[FrozenTensors] = []
        if shard == "parameters" and world.size > 1:
            frozen_by_unit = find_frozen(frozen, units)
            specs_of_frozen = [frozen_specs(tensors) for tensors in frozen_by_unit]
            self._ring_plan = plan_units(
                specs, names_in(model, units), ranks=world.size, slots=slots, frozen=specs_of_frozen
            )
            specs = [*specs, *chain.from_iterable(specs_of_frozen)]
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
        self._check_same_model = partial(check_same_on_all_ranks, self.collectives, world.rank, settings, specs)
        aborts = self._make_aborts()

        plan = self._ring_plan or plan_buckets(specs, ranks=world.size, bucket_bytes=bucket_bytes)
        all_frozen = {name: tensors for of_unit in frozen_by_unit for name, tensors in of_unit.items()}
        self.flat = FlatBuckets(
            model,
            plan,
            grad_dtype=grad_dtype,
            rank=world.rank,
            frozen=all_frozen,
            before_reading=self._before_reading,
            before_writing=self.wait_for_gathers,
            after_writing=lambda: self.gathers.after_writing(),
            before_zeroing=lambda: self.gradients.before_zeroing(),
        )
        self.shards_parameters = self._ring_plan is not None
        self.gathers: Gathers
        self.gradients: GradientReductions
        if self._ring_plan is None:
            buckets = [
                BucketSync(index, bucket, self.flat.parameters_of(bucket), world, self.collectives)
                for index, bucket in enumerate(self.flat.buckets)
            ]
            trained = [bucket for bucket in buckets if bucket.bucket.plan.trainable]
            gathers = ParameterGathers(buckets)
            self.gathers = gathers
            self.gradients = GradientReductions(
                self.flat, trained, gathers, world, self.collectives, overlap=overlap_reduce, aborts=aborts,
                tensor=tensor,
            )  # fmt: skip
        else:
            overlap = (overlap_gather, overlap_reduce)
            refreshes = [] if frozen is None else [frozen.refresh(unit) for unit in units]
            ring = Ring(self._ring_plan, self.flat, world, self.collectives, overlap, frozen_by_unit, refreshes)
            self.gathers = RingGathers(ring, world, self.collectives, units, frozen)
            self.gradients = RingReductions(self.flat, ring, world, self.collectives, aborts)
        self.collectives.before_starting = self.gradients.join_abort
        self.collectives.before_blocking = self._before_blocking
        self._model_hooks = ModelHooks(model, self, units)

    def _before_reading(self) -> None:
        """The resident parameters are about to be read: replicated ones must be up to date, shards always are."""
        if not self.shards_parameters:
            self.require_full_parameters("raise")

    def _make_aborts(self) -> StepAborts | None:
        name = self._check_same_model()
        return StepAborts(self.world, self.collectives, name) if self.world.size > 1 else None

    def rejoin(self, world: World) -> None:
        """Continue with the ranks of the next attempt, after this one failed. Rank and world size must be the same.

        Collectives in flight are forgotten. All memory stays where it is, so graphs stay valid, but a step may have
        changed only parts of it: load a checkpoint next.
        """
        self.gathers.abandon()
        self.collectives.rejoin(world)
        self.world = world
        self.gradients.rejoin(self._make_aborts)

    @property
    def hooks(self) -> HookSet:
        """The hooks that gather and reduce."""
        return self._model_hooks.hooks

    def plan(self, state: StateFormat = "fp32", offload: Offload = "none") -> MemoryPlan:
        """The memory on this rank, with optimizer state in this format, on the device or offloaded."""
        if self._ring_plan is not None:
            return plan_ring(self._ring_plan, self._grad_dtype, state, offload)
        return plan_memory((bucket.plan for bucket in self.flat.buckets), self._grad_dtype, state, offload)

    def close(self) -> None:
        """Wait for collectives in flight, unless a step was aborted (other ranks may be gone), and remove all hooks."""
        if not self.gradients.aborted:
            self._before_blocking()
            self.wait_for_gathers()
        self._model_hooks.remove()

    # -- parameters --------------------------------------------------------------------------------

    def gather(self) -> None:
        """Bring the full parameters up to date with the last optimizer step."""
        self._before_blocking()
        self.wait_for_gathers()
        self.gathers.refresh_full()

    def _before_blocking(self) -> None:
        """Start the collectives that precede one in which all ranks wait for each other."""
        self.gradients.join_abort()
        self.gathers.start()

    def wait_for_gathers(self) -> None:
        """Call this before parameters are written: a gather in flight would overwrite them."""
        if self.gathers.joins_abort_first:
            self.gradients.join_abort()
        self.gathers.wait()

    def ensure_gathered(self, parameters: Sequence[Tensor]) -> None:
        """Call this before reading a parameter directly. For modules, a hook does."""
        self.gradients.join_abort()
        self.gathers.ensure_gathered(parameters)

    def enter_unit(self, parameters: Sequence[Tensor], direction: int) -> None:
        """Gather the layer, or part of a layer, with these parameters, which is about to run forward or backward."""
        self.gradients.join_abort()
        self.gathers.enter(parameters, direction)

    def require_full_parameters(self, if_stale: Literal["raise", "gather"]) -> None:
        """Call this before reading all parameters, for generation, scoring, export or a checkpoint."""
        if if_stale == "gather":
            self.gather()
            return
        reason = self.gathers.stale()
        if reason is not None:
            raise StaleWeights(f"{reason}: call gather() first")

    def make_full_model(self, allocate: Allocate = allocate_zeros) -> nn.Module:
        """The model to use after `gather()` for whatever reads all parameters at once.

        This is the model itself or, with sharded parameters, a copy whose layers are unsharded.
        """
        return self.gathers.make_full_model(self.model, allocate)

    def refresh_full_parameters(self) -> None:
        """Bring the full parameters up to date, if parameters are sharded."""
        if self.shards_parameters:
            self.gather()

    @contextmanager
    def writing_full_model(self) -> Iterator[None]:
        """Inside, write the same parameters of `make_full_model()` on all ranks. Afterwards, shards are updated."""
        self.refresh_full_parameters()
        try:
            yield
        except BaseException:
            self.gathers.invalidate_full_parameters()
            raise
        self.wait_for_gathers()
        self.gathers.update_shards()

    def before_resident_access(self) -> None:
        """Call this on all ranks before the `resident` parameters of the buckets are copied, or swapped for others.

        After a swap, call `gathers.after_writing()` on all ranks.
        """
        self._before_blocking()
        self.wait_for_gathers()

    def before_state_dict(self) -> None:
        self.gathers.refuse_state_dict("and take its state_dict()")
        self.require_full_parameters("raise")

    def before_load_state_dict(self) -> None:
        self.gathers.refuse_state_dict("or use flat.load()")
        self.wait_for_gathers()

    @contextmanager
    def paused(self, gather: bool) -> Iterator[None]:
        """Run no hooks inside. With `gather`, gather the full parameters first; without, stale parameters raise."""
        self._model_hooks.cover_module_tree()
        if gather:
            self.gather()
        with self.hooks.paused():
            yield

    # -- the optimizer's step ----------------------------------------------------------------------

    def raise_if_swapped(self) -> None:
        """Raise unless the model holds the trained weights."""
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
        if not self.gathers.after_update(self.gradients.buckets, ahead=self._overlap_gather):
            self.gather()

    # -- all ranks ---------------------------------------------------------------------------------

    def any_rank(self, flag: Tensor) -> Tensor:
        """1 if the flag is set on any rank, otherwise 0."""
        what = "an agreement of all ranks"
        total = self.collectives.sum(flag.float(), what)
        if self.tensor is not None:
            total = self.tensor.sum(total, what)
        return (total > 0).float()

    def exchange_text(self, text: str) -> list[str]:
        """The text that each rank passed, of all ranks and in their order."""
        texts = self.collectives.all_gather_text(text)
        return texts if self.tensor is None else self.tensor.exchange_columns(texts)

    @property
    def rank(self) -> int:
        """The rank among all ranks; `world.rank` is that in the data parallel group."""
        return self.world.rank if self.tensor is None else self.world.rank * self.tensor.size + self.tensor.rank

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.world.size * self.tensor_parallel

    @property
    def tensor_parallel(self) -> int:
        """The size of the tensor parallel group."""
        return 1 if self.tensor is None else self.tensor.size

    def graph_hooks(self, module: nn.Module) -> GraphHooks:
        """Hooks for a graph of `module` that was captured with `grad_buffers=self.flat.grad_buffers`.

        They gather before its forward and reduce after its backward, outside of the graph. The gradients of warm-up and
        capture are rolled back, so only replays reduce.
        """
        return self._model_hooks.graph_hooks(module)
