"""Memory settings that a run chooses before it allocates, records, and keeps when it is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollgraph.config import Config, parse_config
from rollgraph.parallel.ranks.world import World
from rollgraph.plan import chosen_memory
from rollgraph.plan.choose import MemoryBudget
from rollgraph.plan.chosen_memory import RECORD, find_memory_budget, restore_choices
from rollgraph.plan.report import make_plan
from rollgraph.plan.suggest import DoesNotFit
from rollgraph.run import setup
from rollgraph.train import train

ONE = World(0, 1, "cpu")
RUN = """
output: {folder}/run
steps: 1
cpu_threads: 1
model: {{tiny: {{layers: 2, width: 32, heads: 4, kv_heads: 2, mlp: 64, max_length: 32}}}}
data: {{train: {folder}/t.jsonl, prompts_per_step: 64}}
algorithm: {{name: sft}}
graph: {{impl: none}}
checkpoint: {{export_at_end: false}}
log: {{progress: none, sinks: [jsonl]}}
"""


def make_config(folder: Path, *overrides: str) -> Config:
    (folder / "t.jsonl").write_text('{"prompt": "What is 1 plus 1?", "completion": " It is 2."}\n' * 64)
    return parse_config(RUN.format(folder=folder), overrides)


def limit_memory(monkeypatch: pytest.MonkeyPatch, nbytes: float) -> None:
    """Give the run a device with `nbytes` besides the reserve."""
    device = int(nbytes * 32 / 31) + 32
    monkeypatch.setattr(chosen_memory, "find_memory_budget", lambda world: MemoryBudget(device))


def test_a_resumed_run_keeps_the_choices_of_its_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    limit_memory(monkeypatch, 0.5 * make_plan(config, device="cpu").peak)
    notes: list[str] = []
    monkeypatch.setattr("rollgraph.run.step_log.StepLog.note", lambda log, text: notes.append(text))
    run = train(config, ONE)
    assert run is not None
    record = json.loads((tmp_path / "run" / RECORD).read_text())
    chosen = record["chosen"]
    tokens = chosen["train.microbatch_tokens"]
    assert tokens < 16384
    assert run.config.train.microbatch_tokens == tokens
    assert run.policy.limits.token_buckets[-1] == run.inputs.limits.token_buckets[-1] <= tokens
    assert any(note.startswith(f"  train.microbatch_tokens: {tokens} (") for note in notes)
    recorded = json.loads((tmp_path / "run" / "starts.jsonl").read_text().splitlines()[0])["config"]
    assert recorded["train"]["microbatch_tokens"] == tokens

    # Resumed without a limit, the run keeps its microbatches, because others would change its bits.
    monkeypatch.setattr(chosen_memory, "find_memory_budget", lambda world: MemoryBudget())
    resumed = train(make_config(tmp_path, "steps=2"), ONE)
    assert resumed is not None
    assert resumed.inputs.limits.token_buckets == run.inputs.limits.token_buckets
    assert [change.key for change in resumed.inputs.changes] == ["steps"]
    resumed_record = json.loads((tmp_path / "run" / RECORD).read_text())
    assert resumed_record == record | {"device_bytes": None}  # with the reasons and the plan of the first start
    # A written value wins over the record, and allow_changes=memory discards it.
    assert restore_choices(make_config(tmp_path, "train.microbatch_tokens=640")).train.microbatch_tokens == 640
    assert restore_choices(make_config(tmp_path, "allow_changes=memory")).train.microbatch_tokens is None


def test_a_run_that_cannot_fit_is_refused_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, "train.microbatch_tokens=4096")
    limit_memory(monkeypatch, 0.5 * make_plan(config, device="cpu").peak)

    def refuse(*_: Any) -> None:
        raise AssertionError("a model was made")

    monkeypatch.setattr(setup, "make_model", refuse)
    with pytest.raises(DoesNotFit, match=r"memory: this run needs at least .* \[memory_fits\]") as caught:
        train(config, ONE)
    assert [remedy.setting for remedy in caught.value.suggestions][:1] == ["train.microbatch_tokens: null"]
    assert not (tmp_path / "run" / RECORD).exists()


def test_a_resumed_run_that_no_longer_fits_may_choose_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    planned = make_plan(config, device="cpu").peak
    limit_memory(monkeypatch, 0.8 * planned)
    train(config, ONE)
    limit_memory(monkeypatch, 0.4 * planned)
    with pytest.raises(DoesNotFit, match=r"What would fit: allow_changes: \[memory\], to choose again \(needs"):
        train(make_config(tmp_path, "steps=2"), ONE)
    resumed = train(make_config(tmp_path, "steps=2", "allow_changes=memory"), ONE)
    assert resumed is not None
    assert (resumed.config.train.microbatch_tokens or 16384) < 16384


def test_nothing_is_chosen_if_memory_suffices(tmp_path: Path) -> None:
    run = train(make_config(tmp_path), ONE)
    assert run is not None
    assert run.config.train.microbatch_tokens is None
    assert json.loads((tmp_path / "run" / RECORD).read_text())["chosen"] == {}


def test_ranks_share_the_memory_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one machine, and one on another with less free memory on its device."""
    reports = [[70, 100, "a", ""], [80, 100, "a", ""], [60, 90, "b", ""]]
    monkeypatch.setattr(chosen_memory, "run_on_some_ranks", lambda world, here, work: map(json.dumps, reports))
    assert find_memory_budget(World(0, 3, "cuda:0")) == MemoryBudget(60, 50)
    assert find_memory_budget(World(2, 3, "cpu")) == MemoryBudget(50)


def test_ranks_share_the_memory_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share a GPU, and the third has its own."""
    reports = [[80, 99, "a", "first"], [90, 99, "a", "first"], [60, 99, "a", "second"]]
    monkeypatch.setattr(chosen_memory, "run_on_some_ranks", lambda world, here, work: map(json.dumps, reports))
    assert find_memory_budget(World(0, 3, "cuda:0", staged=True)) == MemoryBudget(40, 33)
