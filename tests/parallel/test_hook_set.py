"""HookSet: its state table, and its hooks on a module tree that changes."""

from __future__ import annotations

import copy
import pickle
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn

from rollgraph.graph import GraphPool, capture, make_graphed_callables
from rollgraph.parallel.data.hooks import TRANSITIONS, HookSet, HookState


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Tree(nn.Module):
    def __init__(self, leaves: int = 2) -> None:
        super().__init__()
        self.leaves = nn.ModuleDict({f"leaf{i}": Leaf() for i in range(leaves)})

    def forward(self, x: Tensor) -> Tensor:
        for leaf in self.leaves.values():
            x = leaf(x)
        return x


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def counting(calls: list[nn.Module]) -> Any:
    """Choose a hook for each leaf that records its calls."""

    def choose(name: str, module: nn.Module) -> dict[Any, Any]:
        return {"forward_pre": lambda m, args: calls.append(m)} if isinstance(module, Leaf) else {}

    return choose


def leaves(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, Leaf)]


def handles_on(module: nn.Module) -> int:
    return len(module._forward_pre_hooks)


def test_the_state_table_is_complete_and_idempotent() -> None:
    for call, row in TRANSITIONS.items():
        assert set(row) == set(HookState)
        assert all(row[row[state]] is row[state] for state in HookState), call
    paused = {HookState.PAUSED_OFF, HookState.PAUSED_ON}
    assert set(TRANSITIONS["pause"].values()) == paused
    for call in ("enable", "disable"):  # neither ends a pause
        assert all((TRANSITIONS[call][state] in paused) == (state in paused) for state in HookState)


class Program(RuleBasedStateMachine):
    """Any sequence of calls, tree changes and passes, compared with a reference of one flag and a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.calls: list[nn.Module] = []
        self.hooks = HookSet(self.tree, counting(self.calls))
        self.on = False
        self.stack: list[tuple[ExitStack, bool]] = []
        self.covered: set[nn.Module] = set()
        self.seen = set(leaves(self.tree))
        self.names = 100
        self.pool = GraphPool()

    def update_expected(self) -> None:
        """Hooks have just been registered or removed."""
        self.covered = set(leaves(self.tree)) if self.on and not self.stack else set()
        self.seen |= set(leaves(self.tree))

    @rule()
    def enable(self) -> None:
        self.on = True
        self.hooks.enable()
        self.update_expected()

    @rule()
    def disable(self) -> None:
        self.on = False
        self.hooks.disable()
        self.update_expected()

    @rule()
    def pause(self) -> None:
        stack = ExitStack()
        stack.enter_context(self.hooks.paused())
        self.stack.append((stack, self.on))
        self.update_expected()

    @precondition(lambda self: self.stack)
    @rule(raises=st.booleans())
    def resume(self, raises: bool) -> None:
        stack, self.on = self.stack.pop()
        if raises:
            with pytest.raises(ZeroDivisionError), stack:
                _ = 1 / 0
        else:
            stack.close()
        self.update_expected()

    @rule()
    def add(self) -> None:
        self.names += 1
        self.tree.leaves[f"leaf{self.names}"] = Leaf()
        self.seen |= set(leaves(self.tree))

    @precondition(lambda self: len(self.tree.leaves) > 1)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        del self.tree.leaves[data.draw(st.sampled_from(sorted(self.tree.leaves)))]

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        self.tree.leaves[data.draw(st.sampled_from(sorted(self.tree.leaves)))] = Leaf()
        self.seen |= set(leaves(self.tree))

    @rule(data=st.data())
    def wrap(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tree.leaves)))
        self.tree.leaves[name] = Wrapper(self.tree.leaves[name])

    @rule()
    def train(self) -> None:
        self.calls.clear()
        self.tree(torch.ones(2)).sum().backward()
        expected = [leaf for leaf in leaves(self.tree) if leaf in self.covered]
        assert sorted(map(id, self.calls)) == sorted(map(id, expected))

    @rule()
    def generate(self) -> None:
        """Run a captured forward over the same parameters with paused hooks, as generation does."""
        before = self.hooks.state
        with self.hooks.paused(), torch.no_grad():
            self.calls.clear()
            graph = capture(lambda x: self.tree(x), (torch.ones(2),), pool=self.pool, warmup=1)
            graph(torch.ones(2))
            assert not self.calls
        assert self.hooks.state is before
        self.pool.reset()
        self.update_expected()

    @rule()
    def swap(self) -> None:
        with torch.no_grad():
            for parameter in self.tree.parameters():
                parameter.copy_(torch.rand(2))

    @rule()
    def copy_has_no_hook(self) -> None:
        self.calls.clear()
        copy.deepcopy(self.tree)(torch.ones(2))
        assert not self.calls

    @invariant()
    def exactly_the_covered_modules_have_a_handle(self) -> None:
        for leaf in self.seen:
            assert handles_on(leaf) == (leaf in self.covered)
        assert self.hooks.modules == self.covered
        assert self.hooks.state.value == ("paused, " * bool(self.stack)) + ("on" if self.on else "off")

    def teardown(self) -> None:
        while self.stack:
            self.stack.pop()[0].close()
        self.hooks.disable()
        assert not any(map(handles_on, self.seen))


def test_any_sequence_of_calls_leaves_the_right_hooks() -> None:
    run_state_machine_as_test(Program, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


def test_graphs_do_not_disturb_the_hooks_of_a_module() -> None:
    """Graphs are not part of the module tree, so a phase that switches them cannot disturb a hook."""
    tree, calls, pool = Tree(), [], GraphPool()
    hooks = HookSet(tree, counting(calls))
    hooks.enable()
    graphed = tuple(leaves(tree))
    make_graphed_callables(graphed, ((torch.ones(2, requires_grad=True),),) * 2, pool=pool)
    for disabled in (False, True, False):
        calls.clear()
        pool.disable() if disabled else pool.enable()
        tree(torch.ones(2)).sum().backward()
        assert calls == list(graphed)
    pool.reset()
    hooks.disable()
    assert not any(map(handles_on, graphed))


def test_a_failed_registration_leaves_no_handle() -> None:
    tree, hooked = Tree(3), []

    def choose(name: str, module: nn.Module) -> dict[Any, Any]:
        if len(hooked) == 2:
            raise ValueError("no hook for this one")
        hooked.append(module)
        return {"forward_pre": lambda m, args: None}

    hooks = HookSet(tree, choose)
    with pytest.raises(ValueError, match="no hook"):
        hooks.enable()
    assert hooks.state is HookState.OFF
    assert not any(map(handles_on, tree.modules()))


def test_a_pickle_carries_no_hook() -> None:
    tree, calls = Tree(), []
    hooks = HookSet(tree, counting(calls))
    hooks.enable()
    pickle.loads(pickle.dumps(tree))(torch.ones(2))
    assert not calls
    tree(torch.ones(2))
    assert len(calls) == 2


def test_a_shared_parameter_keeps_its_hook_while_one_module_has_it() -> None:
    tree, calls = Tree(3), list[Tensor]()
    first, second, third = leaves(tree)
    second.weight = first.weight

    def choose(name: str, module: nn.Module) -> dict[Any, Any]:
        return {"gradient": calls.append} if isinstance(module, Leaf) else {}

    hooks = HookSet(tree, choose)
    hooks.enable()
    tree(torch.ones(2)).sum().backward()
    assert sorted(map(id, calls)) == sorted((id(first.weight), id(third.weight)))
    calls.clear()
    del tree.leaves["leaf0"]
    hooks.enable()
    tree(torch.ones(2)).sum().backward()
    assert sorted(map(id, calls)) == sorted((id(first.weight), id(third.weight)))
    third.weight.requires_grad_(False)
    with hooks.paused():
        pass
    third.weight.requires_grad_(True)
    hooks.enable()
    assert len(third.weight._post_accumulate_grad_hooks) == 1
    del tree.leaves["leaf1"]
    hooks.enable()
    assert not first.weight._post_accumulate_grad_hooks
    hooks.disable()
    assert not third.weight._post_accumulate_grad_hooks
