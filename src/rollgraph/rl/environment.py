"""What happens between a prompt and a rollout: one completion, or several turns with replies in between.

Owns how rollouts are put together: which tokens were sampled, how long a sample may be, and which group it belongs to.
An environment continues lists of tokens by calling `generate`, a function it is given; it does not know the engine.
What was sampled is never tokenized again: replies are appended as tokens, and the policy continues exactly what it
wrote.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollgraph.errors import InvalidInput
from rollgraph.rl.paths import LoadError, load_object
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import Prompt, Rollout


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one go; `finish_reason` is as in Rollout."""

    tokens: Sequence[int]
    logprobs: Sequence[float]  # one for each token
    text: str
    finish_reason: str


# A request is the tokens to continue and a key that chooses the noise: a sample has the same key in all of its turns,
# and different samples of a step have different keys.
Generate = Callable[[list[tuple[list[int], int]]], list[Turn]]
Reply = Callable[[str, Prompt], str | None]  # from the text so far to what follows it; None: the sample is finished


class Environment(Protocol):
    """Anything with these two members can be trained in.

    An environment that fills in `reward` of its rollouts itself says so with `gives_rewards = True`. One that limits
    what follows a prompt takes the limit as an option `max_tokens`, so that a run can check before it begins whether it
    fits.
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn; for the provider of `generate`."""

    def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Several rollouts of each prompt, with `group` set to the index of the prompt."""


@dataclass(eq=False)
class _Episode:
    rollout: Rollout
    key: int

    @property
    def request(self) -> tuple[list[int], int]:
        return [*self.rollout.prompt.tokens, *self.rollout.tokens], self.key


class SingleTurn:
    """One completion for each sample."""

    stop: tuple[str, ...] = ()

    def __init__(self, samples_per_prompt: int) -> None:
        self._samples_per_prompt = _check_positive("samples_per_prompt", samples_per_prompt)

    def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
        samples = _make_samples(prompts, self._samples_per_prompt)
        for sample, turn in _generate(generate, samples):
            _append_sampled(sample.rollout, turn.tokens, turn.logprobs)
            sample.rollout.text = turn.text
            sample.rollout.finish_reason = turn.finish_reason
        return [sample.rollout for sample in samples]


class MultiTurn:
    """Turns of the policy with replies in between, from a tool or a simulated user.

    After each turn that ended by itself, `reply` (a function or a dotted path) gets the text so far, including replies
    and stop strings, and returns more text, or None if the sample is finished. All running samples are continued in one
    call of `generate`.

    A sample has at most `max_tokens` tokens, sampled or not. It ends with the reason "length" when a turn was cut, when
    a reply leaves no room for another token, or when it would need more than `max_turns` turns. A reply that raises
    ends its sample with "error"; `failures` counts these by exception type and `messages` has the first message of each
    type.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reply: Reply | str,
        *,
        samples_per_prompt: int,
        max_turns: int,
        max_tokens: int,
        stop: Sequence[str] = (),
    ) -> None:
        if isinstance(stop, str):
            raise InvalidInput(f"expected a list of strings, got {stop!r}", argument="stop")
        self.stop = tuple(stop)
        self.failures: Counter[str] = Counter()
        self.messages: dict[str, str] = {}
        self._tokenizer = tokenizer
        self._known_ids = frozenset(tokenizer.vocab.values())
        self._reply: Reply = load_object(reply) if isinstance(reply, str) else reply
        _check_call(self._reply, ("text", "prompt"), argument="reply")
        self._samples_per_prompt = _check_positive("samples_per_prompt", samples_per_prompt)
        self._max_turns = _check_positive("max_turns", max_turns)
        self._max_tokens = _check_positive("max_tokens", max_tokens)

    def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
        samples = _make_samples(prompts, self._samples_per_prompt)
        running = samples
        for number in range(1, self._max_turns + 1):
            is_last = number == self._max_turns
            turns = _generate(generate, running)
            running = [sample for sample, turn in turns if self._take_turn(sample.rollout, turn, is_last)]
            if not running:
                break
        return [sample.rollout for sample in samples]

    def _take_turn(self, rollout: Rollout, turn: Turn, is_last: bool) -> bool:
        """Add a turn and the reply to it; returns whether the sample continues."""
        room = self._max_tokens - len(rollout.tokens)
        _append_sampled(rollout, turn.tokens[:room], turn.logprobs[:room])
        rollout.text = self._decode(rollout.tokens)
        rollout.finish_reason = "length" if len(turn.tokens) > room else turn.finish_reason
        if rollout.finish_reason != "stop":
            return False
        try:
            tokens = self._find_reply(rollout)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # tools run on what a policy makes up, and some of them exit or panic
            kind = type(error).__name__
            self.failures[kind] += 1
            self.messages.setdefault(kind, str(error))
            rollout.finish_reason = "error"
            return False
        if tokens is None:
            return False
        if is_last or len(rollout.tokens) + len(tokens) >= self._max_tokens:
            # The reply is left out: nothing could follow it, and half of it was never said.
            rollout.finish_reason = "length"
            return False
        _append_inserted(rollout, tokens)
        rollout.text = self._decode(rollout.tokens)
        return True

    def _find_reply(self, rollout: Rollout) -> Sequence[int] | None:
        reply = self._reply(rollout.text, rollout.prompt)
        if reply is None:
            return None
        return self._tokenizer.encode(reply, special=False)

    def _decode(self, tokens: Sequence[int]) -> str:
        # A model may have more ids than its tokenizer.
        return self._tokenizer.decode([token for token in tokens if token in self._known_ids])


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


def _make_samples(prompts: Sequence[Prompt], count: int) -> list[_Episode]:
    seen: Counter[int] = Counter()
    samples = []
    for group, prompt in enumerate(prompts):
        # Keys come from the prompt rather than from its place, so that noise does not depend on the number of ranks. A
        # prompt can be in a step twice, where an epoch ends or when there are few prompts.
        first_key = (seen[prompt.id] << 48) + prompt.id * count
        seen[prompt.id] += 1
        for i in range(count):
            rollout = Rollout(prompt, tokens=[], sampled=[], logprobs=[], group=group)
            samples.append(_Episode(rollout, first_key + i))
    return samples


def _generate(generate: Generate, samples: Sequence[_Episode]) -> list[tuple[_Episode, Turn]]:
    turns = generate([sample.request for sample in samples])
    if len(turns) != len(samples):
        raise ValueError(f"generate gave {len(turns)} turns for {len(samples)} requests")
    return list(zip(samples, turns, strict=True))


def _append_sampled(rollout: Rollout, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    if len(logprobs) != len(tokens):
        raise ValueError(f"a turn has {len(tokens)} tokens and {len(logprobs)} log-probabilities")
    rollout.tokens += tokens
    rollout.sampled += [True] * len(tokens)
    rollout.logprobs += logprobs


def _append_inserted(rollout: Rollout, tokens: Sequence[int]) -> None:
    """Append tokens that are not the policy's."""
    rollout.tokens += tokens
    rollout.sampled += [False] * len(tokens)
    rollout.logprobs += [0.0] * len(tokens)


def _check_call(
    function: Any, arguments: tuple[str, ...], *, argument: str | None = None, place: str | None = None
) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        detail = f"is called as ({', '.join(arguments)}), which {function!r:.80} does not accept ({error})"
        raise LoadError(detail, argument=argument, place=place) from None


def _check_positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidInput(f"must be at least 1, got {value}", argument=name)
    return value
