"""Offline data: completions from the dataset, as demonstrations to imitate or pairs to prefer one of.

Owns the columns that such a row needs, and the loss mask: which of its tokens are the assistant's. `PromptData` owns
the order of rows and encodes their prompts, so a completion follows exactly the tokens that the policy would continue.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rollgraph.config import Config, ConfigError
from rollgraph.config.fields import name_key_in_errors
from rollgraph.parallel.ranks.world import World
from rollgraph.rl.data.hub import TRAIN_SPLITS, read_data_rows, read_training_rows, read_validation_rows
from rollgraph.rl.data.prompts import PromptData, as_chat
from rollgraph.rl.data.python_objects import NO_OBJECTS, PythonObjects
from rollgraph.rl.data.rows import DataError, Row, is_chat, is_text
from rollgraph.rl.environment import Environment
from rollgraph.tokenizer import Message, Tokenizer
from rollgraph.types import Prompt, Rollout

# -- rows ------------------------------------------------------------------------------------------

# By `Algorithm.source`: the columns with completions, and the reward that each completion gets.
COMPLETION_COLUMNS: Mapping[str, Mapping[str, float]] = {
    "demonstrations": {"completion": 0.0},
    "pairs": {"chosen": 1.0, "rejected": 0.0},
}


def read_completions(rows: Sequence[Row], source: str) -> list[Row]:
    """Rows with completions in the columns of `source`; prompt and completions are all text or all messages.

    A chat without a column for the completion is split: its prompt is everything before the assistant's first message.
    """
    return [_read_row(row, list(COMPLETION_COLUMNS[source])) for row in rows]


def _read_row(row: Row, names: Sequence[str]) -> Row:
    completions = {name: row.columns[name] for name in names if row.columns.get(name) is not None}
    if not completions and names == ["completion"] and not isinstance(row.prompt, str):
        return _split_chat(row)
    for name in names:
        if name not in completions:
            raise DataError(_describe_missing(row, names, name), location=row.location)
        if not is_text(completions[name]) and not is_chat(completions[name]):
            detail = f"{name!r} must be text or a list of messages, got {completions[name]!r:.80}"
            raise DataError(detail, location=row.location)
    prompt = as_chat(row.prompt, chat=any(is_chat(value) for value in completions.values()))
    if not isinstance(prompt, str):
        completions = {name: _messages_after(prompt, name, value, row.location) for name, value in completions.items()}
    return Row(prompt, {**row.columns, **completions}, row.location)


def _split_chat(row: Row) -> Row:
    """Split a chat into a prompt and a completion, which begins with the assistant's first message."""
    assert not isinstance(row.prompt, str)
    assistant_indices = [index for index, message in enumerate(row.prompt) if message["role"] == "assistant"]
    if not assistant_indices:
        raise DataError("none of its messages is the assistant's, so there is nothing to learn", location=row.location)
    if assistant_indices[0] == 0:
        raise DataError("its first message is the assistant's: something must come before it", location=row.location)
    completion = row.prompt[assistant_indices[0] : assistant_indices[-1] + 1]
    return Row(row.prompt[: assistant_indices[0]], {**row.columns, "completion": completion}, row.location)


def _messages_after(prompt: list[Message], name: str, value: str | list[Message], location: str) -> list[Message]:
    """A completion as messages, without those of the prompt, which a list of messages may repeat."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if value[: len(prompt)] == prompt:
        value = value[len(prompt) :]
    if not value or value[0]["role"] != "assistant":
        detail = f"{name!r} must begin with the assistant's message, or with the messages of the prompt"
        raise DataError(detail, location=location)
    while value[-1]["role"] != "assistant":  # messages after the last reply are not trained on
        value = value[:-1]
    return value


def _describe_missing(row: Row, names: Sequence[str], missing: str) -> str:
    present = ", ".join(repr(name) for name in ("prompt", *row.columns))
    if names == ["completion"]:
        return f"a demonstration needs `prompt` and `completion`, or `messages` with the assistant's; got {present}"
    return f"the column {missing!r} is missing: a row needs a prompt, {' and '.join(map(repr, names))}; got {present}"


# -- tokens ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedCompletion:
    """An encoded completion in compact types, because all rows may be in memory."""

    tokens: array[int]  # [T]
    loss_mask: bytes  # [T]; 1: the assistant wrote the token
    text: str


@dataclass(frozen=True)
class _ChatPiece:
    """A part of a rendered chat: an assistant's turn, or the text between two of them."""

    text: str
    is_assistants: bool


class CompletionEncoder:
    """Encodes the completions of rows for prompts of a `PromptData` with the same `chat` and `tools`.

    `check_prompt` raises for a row in which a prompt with a completion has more than `max_tokens` tokens. Over the rows
    that pass, the longest sequence has `longest_sequence` tokens, and all rows together have `total_tokens`, of which
    `completion_tokens` are in completions.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        source: str,
        *,
        max_tokens: int,
        chat: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.longest_sequence = 0
        self.total_tokens = 0
        self.completion_tokens = 0
        self._rows = rows
        self._tokenizer = tokenizer
        self._rewards = COMPLETION_COLUMNS[source]
        self._max_tokens = max_tokens
        self._chat = chat or tools is not None
        self._tools = tools or None
        self._encoded: dict[int, list[EncodedCompletion]] = {}  # by index of the row

    def check_prompt(self, prompt: Prompt) -> None:
        row = self._rows[prompt.id]
        longest = completion_tokens = 0
        for name, completion in zip(self._rewards, self._completions(prompt), strict=True):
            count = len(prompt.tokens) + len(completion.tokens)
            if count > self._max_tokens:
                detail = f"the prompt with its {name} has {count} tokens, and the limit is {self._max_tokens}"
                del self._encoded[prompt.id]
                raise DataError(detail, argument="max_tokens", location=row.location, alternative=("too_long", "drop"))
            longest = max(longest, count)
            completion_tokens += len(completion.tokens)
        self.longest_sequence = max(self.longest_sequence, longest)
        self.total_tokens += len(prompt.tokens) + completion_tokens
        self.completion_tokens += completion_tokens

    def rollouts(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """The completions of prompts as rollouts; those of a prompt form a group."""
        rollouts = []
        for group, prompt in enumerate(prompts):
            for reward, completion in zip(self._rewards.values(), self._completions(prompt), strict=True):
                loss_mask = [bool(is_assistants) for is_assistants in completion.loss_mask]
                no_logprobs = [0.0] * len(loss_mask)  # no policy sampled these tokens
                tokens = list(completion.tokens)
                rollouts.append(
                    Rollout(prompt, tokens, loss_mask, no_logprobs, completion.text, reward=reward, group=group)
                )
        return rollouts

    def _completions(self, prompt: Prompt) -> list[EncodedCompletion]:
        if prompt.id not in self._encoded:
            row = self._rows[prompt.id]
            try:
                completions = [self._encode(prompt, row.columns[name]) for name in self._rewards]
            except DataError:
                raise
            except ValueError as error:
                raise DataError(str(error), location=row.location) from error
            self._encoded[prompt.id] = completions
        return self._encoded[prompt.id]

    def _encode(self, prompt: Prompt, completion: str | list[Message]) -> EncodedCompletion:
        row = self._rows[prompt.id]
        prompt_messages = as_chat(row.prompt, self._chat)
        if isinstance(prompt_messages, str):
            assert isinstance(completion, str)
            pieces = [_ChatPiece(completion, True)]
        else:
            if isinstance(completion, str):
                completion = [{"role": "assistant", "content": completion}]
            pieces = self._render(prompt.text, prompt_messages, completion, row.location)
        is_chat_prompt = not isinstance(prompt_messages, str)
        tokens: list[int] = []
        loss_mask: list[bool] = []
        for piece, ids in zip(pieces, self._encode_pieces(prompt, pieces, special=not is_chat_prompt), strict=True):
            end = self._end_of_turn(ids, is_chat_prompt, is_last=piece is pieces[-1]) if piece.is_assistants else 0
            loss_mask += [position < end for position in range(len(ids))]
            tokens += ids
        if True not in loss_mask:
            raise DataError("the completion is empty", location=row.location)
        last = len(loss_mask) - loss_mask[::-1].index(True)
        text = "".join(piece.text for piece in pieces)
        return EncodedCompletion(array("q", tokens[:last]), bytes(loss_mask[:last]), text)

    def _render(
        self, text: str, prompt_messages: list[Message], completion: list[Message], location: str
    ) -> list[_ChatPiece]:
        """What the chat template writes after the prompt: the assistant's turns, and the text between them."""
        pieces: list[_ChatPiece] = []
        messages = list(prompt_messages)
        for message in completion:
            is_assistants = message["role"] == "assistant"
            if is_assistants and pieces:
                longer = self._tokenizer.render_chat(messages, tools=self._tools)
                pieces.append(_ChatPiece(_remainder(longer, text, location), False))
                text = longer
            messages.append(message)
            if is_assistants:
                longer = self._tokenizer.render_chat(messages, tools=self._tools, add_generation_prompt=False)
                pieces.append(_ChatPiece(_remainder(longer, text, location), True))
                text = longer
        return pieces

    def _encode_pieces(self, prompt: Prompt, pieces: Sequence[_ChatPiece], special: bool) -> list[list[int]]:
        """The tokens of each piece: from encoding the whole text, or each piece alone if a token crosses a boundary.

        Other tools encode the whole text, and some tokenizers add a space at the beginning of each text.
        """
        whole = prompt.text + "".join(piece.text for piece in pieces)
        ids, offsets = self._tokenizer.encode_with_offsets(whole, special=special)
        starts = [start for start, _ in offsets]
        boundaries = list(accumulate((len(piece.text) for piece in pieces), initial=len(prompt.text)))
        count = len(prompt.tokens)
        prompt_matches = tuple(ids[:count]) == prompt.tokens and all(start >= boundaries[0] for start in starts[count:])
        between_tokens = {end for (begin, end), (start, _) in pairwise(offsets) if begin < end == start}
        if not prompt_matches or not {*boundaries[1:-1]} <= {*between_tokens, boundaries[0]}:
            return [self._tokenizer.encode(piece.text, special=False) for piece in pieces]
        piece_ids: list[list[int]] = [[] for _ in pieces]
        piece_index = 0
        for token, start in zip(ids[count:], starts[count:], strict=True):
            while start >= boundaries[piece_index + 1] and piece_index + 1 < len(pieces):
                piece_index += 1
            piece_ids[piece_index].append(token)
        return piece_ids

    def _end_of_turn(self, ids: list[int], in_chat: bool, is_last: bool) -> int:
        """The number of tokens of a turn to train on: up to its stop token, which is added if the text has none.

        A template may write more after the stop token, such as a line break, which is never sampled.
        """
        stop_positions = [position for position, token in enumerate(ids) if token in self._tokenizer.stop_ids]
        if stop_positions and (in_chat or stop_positions[-1] == len(ids) - 1):
            return stop_positions[-1] + 1
        if is_last and self._tokenizer.eos_id is not None:
            ids.append(self._tokenizer.eos_id)
        return len(ids)


def _remainder(longer: str, text: str, location: str) -> str:
    if not longer.startswith(text):
        detail = (
            "the chat template writes the beginning of this chat differently once more of it follows, so it is unknown "
            "which tokens are the assistant's; put each of its replies into a separate row"
        )
        raise DataError(detail, location=location)
    return longer[len(text) :]


# -- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfflineData:
    """Prompts in a resumable order, and their completions."""

    prompts: PromptData
    completions: CompletionEncoder

    def next_rollouts(self) -> list[Rollout]:
        """This rank's rollouts of the next step."""
        return self.completions.rollouts(self.prompts.next_prompts())

    def all_rollouts(self) -> list[Rollout]:
        """The rollouts of one epoch. `prompts` must have one prompt per step."""
        prompts: list[Prompt] = []
        for _ in range(len(self.prompts)):
            prompts += self.prompts.next_prompts()
        return self.completions.rollouts(prompts)


def load_offline_data(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    source: str,
    *,
    max_tokens: int,
    chat: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> OfflineData:
    """Check and encode rows for a source, "demonstrations" or "pairs". `options` are those of `PromptData`."""
    completion_rows = read_completions(rows, source)
    completions = CompletionEncoder(completion_rows, tokenizer, source, max_tokens=max_tokens, chat=chat, tools=tools)
    prompts = PromptData(
        completion_rows, tokenizer, chat=chat, tools=tools, check_prompt=completions.check_prompt, **options
    )
    return OfflineData(prompts, completions)


# -- the offline data of a run ---------------------------------------------------------------------


def load_offline_training_data(
    config: Config,
    tokenizer: Tokenizer,
    world: World,
    source: str,
    max_tokens: int,
    objects: PythonObjects = NO_OBJECTS,
) -> OfflineData:
    settings = config.data
    rows = read_training_rows(config, objects)
    with name_key_in_errors("data"):
        return load_offline_data(
            rows,
            tokenizer,
            source,
            max_tokens=max_tokens,
            prompts_per_step=settings.prompts_per_step,
            seed=config.seed,
            shuffle=settings.shuffle,
            max_prompt_tokens=settings.max_prompt_tokens,
            too_long=settings.too_long,
            chat=settings.chat,
            rank=world.rank,
            ranks=world.size,
        )


def load_offline_validation_data(
    config: Config, tokenizer: Tokenizer, source: str, max_tokens: int, objects: PythonObjects = NO_OBJECTS
) -> OfflineData | None:
    """The first rows of the validation data, all of them on every rank; None if there is no such data."""
    settings = config.data
    rows = read_validation_rows(config, objects)
    if rows is None:
        return None
    with name_key_in_errors("data"):
        return load_offline_data(
            rows,
            tokenizer,
            source,
            max_tokens=max_tokens,
            prompts_per_step=1,
            seed=0,
            shuffle=False,
            max_prompt_tokens=settings.max_prompt_tokens,
            too_long=settings.too_long,
            chat=settings.chat,
        )


def load_warm_start(
    config: Config,
    tokenizer: Tokenizer,
    world: World,
    max_tokens: int,
    objects: PythonObjects = NO_OBJECTS,
    *,
    environment: Environment,
) -> OfflineData | None:
    """The demonstrations of the warm start, rendered as the environment's prompts are.

    A demonstration that is too long is an error, whatever `data.too_long` says.
    """
    settings = config.warm_start
    if settings is None:
        return None
    if settings.batch_size < world.size:
        raise ConfigError([f"warm_start.batch_size: each of {world.size} ranks needs at least one sequence"])
    with name_key_in_errors("warm_start.data"):
        try:
            return load_offline_data(
                read_data_rows(settings.data, TRAIN_SPLITS, objects),
                tokenizer,
                "demonstrations",
                max_tokens=max_tokens,
                prompts_per_step=settings.batch_size,
                seed=config.seed,
                **chat_settings(config, environment),
                rank=world.rank,
                ranks=world.size,
            )
        except DataError as error:  # its own arguments are not keys of `warm_start`
            raise DataError(error.detail, location=error.location) from error


def chat_settings(config: Config, environment: Environment) -> dict[str, Any]:
    """How prompts are rendered. In an environment of messages they are chats, and show the policy its tools."""
    return {"chat": config.data.chat, "tools": getattr(environment, "tools", None)}


def rollouts_of_rank(rollouts: Sequence[Rollout], world: World) -> list[Rollout]:
    """The groups of rollouts that this rank scores."""
    return [rollout for rollout in rollouts if rollout.group % world.size == world.rank]
