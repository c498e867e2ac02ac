"""Names of the built-in algorithms, keys of other frameworks with their counterparts here, and old names of keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# -- built-in algorithms ---------------------------------------------------------------------------
# They are listed here and not in `rl/`, so that checking a configuration does not import PyTorch.

ALGORITHM_PATHS = {
    "grpo": "rollgraph.rl.algorithms.grpo:GRPO",
    "dr_grpo": "rollgraph.rl.algorithms.dr_grpo:DrGRPO",
    "rloo": "rollgraph.rl.algorithms.rloo:RLOO",
    "reinforce_pp": "rollgraph.rl.algorithms.reinforce_pp:ReinforcePP",
    "dapo": "rollgraph.rl.algorithms.dapo:DAPO",
    "gspo": "rollgraph.rl.algorithms.gspo:GSPO",
    "cispo": "rollgraph.rl.algorithms.cispo:CISPO",
    "sft": "rollgraph.rl.algorithms.sft:SFT",
    "dpo": "rollgraph.rl.algorithms.dpo:DPO",
    "distillation": "rollgraph.rl.algorithms.distillation:Distillation",
}

# Advantages are relative to the other samples of the prompt. In a group of one, they would all be 0.
GROUP_RELATIVE = frozenset({"grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo"})

# They learn from completions in the data. Nothing is sampled or rewarded, and `rollout` is not used.
SUPERVISED = frozenset({"sft", "dpo"})

# They sample, and learn from a teacher instead of rewards.
WITH_TEACHER = frozenset({"distillation"})

# One optimizer update per step, because they score their rows under the policy right before the update.
SINGLE_UPDATE = frozenset({"dpo"})


# -- keys of other frameworks ----------------------------------------------------------------------
# Looked up in `migration.tsv`, which `tools/migration_table.py` makes from docs/migrating*.md.

OPTIONS = "algorithm.options."
ALGORITHM = "algorithm"  # stands in the framework column of rows about names of algorithms


class Counterpart(NamedTuple):
    """A key of another framework, and the keys here that do the same.

    >>> str(Counterpart("verl", "data.seed", ("seed",), "one seed for all"))
    "verl's data.seed is seed here (one seed for all)"
    """

    framework: str
    name: str
    keys: tuple[str, ...]  # our keys; for an algorithm, our name of it
    remark: str

    def __str__(self) -> str:
        return self.describe()

    def describe(self, format_key: Callable[[str], str] = str) -> str:
        """`format_key` formats a key the way the user writes it, such as an argument of `Trainer`."""
        return f"{self.framework}'s {self.name} {self.answer(format_key)}"

    def answer(self, format_key: Callable[[str], str] = str) -> str:
        keys = " and ".join(map(format_key, self.keys))
        if not keys:
            return f"is {self.remark}"
        return f"is {keys} here ({self.remark})" if self.remark else f"is {keys} here"


def counterpart_of(key: str, our_names: Collection[str] = ()) -> Counterpart | None:
    """Look up another framework's key, in any section: `beta`, `algorithm.beta`, `rollout.n`.

    If only one framework has the section, only keys of that framework match. `our_names` are our own keys without
    their sections: such a name alone says nothing about a framework.
    """
    table = _counterparts_by_suffix()
    section = key.partition(".")[0]
    framework = None if section in our_names else _framework_by_section().get(section)
    matches = (table[suffix] for suffix in _suffixes(key) if suffix in table and suffix not in our_names)
    return next((row for row in matches if framework in (None, row.framework)), None)


def counterpart_of_algorithm(name: str) -> Counterpart | None:
    return next((row for row in _rows() if row.framework == ALGORITHM and row.name == name.lower()), None)


@functools.cache
def option_keys() -> tuple[str, ...]:
    """Options of the built-in algorithms that the migration pages mention."""
    keys = (key for row in _rows() for key in row.keys if key.startswith(OPTIONS))
    return tuple(dict.fromkeys(keys))


@functools.cache
def _counterparts_by_suffix() -> dict[str, Counterpart]:
    """Counterparts by every suffix of their names: a.b.c, b.c and c. Full names win, then earlier rows."""
    rows = [row for row in _rows() if row.framework != ALGORITHM]
    table: dict[str, Counterpart] = {}
    for row in rows:
        table.setdefault(row.name, row)
    for row in rows:
        for suffix in _suffixes(row.name):
            table.setdefault(suffix, row)
    return table


@functools.cache
def _framework_by_section() -> dict[str, str]:
    """The framework that uses each top-level section."""
    return {row.name.partition(".")[0]: row.framework for row in _rows() if "." in row.name}


def _suffixes(key: str) -> Iterator[str]:
    """The key, then the key without its outer sections one by one: a.b.c, b.c, c."""
    names = key.split(".")
    return (".".join(names[start:]) for start in range(len(names)))


@functools.cache
def _rows() -> tuple[Counterpart, ...]:
    text = Path(__file__).with_name("migration.tsv").read_text(encoding="utf-8")
    rows = []
    for line in text.splitlines():
        framework, name, keys, remark = line.split("\t")
        rows.append(Counterpart(framework, name, tuple(keys.split()), remark))
    return tuple(rows)


# -- keys that had another name --------------------------------------------------------------------

RENAMED = {"train.long_prompts": "train.half_logits"}  # old, new; in the same section


def with_new_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in a checkpoint, with today's names of keys.

    >>> with_new_names({"seed": 0, "train": {"long_prompts": "auto"}})
    {'seed': 0, 'train': {'half_logits': 'auto'}}
    """
    config = dict(saved)
    for old, new in RENAMED.items():
        section, old_name = old.split(".")
        values = config.get(section)
        if isinstance(values, dict) and old_name in values:
            renamed = dict(values)
            renamed[new.split(".")[1]] = renamed.pop(old_name)
            config[section] = renamed
    return config
