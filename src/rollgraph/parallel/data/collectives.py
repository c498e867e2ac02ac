"""The collectives of one process group, started asynchronously, with errors that name the lost rank.

Owns every call into torch.distributed. Does not know buckets, modules or hooks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rollgraph.parallel.ranks.failures import RankLost
from rollgraph.parallel.ranks.liveness import Liveness
from rollgraph.parallel.ranks.world import World

# -- ranks that share a GPU ------------------------------------------------------------------------
# NCCL refuses two ranks on one GPU, and gloo supports few collectives of CUDA tensors. So the host waits until the
# device has computed the input, exchanges a copy of it while the device continues, and copies the result back when the
# caller waits for it. All of this runs in the thread and on the stream of the caller: collectives start in program
# order, as on a CPU, and work that is queued on the stream after the wait reads the result.
#
# It is slower than NCCL, because the host does not run ahead of the device. On a CPU we make the same copies, so that
# tests cover this without a GPU.


class HostStaging:
    """Host copies of the two tensors of a collective: `input` is ready, and the collective fills `output`.

    PyTorch does not reuse their pinned memory before the copies from it have finished.
    """

    def __init__(self, output: Tensor, input: Tensor) -> None:
        if input.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot contain an exchange through host memory, which ranks that share a GPU need"
            )
        self._target = output
        self.output = _allocate_like(output)
        self.input = _allocate_like(input)
        self.input.copy_(input)  # blocks until the stream has computed it

    def copy_back(self) -> None:
        """Queue the copy of the result to the output tensor, once the collective is complete."""
        self._target.copy_(self.output, non_blocking=True)


def _allocate_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


# -- collectives -----------------------------------------------------------------------------------

CollectiveCall = Callable[..., Any]  # a collective of torch.distributed: output, input, group and async_op
Reduction = Literal["library", "ordered"]

# The newer names first: the older ones warn.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ABORT_SECONDS = 5.0  # for a collective to fail after its process group was aborted
_IN_LAYER = "a tensor parallel collective"
_CHECK_INTERVAL = timedelta(seconds=0.25)  # between two checks for a lost rank, during a wait


class CommunicationError(RankLost):
    """A collective failed or timed out. The message names the bucket and the rank; `loss` has the report."""


class WaitEnded(RuntimeError):
    """A wait ended before its collective, which is still in flight."""


@dataclass
class PendingCollective:
    """A collective in flight: functions that wait for it and then copy its result."""

    wait: Callable[[], None]
    copy_out: Callable[[], None]
    buffers: tuple[Tensor, ...] = ()  # kept alive until it is complete

    def complete(self) -> None:
        self.wait()
        self.copy_out()


def _do_nothing() -> None:
    pass


def make_liveness(world: World, timeout: float = 600.0) -> Liveness:
    """Create a liveness check for a world without one. All ranks create theirs in the same order."""
    store = _store_of(world)
    generation = store.add(f"rollgraph/liveness/{world.rank}", 1)
    return Liveness(world.rank, world.size, store, timeout, key=f"rollgraph/liveness/at/{generation}")


def _store_of(world: World) -> Any:
    group: Any = world.group or dist.group.WORLD
    return dist.distributed_c10d._get_process_group_store(group)


class Collectives:
    """All-gathers and reduce-scatters of one process group.

    `reduction="library"` sums as the backend does. "ordered" sums in the order of ranks, so that the bits do not depend
    on the backend. If a rank is lost or does not respond within `timeout` seconds, all others raise. If the world has a
    liveness check, its time-out is used instead.
    """

    def __init__(self, world: World, reduction: Reduction = "library", timeout: float = 600.0) -> None:
        if reduction not in ("library", "ordered"):
            raise ValueError(f"reduction={reduction!r}: expected 'library' or 'ordered'")
        if world.size > 1 and not dist.is_initialized():
            raise CommunicationError(f"there are {world.size} ranks, but torch.distributed is not initialised")
        self._world = world
        self._reduction = reduction
        self._unfinished: set[Any] = set()  # collectives that were started and not waited for
        self.timeout = timeout
        self.liveness = world.liveness
        if world.size > 1 and self.liveness is None:
            self.liveness = make_liveness(world, timeout)
            weakref.finalize(self, self.liveness.close)
        if self.liveness is not None:
            self.timeout = self.liveness.timeout
        self.before_starting: Callable[[], None] = _do_nothing  # called before each collective
        self.before_blocking: Callable[[], None] = _do_nothing  # called before collectives that block all ranks
        self.while_waiting: Callable[[], None] = _do_nothing  # polled during waits; may raise WaitEnded to end the wait

    @property
    def staged(self) -> bool:
        """Whether collectives pass through host memory."""
        return self._world.staged

    @property
    def _on_device(self) -> bool:
        """Whether collectives run on the GPU, so that the host need not wait for them."""
        return self._world.device.startswith("cuda") and not self.staged

    @property
    def store(self) -> Any:
        """The key-value store of the process group, through which ranks exchange messages without a collective."""
        return _store_of(self._world)

    def rejoin(self, world: World) -> None:
        """Continue in the next attempt, with its process group and liveness check. Rank and size must be the same."""
        if (world.rank, world.size) != (self._world.rank, self._world.size):
            raise ValueError(
                f"rank {self._world.rank} of {self._world.size} cannot go on as {world.rank} of {world.size}"
            )
        if not self.wait_until_failed(_ABORT_SECONDS):
            raise CommunicationError("a lost rank may still write to the memory of this process: start a new process")
        self._world = world
        self.liveness = world.liveness
        if self.liveness is not None:
            self.timeout = self.liveness.timeout

    def wait_until_failed(self, seconds: float) -> bool:
        """Wait until collectives with a lost rank have failed: until then they may still write to memory.

        With gloo, a collective fails once the connections to the lost rank are closed, so that process has to be ended.
        Returns whether all of them failed within `seconds`; then we forget them.
        """
        deadline = time.monotonic() + seconds
        while any(not work.is_completed() for work in self._unfinished):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        self._unfinished.clear()
        return True

    def gather(self, full: Tensor, shard: Tensor, what: str) -> PendingCollective:
        """Start to fill `full` with the shards of all ranks. `what` names the collective in errors."""
        if self._world.size == 1:
            return PendingCollective(_do_nothing, _do_nothing)
        shard_copy = shard.clone()  # the shard may be a part of `full`
        wait = self._start(what, _all_gather, full, shard_copy)
        return PendingCollective(wait, _do_nothing, (shard_copy,))

    def reduce(self, gradients: Tensor, shard: Tensor, what: str, *, accumulate: bool = False) -> PendingCollective:
        """Start to sum gradients over all ranks into this rank's `shard`, on top of its contents if `accumulate`."""
        size = self._world.size
        if size == 1:
            return PendingCollective(_do_nothing, _do_nothing)
        if self._reduction == "library":
            total = torch.empty_like(shard)
            wait = self._start(what, _reduce_scatter, total, gradients)
            return PendingCollective(wait, lambda: sum_in_order(shard, total.unsqueeze(0), accumulate), (total,))
        parts = torch.empty_like(gradients)
        wait = self._start(what, dist.all_to_all_single, parts, gradients)
        return PendingCollective(wait, lambda: sum_in_order(shard, parts.view(size, -1), accumulate), (parts,))

    def sum(self, value: Tensor, what: str = "the sum of a scalar") -> Tensor:
        """The sum of a scalar over all ranks, added in their order."""
        if self._world.size == 1:
            return value
        self.before_blocking()
        values = self._all_gather_now(value.view(1), what)
        total = values[0].clone()
        for part in values[1:]:
            total += part
        return total

    def all_gather_text(self, text: str, *, counts_as_progress: bool = True) -> list[str]:
        """The strings that all ranks passed, in the order of ranks. For `counts_as_progress` see `_start`."""
        if self._world.size == 1:
            return [text]
        self.before_blocking()
        device = self._world.device
        content = text.encode(errors="surrogatepass")
        # One byte more than needed, because frombuffer refuses an empty buffer.
        encoded = torch.frombuffer(bytearray(content + b"."), dtype=torch.uint8).to(device)[:-1]
        what = "the exchange of strings"
        lengths = self._all_gather_now(torch.tensor([len(encoded)], device=device), what, counts_as_progress).tolist()
        longest = max(lengths)
        if longest == 0:
            return [""] * self._world.size
        padded = encoded.new_zeros(longest)
        padded[: len(encoded)] = encoded
        rows = self._all_gather_now(padded, what, counts_as_progress).view(self._world.size, -1).cpu()
        texts = []
        for row, length in zip(rows, lengths, strict=True):
            texts.append(row[:length].numpy().tobytes().decode(errors="surrogatepass"))
        return texts

    def all_gather_in_layer(self, tensor: Tensor) -> Tensor:
        """All-gather inside a layer: the tensors of all ranks, [ranks, ...]."""
        gathered = tensor.new_empty((self._world.size, *tensor.shape))
        self._run_in_layer(_all_gather, gathered.view(-1), tensor.view(-1))
        return gathered

    def all_to_all_in_layer(self, rows: Tensor) -> Tensor:
        """All-to-all inside a layer: from each rank the row for this rank, [ranks, ...]."""
        received = torch.empty_like(rows)
        self._run_in_layer(dist.all_to_all_single, received, rows)
        return received

    def _run_in_layer(self, call: CollectiveCall, output: Tensor, input: Tensor) -> None:
        """Run a collective inside a layer. On a GPU, the host does not wait for it.

        It does not count as progress: tensor parallel groups have different samples, so their counts differ.
        """
        assert self.liveness is not None
        if self._on_device:
            with self._explain_errors(_IN_LAYER):
                self.liveness.check()
                call(output, input, group=self._world.group)
            return
        wait = self._start(_IN_LAYER, call, output, input, counts_as_progress=False)
        wait()

    def _all_gather_now(self, tensor: Tensor, what: str, counts_as_progress: bool = True) -> Tensor:
        """The concatenated tensors of all ranks."""
        gathered = tensor.new_empty(self._world.size * len(tensor))
        self._start(what, _all_gather, gathered, tensor, counts_as_progress=counts_as_progress)()
        return gathered

    def _start(
        self, what: str, call: CollectiveCall, output: Tensor, input: Tensor, *, counts_as_progress: bool = True
    ) -> Callable[[], None]:
        """Start a collective, and return a function that waits for it.

        All ranks start the same number of collectives with `counts_as_progress`: the count shows who is behind.
        """
        assert self.liveness is not None
        self.before_starting()
        staging = None
        if self.staged:
            staging = HostStaging(output, input)
            output = staging.output
            input = staging.input
        with self._explain_errors(what):
            self.liveness.check()
            if counts_as_progress:
                self.liveness.report_progress(what)
            work = call(output, input, group=self._world.group, async_op=True)
        self._unfinished.add(work)

        def wait() -> None:
            with self._explain_errors(what):
                self._wait(work, what)
            self._unfinished.discard(work)
            if staging is not None:
                staging.copy_back()

        return wait

    def _wait(self, work: Any, what: str) -> None:
        """Wait while all ranks are alive, but no longer than the time-out."""
        assert self.liveness is not None
        if self._on_device:
            work.wait(timedelta(seconds=self.timeout))  # only one wait: NCCL aborts a collective whose wait times out
            self.liveness.check()  # the wait also ends, with any result, if a lost rank made us abort the collective
            return
        deadline = self.liveness.clock() + self.timeout
        while True:
            try:
                work.wait(_CHECK_INTERVAL)
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or completed just after the wait timed out
                    work.wait()
                    return
            self.liveness.check()
            self.while_waiting()
            if self.liveness.clock() > deadline:
                reason = self.liveness.report_timeout(what)
                raise RankLost(reason, self.liveness.loss)

    @property
    def _rank_of_all(self) -> int:
        """The rank among all ranks, for messages: the group may be a part of them."""
        return self._world.rank if self.liveness is None else self.liveness.rank

    @contextmanager
    def _explain_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except WaitEnded:
            raise
        except RankLost as error:
            message = f"rank {self._rank_of_all}: {what} failed: {error}"
            raise CommunicationError(message, error.loss) from error
        except RuntimeError as error:
            assert self.liveness is not None
            reason = self.liveness.wait_for_loss() or "all ranks are alive"
            message = f"rank {self._rank_of_all}: {what} failed: {reason} ({_last_line(error)})"
            raise CommunicationError(message, self.liveness.loss) from error


def _last_line(error: BaseException) -> str:
    """The last line of a PyTorch error, whose text may begin with a C++ stack trace."""
    return str(error).strip().splitlines()[-1]


def sum_in_order(shard: Tensor, parts: Tensor, accumulate: bool = False) -> None:
    """Add up the rows of `parts` in order: into the shard or, with `accumulate`, onto its contents.

    Microbatches that are reduced one after another then give the same sum as in a single process.
    """
    if not accumulate:
        shard.copy_(parts[0])
        parts = parts[1:]
    for part in parts:
        shard.add_(part)
