"""Streaming weights: the bits that are stored, bounded memory, progress in bytes, and no mixture of two files."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollgraph.files import FileError
from rollgraph.model import Architecture, Decoder, ModelFileError, load_model, load_weights, save_model
from rollgraph.model.weights import hf
from rollgraph.model.weights.stream import READ_THREADS, FileVersion, Transfer, stream

SMALL = Architecture("qwen2", vocabulary=23, hidden=16, mlp=20, layers=3, heads=4, kv_heads=2, head_dim=6, tied=True)
UNTIED = Architecture("llama", 23, 16, 20, 2, 4, 1, 4, attention_bias=True, mlp_bias=True)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def build(architecture: Architecture = SMALL, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.to(dtype)


def same(left: Decoder, right: Decoder) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def stored_bytes(folder: Path) -> int:
    tensors = [tensor for path in folder.glob("*.safetensors") for tensor in load_file(path).values()]
    return sum(tensor.nbytes for tensor in tensors)


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_of_any_size_at_any_offset_arrive_in_their_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """The tensors are at odd offsets, in two files, and in pieces that do not divide them."""
    stored, transfers = [], []
    for number, padding in enumerate((3, 8)):
        values = torch.randn(501).to(dtype)
        path = tmp_path / f"{number}.bin"
        path.write_bytes(b"x" * padding + values.view(torch.uint8).numpy().tobytes() + b"y")
        for other in DTYPES:
            transfers.append(Transfer(FileVersion.of(path), padding, dtype, torch.zeros(3, 167, dtype=other)))
            stored.append(values.view(3, 167).to(other))
    stream(transfers, staging_bytes=READ_THREADS * 2 * 100)
    for transfer, expected in zip(transfers, stored, strict=True):
        assert torch.equal(transfer.to, expected)


@pytest.mark.parametrize("architecture", [SMALL, UNTIED], ids=lambda a: a.family)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_progress_counts_the_bytes_of_the_files_up_to_the_last_one(
    architecture: Architecture, stored: torch.dtype, tmp_path: Path
) -> None:
    model = build(architecture, stored)
    save_model(model, tmp_path, shard_bytes=1500)
    for dtype in (torch.float32, torch.bfloat16):
        reports: list[tuple[int, int]] = []
        loaded = load_model(tmp_path, dtype=dtype, on_bytes=lambda *progress, reports=reports: reports.append(progress))
        assert same(loaded, model.to(dtype))
        done, totals = zip(*reports, strict=True)
        assert set(totals) == {stored_bytes(tmp_path)}
        assert (done[0], done[-1]) == (0, totals[0])
        assert sorted(set(done)) == list(done)


def test_loading_counts_as_a_write_to_the_parameters(tmp_path: Path) -> None:
    """The backward of an earlier forward is refused, as after `copy_`."""
    save_model(build(), tmp_path)
    model = build()
    hidden = model(torch.arange(4), torch.arange(4), torch.tensor([0, 4], dtype=torch.int32), 4)
    load_weights(model, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


# -- files that change -----------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    """The same size and the same file, with other numbers at its end."""
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1" * 8)
    os.utime(path, ns=(0, 0))


def exchange(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


@pytest.mark.parametrize(
    ("change", "when"),
    [(cut, "before"), (overwrite, "before"), (exchange, "before"), (os.remove, "before"), (cut, "during"),
     (overwrite, "during")],  # an open file that is exchanged or removed does not change
)  # fmt: skip
def test_a_file_that_changes_is_an_error_and_leaves_only_nan(
    change: Any, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the header and the tensors, or while the tensors are read."""
    save_model(build(), tmp_path)
    path = tmp_path / hf.WEIGHTS
    changed: list[int] = []

    def meddle(done: int, total: int) -> None:
        if not changed and bool(done) == (when == "during"):
            changed.append(done)
            change(path)

    def meddling(transfers: Any, on_bytes: Any) -> None:
        stream(transfers, meddle, staging_bytes=READ_THREADS * 2 * 64)

    monkeypatch.setattr(hf, "stream", meddling)
    model = build()
    with pytest.raises(ModelFileError, match=rf"{path} (changed|became shorter) while|cannot be read: No such file"):
        load_weights(model, tmp_path)
    assert changed
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())


def test_an_interruption_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(4000))
    done: list[int] = []

    def interrupt(count: int, total: int) -> None:
        done.append(count)
        if count:
            raise KeyboardInterrupt

    transfer = Transfer(FileVersion.of(path), 0, torch.float32, torch.ones(1000))
    with pytest.raises(KeyboardInterrupt):
        stream([transfer], interrupt, staging_bytes=READ_THREADS * 2 * 4)
    assert done == [0, 4]


def test_a_file_that_is_shorter_than_its_tensors_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(100))
    transfer = Transfer(FileVersion.of(path), 0, torch.float32, torch.ones(26))
    with pytest.raises(FileError, match="became shorter while it was read"):
        stream([transfer])


# -- memory ----------------------------------------------------------------------------------------

MIB = 2**20
LARGE = Architecture("llama", vocabulary=4096, hidden=1024, mlp=4096, layers=4, heads=16, kv_heads=16, head_dim=64)
LIMITED = """
import resource, sys
from functools import partial
from pathlib import Path

import torch
from rollgraph.model.weights import hf
from rollgraph.model import load_model
from rollgraph.model.weights.stream import stream

warm, folder, dtype, allowed = sys.argv[1:]
hf.stream = partial(stream, staging_bytes=8 * 2**20)
load_model(warm, dtype=getattr(torch, dtype))
status = Path("/proc/self/status").read_text()
used = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + int(allowed), -1))
mapped = []

def look(done, total):
    mapped.append(folder in Path("/proc/self/maps").read_text())

model = load_model(folder, dtype=getattr(torch, dtype), on_bytes=look)
resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
assert len(mapped) > 10 and not any(mapped), "a file of weights is mapped"
print(sum(parameter.double().sum().item() for parameter in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other ways")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_needs_no_more_host_memory_than_the_weights_and_its_buffers(dtype: str, tmp_path: Path) -> None:
    """The system refuses any memory beyond that. The files have 300 MB, and the margin is a fifth of that."""
    torch.manual_seed(0)
    model = Decoder(LARGE)
    save_model(model, tmp_path / "large", shard_bytes=100 * MIB)
    save_model(Decoder(SMALL), tmp_path / "small")
    assert stored_bytes(tmp_path / "large") > 280 * MIB
    model = model.to(getattr(torch, dtype))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    allowed = weights + 8 * MIB + 48 * MIB
    arguments = [str(tmp_path / "small"), str(tmp_path / "large"), dtype, str(allowed)]
    done = subprocess.run([sys.executable, "-c", LIMITED, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == sum(parameter.double().sum().item() for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gpu_gets_the_same_bits_and_allocates_little_more_than_the_weights(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "stream", partial(stream, staging_bytes=16 * MIB))
    save_model(build(LARGE, stored), tmp_path, shard_bytes=100 * MIB)
    expected = load_model(tmp_path, dtype=dtype)
    pinned = pinned_bytes()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    reports: list[tuple[int, int]] = []
    loaded = load_model(tmp_path, dtype=dtype, device="cuda", on_bytes=lambda *progress: reports.append(progress))
    assert torch.cuda.max_memory_allocated() - before < sum(p.nbytes for p in loaded.parameters()) + 32 * MIB
    assert pinned_bytes() - pinned <= 16 * MIB
    assert same(loaded.cpu(), expected)
    assert reports[-1] == (stored_bytes(tmp_path),) * 2


def pinned_bytes() -> int:
    """The pinned memory that PyTorch holds, in use or not: it returns none to the system."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
