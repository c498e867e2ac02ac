"""`rollgraph train` with two ranks on one GPU, if configured: graphs replay, and a run survives a kill.

The first test also runs on a CPU, where gloo needs no copies through host memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollgraph.config import to_yaml
from rollgraph.parallel.ranks.failures import ExitCode
from tests.test_train import TWO_RANKS, assert_same_weights, config_of, folder, metrics_of, weights_of

__all__ = ["folder"]  # the fixture
pytestmark = [pytest.mark.multi, pytest.mark.timeout(900)]

SHARED = (
    "model.tiny={layers: 4, width: 32, heads: 2, kv_heads: 1, mlp: 64, max_length: 16}",
    "memory.cache_gib=0.01",
    "ranks={backend: gloo, timeout: 200, heartbeat_timeout: 100}",
    "shard=parameters",
    "algorithm.minibatches=1",
    "checkpoint={every: 1, keep_last: 9}",
    "steps=5",
)
PATIENCE = 300.0  # seconds


def write_config(folder: Path, name: str, *overrides: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(to_yaml(config_of(folder, *SHARED, f"output={folder / name}", *overrides)))
    return path


def environment(folder: Path, **variables: Any) -> dict[str, str]:
    """Share a cache folder, so that all runs use the GEMM algorithms that the first one chose."""
    return {**os.environ, "ROLLGRAPH_CACHE": str(folder), **{name: str(value) for name, value in variables.items()}}


def torchrun(folder: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *TWO_RANKS, "-m", "rollgraph", "train", str(write_config(folder, name, *overrides))]
    return subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=PATIENCE)


def kill_one_rank(folder: Path, name: str, *overrides: str) -> None:
    """Start both ranks, kill one after its second step, and check that the other ends for this reason."""
    path = write_config(folder, name, *overrides)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
    ranks = []
    for rank in range(2):
        variables |= {"RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, "-m", "rollgraph", "train", str(path)]
        with (folder / f"{name}.rank{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen(command, env=environment(folder, **variables), stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + PATIENCE
        saved = folder / name / "checkpoints" / "step_00000001"
        while not saved.exists():
            running = all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline
            assert running, [log.read_text() for log in sorted(folder.glob(f"{name}.rank*.log"))]
            time.sleep(0.005)
        ranks[1].kill()
        code = ranks[0].wait(PATIENCE)
        output = (folder / f"{name}.rank0.log").read_text()
        assert code in (ExitCode.RANK_LOST, ExitCode.FINISHED), output  # it may have been at its end already
        assert code == ExitCode.FINISHED or "rank 1" in output, output
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_run_of_two_ranks_on_one_device_survives_a_kill(folder: Path, device: str) -> None:
    dtype = f"model.dtype={'float32' if device == 'cpu' else 'bfloat16'}"
    completed = torchrun(folder, "undisturbed", dtype)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    report = json.loads((folder / "undisturbed" / "graphs.json").read_text())
    assert {graph["backend"] for graph in report["graphs"]} == {"tape" if device == "cpu" else "cuda"}
    assert all(graph["captures"] == 1 and not graph["eager_runs"] for graph in report["graphs"])
    for entry in metrics_of(folder / "undisturbed"):
        assert entry["policy/token_mult_prob_error_max"] == 1.0

    kill_one_rank(folder, "killed", dtype)
    completed = torchrun(folder, "killed", dtype)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    metrics = [metrics_of(folder / name) for name in ("undisturbed", "killed")]
    for first, second in zip(*metrics, strict=True):
        for name in ("step", "reward", "loss", "optimizer/grad_norm", "policy/kl"):
            assert first[name] == second[name], (name, first["step"])
    assert_same_weights(folder / "undisturbed", folder / "killed", step=4)
    ours, theirs = (weights_of(folder / name, 4, rank=1) for name in ("undisturbed", "killed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.gpu
def test_ranks_share_a_gpu_only_with_gloo(folder: Path) -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("two ranks have a GPU each here")
    completed = torchrun(folder, "refused", "ranks.backend=auto")
    assert completed.returncode != 0
    assert "set ranks.backend: gloo" in completed.stdout + completed.stderr


@pytest.mark.gpu
def test_tensor_parallel_on_one_gpu_runs_without_graphs(folder: Path) -> None:
    options = ("shard=optimizer", "tensor_parallel=2", "steps=2", "graph={impl: none, exact: must}")
    completed = torchrun(folder, "eager", *options)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    for entry in metrics_of(folder / "eager"):
        assert entry["policy/token_mult_prob_error_max"] == 1.0
