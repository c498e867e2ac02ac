"""Bindings: a change of parameters, modules or names after capture is followed exactly, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import GraphPool, StaleGraph, capture, make_graphed_callables
from tests.graph.training_programs import Model, Program, followed_or_refused, run, twins

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
def test_a_captured_step_follows_or_refuses_a_change(
    backend: str, device: torch.device, change: Callable[[Program], None]
) -> None:
    program, twin, graphed = twins("sgd", True, backend=backend)
    run(program, graphed, twin)
    for p in (program, twin):
        change(p)
    followed_or_refused(program, graphed, twin, "")


@CHANGES
@pytest.mark.parametrize("target", ["module", "function"])
def test_a_graphed_callable_follows_or_refuses_a_change(
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


def test_the_other_training_mode_runs_eagerly(backend: str, device: torch.device) -> None:
    pool, model, x = GraphPool(), Model(), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    make_graphed_callables(model, (torch.randn(3, 4),), pool=pool, backend=backend)
    for training in (True, False, False, True):
        for m in (model, twin):
            m.train(training)
        rows = x if training else x[:1]  # in the other mode, the original runs and takes any shape
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
def test_a_changed_list_of_modules_is_refused(backend: str, device: torch.device, target: str, change: str) -> None:
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


def test_a_module_added_to_a_list_that_a_function_runs_is_refused(backend: str, device: torch.device) -> None:
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


# -- names that a function reads -------------------------------------------------------------------


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
def test_a_rebound_name_that_a_function_reads_is_refused(
    backend: str, device: torch.device, how: str, change: str
) -> None:
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
