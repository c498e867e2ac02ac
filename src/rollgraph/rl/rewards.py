"""Rewards: functions with TRL's signature, called for all rollouts of a step.

    def near(prompts, completions, answer, **columns):      # lists of the same length
        return [1.0 if text.strip() == wanted else 0.0 for text, wanted in zip(completions, answer)]

Owns the weighted sum, and what becomes of a function that fails: its rollouts get a fixed value, the failure is
counted, and the run goes on. Whether functions run here or in worker processes makes no other difference.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rollgraph.errors import InvalidInput, suggest
from rollgraph.rl.paths import LoadError
from rollgraph.rl.reward_arguments import ChatForm, RewardBatch, TrainerState
from rollgraph.rl.reward_calls import RewardCaller, RewardJob, Scored, check_score
from rollgraph.rl.reward_loading import LARGEST, Reward, RewardSpec, is_allowed, load_reward
from rollgraph.rl.reward_workers import RewardWorkers
from rollgraph.rl.worker_messages import Failure, show
from rollgraph.rl.workers import MakePool, WorkerPool
from rollgraph.types import ENVIRONMENT, Rollout

__all__ = ["ENVIRONMENT", "RewardFunctions", "RewardSpec", "TrainerState", "load_reward"]

MOST_MESSAGES = 5  # how many different failures people are told about
ROUNDING = 1e-6  # of weights that add up
_ABOUT_ONE_ROLLOUT = ("not_finite", "too_large")  # failures of one value rather than of a whole call


class RewardFunctions:
    """Scores rollouts with several functions: `reward` is the weighted sum of what they return.

    With `workers`, functions run in that many processes, with at most `timeout` seconds per call, and may hang or
    crash; without, they run here and may not, and only coroutine functions have a time limit. `make_pool` may start
    the processes elsewhere. One call is for
    `batch_size` rollouts, or for as many as spread a batch evenly over the workers. Prompts that came as messages are
    given as such, with the completion as a message, unless `chat` is "text". With `adds`, the sum includes the reward a
    rollout already has from its environment.

    What fails counts as `on_failure`. `failures` has the number of rollouts for each kind of failure (raised, timeout,
    died, wrong_type, wrong_length, not_finite, too_large, unscored), `messages` the first message of each kind,
    `unread()` the first few different messages, and `unrewarded` the number of rollouts that no function rewarded.
    `logged` has what functions passed to `log_metric`, by name, until the owner clears it.
    """

    def __init__(
        self,
        functions: Sequence[RewardSpec | str | Mapping[str, Any]],
        *,
        workers: int = 0,
        timeout: float = 30.0,
        on_failure: float = 0.0,
        batch_size: int | None = None,
        chat: ChatForm = "messages",
        adds: bool = False,
        make_pool: MakePool = WorkerPool,
    ) -> None:
        if not functions and not adds:
            raise LoadError("there are no reward functions", argument="functions")
        if workers < 0:
            raise InvalidInput(f"must be at least 0, got {workers}", argument="workers")
        if timeout <= 0:
            raise InvalidInput(f"must be more than 0 seconds, got {timeout}", argument="timeout")
        if batch_size is not None and batch_size < 1:
            raise InvalidInput(f"must be at least 1, got {batch_size}", argument="batch_size")
        if not is_allowed(on_failure):
            detail = f"expected a number from -{LARGEST:g} to {LARGEST:g}, got {show(on_failure)}"
            raise InvalidInput(detail, argument="on_failure")
        specs: list[RewardSpec] = []
        self._rewards: list[Reward] = []
        for index, entry in enumerate(functions):
            with _naming_entry(index):
                spec = RewardSpec.read(entry)
                self._add(load_reward(spec))
            specs.append(spec)
        self._workers = workers
        self._batch_size = batch_size
        self._on_failure = on_failure
        self._chat = chat
        self._adds = adds
        self.logged: defaultdict[str, list[float]] = defaultdict(list)
        self.failures: Counter[str] = Counter()
        self.messages: dict[str, str] = {}
        self.unrewarded = 0
        self._seen: set[str] = set()
        self._unread: list[str] = []
        self._rewarded: set[int] = set()  # rollouts of the present call that some function has a reward for
        self._caller: RewardCaller | RewardWorkers
        if workers:
            self._caller = RewardWorkers(specs, self._rewards, workers, timeout, make_pool)
        else:
            self._caller = RewardCaller(self._rewards, timeout)

    def _add(self, reward: Reward) -> None:
        if any(reward.label == other.label for other in self._rewards):
            detail = f"two rewards are called {reward.label!r}; give one of them another label"
            raise LoadError(detail, argument="label")
        self._rewards.append(reward)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes and the event loop."""
        self._caller.close()

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise if a function needs a column that the data does not have."""
        present = sorted(columns)
        for index, reward in enumerate(self._rewards):
            for missing in sorted(reward.needs.difference(present)):
                near = suggest(missing, present)
                detail = f"reward {reward.label!r} needs the column {missing!r}{near} (the data has {present})"
                raise LoadError(detail, argument=f"functions[{index}]")

    def score(self, rollouts: Sequence[Rollout], state: TrainerState | None = None) -> None:
        """Fill in `rewards`, `reward` and `extra` of each rollout; functions can ask for the state of the run."""
        size = self._batch_size or -(-len(rollouts) // max(self._workers, 1)) or 1
        shares = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        jobs = self._make_jobs(shares, state or TrainerState())
        results = self._caller.run(jobs)
        self._rewarded = set()
        for rollout in rollouts:
            rollout.rewards = {}
            rollout.extra = {}
            rollout.failures = {name: why for name, why in rollout.failures.items() if name == ENVIRONMENT}
            self._begin(rollout)
        for job, found in zip(jobs, results, strict=True):
            self._add_scores(self._rewards[job.reward], shares[job.share], found)
        for rollout in rollouts:
            self._finish(rollout)
        self.unrewarded += sum(id(rollout) not in self._rewarded for rollout in rollouts)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each function, and 1 for the environment's own reward, by label."""
        weights = {ENVIRONMENT: 1.0} if self._adds else {}
        return weights | {reward.label: reward.weight for reward in self._rewards}

    def is_right(self, rollout: Rollout) -> bool:
        """Whether the rewards of a rollout are as high as they can be, if 1 is the most that a function gives.

        Penalties do not count: functions without a positive weight, and built-in rewards that are at most 0. Nor do
        functions that have no reward for this rollout. An environment's own reward counts like that of a function.
        """
        weights = {reward.label: reward.weight for reward in self._rewards if reward.weight > 0 and not reward.penalty}
        if self._adds:
            weights[ENVIRONMENT] = 1.0
        judged = [label for label in rollout.rewards if label in weights]
        best = math.fsum(weights[label] for label in judged)
        earned = math.fsum(weights[label] * rollout.rewards[label] for label in judged)
        return bool(judged) and earned >= best * (1 - ROUNDING)

    def _make_jobs(self, shares: Sequence[Sequence[Rollout]], state: TrainerState) -> list[RewardJob]:
        """Each function for each share of the rollouts, function by function."""
        as_text = [RewardBatch.of(share, "text", state) for share in shares]
        as_given = [RewardBatch.of(share, self._chat, state) for share in shares]
        jobs = []
        for index, reward in enumerate(self._rewards):
            for number, batch in enumerate(as_text if reward.built_in else as_given):
                jobs.append(RewardJob(index, number, reward.choose(batch)))
        return jobs

    def _begin(self, rollout: Rollout) -> None:
        """Start the sum with nothing, or with the environment's own reward."""
        if not self._adds:
            rollout.reward = 0.0
            return
        given = check_score(rollout.reward)
        if isinstance(given, Failure):
            self._count(given.kind, f"{ENVIRONMENT}: {given.message} ({_name(rollout)})")
            given = self._on_failure
        elif given is not None:
            self._rewarded.add(id(rollout))
        rollout.reward = given or 0.0
        if given is not None:
            rollout.rewards[ENVIRONMENT] = given

    def _add_scores(self, reward: Reward, share: Sequence[Rollout], found: Scored) -> None:
        for name, value in found.log.metrics:
            self.logged[name].append(value)
        for rollout, extra in zip(share, found.log.extra, strict=True):
            rollout.extra |= extra
        for rollout, score in zip(share, found.scores, strict=True):
            if isinstance(score, Failure):
                message = f"{reward.label}: {score.message}"
                if score.kind in _ABOUT_ONE_ROLLOUT:
                    message += f" ({_name(rollout)})"
                self._count(score.kind, message)
                rollout.failures[reward.label] = score.message
                score = self._on_failure
            elif score is not None:
                self._rewarded.add(id(rollout))
            if score is not None:  # None: this function has nothing to say about the rollout
                rollout.rewards[reward.label] = score
                rollout.reward += reward.weight * score

    def _finish(self, rollout: Rollout) -> None:
        """Replace the sum by `on_failure` if nothing was added up, or if it is larger than a reward can be."""
        if not rollout.rewards:
            self._count("unscored", f"no function has a reward for {_name(rollout)}")
            rollout.reward = self._on_failure
        elif not abs(rollout.reward) <= LARGEST:  # weights can do this; infinity minus infinity is NaN
            parts = ", ".join(rollout.rewards)
            total = f"the weighted sum of {parts} is {rollout.reward:g}, beyond {LARGEST:g}"
            self._count("too_large", f"{total} ({_name(rollout)})")
            rollout.reward = self._on_failure
            self._rewarded.discard(id(rollout))

    def _count(self, kind: str, message: str) -> None:
        self.hear({kind: 1}, {kind: message})

    def hear(self, failures: Mapping[str, int], messages: Mapping[str, str]) -> None:
        """Add failures of this process, or of another one that scores for the same run, to those known so far."""
        self.failures.update(failures)
        for kind, message in messages.items():
            self.messages.setdefault(kind, message)
            if message not in self._seen and len(self._seen) < MOST_MESSAGES:
                self._seen.add(message)
                self._unread.append(message)

    def unread(self) -> list[str]:
        """Messages not returned before; only the first few different ones of a run."""
        unread = self._unread
        self._unread = []
        return unread


@contextmanager
def _naming_entry(index: int) -> Iterator[None]:
    """Say which entry of `functions` an error is about; without a field of its own, it is about the name."""
    try:
        yield
    except InvalidInput as error:
        named = error if error.argument else type(error)(error.detail, argument="name", place=error.place)
        raise named.renamed(lambda name: f"functions[{index}].{name}") from error


def _name(rollout: Rollout) -> str:
    return f"a sample of prompt {rollout.prompt.id}"
