"""Make the data: GSM8K, or similar word problems that need no download. Writes to the folder `data`.

python make_data.py                 GSM8K from the Hugging Face Hub; if that fails, generated word problems
python make_data.py openai/gsm8k    GSM8K from the Hub, or an error
python make_data.py FOLDER          GSM8K from files in a folder: train*.jsonl or .parquet, and test*
python make_data.py made            generated word problems; the same for the same --seed
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

GSM8K = "openai/gsm8k"
INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."
TRAINED = 1_000  # generated problems; GSM8K has 7,473
HELD_OUT = 200
NAMES = ("Ada", "Ben", "Chen", "Dana", "Emeka", "Fatima", "Goran", "Hana")
Row = dict[str, str]


def main(folder: Path, source: str = "made", seed: int = 0) -> None:
    if source == "made":
        train, held_out = make_problems(seed)
    else:
        files = Path(source) if Path(source).is_dir() else download(source)
        train, held_out = read_gsm8k(files, "train"), read_gsm8k(files, "test")
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "train.jsonl", train)
    write_lines(folder / "held_out.jsonl", held_out)


def write_lines(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_row(question: str, answer: str) -> Row:
    return {"prompt": f"{question} {INSTRUCTION}", "answer": answer}


# -- GSM8K -----------------------------------------------------------------------------------------


def download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise SystemExit(f"{name} is no folder, and the Hub needs: pip install 'rollgraph[hub,parquet]'") from None
    return Path(snapshot_download(name, repo_type="dataset", allow_patterns=["main/*"]))


def read_gsm8k(folder: Path, part: str) -> list[Row]:
    """The rows of all files of a split. A solution ends with its answer: `... #### 72`."""
    files = [file for file in sorted(folder.rglob(f"{part}*")) if file.suffix in (".jsonl", ".parquet")]
    if not files:
        raise SystemExit(f"{folder} has no file {part}*.jsonl or {part}*.parquet")
    rows = []
    for file in files:
        for entry in read_entries(file):
            answer = entry["answer"].rpartition("####")[2].strip().replace(",", "")
            rows.append(make_row(entry["question"], answer))
    return rows


def read_entries(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(file).to_pylist()
    else:
        yield from map(json.loads, file.read_text(encoding="utf-8").splitlines())


# -- generated word problems -----------------------------------------------------------------------


def make_problems(seed: int) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows, without overlap."""
    generator = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < TRAINED + HELD_OUT:
        question, answer = make_problem(generator)
        rows[question] = make_row(question, str(answer))
    problems = list(rows.values())
    return problems[:TRAINED], problems[TRAINED:]


def make_problem(generator: random.Random) -> tuple[str, int]:
    name = generator.choice(NAMES)
    each = generator.randint(3, 30)
    count = generator.randint(2, 12)
    more = generator.randint(2, 40)
    total = each * count
    fewer = generator.randint(1, total - 1)
    return generator.choice(
        [
            (
                f"{name} has {more} marbles and buys {count} bags with {each} marbles each. "
                f"How many marbles does {name} have now?",
                more + total,
            ),
            (
                f"{name} reads {each} pages a day for {count} days, and then another {more} pages. "
                f"How many pages has {name} read?",
                total + more,
            ),
            (
                f"A train has {count} cars with {each} seats each, and {fewer} seats are empty. How many are taken?",
                total - fewer,
            ),
            (
                f"{name} earns {each} dollars an hour, works for {count} hours and spends {fewer} dollars. "
                f"How many dollars are left?",
                total - fewer,
            ),
            (
                f"A shop sells {each} pens on Monday and {count} times as many on Tuesday. "
                f"How many pens does it sell on both days?",
                each + total,
            ),
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="a dataset on the Hub, a folder, or `made`")
    parser.add_argument("--seed", type=int, default=0, help="for generated problems (default: 0)")
    options = parser.parse_args()
    if options.source is not None:
        main(Path("data"), options.source, options.seed)
    else:
        try:
            main(Path("data"), GSM8K)
        except (Exception, SystemExit) as error:  # no package, no network, a proxy, ...
            print(f"cannot get {GSM8K} ({error}): writing generated word problems instead")
            main(Path("data"), "made", options.seed)
