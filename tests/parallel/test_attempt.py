"""Attempts: ranks leave one without waiting for anybody, and the same processes join the next."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from rollgraph.checkpoint import load, write
from rollgraph.config.keys import RanksConfig
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.connection import RankServer, connect_to_rank_0
from rollgraph.parallel.ranks.failures import RankLost
from rollgraph.parallel.ranks.join import (
    Attempt,
    RefusedBefore,
    end_process,
    join,
    leave,
    own_store,
    raise_if_refused,
    refuse_retries,
)
from rollgraph.parallel.ranks.liveness import RANK_0
from rollgraph.parallel.ranks.world import World

RANKS, STEPS = 3, 4


def test_the_address_of_a_dead_attempt_is_ignored() -> None:
    """`torchrun` restarts ranks with the same store, in which the old rank 0 left its address."""
    store = dist.HashStore()
    RankServer(2, store, RANK_0, "old", 0).close()
    new_servers: list[RankServer] = []

    class LateStore:
        """The new rank 0 publishes its address after the other rank has looked for it."""

        def get(self, key: str) -> bytes:
            address: bytes = store.get(key)
            if not new_servers:
                new_servers.append(RankServer(2, store, key, "new", 1))
            return address

    def answer() -> Any:
        while not new_servers:
            time.sleep(0.01)
        return new_servers[0].accept([1])

    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(answer)
        rank_0 = connect_to_rank_0(1, LateStore(), RANK_0, 60.0, "here")
        rank, node, connection = accepted.result(60)
    assert (rank_0.token, rank_0.node, rank_0.attempt, rank, node) == (new_servers[0].token, "new", 1, 1, "here")
    for one in (rank_0.connection, connection, new_servers[0]):
        one.close()


def test_a_user_error_makes_later_attempts_refuse_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for error in (RankLost("rank 1 is gone"), RuntimeError("out of memory"), KeyboardInterrupt()):
        refuse_retries(store, error)
        raise_if_refused(store)
    refuse_retries(store, ValueError("rewards.py has no function exact"))
    with pytest.raises(RefusedBefore, match=r"rewards\.py has no function exact") as raised:
        raise_if_refused(store)
    refuse_retries(store, raised.value)  # the second attempt adds nothing
    with pytest.raises(RefusedBefore, match=r"^an earlier attempt failed, and so would this one: rewards"):
        raise_if_refused(store)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")  # the store dies with rank 0, and with it the note
    raise_if_refused(store)


def test_each_attempt_has_a_store_of_its_own() -> None:
    store = dist.HashStore()
    own_store(store, 0).set("address", "old")
    assert not own_store(store, 1).check(["address"])


# -- the same process in two attempts --------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def take_steps(sharded: ShardedModel, optimizer: ShardedAdamW, steps: range, lose: Callable[[], None]) -> None:
    """`lose` is called in step 2, before the backward pass, which begins to reduce its gradients."""
    for step in steps:
        torch.manual_seed(10 * step + sharded.world.rank)
        loss = sharded.model(torch.randn(5, 6)).square().mean()
        if step == 2:
            lose()
        loss.backward()
        sharded.gradients.finish()
        optimizer.step()
        sharded.flat.zero_gradients()
    sharded.gather()


def rank_main(rank: int, number: int, port: int, folder: Path, how: int) -> None:
    """One rank from the attempt `number` on."""
    torch.set_num_threads(1)
    limits = RanksConfig(timeout=100.0, heartbeat_timeout=10.0 if how == signal.SIGSTOP else 100.0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)

    def join_attempt(number: int) -> World:
        return join(Attempt(number, rank, RANKS, node=f"node-{rank}", store=own_store(store, number)), limits)

    world = join_attempt(number)
    sharded = ShardedModel(make_model(), world, reduction="ordered", bucket_bytes=64)
    optimizer = ShardedAdamW(sharded, lr=0.1)
    memory = [parameter.data_ptr() for parameter in sharded.model.parameters()]
    if number == 0:
        try:
            take_steps(sharded, optimizer, range(2), lambda: None)
            write.save(folder / "saved", sharded, optimizer)
            take_steps(sharded, optimizer, range(2, STEPS), lambda: signal_rank_1(rank, how))
            leave(world)
            torch.save([p.detach() for p in sharded.model.parameters()], folder / f"undisturbed{rank}.pt")
            return
        except RankLost as error:
            began = time.monotonic()
            leave(world, error)
            assert time.monotonic() - began < 50, "it waited"
            (folder / f"left{rank}").write_text(str(error))
        world = join_attempt(1)
        sharded.rejoin(world)
    load.load(folder / "saved", sharded, optimizer)
    take_steps(sharded, optimizer, range(2, STEPS), lambda: None)
    leave(world)
    assert [parameter.data_ptr() for parameter in sharded.model.parameters()] == memory
    torch.save([p.detach() for p in sharded.model.parameters()], folder / f"after{rank}.pt")
    end_process(0)


def signal_rank_1(rank: int, how: int) -> None:
    if rank == 1 and how:
        os.kill(os.getpid(), how)


def start(number: int, ranks: range, port: int, folder: Path, how: int) -> list[BaseProcess]:
    context = mp.get_context("forkserver")
    processes: list[BaseProcess] = []
    for rank in ranks:
        processes.append(context.Process(target=rank_main, args=(rank, number, port, folder, how), daemon=True))
        processes[-1].start()
    return processes


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_continue_with_a_new_rank_in_the_same_memory(tmp_path: Path, how: int) -> None:
    """Rank 1 is killed, or stopped, while the others wait for it in a collective. A new process takes its place."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    undisturbed = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = start(0, range(RANKS), store.port, tmp_path, how)
    reference = tmp_path / "others"
    reference.mkdir()
    processes += start(0, range(RANKS), undisturbed.port, reference, 0)
    survivors = [tmp_path / "left0", tmp_path / "left2"]
    deadline = time.monotonic() + 300
    while not all(path.exists() for path in survivors):
        assert time.monotonic() < deadline, [process.exitcode for process in processes]
        time.sleep(0.01)
    processes[1].kill()  # its launcher ends a rank that hangs
    processes += start(1, range(1, 2), store.port, tmp_path, how)
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0, 0, 0, 0, 0]
    for path in survivors:
        assert "rank 1 on node-1 (set-up; last operation: " in path.read_text()
    for rank in range(RANKS):
        expected, result = torch.load(reference / f"undisturbed{rank}.pt"), torch.load(tmp_path / f"after{rank}.pt")
        assert all(map(torch.equal, expected, result))
