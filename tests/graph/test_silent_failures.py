"""Calls that must not fail silently: each is refused or computed correctly, and a refusal changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import (
    CaptureError,
    GraphHooks,
    GraphPool,
    ReplayMismatch,
    StaleGraph,
)
from tests.graph.refusals import BOTH, Net, gradients, graph, refused, same

# -- broadcasting, casting, arguments --------------------------------------------------------------


WRONG_CALLS: dict[str, Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "one row": lambda x: ((x[:1],), {}),
    "one row without its dimension": lambda x: ((x[0],), {}),
    "an added dimension": lambda x: ((x[None],), {}),
    "a scalar tensor": lambda x: ((x.sum(),), {}),
    "a number": lambda x: ((1.0,), {}),
    "double": lambda x: ((x.double(),), {}),
    "bfloat16": lambda x: ((x.bfloat16(),), {}),
    "integers": lambda x: ((x.long(),), {}),
    "another device": lambda x: ((x.to("meta"),), {}),
    "sparse": lambda x: ((x.to_sparse(),), {}),
    "an extra tensor": lambda x: ((x, x), {}),
    "an extra None": lambda x: ((x, None), {}),
    "an extra keyword": lambda x: ((x,), {"y": x}),
    "nothing": lambda x: ((), {}),
    "by keyword": lambda x: ((), {"x": x}),
    "in a list": lambda x: (([x],), {}),
    "in a dict": lambda x: (({"x": x},), {}),
}


@BOTH
def test_a_call_that_does_not_match_is_refused_and_the_next_is_correct(
    backend: str, device: torch.device, how: str
) -> None:
    net = Net()
    net.first.weight.grad = torch.ones(4, 4)
    eager, x = copy.deepcopy(net), torch.randn(3, 4)
    graphed = graph(how, net, torch.randn(3, 4), backend=backend)
    for description, wrong in WRONG_CALLS.items():
        args, kwargs = wrong(x)
        print(description)
        with refused(ReplayMismatch, net):
            graphed(*args, **kwargs)
        assert torch.equal(graphed(x), eager(x))


@BOTH
def test_another_pytree_is_refused(backend: str, device: torch.device, how: str) -> None:
    a, b = torch.randn(3), torch.randn(3)
    graphed = graph(how, lambda tree, y: tree["a"][0] - tree["b"] * y, {"a": (a,), "b": b}, b, backend=backend)
    for tree in ({"a": [a], "b": b}, {"a": (a,)}, {"a": (a,), "b": b, "c": b}, {"a": a, "b": b}, {"a": (a,), "c": b}):
        with pytest.raises(ReplayMismatch):
            graphed(tree, b)
    single = graph(how, lambda pair: pair[0] * 2, (a,), backend=backend) if how == "capture" else None
    if single is not None:
        for tree in (a, [a], {"a": a}):
            with pytest.raises(ReplayMismatch):
                single(tree)
        assert torch.equal(single((b,)), b * 2)
    with suppress(ReplayMismatch):  # the same dict in another order: correct, or refused
        assert torch.equal(graphed({"b": b, "a": (a,)}, b), a - b * b)
    assert torch.equal(graphed({"a": (b,), "b": a}, b), b - a * b)


CONSTANTS = [
    (True, 1), (1, True), (1, 1.0), (1.0, 1), (1, 2), (0.0, -0.0), ("a", "b"), (None, 0), (1, "1"), ([1], [2]),
    ({"k": 1}, {"k": 2}), (torch.float32, torch.float64), (slice(1), slice(2)), (torch.relu, torch.tanh), (1j, 2j),
]  # fmt: skip


@BOTH
def test_a_frozen_argument_that_changes_is_refused(backend: str, device: torch.device, how: str) -> None:
    x, frozen = torch.randn(3), [value for value, _ in CONSTANTS]
    graphed = graph(how, lambda x, *constants: x + 1, x, *frozen, backend=backend)
    for index, (_, changed) in enumerate(CONSTANTS):
        for wrong in (changed, x):
            print(f"argument {index + 1}: {frozen[index]!r} -> {wrong!r}")
            with refused(ReplayMismatch, match=rf"argument {index + 1}\b|arguments differ"):
                graphed(x, *frozen[:index], wrong, *frozen[index + 1 :])
        assert torch.equal(graphed(x, *copy.deepcopy(frozen)), x + 1)


@BOTH
def test_an_argument_written_in_place_is_refused_or_written(backend: str, device: torch.device, how: str) -> None:
    cache, x = torch.zeros(3), torch.ones(3)
    try:
        graphed = graph(how, lambda cache, x: cache.add_(x) * 2, torch.zeros(3), x, backend=backend)
    except CaptureError:
        return
    graphed(cache, x)
    assert torch.equal(cache, x)


# -- inputs are copied unless address, shape and strides are those of the static tensor ------------


@BOTH
def test_views_of_the_static_input_are_copied(backend: str, device: torch.device, how: str) -> None:
    seen: list[Tensor] = []
    hooks = GraphHooks(pre_forward=[lambda target, args, kwargs: seen.append(args[0])], when=("capture",))
    graphed = graph(how, lambda x: x.exp(), torch.randn(3, 3), backend=backend, hooks=hooks)
    static, x = seen[0], torch.randn(3, 3)
    for view in (
        lambda t: t,
        lambda t: t.t(),
        lambda t: t.as_strided((3, 3), (0, 1)),
        lambda t: t.as_strided((3, 3), (1, 0)),
        lambda t: t[1:2].expand(3, 3),
    ):
        static.copy_(x)
        assert torch.equal(graphed(view(static)), view(x).exp())


@BOTH
def test_a_transposed_output_fed_back_is_copied(backend: str, device: torch.device, how: str) -> None:
    graphed = graph(how, lambda x: (x, x * 2), torch.randn(3, 3), backend=backend)
    x = torch.randn(3, 3)
    itself, doubled = graphed(x)
    assert torch.equal(graphed(itself.t())[1], x.t() * 2)
    itself, doubled = graphed(x)
    assert torch.equal(graphed(doubled.t())[1], x.t() * 4)


@BOTH
def test_outputs_that_are_inputs_can_be_fed_back_in_another_order(backend: str, device: torch.device, how: str) -> None:
    graphed = graph(how, lambda a, b: (a, b, a + 2 * b), torch.randn(3), torch.randn(3), backend=backend)
    a, b = torch.randn(3), torch.randn(3)
    first, second, _ = graphed(a, b)
    assert torch.equal(graphed(second, first)[2], b + 2 * a)


@BOTH
def test_a_conjugate_view_of_the_static_input_is_copied(backend: str, device: torch.device, how: str) -> None:
    graphed = graph(how, lambda z: (z, z * 1j), torch.randn(3, dtype=torch.cfloat), backend=backend)
    z = torch.randn(3, dtype=torch.cfloat)
    itself, _ = graphed(z)
    assert torch.equal(graphed(itself.conj())[1], z.conj() * 1j)


# -- memory that a backward still needs ------------------------------------------------------------


def test_two_forwards_before_a_backward_are_refused(backend: str, device: torch.device) -> None:
    net = Net()
    eager = copy.deepcopy(net)
    graphed = graph("callable", net, torch.randn(3, 4), backend=backend)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    out = graphed(x)
    with refused(StaleGraph, net, match="before the backward"):
        graphed(y)
    assert torch.equal(out, eager(x))  # the refused call wrote nothing
    out.sum().backward()
    graphed(y).sum().backward()
    eager(x).sum().backward()
    eager(y).sum().backward()
    assert all(map(same, gradients(net), gradients(eager)))


@BOTH
def test_a_replay_over_the_memory_of_a_pending_backward_is_refused(
    backend: str, device: torch.device, how: str
) -> None:
    pool, a, c = GraphPool(), Net(), Net()
    eager_a, eager_c = copy.deepcopy(a), copy.deepcopy(c)
    graph("callable", a, torch.randn(3, 4), pool=pool, backend=backend)
    graphed_c = graph(how, c, torch.randn(3, 4), pool=pool, backend=backend)
    x = torch.randn(3, 4)
    out = a(x)
    with refused(StaleGraph, a, c, match="shares memory"):
        graphed_c(x)
    out.square().sum().backward()
    eager_a(x).square().sum().backward()
    assert all(map(same, gradients(a), gradients(eager_a)))
    assert torch.equal(graphed_c(x), eager_c(x))


# -- parameters that moved -------------------------------------------------------------------------


def _data_clone(net: Net) -> None:
    net.last.weight.data = net.last.weight.data.clone() * 2


def _data_same_address_other_strides(net: Net) -> None:
    net.last.weight.data = net.last.weight.data.t()


def _assign(net: Net) -> None:
    net.load_state_dict({k: v.clone() * 2 for k, v in net.state_dict().items()}, assign=True)


def _new_parameter(net: Net) -> None:
    net.first.weight = nn.Parameter(torch.randn(4, 4))


def _new_buffer(net: Net) -> None:
    net.scale = torch.rand(4)


def _to_double_and_back(net: Net) -> None:
    net.double().float().last.weight.data.mul_(2)


def _new_sub_module(net: Net) -> None:
    net.last = nn.Linear(4, 4, bias=False)


def _bias_added(net: Net) -> None:
    net.last.bias = nn.Parameter(torch.ones(4))


def _bias_removed(net: Net) -> None:
    net.first.bias = None


@BOTH
@pytest.mark.parametrize(
    "move",
    [_data_clone, _data_same_address_other_strides, _assign, _new_parameter, _new_buffer, _to_double_and_back,
     _new_sub_module, _bias_added, _bias_removed],
)  # fmt: skip
def test_a_moved_parameter_is_refused(
    backend: str, device: torch.device, how: str, move: Callable[[Net], None]
) -> None:
    net, x = Net(), torch.randn(3, 4)
    graphed = graph(how, net, torch.randn(3, 4), backend=backend)
    move(net)
    with refused(StaleGraph, net):
        graphed(x)
    if how == "callable":
        net.forward.reset()  # as the message advises: capture again
    again = graph(how, net, torch.randn(3, 4), backend=backend)
    eager = copy.deepcopy(net)
    assert torch.equal(again(x), eager(x))


@BOTH
def test_a_parameter_put_back_is_accepted_again(backend: str, device: torch.device, how: str) -> None:
    net, x = Net(), torch.randn(3, 4)
    eager = copy.deepcopy(net)
    graphed = graph(how, net, torch.randn(3, 4), backend=backend)
    kept = net.last.weight.data
    net.last.weight.data = kept.clone()
    with refused(StaleGraph, net, match=r"weight.*moved"):
        graphed(x)
    net.last.weight.data = kept
    assert torch.equal(graphed(x), eager(x))


@BOTH
def test_values_loaded_in_place_are_seen(backend: str, device: torch.device, how: str) -> None:
    net, source, x = Net(), Net(), torch.randn(3, 4)
    graphed = graph(how, net, torch.randn(3, 4), backend=backend)
    net.load_state_dict(source.state_dict())
    assert torch.equal(graphed(x), source(x))
