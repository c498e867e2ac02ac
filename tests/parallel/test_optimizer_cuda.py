"""Optimizer state on a GPU: streaming from pinned memory, planned memory, and graphs of an update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rollgraph.checkpoint.load import load
from rollgraph.checkpoint.write import save
from rollgraph.graph import capture
from rollgraph.parallel.data.bucket_plan import CHUNK, STREAM_BUFFERS, Offload, StateFormat
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World

pytestmark = pytest.mark.gpu

FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16", "int8")
WIDTH = 4096  # a layer has four chunks
Training = tuple[ShardedModel, ShardedAdamW]


def make(state: StateFormat, offload: Offload, layers: int = 3) -> Training:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(layers)))
    sharded = ShardedModel(model, World(0, 1, "cuda:0"))
    return sharded, ShardedAdamW(sharded, 1e-3, weight_decay=0.1, state=state, offload=offload)


def train(training: Training, steps: int) -> None:
    """Nothing here waits for the device, so the copies of one step run into the next one."""
    sharded, optimizer = training
    generator = torch.Generator("cuda").manual_seed(optimizer.steps)
    for _ in range(steps):
        for gradients in sharded.gradients.shards():
            gradients.normal_(generator=generator)
        sharded.gradients.finish()
        optimizer.step()


def everything(training: Training) -> dict[str, Tensor]:
    sharded, optimizer = training
    optimizer.state.synchronize()
    tensors = {name: parameter.detach() for name, parameter in sharded.model.named_parameters()}
    for piece in optimizer.parameter_states:
        tensors |= {f"{piece.parameter.name} {name}": tensor for name, tensor in piece.fields.items()}
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [name for name in left if not torch.equal(left[name], right[name])]


@pytest.mark.parametrize("state", FORMATS)
def test_streamed_state_has_the_bits_of_resident_state_after_many_steps(state: StateFormat) -> None:
    states = []
    for offload in ("none", "host"):
        training = make(state, offload)
        assert training[1].masters[0].is_pinned() == (offload == "host")
        assert len(training[1].state.chunks) > STREAM_BUFFERS or offload == "none"
        train(training, 40)
        states.append(everything(training))
    assert differences(*states) == []


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("state", FORMATS)
def test_an_update_takes_the_planned_memory(state: StateFormat, offload: Offload) -> None:
    sharded, optimizer = make(state, offload, layers=4)
    plan = sharded.plan(state, offload).optimizer
    del optimizer
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer = ShardedAdamW(sharded, 1e-3, state=state, offload=offload)
    at_rest = torch.cuda.memory_allocated() - before
    optimizer.update()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    planned = plan.device + plan.streaming
    assert planned <= at_rest <= peak <= 1.01 * planned + 2**20
    held = sum(tensor.nbytes for shard in optimizer.state.shards for tensor in shard.values())
    assert held == plan.device + plan.host


@pytest.mark.parametrize("state", FORMATS)
def test_a_graph_of_an_update_has_the_bits_of_an_eager_one(state: StateFormat) -> None:
    eager, captured = make(state, "none", layers=1), make(state, "none", layers=1)
    captured[1].update = capture(captured[1].update, backend="cuda")  # type: ignore[method-assign]
    train(eager, 3)
    train(captured, 3)
    assert differences(everything(eager), everything(captured)) == []


def test_a_graph_of_an_update_that_streams_is_refused() -> None:
    _, optimizer = make("fp32", "host", layers=1)
    with (
        pytest.raises(RuntimeError, match="streams its state from the host cannot be captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.update()


@pytest.mark.parametrize("state", FORMATS)
def test_a_checkpoint_of_state_on_the_host_resumes_exactly(state: StateFormat, tmp_path: Path) -> None:
    first = make(state, "host")
    train(first, 3)
    save(tmp_path / "c", *first)
    train(first, 2)
    for offload in ("host", "none"):
        second = make(state, offload)
        load(tmp_path / "c", *second)
        train(second, 2)
        assert differences(everything(first), everything(second)) == []


def test_the_norm_of_a_large_bucket_needs_little_memory() -> None:
    sharded, _ = make("fp32", "none", layers=2)
    (gradients,) = sharded.gradients.shards()[:1]
    gradients.normal_()
    expected = torch.linalg.vector_norm(torch.cat(sharded.gradients.shards()).double())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    norm = sharded.gradients.norm()
    assert torch.cuda.max_memory_allocated() - before <= 8 * CHUNK + 2**20
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
