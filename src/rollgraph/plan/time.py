"""The estimated time of a step: a lower bound for the device, plus the cost of memory settings and of communication.

The estimate ranks settings; it does not predict wall-clock time. Everything runs at the speeds of the lower bound (the
floor), which are those of large matmuls and copies. Settings cost what they compute or move in addition:

- each microbatch costs a fixed number of tokens more, because small matmuls are slow, and moves all gradients;
- a recomputed layer costs its forward a second time, and logits in chunks cost the head's matmul a second time;
- optimizer state on the host crosses the bus twice, in both directions at once; on the device, it is read and written;
- reference weights are swapped with those of the policy and back, over the bus or on the device;
- a KV cache that cannot hold all rows decodes as many rows at a time as it can hold;
- several ranks communicate, and communication that computing does not hide is added.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from rollgraph.config import Config
from rollgraph.inputs.inputs import recomputes_old_logprobs
from rollgraph.model.logprobs import tokens_per_chunk
from rollgraph.model.tensor_parallel import LARGE_ALL_REDUCE
from rollgraph.parallel.fsdp.layout import RingPlan
from rollgraph.plan.memory import FP32, PHASES, Phase, cache_plan, planned_weights
from rollgraph.plan.run_shape import RunShape
from rollgraph.policy import Limits

# -- the floor: a lower bound ----------------------------------------------------------------------

TFLOPS = 785.0  # of a large bf16 matmul, measured on one H200
TB_PER_SECOND = 4.28  # of a large copy on the device, measured on one H200


@dataclass(frozen=True)
class Speed:
    """How fast a device computes and copies."""

    tflops: float = TFLOPS
    tb_per_second: float = TB_PER_SECOND

    @property
    def flops(self) -> float:
        return self.tflops * 1e12

    @property
    def bandwidth(self) -> float:
        return self.tb_per_second * 1e12


@dataclass(frozen=True)
class Floor:
    """A lower bound on the seconds of each part of a step."""

    repeated: dict[str, float]  # the prompt is computed again for each sample
    shared: dict[str, float]  # the prompt is computed once for all of its samples
    speed: Speed

    def to_dict(self) -> dict[str, Any]:
        return {
            "floor_seconds": {
                "repeated": {**self.repeated, "total": sum(self.repeated.values())},
                "shared": {**self.shared, "total": sum(self.shared.values())},
            },
            "tflops": self.speed.tflops,
            "tb_per_second": self.speed.tb_per_second,
        }


def sum_up_to(first: int, last: int, limit: int) -> int:
    """The sum of min(number, limit) for all integers from `first` to `last`.

    >>> sum_up_to(2, 5, 3)
    11
    """
    rising = max(min(last, limit), first - 1)  # the last number that counts as itself
    return (rising * (rising + 1) - first * (first - 1)) // 2 + limit * (last - rising)


def step_floor(config: Config, shape: RunShape, limits: Limits, speed: Speed) -> Floor:
    """The time of the matmuls and memory traffic that no implementation can avoid.

    A token costs 2 FLOPs per weight in the forward pass and 6 with the backward; attention itself is not counted. With
    long prompts, only the tokens of completions go through the head. A decode step reads all weights and the keys and
    values of its rows; it takes as long as its FLOPs or its bytes, whichever is longer.
    """
    a = shape.architecture
    algorithm = shape.algorithm
    weights = shape.matmul_weights
    prompts = shape.prompts(config)
    samples = shape.samples(config)
    new = min(config.rollout.max_tokens, limits.max_length - 1)
    prompt = limits.max_length - new
    flops = speed.flops
    bandwidth = speed.bandwidth
    itemsize = shape.itemsize
    rows = limits.rows

    def decode(batch: int) -> float:
        """Seconds to decode all `new` tokens of `batch` rows."""
        compute_seconds = 2 * weights * batch / flops  # of one step
        kv_bytes = 2 * a.kv_heads * a.head_dim * itemsize * batch  # of one position in one layer, for all rows
        windows = [a.window(layer) or limits.max_length for layer in range(a.layers)]

        def read_seconds(step: int) -> float:
            positions = sum(min(prompt + step, window) for window in windows)
            return (weights * itemsize + kv_bytes * positions) / bandwidth

        # Reading takes longer with each step. The first steps are bound by computing, all others by reading. We do not
        # loop over the steps, because a configuration may have billions.
        compute_bound = bisect_left(range(1, new + 1), compute_seconds, key=read_seconds)
        read_bound = new - compute_bound
        positions = sum(sum_up_to(prompt + compute_bound + 1, prompt + new, window) for window in windows)
        read_bytes = read_bound * weights * itemsize + kv_bytes * positions
        return compute_bound * compute_seconds + read_bytes / bandwidth

    full_batches, last_rows = divmod(samples, rows)
    decode_seconds = full_batches * decode(rows) + (decode(last_rows) if last_rows else 0.0)

    def parts(prompts_computed: int) -> dict[str, float]:
        tokens = prompts_computed * prompt + samples * new
        without_logits = tokens - samples * new if limits.half_logits else 0
        forward = 2 * (weights * tokens - a.vocabulary * a.hidden * without_logits) / flops
        seconds = {"decode": decode_seconds, "prefill": 2 * weights * prompts_computed * prompt / flops}
        if algorithm.needs_reference:
            seconds["reference"] = forward
        if recomputes_old_logprobs(config, algorithm, is_exact=config.graph.exact != "off"):
            seconds["old log-probabilities"] = forward
        return seconds | {"train": _training_passes(config, shape) * forward}

    return Floor(parts(samples), parts(prompts), speed)


def offline_step_floor(config: Config, shape: RunShape, limits: Limits, speed: Speed) -> Floor:
    """The time of the matmuls of a step that trains on a dataset, if all sequences have the maximum length.

    Nothing is generated. The policy scores pairs before training, because their loss compares it with the reference.
    """
    forward = 2 * shape.matmul_weights * shape.samples(config) * limits.max_length / speed.flops
    seconds = {}
    if shape.algorithm.source == "pairs":
        seconds["policy"] = forward
    if shape.algorithm.needs_reference:
        seconds["reference"] = forward
    seconds["train"] = _training_passes(config, shape) * forward
    return Floor(repeated=seconds, shared=seconds, speed=speed)  # no shared prompts: each row has its own


def _training_passes(config: Config, shape: RunShape) -> int:
    """The cost of training in forward passes: a backward costs two, or one if the weights get no gradients (LoRA)."""
    return (3 if shape.lora_columns is None else 2) * config.algorithm.epochs


# -- communication ---------------------------------------------------------------------------------
# `layout.py` has the time of a collective. Here we list the collectives of each layout, and what overlaps with them:
#
# - *shard: optimizer*: gradients are reduced during the backward of an update's last microbatch; only the last bucket
#   is exposed. Parameters are gathered during the next forward; only the first bucket is exposed. After the last update
#   of a step comes generation, which needs all parameters at once, so that gather is fully exposed.
# - *shard: parameters*: generation starts with a gather of all parameters, fully exposed. So does scoring by the
#   reference policy, and scoring of pairs by the policy. In training, for every microbatch, a layer is gathered while
#   the previous one computes, in the forward and again in the backward, and its gradients are reduced while the next
#   one computes. Layers that are still in the ring are not gathered again. Embedding and head are gathered once per
#   update, and their gradients are reduced in every microbatch, all exposed. With adapters, layers are gathered with
#   their base, and only the gradients of adapters are reduced.
# - *tensor_parallel*: two all-reduces in the forward of each layer and two in its backward, all exposed. A rank gathers
#   the partial sums of all ranks and adds them in rank order, so that all ranks get the same bits. With more than two
#   ranks and large tensors, each rank adds up one part and gathers the others, which moves as many bytes as the
#   library's all-reduce.
#
# Single numbers, such as the norm of the gradients, are not counted.

_ALL_REDUCES_PER_PASS = 2  # of a layer: two in its forward and two in its backward


@dataclass(frozen=True)
class Communication:
    """One kind of communication in a step, e.g. Communication("sums of tensor groups", "train", seconds=0.4)."""

    name: str
    phase: Phase
    seconds: float  # without overlap
    hidden: float = 0.0  # the part of `seconds` that overlaps with computing

    @property
    def exposed(self) -> float:
        return self.seconds - self.hidden

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "phase": self.phase, "seconds": self.seconds, "exposed": self.exposed}


def step_communication(
    config: Config, shape: RunShape, speed: Speed, *, rows: int, score_passes: int
) -> tuple[Communication, ...]:
    """All communication of a step. `rows` decode at a time; scoring runs `score_passes` forwards over all samples."""
    work = _StepWork(config, shape, speed, rows, score_passes)
    communication: list[Communication] = []
    if shape.ring is not None:
        communication += _parameter_sharding(work, shape.ring)
    elif shape.layout.data_parallel > 1:
        communication += _optimizer_sharding(work)
    if shape.layout.tensor_parallel > 1:
        communication += _tensor_all_reduces(work)
    return tuple(communication)


@dataclass(frozen=True)
class _StepWork:
    """The work of one rank in a step, as far as communication depends on it."""

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
        """Tokens of a microbatch."""
        return self.shape.limits(self.config).token_buckets[-1]

    @property
    def updates(self) -> int:
        return self.config.algorithm.epochs * self.config.algorithm.minibatches

    @property
    def train_microbatches(self) -> int:
        tokens_per_update = self.shape.tokens(self.config) / self.config.algorithm.minibatches
        return self.updates * max(1, -(-int(tokens_per_update) // self.tokens))

    @property
    def score_microbatches(self) -> int:
        return self.score_passes * max(1, -(-self.shape.tokens(self.config) // self.tokens))

    @property
    def forward(self) -> float:
        """Seconds of all layers in the forward of a microbatch."""
        a = self.shape.architecture
        weights = self.shape.matmul_weights - a.vocabulary * a.hidden
        return 2 * weights * self.tokens / self.speed.flops

    @property
    def backward(self) -> float:
        """Seconds of all layers in the backward of a microbatch, recomputation included."""
        recomputed = self.shape.recomputed_layers(self.config) / self.layers
        return self.forward * ((2 if self.shape.lora_columns is None else 1) + recomputed)


def _optimizer_sharding(work: _StepWork) -> list[Communication]:
    shape, group = work.shape, work.shape.layout.data_group
    reductions = [group.reduce_scatter(bucket.numel * FP32) for bucket in shape.buckets if bucket.trainable]
    gathers = [group.all_gather(bucket.numel * bucket.dtype.itemsize) for bucket in shape.buckets]
    # Buckets are in the order of the backward: the last one is reduced last and gathered first.
    hidden_reductions = min(sum(reductions[:-1]), work.backward)
    hidden_gathers = min(sum(gathers[:-1]), work.forward)
    before_generation = 0 if shape.trains_offline else 1
    before_training = work.updates - before_generation
    communication = [
        Communication("reduced gradients", "train", work.updates * sum(reductions), work.updates * hidden_reductions),
        Communication("gathered parameters", "train", before_training * sum(gathers), before_training * hidden_gathers),
    ]
    if before_generation:
        communication.append(Communication("gathered parameters", "generate", sum(gathers)))
    return [kind for kind in communication if kind.seconds]


def _parameter_sharding(work: _StepWork, ring: RingPlan) -> list[Communication]:
    """The ring's collectives in training, and the gathers of all parameters for generation and scoring.

    The first forward after an update gathers every layer. Each later pass begins where the one before ended, so the
    last layers of that one are still in their slots. Every backward reduces the gradients of all layers.
    """
    shape, group, layers = work.shape, work.shape.layout.data_group, work.layers
    updates, microbatches = work.updates, work.train_microbatches
    gather = group.all_gather(ring.slot_nbytes(0))  # seconds, for one layer
    reduce = group.reduce_scatter(ring.slot_gradients(0) * FP32)
    first_forward = layers * gather
    later_forward = (layers - ring.layer_slots) * gather
    backward = later_forward + layers * reduce
    # Nothing computes during the first gather after an update, nor during the last reduction of a backward.
    hidden_by_first_forward = min(first_forward - gather, work.forward)
    hidden_by_later_forward = min(later_forward, work.forward)
    hidden_by_backward = min(backward - reduce, work.backward)
    later_forwards = microbatches - updates
    communication = [
        Communication(
            "layers, gathered and reduced",
            "train",
            updates * first_forward + later_forwards * later_forward + microbatches * backward,
            updates * hidden_by_first_forward
            + later_forwards * hidden_by_later_forward
            + microbatches * hidden_by_backward,
        ),
    ]
    scores_pairs = shape.algorithm.source == "pairs"
    # The root stays in its own slot until the weights change, by an update or by a swap with the reference. So the
    # first update may find the root that generation or scoring has gathered.
    keeps_root = (scores_pairs or not shape.trains_offline) and not shape.stores_reference
    root_gathers = updates - 1 if keeps_root else updates
    for root in ring.units[ring.num_layers :]:  # no root with adapters: outside the layers, everything is frozen
        seconds = root_gathers * group.all_gather(root.nbytes)
        seconds += microbatches * group.reduce_scatter(root.gradients * FP32)
        communication.append(Communication("embedding and head", "train", seconds))
    gather_all = group.all_gather(sum(unit.nbytes for unit in ring.units))
    if shape.stores_reference:
        communication.append(Communication("gathered reference", "score", gather_all))
    if scores_pairs:
        communication.append(Communication("gathered parameters", "score", gather_all))
    if not shape.trains_offline:
        communication.append(Communication("gathered parameters", "generate", gather_all))
    return communication


def _tensor_all_reduces(work: _StepWork) -> list[Communication]:
    """The all-reduces of each phase. No computing overlaps with them."""
    config, shape, group = work.config, work.shape, work.shape.layout.tensor_group
    limits = shape.limits(config)

    def all_reduces(tokens: int) -> float:
        """Seconds of the all-reduces of all layers, in a forward over `tokens` tokens."""
        nbytes = tokens * shape.architecture.hidden * shape.itemsize
        if group.ranks > 2 and nbytes >= LARGE_ALL_REDUCE:
            return _ALL_REDUCES_PER_PASS * work.layers * group.all_reduce(nbytes, "ring")
        return _ALL_REDUCES_PER_PASS * work.layers * group.all_gather(group.ranks * nbytes)

    passes = 2 + shape.recomputed_layers(config) / work.layers  # forward, backward, and recomputation
    communication = [
        Communication("sums of tensor groups", "train", work.train_microbatches * passes * all_reduces(work.tokens))
    ]
    if work.score_passes:
        communication.append(
            Communication("sums of tensor groups", "score", work.score_microbatches * all_reduces(work.tokens))
        )
    if not shape.trains_offline:
        assert limits.prefill_tokens is not None
        new = min(config.rollout.max_tokens, limits.max_length - 1)
        prompt_tokens = shape.prompts(config) * (limits.max_length - new)
        batches = -(-shape.samples(config) // work.rows)
        seconds = batches * new * all_reduces(work.rows)
        seconds += prompt_tokens / limits.prefill_tokens * all_reduces(limits.prefill_tokens)
        communication.append(Communication("sums of tensor groups", "generate", seconds))
    return communication


# -- the estimate ----------------------------------------------------------------------------------

MICROBATCH_OVERHEAD_TOKENS = 900  # each microbatch costs this many more; measured on an H200, 4,096 to 16,384 tokens
HOST_BYTES_PER_SECOND = 50e9  # between pinned memory and the device, in each direction; PCIe 5.0


_GENERATION = ("decode", "prefill")
_PHASES: dict[str, Phase] = {  # everything else is training, including the overhead of microbatches
    **dict.fromkeys(_GENERATION, "generate"),
    **dict.fromkeys(("reference", "old log-probabilities", "policy", "exchange of weights"), "score"),
}


@dataclass(frozen=True)
class StepTime:
    """The estimated seconds of a step, by part."""

    floor: dict[str, float]
    added: dict[str, float]
    communication: tuple[Communication, ...] = ()

    @property
    def exposed(self) -> float:
        """The seconds of communication that computing does not hide."""
        return sum(kind.exposed for kind in self.communication)

    @property
    def total(self) -> float:
        return sum(self.floor.values()) + sum(self.added.values()) + self.exposed

    def of_phase(self, phase: Phase) -> float:
        computed = {**self.floor, **self.added}
        seconds = sum(value for name, value in computed.items() if _PHASES.get(name, "train") == phase)
        return seconds + sum(kind.exposed for kind in self.communication if kind.phase == phase)

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": {**{phase: self.of_phase(phase) for phase in PHASES}, "total": self.total},
            "exposed_seconds": self.exposed,
        }


def estimate_step(config: Config, shape: RunShape, speed: Speed) -> StepTime:
    limits = shape.limits(config)
    rows = limits.rows
    if shape.trains_offline:
        floor = offline_step_floor(config, shape, limits, speed).shared
    else:
        rows = max(1, min(limits.rows, cache_plan(config, shape).tokens // limits.max_length))
        floor = step_floor(config, shape, replace(limits, rows=rows), speed).shared
    epochs = config.algorithm.epochs
    bucket = limits.token_buckets[-1]
    tokens = shape.tokens(config)
    a = shape.architecture
    head = a.vocabulary * a.hidden
    added = {"recomputed layers": (shape.matmul_weights - head) * shape.recomputed_layers(config) / a.layers}
    if config.memory.logits == "chunks" and tokens_per_chunk(bucket, a.vocabulary) < bucket:
        added["logits, computed twice"] = head * (shape.logit_tokens(config) / tokens if limits.half_logits else 1.0)
    added = {name: epochs * 2 * weights * tokens / speed.flops for name, weights in added.items()}
    passes = sum(seconds for name, seconds in floor.items() if name not in _GENERATION)
    added["microbatches"] = (passes + sum(added.values())) * MICROBATCH_OVERHEAD_TOKENS / bucket
    added["gradients"] = epochs * tokens / bucket * _gradient_traffic(shape) / speed.bandwidth
    state = planned_weights(config, shape).optimizer
    updates = epochs * config.algorithm.minibatches
    added["optimizer"] = updates * (state.host / HOST_BYTES_PER_SECOND + 2 * state.device / speed.bandwidth)
    if shape.stores_reference:
        weights = 2 * shape.trainable_weights * shape.itemsize  # swapped in and back
        over_bus = config.memory.reference == "host"
        added["exchange of weights"] = weights / HOST_BYTES_PER_SECOND if over_bus else 4 * weights / speed.bandwidth
    scored = [name for name in floor if _PHASES.get(name) == "score"]
    communication = step_communication(config, shape, speed, rows=rows, score_passes=len(scored))
    return StepTime(floor, added, communication)


def _gradient_traffic(shape: RunShape) -> int:
    """The bytes that a microbatch's gradients move: they are written and read, those in fp32 read and written."""
    return shape.trainable_weights * (2 * shape.itemsize + 2 * 4)
