"""The shape of a run for the memory plan: the model on the meta device, its buckets, and the size of a step.

Nothing here depends on memory settings, so one shape serves to plan any number of them. Reads config.json at most: no
weights, and nothing on a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from rollgraph.config import Config
from rollgraph.inputs.base_model import adapter_spec, base_is_reference
from rollgraph.inputs.inputs import Inputs, make_algorithm, make_tokenizer, resolve_architecture
from rollgraph.inputs.shapes import (
    PromptLengths,
    check_tensor_parallel,
    make_limits,
    max_offline_tokens,
    memory_limits,
    offline_limits,
    recomputed_layers,
    stages_through_host,
    teacher_on_meta,
)
from rollgraph.model import Architecture, Decoder
from rollgraph.model.layers import Linear
from rollgraph.model.lora import attach
from rollgraph.model.meta import shapes_only
from rollgraph.parallel.data.bucket_plan import (
    BUCKET_BYTES,
    BucketPlan,
    MemoryPlan,
    Offload,
    StateFormat,
    plan_buckets,
    plan_memory,
    specs_of,
)
from rollgraph.parallel.fsdp.layout import RingPlan, find_frozen, frozen_specs, names_in, plan_ring, plan_units
from rollgraph.plan.layout import Layout, Network, configured_layout
from rollgraph.policy import Limits
from rollgraph.policy.weights import SHARDED_BASE
from rollgraph.rl.algorithms import Algorithm
from rollgraph.rl.data.demonstrations import COMPLETION_COLUMNS

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class RunShape:
    """The sizes of one rank of a run."""

    model: Decoder  # on the meta device: this rank's shard of each layer
    full_architecture: Architecture  # of the whole model, before tensor parallel sharding
    matmul_weights: int  # weights in matmuls: all but the embedding, unless it is tied to the head
    algorithm: Algorithm
    layout: Layout
    device: Device
    stores_reference: bool = False  # whether the run stores the trained weights a second time, as reference
    teacher: Decoder | None = None  # a teacher whose architecture is not the policy's
    longest_row: int | None = None  # tokens of the longest row of offline data, if the data was read
    half_logits: bool = False  # whether at most half of the tokens of offline data are completions (and need logits)
    prompt_lengths: PromptLengths | None = None  # measured on the data, if the configuration does not limit them
    notes: tuple[str, ...] = ()  # assumptions
    _limits: dict[tuple[int | None, tuple[int, ...] | None], Limits] = field(default_factory=dict)
    _weights: dict[tuple[StateFormat, Offload], MemoryPlan] = field(default_factory=dict)

    @property
    def architecture(self) -> Architecture:
        """The architecture of this rank's shard of the model."""
        return self.model.architecture

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def itemsize(self) -> int:
        return self.model.embed_tokens.weight.dtype.itemsize

    def with_config(self, config: Config, *, ranks: int | None = None, nodes: int | None = None) -> RunShape:
        """The same run and data with another configuration. `ranks` and `nodes` stay as they are if None."""
        layout = self.layout
        changed = make_run_shape(
            config,
            ranks=ranks or layout.ranks,
            nodes=nodes or layout.nodes,
            network=layout.network,
            device=self.device,
            prompt_lengths=self.prompt_lengths,
        )
        # Both were measured on offline data, which `make_run_shape` does not get here.
        return replace(changed, longest_row=self.longest_row, half_logits=self.half_logits)

    @cached_property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """The buckets of trained parameters."""
        if self.ring is not None:
            return self.ring.buckets
        return plan_buckets(specs_of(self.model), ranks=self.layout.data_parallel, bucket_bytes=BUCKET_BYTES)

    @cached_property
    def ring(self) -> RingPlan | None:
        """With `shard: parameters`, the ring of slots in which layers take turns; None: every rank has all layers."""
        if not self.layout.shards_parameters:
            return None
        layers = list(self.model.layers)
        base = None if self.lora_columns is None else SHARDED_BASE
        frozen = [frozen_specs(tensors) for tensors in find_frozen(base, layers)]
        return plan_units(
            specs_of(self.model), names_in(self.model, layers), ranks=self.layout.data_parallel, frozen=frozen
        )

    @cached_property
    def frozen_bytes(self) -> int:
        """The bytes of the frozen base of adapters."""
        return 0 if self.lora_columns is None else _storage_bytes(self.model.buffers())

    @cached_property
    def frozen_bytes_outside_layers(self) -> int:
        """The part of `frozen_bytes` that belongs to no layer."""
        if self.lora_columns is None:
            return 0
        return self.frozen_bytes - _storage_bytes(buffer for layer in self.model.layers for buffer in layer.buffers())

    def weight_memory(self, state: StateFormat, offload: Offload) -> MemoryPlan:
        """The memory of parameters, gradients and optimizer state.

        With `shard: parameters`, the parameters are this rank's shards of the layers. The gradients are those of all of
        its shards, and of the layers that are gathered at the same time.
        """
        if (state, offload) not in self._weights:
            if self.ring is None:
                memory = plan_memory(self.buckets, torch.float32, state, offload)
            else:
                memory = plan_ring(self.ring, torch.float32, state, offload)
                memory = replace(memory, parameters=self.ring.shard_nbytes)
            self._weights[state, offload] = memory
        return self._weights[state, offload]

    @cached_property
    def local_bucket_bytes(self) -> tuple[int, ...]:
        """The bytes of this rank's shard of each bucket of trained parameters."""
        parts = 1 if self.ring is None else self.layout.data_parallel
        return tuple(bucket.numel * bucket.dtype.itemsize // parts for bucket in self.buckets)

    @cached_property
    def trainable_weights(self) -> int:
        """The number of trainable weights."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def lora_columns(self) -> dict[str, int] | None:
        """The columns that LoRA's A adds to each fused matmul of a layer, by its name; None without adapters."""
        if self.model.adapters is None:
            return None
        columns = {}
        for name, module in next(iter(self.model.layers)).named_modules():
            if isinstance(module, Linear) and module.adapter is not None:
                columns[name.rpartition(".")[2]] = len(module.adapter.base_and_a) - module.adapter.outputs
        return columns

    def samples(self, config: Config) -> int:
        """The number of samples of a step on one rank."""
        columns = COMPLETION_COLUMNS.get(self.algorithm.source)
        per_prompt = config.rollout.samples_per_prompt if columns is None else len(columns)
        return self.prompts(config) * per_prompt

    def prompts(self, config: Config) -> int:
        """The prompts of a step on one rank. Ranks of a tensor parallel group have the same ones."""
        return -(-config.data.prompts_per_step // self.layout.data_parallel)

    def tokens(self, config: Config) -> int:
        """The tokens of a step on one rank, if all sequences have the maximum length. A shared prompt counts once."""
        longest = self.limits(config).max_length
        if self.trains_offline:
            return self.samples(config) * longest
        new = min(config.rollout.max_tokens, longest - 1)
        return self.samples(config) * new + self.prompts(config) * (longest - new)

    def logit_tokens(self, config: Config) -> int:
        """The tokens of a step that need logits, as far as known: those of completions."""
        if self.trains_offline:
            return self.tokens(config)
        return self.samples(config) * min(config.rollout.max_tokens, self.limits(config).max_length - 1)

    def recomputed_layers(self, config: Config) -> int:
        """How many layers are recomputed."""
        return recomputed_layers(config, self.architecture)

    @property
    def reads_full_parameters(self) -> bool:
        """Whether the run generates or scores, which needs full parameters."""
        return not self.trains_offline or self.algorithm.needs_reference or self.algorithm.source == "pairs"

    @property
    def trains_offline(self) -> bool:
        """Whether the algorithm trains on completions from a dataset, not on samples of the policy."""
        return self.algorithm.source in COMPLETION_COLUMNS

    def limits(self, config: Config) -> Limits:
        """The limits of the run with these memory settings."""
        key = (config.train.microbatch_tokens, config.train.token_buckets)
        if key not in self._limits:
            self._limits[key] = self._make_limits(config)
        return replace(self._limits[key], **memory_limits(config))

    def _make_limits(self, config: Config) -> Limits:
        columns = COMPLETION_COLUMNS.get(self.algorithm.source)
        if columns is None:
            return make_limits(config, self.architecture, self.device, self.layout.data_parallel, self.prompt_lengths)
        longest = self.longest_row or max_offline_tokens(config, self.architecture)
        return offline_limits(config, longest, len(columns), self.device, self.layout.data_parallel, self.half_logits)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the storages of tensors; a storage that several tensors share counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def make_run_shape(
    config: Config,
    *,
    ranks: int = 1,
    nodes: int = 1,
    network: Network | None = None,
    device: Device = "cuda",
    inputs: Inputs | None = None,
    prompt_lengths: PromptLengths | None = None,
) -> RunShape:
    """The shape of one rank out of `ranks`.

    With `inputs`, offline rows have the lengths found in the data. `prompt_lengths` are those measured on the data.
    """
    layout = configured_layout(config, ranks, nodes, network)
    full_architecture, dtype, notes = _read_model(config)
    check_tensor_parallel(config, full_architecture, stages_through_host(config, ranks, device))
    a = full_architecture.sharded(layout.tensor_parallel)
    with shapes_only():
        model = Decoder(a).to(dtype=dtype)
    embedding = 0 if a.tied else a.vocabulary * a.hidden  # a lookup, not a matmul; a tied one is also the head
    matmul_weights = sum(parameter.numel() for parameter in model.parameters()) - embedding
    if config.adapter is not None:
        with shapes_only():
            attach(model, adapter_spec(config.adapter), seed=0)
    algorithm = make_algorithm(config)
    if algorithm.source in COMPLETION_COLUMNS:
        if config.data.max_tokens is None:
            notes.append("data.max_tokens is null, so all rows are assumed to be as long as a microbatch allows")
    elif prompt_lengths is not None:
        notes.append(
            f"data.max_prompt_tokens is null, and the longest prompt of the data needs {prompt_lengths.training}"
        )
    elif config.data.max_prompt_tokens is None:
        notes.append("data.max_prompt_tokens is null, so prompts are assumed to be as long as the model allows")
    teacher = teacher_on_meta(config) if algorithm.needs_reference else None
    if teacher is not None and teacher.architecture == full_architecture and config.adapter is None:
        teacher = None  # its weights go into the slot of the reference policy
    stores_reference = algorithm.needs_reference and teacher is None and not base_is_reference(config)
    shape = RunShape(
        model,
        full_architecture,
        matmul_weights,
        algorithm,
        layout,
        device,
        stores_reference,
        teacher,
        prompt_lengths=prompt_lengths,
        notes=tuple(notes),
    )
    if inputs is None or inputs.offline_data is None:
        return shape
    return replace(shape, longest_row=inputs.limits.max_length, half_logits=inputs.limits.half_logits)


def _read_model(config: Config) -> tuple[Architecture, torch.dtype, list[str]]:
    """The architecture and dtype of a run's whole model, and the assumptions made."""
    path = config.model.path
    architecture, dtype = resolve_architecture(config, make_tokenizer(config) if path is None else None)
    notes = [] if dtype else [f"{path}/config.json names no dtype, so bfloat16 is assumed"]
    return architecture, getattr(torch, dtype or "bfloat16"), notes
