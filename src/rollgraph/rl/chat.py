"""Environments of messages: the policy talks with tools, with a simulated user, or with both.

    def reply(messages, prompt):      # what follows the assistant's last message; None or []: nothing
        return [{"role": "user", "content": "Are you sure?"}] if len(messages) < 4 else None

    def reward(messages, prompt):     # of the turn that has just ended
        return 1.0 if messages[-1]["content"] == prompt.columns["answer"] else 0.0

Owns what happens between two turns: tool calls are read and run, `reply` is asked, and the messages become the tokens
that the chat template puts between turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollgraph.rl.chat_functions import ChatFunctions, MessageReply, TurnReward, load_chat_functions
from rollgraph.rl.conversations import Answer, Conversations, check_positive
from rollgraph.rl.replies import ReplyTimeout
from rollgraph.rl.reward_calls import check_score, copy_value
from rollgraph.rl.tool_calls import ToolCall, parse_turn
from rollgraph.rl.tools import Tool, write_result
from rollgraph.rl.turns import Episode
from rollgraph.rl.worker_messages import Failure, line_of
from rollgraph.tokenizer import Message, Tokenizer
from rollgraph.tokenizer.chat_replies import ChatReplies
from rollgraph.types import Rollout


class Chat(Conversations):
    """Turns of the policy with messages in between.

    After each turn that the policy ended itself, its calls of Python tools are run, and their results follow. Without
    a call, or if a call is of a tool that is only a schema, `reply` is asked what follows. If nothing does, the rollout
    is finished. `reward` is asked after each turn and what follows it. All of them may be async, and may be given as
    import paths. An environment with a state is a class instead, `episode`, of which each rollout has an instance.
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
        self._most_characters = check_positive("max_result_characters", max_result_characters)
        roles = []
        if self._functions.tools:
            roles.append("tool")
        if self._functions.reply is not None:
            roles.append("user")
        self._template = ChatReplies(tokenizer, roles=roles, tools=self.tools)

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

    def describe(self, rollout: Rollout, tokens: Sequence[int]) -> str:
        rollout.text = self._decode(tokens)
        message: dict[str, Any] = {"role": "assistant", "content": rollout.text}
        said, calls = self._parse(tokens)
        if calls and not any(call.error for call in calls):
            message = {"role": "assistant", "content": said, "tool_calls": [call.to_message() for call in calls]}
        rollout.messages.append(message)
        return rollout.text

    async def answer(self, episode: Episode, *, ended: bool) -> Answer:
        rollout = episode.rollout
        if rollout.prompt.messages is None:
            raise ValueError(f"prompt {rollout.prompt.id} is not a chat, so no messages can follow it")
        functions = await self._functions_of(episode)
        conversation = [*rollout.prompt.messages, *rollout.messages]
        failures: list[tuple[str, str]] = []
        follow: list[Message] = []
        if ended:
            _, calls = self._parse(rollout.tokens[rollout.spans[-1].start :])
            follow = await self._run_tools(functions, calls, failures)
            if not calls or len(follow) < len(calls):
                follow += await self._ask(functions, [*conversation, *follow], rollout)
        reward = await self._rate(functions, [*conversation, *follow], rollout)
        if not follow:
            return Answer(reward=reward, failures=failures)
        tokens = self._template.encode(follow, rollout.tokens[-1] if rollout.tokens else None)
        text = self._decode(tokens, skip_special=False)
        plain = json.loads(json.dumps(follow))  # rollouts travel to other ranks and into checkpoints
        return Answer(tokens, text, plain, reward, failures)

    async def _functions_of(self, episode: Episode) -> ChatFunctions:
        """The functions of this rollout, with a state of their own if they are methods."""
        if self._functions.make is None:
            return self._functions
        if episode.state is None:
            instance = await self._replies.call(self._functions.make, episode.rollout.prompt)
            episode.state = self._functions.of_instance(instance)
        functions: ChatFunctions = episode.state
        return functions

    async def _run_tools(
        self, functions: ChatFunctions, calls: Sequence[ToolCall], failures: list[tuple[str, str]]
    ) -> list[Message]:
        """The results of all calls but those that `reply` has to run.

        A tool that raises is counted, and the policy is told; one that hangs ends the rollout.
        """
        results: list[Message] = []
        for call in calls:
            found = functions.tools.find(call, functions.instance)
            if found is None:
                continue
            try:
                result = found if isinstance(found, str) else await self._replies.call(found, **call.arguments)
            except ReplyTimeout:
                raise
            except Exception as error:
                kind = type(error).__name__
                failures.append((f"{call.name}/{kind}", f"{error}{line_of(error)}"))
                result = f"error: {kind}: {error}"
            results.append(write_result(call.name, result, self._most_characters))
        return results

    async def _ask(self, functions: ChatFunctions, conversation: list[Message], rollout: Rollout) -> list[Message]:
        if functions.reply is None:
            return []
        replied = await self._replies.call(functions.reply, copy_value(conversation), rollout.prompt)
        if replied is None:
            return []
        if isinstance(replied, str) or not isinstance(replied, Sequence):
            raise TypeError(f"reply must return a list of messages or None, not {replied!r:.80}")
        return list(replied)

    async def _rate(self, functions: ChatFunctions, conversation: list[Message], rollout: Rollout) -> float:
        if functions.reward is None:
            return 0.0
        score = check_score(await self._replies.call(functions.reward, copy_value(conversation), rollout.prompt))
        if isinstance(score, Failure):
            raise ValueError(f"reward: {score.message}")
        return score or 0.0

    def _parse(self, tokens: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """What a turn says, and its tool calls. Special tokens count, because some models begin a call with one."""
        if not self._functions.tools:
            return "", []
        if tokens and tokens[-1] in {*self._tokenizer.stop_ids, self._template.end_id}:
            tokens = tokens[:-1]
        return parse_turn(self._decode(tokens, skip_special=False))
