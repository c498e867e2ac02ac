"""Plans of many ranks: the memory of each layout, proposals, and how a step scales."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollgraph.config import Config, ConfigError, parse_config
from rollgraph.inputs.inputs import make_tokenizer
from rollgraph.model import Architecture
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from rollgraph.plan import chosen_memory
from rollgraph.plan.choose import MemoryBudget
from rollgraph.plan.chosen_memory import choose_memory, count_nodes
from rollgraph.plan.layout import Link, Network
from rollgraph.plan.memory import GIB, PHASES, Pass, phase_bytes, pool_bytes
from rollgraph.plan.report import Plan, make_plan
from rollgraph.plan.suggest import DoesNotFit
from rollgraph.policy.weights import SHARDED_BASE
from rollgraph.run.setup import make_model
from tests.parallel.lockstep import Room, RoomCollectives, run_ranks
from tests.parallel.test_ring import storages
from tests.plan.test_memory_plan import line_bytes, run_plan

QWEN_32B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
ARCHITECTURE = Architecture.from_config(QWEN_32B)
NORMS = 2 * 5120
QKV = 5120 * (40 + 2 * 8) * 128 + (40 + 2 * 8) * 128  # with its bias
OUT = 40 * 128 * 5120
MLP = 3 * 5120 * 27648
LAYER = NORMS + QKV + OUT + MLP
REST = 2 * 152064 * 5120 + 5120  # embedding, head and final norm
PARAMETERS = 64 * LAYER + REST
RUN = """
data: {{train: t.jsonl, prompts_per_step: 64, max_prompt_tokens: 512}}
rollout: {{samples_per_prompt: 16, max_tokens: 2048, rows: 256}}
reward: {{functions: [{{name: exact_match}}]}}
algorithm: {{kl_coef: 0.01}}
model: {{path: {folder}}}
"""
SETTLED = (  # leaves nothing to choose
    "train.microbatch_tokens=8192",
    "memory.logits=chunks",
    "model.checkpointing=32",
    "optimizer.offload=none",
    "memory.reference=device",
    "memory.cache_gib=8",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_32B))
    return tmp_path


@pytest.fixture
def run_file(folder: Path) -> str:
    path = folder / "run.yaml"
    path.write_text(RUN.format(folder=folder))
    return str(path)


def make_config(folder: Path, *overrides: str) -> Config:
    return parse_config(RUN.format(folder=folder), overrides)


def make_settled_plan(folder: Path, *overrides: str, **options: Any) -> Plan:
    return make_plan(make_config(folder, *SETTLED, *overrides), **options)


# -- memory ------------------------------------------------------------------------------------------


def test_memory_of_a_rank_with_sharded_parameters(folder: Path) -> None:
    plan = make_settled_plan(folder, "shard=parameters", ranks=8)
    assert line_bytes(plan, "parameters") == 2 * 64 * LAYER // 8
    assert line_bytes(plan, "ring of layers") == 2 * 2 * LAYER
    assert line_bytes(plan, "embedding and head") == 2 * REST
    assert line_bytes(plan, "parameters, gathered") == 2 * 64 * LAYER
    assert line_bytes(plan, "gradients, fp32") == 4 * (PARAMETERS // 8 + 2 * LAYER + REST)
    assert line_bytes(plan, "optimizer") == pytest.approx(12 * PARAMETERS / 8, rel=1e-3)
    assert line_bytes(plan, "reference") == pytest.approx(2 * PARAMETERS / 8, rel=1e-3)


def test_generation_and_scoring_gather_all_layers(folder: Path) -> None:
    plan = make_settled_plan(folder, "shard=parameters", ranks=8)
    phases = {entry.name: entry.phases for entry in plan.lines}
    assert phases["parameters, gathered"] == ("generate", "score")
    assert phases["ring of layers"] == phases["embedding and head"] == PHASES
    assert phases["gradients, fp32"] == ("train",)
    supervised = make_settled_plan(folder, "shard=parameters", "algorithm={name: sft}", "reward.functions=[]", ranks=8)
    assert line_bytes(supervised, "parameters, gathered") == 0  # supervised training has neither phase


def test_gathered_parameters_lie_in_the_graph_pool(folder: Path) -> None:
    """The peak is permanent memory, gradients, and the graph pool, which has room for all layers."""
    plan = make_settled_plan(folder, "shard=parameters", ranks=8)
    permanent = [entry for entry in plan.lines if entry.where == "device" and entry.phases == PHASES]
    permanent_bytes = sum(entry.nbytes for entry in permanent if entry.name not in ("fragments", "not shared"))
    pool = pool_bytes(plan.choice.settings.shape, plan.lines)
    assert plan.peak == permanent_bytes + line_bytes(plan, "gradients, fp32") + pool
    assert pool > line_bytes(plan, "parameters, gathered")
    less, more = (
        make_settled_plan(folder, "shard=parameters", f"train.microbatch_tokens={tokens}", ranks=8)
        for tokens in (2560, 4096)
    )
    assert line_bytes(more, "activations") - line_bytes(less, "activations") > 10 * GIB
    assert more.peak - less.peak < 5 * GIB  # activations share memory with gathered layers


def test_gathered_parameters_add_memory_on_a_cpu(folder: Path) -> None:
    plan = make_settled_plan(folder, "shard=parameters", "memory.cache_gib=1", ranks=8, device="cpu")
    training_bytes = sum(entry.nbytes for entry in plan.lines if "train" in entry.phases)
    assert plan.peak >= training_bytes + line_bytes(plan, "parameters, gathered") - line_bytes(plan, "not shared")


def test_one_rank_has_nothing_to_shard(folder: Path) -> None:
    assert make_settled_plan(folder, "shard=parameters").lines == make_settled_plan(folder).lines


def test_shards_shrink_with_the_ranks_and_gathered_layers_do_not(folder: Path) -> None:
    plans = [make_settled_plan(folder, "shard=parameters", ranks=ranks, nodes=ranks // 4) for ranks in (4, 8, 16, 32)]
    for name in ("parameters", "optimizer", "reference", "copy for checkpoints"):
        sizes = [line_bytes(plan, name) for plan in plans]
        for more, fewer in zip(sizes[1:], sizes, strict=False):
            assert more == pytest.approx(fewer / 2, rel=1e-3)
    for name in ("ring of layers", "embedding and head", "parameters, gathered", "activations"):
        sizes = [line_bytes(plan, name) for plan in plans]
        assert min(sizes) == pytest.approx(max(sizes), rel=1e-5)  # not exactly: padding makes all shards equal
    peaks = [plan.peak for plan in plans]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_parallel_ranks_shard_the_layers(folder: Path, tensor: int) -> None:
    whole, plan = make_settled_plan(folder, ranks=8), make_settled_plan(folder, f"tensor_parallel={tensor}", ranks=8)
    local = 64 * (NORMS + (QKV + OUT + MLP) // tensor) + REST
    assert plan.choice.settings.shape.trainable_weights == local
    assert line_bytes(plan, "parameters") == pytest.approx(2 * local, rel=1e-3)
    assert line_bytes(plan, "gradients, fp32") == pytest.approx(4 * local, rel=1e-3)
    assert line_bytes(plan, "reference") == line_bytes(plan, "parameters")
    # Ranks with the same shard of the layers divide its state: with 8 ranks in groups of 8, there is one such rank.
    assert line_bytes(plan, "optimizer") == pytest.approx(12 * local * tensor / 8, rel=1e-3)
    # The head is not sharded.
    assert line_bytes(plan, "logits, train") == line_bytes(whole, "logits, train")
    assert line_bytes(plan, "logits, score") == line_bytes(whole, "logits, score")


def test_tensor_parallel_ranks_shard_the_kv_cache(folder: Path) -> None:
    def cache(tensor: int) -> int:
        """Every rank fills its 256 rows, with groups of 2 as with groups of 8."""
        config = make_config(folder, f"tensor_parallel={tensor}", "data.prompts_per_step=1024")
        return line_bytes(make_plan(config, ranks=8), "key/value cache")

    tokens = 256 * 2560 + 16
    assert cache(2) == tokens * 64 * 2 * 4 * 128 * 2
    assert cache(8) == cache(2) // 4


def test_tensor_parallel_activations_are_sharded_but_for_the_residual_stream() -> None:
    """Sharded activations fall with the number of ranks, the residual stream does not: linear in 1 / ranks."""
    saved = [Pass(ARCHITECTURE.sharded(tensor), 1024, 2, cuda=True).saved_by_layer() for tensor in (1, 2, 4, 8)]
    assert saved[0] - saved[1] == 2 * (saved[1] - saved[2]) == 4 * (saved[2] - saved[3])
    stream_bytes = 1024 * 2 * (5120 * 2 * 2 + 4)  # inputs, outputs and scales of two norms
    assert saved[0] - stream_bytes == 8 * (saved[3] - stream_bytes)


def test_workspace_of_a_tensor_parallel_all_reduce() -> None:
    """A small one gathers the summands of all ranks; in a large one over more than two ranks, a rank sums one part."""
    for tokens, tensor, parts in ((1024, 2, 2 * 2 + 2 * 4), (1024, 8, 3 * 2 + 1), (64, 8, 8 * 2 + 2 * 4)):
        sharded = Pass(ARCHITECTURE.sharded(tensor), tokens, 2, cuda=True, tensor_parallel=tensor)
        sum_bytes = tokens * 5120 * (parts + 2 * 2)
        mlp_bytes = tokens * 2 * (2 * 5120 + 3 * 27648 // tensor)
        assert sharded.forward_workspace() == max(sum_bytes, mlp_bytes)
    assert sum_bytes > mlp_bytes  # with eight ranks and few tokens


def test_fewer_key_value_heads_than_ranks_are_replicated() -> None:
    a = Architecture("qwen2", vocabulary=64, hidden=96, mlp=64, layers=1, heads=8, kv_heads=2, head_dim=16)
    assert [(a.sharded(n).heads, a.sharded(n).kv_heads, a.sharded(n).mlp) for n in (1, 2, 4, 8)] == [
        (8, 2, 64),
        (4, 1, 32),
        (2, 1, 16),
        (1, 1, 8),
    ]
    assert a.sharded(1) == a


@pytest.mark.parametrize(
    ("changes", "tensor", "message"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 8, "8 must divide the 12 heads"),
        ({"intermediate_size": 60}, 8, "8 must divide the 40 heads and the MLP's width of 60"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "2 must divide the 3 key/value heads"),
    ],
)
def test_indivisible_layers_are_refused_and_not_proposed(
    folder: Path, changes: dict[str, int], tensor: int, message: str
) -> None:
    (folder / "config.json").write_text(json.dumps(QWEN_32B | changes))
    with pytest.raises(ConfigError, match=f"^tensor_parallel: {message}.*layers_divide"):
        make_settled_plan(folder, f"tensor_parallel={tensor}", ranks=8)
    plan = make_settled_plan(folder, ranks=8, layouts=True)
    assert tensor not in [option.layout.tensor_parallel for option in plan.layouts]


def test_sharded_parameters_and_tensor_parallel_compose(folder: Path) -> None:
    """Each rank keeps a data parallel shard of its tensor parallel shard."""
    both = replace(make_config(folder, *SETTLED), shard="parameters", tensor_parallel=4)  # a rule refuses it
    plan = make_plan(both, ranks=16, nodes=2)
    local = 64 * (NORMS + (QKV + OUT + MLP) // 4) + REST
    assert line_bytes(plan, "parameters") == pytest.approx(2 * (local - REST) / 4, rel=1e-5)
    assert line_bytes(plan, "parameters, gathered") == pytest.approx(2 * (local - REST), rel=1e-5)
    assert line_bytes(plan, "ring of layers") == pytest.approx(2 * 2 * (local - REST) / 64, rel=1e-5)
    assert line_bytes(plan, "optimizer") == pytest.approx(12 * local / 4, rel=1e-3)


# -- proposals ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [80e9, 141e9])
def test_tensor_parallel_is_proposed_for_a_32b_model_on_eight_gpus(folder: Path, size: float) -> None:
    plan = make_plan(make_config(folder), ranks=8, device_bytes=int(size))
    assert plan.fits is False
    assert plan.proposal.startswith("shard: optimizer needs ")
    assert " to train on each of 8 ranks, which have " in plan.proposal
    best = plan.suggestions[0]
    assert best.setting.startswith("tensor_parallel: ")
    assert f": use {best.setting} (needs " in plan.proposal
    assert f"What would fit: {best.setting} (needs " in plan.misfit
    # The proposal fits, and no layout that fits is faster.
    proposed = make_plan(best.config, ranks=8, device_bytes=int(size))
    assert proposed.fits
    fitting = [option.seconds for option in plan.layouts if option.choice.fits]
    assert proposed.choice.settings.time.total == min(fitting)


@pytest.mark.slow
def test_a_misfit_of_sharded_parameters_names_generation(folder: Path) -> None:
    plan = make_plan(make_config(folder, "shard=parameters"), ranks=8, device_bytes=int(80e9))
    assert plan.fits is False
    assert plan.peak_phase == "generate"
    needed = plan.proposal.removeprefix("shard: parameters needs ").partition(" GiB to generate on each of 8 ranks")
    assert float(needed[0]) > 2 * PARAMETERS / 2**30  # generation needs all parameters
    assert ": use shard: optimizer, tensor_parallel: " in plan.proposal


def test_the_fastest_layout_has_no_proposal(folder: Path) -> None:
    assert make_plan(make_config(folder, "tensor_parallel=4"), ranks=8, device_bytes=int(141e9)).proposal == ""
    slow = make_plan(make_config(folder, "tensor_parallel=8"), ranks=8, device_bytes=int(141e9), layouts=True)
    assert slow.fits
    assert slow.proposal.endswith(" is faster")


def test_layouts_that_a_run_refuses_are_not_compared(folder: Path) -> None:
    """Each data parallel rank needs a prompt."""
    compared = make_plan(make_config(folder, "data.prompts_per_step=4", "tensor_parallel=2"), ranks=8, layouts=True)
    assert [option.layout.describe() for option in compared.layouts] == [f"tensor_parallel: {n}" for n in (2, 4, 8)]
    assert make_plan(make_config(folder), layouts=True).layouts == ()


def test_staged_collectives_in_graphs_are_refused_and_not_proposed(folder: Path) -> None:
    """A run whose ranks share a GPU would refuse this layout."""
    sharing = "ranks.backend=gloo"
    with pytest.raises(ConfigError, match=r"^graph\.impl: .* set this to none.*exchanges_in_graphs"):
        make_settled_plan(folder, "tensor_parallel=2", sharing, ranks=2)
    tensor = [
        option.layout.tensor_parallel for option in make_settled_plan(folder, sharing, ranks=2, layouts=True).layouts
    ]
    assert tensor == [1, 1]
    eager = make_settled_plan(folder, sharing, "graph.impl=none", ranks=2, layouts=True)
    assert [option.layout.tensor_parallel for option in eager.layouts] == [1, 1, 2]
    on_cpus = make_settled_plan(folder, sharing, "memory.cache_gib=1", ranks=2, device="cpu", layouts=True)
    assert [option.layout.tensor_parallel for option in on_cpus.layouts] == [1, 1, 2]


def test_sharded_parameters_include_the_base_of_adapters(folder: Path) -> None:
    """Each keeps a shard of all layers. The matrices A are stored twice: in the adapters, and beside the base."""
    plan = make_settled_plan(folder, "shard=parameters", "adapter.rank=32", "model.checkpointing=32", ranks=8)
    a = 32 * (3 * 5120 + 40 * 128 + 2 * 5120 + 27648)  # for q, k and v, output, gate and up, and down
    b = 32 * ((40 + 2 * 8) * 128 + 5120 + 2 * 27648 + 5120)
    padding = 64 * (2 * 32 * 5120)  # at most: rows up to a multiple of 16, and the bias of the rows of A
    base = 64 * (LAYER + a)
    assert base <= line_bytes(plan, "base, frozen") * 8 / 2 <= base + padding
    assert line_bytes(plan, "parameters") == 2 * 64 * (a + b) // 8
    assert line_bytes(plan, "gradients, fp32") == 4 * (64 // 8 + 2) * (a + b)
    assert line_bytes(plan, "optimizer") == 12 * 64 * (a + b) // 8
    assert line_bytes(plan, "embedding and head") == pytest.approx(2 * REST, rel=1e-6)
    gathered = line_bytes(plan, "parameters, gathered")
    assert gathered == 8 * (line_bytes(plan, "base, frozen") + line_bytes(plan, "parameters"))
    assert line_bytes(plan, "ring of layers") == gathered * 2 // 64
    assert not any(entry.name == "reference" for entry in plan.lines)  # the base is the reference
    whole = make_settled_plan(folder, "adapter.rank=32", "model.checkpointing=32", ranks=8)
    assert line_bytes(whole, "base, frozen") == pytest.approx(8 * line_bytes(plan, "base, frozen") + 2 * REST, rel=1e-4)


TINY = """
output: {output}
data: {{train: t.jsonl, prompts_per_step: 4}}
rollout: {{samples_per_prompt: 2, max_tokens: 8}}
reward: {{functions: [{{name: exact_match}}]}}
model: {{tiny: {{width: 48, mlp: 80, layers: 5, heads: 6, kv_heads: 3, max_length: 64}}}}
tokenizer: {{path: bytes}}
shard: parameters
"""


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("overrides", [[], ["adapter.rank=3"], ["adapter={rank: 5, targets: [v_proj, down_proj]}"]])
def test_a_rank_with_sharded_parameters_holds_the_planned_bytes(
    tmp_path: Path, ranks: int, overrides: list[str]
) -> None:
    config = parse_config(TINY.format(output=tmp_path), overrides)
    plan = make_plan(config, ranks=ranks, device="cpu")
    names = ("base, frozen", "parameters", "ring of layers", "embedding and head", "gradients, fp32", "optimizer")
    planned_bytes = sum(line_bytes(plan, name) for name in names)

    def run(rank: int, room: Room) -> tuple[int, int]:
        model = make_model(config, make_tokenizer(config), "cpu")
        base = None if model.adapters is None else SHARDED_BASE
        sharded = ShardedModel(
            model, World(rank, ranks, "cpu"), collectives=RoomCollectives(room, rank), shard="parameters",
            units=list(model.layers), frozen=base,
        )  # fmt: skip
        optimizer = ShardedAdamW(sharded, 0.1)
        tensors = [*model.parameters(), *([] if base is None else model.buffers()), sharded.flat.gradient_memory]
        tensors += [bucket.resident for bucket in (*sharded.flat.buckets, *sharded.flat.frozen_buckets)]
        tensors += [tensor for shard in optimizer.state.shards for tensor in shard.values()]
        full_model = sharded.make_full_model()
        copied = [*full_model.parameters(), *([] if base is None else full_model.buffers())]
        return storages(tensors), storages([*tensors, *copied]) - storages(tensors)

    for held, copied in run_ranks(ranks, run):
        assert held == planned_bytes
        assert copied == line_bytes(plan, "parameters, gathered")


def test_adapters_are_planned_in_every_layout(folder: Path) -> None:
    """While it trains, a rank with a sharded base has more room than one with the whole base."""
    plan = make_settled_plan(folder, "adapter.rank=8", "shard=parameters", ranks=8, layouts=True)
    train = {option.layout.describe(): phase_bytes(option.choice.settings.lines, "train") for option in plan.layouts}
    assert train.keys() == {"shard: optimizer", "shard: parameters", *(f"tensor_parallel: {n}" for n in (2, 4, 8))}
    assert train["shard: optimizer"] - train["shard: parameters"] > 2 * 64 * LAYER * (7 / 8 - 2 / 64)


def test_a_run_that_does_not_fit_is_refused_with_a_layout_that_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_memory, "find_memory_budget", lambda world: MemoryBudget(int(80e9), int(200e9)))
    inputs: Any = SimpleNamespace(prompt_lengths=None, offline_data=None)  # all that the check reads before memory fits
    with pytest.raises(DoesNotFit, match=r"8 ranks with shard: optimizer, .* fit: tensor_parallel: \d") as caught:
        choose_memory(make_config(folder), World(0, 8, "cuda:0"), inputs, print)
    assert caught.value.suggestions[0].config.tensor_parallel > 1


@pytest.mark.parametrize(("machines", "nodes"), [("aabb", 2), ("aaaa", 1), ("abcd", 4), ("aaab", 1)])
def test_nodes_count_if_they_have_equally_many_ranks(
    monkeypatch: pytest.MonkeyPatch, machines: str, nodes: int
) -> None:
    monkeypatch.setattr(chosen_memory, "run_on_some_ranks", lambda world, here, work: list(machines))
    assert count_nodes(World(0, 4, "cpu")) == nodes


# -- scaling -----------------------------------------------------------------------------------------


def test_more_gpus_shorten_a_step_of_fixed_size(folder: Path) -> None:
    plan = make_settled_plan(folder, "tensor_parallel=4", ranks=8, scale="fixed")
    assert plan.scaling is not None
    points = plan.scaling.points
    assert [(point.layout.ranks, point.layout.nodes) for point in points] == [
        (4, 1), (8, 1), (16, 2), (32, 4), (64, 8), (128, 16), (256, 32),
    ]  # fmt: skip
    times = [point.seconds for point in points]
    assert times == sorted(times, reverse=True)
    assert plan.scaling.efficiency(points[0]) == 1
    last = plan.scaling.efficiency(points[-1])
    assert last is not None
    assert 0 < last < 0.7  # a rank with few samples still reads all weights for each token


def test_a_step_that_grows_with_its_gpus_takes_little_longer(folder: Path) -> None:
    plan = make_settled_plan(folder, "tensor_parallel=8", ranks=8, scale="grown")
    assert plan.scaling is not None
    points = plan.scaling.points
    assert [point.layout.ranks for point in points] == [8 << n for n in range(8)]
    assert [point.prompts for point in points] == [64 << n for n in range(8)]
    exposed = [point.choice.settings.time.exposed for point in points]
    assert exposed == sorted(exposed)
    assert 1 < points[-1].seconds / points[1].seconds < 1.1


def test_a_slow_network_slows_the_step(folder: Path) -> None:
    slow = Network(Link(450e9, 3e-6), Link(1e8, 1e-3))
    fast_plan, slow_plan = (make_settled_plan(folder, ranks=16, nodes=2, network=network) for network in (None, slow))
    assert slow_plan.choice.settings.time.exposed > 100 * fast_plan.choice.settings.time.exposed
    alone = make_settled_plan(folder, ranks=8, network=slow)
    assert alone.choice.settings.time.exposed == make_settled_plan(folder, ranks=8).choice.settings.time.exposed


# -- the command -------------------------------------------------------------------------------------


def test_the_command_prints_layouts_and_communication(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--ranks", "16", "--nodes", "2", "--device-gib", "200", "--layouts", "--scale", "grown")
    assert run_plan(run_file, "shard=parameters", *SETTLED, *options) == 0
    output = capsys.readouterr().out
    assert "memory of one of 16 ranks on 2 nodes, shard: parameters" in output
    assert "layers, gathered and reduced" in output
    assert "450 GB/s and 3 us inside a node, 50 GB/s and 10 us between nodes" in output
    for first in ("shard: optimizer ", "tensor_parallel: 8 ", "1,024 "):
        assert [text for text in output.splitlines() if text.startswith(first)]
    assert "does not fit" in output


@pytest.mark.slow
def test_json_has_layouts_and_scaling(run_file: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--ranks", "8", "--device-gib", "75", "--scale", "--link", "inside=200,5", "--json")
    assert run_plan(run_file, "shard=parameters", *SETTLED, *options) == 1
    output = json.loads(capsys.readouterr().out)
    network = Network(inside=Link(200 * 1e9, 5 * 1e-6))
    plan = make_settled_plan(folder, "shard=parameters", ranks=8, network=network, device_bytes=75 << 30, scale="fixed")
    assert output == json.loads(json.dumps(plan.to_dict()))
    assert output["layout"] == {"ranks": 8, "nodes": 1, "shard": "parameters", "tensor_parallel": 1}
    assert output["proposal"] == plan.proposal
    assert {entry["tensor_parallel"] for entry in output["layouts"]} == {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("overrides", "options", "ranks", "nodes"),
    [
        ([], [], 1, 1),
        ([], ["--ranks", "16"], 16, 2),
        ([], ["--ranks", "12"], 12, 1),
        (["cluster={engine: ray, nodes: 2, gpus_per_node: 4}"], [], 8, 2),
        (["cluster={engine: ray, nodes: 2, gpus_per_node: 4}"], ["--nodes", "4"], 16, 4),
        (["cluster={engine: ray, nodes: 2, gpus_per_node: 4}"], ["--ranks", "4"], 4, 1),
        (["cluster={nodes: 2, gpus_per_node: 4}"], [], 1, 1),
    ],
)
def test_ranks_and_nodes_come_from_options_or_the_cluster(
    run_file: str,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    options: list[str],
    ranks: int,
    nodes: int,
) -> None:
    assert run_plan(run_file, *SETTLED, *overrides, *options, "--json") == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert (layout["ranks"], layout["nodes"]) == (ranks, nodes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "--nodes, .* must be positive"),
        (["--ranks", "9", "--nodes", "2"], "9 ranks cannot be spread equally over 2 nodes"),
        (
            ["tensor_parallel=3", "--ranks", "8"],
            r"3 does not divide the 8 ranks that the run has \[ranks_form_groups\]",
        ),
        (["tensor_parallel=2"], "2 does not divide the one rank that the run has"),
        (["tensor_parallel=8", "--ranks", "16", "--nodes", "4"], "8 does not divide the 4 ranks that a node has"),
        (["tensor_parallel=16", "--ranks", "16", "--nodes", "1"], "16 must divide the 40 heads"),
        (["--ranks", "1024"], "data.prompts_per_step: 64, but each of 1024 ranks needs at least one"),
        (["--link", "outside=1,2"], "--link outside=1,2: expected inside=GB/S,US"),
        (["--link", "inside=0,2"], "--link inside=0,2: expected"),
        (["--link", "between=50"], "--link between=50: expected"),
    ],
)
def test_impossible_options_are_refused(
    run_file: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run_plan(run_file, *words) == 2
    assert re.search(message, capsys.readouterr().err)
