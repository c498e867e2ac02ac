"""AdamW on shards: fp32 master weights and moments of the part that this rank owns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rollgraph.sharding.flat_buffer import ParameterSpec
from rollgraph.sharding.sharded_model import ShardedModel

DecayRule = Callable[[ParameterSpec], bool]
Schedule = Callable[[int], float]  # step -> factor of the learning rate


def decay_matrices(parameter: ParameterSpec) -> bool:
    """The usual rule: weights decay, biases and norms do not."""
    return len(parameter.shape) >= 2


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank owns, and its optimizer state."""

    parameter: ParameterSpec
    start: int  # in the flattened parameter
    master: Tensor  # [elements] fp32, a view of the shard
    state: dict[str, Tensor]  # step, exp_avg, exp_avg_sq


class ShardedAdamW:
    """AdamW over the gradient shards of a model. A step that meets a non-finite gradient is skipped and counted.

    `rate` and the step count are tensors, so a captured step follows them; `schedule` sets the rate in `step()`.
    """

    def __init__(
        self,
        model: ShardedModel,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decays: DecayRule = decay_matrices,
        schedule: Schedule | None = None,
    ) -> None:
        self._model, self.base, self.schedule = model, lr, schedule
        rank, device = model.world.rank, model.world.device
        self.rate = torch.tensor(lr, device=device)
        self.skipped = torch.zeros((), device=device)  # steps that were not taken
        self._found = torch.zeros((), device=device)  # 1 if a gradient of this step is not finite, on any rank
        self.steps = 0
        self.masters: list[Tensor] = []  # fp32, the shard of each trained bucket
        self.pieces: list[Piece] = []
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for bucket in model.flat.buckets:
            if bucket.gradients is None:
                continue
            plan, gradients = bucket.plan, bucket.gradient_shard(rank).float()
            if gradients.data_ptr() != bucket.gradient_shard(rank).data_ptr():
                raise ValueError("ShardedAdamW needs fp32 gradients: grad_dtype=torch.float32")
            master = bucket.shard(rank).float().clone()
            self.masters.append(master)
            for slot, start, end in plan.owned(rank):
                view = master[start:end].requires_grad_()
                view.grad = gradients[start:end]
                groups[decays(slot.parameter)].append(view)
                zeros = torch.zeros_like(view, requires_grad=False)
                state = {"step": torch.zeros((), device=device), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
                place = rank * plan.shard_numel + start - slot.start
                self.pieces.append(Piece(slot.parameter, place, view, state))
        given = [
            {"params": views, "weight_decay": weight_decay if decayed else 0.0}
            for decayed, views in groups.items()
            if views
        ]
        self._adamw = (
            torch.optim.AdamW(given, lr=self.rate, betas=betas, eps=eps, fused=True, capturable=True) if given else None
        )
        if self._adamw is not None:  # all state exists from the start, at addresses that stay
            self._adamw.state.update((piece.master, piece.state) for piece in self.pieces)

    def step(self, loss: Tensor | None = None) -> None:
        """One step on the gradients that finish_gradients() left; then the shards are new and gradients are zero.

        It is skipped, on all ranks, if a gradient or the given loss is not finite on any of them.
        """
        self._model.refuse_unfinished()
        self._model.before_update()
        if self.schedule is not None:
            self.rate.fill_(self.base * self.schedule(self.steps))
        self.check_finite(loss)
        self._model.land_gathers()
        self.steps += 1  # before anything changes: as long as it is the same, so are weights and moments
        self.update()
        self._model.flat.zero_gradients()
        self._model.updated()

    @torch.no_grad()
    def restart(self, lr: float, schedule: Schedule | None) -> None:
        """Forget all moments and begin at step 0 with another learning rate; the weights stay."""
        self.base, self.schedule, self.steps = lr, schedule, 0
        self.rate.fill_(lr)
        self.skipped.zero_()
        for piece in self.pieces:
            for tensor in piece.state.values():
                tensor.zero_()

    @torch.no_grad()
    def check_finite(self, loss: Tensor | None = None) -> None:
        """Ask all ranks whether anything is not finite; the answer stays on the device."""
        checked = [*self._model.gradient_shards(), *([] if loss is None else [loss])]
        bad = [(~tensor.isfinite()).any() for tensor in checked]
        self._found.copy_(self._model.any_rank(torch.stack(bad).any()) if bad else torch.zeros(()))

    @torch.no_grad()
    def update(self) -> None:
        """The part of a step that is only tensor operations: it can be captured."""
        self.skipped.add_(self._found)
        if self._adamw is not None:
            self._adamw.found_inf = self._found  # type: ignore[attr-defined]
            self._adamw.step()
        self.write_shards()

    @torch.no_grad()
    def read_shards(self) -> None:
        """The master weights from the model's parameters, after other weights were loaded into it for good."""
        self._model.before_update()
        for shard, master in self._shards_and_masters():
            master.copy_(shard)

    @torch.no_grad()
    def write_shards(self) -> None:
        """The model's own parameters from the master weights, on this rank's shard."""
        self._model.before_update()
        for shard, master in self._shards_and_masters():
            shard.copy_(master)

    def _shards_and_masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        trained = [bucket for bucket in self._model.flat.buckets if bucket.gradients is not None]
        return zip((bucket.shard(self._model.world.rank) for bucket in trained), self.masters, strict=True)


def constant() -> Schedule:
    return lambda step: 1.0


def linear(total: int, floor: float = 0.0) -> Schedule:
    return lambda step: max(floor, 1.0 - (1.0 - floor) * min(step, total) / total)


def cosine(total: int, floor: float = 0.0) -> Schedule:
    return lambda step: floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(step, total) / total))


def warm_up(steps: int, then: Schedule) -> Schedule:
    """From 0 up to the schedule that follows, which begins where the warm-up ends."""
    return lambda step: (step + 1) / (steps + 1) * then(0) if step < steps else then(step - steps)
