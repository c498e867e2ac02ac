"""A capture, failed or successful, leaves the process as it found it."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rollgraph.graph import CaptureError, GraphHooks, GraphPool, HookError, HostReadError, capture
from rollgraph.graph import make_graphed_callables as graph

WARMUP = 3
CLASSES = (nn.Module, Tensor, nn.Parameter, torch.optim.Optimizer, torch.Generator, torch.autograd.Function)


# -- photographs -----------------------------------------------------------------------------------


def raw(tensor: Tensor | None) -> Any:
    """Identity, address and bytes."""
    if tensor is None:
        return None
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return id(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.requires_grad, values


def photograph(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *generators: torch.Generator
) -> dict[str, Any]:
    """Everything in the process that a capture may not change, by name."""
    photo: dict[str, Any] = {
        "torch rng": raw(torch.get_rng_state())[-1],
        "cuda rng": [raw(s)[-1] for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else None,
        "python rng": random.getstate(),
        "numpy rng": np.random.get_state()[1].tobytes() + bytes([np.random.get_state()[2] % 256]),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "dispatch modes": [id(m) for m in _get_current_dispatch_mode_stack()],
        "function modes": [id(m) for m in torch.overrides._get_current_function_mode_stack()],
        "capturing": torch.cuda.is_current_stream_capturing() if torch.cuda.is_available() else None,
        "hooks on all modules": [len(d) for n, d in vars(nn.modules.module).items() if n.startswith("_global_")
                                 and isinstance(d, dict)],
        "trace": (sys.gettrace(), sys.getprofile()),
    }  # fmt: skip
    for kind in CLASSES:
        photo[f"class {kind.__name__}"] = {k: id(v) for k, v in vars(kind).items() if not k.startswith("__abc")}
    for index, generator in enumerate(generators):
        photo[f"generator {index}"] = raw(generator.get_state())[-1]
    for name, module in model.named_modules():
        photo[f"attributes of {name!r}"] = {k: id(v) for k, v in vars(module).items()}
        photo[f"hooks of {name!r}"] = {k: list(v) for k, v in vars(module).items() if k.endswith("hooks") and v}
        photo[f"training of {name!r}"] = module.training
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        photo[f"tensor {name}"] = raw(tensor)
        photo[f"hooks of tensor {name}"] = len(tensor._backward_hooks or {})
        photo[f"grad {name}"] = raw(tensor.grad)
    if optimizer is not None:
        for index, group in enumerate(optimizer.param_groups):
            photo[f"group {index}"] = {k: raw(v) if isinstance(v, Tensor) else repr(v) for k, v in group.items()}
        for index, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                photo[f"state {index} {key}"] = raw(value) if isinstance(value, Tensor) else value
    return photo


def assert_same(before: dict[str, Any], after: dict[str, Any], *, apart_from: tuple[str, ...] = ()) -> None:
    names = [n for n in {**before, **after} if not n.startswith(apart_from or ("nothing",))]
    assert [n for n in names if before.get(n, "absent") != after.get(n, "absent")] == []


def line_of(marker: str) -> str:
    """`file:line` of the line of this file that ends in a marker comment."""
    lines = inspect.getsource(sys.modules[__name__]).split("\n")
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# here: {marker}")]
    return f"{__file__}:{number}"


# -- something to train, that fails where it is told to --------------------------------------------


class Explosion(Exception):
    pass


class Bomb(nn.Module):
    """Passes its input through; raises in the n-th forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"forward": 0, "backward": 0}
        self.fuse: tuple[str, int] | None = None
        self.error: type[BaseException] = Explosion

    def count(self, which: str) -> bool:
        self.calls[which] += 1
        return self.fuse == (which, self.calls[which])

    def forward(self, x: Tensor) -> Tensor:
        if self.count("forward"):
            raise self.error("in forward")  # here: bomb forward
        return _Pass.apply(x, self)

    def set(self, which: str, number: int, error: type[BaseException] = Explosion) -> None:
        self.calls, self.fuse, self.error = {"forward": 0, "backward": 0}, (which, number), error


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bomb: Bomb) -> Tensor:
        ctx.bomb = bomb
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.bomb.count("backward"):
            raise ctx.bomb.error("in backward")  # here: bomb backward
        return gradient * 1, None


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), Bomb(), nn.Linear(6, 3))


class Trainer:
    """A model and its optimizer; `step` is what gets captured, `run` compares with a twin."""

    def __init__(self, device: torch.device, make: Callable[[], nn.Module] = make_model) -> None:
        self.model = make()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.05, fused=True, capturable=True, weight_decay=0.1
        )
        self.device = device

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step_outside(self, x: Tensor) -> Tensor:
        """The same with gradients that are set to None and made again, as around graphed modules."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach().clone()


def inputs(n: int = 5) -> Tensor:
    return torch.linspace(-1, 1, n * 4).view(n, 4).sin()


def run(step: Callable[[Tensor], Tensor], trainer: Trainer, steps: int, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    losses = [step(inputs() * (i + 1)).clone() for i in range(steps)]
    return [raw(t)[-1] for t in [*losses, *trainer.model.state_dict().values()]]


def assert_goes_on(trainer: Trainer, twin: Trainer, backend: str) -> None:
    """Eager training continues as if there had been no attempt; then a capture succeeds and is correct."""
    bomb = next(m for m in trainer.model.modules() if isinstance(m, Bomb))
    bomb.fuse = None
    assert run(trainer.step, trainer, 2, 11) == run(twin.step, twin, 2, 11)
    step = capture(trainer.step, (inputs(),), backend=backend)
    assert run(step, trainer, 3, 12) == run(twin.step, twin, 3, 12)
    assert step.record.replays == 3


def graph_layers(trainer: Trainer, backend: str, **options: Any) -> Any:
    """Every layer of the model as a graph of its own."""
    x, samples = inputs().requires_grad_(), []
    with torch.no_grad():
        mean, var = [b.clone() for b in (trainer.model[1].running_mean, trainer.model[1].running_var)]
        number = trainer.model[1].num_batches_tracked.clone()
        rng = torch.get_rng_state(), torch.cuda.get_rng_state_all() if x.is_cuda else None
        for layer in trainer.model:
            samples.append((x.detach().requires_grad_(),))
            x = layer(x) if not isinstance(layer, Bomb) else x
        trainer.model[1].running_mean.copy_(mean)
        trainer.model[1].running_var.copy_(var)
        trainer.model[1].num_batches_tracked.copy_(number)
        torch.set_rng_state(rng[0])
        if rng[1]:
            torch.cuda.set_rng_state_all(rng[1])
    return graph(tuple(trainer.model), tuple(samples), backend=backend, **options)


# -- success ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("primed", [False, True])
@pytest.mark.parametrize("collector", [False, True])
def test_successful_capture_changes_nothing(backend: str, device: torch.device, primed: bool, collector: bool) -> None:
    trainer, generator = Trainer(device), torch.Generator(device)
    noise = torch.zeros(5, 4)

    def step(x: Tensor) -> Tensor:
        noise.uniform_(generator=generator)
        random.random(), np.random.rand()
        return trainer.step(x + noise)

    if primed:
        step(inputs())
    (gc.enable if collector else gc.disable)()
    try:
        before = photograph(trainer.model, trainer.optimizer, generator)
        capture(step, (inputs(),), backend=backend)
        after = photograph(trainer.model, trainer.optimizer, generator)
    finally:
        gc.enable()
    assert_same(before, after, apart_from=() if primed else ("state",))
    for state in trainer.optimizer.state.values() if not primed else ():
        assert all(not value.any() for value in state.values()), "lazily created state is at its initial value"


@pytest.mark.parametrize("gradients", ["none", "present"])
def test_successful_graphing_of_modules_changes_only_their_forward(
    backend: str, device: torch.device, gradients: str
) -> None:
    trainer = Trainer(device)
    if gradients == "present":
        trainer.step(inputs())
    before = photograph(trainer.model, trainer.optimizer)
    graph_layers(trainer, backend)
    after = photograph(trainer.model, trainer.optimizer)
    for name, module in trainer.model.named_modules():
        attributes = after[f"attributes of {name!r}"]
        assert ("forward" in attributes) == (module is not trainer.model)
        attributes.pop("forward", None)
    assert_same(before, after)


def test_modes_found_on_entry_are_left_in_place(backend: str, device: torch.device) -> None:
    model = make_model().eval()
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        before = photograph(model)
        capture(model, (inputs(),), backend=backend)
        assert_same(before, photograph(model))
    with torch.inference_mode():
        before = photograph(model)
        capture(model, (inputs(),), backend=backend)
        assert_same(before, photograph(model))


# -- failure, everywhere ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("number", range(1, WARMUP + 2))
def test_function_that_fails(backend: str, device: torch.device, which: str, number: int) -> None:
    trainer, twin = Trainer(device), Trainer(device)
    trainer.model[3].set(which, number)
    before = photograph(trainer.model, trainer.optimizer)
    with pytest.raises(CaptureError) as caught:
        capture(trainer.step, (inputs(),), backend=backend, warmup=WARMUP)
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    message = str(caught.value)
    assert line_of(f"bomb {which}") in message
    assert f"Explosion: in {which}" in message
    assert ("warm-up" if number <= WARMUP else "capture") in message
    if which == "forward":
        assert "Sequential.3" in message
    assert isinstance(caught.value.__cause__, Explosion)
    assert_goes_on(trainer, twin, backend)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("number", range(1, WARMUP + 2))
def test_module_that_fails_among_others(backend: str, device: torch.device, which: str, number: int) -> None:
    trainer, twin = Trainer(device), Trainer(device)
    trainer.model[3].set(which, number)
    pool = GraphPool()
    before = photograph(trainer.model, trainer.optimizer)
    with pytest.raises(CaptureError, match=f"Explosion: in {which}") as caught:
        graph_layers(trainer, backend, pool=pool)
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    assert line_of(f"bomb {which}") in str(caught.value)
    assert "'Bomb'" in str(caught.value)
    assert pool.graphs == []
    assert pool.arena.open_intervals() == []
    assert_goes_on(trainer, twin, backend)
    trainer.model[3].fuse = None
    graph_layers(trainer, backend, pool=pool)
    assert run(trainer.step_outside, trainer, 3, 5) == run(twin.step_outside, twin, 3, 5)


@pytest.mark.parametrize("others", [1, 3])
def test_last_of_several_callables_fails(backend: str, device: torch.device, others: int) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(others)]
    trainer, twin = (Trainer(device, lambda: nn.Sequential(*copy.deepcopy(layers), Bomb())) for _ in range(2))
    trainer.model[-1].set("backward", WARMUP + 1)
    before = photograph(trainer.model)
    samples = tuple((inputs().requires_grad_(),) for _ in trainer.model)
    with pytest.raises(CaptureError, match="Explosion"):
        graph(tuple(trainer.model), samples, backend=backend)
    assert_same(before, photograph(trainer.model))
    assert_goes_on(trainer, twin, backend)


@pytest.mark.parametrize("kind", ["pre_forward", "post_forward", "pre_backward", "post_backward"])
@pytest.mark.parametrize("moment", ["warmup", "capture"])
@pytest.mark.parametrize("returns", [False, True])
def test_hook_that_fails(backend: str, device: torch.device, kind: str, moment: str, returns: bool) -> None:
    trainer, twin = Trainer(device), Trainer(device)

    def hook(*_: Any) -> Any:
        if not returns:
            raise Explosion("in hook")
        return 1

    before = photograph(trainer.model, trainer.optimizer)
    hooks = [None] * 4 + [GraphHooks(**{kind: [hook]}, when=(moment,))]
    with pytest.raises(HookError, match=kind) as caught:
        graph_layers(trainer, backend, hooks=hooks)
    assert "hook_that_fails" in str(caught.value), "names the hook"
    assert moment in str(caught.value) or returns
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    if kind.endswith("forward"):
        with pytest.raises(HookError, match=kind):
            capture(trainer.step, (inputs(),), backend=backend, hooks=GraphHooks(**{kind: [hook]}, when=(moment,)))
        assert_same(before, photograph(trainer.model, trainer.optimizer))
    if not returns:
        assert_goes_on(trainer, twin, backend)


@pytest.mark.parametrize("which", ["pre_warmup_hook", "post_warmup_hook"])
def test_warmup_hook_that_fails(backend: str, device: torch.device, which: str) -> None:
    trainer, twin = Trainer(device), Trainer(device)

    def hook(target: Any) -> None:
        if target is trainer.model[-1]:
            raise Explosion("in warm-up hook")

    before = photograph(trainer.model, trainer.optimizer)
    with pytest.raises(HookError, match=which):
        graph_layers(trainer, backend, **{which: hook})
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    assert_goes_on(trainer, twin, backend)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("number", [1, 2, WARMUP + 1])
@pytest.mark.parametrize("whole", [True, False])
def test_keyboard_interrupt(backend: str, device: torch.device, which: str, number: int, whole: bool) -> None:
    trainer, twin = Trainer(device), Trainer(device)
    trainer.model[3].set(which, number, KeyboardInterrupt)
    before = photograph(trainer.model, trainer.optimizer)
    with pytest.raises(KeyboardInterrupt):
        capture(trainer.step, (inputs(),), backend=backend) if whole else graph_layers(trainer, backend)
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    assert_goes_on(trainer, twin, backend)


@pytest.mark.parametrize("run_number", [1, 2, 3, 4, 5])
def test_optimizer_step_that_fails(backend: str, device: torch.device, run_number: int) -> None:
    """The steps are warm-up 1, the one that creates state, warm-up 2 and 3, and the recorded one."""
    trainer, twin, calls = Trainer(device), Trainer(device), []

    def explode(*_: Any) -> None:
        calls.append(1)
        if len(calls) == run_number:
            raise Explosion("in step")

    handle = trainer.optimizer.register_step_post_hook(explode)
    before = photograph(trainer.model, trainer.optimizer)
    with pytest.raises(CaptureError, match="Explosion: in step"):
        capture(trainer.step, (inputs(),), backend=backend)
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    handle.remove()
    assert_goes_on(trainer, twin, backend)


def test_host_read_inside_a_model(backend: str, device: torch.device) -> None:
    trainer, twin = Trainer(device), Trainer(device)

    class Peek(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x  # here: peek

    model = nn.Sequential(trainer.model, Peek())
    before = photograph(model, trainer.optimizer)

    def step(x: Tensor) -> Tensor:
        trainer.optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        trainer.optimizer.step()
        return loss.detach()

    with pytest.raises(HostReadError) as caught:
        capture(step, (inputs(),), backend=backend)
    message = str(caught.value)
    assert all(part in message for part in ("__bool__", "Sequential.1", line_of("peek")))
    assert_same(before, photograph(model, trainer.optimizer))
    assert_goes_on(trainer, twin, backend)


def test_host_read_in_backward(backend: str, device: torch.device) -> None:
    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * float(gradient.sum())  # here: read in backward

    layer = nn.Linear(4, 4)
    before = photograph(layer)
    with pytest.raises(HostReadError) as caught:
        graph(lambda x: Read.apply(layer(x)), (inputs(),), backend=backend)
    assert line_of("read in backward") in str(caught.value)
    assert_same(before, photograph(layer))


def test_a_failed_recapture_keeps_the_existing_graphs(backend: str, device: torch.device) -> None:
    trainer, twin = Trainer(device), Trainer(device)
    step = capture(trainer.step, (inputs(),), backend=backend, on_mismatch="recapture")
    before = photograph(trainer.model, trainer.optimizer)
    trainer.model[3].set("backward", 2)
    with pytest.raises(CaptureError, match="Explosion"):
        step(inputs(9))
    trainer.model[3].set("backward", -1)
    before["attributes of '3'"] = photograph(trainer.model)["attributes of '3'"]
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    assert run(step, trainer, 3, 3) == run(twin.step, twin, 3, 3)
    assert (step.record.captures, step.record.replays) == (1, 3)


# -- what is written is found and put back ---------------------------------------------------------


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
def test_optimizers(backend: str, device: torch.device, name: str, primed: bool) -> None:
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


def test_dampening_is_refused_until_it_ran_once(backend: str, device: torch.device) -> None:
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


# Rebinding what is registered: no operation writes it, so it must be refused, or put back and replayed right.


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
