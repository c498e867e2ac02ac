"""A tensor parallel rank allocates the planned bytes, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollgraph.config import Config, parse_config
from rollgraph.parallel.ranks.world import World
from rollgraph.plan.report import make_plan
from rollgraph.run.setup import make_run
from tests.parallel.worlds import run_world
from tests.plan.test_memory_plan import line_bytes

CONFIG = """
output: {folder}/run
model: {{tiny: {{layers: 3, width: 32, heads: 8, kv_heads: 2, mlp: 64, max_length: 32}}}}
data: {{train: {folder}/t.jsonl, prompts_per_step: 2, max_prompt_tokens: 8}}
rollout: {{samples_per_prompt: 2, max_tokens: 12}}
reward: {{functions: [{{name: exact_match}}]}}
algorithm: {{kl_coef: 0.1}}
train: {{token_buckets: [64]}}
graph: {{impl: none}}
"""
LAYOUTS = {
    "one group": (2, ["tensor_parallel=2"]),
    "two groups": (4, ["tensor_parallel=2", "optimizer.state=int8"]),
    "shared key/value heads": (4, ["tensor_parallel=4", "optimizer.state=bf16"]),
    "adapters": (2, ["tensor_parallel=2", "adapter={rank: 4}"]),
}


def allocated_bytes(world: World, config: Config) -> dict[str, int]:
    """The bytes that a rank has allocated after capture, by the names of the plan."""
    run = make_run(config, world)
    try:
        policy = run.policy
        assert policy.engine is not None
        buckets, states = policy.sharded.flat.buckets, policy.optimizer.state.shards
        buffers = list(policy.model.buffers()) if config.adapter is not None else []
        frozen = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers}
        return {
            "base, frozen": sum(frozen.values()),
            "parameters": sum(bucket.parameters.untyped_storage().nbytes() for bucket in buckets),
            "gradients, fp32": policy.sharded.flat.gradient_memory.untyped_storage().nbytes(),
            "optimizer": sum(tensor.nbytes for state in states for tensor in state.values()),
            "reference": policy.weights.nbytes("device"),
            "key/value cache": sum(pages.nbytes for pages in policy.engine._graphs.pages),
        }
    finally:
        run.close()


@pytest.mark.multi
@pytest.mark.parametrize(("ranks", "overrides"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_tensor_parallel_rank_allocates_the_planned_bytes(ranks: int, overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    config = parse_config(CONFIG.format(folder=tmp_path), overrides)
    plan = make_plan(config, ranks=ranks, device="cpu")
    for allocated in run_world(ranks, tmp_path, allocated_bytes, config):
        assert isinstance(allocated, dict), allocated
        for name, nbytes in allocated.items():
            assert nbytes == line_bytes(plan, name), name
    whole = make_plan(parse_config(CONFIG.format(folder=tmp_path), ["tensor_parallel=1", *overrides[1:]]), device="cpu")
    assert line_bytes(plan, "key/value cache") < line_bytes(whole, "key/value cache")
