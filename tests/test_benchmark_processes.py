"""Shared parts of benchmarks: processes that report figures, and equal timing for each system."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import cpu
import pytest
import rollouts
import torch
from apart import run_apart, seconds_of_process
from common import transformers_config

from rollgraph.inference import Engine, SamplingParams
from rollgraph.model import Architecture, Decoder
from rollgraph.tokenizer import load_tokenizer

TINY = Architecture("qwen2", vocabulary=64, hidden=32, mlp=64, layers=2, heads=2, kv_heads=1, head_dim=16, tied=False)
REPORTER = f"""
import sys
sys.path.insert(0, {str(Path(rollouts.__file__).parent)!r})
from apart import report
print("loading")
report({{"decode": {{"1": 2.5}}}})
"""


def test_reports_are_returned_and_a_quiet_process_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "part.py"
    file.write_text(REPORTER + "report({'arguments': sys.argv[1:]})")
    reports = run_apart(str(file), ["rollgraph", "--only", "decode"], quiet=True)
    assert reports == [{"decode": {"1": 2.5}}, {"arguments": ["rollgraph", "--only", "decode"]}]
    assert capsys.readouterr().out == ""


def test_a_failed_process_keeps_its_reports_and_shows_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "part.py"
    file.write_text(REPORTER + "raise SystemExit('out of memory')")
    assert run_apart(str(file), ["long"], quiet=True) == [{"decode": {"1": 2.5}}]
    assert capsys.readouterr().out == "loading\nout of memory\npart.py long ended with exit code 1\n"


def test_a_process_has_the_given_python_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "part.py"
    file.write_text(REPORTER + "import os; report([sys.executable, os.environ['WHO']])")
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    reports = run_apart(str(file), [], python=str(python), environment={"WHO": "peer"}, quiet=True)
    assert reports[1] == [str(python), "peer"]


def test_a_process_past_its_limit_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "part.py"
    file.write_text("import time\ntime.sleep(600)")
    assert run_apart(str(file), [], limit_s=0.2) == []
    assert "ended with exit code -9" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_seconds_of_a_process_count_from_its_start() -> None:
    before = seconds_of_process()
    time.sleep(0.05)
    assert 0 < before < seconds_of_process()


class TinySystem:
    kinds = ("logprobs",)
    settings = "a tiny model"

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.engine = Engine(Decoder(TINY), rows=4, max_length=32, cache_bytes=1 << 20, filters=False)
        self.prompts: list[list[int]] = []

    def generate(self, prompts: list[list[int]], samples: int, new: int, kind: str) -> int:
        self.prompts += prompts
        outputs = self.engine.generate(prompts, SamplingParams(n=samples, max_tokens=new))
        return sum(len(completion.tokens) for output in outputs for completion in output.completions)


def test_each_timed_run_has_new_prompts_and_all_its_tokens() -> None:
    system = TinySystem()
    shape = rollouts.Shape(TINY, prompts=2, samples=2, prompt=8, new=4)
    assert rollouts.Stopwatch(system).fastest(shape, "logprobs", 4, repeats=3) > 0
    assert len({tuple(prompt) for prompt in system.prompts}) == 6
    system.generate = lambda *_: 15  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="15 new tokens instead of 16"):
        rollouts.Stopwatch(system).seconds(shape, "logprobs", 4)


def test_the_floor_counts_shared_prompts_once_and_no_embedding() -> None:
    alone = rollouts.Shape(TINY, prompts=4, samples=1, prompt=16, new=4)
    shared = rollouts.Shape(TINY, prompts=1, samples=4, prompt=16, new=4)
    parameters = sum(p.numel() for p in Decoder(TINY).parameters())
    assert alone.weights == parameters - TINY.vocabulary * TINY.hidden
    bytes_per_position = TINY.layers * 2 * TINY.kv_heads * TINY.head_dim * 2
    saved = rollouts.floor_of_step(alone, 2) - rollouts.floor_of_step(shared, 2)
    assert saved * rollouts.BYTES_PER_SECOND == pytest.approx(3 * 16 * bytes_per_position)
    assert rollouts.floor_of_rollout(shared) < rollouts.floor_of_rollout(alone)


def test_every_part_is_in_one_group_with_one_architecture() -> None:
    grouped = [part for parts in rollouts.GROUPS.values() for part in parts]
    assert sorted(grouped) == sorted(rollouts.PARTS)
    shapes = {"decode": rollouts.DECODE[1], **rollouts.ROLLOUTS}
    for parts in rollouts.GROUPS.values():
        assert all(shapes[part].architecture == shapes[parts[0]].architecture for part in parts)


def test_peers_have_the_shape_of_our_model() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        theirs = transformers.Qwen2ForCausalLM(transformers_config(rollouts.QWEN_7B))
        ours = Decoder(rollouts.QWEN_7B)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    assert theirs.config.rope_parameters["rope_theta"] == rollouts.QWEN_7B.rope.theta


def test_the_cpu_table_has_medians_ratios_and_gaps_for_failures() -> None:
    ours = [{"figures": {cpu.FIRST: [second, 4.0], cpu.LATER: [0.25, 0.5]}} for second in (3.0, 1.0, 2.0)]
    theirs = [{"figures": {cpu.FIRST: [4.0, 2.0], cpu.LATER: [0.5, 0.5]}}]
    assert cpu.rows_of("tiny", {"rollgraph": ours, "peer": theirs}) == [
        "| `tiny`: start to first step | 2.000 s | 4.000 s | **0.50** | 4.000 s | 2.000 s | **2.00** |",
        "| `tiny`: a later step | 0.250 s | 0.500 s | **0.50** | 0.500 s | 0.500 s | **1.00** |",
    ]
    later = cpu.rows_of("tiny", {"rollgraph": ours, "peer": []})[1]
    assert later == "| `tiny`: a later step | 0.250 s | - | - | 0.500 s | - | - |"


def test_a_linked_model_has_the_weights_but_another_stop_token(tmp_path: Path) -> None:
    model, linked = tmp_path / "model", tmp_path / "linked"
    model.mkdir()
    cpu.write_tiny(cpu.TASKS["tiny"], model)
    cpu.prepare("real", str(model), linked)
    end = json.loads((model / "tokenizer.json").read_text())["added_tokens"][-1]
    assert load_tokenizer(linked).stop_ids == {end["id"]}
    assert load_tokenizer(model).stop_ids != {end["id"]}
    assert (linked / "model.safetensors").samefile(model / "model.safetensors")
