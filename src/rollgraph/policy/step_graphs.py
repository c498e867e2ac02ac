"""What runs over packed tokens, captured: scoring, and a loss with its backward, in a few static sizes.

With one rank a microbatch's forward and backward are one graph for each size. With several, or as the scopes say,
layers or their parts are graphs, whose hooks gather parameters before them and reduce gradients after them. Owns these
graphs and the arithmetic inside of them; knows nothing of batches, optimizers or phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollgraph.graph import GraphPool, capture, make_graphed_callables
from rollgraph.graph.capture import BackendName
from rollgraph.graph.hooks import Guard
from rollgraph.model import Decoder, Keys, token_logprobs
from rollgraph.policy.packing import STREAMS, Arrays, fill, measure, pack
from rollgraph.rl.losses import TokenStreams
from rollgraph.sharding import ShardedModel
from rollgraph.types import Sample

Loss = Callable[[TokenStreams], tuple[Tensor, dict[str, Tensor]]]
OnCapture = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Limits:
    """The static shapes of everything that is captured."""

    max_length: int  # of a prompt with its completion
    rows: int = 64  # sequences that decode at a time
    token_buckets: tuple[int, ...] = (4096,)  # tokens of a microbatch, ascending
    tokens_per_sequence: int = 32  # a bucket has room for tokens / this sequences
    cache_bytes: int | None = None
    prefill_tokens: int | None = None
    whole_logits: bool | None = None  # of a microbatch, kept for its backward; None is if memory allows

    def sequences(self, tokens: int) -> int:
        return max(8, tokens // self.tokens_per_sequence)

    def longest(self, tokens: int) -> int:
        """Of the sequences in a bucket, padding included."""
        return min(tokens, self.max_length)

    def keeps_logits(self, vocabulary: int, free: int) -> bool:
        """Whether training keeps those of a whole microbatch, with so many bytes of a GPU free; a CPU has none."""
        if self.whole_logits is not None:
            return self.whole_logits
        return 4 * self.token_buckets[-1] * vocabulary <= free // 8


@dataclass(frozen=True)
class GraphSettings:
    """How to capture."""

    pool: GraphPool
    backend: BackendName
    scopes: tuple[str, ...] = ("step",)
    on_mismatch: Any = "raise"
    warmup: int = 3


@dataclass
class _Captured:
    """A loss, whether it wants the entropy, and the names of its metrics, which its first run tells."""

    loss: Loss
    entropy: bool
    names: list[str] = field(default_factory=list)


class StepGraphs:
    """The captured steps of a model. `training_guards` are checked before every replay that trains."""

    def __init__(
        self,
        model: Decoder,
        sharded: ShardedModel,
        limits: Limits,
        settings: GraphSettings,
        temperature: float,
        training_guards: Sequence[Guard],
    ) -> None:
        self._model, self._sharded, self._limits, self._settings = model, sharded, limits, settings
        self._temperature, self._training_guards = temperature, list(training_guards)
        self._device = model.embed.weight.device
        self._whole = "step" in settings.scopes
        self.buckets = limits.token_buckets if self._whole else limits.token_buckets[-1:]
        self.has_reference = False  # when the losses were captured
        self._whole_logits = False
        self._score: dict[int, Callable[..., Any]] = {}
        self._train: dict[tuple[str, int], Callable[..., Any]] = {}
        self._losses: dict[str, _Captured] = {}

    # -- what they are given -----------------------------------------------------------------------

    def plan(self, samples: Sequence[Sample]) -> list[tuple[list[int], int]]:
        """Which samples go together, and the bucket they fit best."""
        most, sequences = self.buckets[-1], self._limits.sequences
        groups = pack(samples, most, sequences(most))
        sizes = [measure(samples[i] for i in group) for group in groups]
        return [
            (group, next(b for b in self.buckets if size.fits(b, sequences(b))))
            for group, size in zip(groups, sizes, strict=True)
        ]

    def fill(self, samples: Sequence[Sample], bucket: int) -> Arrays:
        return fill(samples, bucket, self._limits.sequences(bucket), self._limits.longest(bucket))

    def _upload(self, arrays: Arrays) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(array).to(self._device) for array in arrays.tensors)

    # -- what they do ------------------------------------------------------------------------------

    def score(self, arrays: Arrays) -> Tensor:
        """The log-probability of each token, [tokens], until the next call."""
        with torch.no_grad():
            found: Tensor = self._score[len(arrays.ids)](*self._upload(arrays))
        return found

    def train(self, name: str, arrays: Arrays, last: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients of a loss, added to those that are there; how far rollout and training are apart, and metrics.

        The gradients of all ranks are added up beside the backward of the `last` one.
        """
        inputs = self._upload(arrays)
        if self._whole:
            found = self._train[name, len(arrays.ids)](*inputs)
        else:
            with nullcontext() if last else self._sharded.no_sync():
                loss, found = self._loss(name, inputs)
                loss.backward()
        found = found.detach()
        return found[:3], dict(zip(self._losses[name].names, found[3:], strict=True))

    # -- capture -----------------------------------------------------------------------------------

    def capture_score(self, progress: OnCapture) -> None:
        for done, tokens in enumerate(reversed(self.buckets), 1):  # the largest first: the others fit into its memory
            with torch.no_grad():
                self._score[tokens] = self._capture(self._score_step, tokens, f"score {tokens}", [])
            progress(f"score {tokens}", done, len(self.buckets))

    def capture_train(
        self, losses: Mapping[str, tuple[Loss, bool]], reference: bool, whole_logits: bool, progress: OnCapture
    ) -> None:
        """`losses` are by name, with whether they want the entropy; `reference`: whether there is one to look at."""
        self.has_reference, self._whole_logits = reference, whole_logits
        self._losses = {name: _Captured(*given) for name, given in losses.items()}
        if not self._whole:
            self._capture_units(self.buckets[-1])
            progress("train", 1, 1)
            return
        wanted = [(name, tokens) for name in losses for tokens in reversed(self.buckets)]
        for done, (name, tokens) in enumerate(wanted, 1):
            label = f"train {tokens}" if len(losses) == 1 else f"{name} {tokens}"
            step = lambda *inputs, name=name: self._train_step(name, *inputs)  # noqa: E731
            with torch.enable_grad():
                self._train[name, tokens] = self._capture(step, tokens, label, self._training_guards)
            progress(label, done, len(wanted))

    def _capture(self, step: Callable[..., Any], tokens: int, name: str, guards: Sequence[Guard]) -> Callable[..., Any]:
        settings = self._settings
        return capture(
            step, self._upload(self.fill([], tokens)), pool=settings.pool, backend=settings.backend, name=name,
            guards=[self._sharded.stale, *guards], on_mismatch=settings.on_mismatch, warmup=max(1, settings.warmup),
        )  # fmt: skip

    def _capture_units(self, tokens: int) -> None:
        """Layers, or attentions and MLPs, as graphs with the communication of their parameters beside them."""
        settings, architecture = self._settings, self._model.architecture
        cu_seqlens, *keys = self._upload(self.fill([], tokens))[4:7]
        angles = tuple(torch.zeros(tokens, architecture.head_dim // 2, device=self._device) for _ in range(2))
        layout = (cu_seqlens, self._limits.longest(tokens), Keys(*keys))

        def stream(grad: bool = True) -> Tensor:
            shape, dtype = (tokens, architecture.hidden), self._model.embed.weight.dtype
            return torch.zeros(shape, dtype=dtype, device=self._device, requires_grad=grad)

        units: list[torch.nn.Module] = []
        samples: list[tuple[Any, ...]] = []
        for index, layer in enumerate(self._model.layers):
            if "layer" in settings.scopes:
                units.append(layer)
                samples.append((stream(), stream(index > 0), *angles, *layout))
                continue
            if "attn" in settings.scopes:
                units.append(layer.attention)
                samples.append((stream(), *angles, *layout))
            if "mlp" in settings.scopes:
                units.append(layer.mlp)
                samples.append((stream(),))
        # Without recordings, generation and scoring run the same modules, in other shapes.
        on_mismatch: Any = "eager" if settings.backend == "eager" else settings.on_mismatch
        make_graphed_callables(
            tuple(units), tuple(samples), pool=settings.pool, backend=settings.backend, on_mismatch=on_mismatch,
            hooks=[self._sharded.graph_hooks(unit) for unit in units], grad_buffers=self._sharded.flat.grad_buffers,
            num_warmup_iters=max(1, settings.warmup), guards=self._training_guards,
        )  # fmt: skip

    # -- what runs inside of graphs ----------------------------------------------------------------

    def _logprobs(self, inputs: Sequence[Tensor], entropy: bool, whole: bool) -> tuple[Tensor, Tensor | None]:
        ids, positions, targets, _, cu_seqlens, *keys, _ = inputs
        hidden = self._model(ids, positions, cu_seqlens, self._limits.longest(len(ids)), Keys(*keys))
        head = self._model.head_weight
        self._sharded.before_reading([head])
        chunk = len(ids) if whole else None
        found = token_logprobs(hidden, head, targets, self._temperature, entropy=entropy, chunk=chunk)
        return found if isinstance(found, tuple) else (found, None)

    @torch.no_grad()
    def _score_step(self, *inputs: Tensor) -> Tensor:
        return self._logprobs(inputs, entropy=False, whole=False)[0]

    def _loss(self, name: str, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of a microbatch, and side by side: the sum of exp(|rollout - training|) over its log-probabilities,
        their number, the largest, and the loss's own metrics."""
        captured = self._losses[name]
        logprobs, entropy = self._logprobs(inputs, captured.entropy, self._whole_logits)
        streams = dict(zip(STREAMS, inputs[7].unbind(), strict=True))
        value, metrics = captured.loss(
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
        captured.names = list(metrics)
        with torch.no_grad():
            live = streams["weights"] != 0
            apart = torch.where(live, (logprobs - streams["logprobs"]).abs(), 0.0).clamp_max(20.0).exp()
            agreement = torch.stack(((apart * live).sum(), live.sum().float(), apart.max()))
        return value, torch.cat((agreement, torch.stack([metrics[metric] for metric in captured.names])))

    def _train_step(self, name: str, *inputs: Tensor) -> Tensor:
        """Forward and backward, gradients added to the flat buffer: the whole microbatch."""
        loss, metrics = self._loss(name, inputs)
        buffers = self._sharded.flat.grad_buffers
        for buffer, gradient in zip(buffers.values(), torch.autograd.grad(loss, list(buffers)), strict=True):
            buffer.add_(gradient)
        return metrics
