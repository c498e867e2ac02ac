"""The memory plan: how much memory each phase of a run needs, known before anything is allocated.

Owns the sum. Shapes come from where a run takes them: limits from `shapes.py`, buckets from `sharding/`, the cache from
`inference/kv_cache.py`, activations from `layer_memory.py`. What only one phase needs shares its memory with what only
another one needs, so the run needs what the largest phase needs. `memory_choice.py` chooses settings by these plans.

What is counted is memory in use. On a CPU, a process may keep more than that from the system, because the C library
does not return all that is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from rollgraph.config import Config, training_scopes
from rollgraph.inference.decode_graphs import TABLE as STATE_COLUMNS
from rollgraph.inference.defaults import BLOCK_SIZE, CPU_CACHE_BYTES, PREFILL_SEQUENCES, prefill_buckets, row_buckets
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.model import Decoder
from rollgraph.policy import Limits
from rollgraph.run.layer_memory import FP32, Pass
from rollgraph.run.plan_lines import PHASES, Phase, Place, PlanLine, total
from rollgraph.run.run_shape import RunShape
from rollgraph.sharding import MemoryPlan, OptimizerMemory
from rollgraph.sharding.peer_copies import COPIES
from rollgraph.sharding.state_memory import CHUNK

SNAPSHOT = "copy for checkpoints"
CACHE = "key/value cache"
GRADIENTS = "gradients, fp32"
FRAGMENTS = "fragments"
GATHERED = "parameters, gathered"
_GRAPH_OF_LAYER = 48 << 10  # bytes that the driver needs for one layer in one CUDA graph
# Bytes of modules that the libraries and our kernels load when they are first used, of the libraries' workspaces, and
# of what the allocator rounds up: what was measured on an H200 beside everything else, in six configurations.
_LIBRARIES = 1100 << 20
# Memory of the graphs' pool in pieces that are too small for anything, measured on an H200: so many times the widest
# activation and, if pages of the cache lie in the pool, those of so many layers.
_FRAGMENTS = 2.5
_FRAGMENTED_PAGES = 5


def plan_lines(config: Config, shape: RunShape) -> tuple[PlanLine, ...]:
    """The lines of one rank. The settings of memory must have been chosen: none of them is `auto`."""
    limits = shape.limits(config)
    lines = [*_weights(config, shape), *_gathered(shape), *_reference(config, shape)]
    if not shape.samples_nothing:
        lines += _generation(config, shape, limits)
    training = _training_pass(config, shape, limits)
    if shape.cuda:
        lines += _passes(config, shape, training)
        lines += _outside_graphs(config, shape)
        lines.append(_graphs(config, shape, limits))
        lines.append(PlanLine(FRAGMENTS, _fragments(config, shape, training), "device", PHASES))
    else:
        lines += _passes_on_cpu(config, shape, training, lines)
        lines = [replace(line, where="device") for line in lines]  # the host is the device
    return (*lines, _not_shared(shape, lines))


# -- weights ----------------------------------------------------------------------------------------


def _weights(config: Config, shape: RunShape) -> list[PlanLine]:
    memory = planned_weights(config, shape)
    optimizer = memory.optimizer
    return [
        PlanLine("base, frozen", _base(shape), "device", PHASES),
        PlanLine("parameters", memory.parameters, "device", PHASES),
        PlanLine(GRADIENTS, memory.gradients, "device", ("train",)),
        PlanLine("optimizer", optimizer.device, "device", PHASES),
        PlanLine("optimizer, offloaded", optimizer.host, "host", PHASES),
        PlanLine("optimizer, in transit", optimizer.streaming, "device", PHASES),
        *_copies(config, optimizer),
    ]


def _base(shape: RunShape) -> int:
    """The base of adapters: all of it or, with `shard: parameters`, a rank's part of the layers."""
    return shape.base if shape.ring is None else shape.ring.kept_frozen_nbytes


def _gathered(shape: RunShape) -> list[PlanLine]:
    """With `shard: parameters`: what is gathered beside the parts that a rank keeps, the base of adapters included.

    Training has a ring of layers, whose addresses graphs know, so it is there all the time, like what belongs to no
    layer. Generation and scoring have a copy of all layers: on CUDA in the graphs' pool, over activations of training.
    """
    ring = shape.ring
    if ring is None:
        return []
    outside = shape.base_outside_layers + sum(unit.nbytes for unit in ring.units[ring.turning :])
    layers = ring.copy_nbytes if shape.reads_all_parameters else 0
    return [
        PlanLine("ring of layers", sum(map(ring.slot_nbytes, range(ring.size))), "device", PHASES),
        PlanLine("embedding and head", outside, "device", PHASES),
        PlanLine(GATHERED, layers, "device", ("generate", "score")),
    ]


def _copies(config: Config, optimizer: OptimizerMemory) -> list[PlanLine]:
    """Copies of the optimizer's state in host memory, allocated by the first save, or else after the first step."""
    if not config.checkpoint.peers:
        return [PlanLine(SNAPSHOT, optimizer.snapshot, "host", PHASES)]
    copies = COPIES * (optimizer.device + optimizer.host)
    return [PlanLine(SNAPSHOT, copies, "host", PHASES), PlanLine("copies of a neighbour", copies, "host", PHASES)]


def planned_weights(config: Config, shape: RunShape) -> MemoryPlan:
    return shape.weights(config.optimizer.state, "host" if config.optimizer.offload == "host" else "none")


def _reference(config: Config, shape: RunShape) -> list[PlanLine]:
    """The weights of the reference policy, or of a teacher that is another model."""
    if shape.teacher is not None:
        nbytes = sum(parameter.nbytes for parameter in shape.teacher.parameters())
        return [PlanLine("teacher", nbytes, "device", PHASES)]
    if not shape.keeps_reference:
        return []
    where: Place = "host" if config.memory.reference == "host" else "device"
    return [PlanLine("reference", sum(shape.kept_buckets), where, PHASES)]


# -- generation -------------------------------------------------------------------------------------


def cache_plan(config: Config, shape: RunShape) -> CachePlan:
    """Blocks for the longest sequence in every row, but no more than the configuration gives."""
    whole = whole_cache(shape, shape.limits(config))
    given = None if config.memory.cache_gib is None else int(config.memory.cache_gib * 2**30)
    if given is None and not shape.cuda:
        given = CPU_CACHE_BYTES
    if given is None:
        return whole
    fitting = CachePlan.within(whole.architecture, whole.dtype, BLOCK_SIZE, given)
    return min(whole, fitting, key=lambda plan: plan.blocks)


def whole_cache(shape: RunShape, limits: Limits) -> CachePlan:
    """As many blocks as all rows can use."""
    blocks = limits.rows * _blocks_of_row(limits) + 1  # one for idle rows
    return CachePlan(shape.architecture, shape.model.embed.weight.dtype, BLOCK_SIZE, blocks)


def _generation(config: Config, shape: RunShape, limits: Limits) -> list[PlanLine]:
    a, rollout, rows, table = shape.architecture, config.rollout, limits.rows, _blocks_of_row(limits)
    state, history = rows * (STATE_COLUMNS + table), rows * (limits.max_length if rollout.filtered else 1)
    assert limits.prefill_tokens is not None
    batches = [
        3 * size + 1 + min(PREFILL_SEQUENCES, rows) * (2 + table) for size in prefill_buckets(limits.prefill_tokens)
    ]
    orders, results = rows, 3 * rows
    pinned = 2 * (batches[-1] + state + history + 8 * rows) + 2 * results
    copies = 1 if shape.cuda else 3  # plain PyTorch makes intermediate results, kernels do not
    drawn = rows * a.vocabulary * FP32 * (8 if rollout.filtered else copies)  # filtering sorts
    prefill = _prefill_pass(shape, limits).inside_layer()
    if shape.cuda:
        drawn = max(0, drawn - prefill)  # one after the other, in the same memory
    return [
        PlanLine(CACHE, cache_plan(config, shape).nbytes, "device", ("generate",)),
        PlanLine("decode state", 4 * (state + history + orders + results + sum(batches)), "device", PHASES),
        PlanLine("decode state, pinned", 4 * pinned, "host", PHASES),
        PlanLine("inside a layer, prefill", prefill, "device", ("generate",)),
        PlanLine("logits, decode", drawn, "device", ("generate",)),
    ]


def _prefill_pass(shape: RunShape, limits: Limits) -> Pass:
    assert limits.prefill_tokens is not None
    return Pass(
        shape.architecture,
        limits.prefill_tokens,
        shape.itemsize,
        shape.cuda,
        adapters=shape.adapters,
        tensor=shape.layout.tensor,
    )


def _blocks_of_row(limits: Limits) -> int:
    return -(-limits.max_length // BLOCK_SIZE)


# -- scoring and training ----------------------------------------------------------------------------


def _training_pass(config: Config, shape: RunShape, limits: Limits) -> Pass:
    tokens = limits.token_buckets[-1]
    scopes = set(training_scopes(config, shape.ranks))
    return Pass(
        shape.architecture,
        tokens,
        shape.itemsize,
        shape.cuda,
        recomputed=shape.recomputed(config),
        parts=not {"step", "layer"} & scopes,
        whole_step="step" in scopes,
        adapters=shape.adapters,
        tensor=shape.layout.tensor,
    )


def _passes(config: Config, shape: RunShape, training: Pass) -> list[PlanLine]:
    """On CUDA: what a forward keeps, and the largest of what comes and goes beside it."""
    head = training.logits_of_train(config.memory.logits == "whole")
    layer = training.backward_of_layer()
    if shape.architecture.tied and shape.adapters is None and not training.adds_products:
        # The embedding's gradient has two parts, added at the end.
        layer += shape.architecture.vocabulary * shape.architecture.hidden * shape.itemsize
    lines = [
        PlanLine("activations", training.kept(), "device", ("train",)),
        PlanLine("logits, train", head, "device", ("train",)),
        PlanLine("backward of a layer", max(0, layer - head), "device", ("train",)),
        PlanLine("inside a layer", training.inside_layer(), "device", ("score",)),
        PlanLine("logits, score", training.logits_of_score(), "device", ("score",)),
    ]
    scopes = training_scopes(config, shape.ranks)
    if "step" not in scopes:
        lines.append(PlanLine("inputs of graphs", _graph_inputs(training, scopes), "device", PHASES))
    return lines


def _passes_on_cpu(config: Config, shape: RunShape, training: Pass, before: Sequence[PlanLine]) -> list[PlanLine]:
    """On a CPU: a tape keeps what it makes, so everything of a phase adds up."""
    scopes = training_scopes(config, shape.ranks)
    kept = training.kept()
    if training.recomputed == shape.architecture.layers:
        kept += training.kept_by_layer()  # layers are recomputed one at a time
    lines = [
        PlanLine("activations", kept, "device", ("train",)),
        PlanLine("inside a layer", training.inside_layer(), "device", ("score", "train")),
        PlanLine("logits, score", training.logits_of_score(), "device", ("score",)),
        PlanLine("logits, train", training.logits_of_train(config.memory.logits == "whole"), "device", ("train",)),
        PlanLine(
            "gradients of a microbatch", _new_gradients(shape.model, scopes, training.recomputed), "device", ("train",)
        ),
    ]
    if config.optimizer.clip_norm is not None:
        lines.append(_gradient_norm(shape, lines))
    if "step" not in scopes:
        lines.append(PlanLine("inputs of graphs", _graph_inputs(training, scopes), "device", PHASES))
    if shape.keeps_reference:
        lines.append(PlanLine("bucket in exchange", max(shape.kept_buckets), "device", ("score",)))
    if not shape.samples_nothing and config.graph.impl != "none":
        lines.append(_restored_cache(before))
    return lines


def _new_gradients(model: Decoder, scopes: tuple[str, ...], recomputed: int) -> int:
    """Gradients in the dtype of the weights, before they are added to the fp32 ones.

    Inside a graph of the whole step that happens to each as it arrives. A layer that is recomputed, or that is a graph
    of its own, gives all of its gradients at once.
    """
    parameters = [parameter.nbytes for parameter in model.parameters()]
    layers = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in model.layers]
    if "step" in scopes:
        return max(*parameters, max(layers) if recomputed else 0)
    return sum(parameters) - sum(layers) + max(layers)


def _gradient_norm(shape: RunShape, lines: Sequence[PlanLine]) -> PlanLine:
    """Some of the gradients in fp64, and their squares.

    The norm is computed when the microbatches are done, so only what it needs beyond those counts.
    """
    largest = min(CHUNK, max(bucket.shard_numel for bucket in shape.buckets))
    return PlanLine("norm of the gradients", max(0, 2 * 8 * largest - total(lines, "train")), "device", ("train",))


def _restored_cache(before: Sequence[PlanLine]) -> PlanLine:
    """A capture runs for real, and then restores the cache from a copy.

    It is over before the copy for checkpoints is made, so only what it needs beyond that counts. The copy of gradients
    that is made in the same way is never larger than that for checkpoints.
    """
    sizes = {line.name: line.nbytes for line in before}
    return PlanLine("copy of the cache", max(0, sizes[CACHE] - sizes[SNAPSHOT]), "device", ("generate",))


def _graph_inputs(training: Pass, scopes: tuple[str, ...]) -> int:
    a = training.architecture
    stream, angles = a.hidden * training.itemsize, 2 * FP32 * (a.head_dim // 2)
    each = {"layer": 2 * stream + angles, "attn": stream + angles, "mlp": stream}
    return a.layers * training.tokens * sum(each[scope] for scope in scopes)


# -- CUDA --------------------------------------------------------------------------------------------


def _outside_graphs(config: Config, shape: RunShape) -> list[PlanLine]:
    """What the library's allocator keeps for work outside of the graphs, whose pool it does not share."""
    exchange = 0
    if shape.keeps_reference and config.memory.reference == "host":
        exchange = 2 * max(shape.kept_buckets)
    elif shape.keeps_reference:  # a copy of each bucket in turn: one that is larger than all before it is new memory
        exchange = sum(set(accumulate(shape.kept_buckets, max)))
    norm = 2 * 8 * CHUNK  # gradients in fp64, and their squares
    return [PlanLine("outside of graphs", max(exchange, norm), "device", PHASES)]


def _graphs(config: Config, shape: RunShape, limits: Limits) -> PlanLine:
    """What the driver keeps for the graphs themselves, and what the libraries keep."""
    if config.graph.impl == "none":
        return PlanLine("graphs and libraries", _LIBRARIES, "device", PHASES)
    passes = len(limits.buckets) * (1 + 3)  # scoring, and training with its backward
    if not shape.samples_nothing:
        assert limits.prefill_tokens is not None
        passes += len(row_buckets(limits.rows)) + len(prefill_buckets(limits.prefill_tokens))
    nbytes = passes * shape.architecture.layers * _GRAPH_OF_LAYER + _LIBRARIES
    return PlanLine("graphs and libraries", nbytes, "device", PHASES)


def _fragments(config: Config, shape: RunShape, training: Pass) -> int:
    nbytes = int(_FRAGMENTS * training.widest())
    if shape.samples_nothing:
        return nbytes
    cache = cache_plan(config, shape)
    in_pool = shape.architecture.layers - cache.layers_within(planned_weights(config, shape).gradients)
    return nbytes + min(_FRAGMENTED_PAGES, in_pool) * cache.layer_nbytes


def _not_shared(shape: RunShape, lines: Sequence[PlanLine]) -> PlanLine:
    """What cannot be shared although no phase needs all of it at once."""
    working, pages = _working_memory(shape, lines)
    sizes = {line.name: line.nbytes for line in lines}
    held = sizes[GRADIENTS] + max(working.values())
    if not shape.cuda:
        held += pages + sizes.get(GATHERED, 0)
    always = sum(line.nbytes for line in lines if line.where == "device" and line.phases == PHASES)
    needed = max(total(lines, phase) for phase in PHASES) - always
    return PlanLine("not shared", held - needed, "device", PHASES)


def pool_bytes(shape: RunShape, lines: Sequence[PlanLine]) -> int:
    """The memory of the graphs' pool on CUDA, for all phases."""
    working, _ = _working_memory(shape, lines)
    return max(working.values()) + {line.name: line.nbytes for line in lines}[FRAGMENTS]


def _working_memory(shape: RunShape, lines: Sequence[PlanLine]) -> tuple[dict[Phase, int], int]:
    """What each phase needs beside what all need and beside the gradients, and the pages that do not lie over those.

    The pages of whole layers lie over the gradients. The others are part of what generation needs on CUDA, where they
    lie in the pool, and so are gathered parameters; on a CPU both have memory of their own.
    """
    sizes = {line.name: line.nbytes for line in lines}
    cache, gradients = sizes.get(CACHE, 0), sizes[GRADIENTS]
    layer = max(1, cache // shape.architecture.layers)
    within = min(cache, gradients // layer * layer)
    always = sum(line.nbytes for line in lines if line.where == "device" and line.phases == PHASES)
    shared = [line for line in lines if shape.cuda or line.name != GATHERED]
    working = {phase: total(shared, phase) - always for phase in PHASES}
    working["train"] -= gradients
    working["generate"] -= within if shape.cuda else cache
    return working, cache - within
