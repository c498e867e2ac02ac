"""Reading a tensor value on the host is refused at capture, with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollgraph.graph import CaptureError, HostReadError, capture
from rollgraph.graph import make_graphed_callables as graph
from tests.graph.comparisons import example
from tests.graph.marked_lines import line_of


def _assign_by_mask(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0] = torch.arange(16.0)[: x.shape[0] * 4][:8].repeat(2)[:MASKED]
    return x


MASKED = int((example() > 0).sum())

READS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "item": ("item", lambda x: x.sum().item()),
    "float": ("__float__", lambda x: float(x.sum())),
    "int": ("__int__", lambda x: int(x.sum())),
    "complex": ("__complex__", lambda x: complex(x.sum())),
    "bool": ("__bool__", lambda x: bool(x.sum() > 0)),
    "if": ("__bool__", lambda x: x if x.sum() > 0 else -x),
    "and": ("__bool__", lambda x: x.sum() and x),
    "max": ("__bool__", lambda x: max(x[0, 0], x[0, 1])),
    "tolist": ("tolist", lambda x: x.tolist()),
    "detached tolist": ("tolist", lambda x: x.data.tolist()),
    "numpy": ("numpy", lambda x: x.detach().cpu().numpy().sum()),
    "asarray": ("__array__", lambda x: np.asarray(x.detach().cpu())),
    "np.array": ("__array__", lambda x: np.array([x.sum().cpu()])),
    "str": ("__repr__", lambda x: str(x)),
    "repr": ("__repr__", lambda x: repr(x)),
    "f-string": ("__format__", lambda x: f"{x.sum():.3f}"),
    "percent": ("__float__", lambda x: "%f" % x.sum()),  # noqa: UP031
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "argwhere": ("nonzero", lambda x: torch.argwhere(x)),
    "where": ("nonzero", lambda x: torch.where(x > 0)),
    "masked_select": ("masked_select", lambda x: x.masked_select(x > 0)),
    "mask": ("index", lambda x: x[x > 0]),
    "assign by mask": ("index_put", _assign_by_mask),
    "accumulate by mask": ("index_put", lambda x: x.clone().index_put_((x > 0,), torch.ones(()), accumulate=True)),
    "unique": ("unique", lambda x: torch.unique(x)),
    "unique_consecutive": ("unique_consecutive", lambda x: torch.unique_consecutive(x)),
    "bincount": ("bincount", lambda x: torch.bincount(x.abs().long().flatten())),
    "equal": ("equal", lambda x: torch.equal(x, x * 1)),
    "allclose": ("allclose", lambda x: torch.allclose(x, x * 1)),
    "is_nonzero": ("scalar", lambda x: torch.is_nonzero(x.sum())),
    "in": ("__contains__", lambda x: 1.0 in x),
    "repeat_interleave": ("repeat_interleave", lambda x: x.repeat_interleave(torch.arange(4), 0)),
    "range": ("__index__", lambda x: [0 for _ in range(x.sum().long())]),
    "list index": ("__index__", lambda x: [1, 2][(x.sum() * 0).long()]),
    "slice": ("scalar", lambda x: x[: x.sum().abs().long()]),
    "full": ("scalar", lambda x: torch.full((2,), x.sum())),
    "arange": ("scalar", lambda x: torch.arange(x.sum().abs() + 1)),
    "alpha": ("scalar", lambda x: x.add(x, alpha=x.sum())),
    "one_hot": ("scalar", lambda x: F.one_hot(x.abs().long())),
    "to cpu and item": ("item", lambda x: x.cpu().mean().item()),
    "tensor of tensors": ("tensor", lambda x: torch.tensor([x.sum(), x.mean()])),
    "as_tensor of tensors": ("as_tensor", lambda x: torch.as_tensor([x.sum()])),
    "new_tensor of tensors": ("new_tensor", lambda x: x.new_tensor([x.sum(), 1.0])),
    "tensor_split": ("tensor_split", lambda x: torch.tensor_split(x, x.sum(0).abs().long().clamp(1, 3).cpu())),
    "from_dlpack": ("dlpack", lambda x: torch.from_numpy(np.from_dlpack(x.detach().cpu()) * 2)),
    "apply_": ("apply_", lambda x: x.detach().cpu().clone().apply_(lambda v: v * 2)),
    "map_": ("map_", lambda x: x.detach().cpu().clone().map_(x.detach().cpu(), lambda a, b: a + b)),
    "map2_": ("map2_", lambda x: (lambda y: y.clone().map2_(y, y, lambda a, b, c: a + b + c))(x.detach().cpu())),
    "pack_padded": (
        "pack_padded",
        lambda x: nn.utils.rnn.pack_padded_sequence(x[None], x.sum(0).long().clamp(1, 3)[:1].cpu(), True).data,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_host_reads_are_refused_with_their_line(backend: str, device: torch.device, name: str) -> None:
    operation, read = READS[name]

    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return read(x)

    model = nn.Sequential(nn.Identity(), nn.Sequential(Reader()))
    with pytest.raises(HostReadError) as caught:
        capture(model, (example(),), backend=backend)
    message = str(caught.value)
    copied = backend == "cuda" and "_to_copy" in message  # there the copy to the CPU is refused already
    assert copied or operation in message
    assert "Sequential.1.0" in message
    assert f"{__file__}:{read.__code__.co_firstlineno + (2 if read is _assign_by_mask else 0)}" in message or (
        name in ("pack_padded",) and __file__ in message
    )


def test_print_is_refused(backend: str, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: Tensor) -> Tensor:
        print(x)  # here: print
        return x

    with pytest.raises(HostReadError, match="__repr__") as caught:
        capture(step, (example(),), backend=backend)
    assert line_of("print", __file__) in str(caught.value)


@pytest.mark.parametrize("name", ["apply_", "map_", "map2_"])
def test_a_refused_host_write_changes_nothing(name: str) -> None:
    """A host write bypasses the dispatcher, so the undo log would not see it."""
    outside = torch.ones(4)
    others = (outside.clone(),) * {"apply_": 0, "map_": 1, "map2_": 2}[name]

    def step(x: Tensor) -> Tensor:
        return x + getattr(outside, name)(*others, lambda value, *_: value + 1)  # here: write

    with pytest.raises(HostReadError, match=name) as caught:
        capture(step, (torch.ones(4),), backend="tape")
    assert line_of("write", __file__) in str(caught.value)
    assert torch.equal(outside, torch.ones(4))
    assert name not in vars(Tensor)


BACKWARD_READS = {
    name: READS[name] for name in ("item", "bool", "tolist", "numpy", "asarray", "repr", "f-string", "map_")
}


@pytest.mark.parametrize("name", BACKWARD_READS)
@pytest.mark.parametrize("way", ["function", "callable", "hook"])
def test_host_reads_in_backward_are_refused(backend: str, device: torch.device, name: str, way: str) -> None:
    read, layer = BACKWARD_READS[name][1], nn.Linear(4, 4)

    class Reader(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            read(gradient)
            return gradient * 2

    def step(x: Tensor) -> None:
        y = layer(x)
        if way == "hook":
            y.register_hook(lambda gradient: (read(gradient), None)[1])
        else:
            y = Reader.apply(y)
        y.sum().backward()

    target, take = (lambda x: Reader.apply(layer(x)), graph) if way == "callable" else (step, capture)
    with pytest.raises(HostReadError):  # on CUDA at the copy to the CPU, where there is one
        take(target, (example(),), backend=backend)


def test_adam_without_fused_gets_a_hint(backend: str, device: torch.device) -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(layer.parameters(), fused=False, foreach=False)

    def step(x: Tensor) -> None:
        layer(x).sum().backward()
        optimizer.step()  # here: adam

    with pytest.raises(CaptureError, match="fused=True" if backend == "tape" else ".") as caught:
        capture(step, (example(),), backend=backend)
    if backend == "tape":
        assert isinstance(caught.value, HostReadError)
        assert line_of("adam", __file__) in str(caught.value)
