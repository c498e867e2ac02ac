from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgraph.commands import plan as command
from rollgraph.config import Config, parse_config
from rollgraph.model import Architecture, Decoder, PackedKeys, token_logprobs
from rollgraph.model.lora import AdapterSpec, attach
from rollgraph.parallel.ranks.world import World
from rollgraph.plan.memory import PHASES, Pass, pool_bytes
from rollgraph.plan.report import Plan, make_plan
from rollgraph.plan.run_shape import make_run_shape
from rollgraph.plan.time import Floor, Speed, sum_up_to
from rollgraph.run.setup import make_run

GIB = 2**30
QWEN_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
PARAMETERS = 1_543_714_304
RUN = """
data: {{train: t.jsonl, prompts_per_step: 32, max_prompt_tokens: 128}}
rollout: {{samples_per_prompt: 16, max_tokens: 384, rows: 512}}
reward: {{functions: [{{name: exact_match}}]}}
algorithm: {{kl_coef: 0.01}}
model: {{path: {folder}}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_1_5B))
    return tmp_path


def make_config(folder: Path, *overrides: str) -> Config:
    return parse_config(RUN.format(folder=folder), overrides)


def line_bytes(plan: Plan, name: str) -> int:
    return sum(entry.nbytes for entry in plan.lines if entry.name == name)


def floor_of(plan: Plan) -> Floor:
    assert plan.floor is not None
    return plan.floor


# -- time ------------------------------------------------------------------------------------------


def test_the_floor_of_a_step_with_a_1_5b_model(folder: Path) -> None:
    floor = floor_of(make_plan(make_config(folder)))
    assert floor.repeated["prefill"] == pytest.approx(0.26, rel=0.02)
    assert floor.repeated["reference"] == pytest.approx(1.03, rel=0.01)
    assert floor.repeated["train"] == pytest.approx(3.09, rel=0.01)
    # FLOPs alone would take 0.77 s, but reading keys and values bounds the last third of the steps.
    assert 0.77 < floor.repeated["decode"] < 0.77 * 1.05
    assert sum(floor.repeated.values()) == pytest.approx(5.15, rel=0.01)
    assert sum(floor.shared.values()) == pytest.approx(5.15 * 0.77, rel=0.02)


def test_decoding_a_small_batch_is_bound_by_reading_weights(folder: Path) -> None:
    plan = make_plan(make_config(folder, "data.prompts_per_step=1", "rollout.samples_per_prompt=2"))
    reading = 384 * 2 * PARAMETERS / 4.28e12
    assert reading < floor_of(plan).repeated["decode"] < 1.02 * reading


def test_two_ranks_take_half_as_long_and_two_epochs_twice(folder: Path) -> None:
    once = floor_of(make_plan(make_config(folder))).repeated
    assert floor_of(make_plan(make_config(folder), ranks=2)).repeated["train"] == pytest.approx(once["train"] / 2)
    twice = floor_of(make_plan(make_config(folder, "algorithm.epochs=2"))).repeated
    assert twice["train"] == pytest.approx(2 * once["train"])
    assert twice["reference"] == once["reference"]
    assert "reference" not in floor_of(make_plan(make_config(folder, "algorithm.kl_coef=0"))).repeated


def test_fewer_rows_than_samples_decode_longer(folder: Path) -> None:
    at_once = floor_of(make_plan(make_config(folder))).repeated["decode"]
    in_turns = floor_of(make_plan(make_config(folder, "rollout.rows=128"))).repeated["decode"]
    assert at_once < in_turns < 4 * at_once


@pytest.mark.parametrize("tflops", [1.0, 300.0, 785.0, 1e6])
def test_decode_time_is_the_sum_over_its_steps(folder: Path, tflops: float) -> None:
    """Half of the layers have windows; steps are bound by FLOPs, by bytes, or by one and then the other."""
    window = {"use_sliding_window": True, "sliding_window": 200, "max_window_layers": 14}
    (folder / "config.json").write_text(json.dumps(QWEN_1_5B | window))
    plan = make_plan(make_config(folder), speed=Speed(tflops))
    expected = 0.0
    for length in range(128 + 1, 128 + 384 + 1):
        seen = 14 * length + 14 * min(length, 200)
        nbytes = 2 * PARAMETERS + 2 * 2 * 128 * 2 * 512 * seen
        expected += max(2 * PARAMETERS * 512 / (tflops * 1e12), nbytes / 4.28e12)
    assert floor_of(plan).repeated["decode"] == pytest.approx(expected, rel=1e-9)


def test_sum_up_to() -> None:
    for first, last, most in itertools.product(range(6), range(8), range(8)):
        if last >= first - 1:
            assert sum_up_to(first, last, most) == sum(min(n, most) for n in range(first, last + 1))


def test_a_billion_tokens_are_planned_without_a_loop(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(QWEN_1_5B | {"max_position_embeddings": 2**31 - 1}))
    long = ("rollout.max_tokens=2000000000", "train.microbatch_tokens=2147483647")
    assert floor_of(make_plan(make_config(folder, *long))).repeated["decode"] > 1e6


# -- memory ----------------------------------------------------------------------------------------


def test_the_planned_model_is_on_meta(folder: Path) -> None:
    model = make_run_shape(make_config(folder)).model
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_memory_of_weights(folder: Path) -> None:
    plan = make_plan(make_config(folder))
    assert line_bytes(plan, "parameters") == pytest.approx(2 * PARAMETERS, rel=1e-3)
    assert line_bytes(plan, "gradients, fp32") == pytest.approx(4 * PARAMETERS, rel=1e-3)
    assert line_bytes(plan, "optimizer") == pytest.approx(12 * PARAMETERS, rel=1e-3)
    assert line_bytes(plan, "reference") == line_bytes(plan, "parameters")
    assert line_bytes(plan, "copy for checkpoints") == line_bytes(plan, "optimizer")
    four_ranks = make_plan(make_config(folder), ranks=4)
    assert line_bytes(four_ranks, "copy for checkpoints") == pytest.approx(3 * PARAMETERS, rel=1e-2)
    assert line_bytes(four_ranks, "optimizer") == pytest.approx(3 * PARAMETERS, rel=1e-2)
    with_peers = make_plan(make_config(folder, "checkpoint.peers=1", "cluster={engine: ray, nodes: 4}"), ranks=4)
    assert line_bytes(with_peers, "copy for checkpoints") == 2 * line_bytes(four_ranks, "optimizer")
    assert line_bytes(with_peers, "copies of a neighbour") == 2 * line_bytes(four_ranks, "optimizer")
    assert line_bytes(four_ranks, "parameters") == pytest.approx(line_bytes(plan, "parameters"), rel=1e-3)


def test_the_cache_has_room_for_all_rows_unless_its_size_is_given(folder: Path) -> None:
    of_a_token = 28 * 2 * 2 * 128 * 2
    whole = line_bytes(make_plan(make_config(folder)), "key/value cache")
    assert whole == (512 * 512 + 16) * of_a_token  # and a block for idle rows
    limited = line_bytes(make_plan(make_config(folder, "memory.cache_gib=2")), "key/value cache")
    assert 2 * GIB - 16 * of_a_token < limited <= 2 * GIB


def test_the_cache_shares_memory_with_training(folder: Path) -> None:
    """The cache shares memory with gradients and activations, so it adds nothing to the peak."""
    small, large = (make_plan(make_config(folder, f"memory.cache_gib={size}")) for size in (1, 7))
    assert line_bytes(large, "key/value cache") - line_bytes(small, "key/value cache") > 5 * GIB
    assert large.peak - small.peak == line_bytes(large, "fragments") - line_bytes(small, "fragments") < 2 * GIB
    assert large.total("generate") - small.total("generate") > 5 * GIB
    # A cache larger than all that training needs determines the peak.
    rows = ("rollout.rows=65536", "data.prompts_per_step=4096")
    huge = make_plan(make_config(folder, *rows, "memory.cache_gib=200"))
    assert huge.peak_phase == "generate"
    assert huge.peak > 200 * GIB


def test_the_cache_shares_whole_layers_with_gradients(folder: Path) -> None:
    """The rest of the gradients' memory is too small for one more layer and stays unused."""
    adapted = make_plan(make_config(folder, "adapter.rank=32"), device_bytes=16 * GIB)
    gradients, cache = line_bytes(adapted, "gradients, fp32"), line_bytes(adapted, "key/value cache")
    assert gradients < cache / 28  # the pages of one layer
    huge = ("data.prompts_per_step=256", "rollout.rows=4096", "memory.cache_gib=56")
    plan = make_plan(make_config(folder, "adapter.rank=32", *huge))
    assert line_bytes(plan, "not shared") == line_bytes(plan, "gradients, fp32")


@pytest.mark.parametrize("overrides", [[], ["adapter.rank=32"], ["adapter.rank=32", "memory.cache_gib=0.5"]])
def test_the_peak_is_the_graph_pool_and_permanent_memory(folder: Path, overrides: list[str]) -> None:
    """The pool is allocated as one block of this size, so the plan must count all of it."""
    plan = make_plan(make_config(folder, *overrides))
    outside = [entry for entry in plan.lines if entry.where == "device" and entry.phases == PHASES]
    outside_bytes = sum(entry.nbytes for entry in outside if entry.name not in ("fragments", "not shared"))
    pool = pool_bytes(plan.choice.settings.shape, plan.lines)
    assert plan.peak == outside_bytes + line_bytes(plan, "gradients, fp32") + pool


def test_memory_of_adapters_and_their_frozen_base(folder: Path) -> None:
    plan = make_plan(make_config(folder, "adapter.rank=32"))
    a = QWEN_1_5B
    qkv, mlp, hidden = (12 + 2 * 2) * 128, a["intermediate_size"], a["hidden_size"]
    inputs, outputs = 3 * hidden + hidden + 2 * hidden + mlp, qkv + hidden + 2 * mlp + hidden
    adapters = 28 * 32 * (inputs + outputs)
    assert line_bytes(plan, "parameters") == pytest.approx(2 * adapters, rel=1e-2)
    assert line_bytes(plan, "gradients, fp32") == 2 * line_bytes(plan, "parameters")
    assert line_bytes(plan, "optimizer") == pytest.approx(12 * adapters, rel=1e-2)
    # The base, with a copy of A beside it.
    assert line_bytes(plan, "base, frozen") == pytest.approx(2 * PARAMETERS + 2 * 28 * 32 * inputs, rel=1e-2)
    assert line_bytes(plan, "reference") == 0  # the base is the reference
    with_slot = make_plan(make_config(folder, "adapter.rank=32", "warm_start.data=d.jsonl"))
    assert line_bytes(with_slot, "reference") == line_bytes(with_slot, "parameters")


@pytest.mark.parametrize(("state", "each"), [("fp32", 12), ("bf16", 8), ("int8", 6 + 2 / 64)])
def test_the_memory_of_optimizer_state(folder: Path, state: str, each: float) -> None:
    on_device = make_plan(make_config(folder, f"optimizer.state={state}", "optimizer.offload=none"))
    assert line_bytes(on_device, "optimizer") == pytest.approx(each * PARAMETERS, rel=1e-3)
    offloaded = make_plan(make_config(folder, f"optimizer.state={state}", "optimizer.offload=host"))
    assert line_bytes(offloaded, "optimizer") == 0
    # The host has no copy for checkpoints.
    assert offloaded.total("train", "host") == pytest.approx(each * PARAMETERS, rel=1e-2)
    assert on_device.peak - offloaded.peak == pytest.approx(each * PARAMETERS, rel=2e-2)


def test_only_a_kl_term_needs_a_reference(folder: Path) -> None:
    assert line_bytes(make_plan(make_config(folder, "algorithm.kl_coef=0")), "reference") == 0
    options = ("algorithm.kl_coef=0", "algorithm.options={kl_coef: 0.1}")
    assert line_bytes(make_plan(make_config(folder, *options)), "reference") > 0


def test_the_total_of_a_phase_sums_its_lines_on_the_device(folder: Path) -> None:
    plan = make_plan(make_config(folder, "memory.reference=host"), device_bytes=GIB)
    for phase in PHASES:
        expected = [entry.nbytes for entry in plan.lines if entry.where == "device" and phase in entry.phases]
        assert plan.total(phase) == sum(expected)
    assert plan.peak == max(map(plan.total, PHASES)) == plan.total(plan.peak_phase)
    assert plan.fits is False
    assert make_plan(make_config(folder), device_bytes=500 * GIB).fits is True
    assert make_plan(make_config(folder)).fits is None


def test_checkpointing_and_smaller_microbatches_save_less(folder: Path) -> None:
    saved = line_bytes(make_plan(make_config(folder)), "activations")
    assert line_bytes(make_plan(make_config(folder, "model.checkpointing=true")), "activations") < saved / 4
    half = line_bytes(make_plan(make_config(folder, "train.microbatch_tokens=8192")), "activations")
    assert half == pytest.approx(saved / 2, rel=1e-6)


def test_activations_fall_linearly_with_recomputed_layers(folder: Path) -> None:
    saved = [
        line_bytes(make_plan(make_config(folder, f"model.checkpointing={n}")), "activations") for n in (0, 7, 14, 28)
    ]
    assert saved[0] - saved[1] == saved[1] - saved[2] == (saved[2] - saved[3]) / 2 > GIB


def test_graphs_of_layers_have_input_buffers(folder: Path) -> None:
    assert line_bytes(make_plan(make_config(folder)), "inputs of graphs") == 0
    two_ranks = make_plan(make_config(folder), ranks=2)
    assert line_bytes(two_ranks, "inputs of graphs") == 28 * 16384 * (2 * 1536 * 2 + 128 * 4)


@pytest.mark.parametrize(("checkpointing", "per_submodule"), [(0, False), (1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize(
    "architecture",
    [
        Architecture("llama", vocabulary=64, hidden=64, mlp=160, layers=3, heads=4, kv_heads=2, head_dim=16),
        Architecture("qwen2", vocabulary=64, hidden=48, mlp=96, layers=2, heads=6, kv_heads=1, head_dim=8, tied=True),
        Architecture("qwen3", vocabulary=64, hidden=32, mlp=96, layers=4, heads=4, kv_heads=4, head_dim=16),
    ],
    ids=lambda architecture: architecture.family,
)
def test_planned_activations_are_those_that_autograd_saves(
    architecture: Architecture, checkpointing: int, per_submodule: bool
) -> None:
    model = Decoder(architecture)
    model.checkpoint_layers(checkpointing, per_submodule=per_submodule)
    saved = saved_bytes(model, tokens=96)
    planned = Pass(
        architecture, 96, 4, cuda=False, recomputed_layers=checkpointing, recomputes_by_part=per_submodule
    ).saved_activations()
    assert planned == pytest.approx(saved, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_planned_activations_of_adapters_are_those_that_autograd_saves(family: str, dtype: torch.dtype) -> None:
    a = Architecture(family, vocabulary=64, hidden=64, mlp=160, layers=3, heads=4, kv_heads=2, head_dim=16)
    model = Decoder(a).to(dtype)
    attach(model, AdapterSpec(rank=8), seed=0)
    columns = {"qkv": 3 * 8, "out": 8, "gate_up": 2 * 8, "down": 8}
    planned = Pass(a, 96, dtype.itemsize, cuda=False, lora_columns=columns).saved_activations()
    assert planned == pytest.approx(saved_bytes(model, tokens=96), rel=0.05)


def test_planned_activations_of_one_layer() -> None:
    def architecture(layers: int) -> Architecture:
        return Architecture("llama", vocabulary=64, hidden=64, mlp=128, layers=layers, heads=4, kv_heads=2, head_dim=16)

    difference = saved_bytes(Decoder(architecture(3)), tokens=64) - saved_bytes(Decoder(architecture(2)), tokens=64)
    assert Pass(architecture(1), 64, 4, cuda=False).saved_by_layer() == pytest.approx(difference, rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_planned_activations_on_a_gpu_are_those_that_autograd_saves(family: str) -> None:
    a = Architecture(family, vocabulary=512, hidden=256, mlp=768, layers=3, heads=4, kv_heads=2, head_dim=64)
    saved = saved_bytes(Decoder(a).to("cuda", torch.bfloat16), tokens=2048)
    assert Pass(a, 2048, 2, cuda=True).saved_activations() == pytest.approx(saved, rel=0.25)


def saved_bytes(model: Decoder, tokens: int) -> int:
    """Return the bytes that autograd saves for the backward pass of log-probabilities, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    storages: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # kept alive so that its address is not reused
        return tensor

    device = model.embed_tokens.weight.device
    ids = torch.randint(model.architecture.vocabulary, (tokens,), device=device)
    ends = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32, device=device)
    positions = torch.arange(tokens, device=device) % (tokens // 2)
    keys = PackedKeys(torch.arange(2 * tokens, device=device).clamp_max(tokens - 1), ends)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(ids, positions, ends, tokens, keys)
        logprobs = token_logprobs(hidden, model.head_weight, ids.roll(-1), chunk=tokens // 2)  # keeps no logits
    assert isinstance(logprobs, torch.Tensor)
    assert logprobs.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


def test_a_run_allocates_the_planned_bytes(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    config = parse_config(
        f"""
        output: {tmp_path / "run"}
        model: {{tiny: {{layers: 2, width: 32, heads: 4, kv_heads: 2, mlp: 64, max_length: 32}}}}
        data: {{train: {tmp_path / "t.jsonl"}, prompts_per_step: 2, max_prompt_tokens: 8}}
        rollout: {{samples_per_prompt: 2, max_tokens: 12, top_k: 5}}
        reward: {{functions: [{{name: exact_match}}]}}
        algorithm: {{kl_coef: 0.1}}
        train: {{token_buckets: [64]}}
        graph: {{impl: none}}
        """
    )
    plan = make_plan(config, device="cpu")
    run = make_run(config, World(0, 1, "cpu"))
    try:
        memory_plan, engine = run.policy.sharded.plan(), run.policy.engine
        assert engine is not None
        graphs = engine._graphs
        assert line_bytes(plan, "parameters") == memory_plan.parameters
        assert line_bytes(plan, "gradients, fp32") == memory_plan.gradients
        assert line_bytes(plan, "optimizer") == memory_plan.optimizer.device
        assert line_bytes(plan, "reference") == run.policy.weights.nbytes("device")
        assert line_bytes(plan, "key/value cache") == sum(layer.nbytes for layer in graphs.pages) == engine.plan.nbytes
        state = (graphs.state, graphs.history, graphs.orders, graphs.results, *graphs._batches.values())
        assert line_bytes(plan, "decode state") == sum(tensor.nbytes for tensor in state)
        pinned = (*graphs.upload._areas, *engine._host_results)
        assert line_bytes(plan, "decode state, pinned") == sum(tensor.nbytes for tensor in pinned)
    finally:
        run.close()


# -- the command -----------------------------------------------------------------------------------


def run_plan(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["plan", *arguments])
    exit_code: int = options.run(options)
    return exit_code


@pytest.fixture
def run_file(folder: Path) -> str:
    path = folder / "run.yaml"
    path.write_text(RUN.format(folder=folder))
    return str(path)


def test_the_command_prints_whether_a_run_fits(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(run_file, "--device-gib", "139") == 0
    output = capsys.readouterr().out
    assert "the device has 139.00 GiB, 4.34 GiB of them in reserve: it fits" in output
    assert "memory.logits: whole (nothing is computed twice)" in output
    assert "785 TFLOP/s and 4.28 TB/s (measured on an H200)" in output
    assert run_plan(run_file, "--device-gib", "9", "--tflops", "300") == 1
    output = capsys.readouterr().out
    assert "it does not fit: this run needs at least" in output
    assert "What would fit: adapter: {rank: 32} (needs" in output
    assert "measured" not in output


def test_the_command_refuses_what_a_run_refuses(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("nan", "inf", "0"):
        assert run_plan(run_file, "--device-gib", size) == 2
        assert "must be positive and finite" in capsys.readouterr().err
    assert run_plan(run_file, "optimizer.offload=host", "--device", "cpu") == 2
    assert "offload_from_a_device" in capsys.readouterr().err
    assert run_plan(run_file, "tokenizer.path=bytes", "adapter.path=nowhere") == 2
    assert "adapter.path: nowhere: there is no such folder" in capsys.readouterr().err


def test_the_plan_of_a_cpu_has_no_time_unless_its_speed_is_given(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = (run_file, "--device", "cpu")
    assert run_plan(*cpu) == 0
    output = capsys.readouterr().out
    assert "without the process itself and its libraries" in output
    assert not [words for words in ("H200", "least time", "TFLOP", "--device-gib") if words in output]
    assert run_plan(*cpu, "--json") == 0
    assert "floor_seconds" not in json.loads(capsys.readouterr().out)
    assert run_plan(*cpu, "--tflops", "1.5", "--tb-per-second", "0.1") == 0
    assert "at 1.5 TFLOP/s and 0.1 TB/s\n" in capsys.readouterr().out + "\n"


def test_json_has_the_numbers_of_the_plan(run_file: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(run_file, "memory.cache_gib=4", "--json", "--device-gib", "80", "--ranks", "2") == 0
    shown = json.loads(capsys.readouterr().out)
    plan = make_plan(make_config(folder, "memory.cache_gib=4"), ranks=2, device_bytes=80 * GIB)
    assert shown == plan.to_dict()
    assert shown["peak"]["bytes"] == max(shown["phases"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.path=nowhere"], "model.path: nowhere is not a folder"),
        (["--ranks", "0"], "positive"),
        (["graph.scope=step", "--ranks", "2"], "not possible with 2 ranks"),
        (["algorithm.name=grop"], "there is no algorithm"),
        (["stepz=3"], "unknown key"),
    ],
)
def test_invalid_options_are_refused(
    run_file: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(run_file, *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_notes_name_assumptions(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({k: v for k, v in QWEN_1_5B.items() if k != "dtype"}))
    plan = make_plan(make_config(folder, "data.max_prompt_tokens=null", "train.microbatch_tokens=32768"))
    assert ["bfloat16 is assumed" in plan.notes[0], "data.max_prompt_tokens" in plan.notes[1]] == [True, True]
    assert make_plan(make_config(folder, "model.dtype=float32")).notes == ()
