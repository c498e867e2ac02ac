from __future__ import annotations

from pathlib import Path

import pytest

from rollgraph.log.progress import PlainDisplay
from rollgraph.train import train
from tests.test_train import ONE, config_of, folder

__all__ = ["folder"]


def test_the_display_shows_every_phase_to_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress: dict[str, list[tuple[int, int]]] = {}
    show = PlainDisplay.phase

    def record(
        self: PlainDisplay, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False
    ) -> None:
        progress.setdefault(name, []).append((done, total))
        show(self, name, done, total, detail, in_bytes=in_bytes)

    monkeypatch.setattr(PlainDisplay, "phase", record)
    (folder / "demonstrations.jsonl").write_text('{"prompt": "01?", "completion": "4"}\n')
    warm = f"warm_start={{data: {folder / 'demonstrations.jsonl'}, steps: 3}}"
    train(config_of(folder, "graph.impl=none", "log.progress=plain", "steps=1", warm), ONE)
    lines = capsys.readouterr().out.splitlines()
    before = lines[: next(i for i, line in enumerate(lines) if line.startswith("[1/1]"))]
    phases = [
        *("read data", "load model", "autotune matmuls", "warm start", "validate"),
    ]
    ends = [line.partition(":")[0] for line in before if "done in" in line]
    unfinished = [line.partition(":")[0] for line in before if "done in" not in line]
    assert ends == [*phases, "validate"]  # validates again after its only step
    # A slow machine prints more lines.
    assert list(dict.fromkeys(name for name in unfinished if name in phases)) == phases
    assert progress["train"] == [(8, 16), (16, 16)]  # two minibatches
    assert progress["warm start"] == [(0, 3), (1, 3), (2, 3)]
