"""The liveness check: ranks are objects of one process that disappear, stop sending heartbeats or get stuck."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch.distributed as dist

from rollgraph.parallel.ranks.connection import connect_to_rank_0
from rollgraph.parallel.ranks.failures import RankLost
from rollgraph.parallel.ranks.liveness import RANK_0, Liveness

FOREVER = 600.0  # a timeout that no test reaches


def make(rank: int, size: int, store: Any, timeout: float, **options: Any) -> Liveness:
    return Liveness(rank, size, store, timeout, node=f"node-{rank}", **options)


@contextmanager
def connected(size: int = 3, timeout: float = FOREVER, store: Any = None, **options: Any) -> Iterator[list[Liveness]]:
    store = store or dist.HashStore()
    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(lambda rank: make(rank, size, store, timeout, **options), range(size)))
    wait_until(lambda: len(ranks[0]._connections) == size - 1)
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
    """Behave like a killed process: the thread ends and the connections close without a message."""
    rank._is_closing = True
    rank._alarm.ring()


def loss_of(rank: Liveness) -> tuple[int | None, str]:
    wait_until(lambda: rank.loss is not None)
    assert rank.loss is not None
    return rank.loss.rank, rank.loss.text


def test_a_rank_that_disappears_is_named_with_its_last_operation() -> None:
    with connected() as ranks:
        for rank in ranks:
            rank.report_progress("the first gather")
        ranks[2].report_progress("the second gather")
        ranks[2].enter_phase("generate")
        wait_until(lambda: ranks[0]._peers[2].operations == 2 and ranks[0]._peers[2].phase == "generate")
        vanish(ranks[2])
        text = "rank 2 on node-2 (generate; last operation: the second gather) disappeared without notice"
        assert loss_of(ranks[0]) == loss_of(ranks[1]) == (2, text)
        with pytest.raises(RankLost, match=r"rank 2 on node-2 \(generate") as caught:
            ranks[1].check()
        assert caught.value.lost_rank == 2
        assert (caught.value.loss.node, caught.value.loss.phase) == ("node-2", "generate")


def test_every_other_rank_notices_that_rank_0_disappeared() -> None:
    with connected() as ranks:
        ranks[0].report_progress("the first gather")
        wait_until(lambda: all(rank._peers[0].operations == 1 for rank in ranks[1:]))
        vanish(ranks[0])
        text = "rank 0 on node-0 (set-up; last operation: the first gather) disappeared without notice"
        assert loss_of(ranks[1]) == loss_of(ranks[2]) == (0, text)


def test_a_rank_that_leaves_because_of_a_loss_is_not_reported_as_lost() -> None:
    with connected(4) as ranks:
        vanish(ranks[2])
        assert loss_of(ranks[1])[0] == 2
        ranks[1].leave(RankLost(ranks[1].wait_for_loss()))
        wait_until(lambda: 1 not in ranks[0]._connections)
        assert loss_of(ranks[0])[0] == loss_of(ranks[3])[0] == 2


@pytest.mark.slow
def test_a_silent_rank_is_lost_after_the_timeout_and_stuck_processes_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollgraph.parallel.ranks.liveness._GRACE_SECONDS", 0.1)
    ended: list[str] = []
    ready = threading.Event()
    store = dist.HashStore()
    connections: list[Any] = []

    def silent() -> None:
        """Behave like a process that is stopped after it has connected."""
        connections.append(connect_to_rank_0(2, store, RANK_0, FOREVER, "node-2").connection)
        ready.set()

    thread = threading.Thread(target=silent)
    thread.start()
    with ThreadPoolExecutor(2) as threads:
        limits = {"heartbeat_timeout": 1.0, "exit_process": ended.append}
        ranks = list(threads.map(lambda rank: make(rank, 3, store, 2.0, **limits), range(2)))
    assert ready.wait(60)
    thread.join()
    text = "rank 2 on node-2 (set-up; last operation: startup) has sent no heartbeat for 1 s"
    assert loss_of(ranks[0]) == loss_of(ranks[1]) == (2, text)
    wait_until(lambda: len(ended) >= 2)  # both, although neither waits for anything
    assert set(ended) == {text}
    for rank in ranks:
        rank.leave(RankLost(text))
    connections[0].close()


@pytest.mark.slow
def test_a_rank_that_never_connects_is_named() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: make(rank, 3, store, 2.0, heartbeat_timeout=1.0), range(2)))
    text = "rank 2 did not join within 2 s"
    assert loss_of(ranks[0]) == loss_of(ranks[1]) == (2, text)
    for rank in ranks:
        rank.close()


def test_a_rank_that_is_alive_but_stuck_is_named() -> None:
    with connected(timeout=20.0) as ranks:
        for rank in ranks:
            rank.report_progress("the first gather")
        wait_until(lambda: all(peer.operations == 1 for peer in ranks[0]._peers.values()))
        for rank in (ranks[0], ranks[2]):
            rank.report_progress("the second gather")
        text = ranks[2].report_timeout("the second gather")
        late = "rank 1 on node-1 (set-up; last operation: the first gather)"
        assert text == f"{late} did not reach the second gather within 20 s"
        assert loss_of(ranks[0]) == loss_of(ranks[1]) == (1, text)


def test_a_failure_while_all_ranks_are_alive_names_no_rank() -> None:
    with connected() as ranks:
        ranks[2].leave(RankLost("rank 2: a gather failed: all ranks are alive (no route to host)"))
        text = "rank 2: a gather failed: all ranks are alive (no route to host)"
        assert loss_of(ranks[0]) == loss_of(ranks[1]) == (None, text)


def test_a_timeout_that_every_rank_reached_names_no_rank() -> None:
    with connected(timeout=20.0) as ranks:
        for rank in ranks:
            rank.report_progress("a gather")
        wait_until(lambda: all(peer.operations == 1 for peer in ranks[0]._peers.values()))
        assert "every rank started it" in ranks[1].report_timeout("a gather")
        assert loss_of(ranks[0])[0] is None


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_on_one_rank_is_reported_to_the_others(culprit: int) -> None:
    with connected() as ranks:
        ranks[culprit].leave(ValueError("out of cheese"))
        text = f"rank {culprit} on node-{culprit} failed with ValueError: out of cheese"
        for rank in ranks:
            assert loss_of(rank) == (culprit, text)
            assert rank.loss is not None
            assert rank.loss.refused  # so all ranks exit as after a user error


def test_all_ranks_leave_and_none_is_lost() -> None:
    with connected() as ranks:
        with ThreadPoolExecutor(3) as threads:
            first = [threads.submit(rank.leave) for rank in ranks[1:]]
            wait_until(lambda: all(peer.has_left for peer in ranks[0]._peers.values()))
            assert not any(leaving.done() for leaving in first)  # rank 0 may still have something to write
            for leaving in (*first, threads.submit(ranks[0].leave)):
                leaving.result(60)
        assert [rank.loss for rank in ranks] == [None] * 3


def test_the_first_announcement_under_a_key_wins() -> None:
    with connected() as ranks:
        assert ranks[1].announce("save 7", "no space left") == "no space left"
        assert ranks[2].announce("save 7", "the folder is gone") == "no space left"
        assert ranks[0].announce("save 7", "written") == "no space left"
        ranks[2].announce("save 8", "written")
        wait_until(lambda: all(rank.announced("save 8") == "written" for rank in ranks))
        assert {rank.announced("save 7") for rank in ranks} == {"no space left"}


def test_a_connection_without_the_token_is_refused() -> None:
    with connected() as ranks:
        assert ranks[0]._server is not None
        for request in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"token": "", "rank": 1}\n', b"[]\n"):
            with socket.create_connection(("127.0.0.1", ranks[0]._server.port)) as stranger:
                stranger.sendall(request)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(60)
                with suppress(ConnectionResetError):  # it was closed with unread data
                    assert stranger.recv(100) == b""
        assert [rank.loss for rank in ranks] == [None] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_the_connection_open() -> None:
    with connected(2) as ranks:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # until the parent closes it
            os._exit(0)
        os.close(read)
        try:
            vanish(ranks[1])
            assert loss_of(ranks[0])[0] == 1
        finally:
            os.close(write)
            os.waitpid(child, 0)
