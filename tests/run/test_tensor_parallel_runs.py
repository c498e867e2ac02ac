"""Runs with `tensor_parallel` learn what a run on one rank learns, resume after a kill, and change their layout.

Ranks are started as `torchrun` starts them.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollgraph.config import ConfigError, to_yaml
from rollgraph.inputs.inputs import check_inputs
from rollgraph.model import load_model
from rollgraph.parallel.ranks.failures import ExitCode
from rollgraph.parallel.ranks.world import World
from rollgraph.run.model_source import open_model
from tests.test_train import config_of, folder, metrics_of, rows_of, weights_of

__all__ = ["folder"]

PATIENCE = 300.0  # seconds for a whole run, on a busy machine
CONFIG = """
steps: 3
cpu_threads: 1
model:
  tiny: {layers: 2, width: 16, heads: 4, kv_heads: 2, mlp: 16, max_length: 16}
data: {prompts_per_step: 4, max_prompt_tokens: 8}
rollout: {samples_per_prompt: 3, max_tokens: 5, rows: 4}
reward:
  functions: [{name: "REWARD"}]
algorithm: {options: {kl_coef: 0.05}}
optimizer: {lr: 1e-2}
train: {token_buckets: [64]}
checkpoint: {every: 1, keep_last: 9}
validation: {every: 2, max_prompts: 5}
memory: {cache_gib: 0.001}
log: {progress: plain, sinks: [jsonl]}
graph: {warmup: 1}
ranks: {timeout: 200, heartbeat_timeout: 200}
"""


def rank_main(rank: int, command: str, config: str, log: str, environment: dict[str, str]) -> None:
    """Run the command as one rank."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    from rollgraph.cli import main

    sys.exit(main([command, config]))


@dataclass
class Ranks:
    """The processes of a run."""

    processes: list[Any]
    logs: list[Path]
    store: Any  # kept alive as long as the processes

    def describe(self) -> str:
        codes = [process.exitcode for process in self.processes]
        return f"exit codes {codes}: " + "\n".join(log.read_text() for log in self.logs if log.exists())

    def finish(self) -> None:
        deadline = time.monotonic() + PATIENCE
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        report = self.describe()
        self.end()
        assert all(process.exitcode == 0 for process in self.processes), report

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def start(folder: Path, name: str, ranks: int, *overrides: str, command: str = "train") -> Ranks:
    context = multiprocessing.get_context("forkserver")
    path = folder / f"{name}.yaml"
    path.write_text(to_yaml(config_of(folder, f"output={folder / name}", *overrides, text=CONFIG)))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    logs = [folder / f"{name}.rank{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        log.unlink(missing_ok=True)
        arguments = (rank, command, str(path), str(log), environment)
        process: Any = context.Process(target=rank_main, args=arguments, daemon=True)
        process.start()
        processes.append(process)
    return Ranks(processes, logs, store)


def run(folder: Path, name: str, ranks: int, *overrides: str) -> Path:
    start(folder, name, ranks, *overrides).finish()
    return folder / name


def evaluate(folder: Path, name: str, ranks: int, *overrides: str) -> dict[str, float]:
    """The metrics that `rollgraph eval` prints for the newest checkpoint of a run."""
    processes = start(folder, name, ranks, *overrides, command="eval")
    processes.finish()
    output = processes.logs[0].read_text()
    metrics: dict[str, float] = json.loads(output[output.index("{") : output.rindex("}") + 1])
    return metrics


def samples_of(output: Path, step: int) -> list[Any]:
    """The texts and rewards of a step."""
    rows = map(json.loads, (output / "samples.jsonl").read_text().splitlines())
    return [(row["prompt"], row["completion"], row["reward"]) for row in rows if row["step"] == step]


def assert_learns_the_same(first: Path, second: Path, step: int) -> None:
    """Samples and rewards are equal; loss, KL divergence and gradient norm are, up to rounding in fp32."""
    ours, theirs = metrics_of(first)[step], metrics_of(second)[step]
    assert samples_of(first, step) == samples_of(second, step)
    for name in ("reward", "tokens/train", "tokens/generate"):
        assert ours[name] == theirs[name], name
    for name in ("loss", "policy/kl", "optimizer/grad_norm"):
        assert math.isclose(ours[name], theirs[name], rel_tol=1e-4, abs_tol=1e-6), (name, ours[name], theirs[name])


@pytest.mark.multi
@pytest.mark.slow
def test_tensor_parallel_runs_learn_what_one_rank_learns(folder: Path) -> None:
    """On one group of two ranks and on two. Recomputing activations changes no bit, and nothing runs eagerly."""
    whole = run(folder, "whole", 1)
    sharded = run(folder, "divided", 2, "tensor_parallel=2", "log.verbose=true")
    assert_learns_the_same(whole, sharded, step=0)
    for row in metrics_of(sharded):
        assert row["policy/token_mult_prob_error_max"] == 1.0
    log = (folder / "divided.rank0.log").read_text()
    assert " 0 captured again, " in log
    assert ", 0 eager runs" in log

    recomputed = run(folder, "again", 2, "tensor_parallel=2", "model.checkpointing=2")
    assert rows_of(recomputed) == rows_of(sharded)
    for rank in range(2):
        ours, theirs = weights_of(recomputed, 2, rank), weights_of(sharded, 2, rank)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    data_parallel = run(folder, "several", 2)
    grid = run(folder, "grid", 4, "tensor_parallel=2")
    assert_learns_the_same(data_parallel, grid, step=0)
    for row in metrics_of(grid):
        assert row["policy/token_mult_prob_error_max"] == 1.0

    metrics = evaluate(folder, "divided", 2, "tensor_parallel=2")
    assert metrics == pytest.approx(evaluate(folder, "divided", 1))
    exported = load_model(sharded / "model")
    stored = open_model(str(sharded), "latest", []).load(None, "cpu")
    for (name, parameter), loaded in zip(exported.named_parameters(), stored.parameters(), strict=True):
        assert torch.equal(parameter, loaded), name


@pytest.mark.multi
@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits(folder: Path) -> None:
    options = ("tensor_parallel=2", "steps=4", "algorithm.options={kl_coef: 0.05}")
    undisturbed = run(folder, "undisturbed", 2, *options)
    ranks = start(folder, "killed", 2, *options)
    deadline = time.monotonic() + PATIENCE
    while not (folder / "killed" / "checkpoints" / "step_00000001").exists():
        assert time.monotonic() < deadline, ranks.describe()
        time.sleep(0.002)
    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    ranks.processes[0].join(PATIENCE)
    assert ranks.processes[0].exitcode == ExitCode.RANK_LOST, ranks.describe()
    assert "rank 1" in ranks.logs[0].read_text()
    ranks.end()
    resumed = run(folder, "killed", 2, *options)
    assert rows_of(resumed) == rows_of(undisturbed)
    for rank in range(2):
        ours, theirs = weights_of(resumed, 3, rank), weights_of(undisturbed, 3, rank)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_resumes_with_another_tensor_parallel_size(folder: Path, before: int, after: int) -> None:
    """Both resume from one checkpoint; their next step has the same samples."""
    run(folder, "same", before, f"tensor_parallel={before}", "steps=2")
    shutil.copytree(folder / "same", folder / "other")
    same = run(folder, "same", before, f"tensor_parallel={before}", "steps=3")
    changed = run(folder, "other", after, f"tensor_parallel={after}", "steps=3")
    assert_learns_the_same(same, changed, step=2)


@pytest.mark.multi
@pytest.mark.slow
def test_sharded_adapters_learn_what_one_rank_learns(folder: Path) -> None:
    """They are exported whole, and a run on one rank resumes with them."""
    options = ("adapter={rank: 4, alpha: 8}", "steps=2")
    whole = run(folder, "whole", 1, *options)
    sharded = run(folder, "divided", 2, "tensor_parallel=2", *options)
    assert_learns_the_same(whole, sharded, step=0)
    for row in metrics_of(sharded):
        assert row["policy/token_mult_prob_error_max"] == 1.0
    exported = open_model(str(sharded / "model"), None, []).load(None, "cpu")
    stored = open_model(str(sharded), "latest", []).load(None, "cpu")
    for (name, parameter), loaded in zip(exported.named_parameters(), stored.named_parameters(), strict=True):
        assert name == loaded[0]
        assert torch.equal(parameter, loaded[1]), name
    shutil.copytree(sharded, folder / "other")
    same = run(folder, "divided", 2, "tensor_parallel=2", *options, "steps=3")
    alone = run(folder, "other", 1, *options, "steps=3")
    assert_learns_the_same(same, alone, step=2)


@pytest.mark.multi
@pytest.mark.slow
def test_adapters_resume_across_fsdp_and_tensor_parallel_layouts(folder: Path) -> None:
    """With recomputed layers. The base is random, so each layout reads it from the run folder."""
    options = ("adapter={rank: 4, alpha: 8}", "model.checkpointing=1", "optimizer.schedule=constant")
    layouts = {"shards": (2, "shard=parameters"), "parts": (4, "tensor_parallel=2"), "again": (2, "shard=parameters")}
    names = list(layouts)
    run(folder, "shards", *layouts["shards"], *options, "steps=1")
    for step, (before, after) in enumerate(itertools.pairwise(names), 1):
        shutil.copytree(folder / before, folder / after)
        same, changed = (run(folder, name, *layouts[name], *options, f"steps={step + 1}") for name in (before, after))
        assert_learns_the_same(same, changed, step)
        assert metrics_of(changed)[step]["policy/token_mult_prob_error_max"] == 1.0


@pytest.mark.multi
@pytest.mark.slow
def test_dropout_drops_the_elements_that_one_rank_would_drop(folder: Path) -> None:
    """Before column parallel and row parallel layers, with graphs, and after resuming."""
    options = ("adapter={rank: 4, alpha: 8, dropout: 0.3}", "algorithm.minibatches=2", "optimizer.schedule=constant")
    whole = run(folder, "whole", 1, *options)
    sharded = run(folder, "divided", 2, "tensor_parallel=2", *options)
    assert_learns_the_same(whole, sharded, step=0)
    run(folder, "resumed", 2, "tensor_parallel=2", *options, "steps=1")
    resumed = run(folder, "resumed", 2, "tensor_parallel=2", *options)
    assert metrics_of(resumed)[1:] == metrics_of(sharded)[1:]  # the last step of a run is also validated
    for rank in range(2):
        ours, theirs = weights_of(resumed, 2, rank), weights_of(sharded, 2, rank)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


REPLIES = """
import os
import random
import time
from pathlib import Path

def add(text, prompt):
    with Path(__file__).with_name("asked").open("a") as file:
        file.write(os.environ["RANK"] + "\\n")
    return "+" if len(text) < 6 else None

def roll(text, prompt):
    time.sleep(random.random() / 100)
    add(text, prompt)
    if random.random() < 0.1:
        raise ValueError("lost")
    return random.choice(["+", "++", None])
"""


def environment(folder: Path, reply: str) -> str:
    (folder / "replies.py").write_text(REPLIES)
    options = f"{{reply: '{folder / 'replies.py'}:{reply}', max_turns: 3, max_tokens: 8}}"
    return f"rollout.environment={{name: 'rollgraph.rl.environment:MultiTurn', options: {options}}}"


@pytest.mark.multi
@pytest.mark.slow
def test_the_first_rank_of_a_group_runs_the_environment(folder: Path) -> None:
    """If replies depend on the text alone, a group samples what one rank does. Replies may be random, slow or fail."""
    environment_option = environment(folder, "add")
    whole = run(folder, "whole", 1, environment_option, "rollout.max_tokens=2")
    (folder / "asked").unlink()
    sharded = run(folder, "divided", 2, "tensor_parallel=2", environment_option, "rollout.max_tokens=2")
    assert_learns_the_same(whole, sharded, step=0)
    assert set((folder / "asked").read_text().split()) == {"0"}
    for row in metrics_of(sharded):
        assert row["policy/token_mult_prob_error_max"] == 1.0
    (folder / "asked").unlink()
    grid = run(folder, "grid", 4, "tensor_parallel=2", environment(folder, "roll"), "rollout.max_tokens=2")
    assert set((folder / "asked").read_text().split()) == {"0", "2"}
    for row in metrics_of(grid):
        assert row["policy/token_mult_prob_error_max"] == 1.0


@pytest.mark.parametrize(
    ("rule", "ranks", "overrides"),
    [
        ("ranks_form_groups", 3, ["tensor_parallel=2"]),
        ("layers_divide", 3, ["tensor_parallel=3"]),
        ("adapters_of_own_heads", 4, ["tensor_parallel=4", "adapter={rank: 4}"]),
        ("groups_on_nodes", 2, ["tensor_parallel=2", "cluster={engine: ray, nodes: 2}"]),
        (
            "peers_without_division",
            2,
            ["tensor_parallel=2", "cluster={engine: ray, gpus_per_node: 2}", "checkpoint.peers=1"],
        ),
        ("divided_once", 2, ["tensor_parallel=2", "shard=parameters"]),
    ],
)
def test_impossible_layouts_are_refused(folder: Path, rule: str, ranks: int, overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(config_of(folder, *overrides, text=CONFIG), World(0, ranks, "cpu"))
    assert rule in [problem.rule for problem in caught.value.problems]


def test_staged_collectives_inside_graphs_are_refused(folder: Path) -> None:
    sharing = World(0, 2, "cpu", staged=True)
    with pytest.raises(ConfigError, match=r"graph\.impl: .* set this to none") as caught:
        check_inputs(config_of(folder, "tensor_parallel=2", text=CONFIG), sharing)
    assert [problem.rule for problem in caught.value.problems] == ["exchanges_in_graphs"]
    check_inputs(config_of(folder, "tensor_parallel=2", "graph.impl=none", text=CONFIG), sharing).rewards.close()
    check_inputs(config_of(folder, "shard=parameters", text=CONFIG), sharing).rewards.close()
