"""The files of a tokenizer: what they say, and writing them back. Owns where each thing is written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

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
        if not path.is_file():
            others = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
            besides = f", and {others[0]} alone is not read" if others else ""
            convert = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            raise TokenizerError(f"{path}: no such file{besides}; write it once with transformers: {convert}")
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # newer files have it, and then the map is a leftover
            config |= _read_json(folder / "special_tokens_map.json")
        templates = {name: _read_text(file) for name, file in _template_files(folder).items()}
        config |= {"chat_template": templates} if templates else {}
        of_model, of_generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
        ids = {key: of_generation.get(key, of_model.get(key)) for key in _MODEL_IDS}
        return cls(_read_text(path), config, {key: i for key, i in ids.items() if i is not None}, str(folder))

    def write(self, folder: Path) -> None:
        """Write the files that `read` and transformers read, over those of another tokenizer if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        for stale in _template_files(folder).values():  # would win over what is written here
            stale.unlink()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config, **self.special_tokens}
        if templates := self.chat_templates:
            named = [{"name": name, "template": text} for name, text in templates.items()]
            config["chat_template"] = templates["default"] if set(templates) == {"default"} else named
        (folder / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8", newline="")
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
    return named | ({"default": default} if default.is_file() else {})


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # line ends as they are
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read ({error}); {FETCH_AGAIN}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """An object, empty if there is no file."""
    try:
        value = json.loads(_read_text(path)) if path.is_file() else {}
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path}: is not JSON ({error}); {FETCH_AGAIN}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds a {type(value).__name__} instead of an object; {FETCH_AGAIN}")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def text_of(token: str | dict[str, Any]) -> str:
    return str(token["content"]) if isinstance(token, dict) else token
