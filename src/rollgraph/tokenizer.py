"""Text to ids and back: Hugging Face tokenizer files, chat templates, streams of ids, and Megatron's interface.

`Tokenizer` owns what a folder says: the vocabulary, which tokens are special, where generation stops, how a chat is
written. `ByteTokenizer` is one that needs no files. What they make of a text is what transformers makes of it.
Nothing here knows of models or tensors. A chat template is a program that came with somebody's weights, so it runs in
a sandbox.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}, and what else the template reads

_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order that gives new ones transformers' ids
_MODEL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OTHER_FORMATS = ("tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")
_FETCH_AGAIN = "fetch the file again: a download that was cut off or a Git LFS pointer looks like this"


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
        return {key: _text_of(value) for key, value in named.items() if isinstance(value, str | dict)}

    @property
    def chat_templates(self) -> dict[str, str]:
        entry = self.config.get("chat_template") or {}
        if isinstance(entry, list):
            return {item["name"]: item["template"] for item in entry}
        return {"default": entry} if isinstance(entry, str) else dict(entry)


class Tokenizer:
    """A tokenizer of Hugging Face's kind.

    Its attributes: `vocab` (token -> id), `vocab_size` (the largest id + 1), the ids `bos_id` to `mask_id` (None if
    there is no such token), `special_ids`, `stop_ids` (eos and what else the model's configs stop at),
    `special_tokens` ("bos_token" -> text), `chat_templates` by name, and the `name`: the folder it came from.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        # Without a folder, the content names it: Megatron tells tokenizers, and caches of their data, apart by name.
        self.name = files.name or "sha256:" + hashlib.sha256(files.tokenizer_json.encode()).hexdigest()[:16]
        try:
            self._backend = tokenizers.Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises nothing more specific
            raise TokenizerError(f"{self.name}: tokenizer.json cannot be used ({error}); {_FETCH_AGAIN}") from error
        self._backend.no_truncation()  # settings of whoever saved the file; here a text is encoded whole
        self._backend.no_padding()
        try:
            self.special_tokens, self.chat_templates = files.special_tokens, files.chat_templates
            self._add_declared_tokens()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(f"{self.name}: an entry of tokenizer_config.json is malformed ({error!r})") from error
        self.vocab: dict[str, int] = self._backend.get_vocab()
        self.vocab_size = max(self.vocab.values(), default=-1) + 1
        self._known = frozenset(self.vocab.values())
        # Found by what `decode` skips: a flag of the config that differs from tokenizer.json's says nothing sure.
        added = [[i] for i in self._backend.get_added_tokens_decoder()]
        self.special_ids = frozenset(ids[0] for ids in added if self.decode(ids) != self.decode(ids, False))
        ids = map(self._find_id, _NAMES)
        self.bos_id, self.eos_id, self.unk_id, self.sep_id, self.pad_id, self.cls_id, self.mask_id = ids
        self.stop_ids = frozenset([*_listed(self.eos_id), *_listed(files.model_ids.get("eos_token_id"))])

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Self:
        return cls(TokenizerFiles.read(Path(folder)))

    def save(self, folder: str | os.PathLike[str]) -> None:
        self._files.write(Path(folder))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; `special` lets the post-processor add its tokens, such as a leading bos.

        A special token that is spelled out in the text becomes that token either way, as in transformers.
        """
        ids: list[int] = self._run(self._backend.encode, text, special).ids
        return ids

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        return [encoding.ids for encoding in self._run(self._backend.encode_batch_fast, list(texts), special)]

    def encode_with_offsets(self, text: str, special: bool = True) -> tuple[list[int], list[int]]:
        """The ids, and the character at which each begins; a token that is added begins where the last one ended."""
        encoding = self._run(self._backend.encode, text, special)
        starts, end = [], 0
        for added, span in zip(encoding.special_tokens_mask, encoding.offsets, strict=True):
            start, end = (end, end) if added else span
            starts.append(start)
        return encoding.ids, starts

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        unknown = next((i for i in ids if i not in self._known), None)
        if unknown is not None:
            raise TokenizerError(f"id {unknown} is not in the vocabulary of {self.name} ({self.vocab_size} ids)")
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a chat; `template` is a Jinja source or the name of one of `chat_templates`."""
        source = self._choose_template(template, with_tools=tools is not None)
        given = {"documents": None, **self.special_tokens, **variables}
        given |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return _compile(source).render(given)
        except Exception as error:  # a template can fail in any way that Python can
            raise _describe_failure(error) from error

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The ids of `render_chat(messages, **options)`; the template writes special tokens, so none is added."""
        return self.encode(self.render_chat(messages, **options), special=False)

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens of one byte, which sentencepiece models have for characters outside their vocabulary."""
        found = {token: self.vocab[token] for b in range(256) if (token := f"<0x{b:02X}>") in self.vocab}
        return frozenset(i for token, i in found.items() if self.decode([i], skip_special=False) != token)

    def _run(self, function: Callable[..., Any], text: str | list[str], special: bool) -> Any:
        try:
            return function(text, add_special_tokens=special)
        except TypeError as error:
            raise TokenizerError(f"cannot encode {text!r:.80}: not text, or half of a surrogate pair in it") from error

    def _add_declared_tokens(self) -> None:
        """Tokens that only the config declares join the vocabulary, as they do in transformers."""
        config = self._files.config
        declared = config.get("added_tokens_decoder") or {}
        self._backend.add_tokens([tokenizers.AddedToken(**declared[i]) for i in sorted(declared, key=int)])
        present = {token.content: token for token in self._backend.get_added_tokens_decoder().values()}
        named = [self.special_tokens[key] for name in _NAMES if (key := f"{name}_token") in self.special_tokens]
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        # A dict's are among the special tokens. Those that have a name become special, others stay what they were.
        others = [] if isinstance(extra, dict) else [t for t in map(_text_of, extra) if t not in present]
        texts = dict.fromkeys([*named, *self.special_tokens.values(), *others])
        self._backend.add_special_tokens([present.get(text, text) for text in texts])

    def _find_id(self, name: str) -> int | None:
        if f"{name}_token" in self._files.config:  # an explicit null is an answer: there is none
            return self.vocab.get(self.special_tokens.get(f"{name}_token", ""))
        return next(iter(_listed(self._files.model_ids.get(f"{name}_token_id"))), None)

    def _choose_template(self, template: str | None, with_tools: bool) -> str:
        if template is None:
            template = "tool_use" if with_tools and "tool_use" in self.chat_templates else "default"
        if template not in self.chat_templates and "{" not in template:
            known = f"only {sorted(self.chat_templates)}" if self.chat_templates else "nor any other"
            raise TokenizerError(f"{self.name} has no chat template {template!r}, {known}; pass one as template=")
        return self.chat_templates.get(template, template)


def _make_byte_json() -> str:
    # ByteLevel spells each byte as one visible character: itself, or the next one from U+0100 on.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    vocab = {chr(byte if byte in visible else next(spare)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": 256 + i, "content": f"<|{name}|>", **flags} for i, name in enumerate(("bos", "eos", "pad"))]
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"added_tokens": special, "pre_tokenizer": level, "decoder": level, "model": model})


_BYTE_CHAT = """\
{{ bos_token }}
{%- if tools %}tools: {{ tools | tojson }}{{ eos_token }}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
_BYTE_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
_BYTE_CONFIG = {**_BYTE_TOKENS, "chat_template": _BYTE_CHAT}
_BYTE_FILES = TokenizerFiles(_make_byte_json(), _BYTE_CONFIG, name="ByteTokenizer")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, then bos, eos and pad; `encode` adds none of these by itself.

    It is a tokenizer.json like any other, so transformers reads its folder too. Bytes that are no UTF-8 decode to
    U+FFFD, as by `bytes.decode(errors="replace")`.
    """

    def __init__(self, files: TokenizerFiles = _BYTE_FILES) -> None:
        if files.tokenizer_json != _BYTE_FILES.tokenizer_json:
            raise TokenizerError(f"{files.name}: its tokenizer.json is of another kind; use load_tokenizer")
        super().__init__(files)


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer | ByteTokenizer:
    """The tokenizer of a folder; a ByteTokenizer if one was saved there."""
    files = TokenizerFiles.read(Path(folder))
    return (ByteTokenizer if files.tokenizer_json == _BYTE_FILES.tokenizer_json else Tokenizer)(files)


class Detokenizer:
    """A stream of ids as text, each part given out once no later id can change it.

    Only the last ids are decoded again. What is new is the difference between two decodings that begin at the same
    id, so it does not matter that decoders treat their first id apart.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that have been given out
        self._pieces: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """All that has been given out."""
        return "".join(self._pieces)

    def push(self, id: int) -> str:
        """The text that has become certain with this id, most often its own."""
        if self._finished:
            raise TokenizerError("this stream was finished; make a new Detokenizer")
        if self._skip_special and id in self._tokenizer.special_ids:
            return ""
        if id in self._tokenizer.byte_ids:
            self._window.append(id)  # a run of these is decoded as a whole: one byte more can break all of it
            return ""
        text = self._decode([*self._window, id])
        self._window.append(id)
        # Bytes of an unfinished character decode to one U+FFFD at the end, and only this can still change.
        certain = len(text) - text.endswith("\ufffd")
        self._pieces.append(text[self._given : certain])
        self._given = certain
        if certain == len(text):
            self._window = [id]  # context enough for what follows
            self._given = len(self._decode(self._window))
        elif len(self._window) > 8:  # invalid bytes without end; an unfinished character has three at most
            self._window = self._window[-3:]
            self._given = len(self._decode(self._window)) - 1
        return self._pieces[-1]

    def finish(self) -> str:
        """The rest, now that nothing follows."""
        self._pieces.append(self._decode(self._window)[self._given :])
        self._window, self._given, self._finished = [], 0, True
        return self._pieces[-1]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


class _TokenId:
    """The id of a special token, which Megatron expects to fail if there is none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, view: MegatronTokenizerView, owner: type | None = None) -> int:
        found: int | None = getattr(view.tokenizer, f"{self._name}_id")
        if found is None:
            raise NotImplementedError(f"{view.tokenizer.name} has no {self._name} token")
        return found


class MegatronTokenizerView:
    """Megatron's legacy tokenizer interface over a Tokenizer.

    As in Megatron's Hugging Face tokenizers, `tokenize` lets the post-processor add its tokens, `detokenize` writes
    special tokens out, and `eod` is the eos token.
    """

    bos, eos, pad, cls, sep, mask = (_TokenId() for _ in range(6))

    def __init__(self, tokenizer: Tokenizer, *tokenizer_paths: str, **tokenizer_options: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab = tokenizer.vocab
        self.inv_vocab = {i: token for token, i in tokenizer.vocab.items()}
        self.vocab_size = tokenizer.vocab_size
        paths, options = list(tokenizer_paths or (tokenizer.name,)), {k: str(v) for k, v in tokenizer_options.items()}
        self.unique_identifiers = OrderedDict({"class": type(self).__name__, "tokenizer_path": paths, **options})
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)

    @property
    def eod(self) -> int:
        return self.eos

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def detokenize(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special=False)

    def offsets(self, ids: Iterable[int], text: str) -> list[int]:
        """The character of `text` at which each token begins; a part of a character begins where the character does.

        Sampled ids need not be the encoding of their text; those begin where the text decoded before them ends.
        """
        wanted = [int(i) for i in ids]
        for special in (True, False):
            encoded, starts = self.tokenizer.encode_with_offsets(text, special)
            if encoded == wanted:
                return starts
        for skip_special in (False, True):
            if self.tokenizer.decode(wanted, skip_special) == text:
                stream = Detokenizer(self.tokenizer, skip_special)
                return list(accumulate((len(stream.push(i)) for i in wanted[:-1]), initial=0))
        raise TokenizerError(f"no offsets: these {len(wanted)} ids are not the text {text!r:.80}")


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training masks; here its body is rendered and no more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    # The type itself would offer `dict.update`, and with it a way to write to the caller's messages.
    environment.globals["dict"] = lambda *args, **values: dict(*args, **values)
    return environment.from_string(source)


def _describe_failure(error: Exception) -> TokenizerError:
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    line = error.lineno if isinstance(error, TemplateSyntaxError) else lines[-1] if lines else "unknown"
    message = error.message if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return TokenizerError(f"chat template, line {line}: {message}")


def _template_files(folder: Path) -> dict[str, Path]:
    named = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    default = folder / "chat_template.jinja"
    return named | ({"default": default} if default.is_file() else {})


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # line ends as they are
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read ({error}); {_FETCH_AGAIN}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """An object, empty if there is no file."""
    try:
        value = json.loads(_read_text(path)) if path.is_file() else {}
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path}: is not JSON ({error}); {_FETCH_AGAIN}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds a {type(value).__name__} instead of an object; {_FETCH_AGAIN}")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _text_of(token: str | dict[str, Any]) -> str:
    return str(token["content"]) if isinstance(token, dict) else token


def _listed(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
