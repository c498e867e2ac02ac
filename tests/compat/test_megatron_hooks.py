"""DDP's forward pre-hooks while graphs are switched, on the real package: the reported failure, and its repair."""

from __future__ import annotations

from typing import Any

import pytest

from rollgraph.compat.megatron import reference_weights, repair, repeatable_train, undo
from tests.compat.megatron_world import (
    REASON,
    list_managers,
    make_gpt,
    one_rank,  # noqa: F401
    repair_changes_no_bit,
    toggle,
    unrepaired,  # noqa: F401
    wrap_ddp,
)

pytest.importorskip("megatron.core", reason=REASON)
pytestmark = [pytest.mark.usefixtures("unrepaired", "one_rank"), pytest.mark.filterwarnings("ignore")]


def test_the_reported_failure_occurs() -> None:
    model = make_gpt()
    ddp = wrap_ddp(model)
    assert len(list_managers(model)) == 5
    assert len(ddp.remove_forward_pre_hook_handles) == 82
    toggle(model, "none")
    with pytest.raises(AssertionError):
        ddp.disable_forward_pre_hook()
    assert len(ddp.remove_forward_pre_hook_handles) == 5
    with pytest.raises(KeyError):
        ddp.disable_forward_pre_hook()
    with pytest.raises(AssertionError):
        ddp.enable_forward_pre_hook()
    toggle(model, "local")
    with pytest.raises(KeyError):
        ddp.disable_forward_pre_hook()


@pytest.mark.parametrize("when", ["before the model is made", "after it failed"])
def test_hooks_switch_with_graphs_when_repaired(when: str) -> None:
    if when == "before the model is made":
        repair()
    model = make_gpt()
    ddp = wrap_ddp(model)
    if when == "after it failed":
        toggle(model, "none")
        with pytest.raises(AssertionError):
            ddp.disable_forward_pre_hook()
        repair()
    for to in ("none", "local", "none", "local"):
        toggle(model, to)
        ddp.disable_forward_pre_hook()
        ddp.disable_forward_pre_hook()
        assert not any(module._forward_pre_hooks for module in model.modules())
        ddp.enable_forward_pre_hook()
        ddp.enable_forward_pre_hook()
        assert all(len(module._forward_pre_hooks) == 1 for module in model.modules())
        assert len(list_managers(model)) == (5 if to == "local" else 0)


def test_undo_restores_the_failure() -> None:
    ddp = wrap_ddp(make_gpt())
    repair()
    ddp.disable_forward_pre_hook()
    ddp.disable_forward_pre_hook()
    undo()
    with pytest.raises(KeyError):
        ddp.disable_forward_pre_hook()


def test_a_removed_module_has_no_hook() -> None:
    repair()
    ddp = wrap_ddp(make_gpt("none"))
    layer = ddp.module.decoder.layers[-1]
    del ddp.module.decoder.layers[-1]
    ddp.enable_forward_pre_hook()
    assert not layer._forward_pre_hooks
    assert set(ddp.remove_forward_pre_hook_handles) == set(ddp.module.modules())


@pytest.mark.parametrize("paused_by", ["a switch", "reference weights", "a train()"])
def test_the_order_of_foreign_hooks_is_kept(paused_by: str) -> None:
    """A hook that other code registered after the DDP's still sees gathered parameters."""
    repair()
    model = make_gpt()
    linear = model.decoder.layers[0].mlp.linear_fc1

    def before(*arguments: Any) -> None: ...
    def behind(*arguments: Any) -> None: ...

    linear.register_forward_pre_hook(before)
    ddp = wrap_ddp(model)
    linear.register_forward_pre_hook(behind)
    if paused_by == "a switch":
        toggle(model, "none")
    elif paused_by == "reference weights":
        with reference_weights(ddp, make_gpt("none").state_dict()):
            pass
    else:
        with repeatable_train(ddp, ddp.config):
            ddp.disable_forward_pre_hook()
    names = [hook.__name__ for hook in linear._forward_pre_hooks.values()]
    assert names == ["before", "hook", "behind"]


def test_without_overlap_switching_hooks_still_raises() -> None:
    ddp = wrap_ddp(make_gpt("none"), overlap_param_gather=False)
    repair()
    with pytest.raises(AssertionError):
        ddp.disable_forward_pre_hook()
    with pytest.raises(AssertionError):
        ddp.enable_forward_pre_hook()


def test_the_repair_changes_no_bit_of_healthy_use() -> None:
    assert repair_changes_no_bit()
