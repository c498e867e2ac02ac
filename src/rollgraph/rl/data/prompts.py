"""The prompt dataset: tokenized prompts in a resumable order, sharded over ranks.

Owns the order and the cursor. The order depends only on the seed and the epoch, and the cursor counts prompts. Neither
depends on the number of ranks or the size of a step, so both may change between a save and a resume. A row is stored
once, as it was read, and tokenized when it is first used.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rollgraph.errors import InvalidInput
from rollgraph.rl.data.rows import DataError, Row
from rollgraph.tokenizer import Message, Tokenizer
from rollgraph.types import Prompt

Indices = np.ndarray[Any, np.dtype[np.int64]]
OnProgress = Callable[[int, int], None]  # gets the number of rows encoded so far, and of all rows
ENCODE_CHUNK = 4096  # rows that are encoded in one call


def split(rows: Sequence[Row], held_out: int | float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows at random into training rows and validation rows; both keep their order.

    `held_out` is the number of validation rows or, as a float, their fraction of all rows.
    """
    if isinstance(held_out, float):
        if not 0 <= held_out < 1:
            raise DataError(f"a share must be at least 0 and less than 1, got {held_out}", argument="held_out")
        held_out = max(1, round(held_out * len(rows))) if held_out else 0
    if not 0 <= held_out < len(rows):
        raise DataError(f"{held_out} of {len(rows)} rows leaves none to train on", argument="held_out")
    validation_indices = set(_permute(len(rows), f"split/{seed}")[:held_out].tolist())
    train = [row for i, row in enumerate(rows) if i not in validation_indices]
    validation = [row for i, row in enumerate(rows) if i in validation_indices]
    return train, validation


def as_chat(prompt: str | list[Message], chat: bool) -> str | list[Message]:
    """With `chat`, turn a text prompt into a chat with one user message; return any other prompt unchanged."""
    if chat and isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


class PromptData:
    """The prompts of a run: `prompts_per_step` for each step, of which this rank gets its shard.

    Epochs follow each other without a gap: a step may contain the end of one and the start of the next. The id of a
    prompt is its index in `rows`.

    With `max_prompt_tokens`, every row is tokenized at the start. A prompt that is too long, or that the tokenizer
    cannot encode, then stops the run before it begins, or with `too_long="drop"` is dropped and counted in `dropped`.
    The longest remaining prompt has `longest_prompt` tokens. `check_prompt` is called for each prompt at the start too;
    if it raises DataError, the prompt is treated like one that is too long. `on_progress` reports the rows encoded so
    far.

    With `chat`, a text prompt is rendered as a user message. `tools` is set for an environment of messages: then every
    prompt is a chat, and the template shows the policy these tools, if there are any.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        *,
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        max_prompt_tokens: int | None = None,
        too_long: Literal["error", "drop"] = "error",
        chat: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        check_prompt: Callable[[Prompt], None] | None = None,
        rank: int = 0,
        ranks: int = 1,
        on_progress: OnProgress | None = None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise InvalidInput(f"must be at least 0 and less than ranks={ranks}, got {rank}", argument="rank")
        if prompts_per_step < ranks:
            detail = f"each of {ranks} ranks needs at least one prompt per step, got {prompts_per_step}"
            raise InvalidInput(detail, argument="prompts_per_step")
        if too_long not in ("error", "drop"):
            raise InvalidInput(f"expected 'error' or 'drop', got {too_long!r}", argument="too_long")
        if not rows:
            raise DataError("there are no rows", argument="rows")
        self.prompts_per_step = prompts_per_step
        self.longest_prompt = 0
        self._rows = rows
        self._tokenizer = tokenizer
        self._chat = chat
        self._tools = tools
        self._check_prompt = check_prompt
        self._seed = seed
        self._shuffle = shuffle
        self._rank = rank
        self._ranks = ranks
        self._encoded: dict[int, tuple[str, array[int]]] = {}  # by row
        self._row_indices = self._select_rows(max_prompt_tokens, too_long, on_progress)
        self._epoch = -1
        self._order = self._row_indices
        self._cursor = 0
        self._make_prompt(int(self._row_indices[0]))  # raises now rather than later if there is no chat template

    def __len__(self) -> int:
        """The number of prompts in an epoch."""
        return len(self._row_indices)

    @property
    def dropped(self) -> int:
        """The number of rows that were dropped because they are too long or cannot be encoded."""
        return len(self._rows) - len(self._row_indices)

    @property
    def epoch(self) -> float:
        """The number of passes over the prompts so far."""
        return self._cursor / len(self)

    @property
    def columns(self) -> frozenset[str]:
        """All columns that any row has; reward functions can take these as arguments."""
        return frozenset(name for row in self._rows for name in row.columns)

    def next_prompts(self) -> list[Prompt]:
        """This rank's prompts of the next step: a contiguous shard of them, in the order of ranks."""
        first = self._rank * self.prompts_per_step // self._ranks
        last = (self._rank + 1) * self.prompts_per_step // self._ranks
        prompts = []
        repeats: Counter[int] = Counter()
        for offset in range(last):
            row = self._row_at(self._cursor + offset)
            if offset >= first:
                prompts.append(self._make_prompt(row, repeats[row]))
            repeats[row] += 1
        self._cursor += self.prompts_per_step
        return prompts

    def state(self) -> dict[str, Any]:
        return {"cursor": self._cursor, **self._identity, "content": self._content}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken: from the same data in the same order, on any number of ranks."""
        self.check_state(state)
        self._cursor = state["cursor"]

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if a state was taken from other data."""
        for name, expected in self._identity.items():
            if state.get(name) != expected:
                detail = f"is {expected} here but {state.get(name)} in the saved state, so the order would differ"
                raise DataError(detail, argument=name)
        if state.get("content") != self._content:
            file = self._rows[0].location.rpartition(":")[0]
            raise DataError("its rows are not those of the saved state: prompts or columns differ", location=file)
        cursor = state.get("cursor")
        if not isinstance(cursor, int) or cursor < 0:
            raise DataError(f"expected a number of prompts in the saved state, got {cursor!r}", argument="cursor")

    @property
    def _identity(self) -> dict[str, Any]:
        return {"rows": len(self), "seed": self._seed, "shuffle": self._shuffle}

    @functools.cached_property
    def _content(self) -> str:
        """A fingerprint of all rows; files with the same rows have the same fingerprint."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            text = json.dumps([row.prompt, row.columns], sort_keys=True, default=repr)
            digest.update(text.encode() + b"\n")
        return digest.hexdigest()

    def _select_rows(self, max_tokens: int | None, too_long: str, on_progress: OnProgress | None) -> Indices:
        """The indices of the rows that can be encoded and are short enough."""
        if max_tokens is None and self._check_prompt is None:
            return np.arange(len(self._rows))
        row_indices: list[int] = []
        first_problem: DataError | None = None
        for index in range(len(self._rows)):
            if index % ENCODE_CHUNK == 0:
                self._encode_chunk(range(index, min(index + ENCODE_CHUNK, len(self._rows))))
                if on_progress is not None:
                    on_progress(index, len(self._rows))
            try:
                count = self._count_tokens(index, max_tokens)
            except DataError as problem:
                if too_long == "error":
                    raise
                first_problem = first_problem or problem
                continue
            row_indices.append(index)
            self.longest_prompt = max(self.longest_prompt, count)
        if not row_indices:
            assert first_problem is not None
            detail = f"all {len(self._rows)} prompts are dropped, the first because: {first_problem.detail}"
            raise DataError(detail, argument=first_problem.argument, location=first_problem.location)
        return np.array(row_indices)

    def _count_tokens(self, index: int, max_tokens: int | None) -> int:
        """The length of a row's prompt; raises if it cannot be encoded, is too long or fails `check_prompt`."""
        drop = ("too_long", "drop")
        try:
            text, tokens = self._encode(index)
        except DataError as error:
            raise DataError(f"{error.detail}; fix it", location=error.location, alternative=drop) from error
        count = len(tokens)
        if max_tokens is not None and count > max_tokens:
            raise DataError(
                f"the prompt has {count} tokens, and the limit is {max_tokens}; raise it",
                argument="max_prompt_tokens",
                location=self._rows[index].location,
                alternative=drop,
            )
        if self._check_prompt is not None:
            self._check_prompt(Prompt(index, tuple(tokens), text))
        return count

    def _row_at(self, position: int) -> int:
        """The index of the row at a position in the endless sequence of epochs."""
        epoch, index = divmod(position, len(self))
        if epoch != self._epoch:  # positions only grow, so the order of one epoch is enough
            self._epoch = epoch
            self._order = self._row_indices
            if self._shuffle:
                self._order = self._row_indices[_permute(len(self), f"{self._seed}/{epoch}")]
        return int(self._order[index])

    def _make_prompt(self, index: int, repeat: int = 0) -> Prompt:
        text, tokens = self._encode(index)
        row = copy.deepcopy(self._rows[index])  # a reward or an environment may change what it gets
        prompt = as_chat(row.prompt, self._tools is not None)
        messages = None if isinstance(prompt, str) else prompt
        return Prompt(index, tuple(tokens), text, row.columns, messages, repeat)

    def _encode_chunk(self, indices: Sequence[int]) -> None:
        """Encode rows in one call, on all cores. If one fails, encode none: `_encode` will name the row that fails."""
        try:
            prompts = [self._render(self._rows[index].prompt) for index in indices]
            for special in (False, True):
                batch = [
                    (index, text)
                    for index, (text, needs_special) in zip(indices, prompts, strict=True)
                    if needs_special is special
                ]
                encoded = self._tokenizer.encode_batch([text for _, text in batch], special=special)
                for (index, text), tokens in zip(batch, encoded, strict=True):
                    self._encoded[index] = text, array("q", tokens)
        except ValueError:
            return

    def _encode(self, index: int) -> tuple[str, array[int]]:
        """The text and the tokens of a row; cached."""
        encoded = self._encoded.get(index)
        if encoded is not None:
            return encoded
        row = self._rows[index]
        try:
            text, tokens = self.encode(row.prompt)
        except ValueError as error:
            raise DataError(str(error), location=row.location) from error
        self._encoded[index] = text, array("q", tokens)
        return self._encoded[index]

    def encode(self, prompt: str | list[Message]) -> tuple[str, list[int]]:
        """The text and the tokens of any prompt, also one that is not in the rows."""
        text, special = self._render(prompt)
        return text, list(self._tokenizer.encode(text, special=special))

    def _render(self, prompt: str | list[Message]) -> tuple[str, bool]:
        """The text of a prompt, and whether to add special tokens: a chat template writes them itself."""
        prompt = as_chat(prompt, self._chat or self._tools is not None)
        if isinstance(prompt, str):
            return prompt, True
        return self._tokenizer.render_chat(prompt, tools=self._tools or None), False


def _permute(count: int, key: str) -> Indices:
    # RandomState, because its stream is frozen: numpy may change Generator's stream, which would break a resume.
    words = np.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u4")
    return np.random.RandomState(words).permutation(count)
