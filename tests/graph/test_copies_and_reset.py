"""Copies of a graphed model run their own weights; a reset graph runs the original code."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import (
    GraphPool,
    StaleGraph,
    capture,
    make_graphed_callables,
)
from tests.graph.refusals import Net, gradients, graph, refused, same


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_graphed_model_runs_its_own_weights(
    backend: str, device: torch.device, duplicate: Callable[[Any], Any]
) -> None:
    pool, model, x = GraphPool(), nn.Sequential(Net(), Net()), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    make_graphed_callables(tuple(model), ((torch.randn(3, 4),), (torch.randn(3, 4, requires_grad=True),)), pool=pool,
                           backend=backend)  # fmt: skip
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    for twin in (duplicate(model), duplicate(duplicate(model))):
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(1)
        mirror = copy.deepcopy(plain)
        mirror.load_state_dict(twin.state_dict())
        replays = pool.report().replays
        twin(x).sum().backward()
        mirror(x).sum().backward()
        assert pool.report().replays == replays
        assert torch.equal(twin(x[:1]), mirror(x[:1]))  # any shape, because the copy is ungraphed
        assert all(map(same, gradients(twin), gradients(mirror)))
    assert gradients(model) == [None] * 6
    assert torch.equal(model(x), plain(x))


def test_a_copy_of_a_captured_function_runs_its_own_weights(backend: str, device: torch.device) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def step(self, x: Tensor) -> Tensor:
            return self.net(x) * 2

    model, x = Holder(), torch.randn(3, 4)
    model.graph = capture(model.step, (torch.randn(3, 4),), backend=backend)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.net.last.weight.zero_()
    assert torch.equal(twin.graph(x), torch.zeros(3, 4))
    assert torch.equal(model.graph(x), model.net(x) * 2)


def test_reset_restores_the_original_forward(backend: str, device: torch.device) -> None:
    pool, net, x = GraphPool(), Net(), torch.randn(3, 4)
    eager = copy.deepcopy(net)
    make_graphed_callables(net, (torch.randn(3, 4),), pool=pool, backend=backend)
    graphed = net.forward
    graphed.reset()
    graphed.reset()  # a second reset does nothing
    assert "forward" not in net.__dict__
    assert net.forward.__func__ is Net.forward
    assert torch.equal(net(x[:1]), eager(x[:1]))
    assert torch.equal(graphed(x), eager(x))  # the old graph runs the original, and counts it
    assert graphed.record.eager_runs["reset"] == 1
    make_graphed_callables(net, (torch.randn(3, 4),), pool=pool, backend=backend)
    assert torch.equal(net(x), eager(x))


def test_reset_restores_a_forward_set_on_the_instance(backend: str, device: torch.device) -> None:
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    net.forward = patched = lambda x: x + net.bias
    make_graphed_callables(net, (torch.randn(3, 4),), allow_unused_input=True, backend=backend)
    assert torch.equal(net(x), x + net.bias)
    net.forward.reset()
    assert net.forward is patched


def test_reset_under_a_later_wrapper_keeps_the_wrapper(backend: str, device: torch.device) -> None:
    net, x = Net(), torch.randn(3, 4)
    eager = copy.deepcopy(net)
    make_graphed_callables(net, (torch.randn(3, 4),), backend=backend)
    graphed = net.forward
    net.forward = wrapper = lambda x: graphed(x) + 1
    graphed.reset()
    assert net.forward is wrapper
    assert torch.equal(net(x), eager(x) + 1)


def test_reset_of_functions_runs_the_original(backend: str, device: torch.device) -> None:
    calls: list[int] = []

    def double(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    for how in ("callable", "capture"):
        graphed = graph(how, double, torch.randn(3), backend=backend)
        calls.clear()
        graphed(torch.ones(3))
        assert not calls
        graphed.reset()
        assert graphed(torch.ones(5)).tolist() == [2.0] * 5
        assert calls == [1]
        assert graphed.record.eager_runs == {"reset": 1}


def test_a_backward_after_reset_is_refused(backend: str, device: torch.device) -> None:
    net = Net()
    make_graphed_callables(net, (torch.randn(3, 4),), backend=backend)
    out = net(torch.randn(3, 4))
    net.forward.reset()
    with refused(StaleGraph, net, match="reset between"):
        out.sum().backward()
