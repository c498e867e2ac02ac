"""Switching, deleting and capturing megatron-core's local graphs: each failure of the real package, and its repair.

`CaptureStandIn` replaces capture itself: it runs the function and records nothing. All other code is Megatron's.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rollgraph.compat.diagnosis import RepairState
from rollgraph.compat.megatron import findings, repair, undo
from rollgraph.compat.megatron.capture import INPUT_SURFACE
from rollgraph.compat.megatron.graph_switch import GRAPH_SWITCH
from tests.compat.megatron_world import (
    REASON,
    TOKENS,
    WIDTH,
    compute_gradients,
    list_managers,
    make_batch,
    make_gpt,
    one_rank,  # noqa: F401
    reset_graphs,
    unrepaired,  # noqa: F401
    wrap_ddp,
)

pytest.importorskip("megatron.core", reason=REASON)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unrepaired", "one_rank"), pytest.mark.filterwarnings("ignore")]


def graphs() -> Any:
    from megatron.core.transformer import cuda_graphs

    return cuda_graphs


def toggle(model: nn.Module, to: str, reset: bool = True) -> None:
    from megatron.core.transformer.utils import toggle_cuda_graphs

    toggle_cuda_graphs(model, to, reset_cuda_graphs=reset)


def record_step(ddp: Any) -> int:
    """Run a training step, and return how many graphs it records."""
    compute_gradients(ddp)
    return len(graphs()._CudagraphGlobalRecord.cudagraph_record)


# Deleting


def train_delete_train(ddp: Any) -> int:
    assert record_step(ddp) == 8  # 4 layers, forward and backward
    graphs().create_cudagraphs()
    assert graphs()._CudagraphGlobalRecord.cudagraph_created
    graphs().delete_cuda_graphs()
    return record_step(ddp)


def test_training_stays_eager_after_a_deletion_until_repaired() -> None:
    assert train_delete_train(wrap_ddp(make_gpt())) == 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        reset_graphs(monkeypatch)
        repair()
        ddp = wrap_ddp(make_gpt())
        assert train_delete_train(ddp) == 8
        runners = [runner for manager in list_managers(ddp.module) for runner in manager.cudagraph_runners]
        assert len(runners) == 4  # recorded again, without new runners
        graphs().create_cudagraphs()
        assert all(runner.cudagraph_created and runner.bwd_graph is not None for runner in runners)


def test_graphs_reset_when_switched_off_are_captured_again() -> None:
    repair()
    ddp = wrap_ddp(make_gpt())
    assert record_step(ddp) == 8
    graphs().create_cudagraphs()
    toggle(ddp.module, "none")
    toggle(ddp.module, "local", reset=False)
    assert record_step(ddp) == 8


def use_a_runner_per_microbatch(ddp: Any) -> None:
    """As in pipeline parallelism."""
    for manager in list_managers(ddp.module):
        manager.reuse_cudagraphs = False  # type: ignore[assignment]


def has_captured_runners(ddp: Any) -> bool:
    runners = [runner for manager in list_managers(ddp.module) for runner in manager.cudagraph_runners]
    return len(runners) == 4 and all(runner.fwd_graph is not None for runner in runners)


def test_deleted_runners_of_microbatches_are_not_reused() -> None:
    repair()
    ddp = wrap_ddp(make_gpt())
    use_a_runner_per_microbatch(ddp)
    assert train_delete_train(ddp) == 8
    graphs().create_cudagraphs()
    assert has_captured_runners(ddp)


def test_the_function_is_repaired_where_an_engine_imported_it() -> None:
    engine = pytest.importorskip("megatron.core.inference.engines.dynamic_engine")
    original = engine.delete_cuda_graphs
    repair()
    assert engine.delete_cuda_graphs is graphs().delete_cuda_graphs is not original
    undo()
    assert engine.delete_cuda_graphs is graphs().delete_cuda_graphs is original


def test_a_probe_does_not_touch_existing_graphs() -> None:
    ddp = wrap_ddp(make_gpt())
    record_step(ddp)
    graphs().create_cudagraphs()
    by_name = {finding.name: finding for finding in repair()}
    assert by_name["deleted-graphs"].state is RepairState.UNKNOWN
    assert "before the first" in by_name["deleted-graphs"].reason
    runners = [runner for manager in list_managers(ddp.module) for runner in manager.cudagraph_runners]
    assert all(runner.fwd_graph is not None and runner.cudagraph_created for runner in runners)
    assert graphs()._CudagraphGlobalRecord.cudagraph_created


# Switching


def test_kept_graphs_return_when_switched_on() -> None:
    repair()
    ddp = wrap_ddp(make_gpt())
    record_step(ddp)
    graphs().create_cudagraphs()
    managers = list_managers(ddp.module)
    toggle(ddp.module, "none", reset=False)
    assert list_managers(ddp.module) == []
    toggle(ddp.module, "local", reset=False)
    assert set(list_managers(ddp.module)) == set(managers)
    assert graphs()._CudagraphGlobalRecord.cudagraph_created


def test_kept_graphs_of_a_second_capture_return() -> None:
    repair()
    ddp = wrap_ddp(make_gpt())
    toggle(ddp.module, "none")
    toggle(ddp.module, "local")
    renewed = list_managers(ddp.module)
    record_step(ddp)
    graphs().create_cudagraphs()
    toggle(ddp.module, "none", reset=False)
    toggle(ddp.module, "local", reset=False)
    assert set(list_managers(ddp.module)) == set(renewed)  # not those that the model was built with


def test_switching_on_again_keeps_captured_graphs() -> None:
    repair()
    ddp = wrap_ddp(make_gpt())
    toggle(ddp.module, "none")
    toggle(ddp.module, "local")
    record_step(ddp)
    graphs().create_cudagraphs()
    captured = list_managers(ddp.module)
    toggle(ddp.module, "local", reset=False)
    assert set(list_managers(ddp.module)) == set(captured)
    assert all(runner.fwd_graph is not None for manager in captured for runner in manager.cudagraph_runners)
    assert set(ddp.remove_forward_pre_hook_handles) == set(ddp.module.modules())


def test_graphs_switched_off_when_repaired_switch_on_after_undo() -> None:
    repair()
    ddp = wrap_ddp(make_gpt())
    toggle(ddp.module, "none")
    undo()
    toggle(ddp.module, "local")
    renewed = list_managers(ddp.module)
    assert len(renewed) == 5
    repair()
    toggle(ddp.module, "none", reset=False)
    toggle(ddp.module, "local", reset=False)
    assert set(list_managers(ddp.module)) == set(renewed)


def test_hooks_registered_when_repaired_switch_after_undo() -> None:
    repair()
    ddps = [wrap_ddp(make_gpt()), wrap_ddp(make_gpt())]
    toggle(ddps[0].module, "none")
    undo()
    for ddp in ddps:
        ddp.disable_forward_pre_hook()
        assert not any(module._forward_pre_hooks for module in ddp.module.modules())
        ddp.enable_forward_pre_hook()
        assert set(ddp.remove_forward_pre_hook_handles) == set(ddp.module.modules())


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("fails", ["an unknown word", "an RNG tracker that is not graph-safe"])
def test_a_failed_switch_leaves_managers_in_place(on: bool, fails: str) -> None:
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    repair()
    ddp = wrap_ddp(make_gpt())
    if not on:
        toggle(ddp.module, "none")
    managers = list_managers(ddp.module)
    if fails == "an unknown word":
        with pytest.raises(AssertionError, match="Invalid CUDA graph implementation: transformer_engine"):
            toggle(ddp.module, "transformer_engine")
    else:
        initialize_rng_tracker(force_reset=True)
        with pytest.raises(AssertionError, match="RNG tracker does not support cudagraphs!"):
            toggle(ddp.module, "local")
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    assert set(list_managers(ddp.module)) == set(managers)
    assert set(ddp.remove_forward_pre_hook_handles) == set(ddp.module.modules())
    toggle(ddp.module, "local", reset=False)
    assert len(list_managers(ddp.module)) == 5


def capture_then_renew(ddp: Any) -> int:
    record_step(ddp)
    graphs().create_cudagraphs()
    toggle(ddp.module, "none", reset=False)
    toggle(ddp.module, "local", reset=True)
    return record_step(ddp)


def test_new_managers_do_not_look_for_old_graphs() -> None:
    with pytest.raises(AssertionError, match="no matching cudagraph runners were found"):
        capture_then_renew(wrap_ddp(make_gpt()))
    with pytest.MonkeyPatch.context() as monkeypatch:
        reset_graphs(monkeypatch)
        repair()
        assert capture_then_renew(wrap_ddp(make_gpt())) == 8


def test_a_model_at_the_address_of_a_freed_one_is_switched() -> None:
    from megatron.core.transformer import utils

    def switch_at_a_reused_address() -> int:
        first, model = make_gpt(), make_gpt()
        toggle(first, "none", reset=False)
        utils.cuda_graph_attr_cache[id(model)] = utils.cuda_graph_attr_cache.pop(id(first))  # as if it were freed
        toggle(model, "none", reset=False)
        return len(list_managers(model))

    assert switch_at_a_reused_address() == 5
    repair()
    assert switch_at_a_reused_address() == 0


def make_moe(impl: str = "local") -> nn.Module:
    from megatron.core.transformer.enums import CudaGraphScope

    return make_gpt(
        impl,
        num_moe_experts=2,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        cuda_graph_scope=[CudaGraphScope.moe_router] if impl == "local" else [],
        add_bias_linear=False,
    )


def test_layers_with_several_managers_generate_after_switching_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 does not define it without Transformer Engine
        monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)

    def generate(model: nn.Module) -> Tensor:
        layer = model.decoder.layers[0].eval()
        x = torch.randn(TOKENS, 1, WIDTH, generator=torch.Generator().manual_seed(0))
        return layer._forward_mlp(x, inference_context=object())

    model = make_moe()
    model.decoder.layers[0].mlp.fwd_execution_map = "postprocess"  # as a partial run leaves it
    assert len(list_managers(model)) == 1 + 2 * 4
    toggle(model, "none")
    assert len(list_managers(model)) == 2 * 4
    with pytest.raises(AssertionError, match="Partial cudagraphs for MoEs were detected during inference!"):
        generate(model)

    repair()
    toggle(model, "none")
    assert list_managers(model) == []
    assert torch.equal(generate(model), generate(make_moe("none")))


@pytest.mark.parametrize("reset", [True, False])
def test_layers_with_several_managers_are_restored(reset: bool) -> None:
    repair()
    model = make_moe()
    layer: Any = model.decoder.layers[0]
    router, wrapper = layer.cudagraph_manager_router, layer._forward_mlp_router
    layer.mlp.fwd_execution_map = "postprocess"  # as a partial run leaves it
    toggle(model, "none", reset)
    assert layer._forward_mlp_router.__func__ is type(layer)._forward_mlp_router
    assert layer.mlp.fwd_execution_map == ["route", "expert_compute", "postprocess"]
    toggle(model, "local", reset)
    assert len(list_managers(model)) == 1 + 2 * 4
    assert layer.use_partial_cudagraphs
    assert (layer.cudagraph_manager_router is router) is not reset
    assert (layer._forward_mlp_router is wrapper) is not reset
    assert layer.cudagraph_manager_router.func == router.func  # the layer's function, wrapped only once


@pytest.mark.parametrize("reset", [True, False])
def test_layers_with_several_managers_are_whole_after_undo(reset: bool) -> None:
    repair()
    ddp = wrap_ddp(make_moe())
    layer = ddp.module.decoder.layers[0]
    router, wrapper = layer.cudagraph_manager_router, layer._forward_mlp_router
    toggle(ddp.module, "none", reset)
    undo()
    assert len(list_managers(ddp.module)) == 2 * 4  # as Megatron's code leaves them
    toggle(ddp.module, "local", reset)
    assert len(list_managers(ddp.module)) == 1 + 2 * 4
    assert layer.use_partial_cudagraphs
    assert (layer.cudagraph_manager_router, layer._forward_mlp_router) == (router, wrapper)
    assert not any("rollgraph" in name for module in ddp.modules() for name in vars(module))


def test_modules_that_undo_restores_have_hooks() -> None:
    repair()
    ddp = wrap_ddp(make_moe())
    toggle(ddp.module, "none")
    undo()
    assert set(ddp.remove_forward_pre_hook_handles) == set(ddp.module.modules())
    ddp.disable_forward_pre_hook()


def test_disabled_hooks_stay_disabled() -> None:
    repair()
    ddp = wrap_ddp(make_gpt())
    ddp.disable_forward_pre_hook()
    toggle(ddp.module, "none")
    assert not ddp.remove_forward_pre_hook_handles
    ddp.enable_forward_pre_hook()
    toggle(ddp, "local")  # the DDP itself, as some callers pass
    assert set(ddp.remove_forward_pre_hook_handles) == set(ddp.module.modules())
    assert len(list_managers(ddp)) == 5


def test_unrepaired_code_can_disable_hooks_after_a_switch() -> None:
    GRAPH_SWITCH.apply()
    try:
        ddp = wrap_ddp(make_gpt())
        for to in ("none", "local"):
            toggle(ddp.module, to)
            ddp.disable_forward_pre_hook()
            ddp.enable_forward_pre_hook()
    finally:
        GRAPH_SWITCH.undo()


# Failing captures


class OutOfMemory(Exception):
    pass


def fail_a_capture(ddp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at the third graph, while the output of the second waits to become its input."""
    create_graph, attempts = graphs().torch.cuda.CUDAGraph, []

    def create_two_graphs() -> Any:
        attempts.append(1)
        if len(attempts) == 3:
            raise OutOfMemory
        return create_graph()

    record_step(ddp)
    with monkeypatch.context() as patched:
        patched.setattr(graphs().torch.cuda, "CUDAGraph", create_two_graphs, raising=False)
        with pytest.raises(OutOfMemory):
            graphs().create_cudagraphs()


def gradients_arrive(ddp: Any) -> bool:
    ddp.zero_grad_buffer()
    with torch.enable_grad():
        ddp(**make_batch()).mean().backward()
    return any(bool(parameter.main_grad.abs().sum() > 0) for parameter in ddp.module.parameters())


def test_a_failed_capture_stops_gradients_until_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = wrap_ddp(make_gpt())
    fail_a_capture(ddp, monkeypatch)
    assert graphs().is_graph_capturing()
    assert graphs().is_graph_warmup()
    assert not gradients_arrive(ddp)


def test_training_continues_and_captures_after_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    repair()
    ddp = wrap_ddp(make_gpt())
    fail_a_capture(ddp, monkeypatch)
    assert not graphs().is_graph_capturing()
    assert not graphs().is_graph_warmup()
    assert gradients_arrive(ddp)
    ddp.finish_grad_sync()
    assert graphs().fwd_buffer_reuse_ref_count == 0
    graphs().create_cudagraphs()
    assert graphs()._CudagraphGlobalRecord.cudagraph_created
    runners = [runner for manager in list_managers(ddp.module) for runner in manager.cudagraph_runners]
    assert all(runner.fwd_graph is not None and runner.bwd_graph is not None for runner in runners)


def test_a_failed_capture_leaves_no_runners_of_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    repair()
    ddp = wrap_ddp(make_gpt())
    use_a_runner_per_microbatch(ddp)
    fail_a_capture(ddp, monkeypatch)
    assert record_step(ddp) == 8
    graphs().create_cudagraphs()
    assert has_captured_runners(ddp)


def test_the_warm_up_flag_ends_with_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spy(type(graphs().torch.cuda).graph):  # type: ignore[misc]
        def __enter__(self) -> None:
            warm_up_flags.append(graphs().is_graph_warmup())

    warm_up_flags: list[bool] = []
    monkeypatch.setattr(graphs().torch.cuda, "graph", Spy, raising=False)

    def warm_up_after_a_capture() -> bool:
        warm_up_flags.clear()
        record_step(wrap_ddp(make_gpt()))
        graphs().create_cudagraphs()
        return graphs().is_graph_warmup()

    assert warm_up_after_a_capture()
    assert warm_up_flags == [True] * 8
    with pytest.MonkeyPatch.context() as patched:
        reset_graphs(patched)
        repair()
        assert not warm_up_after_a_capture()
        assert warm_up_flags == [True] * 4 + [False] * 4  # still set in forward captures; the next test shows why


def test_all_parameters_of_a_captured_layer_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are recomputed only outside of captures. Inside, recomputing would hide them from the backward graph."""
    from megatron.core.tensor_parallel import random

    for name in ("_get_all_rng_states", "_set_all_rng_states"):  # these need a device
        monkeypatch.setattr(random, name, lambda *states: ())
    monkeypatch.setattr(random, "_fork_rng", nullcontext)
    original = random.CheckpointWithoutOutput.__init__
    monkeypatch.setattr(random.CheckpointWithoutOutput, "__init__", lambda self, fp8=None: original(self, fp8=None))
    repair()
    ddp = wrap_ddp(make_gpt(recompute_granularity="selective", recompute_modules=["layernorm"]))
    record_step(ddp)
    graphs().create_cudagraphs()
    for layer in ddp.module.decoder.layers:
        (runner,) = layer.cudagraph_manager.cudagraph_runners
        assert set(runner.params_to_backprop) == set(layer.parameters())


def test_a_failed_capture_by_transformer_engine_leaves_no_flag() -> None:
    """Megatron's helper, from the point where it needs Transformer Engine."""
    helper = object.__new__(graphs().TECudaGraphHelper)
    helper._start_capturing = graphs()._set_capture_start
    with pytest.raises(AttributeError):
        helper.create_cudagraphs()
    assert graphs().is_graph_capturing()
    graphs()._set_capture_end()
    repair()
    with pytest.raises(AttributeError):
        helper.create_cudagraphs()
    assert not graphs().is_graph_capturing()


def test_a_refusal_before_any_capture_keeps_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    repair()
    record = graphs()._CudagraphGlobalRecord
    monkeypatch.setattr(record, "cudagraph_created", True)
    monkeypatch.setattr(record, "cudagraph_record", ["a late one"])
    with pytest.raises(AssertionError):
        graphs().create_cudagraphs()
    assert record.cudagraph_record == ["a late one"]


# Weak references to inputs


def te_weak_reference_stand_in(tensor: Tensor) -> Tensor:
    """Replaces Transformer Engine's make_weak_ref: a tensor on the same memory that does not keep it alive."""
    if tensor.numel() == 0:
        return torch.empty_like(tensor)
    address = tensor.detach().numpy().__array_interface__["data"][0]
    interface = {"shape": tuple(tensor.shape), "typestr": "<f4", "data": (address, False), "version": 3}
    return torch.from_numpy(np.asarray(type("Address", (), {"__array_interface__": interface})()))


class Memory(np.ndarray):
    """Memory with weak references, so that a test can see when it is freed."""


@pytest.fixture
def weak_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs(), "HAVE_TE_GRAPHS", True)
    monkeypatch.setattr(graphs(), "make_weak_ref", te_weak_reference_stand_in, raising=False)
    monkeypatch.setattr(graphs(), "TransformerEngineBaseModule", type("Absent", (), {}), raising=False)
    monkeypatch.setattr(graphs(), "is_fp8_activation_recompute_enabled", lambda: False, raising=False)
    off = type("Off", (), {"is_fp8_enabled": staticmethod(lambda: False)})
    monkeypatch.setattr(graphs(), "FP8GlobalStateManager", off, raising=False)


def capture_and_move_weights(before_move: Callable[[nn.Module], None] = lambda model: None) -> tuple[bool, Any]:
    """Whether memory that the last layer's graphs read stays allocated when its weight moves."""
    model = make_gpt()
    weight = model.decoder.layers[-1].mlp.linear_fc2.weight
    memory = weight.detach().numpy().copy().view(Memory)
    weight.data = torch.from_numpy(memory)
    memory_reference = weakref.ref(memory)
    del memory
    with torch.enable_grad():
        model(**make_batch()).mean().backward()
    graphs().create_cudagraphs()
    before_move(model)
    weight.data = weight.data.clone()
    gc.collect()
    return memory_reference() is not None, model


@pytest.mark.usefixtures("weak_references")
def test_weights_that_a_graph_reads_are_freed_until_repaired() -> None:
    alive, _ = capture_and_move_weights()
    assert not alive
    with pytest.MonkeyPatch.context() as monkeypatch:
        reset_graphs(monkeypatch)
        assert INPUT_SURFACE.probe().state is RepairState.AFFECTED
        INPUT_SURFACE.apply()
        try:
            alive, model = capture_and_move_weights()
            assert alive
            runner = list_managers(model)[-1].cudagraph_runners[0]
            owned = {tensor.data_ptr() for tensor in runner.fwd_graph_output_surface}
            held = {tensor.data_ptr() for tensor in runner.fwd_graph._rollgraph_held_inputs}
            assert not held & owned  # memory of the graph's pool may still be reused
        finally:
            INPUT_SURFACE.undo()
    assert INPUT_SURFACE.probe().state is RepairState.AFFECTED


@pytest.mark.usefixtures("weak_references")
@pytest.mark.parametrize("deleted_by", ["the function", "a switch with a reset"])
def test_inputs_of_deleted_graphs_are_freed(deleted_by: str) -> None:
    assert INPUT_SURFACE.name in {finding.name for finding in repair() if finding.state is RepairState.REPAIRED}
    by_function = deleted_by == "the function"
    alive, model = capture_and_move_weights(
        lambda model: graphs().delete_cuda_graphs() if by_function else toggle(model, "none")
    )
    assert not alive
    assert model is not None


def test_input_surfaces_are_healthy_without_transformer_engine() -> None:
    by_name = {finding.name: finding for finding in findings()}
    assert by_name["input-surfaces"].state is RepairState.CLEAR
    repair()
    assert not INPUT_SURFACE.is_active
