"""The graphs that score packed tokens: the log-probability of each of them, in a few static sizes.

Owns these graphs, the division of samples into microbatches, and the arithmetic of log-probabilities. `StepGraphs` adds
training to it; a model that is never trained needs no more than this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollgraph.distributed.world import World
from rollgraph.graph import GraphPool, capture
from rollgraph.graph.capture import BackendName
from rollgraph.graph.hooks import Guard
from rollgraph.inference.decode_graphs import OnCapture
from rollgraph.model import Decoder, Keys, token_logprobs
from rollgraph.model.kernel_compilation import compiling_together
from rollgraph.policy.asked_rows import put_rows, take_rows
from rollgraph.policy.limits import Limits, TokenBucket
from rollgraph.policy.packed_arrays import PackedArrays, fill
from rollgraph.policy.packing import measure, pack
from rollgraph.sharding.tensor_peers import TensorPeers
from rollgraph.types import Sample


@dataclass(frozen=True)
class GraphSettings:
    """How to capture."""

    pool: GraphPool
    backend: BackendName
    scopes: tuple[str, ...] = ("step",)
    on_mismatch: Any = "raise"
    warmup: int = 2


def choose_backend(name: BackendName, world: World, tensor: TensorPeers | None) -> BackendName:
    """What captures the graphs of a worker. `tensor` are the ranks with which these exchange tensors, if any do."""
    if name == "auto":
        name = "cuda" if world.device.startswith("cuda") else "tape"
    if name == "cuda" and tensor is not None and tensor.collectives.staged:
        raise ValueError(
            "ranks that divide layers exchange tensors through host memory here, which no CUDA graph can contain: "
            "use backend='eager'"
        )
    return name


class ScoreGraphs:
    """The captured scoring of a model. `label` names the graphs; `guards` are checked before every replay."""

    def __init__(
        self,
        model: Decoder,
        limits: Limits,
        settings: GraphSettings,
        temperature: float,
        *,
        label: str = "score",
        guards: Sequence[Guard] = (),
    ) -> None:
        self.reader = model  # what scores
        self._limits = limits
        self._settings = settings
        self._temperature = temperature
        self._label = label
        self._guards = list(guards)
        self._device = model.embed.weight.device
        self._whole_step = "step" in settings.scopes
        self.buckets = limits.buckets
        if not self._whole_step:
            self.buckets = tuple(bucket for bucket in limits.buckets if bucket.tokens == limits.token_buckets[-1])
        self._score: dict[TokenBucket, Callable[..., Any]] = {}
        self._with_entropy: Callable[..., Any] | None = None

    # -- inputs ------------------------------------------------------------------------------------

    def plan(
        self, samples: Sequence[Sample], buckets: Sequence[TokenBucket] = ()
    ) -> list[tuple[list[int], TokenBucket]]:
        """Divide samples into microbatches: the indices of the samples, and the smallest bucket they fit."""
        largest = self.buckets[-1].tokens
        planned = []
        for indices in pack(samples, largest, self._limits.sequences(largest)):
            size = measure(samples[index] for index in indices)
            asked = sum(len(samples[index].tokens) for index in indices)
            fitting = [
                bucket
                for bucket in buckets or self.buckets
                if asked <= bucket.logits and size.fits(bucket.tokens, self._limits.sequences(bucket.tokens))
            ]
            planned.append((indices, fitting[0]))
        return planned

    def fill(self, samples: Sequence[Sample], bucket: TokenBucket) -> PackedArrays:
        tokens, logits = bucket
        return fill(samples, tokens, self._limits.sequences(tokens), self._limits.longest(tokens), logits)

    def _upload(self, arrays: PackedArrays) -> tuple[Tensor, ...]:
        """The arrays on the device. From pinned memory, the host does not wait for a replay that still runs."""
        on_host = [torch.from_numpy(array) for array in arrays.tensors]
        if self._device.type == "cuda":
            on_host = [tensor.pin_memory() for tensor in on_host]
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in on_host)

    # -- capture and replay ------------------------------------------------------------------------

    def capture_score(self, progress: OnCapture) -> None:
        for done, bucket in enumerate(reversed(self.buckets)):  # the largest first: the others reuse its memory
            name = f"{self._label} {bucket}"
            progress(name, done, len(self.buckets))
            with torch.no_grad():
                self._score[bucket] = self._capture(self._score_step, bucket, name, [])

    def capture_entropy(self, progress: OnCapture) -> None:
        """Capture scoring with the entropy, in the largest bucket alone: few samples are scored in this way."""
        bucket = self.buckets[-1]
        name = f"{self._label} {bucket}, entropy"
        progress(name, 0, 1)
        with torch.no_grad():
            self._with_entropy = self._capture(self._entropy_step, bucket, name, [])

    def _capture(
        self, step: Callable[..., Any], bucket: TokenBucket, name: str, guards: Sequence[Guard]
    ) -> Callable[..., Any]:
        settings = self._settings
        return capture(
            step, self._upload(self.fill([], bucket)), pool=settings.pool, backend=settings.backend, name=name,
            guards=[*self._guards, *guards], on_mismatch=settings.on_mismatch, warmup=max(1, settings.warmup),
            warmup_in_pool=True, first_run=compiling_together,
        )  # fmt: skip

    def score(self, arrays: PackedArrays) -> Tensor:
        """The log-probability of each token, [tokens]. The result is valid until the next call."""
        with torch.no_grad():
            logprobs: Tensor = self._score[arrays.bucket](*self._upload(arrays))
        return logprobs

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The log-probabilities of the tokens of each sample."""
        return self._score_samples(samples, self.score, self.buckets)

    def logprobs_and_entropies(self, samples: Sequence[Sample]) -> list[tuple[list[float], list[float]]]:
        both = self._score_samples(samples, self._score_with_entropy, self.buckets[-1:])
        return [(logprobs, entropies) for logprobs, entropies in both]

    def _score_with_entropy(self, arrays: PackedArrays) -> Tensor:
        """The log-probability of each token, and the entropy, [2, tokens]."""
        assert self._with_entropy is not None, "call capture_entropy() first"
        with torch.no_grad():
            both: Tensor = self._with_entropy(*self._upload(arrays))
        return both

    def _score_samples(
        self, samples: Sequence[Sample], score: Callable[[PackedArrays], Tensor], buckets: Sequence[TokenBucket]
    ) -> list[Any]:
        """What `score` gives for the tokens of each sample, in its last dimension."""
        scored = []
        for indices, bucket in self.plan(samples, buckets):  # packed while the device works on the one before
            arrays = self.fill([samples[index] for index in indices], bucket)
            scored.append((indices, arrays.starts, score(arrays).clone()))
        results: list[Any] = [None] * len(samples)
        for indices, starts, values in scored:
            on_host = values.cpu()
            for index, start in zip(indices, starts, strict=True):
                results[index] = on_host[..., start : start + len(samples[index].tokens)].tolist()
        return results

    # -- what runs inside the graphs ---------------------------------------------------------------

    @torch.no_grad()
    def _entropy_step(self, *inputs: Tensor) -> Tensor:
        logprobs, entropy = self._logprobs(self.reader, inputs, entropy=True, whole=False)
        assert entropy is not None
        return torch.stack((logprobs, entropy))

    @torch.no_grad()
    def _score_step(self, *inputs: Tensor) -> Tensor:
        logprobs, _ = self._logprobs(self.reader, inputs, entropy=False, whole=False)
        return logprobs

    def _logprobs(
        self, model: Decoder, inputs: Sequence[Tensor], entropy: bool, whole: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The log-probability of each token and, if wanted, its entropy. Both are 0 where there are no logits."""
        ids, positions, targets, _, cu_seqlens, keys, cu_keys, _, *asked = inputs
        hidden = model(ids, positions, cu_seqlens, self._limits.longest(len(ids)), Keys(keys, cu_keys))
        if asked:  # otherwise all tokens have logits
            hidden = take_rows(hidden, asked[0])
            targets = targets.index_select(0, asked[0])
        head = model.head_weight
        self._gather(head)
        chunk = len(hidden) if whole else None
        routes = model.head_routes
        result = token_logprobs(hidden, head, targets, self._temperature, entropy=entropy, chunk=chunk, routes=routes)
        logprobs, entropies = result if isinstance(result, tuple) else (result, None)
        if asked:
            logprobs = put_rows(logprobs, asked[0], len(ids))
            entropies = None if entropies is None else put_rows(entropies, asked[0], len(ids))
        return logprobs, entropies

    def _gather(self, head: Tensor) -> None:
        """Make sure that the head is whole, for a model whose parameters are sharded."""
