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
def test_each_phase_has_a_peak_of_its_own_on_a_gpu() -> None:
    """The peak over all phases is kept, although each phase resets the counter."""
    memory = MemoryMeter("cuda")
    for phase, size in (("generate", 256), ("train", 64), ("generate", 32)):
        memory.start_phase()
        tensor = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        del tensor
        memory.end_phase(phase)
    assert memory.by_phase["generate"] - memory.by_phase["train"] == 192 * MIB
    assert memory.peak >= memory.by_phase["generate"]


@pytest.mark.gpu
def test_capture_memory_counts_for_its_phase() -> None:
    """A replay allocates nothing, but needs the memory of its capture."""
    memory = MemoryMeter("cuda")
    for phase, size in (("score", 64), ("train", 256), ("train", 32)):
        memory.start_capture(phase)
        tensor = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        del tensor
    memory.end_captures()
    for phase in ("score", "train"):
        memory.start_phase()
        memory.end_phase(phase)
    assert memory.by_phase["train"] - memory.by_phase["score"] == 192 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_phase_on_a_cpu_has_the_resident_memory_at_its_end() -> None:
    memory = MemoryMeter("cpu")
    memory.start_phase()
    memory.end_phase("generate")
    assert 0 < memory.by_phase["generate"] < 2 * memory.peak  # the system updates the two at different times
    assert resident_bytes() is not None


def test_the_peak_of_a_process_is_not_inherited_from_its_parent() -> None:
    memory = bytearray(1024 * MIB)
    memory[:: mmap.PAGESIZE] = bytes(len(range(0, len(memory), mmap.PAGESIZE)))  # makes every page resident
    program = "from rollgraph.run.step_log import peak_resident_bytes; print(peak_resident_bytes())"
    peak = int(subprocess.check_output([sys.executable, "-c", program]))
    assert 0 < peak < len(memory)


def test_without_proc_only_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    memory = MemoryMeter("cpu")
    memory.start_phase()
    memory.end_phase("generate")
    assert memory.by_phase == {}
    assert memory.peak > 0
