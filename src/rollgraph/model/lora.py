"""LoRA adapters of a model: their settings, and how they are attached and switched off.

Attaching makes the adapters the only parameters of the model. The base becomes buffers: nothing trains it, and no
checkpoint holds it. With a scale of zero the model is the base, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from rollgraph.model.architecture import Architecture, hf_tensor_map
from rollgraph.model.layers import Linear

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PARAMETERS = ("lora_a", "lora_b")
_version = attrgetter("_version")


@dataclass(frozen=True)
class AdapterSpec:
    """The settings of adapters, e.g. AdapterSpec(rank=8, alpha=16, targets=("q_proj", "v_proj"))."""

    rank: int = 32
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"targets={self.targets}: must name at least one of {', '.join(TARGETS)}, and no other")
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: must be positive")

    @property
    def scale(self) -> float:
        """The factor of (x A^T) B^T."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class Adaptable(nn.Module):
    """A model that can have adapters. `Decoder` is one."""

    architecture: Architecture
    embed_tokens: nn.Embedding
    adapters: Adapters | None = None  # set by `attach`


class Adapters:
    """The adapters of a model. Created by `attach`.

    Each layer multiplies with a copy of A in `base_and_a`. `refresh` updates the copies after the parameters have
    changed. Where layers are gathered before use (FSDP), gathering a layer updates its copy instead (see
    `make_lora_a_copier`).
    """

    def __init__(self, model: Adaptable, spec: AdapterSpec, scale: Tensor, layers: dict[str, Linear]) -> None:
        self.spec = spec
        self.scale = scale  # on the device; 0 while the adapters are switched off
        self._uses_of_base = 0  # number of open `off` contexts
        self._model = model
        self._layers = layers
        self._watched: list[Tensor] = [layer.lora_a for layer in layers.values()]
        self._copied = -1
        self._layers_are_gathered = False
        self.refresh()

    # -- switching off -----------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        return self._uses_of_base == 0

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the adapters are off, and the model is the base.

        Leaving the outermost context switches them on again, even after an error.
        """
        self._uses_of_base += 1
        try:
            self.scale.fill_(0.0)
            yield
        finally:
            if self._uses_of_base == 1:
                self.scale.fill_(self.spec.scale)
            self._uses_of_base -= 1  # last: if interrupted before this line, training is refused

    # -- the copies of A ---------------------------------------------------------------------------

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Watch these tensors for changes of A, too: they share its memory."""
        self._watched += tensors
        self.refresh()

    def leave_copies_to_gathers(self) -> None:
        """Let gathers copy A from now on. A layer's memory may hold another layer then, and `refresh` does nothing."""
        self._layers_are_gathered = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy A to `base_and_a` in all layers, if it has changed."""
        version = self._version()
        if version == self._copied or self._layers_are_gathered:
            return
        copies = []
        for layer in self._layers.values():
            assert layer.adapter is not None
            copies.append(layer.adapter.base_and_a[layer.adapter.a_rows])
        torch._foreach_copy_(copies, [layer.lora_a for layer in self._layers.values()])
        self._copied = version

    def stale(self) -> str | None:
        """Why the model must not run now; None if it may. A guard for graphs."""
        if self._version() == self._copied or self._layers_are_gathered:
            return None
        return "the adapters have changed since they were last copied: call refresh()"

    def _version(self) -> int:
        """Grows with every in-place change."""
        return sum(map(_version, self._watched))

    # -- by the names of Hugging Face --------------------------------------------------------------

    def projections(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Hugging Face's name of each adapted projection, and views of its A, [rank, inputs], and B, [outputs, rank].

        A fused layer, such as qkv, stacks the A of its projections as rows of `lora_a`. Their B are transposed, and lie
        side by side in `lora_b`. Call `refresh` after writing to the views.
        """
        rank = self.spec.rank
        for layer_name, targets in _target_slices(self._model, self.spec).items():
            layer = self._layers[layer_name]
            assert layer.adapter is not None
            for index, (name, projection) in enumerate(zip(targets, layer.adapter.projections, strict=True)):
                a_rows = slice(index * rank, (index + 1) * rank)
                yield name, layer.lora_a.detach()[a_rows], layer.lora_b.detach()[:, projection.b_columns].t()

    @torch.no_grad()
    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face's tensors with the adapters merged, one at a time. Those without an adapter are views."""
        adapted = {f"{name}.weight": (a, b) for name, a, b in self.projections()}
        for name, (parameter, rows) in hf_tensor_map(self._model.architecture).items():
            base = attrgetter(parameter)(self._model)[rows]
            if name not in adapted:
                yield name, base
                continue
            dtype = torch.promote_types(base.dtype, torch.float32)
            a, b = adapted[name]
            yield name, torch.addmm(base.to(dtype), b.to(dtype), a.to(dtype), alpha=self.spec.scale).to(base.dtype)


def attach(model: Adaptable, spec: AdapterSpec, *, seed: int) -> None:
    """Give a model adapters that change nothing yet: A is initialized as in PEFT, B is zero.

    All other parameters become buffers. The base is copied one layer at a time, so memory grows by one layer at most.
    """
    if model.adapters is not None:
        raise ValueError("the model has adapters already")
    dtype = torch.promote_types(model.embed_tokens.weight.dtype, torch.float32)
    scale = torch.full((), spec.scale, dtype=dtype, device=model.embed_tokens.weight.device)
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for module, targets in _target_slices(model, spec).items():
        layer = layers[module] = _linear(model, module)
        columns = list(targets.values())
        if layer.replicated_rows is not None:
            raise ValueError("ranks that share key/value heads cannot have adapters of them")
        a = _init_a(layer, spec.rank * len(columns), generator)
        layer.attach_adapter(columns, a, scale, spec.dropout)
        if scale.is_cuda:  # return the memory of the old weight, which smaller tensors would fragment
            torch.cuda.empty_cache()
    _parameters_to_buffers(model)
    model.register_buffer("adapter_scale", scale, persistent=False)  # a copy of the model can share it
    model.adapters = Adapters(model, spec, scale, layers)


def frozen_tensors(layer: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    """The base of a layer with adapters, by name: each tensor, and then views of it.

    Code that moves a tensor to other memory must move its views, too.
    """
    tensors: dict[str, tuple[Tensor, ...]] = {}
    for prefix, module in layer.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            storage = buffer
            if isinstance(module, Linear) and module.adapter is not None:
                padded = {"weight": module.adapter.base_and_a, "bias": module.adapter.bias}[name]
                storage = buffer if padded is None else padded
            tensors[f"{prefix}.{name}".removeprefix(".")] = (storage,) if storage is buffer else (storage, buffer)
    return tensors


def make_lora_a_copier(layer: nn.Module) -> Callable[[], None]:
    """Return a function that copies A to `base_and_a` in every adapted Linear of a layer, changed or not."""
    copies = []
    originals = []
    for module in layer.modules():
        if isinstance(module, Linear) and module.adapter is not None:
            # `.data`: a copy must not bump the version of `base_and_a`, which autograd has saved. That is safe: before
            # the backward the layer is gathered again, with the same A, or the guards of the ring refuse the backward.
            copies.append(module.adapter.base_and_a.data[module.adapter.a_rows])
            originals.append(module.lora_a.data)
    return partial(torch._foreach_copy_, copies, originals)


def _init_a(layer: Linear, rows: int, generator: torch.Generator) -> Tensor:
    """A of a layer, initialized as in PEFT. In a row parallel layer, this rank's shard of what a single rank draws."""
    group = layer.row_parallel_group
    ranks = 1 if group is None else group.size
    inputs = layer.in_features * ranks
    bound = inputs**-0.5  # Kaiming's for a slope of sqrt(5)
    a = torch.empty(rows, inputs).uniform_(-bound, bound, generator=generator)
    return a if group is None else a.chunk(ranks, 1)[group.rank]


def _target_slices(model: Adaptable, spec: AdapterSpec) -> dict[str, dict[str, slice]]:
    """The outputs of each adapted projection, by the name of its fused module and then by its own."""
    slices: dict[str, dict[str, slice]] = {}
    for name, (parameter, rows) in hf_tensor_map(model.architecture).items():
        projection, kind = name.rsplit(".", 1)
        if kind != "weight" or projection.rsplit(".", 1)[-1] not in spec.targets:
            continue
        module = parameter.removesuffix(".weight")
        outputs = _linear(model, module).out_features
        slices.setdefault(module, {})[projection] = slice(*rows.indices(outputs)[:2])
    return slices


def _linear(model: nn.Module, name: str) -> Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, Linear)
    return layer


def _parameters_to_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and name not in _PARAMETERS:
                delattr(module, name)
                module.register_buffer(name, parameter.detach(), persistent=False)
