"""Captured training: the forward, loss and backward of a packed microbatch, and the metrics of an update.

With one rank, the whole forward and backward of a microbatch is one graph per token bucket. With several ranks, or if
the scopes say so, each layer, attention or MLP is a graph; hooks gather its parameters before it runs and reduce its
gradients afterwards. Owns these graphs and what they compute; knows nothing about batches, optimizers or phases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollgraph.graph import make_graphed_callables
from rollgraph.graph.direct_sums import direct_sums
from rollgraph.graph.hooks import Guard
from rollgraph.inference.decode_graphs import OnCapture
from rollgraph.log.metrics import to_host
from rollgraph.model import Decoder, PackedKeys
from rollgraph.parallel.data.collectives import Collectives
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.policy.microbatch import STREAMS, Limits, PackedArrays, TokenBucket
from rollgraph.policy.score_graphs import CaptureSettings, ScoreGraphs
from rollgraph.policy.weights import AdaptedWeights
from rollgraph.rl.losses import TokenStreams, means

# -- the backward of a whole step ------------------------------------------------------------------


def add_gradients(loss: Tensor, buffers: Mapping[Tensor, Tensor]) -> None:
    """Add the gradient of each parameter to its buffer. `.grad` is neither used nor changed.

    If a parameter is used in several places, autograd sums its gradient before it is added.
    """
    with ExitStack() as handles:
        for parameter, grad_sum in handles.enter_context(direct_sums(buffers)).items():
            handles.callback(parameter.register_hook(grad_sum.add).remove)
        torch.autograd.grad(loss, list(buffers))


# -- the graphs ------------------------------------------------------------------------------------

Loss = Callable[[TokenStreams], tuple[Tensor, dict[str, Tensor]]]
_ABOVE_ONE = 1 + torch.finfo(torch.float32).eps


@dataclass
class _TrainedLoss:
    """A loss, whether it needs entropies, and the names of its metrics, which its first call sets."""

    loss: Loss
    needs_entropy: bool
    metric_names: list[str] = field(default_factory=list)


class TrainGraphs(ScoreGraphs):
    """The training and scoring graphs of a model. The guards of `weights` are checked before every replay.

    `training_guards` are additional guards of training. If parameters are sharded, `full_model` is a second model that
    holds the full parameters; the worker creates it and sets it here before scoring is captured.
    """

    def __init__(
        self,
        model: Decoder,
        sharded: ShardedModel,
        limits: Limits,
        settings: CaptureSettings,
        temperature: float,
        weights: AdaptedWeights,
        training_guards: Sequence[Guard] = (),
    ) -> None:
        super().__init__(model, limits, settings, temperature, guards=weights.guards, gather=sharded.ensure_gathered)
        self._model = model
        self._sharded = sharded
        self._weights = weights
        self._training_guards: list[Guard] = [weights.not_the_policy, *training_guards]
        self.has_reference = False  # whether a reference policy existed when the losses were captured
        self._whole_logits = False
        self._train: dict[tuple[str, TokenBucket], Callable[..., Any]] = {}
        self._losses: dict[str, _TrainedLoss] = {}

    # -- running -----------------------------------------------------------------------------------

    def train(self, name: str, arrays: PackedArrays, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Accumulate the gradients of a loss. Returns `_agreement` with the rollout, [3], and the loss's metrics.

        Gradients are reduced across ranks during the backward of the `last` microbatch.
        """
        inputs = arrays.to(self._device)
        if self._whole_step:
            self._sharded.gradients.expect_all()
            values = self._train[name, arrays.bucket](*inputs)
        else:
            with ExitStack() as stack:
                if not last:
                    stack.enter_context(self._sharded.gradients.no_sync())
                loss, values = self._loss(name, inputs)
                loss.backward()
        values = values.detach()
        return values[:3], dict(zip(self._losses[name].metric_names, values[3:], strict=True))

    # -- capture -----------------------------------------------------------------------------------

    def capture_train(
        self, losses: Mapping[str, tuple[Loss, bool]], has_reference: bool, whole_logits: bool, progress: OnCapture
    ) -> None:
        """Create the training graphs, and capture them now if graphs are captured ahead.

        `losses` maps a name to a loss and whether it needs entropies. `has_reference`: there is a reference policy.
        """
        self.has_reference = has_reference
        self._whole_logits = whole_logits
        self._losses = {name: _TrainedLoss(loss, needs_entropy) for name, (loss, needs_entropy) in losses.items()}
        if not self._whole_step:
            progress("train", 0, 1)
            self._capture_modules(self.buckets[-1].tokens)
            return
        graphs = [(name, bucket) for name in losses for bucket in reversed(self.buckets)]
        for done, (name, bucket) in enumerate(graphs):
            label = f"train {bucket}" if len(losses) == 1 else f"{name} {bucket}"
            step, report = partial(self._train_step, name), partial(progress, label, done, len(graphs))
            with torch.enable_grad():
                self._train[name, bucket] = self._make_graph(step, bucket, label, self._training_guards, report)

    def _capture_modules(self, tokens: int) -> None:
        """Capture each layer, attention or MLP, with hooks that gather its parameters and reduce its gradients."""
        settings = self._settings
        modules, samples = self._list_modules(tokens)
        # The eager backend records nothing: generation and scoring run the same modules, with other shapes.
        on_mismatch: Any = "eager" if settings.backend == "eager" else settings.on_mismatch
        common_guards = [*self._training_guards, *self._weights.copy_guards]
        make_graphed_callables(
            tuple(modules), tuple(samples), pool=settings.pool, backend=settings.backend, on_mismatch=on_mismatch,
            hooks=[self._sharded.graph_hooks(module) for module in modules],
            grad_buffers=self._sharded.flat.grad_buffers, num_warmup_iters=max(1, settings.warmup),
            guards=[[*common_guards, *self._sharded.gathers.guards_of(module)] for module in modules],
        )  # fmt: skip

    def _list_modules(self, tokens: int) -> tuple[list[torch.nn.Module], list[tuple[Any, ...]]]:
        """The modules to capture, and sample arguments for each."""
        scopes = self._settings.scopes
        architecture = self._model.architecture
        cu_seqlens, *keys = self._limits.collate([], TokenBucket(tokens, tokens)).to(self._device)[4:7]
        cos, sin = (torch.zeros(tokens, architecture.head_dim // 2, device=self._device) for _ in range(2))
        layout = (cos, sin, cu_seqlens, self._limits.longest(tokens), PackedKeys(*keys))

        def hidden(grad: bool) -> Tensor:
            dtype = self._model.embed_tokens.weight.dtype
            return torch.zeros((tokens, architecture.hidden), dtype=dtype, device=self._device, requires_grad=grad)

        modules: list[torch.nn.Module] = []
        samples: list[tuple[Any, ...]] = []
        residual_needs_grad, update_needs_grad = self._model.embed_tokens.weight.requires_grad, False
        for layer in self._model.layers:
            if "layer" in scopes:
                modules.append(layer)
                samples.append((hidden(residual_needs_grad), hidden(update_needs_grad), *layout))
            residual_needs_grad = residual_needs_grad or update_needs_grad
            if "attn" in scopes:
                modules.append(layer.self_attn)
                samples.append((hidden(residual_needs_grad), *layout))
            residual_needs_grad = residual_needs_grad or _is_trainable(layer.self_attn)
            if "mlp" in scopes:
                modules.append(layer.mlp)
                samples.append((hidden(residual_needs_grad),))
            update_needs_grad = residual_needs_grad or _is_trainable(layer.mlp)
            if layer.recomputes:  # autograd sees one function, so both of its outputs need gradients
                residual_needs_grad = update_needs_grad
        return modules, samples

    # -- what runs inside the graphs ---------------------------------------------------------------

    def _loss(self, name: str, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of a microbatch, and one tensor of values: three for the agreement, then the loss's metrics."""
        trained = self._losses[name]
        logprobs, entropy = self._logprobs(self._model, inputs, trained.needs_entropy, self._whole_logits)
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
        """Forward and backward of a whole microbatch; gradients are added to the flat buffer."""
        loss, values = self._loss(name, inputs)
        add_gradients(loss, self._sharded.flat.grad_buffers)
        return values


def _is_trainable(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@torch.no_grad()
def _agreement(logprobs: Tensor, rollout_logprobs: Tensor, weights: Tensor) -> Tensor:
    """How far the log-probabilities of training and rollout differ, [3].

    The sum of exp(|difference|) over trained tokens, the number of these tokens, and the largest exp(|difference|).
    """
    trained = weights != 0
    difference = torch.where(trained, (logprobs - rollout_logprobs).abs(), 0.0)
    error = difference.clamp_max(20.0).exp()
    error = torch.where(difference > 0, error.clamp_min(_ABOVE_ONE), error)  # exp rounds small differences to 1
    return torch.stack(((error * trained).sum(), trained.sum().float(), error.max()))


# -- metrics ---------------------------------------------------------------------------------------

# The metrics of a loss are logged under `policy/`, except for these two.
LOSS_METRICS = {"loss": "loss", "weight": "loss/weight"}
# How far the log-probabilities of rollout and training differ: the mean and the maximum of exp(|difference|).
AGREEMENT_METRICS = ("policy/token_mult_prob_error", "policy/token_mult_prob_error_max")


@dataclass
class TrainTotals:
    """Running sums over one call of `train`."""

    has_rollout_logprobs: bool = True  # whether to compare training with the log-probabilities of the rollout
    metrics: dict[str, Tensor] = field(default_factory=dict)
    agreement: list[Tensor] = field(default_factory=list)  # [3] of each microbatch before the first update
    updates: int = 0
    samples: int = 0
    tokens: int = 0
    bucket_tokens: int = 0  # tokens and padding
    grad_norms: list[Tensor] = field(default_factory=list)

    def add_microbatch(
        self, agreement: Tensor, metrics: Mapping[str, Tensor], tokens: int, bucket: int, samples: int
    ) -> None:
        """Add the values of a microbatch. Tensors are copied, because the next replay overwrites them."""
        if self.updates == 0:
            self.agreement.append(agreement.clone())
        for name, value in metrics.items():
            if name in self.metrics:
                self.metrics[name] = self.metrics[name] + value
            else:
                self.metrics[name] = value.clone()
        self.tokens += tokens
        self.bucket_tokens += bucket
        self.samples += samples


def reduce_metrics(
    totals: TrainTotals, collectives: Collectives, ranks: int, extra_metrics: Mapping[str, Tensor]
) -> dict[str, float]:
    """Average the metrics over all ranks. One transfer from the device, and one more if there are several ranks."""
    agreement = torch.stack(totals.agreement)  # [microbatches, 3]
    largest = agreement[:, 2].max()
    sums = torch.stack([*agreement[:, :2].sum(0), *totals.metrics.values()])
    tokens = totals.tokens
    bucket_tokens = totals.bucket_tokens
    if ranks > 1:
        local = [tokens, bucket_tokens, *torch.stack([largest, *sums]).tolist()]
        by_rank = [json.loads(text) for text in collectives.all_gather_text(json.dumps(local))]
        tokens = sum(values[0] for values in by_rank)
        bucket_tokens = sum(values[1] for values in by_rank)
        gathered = torch.tensor([values[2:] for values in by_rank], device=sums.device)
        largest = gathered[:, 0].max()
        sums = gathered[:, 1:].sum(0)
    metrics = {}
    for name, value in means(dict(zip(totals.metrics, sums[2:], strict=True))).items():
        if name in LOSS_METRICS:
            metrics[LOSS_METRICS[name]] = value / totals.updates  # per minibatch
        else:
            metrics[f"policy/{name}"] = value
    if totals.has_rollout_logprobs:
        mean_error = sums[0] / sums[1].clamp_min(1)
        metrics |= dict(zip(AGREEMENT_METRICS, (mean_error, largest), strict=True))
    metrics |= extra_metrics
    if totals.grad_norms:
        metrics["optimizer/grad_norm"] = torch.stack(totals.grad_norms).mean()
    return {**to_host(metrics), "tokens/padding": 1 - tokens / max(1, bucket_tokens), "tokens/train": float(tokens)}
