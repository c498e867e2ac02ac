"""A training program and its twin: a model, an optimizer, and a step that is captured or eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph import StaleGraph, capture


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
