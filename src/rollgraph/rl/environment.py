"""Environments turn prompts into rollouts: with one completion, or with several turns and text replies in between.

Owns the interface of an environment and its loading. An environment gets a function `generate`, which continues lists
of tokens; it does not know the engine. The environment of messages and tools is in `chat.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from rollgraph.rl.multi_turn import Conversations, EnvResponse, check_positive
from rollgraph.rl.paths import LoadError, load_object
from rollgraph.rl.turns import Episode, Generate, append_turn, generate_all, make_episodes
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import Prompt, Rollout

# (text so far, prompt) -> the text that follows; None: the rollout is finished.
TextReply = Callable[[str, Prompt], str | Awaitable[str | None] | None]


class Environment(Protocol):
    """The interface of an environment: `stop` and `run`.

    It may also have:
    - `gives_rewards = True`: it fills in `reward` of its rollouts itself;
    - `stop_ids`: tokens that end a turn, in addition to the tokenizer's;
    - `tools`: JSON schemas that the chat template shows the policy. If the attribute exists, even as an empty list,
      every prompt is rendered as a chat;
    - `failures`: a Counter of failures by kind; with it, `messages` (the first message of each kind), `hear(messages)`
      (adds those of other ranks) and `unread()` (returns each message once).

    An environment that limits the tokens after a prompt takes this limit as an option `max_tokens`, so that a run can
    check before it begins whether they fit.
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn; `generate` stops at them."""

    def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Several rollouts of each prompt, with `group` set to the index of the prompt."""


class SingleTurn:
    """One completion for each sample."""

    stop: tuple[str, ...] = ()

    def __init__(self, samples_per_prompt: int) -> None:
        self._samples_per_prompt = check_positive("samples_per_prompt", samples_per_prompt)

    def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
        episodes = make_episodes(prompts, self._samples_per_prompt)
        turns = generate_all(generate, [episode.request for episode in episodes])
        for episode, turn in zip(episodes, turns, strict=True):
            append_turn(episode.rollout, turn.tokens, turn.logprobs)
            episode.rollout.text = turn.text
            episode.rollout.finish_reason = turn.finish_reason
        return [episode.rollout for episode in episodes]


class MultiTurn(Conversations):
    """Turns of the policy with text replies in between, from a tool or a simulated user.

    After each turn that the policy ended itself, `reply` (a function, plain or async, or its import path) gets the text
    so far, including replies and stop strings. It returns more text, or None if the rollout is finished.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reply: TextReply | str,
        *,
        samples_per_prompt: int,
        max_turns: int,
        max_tokens: int,
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
        self._reply = load_function(reply, ("text", "prompt"), argument="reply")

    def record_turn(self, rollout: Rollout, tokens: Sequence[int]) -> str:
        rollout.text = self._decode(rollout.tokens)
        return self._decode(tokens)

    async def env_response(self, episode: Episode, *, policy_ended: bool) -> EnvResponse:
        rollout = episode.rollout
        reply = await self._reply_loop.call(self._reply, rollout.text, rollout.prompt)
        if reply is None:
            return EnvResponse()
        return EnvResponse(self._tokenizer.encode(reply, special=False), reply)


def find_max_tokens(path: str, options: Mapping[str, Any]) -> int | None:
    """The `max_tokens` of an environment with these options: the limit on the tokens after a prompt."""
    factory = load_object(path)
    default = None
    try:
        parameter = inspect.signature(factory).parameters.get("max_tokens")
    except (TypeError, ValueError):
        parameter = None  # load_environment raises the error
    if parameter is not None:
        default = parameter.default
    max_tokens = options.get("max_tokens", default)
    return max_tokens if isinstance(max_tokens, int) else None


def load_environment(path: str, *, tokenizer: Tokenizer | None = None, **options: Any) -> Environment:
    """Make an environment by calling the object at "package.module:Name" or "file.py:Name" with these options.

    The tokenizer is passed if the object has a parameter `tokenizer`.
    """
    factory = load_object(path)
    if not callable(factory):
        raise LoadError(f"expected a class or a function, got {factory!r:.80}", location=repr(path))
    signature = inspect.signature(factory)
    if tokenizer is not None and "tokenizer" in signature.parameters:
        options["tokenizer"] = tokenizer
    try:
        signature.bind(**options)
    except TypeError as error:
        detail = f"{error}; its signature is {signature}"
        if "prompt" in signature.parameters:
            detail += "; a class with a state for each rollout is the option `episode` of rollgraph.rl.chat:Chat"
        raise LoadError(detail, location=repr(path)) from None
    environment: Environment = factory(**options)
    if not isinstance(getattr(environment, "stop", None), tuple):
        raise LoadError("an environment must have `stop`, a tuple of strings that end a turn", location=repr(path))
    _check_call(getattr(environment, "run", None), ("generate", "prompts"), location=f"{path!r}: run")
    return environment


def load_function(function: Any, arguments: tuple[str, ...], *, argument: str) -> Callable[..., Any]:
    """Load a function from its import path, or take the function itself; check that it accepts these arguments."""
    target: Callable[..., Any] = load_object(function) if isinstance(function, str) else function
    _check_call(target, arguments, argument=argument)
    return target


def _check_call(
    function: Any, arguments: tuple[str, ...], *, argument: str | None = None, location: str | None = None
) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        detail = f"is called as ({', '.join(arguments)}), which {function!r:.80} does not accept ({error})"
        raise LoadError(detail, argument=argument, location=location) from None
