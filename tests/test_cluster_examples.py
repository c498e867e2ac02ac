"""The cluster examples use options of rollgraph and torchrun that exist, and the batch script requeues as documented.
It runs with stand-ins for the commands of SLURM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from rollgraph.cli import main
from rollgraph.commands.train import add_parser as add_train
from rollgraph.config import Config, parse_config
from tests.plan.test_layouts import QWEN_32B

ROOT = Path(__file__).parents[1]
FILES = ROOT / "examples" / "cluster"
MINIMAL = "data: {train: t.jsonl}\nreward: {functions: [{name: exact_match}]}\nmodel: {path: m}\n"

SRUN = '#!/bin/sh\nexec "$@"\n'
SCONTROL = """#!/bin/sh
case "$1" in
    show) printf 'node-a\\nnode-b\\n' ;;
    requeue) echo "$2" >requeued ;;
esac
"""
# Like torchrun: a rank is a process group, SIGTERM is forwarded to the whole group, and the exit code is 0 or 1.
TORCHRUN = """#!{python}
import json, os, signal, subprocess, sys
if sys.argv[1:] == ["--help"]:
    sys.exit(print("  --shutdown-timeout SECONDS"))
json.dump(sys.argv[1:], open("torchrun.json", "w"))
command = sys.argv[sys.argv.index("--no-python") + 1 :]
rank = subprocess.Popen(command, env={{**os.environ, "RANK": "0"}}, start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: os.killpg(rank.pid, signal.SIGTERM))
sys.exit(1 if rank.wait() else 0)
"""
# Like rollgraph: exits with a given code, or waits for SIGTERM and exits with 143.
ROLLGRAPH = """#!{python}
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
json.dump(sys.argv[1:], open("rollgraph.json", "w"))
if os.environ["ENDS_WITH"] == "TERM":
    open("started", "w").close()
    time.sleep(600)
sys.exit(int(os.environ["ENDS_WITH"]))
"""


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FILES / name).read_text(encoding="utf-8")))


def config_of(arguments: list[str]) -> Config:
    """The configuration of `rollgraph train FILE key=value ...`. Unknown keys and bad values raise."""
    parser = argparse.ArgumentParser()
    add_train(parser.add_subparsers())
    assert arguments[0] == "train"
    options = parser.parse_args(arguments)
    return parse_config(MINIMAL, options.overrides)


def test_the_ray_job_reserves_the_gpus_of_its_command() -> None:
    (job,) = documents("rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    command = shlex.split(job["spec"]["entrypoint"])
    assert command[0] == "rollgraph"
    config = config_of(command[1:])
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert config.cluster.engine == "ray"
    assert config.cluster.nodes == workers["replicas"] == workers["minReplicas"]
    assert config.cluster.gpus_per_node == int(container["resources"]["limits"]["nvidia.com/gpu"])
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(config.output.startswith(f"{mount}/") for mount in mounts)


def test_the_indexed_job_starts_the_nodes_that_torchrun_expects() -> None:
    service, job = documents("torchrun_job.yaml")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    options = get_args_parser().parse_args(container["command"][1:])
    assert container["command"][0] == "torchrun"
    assert (options.module, options.training_script) == (True, "rollgraph")
    config = config_of(options.training_script_args)
    assert config.cluster.engine == "none"
    assert int(options.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(options.nproc_per_node) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    host, _, port = options.rdzv_endpoint.partition(":")
    assert (host, port.isdigit()) == (f"{job['metadata']['name']}-0.{pod['subdomain']}", True)
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    names = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names


@pytest.mark.slow
def test_documented_plans_are_those_that_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(yaml|text)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my.yaml").write_text(next(text for language, text in blocks if language == "yaml"))
    model = tmp_path / "models" / "Qwen2.5-32B-Instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(QWEN_32B))
    monkeypatch.chdir(tmp_path)
    examples = [text for language, text in blocks if language == "text"]
    assert len(examples) == 3
    for text in examples:
        command, _, *lines = text.splitlines()
        arguments = shlex.split(command.removeprefix("$ "))
        assert main(arguments[1:]) in (0, 1)
        output = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line and line not in output] == []


# -- SLURM -------------------------------------------------------------------------------------------


def start_script(folder: Path, ends_with: str, restarts: int) -> subprocess.Popen[str]:
    tools = folder / "tools"
    tools.mkdir()
    programs = {"srun": SRUN, "scontrol": SCONTROL, "torchrun": TORCHRUN, "rollgraph": ROLLGRAPH}
    for name, text in programs.items():
        filled = text.format(python=sys.executable) if text.startswith("#!{") else text
        (tools / name).write_text(filled)
        (tools / name).chmod(0o755)
    variables = {
        "PATH": os.pathsep.join([str(tools), os.environ["PATH"]]),
        "ENDS_WITH": ends_with,
        "SLURM_JOB_ID": "17",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    command = ["bash", str(FILES / "slurm.sbatch"), "my.yaml", "steps=7", "reward.functions=[{name: exact_match}]"]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("ends_with", "restarts", "code", "requeued"),
    [
        ("0", 0, 0, False),
        ("1", 0, 1, False),
        ("2", 0, 2, False),
        ("75", 0, 1, True),
        ("75", 20, 1, False),
        ("143", 0, 1, False),  # cancelled by a user
    ],
)
def test_the_batch_script_requeues_itself_if_that_helps(
    tmp_path: Path, ends_with: str, restarts: int, code: int, requeued: bool
) -> None:
    process = start_script(tmp_path, ends_with, restarts)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors
    assert (tmp_path / "requeued").exists() == requeued
    assert ("it is not queued again" in errors) == (code == 2)
    assert (tmp_path / "exit_codes.17" / "0").read_text() == f"{ends_with}\n"


def test_the_batch_script_stops_its_ranks_before_the_time_limit(tmp_path: Path) -> None:
    process = start_script(tmp_path, "TERM", 0)
    limit = time.monotonic() + 300
    while not (tmp_path / "started").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    assert (tmp_path / "exit_codes.17" / "0").read_text() == "143\n"
    assert (tmp_path / "requeued").read_text() == "17\n"


def test_the_batch_script_passes_its_arguments_on(tmp_path: Path) -> None:
    assert start_script(tmp_path, "0", 3).wait(timeout=300) == 0
    train_arguments = yaml.safe_load((tmp_path / "rollgraph.json").read_text())
    assert train_arguments == ["train", "my.yaml", "steps=7", "reward.functions=[{name: exact_match}]"]
    assert config_of(train_arguments).steps == 7
    arguments = yaml.safe_load((tmp_path / "torchrun.json").read_text())
    # Only newer versions of torchrun have this option.
    supported = [word for word in arguments if word not in ("--shutdown-timeout", "540")]
    options = get_args_parser().parse_args(supported)
    assert (options.nnodes, options.nproc_per_node, options.no_python) == ("2", "8", True)
    assert (options.rdzv_endpoint, options.rdzv_id, options.max_restarts) == ("node-a:29500", "17.3", 20)
    text = (FILES / "slurm.sbatch").read_text(encoding="utf-8")
    assert f"#SBATCH --nodes={options.nnodes}\n" in text
    assert f"#SBATCH --gpus-per-node={options.nproc_per_node}\n" in text
    assert "#SBATCH --signal=B:USR1@600\n" in text
