"""Adapter folders: those that fit the model are copied in place; others are refused by name, and change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollgraph.model import Architecture, Decoder, ModelFileError, load_model, save_model
from rollgraph.model.lora import TARGETS, AdapterSpec, attach
from rollgraph.model.weights import adapter_files
from rollgraph.model.weights.adapter_files import ADAPTER_WEIGHTS, load_adapter, read_adapter, read_base, save_adapter
from rollgraph.model.weights.peft_config import ADAPTER_CONFIG, AdapterFileError

ARCHITECTURE = Architecture("qwen2", vocabulary=23, hidden=16, mlp=20, layers=2, heads=4, kv_heads=2, head_dim=6)
SPEC = AdapterSpec(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def build(spec: AdapterSpec = SPEC, architecture: Architecture = ARCHITECTURE) -> Decoder:
    """A model with random adapters."""
    model = Decoder(architecture)
    attach(model, spec, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def state(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapter(build(), tmp_path / "adapter", base="org/model", revision="v1")
    return tmp_path / "adapter"


def change(folder: Path, **fields: Any) -> None:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(folder: Path, *words: str) -> str:
    """The error message, which is the same from reading and from loading. Loading leaves the adapters as they were."""
    model = build()
    before = state(model)
    with pytest.raises(AdapterFileError) as read:
        read_adapter(folder, ARCHITECTURE)
    with pytest.raises(AdapterFileError) as loaded:
        load_adapter(model, folder)
    assert str(loaded.value) == str(read.value)
    assert same(state(model), before)
    for word in words:
        assert word in str(read.value)
    return str(read.value)


# -- folders that fit ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, AdapterSpec(rank=1, alpha=0.5, rslora=True)], ids=["some", "all"])
def test_a_saved_adapter_loads_bit_for_bit(spec: AdapterSpec, tmp_path: Path) -> None:
    saved, loaded = build(spec), build(spec)
    addresses = [parameter.data_ptr() for parameter in loaded.parameters()]
    save_adapter(saved, tmp_path, base="org/model", revision="v1")
    assert read_adapter(tmp_path, ARCHITECTURE).spec == spec
    assert read_base(tmp_path) == ("org/model", "v1")
    assert not same(state(loaded), state(saved))
    load_adapter(loaded, tmp_path)
    assert same(state(loaded), state(saved))
    assert [parameter.data_ptr() for parameter in loaded.parameters()] == addresses
    assert loaded.adapters is not None
    assert loaded.adapters.stale() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS]


def test_an_adapter_of_another_dtype_is_converted(folder: Path) -> None:
    stored = load_file(folder / ADAPTER_WEIGHTS)
    save_file({name: tensor.bfloat16() for name, tensor in stored.items()}, folder / ADAPTER_WEIGHTS)
    model = build()
    load_adapter(model, folder)
    assert model.adapters is not None
    (first, *_), *_ = [(a, b) for _, a, b in model.adapters.projections()]
    assert torch.equal(first, stored[FIRST].bfloat16().float())


@pytest.mark.parametrize(
    ("targets", "excluded", "expected"),
    [
        ("all-linear", None, TARGETS),
        ("all-linear", ["mlp.gate_proj"], tuple(name for name in TARGETS if name != "gate_proj")),
        (["self_attn.q_proj", "query_key_value"], None, ("q_proj",)),
        ([f"model.layers.{i}.mlp.{name}_proj" for i in (1, 0) for name in ("up", "down")], None, TARGETS[-2:]),
        (r".*\.(k|v)_proj", None, ("k_proj", "v_proj")),
        (r".*_proj", r".*mlp.*", TARGETS[:4]),
    ],
)
def test_targets_mean_the_same_as_in_peft(targets: Any, excluded: Any, expected: Any, tmp_path: Path) -> None:
    save_adapter(build(AdapterSpec(rank=3, alpha=6.0, targets=expected)), tmp_path, base=None)
    change(tmp_path, target_modules=targets, exclude_modules=excluded)
    assert read_adapter(tmp_path, ARCHITECTURE).spec.targets == expected


# -- unsupported fields ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("modules_to_save", ["lm_head"]),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("layers_to_transform", [0]),
        ("layer_replication", [[0, 1]]),
        ("target_parameters", ["experts"]),
        ("trainable_token_indices", [1]),
        ("init_lora_weights", "pissa"),
        ("alora_invocation_tokens", [5]),
        ("a_field_of_the_future", {"on": 1}),
        ("r", 0),
        ("r", 2.5),
        ("r", 4096),
        ("lora_alpha", "8"),
        ("lora_dropout", 1.0),
        ("use_rslora", 1),
        ("target_modules", ["query_key_value"]),
        ("target_modules", ["q_proj", "lm_head"]),
        ("target_modules", r"model\.layers\.1\..*"),
        ("target_modules", "(q_proj"),
        ("target_modules", {"q_proj": 1}),
    ],
)
def test_a_field_that_is_not_supported_is_named(folder: Path, field: str, value: Any) -> None:
    change(folder, **{field: value})
    refused(folder, str(folder / ADAPTER_CONFIG), f"{field}={value!r:.80}: ")


@pytest.mark.parametrize("field", ["peft_type", "r", "lora_alpha", "target_modules"])
def test_a_field_that_is_missing_is_named(folder: Path, field: str) -> None:
    change(folder, **{field: None})
    refused(folder, f"there is no {field}")


def test_fields_without_effect_are_ignored(folder: Path) -> None:
    more = {"peft_version": "9", "inference_mode": False, "init_lora_weights": "gaussian", "loftq_config": {}}
    change(folder, **more, layers_pattern="layers", fan_in_fan_out=True, a_field_of_the_future=False, lora_dropout=0.1)
    stored = read_adapter(folder, ARCHITECTURE)
    assert (stored.spec.rank, stored.spec.dropout) == (3, 0.1)
    load_adapter(build(), folder)


# -- files that are damaged, or of another model ---------------------------------------------------


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    del tensors[FIRST]
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def with_more_tensors(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(2)}, folder / ADAPTER_WEIGHTS)


def cut(folder: Path) -> None:
    content = (folder / ADAPTER_WEIGHTS).read_bytes()
    (folder / ADAPTER_WEIGHTS).write_bytes(content[: len(content) // 2])


def as_a_pickle(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin")


def with_integers(folder: Path) -> None:
    save_file({FIRST: torch.zeros(3, 16, dtype=torch.int8)}, folder / ADAPTER_WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_a_tensor, ["does not fit the model (it is one of org/model); missing: ", FIRST]),
        (with_more_tensors, ["unexpected: base_model.model.lm_head.weight"]),
        (cut, ["adapter_model.safetensors is not a complete safetensors file"]),
        (as_a_pickle, ["has no adapter_model.safetensors, only adapter_model.bin: a pickle can run any code"]),
        (with_integers, [FIRST, "is stored as I8"]),
        (lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), ["adapter: has no adapter_model.safetensors"]),
        (lambda folder: (folder / ADAPTER_CONFIG).unlink(), ["adapter: has no adapter_config.json"]),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("[]"), ["does not hold a JSON object"]),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), ["is not JSON"]),
    ],
)
def test_damaged_files_are_refused(folder: Path, damage: Callable[[Path], object], words: list[str]) -> None:
    damage(folder)
    refused(folder, *words)


def test_an_adapter_of_another_base_is_refused(folder: Path, tmp_path: Path) -> None:
    for fields, kind in (({"hidden": 32}, "wrong shape"), ({"layers": 3}, "missing"), ({"layers": 1}, "unexpected")):
        other = Architecture(**{**vars(ARCHITECTURE), **fields})
        with pytest.raises(AdapterFileError, match=rf"does not fit the model \(it is one of org/model\); {kind}: "):
            read_adapter(folder, other)
    refused(tmp_path / "none", "none: there is no such folder")


def test_an_adapter_with_settings_other_than_the_models_is_refused(folder: Path) -> None:
    for spec, message in (
        (AdapterSpec(rank=2, alpha=6.0, targets=SPEC.targets), "rank is 3 there and 2 in the model"),
        (AdapterSpec(rank=3, alpha=3.0, targets=SPEC.targets), "alpha is 6.0 there and 3.0 in the model"),
        (AdapterSpec(rank=3, alpha=6.0), "targets is"),
    ):
        model = build(spec)
        before = state(model)
        with pytest.raises(AdapterFileError, match=message):
            load_adapter(model, folder)
        assert same(state(model), before)
    with pytest.raises(AdapterFileError, match="the model has no adapters"):
        load_adapter(Decoder(ARCHITECTURE), folder)


class FailingFile:
    """An adapter's tensors. The fifth cannot be read, or has changed since its header was checked."""

    def __init__(self, path: Path, changed: Tensor | None) -> None:
        self._tensors = load_file(path)
        self._changed = changed
        self._reads = 0

    def __enter__(self) -> FailingFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def get_tensor(self, name: str) -> Tensor:
        self._reads += 1
        if self._reads < 5:
            return self._tensors[name]
        if self._changed is None:
            raise OSError("cannot be read")
        return self._changed


@pytest.mark.parametrize(
    ("changed", "message"), [(None, "cannot be read"), (torch.ones(1), "changed while the adapter was loaded")]
)
def test_an_error_while_reading_leaves_the_adapter_unchanged(
    folder: Path, changed: Tensor | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    before = state(model)
    monkeypatch.setattr(adapter_files, "safe_open", lambda path, framework: FailingFile(path, changed))
    with pytest.raises((OSError, AdapterFileError), match=message):
        load_adapter(model, folder)
    assert same(state(model), before)


def test_the_base_must_be_named(folder: Path) -> None:
    change(folder, base_model_name_or_path=None)
    with pytest.raises(AdapterFileError, match="base_model_name_or_path=None: does not say which model to load"):
        read_base(folder)


# -- writing ---------------------------------------------------------------------------------------


def test_an_adapter_and_a_model_do_not_share_a_folder(folder: Path, tmp_path: Path) -> None:
    model = build()
    save_model(model, tmp_path / "model")
    with pytest.raises(AdapterFileError, match="holds the weights of a model"):
        save_adapter(model, tmp_path / "model", base=None)
    with pytest.raises(ModelFileError, match="holds an adapter"):
        save_model(model, folder, merge=True)
    with pytest.raises(ModelFileError, match="no adapters to merge"):
        save_model(load_model(tmp_path / "model"), tmp_path / "merged", merge=True)


def test_an_interrupted_save_leaves_no_mixture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, model = load_file(folder / ADAPTER_WEIGHTS), build()
    replace = adapter_files.os.replace
    for renamed in (0, 1):
        left = [True] * renamed

        def run_out(*arguments: Any, left: list[bool] = left) -> None:
            if not left:
                raise OSError("interrupted")
            left.pop()
            replace(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(adapter_files.os, "replace", run_out)
            with pytest.raises(OSError, match="interrupted"):
                save_adapter(model, folder, base=None)
        refused(folder, "has no adapter_model.safetensors")
    save_adapter(model, folder, base=None)
    loaded = build()
    load_adapter(loaded, folder)
    assert same(state(loaded), state(model))
    assert not torch.equal(load_file(folder / ADAPTER_WEIGHTS)[FIRST], before[FIRST])
