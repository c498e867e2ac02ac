"""Environments of messages: the policy talks with tools, with a simulated user, or with both.

    def reply(messages, prompt):      # what follows the assistant's last message; None or []: nothing
        return [{"role": "user", "content": "Are you sure?"}] if len(messages) < 4 else None

    def reward(messages, prompt):     # of the turn that has just ended
        return 1.0 if messages[-1]["content"] == prompt.columns["answer"] else 0.0

Owns what happens between two turns: tool calls are read and run, `reply` is asked, and the messages become the tokens
that the chat template puts between turns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollgraph.errors import InvalidInput
from rollgraph.rl.conversations import Answer, Conversations, check_positive
from rollgraph.rl.environment import load_function
from rollgraph.rl.paths import LoadError
from rollgraph.rl.replies import ReplyTimeout
from rollgraph.rl.reward_calls import check_score, copy_value
from rollgraph.rl.tool_calls import ToolCall, parse_turn
from rollgraph.rl.tools import Tool, ToolBox, write_result
from rollgraph.rl.worker_messages import Failure
from rollgraph.tokenizer import Message, Tokenizer
from rollgraph.tokenizer.chat_replies import ChatReplies
from rollgraph.types import Prompt, Rollout

Messages = list[dict[str, Any]]
MessageReply = Callable[[Messages, Prompt], Sequence[Message] | Awaitable[Sequence[Message] | None] | None]
TurnReward = Callable[[Messages, Prompt], float | Awaitable[float | None] | None]


class Chat(Conversations):
    """Turns of the policy with messages in between.

    After each turn that the policy ended itself, its calls of Python tools are run, and their results follow. Without
    a call, or if a call is of a tool that is only a schema, `reply` is asked what follows. If nothing does, the rollout
    is finished. `reward` is asked after each turn and what follows it. All three may be async, and may be given as
    import paths.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        samples_per_prompt: int,
        reply: MessageReply | str | None = None,
        tools: Sequence[Tool] = (),
        reward: TurnReward | str | None = None,
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
        self._tools = ToolBox(tools)
        self._reply = None
        if reply is not None:
            self._reply = load_function(reply, ("messages", "prompt"), argument="reply")
        self._reward = None
        if reward is not None:
            self._reward = load_function(reward, ("messages", "prompt"), argument="reward")
        self._most_characters = check_positive("max_result_characters", max_result_characters)
        if not self._tools and self._reply is None:
            raise InvalidInput("give `reply`, `tools` or both: otherwise nothing follows a turn", argument="reply")
        if self._tools.has_schemas_only and self._reply is None:
            raise LoadError("a tool that is only a schema needs a `reply` that runs it", argument="tools")
        roles = (["tool"] if self._tools else []) + (["user"] if self._reply else [])
        self._template = ChatReplies(tokenizer, roles=roles, tools=self._tools.schemas)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas with which prompts are rendered."""
        return self._tools.schemas

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self._template.end_id,)

    @property
    def gives_rewards(self) -> bool:
        return self._reward is not None

    def describe(self, rollout: Rollout, tokens: Sequence[int]) -> str:
        rollout.text = self._decode(tokens)
        message: dict[str, Any] = {"role": "assistant", "content": rollout.text}
        said, calls = self._parse(tokens)
        if calls and not any(call.error for call in calls):
            message = {"role": "assistant", "content": said, "tool_calls": [call.to_message() for call in calls]}
        rollout.messages.append(message)
        return rollout.text

    async def answer(self, rollout: Rollout, *, ended: bool) -> Answer:
        if rollout.prompt.messages is None:
            raise ValueError(f"prompt {rollout.prompt.id} is not a chat, so no messages can follow it")
        conversation = [*rollout.prompt.messages, *rollout.messages]
        failures: list[tuple[str, str]] = []
        follow: list[Message] = []
        if ended:
            _, calls = self._parse(rollout.tokens[rollout.spans[-1].start :])
            follow = await self._run_tools(calls, failures)
            if not calls or len(follow) < len(calls):
                follow += await self._ask([*conversation, *follow], rollout.prompt)
        reward = await self._rate([*conversation, *follow], rollout.prompt)
        if not follow:
            return Answer(reward=reward, failures=failures)
        tokens = self._template.encode(follow, rollout.tokens[-1] if rollout.tokens else None)
        text = self._decode(tokens, skip_special=False)
        return Answer(tokens, text, [dict(message) for message in follow], reward, failures)

    async def _run_tools(self, calls: Sequence[ToolCall], failures: list[tuple[str, str]]) -> list[Message]:
        """The results of all calls but those that `reply` has to run.

        A tool that raises is counted, and the policy is told; one that hangs ends the rollout.
        """
        results: list[Message] = []
        for call in calls:
            found = self._tools.find(call)
            if found is None:
                continue
            try:
                result = found if isinstance(found, str) else await self._replies.call(found, **call.arguments)
            except ReplyTimeout:
                raise
            except Exception as error:
                kind = type(error).__name__
                failures.append((f"{call.name}/{kind}", str(error)))
                result = f"error: {kind}: {error}"
            results.append(write_result(call.name, result, self._most_characters))
        return results

    async def _ask(self, conversation: list[Message], prompt: Prompt) -> list[Message]:
        if self._reply is None:
            return []
        replied = await self._replies.call(self._reply, copy_value(conversation), prompt)
        if replied is None:
            return []
        if isinstance(replied, str) or not isinstance(replied, Sequence):
            raise TypeError(f"reply must return a list of messages or None, not {replied!r:.80}")
        return list(replied)

    async def _rate(self, conversation: list[Message], prompt: Prompt) -> float:
        if self._reward is None:
            return 0.0
        score = check_score(await self._replies.call(self._reward, copy_value(conversation), prompt))
        if isinstance(score, Failure):
            raise ValueError(f"reward: {score.message}")
        return score or 0.0

    def _parse(self, tokens: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """What a turn says, and its tool calls. Special tokens count, because some models begin a call with one."""
        if not self._tools:
            return "", []
        if tokens and tokens[-1] in {*self._tokenizer.stop_ids, self._template.end_id}:
            tokens = tokens[:-1]
        return parse_turn(self._decode(tokens, skip_special=False))
