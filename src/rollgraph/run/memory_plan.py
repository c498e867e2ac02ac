"""The memory plan: how much memory each phase of a run needs, known before anything is allocated.

Owns the arithmetic. Shapes come from where a run takes them: limits from `shapes.py`, buckets from `sharding/`, the
cache from `inference/kv_cache.py`, and the model is built on the meta device. The graphs of all phases share one pool,
so memory that only one phase needs is counted once, at its largest.

What is counted is memory in use. On a CPU, a process may keep more than that from the system, because the C library
does not return all that is freed.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from rollgraph.config import Config, training_scopes
from rollgraph.inference.decode_graphs import TABLE as STATE_COLUMNS
from rollgraph.inference.defaults import BLOCK_SIZE, CPU_CACHE_BYTES, PREFILL_SEQUENCES, prefill_buckets
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.model import Architecture, Decoder
from rollgraph.model.logprobs import CHUNK_ELEMENTS
from rollgraph.model.tiled_attention import TILE
from rollgraph.policy import Limits
from rollgraph.rl.algorithms import Algorithm
from rollgraph.rl.demonstrations import COLUMNS
from rollgraph.run.inputs import make_algorithm, make_tokenizer, read_architecture
from rollgraph.run.shapes import longest_written, make_limits, recomputed_layers, written_limits
from rollgraph.run.step_floor import TB_PER_SECOND, TFLOPS, Floor, step_floor, written_floor
from rollgraph.run.teacher import shape_teacher
from rollgraph.sharding import BUCKET_BYTES, BucketPlan, plan_buckets, specs_of

Phase = Literal["generate", "score", "train"]
Place = Literal["device", "host"]
PHASES: tuple[Phase, ...] = ("generate", "score", "train")

FP32 = 4
SNAPSHOT = "copy for checkpoints"
CACHE = "key/value cache"


@dataclass(frozen=True)
class PlanLine:
    """One kind of memory, e.g. PlanLine("parameters", 3087428608, "device", ("generate", "score", "train"))."""

    name: str
    nbytes: int
    where: Place
    phases: tuple[Phase, ...]  # that need it


@dataclass(frozen=True)
class Plan:
    """The memory of one rank, and the least time of its step."""

    lines: tuple[PlanLine, ...]
    floor: Floor | None  # None: nothing is known about the speed of the device
    device_bytes: int | None  # that the device has; None if unknown
    notes: tuple[str, ...] = ()  # assumptions
    device: Literal["cuda", "cpu"] = "cuda"

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
            **(self.floor.to_dict() if self.floor is not None else {}),
            "notes": list(self.notes),
        }


def make_plan(
    config: Config,
    *,
    ranks: int = 1,
    device_bytes: int | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    tflops: float | None = None,
    tb_per_second: float | None = None,
) -> Plan:
    """The plan of one rank out of `ranks`. Reads config.json at most: no weights, and nothing on a device.

    Speeds that are not given are those of one H200, for `cuda`. For `cpu` there is no floor without both of them.
    """
    model, notes = shape_model(config)
    algorithm = make_algorithm(config)
    cuda = device == "cuda"
    written = COLUMNS.get(algorithm.source)
    if written is None:
        limits = make_limits(config, model.architecture, device, ranks)
    else:
        longest = longest_written(config, model.architecture)
        limits = written_limits(config, longest, len(written), device, ranks)
    lines = [*_weights(model, ranks)]
    lines += _reference(config, model, algorithm, lines, device_bytes if cuda else None)
    if not cuda:
        free = 0
    elif device_bytes is None:
        free = sys.maxsize
    else:
        free = _free(device_bytes, lines)
    whole = limits.keeps_logits(model.architecture.vocabulary, free)
    if written is None:
        lines.append(_cache(model, limits, lines, device_bytes, cuda))
        lines += _decode_state(config, limits)
        lines += _sampling_memory(config, model, limits, cuda)
        if not cuda and config.graph.impl != "none":
            lines.append(_restored_cache(lines))
        if config.data.max_prompt_tokens is None:
            notes.append("data.max_prompt_tokens is null, so prompts are assumed to be as long as the model allows")
    elif config.data.max_tokens is None:
        notes.append("data.max_tokens is null, so all rows are assumed to be as long as a microbatch allows")
    lines += _working_memory(config, model, algorithm, limits, ranks, cuda, whole)
    if cuda:
        tflops, tb_per_second = tflops or TFLOPS, tb_per_second or TB_PER_SECOND
    else:
        lines = [replace(line, where="device") for line in lines]  # the host is the device
    floor = None
    if tflops is not None and tb_per_second is not None:
        least = step_floor if written is None else written_floor
        floor = least(config, model, algorithm, limits, ranks, tflops, tb_per_second)
    return Plan(tuple(lines), floor, device_bytes if cuda else None, tuple(notes), device)


def shape_model(config: Config) -> tuple[Decoder, list[str]]:
    """The model of a run, on the meta device, and the assumptions that were made."""
    path = config.model.path
    architecture, dtype = read_architecture(config, make_tokenizer(config) if path is None else None)
    with torch.device("meta"):
        model = Decoder(architecture, checkpointing=recomputed_layers(config, architecture))
    notes = [] if dtype else [f"{path}/config.json names no dtype, so bfloat16 is assumed"]
    return model.to(dtype=getattr(torch, dtype or "bfloat16")), notes


# -- memory of every phase -------------------------------------------------------------------------


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
        PlanLine(SNAPSHOT, 3 * FP32 * sum(moments), "host", PHASES),  # allocated by the first save
    ]


def _reference(
    config: Config, model: Decoder, algorithm: Algorithm, before: list[PlanLine], device_bytes: int | None
) -> list[PlanLine]:
    """The weights of the reference policy, on the device or on the host, or of a teacher that is another model."""
    if not algorithm.needs_reference:
        return []
    teacher = shape_teacher(config)
    if teacher is not None and teacher.architecture != model.architecture:
        return [PlanLine("teacher", sum(parameter.nbytes for parameter in teacher.parameters()), "device", PHASES)]
    parameters = before[0].nbytes
    where = config.memory.reference
    if where == "auto":
        fits = device_bytes is None or parameters < _free(device_bytes, before) // 8
        where = "device" if fits else "host"
    return [PlanLine("reference", parameters, where, PHASES)]


def _cache(model: Decoder, limits: Limits, before: list[PlanLine], device_bytes: int | None, cuda: bool) -> PlanLine:
    """Blocks for the longest sequence in every row, but no more than configured, or than half of the free memory."""
    most = limits.rows * _blocks_of_row(limits) + 1
    whole = CachePlan(model.architecture, model.embed.weight.dtype, BLOCK_SIZE, most)
    given = limits.cache_bytes
    if given is None and not cuda:
        given = CPU_CACHE_BYTES
    elif given is None and device_bytes is not None:
        given = _free(device_bytes, before) // 2
    if given is not None:
        fitting = CachePlan.within(whole.architecture, whole.dtype, BLOCK_SIZE, given)
        whole = min(whole, fitting, key=lambda plan: plan.blocks)
    return PlanLine(CACHE, whole.nbytes, "device", PHASES)


def _decode_state(config: Config, limits: Limits) -> list[PlanLine]:
    rollout, rows, table = config.rollout, limits.rows, _blocks_of_row(limits)
    state, history = rows * (STATE_COLUMNS + table), rows * (limits.max_length if rollout.filtered else 1)
    most = limits.prefill_tokens
    assert most is not None
    batches = [3 * size + 1 + min(PREFILL_SEQUENCES, rows) * (2 + table) for size in prefill_buckets(most)]
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


# -- memory of one phase -------------------------------------------------------------------------


def _working_memory(
    config: Config,
    model: Decoder,
    algorithm: Algorithm,
    limits: Limits,
    ranks: int,
    cuda: bool,
    whole: bool,
) -> list[PlanLine]:
    a, itemsize = model.architecture, model.embed.weight.dtype.itemsize
    tokens = limits.token_buckets[-1]
    scopes = training_scopes(config, ranks)
    chunk = min(tokens, max(1, CHUNK_ELEMENTS // a.vocabulary))
    parts = not {"step", "layer"} & set(scopes)
    kept = activation_bytes(a, tokens, itemsize, checkpointing=model.checkpointing, cuda=cuda, parts=parts)
    if model.checkpointing == a.layers:
        kept += layer_bytes(a, tokens, itemsize, cuda=cuda)  # they are recomputed one by one, the last one first
    copies = 1 if cuda else 3  # plain PyTorch makes intermediate results, kernels do not
    at_once = tokens if whole else chunk
    backward = at_once * a.vocabulary * (FP32 + itemsize if cuda else 5 * FP32)
    head = FP32 * a.vocabulary * a.hidden if at_once < tokens else 0  # its gradient is accumulated over chunks in fp32
    lines = [
        PlanLine("activations", kept, "device", ("train",)),
        PlanLine("inside a layer", temporary_bytes(a, tokens, itemsize, cuda=cuda), "device", ("score", "train")),
        PlanLine("logits, score", chunk * a.vocabulary * FP32 * copies, "device", ("score",)),
        PlanLine("logits, train", backward + head, "device", ("train",)),
        PlanLine("gradients of a microbatch", _new_gradients(model, scopes), "device", ("train",)),
    ]
    if config.optimizer.clip_norm is not None:
        lines.append(_gradient_norm(model, ranks, lines))
    if "step" not in scopes:
        lines.append(PlanLine("inputs of graphs", _graph_inputs(a, scopes, tokens, itemsize), "device", PHASES))
    if algorithm.needs_reference:
        largest = max(bucket.numel * bucket.dtype.itemsize for bucket in _buckets(model, ranks))
        lines.append(PlanLine("bucket in exchange", largest, "device", ("score",)))
    return lines


def _gradient_norm(model: Decoder, ranks: int, lines: list[PlanLine]) -> PlanLine:
    """The gradients of a bucket in fp64, and their squares.

    The norm is computed when the microbatches are done, so only what it needs beyond those counts.
    """
    largest = max(bucket.shard_numel for bucket in _buckets(model, ranks))
    microbatch = sum(line.nbytes for line in lines if "train" in line.phases)
    return PlanLine("norm of the gradients", max(0, 2 * 8 * largest - microbatch), "device", ("train",))


def _restored_cache(before: list[PlanLine]) -> PlanLine:
    """A capture runs for real, and then restores the cache from a copy.

    It is over before the copy for checkpoints is made, so only what it needs beyond that counts. The copy of gradients
    that is made in the same way is never larger than that for checkpoints.
    """
    sizes = {line.name: line.nbytes for line in before}
    return PlanLine("copy of the cache", max(0, sizes[CACHE] - sizes[SNAPSHOT]), "device", ("generate",))


def _sampling_memory(config: Config, model: Decoder, limits: Limits, cuda: bool) -> list[PlanLine]:
    a, itemsize = model.architecture, model.embed.weight.dtype.itemsize
    assert limits.prefill_tokens is not None
    copies = 1 if cuda else 3  # plain PyTorch makes intermediate results, kernels do not
    drawn = limits.rows * a.vocabulary * FP32 * (8 if config.rollout.filtered else copies)  # filtering sorts
    prefill = temporary_bytes(a, limits.prefill_tokens, itemsize, cuda=cuda)
    return [
        PlanLine("inside a layer, prefill", prefill, "device", ("generate",)),
        PlanLine("logits, decode", drawn, "device", ("generate",)),
    ]


def activation_bytes(
    a: Architecture, tokens: int, itemsize: int, *, checkpointing: int, cuda: bool, parts: bool = False
) -> int:
    """What the forward of so many tokens, log-probabilities included, saves for its backward.

    Of the `checkpointing` layers that are recomputed, only the residual stream and its update are saved. If their
    `parts` are recomputed by themselves, the norms between these are saved, too.
    """
    each = 2 * a.hidden * itemsize
    if parts:
        each = 2 * _norm_bytes(a.hidden, itemsize, cuda)
    recomputed = checkpointing * tokens * each
    kept = (a.layers - checkpointing) * layer_bytes(a, tokens, itemsize, cuda=cuda)
    angles, numbers = 2 * FP32 * (a.head_dim // 2), 8 + 8 + FP32  # cos and sin; id, target and normalizer
    return recomputed + kept + tokens * (_norm_bytes(a.hidden, itemsize, cuda) + angles + numbers)


def layer_bytes(a: Architecture, tokens: int, itemsize: int, *, cuda: bool) -> int:
    """What one layer saves for its backward."""
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    attention = (q + 2 * kv + q) * itemsize  # rotated queries and keys, values, and the output
    if cuda:
        attention += FP32 * a.heads  # the log-sum-exp of each head
        attention += (q + 2 * kv) * itemsize if a.qk_norm else 0  # the projection
    else:
        attention += (q + kv) * itemsize  # the rest of the projection, of which the values are a part
        attention += (q + kv) * itemsize + FP32 * (a.heads + a.kv_heads) if a.qk_norm else 0
    mlp = (3 if cuda else 4) * a.mlp * itemsize  # gate, up and their product; plain PyTorch also saves silu(gate)
    return tokens * (2 * _norm_bytes(a.hidden, itemsize, cuda) + attention + mlp)


def _norm_bytes(width: int, itemsize: int, cuda: bool) -> int:
    """Per token: the input, its scale and the output. Plain PyTorch also saves what the weight multiplies."""
    return width * (2 * itemsize if cuda else FP32 + 2 * itemsize) + FP32


def temporary_bytes(a: Architecture, tokens: int, itemsize: int, *, cuda: bool) -> int:
    """What is alive at once inside the widest part of a layer, and is not saved for the backward."""
    mlp = tokens * (2 * a.hidden + 3 * a.mlp) * itemsize
    if cuda:
        return mlp
    # Plain PyTorch gathers the keys and values of a tile for each query, and lays them out anew in fp32.
    attention = tokens * TILE * a.kv_heads * a.head_dim * 4 * FP32
    return max(mlp, attention)


def _new_gradients(model: Decoder, scopes: tuple[str, ...]) -> int:
    """Gradients in the dtype of the weights, before they are added to the fp32 ones: of the model, or of one layer."""
    everything = sum(p.nbytes for p in model.parameters())
    if "step" in scopes:
        return everything
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    return everything - sum(layers) + max(layers)


def _graph_inputs(a: Architecture, scopes: tuple[str, ...], tokens: int, itemsize: int) -> int:
    stream, angles = a.hidden * itemsize, 2 * FP32 * (a.head_dim // 2)
    each = {"layer": 2 * stream + angles, "attn": stream + angles, "mlp": stream}
    return a.layers * tokens * sum(each[scope] for scope in scopes)
