"""The warm start: supervised training on demonstrations, until the policy can learn from its own samples."""

from __future__ import annotations

import torch

from rollgraph.rl.algorithms import load_algorithm
from rollgraph.run.rollouts import sample
from rollgraph.run.setup import SUPERVISED, Run


def warm_start(run: Run) -> bool:
    """Whether it came to its end; False if the run was asked to stop, in which case nothing is saved."""
    settings = run.config.warm_start
    assert settings is not None
    algorithm = load_algorithm(SUPERVISED)
    optimizer = run.policy.optimizer
    lr, schedule = optimizer.base, optimizer.schedule
    optimizer.restart(settings.lr, None)
    order = torch.Generator().manual_seed(run.config.seed)
    for step in range(settings.steps):
        if run.on_any_rank(run.stop.requested):
            run.log.note(f"asked to stop in step {step} of the warm start: nothing of it is saved")
            return False
        run.log.view.phase("warm start", step, settings.steps)
        chosen = torch.randint(len(run.inputs.demonstrations), (settings.batch_size,), generator=order)
        rollouts = [run.inputs.demonstrations[index] for index in chosen.tolist()]
        loss = run.policy.train(algorithm.make_batch(rollouts), SUPERVISED)["loss"]
        if settings.stop_at is not None and (step + 1) % settings.check_every == 0:
            reward = _mean_reward(run, step)
            run.log.note(f"warm start, step {step + 1}: loss {loss:.3f}, mean reward of samples {reward:.3f}")
            if reward >= settings.stop_at:
                break
    run.log.view.end_phase()
    optimizer.restart(lr, schedule)
    return True


def _mean_reward(run: Run, step: int) -> float:
    rollouts = sample(run, run.inputs.data.next_prompts(), seed=f"warm start/{step}")
    return sum(rollout.reward for rollout in rollouts) / len(rollouts)
