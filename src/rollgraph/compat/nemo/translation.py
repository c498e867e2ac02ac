"""Translates a NeMo-RL GRPO config into rollgraph's keys, and reports what became of each of its keys.

The checks of a run have the last word: settings that they refuse are revoked, so that the result loads and can be
planned.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rollgraph.compat.nemo.ledger import Ledger, LedgerLine, Status, short_yaml
from rollgraph.compat.nemo.sections import (
    translate_algorithm,
    translate_backend,
    translate_data,
    translate_graphs,
    translate_lengths,
    translate_model,
    translate_optimizer,
    translate_rewards,
)
from rollgraph.compat.omegaconf_yaml import load_composed
from rollgraph.config import Config, ConfigError, capture_scopes, parse_config
from rollgraph.config.yaml_tree import Node
from rollgraph.errors import InvalidInput

# -- checks that a run would make ------------------------------------------------------------------

NAME = "translation"  # stands for the file in messages


class Problem(NamedTuple):
    """For example `Problem("checkpoint.every", "checkpoint.every: expected whole number ≥ 1, got null")`."""

    key: str  # of rollgraph
    text: str


def find_problems(text: str, ranks: int) -> list[Problem]:
    from rollgraph.inputs.inputs import make_algorithm  # takes torch

    try:
        config = parse_config(text, name=NAME)
        capture_scopes(config, ranks)
        make_algorithm(config)
    except ConfigError as error:
        return [
            Problem(problem.key.partition("[")[0], str(replace(problem, location=""))) for problem in error.problems
        ]
    except InvalidInput as error:
        return [Problem(error.argument or "", str(error))]
    except (ValueError, ImportError) as error:
        return [Problem("", str(error))]
    return []


# -- outputs ---------------------------------------------------------------------------------------

SINKS = ("tensorboard", "wandb", "mlflow")
MLFLOW_KEYS = {"tracking_uri": "tracking_uri", "experiment_name": "experiment", "run_name": "run_name"}


def translate_checkpoints(ledger: Ledger) -> None:
    every = "checkpointing.save_period"
    best = "checkpointing.keep_top_k"
    steps = ledger.positive_int("grpo.max_num_steps") or Config.steps
    if ledger.get("checkpointing.enabled") is False:
        ledger.translate("checkpointing.enabled", "checkpoint.every", steps, "only the last step is saved")
        ledger.set_key("checkpoint.keep_best", 0)  # a new best would be saved at once
        ledger.ignore(every, "checkpointing is off")
        ledger.ignore(best, "checkpointing is off")
    ledger.ignore("checkpointing.enabled", "rollgraph always saves checkpoints")
    ledger.translate(every, "checkpoint.every", ledger.integer(every))
    if ledger.get(best) is None:
        ledger.refuse(best, "rollgraph never keeps all checkpoints: set checkpoint.keep_best to a number")


def translate_sinks(ledger: Ledger) -> None:
    enabled = [name for name in SINKS if ledger.get(f"logger.{name}_enabled")]
    for name in SINKS:
        if name in enabled:
            ledger.translate(f"logger.{name}_enabled", "log.sinks", ["jsonl", *enabled])
        ledger.ignore(f"logger.{name}_enabled", "off")
    if "wandb" in enabled:
        for key in ledger.keys_below("logger.wandb."):
            ledger.translate(key, f"log.{key.removeprefix('logger.')}", ledger.get(key))
    if "mlflow" in enabled:
        for key in ledger.keys_below("logger.mlflow."):
            name = key.removeprefix("logger.mlflow.")
            if name in MLFLOW_KEYS:
                ledger.translate(key, f"log.mlflow.{MLFLOW_KEYS[name]}", ledger.get(key))
            ledger.refuse(key, f"log.mlflow takes {', '.join(MLFLOW_KEYS.values())}")


# -- the translation -------------------------------------------------------------------------------

TRANSLATORS = (
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
SECTION_ORDER = (
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
    settings: dict[str, Any]
    lines: tuple[LedgerLine, ...]  # one for each key of NeMo-RL, in the order of the file
    to_do: tuple[str, ...]  # steps for the user before a run can start

    def to_yaml(self) -> str:
        """rollgraph's config, below comments that list the remaining steps."""
        import yaml  # type: ignore[import-untyped, unused-ignore]

        notes = "".join(f"# To do: {text}\n" for text in self.to_do)
        return notes + str(yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True, width=110))

    def describe(self) -> str:
        """A report on every key. Those that need attention come last."""
        blocks = []
        for status in (Status.IGNORED, Status.TRANSLATED, Status.UNSUPPORTED):
            lines = [line for line in self.lines if line.status is status]
            rows = [f"  {line.location}: {line.key}: {short_yaml(line.value)} → {line.text}" for line in lines]
            blocks.append("\n".join([f"{status} ({len(lines)})", *rows]))
        to_do = [f"  {text}" for text in self.to_do]
        return "\n\n".join([*blocks, "\n".join([f"to do ({len(to_do)})", *to_do])])


def import_nemo(path: str | os.PathLike[str]) -> Translation:
    """Translate a file. Raises ConfigError if it cannot be read or is not a GRPO config of NeMo-RL."""
    return translate_tree(load_composed(path), path)


def translate_tree(tree: Node, path: str | os.PathLike[str]) -> Translation:
    ledger = Ledger(tree)
    _require_sections(ledger, path)
    for translate in TRANSLATORS:
        translate(ledger)
    ledger.finish()
    _limit_warmup(ledger)
    problems = find_problems(_make_translation(ledger).to_yaml(), ledger.ranks)
    while problems:
        if not any(ledger.revoke(problem.key, problem.text) for problem in problems):  # take back one, and look again
            raise ConfigError([f"{path}: its translation is not a valid config: {text}" for _, text in problems])
        problems = find_problems(_make_translation(ledger).to_yaml(), ledger.ranks)
    return _make_translation(ledger)


def _require_sections(ledger: Ledger, path: str | os.PathLike[str]) -> None:
    missing = [name for name in ("grpo", "policy") if not isinstance(ledger.get(name), dict)]
    if missing:
        present = ", ".join(ledger.tree.value) or "nothing"
        sections = " and no ".join(f"`{name}`" for name in missing)
        raise ConfigError([f"{path}: not a GRPO config of NeMo-RL: it has no {sections}, but {present}"])


def _make_translation(ledger: Ledger) -> Translation:
    settings = {name: ledger.settings[name] for name in (*SECTION_ORDER, *ledger.settings) if name in ledger.settings}
    return Translation(settings, tuple(ledger.lines[key] for key in ledger.leaves), tuple(ledger.to_do))


def _limit_warmup(ledger: Ledger) -> None:
    """NeMo-RL allows a warm-up that is longer than the run."""
    optimizer = ledger.settings.get("optimizer", {})
    warmup = optimizer.get("warmup_steps")
    steps = ledger.settings.get("steps") or Config.steps
    updates = steps * ledger.settings.get("algorithm", {}).get("minibatches", 1)
    if warmup is not None and warmup > updates:
        ledger.to_do.append(f"optimizer.warmup_steps was {warmup}, more than the {updates} updates of the run")
        optimizer["warmup_steps"] = updates
