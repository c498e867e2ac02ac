"""Copies of a rank's state: they arrive whole or not at all, and one is whole at any time."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollgraph.sharding.optimizer_state import OptimizerState
from rollgraph.sharding.peer_choice import Holding, Version
from rollgraph.sharding.peer_copies import PeerCopies, ShardCopy, receive_copy, send_copy, spare_of
from rollgraph.sharding.shard_snapshot import layout_of
from rollgraph.sharding.state_memory import StateFormat

RANKS = 3
ABOUT = {"steps": 3, "state": {"data": {"cursor": 5}, "reward": 0.1}}


def filled(state: StateFormat, elements: int = 40_000) -> tuple[OptimizerState, PeerCopies]:
    """Shards with a rank's own copies of them; the first copy is whole."""
    optimizer = OptimizerState([elements, 64], state, "none", "cpu")
    for shard in optimizer.shards:
        for tensor in shard.values():
            tensor.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(tensor.numel()))
    copies = PeerCopies()
    copies.prepare(RANKS)
    copies.own[0].begin(layout_of(optimizer.shards), "cpu")
    for source, target in zip(optimizer.shards, copies.own[0].shards, strict=True):
        for name, tensor in source.items():
            target[name].copy_(tensor)
    copies.own[0].complete(1, Version(0, 2), ABOUT)
    return optimizer, copies


def bytes_of(copy: ShardCopy) -> bytes:
    return b"".join(bytes(memory) for memory in copy.bytes())


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_copy_arrives_bit_for_bit(state: StateFormat) -> None:
    _, copies = filled(state)
    there = PeerCopies()
    there.prepare(RANKS)
    sender, receiver = socket.socketpair()
    with sender, receiver, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send_copy, sender, copies.own[0])
        receive_copy(receiver, there.neighbours[0], "cpu")
        sending.result()
    assert bytes_of(there.neighbours[0]) == bytes_of(copies.own[0])
    assert there.held() == [Holding(1, Version(0, 2))]
    assert there.find(1, Version(0, 2)) is there.neighbours[0]
    assert there.neighbours[0].about == ABOUT


def test_a_copy_whose_sender_dies_does_not_count_and_the_one_before_stays() -> None:
    optimizer, copies = filled("fp32", elements=4_000_000)  # more than a socket holds
    there = PeerCopies()
    there.prepare(RANKS)
    before = there.neighbours[0]
    before.begin(layout_of(optimizer.shards), "cpu")
    before.complete(1, Version(0, 1), {})
    kept = bytes_of(before)
    broken = spare_of(there.neighbours)
    broken.complete(1, Version(0, 0), {})  # what it held is given up when something newer begins to arrive
    sender, receiver = socket.socketpair()
    with sender, receiver, ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as thread_of_sender:
        receiving = thread.submit(receive_copy, receiver, broken, "cpu")
        sending = thread_of_sender.submit(send_copy, sender, copies.own[0])
        while broken.shards == ():  # it has begun to arrive
            time.sleep(0.001)
        sender.shutdown(socket.SHUT_RDWR)
        assert isinstance(sending.exception(), OSError)
        assert isinstance(receiving.exception(), ConnectionError)
    assert there.held() == [Holding(1, Version(0, 1))]
    assert bytes_of(before) == kept
    assert spare_of(there.neighbours) is broken


def test_the_older_copy_is_written_over() -> None:
    _, copies = filled("fp32")
    assert spare_of(copies.own) is copies.own[1]
    copies.own[1].complete(1, Version(0, 3), ABOUT)
    assert spare_of(copies.own) is copies.own[0]
    copies.own[0].complete(1, Version(1, 2), ABOUT)  # restored, and older than what another attempt had come to
    assert spare_of(copies.own) is copies.own[1]
    copies.forget_all_but(Version(0, 3))
    assert spare_of(copies.own) is copies.own[0]


def test_memory_is_kept_for_the_same_state_and_replaced_for_another() -> None:
    optimizer, copies = filled("fp32")
    memory = copies.own[0].shards
    copies.own[0].begin(layout_of(optimizer.shards), "cpu")
    assert copies.own[0].shards is memory
    assert copies.held() == []
    copies.own[0].begin(layout_of(OptimizerState([40_000, 64], "int8", "none", "cpu").shards), "cpu")
    assert copies.own[0].shards is not memory


def test_copies_are_of_no_use_to_another_number_of_ranks() -> None:
    _, copies = filled("fp32")
    copies.prepare(RANKS)
    assert copies.held() == [Holding(1, Version(0, 2))]
    copies.prepare(RANKS + 1)
    assert copies.held() == []
