"""The run of config.yaml, in Python: `python train.py [MODEL [STEPS]]`."""

from __future__ import annotations

import sys

from rewards import boxed

from rollgraph import Trainer


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct", steps: int = 200) -> None:
    trainer = Trainer(
        model=model,
        train="data/train.jsonl",
        validation="data/held_out.jsonl",
        prompts_per_step=32,
        max_prompt_tokens=512,
        too_long="drop",
        chat=True,
        rewards=["math_verify", (boxed, 0.1)],
        algorithm="grpo",
        samples_per_prompt=8,
        max_tokens=512,
        lr=1e-6,
        output="run_python",
        callbacks=[lambda step, metrics: print(step, metrics["reward"])],
    )
    run = trainer.train(steps=steps)
    print(run.evaluate("data/held_out.jsonl"))
    run.export("exported")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
