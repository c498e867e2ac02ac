"""One rank of a cluster run, without a cluster: its news for the driver, and how its attempts end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rollgraph.checkpoint.lock import LOCK, Claim, lock_folder
from rollgraph.cluster.messages import AttemptEnded, DisplayCall, News, NewsBox, Outcome, StepTaken
from rollgraph.cluster.rank_worker import RankIdentity, RankWorker, RemoteDisplay
from rollgraph.config import Config
from rollgraph.parallel.ranks.failures import RankLost
from tests.test_train import ONE, eager_config, folder, metrics_of

__all__ = ["folder"]

IDENTITY = RankIdentity(rank=0, size=1, local_rank=0, device="cpu", run="ab12")


def run_attempt(worker: RankWorker, number: int) -> tuple[Outcome, list[News]]:
    """Run an attempt to its end. Returns its outcome and the news before that."""
    worker.start_attempt(number, "", "here")
    messages: list[News] = []
    while True:
        for news in worker.news():
            if isinstance(news, AttemptEnded):
                assert news.attempt == number
                return news.outcome, messages
            messages.append(news)


@pytest.mark.slow
def test_a_rank_reports_its_steps_and_serves_several_attempts(folder: Path) -> None:
    config: Config = eager_config(folder, "data.validation=null", "steps=2", "checkpoint.every=1")
    worker = RankWorker(config, IDENTITY, None)
    outcome, messages = run_attempt(worker, 1)
    assert outcome == Outcome("finished")
    assert [news.step for news in messages if isinstance(news, StepTaken)] == [0, 1]
    assert [news.arguments[0] for news in messages if isinstance(news, DisplayCall) and news.method == "step"] == [0, 1]
    assert len(metrics_of(folder / "run")) == 2
    assert not (folder / "run" / LOCK).exists()
    outcome, messages = run_attempt(worker, 2)
    assert outcome == Outcome("finished")
    assert not any(isinstance(news, StepTaken) for news in messages)


def test_user_errors_and_folders_of_newer_attempts_exit_with_code_2(folder: Path) -> None:
    config = eager_config(folder, "data.validation=null", "steps=1")
    worker = RankWorker(config, IDENTITY, None)
    with lock_folder(config.output, ONE, Claim("ab12", 7)):
        outcome, _ = run_attempt(worker, 1)
    assert (outcome.how, outcome.code) == ("failed", 2)
    assert "attempt 7 of run ab12" in outcome.text
    (folder / "train.jsonl").write_text("no JSON\n")
    outcome, _ = run_attempt(worker, 2)
    assert (outcome.how, outcome.code) == ("failed", 2)
    assert "train.jsonl" in outcome.text


def test_only_the_latest_progress_is_sent_and_in_order() -> None:
    box = NewsBox()
    view = RemoteDisplay(box, shows=True, check=lambda: None)
    view.phase("generate", 1, 9)
    view.phase("generate", 2, 9)
    view.note("found")
    view.phase("train", 1, 3)
    assert [(news.method, news.arguments[:2]) for news in box.take(0.0) if isinstance(news, DisplayCall)] == [
        ("phase", ("generate", 2)),
        ("note", ("found",)),
        ("phase", ("train", 1)),
    ]
    assert box.take(0.0) == []


def test_a_wait_for_news_ends_when_news_arrives() -> None:
    box = NewsBox()
    timer = threading.Timer(0.05, box.put, [StepTaken(1, 0)])
    timer.start()
    assert box.take(600.0) == [StepTaken(1, 0)]


def test_a_rank_that_must_leave_raises_when_it_shows_progress() -> None:
    def check() -> None:
        raise RankLost("rank 1 was lost")

    with pytest.raises(RankLost):
        RemoteDisplay(NewsBox(), shows=False, check=check).phase("generate", 1, 9)
