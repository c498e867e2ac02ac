"""Their datasets and environments as files of prompts and reward functions."""

from __future__ import annotations

import re

from rollgraph.compat.nemo.ledger import Ledger

READY = "a file has its prompts ready, and what rewards them is in `reward`"
OTHER_SCORES = (
    "math_verify compares expressions wherever they stand in a completion, as hf_math_verify does: other rewards, "
    "higher than those of dapo_math_verify, which compares the text after `Answer:`"
)
SETTINGS = ("processor", "env_name", "task_name", "input_key", "split", "train_split", "val_split", "subset", "seed")


def translate_data(book: Ledger) -> None:
    _translate_dataset(book, "train", ("data.train.data_path", "data.train_data_path"))
    _translate_dataset(book, "validation", ("data.validation.data_path", "data.val_data_path"))
    if "train" not in book.ours["data"]:
        book.put("data.train", "data/train.jsonl")
        book.to_do.append("data.train is a .jsonl or .parquet file with a column `prompt`")
    if (period := book.number("grpo.val_period") or 0) > 0:
        book.translate("grpo.val_period", "validation.every", period)
    else:
        book.translate("grpo.val_period", "data.validation", None, "no validation")
    for key in book.below("data."):
        name = key.rpartition(".")[2]
        if name in ("prompt_file", "system_prompt_file") and book.get(key) is not None:
            book.refuse(key, "put it into the column `prompt`, or into `messages`")
        elif name == "input_key" and book.get(key) != "prompt":
            book.refuse(key, "the column is called `prompt`: rename it in the file")
        elif name == "split_validation_size" and book.get(key):
            book.refuse(key, "split the file first, by rollgraph.rl.data.split, and name the other as data.validation")
        elif name in (*SETTINGS, "prompt_file", "system_prompt_file", "split_validation_size"):
            book.ignore(key, READY)


def _translate_dataset(book: Ledger, part: str, paths: tuple[str, ...]) -> None:
    ours = f"data.{part}"
    whole = book.get(ours)
    for key in paths:
        if isinstance(book.get(key), str):
            book.translate(key, ours, book.get(key))
        elif book.get(key) is not None:
            book.refuse(key, "expected the path of a file")
    names = [
        f"data.{part}.dataset_name",
        *(("data.dataset_name", "data.default.dataset_name") if part == "train" else ()),
    ]
    for key in names:
        if part in book.ours["data"] or book.get(key) is None:
            book.ignore(key, "the file is what counts")
            continue
        file = f"data/{_file_name(book.get(key))}.jsonl"
        book.translate(key, ours, file)
        book.to_do.append(f"{ours}: write {book.get(key)} to {file}, with columns `prompt` and `answer`")
    if isinstance(whole, list):
        book.refuse(ours, "there is one file: put the datasets together")
    elif part == "validation" and whole is None:
        book.translate(ours, ours, None, "no validation")


def _file_name(dataset: object) -> str:
    return re.sub(r"[^\w.-]+", "_", str(dataset))


def translate_rewards(book: Ledger) -> None:
    """The environment `math` is math-verify against the answer's column; any other has to be brought."""
    keys = [key for key in book.below("data.") if key.endswith(".output_key")]
    columns = [book.get(key) for key in keys if isinstance(book.get(key), str)]
    used = [str(book.get(key)) for key in book.below("data.") if key.endswith("env_name")]
    used = used or [key.split(".")[1] for key in book.below("env.")]
    if set(used) <= {"math"}:
        functions = [{"name": "math_verify", "options": {"column": columns[0] if columns else "answer"}}]
        book.put("reward.functions", functions)
        for key in keys:
            book.translate(key, "reward.functions", functions)
        key = "env.math.math_verify_impl"
        if book.get(key) in (None, "hf_math_verify"):
            book.translate(key, "reward.functions", functions, "pip install 'rollgraph[math]'")
        elif key in book.leaves:
            book.refuse(key, OTHER_SCORES)
            book.to_do.append(f"reward.functions: {OTHER_SCORES}; to score as {book.get(key)}, write a function")
    else:
        book.put("reward.functions", [{"name": "rewards.py:reward"}])
        words = ", ".join(sorted(set(used)))
        book.to_do.append(f"reward.functions: write rewards.py:reward for {words}; see docs/rewards.md")
        for key in keys:
            book.ignore(key, "every column of the file goes to the reward function")
    for key in book.below("env."):
        name = key.split(".")[1]
        if name not in used:
            book.ignore(key, "no dataset uses it")
        elif name != "math":
            book.refuse(key, "write a reward function, or give rollout.environment")
