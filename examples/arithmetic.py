"""Makes the data of the quickstart: two-digit additions, `python examples/arithmetic.py FOLDER [SEED]`.

8,000 problems to train on, 2,000 held out, and demonstrations for the warm start whose digits are often wrong: they
teach the form of an answer, and some arithmetic, and leave the rest to be learned from rewards.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NOISE = 0.4  # of a demonstration's digits


def main(folder: Path, seed: int = 0) -> None:
    generator = random.Random(seed)
    problems = [(a, b) for a in range(100) for b in range(100)]
    generator.shuffle(problems)
    rows = [{"prompt": f"{a:02}+{b:02}=", "answer": str(a + b)} for a, b in problems]
    train, held_out = rows[:8000], rows[8000:]
    demonstrations = []
    for row in generator.choices(train, k=100_000):
        digits = [generator.choice("0123456789") if generator.random() < NOISE else digit for digit in row["answer"]]
        demonstrations.append({"prompt": row["prompt"], "completion": "".join(digits)})
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("train", train), ("held_out", held_out), ("demonstrations", demonstrations)):
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
