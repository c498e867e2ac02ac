"""Translates datasets and environments into files of prompts, validation and reward functions."""

from __future__ import annotations

import re

from rollgraph.compat.nemo.ledger import Ledger
from rollgraph.config import Config

READY = "the file holds finished prompts, and `reward` names what rewards them"
OTHER_SCORES = (
    "math_verify compares expressions anywhere in a completion, as hf_math_verify does: its rewards are higher than "
    "those of dapo_math_verify, which compares the text after `Answer:`"
)
SETTINGS = ("processor", "env_name", "task_name", "input_key", "split", "train_split", "val_split", "subset", "seed")
PROMPT_FILES = ("prompt_file", "system_prompt_file")


def translate_data(book: Ledger) -> None:
    train_names = ("data.train.dataset_name", "data.dataset_name", "data.default.dataset_name")
    _translate_dataset(book, "train", ("data.train.data_path", "data.train_data_path"), train_names)
    validation_names = ("data.validation.dataset_name",)
    _translate_dataset(book, "validation", ("data.validation.data_path", "data.val_data_path"), validation_names)
    if "train" not in book.ours["data"]:
        book.put("data.train", "data/train.jsonl")
        book.to_do.append("data.train is a .jsonl or .parquet file with a column `prompt`")
    _translate_validation(book)
    for key in book.below("data."):
        name = key.rpartition(".")[2]
        if name in PROMPT_FILES and book.get(key) is not None:
            book.refuse(key, "put it into the column `prompt`, or into `messages`")
        elif name == "input_key" and book.get(key) != "prompt":
            book.refuse(key, "the column must be called `prompt`: rename it in the file")
        elif name == "split_validation_size" and book.get(key):
            book.refuse(key, "split the file with rollgraph.rl.data.split, and name the second part data.validation")
        elif name in (*SETTINGS, *PROMPT_FILES, "split_validation_size"):
            book.ignore(key, READY)


def _translate_validation(book: Ledger) -> None:
    """NeMo-RL validates every so many steps, and at the start and the end if asked to. rollgraph's `train` always
    validates before the first step and after the last, if there is a validation file."""
    key = "grpo.val_period"
    period = book.number(key) or 0
    at_start_or_end = book.get("grpo.val_at_start") or book.get("grpo.val_at_end")
    if period > 0:
        book.translate(key, "validation.every", period)
    elif at_start_or_end and book.ours["data"].get("validation") is not None:
        steps = book.count("grpo.max_num_steps") or Config.steps
        book.translate(key, "validation.every", steps, "only before the first step and after the last")
    else:
        book.translate(key, "data.validation", None, "no validation")


def _translate_dataset(book: Ledger, part: str, paths: tuple[str, ...], names: tuple[str, ...]) -> None:
    ours = f"data.{part}"
    whole = book.get(ours)
    for key in paths:
        if isinstance(book.get(key), str):
            book.translate(key, ours, book.get(key))
        elif book.get(key) is not None:
            book.refuse(key, "expected the path of a file")
    for key in names:
        if part in book.ours["data"] or book.get(key) is None:
            book.ignore(key, "the file counts, not the name")
            continue
        file = f"data/{_file_name(book.get(key))}.jsonl"
        book.translate(key, ours, file)
        book.to_do.append(f"{ours}: write {book.get(key)} to {file}, with columns `prompt` and `answer`")
    if isinstance(whole, list):
        book.refuse(ours, "rollgraph reads one file: concatenate the datasets")
    elif part == "validation" and whole is None:
        book.translate(ours, ours, None, "no validation")


def _file_name(dataset: object) -> str:
    return re.sub(r"[^\w.-]+", "_", str(dataset))


def translate_rewards(book: Ledger) -> None:
    """The environment `math` becomes math_verify against the answer's column; others need a reward function."""
    keys = [key for key in book.below("data.") if key.endswith(".output_key")]
    used = {str(book.get(key)) for key in book.below("data.") if key.endswith("env_name")}
    if not used:
        used = {key.split(".")[1] for key in book.below("env.")}
    if used <= {"math"}:
        _translate_math(book, keys)
    else:
        book.put("reward.functions", [{"name": "rewards.py:reward"}])
        words = ", ".join(sorted(used))
        book.to_do.append(f"reward.functions: write rewards.py:reward for {words}; see docs/rewards.md")
        for key in keys:
            book.ignore(key, "a reward function gets every column of the file")
    for key in book.below("env."):
        name = key.split(".")[1]
        if name not in used:
            book.ignore(key, "no dataset uses it")
        elif name != "math":
            book.refuse(key, "write a reward function, or give rollout.environment")


def _translate_math(book: Ledger, column_keys: list[str]) -> None:
    columns = [book.get(key) for key in column_keys if isinstance(book.get(key), str)]
    column = columns[0] if columns else "answer"
    functions = [{"name": "math_verify", "options": {"column": column}}]
    book.put("reward.functions", functions)
    for key in column_keys:
        book.translate(key, "reward.functions", functions)
    key = "env.math.math_verify_impl"
    if book.get(key) in (None, "hf_math_verify"):
        book.translate(key, "reward.functions", functions, "pip install 'rollgraph[math]'")
    elif key in book.leaves:
        book.refuse(key, OTHER_SCORES)
        book.to_do.append(f"reward.functions: {OTHER_SCORES}; to score as {book.get(key)}, write a function")
