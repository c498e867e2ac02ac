"""Guards run before every replay, and cannot be paused."""

from __future__ import annotations

import copy

import pytest
import torch

from rollgraph.graph import CaptureError, GraphHooks, GraphPool, StaleGraph, capture
from rollgraph.graph import make_graphed_callables as graph
from tests.graph.hook_logs import layers, sample


@pytest.mark.parametrize("whole", [False, True])
def test_guards_run_at_every_replay_and_nothing_pauses_them(backend: str, device: torch.device, whole: bool) -> None:
    (layer,), calls, reason = layers(1), [], [None]
    twin = copy.deepcopy(layer)
    hooks = GraphHooks(pre_forward=[lambda *_: calls.append("hook")], when=("replay",))

    def guard() -> str | None:
        calls.append("guard")
        return reason[0]

    pool, x = GraphPool(), sample().detach()
    take = capture if whole else graph
    graphed = take(layer, (x,), backend=backend, hooks=hooks, guards=[guard], pool=pool)
    assert calls == [], "not at capture"
    graphed(x)
    assert calls == ["guard", "hook"]
    with hooks.paused():
        graphed(x)
    assert calls == ["guard", "hook", "guard"]
    reason[0] = "weights of step 3, not gathered"
    rng, replays = torch.get_rng_state(), pool.report().replays
    for context in (hooks.paused, torch.enable_grad):
        with context(), pytest.raises(StaleGraph, match="weights of step 3"):
            graphed(x)
    assert "hook" not in calls[3:], "a refused replay runs no hook"
    assert torch.equal(torch.get_rng_state(), rng)
    assert pool.report().replays == replays
    assert layer.weight.grad is None
    assert pool.arena.open_intervals() == []
    reason[0] = None
    assert torch.equal(graphed(x), twin(x))


def test_all_guards_run_in_order_for_each_callable(backend: str, device: torch.device) -> None:
    pair, calls = tuple(layers(2)), []
    guards = [lambda: calls.append(1), lambda: calls.append(2)]
    graph(pair, ((sample(),), (sample(),)), backend=backend, guards=guards)
    pair[1](pair[0](sample()))
    assert calls == [1, 2, 1, 2]


def test_a_guard_that_raises_changes_nothing(backend: str, device: torch.device) -> None:
    (layer,) = layers(1)

    def guard() -> str | None:
        raise LookupError("no such version")

    pool = GraphPool()
    graph(layer, (sample(),), backend=backend, guards=[guard], pool=pool)
    with pytest.raises(LookupError):
        layer(sample())
    assert pool.report().replays == 0


@pytest.mark.parametrize("policy", ["eager", "recapture"])
def test_on_mismatch_does_not_apply_to_guards(backend: str, device: torch.device, policy: str) -> None:
    """Running eagerly on stale weights is as wrong as replaying on them."""
    (layer,) = layers(1)
    graph(layer, (sample(),), backend=backend, guards=[lambda: "stale"], on_mismatch=policy)
    with pytest.raises(StaleGraph, match="stale"):
        layer(sample())


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_guards_run_after_the_hooks_and_again_before_the_backward(
    backend: str, device: torch.device, step: str
) -> None:
    """Three layers take turns in one slot: without the hook that refills it, a replay would read another layer."""
    modules, held = layers(3), [-1]
    skipped: list[tuple[str, int]] = []

    def fill(index: int, when: str) -> None:
        if (when, index) not in skipped:
            held[0] = index

    hooks, guards = [], []
    for index in range(3):
        pre_forward = [lambda *_, index=index: fill(index, "forward")]
        pre_backward = [lambda *_, index=index: fill(index, "backward")]
        hooks.append(GraphHooks(pre_forward=pre_forward, pre_backward=pre_backward, when=("replay",)))
        guards.append([lambda index=index: None if held[0] == index else f"slot 0 holds layer {held[0]}, not {index}"])
    pool = GraphPool()
    graph(tuple(modules), ((sample(),),) * 3, backend=backend, hooks=hooks, guards=guards, pool=pool)

    def run() -> torch.Tensor:
        x = sample()
        for module in modules:
            x = module(x)
        return x.sum()

    run().backward()
    expected = [module.weight.grad.clone() for module in modules]
    for module in modules:
        module.weight.grad = None
    skipped.append((step, 1))
    with pytest.raises(StaleGraph, match=f"slot 0 holds layer {0 if step == 'forward' else 2}, not 1"):
        run().backward()
    assert modules[1].weight.grad is None
    skipped.clear()
    for module in modules:
        module.weight.grad = None
    run().backward()
    assert all(torch.equal(module.weight.grad, before) for module, before in zip(modules, expected, strict=True))


def test_a_backward_refused_by_a_guard_can_run_later(backend: str, device: torch.device) -> None:
    (layer,), reason = layers(1), [None]
    twin = copy.deepcopy(layer)
    pool = GraphPool()
    graph((layer,), ((sample(),),), backend=backend, guards=[[lambda: reason[0]]], pool=pool)
    output = layer(sample()).sum()
    reason[0] = "gone"
    with pytest.raises(StaleGraph, match="gone"):
        output.backward(retain_graph=True)
    reason[0] = None
    output.backward()
    twin(sample()).sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    assert pool.arena.open_intervals() == []


def test_each_callable_needs_its_list_of_guards(backend: str, device: torch.device) -> None:
    with pytest.raises(CaptureError, match="3 lists of guards for 2 callables"):
        graph(tuple(layers(2)), ((sample(),),) * 2, backend=backend, guards=[[], [], []])
    with pytest.raises(CaptureError, match="either functions"):
        graph(tuple(layers(2)), ((sample(),),) * 2, backend=backend, guards=[[], lambda: None])
