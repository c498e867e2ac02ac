"""A graph equals eager, bit for bit: outputs, gradients, parameters, buffers and the random stream.

Each program runs on two copies of a model, eagerly and graphed. A trace holds everything that it computed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import GraphError, GraphPool, MemoryInUse, capture, make_graphed_callables
from tests.parity.models import BATCH, MODELS, TIME, WIDTH, Fn, dropping, linear, mlp

STEPS, MICROBATCHES = 3, 2
Trace = list[Tensor | None]
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, fused=True, capturable=True),
    "adamw-warm": lambda p: torch.optim.AdamW(p, 0.01, fused=True, capturable=True, amsgrad=True),
}
# CUDA cannot set a generator's state during capture, so a checkpoint cannot draw its mask again there.
REWINDS_RNG = {"checkpointed", "checkpointed_dropout", "nested_checkpoint", "autocast_checkpoint"}
NONDETERMINISTIC = {"reductions", "lstm"}  # CUDA's cumsum is not deterministic; cuDNN's LSTM draws once per process
HOST_VALUES = {"constants", "other_constants"}  # CUDA cannot copy a Python list to the device during capture


def assert_same(graphed: Trace, eager: Trace) -> None:
    assert len(graphed) == len(eager)
    wrong = [i for i, (g, e) in enumerate(zip(graphed, eager, strict=True)) if not same(g, e)]
    assert not wrong, f"{len(wrong)} of {len(eager)} differ, first {wrong[0]}: {graphed[wrong[0]]} != {eager[wrong[0]]}"


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def copies(*tensors: Tensor | None) -> Trace:
    return [None if t is None else t.detach().clone() for t in tensors]


def state(model: nn.Module) -> Trace:
    """Copy the parameters, their gradients, and the buffers."""
    return copies(*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers())


def batches(count: int = STEPS * MICROBATCHES) -> list[Tensor]:
    return list(torch.randn(count, BATCH, TIME, WIDTH).unbind())


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    model = make()
    return model, copy.deepcopy(model)


def backward(model: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss, the output and the gradient of the input, which becomes a new leaf."""
    x = x.detach().requires_grad_()
    output = model(x)
    loss = (output.float() * output.detach().float().cos()).mean() * 3
    loss.backward()
    return loss.detach(), output.detach(), x.grad


def train(
    model: nn.Module,
    inputs: list[Tensor],
    how: str,
    optimizer: str = "adamw",
    set_to_none: bool = True,
    backend: str | None = None,
) -> Trace:
    """Take three steps of two microbatches. `how` says what is graphed; without a backend, nothing is."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    opt = OPTIMIZERS[optimizer](parameters)
    torch.manual_seed(1)
    if optimizer.endswith("warm"):
        backward(model, inputs[0])
        opt.step()
        opt.zero_grad()

    def whole(*microbatches: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        opt.zero_grad(set_to_none=set_to_none)
        results = [backward(model, x) for x in microbatches]
        opt.step()
        return results

    def micro(x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return backward(model, x)

    if backend is not None and how == "whole":
        whole = capture(whole, tuple(inputs[:MICROBATCHES]), backend=backend, warmup=1)
    elif backend is not None and how == "backward":
        micro = capture(micro, (inputs[0],), backend=backend, warmup=2)
    elif backend is not None and how == "module":
        sample = inputs[0].clone().requires_grad_()
        assert make_graphed_callables(model, (sample,), allow_unused_input=True, backend=backend) is model
    trace: Trace = []
    for step in range(STEPS):
        now = inputs[step * MICROBATCHES : (step + 1) * MICROBATCHES]
        if how == "whole":
            for result in whole(*now):
                trace += copies(*result)
        else:
            opt.zero_grad(set_to_none=set_to_none)
            for x in now:
                trace += copies(*micro(x))
            opt.step()
        trace += state(model)
    return [*trace, torch.rand(4)]


def skip_if_not_promised(name: str, backend: str) -> None:
    if backend == "cuda" and name in REWINDS_RNG | HOST_VALUES | NONDETERMINISTIC:
        pytest.skip("CUDA: sets a generator's state, copies from the host, or is not deterministic in eager either")


def combine(names: Iterable[str], settings: Iterable[Any]) -> list[Any]:
    """Combine each name with each setting. `make test` runs one setting of each name, in turn, and all of the first."""
    settings = list(settings)
    combined = []
    for row, name in enumerate(names):
        for column, setting in enumerate(settings):
            quick = row == 0 or column == row % len(settings)
            combined.append(pytest.param(name, setting, marks=[] if quick else pytest.mark.slow))
    return combined


@pytest.mark.parametrize(("name", "optimizer"), combine(MODELS, OPTIMIZERS))
def test_a_whole_step_equals_eager(name: str, optimizer: str, backend: str, device: torch.device) -> None:
    set_to_none = optimizer in ("sgd", "adamw-warm")
    skip_if_not_promised(name, backend)
    (graphed, eager), inputs = twins(MODELS[name]), batches()
    expected = train(eager, inputs, "whole", optimizer, set_to_none)
    assert_same(train(graphed, inputs, "whole", optimizer, set_to_none, backend), expected)


@pytest.mark.parametrize(("name", "setting"), combine(MODELS, itertools.product(["backward", "module"], [True, False])))
def test_graphs_without_the_optimizer_equal_eager(
    name: str, setting: tuple[str, bool], backend: str, device: torch.device
) -> None:
    """All three ways to capture agree, because each equals the same eager program."""
    how, set_to_none = setting
    skip_if_not_promised(name, backend)
    (graphed, eager), inputs = twins(MODELS[name]), batches()
    expected = train(eager, inputs, how, "momentum", set_to_none)
    assert_same(train(graphed, inputs, how, "momentum", set_to_none, backend), expected)


@pytest.mark.parametrize("name", ["mlp", "dropout", "checkpointed_dropout", "batch_norm", "in_place"])
def test_layers_as_graphs_of_one_pool_equal_eager(name: str, backend: str, device: torch.device) -> None:
    """A chain of graphed layers and one graph of all of them both equal eager."""
    skip_if_not_promised(name, backend)

    def build() -> nn.Sequential:
        # in_place returns a transposed tensor, so give every output the shape of an input.
        return nn.Sequential(*(nn.Sequential(MODELS[name](), Reshape()) for _ in range(3)))

    model, inputs = build(), batches()
    eager, whole, layered = (copy.deepcopy(model) for _ in range(3))
    samples = tuple((inputs[0].clone().requires_grad_(),) for _ in layered)
    make_graphed_callables(tuple(layered), samples, backend=backend)
    expected = train(eager, inputs, "backward")
    assert_same(train(whole, inputs, "backward", backend=backend), expected)
    assert_same(train(layered, inputs, "backward"), expected)


class Reshape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(BATCH, TIME, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("input_grad", [True, False])
def test_bf16_parameters_accumulate_into_fp32_buffers(
    dtype: torch.dtype, input_grad: bool, backend: str, device: torch.device
) -> None:
    (graphed, eager), inputs = twins(lambda: mlp().to(dtype)), [x.to(dtype) for x in batches()]
    results = []
    for model in (graphed, eager):
        buffers = {p: torch.zeros(p.shape) for p in model.parameters()}
        if model is graphed:
            sample = inputs[0].clone().requires_grad_(input_grad)
            make_graphed_callables(model, (sample,), grad_buffers=buffers, backend=backend)
        trace: Trace = []
        for step in range(STEPS):
            for x in inputs[step * MICROBATCHES : (step + 1) * MICROBATCHES]:
                x = x.clone().requires_grad_(input_grad)
                model(x).float().square().sum().backward()
                trace += copies(x.grad)
                if model is eager:
                    for p, buffer in buffers.items():
                        buffer.add_(p.grad)
                        p.grad = None
            trace += copies(*(p.grad for p in model.parameters()), *buffers.values())
            with torch.no_grad():
                for p, buffer in buffers.items():
                    p.sub_(buffer.to(dtype), alpha=0.1)
                    buffer.zero_()
            trace += state(model)
        results.append(trace)
    assert_same(*results)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", ["mlp", "sdpa", "tied", "layer_norm", "checkpointed", "constants"])
def test_graphs_under_autocast_equal_eager(name: str, cache: bool, backend: str, device: torch.device) -> None:
    """The caller enters autocast, around the captured function and around the graphed module."""
    skip_if_not_promised(name, backend)
    model, inputs, results = MODELS[name](), batches(2), []
    for how in ("eager", "backward", "module"):
        twin = copy.deepcopy(model)
        amp = torch.autocast(device.type, torch.bfloat16, cache_enabled=cache)

        def forward(x: Tensor, twin: nn.Module = twin) -> Tensor:
            return twin(x).float().square().mean()

        if how == "module":
            with amp:
                make_graphed_callables(twin, (inputs[0].clone().requires_grad_(),), backend=backend)

        def step(x: Tensor, forward: Any = forward) -> tuple[Tensor, Tensor | None]:
            x = x.detach().requires_grad_()
            loss = forward(x)
            with torch.autocast(x.device.type, enabled=False):
                loss.backward()
            return loss.detach(), x.grad

        if how == "backward":
            with amp:
                step = capture(step, (inputs[0],), backend=backend)
        trace: Trace = []
        for x in inputs:
            with amp:
                trace += copies(*step(x))
            trace += state(twin)
        results.append(trace)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


# -- gradients --------------------------------------------------------------------------------------


def test_a_gradient_kept_by_the_user_survives(backend: str, device: torch.device) -> None:
    """Including the gradient of an input, and a gradient that is the incoming one itself."""
    model = Fn(lambda m, x: m.inner(x) + m.bias, inner=linear(), bias=nn.Parameter(torch.randn(BATCH, TIME, WIDTH)))
    x = torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
    make_graphed_callables(model, (x,), backend=backend)
    kept: Trace = []
    for scale in (1.0, 2.0, 4.0):
        (model(x) * scale).sum().backward()
        leaves = [x, *model.parameters()]
        kept += [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
    first, second, third = kept[:4], kept[4:8], kept[8:]
    assert_same([g * 2 for g in first], second)
    assert_same([g * 4 for g in first], third)


def test_accumulation_is_exact(backend: str, device: torch.device) -> None:
    """Gradients of 1 and 2 add up to 3, whichever parameters had a gradient before."""
    for first_has_gradient in (True, False):
        weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        f = make_graphed_callables(lambda x: x * weight + bias, (torch.ones(3),), backend=backend)  # noqa: B023
        (weight if first_has_gradient else bias).grad = torch.zeros(3)
        f(torch.ones(3)).sum().backward()
        f(torch.ones(3) * 2).sum().backward()
        assert torch.equal(weight.grad, torch.full((3,), 3.0))
        assert torch.equal(bias.grad, torch.full((3,), 2.0))


def test_a_parameter_shared_by_two_graphs_gets_both_gradients(backend: str, device: torch.device) -> None:
    """In the later graph, its gradient is the incoming buffer, and must stay there while the earlier graph runs."""

    def run(graphed: bool) -> Trace:
        torch.manual_seed(2)
        shared, trace = nn.Parameter(torch.randn(WIDTH)), []
        layers: Sequence[Any] = (lambda x: x * 2 + shared, lambda x: x * 3 + shared)
        if graphed:
            samples = tuple((torch.randn(WIDTH, requires_grad=True),) for _ in layers)
            layers = make_graphed_callables(tuple(layers), samples, backend=backend)
        for _ in range(3):
            x = torch.randn(WIDTH, requires_grad=True)
            (layers[1](layers[0](x)) * torch.arange(WIDTH)).sum().backward()
            trace += copies(shared.grad, x.grad)
        return trace

    assert_same(run(True), run(False))


@pytest.mark.parametrize("how", ["backward", "module"])
def test_a_tensor_hook_of_a_parameter_runs_once(how: str, backend: str, device: torch.device) -> None:
    def build() -> nn.Module:
        model = mlp()
        model[0].weight.register_hook(lambda g: g * 2)
        return model

    torch.manual_seed(3)
    eager = build()
    graphed = build()
    graphed.load_state_dict(eager.state_dict())
    inputs = batches()
    assert_same(train(graphed, inputs, how, backend=backend), train(eager, inputs, how))


def test_a_parameter_of_an_unused_output_has_no_gradient(backend: str, device: torch.device) -> None:
    """As in eager; otherwise, the optimizer would apply weight decay to it."""
    graphed, eager = twins(lambda: Fn(lambda m, x: (m.a(x), m.b(x)), a=linear(), b=linear()))
    make_graphed_callables(graphed, (torch.randn(2, WIDTH),), backend=backend)
    results = []
    for model in (graphed, eager):
        opt = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
        model(torch.ones(2, WIDTH))[0].sum().backward()
        opt.step()
        results.append(state(model))
    assert_same(*results)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_graph_switched_off_and_on_equals_eager(set_to_none: bool, backend: str, device: torch.device) -> None:
    """A call that runs eagerly creates its own gradients, and the graph must continue from them."""
    (graphed, eager), inputs, results = twins(mlp), batches(), []
    for model in (graphed, eager):
        opt = OPTIMIZERS["momentum"](model.parameters())

        def run(x: Tensor, model: nn.Module = model) -> Any:
            return backward(model, x)

        if model is graphed:
            run = capture(run, (inputs[0],), backend=backend)
        trace: Trace = []
        for x, off in zip(inputs, (True, False, False, True, False, True), strict=True):
            if model is graphed:
                run.enabled = not off
            trace += copies(*run(x))
            opt.step()
            opt.zero_grad(set_to_none)
            trace += state(model)
        results.append(trace)
    assert_same(*results)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_autograd_grad_works_through_a_graph(set_to_none: bool, backend: str, device: torch.device) -> None:
    """With and without existing gradients."""
    graphed, eager = twins(mlp)
    sample = torch.randn(3, WIDTH, requires_grad=True)
    make_graphed_callables(graphed, (sample,), backend=backend)
    results = []
    for model in (graphed, eager):
        trace: Trace = []
        for _ in range(3):
            x = torch.ones(3, WIDTH, requires_grad=True)
            gradients = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
            model(x).sum().backward()
            trace += [*gradients, *state(model)]
            model.zero_grad(set_to_none)
        results.append(trace)
    assert_same(*results)


# -- schedules --------------------------------------------------------------------------------------

ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("make", [mlp, dropping, MODELS["batch_norm"], MODELS["checkpointed_dropout"]])
def test_an_interleaved_schedule_equals_eager(make: Any, reuse: bool, backend: str, device: torch.device) -> None:
    """Run two rounds, with gradients accumulating between them."""
    if make is MODELS["checkpointed_dropout"]:
        skip_if_not_promised("checkpointed_dropout", backend)
    chunks, inputs, results = nn.ModuleList([make(), make(), make()]), batches(6), []
    for graphed in (True, False):
        model = copy.deepcopy(chunks)
        # Chunk 1 has two layers, chunk 2 has one.
        calls: dict[tuple[int, int], list[Any]] = {
            (c, m): list(model[:2] if c == 1 else model[2:]) for c in (1, 2) for m in range(3)
        }
        torch.manual_seed(4)
        if graphed:
            sample = (inputs[0].clone().requires_grad_(),)
            flat = make_graphed_callables(
                tuple(model), (sample,) * 3, order=ORDER, layers_per_chunk=[2, 1], reuse_buffers=reuse, backend=backend
            )
            calls = {(1, m): list(flat[2 * m : 2 * m + 2]) for m in range(3)} | {
                (2, m): [flat[6 + m]] for m in range(3)
            }
        trace: Trace = []
        for round_ in range(2):
            trace += pipeline(calls, inputs[3 * round_ : 3 * round_ + 3])
            trace += state(model)
        results.append([*trace, torch.rand(3)])
    assert_same(*results)


def pipeline(calls: dict[tuple[int, int], list[Any]], inputs: list[Tensor]) -> Trace:
    """Run ORDER, handing activations and gradients from chunk to chunk as a pipeline sends them."""
    counts: dict[int, int] = dict.fromkeys((1, 2, -1, -2), 0)
    chunk_inputs: dict[tuple[int, int], Tensor] = {}
    chunk_outputs: dict[tuple[int, int], Tensor] = {}
    trace: Trace = []
    for step in ORDER:
        chunk, microbatch = abs(step), counts[step]
        counts[step] += 1
        key = (chunk, microbatch)
        if step > 0:
            source = inputs[microbatch] if chunk == 1 else chunk_outputs[1, microbatch]
            chunk_inputs[key] = y = source.detach().clone().requires_grad_()
            for layer in calls[key]:
                y = layer(y)
            chunk_outputs[key] = y
            trace += copies(y)
        else:
            gradient = (
                torch.ones_like(chunk_outputs[key]) * (microbatch + 1)
                if chunk == 2
                else chunk_inputs[2, microbatch].grad
            )
            chunk_outputs[key].backward(gradient)
            trace += copies(chunk_inputs[key].grad)
    return trace


# -- many graphs ------------------------------------------------------------------------------------


def chain(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(Fn(lambda m, x, mask: m.inner(x).tanh() * mask, inner=linear()) for _ in range(count))


def test_many_graphs_can_read_one_tensor(backend: str, device: torch.device) -> None:
    """Every graph reads the right values, and what one saved for its backward survives the next."""
    graphed, eager = chain(), None
    eager = copy.deepcopy(graphed)
    x, mask = torch.randn(3, WIDTH, requires_grad=True), torch.rand(3, WIDTH)
    make_graphed_callables(tuple(graphed), tuple((x, mask) for _ in graphed), backend=backend)
    results = []
    for layers in (graphed, eager):
        trace: Trace = []
        for scale in (1.0, 2.0, 3.0):
            y, shared, kept = x, mask * scale, []
            for layer in layers:
                y = layer(y, shared)
                kept.append(y)
            sum((k * k).sum() for k in kept).backward()  # the loss saves every output
            trace += [*copies(x.grad, *kept), *state(layers)]
        results.append(trace)
        x.grad = None
    assert_same(*results)


def test_graphs_of_one_pool_replay_in_their_order_of_capture(backend: str, device: torch.device) -> None:
    """Layers captured together replay 0..N-1 forward and N-1..0 backward; layers captured one by one cannot."""
    together, apart, mask = chain(2), chain(2), torch.ones(3, WIDTH)
    sample = (torch.randn(3, WIDTH, requires_grad=True), mask)
    make_graphed_callables(tuple(together), (sample, sample), backend=backend)
    together[1](together[0](sample[0], mask), mask).sum().backward()
    pool = GraphPool()
    for layer in apart:
        make_graphed_callables(layer, sample, pool=pool, backend=backend)
    y = apart[0](sample[0], mask)
    with pytest.raises(MemoryInUse, match="waits for its backward"):
        apart[1](y, mask)
    y.sum().backward()  # the refused call changed nothing
    assert apart[0].inner.weight.grad is not None


@pytest.mark.parametrize("make", [mlp, dropping])
def test_a_graphed_checkpoint_of_a_module_equals_eager(make: Any, backend: str, device: torch.device) -> None:
    """A function finds its parameters behind the checkpoint, and gradients are right in every replay."""
    skip_if_not_promised("checkpointed_dropout", backend)
    graphed, eager = twins(make)

    def over(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) * 2

    inputs, results = batches(4), []
    for model in (graphed, eager):
        f = over(model)
        torch.manual_seed(5)
        if model is graphed:
            f = make_graphed_callables(f, (inputs[0].clone().requires_grad_(),), backend=backend)
        trace: Trace = []
        for x in inputs:
            trace += copies(*backward(f, x)) + state(model)
        results.append([*trace, torch.rand(3)])
    assert_same(*results)


@pytest.mark.parametrize("how", ["capture", "module"])
def test_a_flag_written_in_place_is_seen(how: str, backend: str, device: torch.device) -> None:
    """The flag is not an argument, and its address is stable."""
    flag = torch.zeros((), dtype=torch.bool)

    def f(x: Tensor) -> Tensor:
        return torch.where(flag, x * 2, x)

    x, address = torch.ones(3), flag.data_ptr()
    make = capture if how == "capture" else make_graphed_callables
    g = make(f, (x,), backend=backend)
    for value in (False, True, True, False):
        flag.fill_(value)
        assert torch.equal(g(x), f(x))
    assert flag.data_ptr() == address


# -- randomness -------------------------------------------------------------------------------------


def test_the_random_stream_equals_eager_interleaved_and_resumed(backend: str, device: torch.device) -> None:
    """Two graphs alternate with eager code, and a state is saved midway and loaded again."""
    layers = nn.ModuleList([dropping(), dropping()])
    results = []
    for graphed in (True, False):
        model, x = copy.deepcopy(layers), torch.ones(BATCH, TIME, WIDTH)
        torch.manual_seed(6)
        pools = [GraphPool(), GraphPool()]
        if graphed:
            for layer, pool in zip(model, pools, strict=True):
                make_graphed_callables(layer, (x.clone().requires_grad_(),), pool=pool, backend=backend)
        get, put = (torch.cuda.get_rng_state, torch.cuda.set_rng_state) if device.type == "cuda" else (
            torch.get_rng_state, torch.set_rng_state)  # fmt: skip
        trace: Trace = []
        for index in (0, 1, 1, 0):
            trace += copies(torch.rand(2), *backward(model[index], x), torch.randn(2))
        saved = get()
        first = copies(*backward(model[0], x), torch.rand(2), *backward(model[1], x))
        put(saved)
        assert_same(copies(*backward(model[0], x), torch.rand(2), *backward(model[1], x)), first)
        results.append([*trace, *first, *state(model), torch.rand(2)])
    assert_same(*results)


def test_a_generator_of_the_user_follows_its_stream(backend: str, device: torch.device) -> None:
    ours, theirs = (torch.Generator(device).manual_seed(7) for _ in range(2))
    x = torch.zeros(5)
    f = capture(lambda x: x + torch.rand(5, generator=ours), (x,), backend=backend)
    for _ in range(3):
        assert torch.equal(f(x), torch.rand(5, generator=theirs))
        assert torch.equal(torch.rand(2, generator=ours), torch.rand(2, generator=theirs))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_generator_seeded_inside_equals_eager_or_is_refused(fresh: bool, backend: str, device: torch.device) -> None:
    kept = torch.Generator(device)

    def f(x: Tensor) -> Tensor:
        generator = (torch.Generator(device) if fresh else kept).manual_seed(8)
        return x + torch.rand(5, generator=generator)

    equals_eager_or_refuses(f, backend, torch.zeros(5))


# -- what a function may do ---------------------------------------------------------------------------


def equals_eager_or_refuses(f: Callable[[Tensor], Tensor], backend: str, *inputs: Tensor) -> None:
    """A capture may refuse what it cannot replay, but it must not replay something else."""
    try:
        graphed = capture(f, (inputs[0].clone(),), backend=backend)
    except GraphError:
        return
    for x in [*inputs, *inputs]:
        ours, theirs = x.clone(), x.clone()
        assert torch.equal(graphed(ours), f(theirs))
        assert torch.equal(ours, theirs), "the function writes its argument; the graph does not"


CONSTRUCTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda x: torch.tensor([1.0, 2.0, 3.0]),
    "as_tensor": lambda x: torch.as_tensor([1.0, 2.0, 3.0]),
    "asarray": lambda x: torch.asarray([1.0, 2.0, 3.0]),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0, 3.0]),
    "legacy": lambda x: torch.Tensor([1.0, 2.0, 3.0]),
    "from_numpy": lambda x: torch.from_numpy(numpy.ones(3, numpy.float32)),
    "frombuffer": lambda x: torch.frombuffer(bytearray(12), dtype=torch.float32),
    "eye": lambda x: torch.eye(3)[0],
    "linspace": lambda x: torch.linspace(0, 1, 3),
    "parameter": lambda x: nn.Parameter(torch.ones(3)).data,
    "deepcopy": lambda x: copy.deepcopy(x),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_constant_created_inside_equals_eager_or_is_refused(name: str, backend: str, device: torch.device) -> None:
    make = CONSTRUCTORS[name]
    equals_eager_or_refuses(lambda x: make(x).to(x.device).add_(x), backend, torch.ones(3), torch.full((3,), 2.0))


def test_an_argument_written_in_place_equals_eager_or_is_refused(backend: str, device: torch.device) -> None:
    equals_eager_or_refuses(lambda x: x.mul_(2) + 1, backend, torch.ones(3), torch.full((3,), 2.0))


@torch.library.custom_op("rollgraph_tests::head_and_tail", mutates_args=())
def head_and_tail(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x * 2, [x + 1, x + 2]


def test_an_operation_that_returns_a_list_equals_eager_or_is_refused(backend: str, device: torch.device) -> None:
    def f(x: Tensor) -> Tensor:
        head, (one, two) = head_and_tail(x)
        return head + one * two

    equals_eager_or_refuses(f, backend, torch.ones(3), torch.full((3,), 2.0))
