"""CUDA only: the memory of a pool, the memory that graphs share, and a run under compute-sanitizer."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.graph_overhead import chain_memory
from rollgraph.graph import CaptureError, GraphPool, capture, cuda_backend, make_graphed_callables
from rollgraph.graph.cuda_backend import CaptureMonitor

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent


@pytest.mark.parametrize(("hidden", "mlp"), [(512, 2048), (1536, 8960)])
def test_a_chain_needs_no_more_memory_than_pytorchs(hidden: int, mlp: int) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.skip("counts the memory of the whole device: run without -n")
    graphs = make_graphed_callables, torch.cuda.make_graphed_callables
    for _ in range(2):  # the first time, kernels and workspaces are loaded too
        ours, theirs = (chain_memory(graph, 28, 512, hidden, mlp) for graph in graphs)
    assert ours <= theirs


@pytest.mark.parametrize("accumulate", [True, False])
def test_gradients_survive_the_other_graphs_of_a_pool(accumulate: bool) -> None:
    """Graphs reuse each other's memory, but not that of a gradient the optimizer still needs."""
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5)).cuda() for _ in range(4)]
    twins, pool = copy.deepcopy(blocks), GraphPool()
    sample = torch.randn(8, 16, device="cuda", requires_grad=True)
    make_graphed_callables(tuple(blocks), ((sample,),) * 4, pool=pool)
    scale = torch.ones((), device="cuda")
    unrelated = capture(lambda x: (x @ x.T @ x).tanh() * scale, (torch.randn(64, 64, device="cuda"),), pool=pool)
    for step in range(4):
        x = torch.randn(8, 16, device="cuda")
        for modules in (blocks, twins):
            torch.manual_seed(step)
            nn.Sequential(*modules)(x).square().sum().backward()
        unrelated(torch.randn(64, 64, device="cuda"))
        pairs = zip(nn.ModuleList(blocks).parameters(), nn.ModuleList(twins).parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
        if not accumulate:
            for module in (*blocks, *twins):
                module.zero_grad(set_to_none=True)


def test_gradients_of_a_captured_step_survive_another_capture_in_its_pool() -> None:
    layer, pool = nn.Linear(32, 32).cuda(), GraphPool()

    def step(x: Tensor) -> None:
        layer.zero_grad(set_to_none=True)
        layer(x).square().sum().backward()

    x = torch.randn(16, 32, device="cuda")
    graphed = capture(step, (x,), pool=pool)
    unrelated = capture(lambda x: (x @ x.T).tanh() @ x, (torch.randn(128, 128, device="cuda"),), pool=pool)
    graphed(x)
    kept = layer.weight.grad.clone()
    unrelated(torch.randn(128, 128, device="cuda"))
    assert torch.equal(layer.weight.grad, kept)


def test_dropout_in_a_checkpointed_region_is_refused() -> None:
    """A CUDA capture silently ignores the RNG state that checkpointing sets."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).cuda()
    sample = torch.randn(2, 4, device="cuda", requires_grad=True)
    with pytest.raises(CaptureError, match="RNG state"):
        make_graphed_callables(lambda x: checkpoint(inner, x, use_reentrant=False), (sample,))


def test_a_whole_step_over_graphed_modules_equals_eager() -> None:
    """The leaves that replaced the parameters while the modules were captured are no longer part of the program."""
    blocks, pool = [nn.Linear(8, 8).cuda() for _ in range(2)], GraphPool()
    make_graphed_callables(tuple(blocks), ((torch.randn(4, 8, device="cuda", requires_grad=True),),) * 2, pool=pool)
    model = nn.Sequential(*blocks)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]

    def step(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizers[0]) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    x = torch.randn(4, 8, device="cuda")
    with pool.disabled():
        graphed = capture(lambda x: step(x), (x,))
    for _ in range(3):
        graphed(x)
        step(x, twin, optimizers[1])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_compute_sanitizer_is_clean() -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # Its Python backtraces keep frames alive, and with them the losses of eager steps.
    options = ["--tool", "memcheck", "--show-backtrace", "no", "--error-exitcode", "9"]
    command = [sanitizer, *options, sys.executable, str(HERE / "small_program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr


def test_a_monitor_that_autograd_keeps_does_not_count_as_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's thread frees the dispatch modes of a captured backward, and so the monitor, at some later time."""
    kept: list[CaptureMonitor] = []

    class KeptMonitor(CaptureMonitor):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self)

    monkeypatch.setattr(cuda_backend, "CaptureMonitor", KeptMonitor)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda()  # its output is saved for the backward
    twin = copy.deepcopy(module)
    x = torch.randn(3, 4, device="cuda")
    make_graphed_callables(module, (x.clone(),))
    assert len(kept) == 2
    kept.clear()
    assert torch.equal(module(x), twin(x))
