"""The boundary between a graph and the program's autograd: everything behaves as in eager, or is refused."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import (
    CaptureError,
    GraphError,
    GraphPool,
    ReplayMismatch,
    StaleGraph,
    capture,
    make_graphed_callables,
)
from rollgraph.graph.captured import MAX_VARIANTS
from rollgraph.graph.errors import MemoryInUse

BOTH = pytest.mark.parametrize("how", ["callable", "capture"])


def graph(how: str, target: Any, *sample: Any, **options: Any) -> Any:
    return (make_graphed_callables if how == "callable" else capture)(target, sample, **options)


def doubles(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


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
        found = buffers[weight] if buffers is not None else weight.grad
        assert torch.allclose(found, twin.emb.weight.grad, rtol=1e-13, atol=1e-13)


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


def test_a_parameter_is_still_a_parameter_during_capture(backend: str, device: torch.device) -> None:
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
    del loss
    with torch.no_grad():
        twin[2].weight.mul_(2)
    for model in (module, twin):
        model(x).sum().backward()
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
    with pytest.raises(GraphError, match="no gradient passes through what it returns"):
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


def test_no_output_requires_grad_where_eagers_does_not(backend: str, device: torch.device) -> None:
    encoder, x = nn.Linear(3, 2).double(), doubles(4, 3)
    graphed = capture(torch.no_grad()(encoder.forward), (x,), backend=backend)
    assert not graphed(x).requires_grad
    with torch.no_grad():
        graphed = capture(encoder, (x,), backend=backend)
        assert not graphed(x).requires_grad


# -- arguments that the function writes ------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True])
@BOTH
def test_an_argument_that_the_function_wrote_before_it_read_it_is_refused(
    backend: str, device: torch.device, how: str, wrapped: bool
) -> None:
    buffer = torch.zeros(6)

    def function(x: Tensor) -> Tensor:
        buffer.add_(1)
        return x * 2

    graphed = graph(how, function, buffer, backend=backend)
    given = buffer.view(2, 3).view(6) if wrapped else buffer
    with pytest.raises(ReplayMismatch, match="argument 0 lies in memory that the function writes before"):
        graphed(given)
    assert not buffer.any()
    assert torch.equal(graphed(given.clone()), torch.zeros(6))
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
    """A decode step that writes the next token to where it read the last one."""
    token, memory = torch.zeros(1), torch.zeros(4)

    def step(x: Tensor) -> Tensor:
        seen = x + 1
        token.copy_(seen)
        memory[2:].add_(1)
        return seen * 2

    graphed = graph(how, step, token, backend=backend)
    for expected in (2.0, 4.0, 6.0):
        assert graphed(token).item() == expected
    assert graphed(memory[:1]).item() == 2.0  # beside what is written, in one storage


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


# -- threads ---------------------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run in threads that start together, and raise here what one of them raised."""
    barrier, errors = threading.Barrier(count), []

    def run(index: int) -> None:
        barrier.wait(60)
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]


def powers(x: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(5):
        x = x @ x
    return x, x > 0


@BOTH
def test_threads_that_replay_one_graph_get_their_own_results_or_an_error(
    backend: str, device: torch.device, how: str
) -> None:
    right, wrong = [], []

    def work(index: int) -> None:
        x = torch.eye(64, dtype=torch.float64, device=device) * (1 + index / 10)
        with torch.no_grad():
            expected = powers(x)[0]
            for _ in range(25):
                try:
                    y, positive = graphed(x)
                except MemoryInUse:
                    continue
                same = torch.equal(y, expected) and torch.equal(positive, expected > 0)
                (right if same else wrong).append(index)
                del y, positive

    with torch.no_grad():
        graphed = graph(how, powers, torch.eye(64, dtype=torch.float64), backend=backend)
    in_threads(4, work)
    assert right
    assert wrong == []


@BOTH
def test_threads_that_take_turns_and_keep_clones_get_correct_results(
    backend: str, device: torch.device, how: str
) -> None:
    turn, right = threading.Lock(), []

    def work(index: int) -> None:
        x = torch.eye(64, dtype=torch.float64, device=device) * (1 + index / 10)
        with torch.no_grad():
            expected = powers(x)[0]
            for _ in range(10):
                with turn:
                    y = graphed(x)[0].clone()
                right.append(torch.equal(y, expected))

    with torch.no_grad():
        graphed = graph(how, powers, torch.eye(64, dtype=torch.float64), backend=backend)
    in_threads(3, work)
    assert right == [True] * 30


@BOTH
def test_an_output_that_another_thread_refers_to_is_not_overwritten(
    backend: str, device: torch.device, how: str
) -> None:
    pool = GraphPool()
    with torch.no_grad():
        double, triple = (graph(how, lambda x, n=n: x * n, torch.zeros(3), pool=pool, backend=backend) for n in (2, 3))
        ones = torch.ones(3)
        kept = double(ones)
    results: list[list[float]] = []

    @torch.no_grad()
    def work(index: int) -> None:
        results.append(double(ones).tolist())
        results.append(triple(ones).tolist())

    with pytest.raises(MemoryInUse, match="used by two threads"):
        in_threads(1, work)
    assert kept.tolist() == [2.0] * 3
    del kept
    in_threads(1, work)
    assert results == [[2.0] * 3, [3.0] * 3]


def test_training_one_graph_in_two_threads_is_refused_or_correct(backend: str, device: torch.device) -> None:
    module = nn.Linear(3, 3).double()
    make_graphed_callables(module, (doubles(2, 3, grad=True),), backend=backend)
    held = module(doubles(2, 3))
    held.sum().backward()

    def train(index: int) -> None:
        module(torch.ones(2, 3, dtype=torch.float64, device=device)).sum().backward()

    with pytest.raises(MemoryInUse, match="used by two threads"):
        in_threads(1, train)
    del held
    module.zero_grad()
    in_threads(1, train)
    assert torch.equal(module.weight.grad, torch.full((3, 3), 2.0, dtype=torch.float64))


# -- what else a capture meets ---------------------------------------------------------------------


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
        graphed(torch.ones(2))  # used all the time, so never the one to go
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
