"""The first example of docs/python_api.md runs from a wheel, outside the repository, as a script and as a notebook,
with every available Python.
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
    """A cache with a tiny model under the id of the example. It knows two words, so it is often right."""
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
def folder(tmp_path: Path) -> Path:
    for name in ("val", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a b", "answer": "a"}\n')
    return tmp_path


def environment_of(folder: Path, installed: Path) -> dict[str, str]:
    cache = make_hub(folder)
    variables = {"HF_HUB_CACHE": str(cache.folder), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(installed)}
    return {**os.environ, **variables, "OMP_NUM_THREADS": "1"}


def pythons() -> list[str]:
    """This Python, and ROLLGRAPH_PYTHON and Python 3.13 if they have the dependencies of rollgraph."""
    paths = [sys.executable]
    for name in (os.environ.get("ROLLGRAPH_PYTHON", ""), "python3.13"):
        path = shutil.which(name) if name else None
        imports = "import torch, numpy, safetensors, tokenizers, jinja2, rich, yaml, cloudpickle, huggingface_hub"
        if path and subprocess.run([path, "-c", imports], capture_output=True).returncode == 0:
            paths.append(path)
    return paths


def assert_trained(folder: Path, output: str) -> None:
    lines = [line for line in output.splitlines() if re.fullmatch(r"\d+ [-+\d.e]+", line)]
    assert [int(line.split()[0]) for line in lines] == list(range(STEPS)), output  # the callback of the example
    steps = [json.loads(line)["step"] for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert steps == [-1, *range(STEPS)]
    assert (folder / "exported" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_example_runs_as_a_script(folder: Path, installed: Path) -> None:
    (folder / "script.py").write_text(f"import rollgraph\nprint(rollgraph.__file__)\n{page_example()}")
    for python in pythons():
        for leftover in ("runs", "exported"):
            shutil.rmtree(folder / leftover, ignore_errors=True)
        completed = subprocess.run(
            [python, "script.py"], cwd=folder, env=environment_of(folder, installed), capture_output=True, text=True
        )
        assert completed.returncode == 0, completed.stderr
        assert Path(completed.stdout.splitlines()[0]) == installed / "rollgraph" / "__init__.py"
        assert_trained(folder, completed.stdout)


@pytest.mark.slow
def test_the_example_runs_as_a_notebook(folder: Path, installed: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook()
    location_cell = nbformat.v4.new_code_cell("import rollgraph; rollgraph.__file__")
    notebook.cells = [location_cell, nbformat.v4.new_code_cell(page_example())]
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute(cwd=str(folder), env=environment_of(folder, installed))
    assert str(installed) in notebook.cells[0].outputs[0]["data"]["text/plain"]
    streams = [output["text"] for output in notebook.cells[1].outputs if output["output_type"] == "stream"]
    assert_trained(folder, "".join(streams))
