"""What the samples of a step are written with: the values of their tokens, and why some were not trained on."""

from __future__ import annotations

from collections.abc import Sequence

from rollgraph.rl.algorithms.batches import has_failed, is_constant
from rollgraph.run.setup import Run, describes_tokens
from rollgraph.telemetry.samples import choose_groups
from rollgraph.telemetry.token_values import SampleDetails
from rollgraph.types import Batch, Rollout, Sample

CUT_OFF = "it was cut off at the limit of tokens, and mask_truncated is set"
FAILED = "it failed"
NOT_KEPT = "the algorithm did not keep its group"
EQUAL = "the rewards of its group are all equal"


def detail_samples(run: Run, step: int, rollouts: Sequence[Rollout], batch: Batch) -> dict[int, SampleDetails]:
    """By place among the rollouts and then the dropped ones; only of the few that are written.

    Those that were trained on are scored again with the new weights. Every rank does that, because scoring needs all.
    """
    dropped = run.log.dropped
    log = run.config.log
    everything = [*rollouts, *dropped]
    chosen = choose_groups(everything, log.sample_groups, every=log.samples_every, seed=run.config.seed, step=step)
    if not chosen or run.inputs.written is not None:
        return {}
    samples = {}
    for sample in batch.samples:
        if sample.rollout is not None and rollouts[sample.rollout].group in chosen:
            samples[sample.rollout] = sample
    updated = _score_again(run, samples) if describes_tokens(run.config, run.inputs) else {}
    found = {}
    for place, sample in samples.items():
        left_out = "" if any(sample.weights) else _why_left_out(rollouts[place])
        logprobs, entropies = updated.get(place, (None, None))
        found[place] = SampleDetails(sample.advantages, logprobs, entropies, left_out)
    for place, rollout in enumerate(dropped, len(rollouts)):
        if rollout.group in chosen:
            group = [other for other in dropped if other.group == rollout.group]
            found[place] = SampleDetails(left_out=EQUAL if is_constant(group) else NOT_KEPT)
    return found


def _score_again(run: Run, samples: dict[int, Sample]) -> dict[int, tuple[list[float], list[float]]]:
    """Log-probabilities and entropies."""
    wanted = {place: sample for place, sample in samples.items() if len(sample.tokens) <= run.config.log.token_values}
    if not wanted:
        return {}
    with run.log.timed("log"):
        return dict(zip(wanted, run.policy.logprobs_and_entropies(list(wanted.values())), strict=True))


def _why_left_out(rollout: Rollout) -> str:
    if has_failed(rollout):
        return FAILED
    return CUT_OFF if rollout.finish_reason == "length" else NOT_KEPT
