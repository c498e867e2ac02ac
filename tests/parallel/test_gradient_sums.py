"""Gradients are added to their buffers as they arrive, with the same bits, and few are alive at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rollgraph.graph import capture, make_graphed_callables
from rollgraph.graph.direct_sums import direct_sum_of, direct_sums
from rollgraph.model import Architecture, Decoder, token_logprobs
from rollgraph.model.layers import Linear
from rollgraph.model.recompute import recompute
from rollgraph.policy.train_graphs import add_gradients

LAYERS = 12
WIDTH = 24


class Tied(nn.Module):
    """A chain of layers between an embedding and a head that are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Parameter(torch.randn(30, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed[ids]
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return (hidden @ self.embed.t()).logsumexp(-1).sum()


class Lifetimes(TorchDispatchMode):
    """Counts, at each operation, how many of the gradients that are added to `buffers` are alive."""

    def __init__(self, buffers: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._addresses = {buffer.data_ptr() for buffer in buffers}
        self._storages: dict[int, StorageWeakRef] = {}
        self._alive: list[set[int]] = []  # at each operation, the storages in use
        self._gradients: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, Tensor) else ():
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:  # its reference keeps the key from being used again
                self._storages[storage._cdata] = StorageWeakRef(storage)
        if func is torch.ops.aten.add_.Tensor and args[0].data_ptr() in self._addresses:
            self._gradients.add(args[1].untyped_storage()._cdata)
        self._alive.append({key for key, reference in self._storages.items() if not reference.expired()})
        return result

    @property
    def most(self) -> int:
        assert len(self._gradients) >= LAYERS
        return max(len(alive & self._gradients) for alive in self._alive)


def make_buffers(model: nn.Module) -> dict[Tensor, Tensor]:
    return {parameter: torch.zeros(parameter.shape) for parameter in model.parameters()}


def add_all_at_once(loss: Tensor, buffers: dict[Tensor, Tensor]) -> None:
    for buffer, gradient in zip(buffers.values(), torch.autograd.grad(loss, list(buffers)), strict=True):
        buffer.add_(gradient)


@pytest.mark.parametrize("backend", ["eager", "tape"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_bits_of_autograd_and_few_are_alive_at_once(backend: Any, dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    sums: list[list[Tensor]] = []
    most: list[int] = []
    for add in (add_gradients, add_all_at_once):
        buffers = make_buffers(model)

        def step(ids: Tensor, add: Callable[..., None] = add, buffers: dict[Tensor, Tensor] = buffers) -> None:
            add(model(ids), buffers)

        graph = capture(step, (torch.zeros(7, dtype=torch.long),), backend=backend)
        assert not any(buffer.any() for buffer in buffers.values())
        for seed in range(2):  # the second call accumulates
            ids = torch.randint(30, (7,), generator=torch.Generator().manual_seed(seed))
            lifetimes = Lifetimes(list(buffers.values()))
            with lifetimes:
                graph(ids)
        sums.append(list(buffers.values()))
        most.append(lifetimes.most)
        assert all(parameter.grad is None and not parameter._backward_hooks for parameter in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))
    assert sums[0][0].abs().max() > 0
    assert most[0] <= 4  # of one layer, and of the embedding
    assert most[1] == len(sums[1])  # they are all alive if autograd returns them at once


def test_a_backward_that_fails_leaves_no_hook() -> None:
    model = Tied()
    buffers = make_buffers(model)
    buffers[nn.Parameter(torch.ones(2))] = torch.zeros(2)  # the loss does not depend on it
    with pytest.raises(RuntimeError, match="not have been used"):
        add_gradients(model(torch.arange(5)), buffers)
    assert all(not parameter._backward_hooks for parameter in buffers)


def test_a_hook_on_a_parameter_sees_its_gradient_and_may_change_it() -> None:
    """So no GEMM may add that gradient to its buffer itself."""
    model = Tied()
    plain = make_buffers(model)
    add_gradients(model(torch.arange(5)), plain)
    hooked = model.embed
    buffers = make_buffers(model)
    handle = hooked.register_hook(lambda gradient: 3 * gradient)
    with direct_sums(buffers):
        assert {parameter for parameter in buffers if direct_sum_of(parameter) is None} == {hooked}
    add_gradients(model(torch.arange(5)), buffers)
    handle.remove()
    assert torch.equal(buffers[hooked], 3 * plain[hooked])
    assert all(torch.equal(buffers[p], plain[p]) for p in buffers if p is not hooked)
    with direct_sums(buffers):
        assert all(direct_sum_of(parameter) is not None for parameter in buffers)


class Recomputed(nn.Module):
    """A linear layer that the backward pass recomputes."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = recompute(self, self.linear, x)
        return output


@pytest.mark.gpu
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("way", ["eager", "whole step", "callable"])
def test_a_gemm_adds_the_gradients_of_weight_and_bias_in_fp32(way: str, recomputed: bool) -> None:
    """Rounding a gradient to bf16 before it is added would make the error a thousand times as large."""
    torch.manual_seed(0)
    linear = Linear(48, 32, bias=True).to("cuda", torch.bfloat16)
    module = Recomputed(linear) if recomputed else linear
    buffers: dict[Tensor, Tensor] = {p: torch.zeros(p.shape, device="cuda") for p in module.parameters()}
    inputs = [torch.randn(64, 48, device="cuda", dtype=torch.bfloat16) for _ in range(5)]
    upstream = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)

    def step(x: Tensor) -> None:
        add_gradients((module(x) * upstream).sum(), buffers)

    run = step
    if way == "whole step":
        run = capture(step, (inputs[0],), backend="cuda")
    if way == "callable":
        make_graphed_callables(module, (inputs[0],), grad_buffers=buffers, backend="cuda")

        def run(x: Tensor) -> None:
            module(x).backward(upstream)

    for x in inputs:
        run(x)
    expected = upstream.double().t() @ sum(x.double() for x in inputs)
    error = (buffers[linear.weight].double() - expected).norm() / expected.norm()
    assert error < 1e-5
    expected = 5 * upstream.double().sum(0)
    error = (buffers[linear.bias].double() - expected).norm() / expected.norm()
    assert error < 1e-5
    assert direct_sum_of(linear.weight) is None
    assert direct_sum_of(linear.bias) is None


@pytest.mark.gpu
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_hook_changes_the_gradient_that_a_gemm_would_add(recomputed: bool) -> None:
    linear = Linear(48, 32, bias=True).to("cuda", torch.bfloat16)
    module = Recomputed(linear) if recomputed else linear
    buffers: dict[Tensor, Tensor] = {p: torch.zeros(p.shape, device="cuda") for p in module.parameters()}
    linear.weight.register_hook(torch.zeros_like)
    add_gradients(module(torch.randn(64, 48, device="cuda", dtype=torch.bfloat16)).float().sum(), buffers)
    assert not buffers[linear.weight].any()
    assert buffers[linear.bias].any()


SMALL = Architecture("llama", 64, hidden=64, mlp=96, layers=3, heads=4, kv_heads=2, head_dim=32)
MODELS = {
    "llama": SMALL,
    "tied, biases": replace(SMALL, family="qwen2", tied=True),
    "norms of heads": replace(SMALL, family="qwen3", tied=True, attention_bias=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS)
def test_a_model_sums_the_gradients_of_autograd(architecture: Architecture, recomputed: bool, captured: bool) -> None:
    """Autograd rounds its gradients to bf16, so they differ by that much. The sums have the same bits in each run."""
    torch.manual_seed(0)
    model = Decoder(architecture, checkpointing=recomputed).to("cuda", torch.bfloat16)
    cu_seqlens = torch.tensor([0, 40, 170], dtype=torch.int32, device="cuda")
    positions = torch.cat((torch.arange(40), torch.arange(130))).cuda()
    microbatches = torch.randint(architecture.vocabulary, (3, 170), device="cuda")
    microbatches[1, 90:] = 7  # as padding does, one token repeats very often

    def loss_of(ids: Tensor) -> Tensor:
        logprobs = token_logprobs(model(ids, positions, cu_seqlens, 130), model.head_weight, ids.roll(-1), chunk=64)
        assert isinstance(logprobs, Tensor)
        return logprobs.square().mean()

    sums: list[list[Tensor]] = []
    for _ in range(2):
        buffers: dict[Tensor, Tensor] = {p: torch.zeros(p.shape, device="cuda") for p in model.parameters()}

        def step(ids: Tensor, buffers: dict[Tensor, Tensor] = buffers) -> None:
            add_gradients(loss_of(ids), buffers)

        run = capture(step, (microbatches[0],), backend="cuda") if captured else step
        for ids in microbatches:
            run(ids)
        sums.append(list(buffers.values()))
    assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))
    names = [name for name, _ in model.named_parameters()]
    separate = [torch.autograd.grad(loss_of(ids), list(model.parameters())) for ids in microbatches]
    for name, total, parts in zip(names, sums[0], zip(*separate, strict=True), strict=True):
        expected = torch.stack(parts).double().sum(0)
        assert (total.double() - expected).norm() <= 1e-2 * expected.norm(), name
