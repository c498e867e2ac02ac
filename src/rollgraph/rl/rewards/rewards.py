"""Rewards: functions with TRL's signature, called for all rollouts of a step.

    def exact(prompts, completions, answer, **columns):      # lists of the same length
        return [1.0 if text.strip() == expected else 0.0 for text, expected in zip(completions, answer)]

Owns the weighted sum of rewards, and the handling of a function that fails: its rollouts get a fixed value, the failure
is counted, and the run goes on. All of this is the same in this process and with worker processes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rollgraph.errors import InvalidInput, suggest
from rollgraph.rl.paths import LoadError
from rollgraph.rl.rewards.arguments import ChatForm, RewardBatch, TrainerState
from rollgraph.rl.rewards.calls import RewardCaller, RewardJob, ScoredBatch, check_score
from rollgraph.rl.rewards.loading import MAX_REWARD, Reward, RewardSpec, is_in_range, load_reward
from rollgraph.rl.rewards.pool import PoolFactory, WorkerPool
from rollgraph.rl.rewards.process import Failure, short_repr
from rollgraph.rl.rewards.workers import RewardWorkers
from rollgraph.types import ENVIRONMENT, Rollout

MAX_MESSAGES = 5  # different failures that a run shows
ROUNDING_TOLERANCE = 1e-6  # of a sum of weights
_SINGLE_ROLLOUT_FAILURES = ("not_finite", "too_large")  # of one value rather than of a whole call


class RewardFunctions:
    """Scores rollouts with several functions: a rollout's `reward` is the weighted sum of their scores.

    With `workers`, functions run in that many processes, for at most `timeout` seconds per call, and may hang or crash.
    Without workers they run in this process and must do neither; only coroutine functions have a time limit then.
    `make_pool` can start the processes on other machines. One call scores `batch_size` rollouts, by default an equal
    part of all rollouts for each worker. A prompt that is a chat is passed as messages, and its completion too, unless
    `chat` is "text". With `includes_environment`, the sum also has the reward that the environment gave the rollout.

    A function that fails scores `on_failure`. These attributes report failures:
    - `failures`: the number of rollouts for each kind of failure (raised, timeout, died, wrong_type, wrong_length,
      not_finite, too_large, unscored);
    - `messages`: the first message of each kind; `unread()` returns the first few different messages once;
    - `unrewarded`: the number of rollouts without a valid reward: every function (and the environment, if included)
      failed or gave none, or the sum was out of range.

    `logged` has the values that functions passed to `log_metric`, by name, until the caller clears it.
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
        includes_environment: bool = False,
        make_pool: PoolFactory = WorkerPool,
    ) -> None:
        if not functions and not includes_environment:
            raise LoadError("there are no reward functions", argument="functions")
        if workers < 0:
            raise InvalidInput(f"must be at least 0, got {workers}", argument="workers")
        if timeout <= 0:
            raise InvalidInput(f"must be more than 0 seconds, got {timeout}", argument="timeout")
        if batch_size is not None and batch_size < 1:
            raise InvalidInput(f"must be at least 1, got {batch_size}", argument="batch_size")
        if not is_in_range(on_failure):
            detail = f"expected a number from -{MAX_REWARD:g} to {MAX_REWARD:g}, got {short_repr(on_failure)}"
            raise InvalidInput(detail, argument="on_failure")
        specs: list[RewardSpec] = []
        self._rewards: list[Reward] = []
        for index, entry in enumerate(functions):
            with _name_entry_in_errors(index):
                spec = RewardSpec.read(entry)
                self._add(load_reward(spec))
            specs.append(spec)
        self._workers = workers
        self._batch_size = batch_size
        self._on_failure = on_failure
        self._chat_form = chat
        self._includes_environment = includes_environment
        self.logged: defaultdict[str, list[float]] = defaultdict(list)
        self.failures: Counter[str] = Counter()
        self.messages: dict[str, str] = {}
        self.unrewarded = 0
        self._seen_messages: set[str] = set()
        self._unread_messages: list[str] = []
        self._rewarded_ids: set[int] = set()  # of rollouts in this call of `score` with a reward from any function
        self._caller: RewardCaller | RewardWorkers
        if workers:
            self._caller = RewardWorkers(specs, self._rewards, workers, timeout, make_pool)
        else:
            self._caller = RewardCaller(self._rewards, timeout)

    def _add(self, reward: Reward) -> None:
        if any(reward.label == loaded.label for loaded in self._rewards):
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
        available = sorted(columns)
        for index, reward in enumerate(self._rewards):
            for missing in sorted(reward.needs.difference(available)):
                hint = suggest(missing, available)
                detail = f"reward {reward.label!r} needs the column {missing!r}{hint} (the data has {available})"
                raise LoadError(detail, argument=f"functions[{index}]")

    def score(self, rollouts: Sequence[Rollout], state: TrainerState | None = None) -> None:
        """Fill in `rewards`, `reward` and `extra` of each rollout. Functions can take `state` as `trainer_state`."""
        chunk_size = self._batch_size or -(-len(rollouts) // max(self._workers, 1)) or 1
        chunks = [rollouts[start : start + chunk_size] for start in range(0, len(rollouts), chunk_size)]
        jobs = self._make_jobs(chunks, state or TrainerState())
        results = self._caller.run(jobs)
        self._rewarded_ids = set()
        for rollout in rollouts:
            rollout.rewards = {}
            rollout.extra = {}
            rollout.failures = {name: message for name, message in rollout.failures.items() if name == ENVIRONMENT}
            self._start_reward(rollout)
        for job, scored in zip(jobs, results, strict=True):
            self._add_scores(self._rewards[job.reward], chunks[job.chunk], scored)
        for rollout in rollouts:
            self._replace_invalid_reward(rollout)
        self.unrewarded += sum(id(rollout) not in self._rewarded_ids for rollout in rollouts)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each function by label, and 1 for the environment's reward."""
        weights = {ENVIRONMENT: 1.0} if self._includes_environment else {}
        return weights | {reward.label: reward.weight for reward in self._rewards}

    def is_correct(self, rollout: Rollout) -> bool:
        """Whether a rollout has the best possible reward, if each function gives at most 1.

        Penalties do not count: functions without a positive weight, and built-in rewards that are at most 0. Nor do
        functions without a reward for this rollout. The environment's reward counts like that of a function.
        """
        weights = {reward.label: reward.weight for reward in self._rewards if reward.weight > 0 and not reward.penalty}
        if self._includes_environment:
            weights[ENVIRONMENT] = 1.0
        labels = [label for label in rollout.rewards if label in weights]
        best = math.fsum(weights[label] for label in labels)
        earned = math.fsum(weights[label] * rollout.rewards[label] for label in labels)
        return bool(labels) and earned >= best * (1 - ROUNDING_TOLERANCE)

    def _make_jobs(self, chunks: Sequence[Sequence[Rollout]], state: TrainerState) -> list[RewardJob]:
        """One job for each function and each chunk of the rollouts, function by function."""
        text_batches = [RewardBatch.from_rollouts(chunk, "text", state) for chunk in chunks]
        chat_batches = [RewardBatch.from_rollouts(chunk, self._chat_form, state) for chunk in chunks]
        jobs = []
        for index, reward in enumerate(self._rewards):
            for chunk_index, batch in enumerate(text_batches if reward.built_in else chat_batches):
                jobs.append(RewardJob(index, chunk_index, reward.select_arguments(batch)))
        return jobs

    def _start_reward(self, rollout: Rollout) -> None:
        """Set `reward` to 0 or to the environment's reward; `_add_scores` adds to it."""
        if not self._includes_environment:
            rollout.reward = 0.0
            return
        score = check_score(rollout.reward)
        if isinstance(score, Failure):
            self._count_failure(score.kind, f"{ENVIRONMENT}: {score.message} ({_describe_rollout(rollout)})")
            score = self._on_failure
        elif score is not None:
            self._rewarded_ids.add(id(rollout))
        rollout.reward = score or 0.0
        if score is not None:
            rollout.rewards[ENVIRONMENT] = score

    def _add_scores(self, reward: Reward, chunk: Sequence[Rollout], scored: ScoredBatch) -> None:
        for name, value in scored.log.metrics:
            self.logged[name].append(value)
        for rollout, extra in zip(chunk, scored.log.extra, strict=True):
            rollout.extra |= extra
        for rollout, score in zip(chunk, scored.scores, strict=True):
            if isinstance(score, Failure):
                message = f"{reward.label}: {score.message}"
                if score.kind in _SINGLE_ROLLOUT_FAILURES:
                    message += f" ({_describe_rollout(rollout)})"
                self._count_failure(score.kind, message)
                rollout.failures[reward.label] = score.message
                score = self._on_failure
            elif score is not None:
                self._rewarded_ids.add(id(rollout))
            if score is not None:  # None: the function has no reward for this rollout
                rollout.rewards[reward.label] = score
                rollout.reward += reward.weight * score

    def _replace_invalid_reward(self, rollout: Rollout) -> None:
        """Replace the sum by `on_failure` if no function scored the rollout, or if the sum is out of range."""
        if not rollout.rewards:
            self._count_failure("unscored", f"no function has a reward for {_describe_rollout(rollout)}")
            rollout.reward = self._on_failure
        elif not abs(rollout.reward) <= MAX_REWARD:  # large weights can cause this; infinity minus infinity is NaN
            labels = ", ".join(rollout.rewards)
            total = f"the weighted sum of {labels} is {rollout.reward:g}, beyond {MAX_REWARD:g}"
            self._count_failure("too_large", f"{total} ({_describe_rollout(rollout)})")
            rollout.reward = self._on_failure
            self._rewarded_ids.discard(id(rollout))

    def _count_failure(self, kind: str, message: str) -> None:
        self.add_failures({kind: 1}, {kind: message})

    def add_failures(self, failures: Mapping[str, int], messages: Mapping[str, str]) -> None:
        """Count failures of this process, or of another one that scores for the same run."""
        self.failures.update(failures)
        for kind, message in messages.items():
            self.messages.setdefault(kind, message)
            if message not in self._seen_messages and len(self._seen_messages) < MAX_MESSAGES:
                self._seen_messages.add(message)
                self._unread_messages.append(message)

    def unread(self) -> list[str]:
        """Messages not returned before; a run has at most MAX_MESSAGES different ones."""
        unread = self._unread_messages
        self._unread_messages = []
        return unread


@contextmanager
def _name_entry_in_errors(index: int) -> Iterator[None]:
    """Name the entry of `functions` in an error's argument; an error without an argument is about `name`."""
    try:
        yield
    except InvalidInput as error:
        named = error if error.argument else type(error)(error.detail, argument="name", location=error.location)
        raise named.renamed(lambda name: f"functions[{index}].{name}") from error


def _describe_rollout(rollout: Rollout) -> str:
    return f"a sample of prompt {rollout.prompt.id}"
