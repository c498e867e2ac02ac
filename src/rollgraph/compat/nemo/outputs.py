"""What a run leaves: checkpoints, and metrics in their sinks."""

from __future__ import annotations

from rollgraph.compat.nemo.ledger import Ledger
from rollgraph.config import Config

SINKS = ("tensorboard", "wandb", "mlflow")


def translate_checkpoints(book: Ledger) -> None:
    every, best = "checkpointing.save_period", "checkpointing.keep_top_k"
    steps = book.count("grpo.max_num_steps") or Config.steps
    if book.get("checkpointing.enabled") is False:
        book.translate("checkpointing.enabled", "checkpoint.every", steps, "the last step always has one")
        book.ignore(every, "checkpointing is off")
    book.ignore("checkpointing.enabled", "on, as always")
    book.translate(every, "checkpoint.every", book.number(every))
    if book.get(best) is None:
        book.refuse(best, "not all are kept: checkpoint.keep_best is a number")


def translate_sinks(book: Ledger) -> None:
    on = [name for name in SINKS if book.get(f"logger.{name}_enabled")]
    for name in SINKS:
        if name in on:
            book.translate(f"logger.{name}_enabled", "log.sinks", ["jsonl", *on])
        book.ignore(f"logger.{name}_enabled", "off")
    for name in [name for name in on if name != "tensorboard"]:
        for key in book.below(f"logger.{name}."):
            ours = key.removeprefix("logger.")
            book.translate(key, f"log.{ours}".replace("mlflow.experiment_name", "mlflow.experiment"), book.get(key))
