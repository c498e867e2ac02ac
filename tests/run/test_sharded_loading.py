"""Loading with `shard: parameters`: each rank gets the bits of its shards, and never holds the whole model."""

from __future__ import annotations

import resource
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgraph.config import Config
from rollgraph.inputs.inputs import check_inputs
from rollgraph.model import Architecture, Decoder, load_model, save_model
from rollgraph.model.meta import unallocated_decoder
from rollgraph.model.weights import hf
from rollgraph.model.weights.stream import stream
from rollgraph.parallel.data.bucket_plan import specs_of
from rollgraph.parallel.fsdp.layout import names_in, plan_ring, plan_units
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PolicyWorker
from rollgraph.run.setup import load_policy
from tests.model.test_weight_stream import build
from tests.parallel.worlds import run_world
from tests.test_train import config_of, folder

__all__ = ["folder"]

MIB = 2**20
TIED = Architecture("qwen2", vocabulary=300, hidden=16, mlp=20, layers=5, heads=4, kv_heads=2, head_dim=6, tied=True)
UNTIED = Architecture("qwen3", 300, 24, 40, 3, 4, 2, 8, attention_bias=True)
LARGE = Architecture("llama", vocabulary=1024, hidden=512, mlp=2048, layers=16, heads=8, kv_heads=8, head_dim=64)
STAGING = 8 * MIB


def configured(folder: Path, model: Path, *overrides: str) -> Config:
    options = (f"model={{path: {model}}}", "tokenizer.path=bytes", "shard=parameters", "data.validation=null")
    return config_of(folder, *options, "graph.impl=none", *overrides)


def make_policy(world: World, config: Config) -> PolicyWorker:
    progress: list[tuple[int, int]] = []
    policy = load_policy(config, world, check_inputs(config, world), lambda done, total: progress.append((done, total)))
    assert progress[-1][0] == progress[-1][1] > 0
    return policy


def loaded_tensors(world: World, config: Config) -> dict[str, Any]:
    """Load on one rank. Return the gathered parameters, and the master weights of its shards with their offsets."""
    with closing(make_policy(world, config)) as policy:
        full_model = policy.sharded.make_full_model()
        policy.sharded.gather()
        masters = [
            (piece.parameter.name, piece.start, piece.master.clone()) for piece in policy.optimizer.parameter_states
        ]
        parameters = {name: parameter.detach().clone() for name, parameter in full_model.named_parameters()}
        return {"parameters": parameters, "masters": masters}


def assert_loaded(ranks: list[dict[str, Any]], expected: Decoder) -> None:
    whole = dict(expected.named_parameters())
    covered = dict.fromkeys(whole, 0)
    for loaded in ranks:
        assert isinstance(loaded, dict), loaded
        assert loaded["parameters"].keys() == whole.keys()
        assert all(torch.equal(loaded["parameters"][name], whole[name]) for name in whole)
        for name, start, master in loaded["masters"]:
            assert torch.equal(master, whole[name].detach().flatten()[start : start + len(master)].float())
            covered[name] += len(master)
    assert covered == {name: parameter.numel() for name, parameter in whole.items()}


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_load_the_stored_bits(folder: Path, ranks: int) -> None:
    """With tied and untied heads, biases and QK norms, from several files, in the stored dtype and in another."""
    for number, (architecture, stored, dtype) in enumerate(
        ((TIED, torch.float32, "auto"), (UNTIED, torch.bfloat16, "float32"), (UNTIED, torch.bfloat16, "auto"))
    ):
        source = folder / f"model{number}"
        save_model(build(architecture, stored), source, shard_bytes=4000)
        config = configured(folder, source, f"model.dtype={dtype}")
        results = run_world(ranks, folder, loaded_tensors, config)
        assert_loaded(results, load_model(source, dtype=None if dtype == "auto" else getattr(torch, dtype)))


def planned_bytes(architecture: Architecture, ranks: int) -> int:
    """The bytes of parameters, gradients and int8 optimizer state on a rank with sharded parameters."""
    model = unallocated_decoder(architecture, torch.float32, "cpu")
    units = plan_units(specs_of(model), names_in(model, list(model.layers)), ranks=ranks)
    plan = plan_ring(units, torch.float32, "int8")
    return plan.parameters + plan.gradients + plan.optimizer.device


def load_within(world: World, small: Config, large: Config, allowed: int) -> float:
    """Load under a limit of `allowed` more bytes. Return the sum over the parameters of this rank's shards."""
    hf.stream = partial(stream, staging_bytes=STAGING)  # type: ignore[assignment]
    make_policy(world, small).close()  # libraries allocate their own memory once
    inputs = check_inputs(large, world)
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, -1))
    try:
        policy = load_policy(large, world, inputs, None)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
    with closing(policy):
        buckets = policy.sharded.flat.buckets
        return sum(bucket.shard(world.rank).double().sum().item() for bucket in buckets)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA and /proc are Linux's")
def test_loading_needs_only_shards_ring_and_staging_buffers(folder: Path) -> None:
    """The model is larger than int8 state by more than the margin, so a whole copy could not hide in its place."""
    torch.manual_seed(0)
    save_model(Decoder(LARGE), folder / "large", shard_bytes=100 * MIB)
    save_model(build(TIED), folder / "small")
    weights = sum(parameter.nbytes for parameter in load_model(folder / "large").parameters())
    margin = STAGING + 48 * MIB
    assert weights - weights * 6 / 4 / 3 > 2 * margin
    options = ("memory.cache_gib=0.1", "optimizer.state=int8")
    configs = [configured(folder, folder / name, *options) for name in ("small", "large")]
    sums = run_world(3, folder, load_within, *configs, planned_bytes(LARGE, 3) + margin)
    assert all(isinstance(total, float) for total in sums), sums
    expected = sum(parameter.double().sum().item() for parameter in load_model(folder / "large").parameters())
    assert sum(sums) == pytest.approx(expected, abs=1e-6)
