"""Environments of messages: the policy talks to tools, to a simulated user, or to both.

    def reply(messages, prompt):      # the messages after the assistant's last one; None or []: none
        return [{"role": "user", "content": "Are you sure?"}] if len(messages) < 4 else None

    def reward(messages, prompt):     # of the turn that has just ended
        return 1.0 if messages[-1]["content"] == prompt.columns["answer"] else 0.0

Owns the steps between two turns: parse and run tool calls, call `reply`, and render the messages as the tokens that the
chat template has between turns.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollgraph.errors import InvalidInput
from rollgraph.rl.environment import load_function
from rollgraph.rl.multi_turn import Conversations, EnvResponse, ReplyTimeout, check_positive
from rollgraph.rl.paths import LoadError
from rollgraph.rl.rewards.calls import check_score, copy_value
from rollgraph.rl.rewards.process import Failure, line_suffix
from rollgraph.rl.tool_calls import ToolCall, parse_tool_calls
from rollgraph.rl.tools import Tool, ToolBox, result_message
from rollgraph.rl.turns import Episode
from rollgraph.tokenizer import Message, Tokenizer
from rollgraph.tokenizer.reply_encoder import ReplyEncoder
from rollgraph.types import Prompt, Rollout

# -- functions and classes of users ----------------------------------------------------------------
# class Maze:
#     tools = ("move",)                     # methods that the policy may call
#
#     def __init__(self, prompt): ...       # once for each rollout
#     def move(self, direction: str): ...
#     def reply(self, messages, prompt): ...
#     def reward(self, messages, prompt): ...

Messages = list[dict[str, Any]]
MessageReply = Callable[[Messages, Prompt], Sequence[Message] | Awaitable[Sequence[Message] | None] | None]
TurnReward = Callable[[Messages, Prompt], float | Awaitable[float | None] | None]

_ARGUMENTS = ("messages", "prompt")


@dataclass(frozen=True)
class ChatFunctions:
    """A user's functions. If they are methods of `episode_class`, they are unbound until `bind`."""

    tools: ToolBox
    reply: Callable[..., Any] | None
    reward: Callable[..., Any] | None
    episode_class: Callable[[Prompt], Any] | None = None
    instance: Any = None

    def bind(self, instance: Any) -> ChatFunctions:
        reply = instance.reply if self.reply is not None else None
        reward = instance.reward if self.reward is not None else None
        return replace(self, reply=reply, reward=reward, instance=instance)


def load_chat_functions(
    reply: MessageReply | str | None, tools: Sequence[Tool], reward: TurnReward | str | None, episode: type | str | None
) -> ChatFunctions:
    """Load and check functions, their import paths, or a class with them as methods."""
    if episode is not None:
        if reply is not None or reward is not None or tools:
            raise InvalidInput("its methods take the place of `reply`, `tools` and `reward`", argument="episode")
        return _load_class(episode)
    box = ToolBox(tools)
    if not box and reply is None:
        raise InvalidInput("give `reply`, `tools` or both: otherwise nothing follows a turn", argument="reply")
    if box.has_schema_only_tool and reply is None:
        raise LoadError("a tool that is only a schema needs a `reply` that runs it", argument="tools")
    return ChatFunctions(
        box,
        None if reply is None else load_function(reply, _ARGUMENTS, argument="reply"),
        None if reward is None else load_function(reward, _ARGUMENTS, argument="reward"),
    )


def _load_class(episode: type | str) -> ChatFunctions:
    episode_class: Any = load_function(episode, ("prompt",), argument="episode")
    if not isinstance(episode_class, type):
        raise LoadError(f"expected a class, got {episode_class!r:.80}", argument="episode")
    methods = {}
    for name in ("reply", "reward"):
        methods[name] = getattr(episode_class, name, None)
        if methods[name] is not None:
            load_function(methods[name], ("self", *_ARGUMENTS), argument="episode")
    box = ToolBox.of_methods(episode_class, getattr(episode_class, "tools", ()))
    if not box and methods["reply"] is None:
        raise LoadError(f"{episode_class.__name__} has neither `tools` nor a method `reply`", argument="episode")
    return ChatFunctions(box, methods["reply"], methods["reward"], episode_class=episode_class)


# -- the environment -------------------------------------------------------------------------------


class Chat(Conversations):
    """Turns of the policy with messages in between.

    After each turn that the policy ended itself, its calls of Python tools are run, and their results follow. If there
    was no call, or one of a tool that is only a schema, `reply` is called for more messages. Without any message, the
    rollout is finished. `reward` is called after each turn, with the messages that follow it. All of these may be async
    and may be import paths. For an environment with a state, pass a class as `episode`; each rollout has an instance.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        samples_per_prompt: int,
        reply: MessageReply | str | None = None,
        tools: Sequence[Tool] = (),
        reward: TurnReward | str | None = None,
        episode: type | str | None = None,
        max_turns: int = 8,
        max_tokens: int = 1024,
        max_result_characters: int = 4096,
        stop: Sequence[str] = (),
        timeout: float = 60.0,
        threads: int = 32,
    ) -> None:
        super().__init__(
            tokenizer,
            samples_per_prompt=samples_per_prompt,
            max_turns=max_turns,
            max_tokens=max_tokens,
            timeout=timeout,
            threads=threads,
            stop=stop,
        )
        self._functions = load_chat_functions(reply, tools, reward, episode)
        self._max_result_characters = check_positive("max_result_characters", max_result_characters)
        roles = []
        if self._functions.tools:
            roles.append("tool")
        if self._functions.reply is not None:
            roles.append("user")
        self._template = ReplyEncoder(tokenizer, roles=roles, tools=self.tools)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas with which prompts are rendered."""
        return self._functions.tools.schemas

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._template.end_id,)

    @property
    def gives_rewards(self) -> bool:
        return self._functions.reward is not None

    def record_turn(self, rollout: Rollout, tokens: Sequence[int]) -> str:
        rollout.text = self._decode(tokens)
        message: dict[str, Any] = {"role": "assistant", "content": rollout.text}
        content, calls = self._parse(tokens)
        if calls and not any(call.error for call in calls):
            message = {"role": "assistant", "content": content, "tool_calls": [call.to_message() for call in calls]}
        rollout.messages.append(message)
        return rollout.text

    async def env_response(self, episode: Episode, *, policy_ended: bool) -> EnvResponse:
        rollout = episode.rollout
        if rollout.prompt.messages is None:
            raise ValueError(f"prompt {rollout.prompt.id} is not a chat, so no messages can follow it")
        functions = await self._functions_of(episode)
        conversation = [*rollout.prompt.messages, *rollout.messages]
        failures: list[tuple[str, str]] = []
        next_messages: list[Message] = []
        if policy_ended:
            _, calls = self._parse(rollout.tokens[rollout.spans[-1].start :])
            next_messages = await self._run_tools(functions, calls, failures)
            if not calls or len(next_messages) < len(calls):
                next_messages += await self._call_reply(functions, [*conversation, *next_messages], rollout)
        reward = await self._score_turn(functions, [*conversation, *next_messages], rollout)
        if not next_messages:
            return EnvResponse(reward=reward, failures=failures)
        tokens = self._template.encode(next_messages, rollout.tokens[-1] if rollout.tokens else None)
        text = self._decode(tokens, skip_special=False)
        json_messages = json.loads(json.dumps(next_messages))  # rollouts travel to other ranks and into checkpoints
        return EnvResponse(tokens, text, json_messages, reward, failures)

    async def _functions_of(self, episode: Episode) -> ChatFunctions:
        """The functions of this rollout; methods are bound to its instance."""
        if self._functions.episode_class is None:
            return self._functions
        if episode.state is None:
            instance = await self._reply_loop.call(self._functions.episode_class, episode.rollout.prompt)
            episode.state = self._functions.bind(instance)
        functions: ChatFunctions = episode.state
        return functions

    async def _run_tools(
        self, functions: ChatFunctions, calls: Sequence[ToolCall], failures: list[tuple[str, str]]
    ) -> list[Message]:
        """The results of all calls except those that `reply` has to run.

        If a tool raises, this counts as a failure and the policy is told; if it hangs, the rollout ends.
        """
        results: list[Message] = []
        for call in calls:
            function_or_error = functions.tools.find(call, functions.instance)
            if function_or_error is None:
                continue
            try:
                result = (
                    function_or_error
                    if isinstance(function_or_error, str)
                    else await self._reply_loop.call(function_or_error, **call.arguments)
                )
            except ReplyTimeout:
                raise
            except Exception as error:
                kind = type(error).__name__
                failures.append((f"{call.name}/{kind}", f"{error}{line_suffix(error)}"))
                result = f"error: {kind}: {error}"
            results.append(result_message(call.name, result, self._max_result_characters))
        return results

    async def _call_reply(
        self, functions: ChatFunctions, conversation: list[Message], rollout: Rollout
    ) -> list[Message]:
        if functions.reply is None:
            return []
        messages = await self._reply_loop.call(functions.reply, copy_value(conversation), rollout.prompt)
        if messages is None:
            return []
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise TypeError(f"reply must return a list of messages or None, not {messages!r:.80}")
        return list(messages)

    async def _score_turn(self, functions: ChatFunctions, conversation: list[Message], rollout: Rollout) -> float:
        if functions.reward is None:
            return 0.0
        score = check_score(await self._reply_loop.call(functions.reward, copy_value(conversation), rollout.prompt))
        if isinstance(score, Failure):
            raise ValueError(f"reward: {score.message}")
        return score or 0.0

    def _parse(self, tokens: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """A turn's text without tool calls, and the calls. Decodes special tokens: some models begin calls with one."""
        if not self._functions.tools:
            return "", []
        if tokens and tokens[-1] in {*self._tokenizer.stop_ids, self._template.end_id}:
            tokens = tokens[:-1]
        return parse_tool_calls(self._decode(tokens, skip_special=False))
