"""Folders of weights: those that fit the model are copied in place, and those that do not change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollgraph.model import (
    Architecture,
    ArchitectureError,
    Decoder,
    ModelFileError,
    Rope,
    load_model,
    load_weights,
    save_model,
)
from rollgraph.model.architecture import hf_tensor_map
from rollgraph.model.weights import hf
from rollgraph.model.weights import hf as files

ARCHITECTURE = Architecture(
    "qwen2", vocabulary=23, hidden=16, mlp=20, layers=2, heads=4, kv_heads=2, head_dim=6, tied=True, max_length=64
)
UNTIED = Architecture("llama", 23, 16, 20, 2, 4, 1, 4, attention_bias=True, mlp_bias=True)
NORMED = Architecture("qwen3", 23, 16, 20, 1, 4, 2, 8, rope=Rope(1e6, "linear", {"factor": 2.0}))


def build(architecture: Architecture = ARCHITECTURE) -> Decoder:
    """A model whose biases and norms are random as well."""
    model = Decoder(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def state(model: Decoder) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(build(), tmp_path / "whole")
    return tmp_path / "whole"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_model(build(), tmp_path / "sharded", shard_bytes=1500)
    return tmp_path / "sharded"


# -- folders that fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [ARCHITECTURE, UNTIED, NORMED], ids=lambda a: a.family)
@pytest.mark.parametrize("shard_bytes", [1, 1500, 10**9])
def test_a_saved_model_loads_bit_for_bit(architecture: Architecture, shard_bytes: int, tmp_path: Path) -> None:
    model = build(architecture)
    save_model(model, tmp_path, shard_bytes=shard_bytes)
    loaded = load_model(tmp_path)
    assert same(state(loaded), state(model))
    assert loaded.rope_factor == model.rope_factor
    existing = build(architecture)
    load_weights(existing, tmp_path)
    assert same(state(existing), state(model))
    assert not list(tmp_path.glob("*.incomplete"))


def test_every_element_of_every_parameter_is_stored_once() -> None:
    for architecture in (ARCHITECTURE, UNTIED, NORMED):
        model = Decoder(architecture)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            for name, rows in hf_tensor_map(architecture).values():
                model.get_parameter(name)[rows] += 1
        assert all(bool((parameter == 1).all()) for parameter in model.parameters())


def test_loading_writes_into_the_existing_parameters(folder: Path) -> None:
    """Even if they are views of one flat buffer, as with sharding."""
    model = build()
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.data = part.view_as(parameter)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    load_weights(model, folder)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    assert torch.equal(flat, torch.cat([p.detach().flatten() for p in load_model(folder).parameters()]))
    save_model(model, folder)
    assert same(state(load_model(folder)), state(model))


def test_loads_in_the_stored_dtype_or_the_requested_one(tmp_path: Path) -> None:
    half = build().to(torch.bfloat16)
    save_model(half, tmp_path)
    loaded = load_model(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert same(state(loaded), state(half))
    wide = load_model(tmp_path, dtype=torch.float32)
    assert same(state(wide), {name: tensor.float() for name, tensor in state(half).items()})
    converted = build()
    load_weights(converted, tmp_path, cast=True)
    assert same(state(converted), state(wide))


def test_loading_draws_no_random_numbers(folder: Path) -> None:
    before = torch.get_rng_state()
    load_model(folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpointing_is_passed_on(folder: Path) -> None:
    for setting, expected in ((True, ARCHITECTURE.layers), (1, 1), (0, 0)):
        model = load_model(folder, checkpointing=setting)
        assert model.checkpointing == expected == sum(layer.recomputes for layer in model.layers)


def test_leftovers_of_old_files_are_ignored(folder: Path) -> None:
    """Rotary frequencies and a stored copy of a tied head, in any dtype."""
    model = load_model(folder)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3), "lm_head.weight": torch.zeros(23, 16)}
    rewrite(folder, lambda tensors: tensors | {name: tensor.half() for name, tensor in more.items()})
    load_weights(build(), folder)
    assert same(state(load_model(folder)), state(model))


# -- folders that do not fit -----------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], name: str = files.WEIGHTS) -> None:
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / name).items()}
    save_file(change(tensors), folder / name, {"format": "pt"})


def configure(folder: Path, **changes: Any) -> None:
    path = folder / files.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder: Path, match: str, architecture: Architecture = ARCHITECTURE, *, build_too: bool = True) -> None:
    """Check that neither load_weights nor load_model accepts a folder, and that an existing model is unchanged."""
    model = build(architecture)
    before = state(model)
    with pytest.raises(ModelFileError, match=match):
        load_weights(model, folder)
    assert same(state(model), before)
    if build_too:
        with pytest.raises(ModelFileError, match=match):
            load_model(folder)


def without(*endings: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(endings)}


def test_missing_tensors_are_named(folder: Path) -> None:
    rewrite(folder, without("1.mlp.up_proj.weight"))
    refused(folder, r"does not fit the model; missing: model\.layers\.1\.mlp\.up_proj\.weight$")
    rewrite(folder, without("proj.bias"))
    refused(folder, r"missing: model\.layers\.0\.self_attn\.q_proj\.bias, .*k_proj\.bias, .*v_proj\.bias and 4 more$")
    rewrite(folder, lambda tensors: {})
    refused(folder, "missing: .* and 23 more$")


def test_an_untied_head_is_required(tmp_path: Path) -> None:
    save_model(build(UNTIED), tmp_path)
    rewrite(tmp_path, without("lm_head.weight"))
    refused(tmp_path, r"missing: lm_head\.weight$", UNTIED)


def test_unexpected_tensors_are_named(folder: Path) -> None:
    more = {f"model.layers.{i}.self_attn.o_proj.bias": torch.zeros(16) for i in range(5)}
    rewrite(folder, lambda tensors: tensors | more)
    refused(folder, r"unexpected: model\.layers\.0\.self_attn\.o_proj\.bias, .* and 2 more$")


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("model.norm.weight", torch.zeros(15), r"norm\.weight \[15\] instead of \[16\]"),
        ("model.norm.weight", torch.zeros(1, 16), r"norm\.weight \[1, 16\] instead of \[16\]"),
        ("model.layers.1.self_attn.k_proj.weight", torch.zeros(24, 16), r"\[24, 16\] instead of \[12, 16\]"),
        ("model.layers.1.mlp.down_proj.weight", torch.zeros(20, 16), r"\[20, 16\] instead of \[16, 20\]"),
        ("lm_head.weight", torch.zeros(24, 16), r"lm_head\.weight \[24, 16\] instead of \[23, 16\]"),
    ],
)
def test_misshapen_tensors_are_named(name: str, tensor: Tensor, match: str, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {name: tensor})
    refused(folder, f"wrong shape: .*{match}$")


def test_all_problems_are_reported_at_once(folder: Path) -> None:
    rewrite(folder, lambda tensors: without("norm.weight")(tensors) | {"extra": torch.zeros(1)})
    refused(folder, "missing: .*; unexpected: extra")


def test_another_dtype_is_cast_only_on_request(tmp_path: Path) -> None:
    save_model(build().to(torch.bfloat16), tmp_path)
    refused(tmp_path, r"cast=True.*embed_tokens\.weight bfloat16 instead of float32.* and \d+ more", build_too=False)


def test_several_stored_dtypes_require_a_choice(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"].half()})
    with pytest.raises(ModelFileError, match=r"stored in several dtypes \(float16, float32\): choose one with dtype="):
        load_model(folder)
    assert load_model(folder, dtype=torch.float32).norm.dtype == torch.float32


def test_quantized_tensors_are_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"model.norm.weight": torch.zeros(16, dtype=torch.int8)})
    refused(folder, r"norm\.weight is stored as I8; expected one of F64, F32, F16, BF16")


def test_broken_files_are_refused(folder: Path) -> None:
    path = folder / files.WEIGHTS
    content = path.read_bytes()
    for broken in (content[:-1], content[:100], b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0"):
        path.write_bytes(broken)
        refused(folder, r"model\.safetensors is not a complete safetensors file")


def test_a_missing_or_broken_shard_is_refused(sharded: Path) -> None:
    first, *_, last = sorted(sharded.glob("model-*.safetensors"))
    content = last.read_bytes()
    last.write_bytes(content[:-10])
    refused(sharded, f"{last.name} is not a complete safetensors file")
    last.unlink()
    refused(sharded, f"not complete; missing: {last.name}$")
    last.write_bytes(first.read_bytes())
    refused(sharded, rf"has model\.embed_tokens\.weight twice, in {first.name} and in {last.name}")


def test_a_malformed_index_is_refused(sharded: Path) -> None:
    index = sharded / files.INDEX
    for content, match in (
        ("{", "not JSON"),
        ("[]", "does not hold a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "missing"),
        ('{"weight_map": {"model.norm.weight": 5}}', r"index\.json: .*weight_map.*: model\.norm\.weight=5$"),
    ):
        index.write_text(content)
        refused(sharded, match)


def test_one_file_beside_an_index_is_ambiguous(folder: Path, sharded: Path) -> None:
    (sharded / files.WEIGHTS).write_bytes((folder / files.WEIGHTS).read_bytes())
    refused(sharded, r"both model\.safetensors and model\.safetensors\.index\.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_never_loaded(name: str, folder: Path) -> None:
    (folder / files.WEIGHTS).unlink()
    refused(folder, r"neither model\.safetensors nor model\.safetensors\.index\.json$")
    torch.save(build().state_dict(), folder / name)
    refused(folder, f"only {name}: a pickle can run any code and is never loaded.*convert.*save_pretrained")


def test_a_missing_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere is not a folder")
    refused(folder / files.WEIGHTS, "is not a folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"empty has no config\.json")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"null"])
def test_a_config_that_is_not_json_is_refused(content: bytes, folder: Path) -> None:
    (folder / files.CONFIG).write_bytes(content)
    refused(folder, r"config\.json (is not JSON|does not hold a JSON object)")


def test_weights_of_another_architecture_are_refused(folder: Path) -> None:
    """Even if all shapes are equal: other positions or norms make another model."""
    for field, value in (("rope", Rope(5e5)), ("norm_eps", 1e-5), ("windows", (None, 7))):
        architecture = replace(ARCHITECTURE, **{field: value})
        refused(folder, f"has another architecture: {field} is .* there and .* here$", architecture, build_too=False)
    architecture = Architecture("llama", 24, 16, 20, 2, 4, 2, 6)
    refused(
        folder,
        "another architecture: family is qwen2 there and llama here, vocab.* and 1 more$",
        architecture,
        build_too=False,
    )


def test_an_unsupported_architecture_is_refused(folder: Path) -> None:
    model = build()
    before = state(model)
    for changes, match in (({"hidden_act": "gelu"}, "hidden_act='gelu'"), ({"hidden_size": None}, "hidden_size=None")):
        configure(folder, hidden_act="silu")
        configure(folder, **changes)
        for load in (lambda: load_weights(model, folder), lambda: load_model(folder)):
            with pytest.raises(ArchitectureError, match=f"{folder.name}: .*{match}"):
                load()
    assert same(state(model), before)


# -- saving ----------------------------------------------------------------------------------------


def test_shards_index_and_config_agree(tmp_path: Path) -> None:
    save_model(build(UNTIED), tmp_path, shard_bytes=1500)
    index = json.loads((tmp_path / files.INDEX).read_text())
    names, sizes = set(), 0
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
        assert {index["weight_map"][name] for name in tensors} == {path.name}
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 1500 or len(tensors) == 1
        names |= tensors.keys()
        sizes += size
    assert names == index["weight_map"].keys() == hf_tensor_map(UNTIED).keys()
    assert sizes == index["metadata"]["total_size"] == 4 * sum(p.numel() for p in Decoder(UNTIED).parameters())
    assert json.loads((tmp_path / files.CONFIG).read_text())["dtype"] == "float32"
    count = len(set(index["weight_map"].values()))
    shards = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert listing(tmp_path) == sorted([files.CONFIG, files.INDEX, *shards])
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # all have the same permissions


def test_a_tied_head_is_not_written(folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / files.WEIGHTS)


@pytest.mark.parametrize("sizes", [(700, 10**9), (10**9, 700), (700, 3000), (10**9, 10**9)])
def test_a_folder_holds_one_save(sizes: tuple[int, int], tmp_path: Path) -> None:
    """Only the newer one, of another size and dtype, remains. Other files in the folder stay."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-00009-of-00009.safetensors.incomplete").write_text("from a save that was killed")
    save_model(build(), tmp_path, shard_bytes=sizes[0])
    newer = build(UNTIED).half()
    save_model(newer, tmp_path, shard_bytes=sizes[1])
    assert same(state(load_model(tmp_path)), state(newer))
    save_model(newer, tmp_path / "alone", shard_bytes=sizes[1])
    assert listing(tmp_path) == sorted(["alone", "tokenizer.json", *listing(tmp_path / "alone")])


@pytest.mark.parametrize("sizes", [(8000, 10**9), (10**9, 8000), (8000, 12000), (10**9, 10**9)])
def test_an_interrupted_save_leaves_no_mixture(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted at any step, the folder holds the old model, the new one, or none that loads."""
    old, new = build(), build(replace(ARCHITECTURE, norm_eps=1e-3))
    steps = cut_short(old, new, sizes, tmp_path / "0", monkeypatch, after=10**6)
    outcomes = set()
    for after in range(steps):
        folder = tmp_path / str(after + 1)
        cut_short(old, new, sizes, folder, monkeypatch, after)
        try:
            model = load_model(folder)
        except ModelFileError:
            outcomes.add("none")
        else:
            expected = old if model.architecture == old.architecture else new
            assert model.architecture == expected.architecture
            assert same(state(model), state(expected))
            outcomes.add("old" if expected is old else "new")
        save_model(new, folder, shard_bytes=sizes[1])  # and the next save succeeds
        assert same(state(load_model(folder)), state(new))
        assert listing(folder) == listing(tmp_path / "0")
    assert outcomes == {"old", "none"}


def cut_short(
    old: Decoder, new: Decoder, sizes: tuple[int, int], folder: Path, patch: pytest.MonkeyPatch, after: int
) -> int:
    """Save `old`, then `new`, but stop after a number of changes to the folder. Returns the number of changes made."""
    save_model(old, folder, shard_bytes=sizes[0])
    done = 0

    class CutError(Exception):
        pass

    def cutting(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if done == after:
                raise CutError
            done += 1
            return function(*args, **kwargs)

        return step

    with patch.context() as patched:
        patched.setattr(hf, "save_file", cutting(save_file))
        patched.setattr(hf.os, "replace", cutting(hf.os.replace))
        patched.setattr(Path, "unlink", cutting(Path.unlink))
        patched.setattr(Path, "write_text", cutting(Path.write_text))
        try:
            save_model(new, folder, shard_bytes=sizes[1])
        except CutError:
            assert after < 10**6
    return done


def test_a_full_disk_raises_a_model_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(hf, "save_file", full)
    with pytest.raises(ModelFileError, match="model was not written: No space left on device"):
        save_model(build(), tmp_path / "model")
