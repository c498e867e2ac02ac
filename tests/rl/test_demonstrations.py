"""Offline data: the tokens of written completions, and which of them are the assistant's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollgraph.rl.data.demonstrations import OfflineData, load_offline_data
from rollgraph.rl.data.rows import DataError, make_rows
from rollgraph.tokenizer import ByteTokenizer, Tokenizer
from rollgraph.tokenizer.files import TokenizerFiles
from rollgraph.types import Rollout

BYTES = ByteTokenizer()
EOS = "<|eos|>"
UNCHANGED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}  # of an added token


def make_data(*rows: dict[str, Any], source: str = "demonstrations", **options: Any) -> OfflineData:
    settings = {"max_tokens": 200, "chat": False, "prompts_per_step": len(rows), "seed": 0, "shuffle": False} | options
    tokenizer = settings.pop("tokenizer", BYTES)
    return load_offline_data(make_rows(rows), tokenizer, source, **settings)


def mark_trained(rollout: Rollout, tokenizer: Tokenizer = BYTES) -> str:
    """The text of a rollout, with the tokens that are trained on in brackets."""
    text = tokenizer.decode(rollout.prompt.tokens, skip_special=False) + "|"
    inside = False
    for token, trained in zip([*rollout.tokens, None], [*rollout.sampled, False], strict=True):
        if trained != inside:
            text += "[" if trained else "]"
            inside = trained
        if token is not None:
            text += tokenizer.decode([token], skip_special=False)
    return text


def mark_row(row: dict[str, Any], **options: Any) -> str:
    (rollout,) = make_data(row, **options).next_rollouts()
    assert len(rollout.tokens) == len(rollout.sampled) == len(rollout.logprobs)
    return mark_trained(rollout)


def say(*contents: str, first: str = "user") -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def test_texts_end_with_the_stop_token() -> None:
    assert mark_row({"prompt": "2+2=", "completion": "4"}) == f"2+2=|[4{EOS}]"
    assert mark_row({"prompt": "2+2=", "completion": f"4{EOS}"}) == f"2+2=|[4{EOS}]"  # not twice
    assert mark_row({"prompt": "2+2=", "completion": f"4{EOS}5"}) == f"2+2=|[4{EOS}5{EOS}]"


def test_the_chat_template_applies_to_demonstrations_and_prompts_alike() -> None:
    """The template of ByteTokenizer puts `role: content<eos>` on a line of its own."""
    prompt = "<|bos|>user: 2+2?<|eos|>\nassistant: "
    expected = f"{prompt}|[4{EOS}]"
    assert mark_row({"prompt": "2+2?", "completion": "4"}, chat=True) == expected
    assert mark_row({"messages": say("2+2?", "4")}) == expected
    assert mark_row({"messages": say("2+2?"), "completion": "4"}) == expected
    assert mark_row({"prompt": say("2+2?"), "completion": say("4", first="assistant")}) == expected
    assert mark_row({"prompt": "2+2?", "completion": say("4", first="assistant")}) == expected
    assert BYTES.render_chat(say("2+2?")) == prompt


def test_only_turns_of_the_assistant_are_trained_on() -> None:
    system = {"role": "system", "content": "be brief"}
    row = {"messages": [system, *say("hi", "hello", "bye", "ciao", "unanswered")]}
    assert mark_row(row) == (
        "<|bos|>system: be brief<|eos|>\nuser: hi<|eos|>\nassistant: |"
        f"[hello{EOS}]\nuser: bye{EOS}\nassistant: [ciao{EOS}]"
    )


def test_the_assistant_may_speak_twice_in_a_row() -> None:
    row = {"messages": [*say("hi", "one"), {"role": "assistant", "content": "two"}]}
    assert mark_row(row).endswith(f"|[one{EOS}]\nassistant: [two{EOS}]")


def test_pairs_are_groups_of_two_marked_by_their_reward() -> None:
    rows = [
        {"prompt": "2+2=", "chosen": "4", "rejected": "five"},
        {"prompt": "x", "chosen": say("x", "y"), "rejected": say("x", "z")},  # they may repeat the prompt
    ]
    rollouts = make_data(*rows, source="pairs").next_rollouts()
    assert [(rollout.group, rollout.reward) for rollout in rollouts] == [(0, 1.0), (0, 0.0), (1, 1.0), (1, 0.0)]
    assert [mark_trained(rollout) for rollout in rollouts] == [
        f"2+2=|[4{EOS}]",
        f"2+2=|[five{EOS}]",
        f"<|bos|>user: x{EOS}\nassistant: |[y{EOS}]",
        f"<|bos|>user: x{EOS}\nassistant: |[z{EOS}]",
    ]


@pytest.mark.parametrize(
    ("row", "source", "message"),
    [
        ({"prompt": "a", "answer": "b"}, "demonstrations",
         r"row:1: a demonstration needs `prompt` and `completion`, or .*got 'prompt', 'answer'"),
        ({"prompt": "a", "completion": 4}, "demonstrations", r"'completion' must be text or a list of messages, got 4"),
        ({"messages": say("a")}, "demonstrations", r"none of its messages is the assistant's"),
        ({"messages": say("a", first="assistant")}, "demonstrations", r"its first message is the assistant's"),
        ({"prompt": "a", "completion": say("b")}, "demonstrations", r"'completion' must begin with the assistant's"),
        ({"prompt": "a", "chosen": "b"}, "pairs", r"row:1: the column 'rejected' is missing: .*got 'prompt', 'chosen'"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "pairs", r"the column 'rejected' is missing"),
    ],
)  # fmt: skip
def test_missing_parts_of_a_row_are_named(row: dict[str, Any], source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_data(row, source=source, too_long="drop")  # `too_long` is about lengths only


def test_long_rows_are_refused_or_dropped() -> None:
    rows = [{"prompt": "abc", "completion": "d" * count} for count in (6, 7, 1)]
    with pytest.raises(DataError, match=r"max_tokens: row:2: the prompt with its completion has 11 tokens.* is 10, or"):
        make_data(*rows, max_tokens=10)
    data = make_data(*rows, max_tokens=10, too_long="drop", prompts_per_step=2)
    assert data.prompts.dropped == 1
    assert data.completions.longest_sequence == 10
    assert [rollout.prompt.id for rollout in data.next_rollouts()] == [0, 2]


def merging_tokenizer() -> Tokenizer:
    """Single letters, the pair `ab`, and an end of text; a text begins with an extra `_`, as in sentencepiece."""
    vocab = {letter: index for index, letter in enumerate(["_", "a", "b", "c", "ab", "<e>"])}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}
    files = {
        "added_tokens": [{"id": 5, "content": "<e>", "special": True, **UNCHANGED}],
        "normalizer": {"type": "Prepend", "prepend": "_"},
        "model": model,
    }
    return Tokenizer(TokenizerFiles(json.dumps(files), {"eos_token": "<e>"}, name="merging"))


def test_tokens_are_those_of_the_full_text_unless_one_crosses_the_border() -> None:
    tokenizer = merging_tokenizer()
    assert tokenizer.decode(tokenizer.encode("cab"), skip_special=False).replace(" ", "") == "_cab"
    clean, crossing = make_data(
        {"prompt": "c", "completion": "ab"}, {"prompt": "ca", "completion": "bc"}, tokenizer=tokenizer
    ).next_rollouts()
    assert [*clean.prompt.tokens, *clean.tokens] == [*tokenizer.encode("cab"), 5]  # no second `_`
    assert list(crossing.prompt.tokens) == tokenizer.encode("ca")  # the prompt that the policy would continue
    assert crossing.tokens == [*tokenizer.encode("bc"), 5]


def test_a_space_before_a_turn_is_not_the_assistants() -> None:
    """In the full text, it belongs to the first token of the turn, whose offset begins after it."""
    vocab = {token: index for index, token in enumerate(["Ġ", ":", "a", "u", "Ġa", "<e>"])}
    files = {
        "added_tokens": [{"id": 5, "content": "<e>", "special": True, **UNCHANGED}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["Ġ", "a"]]},
    }
    template = "{% for m in messages %}{{ m.role[0] + ': ' + m.content + '<e>' }}{% endfor %}"
    template += "{{ 'a: ' if add_generation_prompt }}"
    tokenizer = Tokenizer(TokenizerFiles(json.dumps(files), {"eos_token": "<e>", "chat_template": template}, name="t"))
    (rollout,) = make_data({"messages": say("u", ":", "u", "a")}, tokenizer=tokenizer).next_rollouts()
    assert mark_trained(rollout, tokenizer) == "u: u<e>a: |[:<e>]u: u<e>a: [a<e>]"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    """Some templates drop the beginning of a reply once another message follows."""
    template = (
        "{% for m in messages %}{{ m.role }}{% if not loop.last %}*{% endif %}:{{ m.content }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    files = TokenizerFiles(BYTES.files.tokenizer_json, {**BYTES.files.config, "chat_template": template}, name="x")
    with pytest.raises(DataError, match=r"row:1: the chat template writes the beginning of this chat differently"):
        make_data({"messages": say("a", "b", "c", "d")}, tokenizer=Tokenizer(files))
