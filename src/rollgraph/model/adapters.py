"""Low-rank adapters of a whole model: what they are, how they are attached, and how they are switched off.

Attaching makes the adapters the only parameters of the model. The base stays where it is, as buffers: nothing trains
it, and it is in no checkpoint. With the scale at zero the model is the base, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from rollgraph.model.architecture import Architecture
from rollgraph.model.hf_names import tensor_places
from rollgraph.model.linear import Linear

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PARAMETERS = ("lora_a", "lora_b")
_version = attrgetter("_version")


@dataclass(frozen=True)
class AdapterSpec:
    """What adapters a model gets, e.g. AdapterSpec(rank=8, alpha=16, targets=("q_proj", "v_proj"))."""

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
        """What the product of both matrices is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class Adaptable(nn.Module):
    """A model that can have adapters. `Decoder` is one."""

    architecture: Architecture
    embed: nn.Embedding
    adapters: Adapters | None = None  # set by `attach`


class Adapters:
    """The adapters of a model. Made by `attach`.

    Each layer multiplies with a copy of A, which `refresh` brings up to date after the parameters have changed. Where
    layers come and go, whoever brings one makes its copies, too (see `copying_a`), and nothing is left to do here.
    """

    def __init__(self, model: Adaptable, spec: AdapterSpec, scale: Tensor, layers: dict[str, Linear]) -> None:
        self.spec = spec
        self.scale = scale  # on the device; 0 while the adapters are switched off
        self._uses_of_base = 0  # that have not ended
        self._model = model
        self._layers = layers
        self._watched: list[Tensor] = [layer.lora_a for layer in layers.values()]
        self._copied = -1
        self._layers_come_and_go = False
        self.refresh()

    # -- switching off -----------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        return self._uses_of_base == 0

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is the base. The adapters are on again once nobody is inside, exception or not."""
        self._uses_of_base += 1
        try:
            self.scale.fill_(0.0)
            yield
        finally:
            if self._uses_of_base == 1:
                self.scale.fill_(self.spec.scale)
            self._uses_of_base -= 1  # last: if an interrupt comes before, training is refused

    # -- the copies of A ---------------------------------------------------------------------------

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Also look at these tensors in order to find out whether A has changed: they share its memory."""
        self._watched += tensors
        self.refresh()

    def leave_to_gathers(self) -> None:
        """Layers come and go from now on: their memory may hold others, and must not be written here."""
        self._layers_come_and_go = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy A to where it is multiplied with, if it has changed."""
        version = self._version()
        if version == self._copied or self._layers_come_and_go:
            return
        copies = []
        for layer in self._layers.values():
            assert layer.adapter is not None
            copies.append(layer.adapter.extended[layer.adapter.low])
        torch._foreach_copy_(copies, [layer.lora_a for layer in self._layers.values()])
        self._copied = version

    def stale(self) -> str | None:
        """Why the model must not run now; None if it may. For use as a guard of a graph."""
        if self._version() == self._copied or self._layers_come_and_go:
            return None
        return "the adapters have changed since they were last copied: call refresh()"

    def _version(self) -> int:
        """Grows with every change in place."""
        return sum(map(_version, self._watched))

    # -- by the names of Hugging Face --------------------------------------------------------------

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The name of each projection with an adapter, and views of its A, [rank, inputs], and B, [outputs, rank].

        Call `refresh` after writing to them.
        """
        for module, targets in _targeted(self._model, self.spec).items():
            layer = self._layers[module]
            assert layer.adapter is not None
            for index, (name, part) in enumerate(zip(targets, layer.adapter.parts, strict=True)):
                rows = slice(index * self.spec.rank, (index + 1) * self.spec.rank)
                yield name, layer.lora_a.detach()[rows], layer.lora_b.detach()[:, part.up].t()

    @torch.no_grad()
    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model with the adapters added, one at a time. Those without an adapter are views."""
        adapted = {f"{name}.weight": (a, b) for name, a, b in self.parts()}
        for name, (place, rows) in tensor_places(self._model.architecture).items():
            base = attrgetter(place)(self._model)[rows]
            if name not in adapted:
                yield name, base
                continue
            wide = torch.promote_types(base.dtype, torch.float32)
            a, b = adapted[name]
            yield name, torch.addmm(base.to(wide), b.to(wide), a.to(wide), alpha=self.spec.scale).to(base.dtype)


def attach(model: Adaptable, spec: AdapterSpec, *, seed: int) -> None:
    """Give a model adapters that change nothing yet: A is drawn as PEFT does, B is zero.

    Everything else in the model becomes a buffer. At any moment the base exists once, except for one layer.
    """
    if model.adapters is not None:
        raise ValueError("the model has adapters already")
    dtype = torch.promote_types(model.embed.weight.dtype, torch.float32)
    scale = torch.full((), spec.scale, dtype=dtype, device=model.embed.weight.device)
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for module, targets in _targeted(model, spec).items():
        layer = layers[module] = _linear(model, module)
        columns = list(targets.values())
        if layer.shared is not None:
            raise ValueError("ranks that share key/value heads cannot have adapters of them")
        a = _draw_a(layer, spec.rank * len(columns), generator)
        layer.adapt(columns, a, scale, spec.dropout)
        if scale.is_cuda:  # the memory of the old weight, which smaller tensors would split
            torch.cuda.empty_cache()
    _freeze(model)
    model.register_buffer("adapter_scale", scale, persistent=False)  # so that a copy of the model can share it
    model.adapters = Adapters(model, spec, scale, layers)


def frozen_tensors(layer: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    """The base in a layer of a model with adapters, by name: each tensor, and then views of it.

    Whoever moves a tensor to other memory moves its views there, too.
    """
    found: dict[str, tuple[Tensor, ...]] = {}
    for prefix, module in layer.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            whole = buffer
            if isinstance(module, Linear) and module.adapter is not None:
                extended = {"weight": module.adapter.extended, "bias": module.adapter.bias}[name]
                whole = buffer if extended is None else extended
            found[f"{prefix}.{name}".removeprefix(".")] = (whole,) if whole is buffer else (whole, buffer)
    return found


def copying_a(layer: nn.Module) -> Callable[[], None]:
    """What copies A to where it is multiplied with in a layer; it does not look whether that is necessary."""
    copies = []
    originals = []
    for module in layer.modules():
        if isinstance(module, Linear) and module.adapter is not None:
            # Not a change in autograd's eyes: a backward finds there what its forward did, or else a guard refuses it.
            copies.append(module.adapter.extended.data[module.adapter.low])
            originals.append(module.lora_a.data)
    return partial(torch._foreach_copy_, copies, originals)


def _draw_a(layer: Linear, rows: int, generator: torch.Generator) -> Tensor:
    """A of a layer as PEFT draws it; where ranks divide the inputs, this rank's piece of what one rank would draw."""
    group = layer.sums_over
    ranks = 1 if group is None else group.size
    inputs = layer.in_features * ranks
    bound = inputs**-0.5  # Kaiming's for a slope of sqrt(5)
    a = torch.empty(rows, inputs).uniform_(-bound, bound, generator=generator)
    return a if group is None else a.chunk(ranks, 1)[group.rank]


def _targeted(model: Adaptable, spec: AdapterSpec) -> dict[str, dict[str, slice]]:
    """The outputs of each projection with an adapter, by the names of the module it is fused into and of its own."""
    found: dict[str, dict[str, slice]] = {}
    for name, (parameter, rows) in tensor_places(model.architecture).items():
        projection, kind = name.rsplit(".", 1)
        if kind != "weight" or projection.rsplit(".", 1)[-1] not in spec.targets:
            continue
        module = parameter.removesuffix(".weight")
        outputs = _linear(model, module).out_features
        found.setdefault(module, {})[projection] = slice(*rows.indices(outputs)[:2])
    return found


def _linear(model: nn.Module, name: str) -> Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, Linear)
    return layer


def _freeze(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and name not in _PARAMETERS:
                delattr(module, name)
                module.register_buffer(name, parameter.detach(), persistent=False)
