"""Recomputed activations: no bit changes, only inputs are kept, and stale weights are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.graph import make_graphed_callables, sanitize
from rollgraph.model import Architecture, Decoder, PackedKeys, token_logprobs
from rollgraph.model.lora import AdapterSpec, attach

TOKENS = 24
LLAMA = Architecture("llama", 61, hidden=32, mlp=48, layers=3, heads=6, kv_heads=2, head_dim=8)
MODELS = {
    "llama": LLAMA,
    "tied, windows, biases": replace(LLAMA, family="qwen2", windows=(None, 5, 1), tied=True),
    "norms of heads": replace(LLAMA, family="qwen3", kv_heads=1, attention_bias=True),
}
every_model = pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS)


def build(architecture: Architecture, count: int = 0, parts: bool = False) -> Decoder:
    torch.manual_seed(1)
    model = Decoder(architecture)
    model.checkpoint_layers(count, per_submodule=parts)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.2 if parameter.dim() > 1 else parameter + noise * 0.3)
    return model


def inputs(device: str = "cpu") -> tuple[Any, ...]:
    """Three sequences, of which the second and the third share the first one as their prompt."""
    lengths = torch.tensor([0, 8, 9, 7])
    tokens = torch.tensor([*range(8), *range(8), *range(8, 17), *range(8), *range(17, 24)])
    cu_keys = torch.tensor([0, 8, 8 + 17, 8 + 17 + 15], dtype=torch.int32)
    positions = torch.tensor([*range(8), *range(8, 17), *range(8, 15)])
    ids = torch.randint(61, (TOKENS,), generator=torch.Generator().manual_seed(2))
    cu_seqlens = lengths.cumsum(0).int()
    ids, positions, cu_seqlens, tokens, cu_keys = (x.to(device) for x in (ids, positions, cu_seqlens, tokens, cu_keys))
    return ids, positions, cu_seqlens, TOKENS, PackedKeys(tokens, cu_keys)


def loss_of(model: Decoder) -> Tensor:
    ids, *others = inputs(str(model.embed_tokens.weight.device))
    logprobs = token_logprobs(model(ids, *others), model.head_weight, ids)
    assert isinstance(logprobs, Tensor)
    return logprobs.square().sum()


def gradients(model: Decoder) -> list[Tensor | None]:
    loss = loss_of(model)
    loss.backward()
    results = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *results]


def equal(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@every_model
def test_recomputing_does_not_change_a_bit(architecture: Architecture) -> None:
    kept = gradients(build(architecture))
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in kept)
    for parts in (False, True):
        for count in (1, 2, architecture.layers):
            assert equal(gradients(build(architecture, count, parts)), kept), (parts, count)


@every_model
def test_layers_whose_input_needs_no_gradient_train_their_own_weights(architecture: Architecture) -> None:
    """As with a frozen base: nothing before the first trained weight requires a gradient."""
    results = []
    for count, parts in ((0, False), (3, False), (3, True)):
        model = build(architecture, count, parts).requires_grad_(False)
        for layer in model.layers:
            layer.self_attn.qkv_proj.weight.requires_grad_()
        results.append(gradients(model))
    assert sum(gradient is not None for gradient in results[0]) == 1 + architecture.layers
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


@every_model
def test_recomputing_does_not_change_a_bit_of_adapters(architecture: Architecture) -> None:
    """Only the adapters are trained, and the input of the first layer needs no gradient."""
    results = []
    for count, parts in ((0, False), (1, False), (3, False), (3, True)):
        results.append(gradients(with_adapters(build(architecture, count, parts))))
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in results[0])
    for recomputed in results[1:]:
        assert equal(recomputed, results[0])


def test_adapters_that_changed_since_the_forward_are_refused() -> None:
    model = with_adapters(build(LLAMA, 3))
    loss = loss_of(model)
    assert model.adapters is not None
    with torch.no_grad():
        next(iter(model.layers)).self_attn.qkv_proj.lora_a.mul_(2)
    model.adapters.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def with_adapters(model: Decoder) -> Decoder:
    attach(model, AdapterSpec(rank=2, alpha=3.0), seed=3)
    assert model.adapters is not None
    with torch.no_grad():
        for _, _, b in model.adapters.projections():
            b.normal_(generator=torch.Generator().manual_seed(4))
    model.adapters.refresh()
    return model


def test_only_the_arguments_of_a_recomputed_module_are_saved() -> None:
    """A layer keeps the residual stream and its update. All layers share the angles and the layout of the batch."""
    saved = {count: bytes_saved(build(LLAMA, count)) for count in (0, 1, 2, 3)}
    stream = TOKENS * 32 * 4
    assert saved[2] - saved[3] == saved[1] - saved[2] > 5 * stream
    of_one_more_layer = bytes_saved(build(replace(LLAMA, layers=4), 4)) - saved[3]
    assert of_one_more_layer == 2 * stream
    parts = bytes_saved(build(LLAMA, 3, parts=True))
    assert saved[3] < parts < saved[3] + (saved[0] - saved[3]) / 2


def bytes_saved(model: Decoder) -> int:
    """The bytes that autograd saves, without parameters and buffers."""
    model_memory = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in model_memory:
            storages[storage.data_ptr()] = storage  # kept alive, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(*inputs())
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("parts", [False, True])
def test_a_weight_that_changed_since_the_forward_is_refused(parts: bool) -> None:
    model = build(LLAMA, 3, parts)
    loss = loss_of(model)
    with torch.no_grad():
        list(model.layers)[1].mlp.down_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_on_gradients_run_once_and_parameters_are_back_in_place() -> None:
    model = build(LLAMA, 3)
    parameters = dict(model.named_parameters())
    calls: list[str] = []
    for name, parameter in parameters.items():
        parameter.register_hook(lambda gradient, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    loss_of(model).backward()
    assert sorted(calls) == sorted([*parameters] * 2)
    assert all(now is parameters[name] for name, now in model.named_parameters())


def test_a_recomputation_that_fails_leaves_the_model_as_it_was() -> None:
    model = build(LLAMA, 3)
    parameters = dict(model.named_parameters())
    loss = loss_of(model)
    layer = list(model.layers)[1]

    def fail(module: Any, args: Any) -> None:
        raise ArithmeticError("the recomputation failed")

    handle = layer.mlp.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    assert all(now is parameters[name] for name, now in model.named_parameters())
    model.zero_grad()
    assert equal(gradients(model), gradients(build(LLAMA)))


@pytest.mark.parametrize(
    "part", ["layer", *(pytest.param(part, marks=pytest.mark.slow) for part in ("self_attn", "mlp"))]
)
def test_graphs_of_recomputed_modules_are_clean_under_the_sanitizer(part: str) -> None:
    model = build(LLAMA, 1, parts=part != "layer")
    layer = next(iter(model.layers))
    target, arguments = one_call(layer, part)
    eager = outputs_and_gradients(target, arguments)
    with sanitize() as findings:
        make_graphed_callables(target, arguments, backend="tape")
        for _ in range(2):
            replayed = outputs_and_gradients(target, arguments)
    assert not len(findings), findings
    assert findings.compared
    assert equal(replayed, eager)


def one_call(layer: Any, part: str) -> tuple[Any, tuple[Any, ...]]:
    """A module to capture, and arguments for it."""
    _, _, cu_seqlens, longest, keys = inputs()
    layout = (*torch.rand(2, TOKENS, 4), cu_seqlens, longest, keys)
    stream = torch.randn(TOKENS, 32, requires_grad=True)
    if part == "layer":
        return layer, (stream, torch.randn(TOKENS, 32, requires_grad=True), *layout)
    return getattr(layer, part), (stream, *layout) if part == "self_attn" else (stream,)


def outputs_and_gradients(target: Any, arguments: tuple[Any, ...]) -> list[Tensor | None]:
    output = target(*arguments)
    outputs = (output,) if isinstance(output, Tensor) else output
    leaves = [*target.parameters(), *(x for x in arguments if isinstance(x, Tensor) and x.requires_grad)]
    total = outputs[-1].square().sum() + outputs[0].sum()
    return [*(x.detach().clone() for x in outputs), *torch.autograd.grad(total, leaves)]


def test_a_count_that_the_model_does_not_have_is_refused() -> None:
    for count in (-1, 4):
        with pytest.raises(ValueError, match="the model has 3 layers"):
            Decoder(LLAMA, checkpointing=count)
    assert Decoder(LLAMA, checkpointing=True).checkpointing == 3
    assert Decoder(LLAMA, checkpointing=False).checkpointing == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@every_model
def test_recomputing_does_not_change_a_bit_on_a_gpu(architecture: Architecture, dtype: torch.dtype) -> None:
    kept = gradients(build(architecture).to("cuda", dtype))
    for parts in (False, True):
        for count in (1, architecture.layers):
            assert equal(gradients(build(architecture, count, parts).to("cuda", dtype)), kept), (parts, count)
