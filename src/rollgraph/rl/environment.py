"""What happens between a prompt and a rollout: one completion, or several turns with replies of text in between.

Owns what an environment is, and how one is loaded. An environment continues lists of tokens by calling `generate`, a
function it is given; it does not know the engine. `chat.py` has the environment of messages and tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from rollgraph.rl.conversations import Answer, Conversations, check_positive
from rollgraph.rl.paths import LoadError, load_object
from rollgraph.rl.turns import Episode, Generate, append_turn, generate_all, make_episodes
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import Prompt, Rollout

# From the text so far to what follows it; None: the rollout is finished.
TextReply = Callable[[str, Prompt], str | Awaitable[str | None] | None]


class Environment(Protocol):
    """Anything with these two members can be trained in.

    What else it may have:
    - `gives_rewards = True`: it fills in `reward` of its rollouts itself;
    - `stop_ids`: tokens that end a turn, beside the tokenizer's own;
    - `tools`: JSON schemas that the chat template shows the policy. If it has this attribute, even without any tool,
      every prompt is rendered as a chat;
    - `failures`: a Counter by kind, with `messages`, the first of each kind, `hear(messages)` for those of other ranks,
      and `unread()`, those that have not been shown.

    One that limits what follows a prompt takes the limit as an option `max_tokens`, so that a run can check before it
    begins whether it fits.
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn; for the provider of `generate`."""

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
    """Turns of the policy with replies of text in between, from a tool or a simulated user.

    After each turn that ended by itself, `reply` (a function, async or not, or its import path) gets the text so far,
    including replies and stop strings, and returns more text, or None if the rollout is finished.
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

    def describe(self, rollout: Rollout, tokens: Sequence[int]) -> str:
        rollout.text = self._decode(rollout.tokens)
        return self._decode(tokens)

    async def answer(self, episode: Episode, *, ended: bool) -> Answer:
        rollout = episode.rollout
        reply = await self._replies.call(self._reply, rollout.text, rollout.prompt)
        if reply is None:
            return Answer()
        return Answer(self._tokenizer.encode(reply, special=False), reply)


def find_budget(path: str, options: Mapping[str, Any]) -> int | None:
    """The `max_tokens` that an environment would have with these options: the limit on what follows a prompt."""
    factory = load_object(path)
    default = None
    try:
        parameter = inspect.signature(factory).parameters.get("max_tokens")
    except (TypeError, ValueError):
        parameter = None  # load_environment says what is wrong with it
    if parameter is not None:
        default = parameter.default
    budget = options.get("max_tokens", default)
    return budget if isinstance(budget, int) else None


def load_environment(path: str, *, tokenizer: Tokenizer | None = None, **options: Any) -> Environment:
    """Call the object at "package.module:Name" or "file.py:Name" with these options.

    It also gets the tokenizer if it has a parameter of that name.
    """
    factory = load_object(path)
    if not callable(factory):
        raise LoadError(f"expected a class or a function, got {factory!r:.80}", place=repr(path))
    signature = inspect.signature(factory)
    if tokenizer is not None and "tokenizer" in signature.parameters:
        options["tokenizer"] = tokenizer
    try:
        signature.bind(**options)
    except TypeError as error:
        raise LoadError(f"{error}; its signature is {signature}", place=repr(path)) from None
    environment: Environment = factory(**options)
    if not isinstance(getattr(environment, "stop", None), tuple):
        raise LoadError("an environment must have `stop`, a tuple of strings that end a turn", place=repr(path))
    _check_call(getattr(environment, "run", None), ("generate", "prompts"), place=f"{path!r}: run")
    return environment


def load_function(function: Any, arguments: tuple[str, ...], *, argument: str) -> Callable[..., Any]:
    """A function, given itself or as an import path, that can be called with these arguments."""
    found: Callable[..., Any] = load_object(function) if isinstance(function, str) else function
    _check_call(found, arguments, argument=argument)
    return found


def _check_call(
    function: Any, arguments: tuple[str, ...], *, argument: str | None = None, place: str | None = None
) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        detail = f"is called as ({', '.join(arguments)}), which {function!r:.80} does not accept ({error})"
        raise LoadError(detail, argument=argument, place=place) from None
