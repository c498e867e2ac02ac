"""Completions that somebody wrote: demonstrations to imitate, and pairs of which one is preferred.

Owns which columns such a row needs, and which of its tokens are the assistant's. `PromptData` owns the order of rows
and encodes their prompts, so a completion follows exactly the tokens that the policy would be asked to continue.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rollgraph.rl.data import DataError, PromptData, Row, as_chat, is_chat, is_text
from rollgraph.tokenizer import Message, Tokenizer
from rollgraph.types import Prompt, Rollout

COLUMNS: Mapping[str, Mapping[str, float]] = {  # by source of rollouts: its columns, and the reward that marks each
    "demonstrations": {"completion": 0.0},
    "pairs": {"chosen": 1.0, "rejected": 0.0},
}


# -- rows ------------------------------------------------------------------------------------------


def read_completions(rows: Sequence[Row], source: str) -> list[Row]:
    """The rows with their completions in the columns of a source: all of a row is text, or all of it is messages.

    The prompt of a chat is everything before the assistant's first message, unless its completion is a column.
    """
    return [_read_row(row, list(COLUMNS[source])) for row in rows]


def _read_row(row: Row, names: Sequence[str]) -> Row:
    given = {name: row.columns[name] for name in names if row.columns.get(name) is not None}
    if not given and names == ["completion"] and not isinstance(row.prompt, str):
        return _divide(row)
    for name in names:
        if name not in given:
            raise DataError(_describe_missing(row, names, name), place=row.place)
        if not is_text(given[name]) and not is_chat(given[name]):
            detail = f"{name!r} must be text or a list of messages, got {given[name]!r:.80}"
            raise DataError(detail, place=row.place)
    prompt = as_chat(row.prompt, chat=any(is_chat(value) for value in given.values()))
    if not isinstance(prompt, str):
        given = {name: _messages_after(prompt, name, value, row.place) for name, value in given.items()}
    return Row(prompt, {**row.columns, **given}, row.place)


def _divide(row: Row) -> Row:
    """A chat as a prompt and what the assistant says after it."""
    assert not isinstance(row.prompt, str)
    spoken = [index for index, message in enumerate(row.prompt) if message["role"] == "assistant"]
    if not spoken:
        raise DataError("none of its messages is the assistant's, so there is nothing to learn", place=row.place)
    if spoken[0] == 0:
        raise DataError("its first message is the assistant's: something must come before it", place=row.place)
    completion = row.prompt[spoken[0] : spoken[-1] + 1]
    return Row(row.prompt[: spoken[0]], {**row.columns, "completion": completion}, row.place)


def _messages_after(prompt: list[Message], name: str, value: str | list[Message], place: str) -> list[Message]:
    """A completion as messages; a list of them may repeat the prompt."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if value[: len(prompt)] == prompt:
        value = value[len(prompt) :]
    if not value or value[0]["role"] != "assistant":
        detail = f"{name!r} must begin with the assistant's message, or with the messages of the prompt"
        raise DataError(detail, place=place)
    while value[-1]["role"] != "assistant":  # nothing is learned from what comes after the last reply
        value = value[:-1]
    return value


def _describe_missing(row: Row, names: Sequence[str], missing: str) -> str:
    present = ", ".join(repr(name) for name in ("prompt", *row.columns))
    if names == ["completion"]:
        return f"a demonstration needs `completion` beside `prompt`, or `messages` with the assistant's; got {present}"
    return f"the column {missing!r} is missing: a row needs a prompt, {' and '.join(map(repr, names))}; got {present}"


# -- tokens ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenCompletion:
    """What follows a prompt, in little memory: there may be as many of them as rows."""

    tokens: array[int]
    trained: bytes  # 1 where the assistant wrote the token, otherwise 0
    text: str


@dataclass(frozen=True)
class _ChatPiece:
    text: str
    is_assistants: bool


class Completions:
    """Encodes the completions of rows, as prompts of `PromptData` with the same `chat` and `tools` ask for them.

    `admit` refuses a row in which a prompt with a completion has more than `most` tokens; the longest of the others has
    `longest`, and all of them have `tokens`, of which those of completions are `written`.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        source: str,
        *,
        most: int,
        chat: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.longest = 0
        self.tokens = 0
        self.written = 0
        self._rows = rows
        self._tokenizer = tokenizer
        self._rewards = COLUMNS[source]
        self._most = most
        self._chat = chat or tools is not None
        self._tools = tools or None
        self._encoded: dict[int, list[WrittenCompletion]] = {}  # by row

    def admit(self, prompt: Prompt) -> None:
        row = self._rows[prompt.id]
        longest = written = 0
        for name, completion in zip(self._rewards, self._completions(prompt), strict=True):
            count = len(prompt.tokens) + len(completion.tokens)
            if count > self._most:
                detail = f"the prompt with its {name} has {count} tokens, and the limit is {self._most}"
                del self._encoded[prompt.id]
                raise DataError(detail, argument="max_tokens", place=row.place, alternative=("too_long", "drop"))
            longest = max(longest, count)
            written += len(completion.tokens)
        self.longest = max(self.longest, longest)
        self.tokens += len(prompt.tokens) + written
        self.written += written

    def rollouts(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """The completions of prompts, as if they had been sampled; those of a prompt are a group."""
        made = []
        for group, prompt in enumerate(prompts):
            for reward, completion in zip(self._rewards.values(), self._completions(prompt), strict=True):
                trained = [bool(wrote) for wrote in completion.trained]
                unknown = [0.0] * len(trained)  # nobody drew these tokens
                tokens = list(completion.tokens)
                made.append(Rollout(prompt, tokens, trained, unknown, completion.text, reward=reward, group=group))
        return made

    def _completions(self, prompt: Prompt) -> list[WrittenCompletion]:
        if prompt.id not in self._encoded:
            row = self._rows[prompt.id]
            try:
                found = [self._encode(prompt, row.columns[name]) for name in self._rewards]
            except DataError:
                raise
            except ValueError as error:
                raise DataError(str(error), place=row.place) from error
            self._encoded[prompt.id] = found
        return self._encoded[prompt.id]

    def _encode(self, prompt: Prompt, completion: str | list[Message]) -> WrittenCompletion:
        row = self._rows[prompt.id]
        asked = as_chat(row.prompt, self._chat)
        if isinstance(asked, str):
            assert isinstance(completion, str)
            pieces = [_ChatPiece(completion, True)]
        else:
            if isinstance(completion, str):
                completion = [{"role": "assistant", "content": completion}]
            pieces = self._render(prompt.text, asked, completion, row.place)
        in_chat = not isinstance(asked, str)
        tokens: list[int] = []
        trained: list[bool] = []
        for piece, ids in zip(pieces, self._encode_pieces(prompt, pieces, special=not in_chat), strict=True):
            end = self._end_of_turn(ids, in_chat, is_last=piece is pieces[-1]) if piece.is_assistants else 0
            trained += [position < end for position in range(len(ids))]
            tokens += ids
        if True not in trained:
            raise DataError("the completion is empty", place=row.place)
        last = len(trained) - trained[::-1].index(True)
        text = "".join(piece.text for piece in pieces)
        return WrittenCompletion(array("q", tokens[:last]), bytes(trained[:last]), text)

    def _render(self, text: str, asked: list[Message], completion: list[Message], place: str) -> list[_ChatPiece]:
        """What the chat template writes after the prompt: the assistant's turns, and what stands between them."""
        pieces: list[_ChatPiece] = []
        messages = list(asked)
        for message in completion:
            is_assistants = message["role"] == "assistant"
            if is_assistants and pieces:
                longer = self._tokenizer.render_chat(messages, tools=self._tools)
                pieces.append(_ChatPiece(_rest(longer, text, place), False))
                text = longer
            messages.append(message)
            if is_assistants:
                longer = self._tokenizer.render_chat(messages, tools=self._tools, add_generation_prompt=False)
                pieces.append(_ChatPiece(_rest(longer, text, place), True))
                text = longer
        return pieces

    def _encode_pieces(self, prompt: Prompt, pieces: Sequence[_ChatPiece], special: bool) -> list[list[int]]:
        """The tokens of each piece: those of the whole text, or of each piece alone if a token crosses a border.

        The whole text is how other tools encode it, and some tokenizers begin each text with a space of their own.
        """
        whole = prompt.text + "".join(piece.text for piece in pieces)
        ids, offsets = self._tokenizer.encode_with_offsets(whole, special=special)
        starts = [start for start, _ in offsets]
        borders = list(accumulate((len(piece.text) for piece in pieces), initial=len(prompt.text)))
        count = len(prompt.tokens)
        same_prompt = tuple(ids[:count]) == prompt.tokens and all(start >= borders[0] for start in starts[count:])
        between_tokens = {end for (begin, end), (start, _) in pairwise(offsets) if begin < end == start}
        if not same_prompt or not {*borders[1:-1]} <= {*between_tokens, borders[0]}:
            return [self._tokenizer.encode(piece.text, special=False) for piece in pieces]
        found: list[list[int]] = [[] for _ in pieces]
        number = 0
        for token, start in zip(ids[count:], starts[count:], strict=True):
            while start >= borders[number + 1] and number + 1 < len(pieces):
                number += 1
            found[number].append(token)
        return found

    def _end_of_turn(self, ids: list[int], in_chat: bool, is_last: bool) -> int:
        """How many tokens of a turn the assistant writes: up to its stop token, which is added if the text has none.

        A template may write more after it, such as a line break, which nobody samples.
        """
        stops = [position for position, token in enumerate(ids) if token in self._tokenizer.stop_ids]
        if stops and (in_chat or stops[-1] == len(ids) - 1):
            return stops[-1] + 1
        if is_last and self._tokenizer.eos_id is not None:
            ids.append(self._tokenizer.eos_id)
        return len(ids)


def _rest(longer: str, text: str, place: str) -> str:
    if not longer.startswith(text):
        detail = (
            "the chat template writes the beginning of this chat differently once more of it follows, so it is unknown "
            "which tokens are the assistant's; give each of its replies a row of its own"
        )
        raise DataError(detail, place=place)
    return longer[len(text) :]


# -- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenData:
    """Prompts, dealt out in an order that can be resumed, and their completions."""

    prompts: PromptData
    completions: Completions

    def next_rollouts(self) -> list[Rollout]:
        """This rank's share of the next step."""
        return self.completions.rollouts(self.prompts.next_prompts())

    def all_rollouts(self) -> list[Rollout]:
        """The rollouts of one epoch, for prompts that are dealt out one by one."""
        prompts: list[Prompt] = []
        for _ in range(len(self.prompts)):
            prompts += self.prompts.next_prompts()
        return self.completions.rollouts(prompts)


def load_written(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    source: str,
    *,
    most: int,
    chat: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> WrittenData:
    """Check and encode the rows of a source, "demonstrations" or "pairs". `options` are those of `PromptData`."""
    read = read_completions(rows, source)
    completions = Completions(read, tokenizer, source, most=most, chat=chat, tools=tools)
    prompts = PromptData(read, tokenizer, chat=chat, tools=tools, admit=completions.admit, **options)
    return WrittenData(prompts, completions)
