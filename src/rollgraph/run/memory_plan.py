"""What a run will take, known before anything is allocated: the memory of each phase, and the floor of a step's time.

Owns the arithmetic. Shapes come from where a run takes them: limits from `lengths.py`, buckets from `sharding/`, the
cache from `inference/kv_cache.py`, over a model that has shapes and no memory. Graphs of all phases share one pool, so
what only one phase needs is there once, as large as the largest.
"""

from __future__ import annotations

import inspect
import sys
from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from rollgraph.config import Config, check_scopes
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.model import Architecture, Decoder
from rollgraph.model.logprobs import CHUNK_ELEMENTS
from rollgraph.policy import Limits
from rollgraph.rl.algorithms import Algorithm
from rollgraph.run.inputs import make_algorithm, make_tokenizer, read_architecture, scores_old
from rollgraph.run.shapes import BLOCK_SIZE, make_limits
from rollgraph.sharding import BucketPlan, ShardedModel, plan_buckets, specs_of

Phase = Literal["generate", "score", "train"]
Place = Literal["device", "host"]
PHASES: tuple[Phase, ...] = ("generate", "score", "train")

TFLOPS, TB_PER_SECOND = 785.0, 4.28  # one H200, measured: a bf16 matrix product, and a copy on the device
BUCKET_BYTES: int = inspect.signature(ShardedModel).parameters["bucket_bytes"].default
STATE_COLUMNS = 9  # of the engine: numbers of a row beside its block table
FP32 = 4


@dataclass(frozen=True)
class PlanLine:
    """One kind of memory, e.g. PlanLine("parameters", 3087428608, "device", ("generate", "score", "train"))."""

    name: str
    nbytes: int
    where: Place
    phases: tuple[Phase, ...]  # in which it is needed


@dataclass(frozen=True)
class Floor:
    """Seconds that a step takes at least, by its parts, if every prompt and completion is as long as it may be."""

    repeated: dict[str, float]  # each sample with a prompt of its own, as training packs them
    shared: dict[str, float]  # the prompt of a group computed once
    tflops: float
    tb_per_second: float


@dataclass(frozen=True)
class Plan:
    """Memory of one rank, and the floor of its step."""

    lines: tuple[PlanLine, ...]
    floor: Floor
    device_bytes: int | None  # what there is; None is not known
    notes: tuple[str, ...] = ()  # what had to be assumed

    def total(self, phase: Phase, where: Place = "device") -> int:
        return sum(line.nbytes for line in self.lines if line.where == where and phase in line.phases)

    @property
    def peak_phase(self) -> Phase:
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.peak_phase)

    @property
    def fits(self) -> bool | None:
        return None if self.device_bytes is None else self.peak <= self.device_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "lines": [{**asdict(line), "phases": list(line.phases)} for line in self.lines],
            "phases": {phase: self.total(phase) for phase in PHASES},
            "host": max(self.total(phase, "host") for phase in PHASES),
            "peak": {"phase": self.peak_phase, "bytes": self.peak},
            "device_bytes": self.device_bytes,
            "fits": self.fits,
            "floor_seconds": {
                "repeated": {**self.floor.repeated, "total": sum(self.floor.repeated.values())},
                "shared": {**self.floor.shared, "total": sum(self.floor.shared.values())},
            },
            "tflops": self.floor.tflops,
            "tb_per_second": self.floor.tb_per_second,
            "notes": list(self.notes),
        }


def make_plan(
    config: Config,
    *,
    ranks: int = 1,
    device_bytes: int | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    tflops: float = TFLOPS,
    tb_per_second: float = TB_PER_SECOND,
) -> Plan:
    """What one of so many ranks takes. Reads config.json at most: no weights, and nothing on a device."""
    model, notes = shape_model(config)
    algorithm = make_algorithm(config)
    cuda = device == "cuda"
    limits = make_limits(config, model.architecture, device, ranks)
    lines = [*_weights(model, ranks)]
    lines += _reference(config, algorithm, lines, device_bytes if cuda else None)
    free = (sys.maxsize if device_bytes is None else _free(device_bytes, lines)) if cuda else 0
    whole = limits.keeps_logits(model.architecture.vocabulary, free)
    lines.append(_cache(model, limits, lines, device_bytes, cuda))
    lines += _decode_state(config, limits)
    lines += _working_memory(config, model, algorithm, limits, ranks, cuda, whole)
    if config.data.max_prompt_tokens is None:
        notes.append("data.max_prompt_tokens is null: prompts are taken to be as long as the model allows")
    floor = step_floor(config, model, algorithm, limits, ranks, tflops, tb_per_second)
    return Plan(tuple(lines), floor, device_bytes if cuda else None, tuple(notes))


def shape_model(config: Config) -> tuple[Decoder, list[str]]:
    """The model of a run with shapes and dtypes but without memory, and what had to be assumed."""
    path = config.model.path
    architecture, dtype = read_architecture(config, make_tokenizer(config) if path is None else None)
    with torch.device("meta"):
        model = Decoder(architecture, checkpointing=config.model.checkpointing)
    notes = [] if dtype else [f"{path}/config.json does not say a dtype: bfloat16 is assumed"]
    return model.to(dtype=getattr(torch, dtype or "bfloat16")), notes


# -- what is there in every phase ------------------------------------------------------------------


def _buckets(model: Decoder, ranks: int) -> tuple[BucketPlan, ...]:
    return plan_buckets(specs_of(model), ranks=ranks, bucket_bytes=BUCKET_BYTES)


def _weights(model: Decoder, ranks: int) -> list[PlanLine]:
    buckets = _buckets(model, ranks)
    moments = [sum(end - start for _, start, end in b.owned(0)) for b in buckets]
    optimizer = sum(FP32 * b.shard_numel + 2 * FP32 * own for b, own in zip(buckets, moments, strict=True))
    return [
        PlanLine("parameters", sum(b.numel * b.dtype.itemsize for b in buckets), "device", PHASES),
        PlanLine("gradients, fp32", sum(b.numel * FP32 for b in buckets), "device", PHASES),
        PlanLine("optimizer", optimizer, "device", PHASES),
        PlanLine("copy for checkpoints", 3 * FP32 * sum(moments), "host", PHASES),  # also where a save is waited for
    ]


def _reference(
    config: Config, algorithm: Algorithm, before: list[PlanLine], device_bytes: int | None
) -> list[PlanLine]:
    """The reference's weights, where they wait."""
    if not algorithm.needs_reference:
        return []
    parameters, where = before[0].nbytes, config.memory.reference
    if where == "auto":
        where = "device" if device_bytes is None or parameters < _free(device_bytes, before) // 8 else "host"
    return [PlanLine("reference", parameters, where, PHASES)]


def _cache(model: Decoder, limits: Limits, before: list[PlanLine], device_bytes: int | None, cuda: bool) -> PlanLine:
    """Blocks for all that the rows could ever hold, within what is given or half of what is free by then."""
    most = limits.rows * _blocks_of_row(limits) + 1
    whole = CachePlan(model.architecture, model.embed.weight.dtype, BLOCK_SIZE, most)
    given = limits.cache_bytes
    if given is None and not cuda:
        given = 2**30
    elif given is None and device_bytes is not None:
        given = _free(device_bytes, before) // 2
    if given is not None:
        fitting = CachePlan.within(whole.architecture, whole.dtype, BLOCK_SIZE, given)
        whole = min(whole, fitting, key=lambda plan: plan.blocks)
    return PlanLine("key/value cache", whole.nbytes, "device", PHASES)


def _decode_state(config: Config, limits: Limits) -> list[PlanLine]:
    rollout, rows, table = config.rollout, limits.rows, _blocks_of_row(limits)
    state, history = rows * (STATE_COLUMNS + table), rows * (limits.max_length if rollout.filtered else 1)
    most = limits.prefill_tokens
    assert most is not None
    sizes = [size for size in (64 * 4**power for power in range(16)) if size < most]
    batches = [3 * size + 1 + min(64, rows) * (2 + table) for size in (*sizes, most)]
    orders, results = rows, 3 * rows
    pinned = 2 * (batches[-1] + state + history + 8 * rows) + 2 * results
    return [
        PlanLine("decode state", 4 * (state + history + orders + results + sum(batches)), "device", PHASES),
        PlanLine("decode state, pinned", 4 * pinned, "host", PHASES),
    ]


def _blocks_of_row(limits: Limits) -> int:
    return -(-limits.max_length // BLOCK_SIZE)


def _free(device_bytes: int, lines: list[PlanLine]) -> int:
    return max(0, device_bytes - sum(line.nbytes for line in lines if line.where == "device"))


# -- what one phase needs while it runs ------------------------------------------------------------


def _working_memory(
    config: Config, model: Decoder, algorithm: Algorithm, limits: Limits, ranks: int, cuda: bool, whole: bool
) -> list[PlanLine]:
    a, itemsize = model.architecture, model.embed.weight.dtype.itemsize
    tokens, prefill = limits.token_buckets[-1], limits.prefill_tokens
    assert prefill is not None
    scopes = check_scopes(config, ranks) or (("step",) if ranks == 1 else ("layer",))
    chunk = min(tokens, max(1, CHUNK_ELEMENTS // a.vocabulary))
    kept = activation_bytes(a, tokens, itemsize, checkpointing=model.checkpointing, cuda=cuda)
    if model.checkpointing:
        kept += layer_bytes(a, tokens, itemsize, cuda=cuda)  # one is computed again at a time
    copies = 1 if cuda else 3  # plain PyTorch has intermediate results, kernels have none
    at_once = tokens if whole else chunk
    backward = at_once * a.vocabulary * (FP32 + itemsize if cuda else 5 * FP32)
    head = FP32 * a.vocabulary * a.hidden if at_once < tokens else 0  # its gradient is summed over chunks in fp32
    drawn = limits.rows * a.vocabulary * FP32 * (8 if config.rollout.filtered else copies)  # a filter sorts
    lines = [
        PlanLine("activations", kept, "device", ("train",)),
        PlanLine("inside a layer, prefill", temporary_bytes(a, prefill, itemsize), "device", ("generate",)),
        PlanLine("inside a layer", temporary_bytes(a, tokens, itemsize), "device", ("score", "train")),
        PlanLine("logits, decode", drawn, "device", ("generate",)),
        PlanLine("logits, score", chunk * a.vocabulary * FP32 * copies, "device", ("score",)),
        PlanLine("logits, train", backward + head, "device", ("train",)),
        PlanLine("gradients of a microbatch", _new_gradients(model, scopes), "device", ("train",)),
    ]
    if "step" not in scopes:
        lines.append(PlanLine("inputs of graphs", _graph_inputs(a, scopes, tokens, itemsize), "device", PHASES))
    if algorithm.needs_reference:
        largest = max(bucket.numel * bucket.dtype.itemsize for bucket in _buckets(model, ranks))
        lines.append(PlanLine("bucket in exchange", largest, "device", ("score",)))
    return lines


def activation_bytes(a: Architecture, tokens: int, itemsize: int, *, checkpointing: bool, cuda: bool) -> int:
    """What a forward of so many tokens, up to their log-probabilities, keeps for its backward."""
    each = tokens * 2 * a.hidden * itemsize if checkpointing else layer_bytes(a, tokens, itemsize, cuda=cuda)
    angles, numbers = 2 * FP32 * (a.head_dim // 2), 8 + 8 + FP32  # cos and sin; id, target and normalizer
    return a.layers * each + tokens * (_norm_bytes(a.hidden, itemsize, cuda) + angles + numbers)


def layer_bytes(a: Architecture, tokens: int, itemsize: int, *, cuda: bool) -> int:
    """What one layer keeps for its backward."""
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    attention = FP32 * a.heads  # a sum for each head's softmax
    if cuda and itemsize == 2:
        attention += (q + 2 * 2 * kv + q) * itemsize  # rotated queries; keys and values, room for twice as many; output
        attention += (q + 2 * kv) * itemsize if a.qk_norm else 0  # the projection
    else:
        attention += (q + 2 * kv + q + kv + q) * itemsize  # the projection with its values, rotated queries and keys
        attention += tokens * itemsize  # a mask, [tokens, tokens]
    if a.qk_norm:
        attention += (q + kv) * itemsize + FP32 * (a.heads + a.kv_heads)
    mlp = (3 if cuda else 4) * a.mlp * itemsize  # gate, up and their product; plain PyTorch keeps silu(gate), too
    return tokens * (2 * _norm_bytes(a.hidden, itemsize, cuda) + attention + mlp)


def _norm_bytes(width: int, itemsize: int, cuda: bool) -> int:
    """Of a token: what goes in, its scale and what comes out; plain PyTorch also keeps what the weight multiplies."""
    return width * (2 * itemsize if cuda else FP32 + 2 * itemsize) + FP32


def temporary_bytes(a: Architecture, tokens: int, itemsize: int) -> int:
    """What exists at a time inside a layer's MLP, its widest part, and is not kept: forward, or its gradients."""
    return tokens * (2 * a.hidden + 3 * a.mlp) * itemsize


def _new_gradients(model: Decoder, scopes: tuple[str, ...]) -> int:
    """Gradients in the dtype of the weights, before they are added to the fp32 ones: all, or those of a layer."""
    everything = sum(p.nbytes for p in model.parameters())
    if "step" in scopes:
        return everything
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    return everything - sum(layers) + max(layers)


def _graph_inputs(a: Architecture, scopes: tuple[str, ...], tokens: int, itemsize: int) -> int:
    stream, angles = a.hidden * itemsize, 2 * FP32 * (a.head_dim // 2)
    each = {"layer": 2 * stream + angles, "attn": stream + angles, "mlp": stream}
    return a.layers * tokens * sum(each[scope] for scope in scopes)


# -- time ------------------------------------------------------------------------------------------


def sum_up_to(first: int, last: int, most: int) -> int:
    """The sum of min(number, most) over the whole numbers from first to last.

    >>> sum_up_to(2, 5, 3)
    11
    """
    rising = max(min(last, most), first - 1)  # the last number that counts as itself
    return (rising * (rising + 1) - first * (first - 1)) // 2 + most * (last - rising)


def step_floor(
    config: Config,
    model: Decoder,
    algorithm: Algorithm,
    limits: Limits,
    ranks: int,
    tflops: float,
    tb_per_second: float,
) -> Floor:
    """Matrix products and bytes that no implementation can leave out, over what the device can do.

    A token costs 2 FLOPs for each weight forward and 6 with backward; attention itself is not counted. A decode step
    reads all weights and the keys and values of its rows, and takes the longer of its FLOPs and its bytes.
    """
    a = model.architecture
    table = 0 if a.tied else a.vocabulary * a.hidden  # embedding is a look-up, unless its weights make the logits
    weights = sum(p.numel() for p in model.parameters()) - table
    prompts = -(-config.data.prompts_per_step // ranks)
    samples = prompts * config.rollout.samples_per_prompt
    new = min(config.rollout.max_tokens, limits.max_length - 1)
    prompt = limits.max_length - new
    flops, bandwidth = tflops * 1e12, tb_per_second * 1e12
    itemsize, rows = model.embed.weight.dtype.itemsize, limits.rows

    def decode(running: int) -> float:
        computed = 2 * weights * running / flops
        own = 2 * a.kv_heads * a.head_dim * itemsize * running  # bytes of one token in one layer, in all rows
        windows = [a.window(layer) or limits.max_length for layer in range(a.layers)]

        def read(step: int) -> float:
            seen = sum(min(prompt + step, window) for window in windows)
            return (weights * itemsize + own * seen) / bandwidth

        # Reading takes longer from step to step, until it takes longer than computing. No loop over the steps: a
        # configuration may ask for billions.
        first = bisect_left(range(1, new + 1), computed, key=read)
        seen = sum(sum_up_to(prompt + first + 1, prompt + new, window) for window in windows)
        return first * computed + ((new - first) * weights * itemsize + own * seen) / bandwidth

    def parts(prompts_computed: int) -> dict[str, float]:
        tokens = prompts_computed * prompt + samples * new
        forward = 2 * weights * tokens / flops
        found = {"decode": decoded, "prefill": 2 * weights * prompts_computed * prompt / flops}
        if algorithm.needs_reference:
            found["reference"] = forward
        if scores_old(config, algorithm):
            found["old log-probabilities"] = forward
        passes = 4 if model.checkpointing else 3  # backward is two forwards; checkpointing adds one
        return found | {"train": passes * config.algorithm.epochs * forward}

    full, rest = divmod(samples, rows)
    decoded = full * decode(rows) + (decode(rest) if rest else 0.0)
    return Floor(parts(samples), parts(prompts), tflops, tb_per_second)
