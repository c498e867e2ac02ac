"""The boundary between a graph and the program's autograd: everything behaves as in eager, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import (
    StaleGraph,
    capture,
    make_graphed_callables,
)
from tests.graph.comparisons import doubles

# -- parameters that are reached past the module ---------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is also reached through a list or a closure."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3, dtype=torch.float64)
        self.way = way
        self.tied = [self.emb.weight]
        weight = self.emb.weight
        self.project: Callable[[Tensor], Tensor] = lambda h: h @ weight.t()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.emb(ids)
        if self.way == "list":
            return hidden @ self.tied[0].t()
        return self.project(hidden)


@pytest.mark.parametrize("way", ["list", "closure"])
@pytest.mark.parametrize("buffered", [False, True])
def test_a_parameter_reached_in_two_ways_gets_both_gradients(
    backend: str, device: torch.device, way: str, buffered: bool
) -> None:
    module, ids = Tied(way), torch.tensor([0, 1, 1, 4])
    twin = Tied(way)
    twin.load_state_dict(module.state_dict())
    weight = module.emb.weight
    buffers = {weight: torch.zeros_like(weight)} if buffered else None
    make_graphed_callables(module, (ids,), backend=backend, grad_buffers=buffers)
    for _ in range(2):
        ids = torch.randint(0, 5, (4,))
        module(ids).square().sum().backward()
        twin(ids).square().sum().backward()
        gradient = buffers[weight] if buffers is not None else weight.grad
        assert torch.allclose(gradient, twin.emb.weight.grad, rtol=1e-13, atol=1e-13)


def test_a_parameter_reached_only_outside_the_module_gets_its_gradient(backend: str, device: torch.device) -> None:
    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(doubles(3, 3))
            self.held = [self.w]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.held[0]

    module, x = Past(), doubles(2, 3)
    make_graphed_callables(module, (x,), backend=backend)
    module(x).sum().backward()
    assert torch.equal(module.w.grad, x.t() @ torch.ones(2, 3, dtype=torch.float64))


class Marked(nn.Parameter):
    """A parameter class of the user's own."""


def test_a_parameter_keeps_its_class_and_attributes_during_capture(backend: str, device: torch.device) -> None:
    class Curious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.m = nn.Parameter(doubles(3)), Marked(doubles(3))
            self.m.scale = 3.0
            self.same = nn.Module()
            self.same.w = self.w

        def forward(self, x: Tensor) -> Tensor:
            known = isinstance(self.w, nn.Parameter) and type(self.m) is Marked and self.same.w is self.w
            return x * self.w * self.m * (self.m.scale if known and self.w.is_leaf else 0.0)

    module, x = Curious(), doubles(3)
    make_graphed_callables(module, (x,), backend=backend)
    module(x).sum().backward()
    assert torch.allclose(module.w.grad, 3 * x * module.m, rtol=1e-13)
    assert torch.allclose(module.m.grad, 3 * x * module.w, rtol=1e-13)


# -- changed in place between forward and backward -------------------------------------------------


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def test_a_weight_changed_before_the_backward_is_refused_as_in_eager(backend: str, device: torch.device) -> None:
    module, x = two_layers(), doubles(2, 3)
    twin = copy.deepcopy(module)
    make_graphed_callables(module, (x,), backend=backend)
    loss = module(x).sum()
    with torch.no_grad():
        module[2].weight.mul_(2)
    with pytest.raises(StaleGraph, match=r"parameter 2\.weight .* modified in place"):
        loss.backward()
    assert all(p.grad is None for p in module.parameters())
    with torch.no_grad():
        twin[2].weight.mul_(2)
    for model in (module, twin):
        model(x).sum().backward()  # nothing waits for the refused backward, although it could be tried again
    with pytest.raises(StaleGraph, match="already ran, or was refused"):
        loss.backward()
    assert all(torch.allclose(p.grad, q.grad) for p, q in zip(module.parameters(), twin.parameters(), strict=True))


def test_a_weight_that_the_backward_does_not_read_may_change(backend: str, device: torch.device) -> None:
    module, x = two_layers(), doubles(2, 3)
    make_graphed_callables(module, (x,), backend=backend)
    loss = module(x).sum()
    with torch.no_grad():
        module[0].bias.mul_(2)
        module[0].weight.mul_(2)  # x needs no gradient, so nothing is multiplied by it
    loss.backward()
    assert torch.equal(module[2].bias.grad, torch.full((2,), 2.0, dtype=torch.float64))


def test_a_buffer_changed_before_the_backward_is_refused(backend: str, device: torch.device) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", doubles(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module, x = Scaled(), doubles(3, grad=True)
    make_graphed_callables(module, (doubles(3, grad=True),), backend=backend)
    loss = module(x).sum()
    module.scale.add_(1)
    with pytest.raises(StaleGraph, match="buffer scale"):
        loss.backward()


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "softmax", "relu"])
def test_an_output_changed_before_the_backward_that_reads_it_is_refused(
    backend: str, device: torch.device, name: str
) -> None:
    def function(x: Tensor) -> Tensor:
        return x.softmax(-1) if name == "softmax" else getattr(torch, name)(x)

    graphed = make_graphed_callables(function, (doubles(2, 3, grad=True),), backend=backend)
    for run in (function, graphed):
        x = doubles(2, 3, grad=True)
        y = run(x)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            y.sum().backward()
        assert x.grad is None


def test_an_output_that_no_backward_reads_may_change(backend: str, device: torch.device) -> None:
    module = nn.Linear(3, 2).double()
    twin = copy.deepcopy(module)
    make_graphed_callables(module, (doubles(2, 3, grad=True),), backend=backend)
    values = doubles(2, 3)
    for _ in range(2):
        leaves = []
        for run in (module, twin):
            x = values.clone().requires_grad_()
            y = run(x)
            y.mul_(2)
            y.square().sum().backward()
            leaves.append(x)
        assert torch.allclose(leaves[0].grad, leaves[1].grad, rtol=1e-13)
        assert torch.allclose(module.weight.grad, twin.weight.grad, rtol=1e-13)


def test_an_input_changed_before_the_backward_does_not_matter(backend: str, device: torch.device) -> None:
    """Eager refuses this. A graph has its own copy, so its gradient is that of the forward's input."""
    weight = doubles(3, grad=True)
    graphed = make_graphed_callables(lambda x: x * weight, (doubles(3),), backend=backend)
    x = doubles(3)
    before = x.clone()
    loss = graphed(x).sum()
    x.zero_()
    loss.backward()
    assert torch.equal(weight.grad, before)


def test_weights_may_change_between_two_steps(backend: str, device: torch.device) -> None:
    module, x = two_layers(), doubles(2, 3)
    twin = copy.deepcopy(module)
    make_graphed_callables(module, (x,), backend=backend)
    for model in (module, twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert all(torch.allclose(p, q, rtol=1e-12) for p, q in zip(module.parameters(), twin.parameters(), strict=True))


def test_weights_of_a_checkpointed_region_may_change_as_in_eager(backend: str, device: torch.device) -> None:
    """Checkpointing does not save the weights but reads them again, so eager accepts the change."""
    module = two_layers()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    graphed, x = Checkpointed(), doubles(2, 3)
    make_graphed_callables(graphed, (doubles(2, 3, grad=True),), backend=backend)
    loss = graphed(x.requires_grad_()).sum()
    with torch.no_grad():
        module[2].weight.mul_(2)
    loss.backward()
    assert module[2].bias.grad is not None


# -- views of gradients ----------------------------------------------------------------------------


def test_a_view_of_a_gradient_remains_a_view(backend: str, device: torch.device) -> None:
    module = nn.Linear(3, 2).double()
    twin = copy.deepcopy(module)
    make_graphed_callables(module, (doubles(4, 3),), backend=backend)
    views: dict[nn.Module, Tensor] = {}
    for step in range(4):
        x = doubles(4, 3)
        for model in (module, twin):
            model(x).square().sum().backward()
            if step == 0:
                views[model] = model.weight.grad.view(-1)
            assert torch.equal(views[model], model.weight.grad.view(-1))
        assert torch.allclose(module.weight.grad, twin.weight.grad, rtol=1e-12)
    views[module].zero_()
    assert not module.weight.grad.any()


def test_a_view_kept_after_its_gradient_was_dropped_keeps_its_value(backend: str, device: torch.device) -> None:
    module = nn.Linear(3, 2).double()
    make_graphed_callables(module, (doubles(4, 3),), backend=backend)
    module(doubles(4, 3)).sum().backward()
    view = module.weight.grad.view(-1)
    value = view.clone()
    module.zero_grad(set_to_none=True)
    module(doubles(4, 3)).sum().backward()
    assert torch.equal(view, value)
    assert not torch.equal(module.weight.grad.view(-1), value)


@pytest.mark.parametrize("how", ["view", "slice"])
def test_a_flat_gradient_buffer_is_not_overwritten_after_it_was_detached(
    backend: str, device: torch.device, how: str
) -> None:
    weight, x = nn.Parameter(doubles(3)), doubles(3)
    flat = torch.zeros(3 if how == "view" else 5, dtype=torch.float64)
    weight.grad = flat.view(3) if how == "view" else flat[1:4]

    def step(x: Tensor) -> None:
        (weight * x).sum().backward()

    graphed = capture(step, (x,), backend=backend)
    graphed(x)
    graphed(x)
    assert torch.equal(weight.grad, 2 * x)
    kept = flat.clone()
    assert kept.any()
    for _ in range(2):
        weight.grad = None
        graphed(x)
        assert torch.equal(weight.grad, x)
        assert torch.equal(flat, kept)
