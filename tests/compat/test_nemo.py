from __future__ import annotations

import argparse
from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from rollgraph.commands import config as command
from rollgraph.compat.graph_keys import lint
from rollgraph.compat.nemo import Status, Translation, import_nemo
from rollgraph.compat.nemo.ledger import short_yaml
from rollgraph.compat.nemo.translation import translate_tree
from rollgraph.compat.omegaconf_yaml import load_composed
from rollgraph.config import Config, ConfigError, capture_scopes, load_config, parse_config
from rollgraph.config.yaml_tree import Node, strip_locations
from rollgraph.inputs.inputs import make_algorithm
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.rl.algorithms.advantages import centered, leave_one_out

DATA = Path(__file__).parent / "data"
SMALL = """\
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 9}
policy:
  model_name: m
  max_total_sequence_length: 64
"""


def import_and_load(path: Path, tmp_path: Path) -> tuple[Config, Translation]:
    """Import, write the result and load it, as users do."""
    translation = import_nemo(path)
    ours = tmp_path / "ours.yaml"
    ours.write_text(translation.to_yaml())
    return load_config(ours), translation


def translate(tmp_path: Path, text: str) -> tuple[Config, dict[str, tuple[Status, str]]]:
    path = tmp_path / "their.yaml"
    path.write_text(text)
    config, translation = import_and_load(path, tmp_path)
    return config, statuses(translation)


def statuses(translation: Translation) -> dict[str, tuple[Status, str]]:
    return {line.key: (line.status, line.text) for line in translation.lines}


def leaves(value: Any, key: str = "") -> list[str]:
    if not isinstance(value, dict) or not value:
        return [key]
    return [leaf for name, inner in value.items() for leaf in leaves(inner, f"{key}.{name}".lstrip("."))]


@pytest.mark.parametrize("name", ["grpo_base", "grpo_megatron", "grpo_megatron_current"])
def test_every_key_is_listed_once_and_known(name: str, tmp_path: Path) -> None:
    path = DATA / f"{name}.yaml"
    config, translation = import_and_load(path, tmp_path)
    assert [line.key for line in translation.lines] == leaves(strip_locations(load_composed(path)))
    assert [line for line in translation.lines if line.text == "not known here"] == []
    load_algorithm(config.algorithm.name, {**config.algorithm.options, "kl_coef": config.algorithm.kl_coef})
    for line in translation.lines:  # each line says what the written file has
        if line.status is Status.TRANSLATED and line.text.count(": ") == 1:
            key, _, value = line.text.partition(" (")[0].partition(": ")
            setting: Any = translation.settings
            for part in key.split("."):
                setting = setting[part]
            assert short_yaml(setting) == value, line


def test_translation_of_a_dtensor_config(tmp_path: Path) -> None:
    config, translation = import_and_load(DATA / "grpo_base.yaml", tmp_path)
    assert (config.seed, config.steps, config.output) == (7, 300, "results/small")
    assert (config.model.path, config.model.dtype, config.model.checkpointing) == ("acme/Tiny-1B", "bfloat16", True)
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt) == (16, 8)
    assert (config.data.max_prompt_tokens, config.rollout.max_tokens) == (256, 768)  # ${sub:...} of the total
    assert config.rollout.stop == ("</answer>",)
    assert config.train.microbatch_tokens == 4096  # ${mul:...}
    assert config.algorithm.name == "dapo"  # like NeMo-RL, it averages the loss over all tokens
    assert config.algorithm.options["dynamic_sampling"] is False  # its default is true
    assert config.algorithm.options["clip_high"] == 0.24
    assert config.algorithm.minibatches == 2  # 16 x 8 / 64
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.clip_norm) == (3e-6, (0.9, 0.95), 0.5)
    assert (config.optimizer.schedule, config.optimizer.warmup_steps) == ("constant", 30)
    assert (config.reward.functions[0].name, config.reward.workers) == ("math_verify", 4)
    assert config.log.sinks is None
    ledger = statuses(translation)
    assert ledger["policy.megatron_cfg.optimizer.lr"] == (Status.IGNORED, "policy.dtensor_cfg is the backend in use")
    assert {key for key, (status, _) in ledger.items() if status is Status.UNSUPPORTED} == {
        "grpo.use_leave_one_out_baseline",
        "data.train.split_validation_size",
        "data.default.prompt_file",
    }


def test_translation_of_deprecated_graph_keys(tmp_path: Path) -> None:
    config, translation = import_and_load(DATA / "grpo_megatron.yaml", tmp_path)
    ledger = statuses(translation)
    assert (config.graph.impl, config.graph.scope) == ("auto", ("attn", "mlp"))
    assert ledger["policy.megatron_cfg.enable_cuda_graph"] == (Status.TRANSLATED, "graph.impl: auto")
    assert ledger["policy.megatron_cfg.use_te_rng_tracker"][0] is Status.IGNORED
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.schedule) == (4e-6, (0.9, 0.98), "cosine")
    assert config.optimizer.warmup_steps == 13
    assert ledger["policy.megatron_cfg.optimizer.min_lr"] == (Status.UNSUPPORTED, "the learning rate ends at 0")
    too_many = (Status.UNSUPPORTED, "ranks of a tensor parallel group must be on one node, and each has 1")
    assert ledger["policy.megatron_cfg.tensor_model_parallel_size"] == too_many
    assert (config.checkpoint.every, config.checkpoint.keep_best) == (300, 0)  # only the last step is saved
    assert ledger["checkpointing.save_period"] == (Status.IGNORED, "checkpointing is off")
    assert (config.log.sinks, config.log.wandb) == (("jsonl", "wandb"), {"project": "small", "name": "run-7"})
    locations = {line.key: Path(line.location).name for line in translation.lines}
    assert locations["grpo.seed"] == "grpo_base.yaml:15"
    assert locations["grpo.num_generations_per_prompt"] == "grpo_megatron.yaml:5"


def test_translation_of_current_graph_keys(tmp_path: Path) -> None:
    config, _ = import_and_load(DATA / "grpo_megatron_current.yaml", tmp_path)
    assert (config.graph.impl, config.graph.scope, config.graph.warmup) == ("auto", ("layer",), 5)
    assert config.algorithm.name == "grpo"  # token_level_loss: false
    assert (config.data.train, config.data.validation) == ("data/questions.jsonl", "data/held_out.jsonl")
    assert config.data.shuffle is False
    assert config.reward.functions[0].options == {"column": "solution"}
    assert config.optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("graph_keys", "ranks", "impl", "scope"),
    [
        ("cuda_graph_impl: local, cuda_graph_scope: full_iteration", 1, "auto", ("step",)),
        ("cuda_graph_impl: local, cuda_graph_scope: full_iteration", 8, "auto", ("layer",)),
        ("cuda_graph_impl: full_iteration, cuda_graph_modules: []", 1, "auto", ("step",)),
        ("cuda_graph_impl: full_iteration, cuda_graph_modules: []", 8, "auto", ("layer",)),
        ("external_cuda_graph: true, cuda_graph_scope: [mlp]", 8, "auto", ("mlp",)),
        ("cuda_graph_impl: none", 1, "auto", None),  # vLLM still captures generation
        ("cuda_graph_impl: local, cuda_graph_modules: [moe_router]", 1, "auto", None),
    ],
)
def test_graph_keys_set_impl_and_scope(
    tmp_path: Path, graph_keys: str, ranks: int, impl: str, scope: tuple[str, ...] | None
) -> None:
    text = f"{SMALL}  megatron_cfg: {{enabled: true, {graph_keys}}}\ncluster: {{gpus_per_node: {ranks}}}\n"
    config, _ = translate(tmp_path, text)
    assert (config.graph.impl, config.graph.scope) == (impl, scope)


@pytest.mark.parametrize(
    ("megatron", "tensor_parallel", "is_translated"), [("true", 2, True), ("false", 4, True), ("true", 3, False)]
)
def test_tensor_parallel_is_translated_if_it_fits_a_node(
    tmp_path: Path, megatron: str, tensor_parallel: int, is_translated: bool
) -> None:
    """The size comes from the enabled backend; the other one is ignored."""
    theirs = {"true": (tensor_parallel, 16), "false": (16, tensor_parallel)}[megatron]
    sections = f"  megatron_cfg: {{enabled: {megatron}, tensor_model_parallel_size: {theirs[0]}}}\n"
    sections += f"  dtensor_cfg: {{tensor_parallel_size: {theirs[1]}}}\n"
    config, ledger = translate(tmp_path, f"{SMALL}{sections}cluster: {{gpus_per_node: 8, num_nodes: 3}}\n")
    key = {"true": "megatron_cfg.tensor_model_parallel_size", "false": "dtensor_cfg.tensor_parallel_size"}[megatron]
    assert ledger[f"policy.{key}"][0] is (Status.TRANSLATED if is_translated else Status.UNSUPPORTED)
    assert config.tensor_parallel == (tensor_parallel if is_translated else 1)


def test_eager_training_and_generation_mean_no_graphs(tmp_path: Path) -> None:
    text = SMALL + "  megatron_cfg: {enabled: true, cuda_graph_impl: none}\n"
    config, ledger = translate(tmp_path, text + "  generation: {vllm_cfg: {enforce_eager: True}}\n")
    assert config.graph.impl == "none"
    assert ledger["policy.generation.vllm_cfg.enforce_eager"] == (Status.TRANSLATED, "graph.impl: none")


def test_contradictory_graph_keys_are_unsupported(tmp_path: Path) -> None:
    keys = "enable_cuda_graph: true, external_cuda_graph: true"
    config, ledger = translate(tmp_path, f"{SMALL}  megatron_cfg: {{enabled: true, {keys}}}\n")
    assert ledger["policy.megatron_cfg.external_cuda_graph"][0] is Status.UNSUPPORTED
    assert ledger["policy.megatron_cfg.enable_cuda_graph"][0] is Status.UNSUPPORTED
    assert config.graph.impl == "auto"  # our default


def test_sequence_level_ratios_mean_gspo(tmp_path: Path) -> None:
    loss = (
        "{sequence_level_importance_ratios: true, token_level_loss: false, ratio_clip_min: 3e-4, ratio_clip_max: 4e-4"
    )
    loss += ", use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 2}"
    config, _ = translate(tmp_path, f"{SMALL}loss_fn: {loss}\n")
    assert config.algorithm.name == "gspo"
    assert config.algorithm.options["clip_low"] == 3e-4
    assert config.algorithm.options["importance_cap"] == 2.0


@pytest.mark.parametrize("section", ["{}", "adv_estimator: {{name: grpo, {}}}"], ids=["earlier", "later"])
@pytest.mark.parametrize("normalized", [True, False])
def test_leave_one_out_is_unsupported_with_the_difference(tmp_path: Path, section: str, normalized: bool) -> None:
    keys = f"normalize_rewards: {normalized}, use_leave_one_out_baseline: true"
    text = SMALL.replace("max_num_steps: 9", f"max_num_steps: 9, {section.format(keys)}")
    config, ledger = translate(tmp_path, text)
    (key,) = [key for key in ledger if key.endswith("use_leave_one_out_baseline")]
    status, reason = ledger[key]
    assert (config.algorithm.name, status) == ("grpo", Status.UNSUPPORTED)
    if normalized:
        assert "mean and standard deviation of the other samples" in reason
        return
    assert "advantages are 3/4 of NeMo-RL's; rloo subtracts the mean of the others, but sums over the tokens" in reason
    rewards = [1.0, 0.0, 0.0, 0.5]
    assert centered(rewards) == pytest.approx([3 / 4 * value for value in leave_one_out(rewards)])
    assert load_algorithm("rloo").weights([2, 6]) != load_algorithm("grpo").weights([2, 6])  # hence not rloo


def test_overlong_shaping_becomes_an_option_of_dapo(tmp_path: Path) -> None:
    shaping = "{enabled: true, overlong_buffer_length: 8, overlong_buffer_penalty: 1, max_response_length: 32}"
    text = SMALL.replace("max_num_steps: 9", f"max_num_steps: 9, reward_shaping: {shaping}")
    config, _ = translate(tmp_path, text + "loss_fn: {token_level_loss: true}\n")
    assert config.algorithm.options == {"dynamic_sampling": False, "max_tokens": 32, "overlong_buffer": 8}


def test_values_that_break_our_rules_are_adapted_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "their.yaml"
    path.write_text(
        SMALL + "  train_micro_batch_size: 1\n" + "  megatron_cfg: {enabled: true, scheduler: {lr_warmup_iters: 50}}\n"
    )
    config, translation = import_and_load(path, tmp_path)
    assert config.train.microbatch_tokens == 128  # 64 tokens of prompt and 64 of completion
    assert config.optimizer.warmup_steps == 9
    assert any("warmup_steps was 50, more than the 9 updates of the run" in text for text in translation.to_do)


def test_a_custom_environment_is_unsupported(tmp_path: Path) -> None:
    text = SMALL + "data: {default: {env_name: code}}\nenv: {code: {num_workers: 2}, math: {num_workers: 3}}\n"
    config, ledger = translate(tmp_path, text)
    assert config.reward.functions[0].name == "rewards.py:reward"
    assert ledger["env.code.num_workers"][0] is Status.UNSUPPORTED
    assert ledger["env.math.num_workers"] == (Status.IGNORED, "no dataset uses it")
    assert config.reward.workers == 0


def test_a_verifier_that_scores_differently_is_reported(tmp_path: Path) -> None:
    """NeMo-RL's public grpo_math_1B_dapo_megatron.yaml uses it, and warns that hf_math_verify scores higher."""
    path = tmp_path / "their.yaml"
    path.write_text(SMALL + "env: {math: {math_verify_impl: dapo_math_verify, verifier_type: english_multichoice}}\n")
    config, translation = import_and_load(path, tmp_path)
    ledger = statuses(translation)
    status, reason = ledger["env.math.math_verify_impl"]
    assert (status, config.reward.functions[0].name) == (Status.UNSUPPORTED, "math_verify")
    assert "higher than those of dapo_math_verify" in reason
    assert "# To do: reward.functions: math_verify compares" in translation.to_yaml()
    assert ledger["env.math.verifier_type"][0] is Status.UNSUPPORTED
    path.write_text(SMALL + "env: {math: {math_verify_impl: hf_math_verify}}\n")
    assert statuses(import_nemo(path))["env.math.math_verify_impl"][0] is Status.TRANSLATED


@pytest.mark.parametrize("period", [0, -1])
def test_a_period_of_zero_means_no_validation(tmp_path: Path, period: int) -> None:
    text = SMALL.replace("max_num_steps: 9", f"max_num_steps: 9, val_period: {period}")
    config, ledger = translate(tmp_path, text + "data: {validation: {data_path: a.jsonl}}\n")
    assert config.data.validation is None
    assert ledger["grpo.val_period"] == (Status.TRANSLATED, "data.validation: null (no validation)")


def test_an_unknown_key_is_unsupported(tmp_path: Path) -> None:
    _, ledger = translate(tmp_path, SMALL + "  brand_new: 3\n")
    assert ledger["policy.brand_new"] == (Status.UNSUPPORTED, "not known here")


# Mistakes in a NeMo-RL config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sft: {}\npolicy: {model_name: m}\n", "not a GRPO config of NeMo-RL: it has no `grpo`, but sft, policy"),
        ("grpo: {}\npolicy: {precision: x}\n", "their.yaml:2: policy.model_name: required, but missing"),
        (f"{SMALL}  a: ${{policy.nam}}\n", "their.yaml:5: policy.a: ${policy.nam}: there is no key policy.nam"),
        (f"{SMALL}  a: ${{pow:2,3}}\n", "their.yaml:5: policy.a: ${pow:2,3}: no resolver 'pow'"),
        (f"{SMALL}  a: ${{oc.env:NO_SUCH_NAME}}\n", "the environment variable NO_SUCH_NAME is not set"),
        (f"{SMALL}  a: ${{policy.b}}\n  b: ${{policy.a}}\n", "refers to itself: policy.a -> policy.b -> policy.a"),
        (f"{SMALL}  a: ${{policy\n", "an interpolation is not closed"),
        (f"{SMALL}  model_name: n\n", "their.yaml:5: model_name: given twice"),
        (f"{SMALL}x: &x {{a: 1}}\ny: {{<<: *x, a: 2,\n  a: 3}}\n", "their.yaml:7: a: given twice"),
        (f"{SMALL}  a: [\n", "not YAML"),
        ("defaults: nowhere.yaml\n", "their.yaml:1: defaults: there is no file"),
        ("defaults: their.yaml\n", "their.yaml:1: defaults: the files form a cycle: their.yaml -> their.yaml"),
        ("- a\n", "their.yaml:1: expected keys, got list"),
    ],
)
def test_mistakes_in_a_file_are_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "their.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        import_nemo(path)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("checkpointing.save_period", None, "checkpoint.every: expected whole number ≥ 1, got null"),
        ("policy.megatron_cfg.cuda_graph_warmup_steps", None, "graph.warmup: expected whole number ≥ 1, got null"),
        ("policy.generation.temperature", 0.0, "rollout.temperature: expected number ≥ 0.01, got 0.0"),
        ("policy.generation.temperature", "hot", "'hot' cannot be rollout.temperature"),
        ("policy.generation.stop_strings", ["a", 1], "rollout.stop[1]: expected text, got 1"),
        ("policy.max_total_sequence_length", "many", "expected a whole number, got 'many'"),
        ("policy.max_total_sequence_length", 0, "expected a whole number ≥ 1, got 0"),
        ("grpo.max_num_steps", -1, "expected a whole number ≥ 1, got -1"),
        ("grpo.num_generations_per_prompt", 1, "grpo compares the samples of a prompt, so it needs 2 or more"),
        ("loss_fn.ratio_clip_min", 2, "algorithm.options.clip_low: expected a number from 0 to 1, got 2.0"),
        ("loss_fn.reference_policy_kl_type", "k9", "algorithm.options.kl_estimator: expected k1 or k2 or k3, got 'k9'"),
    ],
)
def test_a_refused_value_makes_only_its_key_unsupported(key: str, value: Any, reason: str) -> None:
    whole = strip_locations(load_composed(DATA / "grpo_megatron_current.yaml"))
    whole["checkpointing"]["enabled"] = True
    whole["policy"]["train_global_batch_size"] = 16  # one sample of each prompt
    before = statuses(translate_tree(as_node(whole), "their.yaml"))
    *sections, name = key.split(".")
    reduce(dict.__getitem__, sections, whole)[name] = value
    translation = translate_tree(as_node(whole), "their.yaml")
    parse_config(translation.to_yaml())
    after = statuses(translation)
    assert after[key][0] is Status.UNSUPPORTED
    assert reason in after[key][1]
    assert {key for key in after if after[key][0] is not before[key][0]} == {key}


def test_a_dataset_path_must_be_text(tmp_path: Path) -> None:
    config, ledger = translate(tmp_path, SMALL + "data: {train: {data_path: 5}}\n")
    assert ledger["data.train.data_path"] == (Status.UNSUPPORTED, "expected the path of a file")
    assert config.data.train == "data/train.jsonl"


@pytest.mark.parametrize(
    "wrong_value",
    [None, "x", *(pytest.param(wrong_value, marks=pytest.mark.slow) for wrong_value in (-1, [1]))],
    ids=repr,
)
def test_no_value_aborts_a_translation(wrong_value: Any) -> None:
    """With a wrong value for any translated key, the other keys are still translated and pass the checks of a run."""
    whole = strip_locations(load_composed(DATA / "grpo_base.yaml"))
    lines = translate_tree(as_node(whole), "their.yaml").lines
    keys = [line.key for line in lines if line.status is Status.TRANSLATED and line.key != "policy.model_name"]
    assert len(keys) > 30
    for key in keys:
        changed = deepcopy(whole)
        *sections, name = key.split(".")
        reduce(dict.__getitem__, sections, changed)[name] = wrong_value
        translation = translate_tree(as_node(changed), "their.yaml")
        assert [line.key for line in translation.lines] == leaves(changed)
        config = parse_config(translation.to_yaml())
        capture_scopes(config, ranks=1)
        make_algorithm(config)


@pytest.mark.parametrize(
    ("graph_keys", "ranks"),
    [("cuda_graph_impl: full_iteration, ", 8), ("cuda_graph_impl: local, cuda_graph_modules: [attn, mlp], ", 1)],
)
def test_activation_checkpointing_is_translated_for_any_scope(tmp_path: Path, graph_keys: str, ranks: int) -> None:
    keys = f"{{enabled: true, {graph_keys}activation_checkpointing: true}}"
    text = f"{SMALL}  megatron_cfg: {keys}\ncluster: {{gpus_per_node: {ranks}, num_nodes: 1}}\n"
    config, ledger = translate(tmp_path, text)
    capture_scopes(config, ranks)  # as plan and train do
    assert config.model.checkpointing is True
    line = ledger["policy.megatron_cfg.activation_checkpointing"]
    assert line == (Status.TRANSLATED, "model.checkpointing: true")


SLOW_VALUES = [
    pytest.param(wrong_value, marks=pytest.mark.slow) for wrong_value in (True, 0, -1, 1.5, "", [], [1], [{"a": [1]}])
]


@pytest.mark.parametrize("wrong_value", [None, "x", {"a": 1}, *SLOW_VALUES], ids=repr)
def test_a_section_of_another_type_is_refused_or_listed(tmp_path: Path, wrong_value: Any) -> None:
    """With a wrong value for any section, or for a setting on which others depend, there is no traceback."""
    whole = strip_locations(load_composed(DATA / "grpo_megatron.yaml"))
    sections = [path for path, value in walk(whole) if isinstance(value, dict) or path[-1] in ("env_name", "scheduler")]
    assert len(sections) > 30
    for path in sections:
        changed = deepcopy(whole)
        reduce(dict.__getitem__, path[:-1], changed)[path[-1]] = wrong_value
        tree = as_node(changed)
        lint(tree)
        try:
            lines = translate_tree(tree, "their.yaml").lines
        except ConfigError:
            continue
        assert [line.key for line in lines] == leaves(changed), path


def walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, name), inner
        yield from walk(inner, (*path, name))


def as_node(value: Any) -> Node:
    if isinstance(value, dict):
        return Node({name: as_node(inner) for name, inner in value.items()}, "their.yaml:1")
    return Node([as_node(inner) for inner in value] if isinstance(value, list) else value, "their.yaml:1")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file or directory"):
        import_nemo(tmp_path / "nowhere.yaml")


def test_a_cycle_of_defaults_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: b.yaml\n")
    (tmp_path / "b.yaml").write_text("x: 1\ndefaults: [a.yaml]\n")
    with pytest.raises(
        ConfigError, match=r"b\.yaml:2: defaults: the files form a cycle: a\.yaml -> b\.yaml -> a\.yaml"
    ):
        import_nemo(tmp_path / "a.yaml")


def test_files_are_composed_as_by_omegaconf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OmegaConf's merging, overriding, scalars, relative references and resolvers."""
    monkeypatch.setenv("WHERE", "/data")
    (tmp_path / "first.yaml").write_text("a: {x: 1, y: [1, 2]}\nb: {x: 1}\nc: {x: 1}\nn: 3\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "second.yaml").write_text("defaults: ../third.yaml\na: {y: [3]}\n")
    (tmp_path / "third.yaml").write_text("n: 4\nthird: yes\n")
    (tmp_path / "top.yaml").write_text("""\
defaults: [first.yaml, sub/second.yaml]
b: {_override_: true, z: 2}
c: null
small: 1e-8
quoted: "1e-8"
sum: ${add:${n}, ${mul:2,${a.x}}}
half: ${div:${n},8}
most: ${max:${n}, 9}
text: run-${n}-${a.y[0]}
path: ${oc.env:WHERE}/${oc.env:NO_SUCH_NAME,x}
whole: ${a}
through: ${whole.x}
inside: {here: 5, near: "${.here}", far: "${..n}"}
shared: &anchor {k: 1}
merged: &merged {<<: *anchor, l: 2}
overridden: &overridden {<<: *merged, k: 3}
again: {<<: [*overridden, *anchor], l: 4}
same: *overridden
""")
    assert strip_locations(load_composed(tmp_path / "top.yaml")) == {
        "a": {"x": 1, "y": [3]},
        "b": {"z": 2},
        "c": None,
        "n": 4,
        "third": True,
        "small": 1e-8,
        "quoted": "1e-8",
        "sum": 6,
        "half": 0.5,
        "most": 9,
        "text": "run-4-3",
        "path": "/data/x",
        "whole": {"x": 1, "y": [3]},
        "through": 1,
        "inside": {"here": 5, "near": 5, "far": 4},
        "shared": {"k": 1},
        "merged": {"k": 1, "l": 2},
        "overridden": {"k": 3, "l": 2},
        "again": {"k": 3, "l": 4},
        "same": {"k": 3, "l": 2},
    }


# The command


def run_config_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["config", *arguments])
    exit_code: int = options.run(options)
    return exit_code


def test_the_command_writes_a_file_and_lists_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = tmp_path / "ours.yaml"
    assert run_config_command("import", str(DATA / "grpo_megatron.yaml"), "-o", str(ours)) == 0
    output = capsys.readouterr().out
    assert "grpo_base.yaml:15: grpo.seed: 7 → seed: 7\n" in output
    assert "unsupported (5)\n" in output
    assert load_config(ours).seed == 7
    assert run_config_command(str(ours), "seed=8") == 0  # `rollgraph config FILE` still prints a config
    assert "seed: 8\n" in capsys.readouterr().out


def test_the_command_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(SMALL)
    assert run_config_command("import", str(theirs), "-o", str(theirs)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{theirs} exists and is not overwritten" in captured.err
    assert theirs.read_text() == SMALL
    assert run_config_command(str(DATA / "grpo_base.yaml"), "-o", str(tmp_path / "new.yaml")) == 2
    assert "-o only works with import" in capsys.readouterr().err


def test_the_command_prints_yaml_without_an_output_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config_command("import", str(DATA / "grpo_base.yaml")) == 0
    captured = capsys.readouterr()
    ours = tmp_path / "ours.yaml"
    ours.write_text(captured.out)  # only YAML
    assert load_config(ours).steps == 300
    assert "translated (" in captured.err


@pytest.mark.parametrize("files", [(), ("a.yaml", "b.yaml"), ("nowhere.yaml",)])
def test_the_command_explains_wrong_arguments(files: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config_command("import", *files) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("nowhere.yaml: cannot be read" if files == ("nowhere.yaml",) else "expected one file") in captured.err


def test_the_documented_ledger_matches_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DATA)
    printed = import_nemo("grpo_megatron.yaml").describe().splitlines()
    _, _, block = (
        (DATA.parents[2] / "docs" / "migrating_nemo_rl.md").read_text(encoding="utf-8").partition("-o ours.yaml\n")
    )
    documented = [line for line in block.partition("```")[0].splitlines() if line.strip() not in ("", "...")]
    assert len(documented) > 8
    assert [line for line in documented if line not in printed] == []
