"""Switching graphs off and on, copies and resets of graphed models; graphs stay outside the module tree."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import CaptureError, GraphedCallable, GraphPool, capture
from rollgraph.graph import make_graphed_callables as graph


class Block(nn.Module):
    """A module at the top of a file, so that it can be pickled. Counts how often its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x).tanh() * self.scale


class Model(nn.Module):
    def __init__(self, n: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sample() -> Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()


def graphed(backend: str, n: int = 3) -> tuple[Model, GraphPool]:
    model, pool = Model(n), GraphPool()
    graph(tuple(model.blocks), tuple((sample(),) for _ in range(n)), pool=pool, backend=backend)
    return model, pool


def replays(pool: GraphPool) -> list[int]:
    return [g.record.replays for g in pool.graphs]


def gradients(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    model.zero_grad()
    model(sample() if x is None else x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


# -- on and off ------------------------------------------------------------------------------------


def test_a_pool_switches_off_and_on_any_number_of_times(backend: str, device: torch.device) -> None:
    model, pool = graphed(backend)
    expected = gradients(Model())
    for _ in range(5):
        for switch in (pool.disable, pool.disable, pool.enable, pool.enable):
            switch()
            assert all(map(torch.equal, gradients(model), expected))
        with pool.disabled(), pool.disabled():
            assert all(map(torch.equal, gradients(model), expected))
        assert all(g.enabled for g in pool.graphs)
    for g in pool.graphs:
        assert (g.record.captures, g.record.replays, g.record.backward_replays) == (1, 10, 10)
        assert dict(g.record.eager_runs) == {"disabled": 15}
    assert [b.calls for b in model.blocks] == [3 + 1 + 15] * 3


def test_a_switch_affects_the_chosen_model_or_callable_only(backend: str, device: torch.device) -> None:
    (first, pool), second = graphed(backend, 2), Model(1)
    graph(tuple(second.blocks), ((sample(),),), pool=pool, backend=backend)
    pool.disable(first)
    first(sample().detach()), second(sample().detach())
    assert replays(pool) == [0, 0, 1]
    pool.enable(first.blocks[0])
    assert [g.enabled for g in pool.graphs] == [True, False, True]
    pool.graphs[0].disable()
    pool.graphs[1].enable()
    assert [g.enabled for g in pool.graphs] == [False, True, True]
    first.blocks[0].forward.enable()
    with pool.disabled(second):
        assert [g.enabled for g in pool.graphs] == [True, True, False]
    assert all(g.enabled for g in pool.graphs)
    pool.disable(nn.Linear(2, 2))
    assert all(g.enabled for g in pool.graphs)


def test_a_captured_function_switches_too(backend: str, device: torch.device) -> None:
    pool, calls = GraphPool(), []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    double = capture(function, (sample().detach(),), pool=pool, backend=backend)
    x, before = sample().detach(), len(calls)
    with pool.disabled():
        assert torch.equal(double(x * 3), x * 6)
        assert torch.equal(double(x[:1]), x[:1] * 2), "any input that the original takes"
    assert torch.equal(double(x), x * 2)
    assert len(calls) == before + 2
    assert (double.record.replays, dict(double.record.eager_runs)) == (1, {"disabled": 2})
    model = Model(1)
    whole = capture(model, (x,), pool=pool, backend=backend)
    with pool.disabled(model):
        assert (double.enabled, whole.enabled) == (True, False)


def test_disabled_restores_the_previous_state(backend: str, device: torch.device) -> None:
    """Even if the graphs were disabled before, under an exception, and nested."""
    model, pool = graphed(backend)
    pool.graphs[1].disable()
    with pytest.raises(ZeroDivisionError), pool.disabled(), pool.disabled(model.blocks[0]):
        pool.enable(model.blocks[1]) or 1 / 0
    assert [g.enabled for g in pool.graphs] == [True, False, True]
    with pool.disabled():
        with pool.disabled():
            pass
        assert not any(g.enabled for g in pool.graphs)
    assert [g.enabled for g in pool.graphs] == [True, False, True]


def test_modules_come_and_go_while_graphs_are_off(backend: str, device: torch.device) -> None:
    """Graphs are not looked up in the current module tree."""
    model, pool = graphed(backend)
    expected = gradients(Model())
    with pool.disabled(model):
        removed = model.blocks[1]
        del model.blocks[1]
        model.extra = nn.Linear(4, 4)
    assert all(g.enabled for g in pool.graphs), "the removed one too"
    pool.disable(model)
    assert [g.enabled for g in pool.graphs] == [False, True, False]
    model.blocks.insert(1, removed)
    del model.extra
    pool.enable(model)
    pool.enable(model)
    before = replays(pool)
    assert all(map(torch.equal, gradients(model), expected))
    assert [a - b for a, b in zip(replays(pool), before, strict=True)] == [1, 1, 1]
    assert pool.report().captures == 3


def test_a_backward_is_graphed_if_its_forward_was(backend: str, device: torch.device) -> None:
    """Also if graphs are switched off or on in between."""
    model, pool = graphed(backend)
    expected = gradients(Model())
    for before, after in ((pool.enable, pool.disable), (pool.disable, pool.enable)):
        model.zero_grad()
        before()
        loss = model(sample()).square().sum()
        after()
        loss.backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    assert [g.record.backward_replays for g in pool.graphs] == [1, 1, 1]


def test_the_other_training_mode_runs_the_original(backend: str, device: torch.device) -> None:
    model, pool = graphed(backend, 1)
    x = torch.ones(5, 4)
    model.eval()
    assert torch.equal(model(x), Model(1).eval()(x)), "another batch size, as the original takes it"
    model.train()
    model(sample())
    assert dict(pool.graphs[0].record.eager_runs) == {"called in the other training mode": 1}
    assert replays(pool) == [1]


# -- outside the module tree -----------------------------------------------------------------------


def test_the_module_tree_and_state_are_those_of_the_model(backend: str, device: torch.device) -> None:
    model, pool = graphed(backend)
    plain = Model()
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain)
    assert not any(isinstance(m, GraphedCallable) for m in model.modules())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    plain.load_state_dict(torch.load(buffer, weights_only=True))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(sample()), plain(sample())), "loading copies into the tensors that the graph is bound to"
    assert replays(pool) == [1, 1, 1]


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, _pickled, _saved])
@pytest.mark.parametrize("part", [False, True])
def test_a_copy_runs_its_own_weights_ungraphed(backend: str, device: torch.device, duplicate: Any, part: bool) -> None:
    model, pool = graphed(backend, 2)
    original = model.blocks[0] if part else model
    twin = duplicate(original)
    if duplicate is copy.copy:
        return  # shares its weights with the original, and may share its graph
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    before = replays(pool)
    x = sample()
    out = twin(x)
    assert not out.any(), "its own weights"
    assert replays(pool) == before, "ungraphed"
    assert original(sample()).any()
    out.sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    del out  # CUDA: an autograd graph that is alive ties its parameters to the stream it was made in
    twin(torch.ones(7, 4))
    blocks = [twin] if part else list(twin.blocks)
    graph(tuple(blocks), tuple((sample(),) for _ in blocks), backend=backend)
    assert not twin(sample()).any(), "and can be graphed by itself"
    assert original(sample()).any()


def test_copies_of_copies_and_of_a_disabled_model_are_ungraphed(backend: str, device: torch.device) -> None:
    model, pool = graphed(backend, 1)
    with pool.disabled():
        twin = copy.deepcopy(copy.deepcopy(model))
    twin(torch.ones(9, 4))
    assert replays(pool) == [0]
    assert twin.blocks[0].forward.__self__ is twin.blocks[0]


def test_a_deepcopied_list_of_graph_and_module_uses_the_new_weights(backend: str, device: torch.device) -> None:
    """The copy may reach the graph before the module that it belongs to."""
    model, _ = graphed(backend, 1)
    block = model.blocks[0]
    forward, twin = copy.deepcopy([block.forward, block])
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not forward(sample()).any()
    assert not twin(sample()).any()


# -- reset -----------------------------------------------------------------------------------------


def test_reset_puts_the_original_back(backend: str, device: torch.device) -> None:
    model, pool = graphed(backend)
    forward = model.blocks[0].forward
    forward.reset()
    assert "forward" not in vars(model.blocks[0])
    assert model.blocks[0].forward.__func__ is Block.forward
    expected = gradients(Model())
    assert all(map(torch.equal, gradients(model), expected))
    assert torch.equal(forward(sample()), Model().blocks[0](sample())), "a reset graph runs the original"
    assert dict(forward.record.eager_runs) == {"reset": 1}
    pool.reset()
    assert all("forward" not in vars(b) for b in model.blocks)
    assert pool.graphs == []
    assert all(map(torch.equal, gradients(model), expected))
    graph(tuple(model.blocks), tuple((sample(),) for _ in range(3)), pool=pool, backend=backend)
    assert all(map(torch.equal, gradients(model), expected))
    forward.reset()
    assert "forward" in vars(model.blocks[0]), "an old graph's reset does not remove its successor"


def test_reset_restores_a_forward_that_was_an_attribute(backend: str, device: torch.device) -> None:
    block = Block()
    patched = lambda x: block.layer(x) * 3  # noqa: E731
    block.forward = patched
    expected = patched(sample())
    graph(block, (sample(),), backend=backend)
    assert torch.equal(block(sample()), expected)
    block.forward.reset()
    assert block.forward is patched
    assert torch.equal(block(sample()), expected)


def test_a_reset_captured_function_runs_the_original(backend: str, device: torch.device) -> None:
    pool, x = GraphPool(), sample().detach()
    double = capture(lambda x: x * 2, (x,), pool=pool, backend=backend)
    double.reset()
    double.reset()
    assert torch.equal(double(x[:1]), x[:1] * 2)
    assert dict(double.record.eager_runs) == {"reset": 1}
    assert pool.memory_bytes() == 0 or backend == "cuda"


def test_graphing_twice_is_refused(backend: str, device: torch.device) -> None:
    model, _ = graphed(backend, 1)
    with pytest.raises(CaptureError, match="already graphed"):
        graph(model.blocks[0], (sample(),), backend=backend)


def test_a_graphed_layer_can_be_assigned_into_a_sequential(backend: str, device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    layer = model[0]
    model[0] = graph(model[0], (sample(),), backend=backend)
    assert model[0] is layer
    assert list(model.state_dict()) == list(twin.state_dict())
    model(sample()).sum().backward()
    twin(sample()).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert layer.forward.record.replays == 1


def test_hooks_of_the_module_run_at_replay(backend: str, device: torch.device) -> None:
    """PyTorch's hooks on the graphed module itself are outside the graph, as they are around a forward."""
    model, pool = graphed(backend, 1)
    seen: list[Any] = []
    handle = model.blocks[0].register_forward_hook(lambda m, args, out: seen.append(out.shape))
    for _ in range(2):
        model(sample().detach())
    handle.remove()
    model(sample().detach())
    assert seen == [(2, 4)] * 2
    assert replays(pool) == [3]
