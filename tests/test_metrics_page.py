"""docs/metrics.md names every metric that a run can write, and no other."""

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

OPTIONS = {"dr_grpo": "{max_tokens: 4}"}  # what an algorithm cannot do without

OWN = """
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
    """Whether a metric is the one of a name, in which <label> stands for any text."""
    parts = [re.escape(part) for part in re.split(r"<\w+>", name)]
    return re.fullmatch("[^/]+".join(parts), metric) is not None


def metrics_of_a_run(folder: Path, output: str, *overrides: str) -> set[str]:
    train(eager_config(folder, f"output={folder / output}", "steps=1", *overrides), ONE)
    rows = [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]
    return {name for row in rows for name in row} - {"step"}


def inputs_of(folder: Path, name: str) -> list[str]:
    """What an algorithm learns from, where that is not a reward: rows with completions, or a teacher."""
    if name in SUPERVISED:
        path = folder / "written.jsonl"
        path.write_text('{"prompt": "0?", "completion": "4", "chosen": "4", "rejected": "5"}\n' * 8)
        return ["reward.functions=[]", "algorithm.minibatches=1", f"data.train={path}", f"data.validation={path}"]
    if name in WITH_TEACHER:
        train(eager_config(folder, "steps=1", "data.validation=null", "checkpoint.export_at_end=true"), ONE)
        return ["reward.functions=[]", f"algorithm.teacher={folder / 'run' / 'model'}"]
    return ["data.validation=null"]


def test_the_page_has_every_metric_and_no_other(folder: Path) -> None:
    """Each algorithm as it is, and a run in which everything happens that is only reported when it happens."""
    written = {}
    for name in ALGORITHMS:
        given = [f"algorithm.name={name}", f"algorithm.options={OPTIONS.get(name, '{}')}", *inputs_of(folder, name)]
        written[name] = metrics_of_a_run(folder, name, *given)
        if name not in SUPERVISED:  # which learn from what others wrote
            assert {"policy/entropy", "policy/clipped_low", "policy/clipped_high"} <= written[name]
    long = json.dumps({"prompt": "0" * 20, "answer": "4"}) + "\n"
    for file in ("train", "held_out"):
        path = folder / f"{file}.jsonl"
        path.write_text(long + path.read_text())
    (folder / "own.py").write_text(OWN)
    functions = f"reward.functions=[{{name: '{folder}/own.py:some'}}, {{name: length, options: {{limit: 4}}}}]"
    environment = f"rollout.environment={{name: '{folder}/own.py:Failing'}}"
    written["everything"] = metrics_of_a_run(folder, "everything", KL, functions, environment, "data.too_long=drop")
    page = names_on_the_page()
    assert len(page) > 40
    for run, metrics in written.items():
        assert [metric for metric in sorted(metrics) if not any(is_named(metric, name) for name in page)] == [], run
    everything = set().union(*written.values())
    assert [name for name in sorted(page) if not any(is_named(metric, name) for metric in everything)] == []
