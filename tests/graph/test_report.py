"""The report counts captures, replays and eager runs, with the reasons of the latter."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import CaptureError, GraphPool, ReplayMismatch, capture
from rollgraph.graph import make_graphed_callables as graph


def sample(rows: int = 2) -> Tensor:
    return torch.linspace(-1, 1, rows * 4).view(rows, 4).requires_grad_()


def double(x: Tensor, scale: int = 2) -> Tensor:
    return x * scale


def test_captures_replays_and_eager_runs_are_counted(backend: str, device: torch.device) -> None:
    pool, layer, x = GraphPool(), nn.Linear(4, 4), sample().detach()
    graph(layer, (sample(),), pool=pool, backend=backend)
    twice = capture(double, (x,), pool=pool, backend=backend)
    for _ in range(3):
        layer(sample()).sum().backward()
    layer(sample())
    twice(x)
    with pytest.raises(ReplayMismatch):
        twice(sample(3).detach())
    with pool.disabled():
        layer(sample()), layer(sample()), twice(sample(5).detach())
    layer.eval()
    layer(sample())
    report = pool.report()
    first, second = report.graphs
    assert (first.name, second.name) == ("Linear", "double")
    assert (first.captures, first.replays, first.backward_replays) == (1, 4, 3)
    assert dict(first.eager_runs) == {"disabled": 2, "called in the other training mode": 1}
    assert (second.captures, second.replays, second.backward_replays) == (1, 1, 0)
    assert dict(second.eager_runs) == {"disabled": 1}
    assert (report.captures, report.replays, report.eager_runs) == (2, 5, 4)
    assert first.operations > second.operations >= 1
    assert first.backend == second.backend == backend
    if backend == "tape":
        assert first.bytes_owned >= 2 * x.nbytes
        assert report.pool_bytes >= first.bytes_owned + second.bytes_owned - x.nbytes


def test_runs_are_counted_under_each_policy(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    eager = capture(double, (sample().detach(),), pool=pool, backend=backend, on_mismatch="eager", name="e")
    again = capture(double, (sample().detach(),), pool=pool, backend=backend, on_mismatch="recapture", name="r")
    for function in (eager, again):
        for rows in (2, 3, 3, 2):
            x = sample(rows).detach()
            assert torch.equal(function(x), x * 2)
    ((reason, count),) = eager.record.eager_runs.items()
    assert count == 2
    assert "captured as float32[2, 4]" in reason
    assert "float32[3, 4]" in reason
    assert (eager.record.captures, eager.record.replays) == (1, 2)
    assert (again.record.captures, again.record.replays) == (2, 4)
    assert not again.record.eager_runs


def test_a_refused_capture_is_not_in_the_report(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    with pytest.raises(CaptureError):
        capture(lambda x: x.tolist(), (sample().detach(),), pool=pool, backend=backend)
    assert pool.report().graphs == ()
    assert "0 graphs" in str(pool.report())


def test_the_eager_backend_is_reported_as_eager_runs(device: torch.device) -> None:
    pool, layer = GraphPool(), nn.Linear(4, 4)
    graph(layer, (sample(),), pool=pool, backend="eager")
    layer(sample()).sum().backward()
    (record,) = pool.report().graphs
    assert (record.captures, record.replays, record.backward_replays) == (0, 0, 0)
    assert dict(record.eager_runs) == {"backend is eager": 1}
    assert pool.report().pool_bytes == 0


def test_the_eager_backend_keeps_no_autograd_graph(device: torch.device) -> None:
    """It would tie the parameters to the stream of that call, and a later CUDA capture would fail."""
    layer, losses = nn.Linear(4, 4), []

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).sum()
        losses.append(weakref.ref(loss))
        return loss

    captured = capture(step, (sample().detach(),), backend="eager")
    captured(sample().detach())
    assert [loss() for loss in losses] == [None]


def test_the_report_prints_as_a_table(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    twice = capture(double, (sample().detach(),), {"scale": 2}, pool=pool, backend=backend)
    capture(double, (sample().detach(),), pool=pool, backend=backend)
    twice(sample().detach(), scale=2)
    with pool.disabled():
        twice(sample().detach(), scale=3)
    lines = str(pool.report()).split("\n")
    assert lines[0].split() == ["graph", "backend", "ops", "owned", "captures", "replays", "eager", "surface"]
    assert set(lines[1]) <= {"-", " "}
    row = lines[2].split()
    assert row[:2] == ["double", backend]
    assert row[5:8] == ["1", "1", "1"]
    assert f"(0: float32[2, 4]@{sample().device}, scale=2)" in lines[2]
    assert lines[3].startswith("double#2")
    assert "  double: 1 eager: disabled" in lines
    assert lines[-1].startswith("2 graphs, 2 captures, 1 replays, 1 eager runs, ")


def test_the_report_exports_json(backend: str, device: torch.device) -> None:
    pool, layer = GraphPool(), nn.Linear(4, 4)
    pool.notes.append("about all of them")
    graph(layer, (sample(),), pool=pool, backend=backend)
    layer(sample()).sum().backward()
    with pool.disabled():
        layer(sample())
    assert "note: about all of them" in str(pool.report())
    content = json.loads(pool.report().to_json())
    assert set(content) == {"summary", "pool_bytes", "notes", "graphs"}
    assert content["notes"] == ["about all of them"]
    (record,) = content["graphs"]
    assert record["name"] == "Linear"
    assert record["backend"] == backend
    assert (record["captures"], record["replays"], record["backward_replays"]) == (1, 1, 1)
    assert record["eager_runs"] == {"disabled": 1}
    assert record["surface"] == f"(0: float32[2, 4]@{sample().device})"
    assert record["operations"] > 0


def test_a_report_is_a_snapshot(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    twice = capture(double, (sample().detach(),), pool=pool, backend=backend)
    before = pool.report()
    twice(sample().detach())
    assert before.replays == 0
    assert pool.report().replays == 1


def test_hooks_on_sub_modules_are_noted(backend: str, device: torch.device) -> None:
    pool, seen = GraphPool(), []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda *_: seen.append(1))
    graph(model, (sample(),), pool=pool, backend=backend)
    ran = len(seen)
    model(sample())
    assert len(seen) == ran
    assert "hooks on 1 sub-modules ran at capture and do not run at replay" in str(pool.report())


def test_reset_releases_memory(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    layer = graph(nn.Linear(256, 256), (torch.zeros(64, 256, requires_grad=True),), pool=pool, backend=backend)
    assert pool.report().pool_bytes > 64 * 256 * 4 * 2
    layer.forward.reset()
    if backend == "tape":
        assert pool.report().pool_bytes < 64 * 256 * 4
        assert pool.report().graphs[0].bytes_owned == 0


def test_dropped_captures_are_not_counted_as_memory(backend: str, device: torch.device) -> None:
    pool = GraphPool()
    graphed = capture(lambda x: x * 2, (torch.randn(3),), pool=pool, backend=backend, on_mismatch="recapture")
    for size in range(4, 40):
        graphed(torch.randn(size))
    record = pool.report().graphs[0]
    assert record.dropped == 37 - 16
    if backend == "tape":  # an input and an output each; the pool of a GPU rounds up
        assert record.bytes_owned == sum(2 * 4 * size for size in range(40 - 16, 40))
