"""Objects that are as old as the run: collections leave them alone, and see them again afterwards."""

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


def is_seen(thing: Thing) -> bool:
    return any(seen is thing for seen in gc.get_objects())


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> None:
    gc.unfreeze()


def test_only_new_objects_are_seen_until_the_end() -> None:
    old = Thing()
    with gc_frozen(STEPS):
        new = Thing()
        assert not is_seen(old)
        assert is_seen(new)
    assert is_seen(old)


def test_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), gc_frozen(STEPS):
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_garbage_from_before_is_freed() -> None:
    thing = Thing()
    thing.__dict__["itself"] = thing
    alive = weakref.ref(thing)
    del thing
    with gc_frozen(STEPS):
        assert alive() is None


def test_what_was_frozen_before_stays_frozen() -> None:
    old = Thing()
    with gc_frozen(STEPS):
        with gc_frozen(STEPS):
            pass
        assert not is_seen(old)


def test_collections_during_steps_do_not_look_at_the_data(tmp_path: Path) -> None:
    seen = []
    config = eager_config(write_inputs(tmp_path), f"steps={STEPS}")
    train(config, ONE, on_step=lambda *_: seen.append(any(type(thing) is Row for thing in gc.get_objects())))
    assert seen == [False] * config.steps
    assert gc.get_freeze_count() == 0
