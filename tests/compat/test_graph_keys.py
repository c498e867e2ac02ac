from __future__ import annotations

import itertools
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest

from rollgraph.compat.graph_keys import LintKind, Remark, find_contradictions, lint_file, read_impl, read_scopes


def lint(tmp_path: Path, text: str, known: tuple[str, ...] | None = None) -> list[Remark]:
    path = tmp_path / "their.yaml"
    path.write_text(textwrap.dedent(text))
    return lint_file(path, known)


def keys_of(remarks: list[Remark], kind: LintKind) -> list[tuple[str, str]]:
    return [(remark.place.rpartition("/")[2], remark.key) for remark in remarks if remark.kind is kind]


@pytest.mark.parametrize(
    ("model", "impl", "names"),
    [
        ({}, "none", []),
        ({"enable_cuda_graph": True}, "local", []),
        ({"external_cuda_graph": True, "cuda_graph_scope": "attn,mlp"}, "transformer_engine", ["attn", "mlp"]),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, "local", []),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}, "local", ["attn"]),
        ({"enable_cuda_graph": False, "cuda_graph_scope": None}, "none", []),
    ],
)
def test_implementation_and_scopes_of_a_config(model: dict[str, Any], impl: str, names: list[str]) -> None:
    assert (read_impl(model), read_scopes(model)) == (impl, names)
    assert find_contradictions(model, {}) == []


def test_contradictions_are_those_that_megatron_core_refuses() -> None:
    """For every combination, we report a contradiction exactly if TransformerConfig refuses it."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig

    choices = {
        "enable_cuda_graph": (None, True),
        "external_cuda_graph": (None, True),
        "cuda_graph_impl": (None, "local", "transformer_engine"),
        "cuda_graph_scope": (
            None,
            "full",
            "attn,mlp",
            "full_iteration",
            "moe,moe_router",
            "moe_preprocess",
            "full,attn",
        ),
        "cpu_offloading": (None, True),
        "recompute_granularity": (None, "full"),
    }
    accepted = refused = 0
    for values in itertools.product(*choices.values()):
        model = {key: value for key, value in zip(choices, values, strict=True) if value is not None}
        contradictions = find_contradictions(model, {})
        required: dict[str, Any] = {"num_moe_experts": 2, "moe_expert_capacity_factor": 1.0}
        required |= {"moe_pad_expert_input_to_capacity": True, "moe_layer_freq": [0, 1], "num_layers": 2}
        required |= {
            "hidden_size": 8,
            "num_attention_heads": 2,
            "cpu_offloading_num_layers": 1,
            "moe_ffn_hidden_size": 8,
        }
        required |= (
            {"recompute_method": "uniform", "recompute_num_layers": 1} if "recompute_granularity" in model else {}
        )
        if model.get("cpu_offloading") and "recompute_granularity" in model:
            continue  # refused with any graph settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                TransformerConfig(**required, **model)
            except (AssertionError, ValueError):
                refused += 1
                assert contradictions, model
            else:
                accepted += 1
                # We also report an unused scope, which Megatron accepts.
                assert [text for _, text in contradictions if "without an implementation" not in text] == [], model
    assert accepted > 20
    assert refused > 100


@pytest.mark.parametrize(
    ("model", "rng", "words"),
    [
        ({"cuda_graph_impl": "local", "use_te_rng_tracker": False}, {}, "RNG tracker does not support cudagraphs!"),
        ({"cuda_graph_impl": "local"}, {"te_rng_tracker": False}, "needs Transformer Engine's RNG tracker"),
        ({"use_te_rng_tracker": True}, {"te_rng_tracker": False}, "disagree"),
        ({"inference_rng_tracker": True}, {"inference_rng_tracker": False}, "disagree"),
        ({"cuda_graph_scope": "attn"}, {}, "without an implementation"),
        ({"cuda_graph_impl": "nccl"}, {}, "no implementation 'nccl'"),
        ({"cuda_graph_impl": "none", "enable_cuda_graph": True}, {}, "but cuda_graph_impl is none"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "attn", "cuda_graph_modules": ["mlp"]}, {}, "two values"),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["mlp"]}, {}, "nothing to choose"),
    ],
)
def test_contradictions_are_described(model: dict[str, Any], rng: dict[str, Any], words: str) -> None:
    assert any(words in text for _, text in find_contradictions(model, rng))


def test_an_inference_rng_tracker_suffices() -> None:
    model = {"cuda_graph_impl": "local", "use_te_rng_tracker": False, "inference_rng_tracker": True}
    assert find_contradictions(model, {}) == []


def test_deprecated_keys_have_a_line_number(tmp_path: Path) -> None:
    text = """\
        enable_cuda_graph: false
        external_cuda_graph: true
        cuda_graph_scope: full
    """
    remarks = lint(tmp_path, text)
    assert keys_of(remarks, LintKind.DEPRECATED) == [
        ("their.yaml:1", "enable_cuda_graph"),
        ("their.yaml:2", "external_cuda_graph"),
        ("their.yaml:3", "cuda_graph_scope"),  # the name
        ("their.yaml:3", "cuda_graph_scope"),  # the value
    ]
    assert "cuda_graph_impl: transformer_engine" in remarks[1].advice
    assert not any(remark.is_serious for remark in remarks)


def test_the_right_spelling_depends_on_the_installed_version(tmp_path: Path) -> None:
    text = "cuda_graph_impl: local\n{}: [mamba, attn]\n"
    old, new = ("cuda_graph_impl", "cuda_graph_scope"), ("cuda_graph_impl", "cuda_graph_modules")
    assert keys_of(lint(tmp_path, text.format("cuda_graph_scope"), old), LintKind.DEPRECATED) == []
    assert keys_of(lint(tmp_path, text.format("cuda_graph_scope"), new), LintKind.DEPRECATED) == [
        ("their.yaml:2", "cuda_graph_scope")
    ]
    assert keys_of(lint(tmp_path, text.format("cuda_graph_modules"), old), LintKind.UNKNOWN) == [
        ("their.yaml:2", "cuda_graph_modules")
    ]


def test_an_unknown_scope_is_a_warning(tmp_path: Path) -> None:
    remarks = lint(tmp_path, "cuda_graph_impl: transformer_engine\ncuda_graph_modules: [attn, vision]\n")
    assert keys_of(remarks, LintKind.UNKNOWN) == [("their.yaml:2", "cuda_graph_modules")]
    assert "'vision'" in remarks[0].text
    assert "another version of megatron-core may have it" in remarks[0].advice
    assert not remarks[0].is_serious


def test_spaces_between_scopes_are_reported(tmp_path: Path) -> None:
    remarks = lint(tmp_path, "cuda_graph_impl: transformer_engine\ncuda_graph_scope: attn, mlp\n")
    assert keys_of(remarks, LintKind.UNKNOWN) == [("their.yaml:2", "cuda_graph_scope")]
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn, mlp"}
    with pytest.raises(KeyError):  # hence the remark
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **settings)


def test_the_single_mempool_is_never_read() -> None:
    """As the remark about this key claims of megatron-core 0.16.1."""
    core = pytest.importorskip("megatron.core")
    if core.__version__ != "0.16.1":
        pytest.skip(f"megatron-core is {core.__version__}")
    folder = Path(core.__file__).parent
    reads = [path for path in folder.rglob("*.py") if "config.cuda_graph_use_single_mempool" in path.read_text()]
    assert reads == []


def test_contradictory_trackers_of_a_bridge_config(tmp_path: Path) -> None:
    text = """\
        model:
          cuda_graph_impl: local
          use_te_rng_tracker: true
        rng:
          te_rng_tracker: false
    """
    assert ("their.yaml:3", "model.use_te_rng_tracker") in keys_of(lint(tmp_path, text), LintKind.CONTRADICTORY)
    without_tracker = text.replace("          use_te_rng_tracker: true\n", "")
    assert keys_of(lint(tmp_path, without_tracker), LintKind.CONTRADICTORY) == [("their.yaml:4", "rng.te_rng_tracker")]


def test_an_unknown_implementation_is_reported(tmp_path: Path) -> None:
    (remark,) = lint(tmp_path, "cuda_graph_impl: nccl\n")
    assert remark.text.endswith("there are none, local, transformer_engine, full_iteration")
    assert remark.advice == "write one of these"


def test_sections_inside_lists_are_checked(tmp_path: Path) -> None:
    text = """\
        stages:
          - model: {hidden_size: 8}
          - model: {cuda_graph_impl: local}
            rng:
              te_rng_tracker: false
    """
    assert keys_of(lint(tmp_path, text), LintKind.CONTRADICTORY) == [("their.yaml:5", "stages.1.rng.te_rng_tracker")]


NEMO = """\
    policy:
      megatron_cfg:
        enabled: true
        activation_checkpointing: false
        cuda_graph_impl: local
"""


def test_a_correct_nemo_config_has_no_remarks(tmp_path: Path) -> None:
    assert lint(tmp_path, NEMO) == []


@pytest.mark.parametrize(
    ("change", "kind", "line", "key"),
    [
        (("enabled: true", "enabled: false"), LintKind.CAPTURES_NOTHING, 5, "cuda_graph_impl"),
        (("cuda_graph_impl: local", "enable_cuda_graph: True"), LintKind.CAPTURES_NOTHING, 5, "enable_cuda_graph"),
        (("impl: local", "impl: transformer_engine"), LintKind.CAPTURES_NOTHING, 5, "cuda_graph_impl"),
        (("impl: local", "impl: full_iteration"), LintKind.CAPTURES_NOTHING, 5, "cuda_graph_impl"),
        (("checkpointing: false", "checkpointing: true"), LintKind.CONTRADICTORY, 4, "activation_checkpointing"),
        (("impl: local", "warmup_steps: 3"), LintKind.NO_EFFECT, 5, "cuda_graph_warmup_steps"),
    ],
)
def test_mistakes_in_a_nemo_config_are_reported(
    tmp_path: Path, change: tuple[str, str], kind: LintKind, line: int, key: str
) -> None:
    keys = keys_of(lint(tmp_path, NEMO.replace(*change)), kind)
    assert keys == [(f"their.yaml:{line}", f"policy.megatron_cfg.{key}")]


CURRENT, LATER = ("cuda_graph_impl", "cuda_graph_scope"), ("cuda_graph_impl", "cuda_graph_modules")


@pytest.mark.parametrize("known", [None, CURRENT, LATER], ids=["none", "0.16.1", "later"])
@pytest.mark.parametrize(
    ("graph_keys", "kinds", "advice", "corrected"),
    [
        ("impl: local, cuda_graph_scope: attn", "no effect", "remove it", "impl: local"),
        ("impl: local, cuda_graph_scope: full", "no effect", "remove it", "impl: local"),
        ("impl: local, cuda_graph_scope: full_iteration", "no effect", "remove it", "impl: local"),
        (
            "impl: local, cuda_graph_scope: moe_router",
            "no effect",
            "call it cuda_graph_modules, or remove it",
            "impl: local, cuda_graph_modules: moe_router",
        ),
        (
            "impl: local, cuda_graph_scope: [moe], cuda_graph_modules: [moe_router]",
            "no effect",
            "remove it",
            "impl: local, cuda_graph_modules: [moe_router]",
        ),
        (
            "impl: local, cuda_graph_modules: full_iteration",
            "captures nothing",
            "use cuda_graph_impl: local, and no scope",
            "impl: local",
        ),
        (
            "scope: attn",
            "contradictory",
            "remove it; cuda_graph_impl: local captures whole layers",
            "impl: local",
        ),
    ],
)
def test_following_the_advice_on_a_nemo_config_leaves_no_remark(
    tmp_path: Path, known: tuple[str, ...] | None, graph_keys: str, kinds: str, advice: str, corrected: str
) -> None:
    """NeMo-RL passes `cuda_graph_modules` on, under Megatron's name for it, but drops `cuda_graph_scope`."""
    text = "policy: {megatron_cfg: {enabled: true, cuda_graph_KEYS}}\n"
    remarks = lint(tmp_path, text.replace("KEYS", graph_keys), known)
    remarks = [remark for remark in remarks if remark.kind not in (LintKind.DEPRECATED, LintKind.UNKNOWN)]
    assert [(remark.kind, remark.advice) for remark in remarks] == [(kinds, advice)]
    assert lint(tmp_path, text.replace("KEYS", corrected), known) == []


def test_a_scope_that_nemo_drops_is_not_reported_as_eager(tmp_path: Path) -> None:
    (remark,) = lint(tmp_path, NEMO + "        cuda_graph_scope: attn\n", CURRENT)
    assert not remark.is_serious  # the implementation is passed on, so layers are captured
    assert "but not cuda_graph_scope; without it, an implementation captures whole layers" in remark.text
    checkpointing = NEMO.replace("checkpointing: false", "checkpointing: true")
    remarks = lint(tmp_path, checkpointing + "        cuda_graph_scope: full_iteration\n", CURRENT)
    assert keys_of(remarks, LintKind.CONTRADICTORY) == [
        ("their.yaml:4", "policy.megatron_cfg.activation_checkpointing")
    ]


@pytest.mark.parametrize("flag", ["enable_cuda_graph", "external_cuda_graph"])
def test_flags_that_nemo_drops_are_reported(tmp_path: Path, flag: str) -> None:
    remarks = lint(tmp_path, NEMO.replace("cuda_graph_impl: local", f"{flag}: true"))
    assert [remark.kind for remark in remarks] == [LintKind.DEPRECATED, LintKind.CAPTURES_NOTHING]
    assert {remark.advice for remark in remarks} == {
        "write cuda_graph_impl: local"
    }  # and not external_cuda_graph, which captures nothing


def test_graph_keys_of_dtensor_workers_capture_nothing(tmp_path: Path) -> None:
    remarks = lint(tmp_path, "policy:\n  dtensor_cfg:\n    cuda_graph_impl: local\n")
    assert keys_of(remarks, LintKind.CAPTURES_NOTHING) == [("their.yaml:3", "policy.dtensor_cfg.cuda_graph_impl")]


def test_graph_keys_of_generation_need_graph_managers(tmp_path: Path) -> None:
    text = """\
        policy:
          megatron_cfg: {enabled: true, cuda_graph_impl: none}
          generation:
            backend: megatron
            mcore_generation_config:
              cuda_graph_impl: local
    """
    key = "policy.generation.mcore_generation_config.cuda_graph_impl"
    assert keys_of(lint(tmp_path, text), LintKind.CAPTURES_NOTHING) == [("their.yaml:6", key)]
    assert lint(tmp_path, text.replace("impl: none", "impl: local")) == []


def test_defaults_and_interpolations_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("impl: local\nmodel:\n  cuda_graph_impl: ${impl}\n")
    text = "defaults: base.yaml\nmodel:\n  use_te_rng_tracker: False\n"
    assert keys_of(lint(tmp_path, text), LintKind.CONTRADICTORY) == [("their.yaml:3", "model.use_te_rng_tracker")]
    assert lint(tmp_path, text + "impl: none\n") == []
