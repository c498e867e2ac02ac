"""The shape of a run, as the memory plan needs it: the model on the meta device, its buckets, and what is in a step.

Nothing here depends on the settings of memory, so a shape is made once, and any number of settings is planned with it.
Reads config.json at most: no weights, and nothing on a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from rollgraph.config import Config
from rollgraph.model import Architecture, Decoder
from rollgraph.model.adapters import attach
from rollgraph.model.linear import Linear
from rollgraph.model.shapes_only import shapes_only
from rollgraph.policy import Limits
from rollgraph.policy.adapted_weights import SHARDED_BASE
from rollgraph.rl.algorithms import Algorithm
from rollgraph.rl.demonstrations import COLUMNS
from rollgraph.run.base_model import adapter_spec, base_is_reference
from rollgraph.run.communication import Network
from rollgraph.run.inputs import Inputs, make_algorithm, make_tokenizer, read_architecture
from rollgraph.run.layer_checks import check_division, stages_exchanges
from rollgraph.run.layout import Layout, layout_of
from rollgraph.run.shapes import longest_written, make_limits, memory_limits, recomputed_layers, written_limits
from rollgraph.run.teacher import shape_teacher
from rollgraph.sharding import (
    BUCKET_BYTES,
    BucketPlan,
    MemoryPlan,
    Offload,
    RingPlan,
    StateFormat,
    find_frozen,
    frozen_specs,
    names_in,
    plan_buckets,
    plan_memory,
    plan_ring,
    plan_units,
    specs_of,
)

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class RunShape:
    """One rank of a run."""

    model: Decoder  # without memory: the rank's part of each layer
    whole: Architecture  # of the model that all ranks of a tensor group have together
    multiplied: int  # weights that each token is multiplied with: all but the embedding, unless it is the head, too
    algorithm: Algorithm
    layout: Layout
    device: Device
    keeps_reference: bool = False  # whether a second set of the trained weights is kept
    teacher: Decoder | None = None  # one that is another model than the policy
    longest: int | None = None  # tokens of a row that was written, if the data was read
    long_prompts: bool = False  # whether such rows are mostly prompts
    notes: tuple[str, ...] = ()  # assumptions
    _limits: dict[tuple[int | None, tuple[int, ...] | None], Limits] = field(default_factory=dict)
    _weights: dict[tuple[StateFormat, Offload], MemoryPlan] = field(default_factory=dict)

    @property
    def architecture(self) -> Architecture:
        """Of the rank's part of the model."""
        return self.model.architecture

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def itemsize(self) -> int:
        return self.model.embed.weight.dtype.itemsize

    def under(self, config: Config, *, ranks: int | None = None, nodes: int | None = None) -> RunShape:
        """The shape of a rank with another configuration or another number of ranks; the data is the same."""
        now = self.layout
        changed = shape_run(
            config, ranks=ranks or now.ranks, nodes=nodes or now.nodes, network=now.network, device=self.device
        )
        return replace(changed, longest=self.longest, long_prompts=self.long_prompts)

    @cached_property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """Those of the parameters that are trained."""
        if self.ring is not None:
            return self.ring.buckets
        return plan_buckets(specs_of(self.model), ranks=self.layout.data, bucket_bytes=BUCKET_BYTES)

    @cached_property
    def ring(self) -> RingPlan | None:
        """With `shard: parameters`, where the layers take turns; None: every rank has all of them."""
        if not self.layout.shards_parameters:
            return None
        layers = list(self.model.layers)
        base = None if self.adapters is None else SHARDED_BASE
        frozen = [frozen_specs(tensors) for tensors in find_frozen(base, layers)]
        return plan_units(specs_of(self.model), names_in(self.model, layers), ranks=self.layout.data, frozen=frozen)

    @cached_property
    def base(self) -> int:
        """The bytes of the frozen base of adapters."""
        return 0 if self.adapters is None else _held_bytes(self.model.buffers())

    @cached_property
    def base_outside_layers(self) -> int:
        """Of these, the bytes that belong to no layer."""
        if self.adapters is None:
            return 0
        return self.base - _held_bytes(buffer for layer in self.model.layers for buffer in layer.buffers())

    def weights(self, state: StateFormat, offload: Offload) -> MemoryPlan:
        """Parameters, gradients and optimizer state.

        With `shard: parameters`, the parameters are this rank's part of the layers, and the gradients are those of its
        part of everything and of what is gathered at a time.
        """
        if (state, offload) not in self._weights:
            if self.ring is None:
                found = plan_memory(self.buckets, torch.float32, state, offload)
            else:
                found = plan_ring(self.ring, torch.float32, state, offload)
                found = replace(found, parameters=self.ring.kept_nbytes)
            self._weights[state, offload] = found
        return self._weights[state, offload]

    @cached_property
    def kept_buckets(self) -> tuple[int, ...]:
        """The bytes of each bucket of trained parameters that a rank keeps."""
        parts = 1 if self.ring is None else self.layout.data
        return tuple(bucket.numel * bucket.dtype.itemsize // parts for bucket in self.buckets)

    @cached_property
    def trained(self) -> int:
        """How many weights are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def adapters(self) -> dict[str, int] | None:
        """The columns that adapters add to each fused product of a layer, by its name; None without adapters."""
        if self.model.adapters is None:
            return None
        found = {}
        for name, module in next(iter(self.model.layers)).named_modules():
            if isinstance(module, Linear) and module.adapter is not None:
                found[name.rpartition(".")[2]] = len(module.adapter.extended) - module.adapter.outputs
        return found

    def samples(self, config: Config) -> int:
        """The sequences of a step on one rank."""
        written = COLUMNS.get(self.algorithm.source)
        each = config.rollout.samples_per_prompt if written is None else len(written)
        return self.prompts(config) * each

    def prompts(self, config: Config) -> int:
        """The prompts of a step on one rank; ranks of a tensor group have the same ones."""
        return -(-config.data.prompts_per_step // self.layout.data)

    def tokens(self, config: Config) -> int:
        """The tokens of a step on one rank, if all are as long as allowed; the prompt of a group counts once."""
        longest = self.limits(config).max_length
        if self.samples_nothing:
            return self.samples(config) * longest
        new = min(config.rollout.max_tokens, longest - 1)
        return self.samples(config) * new + self.prompts(config) * (longest - new)

    def asked(self, config: Config) -> int:
        """Those of them whose log-probabilities are asked for, as far as that is known: the tokens of completions."""
        if self.samples_nothing:
            return self.tokens(config)
        return self.samples(config) * min(config.rollout.max_tokens, self.limits(config).max_length - 1)

    def recomputed(self, config: Config) -> int:
        """How many layers are recomputed."""
        return recomputed_layers(config, self.architecture)

    @property
    def reads_all_parameters(self) -> bool:
        """Whether the run generates or scores."""
        return not self.samples_nothing or self.algorithm.needs_reference or self.algorithm.source == "pairs"

    @property
    def samples_nothing(self) -> bool:
        """Whether the algorithm learns from what the data holds."""
        return self.algorithm.source in COLUMNS

    def limits(self, config: Config) -> Limits:
        """The limits of the run with these settings."""
        key = (config.train.microbatch_tokens, config.train.token_buckets)
        if key not in self._limits:
            self._limits[key] = self._make_limits(config)
        return replace(self._limits[key], **memory_limits(config))

    def _make_limits(self, config: Config) -> Limits:
        written = COLUMNS.get(self.algorithm.source)
        if written is None:
            return make_limits(config, self.architecture, self.device, self.layout.data)
        longest = self.longest or longest_written(config, self.architecture)
        return written_limits(config, longest, len(written), self.device, self.layout.data, self.long_prompts)


def _held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the memory of tensors, some of which may be views of others."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def shape_run(
    config: Config,
    *,
    ranks: int = 1,
    nodes: int = 1,
    network: Network | None = None,
    device: Device = "cuda",
    inputs: Inputs | None = None,
) -> RunShape:
    """The shape of one rank out of `ranks`. With `inputs`, rows that were written are as long as those in the data."""
    layout = layout_of(config, ranks, nodes, network)
    whole, dtype, notes = _read_model(config)
    check_division(config, whole, stages_exchanges(config, ranks, device))
    a = whole.divided(layout.tensor)
    with shapes_only():
        model = Decoder(a).to(dtype=dtype)
    table = 0 if a.tied else a.vocabulary * a.hidden
    multiplied = sum(parameter.numel() for parameter in model.parameters()) - table
    if config.adapter is not None:
        with shapes_only():
            attach(model, adapter_spec(config.adapter), seed=0)
    algorithm = make_algorithm(config)
    if algorithm.source in COLUMNS:
        if config.data.max_tokens is None:
            notes.append("data.max_tokens is null, so all rows are assumed to be as long as a microbatch allows")
    elif config.data.max_prompt_tokens is None:
        notes.append("data.max_prompt_tokens is null, so prompts are assumed to be as long as the model allows")
    teacher = shape_teacher(config) if algorithm.needs_reference else None
    if teacher is not None and teacher.architecture == whole and config.adapter is None:
        teacher = None  # a set of weights in the slot of the reference policy
    slot = algorithm.needs_reference and teacher is None and not base_is_reference(config)
    shape = RunShape(model, whole, multiplied, algorithm, layout, device, slot, teacher, notes=tuple(notes))
    if inputs is None or inputs.written is None:
        return shape
    return replace(shape, longest=inputs.limits.max_length, long_prompts=inputs.limits.long_prompts)


def _read_model(config: Config) -> tuple[Architecture, torch.dtype, list[str]]:
    """The whole model of a run, and the assumptions that were made."""
    path = config.model.path
    architecture, dtype = read_architecture(config, make_tokenizer(config) if path is None else None)
    notes = [] if dtype else [f"{path}/config.json names no dtype, so bfloat16 is assumed"]
    return architecture, getattr(torch, dtype or "bfloat16"), notes
