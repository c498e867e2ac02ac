"""The run of config.yaml, in Python: `python train.py`."""

from __future__ import annotations

from typing import Any

from rewards import boxed

from rollgraph import Trainer

SETTINGS = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "steps": 200,
    "output": "run",
    "prompts_per_step": 32,
    "max_prompt_tokens": 512,
    "too_long": "drop",
    "chat": True,
    "samples_per_prompt": 8,
    "max_tokens": 512,
    "rows": 256,
    "workers": 4,  # for the rewards
    "lr": 1e-6,
    "microbatch_tokens": 4096,
    "validation_every": 20,
    "validation_max_prompts": 200,
}


def make_trainer(**changes: Any) -> Trainer:
    return Trainer(
        train="data/train.jsonl",
        validation="data/held_out.jsonl",
        rewards=[{"name": "math_verify", "label": "correct"}, (boxed, 0.1)],
        algorithm="grpo",
        **{**SETTINGS, **changes},
    )


def main(**changes: Any) -> None:
    with make_trainer(**changes).train() as run:
        print(run.evaluate())
        run.export("exported")


if __name__ == "__main__":
    main()
