"""Garbage collection during a run skips the objects that existed before its steps."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from rollgraph.rl.data.rows import Row
from rollgraph.run.setup import gc_frozen
from rollgraph.train import train
from tests.test_train import ONE, eager_config, write_inputs

STEPS = 30


class Thing:
    pass


def is_tracked(thing: Thing) -> bool:
    return any(tracked is thing for tracked in gc.get_objects())


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> None:
    gc.unfreeze()


def test_only_new_objects_are_tracked_inside() -> None:
    old = Thing()
    with gc_frozen(STEPS):
        new = Thing()
        assert not is_tracked(old)
        assert is_tracked(new)
    assert is_tracked(old)


def test_an_error_unfreezes() -> None:
    with pytest.raises(ZeroDivisionError), gc_frozen(STEPS):
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_garbage_is_freed_before_freezing() -> None:
    thing = Thing()
    thing.__dict__["itself"] = thing
    alive = weakref.ref(thing)
    del thing
    with gc_frozen(STEPS):
        assert alive() is None


def test_nested_freezing_keeps_the_outer_one() -> None:
    old = Thing()
    with gc_frozen(STEPS):
        with gc_frozen(STEPS):
            pass
        assert not is_tracked(old)


def test_the_rows_of_the_data_are_frozen_during_steps(tmp_path: Path) -> None:
    rows_tracked = []
    config = eager_config(write_inputs(tmp_path), f"steps={STEPS}")
    train(config, ONE, on_step=lambda *_: rows_tracked.append(any(type(thing) is Row for thing in gc.get_objects())))
    assert rows_tracked == [False] * config.steps
    assert gc.get_freeze_count() == 0
