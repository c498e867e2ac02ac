"""The run of config.yaml, in Python: `python train.py`."""

from __future__ import annotations

from typing import Any

from rewards import boxed

from rollgraph import Trainer

SETTINGS = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "prompts_per_step": 32,
    "max_prompt_tokens": 512,
    "too_long": "drop",
    "chat": True,
    "samples_per_prompt": 8,
    "max_tokens": 512,
    "rows": 256,
    "lr": 1e-6,
    "validation_every": 20,
    "validation_max_prompts": 200,
}


def main(steps: int = 200, **changes: Any) -> None:
    trainer = Trainer(
        train="data/train.jsonl",
        validation="data/held_out.jsonl",
        rewards=["math_verify", (boxed, 0.1)],
        algorithm="grpo",
        output="run_python",
        **{**SETTINGS, **changes},
    )
    with trainer.train(steps=steps) as run:
        print(run.evaluate())
        run.export("exported")


if __name__ == "__main__":
    main()
