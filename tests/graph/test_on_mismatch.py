"""`on_mismatch`, for a call that does not match the capture: raise, run eagerly, or capture again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rollgraph.graph import CaptureError, GraphPool, StaleGraph, capture, make_graphed_callables


def test_an_unknown_policy_is_refused(backend: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match="on_mismatch='ignore'"):
        capture(lambda x: x, (torch.zeros(1),), backend=backend, on_mismatch="ignore")


@pytest.mark.parametrize("how", ["callable", "capture"])
def test_an_eager_run_is_counted_with_its_reason(backend: str, device: torch.device, how: str) -> None:
    pool, net = GraphPool(), nn.Linear(4, 4)
    eager, x = copy.deepcopy(net), torch.randn(3, 4)
    make = make_graphed_callables if how == "callable" else capture
    graphed = make(net, (torch.randn(3, 4),), pool=pool, backend=backend, on_mismatch="eager")
    for _ in range(2):
        assert torch.equal(graphed(x[:2]), eager(x[:2]))
    with torch.no_grad():
        assert torch.equal(graphed(x), eager(x))
    net.weight.data = net.weight.data * 2
    assert torch.equal(graphed(x), torch.nn.functional.linear(x, eager.weight * 2, eager.bias))
    reasons = pool.report().graphs[0].eager_runs
    assert sorted(reasons.values()) == [1, 1, 2]
    shape, mode, moved = (next(r for r in reasons if word in r) for word in ("argument 0", "grad off", "moved"))
    assert reasons[shape] == 2
    text = str(pool.report())
    assert all(reason in text for reason in (shape, mode, moved))
    assert pool.report().captures == 1
    assert pool.report().replays == 0


@pytest.mark.parametrize("how", ["callable", "capture"])
def test_recapture_is_counted_and_never_repeated_for_a_known_shape(
    backend: str, device: torch.device, how: str
) -> None:
    pool, net = GraphPool(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    eager = copy.deepcopy(net)
    make = make_graphed_callables if how == "callable" else capture
    graphed = make(net, (torch.randn(3, 4),), pool=pool, backend=backend, on_mismatch="recapture")
    for step, rows in enumerate([3, 2, 3, 5, 2, 5, 3, 2]):
        x = torch.randn(rows, 4)
        state = torch.get_rng_state()
        out, expected = graphed(x), eager(x)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(out, expected)
        if how == "callable":
            (out * x).sum().backward()
            (expected * x).sum().backward()
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), eager.parameters(), strict=True))
        record = pool.report().graphs[0]
        assert record.replays == step + 1
        assert record.captures == (1, 2, 2, 3, 3, 3, 3, 3)[step]
        assert not record.eager_runs
    with torch.no_grad():  # another mode is another surface
        assert torch.equal(graphed(x), eager(x))
    assert pool.report().captures == 4


@pytest.mark.parametrize("how", ["callable", "capture"])
def test_recapture_follows_a_moved_parameter(backend: str, device: torch.device, how: str) -> None:
    pool, net = GraphPool(), nn.Linear(4, 4)
    make = make_graphed_callables if how == "callable" else capture
    graphed = make(net, (torch.randn(3, 4),), pool=pool, backend=backend, on_mismatch="recapture")
    x = torch.randn(3, 4)
    for count in (2, 3):
        net.weight.data = net.weight.data * 2
        expected = torch.nn.functional.linear(x, net.weight, net.bias)
        for _ in range(2):
            assert torch.equal(graphed(x), expected)
        record = pool.report().graphs[0]
        assert record.captures == count
    assert record.replays == 4  # each of the four calls was a replay
    assert not record.eager_runs


def test_recapture_in_a_chain_with_open_intervals_equals_eager(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)))
    eager = copy.deepcopy(model)
    samples = ((torch.randn(2, 4),), (torch.randn(2, 4, requires_grad=True),), (torch.randn(2, 4, requires_grad=True),))
    make_graphed_callables(tuple(model)[:1], samples[:1], pool=pool, backend=backend, on_mismatch="recapture")
    make_graphed_callables(tuple(model)[1:], samples[1:], pool=GraphPool(), backend=backend, on_mismatch="recapture")
    for rows in (2, 3, 2, 3, 4):
        x = torch.randn(rows, 4)
        torch.manual_seed(rows)
        model(x).square().sum().backward()
        after = torch.get_rng_state()
        torch.manual_seed(rows)
        eager(x).square().sum().backward()
        assert torch.equal(after, torch.get_rng_state())
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
    assert pool.report().captures == 3


def test_a_policy_never_hides_memory_in_use(backend: str, device: torch.device) -> None:
    for policy in ("eager", "recapture"):
        net = nn.Linear(4, 4)
        make_graphed_callables(net, (torch.randn(3, 4),), backend=backend, on_mismatch=policy)
        out = net(torch.randn(3, 4))
        with pytest.raises(StaleGraph, match="before the backward"):
            net(torch.randn(3, 4))
        out.sum().backward()


def test_a_recapture_that_fails_leaves_the_old_graph_working(backend: str, device: torch.device) -> None:
    net = nn.Linear(4, 4)
    eager, x = copy.deepcopy(net), torch.randn(3, 4)
    graphed = make_graphed_callables(net, (torch.randn(3, 4),), backend=backend, on_mismatch="recapture")
    with pytest.raises(CaptureError, match="warm-up of 'Linear'"):
        graphed(torch.randn(3, 5))
    assert torch.equal(graphed(x), eager(x))
    assert graphed.forward.record.captures == 1
