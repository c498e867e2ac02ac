"""Text to ids and back, by what a folder says: the vocabulary, which tokens are special, where generation stops, how a
chat is written. What it makes of a text is what transformers makes of it.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import tokenizers

from rollgraph.tokenizer.chat_template import compile_template, describe_failure
from rollgraph.tokenizer.files import FETCH_AGAIN, TokenizerError, TokenizerFiles, text_of

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}, and what else the template reads

_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order that gives new ones transformers' ids


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
        with _about(f"{self.name}: tokenizer.json cannot be used", FETCH_AGAIN):
            self._backend = tokenizers.Tokenizer.from_str(files.tokenizer_json)
            self._backend.no_truncation()  # settings of whoever saved the file; here a text is encoded whole
            self._backend.no_padding()
        with _about(f"{self.name}: an entry of tokenizer_config.json is malformed", "compare it with tokenizer.json"):
            self.special_tokens, self.chat_templates = files.special_tokens, files.chat_templates
            self._add_declared_tokens()
        with _about(f"{self.name}: tokenizer.json cannot be used", FETCH_AGAIN):
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
        try:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special)
        except BaseException as error:
            if not _is_the_librarys(error):
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
        """The text of a chat; `template` is a Jinja source or the name of one of `chat_templates`."""
        source = self._choose_template(template, with_tools=tools is not None)
        given = {"documents": None, **self.special_tokens, **variables}
        given |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return compile_template(source).render(given)
        except Exception as error:  # a template can fail in any way that Python can
            raise describe_failure(error) from error

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
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # plain Exceptions and, where its code panics, what is not even one
            raise TokenizerError(f"cannot encode {text!r:.80}: {error}") from error

    def _add_declared_tokens(self) -> None:
        """Tokens that only the config declares join the vocabulary, as they do in transformers."""
        config = self._files.config
        declared = config.get("added_tokens_decoder") or {}
        self._backend.add_tokens([tokenizers.AddedToken(**declared[i]) for i in sorted(declared, key=int)])
        present = {token.content: token for token in self._backend.get_added_tokens_decoder().values()}
        named = [self.special_tokens[key] for name in _NAMES if (key := f"{name}_token") in self.special_tokens]
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        # A dict's are among the special tokens. Those that have a name become special, others stay what they were.
        others = [] if isinstance(extra, dict) else [t for t in map(text_of, extra) if t not in present]
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


@contextmanager
def _about(what: str, advice: str) -> Iterator[None]:
    """What the library raises inside says what it is about, and what to do."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if not _is_the_librarys(error):
            raise
        raise TokenizerError(f"{what} ({error}); {advice}") from error


def _is_the_librarys(error: BaseException) -> bool:
    """Not somebody's wish to stop: its errors are of any kind and, where its code panics, not even an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _listed(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
