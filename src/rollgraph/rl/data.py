"""Prompts: read from a file, checked at the start, dealt out to ranks in an order that can be resumed.

Owns the order and the cursor. The order depends on (seed, epoch) alone and the cursor counts prompts, so neither
knows of ranks or of the size of a step: both may change between a save and a resume. A row is held once, as it was
read; tokens are made when it is its turn.
"""

from __future__ import annotations

import codecs
import copy
import datetime
import decimal
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollgraph.errors import InvalidInput
from rollgraph.rl.paths import import_extra
from rollgraph.tokenizer import Message, Tokenizer
from rollgraph.types import Prompt

MOST_NESTED = 100  # objects and lists inside each other in one line
RESERVED = ("prompts", "completions", "completion_ids")  # what rewards are given beside the columns


class DataError(InvalidInput):
    """A file or a row that cannot be trained on; `place` is the file, or file:line."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the data: its prompt, a text or a chat, and all other columns."""

    prompt: str | list[Message]
    columns: Mapping[str, Any]
    place: str  # file:line, for messages


def load_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a .jsonl file, one object in each line, or of a .parquet file."""
    file = Path(path)
    readers = {".jsonl": read_jsonl, ".ndjson": read_jsonl, ".parquet": _read_parquet}
    if file.suffix not in readers:
        detail = "expected a .jsonl file, with one JSON object per line, or a .parquet file"
        raise DataError(detail, place=str(file))
    if not file.is_file():
        raise DataError("no such file", place=str(file))
    rows = [_make_row(entry, f"{file}:{line}") for line, entry in readers[file.suffix](file)]
    if not rows:
        raise DataError("has no rows", place=str(file))
    return rows


def make_rows(entries: Iterable[Mapping[str, Any]], name: str = "row") -> list[Row]:
    """Rows of your own making, as a file would have them: {"prompt": ..., "answer": ...}."""
    return [_make_row(entry, f"{name}:{line}") for line, entry in enumerate(entries, 1)]


def split(rows: Sequence[Row], held_out: int | float, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to validate with: a number of them or, as a float, a share. Both keep their order."""
    if isinstance(held_out, float):
        if not 0 <= held_out < 1:
            raise DataError(f"a share must be at least 0 and less than 1, got {held_out}", argument="held_out")
        held_out = max(1, round(held_out * len(rows))) if held_out else 0
    if not 0 <= held_out < len(rows):
        raise DataError(f"{held_out} of {len(rows)} rows leaves none to train on", argument="held_out")
    chosen = set(_permute(len(rows), f"split/{seed}")[:held_out].tolist())
    return [row for i, row in enumerate(rows) if i not in chosen], [row for i, row in enumerate(rows) if i in chosen]


class PromptData:
    """Deals out `prompts_per_step` prompts for each step, this rank's share of them to this rank.

    Epochs follow each other without a gap: a step may end one and begin the next. With `max_prompt_tokens` every row
    is tokenised once at the start, so that a prompt that is too long, or that the tokenizer cannot encode, stops a run
    before it has begun; `too_long` says whether it does, or is left out and counted in `dropped`; the longest that is
    left has `longest` tokens. The id of a prompt is its index in `rows`.
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
        self._rows, self._tokenizer, self._chat = rows, tokenizer, chat
        self._seed, self._shuffle, self._rank, self._ranks = seed, shuffle, rank, ranks
        self._kept = self._measure(max_prompt_tokens, too_long)
        self._epoch, self._order = -1, self._kept
        self._cursor = 0
        self._make_prompt(int(self._kept[0]))  # a missing chat template is found now

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._kept)

    @property
    def dropped(self) -> int:
        """Rows that were left out because they are too long, or cannot be encoded."""
        return len(self._rows) - len(self._kept)

    @property
    def columns(self) -> frozenset[str]:
        """Every column that some row has, which is what rewards can ask for."""
        return frozenset(name for row in self._rows for name in row.columns)

    def next_prompts(self) -> list[Prompt]:
        """This rank's share of the next step. Shares in the order of ranks are the prompts of the step in order."""
        first, last = (rank * self.prompts_per_step // self._ranks for rank in (self._rank, self._rank + 1))
        prompts = [self._make_prompt(self._find(self._cursor + i)) for i in range(first, last)]
        self._cursor += self.prompts_per_step
        return prompts

    def state(self) -> dict[str, Any]:
        return {"cursor": self._cursor, **self._identity, "content": self._content}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. It has to be of the same data: the same order, whatever the ranks."""
        self.check_state(state)
        self._cursor = state["cursor"]

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if a state is not of this data."""
        for name, ours in self._identity.items():
            if state.get(name) != ours:
                detail = f"is {ours} here but {state.get(name)} in the saved state, so the order would differ"
                raise DataError(detail, argument=name)
        if state.get("content") != self._content:
            where = self._rows[0].place.rpartition(":")[0]
            raise DataError("its rows are not those of the saved state: prompts or columns differ", place=where)
        cursor = state.get("cursor")
        if not isinstance(cursor, int) or cursor < 0:
            raise DataError(f"expected a number of prompts in the saved state, got {cursor!r}", argument="cursor")

    @property
    def _identity(self) -> dict[str, Any]:
        return {"rows": len(self), "seed": self._seed, "shuffle": self._shuffle}

    @functools.cached_property
    def _content(self) -> str:
        """A fingerprint of all rows: the same file, or another one that says the same."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            digest.update(json.dumps([row.prompt, row.columns], sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()

    def _measure(self, most: int | None, too_long: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The indices of rows that are short enough."""
        if most is None:
            return np.arange(len(self._rows))
        kept: list[int] = []
        first_problem: DataError | None = None
        drop = ("too_long", "drop")
        for index, row in enumerate(self._rows):
            try:
                count = len(self._make_prompt(index).tokens)
            except DataError as error:
                problem = DataError(f"{error.detail}; fix it", place=row.place, alternative=drop)
            else:
                if count <= most:
                    kept.append(index)
                    self.longest = max(self.longest, count)
                    continue
                problem = DataError(
                    f"the prompt has {count} tokens, and the limit is {most}; raise it",
                    argument="max_prompt_tokens",
                    place=row.place,
                    alternative=drop,
                )
            if too_long == "error":
                raise problem
            first_problem = first_problem or problem
        if not kept:
            assert first_problem is not None
            detail = f"all {len(self._rows)} prompts are dropped, the first because: {first_problem.detail}"
            raise DataError(detail, argument=first_problem.argument, place=first_problem.place)
        return np.array(kept)

    def _find(self, position: int) -> int:
        """The row at a position of the endless sequence of epochs."""
        epoch, place = divmod(position, len(self))
        if epoch != self._epoch:  # positions only grow, so the order of one epoch is enough
            shuffled = self._kept[_permute(len(self), f"{self._seed}/{epoch}")] if self._shuffle else self._kept
            self._epoch, self._order = epoch, shuffled
        return int(self._order[place])

    def _make_prompt(self, index: int) -> Prompt:
        row = self._rows[index]
        prompt: str | Sequence[Message] = row.prompt
        if self._chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        try:
            text = prompt if isinstance(prompt, str) else self._tokenizer.render_chat(prompt)
            tokens = self._tokenizer.encode(text, special=text is prompt)  # a template writes special tokens itself
        except ValueError as error:
            raise DataError(str(error), place=row.place) from error
        return Prompt(index, tuple(tokens), text, copy.deepcopy(row.columns))  # rows are for later epochs, too


def _permute(count: int, key: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    # RandomState, because its stream is frozen: numpy may change Generator's between versions, and with it a resume.
    words = np.frombuffer(hashlib.sha256(key.encode()).digest(), dtype="<u4")
    return np.random.RandomState(words).permutation(count)


def read_jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    """The numbers of lines that are not empty, and what they hold: JSON in UTF-8, each key once."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, _read_json(line.removeprefix(codecs.BOM_UTF8))
                except ValueError as error:
                    raise DataError(str(error), place=f"{file}:{number}") from error


def _read_json(line: bytes) -> Any:
    """ValueError where a line is no UTF-8, no JSON, or more than can be worked with."""
    try:
        entry = json.loads(line.decode(), object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if line.count(b"[") + line.count(b"{") > MOST_NESTED and _depth(entry) > MOST_NESTED:
        raise ValueError(_TOO_DEEP)
    return entry


_TOO_DEEP = f"has more than {MOST_NESTED} objects and lists inside each other"


def _depth(entry: Any) -> int:
    """How many objects and lists are inside each other; counted level by level, however many there are."""
    depth, level = 0, [entry]
    while level := [inner for inner in level if isinstance(inner, list | dict)]:
        depth += 1
        level = [value for inner in level for value in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def _read_parquet(file: Path) -> Iterator[tuple[int, Any]]:
    parquet = import_extra("pyarrow.parquet", extra="parquet")
    try:
        batches = parquet.ParquetFile(file).iter_batches()
        yield from enumerate((entry for batch in batches for entry in batch.to_pylist()), 1)
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise DataError(f"cannot be read as Parquet ({error})", place=str(file)) from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return entry


def _make_row(entry: Any, place: str) -> Row:
    if not isinstance(entry, Mapping):
        raise DataError(f"expected an object with a 'prompt', got a {type(entry).__name__}", place=place)
    present = [name for name in ("prompt", "messages") if name in entry]
    given = [name for name in present if entry[name] is not None] or present[
        :1
    ]  # Parquet has nulls for what is not there
    if len(given) != 1:
        keys = ", ".join(map(repr, entry)) or "nothing"
        got = "both" if given else keys
        raise DataError(f"expected either 'prompt' or 'messages', got {got}", place=place)
    for name in RESERVED:
        if name in entry:
            detail = f"the column {name!r} has the name of an argument that every reward function gets; rename it"
            raise DataError(detail, place=place)
    prompt = entry[given[0]]
    if given[0] == "prompt" and not (is_text(prompt) and prompt):
        raise DataError(f"'prompt' must be text, got {prompt!r:.80}", place=place)
    if given[0] == "messages" and not (isinstance(prompt, list) and prompt and all(map(_is_message, prompt))):
        detail = f"'messages' must be a list of {{role, content}}, both text, got {prompt!r:.80}"
        raise DataError(detail, place=place)
    columns = {name: value for name, value in entry.items() if name not in ("prompt", "messages")}
    return Row(prompt, {name: _plain(value, name, place) for name, value in columns.items()}, place)


def _plain(value: Any, name: str, place: str) -> Any:
    """As JSON will give it back: columns travel to other ranks and into checkpoints."""
    if isinstance(value, np.ndarray | np.generic):
        value = (value.astype(str) if value.dtype.kind == "M" else value).tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(inner, name, place) for inner in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(inner, f"{name}.{key}", place) for key, inner in value.items()}
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    kind = type(value).__name__
    detail = f"the column {name!r} holds {kind} ({value!r:.40}); convert it to text or numbers, or leave it out"
    raise DataError(detail, place=place)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and is_text(value.get("role")) and is_text(value.get("content"))


def is_text(value: Any) -> bool:
    """Whether it has tokens: JSON can spell half of a surrogate pair, which has none."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))
