"""Writes run folders without training, with everything that the page can show. A seed determines all bytes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

# Text with which a model could break a page: tags, entities, right-to-left marks, control characters.
HOSTILE = (
    "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>&amp;&lt;b&gt; </textarea></title> "
    "\u202eright to left\u202c \u05d0\u05d1\u05d2 \0\x1b"
)
GIB = 2**30
PHASES = {"generate": 2.1, "reward": 0.15, "score": 0.4, "train": 1.3, "save": 0.05}
SPLITS = ("train", "train", "dropped", "validation")  # of the four groups of a step
QUESTIONS = (
    "A baker fills 7 trays with 12 rolls each and sells 59 of them. How many rolls are left?",
    "Tom reads 18 pages on each of 5 days. The book has 132 pages. How many pages remain?",
    "A train leaves at 14:20 and arrives at 17:05. How many minutes does the journey take?",
    "Three friends share 96 marbles so that each has the same number. How many does each get?",
)
WORDS = ("First", "we", "multiply", "the", "trays", "by", "rolls", "on", "each", "and", "then", "subtract", "what")
PLAN = (
    ("parameters", 0.99, ("generate", "score", "train")),
    ("optimizer", 5.9, ("generate", "score", "train")),
    ("key/value cache", 40.0, ("generate",)),
    ("activations", 22.0, ("train",)),
)


class RunWriter:
    """Writes a run folder step by step, so that a test can let it grow."""

    def __init__(self, folder: Path, *, steps: int = 60, seed: int = 0, lr: float = 1e-6) -> None:
        self.folder = folder
        self.steps = steps
        self._random = random.Random(seed)
        folder.mkdir(parents=True)
        config = {"steps": steps, "seed": seed, "optimizer": {"lr": lr, "schedule": "linear"}, "rollout": {"rows": 256}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        start = {"time": "2026-11-16T09:00:00+00:00", "first_step": 0, "ranks": 2, "device": "NVIDIA H200"}
        self._append("starts.jsonl", [start])

    def take_steps(self, first: int, last: int, *, samples_every: int = 5) -> None:
        for step in range(first, last):
            self._append("metrics.jsonl", [self._row(step)])
            if step % samples_every == 0:
                for group in range(len(SPLITS)):
                    self._append("samples.jsonl", [self._sample(step, group) for _ in range(6)])

    def add_row(self, step: int, **metrics: float) -> None:
        """Append the metrics of a step, with more than the usual ones."""
        self._append("metrics.jsonl", [self._row(step) | metrics])

    def add_sample(self, step: int, completion: str, **fields: Any) -> None:
        """Append a sample, in group 90 unless `fields` has another."""
        record = {"step": step, "split": "train", "group": 90, "prompt_id": 90, "prompt": "Say something."}
        record |= {"columns": {}, "completion": completion, "reward": 0.0, "rewards": {"correct": 0.0}}
        record |= {"advantage": 0.0, "finish_reason": "stop", "tokens": 12, "spans": []}
        self._append("samples.jsonl", [record | fields])

    def finish(self) -> None:
        graphs = [_graph("prefill 512", 214, 2**13, 60), _graph("decode 256", 269, 2**25, 30_400)]
        graphs.append(_graph("train 4096", 1808, 2 * GIB, 480))
        graphs[-1] |= {"backward_replays": 480, "eager_runs": {"a microbatch of 5,120 tokens fits no bucket": 3}}
        self._write("graphs.json", {"pool_bytes": 3 * GIB, "notes": [], "graphs": graphs})
        lines = [{"name": name, "nbytes": int(size * GIB), "where": "device", "phases": p} for name, size, p in PLAN]
        chosen = {"memory.logits": "chunks"}
        reasons = {"memory.logits": "whole would need 141.20 GiB on the device, with 4.84 GiB in reserve"}
        record = {"chosen": chosen, "reasons": reasons, "device": "cuda", "device_bytes": 139 * GIB, "lines": lines}
        self._write("memory.json", record)

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(content))

    def _row(self, step: int) -> dict[str, float]:
        noise = self._random.gauss
        done = 1 - math.exp(-2.2 * step / self.steps)
        length = 180 + 90 * done + noise(0, 9)
        seconds = {phase: mean * (1 + abs(noise(0, 0.12))) for phase, mean in PHASES.items()}
        total = sum(seconds.values()) + 0.08
        row = {"step": step, "reward": 0.08 + 0.75 * done + noise(0, 0.035), "reward/std": 0.45 - 0.2 * done}
        row |= {"loss": noise(0, 0.01), "policy/kl": 0.12 * done**2 + 0.002, "policy/entropy": 0.9 - 0.55 * done}
        row |= {"length/mean": length, "length/max": 512.0, "length/truncated": 0.18 - 0.15 * done}
        row |= {"groups/frac_reward_zero_std": 0.3 + 0.6 * done, "policy/token_mult_prob_error": 1.0}
        row |= {"optimizer/grad_norm": 0.4 + abs(noise(0, 0.15)), "optimizer/lr": 1e-6 * (1 - step / self.steps)}
        row |= {"speed/seconds": total, "speed/tokens_per_second": 256 * length / total, "speed/memory_gib": 61.25}
        row |= {f"speed/seconds/{phase}": value for phase, value in seconds.items()}
        row |= {"speed/memory_gib/generate": 47.5, "speed/memory_gib/train": 30.25}
        for rank in range(2):
            row |= {f"speed/ranks/{rank}/seconds/{p}": value * (1 + 0.06 * rank) for p, value in seconds.items()}
            row[f"speed/ranks/{rank}/memory_gib"] = 61.25
        if step % 10 == 0:
            row |= {"validation/reward": 0.1 + 0.7 * done, "validation/accuracy": 0.08 + 0.68 * done}
        return row

    def _sample(self, step: int, group: int) -> dict[str, Any]:
        split = SPLITS[group]
        right = split != "dropped" and self._random.random() < 0.2 + 0.7 * step / self.steps
        boxed = float(self._random.random() < 0.7)
        thought = " ".join(self._random.choices(WORDS, k=self._random.randint(24, 60))) + ".\n\n"
        answer = f"So the answer is \\boxed{{{25 if right else 31}}}."
        pieces = [("turn", thought + answer)]
        if group == 1:
            pieces = [("turn", thought + 'calculator("7 * 12 - 59")\n'), ("reply", "25\n"), ("turn", answer)]
        spans: list[dict[str, Any]] = []
        tokens: list[str] = []
        for kind, text in pieces:
            parts = text.replace(" ", "\0 ").split("\0")  # a word and the space before it, as tokenizers split
            spans.append({"start": len(tokens), "end": len(tokens) + len(parts), "kind": kind, "text": text})
            tokens += parts
        reward = right + 0.1 * boxed
        advantage = 2 * reward - 1 if split == "train" else None
        record = {"step": step, "split": split, "group": group, "prompt_id": group, "prompt": QUESTIONS[group]}
        record |= {"columns": {"answer": "25"}, "completion": "".join(tokens), "tokens": len(tokens), "spans": spans}
        record |= {"reward": reward, "rewards": {"correct": float(right), "boxed": boxed}, "advantage": advantage}
        record |= {"weighted_rewards": {"correct": float(right), "boxed": 0.1 * boxed}}
        record |= {"finish_reason": "stop" if right or self._random.random() < 0.7 else "length"}
        return record | {"token_values": self._token_values(tokens, advantage)}

    def _token_values(self, tokens: list[str], advantage: float | None) -> dict[str, Any]:
        logprobs = [-self._random.expovariate(1.4) for _ in tokens]
        values: dict[str, Any] = {
            "text": tokens,
            "logprob": logprobs,
            "entropy": [min(3, -it * 0.8) for it in logprobs],
        }
        values["kl"] = [self._random.gauss(0.05, 0.12) for _ in tokens]
        if advantage is None:
            return values | {"absent": {"advantage": "it was not trained on", "ratio": "it was not trained on"}}
        ratios = [math.exp(self._random.gauss(0, 0.08)) for _ in tokens]
        return values | {"advantage": [advantage] * len(tokens), "ratio": ratios}


def _graph(name: str, operations: int, owned: int, replays: int) -> dict[str, Any]:
    counts = {"captures": 1, "replays": replays, "backward_replays": 0, "eager_runs": {}, "dropped": 0}
    graph = {"name": name, "backend": "cuda", "surface": "()", "operations": operations, "bytes_owned": owned}
    return graph | counts | {"notes": []}
