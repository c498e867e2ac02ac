"""Guards run before every replay, and cannot be paused."""

from __future__ import annotations

import copy

import pytest
import torch

from rollgraph.graph import GraphHooks, GraphPool, StaleGraph, capture
from rollgraph.graph import make_graphed_callables as graph
from tests.graph.hook_logs import layers, sample


@pytest.mark.parametrize("whole", [False, True])
def test_guards_run_at_every_replay_and_nothing_pauses_them(backend: str, device: torch.device, whole: bool) -> None:
    (layer,), asked, reason = layers(1), [], [None]
    twin = copy.deepcopy(layer)
    hooks = GraphHooks(pre_forward=[lambda *_: asked.append("hook")], when=("replay",))

    def guard() -> str | None:
        asked.append("guard")
        return reason[0]

    pool, x = GraphPool(), sample().detach()
    take = capture if whole else graph
    graphed = take(layer, (x,), backend=backend, hooks=hooks, guards=[guard], pool=pool)
    assert asked == [], "not at capture"
    graphed(x)
    assert asked == ["guard", "hook"]
    with hooks.paused():
        graphed(x)
    assert asked == ["guard", "hook", "guard"]
    reason[0] = "weights of step 3, not gathered"
    rng, replays = torch.get_rng_state(), pool.report().replays
    for context in (hooks.paused, torch.enable_grad):
        with context(), pytest.raises(StaleGraph, match="weights of step 3"):
            graphed(x)
    assert "hook" not in asked[3:], "a refused replay runs no hook"
    assert torch.equal(torch.get_rng_state(), rng)
    assert pool.report().replays == replays
    assert layer.weight.grad is None
    assert pool.arena.open_intervals() == []
    reason[0] = None
    assert torch.equal(graphed(x), twin(x))


def test_guards_of_several_callables_and_their_order(backend: str, device: torch.device) -> None:
    pair, asked = tuple(layers(2)), []
    guards = [lambda: asked.append(1), lambda: asked.append(2)]
    graph(pair, ((sample(),), (sample(),)), backend=backend, guards=guards)
    pair[1](pair[0](sample()))
    assert asked == [1, 2, 1, 2]


def test_guard_that_raises_changes_nothing(backend: str, device: torch.device) -> None:
    (layer,) = layers(1)

    def guard() -> str | None:
        raise LookupError("no such version")

    pool = GraphPool()
    graph(layer, (sample(),), backend=backend, guards=[guard], pool=pool)
    with pytest.raises(LookupError):
        layer(sample())
    assert pool.report().replays == 0


@pytest.mark.parametrize("policy", ["eager", "recapture"])
def test_a_guard_is_not_a_mismatch_to_act_on(backend: str, device: torch.device, policy: str) -> None:
    """Running eagerly on stale weights is as wrong as replaying on them."""
    (layer,) = layers(1)
    graph(layer, (sample(),), backend=backend, guards=[lambda: "stale"], on_mismatch=policy)
    with pytest.raises(StaleGraph, match="stale"):
        layer(sample())
