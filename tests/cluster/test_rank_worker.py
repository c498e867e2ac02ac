"""One rank of a cluster run without a cluster: what it tells its driver, and how its attempts end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rollgraph.cluster.messages import Outcome
from rollgraph.cluster.news import AttemptEnded, News, NewsBox, Shown, StepTaken
from rollgraph.cluster.rank_worker import RankPlace, RankWorker
from rollgraph.cluster.remote_view import RemoteView
from rollgraph.config import Config
from rollgraph.distributed.lost_ranks import RankLost
from rollgraph.run.folder_lock import LOCK, Claim, lock_folder
from tests.test_train import ONE, eager_config, folder, metrics_of

__all__ = ["folder"]

PLACE = RankPlace(rank=0, size=1, local_rank=0, device="cpu", run="ab12")


def attempt(worker: RankWorker, number: int) -> tuple[Outcome, list[News]]:
    """Run an attempt to its end."""
    worker.begin(number, "", "here")
    told: list[News] = []
    while True:
        for news in worker.news():
            if isinstance(news, AttemptEnded):
                assert news.attempt == number
                return news.outcome, told
            told.append(news)


def test_a_rank_tells_its_steps_and_attempts_go_on_in_the_same_process(folder: Path) -> None:
    config: Config = eager_config(folder, "data.validation=null", "steps=2", "checkpoint.every=1")
    worker = RankWorker(config, PLACE, None)
    outcome, told = attempt(worker, 1)
    assert outcome == Outcome("finished")
    assert [news.step for news in told if isinstance(news, StepTaken)] == [0, 1]
    assert [news.arguments[0] for news in told if isinstance(news, Shown) and news.method == "step"] == [0, 1]
    assert len(metrics_of(folder / "run")) == 2
    assert not (folder / "run" / LOCK).exists()
    outcome, told = attempt(worker, 2)
    assert outcome == Outcome("finished")
    assert not any(isinstance(news, StepTaken) for news in told)


def test_an_error_of_the_user_and_a_folder_of_a_newer_attempt_have_codes_of_their_own(folder: Path) -> None:
    config = eager_config(folder, "data.validation=null", "steps=1")
    worker = RankWorker(config, PLACE, None)
    with lock_folder(config.output, ONE, Claim("ab12", 7)):
        outcome, _ = attempt(worker, 1)
    assert (outcome.how, outcome.code) == ("failed", 2)
    assert "attempt 7 of run ab12" in outcome.text
    (folder / "train.jsonl").write_text("no JSON\n")
    outcome, _ = attempt(worker, 2)
    assert (outcome.how, outcome.code) == ("failed", 2)
    assert "train.jsonl" in outcome.text


def test_of_progress_only_the_latest_is_told_and_never_after_what_followed_it() -> None:
    box = NewsBox()
    view = RemoteView(box, shows=True, check=lambda: None)
    view.phase("generate", 1, 9)
    view.phase("generate", 2, 9)
    view.note("found")
    view.phase("train", 1, 3)
    assert [(news.method, news.arguments[:2]) for news in box.take(0.0) if isinstance(news, Shown)] == [
        ("phase", ("generate", 2)),
        ("note", ("found",)),
        ("phase", ("train", 1)),
    ]
    assert box.take(0.0) == []


def test_news_ends_the_wait_for_it() -> None:
    box = NewsBox()
    timer = threading.Timer(0.05, box.put, [StepTaken(1, 0)])
    timer.start()
    assert box.take(600.0) == [StepTaken(1, 0)]


def test_a_rank_that_has_to_leave_finds_out_where_it_shows_progress() -> None:
    def check() -> None:
        raise RankLost("rank 1 was lost")

    with pytest.raises(RankLost):
        RemoteView(NewsBox(), shows=False, check=check).phase("generate", 1, 9)
