"""Environments: how turns become rollouts, with a scripted policy; and the calculator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollgraph.rl.calculator import CalculatorError, calculator, evaluate_expression, reply
from rollgraph.rl.data.prompts import PromptData
from rollgraph.rl.data.rows import make_rows
from rollgraph.rl.environment import MultiTurn, SingleTurn, load_environment
from rollgraph.rl.paths import LoadError
from rollgraph.rl.turns import Turn
from rollgraph.tokenizer import ByteTokenizer
from rollgraph.types import Prompt, Rollout

TOKENIZER = ByteTokenizer()


def prompt(id: int, text: str = "?") -> Prompt:
    return Prompt(id, tuple(text.encode()), text)


class Script:
    """A policy that writes `write(context, key)`: a text, or a text and its finish reason."""

    def __init__(self, write: Callable[[str, int], str | tuple[str, str]]) -> None:
        self._write = write
        self.calls: list[list[tuple[str, int]]] = []

    def __call__(self, requests: list[tuple[list[int], int]]) -> list[Turn]:
        texts_and_keys = [(TOKENIZER.decode(tokens), key) for tokens, key in requests]
        self.calls.append(texts_and_keys)
        return [self._turn(*request) for request in texts_and_keys]

    def _turn(self, context: str, key: int) -> Turn:
        written = self._write(context, key)
        text, reason = (written, "stop") if isinstance(written, str) else written
        tokens = list(text.encode())
        return Turn(tokens, [-0.5] * len(tokens), text.removesuffix("!"), reason)  # text ends before a stop string


def make(
    answer: Callable[[str, Prompt], Any], samples: int = 1, turns: int = 9, tokens: int = 99, **options: Any
) -> MultiTurn:
    return MultiTurn(TOKENIZER, answer, samples_per_prompt=samples, max_turns=turns, max_tokens=tokens, **options)


def check(rollout: Rollout) -> None:
    assert len(rollout.tokens) == len(rollout.sampled) == len(rollout.logprobs)
    assert all(p == (-0.5 if on else 0.0) for on, p in zip(rollout.sampled, rollout.logprobs, strict=True))


def sampled_text(rollout: Rollout) -> str:
    return "".join(chr(t) if on else "_" for t, on in zip(rollout.tokens, rollout.sampled, strict=True))


def test_repeated_prompts_of_a_step_have_different_noise_on_any_ranks() -> None:
    """Eight prompts from three rows. With noise by row alone, ranks would sample the same completions."""

    def keys(rank: int, ranks: int) -> list[int]:
        rows = make_rows([{"prompt": text} for text in "abc"])
        data = PromptData(rows, TOKENIZER, prompts_per_step=8, seed=0, rank=rank, ranks=ranks)
        script = Script(lambda context, key: "x")
        for _ in range(2):
            SingleTurn(2).run(script, data.next_prompts())
        return [key for _, key in script.calls[-1]]

    alone = keys(0, 1)
    assert len({*alone}) == 16
    assert [key for rank in range(3) for key in keys(rank, 3)] == alone


def test_a_reply_that_changes_its_prompt_does_not_change_it_for_others() -> None:
    """Otherwise a rollout would depend on the order of replies."""

    def count(text: str, prompt: Prompt) -> str | None:
        prompt.columns["visits"].append(text)
        return str(len(prompt.columns["visits"])) if len(prompt.columns["visits"]) < 3 else None

    environment = MultiTurn(TOKENIZER, count, samples_per_prompt=2, max_turns=9, max_tokens=99)
    shared_prompt = Prompt(0, (63,), "?", {"visits": []})
    rollouts = environment.run(Script(lambda context, key: "a"), [shared_prompt])
    assert [rollout.text for rollout in rollouts] == ["a1a2a", "a1a2a"]
    assert shared_prompt.columns == {"visits": []}


def test_single_turns_have_groups_and_keys() -> None:
    script = Script(lambda context, key: (f"{context}{key % 2}", "length" if key % 2 else "stop"))
    prompts = [prompt(5, "a"), prompt(3, "b"), prompt(5, "a")]  # one twice, as at the end of an epoch
    rollouts = SingleTurn(2).run(script, prompts)
    assert [(r.prompt.id, r.group, r.text, r.finish_reason) for r in rollouts] == [
        (id, group, f"{text}{i}", reason)
        for group, (id, text) in enumerate([(5, "a"), (3, "b"), (5, "a")])
        for i, reason in enumerate(["stop", "length"])
    ]
    for rollout in rollouts:
        check(rollout)
        assert all(rollout.sampled)
        assert rollout.tokens == list(rollout.text.encode())
    (call,) = script.calls
    assert [context for context, _ in call] == ["a", "a", "b", "b", "a", "a"]
    assert len({key for _, key in call}) == 6
    # The noise of a sample does not depend on the prompts beside it.
    alone = Script(lambda context, key: "x")
    SingleTurn(2).run(alone, [prompt(3, "b")])
    assert alone.calls == [call[2:4]]


def test_replies_are_not_sampled() -> None:
    def write(context: str, key: int) -> str:
        return f"t{context.count('!')}!" if context.count("!") <= key else "end"

    def answer(text: str, original: Prompt) -> str | None:
        assert original.text == "q"
        return "<é>" if text.endswith("!") else None

    script = Script(write)
    rollouts = make(answer, samples=3, stop=["!"]).run(script, [prompt(0, "q")])
    assert [r.text for r in rollouts] == ["t0!<é>end", "t0!<é>t1!<é>end", "t0!<é>t1!<é>t2!<é>end"]
    assert sampled_text(rollouts[1]) == "t0!____t1!____end"
    assert {r.finish_reason for r in rollouts} == {"stop"}
    for rollout in rollouts:
        check(rollout)
        assert rollout.tokens == list(rollout.text.encode())
    assert len(script.calls[0]) == 3  # the first turns, in one batch
    requests = sorted((key, context) for call in script.calls for context, key in call)
    assert requests == [  # a sample keeps its key, and continues its full context
        (key, "q" + "".join(f"t{i}!<é>" for i in range(number))) for key in range(3) for number in range(key + 2)
    ]
    assert [(span.kind, span.text) for span in rollouts[0].spans] == [
        ("turn", "t0!"),
        ("reply", "<é>"),
        ("turn", "end"),
    ]
    assert [rollouts[0].tokens[span.start : span.end] for span in rollouts[0].spans] == [
        list(span.text.encode()) for span in rollouts[0].spans
    ]


def test_sampled_tokens_are_never_tokenized_again() -> None:
    """No text encodes to these tokens: one byte of a character, a special token, an id without text."""
    odd = [0xC3, TOKENIZER.eos_id or 0, 300]
    contexts = []

    def generate(requests: list[tuple[list[int], int]]) -> list[Turn]:
        contexts.append(requests[0][0])
        return [Turn(odd, [-0.5] * 3, "", "stop")]

    (rollout,) = make(lambda text, _: "ok" if text.count("ok") < 1 else None).run(generate, [prompt(0, "q")])
    assert contexts == [[113], [113, *odd, *b"ok"]]
    assert rollout.tokens == [*odd, *b"ok", *odd]
    assert rollout.text == "\ufffdok\ufffd"


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    answers=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    turns=st.integers(1, 6),
    budget=st.integers(1, 20),
)
def test_limits_are_never_exceeded(lengths: list[int], answers: list[int], turns: int, budget: int) -> None:
    """Compared with a simulation of one sample: turns and replies alternate until a limit is reached."""
    count = iter(range(100))
    script = Script(lambda context, key: "x" * lengths[len(script.calls) % len(lengths) - 1])
    size, reason = 0, "length"
    for number in range(1, turns + 1):
        size += lengths[number % len(lengths) - 1]
        if size > budget:
            size = budget
            break
        if number - 1 >= len(answers):
            reason = "stop"
            break
        if number == turns or size + answers[number - 1] >= budget:
            break
        size += answers[number - 1]

    def answer(text: str, _: Prompt) -> str | None:
        number = next(count)
        return "y" * answers[number] if number < len(answers) else None

    (rollout,) = make(answer, turns=turns, tokens=budget).run(script, [prompt(0)])
    check(rollout)
    assert (len(rollout.tokens), rollout.finish_reason) == (size, reason)
    assert [chr(t) == "x" for t in rollout.tokens] == rollout.sampled
    assert rollout.text == "".join(map(chr, rollout.tokens))
    assert len(script.calls) <= turns


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_a_turn_that_was_cut_gets_no_reply(reason: str) -> None:
    script = Script(lambda context, key: ("a!", reason) if key == 0 else "a!" if context == "?" else "b")
    rollouts = make(lambda text, _: "r" if text.endswith("!") else None, samples=2).run(script, [prompt(0)])
    assert [(r.text, r.finish_reason) for r in rollouts] == [("a!", reason), ("a!rb", "stop")]


def test_a_reply_that_raises_ends_only_its_own_sample() -> None:
    def answer(text: str, _: Prompt) -> Any:
        return {"raise": lambda: 1 // 0, "number": lambda: 5, "go": lambda: "+"}.get(text, lambda: None)()

    texts = ["raise", "number", "go"]
    environment = make(answer, samples=3)
    rollouts = environment.run(Script(lambda context, key: texts[key] if context == "?" else "on"), [prompt(0)])
    assert [(r.text, r.finish_reason) for r in rollouts] == [("raise", "error"), ("number", "error"), ("go+on", "stop")]
    assert environment.failures == {"ZeroDivisionError": 1, "TokenizerError": 1}
    assert rollouts[0].failures["environment"].startswith("ZeroDivisionError: integer division or modulo by zero (")
    assert rollouts[2].failures == {}
    assert f"integer division or modulo by zero ({__file__}:" in environment.messages["ZeroDivisionError"]


def test_a_reply_that_exits_or_panics_ends_only_its_own_sample() -> None:
    class Panic(BaseException):
        """Like a panic of a library in Rust."""

    def answer(text: str, _: Prompt) -> Any:
        raise {"exit": SystemExit(3), "panic": Panic("no"), "stop": KeyboardInterrupt()}[text]

    environment = make(answer, samples=2)
    texts = ["exit", "panic"]
    rollouts = environment.run(Script(lambda context, key: texts[key]), [prompt(0)])
    assert [r.finish_reason for r in rollouts] == ["error", "error"]
    assert environment.failures == {"SystemExit": 1, "Panic": 1}
    with pytest.raises(KeyboardInterrupt):
        environment.run(Script(lambda context, key: "stop"), [prompt(0)])


def test_a_generate_function_that_breaks_its_contract_is_refused() -> None:
    with pytest.raises(ValueError, match="gave 0 turns for 2 requests"):
        SingleTurn(2).run(lambda requests: [], [prompt(0)])
    with pytest.raises(ValueError, match="2 tokens and 1 log-probabilities"):
        SingleTurn(1).run(lambda requests: [Turn([1, 2], [0.0], "", "stop")], [prompt(0)])
    assert SingleTurn(2).run(lambda requests: [], []) == []


def test_environments_are_loaded_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Fine:\n"
        "    stop = ()\n"
        "    def __init__(self, size): self.size = size\n"
        "    def run(self, generate, prompts): return []\n"
        "class NoStop:\n"
        "    def run(self, generate, prompts): return []\n"
        "class NoRun:\n"
        "    stop = ()\n"
        "    def run(self, prompts): return []\n"
        "def answer(text, prompt): return None\n"
        "def one(text): return None\n"
    )
    fine = load_environment(f"{path}:Fine", tokenizer=TOKENIZER, size=3)
    assert fine.run(lambda requests: [], []) == []
    several = {"samples_per_prompt": 1, "max_turns": 1, "max_tokens": 5}
    multi = "rollgraph.rl.environment:MultiTurn"
    environment = load_environment(multi, tokenizer=TOKENIZER, reply=f"{path}:answer", stop=["</a>"], **several)
    assert environment.stop == ("</a>",)
    assert load_environment("rollgraph.rl.environment:SingleTurn", tokenizer=TOKENIZER, samples_per_prompt=2).stop == ()
    for name, options, message in [
        (f"{path}:Fine", {}, r"missing a required argument: 'size'; its signature is \(size\)"),
        (f"{path}:Fine", {"size": 1, "sise": 2}, "unexpected keyword argument 'sise'"),
        (f"{path}:NoStop", {}, "an environment must have `stop`"),
        (f"{path}:NoRun", {}, r"run: is called as \(generate, prompts\)"),
        (multi, several | {"reply": f"{path}:one", "tokenizer": TOKENIZER}, r"reply: is called as \(text, prompt\)"),
        (multi, several | {"reply": f"{path}:answer"}, "missing a required argument: 'tokenizer'"),
        (multi, several | {"reply": f"{path}:answer", "tokenizer": TOKENIZER, "stop": "ab"}, "a list of strings"),
        (
            multi,
            several | {"reply": f"{path}:answer", "tokenizer": TOKENIZER, "max_turns": 0},
            "max_turns: must be at least 1, got 0",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            load_environment(name, **options)
    with pytest.raises(LoadError, match="has no 'Missing'"):
        load_environment(f"{path}:Missing")


# The calculator.


numbers = st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str) | st.just("2e3")


def _combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    signed = st.tuples(st.sampled_from("+-"), inner).map(lambda t: f"({t[0]}{t[1]})")
    binary = st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", " ** "]), inner).map("".join)
    return signed | binary | binary.map(lambda text: f"({text})")


def _bounded(text: str) -> bool:
    """Python itself has no limits, so powers are kept small."""
    return text.count("**") <= 1 and "** (" not in text


def outcome(function: Callable[[str], Any], expression: str) -> Any:
    try:
        return function(expression)
    except Exception as error:
        return error


@given(st.recursive(numbers, _combine, max_leaves=6).filter(_bounded))
def test_evaluate_agrees_with_python(expression: str) -> None:
    ours, python = outcome(evaluate_expression, expression), outcome(eval, expression)
    if isinstance(ours, CalculatorError):
        assume(str(ours) != "number too large")
        assert isinstance(python, ZeroDivisionError | complex)
    else:
        assert ours == python
        assert type(ours) is type(python)


@given(st.text(alphabet="0123456789eE.+-*/%() ", max_size=60) | st.text(max_size=30))
def test_any_text_gives_a_number_or_an_error(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            value = evaluate_expression(text)
        except CalculatorError:
            return
    assert abs(value) < 2**1025


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9**9", "number too large"),
        ("9**(9**9)", "number too large"),
        ("2**255*2**255", "number too large"),
        ("1e308*10", "number too large"),
        ("1e999", "number too large"),
        ("10.0**400", "number too large"),
        ("(((2**200)**2)**2)**2", "number too large"),
        ("1/0", "division by zero"),
        ("5%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("(-8)**0.5", "not a real number"),
        ("", "invalid syntax"),
        ("1+", "invalid syntax"),
        ("(" * 150, "invalid syntax"),
        ("1" + "+1" * 200, "expression too long"),
        ("e", "only numbers"),
        ("e.e", "only numbers"),
        ("1(2)", "only numbers"),
        ("e(1)", "only numbers"),
        ("(1).real", "only numbers"),
        ("__import__('os').system('true')", "only numbers"),
        ("True", "only numbers"),
        ("1,000", "only numbers"),
        ("1j", "only numbers"),
        ("[1]", "only numbers"),
        ("1<2", "only numbers"),
        ("'a'*5", "only numbers"),
    ],
)
def test_evaluate_refuses_all_but_small_arithmetic(expression: str, message: str) -> None:
    with pytest.raises(CalculatorError, match=message):
        evaluate_expression(expression)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so <calc>12*(3+4)</calc>", "<result>84</result>"),
        ("<calc> 1/3 </calc>\n", "<result>0.333333333333</result>"),
        ("<calc>0.1+0.2</calc>", "<result>0.3</result>"),
        ("<calc>84/2</calc>", "<result>42</result>"),
        ("<calc>1</calc><", "<result>1</result>"),
        ("<calc>1</calc><result>1</result> <calc>2</calc>", "<result>2</result>"),
        ("<calc>1+<calc>2</calc>", "<result>2</result>"),
        ("<calc>x</calc>", "<result>error: only numbers, + - * / // % ** and ( )</result>"),
        ("<calc>1</calc><result>1</result> is it", None),
        ("<calc>1+1", None),
        ("no call", None),
    ],
)
def test_the_calculator_replies_to_the_last_call(text: str, expected: str | None) -> None:
    assert reply(text, prompt(0)) == expected


def test_a_conversation_with_the_calculator() -> None:
    turns = ["<calc>12*7</calc>", "<calc>84/0</calc>", "84"]
    script = Script(lambda context, key: turns[context.count("<calc>")])
    environment = load_environment("rollgraph.rl.calculator:calculator", tokenizer=TOKENIZER, samples_per_prompt=2)
    assert environment.stop == calculator(TOKENIZER, samples_per_prompt=1).stop == ("</calc>",)
    rollouts = environment.run(script, [prompt(0, "12*7?"), prompt(1, "again?")])
    expected = "<calc>12*7</calc><result>84</result><calc>84/0</calc><result>error: division by zero</result>84"
    assert [(r.group, r.text) for r in rollouts] == [(0, expected), (0, expected), (1, expected), (1, expected)]
    assert sampled_text(rollouts[0]).replace("_", "") == "".join(turns)
    assert sum(map(len, script.calls)) == 12
