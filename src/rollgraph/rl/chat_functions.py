"""What a user gives to an environment of messages: functions that have no state, or a class whose instances have one.

class Maze:
    tools = ("move",)                     # methods that the policy may call

    def __init__(self, prompt): ...       # once for each rollout
    def move(self, direction: str): ...
    def reply(self, messages, prompt): ...
    def reward(self, messages, prompt): ...
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollgraph.errors import InvalidInput
from rollgraph.rl.environment import load_function
from rollgraph.rl.paths import LoadError
from rollgraph.rl.tools import Tool, ToolBox
from rollgraph.tokenizer import Message
from rollgraph.types import Prompt

Messages = list[dict[str, Any]]
MessageReply = Callable[[Messages, Prompt], Sequence[Message] | Awaitable[Sequence[Message] | None] | None]
TurnReward = Callable[[Messages, Prompt], float | Awaitable[float | None] | None]

_ARGUMENTS = ("messages", "prompt")


@dataclass(frozen=True)
class ChatFunctions:
    """If they are methods, `make` is the class, and these are functions of it until `of_instance` binds them."""

    tools: ToolBox
    reply: Callable[..., Any] | None
    reward: Callable[..., Any] | None
    make: Callable[[Prompt], Any] | None = None
    instance: Any = None

    def of_instance(self, instance: Any) -> ChatFunctions:
        reply = instance.reply if self.reply is not None else None
        reward = instance.reward if self.reward is not None else None
        return replace(self, reply=reply, reward=reward, instance=instance)


def load_chat_functions(
    reply: MessageReply | str | None, tools: Sequence[Tool], reward: TurnReward | str | None, episode: type | str | None
) -> ChatFunctions:
    """Load and check what was given as functions, import paths, or a class."""
    if episode is not None:
        if reply is not None or reward is not None or tools:
            raise InvalidInput("its methods take the place of `reply`, `tools` and `reward`", argument="episode")
        return _load_class(episode)
    box = ToolBox(tools)
    if not box and reply is None:
        raise InvalidInput("give `reply`, `tools` or both: otherwise nothing follows a turn", argument="reply")
    if box.has_schemas_only and reply is None:
        raise LoadError("a tool that is only a schema needs a `reply` that runs it", argument="tools")
    return ChatFunctions(
        box,
        None if reply is None else load_function(reply, _ARGUMENTS, argument="reply"),
        None if reward is None else load_function(reward, _ARGUMENTS, argument="reward"),
    )


def _load_class(episode: type | str) -> ChatFunctions:
    found: Any = load_function(episode, ("prompt",), argument="episode")
    if not isinstance(found, type):
        raise LoadError(f"expected a class, got {found!r:.80}", argument="episode")
    methods = {}
    for name in ("reply", "reward"):
        methods[name] = getattr(found, name, None)
        if methods[name] is not None:
            load_function(methods[name], ("self", *_ARGUMENTS), argument="episode")
    box = ToolBox.of_methods(found, getattr(found, "tools", ()))
    if not box and methods["reply"] is None:
        raise LoadError(f"{found.__name__} has neither `tools` nor a method `reply`", argument="episode")
    return ChatFunctions(box, methods["reply"], methods["reward"], make=found)
