"""The worker: one set of weights that generates, scores and trains, always by replaying captured graphs.

Owns the model, its shards, its optimizer, the inference engine and the pool of all graphs; knows nothing about data,
rewards or the training loop. It does not know the algorithm: it is given a loss over packed tokens. `capture_all`
captures everything before the first step, and nothing is captured afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rollgraph.distributed.world import World
from rollgraph.graph import GraphPool
from rollgraph.graph.capture import BackendName
from rollgraph.inference import Engine, SamplingParams
from rollgraph.inference.decode_graphs import OnCapture
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.model import Decoder, save_model
from rollgraph.model.adapter_files import save_adapter
from rollgraph.model.product_probe import ProductReport, clear_routes
from rollgraph.policy.adapted_weights import SHARDED_BASE, AdaptedWeights
from rollgraph.policy.cache_layout import CacheLayout
from rollgraph.policy.exactness import Exactness, make_exact
from rollgraph.policy.limits import Limits
from rollgraph.policy.packing import share_of, unweighted
from rollgraph.policy.phase_memory import PhaseMemory
from rollgraph.policy.phases import Phases
from rollgraph.policy.rollout_texts import join_rollouts
from rollgraph.policy.score_graphs import GraphSettings, ScoreGraphs, choose_backend
from rollgraph.policy.step_graphs import Loss, StepGraphs
from rollgraph.policy.train_metrics import TrainTotals, summarize
from rollgraph.policy.turn_session import OnProgress, TurnGenerator
from rollgraph.policy.weights import POLICY, WeightSlots
from rollgraph.rl.turns import Request, Turn
from rollgraph.sharding import Sharded, ShardedAdamW, ShardedModel
from rollgraph.sharding.tensor_peers import TensorPeers
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import Batch, Rollout, Sample

OnCaptures = Callable[[str, str, int, int], None]  # for what, the next part of it, how many are done, of how many
OnSamples = Callable[[int, int], None]  # how many samples are trained on, and of how many


class PolicyWorker:
    """The policy in one process of a run. `tensor` are the ranks that divide each layer with it, if any do."""

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
            raise ValueError("dropout of adapters goes neither with checkpointing nor with exact: must")
        model.checkpoint_layers(model.checkpointing, parts=not {"step", "layer"} & set(scopes))
        self.model = model
        self.reader = model  # what generates and scores; with sharded parameters, a full copy for these phases
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
        self.memory = PhaseMemory(self.sharded)
        self.phases = Phases(self.adapted, self.memory.enter)
        self.pool = GraphPool()
        self.pool.leave_unsaved(self.sharded.flat.gradient_memory)  # captures start and end with gradients of zero
        self.engine: Engine | None = None
        self.products: ProductReport | None = None  # how products were made exact; None: they were not
        self._exact = exact
        self._exact_on_all_ranks = False
        self._clip_norm = clip_norm
        self.backend_name = choose_backend(backend, world, tensor)
        self._graphs = GraphSettings(self.pool, self.backend_name, scopes, on_mismatch, warmup)
        self._temperature = sampling.temperature or 1.0
        self._steps = StepGraphs(
            model, self.sharded, limits, self._graphs, self._temperature, self.adapted, [self.memory.gradients_are_lent]
        )
        self._frozen: dict[str, ScoreGraphs] = {}  # other models that score, by name
        self._share = partial(share_of, rank=world.rank, ranks=world.size)  # of the samples of a minibatch

    def add_frozen(self, name: str, model: Decoder) -> None:
        """Let another model, which is never trained, score in place of a slot of this name.

        Call this before `capture_all`, which captures its graphs, too. Each rank has the whole model.
        """
        model.requires_grad_(False)
        self._frozen[name] = ScoreGraphs(model, self.limits, self._graphs, self._temperature, label=name)

    def capture_all(
        self,
        losses: Mapping[str, tuple[Loss, bool]],
        on_progress: OnCaptures | None = None,
        *,
        generates: bool = True,
        entropies: bool = False,
    ) -> None:
        """Allocate the KV cache and capture every graph. `losses` are by name, with whether they need the entropy.

        Generation is captured last, because its cache lies in memory of the other phases (see `phase_memory.py`). If a
        loss uses the reference policy, its slot must exist by now. A worker that never `generates` has no cache,
        and leaves products to the library: there is no generation for training to agree with. `entropies` says whether
        `logprobs_and_entropies` will be called.
        """
        progress = on_progress or (lambda phase, part, done, total: None)
        self.sharded.raise_if_unfinished()
        free = self._free_bytes() if self._on_gpu else 0
        whole_logits = self.limits.keeps_logits(self.model.architecture.vocabulary, free)  # before the cache exists
        self._set_routes(whole_logits, generates, partial(progress, "probe"))
        cache = None
        if generates:
            available = self._free_bytes() if self._on_gpu else None
            cache = CacheLayout.within(self.model, self.limits, self.sharded.flat.gradient_memory, available)
        in_pool = cache.in_pool_nbytes if cache is not None else 0
        self.pool.reserve(max(in_pool, self.limits.pool_bytes), self.model.embed.weight.device)
        has_reference = "reference" in self.adapted or "reference" in self._frozen
        train = partial(self._steps.capture_train, losses, has_reference, whole_logits, partial(progress, "train"))
        score = partial(self._capture_scoring, entropies, partial(progress, "score"))
        try:
            if self.sharded.has_copies:  # a full copy lies in memory of training, and scoring reads it
                train()
                self.reader = self._steps.reader = cast(Decoder, self.sharded.make_reader(self.pool.allocate))
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
            self._steps.capture_score(on_capture)
            if entropies:
                self._steps.capture_entropy(on_capture)
        for graphs in self._frozen.values():
            graphs.capture_score(on_capture)

    def _set_routes(self, whole_logits: bool, generates: bool, on_probe: OnCapture) -> None:
        """Make the products of all phases equal, or leave them to the library."""
        if self._exact == "off" or not generates:
            clear_routes(self.model)
            return
        must = self._exact == "must"
        self.sharded.ensure_gathered(list(self.model.parameters()))  # products are compared over weights
        self.products = make_exact(self.model, self.limits, self._steps.buckets, whole_logits, must, on_probe=on_probe)
        self.pool.notes += self.products.lines()
        self._exact_on_all_ranks = self._holds_on_all_ranks(self.products.exact)

    def _capture_generation(self, cache: CacheLayout, on_capture: OnCapture) -> None:
        pages = cache.make_pages(self.pool)
        self.memory.share(self._forget_cache, over_gradients=cache.over_gradients > 0)
        with self.phases.enter("generate"), self.pool.disabled():  # a graph cannot hold a replay of layers that train
            self.engine = self._make_engine(cache.plan, pages, on_capture)

    def _forget_cache(self) -> None:
        if self.engine is not None:
            self.engine.forget_cache()

    def _make_engine(self, plan: CachePlan, pages: Sequence[Tensor], on_capture: OnCapture) -> Engine:
        return Engine(
            self.reader,
            self.tokenizer,
            rows=self.limits.rows,
            max_length=self.limits.max_length,
            cache=(plan, pages),
            prefill_tokens=self.limits.prefill_tokens,
            filters=self.sampling.filtered,
            exact=False,  # the routes are set already
            pool=self.pool,
            backend=self.backend_name,
            guards=[self.adapted.stale, self.memory.cache_is_gone],
            on_capture=on_capture,
        )

    @property
    def is_exact(self) -> bool:
        """Whether a sample's log-probabilities at training are, bit for bit, those that it was drawn with."""
        restricted = self.sampling.filtered or self.sampling.temperature == 0  # drawn from some of the tokens
        return self._exact_on_all_ranks and not restricted and not self._dropout

    def _holds_on_all_ranks(self, mine: bool) -> bool:
        """Ranks must not differ in what they score, because scoring gathers parameters from all of them."""
        return all(json.loads(text) for text in self.sharded.exchange_text(json.dumps(mine)))

    @property
    def _on_gpu(self) -> bool:
        return self.world.device.startswith("cuda")

    def _free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.world.device)
        if self.sharded.tensor is not None:  # those that divide layers have caches of one size, and the same graphs
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
        """Continue token lists, each given with a key. The noise of a sample depends on `seed` and its key alone."""
        return self.generator(seed=seed, params=params, on_progress=on_progress)(list(requests))

    def generator(
        self, *, seed: str, params: SamplingParams | None = None, on_progress: OnProgress | None = None
    ) -> TurnGenerator:
        """What an environment calls: `generate` with these arguments, which also serves requests as they come."""
        assert self.engine is not None, "call capture_all() first"
        self.sharded.refresh_copy()  # all ranks are here, but some may have nothing to generate
        return TurnGenerator(
            self.engine, self.phases, seed, params or self.sampling, self.limits.max_length, on_progress
        )

    # -- score -------------------------------------------------------------------------------------

    def score(self, rollouts: Sequence[Rollout], weights: str = "reference") -> None:
        """Fill in `reference_logprobs` of rollouts or, under the policy's own weights, `logprobs`.

        Tokens that were not sampled get 0.
        """
        samples = [unweighted(rollout.prompt.tokens, rollout.tokens, rollout.logprobs) for rollout in rollouts]
        for rollout, logprobs in zip(rollouts, self.logprobs(samples, weights), strict=True):
            pairs = zip(logprobs, rollout.sampled, strict=True)
            found = [logprob if sampled else 0.0 for logprob, sampled in pairs]
            if weights == POLICY:
                rollout.logprobs = found
            else:
                rollout.reference_logprobs = found

    def logprobs(self, samples: Sequence[Sample], weights: str = POLICY) -> list[list[float]]:
        """The log-probabilities of the tokens of each sample, at the sampling temperature.

        `weights` names a slot, a model that was added, or the model without its adapters.
        """
        with self.phases.enter("score"):
            if weights in self._frozen:
                return self._frozen[weights].logprobs(samples)
            with self.adapted.use(weights):
                return self._steps.logprobs(samples)

    def logprobs_and_entropies(self, samples: Sequence[Sample]) -> list[tuple[list[float], list[float]]]:
        """Of each sample's tokens: their log-probabilities, and the entropies of the distributions they come from."""
        with self.phases.enter("score"), self.adapted.use(POLICY):
            return self._steps.logprobs_and_entropies(samples)

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
        """Take one optimizer step per minibatch. Every rank is given the whole batch and trains on its share.

        With `score_old` the old log-probabilities are computed first; otherwise they are those of the rollout.
        `on_progress` is called after each microbatch.
        """
        if not batch.minibatches or not all(batch.minibatches):
            raise ValueError("there is nothing to train on: the batch or one of its minibatches is empty")
        if not self._steps.has_reference and any(sample.reference_logprobs is not None for sample in batch.samples):
            raise ValueError(
                "samples have reference log-probabilities, but the loss was captured without a reference policy: "
                "save() it before capture_all()"
            )
        if score_old:
            self._score_old(batch)
        shares = [self._share(minibatch) for minibatch in batch.minibatches]
        wanted = epochs * sum(map(len, shares))

        def report(samples: int) -> None:
            if on_progress is not None:
                on_progress(samples, wanted)

        totals = TrainTotals(compares=all(sample.logprobs is not None for sample in batch.samples))
        with self.phases.enter("train"):
            for _ in range(epochs):
                for share in shares:
                    self._train_minibatch(share, loss, totals, report)
        more = {"optimizer/lr": self.optimizer.rate, "optimizer/skipped_steps": self.optimizer.skipped}
        return summarize(totals, self.sharded.collectives, self.world.size, more)

    def _score_old(self, batch: Batch) -> None:
        local: list[Sample] = []
        for minibatch in batch.minibatches:
            local += self._share(minibatch)
        for sample, logprobs in zip(local, self.logprobs(local), strict=True):
            sample.old_logprobs = logprobs

    def _train_minibatch(
        self, samples: Sequence[Sample], loss: str, totals: TrainTotals, report: Callable[[int], None]
    ) -> None:
        self.adapted.refresh()
        if self._dropout:  # what is left out depends on the update and the rank alone, so that a resumed run repeats it
            torch.manual_seed(self.optimizer.steps * self.world.size + self.world.rank)
        microbatches = self._steps.plan(samples)
        if self.world.size > 1:  # every rank runs as many, because each one takes part in the same collectives
            counts = self.sharded.collectives.all_gather_text(str(len(microbatches)))
            missing = max(int(count) for count in counts) - len(microbatches)
            microbatches += [([], self._steps.buckets[0])] * missing  # all buckets have the same tokens here
        for number, (indices, bucket) in enumerate(microbatches, 1):
            arrays = self._steps.fill([samples[index] for index in indices], bucket)
            agreement, metrics = self._steps.train(loss, arrays, last=number == len(microbatches))
            totals.add_microbatch(agreement, metrics, arrays.used, bucket.tokens, len(indices))
            report(totals.samples)
        self.sharded.finish_gradients(average=False)
        if self._clip_norm is not None:
            totals.norms.append(self.sharded.clip_gradients(self._clip_norm))
        self.optimizer.step()
        totals.updates += 1

    # -- several ranks, and the end ----------------------------------------------------------------

    def gather_rollouts(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts of all ranks, in the order of ranks, on every rank. Groups are renumbered."""
        if self.world.size == 1:
            return rollouts
        mine = json.dumps([rollout.to_dict() for rollout in rollouts])
        return join_rollouts(self.sharded.collectives.all_gather_text(mine))

    def export(self, folder: Path, *, merge: bool = False, base: tuple[str | None, str | None] = (None, None)) -> None:
        """Write a folder that other tools can load: the model, or its adapter alone unless that is to be merged.

        `base` is what the adapter belongs to: the path or hub id of a model, and its revision. Rank 0 writes; those
        that divide layers with it take part.
        """
        with self.phases.enter("save"):
            if self.world.rank == 0:
                if self.model.adapters is None or merge:
                    save_model(self.reader, folder, merge=merge)
                else:
                    save_adapter(self.reader, folder, base=base[0], revision=base[1])
                if self.tokenizer is not None and self.sharded.rank == 0:
                    self.tokenizer.save(folder)

    def rejoin(self, world: World) -> None:
        """Go on with the ranks of the next attempt; see `ShardedModel.rejoin`. Nothing is captured again.

        Ranks that are new create a worker and call `capture_all` meanwhile: the same collectives in the same order.
        """
        self.world = world
        self.sharded.rejoin(world)
        self.memory.forget()
        if self.engine is not None:
            self.engine.reset()
        if self.products is not None:
            self._exact_on_all_ranks = self._holds_on_all_ranks(self.products.exact)

    def close(self) -> None:
        self.pool.reset()
        self.sharded.close()
