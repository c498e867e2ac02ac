"""docs/metrics.md lists exactly the metrics that runs can write."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rollgraph.config.names import SUPERVISED, WITH_TEACHER
from rollgraph.rl.algorithms import ALGORITHMS
from rollgraph.train import train
from tests.test_train import ONE, eager_config, folder

__all__ = ["folder"]

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
KL = "algorithm.options={kl_coef: 0.05, dual_clip: 3.0, importance_cap: 2.0}"

OPTIONS = {"dr_grpo": "{max_tokens: 4}"}  # required options of algorithms

CUSTOM = """
from collections import Counter
from rollgraph.rl.environment import SingleTurn

class Failing(SingleTurn):
    failures = Counter()

    def run(self, generate, prompts):
        rollouts = super().run(generate, prompts)
        rollouts[0].finish_reason = "error"
        self.failures["KeyError"] += 1
        return rollouts

def some(completions, log_metric, **columns):
    log_metric("calls", 1.0)
    return [float(index % 2) if index else float("nan") for index in range(len(completions))]
"""


def names_on_the_page() -> set[str]:
    """Return the names in the first column of each table."""
    cells = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def is_named(metric: str, name: str) -> bool:
    """Whether a metric matches a name, in which <label> stands for any text."""
    parts = [re.escape(part) for part in re.split(r"<\w+>", name)]
    return re.fullmatch("[^/]+".join(parts), metric) is not None


def metrics_of_a_run(folder: Path, output: str, *overrides: str) -> set[str]:
    train(eager_config(folder, f"output={folder / output}", "steps=1", *overrides), ONE)
    rows = [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]
    return {name for row in rows for name in row} - {"step"}


def inputs_of(folder: Path, name: str) -> list[str]:
    """Settings for algorithms that do not learn from rewards, but from completions in the data or a teacher."""
    if name in SUPERVISED:
        path = folder / "written.jsonl"
        path.write_text('{"prompt": "0?", "completion": "4", "chosen": "4", "rejected": "5"}\n' * 8)
        return ["reward.functions=[]", "algorithm.minibatches=1", f"data.train={path}", f"data.validation={path}"]
    if name in WITH_TEACHER:
        train(eager_config(folder, "steps=1", "data.validation=null", "checkpoint.export_at_end=true"), ONE)
        return ["reward.functions=[]", f"algorithm.teacher={folder / 'run' / 'model'}"]
    return ["data.validation=null"]


def test_the_page_lists_exactly_the_metrics_of_runs(folder: Path) -> None:
    """From runs of each algorithm, and one with failures, drops and custom metrics, which are logged only then."""
    metrics_by_run = {}
    for name in ALGORITHMS:
        options = [f"algorithm.name={name}", f"algorithm.options={OPTIONS.get(name, '{}')}", *inputs_of(folder, name)]
        metrics_by_run[name] = metrics_of_a_run(folder, name, *options)
        if name not in SUPERVISED:  # supervised algorithms sample nothing
            assert {"policy/entropy", "policy/clipped_low", "policy/clipped_high"} <= metrics_by_run[name]
    long = json.dumps({"prompt": "0" * 20, "answer": "4"}) + "\n"
    for file in ("train", "held_out"):
        path = folder / f"{file}.jsonl"
        path.write_text(long + path.read_text())
    (folder / "own.py").write_text(CUSTOM)
    functions = f"reward.functions=[{{name: '{folder}/own.py:some'}}, {{name: length, options: {{limit: 4}}}}]"
    environment = f"rollout.environment={{name: '{folder}/own.py:Failing'}}"
    metrics_by_run["everything"] = metrics_of_a_run(
        folder, "everything", KL, functions, environment, "data.too_long=drop"
    )
    page = names_on_the_page()
    assert len(page) > 40
    for run, metrics in metrics_by_run.items():
        assert [metric for metric in sorted(metrics) if not any(is_named(metric, name) for name in page)] == [], run
    everything = set().union(*metrics_by_run.values())
    assert [name for name in sorted(page) if not any(is_named(metric, name) for metric in everything)] == []
