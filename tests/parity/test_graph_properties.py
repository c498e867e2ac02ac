"""Graphs equal eager for generated modules, input trees and programs: an eager twin runs the same sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollgraph.graph import GraphPool, ReplayMismatch, capture, make_graphed_callables
from tests.parity.models import Fn
from tests.parity.test_graph_equals_eager import assert_same, copies, state

WIDTH = 4
few = settings(
    phases=[Phase.explicit, Phase.generate],  # every example captures, so shrinking would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# -- modules ------------------------------------------------------------------------------------------


def _halves(m: Any, x: Tensor) -> Tensor:
    a, b = m.inner(x).chunk(2, -1)
    return torch.cat([a * b.sigmoid(), b], -1)


def _overwrite(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    y[..., 1:3] = y[..., :2] * 2
    return y.add_(x.detach().mean())


def _residual(m: Any, x: Tensor) -> Tensor:
    return x + m.inner(x)


def _counted(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.count.add_(1)
    return x * m.count.rsqrt()


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(m.inner, x, use_reentrant=False)


def _relu(m: Any, x: Tensor) -> Tensor:
    return (x * 2).relu_()


def _twice(m: Any, x: Tensor) -> Tensor:
    return m.inner(m.inner(x).tanh())


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


LEAVES: list[Callable[[], nn.Module]] = [
    linear,
    nn.GELU,
    lambda: Fn(_relu),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.RMSNorm(WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.Dropout(0.3),
    lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    lambda: Fn(_halves, inner=linear()),
    lambda: Fn(_overwrite, inner=linear()),
    lambda: Fn(_counted, count=torch.ones(())),
]
WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [
    lambda inner: Fn(_residual, inner=inner),
    lambda inner: Fn(_twice, inner=inner),
    lambda inner: Fn(_checkpointed, inner=inner),
]
Recipe = Callable[[], nn.Module]


def _sequence(recipes: list[Recipe]) -> Recipe:
    return lambda: nn.Sequential(*(recipe() for recipe in recipes))


def _wrapped(wrap: Callable[[nn.Module], nn.Module], recipe: Recipe) -> Recipe:
    return lambda: wrap(recipe())


stacks = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(_sequence),
        st.tuples(st.sampled_from(WRAPPERS), inner).map(lambda pair: _wrapped(*pair)),
    ),
    max_leaves=5,
)


def build(recipe: Recipe) -> nn.Sequential:
    """Build a model with a trainable layer at both ends."""
    return nn.Sequential(linear(), recipe(), linear())


def can_graph(model: nn.Module, backend: str) -> bool:
    # A checkpoint rewinds the generator, which CUDA cannot do inside a capture.
    return backend != "cuda" or not any(isinstance(m, Fn) and m.body is _checkpointed for m in model.modules())


# -- programs -----------------------------------------------------------------------------------------

ACTIONS = ["train", "train", "train", "eval", "no_grad", "disabled", "zero", "none", "step", "rand", "other_shape"]
programs = st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=10)


def run_modules(model: nn.Sequential, program: list[str], pool: GraphPool | None) -> list[Tensor | None]:
    """Run the program. With a pool, the model is graphed, and a call that a graph refuses must change nothing."""
    opt, trace = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9), []
    for position, action in enumerate(program):
        x = torch.full((3, WIDTH), position + 1.0).cumsum(0).sin_().requires_grad_()
        if action == "train":
            loss = model(x).square().mean()
            loss.backward()
            trace += copies(loss, x.grad)
        elif action == "eval":
            model.eval()
            trace += copies(model(x[:2]))  # the original forward runs, so another shape is fine
            model.train()
        elif action == "disabled":
            if pool is not None:
                pool.disable(model)
            model(x * 2).mean().backward()
            if pool is not None:
                pool.enable(model)
        elif action in ("no_grad", "other_shape") and pool is not None:
            with torch.set_grad_enabled(action != "no_grad"), pytest.raises(ReplayMismatch):
                model(x[:2] if action == "other_shape" else x)
        elif action in ("zero", "none"):
            opt.zero_grad(set_to_none=action == "none")
        elif action == "step":
            opt.step()
        elif action == "rand":
            trace.append(torch.rand(2))
        trace += state(model)
    return [*trace, torch.rand(2)]


@few
@given(recipe=stacks, program=programs, layered=st.booleans(), seed=st.integers(0, 99))
def test_random_modules_equal_eager(
    recipe: Recipe, program: list[str], layered: bool, seed: int, backend: str, device: torch.device
) -> None:
    torch.manual_seed(seed)
    eager = build(recipe)
    if not can_graph(eager, backend):
        return
    graphed, pool, sample = copy.deepcopy(eager), GraphPool(), torch.randn(3, WIDTH, requires_grad=True)
    torch.manual_seed(seed)
    # Capture one graph, or one for each of the three parts. The first part meets every mismatch first.
    parts = tuple(graphed) if layered and any(p.requires_grad for p in graphed[1].parameters()) else (graphed,)
    make_graphed_callables(parts, tuple((sample,) for _ in parts), pool=pool, backend=backend)
    ours = run_modules(graphed, program, pool)
    torch.manual_seed(seed)
    assert_same(ours, run_modules(eager, program, None))


@few
@given(recipe=stacks, program=programs, warm=st.booleans(), seed=st.integers(0, 99))
def test_random_training_steps_equal_eager(
    recipe: Recipe, program: list[str], warm: bool, seed: int, backend: str, device: torch.device
) -> None:
    """Whole steps are switched off and on, with refused calls in between and gradients zeroed inside."""
    torch.manual_seed(seed)
    model, results = build(recipe), []
    if not can_graph(model, backend):
        return
    for graph in (True, False):
        twin = copy.deepcopy(model)
        opt = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], 0.01, fused=True, capturable=True)

        def step(x: Tensor, twin: nn.Module = twin, opt: Any = opt) -> Tensor:
            loss = twin(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none="none" in program)
            return loss.detach()

        torch.manual_seed(seed)
        if warm:
            step(torch.ones(3, WIDTH))
        run: Any = capture(step, (torch.randn(3, WIDTH).mul_(0),), backend=backend) if graph else step
        if not graph:
            torch.randn(3, WIDTH)
        trace: list[Tensor | None] = []
        for position, action in enumerate(program):
            x = torch.full((3, WIDTH), position + 1.0).cumsum(0).sin_()
            if action in ("train", "step"):
                trace += copies(run(x))
            elif action == "disabled":
                if graph:
                    run.disable()
                trace += copies(run(x))
                if graph:
                    run.enable()
            elif action in ("no_grad", "other_shape") and graph:
                with torch.set_grad_enabled(action != "no_grad"), pytest.raises(ReplayMismatch):
                    run(x[:2] if action == "other_shape" else x)
            elif action == "rand":
                trace.append(torch.rand(2))
            trace += state(twin)
        results.append([*trace, torch.rand(2)])
    assert_same(*results)


# -- input trees --------------------------------------------------------------------------------------

leaves = st.one_of(
    st.tuples(st.just("tensor"), st.lists(st.integers(1, 3), max_size=2), st.booleans()),
    st.sampled_from([None, True, 2, 0.5, "name"]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2),
    ),
    max_leaves=6,
)


def plant(tree: Any) -> Any:
    """Replace each description of a tensor with a new tensor."""
    if isinstance(tree, tuple) and tree and tree[0] == "tensor":
        return torch.randn(tree[1]).requires_grad_(tree[2])
    if isinstance(tree, dict):
        return {key: plant(value) for key, value in tree.items()}
    return type(tree)(map(plant, tree)) if isinstance(tree, (list, tuple)) else tree


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class OverTree(nn.Module):
    """Scales every tensor by a weight and by the constants, and returns the same tree and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = dict(sorted(kwargs.items()))  # masks are drawn in this order
        values = torch.utils._pytree.tree_leaves((args, kwargs))
        scale = sum((leaf for leaf in values if isinstance(leaf, (int, float))), 1.0)
        out = torch.utils._pytree.tree_map_only(
            Tensor, lambda t: F.dropout(t * self.weight, 0.2) * scale, (args, kwargs)
        )
        return {"tree": out, "sum": sum((t.sum() for t in tensors(out)), self.weight * 1)}


@pytest.mark.slow
@few
@given(args=st.lists(trees, min_size=1, max_size=3), kwargs=st.dictionaries(st.sampled_from("xyz"), trees, max_size=2))
def test_random_input_trees_equal_eager(
    args: list[Any], kwargs: dict[str, Any], backend: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    graphed, eager = OverTree(), OverTree()
    sample, keywords = tuple(plant(args)), plant(kwargs)
    make_graphed_callables((graphed,), (sample,), sample_kwargs=(keywords,), backend=backend)
    results, calls = [], [(plant(args), plant(kwargs)) for _ in range(3)]
    for model in (graphed, eager):
        trace: list[Tensor | None] = []
        torch.manual_seed(1)
        for call_args, call_kwargs in calls:
            call_args, call_kwargs = copy.deepcopy((call_args, call_kwargs))
            out = model(*call_args, **dict(reversed(call_kwargs.items())))
            sum(t.square().sum() for t in tensors(out)).backward()
            shape = (tuple(call_args), dict(sorted(call_kwargs.items())))
            assert torch.utils._pytree.tree_structure(out["tree"]) == torch.utils._pytree.tree_structure(shape)
            trace += copies(*tensors(out), *(t.grad for t in tensors((call_args, call_kwargs))), model.weight.grad)
        results.append([*trace, torch.rand(2)])
    assert_same(*results)


@pytest.mark.slow
@few
@given(tree=trees, other_tree=trees)
def test_another_tree_is_refused(tree: Any, other_tree: Any, backend: str, device: torch.device) -> None:
    """A call fits if and only if its tree, shapes and constants match those of the capture."""

    def f(tree: Any, x: Tensor) -> Tensor:
        return sum((t.sum() for t in tensors(tree)), x.sum())

    x, first, second = torch.ones(2), plant(tree), plant(other_tree)
    graphed = make_graphed_callables((f,), ((first, x),), backend=backend)[0]

    def shape(tree: Any) -> Any:
        leaves, spec = torch.utils._pytree.tree_flatten(tree)
        return spec, [(type(t), t.shape if isinstance(t, Tensor) else t) for t in leaves]

    if shape(first) == shape(second):
        assert torch.equal(graphed(second, x), f(second, x))
    else:
        with pytest.raises(ReplayMismatch):
            graphed(second, x)
