"""The planned memory of CPU runs, compared with their measured peak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
steps: 2
cpu_threads: 1
output: {folder}/run
data: {{train: {folder}/t.jsonl, prompts_per_step: 2, max_prompt_tokens: 80}}
rollout: {{samples_per_prompt: 2, max_tokens: 8}}
reward: {{functions: [{{name: exact_match}}]}}
checkpoint: {{every: 1, export_at_end: false}}
log: {{progress: none, sinks: [jsonl]}}
"""
LARGE_WEIGHTS = """
model: {tiny: {layers: 2, width: 1024, heads: 8, kv_heads: 2, mlp: 3072, max_length: 128}}
train: {token_buckets: [128]}
algorithm: {kl_coef: 0}
graph: {warmup: 1}
"""
LARGE_ACTIVATIONS = """
model: {tiny: {layers: 4, width: 512, heads: 8, kv_heads: 4, mlp: 1536, max_length: 128}}
train: {token_buckets: [768]}
algorithm: {kl_coef: 0.05}
graph: {warmup: 1}
"""
EAGER_AND_CHECKPOINTED = """
model: {tiny: {layers: 6, width: 512, heads: 8, kv_heads: 2, mlp: 2048, max_length: 128}, checkpointing: true}
train: {token_buckets: [1024]}
algorithm: {kl_coef: 0.05}
graph: {impl: none}
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("settings", [LARGE_WEIGHTS, LARGE_ACTIVATIONS, EAGER_AND_CHECKPOINTED])
def test_planned_memory_on_a_cpu_is_the_measured_peak(tmp_path: Path, settings: str) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "What is 2 plus 2? Answer with a number.", "answer": "4"}\n' * 4)
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path) + settings)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-m", "tests.plan.peak_memory", str(tmp_path / "run.yaml")]
    report = json.loads(subprocess.check_output(command, env=environment, cwd=tmp_path, text=True).splitlines()[-1])
    used = report["peak"] - report["before"]
    print(f"used {used >> 20} MiB, planned {report['planned'] >> 20} MiB")
    assert used > 200 * 2**20  # large enough that the process itself does not matter
    assert 0.8 * used < report["planned"] < 1.2 * used
