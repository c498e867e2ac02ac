"""Translates a NeMo-RL GRPO config into rollgraph's keys, and reports what became of each of its keys.

A run's own checks, in `checks.py`, have the last word: what they refuse is taken back, so that the result loads and
can be planned.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from rollgraph.compat.composed_yaml import load_composed
from rollgraph.compat.nemo.checks import find_problems
from rollgraph.compat.nemo.learning import translate_algorithm, translate_optimizer
from rollgraph.compat.nemo.ledger import Ledger, LedgerLine, Status, short
from rollgraph.compat.nemo.outputs import translate_checkpoints, translate_sinks
from rollgraph.compat.nemo.policy import translate_backend, translate_graphs, translate_lengths, translate_model
from rollgraph.compat.nemo.prompts import translate_data, translate_rewards
from rollgraph.config import Config, ConfigError
from rollgraph.config.yaml_tree import Node

PARTS = (
    translate_graphs,  # before translate_backend, which ignores all keys of the backend that is not used
    translate_backend,
    translate_model,
    translate_algorithm,
    translate_lengths,
    translate_optimizer,
    translate_data,
    translate_rewards,
    translate_checkpoints,
    translate_sinks,
)
ORDER = (
    "seed",
    "steps",
    "output",
    "model",
    "tokenizer",
    "data",
    "rollout",
    "reward",
    "algorithm",
    "optimizer",
    "train",
)


@dataclass(frozen=True)
class Translation:
    ours: dict[str, Any]
    lines: tuple[LedgerLine, ...]  # one for each key of NeMo-RL's, in the order of the file
    to_do: tuple[str, ...]  # what the user has to do before a run can start

    def to_yaml(self) -> str:
        """rollgraph's config, below comments that list what is left to do."""
        import yaml  # type: ignore[import-untyped, unused-ignore]

        notes = "".join(f"# To do: {text}\n" for text in self.to_do)
        return notes + str(yaml.safe_dump(self.ours, sort_keys=False, allow_unicode=True, width=110))

    def describe(self) -> str:
        """What became of every key, with those that need attention last."""
        blocks = []
        for status in (Status.IGNORED, Status.TRANSLATED, Status.UNSUPPORTED):
            lines = [line for line in self.lines if line.status is status]
            rows = [f"  {line.place}: {line.key}: {short(line.value)} → {line.text}" for line in lines]
            blocks.append("\n".join([f"{status} ({len(lines)})", *rows]))
        to_do = [f"  {text}" for text in self.to_do]
        return "\n\n".join([*blocks, "\n".join([f"to do ({len(to_do)})", *to_do])])


def import_nemo(path: str | os.PathLike[str]) -> Translation:
    """Translate a file. Raises ConfigError if it cannot be read, or is not a GRPO config."""
    return translate_tree(load_composed(path), path)


def translate_tree(tree: Node, path: str | os.PathLike[str]) -> Translation:
    book = Ledger(tree)
    _require_sections(book, path)
    for translate in PARTS:
        translate(book)
    book.finish()
    _cut_warmup(book)
    problems = find_problems(_as_it_stands(book).to_yaml(), book.ranks)
    while problems:
        if not any(book.take_back(problem.key, problem.text) for problem in problems):  # take back one, and look again
            raise ConfigError([f"{path}: its translation is not a valid config: {text}" for _, text in problems])
        problems = find_problems(_as_it_stands(book).to_yaml(), book.ranks)
    return _as_it_stands(book)


def _require_sections(book: Ledger, path: str | os.PathLike[str]) -> None:
    missing = [name for name in ("grpo", "policy") if not isinstance(book.get(name), dict)]
    if missing:
        present = ", ".join(book.tree.value) or "nothing"
        sections = " and no ".join(f"`{name}`" for name in missing)
        raise ConfigError([f"{path}: not a GRPO config of NeMo-RL: it has no {sections}, but {present}"])


def _as_it_stands(book: Ledger) -> Translation:
    ours = {name: book.ours[name] for name in (*ORDER, *book.ours) if name in book.ours}
    return Translation(ours, tuple(book.lines[key] for key in book.leaves), tuple(book.to_do))


def _cut_warmup(book: Ledger) -> None:
    """NeMo-RL allows a warm-up that is longer than the run."""
    optimizer = book.ours.get("optimizer", {})
    warmup = optimizer.get("warmup_steps")
    steps = book.ours.get("steps") or Config.steps
    updates = steps * book.ours.get("algorithm", {}).get("minibatches", 1)
    if warmup is not None and warmup > updates:
        book.to_do.append(f"optimizer.warmup_steps was {warmup}, more than the {updates} updates of the run")
        optimizer["warmup_steps"] = updates
