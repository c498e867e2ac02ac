"""The worker: one set of weights that generates, scores and trains, always by replaying captured graphs.

Owns the model, its shards, its optimizer, the inference engine and the pool of all graphs. It knows nothing about data,
rewards or the training loop, nor the algorithm, which is passed in as a loss over packed tokens. `capture_all` captures
every graph before the first step, and nothing is captured afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rollgraph.graph import GraphPool
from rollgraph.graph.capture import BackendName
from rollgraph.inference import Engine, SamplingParams
from rollgraph.inference.decode_graphs import OnCapture
from rollgraph.inference.kv_cache import CachePlan, plan_cache
from rollgraph.inference.sizes import BLOCK_SIZE
from rollgraph.model import Decoder, save_model
from rollgraph.model.gemm.autotune import GemmReport, clear_gemm_algos
from rollgraph.model.tensor_parallel import TensorParallelGroup
from rollgraph.model.tensor_shards import model_shards
from rollgraph.model.weights.adapter_files import save_adapter
from rollgraph.parallel.data.collectives import Collectives
from rollgraph.parallel.data.sharded_model import Sharded, ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from rollgraph.parallel.tensor.peers import TensorPeers, make_grid
from rollgraph.policy.exactness import Exactness, make_exact
from rollgraph.policy.generate import OnProgress, TurnGenerator
from rollgraph.policy.microbatch import Limits, sample_to_score, shard_minibatch
from rollgraph.policy.phases import PhaseMemory, Phases
from rollgraph.policy.score_graphs import CaptureSettings, ScoreGraphs, resolve_backend
from rollgraph.policy.train_graphs import Loss, TrainGraphs, TrainTotals, reduce_metrics
from rollgraph.policy.weights import POLICY, SHARDED_BASE, AdaptedWeights, WeightSlots
from rollgraph.rl.turns import Request, Turn
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import Batch, Rollout, Sample

# -- process groups --------------------------------------------------------------------------------


class ParallelGroups:
    """This rank's process groups. Each `tensor_parallel` consecutive ranks form a tensor parallel group.

    `data` is the data parallel group of this rank. `group` is its tensor parallel group, for the model, or None.
    """

    def __init__(self, world: World, tensor_parallel: int) -> None:
        grid = make_grid(world, tensor_parallel)
        self.data = grid.data
        self.group: TensorParallelGroup | None = None
        self._world = grid.tensor
        if grid.tensor is not None:
            self._collectives = Collectives(grid.tensor)
            collectives = self._collectives
            self.group = TensorParallelGroup(
                grid.tensor.rank, grid.tensor.size, collectives.all_gather_in_layer, collectives.all_to_all_in_layer
            )

    def peers(self, model: Decoder) -> TensorPeers | None:
        """The tensor parallel peers of a worker of this model, or None."""
        if self._world is None:
            return None
        return TensorPeers(self._world, self._collectives, model_shards(model))


# -- memory of the KV cache ------------------------------------------------------------------------
# Which memory holds the pages of which layer. `phases.py` decides when the pages may be used.


@dataclass(frozen=True)
class CacheLayout:
    """The planned KV cache of a worker. Its first layers use the memory of the gradients, the others the graph pool.

    `gradients` is the flat memory of all gradients, [elements].
    """

    plan: CachePlan
    gradients: Tensor

    @classmethod
    def within(cls, model: Decoder, limits: Limits, gradients: Tensor, free: int | None) -> CacheLayout:
        """Plan a cache of `limits.cache_bytes`.

        If that is None, the cache may take the gradients' memory and half of the `free` bytes of the GPU; the other
        half is for activations, as far as they need more than the pages. On a CPU, an engine's default applies.
        """
        nbytes = limits.cache_bytes
        if nbytes is None and free is not None:
            nbytes = gradients.nbytes + free // 2
        plan = plan_cache(
            model,
            rows=limits.rows,
            max_length=limits.max_length,
            block_size=BLOCK_SIZE,
            nbytes=nbytes,
            longest=limits.longest_generated,
        )
        return cls(plan, gradients)

    @property
    def layers_over_gradients(self) -> int:
        """How many layers have their pages in the memory of the gradients."""
        return self.plan.layers_that_fit(self.gradients.nbytes)

    @property
    def pool_nbytes(self) -> int:
        """The bytes of the pages that lie in the graph pool."""
        return (self.plan.architecture.layers - self.layers_over_gradients) * self.plan.layer_nbytes

    def make_pages(self, pool: GraphPool) -> list[Tensor]:
        """The pages of each layer. Call this after capturing the graphs that may overwrite them."""
        pages = self.plan.pages_over(self.gradients)
        while len(pages) < self.plan.architecture.layers:
            pages.append(pool.allocate(self.plan.shape, self.plan.dtype, self.gradients.device))
        return pages


# -- rollouts of all ranks -------------------------------------------------------------------------


def join_rollouts(texts: Sequence[str]) -> list[Rollout]:
    """Concatenate the rollouts of all ranks, given as JSON in rank order. Groups are renumbered to stay distinct."""
    gathered: list[Rollout] = []
    for text in texts:
        offset = 1 + max((rollout.group for rollout in gathered), default=-1)
        of_rank = [Rollout.from_dict(entry) for entry in json.loads(text)]
        gathered += [replace(rollout, group=rollout.group + offset) for rollout in of_rank]
    return gathered


# -- the worker ------------------------------------------------------------------------------------

OnCaptures = Callable[[str, str, int, int], None]  # (phase, name of the next graph, number done, total)
OnSamples = Callable[[int, int], None]  # (samples trained on, total)


class PolicyWorker:
    """The policy in one process of a run. `tensor` is its tensor parallel group, if it has one."""

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
        warmup: int = 2,
        reduction: Any = "library",
        verify_weights: bool = False,
        exact: Exactness = "auto",
        shard: Sharded = "optimizer",
        tensor: TensorPeers | None = None,
    ) -> None:
        if world.size > 1 and "step" in scopes:
            raise ValueError(
                "a graph of a whole step cannot contain the communication of several ranks: use scope layer"
            )
        self._dropout = model.adapters.spec.dropout if model.adapters is not None else 0.0
        if self._dropout and (model.checkpointing or exact == "must"):
            raise ValueError("dropout of adapters cannot be combined with checkpointing or with exact: must")
        model.checkpoint_layers(model.checkpointing, per_submodule=not {"step", "layer"} & set(scopes))
        self.model = model
        self.full_model = model  # generates and scores; with sharded parameters, a second model that holds all of them
        self.tokenizer = tokenizer
        self.world = world
        self.limits = limits
        self.sampling = sampling
        base = None if model.adapters is None else SHARDED_BASE
        self.sharded = ShardedModel(
            model, world, reduction=reduction, shard=shard, units=list(model.layers), frozen=base, tensor=tensor
        )
        self.optimizer = ShardedAdamW(self.sharded, **optimizer)
        self.weights = WeightSlots(self.sharded, verify=verify_weights)
        self.adapted = AdaptedWeights(model.adapters, self.sharded, self.weights)
        self.memory = PhaseMemory(self.sharded.gradients, self.sharded.gathers.invalidate_full_parameters)
        self.phases = Phases(self.adapted.gathered_and_paused, self.sharded.gradients.drop, self.memory.enter)
        self.pool = GraphPool()
        self.pool.leave_unsaved(self.sharded.flat.gradient_memory)  # it holds zeros before and after every capture
        self.engine: Engine | None = None
        self._engines: list[Engine] = []  # a second one if prompts of validation are longer
        self.gemm_report: GemmReport | None = None  # which GEMM algorithms were chosen; None: the library's
        self._exactness = exact
        self._exact_on_all_ranks = False
        self._clip_norm = clip_norm
        self.backend_name = resolve_backend(backend, world, tensor)
        self._capture_settings = CaptureSettings(self.pool, self.backend_name, scopes, on_mismatch, warmup)
        self._temperature = sampling.temperature or 1.0
        self.train_graphs = TrainGraphs(
            model,
            self.sharded,
            limits,
            self._capture_settings,
            self._temperature,
            self.adapted,
            [self.memory.gradients_are_lent],
        )
        self._frozen: dict[str, ScoreGraphs] = {}  # other models that only score, by name
        self._shard_minibatch = partial(shard_minibatch, rank=world.rank, ranks=world.size)

    def add_frozen(self, name: str, model: Decoder) -> None:
        """Add a second model that only scores, under the name of a slot that is then not needed.

        Call this before `capture_all`, which also captures its graphs. Each rank holds the whole model.
        """
        model.requires_grad_(False)
        self._frozen[name] = ScoreGraphs(model, self.limits, self._capture_settings, self._temperature, label=name)

    def capture_all(
        self,
        losses: Mapping[str, tuple[Loss, bool]],
        on_progress: OnCaptures | None = None,
        *,
        generates: bool = True,
        entropies: bool = False,
    ) -> None:
        """Allocate the KV cache and capture every graph. `losses` maps a name to a loss and whether it needs entropies.

        Generation is captured last, because its cache shares the memory of the other phases (see `phases.py`). If a
        loss uses the reference policy, its slot must exist by now. A worker that never `generates` has no cache and
        lets the library choose its GEMM algorithms, because there is no generation to agree with. `entropies` says
        whether `logprobs_and_entropies` will be called.
        """
        progress = on_progress or (lambda phase, part, done, total: None)
        self.sharded.gradients.raise_if_unfinished()
        free = self._free_bytes() if self._on_gpu else 0
        whole_logits = self.limits.keeps_logits(self.model.architecture.vocabulary, free)  # before the cache exists
        self._choose_gemm_algos(whole_logits, generates, partial(progress, "probe"))
        cache = None
        if generates:
            available = self._free_bytes() if self._on_gpu else None
            cache = CacheLayout.within(self.model, self.limits, self.sharded.flat.gradient_memory, available)
        pool_nbytes = cache.pool_nbytes if cache is not None else 0
        self.pool.reserve(max(pool_nbytes, self.limits.pool_bytes), self.model.embed_tokens.weight.device)
        has_reference = "reference" in self.adapted or "reference" in self._frozen
        train = partial(
            self.train_graphs.capture_train, losses, has_reference, whole_logits, partial(progress, "train")
        )
        score = partial(self._capture_scoring, entropies, partial(progress, "score"))
        try:
            if self.sharded.shards_parameters:  # full parameters use memory of training, and scoring reads them
                train()
                self.full_model = self.train_graphs.full_model = cast(
                    Decoder, self.sharded.make_full_model(self.pool.allocate)
                )
                score()
            else:
                score()
                train()
        finally:
            self.sharded.flat.zero_gradients()
        if cache is not None:
            self._capture_generation(cache, partial(progress, "generate"))

    def _capture_scoring(self, entropies: bool, on_capture: OnCapture) -> None:
        with self.phases.enter("score"):
            self.train_graphs.capture_score(on_capture)
            if entropies:
                self.train_graphs.capture_entropy(on_capture)
        for graphs in self._frozen.values():
            graphs.capture_score(on_capture)

    def _choose_gemm_algos(self, whole_logits: bool, generates: bool, on_autotune: OnCapture) -> None:
        """Choose GEMM algorithms with which all phases compute the same bits, or leave the choice to the library."""
        if self._exactness == "off" or not generates:
            clear_gemm_algos(self.model)
            return
        must = self._exactness == "must"
        self.sharded.ensure_gathered(list(self.model.parameters()))  # autotuning multiplies with the weights
        self.gemm_report = make_exact(
            self.model, self.limits, self.train_graphs.buckets, whole_logits, must, on_autotune=on_autotune
        )
        self.pool.notes += self.gemm_report.lines()
        self._exact_on_all_ranks = self._is_true_on_all_ranks(self.gemm_report.exact)

    def _capture_generation(self, cache: CacheLayout, on_capture: OnCapture) -> None:
        pages = cache.make_pages(self.pool)
        self.memory.share(self._forget_cache, over_gradients=cache.layers_over_gradients > 0)
        with self.phases.enter("generate"), self.pool.disabled():  # engine graphs cannot contain replays of layers
            for length in self.limits.generated_lengths:
                self._engines.append(self._make_engine(cache.plan, pages, length))
                if self._capture_settings.captures_ahead:
                    self._engines[-1].capture(on_capture)
            self.engine = self._engines[0]

    def _forget_cache(self) -> None:
        for engine in self._engines:
            engine.forget_cache()

    def _make_engine(self, plan: CachePlan, pages: Sequence[Tensor], max_length: int) -> Engine:
        return Engine(
            self.full_model,
            self.tokenizer,
            rows=self.limits.rows,
            max_length=max_length,
            cache=(plan, pages),
            prefill_tokens=self.limits.prefill_tokens,
            filters=self.sampling.filtered,
            exact=False,  # GEMM algorithms are chosen already
            pool=self.pool,
            backend=self.backend_name,
            guards=[*self.adapted.guards, self.memory.cache_is_gone],
        )

    @property
    def is_exact(self) -> bool:
        """Whether training computes, bit for bit, the log-probabilities that samples were drawn with."""
        is_restricted = self.sampling.filtered or self.sampling.temperature == 0  # not drawn from all tokens
        return self._exact_on_all_ranks and not is_restricted and not self._dropout

    def _is_true_on_all_ranks(self, value: bool) -> bool:
        """Ranks decide alike what to score, because scoring gathers parameters from all of them."""
        return all(json.loads(text) for text in self.sharded.exchange_text(json.dumps(value)))

    @property
    def _on_gpu(self) -> bool:
        return self.world.device.startswith("cuda")

    def _free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.world.device)
        if self.sharded.tensor is not None:  # a tensor parallel group has one cache size and the same graphs
            free = min(map(int, self.sharded.exchange_text(str(free))))
        return free

    # -- generate ----------------------------------------------------------------------------------

    def generate(
        self,
        requests: Sequence[Request],
        *,
        seed: str,
        params: SamplingParams | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Turn]:
        """Continue (tokens, key) requests. The noise of a sample depends only on `seed` and its key."""
        return self.generator(seed=seed, params=params, on_progress=on_progress)(list(requests))

    def generator(
        self,
        *,
        seed: str,
        params: SamplingParams | None = None,
        on_progress: OnProgress | None = None,
        validates: bool = False,
    ) -> TurnGenerator:
        """The `generate` that an environment calls. `validates` selects the engine for prompts of validation."""
        assert self._engines, "call capture_all() first"
        engine = self._engines[-1 if validates else 0]
        self.sharded.refresh_full_parameters()  # now: all ranks get here, even one with nothing to generate
        return TurnGenerator(engine, self.phases, seed, params or self.sampling, engine.max_length, on_progress)

    # -- score -------------------------------------------------------------------------------------

    def score(self, rollouts: Sequence[Rollout], weights: str = "reference") -> None:
        """Fill in the `reference_logprobs` of rollouts or, if `weights` is the policy, their `logprobs`.

        Tokens that were not sampled get 0.
        """
        samples = [sample_to_score(rollout.prompt.tokens, rollout.tokens, rollout.logprobs) for rollout in rollouts]
        for rollout, logprobs in zip(rollouts, self.logprobs(samples, weights), strict=True):
            pairs = zip(logprobs, rollout.sampled, strict=True)
            masked = [logprob if sampled else 0.0 for logprob, sampled in pairs]
            if weights == POLICY:
                rollout.logprobs = masked
            else:
                rollout.reference_logprobs = masked

    def logprobs(self, samples: Sequence[Sample], weights: str = POLICY) -> list[list[float]]:
        """The log-probabilities of the tokens of each sample, at the sampling temperature.

        `weights` names a slot, a model from `add_frozen`, or the base without its adapters.
        """
        with self.phases.enter("score"):
            if weights in self._frozen:
                return self._frozen[weights].logprobs(samples)
            with self.adapted.use(weights):
                return self.train_graphs.logprobs(samples)

    def logprobs_and_entropies(self, samples: Sequence[Sample]) -> list[tuple[list[float], list[float]]]:
        """For each sample, the log-probabilities of its tokens and the entropies of their distributions."""
        with self.phases.enter("score"), self.adapted.use(POLICY):
            return self.train_graphs.logprobs_and_entropies(samples)

    # -- train -------------------------------------------------------------------------------------

    def train(
        self,
        batch: Batch,
        loss: str = "policy",
        *,
        epochs: int = 1,
        score_old: bool = False,
        on_progress: OnSamples | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step per minibatch. Every rank receives the whole batch and trains on its part of it.

        With `score_old`, old log-probabilities are computed first; otherwise those of the rollout are used.
        `on_progress` is called after each microbatch.
        """
        if not batch.minibatches or not all(batch.minibatches):
            raise ValueError("there is nothing to train on: the batch or one of its minibatches is empty")
        if not self.train_graphs.has_reference and any(
            sample.reference_logprobs is not None for sample in batch.samples
        ):
            raise ValueError(
                "samples have reference log-probabilities, but the loss was captured without a reference policy: "
                "save() it before capture_all()"
            )
        if score_old:
            self._score_old(batch)
        local_minibatches = [self._shard_minibatch(minibatch) for minibatch in batch.minibatches]
        total_samples = epochs * sum(map(len, local_minibatches))

        def report(samples: int) -> None:
            if on_progress is not None:
                on_progress(samples, total_samples)

        totals = TrainTotals(has_rollout_logprobs=all(sample.logprobs is not None for sample in batch.samples))
        with self.phases.enter("train"):
            for _ in range(epochs):
                for minibatch in local_minibatches:
                    self._train_minibatch(minibatch, loss, totals, report)
        extra_metrics = {"optimizer/lr": self.optimizer.lr, "optimizer/skipped_steps": self.optimizer.skipped}
        return reduce_metrics(totals, self.sharded.collectives, self.world.size, extra_metrics)

    def _score_old(self, batch: Batch) -> None:
        local: list[Sample] = []
        for minibatch in batch.minibatches:
            local += self._shard_minibatch(minibatch)
        for sample, logprobs in zip(local, self.logprobs(local), strict=True):
            sample.old_logprobs = logprobs

    def _train_minibatch(
        self, samples: Sequence[Sample], loss: str, totals: TrainTotals, report: Callable[[int], None]
    ) -> None:
        self.adapted.refresh()
        if self._dropout:  # a mask depends only on the update and the rank, so a resumed run repeats it
            torch.manual_seed(self.optimizer.steps * self.world.size + self.world.rank)
        microbatches = self.limits.plan(samples, self.train_graphs.buckets)
        if self.world.size > 1:  # every rank runs equally many, because all take part in each collective
            counts = self.sharded.collectives.all_gather_text(str(len(microbatches)))
            missing = max(int(count) for count in counts) - len(microbatches)
            microbatches += [([], self.train_graphs.buckets[0])] * missing  # all buckets have as many tokens
        for number, (indices, bucket) in enumerate(microbatches, 1):
            arrays = self.limits.collate([samples[index] for index in indices], bucket)
            agreement, metrics = self.train_graphs.train(loss, arrays, last=number == len(microbatches))
            totals.add_microbatch(agreement, metrics, arrays.used_tokens, bucket.tokens, len(indices))
            report(totals.samples)
        self.sharded.gradients.finish(average=False)
        if self._clip_norm is not None:
            totals.grad_norms.append(self.sharded.gradients.clip(self._clip_norm))
        self.optimizer.step()
        totals.updates += 1

    # -- other ranks, export, close ----------------------------------------------------------------

    def gather_rollouts(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts of all ranks, in rank order, on every rank. Groups are renumbered."""
        if self.world.size == 1:
            return rollouts
        local = json.dumps([rollout.to_dict() for rollout in rollouts])
        return join_rollouts(self.sharded.collectives.all_gather_text(local))

    def export(self, folder: Path, *, merge: bool = False, base: tuple[str | None, str | None] = (None, None)) -> None:
        """Write a folder that other tools can load: the model, or only its adapter unless `merge` is set.

        `base` names the model that the adapter belongs to: its path or hub id, and its revision. Rank 0 writes; the
        other ranks of its tensor parallel group take part.
        """
        with self.phases.enter("save"):
            if self.world.rank == 0:  # of the data parallel group: rank 0 of all ranks, and its tensor parallel group
                if self.model.adapters is None or merge:
                    save_model(self.full_model, folder, merge=merge)
                else:
                    save_adapter(self.full_model, folder, base=base[0], revision=base[1])
                if self.tokenizer is not None and self.sharded.rank == 0:  # of all ranks
                    self.tokenizer.save(folder)

    def rejoin(self, world: World) -> None:
        """Continue with the ranks of the next attempt; see `ShardedModel.rejoin`. Nothing is captured again.

        Meanwhile, new ranks create a worker and call `capture_all`: the same collectives in the same order.
        """
        self.world = world
        self.sharded.rejoin(world)
        self.memory.invalidate_cache()
        for engine in self._engines:
            engine.reset()
        if self.gemm_report is not None:
            self._exact_on_all_ranks = self._is_true_on_all_ranks(self.gemm_report.exact)

    def close(self) -> None:
        self.pool.reset()
        self.sharded.close()
