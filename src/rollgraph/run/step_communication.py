"""What the ranks of a step send each other, phase by phase, how long it takes, and how much of it computing hides.

`communication.py` has the time of a collective; here is which of them a layout needs, and what runs meanwhile:

- *shard: optimizer*: gradients are reduced during the backward of the last microbatch of an update, all but those that
  arrive last. Parameters are gathered during the forward that follows, all but the first; after the last update of a
  step, generation follows, which needs all of them, so nothing hides that.
- *shard: parameters*: generation begins with a gather of everything, which nothing hides, and so does scoring by the
  reference policy. In training, a layer is gathered while the one before it computes, in the forward and again in the
  backward, and its gradients are reduced while the next one computes, for every microbatch. With adapters, layers are
  gathered with their base, and only the gradients of adapters are reduced.
- *tensor_parallel*: two sums in the forward of each layer and two in its backward. The layer waits for all of them. A
  rank gathers what all have computed and adds it up in the order of ranks, so that all have the same bits. With more
  than two ranks, it adds up one part of a large sum and gathers the others, which moves as much as the library's sum.

Single numbers, such as the norm of the gradients, are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollgraph.config import Config
from rollgraph.model.tensor_group import LARGE_SUM
from rollgraph.run.layer_memory import FP32
from rollgraph.run.plan_lines import Phase
from rollgraph.run.run_shape import RunShape
from rollgraph.run.step_floor import Speed
from rollgraph.sharding import RingPlan

_SUMS = 2  # of a tensor group, in the forward of a layer, and as many in its backward


@dataclass(frozen=True)
class Exchange:
    """One kind of communication in a step, e.g. Exchange("sums of tensor groups", "train", seconds=0.4)."""

    name: str
    phase: Phase
    seconds: float  # as if nothing else was done meanwhile
    hidden: float = 0.0  # of these, the seconds in which the device computes

    @property
    def exposed(self) -> float:
        return self.seconds - self.hidden

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "phase": self.phase, "seconds": self.seconds, "exposed": self.exposed}


def step_exchanges(
    config: Config, shape: RunShape, speed: Speed, *, rows: int, score_passes: int
) -> tuple[Exchange, ...]:
    """All communication of a step. `rows` decode at a time, and scoring is so many forward passes over all samples."""
    work = _Work(config, shape, speed, rows, score_passes)
    found: list[Exchange] = []
    if shape.ring is not None:
        found += _sharded_parameters(work, shape.ring)
    elif shape.layout.data > 1:
        found += _sharded_optimizer(work)
    if shape.layout.tensor > 1:
        found += _tensor_sums(work)
    return tuple(found)


@dataclass(frozen=True)
class _Work:
    """What one rank computes in a step, as far as communication depends on it."""

    config: Config
    shape: RunShape
    speed: Speed
    rows: int
    score_passes: int

    @property
    def layers(self) -> int:
        return self.shape.architecture.layers

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.shape.limits(self.config).token_buckets[-1]

    @property
    def updates(self) -> int:
        return self.config.algorithm.epochs * self.config.algorithm.minibatches

    @property
    def train_microbatches(self) -> int:
        of_update = self.shape.tokens(self.config) / self.config.algorithm.minibatches
        return self.updates * max(1, -(-int(of_update) // self.tokens))

    @property
    def score_microbatches(self) -> int:
        return self.score_passes * max(1, -(-self.shape.tokens(self.config) // self.tokens))

    @property
    def forward(self) -> float:
        """Seconds of the layers in the forward of a microbatch."""
        a = self.shape.architecture
        weights = self.shape.multiplied - a.vocabulary * a.hidden
        return 2 * weights * self.tokens / self.speed.flops

    @property
    def backward(self) -> float:
        """The same of the backward, with what is computed again."""
        again = self.shape.recomputed(self.config) / self.layers
        return self.forward * ((2 if self.shape.adapters is None else 1) + again)


def _sharded_optimizer(work: _Work) -> list[Exchange]:
    shape, group = work.shape, work.shape.layout.data_group
    reductions = [group.reduce_scatter(bucket.numel * FP32) for bucket in shape.buckets if bucket.trainable]
    gathers = [group.all_gather(bucket.numel * bucket.dtype.itemsize) for bucket in shape.buckets]
    # Buckets are in the order of the backward: the last one is reduced last, and gathered first.
    reduced_meanwhile = min(sum(reductions[:-1]), work.backward)
    gathered_meanwhile = min(sum(gathers[:-1]), work.forward)
    before_generation = 0 if shape.samples_nothing else 1
    before_training = work.updates - before_generation
    found = [
        Exchange("reduced gradients", "train", work.updates * sum(reductions), work.updates * reduced_meanwhile),
        Exchange("gathered parameters", "train", before_training * sum(gathers), before_training * gathered_meanwhile),
    ]
    if before_generation:
        found.append(Exchange("gathered parameters", "generate", sum(gathers)))
    return [exchange for exchange in found if exchange.seconds]


def _sharded_parameters(work: _Work, ring: RingPlan) -> list[Exchange]:
    shape, group, layers = work.shape, work.shape.layout.data_group, work.layers
    gather = group.all_gather(ring.slot_nbytes(0))
    reduce = group.reduce_scatter(ring.slot_gradients(0) * FP32)
    in_forward = Exchange("", "train", layers * gather, min((layers - 1) * gather, work.forward))
    both = gather + reduce
    in_backward = Exchange("", "train", layers * both, min((layers - 1) * both, work.backward))
    count = work.train_microbatches
    found = [
        Exchange(
            "layers, gathered and reduced",
            "train",
            count * (in_forward.seconds + in_backward.seconds),
            count * (in_forward.hidden + in_backward.hidden),
        ),
    ]
    for outside in ring.units[ring.turning :]:  # with adapters there is none: the base does not change
        rest = group.all_gather(outside.nbytes) + group.reduce_scatter(outside.gradients * FP32)
        found.append(Exchange("embedding and head", "train", work.updates * rest))
    whole = group.all_gather(sum(unit.nbytes for unit in ring.units))
    if shape.keeps_reference:
        found.append(Exchange("gathered reference", "score", whole))
    if not shape.samples_nothing:
        found.append(Exchange("gathered parameters", "generate", whole))
    return found


def _tensor_sums(work: _Work) -> list[Exchange]:
    config, shape, group = work.config, work.shape, work.shape.layout.tensor_group
    limits = shape.limits(config)

    def sums(tokens: int) -> float:
        """Of all layers, in a forward over so many tokens."""
        nbytes = tokens * shape.architecture.hidden * shape.itemsize
        if group.ranks > 2 and nbytes >= LARGE_SUM:
            return _SUMS * work.layers * group.all_reduce(nbytes, "ring")
        return _SUMS * work.layers * group.all_gather(group.ranks * nbytes)

    passes = 2 + shape.recomputed(config) / work.layers  # forward, backward, and what is computed again
    found = [Exchange("sums of tensor groups", "train", work.train_microbatches * passes * sums(work.tokens))]
    if work.score_passes:
        found.append(Exchange("sums of tensor groups", "score", work.score_microbatches * sums(work.tokens)))
    if not shape.samples_nothing:
        assert limits.prefill_tokens is not None
        new = min(config.rollout.max_tokens, limits.max_length - 1)
        prompts = shape.prompts(config) * (limits.max_length - new)
        turns = -(-shape.samples(config) // work.rows)
        seconds = turns * new * sums(work.rows) + prompts / limits.prefill_tokens * sums(limits.prefill_tokens)
        found.append(Exchange("sums of tensor groups", "generate", seconds))
    return found
