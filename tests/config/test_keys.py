"""Keys, defaults, overrides and rules: what a configuration accepts, and the message for everything else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollgraph
from rollgraph.config import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    TinyModelConfig,
    broken_rules,
    capture_scopes,
    json_schema,
    list_keys,
    load_config,
    parse_config,
    to_yaml,
)

SMALL = """\
model: {tiny: {}}
data: {train: train.jsonl}
rollout: {max_tokens: 32}
reward:
  functions:
    - name: exact
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / "run.yaml"


def problems_of(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides, name="run.yaml")
    return tuple(map(str, caught.value.problems))


def test_missing_keys_have_their_defaults() -> None:
    config = parse_config(SMALL)
    assert config.rollout.max_tokens == 32
    assert config.optimizer.lr == 1e-6
    assert config.reward.functions[0].weight == 1.0
    assert config.model.tiny == TinyModelConfig()
    assert config.warm_start is None
    assert config.tokenizer_path == "bytes"


def test_a_config_built_in_python_equals_one_from_yaml() -> None:
    config = parse_config("model: {path: m}\ndata: {train: t}\nreward: {functions: [{name: f}]}")
    assert Config(model=ModelConfig(path="m"), data=DataConfig(train="t"), reward=config.reward) == config
    assert config.tokenizer_path == "m"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("temprature: 1", "run.yaml:7: temprature: unknown key; did you mean rollout.temperature?"),
        ("sed: 1", "run.yaml:7: sed: unknown key; did you mean seed?"),
        ("top_p: 1", "run.yaml:7: top_p: unknown key; did you mean rollout.top_p?"),
        ("xyzzy: 1", "run.yaml:7: xyzzy: unknown key; expected one of seed, steps"),
        ("train: {long_prompts: true}", "run.yaml:7: train.long_prompts: unknown key; it is train.half_logits now"),
        ("<<: {seed: 1}", "run.yaml:7: <<: unknown key"),
        ("seed: true", "run.yaml:7: seed: expected whole number ≥ 0, got true"),
        ("seed: 1.0", "run.yaml:7: seed: expected whole number ≥ 0, got 1.0"),
        ("seed: '1'", "run.yaml:7: seed: expected whole number ≥ 0, got the text '1'"),
        ("seed:", "run.yaml:7: seed: expected whole number ≥ 0, got null"),
        ("steps: 0", "run.yaml:7: steps: expected whole number ≥ 1, got 0"),
        ("output: 7", "run.yaml:7: output: expected text, got 7"),
        ("resume: maybe", "run.yaml:7: resume: expected auto | never | must, got the text 'maybe'"),
        ("optimizer: {lr: -1}", "run.yaml:7: optimizer.lr: expected number ≥ 0 and ≤ 1, got -1"),
        ("optimizer: {lr: 5}", "run.yaml:7: optimizer.lr: expected number ≥ 0 and ≤ 1, got 5"),
        (
            "optimizer: {eps: 0.2}",
            "optimizer.eps: expected number > 0 and ≤ 0.01, got 0.2; this is Adam's, while the range of the clip is "
            "algorithm.options.clip_low and clip_high",
        ),
        ("optimizer: {lr: 1e999}", "run.yaml:7: optimizer.lr: expected number ≥ 0 and ≤ 1, got the text '1e999'"),
        ("optimizer: {lr: .inf}", "run.yaml:7: optimizer.lr: expected number ≥ 0 and ≤ 1, got the text '.inf'"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas: expected list of 2: number ≥ 0 and < 1, got a list of 1"),
        ("optimizer: {betas: [0.9, 1.0]}", "run.yaml:7: optimizer.betas[1]: expected number ≥ 0 and < 1, got 1.0"),
        ("optimizer: 3", "run.yaml:7: optimizer: expected section, got 3"),
        ("algorithm: dapo", "algorithm: expected section, got the text 'dapo'; did you mean algorithm.name?"),
        ("algorithm: ppo", "got the text 'ppo'; did you mean algorithm.name? ppo is not supported: it needs a critic"),
        ("algorithm: gkd", "got the text 'gkd'; did you mean algorithm.name? gkd is distillation here (on-policy)"),
        ("algorithm: {options: [1]}", "run.yaml:7: algorithm.options: expected mapping, got a list of 1"),
        ("graph: {warmup: 0}", "run.yaml:7: graph.warmup: expected whole number ≥ 1, got 0"),
        ("memory: {cache_gib: 0}", "run.yaml:7: memory.cache_gib: expected number > 0 or null, got 0"),
        ("log:\n  wandb:\n  every: 0", "run.yaml:9: log.every: expected whole number ≥ 1, got 0"),
        ("warm_start: {steps: 3}", "run.yaml:7: warm_start.data: required, but missing"),
        ("seed: 1\nseed: 2", "run.yaml:8: seed: given twice"),
        ("? [a]\n: 1", "run.yaml:7: a key must be text"),
        ("seed: !!python/name:os.system 1", "run.yaml:7: the tag"),
        ("seed: !env SEED", "run.yaml:7: the tag !env is not supported"),
        ("seed: [1", "not YAML"),
        ("stop: &a [*a]", "unusable YAML"),
        ("seed: *nowhere", "run.yaml:7: not YAML: found undefined alias 'nowhere'"),
        ("--- {}", "run.yaml:7: not YAML: but found another document"),
    ],
)
def test_a_problem_names_its_line_and_key(line: str, message: str) -> None:
    assert any(message in problem for problem in problems_of(SMALL + line))


def test_a_limit_may_say_what_to_write_instead() -> None:
    (problem,) = problems_of(SMALL, "rollout.top_k=-1")
    assert problem.endswith("rollout.top_k: expected whole number ≥ 0, got -1; 0 means all tokens")
    (problem,) = problems_of(SMALL, "rollout.top_k=all")
    assert problem.endswith("rollout.top_k: expected whole number ≥ 0, got the text 'all'")


def test_all_problems_are_reported_together_each_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        run="defaults: base.yaml\nrollout:\n  temprature: 1\nreward:\n  functions:\n    - {weight: 1}\n",
        base="# a comment\noptimizer:\n  lr: small\nrollout: {rows: 0}\n",
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["steps=0", "rollout.rows", "log.sinks=[jsonl"])
    base = tmp_path / "base.yaml"
    assert sorted(map(str, caught.value.problems)) == sorted(
        [
            "override 'rollout.rows': expected key=value",
            "override 'log.sinks=[jsonl': not YAML: expected ',' or ']', but got '<stream end>'",
            "override 'steps=0': steps: expected whole number ≥ 1, got 0",
            f"{path}:1: data.train: required, but missing",
            f"{path}:3: rollout.temprature: unknown key; did you mean rollout.temperature?",
            f"{base}:4: rollout.rows: expected whole number ≥ 1, got 0",
            f"{path}:6: reward.functions[0].name: required, but missing",
            f"{base}:3: optimizer.lr: expected number ≥ 0 and ≤ 1, got the text 'small'",
        ]
    )


def test_defaults_are_merged_in_order_and_relative_to_their_file(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts", run=SMALL, lengths="defaults: run.yaml\nrollout: {max_tokens: 64, stop: [a, b]}")
    path = write(
        tmp_path,
        run="defaults: [parts/lengths.yaml, more.yaml]\nrollout: {stop: [c]}\nalgorithm: {options: {y: 2}}",
        more="rollout: {max_tokens: 48}\nalgorithm: {options: {x: 1}}",
    )
    config = load_config(path, ["algorithm.options.z=[3]"])
    assert config.rollout.max_tokens == 48
    assert config.rollout.stop == ("c",)
    assert config.algorithm.options == {"x": 1, "y": 2, "z": [3]}
    assert config.data.train == "train.jsonl"


def test_a_base_may_be_inherited_twice_but_not_from_itself(tmp_path: Path) -> None:
    write(tmp_path, base=SMALL, left="defaults: base.yaml", right="defaults: base.yaml\nseed: 3")
    assert load_config(write(tmp_path, run="defaults: [left.yaml, right.yaml]")).seed == 3
    path = write(tmp_path, run="seed: 1\ndefaults: left.yaml", left="defaults: ./run.yaml")
    with pytest.raises(ConfigError, match=r"left\.yaml:1: defaults: the files form a cycle: run.* -> left.* -> run"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ndefaults: absent.yaml", "run.yaml:2: defaults: there is no file "),
        ("defaults: {a: b}", "run.yaml:1: defaults: expected the path of a file, got a mapping"),
        ("", "run.yaml:1: data.train: required, but missing"),
        ("- seed", "run.yaml:1: expected keys, got a list of 1"),
    ],
)
def test_a_problem_of_a_file_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, run=text))
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_the_folder_of_a_run_leads_to_its_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder, not a regular file$"):
        load_config(tmp_path)
    write(tmp_path, config="seed: 1")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert f"did you mean {tmp_path / 'config.yaml'}?" in str(caught.value)


def test_overrides_win_over_files_in_order() -> None:
    overrides = ["seed=1", "seed = 2", "optimizer.lr=1e-4", "rollout.stop=['#', \"=\"]", "warm_start.data=x=y"]
    config = parse_config(SMALL + "seed: 7", [*overrides, "optimizer.clip_norm=", "model.tiny.layers=3"])
    assert config.seed == 2
    assert config.optimizer.lr == 1e-4
    assert config.optimizer.clip_norm is None
    assert config.rollout.stop == ("#", "=")
    assert config.warm_start is not None
    assert config.warm_start.data == "x=y"
    assert config.model.tiny == TinyModelConfig(layers=3)


def test_an_override_below_a_single_value_is_reported_there() -> None:
    assert problems_of(SMALL, "seed.x=1") == ("override 'seed.x=1': seed: expected whole number ≥ 0, got a mapping",)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1e-6", 1e-6),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("16_384", 16384),
        ("017", 17),
        ("no", "no"),
        ("on", "on"),
        ("1.2.3", "1.2.3"),
        ("1__0", "1__0"),
        ("1e999", "1e999"),
        ("-12", -12),
        ("+2.5E3", 2500.0),
        ("# nothing", None),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
        ("'true'", "true"),
    ],
)
def test_words_mean_what_they_look_like(word: str, value: Any) -> None:
    parsed = parse_config(SMALL, [f"algorithm.options.x={word}"]).algorithm.options["x"]
    assert (type(parsed), parsed) == (type(value), value)


@pytest.mark.parametrize("scope", ["attn,mlp", "attn , mlp", "[attn, mlp]"])
def test_scopes_are_a_tuple_however_they_are_written(scope: str) -> None:
    assert parse_config(SMALL, [f"graph.scope={scope}"]).graph.scope == ("attn", "mlp")


def test_the_number_of_ranks_chooses_the_scopes() -> None:
    assert capture_scopes(parse_config(SMALL), ranks=1) == ("step",)
    assert capture_scopes(parse_config(SMALL), ranks=4) == ("layer",)
    assert capture_scopes(parse_config(SMALL, ["graph.scope=mlp"]), ranks=4) == ("mlp",)
    assert capture_scopes(parse_config(SMALL, ["graph.impl=none"]), ranks=4) == ()
    with pytest.raises(ConfigError, match=r"graph\.scope: step is not possible with 2 ranks"):
        capture_scopes(parse_config(SMALL, ["graph.scope=step"]), ranks=2)


@pytest.mark.parametrize(
    ("rule", "overrides"),
    [
        ("one_model", ["model.tiny=null"]),
        ("one_model", ["model.path=m"]),
        ("heads_fit", ["model.tiny.kv_heads=3"]),
        ("heads_fit", ["model.tiny.width=60"]),
        ("length_fits", ["rollout.max_tokens=256"]),
        ("length_fits", ["data.max_prompt_tokens=225"]),
        ("microbatch_fits", ["train.microbatch_tokens=32"]),
        ("microbatch_fits", ["train.token_buckets=[16, 32]"]),
        ("buckets_rise", ["train.token_buckets=[64, 32]"]),
        ("buckets_rise", ["train.token_buckets=[]"]),
        ("something_rewards", ["reward.functions=[]"]),
        ("group_compares", ["rollout.samples_per_prompt=1"]),
        ("minibatches_filled", ["data.prompts_per_step=1", "algorithm.minibatches=17"]),
        ("one_kl_coef", ["algorithm.kl_coef=0.1", "algorithm.options.kl_coef=0.2"]),
        ("one_kl_coef", ["algorithm.kl_coef=0.1", "algorithm.options.kl_coef=0"]),
        ("kl_of_the_policy", ["algorithm.kl_coef=0.1", "algorithm.options.kl_in=reward", "rollout.top_k=5"]),
        ("adapter_has_targets", ["adapter.targets=[]"]),
        ("targets_differ", ["adapter.targets=[q_proj, q_proj]"]),
        ("exact_without_dropout", ["adapter.dropout=0.1", "graph.exact=must"]),
        ("checkpointing_without_dropout", ["adapter.dropout=0.1", "model.checkpointing=true"]),
        ("exact_without_filters", ["graph.exact=must", "rollout.top_p=0.9"]),
        ("greedy_or_warm", ["validation.temperature=1e-5"]),
        ("peers_survive", ["checkpoint.peers=1"]),
        ("peers_exist", ["checkpoint.peers=1", "cluster.engine=ray"]),
        ("warmup_ends", ["optimizer.warmup_steps=101"]),
        ("warmup_ends", ["optimizer.warmup_steps=401", "algorithm.minibatches=2", "algorithm.epochs=2"]),
        ("samples_differ", ["validation.samples=4"]),
        ("scope_not_empty", ["graph.scope=[]"]),
        ("scope_without_graphs", ["graph.scope=step", "graph.impl=none"]),
        ("scopes_apart", ["graph.scope=layer,attn"]),
        ("scopes_apart", ["graph.scope=attn,attn"]),
        ("divided_once", ["shard=parameters", "tensor_parallel=2"]),
        ("sinks_differ", ["log.sinks=[jsonl, jsonl]"]),
        ("wandb_used", ["log.wandb.project=p"]),
        ("mlflow_used", ["log.mlflow.run_name=p"]),
    ],
)
def test_a_contradictory_combination_breaks_its_rule(rule: str, overrides: list[str]) -> None:
    assert [problem for problem in problems_of(SMALL, *overrides) if problem.endswith(f"[{rule}]")]


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.max_tokens=255"],
        ["data.max_prompt_tokens=224"],
        ["train.microbatch_tokens=33"],
        ["train.token_buckets=[16, 33]", "train.microbatch_tokens=1"],
        ["rollout.samples_per_prompt=1", "algorithm.name=my.algorithm"],
        ["reward.functions=[]", "rollout.environment.name=my.environment"],
        ["graph.impl=none"],
        ["shard=parameters"],
        ["graph.scope=null", "graph.impl=none"],
        ["model.checkpointing=auto", "adapter.dropout=0.1"],
        ["model.checkpointing=false", "adapter.dropout=0.1"],
        ["adapter={}", "graph.exact=must", "model.checkpointing=true"],
        ["log.sinks=[wandb]", "log.wandb.project=p"],
        ["validation.samples=4", "validation.temperature=0.7"],
        ["algorithm.kl_coef=0.1", "algorithm.options.kl_coef=0.1"],
        ["algorithm.kl_coef=0.0", "algorithm.options.kl_coef=0.1"],  # as it is printed
        ["optimizer.warmup_steps=400", "algorithm.minibatches=2", "algorithm.epochs=2"],
        ["rollout.temperature=0.01", "validation.temperature=0.01"],
    ],
)
def test_a_valid_combination_breaks_no_rule(overrides: list[str]) -> None:
    assert broken_rules(parse_config(SMALL, overrides)) == []


def test_a_broken_rule_is_reported_at_its_key_or_section() -> None:
    (problem,) = problems_of(SMALL + "\ngraph:\n  impl: none\n  scope: layer")
    assert problem.startswith("run.yaml:10: graph.scope: a scope makes no sense with graph.impl: none")
    (problem,) = problems_of(SMALL + "\ntrain:\n  microbatch_tokens: 8")
    assert problem.startswith("run.yaml:9: train.microbatch_tokens: ")
    (problem,) = problems_of(SMALL, "train.token_buckets=[12]")
    assert problem.startswith("override 'train.token_buckets=[12]': train.token_buckets: a prompt with its completion")


@pytest.mark.parametrize("temperature", ["0", "1e-05"])
def test_a_temperature_that_explores_nothing_is_refused(temperature: str) -> None:
    (problem,) = problems_of(SMALL, f"rollout.temperature={temperature}")
    assert problem.endswith(f"rollout.temperature: expected number ≥ 0.01, got {temperature}")


def test_contradictory_keys_are_both_shown_with_their_lines() -> None:
    problems = problems_of(SMALL + "algorithm:\n  kl_coef: 0.1\n  options:\n    clip_low: 0.1\n    kl_coef: 0.2")
    assert problems == (
        "run.yaml:8: algorithm.kl_coef: is 0.1, but algorithm.options.kl_coef is 0.2 [one_kl_coef]",
        "run.yaml:11: algorithm.options.kl_coef: is 0.2, but algorithm.kl_coef is 0.1 [one_kl_coef]",
    )


TEXT = st.text(max_size=8) | st.sampled_from(["1e5", "0x10", "yes", "null", "~", "", "1_000", "- a", "#", "a: b", "<<"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXT, max_size=3), st.dictionaries(TEXT, PLAIN | st.lists(PLAIN, max_size=2), max_size=3))
def test_a_printed_config_reads_back_equal(stop: list[str], options: dict[str, Any]) -> None:
    base = parse_config(SMALL, ["graph.scope=attn,mlp", "warm_start.data=w"])
    config = replace(base, rollout=replace(base.rollout, stop=tuple(stop)), algorithm=AlgorithmConfig(options=options))
    assert parse_config(to_yaml(config)) == config


def test_the_schema_has_every_key_with_its_description() -> None:
    schema = json_schema()
    for key in list_keys():
        node = schema
        for name in key.name.replace("[]", "").split("."):
            while "properties" not in node:
                node = node["anyOf"][0] if "anyOf" in node else node["items"]
            assert node["additionalProperties"] is False
            node = node["properties"][name]
        assert node["description"] == key.text
    optimizer = schema["properties"]["optimizer"]["properties"]
    assert optimizer["lr"] == {
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "description": optimizer["lr"]["description"],
        "default": 1e-6,
    }
    assert optimizer["betas"]["minItems"] == optimizer["betas"]["maxItems"] == 2
    assert {"type": "string"} in schema["properties"]["graph"]["properties"]["scope"]["anyOf"][0]["anyOf"]


def test_importing_config_imports_no_heavy_package() -> None:
    code = "import sys, rollgraph.config; print([m for m in ('yaml', 'torch', 'numpy', 'rich') if m in sys.modules])"
    source = Path(rollgraph.__file__).parents[1]
    assert subprocess.check_output([sys.executable, "-c", code], cwd=source, text=True) == "[]\n"
