"""Examples load, the long one has every key, and messages and configurations in the documentation are valid."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rollgraph.config import list_keys, load_config
from rollgraph.inputs.inputs import make_environment
from rollgraph.inputs.shapes import completion_limit
from rollgraph.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
LONG = EXAMPLES / "grpo_math_1b.yaml"


def test_the_step_benchmark_refuses_trl_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo_step.py", "--tiny", "--trl"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(ROOT / "benchmarks" / "grpo_step.py"), run_name="__main__")
    assert raised.value.code == "--trl needs a CUDA device: TRL trains the 1.5B model in bf16, even with --tiny"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_load(path: Path) -> None:
    load_config(path)


def test_the_long_example_has_the_shape_in_its_header() -> None:
    config = load_config(LONG)
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt) == (32, 16)
    assert config.data.max_prompt_tokens is not None
    assert config.data.max_prompt_tokens + config.rollout.max_tokens == 512
    assert config.algorithm.kl_coef == 0.01


def test_the_long_example_has_every_key_and_no_other() -> None:
    keys = keys_of(LONG.read_text(encoding="utf-8"))
    expected = [key.name for key in list_keys()]
    assert [name for name in expected if name not in keys] == []
    assert [name for name in keys if name not in expected] == []


def test_the_long_example_has_a_comment_for_every_key() -> None:
    comments = keys_of(LONG.read_text(encoding="utf-8"))
    assert [name for name, comment in comments.items() if len(comment) < 4] == []


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("  tiny: null #", "  path: null\n  tiny: #", "model.tiny"),
        ("  environment: null #", "  environment: #", "rollout.environment"),
        ("warm_start: null #", "warm_start: #", "warm_start"),
    ],
)
def test_commented_out_sections_load(before: str, after: str, key: str, tmp_path: Path) -> None:
    """Replace a null section by its keys, uncommented, and load the file."""
    start, _, rest = LONG.read_text(encoding="utf-8").partition(before)
    section = re.match(r"[^\n]*\n((?: *#   .*\n)+)", rest)
    assert section is not None
    uncommented = section[1].replace("#   ", "    ", len(section[1].splitlines()))
    if key == "model.tiny":  # model.tiny replaces model.path
        start = re.sub(r"\n  path: models.*", "", start)
        uncommented = uncommented.replace("max_length: 256", "max_length: 512")
    path = tmp_path / "opened.yaml"
    path.write_text(start + after + rest[: section.start(1)] + uncommented + rest[section.end(1) :])
    config = load_config(path)
    value = config
    for name in key.split("."):
        value = getattr(value, name)
    assert value is not None


def test_messages_in_the_troubleshooting_page_exist() -> None:
    source_text = "\n".join(text for path in (ROOT / "src").rglob("*.py") for text in string_constants(path))
    guide = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = []
    for block in re.findall(r"```\n(.*?)```", guide, re.DOTALL):
        messages += block.splitlines()
    assert len(messages) > 20
    missing = []
    for message in messages:
        fixed = [part for part in message.split("…") if len(part) > 4]
        missing += [(part, message) for part in fixed if part not in source_text]
    assert missing == []


def test_configurations_in_the_documentation_load(tmp_path: Path) -> None:
    blocks = [(path, text) for path in (ROOT / "docs").glob("*.md") for text in yaml_blocks(path)]
    assert {path.name for path, _ in blocks} >= {"config.md", "environments.md"}
    stops = []
    (tmp_path / "base.yaml").write_text("")  # in the `defaults` of one of the blocks
    for path, text in blocks:
        name = re.match(r"# (\w+\.yaml)\n", text)  # another block may name it in its `defaults`
        file = tmp_path / (name[1] if name else f"{path.stem}.yaml")
        file.write_text(text)
        config = load_config(file)
        if config.rollout.environment is not None:
            environment = make_environment(config, ByteTokenizer(), config.rollout.samples_per_prompt)
            stops.append(environment.stop)
            assert completion_limit(config) == ("rollout.environment.options.max_tokens", 1024)
    assert stops == [("</calc>",), ()]


def string_constants(path: Path) -> list[str]:
    """Return all string literals of a Python file, the fixed parts of f-strings included."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def yaml_blocks(path: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def keys_of(text: str) -> dict[str, str]:
    """Return the comment of every key of a file, by dotted name. Keys that are commented out with `#   ` count, too."""
    comments: dict[str, str] = {}
    sections: list[tuple[int, str]] = []  # indentation and name of the enclosing sections
    for line in text.splitlines():
        match = re.fullmatch(r"(?P<indent> *(?:#  )? *)(?P<entry>- )?(?P<key>[a-z_]+):(?P<rest>(?: .*)?)", line)
        if match is None:
            continue
        indent = len(match["indent"]) + len(match["entry"] or "")
        while sections and sections[-1][0] >= indent:
            sections.pop()
        if match["entry"]:
            sections[-1] = (sections[-1][0], f"{sections[-1][1]}[]")
        name = ".".join([*(section for _, section in sections), match["key"]])
        comments[name] = match["rest"].partition(" #")[2].strip()
        sections.append((indent, match["key"]))
    return comments


@pytest.mark.slow
def test_the_first_example_generalizes_to_held_out_words(tmp_path: Path) -> None:
    program = [sys.executable, str(EXAMPLES / "shout.py")]
    subprocess.run(program, cwd=tmp_path, check=True, timeout=900, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (tmp_path / "runs/shout/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["validation/reward"] < 0.4
    assert rows[-1]["validation/reward"] > 0.9
