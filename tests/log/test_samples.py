"""The samples that a run writes: which groups, and every field of a row."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest

from rollgraph.log import SampleWriter
from rollgraph.log.samples import SampleDetails, find_spans
from rollgraph.types import Prompt, Rollout


def make_rollouts(groups: int, size: int = 2) -> list[Rollout]:
    """Rollouts of a prompt and a reply, with a column that JSON cannot hold."""
    rollouts = []
    for group in range(groups):
        prompt = Prompt(id=10 + group, tokens=(48, 43), text="0+", columns={"answer": "2", "day": datetime.date.max})
        for index in range(size):
            rollouts.append(
                Rollout(
                    prompt,
                    tokens=[50, 61, 10],
                    sampled=[True, False, True],
                    logprobs=[-0.1, 0.0, -0.2],
                    text="2=€\n",
                    reward=index - 0.25,
                    rewards={"exact": float(index), "short": -0.5},
                    group=group,
                )
            )
    return rollouts


def make_writer(folder: Path, **options: Any) -> SampleWriter:
    return SampleWriter(folder, **{"every": 2, "groups": 2, "seed": 3, "reward_weights": {"short": 0.5}, **options})


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def write_steps(folder: Path, steps: range, **options: Any) -> list[bool]:
    writer = make_writer(folder, **options)
    rollouts = make_rollouts(20)
    advantages = [float(i) for i in range(40)]
    return [bool(writer.write(step, rollouts, advantages)) for step in steps]


def test_whole_groups_are_drawn_from_anywhere_in_a_step(tmp_path: Path) -> None:
    """They differ between steps and follow from the seed, so a resumed run writes those of an undisturbed one."""
    assert write_steps(tmp_path / "whole", range(5)) == [True, False, True, False, True]
    rows = rows_of(tmp_path / "whole")
    groups: dict[int, list[int]] = {}
    for row in rows:
        assert row["advantage"] == 2 * row["group"] + row["rewards"]["exact"]  # that of this rollout
        groups.setdefault(row["step"], []).append(row["group"])
    assert all(len(ids) == 4 and len(set(ids)) == 2 for ids in groups.values())
    assert len({tuple(ids) for ids in groups.values()}) == 3
    assert max(max(ids) for ids in groups.values()) > 2  # not the first ones
    write_steps(tmp_path / "halves", range(4))
    write_steps(tmp_path / "halves", range(3, 5), resume_at=3)
    assert rows_of(tmp_path / "halves") == rows
    write_steps(tmp_path / "other", range(5), seed=4)
    assert rows_of(tmp_path / "other") != rows


def test_a_row_has_every_field_of_a_rollout(tmp_path: Path) -> None:
    make_writer(tmp_path).write(0, make_rollouts(1), [-1.0, 1.0])
    assert rows_of(tmp_path)[1] == {
        "step": 0,
        "split": "train",
        "group": 0,
        "prompt_id": 10,
        "prompt": "0+",
        "columns": {"answer": "2", "day": "9999-12-31"},
        "completion": "2=€\n",
        "reward": 0.75,
        "rewards": {"exact": 1.0, "short": -0.5},
        "weighted_rewards": {"exact": 1.0, "short": -0.25},
        "finish_reason": "stop",
        "tokens": 3,
        "spans": [
            {"start": 0, "end": 1, "kind": "turn"},
            {"start": 1, "end": 2, "kind": "reply"},
            {"start": 2, "end": 3, "kind": "turn"},
        ],
        "advantage": 1.0,
    }
    assert find_spans([]) == []
    with pytest.raises(ValueError, match="2 rollouts with 1 advantages"):
        make_writer(tmp_path).write(0, make_rollouts(1), [1.0])


def test_validations_show_the_same_prompts_each_time(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for step in (-1, 3):
        assert writer.write_validation(step, make_rollouts(20))
    rows = rows_of(tmp_path)
    shown = {step: [row["prompt_id"] for row in rows if row["step"] == step] for step in (-1, 3)}
    assert len(set(shown[-1])) == 2
    assert shown[-1] == shown[3]
    assert {row["split"] for row in rows} == {"validation"}
    assert {row["advantage"] for row in rows} == {None}
    make_writer(tmp_path, resume_at=-1)
    assert rows_of(tmp_path) == []


def test_no_samples_are_written_if_every_is_0(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, every=0)
    assert not writer.write(0, make_rollouts(1), [1.0, 0.0])
    assert not writer.write_validation(0, make_rollouts(1))
    assert not (tmp_path / "samples.jsonl").exists()


def test_dropped_groups_are_drawn_like_kept_ones(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, every=1, groups=6)
    rollouts = make_rollouts(16)
    kept, dropped = rollouts[:16], rollouts[16:]
    for step in range(4):
        writer.write(step, kept, [1.0] * len(kept), dropped)
    rows = rows_of(tmp_path)
    assert len(rows) == 4 * 6 * 2
    assert {row["split"] for row in rows} == {"train", "dropped"}
    for row in rows:
        assert (row["split"] == "dropped") == (row["group"] >= 8) == (row["advantage"] is None)


def test_half_a_surrogate_pair_is_written_as_a_json_escape(tmp_path: Path) -> None:
    """Prompts and values that rewards log can contain one, such as half an emoji; it must not end a run."""
    (rollout,) = make_rollouts(1, size=1)
    rollout.extra = {"judge": "cut \ud83d"}
    make_writer(tmp_path).write(0, [rollout], [0.0])
    (row,) = rows_of(tmp_path)
    assert row["extra"] == {"judge": "cut \ud83d"}


def test_token_values_are_written_or_their_absence_is_explained(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, texts=lambda ids: [chr(id) for id in ids], token_value_limit=3)
    rollouts = make_rollouts(2, size=1)
    rollouts[0].reference_logprobs = [-0.35, 0.0, -0.1]
    details = {0: SampleDetails([2.0, 0.0, 2.0], [-0.1 + math.log(2), -9.0, -0.2], [0.5, 0.0, 1.25])}
    details[1] = SampleDetails(left_out="the rewards of its group are all equal")
    rollouts[1].failures = {"exact": "raised KeyError"}
    writer.write(0, rollouts[:1], [2.0], rollouts[1:], details)
    trained, dropped = rows_of(tmp_path)
    assert trained["token_values"] == {
        "text": ["2", "=", "\n"],
        "logprob": [-0.1, None, -0.2],  # the policy did not sample the second one
        "advantage": [2.0, None, 2.0],
        "ratio": [2.0, None, 1.0],
        "kl": [0.25, None, -0.1],
        "entropy": [0.5, None, 1.25],
        "absent": {},
    }
    assert dropped["token_values"].keys() == {"text", "logprob", "absent"}
    assert dropped["token_values"]["absent"].keys() == {"advantage", "ratio", "kl", "entropy"}
    assert dropped["left_out"] == "the rewards of its group are all equal"
    assert dropped["failures"] == {"exact": "raised KeyError"}
    assert "left_out" not in trained
    assert "failures" not in trained


def test_long_completions_have_no_token_values(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, texts=lambda ids: [str(id) for id in ids], token_value_limit=2)
    writer.write(0, make_rollouts(1), [0.0, 0.0])
    assert {str(row["token_values"]) for row in rows_of(tmp_path)} == {
        "{'absent': {'text': 'it has more than 2 tokens, the limit of log.token_values'}}"
    }
