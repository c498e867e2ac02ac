"""Hooks run around a graph, in order and with the same arguments. Guards cannot be paused."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import CaptureError, GraphHooks, GraphPool, HookError, StaleGraph, capture
from rollgraph.graph import make_graphed_callables as graph

ALL = ("warmup", "capture", "replay")
KINDS = ("pre_forward", "post_forward", "pre_backward", "post_backward")


class Log:
    """Hooks that log their calls as `name:kind`, with the shapes of their arguments."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arguments: list[tuple[str, Any]] = []

    def hooks(self, name: str, when: Any = ALL) -> GraphHooks:
        def make(kind: str) -> Any:
            def hook(*arguments: Any) -> None:
                self.calls.append(f"{name}:{kind}")
                self.arguments.append((kind, structure(arguments)))

            return hook

        return GraphHooks(**{kind: [make(kind)] for kind in KINDS}, when=when)

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def structure(tree: Any) -> Any:
    """A description of the arguments, which must be the same in all three moments."""
    if isinstance(tree, Tensor):
        return ("tensor", tuple(tree.shape), tree.dtype, tree.requires_grad)
    if isinstance(tree, (tuple, list)):
        return (type(tree).__name__, *map(structure, tree))
    if isinstance(tree, dict):
        return {key: structure(value) for key, value in tree.items()}
    return id(tree) if callable(tree) else tree


def passes(name: str) -> list[str]:
    return [f"{name}:{kind}" for kind in KINDS]


def layers(n: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(n)]


def sample() -> Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()


# -- order and arguments ---------------------------------------------------------------------------


def test_order_for_one_callable(backend: str, device: torch.device) -> None:
    log, (layer,) = Log(), layers(1)
    graph(layer, (sample(),), 2, backend=backend, hooks=log.hooks("a"))
    assert log.take() == passes("a") * 3, "two warm-ups and the capture"
    for _ in range(2):
        y = layer(sample())
        assert log.take() == ["a:pre_forward", "a:post_forward"]
        y.sum().backward()
        assert log.take() == ["a:pre_backward", "a:post_backward"]


def test_order_for_several_callables(backend: str, device: torch.device) -> None:
    log, (a, b) = Log(), layers(2)
    graph((a, b), ((sample(),), (sample(),)), 1, backend=backend, hooks=[log.hooks("a"), log.hooks("b")])
    warm, forward, backward = passes("a") + passes("b"), KINDS[:2], KINDS[2:]
    recorded = [f"{n}:{k}" for n in "ab" for k in forward] + [f"{n}:{k}" for n in "ba" for k in backward]
    assert log.take() == warm + recorded
    b(a(sample())).sum().backward()
    assert log.take() == recorded


def test_order_under_a_schedule(backend: str, device: torch.device) -> None:
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
def test_when(backend: str, device: torch.device, when: tuple[str, ...]) -> None:
    log, (layer,) = Log(), layers(1)
    graph(layer, (sample(),), 1, backend=backend, hooks=log.hooks("a", when))
    assert log.take() == passes("a") * len({"warmup", "capture"} & set(when))
    layer(sample()).sum().backward()
    assert log.take() == (passes("a") if "replay" in when else [])


def test_default_is_warmup_and_capture(backend: str, device: torch.device) -> None:
    assert tuple(GraphHooks().when) == ("warmup", "capture")


def test_same_arguments_in_all_moments(backend: str, device: torch.device) -> None:
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


def test_captured_function_has_forward_hooks_only(backend: str, device: torch.device) -> None:
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
    assert counter.item() == ran, "what a hook does is not replayed"
    assert ran == 16, "and is no part of what a capture rolls back"


def test_the_output_in_post_forward_is_the_real_one(backend: str, device: torch.device) -> None:
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
def test_return_value_is_an_error_at_replay_too(backend: str, device: torch.device, kind: str) -> None:
    (layer,) = layers(1)
    hooks = GraphHooks(**{kind: [lambda *_: 0]}, when=("replay",))
    graph(layer, (sample(),), backend=backend, hooks=hooks)
    with pytest.raises(HookError, match=f"{kind} hook .* returned int"):
        layer(sample()).sum().backward()
    with hooks.paused():
        layer(sample()).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_exception_at_replay_keeps_its_type_and_the_graph(backend: str, device: torch.device, kind: str) -> None:
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


def test_interrupt_in_a_hook_is_not_wrapped(backend: str, device: torch.device) -> None:
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
    assert log.take() == ["a:pre_forward", "a:post_forward"], "each pass asks when it runs"


def test_pausing_hooks_does_not_affect_callables_without_hooks(backend: str, device: torch.device) -> None:
    """Callables without hooks share no state that a pause could change."""
    log, (a, b) = Log(), layers(2)
    graph((a, b), ((sample(),), (sample(),)), backend=backend, hooks=[log.hooks("a", ALL), None])
    log.take()
    with log.hooks("other").paused():
        b(a(sample())).sum().backward()
    assert log.take() == passes("a")


# -- what hooks may hold on to ---------------------------------------------------------------------


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


def test_raw_output_is_not_kept_after_capture(backend: str, device: torch.device) -> None:
    (layer,), seen = layers(1), []
    hooks = GraphHooks(post_forward=[lambda m, a, k, out: seen.append(weakref.ref(out))])
    graph(layer, (sample(),), backend=backend, hooks=hooks)
    gc.collect()
    assert [ref() is None for ref in seen] == [True] * 4


# -- guards ----------------------------------------------------------------------------------------


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


# -- what hooks are for: fully sharded parameters --------------------------------------------------


class Sharded:
    """The parameters of one module: a permanent shard, and full values only between the hooks."""

    def __init__(self, module: nn.Module, repoint: bool) -> None:
        self.parameters = list(module.parameters())
        self.shards = [p.detach().clone() for p in self.parameters]
        self.full = [p.data for p in self.parameters]
        self.repoint = repoint
        self.gathers = 0
        self.reshard()

    def unshard(self, *_: Any) -> None:
        self.gathers += 1
        for parameter, full, shard in zip(self.parameters, self.full, self.shards, strict=True):
            full.copy_(shard)
            if self.repoint:
                parameter.data = full

    def reshard(self, *_: Any) -> None:
        for parameter, full, shard in zip(self.parameters, self.full, self.shards, strict=True):
            full.fill_(float("nan"))
            if self.repoint:
                parameter.data = shard

    def hooks(self, when: Any = ALL) -> GraphHooks:
        return GraphHooks([self.unshard], [self.reshard], [self.unshard], [self.reshard], when=when)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


@pytest.mark.parametrize("repoint", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_fully_sharded_parameters(backend: str, device: torch.device, repoint: bool, count: int) -> None:
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(count)]
    twins = copy.deepcopy(blocks)
    optimizer = torch.optim.SGD([p for t in twins for p in t.parameters()], 0.1)
    sharded = [Sharded(block, repoint) for block in blocks]
    samples = tuple((sample(),) for _ in blocks)
    graph(tuple(blocks), samples, backend=backend, hooks=[s.hooks() for s in sharded])
    assert all(torch.isnan(f).all() for s in sharded for f in s.full), "the hooks had the last word in capture"
    for step in range(4):
        x, y = ((sample() * (step + 1)).detach().requires_grad_() for _ in range(2))
        before = [s.gathers for s in sharded]
        a, b = x, y
        for block, twin in zip(blocks, twins, strict=True):
            a, b = block(a), twin(b)
        assert torch.equal(a, b)
        a.square().sum().backward()
        b.square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        assert [s.gathers - n for s, n in zip(sharded, before, strict=True)] == [2] * count
        for block, twin in zip(blocks, twins, strict=True):
            for p, q in zip(block.parameters(), twin.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
                assert repoint or torch.isnan(p).all(), "sharded again outside"
        for s in sharded:
            s.step()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("repoint", [False, True])
def test_without_the_hooks_at_replay_the_poison_shows(backend: str, device: torch.device, repoint: bool) -> None:
    """Shows that the test above can fail: parameters are not un-sharded without hooks."""
    block = nn.Linear(4, 4)
    sharded = Sharded(block, repoint)
    graph(block, (sample(),), backend=backend, hooks=sharded.hooks(("warmup", "capture")))
    if repoint:
        with pytest.raises(StaleGraph, match="weight"):
            block(sample())
    else:
        assert torch.isnan(block(sample())).all()


def test_sharded_function(backend: str, device: torch.device) -> None:
    """The same around a whole captured step."""
    block = nn.Linear(4, 4)
    twin = copy.deepcopy(block)
    sharded = Sharded(block, repoint=False)
    hooks = GraphHooks([sharded.unshard], [sharded.reshard], when=ALL)

    def step(x: Tensor, m: nn.Module = block) -> Tensor:
        loss = m(x).square().sum()
        loss.backward()
        return loss.detach()

    graphed = capture(step, (sample().detach(),), backend=backend, hooks=hooks)
    for i in range(3):
        x = sample().detach() + i
        assert torch.equal(graphed(x), step(x, twin))
        assert torch.equal(block.weight.grad, twin.weight.grad)
        assert torch.isnan(block.weight).all()


def test_moments_by_kind() -> None:
    calls: list[str] = []
    hooks = GraphHooks(
        pre_forward=[lambda *_: calls.append("before")],
        post_backward=[lambda *_: calls.append("after")],
        when={"pre_forward": ("warmup", "capture", "replay"), "post_backward": ("replay",)},
    )
    layer = nn.Linear(2, 2)
    graph(layer, (torch.randn(1, 2, requires_grad=True),), 1, hooks=hooks)
    assert calls == ["before", "before"]  # warm-up, capture
    layer(torch.randn(1, 2)).sum().backward()
    assert calls == ["before"] * 3 + ["after"]
    for wrong in ({"forward": ("replay",)}, {"pre_forward": "replay"}, {"pre_forward": ("never",)}):
        with pytest.raises(ValueError, match="when="):
            GraphHooks(when=wrong)
