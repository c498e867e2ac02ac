"""What happens between a prompt and a rollout: one completion, or several turns with replies in between.

Owns how rollouts are put together: which tokens were sampled and which were not, the budget, the group. An environment
continues lists of tokens by calling `generate`, a function it is given; it knows no engine. What was sampled is never
tokenised again: replies are appended as tokens, and the policy continues exactly what it had written.
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
    """What the policy wrote in one go; `finish_reason` as in Rollout."""

    tokens: Sequence[int]
    logprobs: Sequence[float]  # one for each token
    text: str
    finish_reason: str


# A request is the tokens to continue and a key, which says whose noise to use: the same sample has the same key in
# each of its turns, and different samples of a step have different ones.
Generate = Callable[[list[tuple[list[int], int]]], list[Turn]]
Reply = Callable[[str, Prompt], str | None]  # the text so far -> what is put after it; None: finished


class Environment(Protocol):
    """Anything with these two can be trained in.

    One that fills in `reward` of its rollouts itself says so by `gives_rewards = True`. One with a limit on what
    follows a prompt has it as an option `max_tokens`: by that, a run knows before it begins whether all fits.
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn; for whoever provides `generate`."""

    def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Several rollouts of each prompt, with `group` the index of the prompt."""


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
            _append(sample.rollout, turn.tokens, turn.logprobs)
            sample.rollout.text, sample.rollout.finish_reason = turn.text, turn.finish_reason
        return [sample.rollout for sample in samples]


class MultiTurn:
    """Turns of the policy with replies in between, from a tool or a simulated user.

    After each turn that ended by itself, `reply` (a function or a dotted path) is given the text so far, replies and
    stop strings included, and answers with more text, or None when the sample is finished. All samples that are still
    running are continued in one call of `generate`. A sample has at most `max_tokens` tokens, sampled or not; it ends
    with the reason "length" when a turn was cut, when a reply left no room for another token, or when it would need
    more than `max_turns`. A reply that raises ends its sample with "error", counted in `failures` by its type, with
    the first message of each type in `messages`.
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
        self._tokenizer, self._known = tokenizer, frozenset(tokenizer.vocab.values())
        self._reply: Reply = load_object(reply) if isinstance(reply, str) else reply
        _check_call(self._reply, ("text", "prompt"), argument="reply")
        self._samples_per_prompt = _check_positive("samples_per_prompt", samples_per_prompt)
        self._max_turns = _check_positive("max_turns", max_turns)
        self._max_tokens = _check_positive("max_tokens", max_tokens)

    def run(self, generate: Generate, prompts: Sequence[Prompt]) -> list[Rollout]:
        samples = _make_samples(prompts, self._samples_per_prompt)
        running = samples
        for left in reversed(range(self._max_turns)):
            turns = _generate(generate, running)
            running = [sample for sample, turn in turns if self._take(sample.rollout, turn, last=left == 0)]
            if not running:
                break
        return [sample.rollout for sample in samples]

    def _take(self, rollout: Rollout, turn: Turn, last: bool) -> bool:
        """Add a turn and the reply to it; whether the sample goes on."""
        room = self._max_tokens - len(rollout.tokens)
        _append(rollout, turn.tokens[:room], turn.logprobs[:room])
        rollout.text = self._decode(rollout.tokens)
        rollout.finish_reason = "length" if len(turn.tokens) > room else turn.finish_reason
        if rollout.finish_reason != "stop":
            return False
        try:
            reply = self._reply(rollout.text, rollout.prompt)
            tokens = None if reply is None else self._tokenizer.encode(reply, special=False)
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
        if last or len(rollout.tokens) + len(tokens) >= self._max_tokens:
            rollout.finish_reason = (
                "length"  # without the reply: nothing could follow it, and half of it was never said
            )
            return False
        _append(rollout, tokens, None)
        rollout.text = self._decode(rollout.tokens)
        return True

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in tokens if token in self._known])  # a model may have more ids


def find_budget(path: str, options: Mapping[str, Any]) -> int | None:
    """The `max_tokens` that an environment would have with these options: of a sample, its prompt aside."""
    factory = load_object(path)
    try:
        parameter = inspect.signature(factory).parameters.get("max_tokens")
    except (TypeError, ValueError):
        parameter = None  # load_environment says what is wrong with it
    budget = options.get("max_tokens", None if parameter is None else parameter.default)
    return budget if isinstance(budget, int) else None


def load_environment(path: str, *, tokenizer: Tokenizer | None = None, **options: Any) -> Environment:
    """Call what "package.module:Name" or "file.py:Name" stands for with these options, and with the tokenizer if it
    has a parameter of that name."""
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
        # By the prompt rather than its place, so that noise does not depend on the number of ranks. A prompt can be
        # in a step twice, where an epoch ends or when there are few.
        first = (seen[prompt.id] << 48) + prompt.id * count
        seen[prompt.id] += 1
        samples += [_Episode(Rollout(prompt, [], [], [], group=group), first + i) for i in range(count)]
    return samples


def _generate(generate: Generate, samples: Sequence[_Episode]) -> list[tuple[_Episode, Turn]]:
    turns = generate([sample.request for sample in samples])
    if len(turns) != len(samples):
        raise ValueError(f"generate gave {len(turns)} turns for {len(samples)} requests")
    return list(zip(samples, turns, strict=True))


def _append(rollout: Rollout, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
    """Without log-probabilities, tokens are not the policy's."""
    if logprobs is not None and len(logprobs) != len(tokens):
        raise ValueError(f"a turn has {len(tokens)} tokens and {len(logprobs)} log-probabilities")
    rollout.tokens += tokens
    rollout.sampled += [logprobs is not None] * len(tokens)
    rollout.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs


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
