"""Make the data, two-digit additions: `python make_data.py [SEED]` writes it to the folder `data`.

There are 8,000 training problems, 2,000 held-out problems, and demonstrations for the warm start. Some digits of the
demonstrations are wrong: they teach the format of an answer and some arithmetic, and leave the rest to be learned from
rewards.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NOISE = 0.15  # probability that a digit of a demonstration is replaced by a random one
TRAINED = 8_000
DEMONSTRATIONS = 100_000


def main(folder: Path, seed: int = 0) -> None:
    generator = random.Random(seed)
    problems = [(a, b) for a in range(100) for b in range(100)]
    generator.shuffle(problems)
    rows = [{"prompt": f"{a:02}+{b:02}=", "answer": str(a + b)} for a, b in problems]
    train = rows[:TRAINED]
    held_out = rows[TRAINED:]

    demonstrations = []
    for row in generator.choices(train, k=DEMONSTRATIONS):
        completion = add_noise(row["answer"], generator)
        demonstrations.append({"prompt": row["prompt"], "completion": completion})

    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "train.jsonl", train)
    write_lines(folder / "held_out.jsonl", held_out)
    write_lines(folder / "demonstrations.jsonl", demonstrations)


def add_noise(answer: str, generator: random.Random) -> str:
    digits = []
    for digit in answer:
        if generator.random() < NOISE:
            digit = generator.choice("0123456789")
        digits.append(digit)
    return "".join(digits)


def write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path("data"), int(sys.argv[1]) if len(sys.argv) > 1 else 0)
