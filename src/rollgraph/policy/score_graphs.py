"""Captured scoring: the log-probability of every token of a packed microbatch, with one graph per token bucket.

Owns these graphs and the log-probabilities that they compute. A model that is never trained needs only this file;
`TrainGraphs` adds training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollgraph.graph import GraphPool, capture_lazily
from rollgraph.graph.capture import BackendName
from rollgraph.graph.hooks import Guard
from rollgraph.inference.decode_graphs import OnCapture
from rollgraph.model import Decoder, PackedKeys, token_logprobs
from rollgraph.model.kernels.launch import compiling_together
from rollgraph.parallel.ranks.world import World
from rollgraph.parallel.tensor.peers import TensorPeers
from rollgraph.policy.microbatch import Limits, PackedArrays, TokenBucket
from rollgraph.types import Sample

# -- rows that need logits -------------------------------------------------------------------------
# No row index repeats, so forward and backward only copy rows. Nothing is summed, so no order of summation matters.


def gather_rows(values: Tensor, rows: Tensor) -> Tensor:
    """The rows `values[rows]`. All other rows get a gradient of 0."""
    selected: Tensor = _GatherRows.apply(values, rows)  # type: ignore[no-untyped-call]
    return selected


def scatter_rows(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """The inverse of `gather_rows`: a tensor of `count` rows with `values` at `rows`, and 0 elsewhere."""
    return values.new_zeros(count, *values.shape[1:]).index_copy(0, rows, values)


class _GatherRows(torch.autograd.Function):
    """index_select, but with a backward that does not add up rows with atomics on a GPU."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(values)
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad_selected: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return scatter_rows(grad_selected, rows, ctx.count), None


# -- the graphs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaptureSettings:
    """How a worker captures its graphs."""

    pool: GraphPool
    backend: BackendName
    scopes: tuple[str, ...] = ("step",)
    on_mismatch: Any = "raise"
    warmup: int = 2

    @property
    def captures_ahead(self) -> bool:
        """Whether graphs are captured before they are needed. On a CPU, the first call of a graph records it."""
        return self.backend == "cuda"


def resolve_backend(name: BackendName, world: World, tensor: TensorPeers | None) -> BackendName:
    """The capture backend of a worker: "auto" becomes CUDA graphs on a GPU and the tape on a CPU.

    `tensor` is the tensor parallel group, if there is one. Its collectives must run inside the graphs.
    """
    if name == "auto":
        name = "cuda" if world.device.startswith("cuda") else "tape"
    if name == "cuda" and tensor is not None and tensor.collectives.staged:
        raise ValueError(
            "tensor parallel ranks exchange tensors through host memory here, which no CUDA graph can contain: "
            "use backend='eager'"
        )
    return name


class ScoreGraphs:
    """The scoring graphs of a model. `label` is part of their names; `guards` are checked before every replay.

    `gather` is called before a parameter is read directly; where a module reads it, a hook does that.
    """

    def __init__(
        self,
        model: Decoder,
        limits: Limits,
        settings: CaptureSettings,
        temperature: float,
        *,
        label: str = "score",
        guards: Sequence[Guard] = (),
        gather: Callable[[Sequence[Tensor]], None] = lambda parameters: None,
    ) -> None:
        self.full_model = model  # with full (unsharded) parameters: scoring runs this one
        self._limits = limits
        self._settings = settings
        self._temperature = temperature
        self._label = label
        self._guards = list(guards)
        self._gather = gather
        self._device = model.embed_tokens.weight.device
        self._whole_step = "step" in settings.scopes
        self.buckets = limits.buckets
        if not self._whole_step:
            self.buckets = tuple(bucket for bucket in limits.buckets if bucket.tokens == limits.token_buckets[-1])
        self._score: dict[TokenBucket, Callable[..., Any]] = {}
        self._with_entropy: Callable[..., Any] | None = None

    # -- capture and replay ------------------------------------------------------------------------

    def capture_score(self, progress: OnCapture) -> None:
        """Create the scoring graphs, and capture them now if graphs are captured ahead."""
        for done, bucket in enumerate(reversed(self.buckets)):  # the largest first: the others reuse its memory
            name = f"{self._label} {bucket}"
            report = partial(progress, name, done, len(self.buckets))
            with torch.no_grad():
                self._score[bucket] = self._make_graph(self._score_step, bucket, name, [], report)

    def capture_entropy(self, progress: OnCapture) -> None:
        """The same for scoring with entropies, in the largest bucket only: few samples are scored this way."""
        bucket = self.buckets[-1]
        name = f"{self._label} {bucket}, entropy"
        with torch.no_grad():
            self._with_entropy = self._make_graph(self._entropy_step, bucket, name, [], partial(progress, name, 0, 1))

    def _make_graph(
        self,
        step: Callable[..., Any],
        bucket: TokenBucket,
        name: str,
        guards: Sequence[Guard],
        report: Callable[[], None],
    ) -> Callable[..., Any]:
        settings = self._settings
        graph = capture_lazily(
            step, pool=settings.pool, backend=settings.backend, name=name, guards=[*self._guards, *guards],
            on_mismatch=settings.on_mismatch, warmup=max(1, settings.warmup), warmup_in_pool=True,
            first_run=compiling_together,
        )  # fmt: skip
        if settings.captures_ahead:
            report()
            graph.capture(*self._limits.collate([], bucket).to(self._device))
        return graph

    def score(self, arrays: PackedArrays) -> Tensor:
        """The log-probability of each token, [tokens]. The result is valid until the next call."""
        with torch.no_grad():
            logprobs: Tensor = self._score[arrays.bucket](*arrays.to(self._device))
        return logprobs

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The log-probabilities of the tokens of each sample."""
        return self._score_samples(samples, self.score, self.buckets)

    def logprobs_and_entropies(self, samples: Sequence[Sample]) -> list[tuple[list[float], list[float]]]:
        scored = self._score_samples(samples, self._score_with_entropy, self.buckets[-1:])
        return [(logprobs, entropies) for logprobs, entropies in scored]

    def _score_with_entropy(self, arrays: PackedArrays) -> Tensor:
        """Log-probabilities and entropies, [2, tokens]."""
        assert self._with_entropy is not None, "call capture_entropy() first"
        with torch.no_grad():
            logprobs_and_entropies: Tensor = self._with_entropy(*arrays.to(self._device))
        return logprobs_and_entropies

    def _score_samples(
        self, samples: Sequence[Sample], score: Callable[[PackedArrays], Tensor], buckets: Sequence[TokenBucket]
    ) -> list[Any]:
        """The values that `score` returns, cut along its last dimension into the tokens of each sample."""
        scored = []
        for indices, bucket in self._limits.plan(samples, buckets):
            # The host lays out a microbatch while the device runs the one before: nothing here reads a device value.
            arrays = self._limits.collate([samples[index] for index in indices], bucket)
            values = score(arrays).clone()  # the next call overwrites the result
            scored.append((indices, arrays.starts, values))
        results: list[Any] = [None] * len(samples)
        for indices, starts, values in scored:
            host_values = values.cpu()
            for index, start in zip(indices, starts, strict=True):
                results[index] = host_values[..., start : start + len(samples[index].tokens)].tolist()
        return results

    # -- what runs inside the graphs ---------------------------------------------------------------

    @torch.no_grad()
    def _entropy_step(self, *inputs: Tensor) -> Tensor:
        logprobs, entropy = self._logprobs(self.full_model, inputs, needs_entropy=True, whole_logits=False)
        assert entropy is not None
        return torch.stack((logprobs, entropy))

    @torch.no_grad()
    def _score_step(self, *inputs: Tensor) -> Tensor:
        logprobs, _ = self._logprobs(self.full_model, inputs, needs_entropy=False, whole_logits=False)
        return logprobs

    def _logprobs(
        self, model: Decoder, inputs: Sequence[Tensor], needs_entropy: bool, whole_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The log-probability of each token and, if `needs_entropy`, its entropy; 0 for tokens without logits."""
        ids, positions, targets, _, cu_seqlens, keys, cu_keys, _, *optional_rows = inputs
        hidden = model(ids, positions, cu_seqlens, self._limits.longest(len(ids)), PackedKeys(keys, cu_keys))
        if optional_rows:  # otherwise all tokens have logits
            hidden = gather_rows(hidden, optional_rows[0])
            targets = targets.index_select(0, optional_rows[0])
        head = model.head_weight
        if head.requires_grad:  # a frozen head is never sharded
            self._gather([head])
        chunk = len(hidden) if whole_logits else None
        algos = model.head_algos
        result = token_logprobs(
            hidden, head, targets, self._temperature, entropy=needs_entropy, chunk=chunk, algos=algos
        )
        logprobs, entropies = result if isinstance(result, tuple) else (result, None)
        if optional_rows:
            logprobs = scatter_rows(logprobs, optional_rows[0], len(ids))
            entropies = None if entropies is None else scatter_rows(entropies, optional_rows[0], len(ids))
        return logprobs, entropies
