"""Surfaces: which calls match the capture, and the messages that refuse the others."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, namedtuple
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rollgraph.graph import CaptureError, ReplayMismatch, capture, make_graphed_callables
from rollgraph.graph.surface import StaticTensors, Surface, static_copy

Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Opaque:
    value: int


def refusal(surface: Surface, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ReplayMismatch) as caught:
        surface.bind(args, kwargs)
    return str(caught.value)


# -- structure and wording -------------------------------------------------------------------------


def test_the_message_names_the_argument_and_both_sides(device: torch.device) -> None:
    x, y = torch.zeros(2, 3), torch.zeros(4)
    surface = Surface((x, {"mask": y}), {"scale": y, "flag": True})
    assert surface.names == ["0", "1['mask']", "scale"]
    wrong = refusal(surface, x, {"mask": y}, scale=y[:1], flag=True)
    assert "argument scale" in wrong
    assert f"float32[4]@{y.device}" in wrong
    assert f"float32[1]@{y.device}" in wrong
    assert "argument 1['mask']" in refusal(surface, x, {"mask": y.int()}, scale=y, flag=True)
    assert "argument 0:" in refusal(surface, 3, {"mask": y}, scale=y, flag=True)
    assert "flag was frozen as True at capture and is 1 now" in refusal(surface, x, {"mask": y}, scale=y, flag=1)
    assert "missing scale" in refusal(surface, x, {"mask": y}, flag=True)
    assert "unexpected extra" in refusal(surface, x, {"mask": y}, scale=y, flag=True, extra=1)
    swapped = refusal(surface, x, {"musk": y}, scale=y, flag=True)
    assert "missing 1['mask']" in swapped
    assert "unexpected 1['musk']" in swapped
    assert "unexpected 2" in refusal(surface, x, {"mask": y}, 5, scale=y, flag=True)


def test_containers_of_another_type_are_refused(device: torch.device) -> None:
    x = torch.zeros(2)
    trees = [(x, x), [x, x], Pair(x, x), {"left": x, "right": x}, OrderedDict(left=x, right=x), {"left": x, 1: x}]
    for captured in trees:
        surface = Surface((captured,), {})
        for called in trees:
            if called is captured:
                assert [id(t) for t in surface.bind((called,), {})] == [id(x), id(x)]
            else:
                refusal(surface, called)


def test_keywords_in_another_order_are_the_same_call(backend: str, device: torch.device) -> None:
    a, b = torch.randn(3), torch.randn(3)
    step = capture(lambda *, first, second: first - second, (), {"first": a, "second": b}, backend=backend)
    assert torch.equal(step(second=a, first=b), b - a)
    graphed = make_graphed_callables(
        lambda *, first, second: first - second, (), sample_kwargs={"second": b, "first": a}, backend=backend
    )
    assert torch.equal(graphed(second=a, first=b), b - a)
    assert torch.equal(graphed(first=a, second=b), a - b)


def test_a_single_callable_takes_a_container_as_its_first_argument(backend: str, device: torch.device) -> None:
    """`torch.cuda.make_graphed_callables(f, ([a, b],))` means f([a, b])."""
    a, b = torch.randn(3), torch.randn(3)
    graphed = make_graphed_callables(lambda pair: pair[0] - pair[1], ([a, b],), backend=backend)
    assert torch.equal(graphed([b, a]), b - a)


@pytest.mark.parametrize(
    "value", [Opaque(1), object(), {1, 2}, iter([1]), bytearray(b"x")], ids=lambda v: type(v).__name__
)
def test_an_opaque_argument_is_refused_at_capture(backend: str, device: torch.device, value: Any) -> None:
    x = torch.randn(2)
    with pytest.raises(CaptureError, match=r"argument 1 is a .* freeze"):
        capture(lambda x, value: x * 2, (x, value), backend=backend)
    with pytest.raises(CaptureError, match=r"argument 1\[0\] is a .* freeze"):
        make_graphed_callables(lambda x, value: x * 2, (x, [value]), backend=backend)


def test_a_sparse_argument_is_refused_at_capture(backend: str, device: torch.device) -> None:
    with pytest.raises(CaptureError, match=r"argument 0 has layout torch\.sparse_coo"):
        capture(lambda x: x * 2, (torch.eye(3).to_sparse(),), backend=backend)


def test_constants_compare_by_type_and_value(device: torch.device) -> None:
    module, nan = nn.Linear(1, 1), float("nan")
    pool = [True, 1, 1.0, 1 + 0j, 0, 0.0, -0.0, False, None, "1", b"1", nan, Colour.RED, Colour.BLUE, Colour,
            range(3), slice(3), torch.float32, torch.device("cpu"), torch.Size([1]), module, nn.Linear(1, 1), len,
            torch.relu, torch.contiguous_format]  # fmt: skip
    for i, frozen in enumerate(pool):
        surface = Surface((frozen,), {})
        assert list(surface.bind((frozen,), {})) == []
        for j, called in enumerate(pool):
            if i != j:
                refusal(surface, called)
    assert list(Surface((nan,), {}).bind((float("nan"),), {})) == []


# -- modes -----------------------------------------------------------------------------------------


def _modes(device: torch.device) -> dict[str, Any]:
    return {
        "grad on": nullcontext,
        "grad off": torch.no_grad,
        "inference mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(device.type, torch.bfloat16),
    }


@pytest.mark.parametrize("how", ["callable", "capture"])
@pytest.mark.parametrize("captured", ["grad on", "grad off", "inference mode", "autocast"])
def test_a_call_in_another_mode_is_refused(backend: str, device: torch.device, how: str, captured: str) -> None:
    modes, net, x = _modes(device), nn.Linear(4, 4), torch.randn(3, 4)
    eager = copy.deepcopy(net)
    with modes[captured]():
        graphed = (make_graphed_callables if how == "callable" else capture)(net, (torch.randn(3, 4),), backend=backend)
    for called, mode in modes.items():
        with mode():
            if called != captured:
                with pytest.raises(
                    ReplayMismatch, match=rf"captured with {captured if captured != 'autocast' else ''}"
                ):
                    graphed(x)
                continue
            out, expected = graphed(x), eager(x)
            assert out.dtype is expected.dtype
            assert torch.equal(out, expected)
            assert out.requires_grad == expected.requires_grad  # though a gradient through `capture` only raises
            assert out.is_inference() == expected.is_inference()


def test_autocast_to_another_dtype_is_refused(backend: str, device: torch.device) -> None:
    net, x = nn.Linear(4, 4), torch.randn(3, 4)

    def autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype)

    with autocast(torch.bfloat16):
        graphed = capture(net, (x,), backend=backend)
    with autocast(torch.float16), pytest.raises(ReplayMismatch, match="autocast"):
        graphed(x)


# -- strides may differ ----------------------------------------------------------------------------


@st.composite
def _views(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    """A shape, and a function that makes a tensor of it with unusual strides."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([0, 1, 2])) for _ in shape]  # 0: expanded

    def make() -> Tensor:
        base = torch.randn([max(1, size * step) for size, step in zip(shape, steps, strict=True)])
        for dim, (size, step) in enumerate(zip(shape, steps, strict=True)):
            if step == 0:
                base = base.expand([size if d == dim else -1 for d in range(len(shape))])
            else:
                base = base.narrow(dim, 0, size * step)[(slice(None),) * dim + (slice(None, None, step),)]
        inverse = [order.index(d) for d in range(len(shape))]
        return base if 0 in steps else base.permute(*inverse).contiguous().permute(*order)

    return shape, make


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_views(), _views())
def test_any_strides_are_copied_exactly(device: torch.device, first: Any, second: Any) -> None:
    sample, call = first[1](), second[1]()
    assume(sample.shape == call.shape or second[0] != first[0])
    surface, static = Surface((sample,), {}), StaticTensors([static_copy(sample)])
    if call.shape != sample.shape:
        refusal(surface, call)
        return
    before = sample.clone()
    static.fill(surface.bind((call,), {}))
    assert torch.equal(static.tensors[0], call)
    assert torch.equal(sample, before)  # a sample is never written to


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_view_of_the_static_tensor_is_read_before_it_is_written(device: torch.device, data: st.DataObject) -> None:
    static = StaticTensors([torch.randn(3, 3)])
    tensor = static.tensors[0]
    offset, strides = data.draw(st.integers(0, 2)), data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    assume(offset + 2 * sum(strides) < 9)
    view = tensor.as_strided((3, 3), strides, offset)
    expected = view.clone()
    static.fill([view])
    assert torch.equal(tensor, expected)


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


@pytest.mark.parametrize("view", [_expanded, lambda x: x.t().contiguous().t(), lambda x: x.repeat(1, 2)[:, ::2]])
def test_strided_inputs_and_gradients_equal_eagers(backend: str, device: torch.device, view: Any) -> None:
    """The values are integers, so that sums are exact in whatever order a kernel adds."""

    def integers() -> Tensor:
        return torch.randint(-4, 5, (3, 4)).float()

    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for p in net.parameters():
        p.data.mul_(8).round_()
    eager = copy.deepcopy(net)
    make_graphed_callables(net, (integers().requires_grad_(),), backend=backend)
    weight, gradient = integers(), view(integers())
    for backward in (
        lambda out: out.sum().backward(),
        lambda out: (out * _expanded(weight)).sum().backward(),
        lambda out: out.t()[1:].sum().backward(),
        lambda out: out.backward(gradient),
    ):
        x = integers()
        leaf, twin = x.clone().requires_grad_(), x.clone().requires_grad_()
        backward(net(view(leaf)))
        backward(eager(view(twin)))
        assert torch.equal(leaf.grad, twin.grad)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), eager.parameters(), strict=True))


# -- random trees ----------------------------------------------------------------------------------

_LEAVES = st.one_of(
    st.tuples(st.just("tensor"), st.integers(1, 3), st.sampled_from([torch.float32, torch.int64, torch.bool])),
    st.sampled_from([None, True, 1, 1.0, "a"]),
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(lambda items: ("tuple", items)),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)


def _build(tree: Any) -> Any:
    if isinstance(tree, tuple) and tree[0] == "tensor":
        return torch.zeros(tree[1], dtype=tree[2])
    if isinstance(tree, tuple):
        return tuple(_build(item) for item in tree[1])
    if isinstance(tree, list):
        return [_build(item) for item in tree]
    return {key: _build(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def _same_plan(left: Any, right: Any) -> bool:
    """Equal as a surface: Python's == would call True, 1 and 1.0 equal."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(_same_plan, left.values(), right.values()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same_plan, left, right))
    return left == right


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_TREES, max_size=3), st.lists(_TREES, max_size=3))
def test_a_surface_accepts_its_own_plan_and_no_other(device: torch.device, plan: Any, other_plan: Any) -> None:
    args = tuple(map(_build, plan))
    surface = Surface(args, {})
    called = tuple(map(_build, plan))
    tensors = surface.bind(called, {})
    assert [id(t) for t in tensors] == [id(t) for t in pytree.tree_leaves(called) if isinstance(t, Tensor)]
    rebuilt, kwargs = surface.arguments(tensors)
    assert kwargs == {}
    leaves, tree = pytree.tree_flatten(rebuilt)
    expected, expected_tree = pytree.tree_flatten(called)
    assert tree == expected_tree
    assert all(a is b for a, b in zip(leaves, expected, strict=True))
    if not _same_plan(plan, other_plan):
        refusal(surface, *map(_build, other_plan))
