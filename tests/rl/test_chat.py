"""Environments of messages, with a scripted policy: tools, replies, rewards of turns, limits, and mistakes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollgraph.rl.calculator import calculate
from rollgraph.rl.chat import Chat
from rollgraph.rl.data.prompts import PromptData
from rollgraph.rl.data.rows import make_rows
from rollgraph.rl.environment import load_environment
from rollgraph.rl.paths import LoadError
from rollgraph.rl.turns import Request, Turn
from rollgraph.tokenizer import ByteTokenizer
from rollgraph.types import Prompt, Rollout

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_id or 0


def make(**options: Any) -> Chat:
    return Chat(TOKENIZER, **{"samples_per_prompt": 1, "max_tokens": 1000} | options)


def call(expression: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'calculate', 'arguments': {'expression': expression}})}</tool_call>"


class Policy:
    """Writes `turns` in order, whatever it reads, and ends each with eos."""

    def __init__(self, *turns: str, reason: str = "stop") -> None:
        self._turns = turns
        self._reason = reason
        self.contexts: dict[int, list[list[int]]] = {}  # by key

    def __call__(self, requests: list[Request]) -> list[Turn]:
        turns = []
        for tokens, key in requests:
            contexts = self.contexts.setdefault(key, [])
            contexts.append(tokens)
            text = self._turns[len(contexts) - 1]
            turn_tokens = [*text.encode(), *([EOS] if self._reason == "stop" else [])]
            turns.append(Turn(turn_tokens, [-0.5] * len(turn_tokens), text, self._reason))
        return turns


def prompts_of(environment: Chat, *rows: dict[str, Any]) -> list[Prompt]:
    """The prompts of these rows, made as a run makes them."""
    options = {"prompts_per_step": len(rows), "seed": 0, "shuffle": False, "chat": True, "tools": environment.tools}
    return PromptData(make_rows(rows), TOKENIZER, **options).next_prompts()


def run(environment: Chat, policy: Policy, **columns: Any) -> Rollout:
    (rollout,) = environment.run(policy, prompts_of(environment, {"prompt": "6*7+1?", **columns}))
    return rollout


def test_a_conversation_with_a_tool_calls_it_and_shows_its_results() -> None:
    environment = make(tools=[calculate])
    policy = Policy("so " + call("6*7"), call("6*7)"), call("42+1") + call("1/0"), "43")
    rollout = run(environment, policy)
    prompt_text = TOKENIZER.decode(rollout.prompt.tokens)
    assert '"name": "calculate"' in prompt_text
    assert prompt_text.endswith("user: 6*7+1?\nassistant: ")
    results = ["42", "error: invalid syntax", "43", "error: division by zero"]
    assert [m["content"] for m in rollout.messages if m["role"] == "tool"] == results
    assert rollout.messages[0] == {
        "role": "assistant",
        "content": "so",
        "tool_calls": [{"type": "function", "function": {"name": "calculate", "arguments": {"expression": "6*7"}}}],
    }
    assert (rollout.text, rollout.finish_reason) == ("43", "stop")
    assert [span.kind for span in rollout.spans] == ["turn", "reply"] * 3 + ["turn"]
    assert rollout.spans[1].text == "\ntool: 42<|eos|>\nassistant: "
    inserted_text = "".join(
        "" if sampled else TOKENIZER.decode([token], skip_special=False)
        for token, sampled in zip(rollout.tokens, rollout.sampled, strict=True)
    )
    assert inserted_text == "".join(span.text for span in rollout.spans if span.kind == "reply")
    # The policy reads its own tokens, not the encoding of its text, and its eos is not repeated.
    contexts = policy.contexts[0]
    assert contexts[-1] == [*rollout.prompt.tokens, *rollout.tokens[: rollout.spans[-1].start]]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(contexts))
    assert bytes(rollout.tokens[: rollout.spans[0].end - 1]).decode() == "so " + call("6*7")


def test_messages_are_written_as_by_the_template() -> None:
    conversations: list[list[dict[str, Any]]] = []

    def reply(messages: list[dict[str, Any]], prompt: Prompt) -> list[dict[str, Any]] | None:
        conversations.append(json.loads(json.dumps(messages)))
        messages.clear()  # it is a copy
        return [{"role": "user", "content": f"{prompt.columns['answer']}?"}] if len(conversations) < 3 else None

    rollout = run(make(reply=reply), Policy("a", "b", "c"), answer="43")
    conversation = [*(rollout.prompt.messages or []), *rollout.messages]
    assert [message["content"] for message in conversation] == ["6*7+1?", "a", "43?", "b", "43?", "c"]
    assert conversations == [conversation[:2], conversation[:4], conversation]
    full_tokens = TOKENIZER.encode_chat(conversation, add_generation_prompt=False)
    assert [*rollout.prompt.tokens, *rollout.tokens, *b"\n"] == full_tokens


def test_the_policy_is_told_of_calls_that_cannot_be_run() -> None:
    turns = ["<tool_call>{</tool_call>", '<tool_call>{"name": "multiply", "arguments": {}}</tool_call>', "done"]
    rollout = run(make(tools=[calculate]), Policy(*turns))
    tool_messages = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert tool_messages[0].startswith("error: the call is not JSON")
    assert tool_messages[1] == "error: there is no tool 'multiply' (there is: calculate)"
    assert rollout.messages[0] == {"role": "assistant", "content": turns[0]}
    assert rollout.finish_reason == "stop"


def test_errors_of_a_tool_are_counted_and_its_output_is_limited() -> None:
    def calculate(expression: str) -> str:
        """Calculate.

        Args:
            expression: what
        """
        if expression == "long":
            return "<|eos|>" + "9" * 50
        raise ArithmeticError("no")

    environment = make(tools=[calculate], max_result_characters=10)
    rollout = run(environment, Policy(call("1"), call("long"), "done"))
    tool_messages = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert tool_messages == ["error: Ari... (16 more characters)", "<|eos|>999... (47 more characters)"]
    assert EOS not in rollout.tokens[rollout.spans[3].start : rollout.spans[3].end - len("\nassistant: ") - 1]
    assert environment.failures == {"calculate/ArithmeticError": 1}
    (message,) = environment.unread()
    assert message.startswith(f"calculate/ArithmeticError: no ({__file__}:")
    assert rollout.finish_reason == "stop"


def test_a_tool_may_have_any_parameter_names() -> None:
    def calculate(function: str, self: int) -> str:
        """Calculate.

        Args:
            function: what
            self: whose
        """
        return f"{function} {self}"

    call_text = '<tool_call>{"name": "calculate", "arguments": {"function": "f", "self": 2}}</tool_call>'
    rollout = run(make(tools=[calculate]), Policy(call_text, "done"))
    assert rollout.messages[1]["content"] == "f 2"


def test_a_tool_that_is_only_a_schema_is_run_by_the_reply() -> None:
    schema = {"type": "function", "function": {"name": "calculate", "description": "?", "parameters": {}}}

    async def reply(messages: list[dict[str, Any]], prompt: Prompt) -> list[dict[str, Any]]:
        tool_calls = messages[-1].get("tool_calls", [])
        return [{"role": "tool", "content": each["function"]["arguments"]["expression"] + "!"} for each in tool_calls]

    rollout = run(make(tools=[schema], reply=reply), Policy(call("6*7"), "done"))
    assert [message["content"] for message in rollout.messages] == ["", "6*7!", "done"]


def test_each_turn_may_have_a_reward() -> None:
    """Each turn is rated with its reply, even if it was cut. None is no reward."""

    def reward(messages: list[dict[str, Any]], prompt: Prompt) -> float | None:
        last = messages[-1]
        if last["role"] == "tool":
            return -0.5 if last["content"].startswith("error") else 0.25
        return 1.0 if last["content"] == prompt.columns["answer"] else None

    environment = make(tools=[calculate], reward=reward)
    assert environment.gives_rewards
    rollout = run(environment, Policy(call("6*7"), call("x"), "43"), answer="43")
    assert [span.reward for span in rollout.spans] == [0.25, 0.0, -0.5, 0.0, 1.0]
    assert rollout.reward == 0.75
    assert Rollout.from_dict(json.loads(json.dumps(rollout.to_dict()))) == rollout
    assert [span.reward for span in run(environment, Policy("42"), answer="43").spans] == [0.0]
    cut = run(environment, Policy("43", reason="length"), answer="43")
    assert (cut.reward, cut.finish_reason) == (1.0, "length")
    for wrong in (float("nan"), "1"):
        broken = make(tools=[calculate], reward=lambda messages, prompt, wrong=wrong: wrong)
        assert run(broken, Policy("43")).finish_reason == "error"
        assert "is not a finite number" in broken.messages["ValueError"]


def again(messages: list[dict[str, Any]], prompt: Prompt) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "again"}]


def test_turns_and_tokens_are_limited() -> None:
    rollout = run(make(reply=again, max_turns=2), Policy("a", "b"))
    assert [span.kind for span in rollout.spans] == ["turn", "reply", "turn"]
    assert [message["role"] for message in rollout.messages] == ["assistant", "user", "assistant"]
    assert rollout.finish_reason == "length"
    reply = len("\nuser: again.\nassistant: ")  # the dot stands for eos
    for most in range(1, 2 * reply + 8):
        rollout = run(make(reply=again, max_tokens=most), Policy("a", "b", "c"))
        assert len(rollout.tokens) <= most
        assert rollout.finish_reason == "length"
        assert sum(span.kind == "turn" for span in rollout.spans) == 1 + (most > 2 + reply) + (most > 4 + 2 * reply)


def hang(messages: list[dict[str, Any]], prompt: Prompt) -> None:
    threading.Event().wait()


WRONG: list[tuple[Callable[..., Any], str, str]] = [
    (lambda messages, prompt: "text", "TypeError", "reply must return a list of messages or None, not 'text'"),
    (lambda messages, prompt: ["text"], "TypeError", "a reply has messages such as"),
    (
        lambda messages, prompt: [{"role": "system", "content": ""}],
        "ValueError",
        "has the role 'system', expected 'user'",
    ),
    (lambda messages, prompt: [{"role": "user", "content": "", "at": {1}}], "TypeError", "not JSON serializable"),
    (hang, "ReplyTimeout", "hang took longer than 0.05 s"),
]


@pytest.mark.parametrize(("reply", "kind", "message"), WRONG)
def test_a_wrong_reply_fails_only_its_own_rollout(reply: Callable[..., Any], kind: str, message: str) -> None:
    environment = make(reply=reply, timeout=0.05 if reply is hang else 120)
    rollout = run(environment, Policy("a"))
    assert rollout.finish_reason == "error"
    assert environment.failures == {kind: 1}
    assert message in environment.messages[kind]


def test_a_prompt_that_is_not_a_chat_is_an_error() -> None:
    environment = make(reply=again)
    (rollout,) = environment.run(Policy("a"), [Prompt(3, (1,), "?")])
    assert rollout.finish_reason == "error"
    assert environment.messages == {"ValueError": "prompt 3 is not a chat, so no messages can follow it"}


def test_options_of_chat_are_loaded_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def reply(messages, prompt): return None\n"
        "async def reward(messages, prompt): return 2\n"
        "def double(x: int) -> int:\n"
        '    """Double.\n\n    Args:\n        x: a number\n    """\n'
        "    return 2 * x\n"
        "def wrong(messages): return None\n"
    )
    chat = "rollgraph.rl.chat:Chat"
    options = {"reply": f"{path}:reply", "tools": [f"{path}:double"], "reward": f"{path}:reward"}
    environment = load_environment(chat, tokenizer=TOKENIZER, samples_per_prompt=2, **options)
    assert isinstance(environment, Chat)
    assert [tool["function"]["name"] for tool in environment.tools] == ["double"]
    assert environment.stop_ids == (EOS,)
    schema = {"type": "function", "function": {"name": "f"}}
    for wrong, message in [
        ({}, "reply: give `reply`, `tools` or both"),
        ({"tools": [schema]}, "tools: a tool that is only a schema needs a `reply` that runs it"),
        ({"reply": f"{path}:wrong"}, r"reply: is called as \(messages, prompt\)"),
        ({"tools": [calculate], "reward": f"{path}:wrong"}, r"reward: is called as \(messages, prompt\)"),
        ({"tools": [calculate], "max_result_characters": 0}, "max_result_characters: must be at least 1, got 0"),
        ({"tools": [calculate], "timeout": 0}, "timeout: must be more than 0 seconds, got 0"),
        ({"tools": [calculate], "threads": 0}, "threads: must be at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_environment(chat, tokenizer=TOKENIZER, samples_per_prompt=1, **wrong)


class Counting:
    """Each rollout has a counter of its own."""

    tools = ("add",)

    def __init__(self, prompt: Prompt) -> None:
        self.count = int(prompt.columns["start"])

    def add(self, number: int) -> int:
        """Add to the counter.

        Args:
            number: how much
        """
        self.count += number
        return self.count

    async def reply(self, messages: list[dict[str, Any]], prompt: Prompt) -> list[dict[str, Any]] | None:
        return None if self.count > 100 else [{"role": "user", "content": f"{self.count} is too little"}]

    def reward(self, messages: list[dict[str, Any]], prompt: Prompt) -> float:
        return self.count


def test_each_rollout_has_an_episode_of_its_own() -> None:
    environment = make(episode=Counting, samples_per_prompt=2, max_turns=4)
    assert list(environment.tools[0]["function"]["parameters"]["properties"]) == ["number"]
    add = '<tool_call>{"name": "add", "arguments": {"number": 40}}</tool_call>'
    prompts = prompts_of(environment, {"prompt": "a", "start": 10}, {"prompt": "b", "start": 30})
    rollouts = environment.run(Policy(add, "so?", add, "enough"), prompts)
    first = ["", "50", "so?", "50 is too little", "", "90", "enough", "90 is too little"]
    second = ["", "70", "so?", "70 is too little", "", "110", "enough"]
    contents = [[message["content"] for message in rollout.messages] for rollout in rollouts]
    assert contents == [first[:-1], first[:-1], second, second]
    assert [rollout.reward for rollout in rollouts] == [280, 280, 360, 360]
    assert [rollout.finish_reason for rollout in rollouts] == ["length", "length", "stop", "stop"]


def test_classes_that_are_no_episodes_are_refused() -> None:
    class Misspelt(Counting):
        tools = ("ad",)

    class Short(Counting):
        def reply(self, messages: list[dict[str, Any]]) -> None:  # type: ignore[override]
            return None

    class Mute:
        def __init__(self, prompt: Prompt) -> None: ...

    for episode, message in [
        (Misspelt, "episode: Misspelt has no method 'ad'; did you mean 'add'?"),
        (Short, r"episode: is called as \(self, messages, prompt\)"),
        (Mute, "episode: Mute has neither `tools` nor a method `reply`"),
        (again, "episode: is called as \\(prompt\\)"),
    ]:
        with pytest.raises(LoadError, match=message):
            make(episode=episode)
    with pytest.raises(ValueError, match="episode: its methods take the place of"):
        make(episode=Counting, reply=again)
