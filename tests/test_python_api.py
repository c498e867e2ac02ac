"""The first example of docs/python_api.md, run as a user would: from a wheel, outside the repository, in a script and
in a notebook, with every Python that has PyTorch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollgraph.model import Architecture, Decoder, save_model
from tests.run.local_hub import HubCache, read_files
from tests.test_wheel import installed, wheel

__all__ = ["installed", "wheel"]

ROOT = Path(__file__).parents[1]
WORDS = {"<eos>": 0, "a": 1, "b": 2, "?": 3}
STEPS = 2


def page_example() -> str:
    """The example with fewer steps, and with rows for its dataset."""
    text = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
    (example, *_) = re.findall(r"```python\n(from rollgraph import Trainer\n.*?)```", text, re.DOTALL)
    assert "steps=200" in example
    rows = 'dataset = [{"prompt": "a b", "answer": "a"}, {"prompt": "b a", "answer": "b"}] * 20\n'
    return rows + example.replace("steps=200", f"steps={STEPS}")


def make_hub(folder: Path) -> HubCache:
    """A cache that has a tiny model under the id of the example. It knows two words, so it says the right one often."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model_folder = folder / "model"
    torch.manual_seed(0)
    shape = {"hidden": 16, "mlp": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "max_length": 128}
    save_model(Decoder(Architecture("qwen2", vocabulary=len(WORDS), **shape)), model_folder)
    words = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(model_folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (model_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    cache = HubCache(folder / "hub")
    cache.add("Qwen/Qwen2.5-0.5B", read_files(model_folder))
    return cache


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("val", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a b", "answer": "a"}\n')
    return tmp_path


def environment_of(place: Path, installed: Path) -> dict[str, str]:
    cache = make_hub(place)
    given = {"HF_HUB_CACHE": str(cache.folder), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(installed)}
    return {**os.environ, **given, "OMP_NUM_THREADS": "1"}


def pythons() -> list[str]:
    """This Python, and 3.13 where it has what rollgraph needs. ROLLGRAPH_PYTHON names another one."""
    found = [sys.executable]
    for name in (os.environ.get("ROLLGRAPH_PYTHON", ""), "python3.13"):
        path = shutil.which(name) if name else None
        needs = "import torch, numpy, safetensors, tokenizers, jinja2, rich, yaml, cloudpickle, huggingface_hub"
        if path and subprocess.run([path, "-c", needs], capture_output=True).returncode == 0:
            found.append(path)
    return found


def check_result(place: Path, said: str) -> None:
    lines = [line for line in said.splitlines() if re.fullmatch(r"\d+ [-+\d.e]+", line)]
    assert [int(line.split()[0]) for line in lines] == list(range(STEPS)), said  # the callback of the example
    steps = [json.loads(line)["step"] for line in (place / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert steps == [-1, *range(STEPS)]
    assert (place / "exported" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_example_of_the_page_is_a_script(place: Path, installed: Path) -> None:
    (place / "script.py").write_text(f"import rollgraph\nprint(rollgraph.__file__)\n{page_example()}")
    for python in pythons():
        for left in ("runs", "exported"):
            shutil.rmtree(place / left, ignore_errors=True)
        done = subprocess.run(
            [python, "script.py"], cwd=place, env=environment_of(place, installed), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.splitlines()[0]) == installed / "rollgraph" / "__init__.py"
        check_result(place, done.stdout)


@pytest.mark.slow
def test_the_example_of_the_page_is_a_notebook(place: Path, installed: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook()
    where = nbformat.v4.new_code_cell("import rollgraph; rollgraph.__file__")
    notebook.cells = [where, nbformat.v4.new_code_cell(page_example())]
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute(cwd=str(place), env=environment_of(place, installed))
    assert str(installed) in notebook.cells[0].outputs[0]["data"]["text/plain"]
    printed = [output["text"] for output in notebook.cells[1].outputs if output["output_type"] == "stream"]
    check_result(place, "".join(printed))
