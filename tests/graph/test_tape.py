"""The tape has the semantics of a CUDA graph: static addresses, and no Python at replay."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from rollgraph.graph import CaptureError, GraphPool, capture
from rollgraph.graph import make_graphed_callables as graph
from tests.graph.comparisons import equal, example, second_example

# -- what can be recorded --------------------------------------------------------------------------


def _set_by_mask(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0] = 0.5
    return x


def _write_views(x: Tensor) -> Tensor:
    x = x.clone()
    for part in x.split(2):
        part.mul_(part.sum())
    x[1:, ::2].add_(1)
    x.t()[0].zero_()
    return x


def _data_of_intermediate(x: Tensor) -> Tensor:
    z = torch.zeros(4, 4)
    z.data = x * 2
    return z + 1


def _swap_data(x: Tensor) -> Tensor:
    a, b = x * 1, x * 2
    a.data, b.data = b.data, a.data
    return (a - 1) * b.sum()


def _grow(x: Tensor) -> Tensor:
    return torch.add(x, 1, out=torch.empty(0))


ALLOWED: dict[str, Callable[[Tensor], Any]] = {
    "set by mask": _set_by_mask,
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x * 2),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.arange(4), 0, output_size=6),
    "int index": lambda x: x[torch.arange(0, 4, 2), torch.arange(1, 4, 2)],
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "topk": lambda x: tuple(x.topk(2)),
    "constant": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "constant written": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(x[0]),
    "constant returned": lambda x: (torch.tensor([1.0, 2.0]), torch.tensor(3)),
    "numpy constant": lambda x: torch.as_tensor(np.arange(4.0, dtype=np.float32)).to(x.device) * x,
    "tensor of a tensor": lambda x: x.clone().detach() * torch.scalar_tensor(2.0),
    "full written": lambda x: torch.full((4,), 3.0).add_(x[0]),
    "empty written": lambda x: torch.empty(4, 4).copy_(x).mul_(2),
    "empty strided": lambda x: torch.empty_strided((4, 4), (1, 4)).copy_(x),
    "t_": lambda x: x.clone().t_() + 1,
    "unsqueeze_": lambda x: x.clone().unsqueeze_(0).mul_(2),
    "squeeze_": lambda x: x.clone().unsqueeze_(0).squeeze_(0).mul_(3),
    "transpose_": lambda x: x.clone().transpose_(0, 1).add_(1),
    "as_strided_": lambda x: x.clone().as_strided_((2, 2), (1, 2)) + 0,
    "views": _write_views,
    "data": _data_of_intermediate,
    "swapped data": _swap_data,
    "out": lambda x: torch.add(x, x, out=torch.empty(4, 4)),
    "out that grows": _grow,
    "foreach": lambda x: list(torch._foreach_add([x, x * 2], 1.0)),
    "cat": lambda x: torch.cat([x, x.t()]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "vmap": lambda x: torch.vmap(lambda row: row.sum() * row)(x),
    "func.grad": lambda x: torch.func.grad(lambda z: (z**3).sum())(x),
    "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "fft": lambda x: torch.fft.fft(x).conj() * 2,
    "conj output": lambda x: torch.fft.fft(x).conj().resolve_conj(),
    "dtype": lambda x: x.to(torch.bfloat16).float(),
    "autocast": lambda x: torch.autocast(x.device.type, dtype=torch.bfloat16)(lambda: x @ x)(),
}  # fmt: skip

OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "mixed": lambda x: {"b": [x + 1, None], "a": (3, "s", True), "c": 1.5},
    "empty tensor": lambda x: x[:0] * 2,
    "zero-size": lambda x: (x.new_zeros(0, 3) + 1, x.new_zeros(3, 0).sum(1)),
    "scalar": lambda x: (x.sum(), x.new_zeros(())),
    "transposed": lambda x: (x * 2).t(),
    "strided": lambda x: (x * 2)[:, ::2],
    "expanded": lambda x: x.sum(0).expand(4, 4),
    "integers": lambda x: (x > 0, x.long(), x.argmax(1), x.to(torch.uint8)),
    "input": lambda x: x,
    "view of input": lambda x: (x.t(), x[1:]),
    "aliases": lambda x: (lambda z: (z, z, z[0], z.t()))(x + 1),
    "alias written later": lambda x: (lambda z: (z[0], z.mul_(2)))(x + 1),
    "split": lambda x: (x * 2).split(2),
}


@pytest.mark.parametrize("name", [*ALLOWED, *OUTPUTS])
def test_replay_equals_eager(backend: str, device: torch.device, name: str) -> None:
    function = {**ALLOWED, **OUTPUTS}[name]
    if backend == "cuda" and name in ("numpy constant", "constant", "constant written", "constant returned"):
        pytest.skip("copies from the host")
    with torch.no_grad():
        graphed = capture(function, (example(),), backend=backend)
        for make in (second_example, example, second_example):
            x = make()
            assert equal(graphed(x), function(make()))
            assert torch.equal(x, make()), "the caller's input is never written"


def test_zeros_without_memory_are_materialized() -> None:
    """Autograd's derivatives make such zeros, and a replay would have no memory to write them to."""

    def function(x: Tensor) -> Any:
        zeros = torch._efficientzerotensor(4, 4)
        return zeros, zeros[1:], zeros + x

    graphed = capture(function, (example(),), backend="tape")
    assert equal(graphed(second_example()), function(second_example()))


@pytest.mark.parametrize("name", ["resize_", "set_", "sparse", "external t_", "external resize_"])
def test_an_operation_that_cannot_be_recorded_is_refused(name: str) -> None:
    outside = torch.zeros(4, 2)
    function: Callable[[Tensor], Any] = {
        "resize_": lambda x: x.clone().resize_(9, 9),
        "set_": lambda x: torch.empty(0).set_(x.clone()),
        "sparse": lambda x: x.to_sparse().to_dense(),
        "external t_": lambda x: outside.t_() @ x,
        "external resize_": lambda x: outside.resize_(8, 8).sum() + x,
    }[name]
    with pytest.raises(CaptureError) as caught:
        capture(function, (example(),), backend="tape")
    assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)
    assert outside.shape == (4, 2), "and nothing has changed"


@pytest.mark.parametrize("kind", ["local", "tensor"])
def test_an_intermediate_with_replaced_data_reads_the_new_memory(backend: str, device: torch.device, kind: str) -> None:
    """`.data =` dispatches nothing; the operations after it must still read the new memory."""

    def step(x: Tensor) -> Tensor:
        z = x.exp() if kind == "local" else torch.zeros(4, 4)
        z.sum()
        z.data = x * 2
        return z + 1

    with torch.no_grad():
        graphed = capture(step, (example(),), backend=backend)
        assert torch.equal(graphed(second_example()), step(second_example()))


def test_outputs_alias_parameters(backend: str, device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(3))
    graphed = capture(lambda: (weight, weight[1:], weight * 2), (), backend=backend)
    whole, part, double = graphed()
    assert whole.data_ptr() == weight.data_ptr()
    weight.data.fill_(5)
    assert torch.equal(graphed()[2], weight * 2)
    assert [whole[0].item(), part[0].item(), double[0].item()] == [5, 5, 10]


def test_a_function_may_have_neither_inputs_nor_outputs(backend: str, device: torch.device) -> None:
    total = torch.zeros(())
    graphed = capture(lambda: (total.add_(1), None)[1], (), backend=backend)
    assert total.item() == 0
    assert [graphed() for _ in range(3)] == [None] * 3
    assert total.item() == 3


# -- the semantics of a graph ----------------------------------------------------------------------


def test_addresses_are_static_and_python_is_not_replayed(backend: str, device: torch.device) -> None:
    calls: list[int] = []
    weight = torch.ones(4)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return x * weight + len(calls), x.t()

    graphed = capture(step, (example(),), backend=backend, warmup=2)
    assert len(calls) == 3
    outputs = [graphed(example()) for _ in range(4)]
    assert len({(a.data_ptr(), b.data_ptr()) for a, b in outputs}) == 1
    junk = [torch.full((4, 4), float("nan")) for _ in range(100)]
    del junk
    assert torch.equal(graphed(example())[0], example() + 3), "the Python number is the recorded one"
    assert len(calls) == 3


def test_a_flag_written_in_place_is_seen(backend: str, device: torch.device) -> None:
    """A replay reads the flag from memory, so it sees the new value."""
    flag, rate = torch.zeros((), dtype=torch.bool), torch.tensor(1.0)
    graphed = capture(lambda x: torch.where(flag, x * rate, -x), (example(),), backend=backend)
    x = example()
    for on, value in [(False, 1.0), (True, 2.0), (True, 3.0), (False, 4.0), (True, 5.0)]:
        flag.fill_(on)
        rate.fill_(value)
        assert torch.equal(graphed(x), x * value if on else -x)


def test_the_next_replay_overwrites_outputs_but_not_copies(backend: str, device: torch.device) -> None:
    graphed = capture(lambda x: x * 2, (example(),), backend=backend)
    first = graphed(example())
    kept = first.clone()
    graphed(second_example())
    assert torch.equal(first, second_example() * 2)
    assert torch.equal(kept, example() * 2)


def test_a_replay_may_read_its_own_last_output(backend: str, device: torch.device) -> None:
    graphed = capture(lambda x: x.t() * 0.5 + 1, (example(),), backend=backend)
    replayed, expected = example(), example()
    for _ in range(4):
        replayed, expected = graphed(replayed), expected.t() * 0.5 + 1
        assert torch.equal(replayed, expected)


def test_intermediates_are_freed() -> None:
    def step(x: Tensor) -> Tensor:
        for _ in range(50):
            x = (x * 1.01).sin()
        return x

    x = torch.randn(256, 256)
    pool = GraphPool()
    graphed = capture(step, (x,), backend="tape", pool=pool)
    assert torch.equal(graphed(x + 1), step(x + 1))
    size = x.nbytes
    assert graphed.record.bytes_owned < 6 * size, "not the 100 intermediates"
    assert pool.memory_bytes() < 6 * size


def test_program_is_readable_and_free_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.5))
    graphed = capture(model, (example(),), backend="tape")
    graphed(example())
    source = graphed._variants[0].recording.program.source
    assert source.startswith("def replay():")
    assert all(name in source for name in ("addmm", "gelu", "bernoulli"))
    assert "Linear" not in source
    files: set[str] = set()
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        graphed(example())
    finally:
        sys.setprofile(None)
    assert not [file for file in files if "torch/nn/modules" in file], "no code of the model runs"
    assert "<tape>" in files


def test_unused_results_are_not_computed() -> None:
    def step(x: Tensor) -> Tensor:
        (x @ x).exp().sum()
        return x + 1

    graphed = capture(step, (example(),), backend="tape")
    graphed(example())
    assert "mm" not in graphed._variants[0].recording.program.source


# -- with autograd ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (3, 4)])
def test_empty_batches_and_single_rows_equal_eager(backend: str, device: torch.device, shape: tuple[int, int]) -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())
    twin = copy.deepcopy(layer)
    graph(layer, (torch.zeros(shape).requires_grad_(),), backend=backend)
    for scale in (1.0, 2.0):
        x, y = (torch.full(shape, scale).requires_grad_() for _ in range(2))
        a, b = layer(x), twin(y)
        assert torch.equal(a, b)
        a.sum().backward(), b.sum().backward()
        assert torch.equal(x.grad, y.grad)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(layer.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("name", ["scalar", "transposed", "expanded", "mixed", "aliases", "integers", "strided"])
def test_differentiable_outputs_of_every_kind_equal_eager(backend: str, device: torch.device, name: str) -> None:
    layer = nn.Linear(4, 4)
    twin = copy.deepcopy(layer)
    graphed = graph(lambda x: OUTPUTS[name](layer(x)), (example(),), backend=backend)
    for make in (second_example, example):
        replayed, expected = graphed(make()), OUTPUTS[name](twin(make()))
        assert equal(replayed, expected)
        for tree in (replayed, expected):
            leaves = [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.requires_grad]
            if leaves:
                sum((t * t).sum() for t in leaves).backward()
        for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-6)


# -- memory of a recording -------------------------------------------------------------------------


def test_recording_frees_an_intermediate_when_the_function_does() -> None:
    freed: list[bool] = []

    def step(x: Tensor) -> Tensor:
        intermediate = x + 1
        reference = StorageWeakRef(intermediate.untyped_storage())
        result = intermediate * 2
        del intermediate
        freed.append(reference.expired())
        return result

    capture(step, (torch.ones(4),), pool=GraphPool(), backend="tape", warmup=1)
    assert freed == [True] * len(freed)
    assert len(freed) >= 2  # of the warm-up and of the recording


def test_successive_tensors_at_one_address_are_told_apart() -> None:
    """Each part is freed before the next one is created, which then often reuses its Python object."""

    def step(x: Tensor) -> Tensor:
        x = x.clone()
        total = x.new_zeros(())
        for i in range(16):
            part = x.flatten()[i : i + 1] * (i + 1)
            total = total + part.sum()
            del part
            part = x.flatten()[i : i + 1].exp_() if i % 5 == 4 else x.flatten()[i : i + 1]
            total = total - part.sum()
            del part
        return total

    inputs = torch.linspace(-1, 1, 16)
    replay = capture(step, (torch.zeros(16),), pool=GraphPool(), backend="tape", warmup=1)
    assert torch.equal(replay(inputs.clone()), step(inputs.clone()))
