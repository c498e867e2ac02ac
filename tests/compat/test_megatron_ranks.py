"""Megatron's DDP on two ranks: what one rank updated arrives at the other where it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollgraph.compat.megatron import reference_weights
from rollgraph.parallel.ranks.world import World
from tests.compat.megatron_world import (
    REASON,
    compute_gradients,
    make_batch,
    make_gpt,
    make_reference,
    megatron_world,
    repair_changes_no_bit,
    score,
    toggle,
    update_shard,
    wrap_ddp,
)
from tests.parallel.worlds import run_world

pytest.importorskip("megatron.core", reason=REASON)
pytestmark = [pytest.mark.multi, pytest.mark.slow]


def swap_weights(world: World, inside: bool) -> bool:
    """The restored policy is the gathered one: both ranks' updates, on both ranks."""
    with pytest.MonkeyPatch.context() as monkeypatch, megatron_world(monkeypatch):
        ddp = wrap_ddp(make_gpt("none"))
        ddp.zero_grad_buffer()
        ddp(**make_batch()).mean().backward()
        ddp.finish_grad_sync()
        update_shard(ddp)
        if inside:
            ddp.disable_forward_pre_hook(param_sync=False)
        with reference_weights(ddp.module if inside else ddp, make_reference()):
            score(ddp)
        mine = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
        both = [torch.empty_like(mine) for _ in range(world.size)]
        torch.distributed.all_gather(both, mine)
        return torch.equal(*both)


def switch_hooks(world: World) -> dict[str, bool]:
    """Each rank updates its own shard; return whether the other rank's update arrived after hooks were disabled."""
    with pytest.MonkeyPatch.context() as monkeypatch, megatron_world(monkeypatch):
        seen = {"healthy use is the same": repair_changes_no_bit()}
        for synced in (True, False):
            ddp = wrap_ddp(make_gpt())
            toggle(ddp.module, "none")
            compute_gradients(ddp)
            update_shard(ddp)
            ddp.disable_forward_pre_hook(param_sync=False)  # a second call does not swallow what is asked for
            ddp.disable_forward_pre_hook(param_sync=synced)
            mine = torch.cat([parameter.detach().flatten() for parameter in ddp.module.parameters()])
            both = [torch.empty_like(mine) for _ in range(world.size)]
            torch.distributed.all_gather(both, mine)
            seen[f"param_sync={synced}"] = torch.equal(*both)
        return seen


def everything(world: World) -> dict[str, Any]:
    """Run everything that is tested, because ranks that import Megatron start slowly. What repairs comes last."""
    found: dict[str, Any] = {
        "swapped": swap_weights(world, inside=False),
        "hooks off": swap_weights(world, inside=True),
    }
    return {**found, "switched": switch_hooks(world)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = run_world(2, tmp_path_factory.mktemp("ranks"), everything)
    assert not any(isinstance(result, str) for result in found), found
    return found


def test_parameters_are_gathered_before_the_swap(ranks: list[dict[str, Any]]) -> None:
    assert [found["swapped"] for found in ranks] == [True, True]


def test_parameters_are_gathered_around_a_model_whose_hooks_are_off(ranks: list[dict[str, Any]]) -> None:
    assert [found["hooks off"] for found in ranks] == [True, True]


def test_the_parameter_sync_asked_for_is_never_skipped(ranks: list[dict[str, Any]]) -> None:
    expected = {"healthy use is the same": True, "param_sync=True": True, "param_sync=False": False}
    assert [found["switched"] for found in ranks] == [expected, expected]
