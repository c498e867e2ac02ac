"""Data and rewards for a chat with a calculator: `python examples/calculator_chat.py FOLDER [SEED]` writes the data.

`calculator_chat.yaml` is a run that uses both. The tool itself is `rollgraph.rl.calculator:calculate`.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from rollgraph.types import Prompt

TRAINED = 1_000
HELD_OUT = 100


def reward(messages: list[dict[str, Any]], prompt: Prompt) -> float:
    """Reward a successful call a little and the right answer with 1; penalize a failed call."""
    last = messages[-1]
    if last["role"] == "tool":
        return -0.1 if last["content"].startswith("error") else 0.1
    numbers = re.findall(r"-?\d+", last["content"].replace(",", ""))
    return float(numbers[-1:] == [prompt.columns["answer"]])


def main(folder: Path, seed: int = 0) -> None:
    generator = random.Random(seed)
    answers: dict[str, int] = {}
    while len(answers) < TRAINED + HELD_OUT:
        a, b, c = generator.randint(100, 999), generator.randint(11, 99), generator.randint(100, 999)
        answers[f"What is {a} * {b} + {c}?"] = a * b + c
    rows = [{"prompt": question, "answer": str(answer)} for question, answer in answers.items()]
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "train.jsonl", rows[:TRAINED])
    write_lines(folder / "held_out.jsonl", rows[TRAINED:])


def write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
