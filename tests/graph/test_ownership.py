"""Ownership of memory, open intervals, and how long an output is valid."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import GraphPool, StaleGraph, capture, make_graphed_callables
from rollgraph.graph.errors import MemoryInUse
from tests.graph.chains import block, chain, equal_gradients, leaf

# -- open intervals --------------------------------------------------------------------------------


def test_backwards_in_nested_order_equal_eager_in_every_round(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    blocks, twins = chain(3, backend, pool)
    for _ in range(3):
        x = torch.randn(3, 4)
        for modules in (blocks, twins):
            nn.Sequential(*modules)(x).square().sum().backward()
        assert equal_gradients(blocks, twins)
        assert pool.arena.open_intervals() == []


def test_separate_backwards_run_innermost_first(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    blocks, twins = chain(3, backend, pool)
    x = torch.randn(3, 4)
    outs = [b(x) for b in blocks]
    assert len(pool.arena.open_intervals()) == 3
    for out in reversed(outs):
        out.sum().backward()
    for twin in twins:
        twin(x).sum().backward()
    assert equal_gradients(blocks, twins)


def test_a_backward_refused_for_its_order_can_run_later(backend: str, device: torch.device) -> None:
    blocks, twins = chain(2, backend)
    x = torch.randn(3, 4)
    first, second = (b(x) for b in blocks)
    with pytest.raises(MemoryInUse, match="shares memory"):  # the second block still needs that memory
        first.sum().backward()
    assert all(p.grad is None for b in blocks for p in b.parameters())
    second.sum().backward()
    first.sum().backward()
    for twin in twins:
        twin(x).sum().backward()
    assert equal_gradients(blocks, twins)


def test_a_dropped_output_closes_the_interval(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    (graphed,), (twin,) = chain(1, backend, pool)
    for _ in range(3):
        graphed(leaf())  # not kept
        assert pool.arena.open_intervals() == []
    out = graphed(leaf())
    doubled = out * 2  # keeps the node alive
    del out
    with pytest.raises(MemoryInUse):
        graphed(leaf())
    del doubled
    x = torch.randn(3, 4)
    for module in (graphed, twin):
        module(x).sum().backward()
    assert equal_gradients([graphed], [twin])


def test_a_detached_output_leaves_nothing_open(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    (graphed,), _ = chain(1, backend, pool)
    kept = [graphed(leaf()).detach().clone() for _ in range(3)]
    assert pool.arena.open_intervals() == []
    assert not torch.equal(kept[0], kept[1])


def test_an_exception_between_forward_and_backward_closes_the_interval(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    blocks, twins = chain(2, backend, pool)

    def fails(x: Tensor) -> None:
        out = blocks[1](blocks[0](x))
        raise ValueError(f"{out.shape}")

    for _ in range(2):
        with pytest.raises(ValueError, match="3, 4"):
            fails(leaf())
        gc.collect()
        assert pool.arena.open_intervals() == []
    x = torch.randn(3, 4)
    for modules in (blocks, twins):
        nn.Sequential(*modules)(x).sum().backward()
    assert equal_gradients(blocks, twins)


def test_an_exception_in_the_users_backward_leaves_graphs_usable(backend: str, device: torch.device) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ValueError("user")

    blocks, twins = chain(2, backend)
    with pytest.raises(ValueError, match="user"):
        blocks[1](Fails.apply(blocks[0](leaf()))).sum().backward()
    assert all(p.grad is None for p in blocks[0].parameters())
    for b in blocks:
        b.zero_grad()
    gc.collect()
    x = torch.randn(3, 4)
    for modules in (blocks, twins):
        nn.Sequential(*modules)(x).sum().backward()
    assert equal_gradients(blocks, twins)


def test_a_second_backward_is_refused(backend: str, device: torch.device) -> None:
    (graphed,), (twin,) = chain(1, backend)
    x = leaf()
    loss = graphed(x).sum()
    loss.backward(retain_graph=True)
    twin(x.detach()).sum().backward()
    kept = x.grad.clone()
    with pytest.raises(StaleGraph, match="already ran"):
        loss.backward()
    assert equal_gradients([graphed], [twin])
    assert torch.equal(x.grad, kept)


def test_two_pools_are_independent(backend: str, device: torch.device) -> None:
    (a,), (twin_a,) = chain(1, backend)
    (b,), (twin_b,) = chain(1, backend)
    x = torch.randn(3, 4)
    out_a, out_b = a(x), b(x)
    out_a.sum().backward()  # any order
    b_again = out_b * 2
    a(x).sum().backward()
    b_again.sum().backward()
    for _ in range(2):
        twin_a(x).sum().backward()
    (twin_b(x) * 2).sum().backward()
    assert equal_gradients([a, b], [twin_a, twin_b])


def test_two_models_in_one_process_do_not_interfere(backend: str, device: torch.device) -> None:
    pools = (GraphPool(), GraphPool())
    models = [chain(2, backend, pool) for pool in pools]
    for _ in range(2):
        x = torch.randn(3, 4)
        losses = [nn.Sequential(*blocks)(x).sum() for blocks, _ in models]
        pools[0].disable()
        pools[0].enable()
        for loss in losses:
            loss.backward()
        for blocks, twins in models:
            nn.Sequential(*twins)(x).sum().backward()
            assert equal_gradients(blocks, twins)
    pools[0].reset()
    assert nn.Sequential(*models[0][0])(torch.randn(7, 4)).shape == (7, 4)
    x = torch.randn(3, 4)
    assert torch.equal(models[1][0][0](x), models[1][1][0](x))  # the reset of one pool leaves the other alone
    assert pools[1].report().replays == 5


def test_a_captured_function_waits_for_the_intervals_of_its_pool(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    (graphed,), _ = chain(1, backend, pool)
    step = capture(lambda x: x.exp(), (torch.randn(3),), pool=pool, backend=backend)
    out = graphed(leaf())
    x = torch.randn(3)
    with pytest.raises(MemoryInUse, match="waits for its backward"):
        step(x)
    out.sum().backward()
    assert torch.equal(step(x), x.exp())


def test_reset_of_a_pool_frees_it_for_new_captures(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    (graphed,), (twin,) = chain(1, backend, pool)
    out = graphed(leaf())
    pool.reset()
    pool.reset()
    assert pool.report().graphs == ()
    with pytest.raises(StaleGraph, match="reset between"):
        out.sum().backward()
    x = torch.randn(7, 4)
    assert torch.equal(graphed(x), twin(x))
    (again,), (twin_again,) = chain(1, backend, pool)
    x = torch.randn(3, 4)
    assert torch.equal(again(x), twin_again(x))  # although `out` of the reset graph is still alive


# -- static outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["callable", "capture"])
def test_an_output_saved_by_an_eager_op_is_protected(backend: str, device: torch.device, how: str) -> None:
    graphed = (make_graphed_callables if how == "callable" else capture)(torch.exp, (torch.randn(3),), backend=backend)
    weight, x = torch.ones(3, requires_grad=True), torch.randn(3)
    loss = (graphed(x) * weight).sum()  # saves the output for the gradient of `weight`
    graphed(torch.randn(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert weight.grad is None
    (graphed(x) * weight).sum().backward()
    assert torch.equal(weight.grad, x.exp())


def test_an_output_saved_beside_a_finished_backward_is_protected(backend: str, device: torch.device) -> None:
    (graphed,), _ = chain(1, backend)
    weight, x = torch.ones(4, requires_grad=True), leaf()
    out = graphed(x)
    loss = (out * weight).sum()
    torch.autograd.grad(out.sum(), x)
    graphed(leaf())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(inputs=[weight])


def test_an_output_saved_by_eager_survives_other_graphs(backend: str, device: torch.device) -> None:
    blocks, twins = chain(3, backend)
    x = torch.randn(3, 4)
    for modules in (blocks, twins):
        hidden = modules[0](x)
        (modules[2](modules[1](hidden) * hidden) * hidden).square().sum().backward()
    assert equal_gradients(blocks, twins)


def test_kept_gradients_are_not_overwritten(backend: str, device: torch.device) -> None:
    (graphed,), _ = chain(1, backend)
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(*tensors: Tensor) -> None:
        kept.extend((t, t.clone()) for t in tensors)

    for accumulate in (False, True, False):
        x = leaf()
        graphed(x).square().sum().backward()
        keep(x.grad, *([] if accumulate else [p.grad for p in graphed.parameters()]))
        keep(*torch.autograd.grad(graphed(x).sum(), [x, *graphed.parameters()]))
        keep(*torch.autograd.grad(graphed(x).sum(), [graphed[0].bias]))
        if not accumulate:
            graphed.zero_grad(set_to_none=True)
    graphed[0].weight.grad = torch.zeros(4, 4)  # one gradient exists, one does not
    graphed[0].bias.grad = None
    graphed(leaf()).sum().backward()
    keep(graphed[0].bias.grad)
    graphed[0].bias.grad = None
    graphed(leaf()).mul(2).sum().backward()
    assert all(torch.equal(tensor, value) for tensor, value in kept)


@pytest.mark.parametrize("where", ["tensor", "accumulate node", "post accumulate"])
def test_a_gradient_kept_by_a_hook_is_not_overwritten(backend: str, device: torch.device, where: str) -> None:
    (graphed,), _ = chain(1, backend)
    weight, kept = graphed[0].weight, []
    node = torch.autograd.graph.get_gradient_edge(weight).node  # held: a hook lives as long as its node
    weight.grad, graphed[0].bias.grad = torch.zeros(4, 4), torch.zeros(4)

    def hook(*gradients: Any) -> None:
        gradient = gradients[0][0] if isinstance(gradients[0], tuple) else gradients[0]
        kept.append((gradient, gradient.clone()))

    if where == "tensor":
        weight.register_hook(hook)
    elif where == "accumulate node":
        node.register_prehook(hook)
    else:
        weight.register_post_accumulate_grad_hook(lambda p: hook(p.grad.clone()))
    for _ in range(3):
        graphed(leaf()).square().sum().backward()
    assert len(kept) == 3
    assert all(torch.equal(tensor, value) for tensor, value in kept)


def test_accumulation_is_exact(backend: str, device: torch.device) -> None:
    blocks, twins = chain(2, backend)
    for step in range(6):
        x = leaf()
        y = x.detach().clone().requires_grad_()
        for modules, z in ((blocks, x), (twins, y)):
            nn.Sequential(*modules)(z).square().sum().backward()
            if step % 3 == 2:
                for m in modules:
                    m.zero_grad(set_to_none=step == 2)
        assert torch.equal(x.grad, y.grad)
        assert equal_gradients(blocks, twins)


@pytest.mark.parametrize("existing", [False, True])
def test_a_parameter_shared_by_two_graphs_gets_both_gradients(
    backend: str, device: torch.device, existing: bool
) -> None:
    """`x + shift` returns its incoming gradient, in memory that the next backward graph overwrites."""
    shift = nn.Parameter(torch.zeros(4))
    functions = (lambda x: x * 2 + shift, lambda x: x * 3 + shift)
    graphed = make_graphed_callables(functions, ((torch.randn(4, requires_grad=True),),) * 2, backend=backend)
    for _ in range(2):
        x = torch.randn(4, requires_grad=True)
        shift.grad = torch.zeros(4) if existing else None
        graphed[1](graphed[0](x)).sum().backward()
        assert torch.equal(shift.grad, torch.full((4,), 4.0))


def test_tied_weights_over_two_graphs_get_both_gradients(backend: str, device: torch.device) -> None:
    blocks = [block(), block()]
    blocks[1][0].weight = blocks[0][0].weight
    twins = copy.deepcopy(blocks)
    make_graphed_callables(tuple(blocks), ((leaf(),), (leaf(),)), backend=backend)
    for _ in range(3):
        x = torch.randn(3, 4)
        for modules in (blocks, twins):
            nn.Sequential(*modules)(x).square().sum().backward()
        assert equal_gradients(blocks, twins)


# -- memory of the program --------------------------------------------------------------------------


def test_samples_and_inputs_are_never_written_to(backend: str, device: torch.device) -> None:
    samples = [torch.randn(3, 4) for _ in range(3)]
    values = [s.clone() for s in samples]
    module = block()
    make_graphed_callables(module, (samples[0],), backend=backend)
    function = make_graphed_callables(lambda x, y: (x + 1).mul_(y), (samples[1], samples[2]), backend=backend)
    step = capture(lambda x, y: (x + 1).mul_(y), (samples[1], samples[2]), backend=backend)
    inputs = [torch.randn(3, 4) for _ in range(2)]
    kept = [i.clone() for i in inputs]
    for _ in range(2):
        module(inputs[0]).sum().backward()
        function(*inputs)
        step(*inputs)
    assert all(map(torch.equal, samples, values))
    assert all(map(torch.equal, inputs, kept))


def squeeze_memory(device: torch.device) -> None:
    """Free unused memory, then fill as much of it with NaN as a new allocation can get."""
    gc.collect()
    limit = 1 << 28
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        limit = min(torch.cuda.mem_get_info()[0] // 2, 8 << 30)
    held = []
    for size in [limit // 4, limit // 8, *([1 << 20] * 32), *([1 << 12] * 512), *([64] * 4096), *([1 << 8] * 1024)]:
        held.append(torch.full((size // 4,), float("nan")))
    if device.type == "cuda":
        torch.cuda.synchronize()


def test_results_survive_memory_pressure(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    blocks, twins = chain(3, backend, pool)
    hidden = {"shift": torch.randn(4)}
    shift = hidden["shift"].clone()
    shifted = capture(lambda x: (x + hidden["shift"]).exp().sum(0), (torch.randn(3, 4),), pool=pool, backend=backend)
    hidden.clear()  # the program drops it, but the graph still refers to it
    for _ in range(2):
        x = torch.randn(3, 4)
        for modules in (blocks, twins):
            out = nn.Sequential(*modules)(x)
            if modules is blocks:
                squeeze_memory(device)
            out.square().sum().backward()
            del out
        assert equal_gradients(blocks, twins)
        squeeze_memory(device)
        result = shifted(x)
        squeeze_memory(device)
        assert torch.equal(result, (x + shift).exp().sum(0))


def test_a_graph_outlives_everything_the_user_deletes(backend: str, device: torch.device) -> None:
    def build() -> tuple[Any, Any, Tensor, Tensor]:
        model, x = block(), torch.randn(3, 4)
        expected = model(x).detach()
        graphed = make_graphed_callables(model, (torch.randn(3, 4),), backend=backend).forward
        return graphed, capture(copy.deepcopy(model), (torch.randn(3, 4),), backend=backend), x, expected

    graphed, step, x, expected = build()
    squeeze_memory(device)
    assert torch.equal(graphed(x), expected)
    squeeze_memory(device)
    assert torch.equal(step(x), expected)
