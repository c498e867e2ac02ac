"""Each item of the issue's list "must not happen silently", and that a refused call loses nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    capture,
    make_graphed_callables,
)

BOTH = pytest.mark.parametrize("how", ["callable", "capture"])


class Net(nn.Module):
    """A square layer, a buffer and a bias-free layer: something of each kind to re-point."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


def graph(how: str, target: Any, *sample: Any, **options: Any) -> Any:
    """`target` as a graphed callable or as a captured function; a module is called through what comes back."""
    return (make_graphed_callables if how == "callable" else capture)(target, sample, **options)


def snapshot(*modules: nn.Module) -> list[Any]:
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    grads = [(t.grad, None if t.grad is None else t.grad.clone()) for t in tensors]
    rng = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return [[t.detach().clone() for t in tensors], grads, rng]


@contextmanager
def refused(kind: type[Exception], *modules: nn.Module, match: str | None = None) -> Iterator[None]:
    """The body raises `kind`, and parameters, buffers, gradients and RNG are as before it."""
    values, grads, rng = snapshot(*modules)
    with pytest.raises(kind, match=match):
        yield
    values_now, grads_now, rng_now = snapshot(*modules)
    assert all(map(torch.equal, values, values_now))
    for (held, value), (held_now, _) in zip(grads, grads_now, strict=True):
        assert held_now is held
        assert held is None or torch.equal(held, value)
    assert all(map(torch.equal, rng, rng_now))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def same(left: Any, right: Any) -> bool:
    return (left is None and right is None) or torch.equal(left, right)


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
def test_a_call_that_does_not_fit_is_refused_and_the_next_is_right(
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
    with suppress(ReplayMismatch):  # the same dict in another order: right, or refused
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


# -- a copy is skipped only if address, shape and strides are the static tensor's ------------------


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


# -- parameters that are no longer where they were -------------------------------------------------


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
def test_a_moved_parameter_is_found(backend: str, device: torch.device, how: str, move: Callable[[Net], None]) -> None:
    net, x = Net(), torch.randn(3, 4)
    graphed = graph(how, net, torch.randn(3, 4), backend=backend)
    move(net)
    with refused(StaleGraph, net):
        graphed(x)
    if how == "callable":
        net.forward.reset()  # the way out the message gives: capture again
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
    net, other, x = Net(), Net(), torch.randn(3, 4)
    graphed = graph(how, net, torch.randn(3, 4), backend=backend)
    net.load_state_dict(other.state_dict())
    assert torch.equal(graphed(x), other(x))


# -- gradients that get lost -----------------------------------------------------------------------


def _raises_or_gives(x: Tensor, expected: Tensor, call: Callable[[], None]) -> None:
    try:
        call()
    except ReplayMismatch:
        assert x.grad is None
    else:
        assert x.grad is not None
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("case", ["module", "frozen module", "function without a backward", "other output"])
def test_an_input_that_newly_requires_grad_never_gets_none(backend: str, device: torch.device, case: str) -> None:
    w, x = torch.ones(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    if case == "other output":  # only the output of the newly differentiable input reaches the loss
        sample = (torch.randn(3, 4, requires_grad=True), torch.randn(3, 4))
        function = graph("callable", lambda a, b: (a * 2, b * 2), *sample, backend=backend)
        _raises_or_gives(x, torch.full_like(x, 2), lambda: (function(w, x)[1] * w).sum().backward(inputs=[x, w]))
        return
    target: Any = nn.Linear(4, 4) if "module" in case else (lambda x: x * 2)
    if case == "frozen module":
        target.requires_grad_(False)
    eager = copy.deepcopy(target)
    (expected,) = torch.autograd.grad(eager(x).sum(), x)
    graphed = graph("callable", target, torch.randn(3, 4), backend=backend)
    _raises_or_gives(x, expected, lambda: (graphed(x) * w).sum().backward())
    assert torch.equal(graphed(x.detach()), eager(x))


def test_a_backward_refused_for_a_new_input_changes_no_gradient(backend: str, device: torch.device) -> None:
    net = Net()
    net.first.bias.grad = torch.ones(4)
    graphed = graph("callable", net, torch.randn(3, 4), backend=backend)
    x = torch.randn(3, 4, requires_grad=True)
    out = graphed(x)
    with refused(ReplayMismatch, net, match="requires grad, but did not at capture"):
        out.sum().backward()
    assert x.grad is None


def test_a_captured_function_refuses_an_input_that_requires_grad(backend: str, device: torch.device) -> None:
    x = torch.randn(3, requires_grad=True)
    graphed = graph("capture", lambda x: x * 2, torch.randn(3), backend=backend)
    with refused(ReplayMismatch, match="requires grad"):
        graphed(x)
    with refused(CaptureError, match="requires grad"):
        graph("capture", lambda x: x * 2, x, backend=backend)
    with torch.no_grad():
        assert torch.equal(graph("capture", lambda x: x * 2, x, backend=backend)(x), x * 2)


class LateParameter(nn.Module):
    """Uses `late` only after `skip` calls: its gradient is None in as many warm-up runs."""

    def __init__(self, skip: int) -> None:
        super().__init__()
        self.early, self.late, self.skip = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), skip

    def forward(self, x: Tensor) -> Tensor:
        self.skip -= 1
        return x * self.early if self.skip >= 0 else x * self.early + x.exp() * self.late


@pytest.mark.parametrize(("warmup", "skip"), [(1, 1), (3, 1), (3, 3)])
def test_a_parameter_without_a_gradient_in_warm_up_is_not_dropped(
    backend: str, device: torch.device, warmup: int, skip: int
) -> None:
    net, x = LateParameter(skip), torch.randn(3)
    if skip == warmup:  # no run showed its gradient: that is said
        with pytest.raises(CaptureError, match="warm-up runs"):
            make_graphed_callables(net, (x,), num_warmup_iters=warmup, allow_unused_input=True, backend=backend)
        return
    make_graphed_callables(net, (x,), num_warmup_iters=warmup, allow_unused_input=True, backend=backend)
    net(x).sum().backward()
    assert torch.equal(net.late.grad, x.exp())
    assert torch.equal(net.early.grad, x)


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_capture_does_not_drop_a_parameter_without_a_first_gradient(
    backend: str, device: torch.device, warmup: int
) -> None:
    net, x = LateParameter(1), torch.randn(3)

    def step(x: Tensor) -> Tensor:
        loss = net(x).sum()
        loss.backward()
        return loss

    try:
        graphed = capture(step, (x,), warmup=warmup, backend=backend)
    except CaptureError:  # allowed: it is said, and nothing is lost
        assert gradients(net) == [None, None]
        return
    for _ in range(2):
        graphed(x)
    assert torch.equal(net.early.grad, x * 2)
    assert net.late.grad is not None
    assert torch.equal(net.late.grad, x.exp() * 2)


# -- copies and the end of a graph -----------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_graphed_model_runs_its_own_weights(
    backend: str, device: torch.device, copied: Callable[[Any], Any]
) -> None:
    pool, model, x = GraphPool(), nn.Sequential(Net(), Net()), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    make_graphed_callables(tuple(model), ((torch.randn(3, 4),), (torch.randn(3, 4, requires_grad=True),)), pool=pool,
                           backend=backend)  # fmt: skip
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    for twin in (copied(model), copied(copied(model))):
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(1)
        mirror = copy.deepcopy(plain)
        mirror.load_state_dict(twin.state_dict())
        replays = pool.report().replays
        twin(x).sum().backward()
        mirror(x).sum().backward()
        assert pool.report().replays == replays
        assert torch.equal(twin(x[:1]), mirror(x[:1]))  # any shape: it is ungraphed
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
    graphed.reset()  # twice is once
    assert "forward" not in net.__dict__
    assert net.forward.__func__ is Net.forward
    assert torch.equal(net(x[:1]), eager(x[:1]))
    assert torch.equal(graphed(x), eager(x))  # whoever kept the graph gets the original, counted
    assert graphed.record.eager_runs["reset"] == 1
    make_graphed_callables(net, (torch.randn(3, 4),), pool=pool, backend=backend)
    assert torch.equal(net(x), eager(x))


def test_reset_restores_a_forward_set_on_the_instance(backend: str, device: torch.device) -> None:
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    net.forward = own = lambda x: x + net.bias
    make_graphed_callables(net, (torch.randn(3, 4),), allow_unused_input=True, backend=backend)
    assert torch.equal(net(x), x + net.bias)
    net.forward.reset()
    assert net.forward is own


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


# -- an argument written in place ------------------------------------------------------------------


@BOTH
def test_an_argument_written_in_place_is_refused_or_written(backend: str, device: torch.device, how: str) -> None:
    cache, x = torch.zeros(3), torch.ones(3)
    try:
        graphed = graph(how, lambda cache, x: cache.add_(x) * 2, torch.zeros(3), x, backend=backend)
    except CaptureError:
        return
    graphed(cache, x)
    assert torch.equal(cache, x)
