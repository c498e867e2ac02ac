"""Streams tensors from files into existing memory, on the host or on a GPU.

A few threads read pieces of the files in order. A piece goes straight to its destination if that is host memory of the
same dtype. To a GPU, or to another dtype, it passes through staging buffers of a fixed total size. Files are not
memory-mapped, so these buffers are all the host memory that we use. Knows nothing of models.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rollgraph.files import FileError

STAGING_BYTES = 256 * 2**20  # of all threads together
READ_THREADS = 4
_BUFFERS = 2  # of each thread: one is filled while the other is copied to the GPU
OnBytes = Callable[[int, int], None]  # called with the number of bytes read so far, and in all


class FileVersion(NamedTuple):
    """A file as it was when its header was read."""

    path: Path
    size: int
    modified: int
    inode: int

    @classmethod
    def of(cls, path: Path, descriptor: int | None = None) -> FileVersion:
        status = os.stat(path if descriptor is None else descriptor)
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def check(self, descriptor: int) -> None:
        """Raise if an open file is not this version."""
        if FileVersion.of(self.path, descriptor) != self:
            raise FileError(self.path, "changed while it was read")


class Transfer(NamedTuple):
    """A tensor in a file, or a piece of one, and its destination.

    With a `stride`, the rows are parts of longer rows in the file, which begin `stride` bytes after each other.
    """

    file: FileVersion
    offset: int
    dtype: torch.dtype
    to: Tensor  # contiguous; it may have another dtype, which converts
    stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.to.numel() * self.dtype.itemsize

    @property
    def needs_staging(self) -> bool:
        return self.to.device.type != "cpu" or self.to.dtype != self.dtype

    def split(self, max_bytes: int) -> Iterator[Transfer]:
        """Pieces of at most `max_bytes`; with a stride, of whole rows."""
        if self.stride:
            rows = max(1, max_bytes // (self.to.shape[1] * self.dtype.itemsize))
            for first in range(0, len(self.to), rows):
                yield self._replace(offset=self.offset + first * self.stride, to=self.to[first : first + rows])
            return
        flat = self.to.view(-1)
        step = max(1, max_bytes // self.dtype.itemsize)
        for start in range(0, len(flat), step):
            offset = self.offset + start * self.dtype.itemsize
            yield self._replace(offset=offset, to=flat[start : start + step])


def stream(transfers: Sequence[Transfer], on_bytes: OnBytes | None = None, staging_bytes: int = STAGING_BYTES) -> None:
    """Read all tensors into their destinations. Raises `FileError` if a file is truncated or changes meanwhile.

    After an error, some destinations have been written. `on_bytes` is called in the calling thread.
    """
    report = on_bytes or (lambda done, total: None)
    pieces = [piece for transfer in transfers for piece in transfer.split(staging_bytes // (READ_THREADS * _BUFFERS))]
    total = sum(piece.nbytes for piece in pieces)
    done = 0
    report(done, total)
    with _opened(pieces) as files, ThreadPoolExecutor(READ_THREADS, "weights") as pool:
        destinations = _Destinations(files, pieces)
        try:
            for piece, _ in zip(pieces, pool.map(destinations.fill, pieces), strict=True):
                done += piece.nbytes
                if done < total:
                    report(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            destinations.wait()
    report(total, total)


@contextmanager
def _opened(pieces: Sequence[Transfer]) -> Iterator[dict[FileVersion, int]]:
    """A descriptor of each file. Raises if a file is not the expected version, at the beginning or at the end."""
    with ExitStack() as stack:
        files: dict[FileVersion, int] = {}
        for file in dict.fromkeys(piece.file for piece in pieces):
            try:
                files[file] = os.open(file.path, os.O_RDONLY)
            except OSError as error:
                raise FileError(file.path, "cannot be read", str(error.strerror)) from None
            stack.callback(os.close, files[file])
            file.check(files[file])
        yield files
        for file, descriptor in files.items():
            file.check(descriptor)


class _Destinations:
    """Fills the destinations of pieces, from any thread."""

    def __init__(self, files: dict[FileVersion, int], pieces: Sequence[Transfer]) -> None:
        self._files = files
        self._devices = {piece.to.device for piece in pieces if piece.to.is_cuda}
        largest = max((piece.nbytes for piece in pieces if piece.needs_staging), default=0)
        ready = {device: torch.cuda.current_stream(device).record_event() for device in self._devices}
        self._staging = _Staging(largest, ready)

    def fill(self, piece: Transfer) -> None:
        descriptor = self._files[piece.file]
        if not piece.needs_staging:
            _read(descriptor, piece, piece.to)
            return
        staging = self._staging
        buffer = staging.take()[: piece.nbytes].view(piece.dtype).view(piece.to.shape)
        _read(descriptor, piece, buffer)
        if not piece.to.is_cuda:
            piece.to.copy_(buffer)
            return
        with torch.cuda.stream(staging.stream(piece.to.device)):
            if piece.to.dtype != piece.dtype:
                buffer = buffer.to(piece.to.device, non_blocking=True)  # converted on the GPU
            piece.to.copy_(buffer, non_blocking=True)
            staging.sent()

    def wait(self) -> None:
        """Wait for all copies to the GPUs."""
        for device in self._devices:
            torch.cuda.synchronize(device)


class _Staging(threading.local):
    """The buffers and the streams of one thread."""

    def __init__(self, nbytes: int, ready: dict[torch.device, torch.cuda.Event]) -> None:
        self._nbytes = nbytes
        self._ready = ready  # events after which the destinations may be written
        self._buffers: list[Tensor] = []
        self._arrivals: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._current = -1

    def take(self) -> Tensor:
        """A buffer whose last copy has finished."""
        self._current = (self._current + 1) % _BUFFERS
        if len(self._buffers) <= self._current:
            self._buffers.append(torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=bool(self._ready)))
        arrival = self._arrivals[self._current]
        if arrival is not None:
            arrival.synchronize()
        return self._buffers[self._current]

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_event(self._ready[device])
        return self._streams[device]

    def sent(self) -> None:
        """Call after the copy from the buffer that was taken last was enqueued on the current stream."""
        self._arrivals[self._current] = torch.cuda.current_stream().record_event()


def _read(descriptor: int, piece: Transfer, into: Tensor) -> None:
    """Fill host memory with the bytes of a piece: in one read or, with a stride, row by row."""
    memory: memoryview = into.view(-1).view(torch.uint8).numpy().data
    if not piece.stride:
        _read_at(descriptor, piece, piece.offset, memory)
        return
    row_nbytes = len(memory) // len(into)
    for row in range(len(into)):
        row_memory = memory[row * row_nbytes : (row + 1) * row_nbytes]
        _read_at(descriptor, piece, piece.offset + row * piece.stride, row_memory)


def _read_at(descriptor: int, piece: Transfer, offset: int, memory: memoryview) -> None:
    while memory:
        try:
            count = os.preadv(descriptor, [memory], offset)
        except OSError as error:
            raise FileError(piece.file.path, "cannot be read", str(error.strerror)) from None
        if not count:
            raise FileError(piece.file.path, "became shorter while it was read")
        memory = memory[count:]
        offset += count
