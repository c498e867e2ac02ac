"""What people are told while a run takes its steps and learns nothing."""

from __future__ import annotations

from rollgraph.run.setup import Run
from rollgraph.types import Batch

EQUAL_REWARDS = (
    "the rewards within each group are all equal. If no answer is right, use easier prompts, a warm_start, or a reward "
    "with partial credit; if all are right, use harder prompts. More rollout.samples_per_prompt or a higher "
    "rollout.temperature make groups differ. samples.jsonl in the output folder shows what was rewarded"
)
ALL_MASKED = (
    "mask_truncated leaves out every sample that has an advantage. Raise rollout.max_tokens, or set "
    "algorithm.options: {mask_truncated: false}"
)


def tell_if_nothing_to_learn(run: Run, step: int, batch: Batch) -> None:
    """Tell if all advantages of a step are 0; not again until a step has others."""
    if not run.inputs.algorithm.needs_rewards:
        return
    holds = not any(any(sample.advantages) for sample in batch.samples)
    reason = EQUAL_REWARDS
    if batch.metrics.get("advantage/abs_max"):  # before any sample is left out
        reason = ALL_MASKED
    reward = batch.metrics.get("reward", 0.0)
    text = f"step {step}, mean reward {reward:.3g}: nothing can be learned from the rewards, because {reason}"
    run.log.note_while(holds, "nothing to learn", text)
