"""Time GRPO steps and a cold `generate` on a CPU, beside TRL and transformers: `python benchmarks/cpu.py`.

| task | what it does |
|---|---|
| `tiny` | 2 layers of width 64, 16 prompts x 8 samples of 6 tokens, one thread |
| `quickstart` | the step of the starter `quickstart`: 64 x 8 samples of 5 tokens, two updates, one thread |
| `real` | the model of `--model` in fp32: 4 x 4 samples of 32 tokens, all cores, default settings |
| `generate` | the model of `--model` in bf16, in a new process: 30 tokens in, 24 out, all cores |

Both systems get the same weights, prompts, lengths, threads, rewards and optimizer. Every measurement is a separate
process, and the systems take turns. A figure is the median of `--repeats` processes and, within each, the median of the
steps after the first. Wall time starts with the process; CPU time is user and system time, summed over all threads.

The peer needs TRL and transformers: `--peer-python` names a Python that has them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from apart import report, run_apart, seconds_of_process

SYSTEMS = ("rollgraph", "peer")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
FIRST, LATER, COLD = "start to first step", "a later step", "start to last token"
STARTED = seconds_of_process() - time.perf_counter()  # add perf_counter(), whose clock is finer
QUESTIONS = 256
PROMPT, NEW = 30, 24  # tokens of `generate`


@dataclass(frozen=True)
class Task:
    """A GRPO step: prompts x samples of `new` tokens each, and a number of optimizer steps."""

    model: dict[str, int] | None  # of random weights; None: the model of --model
    prompts: int
    samples: int
    new: int
    steps: int  # timed after the first one
    threads: int
    updates: int = 1
    lr: float = 1e-6
    settings: dict[str, Any] = field(default_factory=dict)  # rollgraph's own


TASKS = {
    "tiny": Task({"layers": 2, "mlp": 128}, prompts=16, samples=8, new=6, steps=20, threads=1),
    "quickstart": Task(
        {"layers": 2, "mlp": 256},
        prompts=64,
        samples=8,
        new=5,
        steps=10,
        threads=1,
        updates=2,
        lr=5e-4,
        settings={"max_prompt_tokens": 8, "rows": 512, "token_buckets": (384,), "cache_gib": 0.06},
    ),
    "real": Task(None, prompts=4, samples=4, new=32, steps=4, threads=CORES),
}
GENERATE = "generate"

# Files of a model folder: the suffixes to link, and the files that name the end token.
MODEL_FILES = (".json", ".jinja", ".safetensors")
ENDS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


# -- inputs of both systems ------------------------------------------------------------------------


def write_tiny(task: Task, folder: Path) -> None:
    """Write random weights, and a tokenizer that turns each byte into a token."""
    import torch

    from rollgraph.model import Architecture, Decoder, save_model
    from rollgraph.tokenizer import ByteTokenizer

    assert task.model is not None
    torch.manual_seed(0)
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "max_length": 16, "tied": True}
    model = Decoder(Architecture("qwen2", vocabulary=259, **sizes, **task.model))
    model.reset_parameters(std=0.05)
    ByteTokenizer().save(folder)
    save_model(model, folder)


def link_without_end(model: Path, folder: Path) -> None:
    """Link a model with an end token that it never writes, so that completions have exactly the maximum length."""
    unused = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"][-1]
    end = {"eos_token": unused["content"], "eos_token_id": unused["id"]}
    for path in model.iterdir():
        if path.name in ENDS:
            settings = json.loads(path.read_text(encoding="utf-8"))
            settings |= {key: end[key] for key in end.keys() & settings.keys()}
            (folder / path.name).write_text(json.dumps(settings), encoding="utf-8")
        elif path.suffix in MODEL_FILES:
            (folder / path.name).symlink_to(path.resolve())


def questions(chat: bool) -> list[dict[str, Any]]:
    draw = random.Random(0)
    sums = [f"{draw.randint(10, 99)}+{draw.randint(10, 99)}" for _ in range(QUESTIONS)]
    if chat:
        return [{"prompt": [{"role": "user", "content": f"What is {s}? Give only the answer."}]} for s in sums]
    return [{"prompt": f"{s}="} for s in sums]


def text_of(tokens: int, folder: str) -> str:
    """Return a text of this many tokens."""
    from rollgraph.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    text = "Once"
    while len(tokenizer.encode(text)) < tokens:
        text += " upon"
    assert len(tokenizer.encode(text)) == tokens
    return text


def share_of_even(completions: list[Any], **_: Any) -> list[float]:
    """Reward the share of even bytes: it differs within a group, so there is something to learn."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(byte % 2 == 0 for byte in text.encode()) / max(1, len(text.encode())) for text in texts]


# -- measurements, each in a separate process ------------------------------------------------------


class Clock:
    """Notes when steps end. After the last one, it reports and exits, so that saving at the end does not count."""

    def __init__(self, steps: int, name: str) -> None:
        self._left = 1 + steps
        self._name = name
        self._ends: list[tuple[float, float]] = []
        self.lengths: list[float] = []

    def step_ends(self) -> None:
        self._ends.append(seconds())
        self._left -= 1
        if self._left == 0:
            later = [
                (after[0] - before[0], after[1] - before[1])
                for before, after in zip(self._ends[:-1], self._ends[1:], strict=True)
            ]
            leave(self._name, {FIRST: self._ends[0], LATER: medians(later)}, statistics.mean(self.lengths))


def seconds() -> tuple[float, float]:
    """Return the wall seconds since this process started, and the CPU seconds of its threads and child processes."""
    times = os.times()
    return STARTED + time.perf_counter(), time.process_time() + times.children_user + times.children_system


def versions(*packages: str) -> str:
    return ", ".join(f"{package} {version(package)}" for package in packages)


def leave(name: str, figures: dict[str, tuple[float, float]], length: float) -> NoReturn:
    report({"name": name, "figures": figures, "length": length})
    sys.stdout.flush()
    os._exit(0)


def medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    wall, cpu = zip(*pairs, strict=True)
    return statistics.median(wall), statistics.median(cpu)


def rollgraph_steps(task: Task, folder: str) -> None:
    from rollgraph import Trainer

    clock = Clock(task.steps, versions("rollgraph", "torch"))

    def on_step(_: int, metrics: dict[str, float]) -> None:
        clock.lengths.append(metrics["length/mean"])
        clock.step_ends()

    with tempfile.TemporaryDirectory() as output:
        Trainer(
            model={"path": folder, "dtype": "float32"},
            train=questions(chat=task.model is None),
            rewards=share_of_even,
            algorithm={"minibatches": task.updates},
            callbacks=on_step,
            steps=1000,
            prompts_per_step=task.prompts,
            samples_per_prompt=task.samples,
            max_tokens=task.new,
            lr=task.lr,
            output=output,
            **task.settings,
        ).train()


def peer_steps(task: Task, folder: str) -> None:
    """Train with TRL at its fastest here: one microbatch for each update, without recomputation."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = Clock(task.steps, versions("trl", "transformers", "torch"))

    class StepEnds(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % task.updates == 0:
                clock.step_ends()

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        clock.lengths.append(statistics.mean(map(len, completion_ids)))
        return share_of_even(completions)

    with tempfile.TemporaryDirectory() as output:
        settings = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=task.prompts * task.samples // task.updates,
            steps_per_generation=task.updates,
            num_generations=task.samples,
            max_completion_length=task.new,
            beta=0.0,
            loss_type="grpo",
            learning_rate=task.lr,
            lr_scheduler_type="constant",
            max_steps=1000,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        GRPOTrainer(
            folder,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(questions(chat=task.model is None)),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            callbacks=[StepEnds()],
        ).train()


def rollgraph_generate(folder: str, text: str) -> None:
    from rollgraph.cli import main as rollgraph

    assert rollgraph(["generate", folder, "--prompt", text, "--max-tokens", str(NEW), "--ignore-eos", "--quiet"]) == 0
    leave(versions("rollgraph", "torch"), {COLD: seconds()}, NEW)


def peer_generate(folder: str, text: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    inputs = tokenizer(text, return_tensors="pt")
    assert inputs["input_ids"].shape[1] == PROMPT
    output = model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, top_k=0)
    print(tokenizer.decode(output[0][PROMPT:]))
    leave(versions("transformers", "torch"), {COLD: seconds()}, len(output[0]) - PROMPT)


MEASURES: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "rollgraph": (rollgraph_steps, rollgraph_generate),
    "peer": (peer_steps, peer_generate),
}


def measure(system: str, name: str, folder: str, text: str) -> None:
    steps, generate = MEASURES[system]
    if name == GENERATE:
        generate(folder, text)
    else:
        steps(TASKS[name], folder)


# -- all tasks and their table ---------------------------------------------------------------------


def prepare(name: str, model: str | None, folder: Path) -> str:
    """Write the folder that both systems load, and return its path."""
    if name == GENERATE:
        return str(model)
    folder.mkdir()
    if TASKS[name].model is None:
        link_without_end(Path(str(model)), folder)
    else:
        write_tiny(TASKS[name], folder)
    return str(folder)


def compare(name: str, folder: str, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Measure both systems in turn."""
    threads = CORES if name == GENERATE else TASKS[name].threads
    text = text_of(PROMPT, folder) if name == GENERATE else ""
    pythons = {"rollgraph": sys.executable, "peer": options.peer_python}
    reports: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    for repeat in range(options.repeats):
        for system in SYSTEMS:
            print(f"== {name}, {system}, {repeat + 1} of {options.repeats}", flush=True)
            reports[system] += run_apart(
                __file__,
                ["--measure", system, name, folder, text],
                python=pythons[system],
                environment={"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
                limit_s=options.limit_s,
                quiet=True,
            )
    for system, own in reports.items():
        for seen in own:
            print(f"{system}: {seen['figures']}, {seen['length']:.2f} tokens in each completion")
    return reports


def rows_of(name: str, reports: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a table row for each figure of a task, with "-" for a system that did not finish."""
    rows = []
    for what in (COLD,) if name == GENERATE else (FIRST, LATER):
        pairs = [[seen["figures"][what] for seen in reports[system]] for system in SYSTEMS]
        wall, cpu = zip(*(medians(each) if each else (None, None) for each in pairs), strict=True)
        rows.append(f"| `{name}`: {what} | {' | '.join([*cells(*wall), *cells(*cpu)])} |")
    return rows


def cells(own: float | None, peer: float | None) -> tuple[str, str, str]:
    seconds = tuple("-" if value is None else f"{value:.3f} s" for value in (own, peer))
    return *seconds, "-" if own is None or peer is None else f"**{own / peer:.2f}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*TASKS, GENERATE], default=[*TASKS, GENERATE], help="tasks")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each measurement")
    parser.add_argument("--peer-python", default=sys.executable, help="a Python with TRL and transformers")
    parser.add_argument("--model", help="folder of the real model; without it, `real` and `generate` are skipped")
    parser.add_argument("--limit-s", type=float, default=900, help="time limit of one process, in seconds")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # arguments of a measuring process
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    names = [name for name in options.only if options.model or (name in TASKS and TASKS[name].model is not None)]
    rows, systems = [], set()
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            reports = compare(name, prepare(name, options.model, Path(scratch) / name), options)
            rows += rows_of(name, reports)
            systems |= {seen["name"] for own in reports.values() for seen in own}
    print(f"\n{CORES} cores; {'; '.join(sorted(systems))}; medians of {options.repeats} processes\n")
    print("| task | rollgraph | peer | ratio | rollgraph, CPU | peer, CPU | ratio |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
