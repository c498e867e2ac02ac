"""Models without memory have the tensors of real ones, and making one does not import PyTorch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rollgraph.model import Decoder
from rollgraph.model.meta import shapes_only
from tests.policy.small_worker import make_model

SHAPES = """
import sys
from rollgraph.model import Architecture, Decoder
from rollgraph.model.lora import AdapterSpec, attach
from rollgraph.model.meta import shapes_only

with shapes_only():
    model = Decoder(Architecture("llama", vocabulary=30, hidden=32, mlp=64, layers=1, heads=2, kv_heads=1, head_dim=16))
    attach(model, AdapterSpec(rank=2, alpha=4), seed=0)
assert all(tensor.is_meta for tensor in model.parameters())
print("torch._dynamo" in sys.modules)
"""


def test_tensors_equal_those_of_a_real_model() -> None:
    real = make_model()
    with shapes_only():
        model = Decoder(real.architecture)
    tensors = {name: (tensor.shape, tensor.is_meta) for name, tensor in model.state_dict().items()}
    assert tensors == {name: (tensor.shape, True) for name, tensor in real.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_initialized_again_afterwards(dtype: torch.dtype) -> None:
    with shapes_only():
        pass
    assert torch.nn.Linear(3, 4).to(dtype).weight.abs().sum() > 0
    assert torch.zeros(3, dtype=dtype).normal_().abs().sum() > 0


def test_making_a_model_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", SHAPES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]
