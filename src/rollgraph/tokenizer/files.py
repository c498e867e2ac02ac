"""The files of a tokenizer: what they say, and writing them back. Owns where each thing is written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rollgraph import files
from rollgraph.files import FileError, MissingFile, write_atomically

_MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OTHER_FORMATS = ("tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")
FETCH_AGAIN = "fetch the file again: a download that was cut off or a Git LFS pointer looks like this"


class TokenizerError(ValueError):
    """Files that are no tokenizer, ids outside the vocabulary, or a chat template that fails."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files of a tokenizer say."""

    tokenizer_json: str  # as it is, to be written back byte for byte
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json, with what other files add
    model_ids: Mapping[str, Any] = field(default_factory=dict)  # bos_token_id and so on, of the model's configs
    name: str = ""

    @classmethod
    def read(cls, folder: Path) -> Self:
        if not folder.is_dir():
            raise TokenizerError(f"{folder}: no such folder; give the one that holds tokenizer.json")
        path = folder / "tokenizer.json"
        if not path.exists():
            others = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
            besides = f", and {others[0]} alone is not read" if others else ""
            convert = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            raise TokenizerError(f"{path}: no such file{besides}; write it once with transformers: {convert}")
        config = _read_config(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # newer files have it, and then the map is a leftover
            config |= _read_config(folder / "special_tokens_map.json")
        templates = {name: _read_text(file) for name, file in _template_files(folder).items()}
        config |= {"chat_template": templates} if templates else {}
        ids = _read_ids(folder / "config.json") | _read_ids(folder / "generation_config.json")
        return cls(_read_text(path), config, {key: i for key, i in ids.items() if i is not None}, str(folder))

    def write(self, folder: Path) -> None:
        """Write the files that `read` and transformers read, over those of another tokenizer if need be. Each appears
        whole; one that was a link is a file of its own afterwards."""
        folder.mkdir(parents=True, exist_ok=True)
        for stale in _template_files(folder).values():  # would win over what is written here
            stale.unlink()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config, **self.special_tokens}
        if templates := self.chat_templates:
            named = [{"name": name, "template": text} for name, text in templates.items()]
            config["chat_template"] = templates["default"] if set(templates) == {"default"} else named
        write_atomically(folder / "tokenizer.json", self.tokenizer_json)
        _write_json(folder / "tokenizer_config.json", config)
        _write_json(folder / "special_tokens_map.json", self.special_tokens)
        path = folder / "generation_config.json"
        if (found := _read_json(path)) or self.model_ids:  # its other settings are the model's, and stay
            _write_json(path, {key: found[key] for key in found if key not in _MODEL_IDS} | dict(self.model_ids))

    @property
    def special_tokens(self) -> dict[str, str]:
        """Text by name, such as "bos_token", and by names of the model's own, such as "image_token"."""
        named = {key: value for key, value in self.config.items() if key.endswith("_token")}
        extra = self.config.get("extra_special_tokens")
        named |= extra if isinstance(extra, dict) else {}
        return {key: text_of(value) for key, value in named.items() if isinstance(value, str | dict)}

    @property
    def chat_templates(self) -> dict[str, str]:
        entry = self.config.get("chat_template") or {}
        if isinstance(entry, list):
            return {item["name"]: item["template"] for item in entry}
        return {"default": entry} if isinstance(entry, str) else dict(entry)


def _template_files(folder: Path) -> dict[str, Path]:
    named = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    default = folder / "chat_template.jinja"
    return named | ({"default": default} if default.exists() else {})


def _read_text(path: Path) -> str:
    try:
        return files.read_text(path)
    except FileError as error:
        raise _cannot_read(error) from None


def _read_json(path: Path) -> dict[str, Any]:
    """An object, empty if there is no file."""
    try:
        value = files.read_json(path)
    except MissingFile:
        return {}
    except FileError as error:
        raise _cannot_read(error) from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds a {type(value).__name__} instead of an object; {FETCH_AGAIN}")
    return value


def _cannot_read(error: FileError) -> TokenizerError:
    why = f" ({error.why})" if error.why else ""
    return TokenizerError(f"{error.place}: {error.what}{why}; {FETCH_AGAIN}")


def _read_config(path: Path) -> dict[str, Any]:
    """A file of tokens and templates, of which each entry is what it has to be."""
    config = _read_json(path)
    for key, value in config.items():
        if value and (wrong := _find_wrong(key, value)):
            raise TokenizerError(f"{path}: an entry of {path.name} is malformed: {key} {wrong}")
    return config


def _find_wrong(key: str, value: Any) -> str:
    """What is wrong with an entry; empty if nothing is, or if nobody here reads it."""
    if key == "added_tokens_decoder":
        if not isinstance(value, dict):
            return f"is {value!r:.80} instead of an object with ids and their tokens"
        wrong = [i for i, token in value.items() if not (i.isdecimal() and len(i) < 20 and _is_object(token))]
        return f"has {_shown(wrong[0], value[wrong[0]])} instead of an id and its token" if wrong else ""
    if key in ("extra_special_tokens", "additional_special_tokens"):
        if not isinstance(value, list | dict):
            return f"is {value!r:.80} instead of a list of tokens, or of an object with their names"
        if isinstance(value, list) and (wrong := [token for token in value if not _is_token(token)]):
            return f"has {wrong[0]!r:.80} instead of a token: a text, or an object with a text as 'content'"
    if key == "chat_template":
        return _find_wrong_template(value)
    if key.endswith("_token") and isinstance(value, dict) and not _is_object(value):
        return f"is {value!r:.80}: a token is a text, or an object with a text as 'content'"
    return ""


def _find_wrong_template(value: Any) -> str:
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        texts = [text for entry in named for text in (entry.get("name"), entry.get("template"))]
        right = len(named) == len(value) and all(isinstance(text, str) for text in texts)
    elif isinstance(value, dict):
        right = all(isinstance(text, str) for text in value.values())
    else:
        right = isinstance(value, str)
    return "" if right else f"is {value!r:.80} instead of a text, or of texts with their names"


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or _is_object(value)


def _is_object(token: Any) -> bool:
    return isinstance(token, dict) and isinstance(token.get("content"), str)


def _shown(key: str, value: Any) -> str:
    return f"{key!r:.40}: {value!r:.40}"


def _read_ids(path: Path) -> dict[str, Any]:
    """The ids of special tokens in a file of the model: each a number, a list of numbers, or null."""
    found = _read_json(path)
    ids = {key: found[key] for key in _MODEL_IDS if key in found}
    for key, value in ids.items():
        several = value if isinstance(value, list) else [value]
        if value is not None and not all(type(i) is int and abs(i) < 2**32 for i in several):
            raise TokenizerError(f"{path}: {key} is {value!r:.80} instead of an id or a list of ids")
    return ids


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def text_of(token: str | dict[str, Any]) -> str:
    return str(token["content"]) if isinstance(token, dict) else token
