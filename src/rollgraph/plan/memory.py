"""The memory plan: how much memory each phase of a run needs, computed before anything is allocated.

Sums up sizes from the same sources as the run: limits from `inputs/shapes.py`, buckets from `parallel/`, the KV cache
from `inference/sizes.py`, and activations from `Pass` below. Memory that only one phase needs is reused by the others,
so a run needs as much as its largest phase. `choose.py` chooses settings by these plans.

We count memory in use. On a CPU, a process may hold more, because the C library does not return all freed memory to the
system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

from rollgraph.checkpoint.peer_exchange import COPIES
from rollgraph.config import Config, training_scopes
from rollgraph.inference.decode_graphs import TABLE as STATE_COLUMNS
from rollgraph.inference.kv_cache import CachePlan, usable_blocks
from rollgraph.inference.sizes import BLOCK_SIZE, CPU_CACHE_BYTES, PREFILL_SEQUENCES, prefill_buckets, row_buckets
from rollgraph.model import Architecture, Decoder
from rollgraph.model.logprobs import tokens_per_chunk
from rollgraph.model.tensor_parallel import LARGE_ALL_REDUCE
from rollgraph.parallel.data.bucket_plan import CHUNK, MemoryPlan, OptimizerMemory
from rollgraph.plan.run_shape import RunShape
from rollgraph.policy import Limits

# -- lines of a plan -------------------------------------------------------------------------------

Phase = Literal["generate", "score", "train"]
Location = Literal["device", "host"]
PHASES: tuple[Phase, ...] = ("generate", "score", "train")
GIB = 2**30


@dataclass(frozen=True)
class PlanLine:
    """One line of a plan, e.g. PlanLine("parameters", 3087428608, "device", ("generate", "score", "train"))."""

    name: str
    nbytes: int
    where: Location
    phases: tuple[Phase, ...]  # the phases that need it; the others may reuse its memory

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "phases": list(self.phases)}


def phase_bytes(lines: Sequence[PlanLine], phase: Phase, where: Location = "device") -> int:
    """The bytes that a phase needs."""
    return sum(line.nbytes for line in lines if line.where == where and phase in line.phases)


def peak_phase(lines: Sequence[PlanLine], where: Location = "device") -> Phase:
    return max(PHASES, key=lambda phase: phase_bytes(lines, phase, where))


def peak_bytes(lines: Sequence[PlanLine], where: Location = "device") -> int:
    """The bytes of the phase that needs the most."""
    return phase_bytes(lines, peak_phase(lines, where), where)


def format_bytes(nbytes: float) -> str:
    """A size for people, e.g. "13.25 GiB".

    >>> format_bytes(3 * 2**29), format_bytes(5 * 2**20)
    ('1.50 GiB', '5.0 MiB')
    """
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"


# -- forward and backward --------------------------------------------------------------------------
# The size of activations, logits and workspace, from the shape of a model and a number of tokens. On CUDA, kernels save
# few activations, and memory that one part of a backward frees is reused by the next. On a CPU, PyTorch makes more
# intermediate tensors, and the tape keeps them.

FP32 = 4


@dataclass(frozen=True)
class Pass:
    """The memory of a forward or backward, e.g. Pass(architecture, tokens=16384, itemsize=2, cuda=True)."""

    architecture: Architecture  # of this rank's shard of each layer
    tokens: int
    itemsize: int  # bytes of a weight or an activation
    cuda: bool
    recomputed_layers: int = 0  # how many layers, from the first one, save only their inputs
    recomputes_by_part: bool = False  # attention and MLP are recomputed separately, so the norms before them are saved
    whole_step: bool = True  # one graph holds the forward and backward of a whole microbatch
    # With adapters: the columns that LoRA's A adds to each fused matmul, by its name. None: all weights are trained.
    lora_columns: Mapping[str, int] | None = field(default=None)
    tensor_parallel: int = 1  # ranks of the tensor parallel group

    @property
    def fuses_grad_accumulation(self) -> bool:
        """Whether weight-gradient GEMMs add into the fp32 gradients directly; see `graph/direct_sums.py`."""
        return self.cuda and self.itemsize < FP32 and self.whole_step

    # -- activations saved for the backward --------------------------------------------------------

    def saved_activations(self) -> int:
        """All activations that the forward saves, including those of log-probabilities, without logits."""
        a = self.architecture
        layers = (
            a.layers - self.recomputed_layers
        ) * self.saved_by_layer() + self.recomputed_layers * self._saved_if_recomputed()
        angles = 2 * FP32 * (a.head_dim // 2)  # cos and sin
        per_token = 8 + 8 + FP32  # id, target and normalizer
        return layers + self.tokens * (self._saved_by_norm(a.hidden) + angles + per_token)

    def saved_by_layer(self) -> int:
        """The activations that one layer saves, if it is not recomputed."""
        a = self.architecture
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        attention = (q + 2 * kv + q) * self.itemsize  # rotated queries and keys, values, and the output
        attention += FP32 * a.heads  # the log-sum-exp of each head
        mlp = 3 * a.mlp * self.itemsize  # gate, up, and silu(gate) * up
        if self.cuda:
            attention += (q + 2 * kv) * self.itemsize if a.qk_norm else 0  # the projection
        else:
            attention += (q + kv) * self.itemsize  # the projection, except for the values, counted above
            if a.qk_norm:
                attention += FP32 * (q + kv + a.heads + a.kv_heads) + self._saved_for_norm_weights(q + kv)
            mlp += a.mlp * self.itemsize  # silu(gate)
            mlp += FP32 * a.mlp if self.itemsize < FP32 else 0  # gate in fp32
        return self.tokens * (2 * self._saved_by_norm(a.hidden) + attention + mlp + self._saved_by_adapters())

    def _saved_if_recomputed(self) -> int:
        if self.recomputes_by_part:
            return self.tokens * 2 * self._saved_by_norm(self.architecture.hidden)
        return self.tokens * 2 * self.architecture.hidden * self.itemsize  # the residual stream and its update

    def _saved_by_norm(self, width: int) -> int:
        """Per token: the scale, the output and, on a GPU, the input; on a CPU, the scaled input in fp32."""
        if self.cuda:
            return width * 2 * self.itemsize + FP32
        return width * (FP32 + self.itemsize) + self._saved_for_norm_weights(width) + FP32

    def _saved_for_norm_weights(self, width: int) -> int:
        """Per token, for the gradient of a norm's weight on a CPU: its input, if that was rounded from fp32."""
        return width * self.itemsize if self.lora_columns is None and self.itemsize < FP32 else 0

    def _saved_by_adapters(self) -> int:
        """Per token: the output of each adapter's down-projection A."""
        return sum((self.lora_columns or {}).values()) * self.itemsize

    # -- workspace ---------------------------------------------------------------------------------

    def forward_workspace(self) -> int:
        """The temporary tensors that are alive at once in the widest part of a layer's forward."""
        a = self.architecture
        mlp = self.tokens * (2 * a.hidden + 3 * a.mlp + self._lora_columns_of("gate_up")) * self.itemsize
        if self.cuda:
            return max(mlp, self._all_reduce_workspace())
        # On a CPU, keys and values are concatenated; queries and outputs exist in fp32, too.
        attention = self.tokens * (2 * a.kv_heads * self.itemsize + 2 * a.heads * FP32) * a.head_dim
        return max(mlp, attention, self._all_reduce_workspace())

    def _all_reduce_workspace(self) -> int:
        """The workspace of a tensor parallel all-reduce: exchanged rows, two sums in fp32, and the residual stream."""
        if self.tensor_parallel == 1:
            return 0
        elements = self.tokens * self.architecture.hidden
        buffers = self.tensor_parallel * self.itemsize + 2 * FP32
        if self.tensor_parallel > 2 and elements * self.itemsize >= LARGE_ALL_REDUCE:
            # Rows sent, rows received, and the sum.
            buffers = 3 * self.itemsize + -(-2 * FP32 // self.tensor_parallel)
        return elements * (buffers + 2 * self.itemsize)

    def _lora_columns_of(self, matmul: str) -> int:
        return (self.lora_columns or {}).get(matmul, 0)

    def largest_activation(self) -> int:
        """The largest activation: gate and up."""
        return self.tokens * (2 * self.architecture.mlp + self._lora_columns_of("gate_up")) * self.itemsize

    def backward_workspace(self) -> int:
        """The temporary tensors that are alive at once in the backward of a layer, besides the saved activations."""
        if not self.cuda:
            return self.forward_workspace()
        a = self.architecture
        stream = 2 * a.hidden * self.itemsize
        mlp = self.tokens * (stream + (3 * a.mlp + self._lora_columns_of("gate_up")) * self.itemsize)
        attention = self.tokens * stream + self._attention_backward_workspace()
        recomputed = self.saved_by_layer() if self.recomputed_layers == a.layers else 0
        return max(mlp, attention, self._all_reduce_workspace()) + recomputed + self._weight_gradients()

    def _attention_backward_workspace(self) -> int:
        """Attention's backward. Every sequence computes separate gradients for the keys of a shared prompt."""
        a = self.architecture
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        per_sequence = 2 * 2 * self.tokens * kv * FP32
        summed = 2 * self.tokens * kv * self.itemsize
        return per_sequence + summed + self.tokens * a.heads * FP32 + 3 * self.tokens * q * self.itemsize

    def _weight_gradients(self) -> int:
        """New weight gradients, before they are added in fp32: of the largest weight, or of a recomputed layer."""
        a = self.architecture
        if self.lora_columns is not None or self.fuses_grad_accumulation:
            return 0
        largest = 2 * a.mlp * a.hidden * self.itemsize
        if not self.recomputed_layers:
            return largest
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        return (3 * a.mlp * a.hidden + a.hidden * (2 * q + 2 * kv)) * self.itemsize

    # -- logits ------------------------------------------------------------------------------------

    def score_logits(self) -> int:
        """One chunk of logits in fp32; plain PyTorch makes two more tensors of that size."""
        vocabulary = self.architecture.vocabulary
        return tokens_per_chunk(self.tokens, vocabulary) * vocabulary * FP32 * (1 if self.cuda else 3)

    def train_logits(self, whole_logits: bool) -> int:
        """Logits and their gradient, of all tokens (`whole_logits`) or of a chunk, and the gradient of the head."""
        a = self.architecture
        rows = self.tokens if whole_logits else tokens_per_chunk(self.tokens, a.vocabulary)
        logits = rows * a.vocabulary * (FP32 + self.itemsize if self.cuda else 5 * FP32)
        if self.lora_columns is not None or self.fuses_grad_accumulation:
            return logits + self.tokens * a.hidden * self.itemsize
        head = a.vocabulary * a.hidden
        if rows < self.tokens:  # accumulated over chunks in fp32
            return logits + head * FP32
        return logits + (head * self.itemsize if self.cuda else 0)


# -- the plan --------------------------------------------------------------------------------------

# Names of lines that other lines are computed from.
SNAPSHOT = "copy for checkpoints"
CACHE = "key/value cache"
GRADIENTS = "gradients, fp32"
FRAGMENTS = "fragments"
GATHERED = "parameters, gathered"
_GRAPH_BYTES_PER_LAYER = 48 << 10  # bytes that the driver needs for one layer in one CUDA graph
# Modules that the libraries and our kernels load on first use, the libraries' workspaces, rounding by the allocator.
# Measured on an H200, in six configurations, as the memory that no other line explains.
_LIBRARY_BYTES = 1100 << 20
# Fragmentation of the graphs' pool, measured on an H200: this many times the largest activation and, if pages of the
# KV cache lie in the pool, the pages of this many layers.
_FRAGMENTED_ACTIVATIONS = 2.5
_FRAGMENTED_PAGE_LAYERS = 5


def plan_lines(config: Config, shape: RunShape) -> tuple[PlanLine, ...]:
    """The plan of one rank. All memory settings must be chosen: none may be `auto`."""
    limits = shape.limits(config)
    lines = [*_weight_lines(config, shape), *_gathered_parameter_lines(shape), *_reference_lines(config, shape)]
    if not shape.trains_offline:
        lines += _generation_lines(config, shape, limits)
    training = _training_pass(config, shape, limits)
    if shape.cuda:
        lines += _cuda_pass_lines(config, shape, training)
        lines += _non_graph_lines(config, shape)
        lines.append(_graph_overhead_line(config, shape, limits))
        lines.append(PlanLine(FRAGMENTS, _fragment_bytes(config, shape, training), "device", PHASES))
    else:
        lines += _cpu_pass_lines(config, shape, training, lines)
        lines = [replace(line, where="device") for line in lines]  # the host is the device
    return (*lines, _unshared_line(shape, lines))


# -- weights ---------------------------------------------------------------------------------------


def _weight_lines(config: Config, shape: RunShape) -> list[PlanLine]:
    memory = planned_weights(config, shape)
    optimizer = memory.optimizer
    return [
        PlanLine("base, frozen", _frozen_base_bytes(shape), "device", PHASES),
        PlanLine("parameters", memory.parameters, "device", PHASES),
        PlanLine(GRADIENTS, memory.gradients, "device", ("train",)),
        PlanLine("optimizer", optimizer.device, "device", PHASES),
        PlanLine("optimizer, offloaded", optimizer.host, "host", PHASES),
        PlanLine("optimizer, in transit", optimizer.streaming, "device", PHASES),
        *_optimizer_copy_lines(config, optimizer),
    ]


def _frozen_base_bytes(shape: RunShape) -> int:
    """The frozen base of adapters: all of it or, with `shard: parameters`, this rank's shard of the layers."""
    return shape.frozen_bytes if shape.ring is None else shape.ring.frozen_shard_nbytes


def _gathered_parameter_lines(shape: RunShape) -> list[PlanLine]:
    """With `shard: parameters`: the gathered parameters, in addition to a rank's shards. A frozen base is included.

    Training gathers into a ring of layers. Graphs contain its addresses, so it is allocated all the time, like the
    embedding and head. Generation and scoring gather all layers: on CUDA, in the graphs' pool, in memory that training
    uses for activations.
    """
    ring = shape.ring
    if ring is None:
        return []
    outside = shape.frozen_bytes_outside_layers + sum(unit.nbytes for unit in ring.units[ring.num_layers :])
    layers = ring.full_nbytes if shape.reads_full_parameters else 0
    return [
        PlanLine("ring of layers", sum(map(ring.slot_nbytes, range(ring.layer_slots))), "device", PHASES),
        PlanLine("embedding and head", outside, "device", PHASES),
        PlanLine(GATHERED, layers, "device", ("generate", "score")),
    ]


def _optimizer_copy_lines(config: Config, optimizer: OptimizerMemory) -> list[PlanLine]:
    """Copies of the optimizer state in host memory, allocated by the first save, or else after the first step."""
    if not config.checkpoint.peers:
        return [PlanLine(SNAPSHOT, optimizer.snapshot, "host", PHASES)]
    copies = COPIES * (optimizer.device + optimizer.host)
    return [PlanLine(SNAPSHOT, copies, "host", PHASES), PlanLine("copies of a neighbour", copies, "host", PHASES)]


def planned_weights(config: Config, shape: RunShape) -> MemoryPlan:
    return shape.weight_memory(config.optimizer.state, "host" if config.optimizer.offload == "host" else "none")


def _reference_lines(config: Config, shape: RunShape) -> list[PlanLine]:
    """The weights of the reference policy, or of a teacher with another architecture."""
    if shape.teacher is not None:
        nbytes = sum(parameter.nbytes for parameter in shape.teacher.parameters())
        return [PlanLine("teacher", nbytes, "device", PHASES)]
    if not shape.stores_reference:
        return []
    where: Location = "host" if config.memory.reference == "host" else "device"
    return [PlanLine("reference", sum(shape.local_bucket_bytes), where, PHASES)]


# -- generation ------------------------------------------------------------------------------------


def cache_plan(config: Config, shape: RunShape) -> CachePlan:
    """The KV cache: blocks for the longest sequence in every row, but at most `memory.cache_gib`."""
    full = full_cache_plan(shape, shape.limits(config))
    limit = None if config.memory.cache_gib is None else int(config.memory.cache_gib * 2**30)
    if limit is None and not shape.cuda:
        limit = CPU_CACHE_BYTES
    if limit is None:
        return full
    limited = CachePlan.within(full.architecture, full.dtype, BLOCK_SIZE, limit)
    return min(full, limited, key=lambda plan: plan.blocks)


def full_cache_plan(shape: RunShape, limits: Limits) -> CachePlan:
    """A KV cache with as many blocks as all rows can use."""
    blocks = usable_blocks(limits.rows, limits.max_length, BLOCK_SIZE, limits.longest_generated)
    return CachePlan(shape.architecture, shape.model.embed_tokens.weight.dtype, BLOCK_SIZE, blocks)


def _generation_lines(config: Config, shape: RunShape, limits: Limits) -> list[PlanLine]:
    a, rollout, rows = shape.architecture, config.rollout, limits.rows
    states = [_decode_state_bytes(limits, length, rollout.filtered) for length in limits.generated_lengths]
    copies = 1 if shape.cuda else 3  # plain PyTorch makes intermediate tensors, kernels do not
    decode_logits = rows * a.vocabulary * FP32 * (8 if rollout.filtered else copies)  # filters sort the logits
    prefill = _prefill_pass(shape, limits).forward_workspace()
    if shape.cuda:
        decode_logits = max(0, decode_logits - prefill)  # prefill and decode reuse the same memory
    return [
        PlanLine(CACHE, cache_plan(config, shape).nbytes, "device", ("generate",)),
        PlanLine("decode state", sum(device for device, _ in states), "device", PHASES),
        PlanLine("decode state, pinned", sum(pinned for _, pinned in states), "host", PHASES),
        PlanLine("inside a layer, prefill", prefill, "device", ("generate",)),
        PlanLine("logits, decode", decode_logits, "device", ("generate",)),
    ]


def _prefill_pass(shape: RunShape, limits: Limits) -> Pass:
    assert limits.prefill_tokens is not None
    return Pass(
        shape.architecture,
        limits.prefill_tokens,
        shape.itemsize,
        shape.cuda,
        lora_columns=shape.lora_columns,
        tensor_parallel=shape.layout.tensor_parallel,
    )


def _decode_state_bytes(limits: Limits, length: int, filtered: bool) -> tuple[int, int]:
    """The bytes of an engine's row state on the device, and of its pinned memory on the host."""
    rows, table = limits.rows, -(-length // BLOCK_SIZE)
    state, history = rows * (STATE_COLUMNS + table), rows * (length if filtered else 1)
    assert limits.prefill_tokens is not None
    batches = [
        3 * size + 1 + min(PREFILL_SEQUENCES, rows) * (2 + table) for size in prefill_buckets(limits.prefill_tokens)
    ]
    orders, results = rows, 3 * rows
    pinned = 2 * (batches[-1] + state + history + 8 * rows) + 2 * results
    return FP32 * (state + history + orders + results + sum(batches)), FP32 * pinned


# -- scoring and training --------------------------------------------------------------------------


def _training_pass(config: Config, shape: RunShape, limits: Limits) -> Pass:
    """The forward and backward of the largest microbatch. The graph scopes decide what is recomputed together."""
    tokens = limits.token_buckets[-1]
    scopes = set(training_scopes(config, shape.ranks))
    return Pass(
        shape.architecture,
        tokens,
        shape.itemsize,
        shape.cuda,
        recomputed_layers=shape.recomputed_layers(config),
        recomputes_by_part=scopes.isdisjoint({"step", "layer"}),  # attention and MLP have graphs of their own
        whole_step="step" in scopes,
        lora_columns=shape.lora_columns,
        tensor_parallel=shape.layout.tensor_parallel,
    )


def _cuda_pass_lines(config: Config, shape: RunShape, training: Pass) -> list[PlanLine]:
    """On CUDA: the saved activations, and the peak of the workspace besides them."""
    head = training.train_logits(config.memory.logits == "whole")
    layer = training.backward_workspace()
    if shape.architecture.tied and shape.lora_columns is None and not training.fuses_grad_accumulation:
        # A tied embedding's gradient has two parts, added at the end.
        layer += shape.architecture.vocabulary * shape.architecture.hidden * shape.itemsize
    lines = [
        PlanLine("activations", training.saved_activations(), "device", ("train",)),
        PlanLine("logits, train", head, "device", ("train",)),
        PlanLine("backward of a layer", max(0, layer - head), "device", ("train",)),
        PlanLine("inside a layer", training.forward_workspace(), "device", ("score",)),
        PlanLine("logits, score", training.score_logits(), "device", ("score",)),
    ]
    scopes = training_scopes(config, shape.ranks)
    if "step" not in scopes:
        lines.append(PlanLine("inputs of graphs", _graph_input_bytes(training, scopes), "device", PHASES))
    return lines


def _cpu_pass_lines(config: Config, shape: RunShape, training: Pass, before: Sequence[PlanLine]) -> list[PlanLine]:
    """On a CPU: activations, workspace and logits count as alive at once, so the lines of a phase add up.

    `before` has the lines of weights and generation.
    """
    scopes = training_scopes(config, shape.ranks)
    activations = training.saved_activations()
    if training.recomputed_layers == shape.architecture.layers:
        # The layer that is being recomputed. Activations of layers that are kept are freed before that, and leave room.
        activations += training.saved_by_layer()
    lines = [
        PlanLine("activations", activations, "device", ("train",)),
        PlanLine("inside a layer", training.forward_workspace(), "device", ("score", "train")),
        PlanLine("logits, score", training.score_logits(), "device", ("score",)),
        PlanLine("logits, train", training.train_logits(config.memory.logits == "whole"), "device", ("train",)),
        PlanLine(
            "gradients of a microbatch",
            _new_gradient_bytes(shape.model, scopes, training.recomputed_layers),
            "device",
            ("train",),
        ),
    ]
    if config.optimizer.clip_norm is not None:
        lines.append(_gradient_norm_line(shape, lines))
    if "step" not in scopes:
        lines.append(PlanLine("inputs of graphs", _graph_input_bytes(training, scopes), "device", PHASES))
    if shape.stores_reference:
        lines.append(PlanLine("bucket in exchange", max(shape.local_bucket_bytes), "device", ("score",)))
    if not shape.trains_offline and config.graph.impl != "none":
        lines.append(_cache_copy_line(before))
    return lines


def _new_gradient_bytes(model: Decoder, scopes: tuple[str, ...], recomputed: int) -> int:
    """A microbatch's gradients in the dtype of the weights, before they are added to the fp32 ones.

    In a graph of the whole step, each gradient is added as soon as it is computed. A recomputed layer, or a layer with
    a separate graph, returns all of its gradients at once.
    """
    parameters = [parameter.nbytes for parameter in model.parameters()]
    layers = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in model.layers]
    if "step" in scopes:
        return max(*parameters, max(layers) if recomputed else 0)
    return sum(parameters) - sum(layers) + max(layers)


def _gradient_norm_line(shape: RunShape, lines: Sequence[PlanLine]) -> PlanLine:
    """The gradient norm's workspace: a chunk of the gradients in fp64, and their squares.

    The norm is computed after all microbatches, so it counts only as far as it exceeds their memory.
    """
    largest = min(CHUNK, max(bucket.shard_numel for bucket in shape.buckets))
    return PlanLine(
        "norm of the gradients", max(0, 2 * 8 * largest - phase_bytes(lines, "train")), "device", ("train",)
    )


def _cache_copy_line(before: Sequence[PlanLine]) -> PlanLine:
    """A capture runs the step for real and then restores the KV cache from a copy.

    The copy is freed before the copy for checkpoints is made, so it counts only as far as it is larger. The gradients
    are copied in the same way, but that copy is never larger than the one for checkpoints.
    """
    sizes = {line.name: line.nbytes for line in before}
    return PlanLine("copy of the cache", max(0, sizes[CACHE] - sizes[SNAPSHOT]), "device", ("generate",))


def _graph_input_bytes(training: Pass, scopes: tuple[str, ...]) -> int:
    a = training.architecture
    stream, angles = a.hidden * training.itemsize, 2 * FP32 * (a.head_dim // 2)
    bytes_per_token = {"layer": 2 * stream + angles, "attn": stream + angles, "mlp": stream}
    return a.layers * training.tokens * sum(bytes_per_token[scope] for scope in scopes)


# -- CUDA ------------------------------------------------------------------------------------------


def _non_graph_lines(config: Config, shape: RunShape) -> list[PlanLine]:
    """Memory of work outside of graphs, which cannot use their pool: swaps of weights, and the gradient norm."""
    swap = 0
    if shape.stores_reference and config.memory.reference == "host":
        swap = 2 * max(shape.local_bucket_bytes)
    elif shape.stores_reference:  # copies one bucket at a time; each new largest one allocates new memory
        swap = sum(set(accumulate(shape.local_bucket_bytes, max)))
    norm = 2 * 8 * CHUNK  # gradients in fp64, and their squares
    return [PlanLine("outside of graphs", max(swap, norm), "device", PHASES)]


def _graph_overhead_line(config: Config, shape: RunShape, limits: Limits) -> PlanLine:
    """Memory of the driver for the graphs themselves, and of the libraries."""
    if config.graph.impl == "none":
        return PlanLine("graphs and libraries", _LIBRARY_BYTES, "device", PHASES)
    forwards = len(limits.buckets) * (1 + 3)  # 1 for scoring; 3 for training, whose backward counts as two forwards
    if not shape.trains_offline:
        assert limits.prefill_tokens is not None
        engine_graphs = len(row_buckets(limits.rows)) + len(prefill_buckets(limits.prefill_tokens))
        engines = len(limits.generated_lengths)  # validation has one of its own if its prompts are longer
        forwards += engine_graphs * engines
    nbytes = forwards * shape.architecture.layers * _GRAPH_BYTES_PER_LAYER + _LIBRARY_BYTES
    return PlanLine("graphs and libraries", nbytes, "device", PHASES)


def _fragment_bytes(config: Config, shape: RunShape, training: Pass) -> int:
    """Memory lost to fragmentation in the graphs' pool."""
    nbytes = int(_FRAGMENTED_ACTIVATIONS * training.largest_activation())
    if shape.trains_offline:
        return nbytes
    cache = cache_plan(config, shape)
    pool_layers = shape.architecture.layers - cache.layers_that_fit(planned_weights(config, shape).gradients)
    return nbytes + min(_FRAGMENTED_PAGE_LAYERS, pool_layers) * cache.layer_nbytes


def _unshared_line(shape: RunShape, lines: Sequence[PlanLine]) -> PlanLine:
    """The allocated memory beyond what the largest phase needs: what phases cannot share."""
    workspaces, separate_pages = _phase_workspaces(shape, lines)
    sizes = {line.name: line.nbytes for line in lines}
    allocated = sizes[GRADIENTS] + max(workspaces.values())
    if not shape.cuda:
        allocated += separate_pages + sizes.get(GATHERED, 0)
    always = sum(line.nbytes for line in lines if line.where == "device" and line.phases == PHASES)
    needed = max(phase_bytes(lines, phase) for phase in PHASES) - always
    return PlanLine("not shared", allocated - needed, "device", PHASES)


def pool_bytes(shape: RunShape, lines: Sequence[PlanLine]) -> int:
    """The size of the graphs' pool on CUDA: the largest phase's workspace, and fragments."""
    workspaces, _ = _phase_workspaces(shape, lines)
    return max(workspaces.values()) + {line.name: line.nbytes for line in lines}[FRAGMENTS]


def _phase_workspaces(shape: RunShape, lines: Sequence[PlanLine]) -> tuple[dict[Phase, int], int]:
    """Each phase's workspace in the graphs' pool, and the bytes of KV cache pages outside of the gradients' memory.

    A workspace is the memory of a phase without the lines that all phases need and without the gradients. KV cache
    pages of the first layers, as many as fit, lie in the memory of the gradients. On CUDA, the other pages and gathered
    parameters lie in the pool, so they are part of the workspaces. On a CPU, both are allocated separately.
    """
    sizes = {line.name: line.nbytes for line in lines}
    cache, gradients = sizes.get(CACHE, 0), sizes[GRADIENTS]
    layer = max(1, cache // shape.architecture.layers)
    pages_over_gradients = min(cache, gradients // layer * layer)
    always = sum(line.nbytes for line in lines if line.where == "device" and line.phases == PHASES)
    pooled = [line for line in lines if shape.cuda or line.name != GATHERED]
    workspaces = {phase: phase_bytes(pooled, phase) - always for phase in PHASES}
    workspaces["train"] -= gradients
    workspaces["generate"] -= pages_over_gradients if shape.cuda else cache
    return workspaces, cache - pages_over_gradients
