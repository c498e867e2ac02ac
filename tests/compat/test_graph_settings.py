from __future__ import annotations

import warnings
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from rollgraph.compat.megatron.graph_settings import GraphSettingsError, graph_overrides


def transformer_config(**settings: Any) -> Any:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **settings)


ON = {"te_rng_tracker": True, "inference_rng_tracker": False}
OFF = {"te_rng_tracker": False, "inference_rng_tracker": False}


@pytest.mark.parametrize(
    ("cfg", "impl", "scope", "rng"),
    [
        ({}, "none", [], OFF),
        ({"cuda_graph_impl": "local"}, "local", [], ON),
        ({"enable_cuda_graph": True}, "local", [], ON),
        ({"enable_cuda_graph": False}, "none", [], OFF),
        ({"external_cuda_graph": True, "cuda_graph_scope": "attn, mlp"}, "transformer_engine", ["attn", "mlp"], ON),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full"]}, "local", [], ON),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": "attn"}, "local", ["attn"], ON),
        ({"cuda_graph_impl": "full_iteration"}, "local", ["full_iteration"], ON),
        ({"cuda_graph_impl": "none", "use_te_rng_tracker": True}, "none", [], ON),
        ({"use_te_rng_tracker": False, "inference_rng_tracker": True, "cuda_graph_impl": "local"}, "local", [],
         {"te_rng_tracker": False, "inference_rng_tracker": True}),
    ],
)  # fmt: skip
def test_settings_of_a_mapping(cfg: dict[str, Any], impl: str, scope: list[str], rng: dict[str, bool]) -> None:
    overrides = graph_overrides(cfg)
    assert overrides.rng == rng
    assert overrides.transformer == {
        "cuda_graph_impl": impl,
        "cuda_graph_scope": scope,
        "use_te_rng_tracker": rng["te_rng_tracker"],
        "inference_rng_tracker": rng["inference_rng_tracker"],
    }
    config = transformer_config(**overrides.transformer)  # accepts them as keyword arguments
    assert config.cuda_graph_impl == impl
    assert [member.name for member in config.cuda_graph_scope] == scope


def test_settings_are_found_in_sections_and_namespaces() -> None:
    graphs = {"cuda_graph_impl": "local"}
    expected = graph_overrides(graphs)
    assert graph_overrides({"policy": {"megatron_cfg": graphs}}) == expected
    assert graph_overrides({"megatron_cfg": graphs}) == expected
    assert graph_overrides({"model": graphs, "rng": {"te_rng_tracker": True}}) == expected
    assert graph_overrides(SimpleNamespace(model=SimpleNamespace(**graphs), rng=None)) == expected
    parsed = Namespace(cuda_graph_impl="local", cuda_graph_scope="full", enable_cuda_graph=False, te_rng_tracker=True)
    assert graph_overrides(parsed) == expected


def test_settings_of_a_constructed_config() -> None:
    finished = transformer_config(enable_cuda_graph=True, cuda_graph_scope="attn")
    assert finished.enable_cuda_graph  # together with cuda_graph_impl, which the constructor would refuse
    overrides = graph_overrides(finished)
    assert overrides.transformer["cuda_graph_impl"] == "local"
    assert overrides.transformer["cuda_graph_scope"] == ["attn"]


def test_apply_to_a_constructed_config() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.enums import CudaGraphScope

    config, rng = transformer_config(enable_cuda_graph=True), SimpleNamespace(**OFF)
    graph_overrides({"external_cuda_graph": True, "cuda_graph_scope": "attn"}).apply(config, rng)
    assert config.cuda_graph_impl == "transformer_engine"
    assert config.cuda_graph_scope == [CudaGraphScope.attn]  # a string would silently match no scope
    assert config.use_te_rng_tracker
    assert vars(rng) == ON
    assert not config.enable_cuda_graph
    config.__post_init__()  # passes Megatron's own checks
    graph_overrides({"cuda_graph_impl": "none"}).apply(config, rng)
    assert (config.cuda_graph_impl, config.cuda_graph_scope, config.use_te_rng_tracker) == ("none", [], False)
    assert vars(rng) == OFF


def test_apply_to_a_config_with_cuda_graph_modules() -> None:
    pytest.importorskip("megatron.core")
    config = SimpleNamespace(
        cuda_graph_impl="none", cuda_graph_modules=None, use_te_rng_tracker=False, inference_rng_tracker=False
    )
    graph_overrides({"cuda_graph_impl": "local", "cuda_graph_scope": "mlp"}).apply(config)
    assert [member.name for member in config.cuda_graph_modules] == ["mlp"]
    graph_overrides({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}).apply(config)
    assert (config.cuda_graph_impl, config.cuda_graph_modules) == ("full_iteration", [])


def test_a_setting_that_does_not_fit_changes_nothing() -> None:
    config = transformer_config()
    before = dict(vars(config))
    with pytest.warns(UserWarning, match="unknown graph scope vision: passed through"):
        overrides = graph_overrides({"cuda_graph_impl": "local", "cuda_graph_modules": ["vision"]})
    with pytest.raises(GraphSettingsError, match=r"has no scope vision; it has full_iteration, attn"):
        overrides.apply(config)
    with pytest.raises(GraphSettingsError, match=r"SimpleNamespace has no te_rng_tracker, inference_rng_tracker"):
        graph_overrides({"cuda_graph_impl": "local"}).apply(config, SimpleNamespace())
    assert vars(config) == before


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"num_moe_experts": 2, "moe_token_dispatcher_type": "allgather", "add_bias_linear": False}


@pytest.mark.parametrize(
    ("settings", "graphs", "message"),
    [
        (FULL, {"activation_checkpointing": True}, "full recompute is only supported with full iteration CUDA graph"),
        ({}, {"cuda_graph_scope": "moe"}, "moe cuda graph is only supported for MoE"),
        ({}, {"cuda_graph_scope": "attn,moe_router"}, "moe cuda graph is only supported for MoE"),
    ],
)
def test_settings_that_the_constructor_refuses_are_not_applied(
    settings: dict[str, Any], graphs: dict[str, Any], message: str
) -> None:
    config, rng = transformer_config(**settings), SimpleNamespace(**OFF)
    before = dict(vars(config))
    overrides = graph_overrides({"cuda_graph_impl": "local", **graphs})
    with pytest.raises(AssertionError, match=message):
        transformer_config(**settings, **overrides.transformer)
    with pytest.raises(GraphSettingsError, match=f"^TransformerConfig refuses cuda_graph_impl: local.*: {message}"):
        overrides.apply(config, rng)
    assert vars(config) == before
    assert vars(rng) == OFF


def test_the_normalized_scope_is_applied() -> None:
    overrides = graph_overrides({"cuda_graph_impl": "local", "cuda_graph_scope": "moe_router"})
    constructed, config = transformer_config(**MOE, **overrides.transformer), transformer_config(**MOE)
    modules = config.recompute_modules
    overrides.apply(config)
    assert config.cuda_graph_scope == constructed.cuda_graph_scope
    assert [member.name for member in config.cuda_graph_scope] == ["moe_router", "moe_preprocess"]
    assert config.recompute_modules is modules


def test_unrelated_mistakes_of_a_config_are_ignored() -> None:
    config = transformer_config()
    config.tensor_model_parallel_size = 3  # with 2 heads
    with pytest.raises(ValueError, match="must be a multiple of"):
        config.__post_init__()
    graph_overrides({"cuda_graph_impl": "local"}).apply(config)
    assert config.cuda_graph_impl == "local"


def test_the_error_lists_all_contradictions() -> None:
    cfg = {"enable_cuda_graph": True, "external_cuda_graph": True, "use_te_rng_tracker": False}
    with pytest.raises(GraphSettingsError) as raised:
        graph_overrides(cfg)
    assert "external_cuda_graph: enable_cuda_graph and external_cuda_graph are both true" in str(raised.value)
    assert "use_te_rng_tracker: cuda_graph_impl: local needs" in str(raised.value)


@pytest.mark.gpu  # a CPU build of PyTorch has no graph-safe generators
def test_the_seed_arguments_give_a_graph_safe_tracker() -> None:
    """Without Transformer Engine, te_rng_tracker alone gives a tracker that is not graph-safe."""
    pytest.importorskip("megatron.core")
    from megatron.core.tensor_parallel import random

    if random.HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    arguments = graph_overrides({"cuda_graph_impl": "local"}).seed_arguments
    te = arguments.pop("te_rng_tracker")
    try:
        random.initialize_rng_tracker(use_te_rng_tracker=te, force_reset=True)
        assert not random._CUDA_RNG_STATE_TRACKER.use_cudagraphable_rng
        random.initialize_rng_tracker(use_te_rng_tracker=te, force_reset=True, **arguments)
        assert random._CUDA_RNG_STATE_TRACKER.use_cudagraphable_rng
    finally:
        random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = None, False


@pytest.mark.gpu
def test_a_layer_can_be_built_with_these_settings() -> None:
    """A graph manager checks the RNG tracker, so building fails without any one of the settings."""
    pytest.importorskip("megatron.core")
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.spec_utils import build_module

    overrides = graph_overrides({"enable_cuda_graph": True})
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        random.model_parallel_cuda_manual_seed(1, force_reset_rng=True, **overrides.seed_arguments)
        config = transformer_config(**overrides.transformer)
        with torch.cuda.stream(torch.cuda.current_stream()):  # a manager changes the current stream permanently
            layer = build_module(get_gpt_layer_local_spec(), config=config)
        assert layer.cudagraph_manager is not None
    finally:
        random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = None, False
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
