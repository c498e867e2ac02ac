"""The roll call: ranks as objects of one process, which go away, fall silent or get stuck."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from rollgraph.distributed.liveness import Liveness, RankLost, _find_rank_0

FOREVER = 600.0  # of which no test sees the end


@contextmanager
def called(size: int = 3, timeout: float = FOREVER, store: Any = None, **options: Any) -> Iterator[list[Liveness]]:
    store = store or dist.HashStore()
    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(lambda rank: Liveness(rank, size, store, timeout, **options), range(size)))
    wait_until(lambda: len(ranks[0]._lines()) == size - 1)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.005)


def vanish(rank: Liveness) -> None:
    """As a process that is killed: its thread ends, its connections close, and nothing is said."""
    rank._left = True
    rank._stir()


def found(rank: Liveness) -> tuple[int | None, str]:
    wait_until(lambda: rank.loss is not None)
    assert rank.loss is not None
    return rank.loss.rank, rank.loss.text


def test_a_rank_that_is_gone_is_named_with_what_it_did_last() -> None:
    with called() as ranks:
        for rank in ranks:
            rank.note("the first gather")
        ranks[2].note("the second gather")
        wait_until(lambda: ranks[0]._ranks[2].count == 2)
        vanish(ranks[2])
        text = "rank 2 got no further than the second gather, and is gone without a word"
        assert found(ranks[0]) == found(ranks[1]) == (2, text)
        with pytest.raises(RankLost, match="rank 2 got no further"):
            ranks[1].check()


def test_that_rank_0_is_gone_is_seen_by_each_of_the_others() -> None:
    with called() as ranks:
        ranks[0].note("the first gather")
        wait_until(lambda: all(rank._ranks[0].count == 1 for rank in ranks[1:]))
        vanish(ranks[0])
        text = "rank 0 got no further than the first gather, and is gone without a word"
        assert found(ranks[1]) == found(ranks[2]) == (0, text)


def test_whoever_leaves_because_of_a_loss_is_not_named_for_it() -> None:
    with called(4) as ranks:
        vanish(ranks[2])
        assert found(ranks[1])[0] == 2
        ranks[1].leave(RankLost(ranks[1].explain()))
        wait_until(lambda: ranks[0]._ranks[1].line is None)
        assert found(ranks[0])[0] == found(ranks[3])[0] == 2


def test_silence_is_a_loss_after_the_time_out_and_ends_who_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgraph.distributed.liveness._MOMENT", 0.1)
    ended: list[str] = []
    ready, store = threading.Event(), dist.HashStore()
    lines: list[Any] = []

    def silent() -> None:
        """As a process that is stopped after it has come."""
        turn = store.add("rollgraph/liveness/2", 1)
        lines.append(_find_rank_0(2, store, f"rollgraph/liveness/at/{turn}", FOREVER))
        ready.set()

    thread = threading.Thread(target=silent)
    thread.start()
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: Liveness(rank, 3, store, 2.0, end=ended.append), range(2)))
    assert ready.wait(60)
    thread.join()
    text = "rank 2 got no further than its start, and has given no sign of life for 2 s"
    assert found(ranks[0]) == found(ranks[1]) == (2, text)
    wait_until(lambda: len(ended) >= 2)  # both, though neither waits for anything
    assert set(ended) == {text}
    for rank in ranks:
        rank.leave(RankLost(text))
    lines[0].close()


def test_a_rank_that_never_comes_is_named() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: Liveness(rank, 3, store, 2.0), range(2)))
    text = "rank 2 got no further than its start, and has given no sign of life for 2 s"
    assert found(ranks[0]) == found(ranks[1]) == (2, text)
    for rank in ranks:
        rank.close()


def test_a_rank_that_lives_and_does_not_come_is_named() -> None:
    with called(timeout=20.0) as ranks:
        for rank in ranks:
            rank.note("the first gather")
        wait_until(lambda: all(seen.count == 1 for seen in ranks[0]._ranks.values()))
        for rank in (ranks[0], ranks[2]):
            rank.note("the second gather")
        said = ranks[2].late("the second gather")
        assert said == "rank 1 got no further than the first gather, and did not come to the second gather within 20 s"
        assert found(ranks[0]) == found(ranks[1]) == (1, said)


def test_a_failure_without_a_loss_is_told_by_all_and_nobody_is_named() -> None:
    with called() as ranks:
        ranks[2].leave(RankLost("rank 2: a gather failed: no rank is gone (no route to host)"))
        text = "rank 2: a gather failed: no rank is gone (no route to host)"
        assert found(ranks[0]) == found(ranks[1]) == (None, text)


def test_where_all_have_come_nobody_is_named() -> None:
    with called(timeout=20.0) as ranks:
        for rank in ranks:
            rank.note("a gather")
        wait_until(lambda: all(seen.count == 1 for seen in ranks[0]._ranks.values()))
        assert "all ranks have begun it" in ranks[1].late("a gather")
        assert found(ranks[0])[0] is None


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_on_one_rank_is_told_to_the_others(culprit: int) -> None:
    with called() as ranks:
        ranks[culprit].leave(ValueError("out of cheese"))
        text = f"rank {culprit} ended with an error, ValueError: out of cheese"
        for rank in ranks:
            if rank.rank != culprit:
                assert found(rank) == (culprit, text)


def test_all_leave_and_nobody_is_lost() -> None:
    with called() as ranks:
        with ThreadPoolExecutor(3) as threads:
            last = threads.submit(ranks[0].leave)
            for rank in ranks[1:]:
                threads.submit(rank.leave).result(60)
            last.result(60)
        assert [rank.loss for rank in ranks] == [None] * 3


def test_the_first_word_on_a_key_stands() -> None:
    with called() as ranks:
        assert ranks[1].post("save 7", "no space left") == "no space left"
        assert ranks[2].post("save 7", "the folder is gone") == "no space left"
        assert ranks[0].post("save 7", "written") == "no space left"
        ranks[2].post("save 8", "written")
        wait_until(lambda: all(rank.posted("save 8") == "written" for rank in ranks))
        assert {rank.posted("save 7") for rank in ranks} == {"no space left"}


def test_strangers_are_not_let_in() -> None:
    with called() as ranks:
        assert ranks[0]._server is not None
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"token": "", "rank": 1}\n', b"[]\n"):
            with socket.create_connection(("127.0.0.1", ranks[0]._server.getsockname()[1])) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(60)
                assert stranger.recv(100) == b""
        assert [rank.loss for rank in ranks] == [None] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_the_connection() -> None:
    with called(2) as ranks:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # until the parent closes it
            os._exit(0)
        os.close(read)
        try:
            vanish(ranks[1])
            assert found(ranks[0])[0] == 1
        finally:
            os.close(write)
            os.waitpid(child, 0)
