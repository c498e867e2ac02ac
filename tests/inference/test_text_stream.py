"""Stop strings and streamed text: no piece has text that a later token could change, or a part of a stop string."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from rollgraph.inference import Engine, Output, SamplingParams
from rollgraph.inference.requests import OnToken, TextStream
from rollgraph.model import Decoder
from rollgraph.tokenizer import Detokenizer
from tests.inference.tiny_engine import make_engine, make_model
from tests.tokenizer.kinds import of_kind


def follow_text(model: Decoder, text: bytes) -> None:
    """Set the weights such that every token of a text is followed by its successor in that text."""
    assert len(set(text)) == len(text)
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
        model.embed_tokens.weight[list(text), torch.arange(len(text))] = 1.0
        assert model.lm_head is not None
        model.lm_head.weight.zero_()
        model.lm_head.weight[list(text[1:]), torch.arange(len(text) - 1)] = 100.0
        for layer in model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.norm.fill_(1.0)


TEXT = "The quick brown_fx €!".encode()[:4] + "abcdé€+-".encode()


@pytest.fixture(scope="module")
def scripted(device: str) -> Engine:
    model = make_model(device)
    follow_text(model, TEXT)
    return make_engine(model, filters=False)


def test_stop_strings_across_and_inside_tokens(scripted: Engine) -> None:
    def run(**options: object) -> tuple[str, int, str | None]:
        params = SamplingParams(temperature=0.0, max_tokens=len(TEXT) - 1, **options)  # type: ignore[arg-type]
        completion = scripted.generate([TEXT[:1].decode()], params)[0].completions[0]
        return completion.text, len(completion.tokens), completion.finish_reason

    whole = TEXT[1:].decode()
    assert run() == (whole, len(TEXT) - 1, "length")
    assert run(stop=("bcd",)) == ("he a", 7, "stop")
    assert run(stop=("zzz", "d", "cd")) == ("he ab", 7, "stop")  # the earliest match counts
    assert run(stop=("é",)) == ("he abcd", 9, "stop")  # one character, two tokens
    assert run(stop=("€+",)) == ("he abcdé", 13, "stop")
    assert run(stop_ids=(ord("c"),)) == ("he abc", 6, "stop")
    assert run(stop=("nowhere",)) == (whole, len(TEXT) - 1, "length")


@pytest.mark.parametrize(
    ("stops", "pieces"),
    [
        (("bcd",), ["h", "e", " ", "a", "", "", ""]),  # a possible start of the stop string is held back
        (("bcx", "cdy"), ["h", "e", " ", "a", "", "", "b", "", "cdé", "", "", "€", "+", "-"]),
        (("-?", "+-?"), ["h", "e", " ", "a", "b", "c", "d", "", "é", "", "", "€", "", "+-"]),  # and comes at the end
    ],
    ids=str,
)
def test_no_part_of_a_stop_string_is_streamed(scripted: Engine, stops: tuple[str, ...], pieces: list[str]) -> None:
    streamed: list[str] = []
    params = SamplingParams(temperature=0.0, max_tokens=len(TEXT) - 1, stop=stops)
    on_token: OnToken = lambda _output, _index, _token, text: streamed.append(text)  # noqa: E731
    (output,) = scripted.generate([TEXT[:1].decode()], params, on_token=on_token)
    assert streamed == pieces
    assert output.completions[0].text == "".join(pieces)


def test_a_stop_string_of_fallback_bytes_ends_a_completion_at_once() -> None:
    tokenizer = of_kind("byte_fallback")
    the, newline = tokenizer.vocab["▁the"], tokenizer.vocab["<0x0A>"]
    stream = TextStream(Detokenizer(tokenizer), ("\n\n",))
    stopped = []
    for token in (the, newline, newline):
        stream.push(token, last=False)
        stopped.append(stream.stopped)
    assert stopped == [False, False, True]
    assert stream.text == "the"


def test_an_aborted_stream_keeps_the_text_of_its_tokens(scripted: Engine) -> None:
    """Even if it ends within a character."""
    params = SamplingParams(temperature=0.0, max_tokens=len(TEXT) - 1)

    def stop_within(output: Output, _index: int, _token: int, _text: str) -> None:
        if len(output.completions[0].tokens) == 8:
            scripted.abort(output)

    (output,) = scripted.generate([TEXT[:1].decode()], params, on_token=stop_within)
    assert output.completions[0].text == "he abcd\ufffd"


def test_streamed_pieces_are_whole_characters_and_join_to_the_text(scripted: Engine, engine: Engine) -> None:
    pieces: list[str] = []
    params = SamplingParams(temperature=0.0, max_tokens=len(TEXT) - 1)
    (output,) = scripted.generate([TEXT[:1].decode()], params, on_token=lambda _o, _i, _t, text: pieces.append(text))
    assert "".join(pieces) == output.completions[0].text == TEXT[1:].decode()
    assert "" in pieces  # between the bytes of a character
    streamed: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    outputs = engine.generate(
        ["a", "b"],
        SamplingParams(n=2, max_tokens=12, seed=1),
        on_token=lambda output, index, token, text: streamed[id(output), index].append((token, text)),
    )
    for output in outputs:
        for index, completion in enumerate(output.completions):
            tokens, texts = zip(*streamed[id(output), index], strict=True)
            assert list(tokens) == completion.tokens
            assert "".join(texts) == completion.text
