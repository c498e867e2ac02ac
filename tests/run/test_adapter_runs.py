"""Runs that train adapters: their files, starting from an adapter, and resuming with the same bits."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollgraph import Trainer
from rollgraph.checkpoint.changes import ChangedConfig
from rollgraph.checkpoint.format import CheckpointError
from rollgraph.cli import main
from rollgraph.config import Config, ConfigError, to_yaml
from rollgraph.errors import InvalidInput
from rollgraph.model import Decoder, load_model
from rollgraph.model.weights.adapter_files import read_adapter, read_base
from rollgraph.model.weights.peft_config import AdapterFileError
from rollgraph.parallel.ranks.world import World
from rollgraph.run.model_source import open_model
from rollgraph.train import train
from tests.parallel.worlds import run_world
from tests.run.test_model_source import run_eval, run_generate
from tests.test_train import (
    ONE,
    assert_same_run,
    config_of,
    eager_config,
    flip,
    fork,
    metrics_of,
    rows_of,
    wait_for,
    weights_of,
    write_inputs,
)

ADAPTER = "adapter={rank: 2, alpha: 8}"
TEXT = ["--prompt", "12?", "--max-tokens", "6", "--temperature", "0", "--logprobs", "--quiet"]
IDS = torch.tensor([49, 50, 63, 4])
GREEDY = "validation={every: 2, max_prompts: 8, temperature: 0}"  # independent of the seed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run of two steps with adapters, and their export. Do not change it."""
    folder = write_inputs(tmp_path_factory.mktemp("trained"))
    path = folder / "config.yaml"
    options = ["steps=2", "checkpoint.every=1", "checkpoint.export_at_end=true", "optimizer.lr=0.1", GREEDY]
    path.write_text(to_yaml(eager_config(folder, ADAPTER, *options)))
    assert main(["train", str(path)]) == 0
    return path


def copy_run(trained: Path, target: Path) -> Path:
    """Copy the run of `trained` to a folder where it may be changed."""
    shutil.copytree(trained.parent / "run", target)
    return target


def greedy_logprobs(capsys: pytest.CaptureFixture[str], folder: Path) -> list[float]:
    capsys.readouterr()
    assert main(["generate", str(folder), *TEXT]) == 0, capsys.readouterr().err
    (completion,) = json.loads(capsys.readouterr().out)["completions"]
    logprobs: list[float] = completion["policy_logprobs"]
    return logprobs


# -- files -----------------------------------------------------------------------------------------


def test_a_checkpoint_holds_only_the_adapter(trained: Path) -> None:
    run = trained.parent / "run"
    last = run / "checkpoints" / "step_00000001"
    layers = [f"layers.0.{name}" for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")]
    parameters = {f"{layer}.{factor}" for layer in layers for factor in ("lora_a", "lora_b")}
    saved = load_file(last / "rank0.safetensors")
    assert {name.partition("/")[2] for name in saved} == parameters
    assert load_file(last / "rest.safetensors") == {}
    assert json.loads((last / "manifest.json").read_text())["parameters"].keys() == parameters
    adapter_elements = sum(t.numel() for name, t in saved.items() if name.startswith("master/"))
    exported = load_file(run / "model" / "adapter_model.safetensors").values()
    assert adapter_elements == sum(tensor.numel() for tensor in exported)
    base_elements = sum(tensor.numel() for tensor in load_file(run / "base" / "model.safetensors").values())
    assert adapter_elements < base_elements / 10


def test_run_checkpoint_and_export_are_the_same_model(trained: Path) -> None:
    run = trained.parent / "run"
    first, last = (run / "checkpoints" / f"step_0000000{step}" for step in (0, 1))
    expected = logits_of(run)
    for path in (last, run / "model"):
        assert torch.equal(logits_of(path), expected)
    for path in (first, run / "base"):
        assert not torch.allclose(logits_of(path), expected, atol=1e-3)


def logits_of(folder: Path) -> torch.Tensor:
    model = open_model(str(folder), None, []).load(None, "cpu")
    with torch.no_grad():
        return model.logits(model(IDS, torch.arange(4), torch.tensor([0, 4], dtype=torch.int32), 4))


@pytest.mark.slow
def test_the_export_is_the_adapter_or_the_merged_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.parent / "run"
    assert read_base(run / "model") == (str(run / "base"), None)
    for target, options in (("adapter", []), ("merged", ["--merge"])):
        assert main(["export", str(trained), "--to", str(tmp_path / target), *options]) == 0, capsys.readouterr().err
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
        assert (tmp_path / "adapter" / name).read_bytes() == (run / "model" / name).read_bytes()
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    expected, merged, base = (greedy_logprobs(capsys, path) for path in (run, tmp_path / "merged", run / "base"))
    assert merged == pytest.approx(expected, abs=1e-5)
    assert base != pytest.approx(expected, abs=1e-2)
    assert main(["export", str(trained), "--to", str(tmp_path / "merged"), "--force"]) == 2
    assert "merged: holds the weights of a model" in capsys.readouterr().err


def test_merging_a_run_without_adapters_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.yaml").write_text(to_yaml(eager_config(folder)))
    (folder / "run" / "checkpoints").mkdir(parents=True)
    assert main(["export", str(folder / "config.yaml"), "--to", str(folder / "to"), "--merge"]) == 2
    assert "--merge: the run has no adapter (adapter: null), so all its weights are" in capsys.readouterr().err
    assert not (folder / "to").exists()


@pytest.mark.slow
def test_peft_loads_the_export(trained: Path) -> None:
    peft = pytest.importorskip("peft")
    run = trained.parent / "run"
    with torch.no_grad():
        theirs = peft.AutoPeftModelForCausalLM.from_pretrained(run / "model")(IDS[None]).logits[0]
    assert (logits_of(run) - theirs).abs().max() < 1e-5


# -- generate and eval -----------------------------------------------------------------------------


@pytest.mark.slow
def test_generate_and_eval_take_an_adapter_or_a_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained.parent / "run"
    expected = run_generate(capsys, run)
    assert run_generate(capsys, run / "model") == expected
    assert run_generate(capsys, run / "base") != expected
    score = final_validation(run)
    for path in (run, run / "model"):
        assert run_eval(capsys, trained, "adapter=null", "output=nowhere", "--model", str(path))[0] == score
    before = rows_of(run)[0]
    assert run_eval(capsys, trained, "--model", str(run / "base"))[0] == {name: before[name] for name in score}


@pytest.mark.slow
def test_a_checkpoint_finds_the_base_model_of_its_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(trained, tmp_path / "run")
    last = run / "checkpoints" / "step_00000001"
    shutil.copytree(last, tmp_path / "elsewhere" / "one" / "two")  # its configuration has the path of the base
    expected = run_generate(capsys, run)
    assert run_generate(capsys, run / "checkpoints" / "step_00000000") != expected
    for path in (last, tmp_path / "elsewhere" / "one" / "two"):
        assert run_generate(capsys, path) == expected
        assert run_eval(capsys, trained, "--model", str(path))[0] == final_validation(run)
    assert run_generate(capsys, last, "--dtype", "bfloat16") == run_generate(
        capsys, run / "model", "--dtype", "bfloat16"
    )


def test_an_adapter_without_its_base_model_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_run(trained, tmp_path / "run")
    settings = run / "model" / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": "./gone"}))
    assert main(["generate", str(run / "model"), *TEXT]) == 2
    assert "is an adapter of ./gone, and there is no such folder" in capsys.readouterr().err
    shutil.rmtree(run / "base")
    monkeypatch.setattr("rollgraph.inputs.base_model.BASE_FOLDER", "nowhere")  # the original has its base
    assert main(["generate", str(run), *TEXT]) == 2
    assert "needs the base model of its run, but there is no folder" in capsys.readouterr().err


# -- resuming --------------------------------------------------------------------------------------


def test_a_resumed_run_reads_its_random_base_from_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of PyTorch may draw other weights from the same seed."""
    halves = [ADAPTER, f"output={folder / 'halves'}"]
    monkeypatch.setenv("STOP_AT", "2")
    train(eager_config(folder, *halves), ONE)
    assert metrics_of(folder / "halves")[-1]["step"] < 3
    monkeypatch.delenv("STOP_AT")
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "reset_parameters", lambda model, **_: [p.data.fill_(0.1) for p in model.parameters()])
        train(eager_config(folder, *halves), ONE)
    train(eager_config(folder, ADAPTER), ONE)
    assert_same_run(folder / "run", folder / "halves", step=3)
    assert metrics_of(folder / "run")[3]["policy/kl"] > 0  # from the base, which is the reference


def test_a_changed_base_model_is_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(trained, tmp_path / "run")
    options = [ADAPTER, "steps=3", "optimizer.lr=0.1", f"output={run}"]
    flip(run / "base" / "model.safetensors")
    for attempt in (lambda: train(eager_config(trained.parent, *options), ONE), lambda: open_model(str(run), None, [])):
        with pytest.raises(CheckpointError, match=r"base/model\.safetensors is not what was written"):
            attempt()
    flip(run / "base" / "model.safetensors")
    with pytest.raises(ChangedConfig, match=r"adapter\.rank: 2 → 4\. .*add allow_changes=adapter$"):
        train(eager_config(trained.parent, *options, "adapter.rank=4"), ONE)
    with pytest.raises(ChangedConfig, match=r"adapter: .* → null"):
        train(eager_config(trained.parent, *options[1:]), ONE)
    train(eager_config(trained.parent, *options), ONE)
    assert metrics_of(run)[-1]["step"] == 2


def test_a_changed_model_folder_is_refused(trained: Path, folder: Path) -> None:
    """Also without a KL term, where no reference is read."""
    shutil.copytree(trained.parent / "run" / "base", folder / "base")
    options = [ADAPTER, f"model={{path: {folder / 'base'}}}", "algorithm.options={}", "data.validation=null"]
    train(eager_config(folder, *options, "steps=1"), ONE)
    assert not {"base", "reference"} & {path.name for path in (folder / "run").iterdir()}
    flip(folder / "base" / "model.safetensors")
    message = r"base has changed: it is not the base model that .*step_00000000 was trained on"
    with pytest.raises(CheckpointError, match=message):
        train(eager_config(folder, *options, "steps=2"), ONE)
    with pytest.raises(CheckpointError, match=message):
        open_model(str(folder / "run"), None, [])
    train(eager_config(folder, *options, "steps=2", "allow_changes=model.path"), ONE)


# -- starting from an adapter ----------------------------------------------------------------------


def test_training_starts_from_an_adapter(trained: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is policy and reference of the first step, and its adapter_config.json gives its rank."""
    first = trained.parent / "run"
    shutil.copytree(first / "model", folder / "adapter")
    options = [f"adapter={{path: {folder / 'adapter'}}}", f"model={{path: {first / 'base'}}}"]
    train(eager_config(folder, *options, "steps=2", "algorithm.minibatches=1", GREEDY), ONE)
    out = folder / "run"
    assert rows_of(out)[0] == {**rows_of(out)[0], **final_validation(first)}
    assert metrics_of(out)[0]["policy/kl"] == 0  # before the first update
    assert metrics_of(out)[1]["policy/kl"] > 0
    reference, adapter = (
        load_file(path / "adapter_model.safetensors") for path in (out / "reference", folder / "adapter")
    )
    assert all(torch.equal(reference[name], adapter[name]) for name in adapter)
    last = out / "checkpoints" / "step_00000001"
    assert open_model(str(last), None, []).config.adapter.rank == 2  # type: ignore[union-attr]

    with pytest.raises(ConfigError, match=r"adapter\.rank: is 16, but the adapter in .* has 2; leave this key out"):
        train(eager_config(folder, *options, "adapter.rank=16", f"output={folder / 'other'}"), ONE)
    wider = [options[0], "model.tiny.width=32"]
    with pytest.raises(AdapterFileError, match=r"^adapter\.path: .*does not fit the model \(it is one of .*base\)"):
        train(eager_config(folder, *wider, f"output={folder / 'other'}"), ONE)
    assert not (folder / "other" / "checkpoints").exists()


def final_validation(run: Path) -> dict[str, Any]:
    return {name: value for name, value in rows_of(run)[-1].items() if name.startswith("validation/")}


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["path", "warm start"])
def test_a_run_with_an_adapter_as_reference_resumes_exactly(
    trained: Path, folder: Path, begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [ADAPTER]
    if begin == "path":
        first = trained.parent / "run"
        options = [f"adapter={{path: {first / 'model'}}}", f"model={{path: {first / 'base'}}}"]
    else:
        rows = [{"prompt": f"{i:02}?", "completion": "44"} for i in range(20)]
        (folder / "warm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options += [f"warm_start={{data: {folder / 'warm.jsonl'}, steps: 3, batch_size: 4, lr: 0.05}}"]
    options.append("algorithm.minibatches=1")
    monkeypatch.setenv("STOP_AT", "3")
    halves = [*options, f"output={folder / 'halves'}"]
    train(eager_config(folder, *halves), ONE)
    assert metrics_of(folder / "halves")[-1]["step"] < 3
    monkeypatch.delenv("STOP_AT")
    train(config_of(folder, *halves), ONE)
    train(eager_config(folder, *options), ONE)
    assert_same_run(folder / "run", folder / "halves", step=3)
    first_kl, *later = [row["policy/kl"] for row in metrics_of(folder / "run")]
    assert first_kl == 0 < min(later)
    flip(folder / "run" / "reference" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="It holds the reference policy: restore it"):
        train(eager_config(folder, *options, "steps=5"), ONE)


# -- the Python API, kills and ranks ---------------------------------------------------------------


def test_the_python_api_exports_adapters_and_merged_models(folder: Path) -> None:
    tiny = {"tiny": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp": 24, "max_length": 16}}
    settings: dict[str, Any] = {"adapter": {"rank": 2}, "graph": {"impl": "none"}, "log": {"progress": "none"}}
    settings |= {"max_tokens": 4, "samples_per_prompt": 2, "prompts_per_step": 2, "rows": 4, "token_buckets": [48]}
    trainer = Trainer(
        tiny,
        [{"prompt": "1?"}, {"prompt": "2?"}],
        rewards=[lambda completions, **_: [float(len(set(c))) for c in completions]],
        output=folder / "run",
        checkpoint_export_at_end=False,
        lr=0.05,
        **settings,
    )
    with trainer.train(steps=1) as run:
        run.export(folder / "adapter")
        run.export(folder / "merged", merge=True)
    merged = load_model(folder / "merged")
    assert read_adapter(folder / "adapter", merged.architecture).spec.rank == 2
    base = load_model(folder / "run" / "base")
    assert not torch.equal(merged.layers[0].mlp.down_proj.weight, base.layers[0].mlp.down_proj.weight)
    assert torch.equal(merged.embed_tokens.weight, base.embed_tokens.weight)


@pytest.mark.slow
def test_a_peft_model_is_refused_as_the_base_model(trained: Path, folder: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    run = trained.parent / "run"
    model = peft.AutoPeftModelForCausalLM.from_pretrained(run / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    with pytest.raises(InvalidInput, match=r"^model: has adapters of PEFT: .* adapter=\{\"path\": folder\}"):
        Trainer((model, tokenizer), [{"prompt": "1?"}], output=folder / "run")
    assert not (folder / "run").exists()


@pytest.mark.slow
@pytest.mark.multi
def test_a_killed_run_resumes_with_the_same_bits(folder: Path) -> None:
    """The run is killed with SIGKILL before it has a checkpoint, and after step 5."""
    options = [ADAPTER, "steps=10", "checkpoint.every=1", "validation.every=100"]
    train(eager_config(folder, *options), ONE)
    killed = [*options, f"output={folder / 'killed'}"]
    for needed in ("base/model.safetensors", "checkpoints/step_00000005"):
        process = fork(folder, *killed)
        wait_for((folder / "killed" / needed).exists, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = fork(folder, *killed)
    output = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert_same_run(folder / "run", folder / "killed", step=9)


def train_on_a_rank(world: World, config: Config) -> None:
    train(config, world)


@pytest.mark.slow
@pytest.mark.multi
def test_a_run_resumes_with_another_number_of_ranks(folder: Path) -> None:
    """Two ranks resume like two that were never stopped, and one rank loads the checkpoint of two."""
    options = [ADAPTER, "data.validation=null", "optimizer.schedule=constant"]
    halves = [*options, f"output={folder / 'halves'}"]
    assert run_world(2, folder, train_on_a_rank, eager_config(folder, *options)) == [None, None]
    assert run_world(2, folder, train_on_a_rank, eager_config(folder, *halves, "steps=2")) == [None, None]
    shutil.copytree(folder / "halves", folder / "alone")
    assert run_world(2, folder, train_on_a_rank, config_of(folder, *halves)) == [None, None]
    for rank in (0, 1):
        ours, theirs = (weights_of(folder / name, 3, rank) for name in ("run", "halves"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    expected = open_model(str(folder / "halves" / "checkpoints" / "step_00000001"), None, []).load(None, "cpu")
    train(eager_config(folder, *options, f"output={folder / 'alone'}"), ONE)
    together, alone = metrics_of(folder / "run"), metrics_of(folder / "alone")
    assert alone[2]["reward"] == pytest.approx(together[2]["reward"])  # the same prompts, the same noise
    assert alone[2]["loss"] == pytest.approx(together[2]["loss"], abs=1e-4)
    exported = open_model(str(folder / "alone" / "checkpoints" / "step_00000001"), None, []).load(None, "cpu")
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, exported.get_parameter(name))


def test_a_plan_uses_the_rank_of_the_adapter_at_adapter_path(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for adapter in (ADAPTER, f"adapter={{path: {trained.parent / 'run' / 'model'}}}"):  # of rank 2; 32 is the default
        capsys.readouterr()
        assert main(["plan", str(trained), "--device", "cpu", "--json", adapter]) == 0
        lines = json.loads(capsys.readouterr().out)["lines"]
        sizes.append({line["name"]: line["nbytes"] for line in lines}["parameters"])
    assert sizes[0] == sizes[1]
