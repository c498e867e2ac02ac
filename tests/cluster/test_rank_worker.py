"""One rank of a cluster run without a cluster: what it tells its driver, and how its attempts end."""

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

PLACE = RankIdentity(rank=0, size=1, local_rank=0, device="cpu", run="ab12")


def attempt(worker: RankWorker, number: int) -> tuple[Outcome, list[News]]:
    """Run an attempt to its end."""
    worker.start_attempt(number, "", "here")
    told: list[News] = []
    while True:
        for news in worker.news():
            if isinstance(news, AttemptEnded):
                assert news.attempt == number
                return news.outcome, told
            told.append(news)


@pytest.mark.slow
def test_a_rank_tells_its_steps_and_attempts_go_on_in_the_same_process(folder: Path) -> None:
    config: Config = eager_config(folder, "data.validation=null", "steps=2", "checkpoint.every=1")
    worker = RankWorker(config, PLACE, None)
    outcome, told = attempt(worker, 1)
    assert outcome == Outcome("finished")
    assert [news.step for news in told if isinstance(news, StepTaken)] == [0, 1]
    assert [news.arguments[0] for news in told if isinstance(news, DisplayCall) and news.method == "step"] == [0, 1]
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


def test_news_ends_the_wait_for_it() -> None:
    box = NewsBox()
    timer = threading.Timer(0.05, box.put, [StepTaken(1, 0)])
    timer.start()
    assert box.take(600.0) == [StepTaken(1, 0)]


def test_a_rank_that_has_to_leave_finds_out_where_it_shows_progress() -> None:
    def check() -> None:
        raise RankLost("rank 1 was lost")

    with pytest.raises(RankLost):
        RemoteDisplay(NewsBox(), shows=False, check=check).phase("generate", 1, 9)
