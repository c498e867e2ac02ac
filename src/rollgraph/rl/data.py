"""Prompts, dealt out to ranks in an order that can be resumed.

Owns the order and the cursor. The order depends only on the seed and the epoch, and the cursor counts prompts. Neither
knows about ranks or the size of a step, so both may change between a save and a resume. A row is held once, as it was
read; its tokens are made when its turn comes.
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
from rollgraph.rl.rows import DataError, Row, is_chat, is_text, load_rows, make_rows, read_jsonl
from rollgraph.tokenizer import Message, Tokenizer
from rollgraph.types import Prompt

__all__ = [
    "DataError", "PromptData", "Row", "as_chat", "is_chat", "is_text", "load_rows", "make_rows",
    "read_jsonl", "split",
]  # fmt: skip

Indices = np.ndarray[Any, np.dtype[np.int64]]


def split(rows: Sequence[Row], held_out: int | float, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to validate with; both keep their order.

    `held_out` is the number of validation rows or, as a float, their share of all rows.
    """
    if isinstance(held_out, float):
        if not 0 <= held_out < 1:
            raise DataError(f"a share must be at least 0 and less than 1, got {held_out}", argument="held_out")
        held_out = max(1, round(held_out * len(rows))) if held_out else 0
    if not 0 <= held_out < len(rows):
        raise DataError(f"{held_out} of {len(rows)} rows leaves none to train on", argument="held_out")
    chosen = set(_permute(len(rows), f"split/{seed}")[:held_out].tolist())
    train = [row for i, row in enumerate(rows) if i not in chosen]
    validation = [row for i, row in enumerate(rows) if i in chosen]
    return train, validation


def as_chat(prompt: str | list[Message], chat: bool) -> str | list[Message]:
    """The prompt of a row as it is encoded: with `chat`, a text is what a user says."""
    if chat and isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


class PromptData:
    """Deals out `prompts_per_step` prompts for each step, and gives this rank its share of them.

    Epochs follow each other without a gap: a step may end one and begin the next. The id of a prompt is its index in
    `rows`.

    With `max_prompt_tokens`, every row is tokenized once at the start. A prompt that is too long, or that the tokenizer
    cannot encode, then stops the run before it has begun, or with `too_long="drop"` is left out and counted in
    `dropped`. The longest prompt that is left has `longest` tokens. `admit` is called for each prompt at the start,
    too: one for which it raises DataError is treated like one that is too long.

    With `chat`, a prompt that is text is rendered as the message of a user. `tools` are given for an environment of
    messages: then every prompt is a chat, and the template shows the policy these tools, if there are any.
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
        admit: Callable[[Prompt], None] | None = None,
        rank: int = 0,
        ranks: int = 1,
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
        self.longest = 0
        self._rows = rows
        self._tokenizer = tokenizer
        self._chat = chat
        self._tools = tools
        self._admit = admit
        self._seed = seed
        self._shuffle = shuffle
        self._rank = rank
        self._ranks = ranks
        self._encoded: dict[int, tuple[str, array[int]]] = {}  # by row
        self._kept = self._measure(max_prompt_tokens, too_long)
        self._epoch = -1
        self._order = self._kept
        self._cursor = 0
        self._make_prompt(int(self._kept[0]))  # finds a missing chat template now rather than later

    def __len__(self) -> int:
        """The number of prompts in an epoch."""
        return len(self._kept)

    @property
    def dropped(self) -> int:
        """The number of rows that were left out because they are too long or cannot be encoded."""
        return len(self._rows) - len(self._kept)

    @property
    def epoch(self) -> float:
        """The number of passes over the prompts so far."""
        return self._cursor / len(self)

    @property
    def columns(self) -> frozenset[str]:
        """Every column that some row has, which is what reward functions can ask for."""
        return frozenset(name for row in self._rows for name in row.columns)

    def next_prompts(self) -> list[Prompt]:
        """This rank's share of the next step; the shares in the order of ranks are the prompts of the step in order."""
        first = self._rank * self.prompts_per_step // self._ranks
        last = (self._rank + 1) * self.prompts_per_step // self._ranks
        prompts = []
        seen: Counter[int] = Counter()
        for place in range(last):
            row = self._find(self._cursor + place)
            if place >= first:
                prompts.append(self._make_prompt(row, seen[row]))
            seen[row] += 1
        self._cursor += self.prompts_per_step
        return prompts

    def state(self) -> dict[str, Any]:
        return {"cursor": self._cursor, **self._identity, "content": self._content}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. It must be of the same data in the same order; ranks may differ."""
        self.check_state(state)
        self._cursor = state["cursor"]

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if a state is not of this data."""
        for name, ours in self._identity.items():
            if state.get(name) != ours:
                detail = f"is {ours} here but {state.get(name)} in the saved state, so the order would differ"
                raise DataError(detail, argument=name)
        if state.get("content") != self._content:
            file = self._rows[0].place.rpartition(":")[0]
            raise DataError("its rows are not those of the saved state: prompts or columns differ", place=file)
        cursor = state.get("cursor")
        if not isinstance(cursor, int) or cursor < 0:
            raise DataError(f"expected a number of prompts in the saved state, got {cursor!r}", argument="cursor")

    @property
    def _identity(self) -> dict[str, Any]:
        return {"rows": len(self), "seed": self._seed, "shuffle": self._shuffle}

    @functools.cached_property
    def _content(self) -> str:
        """A fingerprint of all rows; another file with the same rows has the same one."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            text = json.dumps([row.prompt, row.columns], sort_keys=True, default=repr)
            digest.update(text.encode() + b"\n")
        return digest.hexdigest()

    def _measure(self, most: int | None, too_long: str) -> Indices:
        """The indices of the rows that can be encoded and are short enough."""
        if most is None and self._admit is None:
            return np.arange(len(self._rows))
        kept: list[int] = []
        first_problem: DataError | None = None
        for index in range(len(self._rows)):
            try:
                count = self._count_tokens(index, most)
            except DataError as problem:
                if too_long == "error":
                    raise
                first_problem = first_problem or problem
                continue
            kept.append(index)
            self.longest = max(self.longest, count)
        if not kept:
            assert first_problem is not None
            detail = f"all {len(self._rows)} prompts are dropped, the first because: {first_problem.detail}"
            raise DataError(detail, argument=first_problem.argument, place=first_problem.place)
        return np.array(kept)

    def _count_tokens(self, index: int, most: int | None) -> int:
        """The length of a row's prompt; raises if it cannot be encoded, is longer than `most` or is not admitted."""
        drop = ("too_long", "drop")
        try:
            text, tokens = self._encode(index)
        except DataError as error:
            raise DataError(f"{error.detail}; fix it", place=error.place, alternative=drop) from error
        count = len(tokens)
        if most is not None and count > most:
            raise DataError(
                f"the prompt has {count} tokens, and the limit is {most}; raise it",
                argument="max_prompt_tokens",
                place=self._rows[index].place,
                alternative=drop,
            )
        if self._admit is not None:
            self._admit(Prompt(index, tuple(tokens), text))
        return count

    def _find(self, position: int) -> int:
        """The row at a position in the endless sequence of epochs."""
        epoch, place = divmod(position, len(self))
        if epoch != self._epoch:  # positions only grow, so one epoch's order is enough
            self._epoch = epoch
            self._order = self._kept
            if self._shuffle:
                self._order = self._kept[_permute(len(self), f"{self._seed}/{epoch}")]
        return int(self._order[place])

    def _make_prompt(self, index: int, repeat: int = 0) -> Prompt:
        text, tokens = self._encode(index)
        row = copy.deepcopy(self._rows[index])  # a reward or an environment may change what it gets
        prompt = as_chat(row.prompt, self._tools is not None)
        messages = None if isinstance(prompt, str) else prompt
        return Prompt(index, tuple(tokens), text, row.columns, messages, repeat)

    def _encode(self, index: int) -> tuple[str, array[int]]:
        """The text and the tokens of a row, which is encoded once."""
        found = self._encoded.get(index)
        if found is not None:
            return found
        row = self._rows[index]
        try:
            text, tokens = self.encode(row.prompt)
        except ValueError as error:
            raise DataError(str(error), place=row.place) from error
        self._encoded[index] = text, array("q", tokens)
        return self._encoded[index]

    def encode(self, prompt: str | list[Message]) -> tuple[str, list[int]]:
        """The text and the tokens of a prompt, which need not be one of the rows."""
        prompt = as_chat(prompt, self._chat or self._tools is not None)
        if isinstance(prompt, str):
            return prompt, list(self._tokenizer.encode(prompt, special=True))
        text = self._tokenizer.render_chat(prompt, tools=self._tools or None)
        return text, list(self._tokenizer.encode(text, special=False))  # the template writes special tokens itself


def _permute(count: int, key: str) -> Indices:
    # RandomState, because its stream is frozen: numpy may change that of Generator, which would break a resume.
    words = np.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u4")
    return np.random.RandomState(words).permutation(count)
