"""Make the data, products and sums that need a calculator: `python make_data.py [SEED]` writes it to `data`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

TRAINED = 1_000
HELD_OUT = 200
INSTRUCTION = "Write <calc>...</calc> to use a calculator: its result follows. End with the answer."


def main(folder: Path, seed: int = 0) -> None:
    generator = random.Random(seed)
    answers: dict[str, int] = {}
    while len(answers) < TRAINED + HELD_OUT:
        a, b, c = generator.randint(100, 999), generator.randint(11, 99), generator.randint(100, 999)
        answers[f"{a} * {b} + {c}"] = a * b + c
    rows = [{"prompt": f"What is {text}? {INSTRUCTION}", "answer": str(value)} for text, value in answers.items()]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:TRAINED]), ("held_out", rows[TRAINED:])):
        lines = [json.dumps(row) + "\n" for row in part]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path("data"), int(sys.argv[1]) if len(sys.argv) > 1 else 0)
