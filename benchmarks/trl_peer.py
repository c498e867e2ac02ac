"""TRL's GRPOTrainer as a peer for `grpo_step.py`, which starts this file as a separate process.

Before that process starts, `write_model` writes the folder from which TRL reads weights and tokenizer.
"""

from __future__ import annotations

import argparse
import random
import time
from importlib.metadata import version
from itertools import pairwise
from string import ascii_lowercase
from typing import Any

import torch
from apart import report, seconds_of_process
from common import QWEN_1_5B, sample_without_flashinfer, synchronize, transformers_config

from rollgraph.tokenizer import ByteTokenizer

# By default, TRL uses fp32 weights under autocast and recomputes activations. It is faster without either, but then
# trains bf16 weights without an fp32 copy, which loses updates of the usual size.
FASTEST: dict[str, Any] = {"gradient_checkpointing": False, "model_init_kwargs": {"dtype": "bfloat16"}}
# By default, TRL weights each token by the ratio of its probabilities in training and in vLLM, which takes another
# scoring pass. Without it, the step is faster, but off-policy by the difference between the two systems.
VLLM = {
    **FASTEST,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "generation_kwargs": {"ignore_eos": True, "detokenize": False},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "fastest": FASTEST,
    "vllm": VLLM,
    "vllm-uncorrected": {**VLLM, "vllm_importance_sampling_correction": False},
}
MICRO_BATCH = 16


def write_model(folder: str) -> None:
    """Write random weights in the 1.5B shape, and a tokenizer that turns each byte into a token."""
    from transformers import Qwen2ForCausalLM

    ByteTokenizer().save(folder)
    with torch.device("cuda"):
        Qwen2ForCausalLM(transformers_config(QWEN_1_5B)).to(torch.bfloat16).save_pretrained(folder)


def reward(completions: list[str], **_: Any) -> list[float]:
    return torch.rand(len(completions)).tolist()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Take a warm-up step and then `repeats` more; return the seconds of the fastest, and of the start."""
    sample_without_flashinfer()

    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []  # when each step was finished
    start: list[float] = []  # seconds of the process by then

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            ends.append(time.perf_counter())
            start.append(seconds_of_process())

    chosen = dict(SETTINGS[options.settings])
    if chosen.get("use_vllm"):
        chosen["vllm_max_model_length"] = options.prompt + options.new
    settings = GRPOConfig(
        output_dir=options.folder,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=options.prompts * options.samples // MICRO_BATCH,
        num_generations=options.samples,
        max_completion_length=options.new,
        beta=0.01,
        max_steps=options.repeats + 1,
        bf16=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        **chosen,
    )
    letters = random.Random(0)
    rows = [
        {"prompt": "".join(letters.choices(ascii_lowercase, k=options.prompt))}
        for _ in range(options.prompts * (options.repeats + 1))
    ]
    trainer = GRPOTrainer(
        options.folder,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(options.folder, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    name = f"TRL {version('trl')}, {options.settings}"
    if chosen.get("use_vllm"):
        name += f" {version('vllm')}"
    return {
        "name": name,
        "step": min(after - before for before, after in pairwise(ends)),
        "start": start[0],
        "settings": f"microbatches of {MICRO_BATCH}, bf16=True, {chosen or 'its defaults'}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder that write_model has written")
    parser.add_argument("settings", choices=list(SETTINGS))
    for name in ("prompts", "samples", "prompt", "new", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    report(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
