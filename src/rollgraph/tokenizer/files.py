"""Reads, checks and writes the files of a tokenizer. Knows which setting is in which file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rollgraph import files
from rollgraph.files import FileError, MissingFile, write_atomically

_MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKEN = "a token: a string, or an object whose 'content' is a string"
_OTHER_FORMATS = ("tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")
FETCH_AGAIN = "download the file again: it may be cut off, or a Git LFS pointer"


class TokenizerError(ValueError):
    """The files do not hold a tokenizer, an id is outside the vocabulary, or a chat template fails."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a tokenizer's files."""

    tokenizer_json: str  # unchanged, so that it is written back byte for byte
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json, completed from other files
    model_ids: Mapping[str, Any] = field(default_factory=dict)  # bos_token_id and so on, from the model's configs
    name: str = ""

    @classmethod
    def read(cls, folder: Path) -> Self:
        if not folder.is_dir():
            raise TokenizerError(f"{folder}: no such folder; expected the one that holds tokenizer.json")
        path = folder / "tokenizer.json"
        if not path.exists():
            other_formats = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
            unsupported = f", and {other_formats[0]} alone is not supported" if other_formats else ""
            convert = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            raise TokenizerError(f"{path}: no such file{unsupported}; create it once with transformers: {convert}")
        config = _read_config(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # newer files have it and do not need the map
            config |= _read_config(folder / "special_tokens_map.json")
        templates = {name: _read_text(file) for name, file in _template_files(folder).items()}
        if templates:
            config["chat_template"] = templates
        ids = _read_ids(folder / "config.json") | _read_ids(folder / "generation_config.json")
        return cls(_read_text(path), config, _drop_nulls(ids), str(folder))

    def write(self, folder: Path) -> None:
        """Write the files that `read` and transformers expect, replacing the files of another tokenizer.

        Each file is written atomically. A link is replaced by a file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for stale in _template_files(folder).values():  # they would take precedence over the files we write
            stale.unlink()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config, **self.special_tokens}
        templates = self.chat_templates
        if set(templates) == {"default"}:
            config["chat_template"] = templates["default"]
        elif templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        write_atomically(folder / "tokenizer.json", self.tokenizer_json)
        _write_json(folder / "tokenizer_config.json", config)
        _write_json(folder / "special_tokens_map.json", self.special_tokens)
        path = folder / "generation_config.json"
        settings = _read_json(path)
        if settings or self.model_ids:
            for key in _MODEL_IDS:  # the other settings belong to the model, so we keep them
                settings.pop(key, None)
            _write_json(path, settings | dict(self.model_ids))

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of special tokens by name: "bos_token" and so on, or the model's own, such as "image_token"."""
        named = {key: value for key, value in self.config.items() if key.endswith("_token")}
        extra = self.config.get("extra_special_tokens")
        if isinstance(extra, dict):
            named |= extra
        return {key: token_text(value) for key, value in named.items() if isinstance(value, str | dict)}

    @property
    def chat_templates(self) -> dict[str, str]:
        """The source of each chat template by name."""
        entry = self.config.get("chat_template") or {}
        if isinstance(entry, str):
            return {"default": entry}
        if isinstance(entry, list):
            return {item["name"]: item["template"] for item in entry}
        return dict(entry)


def _template_files(folder: Path) -> dict[str, Path]:
    """The files of chat templates by the name of the template."""
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    default = folder / "chat_template.jinja"
    if default.exists():
        paths["default"] = default
    return paths


def _drop_nulls(ids: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in ids.items() if value is not None}


def _read_text(path: Path) -> str:
    try:
        return files.read_text(path)
    except FileError as error:
        raise _cannot_read(error) from None


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or an empty one if there is no file."""
    try:
        value = files.read_json(path)
    except MissingFile:
        return {}
    except FileError as error:
        raise _cannot_read(error) from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected an object, not a {type(value).__name__}; {FETCH_AGAIN}")
    return value


def _cannot_read(error: FileError) -> TokenizerError:
    why = f" ({error.reason})" if error.reason else ""
    return TokenizerError(f"{error.location}: {error.problem}{why}; {FETCH_AGAIN}")


def _read_config(path: Path) -> dict[str, Any]:
    """Read a file of tokens and templates, and check each entry."""
    config = _read_json(path)
    for key, value in config.items():
        problem = _find_problem(key, value) if value else None
        if problem:
            raise TokenizerError(f"{path}: an entry of {path.name} is malformed: {key} {problem}")
    return config


def _find_problem(key: str, value: Any) -> str | None:
    """What is wrong with an entry. None if it is fine, or if we do not use it."""
    if key == "added_tokens_decoder":
        return _find_id_problem(value)
    if key in ("extra_special_tokens", "additional_special_tokens"):
        return _find_token_problem(value)
    if key == "chat_template":
        return _find_template_problem(value)
    if key.endswith("_token") and isinstance(value, dict) and not _is_token_object(value):
        return f"is {value!r:.80}; expected {_TOKEN}"
    return None


def _find_id_problem(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"is {value!r:.80}; expected an object from ids to tokens"
    for i, token in value.items():
        if not (i.isdecimal() and len(i) < 20 and _is_token_object(token)):
            return f"has {i!r:.40}: {token!r:.40}; expected an id and its token"
    return None


def _find_token_problem(value: Any) -> str | None:
    if isinstance(value, dict):
        return None
    if not isinstance(value, list):
        return f"is {value!r:.80}; expected a list of tokens, or an object from names to tokens"
    for token in value:
        if not isinstance(token, str) and not _is_token_object(token):
            return f"has {token!r:.80}; expected {_TOKEN}"
    return None


def _find_template_problem(value: Any) -> str | None:
    if isinstance(value, list):
        is_valid = all(_is_named_template(entry) for entry in value)
    elif isinstance(value, dict):
        is_valid = all(isinstance(text, str) for text in value.values())
    else:
        is_valid = isinstance(value, str)
    return None if is_valid else f"is {value!r:.80}; expected a string, or named strings"


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _is_token_object(token: Any) -> bool:
    return isinstance(token, dict) and isinstance(token.get("content"), str)


def _read_ids(path: Path) -> dict[str, Any]:
    """The ids of special tokens in a model config. Each is a number, a list of numbers, or null."""
    config = _read_json(path)
    ids = {key: config[key] for key in _MODEL_IDS if key in config}
    for key, value in ids.items():
        listed_ids = value if isinstance(value, list) else [value]
        if value is not None and not all(type(i) is int and abs(i) < 2**32 for i in listed_ids):
            raise TokenizerError(f"{path}: {key} is {value!r:.80}; expected an id or a list of ids")
    return ids


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def token_text(token: str | dict[str, Any]) -> str:
    """The text of a token, which may be an object with flags."""
    if isinstance(token, dict):
        return str(token["content"])
    return token
