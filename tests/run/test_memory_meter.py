from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollgraph.run.step_log import MemoryMeter, resident_bytes

MIB = 2**20


@pytest.mark.gpu
def test_each_phase_on_a_gpu_has_its_own_peak() -> None:
    """The peak of all phases is kept, although each one begins anew."""
    memory = MemoryMeter("cuda")
    for phase, size in (("generate", 256), ("train", 64), ("generate", 32)):
        memory.start_phase()
        held = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        del held
        memory.end_phase(phase)
    assert memory.by_phase["generate"] - memory.by_phase["train"] == 192 * MIB
    assert memory.peak >= memory.by_phase["generate"]


@pytest.mark.gpu
def test_what_a_capture_allocates_counts_for_its_phase() -> None:
    """A replay allocates nothing, and needs the memory nevertheless."""
    memory = MemoryMeter("cuda")
    for phase, size in (("score", 64), ("train", 256), ("train", 32)):
        memory.start_capture(phase)
        held = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        del held
    memory.end_captures()
    for phase in ("score", "train"):
        memory.start_phase()
        memory.end_phase(phase)
    assert memory.by_phase["train"] - memory.by_phase["score"] == 192 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is resident")
def test_a_phase_on_a_cpu_has_what_was_resident_at_its_end() -> None:
    memory = MemoryMeter("cpu")
    memory.start_phase()
    memory.end_phase("generate")
    assert 0 < memory.by_phase["generate"] < 2 * memory.peak  # the system counts the two at other moments
    assert resident_bytes() is not None


def test_the_peak_is_not_that_of_the_process_that_started_this_one() -> None:
    held = bytearray(1024 * MIB)
    held[:: mmap.PAGESIZE] = bytes(len(range(0, len(held), mmap.PAGESIZE)))  # resident, every page
    program = "from rollgraph.run.step_log import peak_resident_bytes; print(peak_resident_bytes())"
    peak = int(subprocess.check_output([sys.executable, "-c", program]))
    assert 0 < peak < len(held)


def test_where_the_system_does_not_tell_only_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    memory = MemoryMeter("cpu")
    memory.start_phase()
    memory.end_phase("generate")
    assert memory.by_phase == {}
    assert memory.peak > 0
