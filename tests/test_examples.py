"""What people copy and look up: examples load, one has every key, and messages in the documentation are real."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollgraph.config import list_keys, load_config
from rollgraph.run.inputs import make_environment
from rollgraph.run.shapes import completion_tokens
from rollgraph.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
LONG = EXAMPLES / "grpo_math_1b.yaml"


def test_the_benchmark_of_a_step_says_what_trl_needs() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "grpo_step.py"), "--tiny", "--trl"]
    without_gpu = {**os.environ, "PYTHONPATH": "src", "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, env=without_gpu, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert found.returncode == 1
    assert found.stderr == "--trl needs a CUDA device: TRL is given the 1.5B model, in bf16, also with --tiny\n"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_loads(path: Path) -> None:
    load_config(path)


def test_the_long_example_has_the_shape_it_says() -> None:
    config = load_config(LONG)
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt) == (32, 16)
    assert config.data.max_prompt_tokens is not None
    assert config.data.max_prompt_tokens + config.rollout.max_tokens == 512
    assert config.algorithm.kl_coef == 0.01


def test_the_long_example_has_every_key_and_no_other() -> None:
    found = keys_of(LONG.read_text(encoding="utf-8"))
    expected = [key.name for key in list_keys()]
    assert [name for name in expected if name not in found] == []
    assert [name for name in found if name not in expected] == []


def test_the_long_example_says_what_each_key_is_for() -> None:
    assert [name for name, comment in keys_of(LONG.read_text(encoding="utf-8")).items() if len(comment) < 4] == []


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("  tiny: null #", "  path: null\n  tiny: #", "model.tiny"),
        ("  environment: null #", "  environment: #", "rollout.environment"),
        ("warm_start: null #", "warm_start: #", "warm_start"),
    ],
)
def test_what_is_commented_out_can_be_used(before: str, after: str, key: str, tmp_path: Path) -> None:
    """A section that is null, with its comments taken away."""
    start, _, rest = LONG.read_text(encoding="utf-8").partition(before)
    section = re.match(r"[^\n]*\n((?: *#   .*\n)+)", rest)
    assert section is not None
    opened = section[1].replace("#   ", "    ", len(section[1].splitlines()))
    if key == "model.tiny":  # instead of a path
        start = re.sub(r"\n  path: models.*", "", start)
        opened = opened.replace("max_length: 256", "max_length: 512")
    path = tmp_path / "opened.yaml"
    path.write_text(start + after + rest[: section.start(1)] + opened + rest[section.end(1) :])
    config = load_config(path)
    value = config
    for name in key.split("."):
        value = getattr(value, name)
    assert value is not None


def test_the_documentation_quotes_messages_that_exist() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    said = "\n".join(texts)
    guide = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = [line for block in re.findall(r"```\n(.*?)```", guide, re.DOTALL) for line in block.splitlines()]
    assert len(messages) > 20
    parts = {part: message for message in messages for part in message.split("…") if len(part) > 4}
    assert [(part, message) for part, message in parts.items() if part not in said] == []


def test_configurations_in_the_documentation_load(tmp_path: Path) -> None:
    found = [(path, text) for path in (ROOT / "docs").glob("*.md") for text in yaml_blocks(path)]
    assert {path.name for path, _ in found} >= {"config.md", "rewards.md"}
    (tmp_path / "base.yaml").write_text("")  # which one of them builds on
    for path, text in found:
        file = tmp_path / f"{path.stem}.yaml"
        file.write_text(text)
        config = load_config(file)
        if config.rollout.environment is not None:
            made = make_environment(config, ByteTokenizer(), config.rollout.samples_per_prompt)
            assert made.stop == ("</calc>",)
            assert completion_tokens(config) == ("rollout.environment.options.max_tokens", 1024)


def yaml_blocks(path: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def keys_of(text: str) -> dict[str, str]:
    """Every key of a file, with dots, and its comment; keys in comments of three spaces or more are keys as well."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []  # indentation and name of the sections around
    for line in text.splitlines():
        match = re.fullmatch(r"(?P<indent> *(?:#  )? *)(?P<entry>- )?(?P<key>[a-z_]+):(?P<rest>(?: .*)?)", line)
        if match is None:
            continue
        indent = len(match["indent"]) + len(match["entry"] or "")
        while above and above[-1][0] >= indent:
            above.pop()
        if match["entry"]:
            above[-1] = (above[-1][0], f"{above[-1][1]}[]")
        name = ".".join([*(section for _, section in above), match["key"]])
        found[name] = match["rest"].partition(" #")[2].strip()
        above.append((indent, match["key"]))
    return found
