"""The files of a tokenizer: which file each setting comes from, saving, and refusals."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rollgraph.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)
from tests.tokenizer.kinds import (
    CONFIG,
    JSON,
    assert_equal_to_peer,
    byte_level,
    of_kind,
    peer_of,
    token,
    write,
)

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
def test_special_tokens_equal_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    folder = write(tmp_path / "a", **files)
    ours, peer = Tokenizer.from_folder(folder), peer_of(folder)
    assert_equal_to_peer(ours, peer)
    text = "x<eins> <zwei><e>fox<f> <p><image> y"
    assert ours.encode(text) == peer.encode(text)
    assert ours.decode(ours.encode(text)) == peer.decode(peer.encode(text), skip_special_tokens=True)
    ours.save(tmp_path / "b")
    assert_equal_to_peer(Tokenizer.from_folder(tmp_path / "b"), peer)
    assert_equal_to_peer(ours, peer_of(tmp_path / "b"))


def test_a_vocabulary_token_named_in_the_config_becomes_special(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "stop": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = write(tmp_path, tokenizer_json=backend.to_str(), tokenizer_config_json={"eos_token": "stop"})
    ours = Tokenizer.from_folder(folder)
    assert (ours.eos_id, ours.special_ids, ours.vocab_size) == (1, {1}, 2)
    assert ours.decode([0, 1]) == "a" == peer_of(folder).decode([0, 1], skip_special_tokens=True)


def test_a_named_token_becomes_special_and_keeps_its_flags(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken(f"<{name}>", lstrip=True, special=False) for name in ("named", "extra", "plain")])
    config = {**CONFIG, "mask_token": "<named>", "additional_special_tokens": ["<extra>"]}
    folder = write(tmp_path, tokenizer_json=backend.to_str(), tokenizer_config_json=config)
    ours, peer = Tokenizer.from_folder(folder), peer_of(folder)
    ids = ours.encode("x  <named>  <extra>  <plain>")
    assert ids == peer.encode("x  <named>  <extra>  <plain>")
    assert ours.decode(ids) == "x<extra><plain>" == peer.decode(ids, skip_special_tokens=True)


def test_unnamed_tokens_take_their_ids_from_the_model_config(tmp_path: Path) -> None:
    config = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    generation = {"eos_token_id": [5, 2]}
    files = {"tokenizer_config_json": {"bos_token": None}, "config_json": config, "generation_config_json": generation}
    tokenizer = Tokenizer.from_folder(write(tmp_path / "a", **files))
    assert tokenizer.bos_id is None  # because of the explicit null
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (5, 3, {5, 2})
    assert tokenizer.special_tokens == {}  # so that a template renders as in transformers
    tokenizer.save(tmp_path / "b")
    loaded = Tokenizer.from_folder(tmp_path / "b")
    assert (loaded.bos_id, loaded.eos_id, loaded.pad_id, loaded.stop_ids) == (None, 5, 3, {5, 2})


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
        (
            "tokenizer_config_json",
            "[" * 100_000,
            r"tokenizer_config.json: cannot be read \(.* more than 100 levels deep",
        ),
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
    content = json.loads(ByteTokenizer().files.tokenizer_json) | {part: PANICS[part]}
    write(tmp_path, tokenizer_json=json.dumps(content))
    error = r"cannot decode \[97\]" if part == "decoder" else r"tokenizer\.json cannot be used \("
    with pytest.raises(TokenizerError, match=f"{re.escape(str(tmp_path))}: {error}"):
        load_tokenizer(tmp_path).decode([97])


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(TokenizerError, match=r"chat_template.jinja: cannot be read \(.*0xff"):
        Tokenizer.from_folder(tmp_path)
