"""Bindings to plain attributes and hooks: a change after capture is refused if a result depends on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import StaleGraph, capture, make_graphed_callables
from tests.graph.training_programs import twins

# -- plain attributes ------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A tensor in a plain attribute, beside counters and caches."""

    __constants__ = ("power",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = torch.full((4,), 2.0)
        self.mask = torch.ones(4)
        self.power, self.calls, self.seconds, self.last = 2, 0, 0.0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mask = MASKS[0]  # assigned by the forward itself
        return self.linear(x).pow(self.power) * self.scale * self.mask


MASKS = [torch.ones(())]

BUILT_IN: dict[str, tuple[Callable[[], nn.Module], str, Any]] = {
    "dropout": (lambda: nn.Dropout(0.5), "p", 0.1),
    "layer norm": (lambda: nn.LayerNorm(4), "eps", 0.5),
    "rms norm": (lambda: nn.RMSNorm(4), "eps", 0.5),
    "batch norm": (lambda: nn.BatchNorm1d(4), "momentum", 0.5),
    "gelu": (nn.GELU, "approximate", "tanh"),
    "leaky relu": (nn.LeakyReLU, "negative_slope", 0.5),
    "softmax": (lambda: nn.Softmax(0), "dim", 1),
    "declared": (Scaled, "power", 3),
}


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("how", ["callable", "capture"])
def test_a_changed_constant_of_a_module_is_refused(backend: str, device: torch.device, name: str, how: str) -> None:
    make, attribute, value = BUILT_IN[name]
    MASKS[0] = torch.ones(())
    model, x = nn.Sequential(nn.Linear(4, 4), make()), torch.randn(3, 4)
    graphed = (make_graphed_callables if how == "callable" else capture)(model, (x,), backend=backend)
    before = getattr(model[1], attribute)
    setattr(model[1], attribute, value)
    with pytest.raises(StaleGraph, match=rf"{type(model[1]).__name__}\.{attribute} was {before!r} .* {value!r} now"):
        graphed(x)
    setattr(model[1], attribute, before)
    graphed(x)  # restored: matches again


def test_a_dropout_probability_does_not_matter_in_eval_mode(backend: str, device: torch.device) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval(), torch.randn(3, 4)
    graphed = capture(model, (x,), backend=backend)
    model[1].p, model[2].momentum = 0.1, 0.9
    assert torch.equal(graphed(x), model(x))


@pytest.mark.parametrize("how", ["callable", "capture", "method"])
def test_a_replaced_tensor_in_a_plain_attribute_is_refused(backend: str, device: torch.device, how: str) -> None:
    MASKS[0] = torch.ones(())
    model, x = Scaled(), torch.randn(3, 4)
    target = model.forward if how == "method" else model
    graphed = (make_graphed_callables if how == "callable" else capture)(target, (x,), backend=backend)
    eager = copy.deepcopy(model)
    model.scale.mul_(3)  # in place: followed
    eager.scale.mul_(3)
    assert torch.equal(graphed(x), eager(x))
    kept, model.scale = model.scale, torch.full((4,), 5.0)
    with pytest.raises(StaleGraph, match=r"(Scaled|self)\.scale.* was replaced"):
        graphed(x)
    model.scale = kept
    assert torch.equal(graphed(x), eager(x))


@pytest.mark.parametrize("how", ["callable", "capture"])
def test_attributes_that_no_result_depends_on_may_change(backend: str, device: torch.device, how: str) -> None:
    MASKS[0] = torch.ones(())
    model, x = Scaled(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    graphed = (make_graphed_callables if how == "callable" else capture)(model, (x,), backend=backend)
    model.calls += 5
    model.seconds = 1.5
    model.last = torch.randn(3)
    model.mask = torch.zeros(4)
    model.note = "new"
    model.linear.tokens_seen = 7
    model.linear.in_features = 4.0
    assert torch.equal(graphed(x), eager(x))


# -- hooks added after capture ---------------------------------------------------------------------


def _double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(_double),
    "pre-forward": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "backward": lambda m: m.register_full_backward_hook(lambda module, inputs, outputs: None),
    "pre-backward": lambda m: m.register_full_backward_pre_hook(lambda module, outputs: None),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("how", ["callable", "capture"])
def test_a_hook_added_inside_a_graph_is_refused(backend: str, device: torch.device, kind: str, how: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    graphed = (make_graphed_callables if how == "callable" else capture)(model, (x,), backend=backend)
    handle = HOOKS[kind](model[0])
    with pytest.raises(StaleGraph, match=r"hook .* was added to Linear since capture"):
        graphed(x)
    handle.remove()
    assert torch.equal(graphed(x), eager(x))


def test_a_hook_around_a_graph_runs(backend: str, device: torch.device) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    make_graphed_callables(model, (x,), backend=backend)
    model.register_forward_hook(_double)
    assert torch.equal(model(x), eager(x) * 2)


def test_a_hook_that_is_removed_and_added_again_is_not_new(backend: str, device: torch.device) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)

    def register() -> Any:
        return model[0].register_forward_pre_hook(lambda module, args: None)

    handle = register()
    graphed = capture(model, (x,), backend=backend)
    handle.remove()
    register()
    assert torch.equal(graphed(x), model(x))
    model[0].register_forward_hook(_double)
    with pytest.raises(StaleGraph, match="forward hook _double"):
        graphed(x)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_tensor_hook_added_inside_a_captured_step_is_refused(backend: str, device: torch.device, kind: str) -> None:
    program, _, graphed = twins("sgd", True, backend=backend)
    handle = getattr(program.model.last.weight, kind)(lambda gradient: None)
    with pytest.raises(StaleGraph, match=r"tensor hook .* was added to Linear\.weight"):
        graphed(torch.randn(3, 4))
    handle.remove()
    graphed(torch.randn(3, 4))
