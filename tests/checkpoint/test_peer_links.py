"""Connections between pairs of ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from rollgraph.checkpoint.peer_exchange import Links, connect, find_hosts, receive_into
from rollgraph.parallel.ranks.connection import LOCALHOST
from rollgraph.parallel.ranks.liveness import Liveness

RANKS = 3


def connected(pairs: list[tuple[int, int]]) -> list[Links]:
    """Connect three ranks, which are threads here."""
    store = dist.HashStore()
    texts = [""] * RANKS
    barrier = threading.Barrier(RANKS)

    def connect_rank(rank: int) -> Links:
        liveness = Liveness(rank, RANKS, store, 60.0)

        def exchange(text: str) -> list[str]:
            texts[rank] = text
            barrier.wait(60)
            return texts

        try:
            return connect(liveness, pairs, exchange)
        finally:
            barrier.wait(60)
            liveness.close()

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(connect_rank, range(RANKS)))


def test_bytes_go_from_each_rank_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", LOCALHOST)
    links = connected([(0, 1), (1, 2), (2, 0)])
    for rank in range(RANKS):
        links[rank].outgoing[(rank + 1) % RANKS].sendall(bytes([rank]) * 5)
    for rank in range(RANKS):
        received = bytearray(5)
        previous = (rank - 1) % RANKS
        receive_into(links[rank].incoming[previous], memoryview(received))
        assert received == bytes([previous]) * 5
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(receive_into, links[1].incoming[0], memoryview(bytearray(5)))
        links[1].close()  # wakes up the waiting thread, although the other side is alive
        assert isinstance(waiting.exception(60), OSError)
    for link in links:
        link.close()


def test_only_the_requested_pairs_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", LOCALHOST)
    links = connected([(2, 1)])
    assert [sorted(link.outgoing) for link in links] == [[], [], [1]]
    assert [sorted(link.incoming) for link in links] == [[], [2], []]
    for link in links:
        link.close()


def test_a_rank_on_the_machine_of_rank_0_is_reached_like_rank_0() -> None:
    """It reached rank 0 at an address that other machines cannot use."""
    addresses = [
        {"machine": "a", "hosts": ["10.0.0.1", "node-a"], "port": 1},
        {"machine": "a", "hosts": ["127.0.0.1"], "port": 2},
        {"machine": "b", "hosts": ["10.0.0.2"], "port": 3},
    ]
    assert find_hosts(addresses[1], addresses, "b") == ["10.0.0.1", "node-a"]
    assert find_hosts(addresses[2], addresses, "a") == ["10.0.0.2"]
    assert find_hosts(addresses[1], addresses, "a") == [LOCALHOST]
