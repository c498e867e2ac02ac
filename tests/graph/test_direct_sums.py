"""Direct sums: a function adds gradients to their buffers itself, and autograd never adds up the placeholders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollgraph.graph import CaptureError, make_graphed_callables
from rollgraph.graph.direct_sums import direct_sum_for, direct_sum_of, direct_sums
from rollgraph.model.recompute import recompute
from rollgraph.policy.train_graphs import add_gradients


class AddsItself(torch.autograd.Function):
    """`x * weight`, whose backward adds the gradient of the weight to its direct sum, if it has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        d_weight = (d_out * x).sum(0)
        total = direct_sum_of(ctx.weight)
        if total is None:
            return d_out * weight, d_weight
        total.buffer().add_(d_weight)
        return d_out * weight, total.placeholder()


class Repeated(nn.Module):
    """One weight with several uses: "d" adds its gradient to a direct sum, "p" leaves it to autograd."""

    def __init__(self, uses: str, recomputed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5, -2.0, 0.5]))
        self.uses = uses
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = recompute(self, self.run, x) if self.recomputed else self.run(x)
        return output

    def run(self, x: Tensor) -> Tensor:
        for use in self.uses:
            x = AddsItself.apply(x, self.weight) if use == "d" else x * self.weight  # type: ignore[no-untyped-call]
        return x


class Additions(TorchDispatchMode):
    """Counts the additions of one tensor to another."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("way", ["whole step", "callable"])
@pytest.mark.parametrize("uses", ["d", "dd", "ddd", "dp", "pd", "dpd", "p"])
def test_each_gradient_is_added_once(uses: str, way: str, recomputed: bool) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    module = Repeated(uses, recomputed)
    plain = Repeated("p" * len(uses)).double()
    (expected,) = torch.autograd.grad(plain(x.double()).sum(), [plain.weight])
    buffers: dict[Tensor, Tensor] = {module.weight: torch.zeros(3)}
    if way == "callable":
        make_graphed_callables(module, (x,), grad_buffers=buffers, backend="tape")
    for _ in range(2):
        if way == "callable":
            module(x).sum().backward()
        else:
            add_gradients(module(x).sum(), buffers)
    total = buffers[module.weight].double()
    assert ((total - 2 * expected).abs() <= 1e-5 * expected.abs()).all()
    assert direct_sum_of(module.weight) is None


def test_a_hook_that_would_see_no_gradient_is_refused() -> None:
    """The backward graph adds the gradient to its buffer, so the hook would never see it."""
    module = nn.Linear(3, 2)
    seen: list[Tensor] = []
    hook = module.weight.register_hook(seen.append)
    buffers: dict[Tensor, Tensor] = {module.weight: torch.zeros(2, 3)}
    forward = module.forward
    with pytest.raises(CaptureError, match=r"shape \(2, 3\) has a gradient buffer and a tensor hook"):
        make_graphed_callables(module, (torch.ones(4, 3),), grad_buffers=buffers, backend="tape")
    assert module.forward == forward
    assert not buffers[module.weight].any()
    hook.remove()
    make_graphed_callables(module, (torch.ones(4, 3),), grad_buffers=buffers, backend="tape")
    module(torch.ones(4, 3)).sum().backward()
    assert torch.equal(buffers[module.weight], torch.full((2, 3), 4.0))


def test_placeholders_are_not_added_up() -> None:
    """Three gradients take three additions, and their placeholders none."""
    module = Repeated("ddd")
    buffers: dict[Tensor, Tensor] = {module.weight: torch.zeros(3)}
    loss = module(torch.ones(4, 3)).sum()
    with Additions() as additions:
        add_gradients(loss, buffers)
    assert additions.count == 3


def test_a_sum_gives_one_placeholder_in_each_backward() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    for _ in range(2):
        with direct_sums({parameter: torch.zeros(2, 3)}) as sums:
            placeholder = sums[parameter].placeholder()
            assert placeholder is not None
            assert placeholder.shape == (2, 3)
            assert not placeholder.any()
            assert sums[parameter].placeholder() is None
            sums[parameter].add(placeholder)
            assert not sums[parameter].buffer().any()


def test_only_half_precision_on_cuda_is_added_directly() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    with direct_sums({parameter: torch.zeros(2, 3)}):
        assert direct_sum_of(parameter) is not None
        assert direct_sum_for(parameter, torch.bfloat16) is None
    assert direct_sum_for(parameter, torch.bfloat16) is None
