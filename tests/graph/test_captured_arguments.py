"""Outputs and arguments of captured functions: gradients, writes in place, transforms, and recaptures."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import (
    CaptureError,
    GraphError,
    GraphPool,
    ReplayMismatch,
    capture,
    make_graphed_callables,
)
from rollgraph.graph.captured import MAX_VARIANTS
from tests.graph.comparisons import doubles
from tests.graph.refusals import BOTH, graph

# -- outputs of a captured function ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["recorded", "eager"])
def test_a_backward_through_the_output_of_a_captured_function_raises(
    backend: str, device: torch.device, kind: str
) -> None:
    encoder, x = nn.Linear(3, 2).double(), doubles(4, 3)
    graphed = capture(lambda x: (encoder(x), x * 2), (x,), backend=backend if kind == "recorded" else "eager")
    encoded, doubled = graphed(x)
    assert encoded.requires_grad
    assert not doubled.requires_grad
    encoded += 1
    assert torch.equal(encoded, encoder(x) + 1)
    with pytest.raises(GraphError, match="no gradient passes through its outputs"):
        encoded.sum().backward()
    assert encoder.weight.grad is None


def test_a_loss_that_a_captured_step_returns_can_be_read_and_kept(backend: str, device: torch.device) -> None:
    module, x = nn.Linear(3, 2).double(), doubles(4, 3)
    twin = copy.deepcopy(module)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    graphed = capture(lambda x: step(module, x), (x,), backend=backend)
    kept, total = [], torch.zeros((), dtype=torch.float64)
    for _ in range(3):
        x = doubles(4, 3)
        loss, expected = graphed(x), step(twin, x)
        assert loss.requires_grad == expected.requires_grad
        assert loss.item() == loss.tolist() == pytest.approx(expected.item(), rel=1e-13)
        total += loss.detach()
        kept.append((loss.detach().clone(), loss.clone(), expected))
    for detached, cloned, expected in kept:
        assert torch.allclose(detached, expected)
        assert torch.equal(detached, cloned)
    assert torch.allclose(total, sum(e.detach() for _, _, e in kept))
    assert torch.allclose(module.weight.grad, twin.weight.grad, rtol=1e-12)


def test_an_output_requires_grad_only_if_eagers_does(backend: str, device: torch.device) -> None:
    encoder, x = nn.Linear(3, 2).double(), doubles(4, 3)
    graphed = capture(torch.no_grad()(encoder.forward), (x,), backend=backend)
    assert not graphed(x).requires_grad
    with torch.no_grad():
        graphed = capture(encoder, (x,), backend=backend)
        assert not graphed(x).requires_grad


# -- arguments that the function writes ------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True])
@BOTH
def test_an_argument_written_before_it_is_read_is_refused(
    backend: str, device: torch.device, how: str, wrapped: bool
) -> None:
    buffer = torch.zeros(6)

    def function(x: Tensor) -> Tensor:
        buffer.add_(1)
        return x * 2

    graphed = graph(how, function, buffer, backend=backend)
    argument = buffer.view(2, 3).view(6) if wrapped else buffer
    with pytest.raises(ReplayMismatch, match="argument 0 lies in memory that the function writes before"):
        graphed(argument)
    assert not buffer.any()
    assert torch.equal(graphed(argument.clone()), torch.zeros(6))
    assert torch.equal(buffer, torch.ones(6))
    followed = graph(how, function, buffer, backend=backend, on_mismatch="eager")
    assert torch.equal(followed(buffer), torch.full((6,), 4.0))


@BOTH
def test_an_argument_returned_after_it_was_written_is_refused(backend: str, device: torch.device, how: str) -> None:
    buffer = torch.zeros(3)

    def function(x: Tensor) -> Tensor:
        buffer.add_(1)
        return x.view(3)

    graphed = graph(how, function, torch.zeros(3), backend=backend)
    with pytest.raises(ReplayMismatch, match="argument 0"):
        graphed(buffer)


@BOTH
def test_an_argument_that_is_written_after_its_last_read_is_accepted(
    backend: str, device: torch.device, how: str
) -> None:
    """As in a decode step, which writes the next token over the last one."""
    token, memory = torch.zeros(1), torch.zeros(4)

    def step(x: Tensor) -> Tensor:
        seen = x + 1
        token.copy_(seen)
        memory[2:].add_(1)
        return seen * 2

    graphed = graph(how, step, token, backend=backend)
    for expected in (2.0, 4.0, 6.0):
        assert graphed(token).item() == expected
    assert graphed(memory[:1]).item() == 2.0  # in the storage that is written, but beside the written part


# -- transforms ------------------------------------------------------------------------------------


@BOTH
def test_forward_mode_and_function_transforms_are_refused(backend: str, device: torch.device, how: str) -> None:
    def function(x: Tensor) -> Tensor:
        return x * x

    graphed, x = graph(how, function, doubles(3), backend=backend), doubles(3)
    dual = torch.autograd.forward_ad
    with dual.dual_level():
        with pytest.raises(ReplayMismatch, match="forward-mode tangent"):
            graphed(dual.make_dual(x, torch.ones_like(x)))
        with pytest.raises(CaptureError, match="forward-mode tangent"):
            graph(how, function, dual.make_dual(x, torch.ones_like(x)), backend=backend)
        assert torch.equal(graphed(x), x * x)
    for transform in (torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())):
        with pytest.raises(ReplayMismatch, match=r"torch\.func transform"):
            transform(graphed)(x)
    followed = graph(how, function, doubles(1)[0], backend=backend, on_mismatch="eager")
    assert torch.equal(torch.vmap(followed)(x), x * x)


# -- modules, copies, recaptures and returned numbers ----------------------------------------------


@BOTH
def test_a_scripted_module_is_refused_with_its_name(backend: str, device: torch.device, how: str) -> None:
    scripted = torch.jit.script(nn.Linear(3, 2))
    for target in (scripted, lambda x: scripted(x)):
        with pytest.raises(CaptureError, match="TorchScript module Linear"):
            graph(how, target, torch.zeros(1, 3), backend=backend)


@BOTH
def test_a_forward_without_gradients_takes_a_sample_that_requires_grad(
    backend: str, device: torch.device, how: str
) -> None:
    graphed = graph(how, torch.no_grad()(lambda x: x * 2), doubles(3, grad=True), backend=backend)
    x = doubles(3, grad=True)
    assert torch.equal(graphed(x), x * 2)
    assert not graphed(x).requires_grad


def test_a_captured_function_that_would_lose_a_gradient_is_refused(backend: str, device: torch.device) -> None:
    def inside(x: Tensor) -> Tensor:
        x.square().sum().backward()
        return x.detach() * 2

    for function in (inside, lambda x: x * 2):
        with pytest.raises(CaptureError, match="argument 0 requires grad"):
            capture(function, (doubles(3, grad=True),), backend=backend)


def test_a_shallow_copy_runs_its_own_forward(backend: str, device: torch.device) -> None:
    pool, x = GraphPool(), torch.ones(50)
    module = nn.Dropout(0.5)
    make_graphed_callables(module, (x,), pool=pool, backend=backend)
    for hooked in (False, True):
        duplicate = copy.copy(module).eval()
        if hooked:
            duplicate._forward_hooks = OrderedDict()
            duplicate.register_forward_hook(lambda *_: None)
        assert torch.equal(duplicate(x), x)
        assert not torch.equal(module(x), x)
        del duplicate
    assert not torch.equal(module(x), x)
    (record,) = pool.report().graphs
    assert record.eager_runs == {"called through a shallow copy of the module": 2}
    assert record.replays == 3


@BOTH
def test_recapture_keeps_a_bounded_number_of_captures(backend: str, device: torch.device, how: str) -> None:
    pool = GraphPool()
    graphed = graph(how, lambda x: x * 2, torch.zeros(1), pool=pool, backend=backend, on_mismatch="recapture")
    for size in range(2, MAX_VARIANTS + 4):
        assert torch.equal(graphed(torch.ones(size)), torch.full((size,), 2.0))
        graphed(torch.ones(2))  # used in between, so never dropped
    (record,) = pool.report().graphs
    assert (record.captures, record.dropped) == (MAX_VARIANTS + 3, 3)
    assert "3 captures dropped" in str(pool.report())
    graphed(torch.ones(2))
    assert pool.report().graphs[0].captures == MAX_VARIANTS + 3
    graphed(torch.ones(1))
    assert pool.report().graphs[0].captures == MAX_VARIANTS + 4


def test_recapture_keeps_a_capture_whose_backward_is_pending(backend: str, device: torch.device) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(doubles(1))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum()

    graphed = make_graphed_callables(Scaled(), (doubles(1),), backend=backend, on_mismatch="recapture")
    waiting = graphed(torch.full((1,), 3.0, dtype=torch.float64))
    for size in range(2, MAX_VARIANTS + 4):
        graphed(doubles(size).detach())
    waiting.backward()
    assert graphed.weight.grad.tolist() == [3.0]


@BOTH
def test_a_returned_number_that_changes_is_refused(backend: str, device: torch.device, how: str) -> None:
    calls = []

    def counting(x: Tensor) -> tuple[Tensor, int]:
        calls.append(None)
        return x * 2, len(calls)

    with pytest.raises(CaptureError, match=r"returns \d in one call and \d in the next"):
        graph(how, counting, torch.zeros(3), backend=backend)
    graphed = graph(how, lambda x: (x * 2, x.shape[0], float("nan")), torch.zeros(3), backend=backend)
    assert graphed(torch.ones(3))[1] == 3
