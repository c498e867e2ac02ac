"""Everything that a function writes in warm-up is rolled back, and replays write it again."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import CaptureError, capture
from tests.graph.process_state import WARMUP, Explosion, assert_same, inputs, photograph


class State(nn.Module):
    """A layer with buffers to write into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("a", torch.arange(8.0).view(2, 4))
        self.register_buffer("b", torch.ones(4))
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.average = copy.deepcopy(self.layer).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.cache: Any = None


def _views(m: State, x: Tensor) -> None:
    m.a[1].view(2, 2)[0].mul_(2)
    m.a.t()[2].copy_(x[:2, 0])


def _indices(m: State, x: Tensor) -> None:
    m.a[torch.arange(1, -1, -1), torch.arange(3, 1, -1)] = x[0, :2]
    m.b.index_add_(0, torch.arange(0, 4, 2), x[0, :2])
    m.b.index_copy_(0, torch.arange(1, 2), x[0, :1])
    m.b.scatter_(0, torch.arange(3, 4), x[1, :1])
    m.a.masked_fill_(m.a > 3, 0.5)


def _foreach(m: State, x: Tensor) -> None:
    torch._foreach_mul_([m.a, m.b], 0.5)
    torch._foreach_add_([m.b], [x.mean(0)])
    torch._foreach_lerp_(list(m.average.parameters()), list(m.layer.parameters()), 0.1)


def _average(m: State, x: Tensor) -> None:
    for mean, parameter in zip(m.average.parameters(), m.layer.parameters(), strict=True):
        mean.mul_(0.9).add_(parameter.detach(), alpha=0.1)
        parameter.data.add_(0.01)


def _swap(m: State, x: Tensor) -> None:
    old = m.b.clone()
    m.b.copy_(m.a[0])
    m.a[0].copy_(old)


def _out(m: State, x: Tensor) -> None:
    torch.add(m.b, x[0], out=m.b)
    torch.cumsum(m.b, 0, out=m.a[0])
    torch.sum(x, 0, out=m.a[1])


def _random(m: State, x: Tensor) -> None:
    m.b.normal_()
    m.a.bernoulli_(0.5)


def _norm(m: State, x: Tensor) -> None:
    m.norm(x)
    nn.functional.batch_norm(x, m.b, m.a[0], training=True)
    m.n.add_(1)


def _gradient(m: State, x: Tensor) -> None:
    m.layer(x).sum().backward()
    m.layer.weight.grad.mul_(0.5)


@pytest.mark.parametrize("write", [_views, _indices, _foreach, _average, _swap, _out, _random, _norm, _gradient])
@pytest.mark.parametrize("fails", [False, True])
def test_writes_in_place_are_rolled_back_and_replayed(
    backend: str, device: torch.device, write: Callable[[State, Tensor], None], fails: bool
) -> None:
    if write is _indices and backend == "cuda":
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(3)
    module, calls = State(), []
    twin = copy.deepcopy(module)

    def step(x: Tensor, m: State = module) -> Tensor:
        with contextlib.nullcontext() if write is _gradient else torch.no_grad():
            write(m, x)
        calls.append(1)
        if fails and len(calls) == WARMUP + 1:
            raise Explosion
        return (m.layer(x) + m.a.sum() + m.b).detach()

    before = photograph(module)
    with pytest.raises(CaptureError, match="Explosion") if fails else contextlib.nullcontext():
        graphed = capture(step, (inputs(),), backend=backend)
    assert_same(before, photograph(module))
    if not fails:
        for seed in range(3):
            torch.manual_seed(seed)
            mine = graphed(inputs() * seed)
            torch.manual_seed(seed)
            assert torch.equal(mine, step(inputs() * seed, twin))
            for (name, a), b in zip(module.state_dict().items(), twin.state_dict().values(), strict=True):
                assert torch.equal(a, b), name


OPTIMIZERS: dict[str, Callable[[Any, bool], torch.optim.Optimizer]] = {
    "sgd": lambda p, gpu: torch.optim.SGD(p, 0.1, weight_decay=0.1),
    "sgd foreach": lambda p, gpu: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p, gpu: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "sgd nesterov": lambda p, gpu: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=False),
    "adam": lambda p, gpu: torch.optim.Adam(p, 0.1, fused=True, capturable=True, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p, gpu: torch.optim.AdamW(p, 0.1, fused=True, capturable=True, weight_decay=0.1),
    "adamw tensor lr": lambda p, gpu: torch.optim.AdamW(p, torch.tensor(0.1), fused=True, capturable=True),
    "rmsprop": lambda p, gpu: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True, capturable=gpu),
    "adadelta": lambda p, gpu: torch.optim.Adadelta(p, 0.1, weight_decay=0.1, capturable=gpu),
    "rprop": lambda p, gpu: torch.optim.Rprop(p, 0.1, capturable=gpu),
    "adagrad": lambda p, gpu: torch.optim.Adagrad(p, 0.1, fused=True, lr_decay=0.1, initial_accumulator_value=0.5),
    "nadam": lambda p, gpu: torch.optim.NAdam(p, 0.1, capturable=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("primed", [False, True])
def test_optimizer_steps_are_rolled_back_and_replayed(
    backend: str, device: torch.device, name: str, primed: bool
) -> None:
    gpu = backend == "cuda"
    if name == ("adagrad" if gpu else "nadam"):
        pytest.skip("PyTorch has no implementation that reads nothing on the host here")
    x = inputs()

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Tensor], Tensor]]:
        torch.manual_seed(1)
        layer = nn.Linear(4, 3)
        optimizer = OPTIMIZERS[name](layer.parameters(), gpu)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return layer, optimizer, step

    (mine, optimizer, step), (twin, _, twin_step) = make(), make()
    if primed:
        step(x), twin_step(x)
    before = photograph(mine, optimizer)
    graphed = capture(step, (x,), backend=backend)
    assert_same(before, photograph(mine, optimizer), apart_from=() if primed else ("state",))
    for i in range(4):
        assert torch.equal(graphed(x + i), twin_step(x + i)), f"loss of step {i}"
        for a, b in zip(mine.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b), f"parameters after step {i}"


def test_dampening_is_refused_before_the_first_step(backend: str, device: torch.device) -> None:
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9, dampening=0.5)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    before = photograph(layer, optimizer)
    with pytest.raises(CaptureError, match="dampening"):
        capture(step, (inputs(),), backend=backend)
    assert_same(before, photograph(layer, optimizer))
    step(inputs())
    capture(step, (inputs(),), backend=backend)


class CountingOptimizer(torch.optim.Optimizer):
    """Keeps its step count as a Python number, as many hand-written optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            parameter.sub_(parameter.grad, alpha=0.1 / state["step"])


# Rebinding registered state: no operation writes it, so a capture must refuse it, or restore and replay it correctly.


def _rebind_buffer(m: State, x: Tensor) -> None:
    m.b = m.b * 0.9 + x.mean(0)


def _rebind_data(m: State, x: Tensor) -> None:
    m.layer.weight.data = m.layer.weight.data * 0.9


def _rebind_buffer_data(m: State, x: Tensor) -> None:
    m.b.data = m.b.data * 0.9 + 1


def _rebind_gradient(m: State, x: Tensor) -> None:
    with torch.enable_grad():
        m.layer(x).sum().backward()
    m.layer.weight.grad = m.layer.weight.grad * 2


def _rebind_attribute(m: State, x: Tensor) -> None:
    m.cache = x.mean(0) if m.cache is None else m.cache * 0.5 + x.mean(0)
    m.b.copy_(m.cache)


def _lazy_buffer(m: State, x: Tensor) -> None:
    if m.cache is None:
        m.cache = torch.zeros(4)
    m.cache.add_(x.mean(0))
    m.b.copy_(m.cache)


def _lazy_constant(m: State, x: Tensor) -> None:
    if m.cache is None:
        m.cache = torch.arange(4.0)
    m.b.add_(m.cache)


def _lazy_from_input(m: State, x: Tensor) -> None:
    if m.cache is None:
        m.cache = x.mean(0).clone()
    m.b.copy_(m.cache.add_(1))


def _count_in_optimizer(m: State, x: Tensor) -> None:
    if m.cache is None:
        m.cache = CountingOptimizer(m.layer.parameters())
    m.layer.zero_grad()
    with torch.enable_grad():
        m.layer(x).sum().backward()
    m.cache.step()


REBINDS = [
    _rebind_buffer, _rebind_data, _rebind_buffer_data, _rebind_gradient, _rebind_attribute, _lazy_buffer,
    _lazy_constant, _lazy_from_input, _count_in_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("write", REBINDS)
def test_rebound_state_raises_or_is_correct(
    backend: str, device: torch.device, write: Callable[[State, Tensor], None]
) -> None:
    torch.manual_seed(3)
    module = State()
    twin = copy.deepcopy(module)
    if write is _count_in_optimizer:
        module.cache, twin.cache = (CountingOptimizer(m.layer.parameters()) for m in (module, twin))

    @torch.no_grad()
    def step(x: Tensor, m: State = module) -> Tensor:
        write(m, x)
        return m.layer(x) + m.b

    before = photograph(module, module.cache if write is _count_in_optimizer else None)
    try:
        graphed = capture(step, (inputs(),), backend=backend)
    except CaptureError:
        after = photograph(module, module.cache if write is _count_in_optimizer else None)
        assert_same(before, after, apart_from=("attributes of ''",))
        return
    assert_same(before, photograph(module), apart_from=("attributes of ''", "state"))
    for i in range(3):
        assert torch.equal(graphed(inputs() * i), step(inputs() * i, twin)), f"call {i}"
        for (name, a), b in zip(module.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b), f"{name} after call {i}"
            assert (a.grad is None) == (b.grad is None), name
            assert a.grad is None or torch.equal(a.grad, b.grad), f"gradient of {name} after call {i}"


def _freeze(m: State) -> None:
    m.layer.weight.requires_grad_(False)


def _evaluate(m: State) -> None:
    m.eval()


def _hook(m: State) -> None:
    m.layer.register_forward_hook(lambda *_: None)


def _tensor_hook(m: State) -> None:
    m.layer.weight.register_hook(lambda g: None)


def _register(m: State) -> None:
    m.register_buffer("late", torch.ones(1))


def _replace_parameter(m: State) -> None:
    m.layer.weight = nn.Parameter(m.layer.weight.detach() * 2)


def _grad_mode(m: State) -> None:
    torch.set_grad_enabled(False)


def _collector(m: State) -> None:
    gc.disable()


@pytest.mark.parametrize(
    "change", [_freeze, _evaluate, _hook, _tensor_hook, _register, _replace_parameter, _grad_mode, _collector]
)
@pytest.mark.parametrize("fails", [False, True])
def test_side_effects_of_the_function_do_not_outlive_its_capture(
    backend: str, device: torch.device, change: Callable[[State], None], fails: bool
) -> None:
    module, calls = State(), []

    def step(x: Tensor) -> Tensor:
        change(module)
        calls.append(1)
        if fails and len(calls) == WARMUP:
            raise Explosion
        return module.layer(x).detach()

    before = photograph(module)
    try:
        with contextlib.suppress(CaptureError):
            capture(step, (inputs(),), backend=backend)
        after = photograph(module)
    finally:
        torch.set_grad_enabled(True)
        gc.enable()
    assert_same(before, after)


@pytest.mark.filterwarnings("ignore")
def test_a_script_module_elsewhere_in_the_process_does_not_matter() -> None:
    script = torch.jit.script(nn.Linear(4, 4))
    graph = capture(lambda x: x * 2, (torch.ones(2),))
    assert torch.equal(graph(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(CaptureError):
        capture(lambda x: x * x.sum().item(), (torch.ones(2),))
    assert script(torch.ones(4)).shape == (4,)
