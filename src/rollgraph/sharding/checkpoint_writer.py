"""Writing a sharded checkpoint: every rank its own file, rank 0 the manifest; it appears whole or not at all.

Writing needs no collective, so a thread can do it while training goes on (`run/checkpoints.py` does). The ranks tell
each other how a save ended through the liveness check, not through the disk, which may be what failed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rollgraph.distributed.liveness import Liveness
from rollgraph.distributed.lost_ranks import RankLost
from rollgraph.files import sync
from rollgraph.sharding.manifest import (
    MANIFEST,
    STATE,
    UNSHARDED,
    CheckpointError,
    FileRecord,
    manifest_checksum,
    record_file,
)
from rollgraph.sharding.optimizer import ShardedAdamW
from rollgraph.sharding.shard_snapshot import ShardSnapshot, take_snapshot
from rollgraph.sharding.sharded_model import ShardedModel

_POLL = 0.02  # seconds between two checks of what another rank writes
_PATIENCE = 4.0  # seconds after a timeout for the liveness check to find out which rank is lost
_WRITTEN = ""  # what rank 0 announces when a checkpoint is complete; anything else is an error


def save(folder: str | os.PathLike[str], model: ShardedModel, optimizer: ShardedAdamW) -> None:
    """Write a checkpoint into a folder that all ranks can see. It appears whole or not at all."""
    target = Path(folder)
    if target.exists():
        raise CheckpointError(f"{target} exists already")
    token = model.exchange_text(uuid.uuid4().hex[:8])[0]
    write(
        take_snapshot(model, optimizer),
        target.with_name(f"{target.name}.{token}.incomplete"),
        target,
        timeout=model.collectives.timeout,
        liveness=model.collectives.liveness,
    )


def write(
    snapshot: ShardSnapshot,
    temporary: Path,
    target: Path,
    *,
    state: Any = None,
    about: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    liveness: Liveness | None = None,
    before_commit: Callable[[], None] | None = None,
) -> None:
    """Write this rank's part. Returns when the checkpoint of all ranks is at `target`, or raises on all of them.

    All ranks name the same `temporary` folder, which must be new. Each rank writes its shard and a note about it there.
    Rank 0 waits for all notes, writes the rest and renames the folder. If a rank cannot write, it tells the others
    through `liveness`, which is required with several ranks, and the folder is deleted. No wait takes longer than
    `timeout` seconds. `before_commit` is called just before the folder is renamed, and may raise. `about` has more
    fields for the manifest; `state` is JSON and may differ between ranks.
    """
    outcome = _SaveOutcome(liveness, temporary.name, timeout)
    try:
        outcome.check()
        temporary.mkdir(parents=True, exist_ok=True)
        _write_shard(snapshot, temporary, state)
        snapshot.release()
        if snapshot.rank == 0:
            _complete(snapshot, temporary, about or {}, outcome)
            if before_commit is not None:
                before_commit()
            os.replace(temporary, target)
            sync(target.parent)
            outcome.announce(_WRITTEN)
        else:
            outcome.wait_for_rank_0()
    except BaseException as error:
        mine = f"{target} was not written: {error}"
        if _is_disk_error(error) and liveness is not None:
            mine = f"{target} was not written: rank{snapshot.rank}: {error}"
        # Announce it before the folder is deleted: a late rank must not create it again.
        failure = outcome.announced() or outcome.announce(mine)
        with suppress(OSError):  # the first error matters more
            if snapshot.rank == 0:
                discard(temporary, temporary.with_suffix(".deleted"))
            elif failure != mine:
                shutil.rmtree(temporary)  # rank 0 may have deleted it before this rank created it
        if liveness is not None and liveness.loss is not None:
            raise RankLost(failure, liveness.loss) from error
        if _is_disk_error(error) or isinstance(error, CheckpointError):
            raise CheckpointError(failure) from error
        raise
    finally:
        snapshot.release()


def _is_disk_error(error: BaseException) -> bool:
    return isinstance(error, (OSError, SafetensorError))


def discard(folder: Path, renamed: Path) -> None:
    """Delete a folder, after renaming it, so that no half-deleted folder ever has its name."""
    os.replace(folder, renamed)
    sync(renamed.parent)
    shutil.rmtree(renamed)


@dataclass(frozen=True)
class _SaveOutcome:
    """How one save ends, shared by all ranks. With a single rank there is no one to tell."""

    liveness: Liveness | None
    key: str
    timeout: float

    def announced(self) -> str | None:
        """How the save ended, if a rank has announced it."""
        return None if self.liveness is None else self.liveness.announced(self.key)

    def announce(self, outcome: str) -> str:
        """Returns the outcome that counts: another rank may have been first, and this one's be a consequence."""
        return outcome if self.liveness is None else self.liveness.announce(self.key, outcome)

    def check(self) -> None:
        """Raise if the save has failed on another rank, or if a rank is lost."""
        if self.liveness is not None:
            self._raise_failure()
            self.liveness.check()

    def _raise_failure(self) -> None:
        failure = self.announced()
        if failure:
            raise CheckpointError(failure)

    def wait_while(self, pending: Callable[[], str]) -> None:
        """Wait until `pending` names nothing any more."""
        deadline = time.monotonic() + self.timeout
        while True:
            missing = pending()
            if not missing:
                return
            self.check()
            if time.monotonic() > deadline:
                self._find_lost_rank()
                raise CheckpointError(f"nothing from {missing} within {self.timeout:g} s")
            time.sleep(_POLL)

    def _find_lost_rank(self) -> None:
        """Give the liveness check time to name a stopped rank, which it finds at about this moment.

        Rank 0 waits less long than the others wait for rank 0, so that none of them takes rank 0 for the lost one.
        """
        if self.liveness is not None:
            patience = _PATIENCE if self.liveness.rank == 0 else 2 * _PATIENCE
            self.liveness.wait_for_loss(patience)
            self.check()

    def wait_for_rank_0(self) -> None:
        self.wait_while(lambda: "rank0" if self.announced() is None else "")
        self._raise_failure()


def _write_shard(snapshot: ShardSnapshot, temporary: Path, state: Any) -> None:
    """Write the shard, then a note about it. The note appears whole: it is renamed."""
    record = _write_tensors(temporary / f"rank{snapshot.rank}.safetensors", snapshot.shard)
    note = temporary / f"rank{snapshot.rank}.json"
    unfinished = note.with_suffix(".part")
    shard = {**record, "parts": snapshot.parts}
    if snapshot.pieces:
        shard["pieces"] = snapshot.pieces
    _write_json(unfinished, {"shard": shard, "state": state})
    os.replace(unfinished, note)


def _complete(snapshot: ShardSnapshot, temporary: Path, about: Mapping[str, Any], outcome: _SaveOutcome) -> None:
    """On rank 0: wait for all shards, and write the rest and the manifest."""
    paths = [temporary / f"rank{rank}.json" for rank in range(snapshot.ranks)]
    outcome.wait_while(lambda: ", ".join(path.stem for path in paths if not path.exists()))
    notes = [json.loads(path.read_text()) for path in paths]
    manifest = {**snapshot.header, **about, "shards": [note["shard"] for note in notes]}
    manifest["rest"] = _write_tensors(temporary / UNSHARDED, snapshot.rest)
    states = [note["state"] for note in notes]
    if any(state is not None for state in states):
        manifest["state"] = _write_json(temporary / STATE, states)
    _write_json(temporary / MANIFEST, {**manifest, "sha256": manifest_checksum(manifest)})
    for path in paths:
        path.unlink()
    sync(temporary)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path)
    path.chmod(mode)  # the usual mode of a new file; save_file makes it readable by the owner alone
    sync(path)
    return record_file(path)


def _write_json(path: Path, value: Any) -> FileRecord:
    path.write_text(json.dumps(value, indent=1))
    sync(path)
    return record_file(path)
