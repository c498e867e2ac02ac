"""Ids of models and datasets on the Hugging Face Hub, as people write them: `org/name@revision:config/split`.

Owns the spelling, and when a text is an id: a path that exists here always wins. Reads no file and needs no network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from rollgraph.errors import InvalidInput
from rollgraph.rl.rows import READERS

Kind = Literal["model", "dataset"]
SCHEME = "hf://"
_PREFIXES: dict[Kind, str] = {"model": "", "dataset": "datasets/"}
_SPELLINGS: dict[Kind, str] = {
    "model": "org/name or org/name@revision",
    "dataset": "org/name, org/name:split or org/name@revision:config/split",
}
_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)"
    r"(@(?P<revision>[^\s@:]+))?"
    r"(:((?P<config>[^\s:/]+)/)?(?P<split>[^\s:/]+))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(InvalidInput):
    """A repository of the hub that cannot be used; `place` is its id."""


@dataclass(frozen=True)
class HubId:
    """A model, or a split of a dataset, e.g. HubId("dataset", "openai/gsm8k", "main", config="main", split="test")."""

    kind: Kind
    repo: str
    revision: str = "main"  # a branch, a tag or a commit
    config: str | None = None
    split: str | None = None
    written: str = ""  # what a person wrote, for messages

    @classmethod
    def parse(cls, text: str, kind: Kind) -> Self | None:
        """The id that a text spells; None if it spells none. Raises if it begins with hf:// and spells none."""
        plain = not text.startswith(SCHEME)
        body = text.removeprefix(SCHEME)
        if not plain:
            body = body.removeprefix(_PREFIXES[kind])
        found = _ID.fullmatch(body)
        if found is None or (kind == "model" and found["split"]):
            if plain:
                return None
            raise HubError(f"expected {SCHEME}{_PREFIXES[kind]}{_SPELLINGS[kind]}", place=text)
        return cls(kind, found["repo"], found["revision"] or "main", found["config"], found["split"], text)

    @property
    def is_plain(self) -> bool:
        """Whether it was written without hf://, so that it may have been meant as a path."""
        return not self.written.startswith(SCHEME)

    @property
    def is_pinned(self) -> bool:
        """Whether it names a commit, whose files never change."""
        return is_commit(self.revision)

    @property
    def at_revision(self) -> str:
        """The repository at its revision, without config and split."""
        return f"{SCHEME}{_PREFIXES[self.kind]}{self.repo}@{self.revision}"

    def __str__(self) -> str:
        if self.split is None:
            return self.at_revision
        part = self.split if self.config is None else f"{self.config}/{self.split}"
        return f"{self.at_revision}:{part}"


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def find_id(text: str, kind: Kind) -> HubId | None:
    """The id that a person means; None for the path of a file or folder, even if nothing is there."""
    if text.startswith(SCHEME):
        return HubId.parse(text, kind)
    if Path(text).exists() or (kind == "dataset" and Path(text).suffix in READERS):
        return None
    return HubId.parse(text, kind)
