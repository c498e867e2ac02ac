"""Hooks run around a graph, in order and with the same arguments."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import CaptureError, GraphHooks, GraphPool, HookError, capture
from rollgraph.graph import make_graphed_callables as graph
from tests.graph.hook_logs import ALL, KINDS, Log, layers, passes, sample

# -- order and arguments ---------------------------------------------------------------------------


def test_hooks_of_one_callable_run_in_order(backend: str, device: torch.device) -> None:
    log, (layer,) = Log(), layers(1)
    graph(layer, (sample(),), 2, backend=backend, hooks=log.hooks("a"))
    assert log.take() == passes("a") * 3, "two warm-ups and the capture"
    for _ in range(2):
        y = layer(sample())
        assert log.take() == ["a:pre_forward", "a:post_forward"]
        y.sum().backward()
        assert log.take() == ["a:pre_backward", "a:post_backward"]


def test_hooks_of_several_callables_run_in_order(backend: str, device: torch.device) -> None:
    log, (a, b) = Log(), layers(2)
    graph((a, b), ((sample(),), (sample(),)), 1, backend=backend, hooks=[log.hooks("a"), log.hooks("b")])
    warm, forward, backward = passes("a") + passes("b"), KINDS[:2], KINDS[2:]
    recorded = [f"{n}:{k}" for n in "ab" for k in forward] + [f"{n}:{k}" for n in "ba" for k in backward]
    assert log.take() == warm + recorded
    b(a(sample())).sum().backward()
    assert log.take() == recorded


def test_hooks_run_in_the_order_of_a_schedule(backend: str, device: torch.device) -> None:
    """The order is 1F1B over two chunks and two microbatches."""
    log, (a, b) = Log(), layers(2)
    order = [1, 1, 2, -2, -1, 2, -2, -1]
    warmed: list[tuple[str, Any]] = []
    steps = graph(
        (a, b), ((sample(),), (sample(),)), 2, backend=backend, order=order, layers_per_chunk=1,
        hooks=[log.hooks("1"), log.hooks("2")],
        pre_warmup_hook=lambda target: (log.calls.append("pre"), warmed.append(("pre", target)), None)[2],
        post_warmup_hook=lambda target: (log.calls.append("post"), warmed.append(("post", target)), None)[2],
    )  # fmt: skip
    expected = [f"{abs(s)}:{k}" for s in order for k in (KINDS[:2] if s > 0 else KINDS[2:])]
    calls = log.take()
    assert calls == ["pre", *passes("1") * 2, "post", "pre", *passes("2") * 2, "post", *expected]
    assert warmed == [("pre", a), ("post", a), ("pre", b), ("post", b)]
    first, second = steps[:2], steps[2:]
    outputs: dict[int, list[Tensor]] = {1: [], 2: []}
    pending: dict[int, list[Tensor]] = {1: [], 2: []}
    for step in order:
        chunk = abs(step)
        if step > 0:
            done = len(outputs[chunk])
            y = (first, second)[chunk - 1][done](sample() if chunk == 1 else outputs[1][done].detach().requires_grad_())
            outputs[chunk].append(y)
            pending[chunk].append(y)
        else:
            pending[chunk].pop(0).sum().backward()
    assert log.take() == expected


@pytest.mark.parametrize("when", [(), ("warmup",), ("capture",), ("replay",), ("warmup", "replay"), ALL])
def test_hooks_run_in_the_chosen_moments_only(backend: str, device: torch.device, when: tuple[str, ...]) -> None:
    log, (layer,) = Log(), layers(1)
    graph(layer, (sample(),), 1, backend=backend, hooks=log.hooks("a", when))
    assert log.take() == passes("a") * len({"warmup", "capture"} & set(when))
    layer(sample()).sum().backward()
    assert log.take() == (passes("a") if "replay" in when else [])


def test_hooks_run_in_warmup_and_capture_by_default(backend: str, device: torch.device) -> None:
    assert tuple(GraphHooks().when) == ("warmup", "capture")


def test_hooks_get_the_same_arguments_in_all_moments(backend: str, device: torch.device) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: dict[str, Any], scale: float, *, mask: Tensor) -> Any:
            y = self.layer(x["a"][0])
            return {"y": [y * scale, None], "m": (mask & mask, 3)}

    log, module = Log(), Nested()
    x, kwargs = ({"a": (sample(),)}, 0.5), {"mask": torch.ones(2, 4, dtype=torch.bool)}
    graph(module, x, 2, backend=backend, sample_kwargs=kwargs, hooks=log.hooks("a"), pool=GraphPool())
    out = module({"a": (sample(),)}, 0.5, mask=kwargs["mask"])
    out["y"][0].sum().backward()
    for kind in KINDS:
        seen = [a for k, a in log.arguments if k == kind]
        assert len(seen) == 4, "two warm-ups, capture, replay"
        assert all(a == seen[0] for a in seen), kind
    targets = {a[1] for _, a in log.arguments}
    assert targets == {id(module)}
    (pre,) = {str(a) for k, a in log.arguments if k == "pre_forward"}
    assert "'mask'" in pre
    (backward,) = {str(a) for k, a in log.arguments if k == "pre_backward"}
    assert "tensor" not in backward, "a backward hook gets no tensor it could pin"


def test_a_captured_function_has_forward_hooks_only(backend: str, device: torch.device) -> None:
    log, (layer,) = Log(), layers(1)
    hooks = log.hooks("f")
    with pytest.raises(CaptureError, match="backward"):
        capture(layer, (sample().detach(),), backend=backend, hooks=hooks)
    hooks.pre_backward, hooks.post_backward = (), ()
    graphed = capture(layer, (sample().detach(),), backend=backend, hooks=hooks, warmup=2)
    assert log.take() == ["f:pre_forward", "f:post_forward"] * 3
    graphed(sample().detach())
    assert log.take() == ["f:pre_forward", "f:post_forward"]
    for kind in KINDS[:2]:
        seen = [a for k, a in log.arguments if k == kind]
        assert all(a[:4] == seen[0][:4] for a in seen)


def test_hooks_are_never_recorded(backend: str, device: torch.device) -> None:
    counter = torch.zeros(())
    hooks = GraphHooks(*[[lambda *_: (counter.add_(1), None)[1]] for _ in KINDS])
    (layer,) = layers(1)
    graph(layer, (sample(),), 3, backend=backend, hooks=hooks)
    ran = counter.item()
    layer(sample()).sum().backward()
    assert counter.item() == ran, "a replay does not repeat the writes of a hook"
    assert ran == 16, "and a capture does not roll them back"


def test_post_forward_gets_the_output_that_the_caller_gets(backend: str, device: torch.device) -> None:
    (layer,), seen = layers(1), []
    hooks = GraphHooks(post_forward=[lambda m, args, kwargs, out: seen.append(out.detach().clone())], when=ALL)
    twin = copy.deepcopy(layer)
    graph(layer, (sample(),), 1, backend=backend, hooks=hooks)
    x = sample().detach() * 3
    y = layer(x)
    assert torch.equal(seen[-1], y)
    assert torch.equal(seen[-1], twin(x))
    assert torch.equal(seen[0], twin(sample()))


# -- misuse ----------------------------------------------------------------------------------------


def test_lengths_and_kinds_are_checked(backend: str, device: torch.device) -> None:
    pair, samples = tuple(layers(2)), ((sample(),), (sample(),))
    for hooks in ([GraphHooks()], [GraphHooks()] * 3, [], GraphHooks()):
        with pytest.raises(CaptureError, match="GraphHooks for 2 callables"):
            graph(pair, samples, backend=backend, hooks=hooks)
    assert all("forward" not in vars(layer) for layer in pair)
    with pytest.raises(TypeError, match="pre_forward takes a list"):
        GraphHooks(pre_forward=lambda *_: None)  # type: ignore[arg-type]
    for when in (("replays",), "replay", ("warmup", "x")):
        with pytest.raises(ValueError, match="when="):
            GraphHooks(when=when)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_return_value_is_an_error_at_replay_too(backend: str, device: torch.device, kind: str) -> None:
    (layer,) = layers(1)
    hooks = GraphHooks(**{kind: [lambda *_: 0]}, when=("replay",))
    graph(layer, (sample(),), backend=backend, hooks=hooks)
    with pytest.raises(HookError, match=f"{kind} hook .* returned int"):
        layer(sample()).sum().backward()
    with hooks.paused():
        layer(sample()).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_replay_keeps_its_type_and_the_graph(backend: str, device: torch.device, kind: str) -> None:
    (layer,), fail = layers(1), [True]
    twin = copy.deepcopy(layer)

    def hook(*_: Any) -> None:
        if fail[0]:
            raise KeyError("from the hook")

    pool = GraphPool()
    graph(layer, (sample(),), backend=backend, hooks=GraphHooks(**{kind: [hook]}, when=("replay",)), pool=pool)
    with pytest.raises(KeyError, match="from the hook") as caught:
        layer(sample()).sum().backward()
    assert any(kind in note for note in caught.value.__notes__)
    assert layer.weight.grad is None
    del caught
    gc.collect()
    fail[0] = False
    for _ in range(2):
        layer(sample()).sum().backward()
        twin(sample()).sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    assert pool.arena.open_intervals() == []


def test_an_interrupt_in_a_hook_is_not_wrapped(backend: str, device: torch.device) -> None:
    def hook(*_: Any) -> None:
        raise KeyboardInterrupt

    (layer,) = layers(1)
    with pytest.raises(KeyboardInterrupt):
        graph(layer, (sample(),), backend=backend, hooks=GraphHooks(post_backward=[hook]))
    assert "forward" not in vars(layer)


# -- pausing ---------------------------------------------------------------------------------------


def test_paused_nests_and_survives_exceptions(backend: str, device: torch.device) -> None:
    log, (layer,) = Log(), layers(1)
    hooks = log.hooks("a", ("replay",))
    graph(layer, (sample(),), backend=backend, hooks=hooks)

    def run() -> int:
        layer(sample()).sum().backward()
        return len(log.take())

    with hooks.paused():
        assert run() == 0
        with hooks.paused():
            assert run() == 0
        assert run() == 0
        with pytest.raises(ValueError, match="inside"), hooks.paused():
            raise ValueError("inside")
        assert run() == 0
    assert run() == 4
    y = layer(sample())
    with hooks.paused():
        y.sum().backward()
    assert log.take() == ["a:pre_forward", "a:post_forward"], "each pass checks the pause when it runs"


def test_pausing_hooks_does_not_affect_callables_without_hooks(backend: str, device: torch.device) -> None:
    """Callables without hooks share no state that a pause could change."""
    log, (a, b) = Log(), layers(2)
    graph((a, b), ((sample(),), (sample(),)), backend=backend, hooks=[log.hooks("a", ALL), None])
    log.take()
    with log.hooks("other").paused():
        b(a(sample())).sum().backward()
    assert log.take() == passes("a")


# -- references that hooks keep --------------------------------------------------------------------


def test_backward_hooks_keep_no_tensor_alive(backend: str, device: torch.device) -> None:
    (layer,) = layers(1)
    hooks = GraphHooks(pre_backward=[lambda m: None], post_backward=[lambda m: None], when=ALL)
    graph(layer, (sample(),), backend=backend, hooks=hooks)
    x = sample()
    y = layer(x)
    inner = weakref.ref(y.grad_fn)
    y.sum().backward()
    seen = weakref.ref(x)
    del x, y
    gc.collect()
    assert seen() is None
    assert inner() is None


def test_outputs_of_warmup_and_capture_are_not_kept(backend: str, device: torch.device) -> None:
    (layer,), seen = layers(1), []
    hooks = GraphHooks(post_forward=[lambda m, a, k, out: seen.append(weakref.ref(out))])
    graph(layer, (sample(),), backend=backend, hooks=hooks)
    gc.collect()
    assert [ref() is None for ref in seen] == [True] * 4
