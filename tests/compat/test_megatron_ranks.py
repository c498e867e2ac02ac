"""Megatron's DDP on two ranks: whether the updates of one rank reach the other."""

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
    """Whether the restored policy is the gathered one, with both ranks' updates, on both ranks."""
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
        local = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
        gathered = [torch.empty_like(local) for _ in range(world.size)]
        torch.distributed.all_gather(gathered, local)
        return torch.equal(*gathered)


def switch_hooks(world: World) -> dict[str, bool]:
    """Whether the other rank's update of its shard arrives when hooks are disabled with and without param_sync."""
    with pytest.MonkeyPatch.context() as monkeypatch, megatron_world(monkeypatch):
        results = {"healthy use is unchanged": repair_changes_no_bit()}
        for synced in (True, False):
            ddp = wrap_ddp(make_gpt())
            toggle(ddp.module, "none")
            compute_gradients(ddp)
            update_shard(ddp)
            ddp.disable_forward_pre_hook(param_sync=False)  # the next call must sync all the same
            ddp.disable_forward_pre_hook(param_sync=synced)
            local = torch.cat([parameter.detach().flatten() for parameter in ddp.module.parameters()])
            gathered = [torch.empty_like(local) for _ in range(world.size)]
            torch.distributed.all_gather(gathered, local)
            results[f"param_sync={synced}"] = torch.equal(*gathered)
        return results


def run_all(world: World) -> dict[str, Any]:
    """Run everything in one world, because ranks that import Megatron start slowly. Repairs come last."""
    results: dict[str, Any] = {
        "swapped": swap_weights(world, inside=False),
        "hooks off": swap_weights(world, inside=True),
    }
    return {**results, "switched": switch_hooks(world)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    results = run_world(2, tmp_path_factory.mktemp("ranks"), run_all)
    assert not any(isinstance(result, str) for result in results), results
    return results


def test_parameters_are_gathered_before_the_swap(ranks: list[dict[str, Any]]) -> None:
    assert [results["swapped"] for results in ranks] == [True, True]


def test_parameters_are_gathered_around_a_model_with_disabled_hooks(ranks: list[dict[str, Any]]) -> None:
    assert [results["hooks off"] for results in ranks] == [True, True]


def test_a_requested_parameter_sync_is_never_skipped(ranks: list[dict[str, Any]]) -> None:
    expected = {"healthy use is unchanged": True, "param_sync=True": True, "param_sync=False": False}
    assert [results["switched"] for results in ranks] == [expected, expected]
