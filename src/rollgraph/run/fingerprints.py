"""What stands behind the paths of a configuration, told by its content.

A file that was moved, or whose path is spelled in another way, has the same fingerprint; one with another content does
not. Fingerprints find mistakes of people, not damage: of large weight files, only some blocks are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rollgraph.config import Config
from rollgraph.model import weight_files
from rollgraph.model.adapter_files import ADAPTER_WEIGHTS
from rollgraph.rl.data import PromptData
from rollgraph.tokenizer import TokenizerFiles

BLOCKS = 16  # of a weight file that are read
BLOCK_BYTES = 1 << 16


def fingerprint_inputs(config: Config, data: PromptData) -> dict[str, str]:
    """A fingerprint for each key whose value is a path to a model, a tokenizer, training data or code."""
    state = data.state()
    found = {"data.train": f"{state['content']} of {state['rows']} rows"}
    tokenizer = Path(config.tokenizer_path)
    if tokenizer.is_dir():
        found["tokenizer.path"] = _of_tokenizer(tokenizer)
    elif config.tokenizer_path == "bytes":
        found["tokenizer.path"] = "bytes"
    if config.model.path is not None and Path(config.model.path).is_dir():
        found["model.path"] = fingerprint_weights(Path(config.model.path))
    if config.adapter is not None and config.adapter.path is not None and Path(config.adapter.path).is_dir():
        found["adapter.path"] = _digest((Path(config.adapter.path) / ADAPTER_WEIGHTS).read_bytes())
    for key, path in _code(config):
        file, _, name = path.rpartition(":")
        if file.endswith(".py") and Path(file).is_file():
            found[key] = f"{_digest(Path(file).read_bytes())}:{name}"
    return found


def _code(config: Config) -> Iterator[tuple[str, str]]:
    """The keys that name code, and what they name; a built-in name has no file."""
    yield "algorithm.name", config.algorithm.name
    if config.rollout.environment is not None:
        yield "rollout.environment.name", config.rollout.environment.name
    for index, function in enumerate(config.reward.functions):
        yield f"reward.functions[{index}].name", function.name


def _of_tokenizer(folder: Path) -> str:
    files = TokenizerFiles.read(folder)
    return _digest(json.dumps([files.tokenizer_json, files.config, files.model_ids], sort_keys=True).encode())


def fingerprint_weights(folder: Path) -> str:
    """Of the names and sizes of a model's weight files, and of some blocks from the beginning of each to its end."""
    parts = []
    for path in weight_files(folder):
        size = path.stat().st_size
        parts.append(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            parts += _blocks(file, size)
    return _digest(b"".join(parts))


def _blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    last = max(0, size - BLOCK_BYTES)
    for index in range(BLOCKS):
        file.seek(last * index // (BLOCKS - 1))
        yield file.read(BLOCK_BYTES)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
