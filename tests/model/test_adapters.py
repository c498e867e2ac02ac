"""Adapters of a model: values and gradients, compared with LoRA in plain PyTorch and with merged weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollgraph.model import Architecture, Decoder
from rollgraph.model.layers import Linear
from rollgraph.model.lora import TARGETS, AdapterSpec, attach, frozen_tensors, make_lora_a_copier
from rollgraph.model.weights.hf import parameter_views

TINY = Architecture(
    "qwen2", vocabulary=40, hidden=16, mlp=24, layers=2, heads=2, kv_heads=1, head_dim=8, attention_bias=True
)
SPEC = AdapterSpec(rank=3, alpha=6.0)
IDS = torch.tensor([1, 2, 3, 4, 5, 6, 7])
CU_SEQLENS = torch.tensor([0, 4, 7], dtype=torch.int32)


def make_model(spec: AdapterSpec | None, architecture: Architecture = TINY) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(architecture).double()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    if spec is not None:
        attach(model, spec, seed=1)
        for _, _, b in model.adapters.projections():
            b.normal_(std=0.3)
    return model


def run(model: Decoder) -> Tensor:
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    return model(IDS, positions, CU_SEQLENS, 4)


class PlainLora(torch.nn.Module):
    """A fused linear layer whose parts have adapters, as PEFT computes them."""

    def __init__(self, layer: Linear, scale: float) -> None:
        super().__init__()
        adapter = layer.adapter
        self.weight, self.bias, self.scale = layer.weight.detach(), layer.bias, scale
        self.a = [torch.nn.Parameter(a.clone()) for a in layer.lora_a.detach().split(adapter.rank)]
        self.b = [
            torch.nn.Parameter(layer.lora_b.detach()[:, projection.b_columns].t().clone())
            for projection in adapter.projections
        ]
        self.columns = [projection.columns for projection in adapter.projections]
        self.algos = {}

    def triggers_pdl(self, rows: int) -> bool:
        return False

    def forward(self, x: Tensor, rows: int | None = None, *, defer_lora: bool = False) -> Tensor:
        out = torch.nn.functional.linear(x, self.weight, self.bias)
        added = torch.zeros_like(out)
        for a, b, columns in zip(self.a, self.b, self.columns, strict=True):
            added[:, columns] = self.scale * (x @ a.t() @ b.t())
        return out + added


@pytest.mark.parametrize(
    "spec",
    [SPEC, replace(SPEC, targets=("v_proj", "up_proj")), replace(SPEC, targets=("q_proj", "o_proj"), rslora=True)],
    ids=["all", "some parts", "rslora"],
)
def test_values_and_gradients_equal_plain_lora(spec: AdapterSpec) -> None:
    model = make_model(spec)
    names = [name for name, _ in model.named_parameters()]
    out = run(model)
    gradients = dict(zip(names, torch.autograd.grad(out.square().sum(), list(model.parameters())), strict=True))
    plain = make_model(spec)
    loras: dict[str, PlainLora] = {}
    for name, module in list(plain.named_modules()):
        if isinstance(module, Linear) and module.adapter is not None:
            loras[name] = PlainLora(module, spec.scale)
            parent, _, attribute = name.rpartition(".")
            setattr(plain.get_submodule(parent), attribute, loras[name])
    expected = run(plain)
    torch.testing.assert_close(out, expected)
    expected.square().sum().backward()
    for name, lora in loras.items():
        torch.testing.assert_close(gradients.pop(f"{name}.lora_a"), torch.cat([a.grad for a in lora.a]))
        torch.testing.assert_close(gradients.pop(f"{name}.lora_b"), torch.cat([b.grad.t() for b in lora.b], 1))
    assert not gradients


def test_a_merged_model_computes_the_same() -> None:
    model = make_model(SPEC)
    merged = Decoder(TINY).double()
    views = parameter_views(merged)
    for name, weight in model.adapters.merged_weights():
        views.pop(name).copy_(weight)
    assert not views
    torch.testing.assert_close(run(model), run(merged))


def test_with_adapters_off_the_model_is_the_base_bit_for_bit() -> None:
    model = make_model(SPEC)
    adapters = model.adapters
    before = run(model)
    for _, _, b in adapters.projections():
        b[0, 0] = torch.inf
    with pytest.raises(KeyError), adapters.off(), adapters.off():  # noqa: PT012
        off = run(model)
        raise KeyError
    for _, _, b in adapters.projections():
        b.zero_()
    assert torch.equal(off, run(model))
    assert not torch.equal(off, before)
    torch.testing.assert_close(off, run(make_model(None)))
    assert adapters.scale == SPEC.scale


@pytest.mark.parametrize("targets", [TARGETS, ("v_proj", "down_proj")])
def test_the_base_of_a_layer_can_be_moved(targets: tuple[str, ...]) -> None:
    """Every tensor of a layer is a parameter or in the base, and nothing else has to move."""
    model = make_model(replace(SPEC, targets=targets))
    expected = run(model)
    for layer in model.layers:
        frozen = frozen_tensors(layer)
        moved = {id(tensor) for tensors in frozen.values() for tensor in tensors}
        assert moved >= {id(buffer) for buffer in layer.buffers()}
        for whole, *views in frozen.values():
            before = whole.data
            memory = torch.full((64 + whole.numel(),), float("nan"), dtype=whole.dtype)[64:].view(whole.shape)
            whole.data = memory.copy_(before)
            for view in views:
                view.data = memory[: len(view)]
            before.fill_(float("nan"))
    torch.testing.assert_close(run(model), expected)


def test_lora_a_can_be_copied_layer_by_layer() -> None:
    """As `refresh` does for all layers, but a backward after it does not take the copy for a change."""
    model, refreshed = make_model(SPEC), make_model(SPEC)
    for each in (model, refreshed):
        with torch.no_grad():
            for layer in each.layers:
                layer.self_attn.qkv_proj.lora_a.mul_(3)
    refreshed.adapters.refresh()
    expected = run(refreshed)
    model.adapters.leave_copies_to_gathers()
    model.adapters.refresh()
    assert model.adapters.stale() is None
    assert not torch.allclose(run(model), expected)
    for layer in model.layers:
        make_lora_a_copier(layer)()
    out = run(model)
    assert torch.equal(out, expected)
    for layer in model.layers:
        make_lora_a_copier(layer)()
    out.sum().backward()


def test_only_adapters_are_parameters_and_the_base_is_stored_once() -> None:
    model = make_model(replace(SPEC, targets=("q_proj", "v_proj")))
    assert {name.rsplit(".", 1)[1] for name, _ in model.named_parameters()} == {"lora_a", "lora_b"}
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    plain = Decoder(TINY).double()
    storages = {id(b.untyped_storage()): b.untyped_storage().nbytes() for b in model.buffers()}
    extended = (
        2 * 16 * (16 + 1) * 8
    )  # in each of two layers, 16 rows for A of two parts, each with an entry of the bias
    frequencies = 4 * 4
    scale = 8
    assert sum(storages.values()) == sum(p.nbytes for p in plain.parameters()) + extended + frequencies + scale


def test_a_stale_copy_is_noticed() -> None:
    model = make_model(SPEC)
    adapters = model.adapters
    assert adapters.stale() is None
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert "refresh" in adapters.stale()
    before = run(model)
    adapters.refresh()
    assert adapters.stale() is None
    assert not torch.equal(run(model), before)


def test_lora_a_depends_on_the_seed_and_lora_b_is_zero() -> None:
    drawn = []
    for seed in (1, 1, 2):
        model = Decoder(TINY)
        attach(model, SPEC, seed=seed)
        drawn.append([(name, a.clone()) for name, a, _ in model.adapters.projections()])
        assert all(not b.any() for _, _, b in model.adapters.projections())
    assert [name.rsplit(".", 1)[1] for name, _ in drawn[0]] == [*TARGETS, *TARGETS]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(drawn[0], drawn[1], strict=True))
    assert not torch.equal(drawn[0][0][1], drawn[2][0][1])
    name, a = drawn[0][0]
    assert name == "model.layers.0.self_attn.q_proj"
    assert a.shape == (3, 16)
    assert 0.2 < a.abs().max() <= 0.25  # uniform up to inputs ** -0.5


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="qkv"):
        AdapterSpec(targets=("qkv",))


def test_a_model_with_adapters_cannot_be_converted() -> None:
    model = make_model(SPEC)
    with pytest.raises(RuntimeError, match="before you attach"):
        model.float()
    with pytest.raises(ValueError, match="already"):
        attach(model, SPEC, seed=0)
