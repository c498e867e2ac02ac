"""Transformer Engine's `make_graphed_callables` for plain modules: its arguments, and equality with eager."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.compat.transformer_engine import make_graphed_callables
from rollgraph.graph import CaptureError, GraphPool, HookError, MemoryInUse, OrderError, ReplayMismatch, StaleGraph

INTERLEAVED = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Set the default device and deterministic kernels: the tape on a CPU, CUDA graphs on a GPU."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    if request.param != "cpu":  # setting the default device to the CPU makes everything much slower
        torch.set_default_device(request.param)
    yield torch.device(request.param)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(before)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        y = y if mask is None else y * mask
        return y if scale is None else y * scale


class Pair(nn.Module):
    """A module with two inputs that uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, used: Tensor, unused: Tensor) -> Tensor:
        return self.linear(used)


def layers(count: int) -> tuple[Layer, ...]:
    torch.manual_seed(1)
    return tuple(Layer() for _ in range(count))


def sample(rows: int = 2) -> Tensor:
    return torch.zeros(rows, 4, requires_grad=True)


def data(seed: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator(device=sample().device).manual_seed(seed))


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for m in modules for p in m.parameters()]


def run_pipeline(
    forwards: Callable[[int, int], Sequence[Callable[[Tensor], Tensor]]], order: Sequence[int], step: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Run one rank of a pipeline, with a separate input and gradient for each chunk and microbatch.

    Returns, in the order of execution, each forward's output and each backward's gradient of its input.
    """
    outputs, input_gradients = [], []
    pending: defaultdict[int, deque[tuple[Tensor, Tensor, int]]] = defaultdict(deque)
    microbatch: defaultdict[int, int] = defaultdict(int)
    for value in order:
        chunk = abs(value) - 1
        if value > 0:
            number = microbatch[chunk]
            microbatch[chunk] += 1
            x = data(1000 * step + 10 * chunk + number).requires_grad_()
            y = x
            for layer in forwards(chunk, number):
                y = layer(y)
            outputs.append(y.detach().clone())
            pending[chunk].append((x, y, number))
        else:
            x, y, number = pending[chunk].popleft()
            y.backward(data(7000 + 1000 * step + 10 * chunk + number))
            assert x.grad is not None
            input_gradients.append(x.grad.clone())
    return outputs, input_gradients


# -- schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("per_chunk", [None, 2, [2, 2], [1, 3]])
def test_an_interleaved_pipeline_equals_eager(device: torch.device, reuse: bool, per_chunk: Any) -> None:
    model, eager = layers(4), layers(4)
    counts = [2, 2] if per_chunk is None or isinstance(per_chunk, int) else per_chunk
    microbatches = 3
    args = [(sample(),) for _ in range(len(model) * microbatches)]
    graphed = make_graphed_callables(
        model, args, _order=INTERLEAVED, _num_layers_per_chunk=per_chunk, _reuse_graph_input_output_buffers=reuse
    )
    assert isinstance(graphed, tuple)
    assert len(graphed) == 12
    first = [0, counts[0]]

    def graphed_layers(chunk: int, microbatch: int) -> Sequence[Callable[[Tensor], Tensor]]:
        start = first[chunk] * microbatches + microbatch * counts[chunk]  # ordered by chunk, microbatch, layer
        return graphed[start : start + counts[chunk]]

    def eager_layers(chunk: int, microbatch: int) -> Sequence[Callable[[Tensor], Tensor]]:
        return eager[first[chunk] : first[chunk] + counts[chunk]]

    for step in range(3):
        ours, theirs = run_pipeline(graphed_layers, INTERLEAVED, step), run_pipeline(eager_layers, INTERLEAVED, step)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        torch.testing.assert_close(gradients(*model), gradients(*eager), rtol=0, atol=0)
    assert all(type(m.forward).__name__ == "method" for m in model), "with an order, modules keep their forward"


@pytest.mark.parametrize(("reuse", "buffers"), [(False, 6), (True, 4)])
def test_reuse_shares_inputs_of_passes_never_open_together(device: torch.device, reuse: bool, buffers: int) -> None:
    """At most 4 of the 6 passes are open at a time: two microbatches of both chunks."""
    pool = GraphPool()
    make_graphed_callables(
        layers(2), [(sample(),)] * 6, _order=INTERLEAVED, _reuse_graph_input_output_buffers=reuse, pool=pool
    )
    inputs = [segment.statics.tensors[0] for graph in pool.graphs for segment in graph._variants]
    assert len({t.data_ptr() for t in inputs}) == buffers


def test_a_microbatch_out_of_order_is_refused(device: torch.device) -> None:
    first, second = make_graphed_callables(layers(1), [(sample(),)] * 2, _order=[1, -1, 1, -1])
    y = first(data(0).requires_grad_())
    with pytest.raises(MemoryInUse, match="waits for its backward"):
        second(data(1).requires_grad_())
    y.sum().backward()
    second(data(1).requires_grad_()).sum().backward()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([1, 2, -2], "chunk 1 never followed by its backward"),
        ([-1, 1], r"order\[0\] = -1: backward of chunk 1 before its forward"),
        ([1, 3, -3, -1], "chunk 2 never runs"),
        ([1, 1, 2, -2, -1, -1], "chunk 1 runs 2 microbatches, but chunk 2 only 1"),
        ([1, 2, -2, -1, -1.5], "half-steps"),
        ([], "empty"),
    ],
)
def test_a_bad_order_is_refused(order: list[Any], message: str) -> None:
    with pytest.raises(OrderError, match=message):
        make_graphed_callables(layers(2), [(sample(),)] * 2, _order=order)


@pytest.mark.parametrize(
    ("per_chunk", "message"),
    [
        ([2], "layers_per_chunk has 1 items, but the order has 2 chunks"),
        ([1, 2], "adds up to 3, not to 2 callables"),
        (2, "adds up to 4, not to 2 callables"),
    ],
)
def test_layers_that_do_not_fit_the_order_are_refused(per_chunk: Any, message: str) -> None:
    with pytest.raises(OrderError, match=message):
        make_graphed_callables(layers(2), [(sample(),)] * 2, _order=[1, 2, -2, -1], _num_layers_per_chunk=per_chunk)


@pytest.mark.parametrize("count", [2, 5, 7])
def test_an_order_needs_a_sample_for_each_pass(count: int) -> None:
    with pytest.raises(CaptureError, match=rf"{count} sample_args.*6"):
        make_graphed_callables(layers(2), [(sample(),)] * count, _order=INTERLEAVED)


def test_reuse_needs_an_order_and_training_mode() -> None:
    with pytest.raises(CaptureError, match=r"_reuse_graph_input_output_buffers.*_order"):
        make_graphed_callables(layers(1), ((sample(),),), _reuse_graph_input_output_buffers=True)
    with pytest.raises(CaptureError, match=r"_reuse_graph_input_output_buffers.*training"):
        make_graphed_callables(
            tuple(m.eval() for m in layers(1)), [(sample(),)], _order=[1, -1], _reuse_graph_input_output_buffers=True
        )


def test_layers_per_chunk_without_an_order_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"_num_layers_per_chunk.*_order"):
        make_graphed_callables(layers(1), ((sample(),),), _num_layers_per_chunk=[1])


def test_is_first_microbatch_is_ignored_at_replay(device: torch.device) -> None:
    """Megatron passes it to each graph of a schedule. It only matters for weights cached in FP8."""
    (layer,), (eager,) = layers(1), layers(1)
    (graph,) = make_graphed_callables((layer,), [(sample(),)], _order=[1, -1])
    x = data(0)
    for first in (True, False):
        torch.testing.assert_close(graph(x, is_first_microbatch=first), eager(x), rtol=0, atol=0)
    with pytest.raises(ReplayMismatch, match="is_last_microbatch"):
        graph(x, is_last_microbatch=True)


# -- shape of the result and arguments -----------------------------------------------------------


def test_modules_keep_their_identity(device: torch.device) -> None:
    (layer,), (eager,) = layers(1), layers(1)
    assert make_graphed_callables(layer, (sample(),)) is layer
    x, y = data(0).requires_grad_(), data(0).requires_grad_()
    for _ in range(2):
        torch.testing.assert_close(layer(x), eager(y), rtol=0, atol=0)
        layer(x).square().sum().backward()
        eager(y).square().sum().backward()
    torch.testing.assert_close(gradients(layer), gradients(eager), rtol=0, atol=0)
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)
    pair = layers(2)
    graphed = make_graphed_callables(pair, ((sample(),), (sample(),)))
    assert isinstance(graphed, tuple)
    assert all(a is b for a, b in zip(graphed, pair, strict=True))
    (single,) = make_graphed_callables(layers(1), ((sample(),),))
    assert isinstance(single, Layer)


def test_graphs_do_not_affect_state_dicts_copies_and_pickles(device: torch.device) -> None:
    (layer,) = layers(1)
    names = list(layer.state_dict())
    make_graphed_callables(layer, (sample(),))
    assert list(layer.state_dict()) == names
    for copied_layer in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            copied_layer.linear.weight.add_(1)
        x = data(3)
        expected = torch.tanh(copied_layer.linear(x))
        torch.testing.assert_close(copied_layer(x), expected, rtol=0, atol=0)
        assert not torch.equal(copied_layer(x), layer(x))
        copied_layer.reset()
        torch.testing.assert_close(copied_layer(x), expected, rtol=0, atol=0)


def test_keyword_arguments_equal_eager(device: torch.device) -> None:
    model, eager = layers(2), layers(2)
    make_graphed_callables(
        model,
        ((sample(),), (sample(),)),
        sample_kwargs=({"mask": torch.ones(2, 4)}, {"mask": None, "scale": torch.zeros(1, requires_grad=True)}),
    )
    x, mask = data(0), (data(1) > 0).float()
    our_scale, their_scale = (torch.full((1,), 3.0, requires_grad=True) for _ in range(2))
    ours = model[1](model[0](x, mask=mask), scale=our_scale, mask=None)
    theirs = eager[1](eager[0](x, mask=mask), scale=their_scale)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    ours.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(gradients(*model), gradients(*eager), rtol=0, atol=0)
    torch.testing.assert_close(our_scale.grad, their_scale.grad, rtol=0, atol=0)
    with pytest.raises(ReplayMismatch, match="missing mask"):
        model[0](x)


def test_one_module_takes_one_dict_of_keyword_arguments(device: torch.device) -> None:
    (layer,), (eager,) = layers(1), layers(1)
    make_graphed_callables(layer, (), sample_kwargs={"x": sample(), "mask": torch.ones(2, 4)})
    x, mask = data(0), (data(1) > 0).float()
    torch.testing.assert_close(layer(mask=mask, x=x), eager(x, mask), rtol=0, atol=0)


def test_sequences_of_different_lengths_are_refused() -> None:
    two = layers(2)
    with pytest.raises(CaptureError, match=r"1 sample_args.*2 modules"):
        make_graphed_callables(two, ((sample(),),))
    with pytest.raises(CaptureError, match="2 sample_args, but 1 sample_kwargs"):
        make_graphed_callables(two, ((sample(),), (sample(),)), sample_kwargs=({},))
    with pytest.raises(CaptureError, match="1 capture_time_hooks for 2 modules"):
        make_graphed_callables(two, ((sample(),), (sample(),)), capture_time_hooks=[None])
    with pytest.raises(CaptureError, match=r"enabled has 1 .* 2 modules"):
        make_graphed_callables(two, ((sample(),), (sample(),)), enabled=(False,))
    assert all("forward" not in vars(m) for m in two)


def test_unused_inputs_must_be_allowed(device: torch.device) -> None:
    torch.manual_seed(0)
    pair = Pair()
    with pytest.raises(CaptureError, match=r"input 1 .*allow_unused_input"):
        make_graphed_callables(pair, (sample(), sample()))
    make_graphed_callables(pair, (sample(), sample()), allow_unused_input=True)
    used, unused = data(0).requires_grad_(), data(1).requires_grad_()
    pair(used, unused).sum().backward()
    assert used.grad is not None
    assert unused.grad is None, "as eager"
    (layer,) = layers(1)
    layer.spare = nn.Parameter(torch.zeros(1))
    with pytest.raises(CaptureError, match=r"parameter spare .*allow_unused_input"):
        make_graphed_callables(layer, (sample(),))
    make_graphed_callables(layer, (sample(),), allow_unused_input=True)(data(0)).sum().backward()
    assert layer.spare.grad is None


@pytest.mark.parametrize("graphed_in", [True, False])
def test_the_other_training_mode_runs_the_original_forward(device: torch.device, graphed_in: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)).train(graphed_in)
    pool = GraphPool()
    make_graphed_callables(module, (sample(),), pool=pool)
    dropped = torch.zeros(2, 4)
    kept = module[0](data(0)).detach()
    for training in (True, False, True):
        module.train(training)
        expected = dropped if training else kept
        torch.testing.assert_close(module(data(0)).detach(), expected, rtol=0, atol=0)
    record = pool.graphs[0].record
    assert record.replays == (2 if graphed_in else 1)
    assert dict(record.eager_runs) == {"called in the other training mode": 1 if graphed_in else 2}
    module.train(not graphed_in)
    other_rows = data(0, rows=3).requires_grad_()
    module(other_rows).sum().backward()
    assert other_rows.grad is not None, "the original forward takes any shape, and trains"


def test_a_graph_of_eval_mode_replays_in_any_grad_mode(device: torch.device) -> None:
    (layer,), (eager,) = layers(1), layers(1)
    pool = GraphPool()
    make_graphed_callables(layer.eval(), (sample(),), pool=pool)
    x = data(0).requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), eager(x), rtol=0, atol=0)
    assert not layer(x).requires_grad, "a graph captured in eval mode has no backward"
    assert pool.graphs[0].record.replays == 2
    with pool.disabled():
        assert layer(x).requires_grad, "the original forward has a backward"


def test_modules_in_different_modes_are_refused() -> None:
    two = layers(2)
    two[1].eval()
    with pytest.raises(CaptureError, match=r"training.*modules\[1\]"):
        make_graphed_callables(two, ((sample(),), (sample(),)))


def test_only_modules_are_accepted(device: torch.device) -> None:
    with pytest.raises(CaptureError, match=r"modules\[0\] is a function"):
        make_graphed_callables(lambda x: x, (sample(),))
    with pytest.raises(CaptureError, match="no modules"):
        make_graphed_callables((), ())
    with pytest.raises(CaptureError, match=r"modules\[0\] is a list"):
        make_graphed_callables(list(layers(2)), ((sample(),), (sample(),)))


def test_a_module_with_hooks_is_refused() -> None:
    def nothing(*_: Any) -> None:
        pass

    for register in (
        "register_forward_pre_hook",
        "register_forward_hook",
        "register_full_backward_pre_hook",
        "register_full_backward_hook",
    ):
        (layer,) = layers(1)
        handle = getattr(layer, register)(nothing)
        with pytest.raises(CaptureError, match=r"modules\[0\] \(Layer\) has hooks.*capture_time_hooks"):
            make_graphed_callables(layer, (sample(),))
        handle.remove()
        make_graphed_callables(layer, (sample(),))


def test_a_graphed_module_is_not_graphed_twice() -> None:
    (layer,) = layers(1)
    make_graphed_callables(layer, (sample(),))
    with pytest.raises(CaptureError, match=r"graphed already.*reset"):
        make_graphed_callables(layer, (sample(),))
    layer.reset()
    make_graphed_callables(layer, (sample(),))


# -- pool, reset -------------------------------------------------------------------------------------


def test_a_foreign_pool_is_refused() -> None:
    pool = GraphPool()
    make_graphed_callables(layers(2), ((sample(),), (sample(),)), pool=pool)
    assert len(pool.graphs) == 2
    (layer,) = layers(1)
    with pytest.raises(CaptureError, match=r"pool=\(0, 1\).*rollgraph.graph.GraphPool"):
        make_graphed_callables(layer, (sample(),), pool=(0, 1))
    assert "forward" not in vars(layer)


def test_reset_restores_the_original_forward(device: torch.device) -> None:
    pool = GraphPool()
    (layer,), (eager,) = layers(1), layers(1)
    graphed = make_graphed_callables(layer, (sample(),), pool=pool)
    layer(data(0))
    graphed.reset()
    x = data(1, rows=5)
    torch.testing.assert_close(layer(x), eager(x), rtol=0, atol=0)
    assert not {"forward", "reset"} & set(vars(layer))
    assert pool.graphs[0].record.replays == 1


@pytest.mark.parametrize("training", [True, False])
def test_modules_run_and_train_after_a_reset_of_their_pool(device: torch.device, training: bool) -> None:
    pool = GraphPool()
    (layer,), (eager,) = layers(1), layers(1)
    make_graphed_callables(layer.train(training), (sample(),), pool=pool)
    pool.reset()
    for module in (layer, eager):
        module(data(1, rows=5)).sum().backward()
    torch.testing.assert_close(gradients(layer), gradients(eager), rtol=0, atol=0)


def test_reset_of_a_microbatch_frees_its_memory(device: torch.device) -> None:
    pool = GraphPool()
    (layer,), (eager,) = layers(1), layers(1)
    first, second = make_graphed_callables((layer,), [(sample(),)] * 2, _order=[1, 1, -1, -1], pool=pool)
    first.reset()
    assert pool.graphs[0].static_bytes == 0
    assert pool.graphs[1].static_bytes > 0
    x = data(0)
    torch.testing.assert_close(first(x), eager(x), rtol=0, atol=0)
    torch.testing.assert_close(second(x), eager(x), rtol=0, atol=0)
    assert dict(pool.graphs[0].record.eager_runs) == {"reset": 1}


# -- hooks -------------------------------------------------------------------------------------------

MERGED = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
PROPOSED = ("forward_pre", "forward", "pre_backward", "backward")


def is_recording() -> bool:
    """Whether a backend is capturing now."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return capturing or bool(modes)


class Log:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []

    def hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module) -> None:
            assert not is_recording()
            self.calls.append(name)
            self.arguments.append((module,))

        return hook

    def entry(self, name: str, keys: Sequence[str]) -> dict[str, Any]:
        return {key: {0: self.hook(f"{name}:{kind}")} for key, kind in zip(keys, ("f<", "f>", "b<", "b>"), strict=True)}


@pytest.mark.parametrize("keys", [MERGED, PROPOSED])
def test_hooks_run_around_warm_up_and_capture_and_never_at_replay(device: torch.device, keys: Sequence[str]) -> None:
    log, (a, b) = Log(), layers(2)
    make_graphed_callables(
        (a, b), ((sample(),), (sample(),)), 2, capture_time_hooks=[log.entry("a", keys), log.entry("b", keys)]
    )
    once_a, once_b = (["a:f<", "a:f>", "a:b<", "a:b>"], ["b:f<", "b:f>", "b:b<", "b:b>"])
    captured = ["a:f<", "a:f>", "b:f<", "b:f>", "b:b<", "b:b>", "a:b<", "a:b>"]
    assert log.calls == once_a * 2 + once_b * 2 + captured
    assert all(module is (a if name[0] == "a" else b) for name, (module,) in zip(log.calls, log.arguments, strict=True))
    log.calls.clear()
    b(a(data(0))).sum().backward()
    assert log.calls == []


@pytest.mark.parametrize("keys", [MERGED, PROPOSED])
def test_hooks_follow_the_order(device: torch.device, keys: Sequence[str]) -> None:
    log, (a, b) = Log(), layers(2)
    order = [1, 2, 1, -1, -2, 2, -1, -2]
    make_graphed_callables(
        (a, b), [(sample(),)] * 4, 1, _order=order, capture_time_hooks=[log.entry("a", keys), log.entry("b", keys)]
    )
    captured = [f"{'ab'[abs(v) - 1]}:{'fb'[v < 0]}{side}" for v in order for side in "<>"]
    assert log.calls[-len(captured) :] == captured
    assert log.calls[: -len(captured)] == [f"{m}:{p}{s}" for m in "ab" for p in "fb" for s in "<>"]


def test_hooks_get_the_arguments_of_module_hooks(device: torch.device) -> None:
    (layer,) = layers(1)
    calls: list[tuple[str, Any]] = []

    def pre(module: nn.Module, args: Any) -> None:
        calls.append(("pre", args))

    def pre_with_kwargs(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(("pre_with_kwargs", (args, kwargs)))

    def post(module: nn.Module, args: Any, output: Any, label: str = "post") -> None:
        calls.append((label, (args, output)))

    def post_with_kwargs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(("post_with_kwargs", (args, kwargs, output)))

    def rest(module: nn.Module, *rest: Any) -> None:
        calls.append(("rest", rest))

    hooks = {
        "forward_pre": {3: pre, 1: pre_with_kwargs, 2: rest},
        "forward": [post, post_with_kwargs, rest],
        "backward": {"r": rest},
    }
    make_graphed_callables(layer, (sample(),), 1, sample_kwargs={"mask": torch.ones(2, 4)}, capture_time_hooks=[hooks])
    names = ["pre", "pre_with_kwargs", "rest", "post", "post_with_kwargs", "rest", "rest"]
    assert [name for name, _ in calls] == names * 2, "in the order of the dictionary, in warm-up and capture"
    for (name, first), (_, second) in zip(calls[:7], calls[7:], strict=True):
        assert describe(first) == describe(second), f"{name}: other arguments in warm-up than in capture"
    tensor = ("tensor", (2, 4), True)
    assert describe(calls[0][1]) == (tensor,)
    assert describe(calls[1][1]) == ((tensor,), {"mask": ("tensor", (2, 4), False)})
    assert describe(calls[3][1]) == ((tensor,), tensor)
    assert describe(calls[4][1]) == ((tensor,), {"mask": ("tensor", (2, 4), False)}, tensor)
    assert [arguments for name, arguments in calls if name == "rest"] == [()] * 6


def test_hooks_in_the_merged_format_are_called_like_module_hooks(device: torch.device) -> None:
    """Hooks as Megatron's FSDP passes them to Transformer Engine, with the ids of those that take kwargs."""
    (layer,) = layers(1)
    calls: dict[str, tuple[Any, ...]] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(*arguments: Any) -> None:
            calls[name] = describe(arguments[1:])

        return record

    def reshard(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        calls["reshard"] = (grad_input, grad_output)

    hooks = {
        "forward_pre_hooks": {0: hook("pre"), 1: hook("pre with kwargs")},
        "forward_pre_hooks_with_kwargs": {1: True},
        "forward_hooks": {0: hook("post"), 1: hook("post with kwargs")},
        "forward_hooks_with_kwargs": {1: True},
        "backward_pre_hooks": {0: hook("unshard")},
        "backward_hooks": {0: reshard},
    }
    make_graphed_callables(layer, (sample(),), 1, sample_kwargs={"mask": torch.ones(2, 4)}, capture_time_hooks=[hooks])
    x, kwargs = ("tensor", (2, 4), True), {"mask": ("tensor", (2, 4), False)}
    assert calls == {
        "pre": ((x,),),
        "pre with kwargs": ((x,), kwargs),
        "post": ((x,), x),
        "post with kwargs": ((x,), kwargs, x),
        "unshard": ((),),  # no gradients are passed
        "reshard": ((), ()),
    }


def describe(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return ("tensor", tuple(tree.shape), tree.requires_grad)
    if isinstance(tree, dict):
        return {key: describe(value) for key, value in tree.items()}
    return tuple(describe(item) for item in tree)


def returns_something(module: nn.Module) -> int:
    return 1


def wants_too_much(module: nn.Module, grad_output: Any, more: Any) -> None:
    pass


def wants_nothing() -> None:
    pass


def one(module: nn.Module) -> None:
    pass


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"forward_pre_hook": {0: one}}, r"capture_time_hooks\[0\].*'forward_pre_hook'.*forward_pre_hooks"),
        ({"forward_hooks": one}, "forward_hooks.*one function"),
        ({"forward_hooks": {0: 3}}, "forward_hooks.*int"),
        (
            {"backward_pre_hooks": {0: wants_too_much}},
            "backward_pre_hooks.*wants_too_much needs 3.*2 arguments at most",
        ),
        ({"forward_pre_hooks": {0: one}, "forward_pre_hooks_with_kwargs": 3}, "forward_pre_hooks_with_kwargs.*int"),
        ({"forward": {0: wants_nothing}}, "wants_nothing.*takes no argument"),
        ({"forward": {0: one}, "forward_hooks": {0: one}}, "forward_hooks.*forward.*same"),
        ({"backward_hooks": {0: returns_something}}, "returns_something returned int"),
        ([one], r"capture_time_hooks\[0\] is a list"),
    ],
)
def test_malformed_hooks_are_refused(hooks: Any, message: str) -> None:
    (layer,) = layers(1)
    with pytest.raises(CaptureError, match=message):
        make_graphed_callables(layer, (sample(),), capture_time_hooks=[hooks])
    assert "forward" not in vars(layer)
    with pytest.raises(CaptureError, match="list with one entry for each module"):
        make_graphed_callables(layer, (sample(),), capture_time_hooks=hooks if isinstance(hooks, dict) else {})


def test_a_hook_that_raises_is_named() -> None:
    def breaks(module: nn.Module) -> None:
        raise KeyError("gone")

    with pytest.raises(HookError, match="breaks raised in warmup"):
        make_graphed_callables(layers(1), ((sample(),),), capture_time_hooks=[{"forward_pre_hooks": {0: breaks}}])


@pytest.mark.parametrize("order", [None, INTERLEAVED])
def test_warm_up_hooks_run_once_globally(device: torch.device, order: list[int] | None) -> None:
    log, two = Log(), layers(2)
    names = [log.entry("a", MERGED), log.entry("b", MERGED)]

    def pre() -> str:
        assert not is_recording()
        log.calls.append("pre")
        return "an ignored value"

    def post() -> None:
        assert not is_recording()
        log.calls.append("post")

    make_graphed_callables(
        two, [(sample(),)] * (6 if order else 2), 3, _order=order, capture_time_hooks=names,
        pre_warmup_hook=pre, post_warmup_hook=post,
    )  # fmt: skip
    assert log.calls.count("pre") == log.calls.count("post") == 1
    assert log.calls[0] == "pre"
    warm_up = log.calls[1 : log.calls.index("post")]
    captured = log.calls[log.calls.index("post") + 1 :]
    assert len(captured) == 4 * (6 if order else 2)
    assert {name: warm_up.count(name) for name in ("a:f<", "b:b>")} == {"a:f<": 3, "b:b>": 3}


# -- gradients that leave ------------------------------------------------------------------------


@pytest.mark.parametrize("clone", [True, False])
def test_a_kept_gradient_is_not_overwritten_by_the_next_replay(device: torch.device, clone: bool) -> None:
    (layer,), (eager,) = layers(1), layers(1)
    make_graphed_callables(layer, (sample(),), clone_param_grads_on_return=clone)
    kept_gradients: list[Tensor] = []
    handle = layer.linear.weight.register_hook(kept_gradients.append)
    expected = []
    for step in range(3):
        for module in (layer, eager):
            module.zero_grad(set_to_none=True)
            module(data(step)).square().sum().backward()
        expected.append(eager.linear.weight.grad)
    handle.remove()
    torch.testing.assert_close(kept_gradients, expected, rtol=0, atol=0)


@pytest.mark.parametrize("clone", [True, False])
def test_gradients_accumulate(device: torch.device, clone: bool) -> None:
    (layer,), (eager,) = layers(1), layers(1)
    make_graphed_callables(layer, (sample(),), clone_param_grads_on_return=clone)
    for step in range(3):
        for module in (layer, eager):
            module(data(step)).square().sum().backward()
    torch.testing.assert_close(gradients(layer), gradients(eager), rtol=0, atol=0)


# -- FP8 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enabled": True}, "enabled=True"),
        ({"enabled": (False, True)}, r"enabled=\(False, True\)"),
        ({"fp8_enabled": True}, "fp8_enabled=True"),
        ({"calibrating": True}, "calibrating=True"),
        ({"fp8_calibrating": True}, "fp8_calibrating=True"),
        ({"cache_quantized_params": True}, "cache_quantized_params=True"),
        ({"fp8_weight_caching": True}, "fp8_weight_caching=True"),
    ],
)
def test_fp8_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    two = layers(2)
    with pytest.raises(CaptureError, match=f"{message}.*FP8"):
        make_graphed_callables(two, ((sample(),), (sample(),)), **arguments)
    assert all("forward" not in vars(m) for m in two)


@pytest.mark.parametrize("old_and_new", [("fp8_enabled", "enabled"), ("fp8_weight_caching", "cache_quantized_params")])
def test_an_argument_in_both_spellings_is_refused(old_and_new: tuple[str, str]) -> None:
    with pytest.raises(CaptureError, match=f"{old_and_new[0]}.*{old_and_new[1]}"):
        make_graphed_callables(layers(1), ((sample(),),), **dict.fromkeys(old_and_new, False))


def test_disabled_fp8_arguments_are_accepted() -> None:
    (layer,) = layers(1)
    make_graphed_callables(
        layer, (sample(),), fp8_enabled=False, fp8_calibrating=False, fp8_recipe=object(), fp8_weight_caching=False,
        amax_reduction_group=object(),
    )  # fmt: skip
    assert "forward" in vars(layer)


def test_transformer_engine_modules_are_refused_by_class() -> None:
    """With a stand-in: only the package of a class or of its bases counts."""
    theirs = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    derived = type("ColumnLinear", (theirs,), {"__module__": __name__})
    for inner in (theirs, derived):
        model = nn.Sequential(nn.Tanh(), nn.Sequential(inner(4, 4)))
        with pytest.raises(CaptureError, match=rf"modules\[0\]\.1\.0.*{inner.__name__}.*transformer_engine"):
            make_graphed_callables(model, (sample(),))


def test_delayed_weight_gradients_are_refused() -> None:
    class Delayed(Layer):
        def need_backward_dw(self) -> bool:
            return True

    with pytest.raises(CaptureError, match=r"modules\[0\] \(Delayed\).*backward_dw"):
        make_graphed_callables(Delayed(), (sample(),))


def test_positional_arguments_are_in_transformer_engines_order() -> None:
    assert list(inspect.signature(make_graphed_callables).parameters)[:20] == [
        "modules", "sample_args", "num_warmup_iters", "allow_unused_input", "sample_kwargs",
        "fp8_enabled", "fp8_calibrating", "fp8_recipe", "fp8_group", "fp8_weight_caching",
        "enabled", "calibrating", "recipe", "amax_reduction_group", "cache_quantized_params",
        "_order", "_num_layers_per_chunk", "pool", "retain_graph_in_backward", "_reuse_graph_input_output_buffers",
    ]  # fmt: skip


# -- retain_graph_in_backward ------------------------------------------------------------------------


def test_a_backward_runs_again_if_its_graph_was_retained(device: torch.device) -> None:
    model, eager = layers(2), layers(2)
    make_graphed_callables(model, ((sample(),), (sample(),)), retain_graph_in_backward=True)
    for step in range(2):
        x, y = data(step).requires_grad_(), data(step).requires_grad_()
        ours, theirs = model[1](model[0](x)), eager[1](eager[0](y))
        for attempt in range(3):
            ours.backward(data(10 + attempt), retain_graph=attempt < 2)
            theirs.backward(data(10 + attempt), retain_graph=attempt < 2)
            torch.testing.assert_close(gradients(*model), gradients(*eager), rtol=0, atol=0)
            torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)
        with pytest.raises((StaleGraph, RuntimeError), match=r"already ran|second time"):
            ours.backward(data(13))


def test_a_retained_forward_is_not_overwritten(device: torch.device) -> None:
    (layer,) = layers(1)
    make_graphed_callables(layer, (sample(),), retain_graph_in_backward=True)
    y = layer(data(0).requires_grad_())
    y.sum().backward(retain_graph=True)
    with pytest.raises(MemoryInUse, match="before the backward of its last call"):
        layer(data(1).requires_grad_())
    y.sum().backward()
    layer(data(1).requires_grad_()).sum().backward()


def test_later_graphs_leave_a_retained_forward_alone(device: torch.device) -> None:
    model, eager = layers(3), layers(3)
    make_graphed_callables(model, ((sample(),),) * 3, retain_graph_in_backward=True)
    ours, theirs = model[1](data(0)), eager[1](data(0))
    for y in (ours, theirs):
        y.backward(data(1), retain_graph=True)
    for step in range(3):
        for m in (model, eager):
            m[2](data(2 + step)).square().sum().backward()
    with pytest.raises(MemoryInUse, match="waits for its backward"):
        model[0](data(9))
    for y in (ours, theirs):
        y.backward(data(1))
    model[0](data(9))
    torch.testing.assert_close(gradients(*model), gradients(*eager), rtol=0, atol=0)


@pytest.mark.parametrize("reuse", [True, False])
def test_a_later_microbatch_leaves_a_retained_one_alone(device: torch.device, reuse: bool) -> None:
    (layer,), (eager,) = layers(1), layers(1)
    first, second = make_graphed_callables(
        (layer,), [(sample(),)] * 2, _order=[1, -1, 1, -1], retain_graph_in_backward=True,
        _reuse_graph_input_output_buffers=reuse,
    )  # fmt: skip
    for retained, later in ((first, second), (eager, eager)):
        y = retained(data(0))
        y.backward(data(1), retain_graph=True)
        later(data(2)).backward(data(3))
        y.backward(data(4))
    torch.testing.assert_close(gradients(layer), gradients(eager), rtol=0, atol=0)


def test_without_retain_graph_a_second_backward_is_refused(device: torch.device) -> None:
    (layer,) = layers(1)
    make_graphed_callables(layer, (sample(),))
    y = layer(data(0).requires_grad_())
    y.sum().backward(retain_graph=True)
    with pytest.raises(StaleGraph, match="already ran"):
        y.sum().backward()


# -- documentation -----------------------------------------------------------------------------------


def test_arguments_are_documented_and_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "transformer_engine.md").read_text(encoding="utf-8")
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    documented = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert set(inspect.signature(make_graphed_callables).parameters) - documented == set()
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(example, "docs/transformer_engine.md", "exec"), {})
    norms = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(norms) == 3
    assert all(norm > 0 for norm in norms)
