"""Tokenizers from a folder: vocabulary, special tokens, stop tokens, and rendered chats.

Ids and texts are the same as with transformers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import tokenizers

from rollgraph.tokenizer.chat_template import compile_template, template_error
from rollgraph.tokenizer.files import FETCH_AGAIN, TokenizerError, TokenizerFiles, token_text

# -- the tokenizer of a folder ---------------------------------------------------------------------

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}, and any other field that the template uses

_SPECIAL_NAMES = (
    "bos",
    "eos",
    "unk",
    "sep",
    "pad",
    "cls",
    "mask",
)  # this order gives new tokens the same ids as transformers


class Tokenizer:
    """A Hugging Face tokenizer.

    - `vocab`: token -> id; `vocab_size`: the largest id + 1
    - `bos_id`, `eos_id`, `unk_id`, `sep_id`, `pad_id`, `cls_id`, `mask_id`: None if there is no such token
    - `special_ids`: the ids that `decode` skips
    - `stop_ids`: eos, and the ids at which the model's configs say to stop
    - `special_tokens`: "bos_token" -> text; `chat_templates`: name -> source
    - `name`: the folder it was loaded from; `files`: what it was made from, and `save` writes
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        # Without a folder, a hash is the name: Megatron distinguishes tokenizers and their cached data by name.
        self.name = files.name or "sha256:" + hashlib.sha256(files.tokenizer_json.encode()).hexdigest()[:16]
        with _library_errors(f"{self.name}: tokenizer.json cannot be used", FETCH_AGAIN):
            self._backend = tokenizers.Tokenizer.from_str(files.tokenizer_json)
            self._backend.no_truncation()  # the file may set these, but we always encode a whole text
            self._backend.no_padding()
        with _library_errors(
            f"{self.name}: an entry of tokenizer_config.json is malformed", "compare it with tokenizer.json"
        ):
            self.special_tokens = files.special_tokens
            self.chat_templates = files.chat_templates
            self._add_declared_tokens()
        with _library_errors(f"{self.name}: tokenizer.json cannot be used", FETCH_AGAIN):
            self.vocab: dict[str, int] = self._backend.get_vocab()
            self.vocab_size = max(self.vocab.values(), default=-1) + 1
            self._known_ids = frozenset(self.vocab.values())
            self.special_ids = self._find_special_ids()
        self.bos_id = self._find_id("bos")
        self.eos_id = self._find_id("eos")
        self.unk_id = self._find_id("unk")
        self.sep_id = self._find_id("sep")
        self.pad_id = self._find_id("pad")
        self.cls_id = self._find_id("cls")
        self.mask_id = self._find_id("mask")
        self.stop_ids = frozenset([*_as_list(self.eos_id), *_as_list(files.model_ids.get("eos_token_id"))])

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Self:
        return cls(TokenizerFiles.read(Path(folder)))

    def save(self, folder: str | os.PathLike[str]) -> None:
        self.files.write(Path(folder))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text. With `special`, the post-processor adds its tokens, such as a leading bos.

        If the text contains the text of a special token, it always becomes that token, as in transformers.
        """
        ids: list[int] = self._run_encoder(self._backend.encode, text, special).ids
        return ids

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        return [encoding.ids for encoding in self._run_encoder(self._backend.encode_batch_fast, list(texts), special)]

    def encode_with_offsets(self, text: str, special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids, and the start and end of each in the text. An added token is an empty span after the previous token.

        Some tokenizers exclude the space that a token begins with.
        """
        encoding = self._run_encoder(self._backend.encode, text, special)
        offsets = []
        end = 0
        for added, span in zip(encoding.special_tokens_mask, encoding.offsets, strict=True):
            start, end = (end, end) if added else span
            offsets.append((start, end))
        return encoding.ids, offsets

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        for i in ids:
            if i not in self._known_ids:
                raise TokenizerError(f"id {i} is not in the vocabulary of {self.name} ({self.vocab_size} ids)")
        try:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special)
        except BaseException as error:
            if not _is_from_library(error):
                raise
            raise TokenizerError(f"{self.name}: cannot decode {list(ids)!r:.80} ({error})") from error

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """Render a chat as text. `template` is Jinja source, or a name in `chat_templates`."""
        source = self._choose_template(template, with_tools=tools is not None)
        context = {"documents": None, **self.special_tokens, **variables}
        context |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return compile_template(source).render(context)
        except Exception as error:  # a template can raise anything
            raise template_error(error) from error

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The ids of `render_chat(messages, **options)`. The template writes special tokens, so none are added."""
        return self.encode(self.render_chat(messages, **options), special=False)

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids of single bytes (`<0xE2>`), which sentencepiece models use for characters without a token."""
        ids = set()
        for byte in range(256):
            token = f"<0x{byte:02X}>"
            if token in self.vocab and self.decode([self.vocab[token]], skip_special=False) != token:
                ids.add(self.vocab[token])
        return frozenset(ids)

    def _run_encoder(self, function: Callable[..., Any], text: str | list[str], special: bool) -> Any:
        try:
            return function(text, add_special_tokens=special)
        except TypeError as error:
            raise TokenizerError(f"cannot encode {text!r:.80}: it is not text, or has half a surrogate pair") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # any Exception, or a panic of the library, which is not an Exception
            raise TokenizerError(f"cannot encode {text!r:.80}: {error}") from error

    def _add_declared_tokens(self) -> None:
        """Add tokens that only the config declares to the vocabulary, as transformers does."""
        config = self.files.config
        declared = config.get("added_tokens_decoder") or {}
        self._backend.add_tokens([tokenizers.AddedToken(**declared[i]) for i in sorted(declared, key=int)])
        existing = {token.content: token for token in self._backend.get_added_tokens_decoder().values()}
        # Named tokens become special; an existing one keeps its other flags. New ones get ids in this order: bos, eos
        # and so on, then the model's own. Extra tokens are added only if there is no such token.
        known_names = [f"{name}_token" for name in _SPECIAL_NAMES]
        texts = [self.special_tokens[name] for name in known_names if name in self.special_tokens]
        texts += self.special_tokens.values()  # the known ones again: `dict.fromkeys` drops them
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        if not isinstance(extra, dict):  # tokens of a dict are in `special_tokens` already
            texts += [text for text in map(token_text, extra) if text not in existing]
        self._backend.add_special_tokens([existing.get(text, text) for text in dict.fromkeys(texts)])

    def _find_special_ids(self) -> frozenset[int]:
        """The ids that `decode` skips. We try each, because flags in the config may differ from tokenizer.json's."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(i for i in added if self.decode([i]) != self.decode([i], skip_special=False))

    def _find_id(self, name: str) -> int | None:
        if f"{name}_token" in self.files.config:  # an explicit null means that there is no such token
            return self.vocab.get(self.special_tokens.get(f"{name}_token", ""))
        ids = _as_list(self.files.model_ids.get(f"{name}_token_id"))
        return ids[0] if ids else None

    def _choose_template(self, template: str | None, with_tools: bool) -> str:
        if template is None:
            template = "tool_use" if with_tools and "tool_use" in self.chat_templates else "default"
        if template not in self.chat_templates and "{" not in template:
            available = f"only {sorted(self.chat_templates)}" if self.chat_templates else "nor any other"
            raise TokenizerError(f"{self.name} has no chat template {template!r}, {available}; pass one as template=")
        return self.chat_templates.get(template, template)


@contextmanager
def _library_errors(what: str, advice: str) -> Iterator[None]:
    """Turn errors of the library into a TokenizerError that says what failed and what to do."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if not _is_from_library(error):
            raise
        raise TokenizerError(f"{what} ({error}); {advice}") from error


def _is_from_library(error: BaseException) -> bool:
    """Whether the library may have raised this: any Exception or a Rust panic, but not Ctrl-C or an exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _as_list(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    if isinstance(ids, list):
        return ids
    return [ids]


# -- a tokenizer of bytes, and loading either ------------------------------------------------------

_BYTE_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 256, 257 and 258


def _make_byte_json() -> str:
    """A tokenizer.json whose vocabulary is the 256 bytes and the special tokens."""
    # ByteLevel writes each byte as one visible character: the byte itself, or the next unused one from U+0100 on.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = 0x100
    vocab = {}
    for byte in range(256):
        if byte in visible:
            vocab[chr(byte)] = byte
        else:
            vocab[chr(spare)] = byte
            spare += 1
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": 256 + i, "content": text, **flags} for i, text in enumerate(_BYTE_SPECIAL_TOKENS)]
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"added_tokens": special, "pre_tokenizer": level, "decoder": level, "model": model})


_BYTE_CHAT = """\
{{ bos_token }}
{%- if tools %}tools: {{ tools | tojson }}{{ eos_token }}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
_BYTE_CONFIG = {
    "bos_token": _BYTE_SPECIAL_TOKENS[0],
    "eos_token": _BYTE_SPECIAL_TOKENS[1],
    "pad_token": _BYTE_SPECIAL_TOKENS[2],
    "chat_template": _BYTE_CHAT,
}
_BYTE_FILES = TokenizerFiles(_make_byte_json(), _BYTE_CONFIG, name="ByteTokenizer")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, then bos, eos and pad. `encode` adds none of these three.

    It has a tokenizer.json like any other tokenizer, so transformers can load its folder. Invalid UTF-8 decodes to
    U+FFFD, as with `bytes.decode(errors="replace")`.
    """

    def __init__(self, files: TokenizerFiles = _BYTE_FILES) -> None:
        if not _is_byte_tokenizer(files):
            raise TokenizerError(f"{files.name}: its tokenizer.json is of another kind; use load_tokenizer")
        super().__init__(files)


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer | ByteTokenizer:
    """Load the tokenizer of a folder, or a ByteTokenizer if one was saved there."""
    files = TokenizerFiles.read(Path(folder))
    if _is_byte_tokenizer(files):
        return ByteTokenizer(files)
    return Tokenizer(files)


def _is_byte_tokenizer(files: TokenizerFiles) -> bool:
    return files.tokenizer_json == _BYTE_FILES.tokenizer_json
