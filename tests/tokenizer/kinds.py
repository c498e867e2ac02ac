"""Small tokenizers of every kind, folders with their files, and the tokenizers that transformers loads from these."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from rollgraph.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    TokenizerFiles,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "A tokenizer reads text and writes numbers; numbers come back as text.",
    "naïve café, 日本語のテキスト, and three emoji: 😀😃🚀",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 22))  # 23",
] * 3
TEXTS = [
    "",
    " ",
    "The quick brown fox",
    "  leading and trailing  ",
    "an unseen wörd: 🦊🦊 and 中文",
    "new\n\nlines\tand tabs",
    "a token <s> spelled out</s> in the text",
]


# Four families of tokenizers, which differ mostly in how they decode.


def byte_level() -> Backend:
    """As in Llama 3 and Qwen: characters outside the vocabulary are split into bytes, over several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    leading = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), leading])
    return backend


def byte_fallback() -> Backend:
    """As in Llama 2 and Gemma: spaces are ▁, and characters outside the vocabulary are tokens <0xNN>."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=120))
    learned = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", *learned["vocab"]]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [("▁", "▁"), *map(tuple, learned["merges"])]
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def word_piece() -> Backend:
    """As in BERT: parts of a word begin with ##, and words are joined by spaces."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    around = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 3), ("[SEP]", 4)])
    backend.post_processor = around
    return backend


def words() -> Backend:
    """No decoder: tokens are joined by spaces."""
    backend = Backend(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(CORPUS, trainers.WordLevelTrainer(vocab_size=60, special_tokens=special))
    return backend


KINDS: dict[str, Callable[[], Backend]] = {f.__name__: f for f in (byte_level, byte_fallback, word_piece, words)}
JSON = {name: make().to_str() for name, make in KINDS.items()}
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def write(folder: Path, kind: str = "byte_level", **files: Any) -> Path:
    """Write a folder with a tokenizer. `config_json={...}` becomes the file config.json; a str is written unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"tokenizer_json": JSON[kind], "tokenizer_config_json": CONFIG, **files}
    for key, content in contents.items():
        name, _, suffix = key.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **flags}


def of_kind(kind: str, **config: Any) -> Tokenizer:
    return Tokenizer(TokenizerFiles(JSON[kind], CONFIG | config))


def peer_of(folder: Path) -> Any:
    return pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(str(folder))


def assert_equal_to_peer(ours: Tokenizer, peer: Any) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == peer.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip) == peer.decode(ids, skip_special_tokens=skip)
    assert ours.vocab == peer.get_vocab()
    assert ours.special_tokens == peer.special_tokens_map
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        assert getattr(ours, f"{name}_id") == getattr(peer, f"{name}_token_id"), name


BYTES = ByteTokenizer()
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello <|im_end|> & <b>goodbye</b> 'quoted'"}],
    [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "Wie heißt 日本? 🚀"},
        {"role": "assistant", "content": "日本\n", "thought": "\nhm\n"},
        {"role": "user", "content": "And the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "weather", "arguments": {"city": "東京"}}]},
        {"role": "tool", "content": '{"°C": 21}'},
        {"role": "assistant", "content": "21 °C", "thought": "easy"},
        {"role": "user", "content": "Thanks {{ messages }}"},
    ],
]
