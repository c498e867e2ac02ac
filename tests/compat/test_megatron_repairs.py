"""Rules for every repair: it is applied once, can be undone, and leaves healthy or unknown code alone."""

from __future__ import annotations

import ast
import gc
import inspect
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollgraph.compat import megatron as compat
from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron import REPAIRS, findings, repair, undo
from rollgraph.compat.megatron.capture import CAPTURE_FAILURE
from rollgraph.compat.megatron.repair import (
    ABSENT,
    CannotRepair,
    Patch,
    Repair,
    Verdict,
    install_patches,
    read_raw,
    uninstall_patches,
)
from tests.compat.megatron_world import (
    REASON,
    one_rank,  # noqa: F401
    unrepaired,  # noqa: F401
)

pytest.importorskip("megatron.core", reason=REASON)
pytestmark = [pytest.mark.usefixtures("unrepaired"), pytest.mark.filterwarnings("ignore")]

BROKEN = {"forward-pre-hooks", "switching-graphs", "deleted-graphs", "capture-failure", "legacy-tokenizer"}


ENABLE = "enable_forward_pre_hook"


def states() -> dict[str, RepairState]:
    return {finding.name: finding.state for finding in findings()}


def snapshot() -> dict[tuple[str, str], Any]:
    """Every name in every loaded megatron module, and every attribute of its classes."""
    values = {}
    for module in [m for name, m in sys.modules.items() if name.startswith("megatron.") and m is not None]:
        for name, value in vars(module).items():
            values[module.__name__, name] = value
            if isinstance(value, type) and value.__module__.startswith("megatron."):
                values.update(
                    {(f"{value.__module__}.{value.__qualname__}", key): inner for key, inner in vars(value).items()}
                )
    return {key: value for key, value in values.items() if key[1] != "__abstractmethods__"}


def changes(before: dict[tuple[str, str], Any]) -> set[str]:
    after = snapshot()
    return {f"{o}.{n}" for o, n in before.keys() | after.keys() if before.get((o, n)) is not after.get((o, n))}


def test_failures_are_diagnosed_repaired_and_restored_by_undo() -> None:
    assert {name for name, state in states().items() if state is RepairState.AFFECTED} == BROKEN
    assert {finding.name for finding in repair() if finding.state is RepairState.REPAIRED} == BROKEN
    assert {name for name, state in states().items() if state is RepairState.REPAIRED} == BROKEN
    undo()
    assert {name for name, state in states().items() if state is RepairState.AFFECTED} == BROKEN


@pytest.mark.usefixtures("one_rank")
def test_failures_are_diagnosed_after_megatron_is_initialized() -> None:
    assert {name for name, state in states().items() if state is RepairState.AFFECTED} == BROKEN
    assert {finding.name for finding in repair() if finding.state is RepairState.REPAIRED} == BROKEN


def test_probes_leave_no_trace(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import utils

    findings()  # imports
    monkeypatch.setattr(utils, "cuda_graph_attr_cache", None)
    before, rng_state = snapshot(), torch.get_rng_state()
    environment = (
        dict(os.environ),
        list(sys.modules),
        list(warnings.filters),
        gc.get_threshold(),
        torch.is_grad_enabled(),
    )
    caplog.set_level(logging.INFO)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        findings()
        repair()
        undo()
    assert (caplog.messages, warned) == ([], [])
    assert environment == (
        *(dict(os.environ), list(sys.modules), list(warnings.filters)),
        *(gc.get_threshold(), torch.is_grad_enabled()),
    )
    assert changes(before) == set()
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert not torch.distributed.is_initialized()
    assert not parallel_state.is_initialized()
    assert random._CUDA_RNG_STATE_TRACKER is before["megatron.core.tensor_parallel.random", "_CUDA_RNG_STATE_TRACKER"]


def test_no_probe_queries_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query fixes the visible devices, which a launcher may not have chosen yet."""
    findings()  # imports
    for name in ("is_available", "device_count", "current_device", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: pytest.fail(name))
    assert {finding.name for finding in repair() if finding.state is RepairState.REPAIRED} == BROKEN


def test_repair_is_idempotent_and_undo_leaves_nothing() -> None:
    findings()
    before = snapshot()
    repair()
    once = snapshot()
    repair()
    assert changes(once) == set()
    changed = changes(before)
    undo()
    undo()
    assert changes(before) == set()
    names = {name.rsplit(".", 1)[1] for name in changed}
    assert names == {
        *("enable_forward_pre_hook", "disable_forward_pre_hook"),
        *("toggle_cuda_graphs", "delete_cuda_graphs", "record_fwd_graph"),
        *("create_cudagraphs", "create_fwd_graph"),
        "MegatronTokenizer",
    }


def test_concurrent_threads_repair_once() -> None:
    findings()
    before = snapshot()
    threads = [Thread(target=repair) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name for name, state in states().items() if state is RepairState.REPAIRED} == BROKEN
    undo()
    assert changes(before) == set()


def test_undo_keeps_foreign_patches_and_reverts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import cuda_graphs

    findings()
    before = snapshot()
    repair()
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs._CudaGraphRunner, "create_fwd_graph", print)
        (diagnosis,) = (finding for finding in repair() if finding.name == "capture-failure")
        assert diagnosis.state is not RepairState.AFFECTED or "create_fwd_graph was replaced since" in diagnosis.repair
        with pytest.raises(RuntimeError, match=r"capture-failure: cannot undo: .*create_fwd_graph was replaced since"):
            undo()
        assert {name.rsplit(".", 1)[1] for name in changes(before)} == {"create_fwd_graph", "create_cudagraphs"}
    undo()
    assert changes(before) == set()


def test_a_repair_under_a_foreign_patch_is_not_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed import DistributedDataParallel as DDP

    findings()
    before = snapshot()
    repair()
    with monkeypatch.context() as patch:
        patch.setattr(DDP, "enable_forward_pre_hook", before[f"{DDP.__module__}.DistributedDataParallel", ENABLE])
        diagnosis = repair()[0]
        assert diagnosis.state is RepairState.AFFECTED
        assert (
            diagnosis.repair == f"cannot repair: {DDP.__module__}.DistributedDataParallel.{ENABLE} was replaced since"
        )
    undo()
    assert changes(before) == set()


def test_repairs_keep_signatures_and_docstrings() -> None:
    findings()
    before = snapshot()
    repair()
    replaced = {key: value for key, value in snapshot().items() if key in before and before[key] is not value}
    assert replaced
    for key, value in replaced.items():
        old, new = (getattr(thing, "__func__", thing) for thing in (before[key], value))
        assert inspect.signature(new) == inspect.signature(old)
        assert (
            list(inspect.signature(new, follow_wrapped=False).parameters)[:1]
            == list(inspect.signature(old).parameters)[:1]
        )
        assert (new.__doc__, new.__name__, new.__module__) == (old.__doc__, old.__name__, old.__module__)


def test_a_version_without_the_failure_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future version, which tracks the handles of its hooks and resets its flags."""
    from megatron.core.distributed import DistributedDataParallel as DDP
    from megatron.core.transformer import cuda_graphs

    def disable(self: Any, param_sync: bool = True) -> None:
        for handle in self.remove_forward_pre_hook_handles.values():
            handle.remove()
        self.remove_forward_pre_hook_handles.clear()

    def enable(self: Any) -> None:
        disable(self)
        for module in self.module.modules():
            self.remove_forward_pre_hook_handles[module] = module.register_forward_pre_hook(lambda *_: None)

    def create(cls: Any) -> None:
        cuda_graphs._set_capture_start()
        try:
            cls.cudagraph_record[0][0].create_fwd_graph()
        finally:
            cuda_graphs._set_capture_end()

    monkeypatch.setattr(DDP, "disable_forward_pre_hook", disable)
    monkeypatch.setattr(DDP, "enable_forward_pre_hook", enable)
    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "create_cudagraphs", classmethod(create))
    only_warm_up = CAPTURE_FAILURE.diagnose()
    assert only_warm_up.state is RepairState.AFFECTED
    assert only_warm_up.reason.endswith("Here: is_graph_warmup() stays True.")
    monkeypatch.setattr(cuda_graphs, "_set_warmup_end", lambda: setattr(cuda_graphs, "_IS_GRAPH_WARMUP", False))
    by_name = {finding.name: finding for finding in repair()}
    for name in ("forward-pre-hooks", "capture-failure"):
        assert (by_name[name].state, by_name[name].repair) == (RepairState.CLEAR, "nothing to do")
    assert DDP.disable_forward_pre_hook is disable
    assert cuda_graphs._CudagraphGlobalRecord.create_cudagraphs.__func__ is create


def move_handles(monkeypatch: pytest.MonkeyPatch) -> str:
    from megatron.core.distributed import DistributedDataParallel as DDP

    def disable(self: Any, param_sync: bool = True, modules: Any = None) -> None:
        raise KeyError("still")

    monkeypatch.setattr(DDP, "disable_forward_pre_hook", disable)
    return "takes (self, param_sync, modules), not (self, param_sync)"


def move_flag(monkeypatch: pytest.MonkeyPatch) -> str:
    from megatron.core.transformer import cuda_graphs

    monkeypatch.delattr(cuda_graphs, "TECudaGraphHelper")
    return "megatron.core.transformer.cuda_graphs has no TECudaGraphHelper"


def move_cache(monkeypatch: pytest.MonkeyPatch) -> str:
    from megatron.core.transformer import utils

    original = utils.toggle_cuda_graphs

    def toggle_cuda_graphs(model: Any, set_to: str = "none", reset_cuda_graphs: bool = True, more: int = 0) -> None:
        original(model, set_to, reset_cuda_graphs)

    monkeypatch.setattr(utils, "toggle_cuda_graphs", toggle_cuda_graphs)
    return "not (model, set_to, reset_cuda_graphs)"


def move_record(monkeypatch: pytest.MonkeyPatch) -> str:
    from megatron.core.transformer import cuda_graphs

    original = cuda_graphs._CudagraphGlobalRecord.record_fwd_graph

    def record(cls: Any, *entry: Any) -> None:
        original(*entry)

    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "record_fwd_graph", classmethod(record))
    return "takes (cls, entry)"


def move_function(monkeypatch: pytest.MonkeyPatch) -> str:
    """Remove attributes of graph managers, which no probe can make without a GPU."""
    from megatron.core.transformer import cuda_graphs

    def make(
        self: Any, config: Any, base_module: Any = None, function_name: Any = None, need_backward: Any = 1
    ) -> None:
        self.wrapped, self.need_backward = getattr(base_module, function_name), need_backward

    monkeypatch.setattr(cuda_graphs.CudaGraphManager, "__init__", make)
    return "does not mention func"


@pytest.mark.parametrize(
    ("name", "move"),
    [
        ("forward-pre-hooks", move_handles),
        ("capture-failure", move_flag),
        ("switching-graphs", move_cache),
        ("switching-graphs", move_function),
        ("deleted-graphs", move_record),
    ],
)
def test_changed_internals_are_refused_by_name(name: str, move: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    findings()  # imports
    message = move(monkeypatch)
    (repair_under_test,) = (each for each in REPAIRS if each.name == name)
    before = snapshot()
    diagnosis = repair_under_test.repair_if_affected()
    assert diagnosis.state is RepairState.AFFECTED
    assert diagnosis.repair.startswith("cannot repair: ")
    assert message in diagnosis.repair
    assert changes(before) == set()
    assert not repair_under_test.is_active


def list_internals() -> list[tuple[Any, str]]:
    """Names in modules and classes of megatron-core that occur anywhere in the code of the repairs."""
    from megatron.core import distributed
    from megatron.core.transformer import cuda_graphs, utils

    source = Path(compat.__file__).parent
    words = {word for file in source.glob("*.py") for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    classes = ("_CudagraphGlobalRecord", "_CudaGraphRunner", "CudaGraphManager", "TECudaGraphHelper", "TensorReusePool")
    owners = [
        *(cuda_graphs, utils, distributed, distributed.DistributedDataParallel),
        *(getattr(cuda_graphs, name) for name in classes),
    ]
    return [
        (owner, name)
        for owner in owners
        for name in sorted(words & vars(owner).keys())
        if name[:2] != "__" and getattr(vars(owner)[name], "__module__", "megatron").startswith("megatron")
    ]


@pytest.mark.parametrize(
    "repair_under_test",
    [
        pytest.param(one, id=one.name, marks=pytest.mark.slow if one.name == "switching-graphs" else [])
        for one in REPAIRS
    ],
)
def test_without_one_internal_a_repair_works_or_is_refused(
    repair_under_test: Repair, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings()
    internals = list_internals()
    refused = 0
    for owner, name in internals:
        with monkeypatch.context() as patch:
            patch.delattr(owner, name)
            before = {id(each): dict(vars(each)) for each, _ in internals}
            diagnosis = repair_under_test.repair_if_affected()
            if diagnosis.state is RepairState.REPAIRED:
                assert repair_under_test.probe().state is RepairState.CLEAR, name
                repair_under_test.undo()
            elif diagnosis.state is not RepairState.CLEAR:
                refused += 1
                assert diagnosis.repair.startswith("cannot repair: "), name
            for each, _ in internals:
                assert vars(each).keys() == before[id(each)].keys(), name
                assert all(vars(each)[key] is value for key, value in before[id(each)].items()), name
    assert bool(refused) is (repair_under_test.name != "legacy-tokenizer")


def test_a_failing_probe_patches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed import DistributedDataParallel as DDP

    monkeypatch.delattr(DDP, "disable_forward_pre_hook")
    before = snapshot()
    (repair_under_test,) = (each for each in REPAIRS if each.name == "forward-pre-hooks")
    diagnosis = repair_under_test.repair_if_affected()
    assert diagnosis.state is RepairState.UNKNOWN
    assert "AttributeError" in diagnosis.reason
    assert diagnosis.repair == "cannot repair: what cannot be tried is left alone"
    assert changes(before) == set()


def test_every_repair_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text(encoding="utf-8")
    assert [one.name for one in REPAIRS if f"| `{one.name}` |" not in text] == []


def test_quotes_of_the_readme_are_documented() -> None:
    root = Path(__file__).parents[2]
    readme, docs = (root / name for name in ("README.md", "docs/megatron.md"))
    (section,) = re.findall(
        r"^## On .*?Megatron.*?(?=^## )", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    quotes = re.findall(r'`assert [^`]+`|"[^"]+"', section)
    assert quotes
    assert [quote for quote in quotes if quote[1:-1] not in docs.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("distributed/distributed_data_parallel", "assert len(self.remove_forward_pre_hook_handles) == 0"),
        ("distributed/distributed_data_parallel", "assert self.remove_forward_pre_hook_handles[module] is not None"),
        (
            "transformer/transformer_layer",
            "Partial cudagraphs for MoEs were detected during inference!Please do not use --cuda-graph-scope "
            "moe_router moe_preprocess alongside inference.",
        ),
        (
            "transformer/cuda_graphs",
            "`cudagraph_created` is set to True but no matching cudagraph runners were found. This module has ",
        ),
        ("transformer/cuda_graphs", "RNG tracker does not support cudagraphs!"),
        ("distributed/param_and_grad_buffer", "Communication call has not been issued for this bucket ("),
    ],
)
def test_documented_error_texts_are_those_of_the_package(module: str, text: str) -> None:
    import megatron.core

    source = (Path(megatron.core.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    # Parsing joins adjacent string literals.
    literals = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    assert text in source or text in literals
    assert text in (Path(__file__).parents[2] / "docs" / "megatron.md").read_text(encoding="utf-8")


# Patches, on objects of our own


class Refuses(SimpleNamespace):
    def __setattr__(self, name: str, value: Any) -> None:
        raise PermissionError(name)


def test_a_failing_patch_reverts_the_patches_before_it() -> None:
    first, table = SimpleNamespace(a=1), {"b": 2}
    with pytest.raises(PermissionError):
        install_patches(
            [Patch(first, "a", 10), Patch(table, "b", 20), Patch(first, "new", 30), Patch(Refuses(), "c", 40)]
        )
    assert (vars(first), table) == ({"a": 1}, {"b": 2})


def test_undo_is_all_or_nothing_if_a_patch_was_replaced() -> None:
    owner = SimpleNamespace(a=1, b=2)
    installed = install_patches([Patch(owner, "a", 10), Patch(owner, "b", 20)])
    owner.b = 99
    with pytest.raises(RuntimeError, match=r"cannot undo: SimpleNamespace.b was replaced since"):
        uninstall_patches(installed)
    assert vars(owner) == {"a": 10, "b": 99}


def test_an_ineffective_repair_is_reverted() -> None:
    owner = SimpleNamespace(a=1)
    useless = Repair("x", "", "", lambda: Verdict(RepairState.AFFECTED, "still"), lambda: [Patch(owner, "a", 2)])
    with pytest.raises(CannotRepair, match="still there with the repair: still"):
        useless.apply()
    assert owner.a == 1
    assert useless.repair_if_affected().repair.startswith("cannot repair: the failure is still there")


def test_names_imported_elsewhere_follow_the_repair() -> None:
    from megatron.core.transformer import utils

    this_module: Any = sys.modules[__name__]
    this_module.toggle_by_name = original = utils.toggle_cuda_graphs
    try:
        repair()
        assert this_module.toggle_by_name is utils.toggle_cuda_graphs is not original
        undo()
        assert this_module.toggle_by_name is utils.toggle_cuda_graphs is original
    finally:
        del this_module.toggle_by_name


def test_undo_deletes_added_attributes() -> None:
    owner = SimpleNamespace()
    uninstall_patches(install_patches([Patch(owner, "a", 1)]))
    assert read_raw(owner, "a") is ABSENT


def test_importing_the_package_does_not_import_megatron() -> None:
    code = "import sys, rollgraph.compat.megatron; print([m for m in sys.modules if m.startswith('megatron')])"
    source = Path(__file__).parents[2] / "src"
    completed = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True)
    assert completed.stdout == "[]\n"
