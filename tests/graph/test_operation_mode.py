"""Dispatch modes leave PyTorch's compiler alone: they do not import it and are not compiled by it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

from rollgraph.graph.state.undo_log import OperationMode

CAPTURE = """
import sys
import torch
from rollgraph.graph import GraphPool, capture

weight = torch.ones(3, requires_grad=True)
optimizer_state = torch.zeros(3)

def step(x):
    (weight * x).sum().backward()
    optimizer_state.add_(weight.grad)
    return weight * 2

graph = capture(step, (torch.ones(3),), pool=GraphPool())
assert graph(torch.full((3,), 5.0)).tolist() == [2.0, 2.0, 2.0]
assert optimizer_state.tolist() == [5.0, 5.0, 5.0]
print("torch._dynamo" in sys.modules)
"""


def test_a_capture_and_a_replay_do_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", CAPTURE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]


class Names(OperationMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_compiled_operations_and_is_not_compiled_itself() -> None:
    graphs: list[list[str]] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append([node.op for node in module.graph.nodes if node.op.startswith("call")])
        return module.forward

    torch.compiler.reset()  # type: ignore[no-untyped-call]
    compiled = torch.compile(lambda x: (x + 1) * 2, backend=backend)
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    alone = list(graphs)
    with Names() as names:
        assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    assert "mul.Tensor" in names.seen
    assert graphs[len(alone) :] in ([], alone)  # compiled once more at most, without the mode's own operations
