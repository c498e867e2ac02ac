"""The graphs over packed tokens of the model that is trained: scoring, and a loss with its backward.

With one rank, the forward and backward of a microbatch are one graph per token bucket. With several ranks, or if the
scopes say so, layers or their parts are graphs, whose hooks gather parameters before them and reduce gradients after
them. Owns these graphs and the arithmetic inside them; knows nothing about batches, optimizers or phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollgraph.graph import make_graphed_callables
from rollgraph.graph.hooks import Guard
from rollgraph.inference.decode_graphs import OnCapture
from rollgraph.model import Decoder, Keys
from rollgraph.policy.adapted_weights import AdaptedWeights
from rollgraph.policy.limits import Limits, TokenBucket
from rollgraph.policy.packed_arrays import STREAMS, PackedArrays
from rollgraph.policy.score_graphs import GraphSettings, ScoreGraphs
from rollgraph.rl.losses import TokenStreams
from rollgraph.sharding import ShardedModel, add_gradients

Loss = Callable[[TokenStreams], tuple[Tensor, dict[str, Tensor]]]
_MORE_THAN_ONE = 1 + torch.finfo(torch.float32).eps


@dataclass
class _TrainedLoss:
    """A loss, whether it needs the entropy, and the names of its metrics, which its first call sets."""

    loss: Loss
    entropy: bool
    metric_names: list[str] = field(default_factory=list)


class StepGraphs(ScoreGraphs):
    """The captured steps of a model. `weights` has the guards that are checked before every replay.

    `training_guards` are checked before those that train, too. If parameters are sharded, `reader` is a full copy of
    the model, and whoever makes it sets it before scoring is captured.
    """

    def __init__(
        self,
        model: Decoder,
        sharded: ShardedModel,
        limits: Limits,
        settings: GraphSettings,
        temperature: float,
        weights: AdaptedWeights,
        training_guards: Sequence[Guard] = (),
    ) -> None:
        super().__init__(model, limits, settings, temperature, guards=[weights.stale])
        self._model = model
        self._sharded = sharded
        self._weights = weights
        self._training_guards: list[Guard] = [weights.not_the_policy, *training_guards]
        self.has_reference = False  # whether there was a reference policy when the losses were captured
        self._whole_logits = False
        self._train: dict[tuple[str, TokenBucket], Callable[..., Any]] = {}
        self._losses: dict[str, _TrainedLoss] = {}

    # -- running -----------------------------------------------------------------------------------

    def train(self, name: str, arrays: PackedArrays, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of a loss to those that are there; return how rollout and training agree, and metrics.

        During the backward of the `last` microbatch, the gradients of all ranks are reduced.
        """
        inputs = self._upload(arrays)
        if self._whole_step:
            self._sharded.expect_gradients()
            values = self._train[name, arrays.bucket](*inputs)
        else:
            with ExitStack() as stack:
                if not last:
                    stack.enter_context(self._sharded.no_sync())
                loss, values = self._loss(name, inputs)
                loss.backward()
        values = values.detach()
        return values[:3], dict(zip(self._losses[name].metric_names, values[3:], strict=True))

    # -- capture -----------------------------------------------------------------------------------

    def capture_train(
        self, losses: Mapping[str, tuple[Loss, bool]], reference: bool, whole_logits: bool, progress: OnCapture
    ) -> None:
        """Capture losses, given by name with whether they need the entropy. `reference`: a reference policy exists."""
        self.has_reference = reference
        self._whole_logits = whole_logits
        self._losses = {name: _TrainedLoss(loss, entropy) for name, (loss, entropy) in losses.items()}
        if not self._whole_step:
            progress("train", 0, 1)
            self._capture_units(self.buckets[-1].tokens)
            return
        wanted = [(name, bucket) for name in losses for bucket in reversed(self.buckets)]
        for done, (name, bucket) in enumerate(wanted):
            label = f"train {bucket}" if len(losses) == 1 else f"{name} {bucket}"
            progress(label, done, len(wanted))
            step = partial(self._train_step, name)
            with torch.enable_grad():
                self._train[name, bucket] = self._capture(step, bucket, label, self._training_guards)

    def _capture_units(self, tokens: int) -> None:
        """Capture layers, or attentions and MLPs, with hooks that communicate their parameters and gradients."""
        settings = self._settings
        units, samples = self._units(tokens)
        # The eager backend records nothing, so generation and scoring run the same modules in other shapes.
        on_mismatch: Any = "eager" if settings.backend == "eager" else settings.on_mismatch
        common = [*self._training_guards, self._weights.stale_copies]
        make_graphed_callables(
            tuple(units), tuple(samples), pool=settings.pool, backend=settings.backend, on_mismatch=on_mismatch,
            hooks=[self._sharded.graph_hooks(unit) for unit in units], grad_buffers=self._sharded.flat.grad_buffers,
            num_warmup_iters=max(1, settings.warmup),
            guards=[[*common, *self._sharded.graph_guards(unit)] for unit in units],
        )  # fmt: skip

    def _units(self, tokens: int) -> tuple[list[torch.nn.Module], list[tuple[Any, ...]]]:
        """The modules to capture, and sample arguments for each of them."""
        scopes = self._settings.scopes
        architecture = self._model.architecture
        cu_seqlens, *keys = self._upload(self.fill([], TokenBucket(tokens, tokens)))[4:7]
        cos, sin = (torch.zeros(tokens, architecture.head_dim // 2, device=self._device) for _ in range(2))
        layout = (cos, sin, cu_seqlens, self._limits.longest(tokens), Keys(*keys))

        def hidden(grad: bool) -> Tensor:
            dtype = self._model.embed.weight.dtype
            return torch.zeros((tokens, architecture.hidden), dtype=dtype, device=self._device, requires_grad=grad)

        units: list[torch.nn.Module] = []
        samples: list[tuple[Any, ...]] = []
        in_residual, in_update = self._model.embed.weight.requires_grad, False  # what has a gradient so far
        for layer in self._model.layers:
            if "layer" in scopes:
                units.append(layer)
                samples.append((hidden(in_residual), hidden(in_update), *layout))
            in_residual = in_residual or in_update
            if "attn" in scopes:
                units.append(layer.attention)
                samples.append((hidden(in_residual), *layout))
            in_residual = in_residual or _is_trained(layer.attention)
            if "mlp" in scopes:
                units.append(layer.mlp)
                samples.append((hidden(in_residual),))
            in_update = in_residual or _is_trained(layer.mlp)
            if layer.recomputes:  # autograd sees one function, so both of its results have gradients
                in_residual = in_update
        return units, samples

    # -- what runs inside the graphs ---------------------------------------------------------------

    def _gather(self, head: Tensor) -> None:
        if head.requires_grad:  # otherwise it belongs to a base, which is whole outside of layers
            self._sharded.ensure_gathered([head])

    def _loss(self, name: str, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of a microbatch, and one tensor of values: the agreement of log-probabilities, then its metrics."""
        trained = self._losses[name]
        logprobs, entropy = self._logprobs(self._model, inputs, trained.entropy, self._whole_logits)
        streams = dict(zip(STREAMS, inputs[7].unbind(), strict=True))
        loss, metrics = trained.loss(
            TokenStreams(
                logprobs=logprobs,
                old_logprobs=streams["old_logprobs"],
                rollout_logprobs=streams["logprobs"],
                advantages=streams["advantages"],
                weights=streams["weights"],
                sequence=inputs[3],
                sequences=len(inputs[4]) - 1,
                entropy=entropy,
                reference_logprobs=streams["reference_logprobs"] if self.has_reference else None,
            )
        )
        trained.metric_names = list(metrics)
        agreement = _agreement(logprobs, streams["logprobs"], streams["weights"])
        return loss, torch.cat((agreement, torch.stack([metrics[metric] for metric in trained.metric_names])))

    def _train_step(self, name: str, *inputs: Tensor) -> Tensor:
        """Forward and backward of a whole microbatch; the gradients are added to the flat buffer."""
        loss, values = self._loss(name, inputs)
        add_gradients(loss, self._sharded.flat.grad_buffers)
        return values


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@torch.no_grad()
def _agreement(logprobs: Tensor, rollout_logprobs: Tensor, weights: Tensor) -> Tensor:
    """How far training and rollout differ: sum of exp(|difference|) over trained tokens, their count, the maximum."""
    trained = weights != 0
    difference = torch.where(trained, (logprobs - rollout_logprobs).abs(), 0.0)
    error = difference.clamp_max(20.0).exp()
    error = torch.where(difference > 0, error.clamp_min(_MORE_THAN_ONE), error)  # exp rounds small ones to 1
    return torch.stack(((error * trained).sum(), trained.sum().float(), error.max()))
