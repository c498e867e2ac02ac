"""Translates what a run leaves behind: checkpoints, and metrics in their sinks."""

from __future__ import annotations

from rollgraph.compat.nemo.ledger import Ledger
from rollgraph.config import Config

SINKS = ("tensorboard", "wandb", "mlflow")
MLFLOW_KEYS = {"tracking_uri": "tracking_uri", "experiment_name": "experiment", "run_name": "run_name"}


def translate_checkpoints(book: Ledger) -> None:
    every = "checkpointing.save_period"
    best = "checkpointing.keep_top_k"
    steps = book.count("grpo.max_num_steps") or Config.steps
    if book.get("checkpointing.enabled") is False:
        book.translate("checkpointing.enabled", "checkpoint.every", steps, "only the last step is saved")
        book.put("checkpoint.keep_best", 0)  # a new best would be saved at once
        book.ignore(every, "checkpointing is off")
        book.ignore(best, "checkpointing is off")
    book.ignore("checkpointing.enabled", "rollgraph always saves checkpoints")
    book.translate(every, "checkpoint.every", book.number(every))
    if book.get(best) is None:
        book.refuse(best, "rollgraph never keeps all checkpoints: set checkpoint.keep_best to a number")


def translate_sinks(book: Ledger) -> None:
    on = [name for name in SINKS if book.get(f"logger.{name}_enabled")]
    for name in SINKS:
        if name in on:
            book.translate(f"logger.{name}_enabled", "log.sinks", ["jsonl", *on])
        book.ignore(f"logger.{name}_enabled", "off")
    if "wandb" in on:
        for key in book.below("logger.wandb."):
            book.translate(key, f"log.{key.removeprefix('logger.')}", book.get(key))
    if "mlflow" in on:
        for key in book.below("logger.mlflow."):
            name = key.removeprefix("logger.mlflow.")
            if name in MLFLOW_KEYS:
                book.translate(key, f"log.mlflow.{MLFLOW_KEYS[name]}", book.get(key))
            book.refuse(key, f"log.mlflow takes {', '.join(MLFLOW_KEYS.values())}")
