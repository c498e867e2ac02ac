"""Any program over one pool: a call is accepted exactly if the contract allows it, and then equals eager."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn

from rollgraph.graph import GraphPool, make_graphed_callables
from rollgraph.graph.errors import MemoryInUse
from tests.graph.chains import chain, equal_gradients

ACTIONS = [*["forward"] * 5, *["backward"] * 4, "drop", "switch", "zero", "eager"]


@dataclass(eq=False)
class Pending:
    """A forward whose backward is still to come, graphed and eager."""

    graphs: list[int]  # the graphs whose intervals it keeps open, in order
    out: Tensor
    twin: Tensor
    leaf: Tensor
    twin_leaf: Tensor


class Programs(RuleBasedStateMachine):
    """Any order of forward, backward, drop, disable and enable.

    A call is accepted exactly if the contract allows it, and then equals eager bit for bit. A refused call changes
    nothing and can be repeated later.
    """

    backend: str
    pool: GraphPool | None = None
    blocks: list[nn.Module]
    twins: list[nn.Module]

    @initialize()
    def start(self) -> None:
        self.pending: list[Pending] = []
        shared = type(self)
        if shared.pool is None or shared.pool.arena.open_intervals():  # the traceback of a failure keeps outputs
            shared.pool = GraphPool()
            shared.blocks, shared.twins = chain(3, self.backend, shared.pool)
        self.switch(True)
        self.zero_grad(set_to_none=True)

    def teardown(self) -> None:
        self.pending.clear()

    def _open(self, besides: Pending | None = None) -> list[int]:
        return [i for p in self.pending if p is not besides for i in p.graphs]

    def _intervals(self) -> list[str]:
        return sorted(self.pool.arena.open_intervals())

    def _state(self) -> list[Tensor]:
        parameters = [p for b in self.blocks for p in b.parameters()]
        gradients = [torch.empty(0) if p.grad is None else p.grad.clone() for p in parameters]
        return [*gradients, *(p.out.detach().clone() for p in self.pending), torch.get_rng_state()]

    @rule(action=st.sampled_from(ACTIONS), i=st.integers(0, 2), flag=st.booleans(), choice=st.integers(0, 11))
    def act(self, action: str, i: int, flag: bool, choice: int) -> None:
        """A single weighted rule, because hypothesis omits whole rules from a run, and then little would happen."""
        if action in ("backward", "drop") and not self.pending:
            action = "forward"
        if action == "forward":
            self.forward(i, through=flag)
        elif action == "backward":
            self.backward(self.pending[choice % len(self.pending)])
        elif action == "drop":
            del self.pending[choice % len(self.pending)]
        elif action == "switch":
            self.switch(flag)
        elif action == "zero":
            self.zero_grad(set_to_none=flag)
        else:
            self.eager()

    def forward(self, i: int, through: bool) -> None:
        x = torch.randn(3, 4)
        last = self.pending[-1] if through and self.pending else None
        leaves = (last.leaf, last.twin_leaf) if last else (x.clone().requires_grad_(), x.clone().requires_grad_())
        before, intervals = self._state(), self._intervals()
        allowed = not self.on or all(j < i for j in self._open())
        try:
            out = self.blocks[i](last.out if last else leaves[0])
        except MemoryInUse:
            assert not allowed
            assert all(map(torch.equal, before, self._state()))
            assert self._intervals() == intervals
            return
        assert allowed
        twin = self.twins[i](last.twin if last else leaves[1])
        assert torch.equal(out, twin)
        if last:
            self.pending.remove(last)
        self.pending.append(Pending([*(last.graphs if last else []), *([i] if self.on else [])], out, twin, *leaves))

    def backward(self, one: Pending) -> None:
        before, intervals = self._state(), self._intervals()
        allowed = all(j < i for i in one.graphs for j in self._open(besides=one))
        try:
            one.out.square().sum().backward()
        except MemoryInUse:
            assert not allowed
            assert all(map(torch.equal, before, self._state()))
            assert self._intervals() == intervals
            return
        assert allowed
        one.twin.square().sum().backward()
        self.pending.remove(one)
        assert equal_gradients(self.blocks, self.twins)
        assert torch.equal(one.leaf.grad, one.twin_leaf.grad)

    def switch(self, on: bool) -> None:
        self.on = on
        (self.pool.enable if on else self.pool.disable)()

    def zero_grad(self, set_to_none: bool) -> None:
        for module in (*self.blocks, *self.twins):
            module.zero_grad(set_to_none=set_to_none)

    def eager(self) -> None:
        with self.pool.disabled():
            x = torch.randn(5, 4)
            for modules in (self.blocks, self.twins):
                nn.Sequential(*modules)(x).sum().backward()
        assert equal_gradients(self.blocks, self.twins)

    @invariant()
    def the_pool_knows_what_is_open(self) -> None:
        assert len(self._intervals()) == len(self._open())


def test_every_program_over_one_pool_equals_eager_or_is_refused(backend: str, device: torch.device) -> None:
    class Machine(Programs):
        pass

    Machine.backend = backend
    examples = 60 if backend != "cuda" else 12  # a capture is slow there, and the rules do not know the backend
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))


def test_large_gradients_move_during_the_backward_and_stay_exact(backend: str, device: torch.device) -> None:
    """Gradients above a MiB move inside the backward itself: one used twice, one of an input, and a small one."""
    model = nn.ModuleDict({"shared": nn.Linear(600, 600), "last": nn.Linear(600, 8)})

    def forward(x: Tensor) -> Tensor:
        return model["last"](model["shared"](model["shared"](x).tanh()))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    module = Model()
    x = torch.randn(600, 600, requires_grad=True)
    forward(x).square().sum().backward()
    leaves = [x, *model.parameters()]
    expected = [leaf.grad for leaf in leaves]
    make_graphed_callables(module, (x.detach().clone().requires_grad_(),), backend=backend)
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        module(x).square().sum().backward()
        assert all(torch.equal(leaf.grad, e) for leaf, e in zip(leaves, expected, strict=True))
        assert not any(leaf._backward_hooks for leaf in leaves)
