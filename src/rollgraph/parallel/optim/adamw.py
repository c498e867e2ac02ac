"""AdamW on shards: fp32 master weights and moments for this rank's part of each parameter.

`state.py` owns the memory of the state and streams it in chunks; `codecs.py` stores moments in fewer bits. An update
decodes the moments of a chunk, if necessary, and runs PyTorch's fused AdamW on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollgraph.parallel.data.bucket_plan import Offload, ParameterSpec, StateFormat, chunk_elements
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.codecs import MomentCodec, RoundingNoise
from rollgraph.parallel.optim.schedules import Schedule
from rollgraph.parallel.optim.state import OptimizerState, ShardState, StateChunk

DecayRule = Callable[[ParameterSpec], bool]


def decay_matrices(parameter: ParameterSpec) -> bool:
    """The usual rule: weight decay for matrices, none for biases and norms."""
    return len(parameter.shape) >= 2


@dataclass(frozen=True)
class ParameterState:
    """This rank's part of one parameter, and its optimizer state in the stored format."""

    parameter: ParameterSpec
    start: int  # the first element, in the flattened parameter
    elements: int
    fields: ShardState  # views of the shard's state

    @property
    def master(self) -> Tensor:
        """[elements] fp32"""
        return self.fields["master"]

    @property
    def state(self) -> ShardState:
        """The moments exp_avg and exp_avg_sq and, with int8, the exponents of their blocks."""
        return {name: tensor for name, tensor in self.fields.items() if name != "master"}


class ShardedAdamW:
    """AdamW over the gradient shards of a model. A step with a non-finite gradient is skipped and counted.

    `lr` and the number of updates are tensors, so that a captured step reads their current values. `step()` sets `lr`
    from `schedule`. `state` is the format of the moments. `offload` says where moments and master weights are.
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
        state: StateFormat = "fp32",
        offload: Offload = "none",
        seed: int = 0,
    ) -> None:
        self._model = model
        self.base_lr = lr
        self.schedule = schedule
        self._betas = betas
        self._eps = eps
        device = model.world.device
        self.lr = torch.tensor(lr, device=device)
        self.skipped = torch.zeros((), device=device)  # the number of skipped steps
        self.updates = torch.zeros((), device=device)  # the number of other steps
        self._found_inf = torch.zeros((), device=device)  # 1 if a gradient of this step is not finite, on any rank
        self.steps = 0  # of the schedule: all steps, skipped ones included
        self._buckets = [bucket for bucket in model.flat.buckets if bucket.gradients is not None]
        self._check_gradients()
        numels = [bucket.plan.shard_numel for bucket in self._buckets]
        self.state = OptimizerState(numels, state, offload, device)
        self.parameter_states = self.split_by_parameter(self.state.shards)
        self._spans = [self._spans_of(chunk, decays, weight_decay) for chunk in self.state.chunks]
        self._codec: MomentCodec | None = None
        if state != "fp32":
            self._codec = MomentCodec(state, device)
            self._noise = RoundingNoise(device, seed)
            self._moments = torch.empty((2, chunk_elements(numels)), device=device)
        self.read_shards()

    def _check_gradients(self) -> None:
        for bucket in self._buckets:
            if bucket.gradient_shard(self._rank).dtype is not torch.float32:
                raise ValueError("ShardedAdamW needs fp32 gradients: pass grad_dtype=torch.float32 to ShardedModel")

    @property
    def _rank(self) -> int:
        return self._model.world.rank

    @property
    def masters(self) -> list[Tensor]:
        """The fp32 weights of each shard."""
        return [shard["master"] for shard in self.state.shards]

    def split_by_parameter(self, shards: Sequence[ShardState]) -> list[ParameterState]:
        """View shards of state, or copies of them, parameter by parameter."""
        pieces = []
        for bucket, shard in zip(self._buckets, shards, strict=True):
            first = self._rank * bucket.plan.shard_numel
            for slot, start, end in bucket.plan.owned(self._rank):
                fields = self.state.part(shard, start, end)
                pieces.append(ParameterState(slot.parameter, first + start - slot.start, end - start, fields))
        return pieces

    def _spans_of(self, chunk: StateChunk, decays: DecayRule, decay: float) -> dict[float, list[tuple[int, int]]]:
        """The spans (start, end) of parameters in a chunk, by weight decay."""
        spans: dict[float, list[tuple[int, int]]] = {}
        for slot, start, end in self._buckets[chunk.shard].plan.owned(self._rank):
            low = max(start, chunk.start)
            high = min(end, chunk.end)
            if low < high:
                decay_of_parameter = decay if decays(slot.parameter) else 0.0
                spans.setdefault(decay_of_parameter, []).append((low - chunk.start, high - chunk.start))
        return spans

    # -- a step ------------------------------------------------------------------------------------

    def step(self, loss: Tensor | None = None) -> None:
        """Update the shards with the gradients from gradients.finish(), and zero the gradients.

        All ranks skip the step if a gradient, or `loss`, is not finite on any rank.
        """
        self._model.gradients.raise_if_unfinished()
        self._model.before_update()
        if self.schedule is not None:
            self.lr.fill_(self.base_lr * self.schedule(self.steps))
        self.check_finite(loss)
        self._model.wait_for_gathers()  # again: before they wait for each other in the check, ranks start gathers
        self.state.wait_for_reader()
        self.steps += 1  # before anything changes: an unchanged count means unchanged weights and moments
        self.update()
        self._model.flat.zero_gradients()
        self._model.after_update()

    @torch.no_grad()
    def check_finite(self, loss: Tensor | None = None) -> None:
        """Check whether any gradient of any rank is not finite. The result stays on the device."""
        found_inf = torch.zeros_like(self._found_inf)
        shards = self._model.gradients.shards()
        if shards:  # one pass without temporary tensors; it also multiplies by 1
            torch._amp_foreach_non_finite_check_and_unscale_(shards, found_inf, torch.ones_like(found_inf))
        if loss is not None:
            found_inf += ~loss.isfinite().all()
        self._found_inf.copy_(self._model.any_rank(found_inf))

    @torch.no_grad()
    def update(self) -> None:
        """The part of a step that can be captured: tensor operations only."""
        self.skipped.add_(self._found_inf)
        self.updates.add_(1)
        if self._codec is not None:
            self._noise.start_update(self.updates)
        for (chunk, state), spans in zip(self.state.stream(), self._spans, strict=True):
            self._update_chunk(chunk, state, spans)
        self.updates.sub_(self._found_inf)

    def _update_chunk(self, chunk: StateChunk, state: ShardState, spans: dict[float, list[tuple[int, int]]]) -> None:
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        if self._codec is not None:
            exp_avg, exp_avg_sq = self._moments[:, : chunk.elements]
            self._codec.decode(state, exp_avg, exp_avg_sq)
        gradients = self._buckets[chunk.shard].gradient_shard(self._rank)[chunk.start : chunk.end]
        for decay, parts in spans.items():
            self._run_adamw(decay, parts, state["master"], gradients, exp_avg, exp_avg_sq)
        if self._codec is not None:
            self._codec.encode_randomly(exp_avg, exp_avg_sq, self._noise, chunk.first, state)
        self._parameters_of(chunk).copy_(state["master"])

    def _run_adamw(self, decay: float, parts: list[tuple[int, int]], *tensors: Tensor) -> None:
        """Update spans of masters; `tensors` are masters, gradients and both moments. No-op if the step is skipped."""
        masters, gradients, exp_avgs, exp_avg_sqs = ([tensor[low:high] for low, high in parts] for tensor in tensors)
        torch._fused_adamw_(
            masters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [self.updates] * len(parts),
            lr=self.lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            found_inf=self._found_inf,
        )

    def _parameters_of(self, chunk: StateChunk) -> Tensor:
        """The model's parameters of a chunk."""
        return self._buckets[chunk.shard].shard(self._rank)[chunk.start : chunk.end]

    # -- the whole state ---------------------------------------------------------------------------

    @torch.no_grad()
    def restart(self, lr: float, schedule: Schedule | None) -> None:
        """Reset moments and step count, with a new learning rate and schedule. The weights stay."""
        self.base_lr = lr
        self.schedule = schedule
        self.steps = 0
        self.lr.fill_(lr)
        self.skipped.zero_()
        self.updates.zero_()
        self.state.clear_moments()

    @torch.no_grad()
    def read_shards(self) -> None:
        """Copy the model's parameters to the master weights. Call this after loading weights to train."""
        self._model.before_update()
        self.state.before_writing()
        for chunk in self.state.chunks:
            chunk.stored["master"].copy_(self._parameters_of(chunk))

    @torch.no_grad()
    def write_shards(self) -> None:
        """Copy the master weights to this rank's shards of the model's parameters."""
        self._model.before_update()
        self.state.synchronize()
        for chunk in self.state.chunks:
            self._parameters_of(chunk).copy_(chunk.stored["master"])
