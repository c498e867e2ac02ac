"""Bindings: a change of the program after capture is followed exactly, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import GraphPool, StaleGraph, capture, make_graphed_callables


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def optimizers(kind: str) -> Callable[[Any], torch.optim.Optimizer]:
    return {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
        "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True, capturable=True),
        "adamw, tensor lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1), fused=True, capturable=True),
    }[kind]


class Program:
    """A model, an optimizer and one training step over them, with or without its own zero_grad."""

    def __init__(self, kind: str = "sgd", zero: bool | None = None, steps: bool = True) -> None:
        self.model = Model()
        self.optimizer = optimizers(kind)(self.model.parameters())
        self.zero, self.steps = zero, steps

    def step(self, x: Tensor) -> Tensor:
        if self.zero is not None:
            self.optimizer.zero_grad(set_to_none=self.zero)
        loss = self.model(x).square().mean()
        loss.backward()
        if self.steps:
            self.optimizer.step()
        return loss


def twins(*args: Any, backend: str, **options: Any) -> tuple[Program, Program, Any]:
    """Two equal programs, and the captured step of the first one."""
    program = Program(*args)
    twin = copy.deepcopy(program)
    return program, twin, capture(program.step, (torch.randn(3, 4),), backend=backend, **options)


def assert_equal(program: Program, twin: Program) -> None:
    left, right = program.model.state_dict(), twin.model.state_dict()
    assert all(torch.equal(left[key], right[key]) for key in left)
    for p, q in zip(program.model.parameters(), twin.model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    states = (list(program.optimizer.state.values()), list(twin.optimizer.state.values()))
    for mine, theirs in zip(*states, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(
            torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k])) for k in mine if mine[k] is not None
        )


def run(program: Program, graphed: Any, twin: Program) -> None:
    """Run one replay and one eager step from the same random state; afterwards everything is equal."""
    x, seed = torch.randn(3, 4), int(torch.randint(1 << 30, ()))
    torch.manual_seed(seed)
    loss = graphed(x).clone()
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    assert torch.equal(loss, twin.step(x))
    assert torch.equal(torch.get_rng_state(), after)
    assert_equal(program, twin)


def followed_or_refused(program: Program, graphed: Any, twin: Program, reason: str) -> None:
    """After the same change to both: the replay does what eager does, or raises StaleGraph and changes nothing."""
    before = copy.deepcopy([*program.model.state_dict().values()])
    grads = [p.grad if p.grad is None else p.grad.clone() for p in program.model.parameters()]
    try:
        run(program, graphed, twin)
    except StaleGraph as error:
        refused = str(error)
    else:
        return
    assert reason in refused
    assert all(map(torch.equal, before, program.model.state_dict().values()))
    for value, p in zip(grads, program.model.parameters(), strict=True):
        assert (value is None) == (p.grad is None)
        assert value is None or torch.equal(value, p.grad)


# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZERS = pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "adamw, tensor lr"])


@pytest.mark.parametrize(
    ("kind", "zero"),
    [("sgd", None), ("sgd", False), ("momentum", True), ("adamw", None), ("adamw, tensor lr", True)],
)
def test_a_captured_step_is_eagers_step(backend: str, device: torch.device, kind: str, zero: bool | None) -> None:
    program, twin, graphed = twins(kind, zero, backend=backend)
    assert all(p.grad is None for p in program.model.parameters())
    for _ in range(3):
        run(program, graphed, twin)


@OPTIMIZERS
def test_a_learning_rate_changed_after_capture(backend: str, device: torch.device, kind: str) -> None:
    program, twin, graphed = twins(kind, True, backend=backend)
    run(program, graphed, twin)
    for p in (program, twin):
        lr = p.optimizer.param_groups[0]["lr"]
        p.optimizer.param_groups[0]["lr"] = lr.fill_(0.5) if isinstance(lr, Tensor) else 0.5
    followed_or_refused(program, graphed, twin, "['lr'] was 0.1 at capture and is 0.5 now")
    for p in (program, twin):
        lr = p.optimizer.param_groups[0]["lr"]
        p.optimizer.param_groups[0]["lr"] = lr.fill_(0.1) if isinstance(lr, Tensor) else 0.1
    run(program, graphed, twin)  # put back: fits again


@pytest.mark.parametrize(
    ("kind", "then"),
    [("sgd", "nothing"), ("sgd", "another rate in it"), ("sgd", "another rate later"), ("momentum", "nothing"),
     ("adamw", "nothing"), ("adamw, tensor lr", "another rate in it")],
)  # fmt: skip
def test_an_optimizer_state_loaded_after_capture(backend: str, device: torch.device, kind: str, then: str) -> None:
    program, twin, graphed = twins(kind, True, backend=backend)
    run(program, graphed, twin)
    state = copy.deepcopy(twin.optimizer.state_dict())
    for entry in state["state"].values():
        for value in entry.values():
            if isinstance(value, Tensor):
                value.add_(1)
    if then == "another rate in it":
        state["param_groups"][0]["lr"] = state["param_groups"][0]["lr"] * 5
    for p in (program, twin):
        p.optimizer.load_state_dict(copy.deepcopy(state))
        if then == "another rate later":
            p.optimizer.param_groups[0]["lr"] = p.optimizer.param_groups[0]["lr"] * 5
    followed_or_refused(program, graphed, twin, "")


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_parameter_group_added_after_capture(backend: str, device: torch.device, kind: str) -> None:
    program, twin, graphed = twins(kind, False, backend=backend)
    run(program, graphed, twin)
    extras = []
    for p in (program, twin):
        extras.append(nn.Parameter(torch.ones(3)))
        extras[-1].grad = torch.ones(3)
        p.optimizer.add_param_group({"params": [extras[-1]], "lr": 0.1})
    x, seed = torch.randn(3, 4), 1
    torch.manual_seed(seed)
    try:
        graphed(x)
    except StaleGraph:
        return
    torch.manual_seed(seed)
    extras[1].grad = torch.ones(3)
    twin.step(x)
    assert torch.equal(*extras)


def test_a_hyper_parameter_changed_after_capture(backend: str, device: torch.device) -> None:
    program, twin, graphed = twins("momentum", True, backend=backend)
    for p in (program, twin):
        p.optimizer.param_groups[0]["momentum"] = 0.5
    followed_or_refused(program, graphed, twin, "'momentum'")


def test_eager_policy_follows_every_change(backend: str, device: torch.device) -> None:
    program, twin, graphed = twins("adamw", True, backend=backend, on_mismatch="eager")
    run(program, graphed, twin)
    state = copy.deepcopy(twin.optimizer.state_dict())
    for p in (program, twin):
        p.optimizer.load_state_dict(copy.deepcopy(state))
        p.optimizer.param_groups[0]["lr"] = 0.5
    run(program, graphed, twin)
    assert graphed.record.eager_runs.total() == 1


def test_recapture_policy_follows_every_change(backend: str, device: torch.device) -> None:
    program, twin, graphed = twins("adamw", True, backend=backend, on_mismatch="recapture")
    for rate in (0.1, 0.5, 0.5, 0.2):
        for p in (program, twin):
            p.optimizer.param_groups[0]["lr"] = rate
        run(program, graphed, twin)
    assert graphed.record.captures == 3
    assert graphed.record.replays == 4
    assert not graphed.record.eager_runs


# -- parameters and modules ------------------------------------------------------------------------


def _freeze(program: Program) -> None:
    program.model.first.weight.requires_grad_(False)


def _eval(program: Program) -> None:
    program.model.eval()


def _eval_sub_module(program: Program) -> None:
    program.model.norm.eval()


def _eval_without_tensors(program: Program) -> None:
    program.model.drop.eval()


def _buffer(program: Program) -> None:
    program.model.norm.running_mean = torch.ones(8)


def _module(program: Program) -> None:
    program.model.last = copy.deepcopy(program.model.last)
    program.model.last.weight.data.mul_(2)


def _module_without_tensors(program: Program) -> None:
    program.model.drop = nn.Identity()


def _data(program: Program) -> None:
    program.model.last.bias.data = program.model.last.bias.data * 2


def _remove_parameter(program: Program) -> None:
    program.model.last.bias = None


CHANGES = pytest.mark.parametrize(
    "change",
    [_freeze, _eval, _eval_sub_module, _eval_without_tensors, _buffer, _module, _module_without_tensors, _data,
     _remove_parameter],
)  # fmt: skip


@CHANGES
def test_a_captured_step_after_a_change(backend: str, device: torch.device, change: Callable[[Program], None]) -> None:
    program, twin, graphed = twins("sgd", True, backend=backend)
    run(program, graphed, twin)
    for p in (program, twin):
        change(p)
    followed_or_refused(program, graphed, twin, "")


@CHANGES
@pytest.mark.parametrize("target", ["module", "function"])
def test_a_graphed_callable_after_a_change(
    backend: str, device: torch.device, change: Callable[[Program], None], target: str
) -> None:
    program = Program("sgd", None)
    twin = copy.deepcopy(program)
    if target == "module":
        make_graphed_callables(program.model, (torch.randn(3, 4),), backend=backend)
    else:
        inner = program.model
        program.model = make_graphed_callables(lambda x: inner(x), (torch.randn(3, 4),), backend=backend)
        program.model.state_dict, program.model.parameters = inner.state_dict, inner.parameters
    run(program, program.step, twin)
    if target == "function":
        outer, program.model = program.model, inner
        change(program)
        program.model = outer
    else:
        change(program)
    change(twin)
    followed_or_refused(program, program.step, twin, "")


def test_training_mode_toggled_and_toggled_back(backend: str, device: torch.device) -> None:
    pool, model, x = GraphPool(), Model(), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    make_graphed_callables(model, (torch.randn(3, 4),), pool=pool, backend=backend)
    for training in (True, False, False, True):
        for m in (model, twin):
            m.train(training)
        rows = x if training else x[:1]  # the other mode takes whatever the original takes
        torch.manual_seed(1)
        out = model(rows)
        torch.manual_seed(1)
        expected = twin(rows)
        assert torch.equal(out, expected)
        out.sum().backward()
        expected.sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    record = pool.report().graphs[0]
    assert record.replays == 2
    assert record.eager_runs == {"called in the other training mode": 2}


# -- lists of modules ------------------------------------------------------------------------------


class Towers(nn.Module):
    """Lists and dictionaries of modules: run completely, nested, run in part, empty, and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.pairs = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Tanh()]) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.adapters = nn.ModuleList()
        self.spare = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for linear, activation in self.pairs:
            x = activation(linear(x))
        for adapter in self.adapters:
            x = x + adapter(x)
        return self.tail(self.heads["a"](x))


def _linear() -> nn.Linear:
    with torch.no_grad():
        layer = nn.Linear(4, 4)
        layer.weight.fill_(0.5)
    return layer


LIST_CHANGES: dict[str, Callable[[Towers], object]] = {
    "replaced": lambda m: m.layers.__setitem__(1, _linear()),
    "replaced by one without weights": lambda m: m.layers.__setitem__(1, nn.Tanh()),
    "appended": lambda m: m.layers.append(_linear()),
    "extended": lambda m: m.layers.extend([nn.Tanh()]),
    "inserted": lambda m: m.layers.insert(0, nn.Tanh()),
    "deleted": lambda m: m.layers.__delitem__(0),
    "nested replaced": lambda m: m.pairs[1].__setitem__(1, nn.ReLU()),
    "nested appended": lambda m: m.pairs.append(nn.ModuleList([_linear(), nn.ReLU()])),
    "sequential replaced": lambda m: m.tail.__setitem__(1, nn.Tanh()),
    "sequential appended": lambda m: m.tail.append(_linear()),
    "sequential cut": lambda m: m.tail.__delitem__(1),
    "chosen replaced": lambda m: m.heads.update({"a": _linear()}),
    "the list itself": lambda m: setattr(m, "layers", nn.ModuleList([_linear()])),
    "the first adapter": lambda m: m.adapters.append(_linear()),
}
TARGETS = pytest.mark.parametrize("target", ["callable", "module", "function"])


def towers(target: str, backend: str) -> tuple[Towers, Any]:
    model, sample = Towers(), (torch.randn(3, 4),)
    if target == "callable":
        return model, make_graphed_callables(model, sample, allow_unused_input=True, backend=backend)
    return model, capture(model if target == "module" else lambda x: model(x), sample, backend=backend)


@TARGETS
@pytest.mark.parametrize("change", LIST_CHANGES)
def test_a_changed_list_of_modules_is_found(backend: str, device: torch.device, target: str, change: str) -> None:
    model, graphed = towers(target, backend)
    eager = copy.deepcopy(model)
    x = torch.randn(3, 4)
    assert torch.equal(graphed(x), eager(x))
    LIST_CHANGES[change](model)
    with pytest.raises(StaleGraph, match=r"ModuleList|ModuleDict|Sequential|Towers"):
        graphed(x)


@TARGETS
def test_modules_that_a_graph_does_not_run_may_come_and_go(backend: str, device: torch.device, target: str) -> None:
    model, graphed = towers(target, backend)
    eager = copy.deepcopy(model)
    x = torch.randn(3, 4)
    model.critic = nn.Linear(4, 1)
    model.spare.append(nn.Linear(4, 4))
    model.heads["c"] = nn.Linear(4, 4)
    model.layers[0].note = nn.Identity()
    assert torch.equal(graphed(x), eager(x))
    del model.critic
    assert torch.equal(graphed(x), eager(x))


def test_a_list_that_a_function_goes_through_is_found(backend: str, device: torch.device) -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    x = torch.randn(3, 4)
    graphed = capture(run, (x,), backend=backend)
    assert torch.equal(graphed(x), run(x))
    layers.append(nn.Linear(4, 4))
    with pytest.raises(StaleGraph, match=r"2 \(Linear\) was added to a ModuleList"):
        graphed(x)


def test_layers_graphed_one_by_one_accept_a_new_layer(backend: str, device: torch.device) -> None:
    layers, x = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), torch.randn(3, 4)
    eager = copy.deepcopy(layers)
    make_graphed_callables(tuple(layers), ((x,), (x,)), backend=backend)
    layers.append(nn.Linear(4, 4))
    layers[0] = nn.Linear(4, 4)
    assert torch.equal(layers[1](x), eager[1](x))


# -- the names by which a function reaches what it runs --------------------------------------------


class Trainer:
    """Not a module: an object with a tensor and a model, of which it runs parts."""

    def __init__(self) -> None:
        self.model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "heads": nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])})
        self.scale = torch.full((4,), 2.0)
        self.parts = {"bias": torch.ones(4)}
        self.last = torch.zeros(4)

    def run(self, x: Tensor) -> Tensor:
        self.last = self.scale  # assigned here: not bound by the graph
        x = self.model.encoder(x) * self.scale + self.parts["bias"]
        for head in self.model.heads:
            x = head(x)
        return x + GLOBAL["tensor"]


GLOBAL: dict[str, Any] = {}

RENAMED: dict[str, Callable[[Trainer], object]] = {
    "the model": lambda t: setattr(t, "model", copy.deepcopy(t.model)),
    "a part": lambda t: setattr(t.model, "encoder", nn.Linear(4, 4)),
    "a list": lambda t: setattr(t.model, "heads", nn.ModuleList([nn.Tanh()])),
    "an entry": lambda t: t.model.heads.__setitem__(0, nn.Linear(4, 4)),
    "a tensor": lambda t: setattr(t, "scale", torch.ones(4)),
    "a tensor in a dictionary": lambda t: t.parts.update(bias=torch.zeros(4)),
    "a global tensor": lambda t: GLOBAL.update(tensor=torch.full((4,), 7.0)),
}


@pytest.mark.parametrize("how", ["callable", "capture", "function"])
@pytest.mark.parametrize("change", RENAMED)
def test_a_name_that_a_function_reads_is_followed(backend: str, device: torch.device, how: str, change: str) -> None:
    trainer, x = Trainer(), torch.randn(3, 4)
    GLOBAL["tensor"] = torch.ones(4)
    target = (lambda x: trainer.run(x)) if how == "function" else trainer.run
    graphed = (make_graphed_callables if how == "callable" else capture)(target, (x,), backend=backend)
    trainer.last = torch.ones(4)
    trainer.steps = 5
    trainer.parts["other"] = torch.zeros(4)
    assert torch.equal(graphed(x), trainer.run(x))
    RENAMED[change](trainer)
    with pytest.raises(StaleGraph):
        graphed(x)


def test_a_name_may_be_deleted(backend: str, device: torch.device) -> None:
    """The graph keeps what it read; the function itself could no longer run."""
    trainer, x = Trainer(), torch.randn(3, 4)
    GLOBAL["tensor"] = torch.ones(4)
    graphed, expected = capture(trainer.run, (x,), backend=backend), trainer.run(x)
    del trainer.scale, trainer.parts["bias"], trainer.model
    GLOBAL.clear()
    assert torch.equal(graphed(x), expected)
    trainer.scale = torch.zeros(4)
    with pytest.raises(StaleGraph, match=r"self\.scale \(read at .*test_binding\.py:\d+\) was replaced"):
        graphed(x)


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
def test_a_constant_of_a_module_is_found(backend: str, device: torch.device, name: str, how: str) -> None:
    make, attribute, value = BUILT_IN[name]
    MASKS[0] = torch.ones(())
    model, x = nn.Sequential(nn.Linear(4, 4), make()), torch.randn(3, 4)
    graphed = (make_graphed_callables if how == "callable" else capture)(model, (x,), backend=backend)
    before = getattr(model[1], attribute)
    setattr(model[1], attribute, value)
    with pytest.raises(StaleGraph, match=rf"{type(model[1]).__name__}\.{attribute} was {before!r} .* {value!r} now"):
        graphed(x)
    setattr(model[1], attribute, before)
    graphed(x)  # put back: fits again


def test_a_dropout_probability_does_not_matter_in_eval_mode(backend: str, device: torch.device) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval(), torch.randn(3, 4)
    graphed = capture(model, (x,), backend=backend)
    model[1].p, model[2].momentum = 0.1, 0.9
    assert torch.equal(graphed(x), model(x))


@pytest.mark.parametrize("how", ["callable", "capture", "method"])
def test_a_tensor_in_a_plain_attribute_is_found(backend: str, device: torch.device, how: str) -> None:
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
def test_a_hook_added_inside_a_graph_is_found(backend: str, device: torch.device, kind: str, how: str) -> None:
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
def test_a_tensor_hook_added_inside_a_captured_step_is_found(backend: str, device: torch.device, kind: str) -> None:
    program, _, graphed = twins("sgd", True, backend=backend)
    handle = getattr(program.model.last.weight, kind)(lambda gradient: None)
    with pytest.raises(StaleGraph, match=r"tensor hook .* was added to Linear\.weight"):
        graphed(torch.randn(3, 4))
    handle.remove()
    graphed(torch.randn(3, 4))


# -- optimizers of the program's own ---------------------------------------------------------------


class Sign(torch.optim.Optimizer):
    """An optimizer with its rate and a tensor in plain attributes, which counts its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.rate, self.decay, self.steps, self.tokens_seen = 0.1, torch.tensor(0.9), 0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(self.decay).sub_(p.grad.sign() * self.rate)


def signed(backend: str) -> tuple[Program, Program, Any]:
    program = Program("sgd", True)
    program.optimizer = Sign(program.model.parameters())
    twin = copy.deepcopy(program)
    twin.optimizer = Sign(twin.model.parameters())
    return program, twin, capture(program.step, (torch.randn(3, 4),), backend=backend)


def test_attributes_of_a_custom_optimizer(backend: str, device: torch.device) -> None:
    program, twin, graphed = signed(backend)
    run(program, graphed, twin)
    program.optimizer.tokens_seen += 100
    program.optimizer.steps += 1
    program.optimizer.decay.fill_(0.8)
    twin.optimizer.decay.fill_(0.8)
    run(program, graphed, twin)
    program.optimizer.rate = 0.5
    with pytest.raises(StaleGraph, match=r"Sign\.rate was 0\.1 at capture and is 0\.5 now"):
        graphed(torch.randn(3, 4))
    program.optimizer.rate = 0.1
    program.optimizer.decay = torch.tensor(0.5)
    with pytest.raises(StaleGraph, match=r"Sign\.decay was replaced"):
        graphed(torch.randn(3, 4))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("change", ["appended", "removed", "replaced"])
def test_parameters_of_a_group_changed_in_place(backend: str, device: torch.device, kind: str, change: str) -> None:
    program, twin, graphed = twins(kind, True, backend=backend)
    run(program, graphed, twin)
    entries = program.optimizer.param_groups[0]["params"]
    if change == "appended":
        entries.append(nn.Parameter(torch.ones(3)))
    elif change == "removed":
        entries.pop()
    else:
        entries[0] = nn.Parameter(torch.ones_like(entries[0]))
    with pytest.raises(StaleGraph, match=r"the entries of .*param_groups\[0\]\['params'\] changed since capture"):
        graphed(torch.randn(3, 4))


def test_a_hook_added_to_an_optimizer_is_found(backend: str, device: torch.device) -> None:
    program, twin, graphed = twins("sgd", True, backend=backend)
    run(program, graphed, twin)
    program.optimizer.register_step_post_hook(lambda *args: None)
    with pytest.raises(StaleGraph, match=r"step post hook .* was added to SGD"):
        graphed(torch.randn(3, 4))


# -- gradients of a captured function --------------------------------------------------------------


@pytest.mark.parametrize("at_capture", ["none", "existing"])
def test_gradients_in_every_state_equal_eagers(backend: str, device: torch.device, at_capture: str) -> None:
    program = Program("sgd", None, False)
    if at_capture == "existing":
        for p in program.model.parameters():
            p.grad = torch.full_like(p, 0.25)
    twin = copy.deepcopy(program)
    for p, q in zip(program.model.parameters(), twin.model.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    graphed = capture(program.step, (torch.randn(3, 4),), backend=backend)
    assert_equal(program, twin)
    run(program, graphed, twin)
    run(program, graphed, twin)  # accumulates
    for set_to_none in (True, False, True):
        for p in (program, twin):
            p.optimizer.zero_grad(set_to_none=set_to_none)
        run(program, graphed, twin)
    for p in (program, twin):  # some None, some not
        p.model.first.weight.grad = None
        p.model.last.bias.grad.mul_(3)
    run(program, graphed, twin)


@pytest.mark.parametrize("zero", [None, True, False])
def test_a_gradient_assigned_by_the_user(backend: str, device: torch.device, zero: bool | None) -> None:
    program, twin, graphed = twins("sgd", zero, backend=backend)
    run(program, graphed, twin)
    mine = torch.ones(8, 4)
    program.model.first.weight.grad, twin.model.first.weight.grad = mine, mine.clone()
    followed_or_refused(program, graphed, twin, "gradient of a parameter of shape (8, 4)")
    for p in (program, twin):
        p.optimizer.zero_grad(set_to_none=True)
    twin.model.load_state_dict(program.model.state_dict())
    run(program, graphed, twin)


@pytest.mark.parametrize("at_capture", ["none", "existing"])
def test_a_kept_gradient_is_not_overwritten(backend: str, device: torch.device, at_capture: str) -> None:
    """`kept = p.grad; p.grad = None; step()` does not touch `kept` in eager. A graph has one buffer, so it raises."""
    program = Program("sgd", None, False)
    if at_capture == "existing":
        for p in program.model.parameters():
            p.grad = torch.zeros_like(p)
    graphed = capture(program.step, (torch.randn(3, 4),), backend=backend)
    graphed(torch.randn(3, 4))
    kept = program.model.last.bias.grad
    value = kept.clone()
    program.optimizer.zero_grad(set_to_none=True)
    with pytest.raises(StaleGraph, match="still referenced"):
        graphed(torch.randn(3, 4))
    assert torch.equal(kept, value)
    del kept
    graphed(torch.randn(3, 4))


def test_only_the_functions_own_gradients_are_touched(backend: str, device: torch.device) -> None:
    program, bystander = Program("sgd", None, False), nn.Linear(4, 4)
    bystander.weight.grad = torch.ones(4, 4)
    program.model.first.requires_grad_(False)
    graphed = capture(program.step, (torch.randn(3, 4),), backend=backend)
    graphed(torch.randn(3, 4))
    assert torch.equal(bystander.weight.grad, torch.ones(4, 4))
    assert bystander.bias.grad is None
    assert program.model.first.weight.grad is None
    assert program.model.last.weight.grad is not None
