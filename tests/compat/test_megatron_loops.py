"""Training loops around megatron-core: calling a one-shot train() for each rollout, and in-place reference weights."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.compat.megatron import reference_weights, repair, repeatable_train
from tests.compat.megatron_world import (
    REASON,
    copy_weights,
    make_batch,
    make_gpt,
    make_reference,
    one_rank,  # noqa: F401
    score,
    unrepaired,  # noqa: F401
    update_shard,
    wrap_ddp,
)

pytest.importorskip("megatron.core", reason=REASON)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unrepaired", "one_rank"), pytest.mark.filterwarnings("ignore")]

CONFIG_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")


def one_shot_train(model: list[Any], config: Any, seeds: Iterable[int], fail_at: int | None = None) -> None:
    """A small copy of the train() of Megatron-LM and slime, with the same assertions and the same leftovers.

    It asserts that there is no `no_sync_func`, sets functions of the config, disables hooks for the first step, enables
    them for the others, and disables them at the end.
    """
    assert config.no_sync_func is None, "a custom no_sync_func is not supported when overlapping grad-reduce"
    config.no_sync_func = [chunk.no_sync for chunk in model]
    config.grad_sync_func = [chunk.start_grad_sync for chunk in model]
    config.param_sync_func = [chunk.start_param_sync for chunk in model]
    config.finalize_model_grads_func = finish_gradients
    for chunk in model:
        chunk.disable_forward_pre_hook(param_sync=False)
    param_sync_func, config.param_sync_func = config.param_sync_func, None
    for step, seed in enumerate(seeds):
        if step == fail_at:
            raise RuntimeError("a step failed")
        for chunk in model:
            chunk.zero_grad_buffer()
            with config.no_sync_func[0]():
                chunk(**make_batch(seed)).mean().backward()
            chunk(**make_batch(seed + 100)).mean().backward()
        config.finalize_model_grads_func(model)
        for chunk in model:
            update_shard(chunk)
        if step == 0:
            for chunk in model:
                chunk.enable_forward_pre_hook()
            config.param_sync_func = param_sync_func
    for chunk in model:
        chunk.disable_forward_pre_hook()


def finish_gradients(model: list[Any]) -> None:
    for chunk in model:
        chunk.finish_grad_sync()


def test_a_second_train_fails_without_repair() -> None:
    ddp = wrap_ddp(make_gpt("none"))
    one_shot_train([ddp], ddp.config, [0, 1])
    with pytest.raises(AssertionError, match="a custom no_sync_func is not supported"):
        one_shot_train([ddp], ddp.config, [2])
    ddp.config.no_sync_func = None  # the first workaround that people try
    with pytest.raises(KeyError):
        one_shot_train([ddp], ddp.config, [2])


@pytest.mark.parametrize("repaired", [True, False])
def test_train_per_rollout_equals_one_long_train(repaired: bool) -> None:
    once = wrap_ddp(make_gpt("none"))
    one_shot_train([once], once.config, range(6))
    if repaired:
        repair()
    ddp = wrap_ddp(make_gpt("none"))
    for rollout in range(3):
        with repeatable_train([ddp], ddp.config):
            one_shot_train([ddp], ddp.config, [2 * rollout, 2 * rollout + 1])
    expected, actual = copy_weights(once), copy_weights(ddp)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fail_at", [None, 0, 1])
def test_config_and_hooks_are_restored(enabled: bool, fail_at: int | None) -> None:
    ddp = wrap_ddp(make_gpt("none"))
    if not enabled:
        ddp.disable_forward_pre_hook()
    functions = {name: object() for name in CONFIG_FUNCTIONS}
    for name, value in functions.items():
        setattr(ddp.config, name, value)
    for _ in range(2):
        try:
            with repeatable_train(ddp, ddp.config), repeatable_train(ddp, ddp.config):
                one_shot_train([ddp], ddp.config, [0, 1], fail_at)
        except RuntimeError:
            assert fail_at is not None
        assert {name: getattr(ddp.config, name) for name in CONFIG_FUNCTIONS} == functions
        assert set(ddp.remove_forward_pre_hook_handles) == (set(ddp.module.modules()) if enabled else set())
        assert sum(len(module._forward_pre_hooks) for module in ddp.module.modules()) == len(
            ddp.remove_forward_pre_hook_handles
        )
        assert "disable_forward_pre_hook" not in vars(ddp)


@pytest.mark.parametrize("entered", ["the model", "a layer"])
def test_a_module_inside_a_ddp_with_disabled_hooks(entered: str) -> None:
    ddp, other = wrap_ddp(make_gpt("none")), wrap_ddp(make_gpt("none"))
    ddp.disable_forward_pre_hook()
    with repeatable_train(ddp.module if entered == "the model" else ddp.module.decoder.layers[1], ddp.config):
        one_shot_train([ddp], ddp.config, [0, 1])
        assert "disable_forward_pre_hook" not in vars(other)
    assert not ddp.remove_forward_pre_hook_handles


@pytest.mark.parametrize(("enabled", "fail_at", "has_note"), [(False, 1, True), (False, 0, False), (True, 1, False)])
def test_a_failure_has_a_note_if_parameters_were_not_gathered(enabled: bool, fail_at: int, has_note: bool) -> None:
    ddp = wrap_ddp(make_gpt("none"))
    if not enabled:
        ddp.disable_forward_pre_hook()
    with pytest.raises(RuntimeError, match="a step failed") as raised, repeatable_train(ddp, ddp.config):
        one_shot_train([ddp], ddp.config, [0, 1], fail_at)
    notes = getattr(raised.value, "__notes__", [])
    assert [("start_param_sync(force_sync=True)" in note) for note in notes] == [True] * has_note


def test_without_hooks_only_the_config_is_restored() -> None:
    ddp = wrap_ddp(make_gpt("none"), overlap_param_gather=False)
    ddp.config.finalize_model_grads_func = print
    with repeatable_train(ddp, ddp.config):
        assert ddp.config.finalize_model_grads_func is None
        ddp.config.no_sync_func = print
    assert ddp.config.finalize_model_grads_func is print
    assert ddp.config.no_sync_func is None


def test_attributes_added_to_the_config_are_removed() -> None:
    ddp, config = wrap_ddp(make_gpt("none")), SimpleNamespace(no_sync_func=1)
    with repeatable_train(ddp, config):
        assert config.no_sync_func is None
        config.no_sync_func, config.grad_sync_func = 2, 3
    assert vars(config) == {"no_sync_func": 1}


def test_overridden_methods_are_still_called() -> None:
    from megatron.core.distributed import DistributedDataParallel

    class Counting(DistributedDataParallel):
        def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
            calls.append(param_sync)
            super().disable_forward_pre_hook(param_sync)

    calls: list[bool] = []
    repair()
    ddp = wrap_ddp(make_gpt("none"), Counting)
    with repeatable_train(ddp, ddp.config):
        one_shot_train([ddp], ddp.config, [0, 1])
        ddp.disable_forward_pre_hook()
    assert calls == [False, True, True]


# Reference weights


def test_the_model_scores_with_the_reference_and_is_restored() -> None:
    reference = make_reference()
    expected = make_gpt("none")
    expected.load_state_dict(reference)
    ddp = wrap_ddp(make_gpt("none"))
    policy, addresses = copy_weights(ddp), [parameter.data_ptr() for parameter in ddp.parameters()]
    policy_scores = score(ddp)
    with reference_weights(ddp, reference):
        assert torch.equal(score(ddp), score(expected))
        assert [parameter.data_ptr() for parameter in ddp.parameters()] == addresses
        assert not any(module._forward_pre_hooks for module in ddp.modules())
    assert all(torch.equal(policy[name], tensor) for name, tensor in ddp.named_parameters())
    assert [parameter.data_ptr() for parameter in ddp.parameters()] == addresses
    assert set(ddp.remove_forward_pre_hook_handles) == set(ddp.module.modules())
    assert torch.equal(score(ddp), policy_scores)
    assert not torch.equal(policy_scores, score(expected))


def test_hooks_are_off_when_the_model_inside_a_ddp_is_swapped() -> None:
    ddp, reference = wrap_ddp(make_gpt("none")), make_reference()
    with reference_weights(ddp.module, reference):
        assert not any(module._forward_pre_hooks for module in ddp.modules())
    assert set(ddp.remove_forward_pre_hook_handles) == set(ddp.module.modules())


def clone(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in weights.items()}


@pytest.mark.parametrize("wrapped", [True, False])
def test_weights_that_share_memory_with_the_model_are_refused(wrapped: bool) -> None:
    model = wrap_ddp(make_gpt("none")) if wrapped else make_gpt("none")
    reference = model.state_dict()
    with pytest.raises(ValueError, match=r"are the model's own memory.*clone"), reference_weights(model, reference):
        pytest.fail("entered")
    mixed = {**clone(reference), "decoder.final_layernorm.bias": reference["decoder.final_layernorm.bias"]}
    with pytest.raises(ValueError, match=r"^decoder.final_layernorm.bias and 0 more"), reference_weights(model, mixed):
        pytest.fail("entered")
    with reference_weights(model, clone(reference)):
        pass


def test_frozen_weights_may_share_memory_with_the_model() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    with reference_weights(model, {"weight": model.weight.detach(), "bias": torch.ones(2)}):
        assert model.bias.eq(1).all()


def test_entries_other_than_tensors_are_ignored() -> None:
    class WithExtras(torch.nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {**super().state_dict(*args, **kwargs), "note": b"of the checkpoint", "a._extra_state": None}

    model = WithExtras(2, 2)
    with reference_weights(model, {**clone(model.state_dict()), "weight": torch.ones(2, 2), "note": b"another"}):
        assert model.weight.eq(1).all()
    assert not model.weight.eq(1).all()


def test_model_chunks_without_ddp_are_swapped() -> None:
    chunks = [make_gpt("none"), make_gpt("none")]
    policies = [copy_weights(chunk) for chunk in chunks]
    with reference_weights(chunks, [make_reference(1), make_reference(2)]):
        assert not torch.equal(score(chunks[0]), score(chunks[1]))
    for chunk, before in zip(chunks, policies, strict=True):
        assert all(torch.equal(before[name], tensor) for name, tensor in chunk.named_parameters())
    with (
        pytest.raises(ValueError, match="1 state dicts for 2 model chunks"),
        reference_weights(chunks, make_reference()),
    ):
        pytest.fail("entered")


@pytest.mark.parametrize("enabled", [True, False])
def test_an_exception_restores_weights_and_hooks(enabled: bool) -> None:
    ddp = wrap_ddp(make_gpt("none"))
    if not enabled:
        ddp.disable_forward_pre_hook()
    policy = copy_weights(ddp)

    def score_and_fail() -> None:
        ddp.enable_forward_pre_hook()
        raise RuntimeError("scoring failed")

    with pytest.raises(RuntimeError, match="scoring failed"), reference_weights([ddp], [make_reference()]):
        score_and_fail()
    assert all(torch.equal(policy[name], tensor) for name, tensor in ddp.named_parameters())
    assert bool(ddp.remove_forward_pre_hook_handles) is enabled


def test_contexts_nest() -> None:
    ddp = wrap_ddp(make_gpt("none"))
    policy_scores = score(ddp)
    with reference_weights(ddp, make_reference(1)):
        outer = score(ddp)
        with reference_weights(ddp, make_reference(2)):
            assert not torch.equal(score(ddp), outer)
        assert torch.equal(score(ddp), outer)
    assert torch.equal(score(ddp), policy_scores)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: d.pop("decoder.final_layernorm.bias"), KeyError, r"lacks \['decoder.final_layernorm.bias'\]"),
        (lambda d: d.update(other=torch.zeros(1)), KeyError, r"the model \['other'\]"),
        (lambda d: d.update({"decoder.final_layernorm.bias": torch.zeros(3)}), ValueError, r"is \(32,\) torch.float32"),
        (lambda d: d.update({"decoder.final_layernorm.bias": torch.zeros(32).half()}), ValueError, "torch.float16"),
        (lambda d: d.update({"decoder.final_layernorm.bias": None}), TypeError, "bias is a NoneType in the state dict"),
    ],
)
def test_a_wrong_state_dict_changes_nothing(change: Any, error: type[Exception], message: str) -> None:
    ddp, reference = wrap_ddp(make_gpt("none")), make_reference()
    change(reference)
    policy = copy_weights(ddp)
    with pytest.raises(error, match=message), reference_weights(ddp, reference):
        pytest.fail("entered")
    assert all(torch.equal(policy[name], tensor) for name, tensor in ddp.named_parameters())
    assert set(ddp.remove_forward_pre_hook_handles) == set(ddp.module.modules())
