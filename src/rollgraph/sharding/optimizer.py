"""AdamW on shards: fp32 master weights and moments for the part of each parameter that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rollgraph.sharding.bucket_plan import ParameterSlice, ParameterSpec
from rollgraph.sharding.flat_buffer import Bucket
from rollgraph.sharding.schedules import Schedule
from rollgraph.sharding.sharded_model import ShardedModel

DecayRule = Callable[[ParameterSpec], bool]


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
    """AdamW over the gradient shards of a model. A step with a non-finite gradient is skipped and counted.

    `rate` and the step count are tensors, so a captured step follows them. `step()` sets the rate from `schedule`.
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
        self._model = model
        self.base = lr
        self.schedule = schedule
        device = model.world.device
        self.rate = torch.tensor(lr, device=device)
        self.skipped = torch.zeros((), device=device)  # how many steps were skipped
        self._found_inf = torch.zeros((), device=device)  # 1 if a gradient of this step is not finite, on any rank
        self.steps = 0
        self.masters: list[Tensor] = []  # fp32, the shard of each trained bucket
        self.pieces: list[Piece] = []
        for bucket in self._trained_buckets():
            self._add_bucket(bucket)
        decayed = [piece.master for piece in self.pieces if decays(piece.parameter)]
        not_decayed = [piece.master for piece in self.pieces if not decays(piece.parameter)]
        groups = []
        if decayed:
            groups.append({"params": decayed, "weight_decay": weight_decay})
        if not_decayed:
            groups.append({"params": not_decayed, "weight_decay": 0.0})
        self._adamw: torch.optim.AdamW | None = None
        if groups:
            self._adamw = torch.optim.AdamW(groups, lr=self.rate, betas=betas, eps=eps, fused=True, capturable=True)
            # All state exists from the start, at addresses that stay.
            self._adamw.state.update((piece.master, piece.state) for piece in self.pieces)

    def _trained_buckets(self) -> list[Bucket]:
        return [bucket for bucket in self._model.flat.buckets if bucket.gradients is not None]

    def _add_bucket(self, bucket: Bucket) -> None:
        rank = self._model.world.rank
        gradients = bucket.gradient_shard(rank)
        if gradients.dtype is not torch.float32:
            raise ValueError("ShardedAdamW needs fp32 gradients: pass grad_dtype=torch.float32 to ShardedModel")
        master = bucket.shard(rank).float().clone()
        self.masters.append(master)
        for slot, start, end in bucket.plan.owned(rank):
            view = master[start:end].requires_grad_()
            view.grad = gradients[start:end]
            self.pieces.append(self._make_piece(slot, rank * bucket.plan.shard_numel + start - slot.start, view))

    def _make_piece(self, slot: ParameterSlice, start: int, master: Tensor) -> Piece:
        state = {
            "step": torch.zeros((), device=master.device),
            "exp_avg": torch.zeros_like(master, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
        }
        return Piece(slot.parameter, start, master, state)

    def step(self, loss: Tensor | None = None) -> None:
        """One step on the gradients that finish_gradients() left; it updates the shards and zeroes the gradients.

        All ranks skip it if a gradient, or the given loss, is not finite on any of them.
        """
        self._model.raise_if_unfinished()
        self._model.before_update()
        if self.schedule is not None:
            self.rate.fill_(self.base * self.schedule(self.steps))
        self.check_finite(loss)
        self._model.wait_for_gathers()
        self.steps += 1  # before anything changes: an unchanged count means unchanged weights and moments
        self.update()
        self._model.flat.zero_gradients()
        self._model.after_update()

    @torch.no_grad()
    def restart(self, lr: float, schedule: Schedule | None) -> None:
        """Forget all moments and start again at step 0 with another learning rate. The weights stay."""
        self.base = lr
        self.schedule = schedule
        self.steps = 0
        self.rate.fill_(lr)
        self.skipped.zero_()
        for piece in self.pieces:
            for tensor in piece.state.values():
                tensor.zero_()

    @torch.no_grad()
    def check_finite(self, loss: Tensor | None = None) -> None:
        """Ask all ranks whether any gradient is not finite. The answer stays on the device."""
        checked = self._model.gradient_shards()
        if loss is not None:
            checked.append(loss)
        if not checked:
            self._found_inf.zero_()
            return
        non_finite = torch.stack([(~tensor.isfinite()).any() for tensor in checked])
        self._found_inf.copy_(self._model.any_rank(non_finite.any()))

    @torch.no_grad()
    def update(self) -> None:
        """The part of a step that consists of tensor operations only, so that it can be captured."""
        self.skipped.add_(self._found_inf)
        if self._adamw is not None:
            self._adamw.found_inf = self._found_inf  # type: ignore[attr-defined]
            self._adamw.step()
        self.write_shards()

    @torch.no_grad()
    def read_shards(self) -> None:
        """Copy the model's parameters to the master weights. Call this after loading weights that are to be trained."""
        self._model.before_update()
        for shard, master in self._shards_and_masters():
            master.copy_(shard)

    @torch.no_grad()
    def write_shards(self) -> None:
        """Copy the master weights to this rank's shard of the model's parameters."""
        self._model.before_update()
        for shard, master in self._shards_and_masters():
            shard.copy_(master)

    def _shards_and_masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        for bucket, master in zip(self._trained_buckets(), self.masters, strict=True):
            yield bucket.shard(self._model.world.rank), master
