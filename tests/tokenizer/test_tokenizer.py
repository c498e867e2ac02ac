"""Tokenizers compared with transformers, streams with whole decodings, and templates that misbehave."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from rollgraph.tokenizer import (
    ByteTokenizer,
    Detokenizer,
    MegatronTokenizerView,
    Tokenizer,
    TokenizerError,
    TokenizerFiles,
    load_tokenizer,
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
    """As in BERT: parts of a word begin with ##, and a space is put between words."""
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
    """A folder with a tokenizer; `config_json={...}` is the file config.json, a str is written as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"tokenizer_json": JSON[kind], "tokenizer_config_json": CONFIG, **files}
    for key, content in contents.items():
        name, _, suffix = key.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.{suffix}").write_text(text, encoding="utf-8")
    return folder


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


# Encoding and decoding


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path, kind)
    ours = Tokenizer.from_folder(folder)
    assert_equal_to_peer(ours, peer_of(folder))
    for special in (True, False):
        assert ours.encode_batch(TEXTS, special) == [ours.encode(text, special) for text in TEXTS]
    assert ours.encode_batch([]) == []


def test_special_adds_what_the_post_processor_adds() -> None:
    tokenizer = of_kind("byte_level")
    plain = tokenizer.encode("fox", special=False)
    assert tokenizer.encode("fox") == [tokenizer.bos_id, *plain]
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
    assert tokenizer.decode(tokenizer.encode("fox"), skip_special=False) == "<s>fox"


def test_truncation_and_padding_of_the_file_are_kept_but_not_applied(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=64)
    folder = write(tmp_path / "a", tokenizer_json=backend.to_str())
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode(CORPUS[0]) == of_kind("byte_level").encode(CORPUS[0])
    assert len(tokenizer.encode("fox")) < 64
    tokenizer.save(tmp_path / "b")
    assert (tmp_path / "b/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_the_vocabulary_counts_added_tokens_and_holes() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    backend.add_tokens(["<x>"])
    tokenizer = Tokenizer(TokenizerFiles(backend.to_str()))
    assert tokenizer.vocab == {"a": 0, "b": 7, "<x>": backend.token_to_id("<x>")}
    assert tokenizer.vocab_size == max(tokenizer.vocab.values()) + 1 >= 8
    assert tokenizer.decode([0, 7]) == "a b"
    for wrong in (-1, 3, tokenizer.vocab_size, 2**40):
        with pytest.raises(TokenizerError, match=rf"^id {wrong} is not in .* \({tokenizer.vocab_size} ids\)"):
            tokenizer.decode([0, wrong, -5])


@pytest.mark.parametrize("text", ["half of a pair: \ud83d", None, 5])
def test_a_value_that_is_not_text_is_named(text: Any) -> None:
    tokenizer = of_kind("words")
    for call in (lambda: tokenizer.encode(text), lambda: tokenizer.encode_batch(["a", text])):
        with pytest.raises(TokenizerError, match=r"cannot encode .*not text, or has half a surrogate pair"):
            call()


def test_library_errors_name_the_text_that_caused_them() -> None:
    """A bare Exception, and a panic, which is not an Exception. The next text is encoded normally."""
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0], ["b", -2.0]], "byte_fallback": False}
    unknown = Tokenizer(TokenizerFiles(json.dumps({"added_tokens": [], "model": model})))
    pieces = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}
    panics = Tokenizer(TokenizerFiles(json.dumps({"added_tokens": [], "model": model, "post_processor": processor})))
    for tokenizer, text, reason in ((unknown, "xyz", "unk_id"), (panics, "ab", "")):
        with pytest.raises(TokenizerError, match=rf"cannot encode '{text}': .*{reason}"):
            tokenizer.encode(text)
        with pytest.raises(TokenizerError, match=rf"cannot encode \['ab', '{text}'\]: .*{reason}"):
            tokenizer.encode_batch(["ab", text])
        with pytest.raises(TokenizerError, match=rf"cannot encode '{text}': .*{reason}"):
            tokenizer.encode_with_offsets(text)
        assert tokenizer.encode("ab", special=False) == [0, 1]


# Files


def token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **flags}


DECLARED = {"9000": token("<zwei>", special=False), "8000": token("<eins>", special=True)}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config_json": {}},
        {"tokenizer_config_json": {**CONFIG, "pad_token": None, "sep_token": "</s>", "add_bos_token": True}},
        {"tokenizer_config_json": {"eos_token": {"__type": "AddedToken", **token("</s>")}, "mask_token": "fox"}},
        {"special_tokens_map_json": {"bos_token": token("</s>"), "eos_token": "<s>", "pad_token": "<pad>"}},
        {
            "tokenizer_config_json": {**CONFIG, "sep_token": "<zwei>", "added_tokens_decoder": DECLARED},
            "special_tokens_map_json": {"bos_token": "</s>", "pad_token": "<pad>"},
        },
        # tokens that tokenizer.json lacks
        {"tokenizer_config_json": {"mask_token": "<m>", "pad_token": "<p>", "cls_token": "<c>", "bos_token": "<b>"}},
        {"tokenizer_config_json": {**CONFIG, "pad_token": "<p>", "extra_special_tokens": ["<e>", "<p>", "<f>"]}},
        {"tokenizer_config_json": {**CONFIG, "additional_special_tokens": ["<e>", "</s>"]}},
        {"tokenizer_config_json": {**CONFIG, "image_token": "<image>", "pad_token": "<p>"}},
        {"tokenizer_config_json": {**CONFIG, "extra_special_tokens": {"image_token": "<image>", "own": "<e>"}}},
    ],
)
def test_special_tokens_are_found_where_transformers_finds_them(tmp_path: Path, files: dict[str, Any]) -> None:
    folder = write(tmp_path / "a", **files)
    ours, peer = Tokenizer.from_folder(folder), peer_of(folder)
    assert_equal_to_peer(ours, peer)
    text = "x<eins> <zwei><e>fox<f> <p><image> y"
    assert ours.encode(text) == peer.encode(text)
    assert ours.decode(ours.encode(text)) == peer.decode(peer.encode(text), skip_special_tokens=True)
    ours.save(tmp_path / "b")
    assert_equal_to_peer(Tokenizer.from_folder(tmp_path / "b"), peer)
    assert_equal_to_peer(ours, peer_of(tmp_path / "b"))


def test_a_vocabulary_token_that_the_config_names_becomes_special(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "stop": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = write(tmp_path, tokenizer_json=backend.to_str(), tokenizer_config_json={"eos_token": "stop"})
    ours = Tokenizer.from_folder(folder)
    assert (ours.eos_id, ours.special_ids, ours.vocab_size) == (1, {1}, 2)
    assert ours.decode([0, 1]) == "a" == peer_of(folder).decode([0, 1], skip_special_tokens=True)


def test_a_token_that_is_named_becomes_special_and_keeps_its_flags(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken(f"<{name}>", lstrip=True, special=False) for name in ("named", "extra", "plain")])
    config = {**CONFIG, "mask_token": "<named>", "additional_special_tokens": ["<extra>"]}
    folder = write(tmp_path, tokenizer_json=backend.to_str(), tokenizer_config_json=config)
    ours, peer = Tokenizer.from_folder(folder), peer_of(folder)
    ids = ours.encode("x  <named>  <extra>  <plain>")
    assert ids == peer.encode("x  <named>  <extra>  <plain>")
    assert ours.decode(ids) == "x<extra><plain>" == peer.decode(ids, skip_special_tokens=True)


def test_ids_of_the_model_config_are_used_for_unnamed_tokens(tmp_path: Path) -> None:
    config = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    generation = {"eos_token_id": [5, 2]}
    files = {"tokenizer_config_json": {"bos_token": None}, "config_json": config, "generation_config_json": generation}
    tokenizer = Tokenizer.from_folder(write(tmp_path / "a", **files))
    assert tokenizer.bos_id is None  # because of the explicit null
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (5, 3, {5, 2})
    assert tokenizer.special_tokens == {}  # so that a template renders as in transformers
    tokenizer.save(tmp_path / "b")
    again = Tokenizer.from_folder(tmp_path / "b")
    assert (again.bos_id, again.eos_id, again.pad_id, again.stop_ids) == (None, 5, 3, {5, 2})


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, {2}),
        ({"config_json": {"eos_token_id": 5}}, {2, 5}),
        ({"config_json": {"eos_token_id": 4}, "generation_config_json": {"eos_token_id": [5, 1]}}, {1, 2, 5}),
        ({"config_json": {"eos_token_id": 4}, "generation_config_json": {"temperature": 0.6}}, {2, 4}),
        ({"tokenizer_config_json": {}}, set()),
        ({"tokenizer_config_json": {}, "generation_config_json": {"eos_token_id": 0}}, {0}),
    ],
)
def test_stop_ids(tmp_path: Path, files: dict[str, Any], stops: set[int]) -> None:
    assert Tokenizer.from_folder(write(tmp_path, **files)).stop_ids == stops


def test_saving_replaces_another_tokenizer_completely(tmp_path: Path) -> None:
    stale = write(
        tmp_path,
        "word_piece",
        tokenizer_config_json={"cls_token": "[CLS]", "chat_template": "stale {{ 1 }}"},
        special_tokens_map_json={"cls_token": "[CLS]", "sep_token": "[SEP]"},
        chat_template_jinja="stale {{ 2 }}",
        generation_config_json={"eos_token_id": 9, "temperature": 0.6},
    )
    write(stale / "additional_chat_templates", chat_jinja="stale {{ 3 }}")
    of_kind("byte_level", chat_template="new {{ 4 }}").save(stale)
    for tokenizer in (Tokenizer.from_folder(stale), load_tokenizer(stale)):
        assert type(tokenizer) is Tokenizer
        assert tokenizer.special_tokens == CONFIG
        assert tokenizer.chat_templates == {"default": "new {{ 4 }}"}
        assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.stop_ids) == (None, None, {2})
    assert json.loads((stale / "generation_config.json").read_text()) == {"temperature": 0.6}


def test_unrelated_settings_survive(tmp_path: Path) -> None:
    config = {**CONFIG, "model_max_length": 4096, "tokenizer_class": "Qwen2Tokenizer"}
    write(tmp_path / "b", generation_config_json={"top_p": 0.9, "eos_token_id": 1})
    folder = write(tmp_path / "a", tokenizer_config_json=config, generation_config_json={"eos_token_id": [2, 5]})
    Tokenizer.from_folder(folder).save(tmp_path / "b")
    assert json.loads((tmp_path / "b/tokenizer_config.json").read_text()) == config
    assert json.loads((tmp_path / "b/generation_config.json").read_text()) == {"top_p": 0.9, "eos_token_id": [2, 5]}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for load in (Tokenizer.from_folder, ByteTokenizer.from_folder, load_tokenizer):
        with pytest.raises(
            TokenizerError, match=r"/nowhere: no such folder; expected the one that holds tokenizer.json"
        ):
            load(tmp_path / "nowhere")
        with pytest.raises(TokenizerError, match=r"tokenizer.json: no such file; create it once with transformers"):
            load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x00sentencepiece")
    with pytest.raises(
        TokenizerError, match=r"no such file, and tokenizer.model alone is not supported; create it once"
    ):
        Tokenizer.from_folder(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_json", POINTER, r"tokenizer.json cannot be used \(.*Git LFS pointer"),
        ("tokenizer_json", JSON["words"][:-40], r"tokenizer.json cannot be used \(.*cut off"),
        ("tokenizer_json", "{}", r"tokenizer.json cannot be used"),
        ("tokenizer_config_json", '{"a": 1,', r"tokenizer_config.json: is not JSON \(.*line 1 column 9"),
        ("tokenizer_config_json", [], r"tokenizer_config.json: expected an object, not a list"),
        ("tokenizer_config_json", {"eos_token": {"text": "x"}}, r"an entry of tokenizer_config.json .*'content'"),
        ("tokenizer_config_json", {"chat_template": ["x"]}, r"an entry of tokenizer_config.json is malformed"),
        (
            "tokenizer_config_json",
            {"added_tokens_decoder": {"1": 5}},
            r"an entry of tokenizer_config.json is malformed",
        ),
        (
            "tokenizer_config_json",
            {"added_tokens_decoder": [{"content": "x"}]},
            r"tokenizer_config.json is malformed: added_tokens_decoder is \[.*\]; expected an object",
        ),
        (
            "tokenizer_config_json",
            {"added_tokens_decoder": {"one": {"content": "x"}}},
            r"added_tokens_decoder has 'one': .*; expected an id and its token",
        ),
        (
            "tokenizer_config_json",
            {"added_tokens_decoder": {"1": {"text": "x"}}},
            r"tokenizer_config.json is malformed",
        ),
        (
            "tokenizer_config_json",
            {"extra_special_tokens": 3},
            r"malformed: extra_special_tokens is 3; expected a list",
        ),
        (
            "tokenizer_config_json",
            {"additional_special_tokens": [3]},
            r"additional_special_tokens has 3; expected a token",
        ),
        ("tokenizer_config_json", {"chat_template": 3}, r"malformed: chat_template is 3; expected a string"),
        ("tokenizer_config_json", {"chat_template": {"default": 3}}, r"malformed: chat_template is .*'default': 3"),
        (
            "tokenizer_config_json",
            {"pad_token": {"content": 3}},
            r"malformed: pad_token is .*; expected a token: a string",
        ),
        (
            "special_tokens_map_json",
            {"bos_token": {}, "eos_token": {"a": 1}},
            r"special_tokens_map.json is .*eos_token",
        ),
        ("tokenizer_config_json", "[" * 100_000, r"tokenizer_config.json: cannot be read \(.* more than 100 deep"),
        ("tokenizer_json", "[" * 100_000, r"tokenizer.json cannot be used"),
        ("config_json", '{"a": %s}' % ("9" * 5000), r"[/]config.json: cannot be read \(.*more than 4300 digits"),
        (
            "generation_config_json",
            {"eos_token_id": {}},
            r"generation_config.json: eos_token_id is {}; expected an id",
        ),
        ("config_json", {"eos_token_id": [1, {}]}, r"[/]config.json: eos_token_id is \[1, {}\]; expected an id"),
        ("config_json", {"pad_token_id": "0"}, r"[/]config.json: pad_token_id is '0'; expected an id"),
        ("config_json", {"bos_token_id": 2**63}, r"[/]config.json: bos_token_id is 9223372036854775808; expected"),
        ("config_json", {"bos_token_id": True}, r"[/]config.json: bos_token_id is True; expected"),
        ("special_tokens_map_json", POINTER, r"special_tokens_map.json: is not JSON .*download the file again"),
        ("generation_config_json", "", r"generation_config.json: is not JSON"),
        ("config_json", "{'a': 1}", r"[/]config.json: is not JSON"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(write(tmp_path, **{name: content}))
    assert str(tmp_path) in str(caught.value)


NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_pipe_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(TokenizerError, match=rf"/{name}: is a named pipe, not a regular file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith((".jinja", "config.json"))])
def test_saving_replaces_links_but_not_their_targets(tmp_path: Path, name: str) -> None:
    shared, target = tmp_path / "shared", tmp_path / "target"
    shared.write_text("theirs")
    target.mkdir()
    (target / name).symlink_to(shared)
    (target / "generation_config.json").symlink_to(tmp_path / "nowhere")
    (target / "tokenizer_config.json").symlink_to(shared)
    tokenizer = ByteTokenizer()
    tokenizer.save(target)
    assert shared.read_text() == "theirs"
    assert not (tmp_path / "nowhere").exists()
    assert not (target / name).is_symlink()
    assert not (target / "tokenizer_config.json").is_symlink()
    assert load_tokenizer(target).encode("text") == tokenizer.encode("text")
    assert not list(target.glob("*incomplete*"))


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]], "continuing_subword_prefix": "##"}
PANICS = {
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "model": BPE,
    "decoder": {"type": "Strip", "content": "a", "start": 3, "stop": 3},
}


@pytest.mark.parametrize("part", PANICS)
def test_files_that_make_the_library_panic_are_named(tmp_path: Path, part: str) -> None:
    """A panic is not an Exception, so `except Exception` would not catch it."""
    content = json.loads(ByteTokenizer()._files.tokenizer_json) | {part: PANICS[part]}
    write(tmp_path, tokenizer_json=json.dumps(content))
    said = r"cannot decode \[97\]" if part == "decoder" else r"tokenizer\.json cannot be used \("
    with pytest.raises(TokenizerError, match=f"{re.escape(str(tmp_path))}: {said}"):
        load_tokenizer(tmp_path).decode([97])


@pytest.mark.parametrize("version", ["3.1.5", "2.11.3", "3.0"])
def test_templates_do_not_run_in_an_unsafe_jinja2(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    message = rf"jinja2 {version}, because they can leave its sandbox; pip install 'jinja2>=3\.1\.6'"
    with pytest.raises(TokenizerError, match=message):
        ByteTokenizer().render_chat([{"role": "user", "content": "x"}], template="{{ messages }} " + version)


@pytest.mark.parametrize("version", ["3.1.6", "3.1.10", "3.2", "4.0.0rc1"])
def test_templates_run_in_a_safe_jinja2(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert ByteTokenizer().render_chat([], template="{{ 1 + 1 }} " + version) == f"2 {version}"


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(TokenizerError, match=r"chat_template.jinja: cannot be read \(.*0xff"):
        Tokenizer.from_folder(tmp_path)


# Chat


CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set state.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > state.last and message.thought is defined %}
            {{- '<think>' + message.thought.strip('\\n') + '</think>' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.name + ' ' + call.arguments | tojson(indent=2) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

Today: {{ date_string }}

{% if documents %}{% for document in documents %}{{ document.title }}: {{ document.text }}
{% endfor %}{% endif %}
{{- system_message }}<|eot_id|>
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ (message.content or '') | trim }}
        {%- if message.tool_calls %}{{- message.tool_calls[0] | tojson }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + (message["content"] or message.tool_calls | tojson) | trim + eos_token }}
    {%- else %}
        {{- "[" ~ message.role | upper ~ "] " ~ message.content ~ " {{ braces }}" }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Température <b>& more</b> 日本",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}}},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {}}},
]
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


@pytest.mark.parametrize("chat", CHATS, ids=["short", "long"])
@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["no tools", "empty tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_equal_those_of_transformers(tmp_path: Path, name: str, tools: Any, chat: list[dict[str, Any]]) -> None:
    folder = write(tmp_path, chat_template_jinja=TEMPLATES[name])
    ours, peer = Tokenizer.from_folder(folder), peer_of(folder)
    for prompt in (True, False):
        options = {"add_generation_prompt": prompt, "tools": tools}
        for variables in ({}, {"enable_thinking": False, "date_string": "today", "bos_token": "<bos>"}):
            text = ours.render_chat(chat, **options, **variables)
            assert text == peer.apply_chat_template(chat, tokenize=False, **options, **variables)
            assert chat[0]["content"].strip() in text
            ids = ours.encode_chat(chat, **options, **variables)
            assert ids == peer.apply_chat_template(chat, **options, **variables)["input_ids"]
            assert ids == ours.encode(text, special=False)
    documents = [{"title": "T", "text": "Ü"}]
    expected = peer.apply_chat_template(chat, documents=documents, tokenize=False)
    assert ours.render_chat(chat, documents=documents, add_generation_prompt=False) == expected


def test_a_generation_prompt_is_added_by_default() -> None:
    tokenizer = of_kind("byte_level", chat_template=CHATML)
    text = tokenizer.render_chat(CHATS[0])
    assert text.endswith("<|im_start|>assistant\n")
    ids = tokenizer.encode_chat(CHATS[0])
    assert ids.count(tokenizer.vocab["<|im_start|>"]) == 2
    assert tokenizer.bos_id not in ids  # the post-processor would add one, but the template did not


NAMED = [{"name": "default", "template": "plain {{ 1 }}"}, {"name": "tool_use", "template": "tools {{ 2 }}"}]


def test_named_templates(tmp_path: Path) -> None:
    config = {**CONFIG, "chat_template": [*NAMED, {"name": "rag", "template": "rag {{ 3 }}"}]}
    folder = write(tmp_path / "a", tokenizer_config_json=config)
    Tokenizer.from_folder(folder).save(tmp_path / "b")
    peer_of(folder).save_pretrained(tmp_path / "c")  # as one file for each template
    for place in "abc":
        ours, peer = Tokenizer.from_folder(tmp_path / place), peer_of(tmp_path / place)
        for options in ({}, {"tools": []}, {"tools": TOOLS}):
            assert ours.render_chat(CHATS[0], **options) == peer.apply_chat_template(
                CHATS[0], tokenize=False, **options
            )
        assert ours.render_chat(CHATS[0], template="rag") == "rag 3"
        assert ours.render_chat(CHATS[0], tools=TOOLS, template="default") == "plain 1"
        assert ours.render_chat(CHATS[0], template="own {{ eos_token }}") == "own </s>"
        with pytest.raises(TokenizerError, match=r"no chat template 'rug', only \['default', 'rag', 'tool_use'\]"):
            ours.render_chat(CHATS[0], template="rug")


def test_the_template_file_takes_precedence(tmp_path: Path) -> None:
    config = {**CONFIG, "chat_template": NAMED}
    folder = write(tmp_path, tokenizer_config_json=config, chat_template_jinja="file\r\n{{ 1 }}\n")
    ours = Tokenizer.from_folder(folder)
    assert list(ours.chat_templates) == ["default"]
    assert ours.render_chat(CHATS[0], tools=TOOLS) == "file\n1"


def test_a_missing_template_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="has no chat template 'default', nor any other; pass one as template="):
        of_kind("words").encode_chat(CHATS[0])
    only = of_kind("words", chat_template={"rag": "rag {{ 3 }}"})
    with pytest.raises(TokenizerError, match=r"has no chat template 'default', only \['rag'\]"):
        only.render_chat(CHATS[0])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "line 1: roles must alternate$"),
        ("\n\n{% for m in messages %}\n{{ raise_exception(m.role) }}{% endfor %}", "line 4: user$"),
        ("{{ 1 }}\n{% if %}", "line 2: Expected an expression"),
        ("{% for m in messages %}\n\n", "line 1: Unexpected end of template.*endfor"),
        ("\n{{ nothing.here }}", "line 2: 'nothing' is undefined"),
        ("\n{{ messages[0].content + 5 }}", "line 2: TypeError: can only concatenate str"),
        ("{% macro f() %}\n{{ 1 / 0 }}{% endmacro %}\n{{ f() }}", "line 2: ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "line 1: RecursionError"),
        ("{{ unknown_tag | no_such_filter }}", "line 1: No filter named 'no_such_filter'"),
        ("{% generation %}\n{{ 1 / 0 }}{% endgeneration %}", "line 2: ZeroDivisionError"),
        ("{{ messages | tojson }}{{ raise_exception | tojson }}", "line 1: TypeError: .*not JSON serializable"),
    ],
)
def test_a_template_that_fails_says_why_and_where(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match="^chat template, " + message):
        of_kind("words").render_chat(CHATS[0], template=template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ (''|attr('__class__')).__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__.co_names }}",
        "{{ dict.__globals__.os }}",
        "{{ lipsum.__globals__['os'].popen('true') }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ ('{0.__class__.__mro__}'|attr('format'))(messages) }}",
        "{% set n = namespace() %}{% set n.__call__ = messages.append %}{{ n(1) }}",
        "{% set n = namespace(__call__=raise_exception) %}{{ n('x') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='x') }}",
        "{{ messages[0].pop('content') }}",
        "{{ dict.update(messages[0], {'content': 'x'}) }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "untouched"}]
    with pytest.raises(TokenizerError, match=r"^chat template, line 1: "):
        of_kind("words").render_chat(messages, template=template)
    assert messages == [{"role": "user", "content": "untouched"}]


def test_templates_may_use_namespaces_dicts_and_generation_blocks(tmp_path: Path) -> None:
    template = (
        "   {% if documents is none %}none\n   {% endif %}"
        "{% set n = namespace({'a': 1}, self=2) %}{% set n.b = dict(x=n.a) %}{{ n.b.x }}{{ n.self }}"
        "{% for i in range(5) %}{% generation %}{% set n.a = i %}{% set leak = i %}{{ i }}{% endgeneration %}"
        "{{ leak }}{% endfor %}{{ n.a }}{{ dict({'y': '<&>'}, z='é') | tojson(sort_keys=true, ensure_ascii=true) }}"
    )
    folder = write(tmp_path, chat_template_jinja=template)
    text = Tokenizer.from_folder(folder).render_chat(CHATS[0])
    assert text == peer_of(folder).apply_chat_template(CHATS[0], tokenize=False)
    assert text == 'none\n12012344{"y": "<&>", "z": "\\u00e9"}'
    # in transformers the block is a function, so `break` is a syntax error there
    loop = "{% for i in range(9) %}{% generation %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endgeneration %}"
    assert of_kind("words").render_chat([], template=loop + "{% endfor %}") == "012"


# Bytes


BYTES = ByteTokenizer()
NO_SPECIAL = st.text().filter(lambda text: "<|" not in text)


@given(NO_SPECIAL)
def test_bytes_are_ids(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text
    assert BYTES.encode_batch([text, text], special=False) == [ids, ids]


@given(st.lists(st.integers(0, 258)))
def test_invalid_bytes_decode_as_in_python(ids: list[int]) -> None:
    assert BYTES.decode(ids) == bytes(i for i in ids if i < 256).decode(errors="replace")
    written = b"".join(bytes([i]) if i < 256 else (b"<|bos|>", b"<|eos|>", b"<|pad|>")[i - 256] for i in ids)
    assert BYTES.decode(ids, skip_special=False) == written.decode(errors="replace")


def test_the_ids_of_bytes() -> None:
    assert (BYTES.bos_id, BYTES.eos_id, BYTES.pad_id, BYTES.vocab_size) == (256, 257, 258, 259)
    assert (BYTES.unk_id, BYTES.cls_id, BYTES.sep_id, BYTES.mask_id) == (None,) * 4
    assert BYTES.stop_ids == {257}
    assert BYTES.special_ids == {256, 257, 258}
    assert len(BYTES.vocab) == 259
    assert BYTES.encode("é<|eos|>") == [195, 169, 257]
    with pytest.raises(TokenizerError, match=r"id 259 is not in the vocabulary of ByteTokenizer \(259 ids\)"):
        BYTES.decode([259])


def test_a_chat_in_bytes() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert BYTES.render_chat(chat) == "<|bos|>user: hi<|eos|>\nassistant: yo<|eos|>\nassistant: "
    assert BYTES.encode_chat(chat[:1], add_generation_prompt=False) == [256, *b"user: hi", 257, 10]
    # what follows the prompt is what the model should write
    assert BYTES.render_chat(chat, add_generation_prompt=False).startswith(BYTES.render_chat(chat[:1]) + "yo<|eos|>")
    assert BYTES.render_chat([], tools=[{"a": "ü"}]) == '<|bos|>tools: [{"a": "ü"}]<|eos|>\nassistant: '


def test_a_byte_tokenizer_is_saved_like_any_other(tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    for again in (load_tokenizer(tmp_path), ByteTokenizer.from_folder(tmp_path)):
        assert type(again) is ByteTokenizer
        assert_equal_to_peer(again, peer_of(tmp_path))
        assert again.encode_chat(CHATS[0]) == BYTES.encode_chat(CHATS[0])
    assert peer_of(tmp_path).apply_chat_template(CHATS[0], tokenize=False) == BYTES.render_chat(
        CHATS[0], add_generation_prompt=False
    )
    other = write(tmp_path / "other")
    assert type(load_tokenizer(other)) is Tokenizer
    with pytest.raises(TokenizerError, match=r"other: its tokenizer.json is of another kind; use load_tokenizer"):
        ByteTokenizer.from_folder(other)


# Streams


STREAMED: dict[str, Tokenizer] = {kind: of_kind(kind) for kind in KINDS} | {"bytes": BYTES}


def decoding_otherwise(decoder: decoders.Decoder) -> Tokenizer:
    backend = byte_fallback()
    backend.decoder = decoder
    return Tokenizer(TokenizerFiles(backend.to_str(), CONFIG))


def marking_ends() -> Tokenizer:
    """As in CLIP: the last part of a word ends with </w>, which decodes to a space except at the very end."""
    backend = Backend(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, end_of_word_suffix="</w>"))
    return Tokenizer(TokenizerFiles(backend.to_str()))


STREAMED["metaspace"] = decoding_otherwise(decoders.Metaspace())
STREAMED["bytes, metaspace"] = decoding_otherwise(
    decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
)
STREAMED["ends"] = marking_ends()


def stream(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool = True) -> list[str]:
    """The text that each id gives, then the rest."""
    detokenizer = Detokenizer(tokenizer, skip_special)
    pieces = [detokenizer.push(i) for i in ids]
    assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return pieces


@pytest.mark.parametrize("kind", STREAMED)
@given(data=st.data())
def test_a_stream_of_any_ids_gives_their_text(kind: str, data: st.DataObject) -> None:
    tokenizer = STREAMED[kind]
    favourites = sorted({*tokenizer.special_ids, *tokenizer.byte_ids, *tokenizer.encode("🚀日 a", special=False)})
    some = st.sampled_from(favourites) if favourites else st.nothing()
    ids = data.draw(st.lists(some | st.sampled_from(sorted(tokenizer.vocab.values())), max_size=40))
    skip = data.draw(st.booleans())
    pieces = stream(tokenizer, ids, skip)
    whole = tokenizer.decode(ids, skip)
    assert "".join(pieces) == whole  # so the text given so far is the beginning of every continuation's text
    if not tokenizer.byte_ids:  # and it was given at once, except for a character that may be incomplete
        given_out = ""
        for end, piece in enumerate(pieces[:-1], 1):
            given_out += piece
            assert len(tokenizer.decode(ids[:end], skip)) - len(given_out) <= 1


def test_an_emoji_comes_out_whole() -> None:
    assert stream(BYTES, list("a🚀é".encode())) == ["a", "", "", "", "🚀", "", "é", ""]
    tokenizer = of_kind("byte_level")
    fox = tokenizer.encode("🦊", special=False)
    assert len(fox) == 3
    assert stream(tokenizer, [*fox, *fox]) == ["", "", "🦊", "", "", "🦊", ""]


def test_bytes_that_are_not_a_character() -> None:
    assert stream(BYTES, [0xE2, 0x82, 65, 0xFF, 0xFF, 66]) == ["", "", "\ufffdA", "", "\ufffd", "\ufffdB", ""]
    assert stream(BYTES, [65, 0xF0, 0x9F]) == ["A", "", "", "\ufffd"]  # cut off
    real = stream(BYTES, [*"\ufffd".encode(), 65])
    assert "".join(real) == "\ufffdA"


def test_spaces_of_a_metaspace_tokenizer() -> None:
    tokenizer = of_kind("byte_fallback")
    ids = [tokenizer.vocab[token] for token in ("▁the", "▁dog", "</s>", "▁the", "▁▁", "▁the")]
    assert stream(tokenizer, ids) == ["the", " dog", "", " the", "  ", " the", ""]


def test_fallback_bytes_wait_for_the_end_of_their_run() -> None:
    tokenizer = of_kind("byte_fallback")
    euro = [tokenizer.vocab[f"<0x{byte:02X}>"] for byte in "€".encode()]
    the = tokenizer.vocab["▁the"]
    assert stream(tokenizer, [the, *euro, the]) == ["the", "", "", "", "€ the", ""]
    assert stream(tokenizer, euro) == ["", "", "", "€"]
    # with one more byte, the decoder accepts none of them as a character: nothing was given too early
    assert stream(tokenizer, [*euro, euro[0], the])[-2] == "\ufffd" * 4 + " the"


def test_pending_text_is_known_before_the_stream_ends() -> None:
    tokenizer = of_kind("byte_fallback")
    newline, *euro = [tokenizer.vocab[f"<0x{byte:02X}>"] for byte in "\n€".encode()]
    stream = Detokenizer(tokenizer)
    seen = []
    for id in (newline, newline, *euro):
        assert stream.push(id) == ""
        seen.append(stream.pending())
    assert seen == ["\n", "\n\n", "", "", "\n\n€"]  # an incomplete character hides its whole run
    assert stream.finish() == "\n\n€"


def test_special_tokens_in_a_stream() -> None:
    tokenizer = of_kind("byte_level")
    ids = tokenizer.encode("<|im_start|>fox<|im_end|> dog")
    assert "".join(stream(tokenizer, ids)) == "fox dog"
    assert "".join(stream(tokenizer, ids, skip_special=False)) == "<s><|im_start|>fox<|im_end|> dog"


def test_a_special_token_that_the_config_declares_as_ordinary(tmp_path: Path) -> None:
    """The tokenizers library still skips it, so a stream must skip it too, and must not use it as context."""
    declared = {"2": token("</s>", special=False)}
    folder = write(tmp_path, "byte_fallback", tokenizer_config_json={"added_tokens_decoder": declared})
    tokenizer = Tokenizer.from_folder(folder)
    ids = [tokenizer.vocab["▁the"], 2, tokenizer.vocab["▁the"]]
    assert stream(tokenizer, ids) == ["the", "", " the", ""]
    assert tokenizer.decode(ids) == "the the" == peer_of(folder).decode(ids, skip_special_tokens=True)


def test_a_finished_stream_is_over() -> None:
    detokenizer = Detokenizer(BYTES)
    assert (detokenizer.finish(), detokenizer.finish(), detokenizer.text) == ("", "", "")
    with pytest.raises(TokenizerError, match="this stream is finished"):
        detokenizer.push(65)


def test_an_unknown_id_leaves_the_stream_as_it_was() -> None:
    detokenizer = Detokenizer(BYTES)
    detokenizer.push(0xC3)
    with pytest.raises(TokenizerError, match="id 300 "):
        detokenizer.push(300)
    assert detokenizer.push(0xA9) == "é"


class Counting(Tokenizer):
    """Counts the ids that it decodes."""

    decoded = 0

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("byte_level", ["f", "Ġdog", "Ã"]),
        ("byte_level", ["ÿ"]),
        ("byte_level", ["ð", "Ł"]),
        ("byte_fallback", ["<0xE2>", "<0x82>"]),
        ("byte_fallback", ["▁the", "<0xE2>"]),
    ],
)
def test_a_stream_costs_the_same_for_each_id(kind: str, tokens: list[str]) -> None:
    tokenizer = Counting(TokenizerFiles(JSON[kind], CONFIG))
    draw = random.Random(0)
    ids = [tokenizer.vocab[draw.choice(tokens)] for _ in range(3000)]
    _ = tokenizer.byte_ids
    tokenizer.decoded = 0
    assert "".join(stream(tokenizer, ids)) == Tokenizer.decode(tokenizer, ids)
    assert tokenizer.decoded < 20 * len(ids)


# Megatron


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_offsets_equal_those_of_megatron(tmp_path: Path, kind: str) -> None:
    tokenizer = STREAMED[kind]
    tokenizer.save(tmp_path)
    peer, view = peer_of(tmp_path), MegatronTokenizerView(tokenizer)
    for text in TEXTS:
        ids = view.tokenize(text)
        assert ids == peer(text).input_ids
        expected, end = [], 0
        for i in range(len(ids)):
            span = peer(text).token_to_chars(i)
            expected.append(end if span is None else span.start)
            end = end if span is None else span.end
        assert view.offsets(ids, text) == expected
        assert view.offsets(np.array(ids), text) == expected
        assert view.detokenize(np.array(ids, dtype=np.int64)) == peer.decode(ids)


def test_offsets_point_at_the_characters() -> None:
    view = MegatronTokenizerView(BYTES)
    assert view.offsets(list("aé🚀b".encode()), "aé🚀b") == [0, 1, 1, 2, 2, 2, 2, 3]


def test_offsets_of_ids_that_are_not_the_encoding_of_their_text() -> None:
    tokenizer = of_kind("byte_level")
    view = MegatronTokenizerView(tokenizer)
    ids = [tokenizer.vocab[token] for token in ("t", "h", "e", "Ġ", "Ã", "©", "</s>")]
    assert tokenizer.encode("the é", special=False) != ids
    assert view.offsets(ids, "the é</s>") == [0, 1, 2, 3, 4, 4, 5]
    assert view.offsets(ids, "the é") == [0, 1, 2, 3, 4, 4, 5]
    with pytest.raises(TokenizerError, match="no offsets: these 7 ids are not an encoding of 'the e'"):
        view.offsets(ids, "the e")


def test_megatron_sees_the_vocabulary() -> None:
    tokenizer = of_kind("word_piece", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    view = MegatronTokenizerView(tokenizer)
    assert view.vocab_size == tokenizer.vocab_size
    assert all(view.vocab[token] == i for i, token in view.inv_vocab.items())
    assert len(view.inv_vocab) == len(view.vocab)
    assert (view.cls, view.sep, view.mask, view.bos, view.eos, view.eod) == (3, 4, 5, 1, 2, 2)
    with pytest.raises(NotImplementedError, match="has no pad token"):
        _ = view.pad
    bare = MegatronTokenizerView(Tokenizer(TokenizerFiles(JSON["words"], name="bare")))
    for name in ("bos", "eos", "pad", "cls", "sep", "mask"):
        with pytest.raises(NotImplementedError, match=f"^bare has no {name} token"):
            getattr(bare, name)
    with pytest.raises(NotImplementedError, match=r"^bare has no eos token"):
        _ = bare.eod


def test_megatron_tells_tokenizers_apart(tmp_path: Path) -> None:
    folder = write(tmp_path)
    view = MegatronTokenizerView(Tokenizer.from_folder(folder))
    assert list(view.unique_identifiers.items()) == [
        ("class", "MegatronTokenizerView"),
        ("tokenizer_path", [str(folder)]),
    ]
    named = MegatronTokenizerView(BYTES, "some/path", "other", vocab_extra_ids=7, lower_case=True)
    assert named.unique_description == (
        '{\n    "class": "MegatronTokenizerView",\n    "tokenizer_path": [\n        "some/path",\n        "other"\n'
        '    ],\n    "vocab_extra_ids": "7",\n    "lower_case": "True"\n}'
    )
    nameless = {MegatronTokenizerView(of_kind(kind)).unique_description for kind in KINDS}
    assert len(nameless) == len(KINDS)
    assert MegatronTokenizerView(of_kind("words")).unique_description in nameless
