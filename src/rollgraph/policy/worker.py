"""The worker: one set of weights that generates, scores and trains, each by replaying captured graphs.

Owns the model, its shards, its optimizer, the pool of all graphs and the engine; knows nothing of data, rewards or the
loop. It is blind to the algorithm: it is given a loss over packed tokens. Everything is captured by `capture_all`,
before the first step, and nothing afterwards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollgraph.distributed.world import World
from rollgraph.graph import GraphPool
from rollgraph.graph.capture import BackendName
from rollgraph.inference import Engine, Progress, SamplingParams
from rollgraph.model import Decoder, save_model
from rollgraph.policy.phases import Phases
from rollgraph.policy.step_graphs import GraphSettings, Limits, Loss, OnCapture, StepGraphs
from rollgraph.policy.weights import POLICY, WeightSlots
from rollgraph.rl.environment import Turn
from rollgraph.rl.losses import means
from rollgraph.sharding import ShardedAdamW, ShardedModel
from rollgraph.telemetry.metrics import to_host
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import Batch, Rollout, Sample

# How far the log-probabilities of a rollout and of training are apart: the mean of exp(|difference|), and the largest.
AGREEMENT = ("token_mult_prob_error", "token_mult_prob_error_max")


@dataclass
class Totals:
    """What a call of `train` adds up on the device, and its padding."""

    metrics: dict[str, Tensor] = field(default_factory=dict)
    agreement: list[Tensor] = field(default_factory=list)  # of each microbatch before the first update, see AGREEMENT
    updates: int = 0
    tokens: int = 0
    places: int = 0
    norms: list[Tensor] = field(default_factory=list)


class PolicyWorker:
    """One process of a run."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        world: World,
        limits: Limits,
        *,
        sampling: SamplingParams,
        optimizer: Mapping[str, Any],
        clip_norm: float | None = 1.0,
        backend: BackendName = "auto",
        scopes: tuple[str, ...] = ("step",),
        on_mismatch: Any = "raise",
        warmup: int = 3,
        reduction: Any = "library",
        verify_weights: bool = False,
    ) -> None:
        if world.size > 1 and "step" in scopes:
            raise ValueError("a graph of a whole step cannot hold the communication of several ranks: use scope layer")
        if model.checkpointing and "step" not in scopes:
            raise ValueError("checkpointing calls a layer twice, which a graph of the layer cannot: use scope step")
        self.model, self.tokenizer, self.world, self.limits = model, tokenizer, world, limits
        self.sharded = ShardedModel(model, world, reduction=reduction)
        self.optimizer = ShardedAdamW(self.sharded, **optimizer)
        self.weights = WeightSlots(self.sharded, verify=verify_weights)
        self.phases = Phases(self.sharded)
        self.pool = GraphPool()
        self.sampling, self._clip_norm = sampling, clip_norm
        self.backend_name: BackendName = _backend_of(world) if backend == "auto" else backend
        settings = GraphSettings(self.pool, self.backend_name, scopes, on_mismatch, warmup)
        temperature, guards = sampling.temperature or 1.0, [self._not_the_policy]
        self._steps = StepGraphs(model, self.sharded, limits, settings, temperature, guards)
        self.engine: Engine | None = None

    def capture_all(self, losses: Mapping[str, tuple[Loss, bool]], on_capture: OnCapture | None = None) -> None:
        """Allocate the cache and capture every graph. `losses` are by name, with whether they want the entropy."""
        progress = on_capture or (lambda name, done, total: None)
        free = torch.cuda.mem_get_info(self.world.device)[0] if self.world.device.startswith("cuda") else 0
        whole_logits = self.limits.keeps_logits(self.model.architecture.vocabulary, free)  # before there is a cache
        with self.phases.enter("generate"):
            self.engine = Engine(
                self.model,
                self.tokenizer,
                rows=self.limits.rows,
                max_length=self.limits.max_length,
                cache_bytes=self._cache_bytes(),
                prefill_tokens=self.limits.prefill_tokens,
                filters=self.sampling.filtered,
                pool=self.pool,
                backend=self.backend_name,
                guards=[self.sharded.stale],
                on_capture=progress,
            )
        with self.phases.enter("score"):
            self._steps.capture_score(progress)
        self._steps.capture_train(losses, "reference" in self.weights, whole_logits, progress)

    def _cache_bytes(self) -> int | None:
        """An engine of its own would take most of what is free; here training needs room beside it."""
        if self.limits.cache_bytes is not None or not self.world.device.startswith("cuda"):
            return self.limits.cache_bytes
        return torch.cuda.mem_get_info(self.world.device)[0] // 2

    def _not_the_policy(self) -> str | None:
        """A guard of training: other weights are in the model."""
        return None if self.weights.current == POLICY else f"the weights in the model are {self.weights.current!r}"

    # -- generate ----------------------------------------------------------------------------------

    def generate(
        self,
        requests: Sequence[tuple[list[int], int]],
        *,
        seed: str,
        params: SamplingParams | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Turn]:
        """Continue token lists, each with a key: the noise of a sample depends on `seed` and its key alone."""
        assert self.engine is not None, "capture_all() first"
        params = params or self.sampling
        room = self.limits.max_length
        each = [
            replace(params, seed=_seed(f"{seed}/{key}"), max_tokens=max(0, min(params.max_tokens, room - len(tokens))))
            for tokens, key in requests
        ]
        with self.phases.enter("generate"):
            outputs = self.engine.generate([tokens for tokens, _ in requests], each, on_progress=on_progress)
        turns = []
        for output in outputs:
            if output.error is not None:
                raise ValueError(f"a prompt of {len(output.prompt_tokens)} tokens cannot be continued: {output.error}")
            (found,) = output.completions
            turns.append(Turn(found.tokens, found.logprobs, found.text, found.finish_reason or "abort"))
        return turns

    # -- score -------------------------------------------------------------------------------------

    def score(self, rollouts: Sequence[Rollout], weights: str = "reference") -> None:
        """Fill `reference_logprobs` of rollouts."""
        samples = [_bare(rollout.prompt.tokens, rollout.tokens, rollout.logprobs) for rollout in rollouts]
        for rollout, found in zip(rollouts, self.logprobs(samples, weights), strict=True):
            rollout.reference_logprobs = [x if on else 0.0 for x, on in zip(found, rollout.sampled, strict=True)]

    def logprobs(self, samples: Sequence[Sample], weights: str = POLICY) -> list[list[float]]:
        """Of the tokens of each sample, under a slot's weights, at the temperature of sampling."""
        results: list[list[float]] = [[] for _ in samples]
        with self.phases.enter("score"), self.weights.use(weights):
            scored = []
            for group, bucket in self._steps.plan(samples):  # one is laid out while the device is busy with the last
                arrays = self._steps.fill([samples[i] for i in group], bucket)
                scored.append((group, arrays.starts, self._steps.score(arrays).clone()))
        for group, starts, values in scored:
            found = values.cpu()
            for index, start in zip(group, starts, strict=True):
                results[index] = found[start : start + len(samples[index].tokens)].tolist()
        return results

    # -- train -------------------------------------------------------------------------------------

    def train(
        self, batch: Batch, loss: str = "policy", *, epochs: int = 1, score_old: bool = False
    ) -> dict[str, float]:
        """One optimizer step for each minibatch. Every rank is given the whole batch and takes its share of each.

        With `score_old` the old log-probabilities are computed first; otherwise they are the rollout's own.
        """
        if not batch.minibatches or not all(batch.minibatches):
            raise ValueError("there is nothing to train on: a batch has minibatches, and a minibatch has samples")
        if not self._steps.has_reference and any(sample.reference_logprobs is not None for sample in batch.samples):
            raise ValueError(
                "the loss was captured without a reference, but samples have one: save() it before capture_all()"
            )
        if score_old:
            mine = [sample for minibatch in batch.minibatches for sample in self._share(minibatch)]
            for sample, logprobs in zip(mine, self.logprobs(mine), strict=True):
                sample.old_logprobs = logprobs
        totals = Totals()
        with self.phases.enter("train"):
            for _ in range(epochs):
                for minibatch in batch.minibatches:
                    self._learn(minibatch, loss, totals)
        return self._summary(totals)

    def _learn(self, minibatch: Sequence[Sample], loss: str, totals: Totals) -> None:
        mine = self._share(minibatch)
        microbatches = self._steps.plan(mine)
        if self.world.size > 1:  # collectives: every rank runs as many
            most = max(int(count) for count in self.sharded.collectives.agree(str(len(microbatches))))
            microbatches += [([], self._steps.buckets[-1])] * (most - len(microbatches))
        for index, (group, bucket) in enumerate(microbatches):
            arrays = self._steps.fill([mine[i] for i in group], bucket)
            agreement, metrics = self._steps.train(loss, arrays, last=index == len(microbatches) - 1)
            if totals.updates == 0:
                totals.agreement.append(agreement.clone())
            for name, value in metrics.items():
                totals.metrics[name] = totals.metrics[name] + value if name in totals.metrics else value.clone()
            totals.tokens += arrays.used
            totals.places += bucket
        self.sharded.finish_gradients(average=False)
        if self._clip_norm is not None:
            totals.norms.append(self.sharded.clip_gradients(self._clip_norm))
        self.optimizer.step()
        totals.updates += 1

    def _share(self, minibatch: Sequence[Sample]) -> list[Sample]:
        """This rank's samples: as many as any other has, give or take one, and those of a prompt side by side."""
        rank, size, count = self.world.rank, self.world.size, len(minibatch)
        ordered = sorted(minibatch, key=lambda sample: tuple(sample.prompt))
        return ordered[count * rank // size : count * (rank + 1) // size]

    def _summary(self, totals: Totals) -> dict[str, float]:
        """Means over all ranks: one transfer from the device, and one more where ranks exchange their sums."""
        names, tokens, places = list(totals.metrics), totals.tokens, totals.places
        apart = torch.stack(totals.agreement)
        sums = torch.stack([*apart[:, :2].sum(0), *(totals.metrics[name] for name in names)])
        largest = apart[:, 2].max()
        if self.world.size > 1:
            mine = [tokens, places, *torch.stack([largest, *sums]).tolist()]
            everyone = [json.loads(said) for said in self.sharded.collectives.agree(json.dumps(mine))]
            tokens, places = (sum(theirs[i] for theirs in everyone) for i in range(2))
            found = torch.tensor([theirs[2:] for theirs in everyone], device=sums.device)
            largest, sums = found[:, 0].max(), found[:, 1:].sum(0)
        values = means(dict(zip(names, sums[2:], strict=True)))
        values |= dict(zip(AGREEMENT, (sums[0] / sums[1].clamp_min(1), largest), strict=True))
        values |= {name: values[name] / totals.updates for name in values.keys() & {"loss", "weight"}}  # of a minibatch
        values |= {"lr": self.optimizer.rate, "skipped_steps": self.optimizer.skipped}
        if totals.norms:
            values["grad_norm"] = torch.stack(totals.norms).mean()
        return {**to_host(values), "padding": 1 - tokens / max(1, places), "train_tokens": float(tokens)}

    # -- several ranks, and the end ----------------------------------------------------------------

    def gather_rollouts(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts of all ranks, in the order of ranks, on every rank; groups are numbered anew."""
        if self.world.size == 1:
            return rollouts
        everyone: list[Rollout] = []
        for said in self.sharded.collectives.agree(json.dumps([rollout.to_dict() for rollout in rollouts])):
            offset = 1 + max((rollout.group for rollout in everyone), default=-1)
            theirs = [Rollout.from_dict(entry) for entry in json.loads(said)]
            everyone += [replace(rollout, group=rollout.group + offset) for rollout in theirs]
        return everyone

    def export(self, folder: Path) -> None:
        """A model folder for other tools, by rank 0."""
        with self.phases.enter("save"):
            if self.world.rank == 0:
                save_model(self.model, folder)
                if self.tokenizer is not None:
                    self.tokenizer.save(folder)

    def close(self) -> None:
        self.pool.reset()
        self.sharded.close()


def _bare(prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> Sample:
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(prompt, tokens, zeros, zeros, logprobs)  # type: ignore[arg-type]


def _backend_of(world: World) -> BackendName:
    return "cuda" if world.device.startswith("cuda") else "tape"


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
