"""Samples: filtered by indexed fields and by text, grouped, sorted, and shown token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollgraph.view import answers, samples
from rollgraph.view.answers import BadRequest, NotFound
from rollgraph.view.runs import Catalog, RunData
from tests.view.synthetic_run import index_all, make_sample, open_run, write_group, write_lines, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    folder = write_run(tmp_path_factory.mktemp("samples") / "run", steps=6)
    for step in range(0, 6, 2):
        for group in (3, 1):
            write_group(folder, step, group)
        write_group(folder, step, 7, split="dropped", advantage=None, left_out="the rewards of its group are all equal")
        write_group(folder, step, 9, split="validation", size=1, prompt="Ünïcode İ", reward=0.6)
    write_group(folder, 4, 11, size=2, finish_reason="length", reward=-2.5, completion="never ENDS")
    return open_run(folder)


def keys(run: RunData, **parameters: str) -> list[tuple[int, str, int]]:
    answer = answers.answer_samples(run, parameters)
    assert answer["total"] == len(answer["groups"])
    return [(group["step"], group["kind"], group["group"]) for group in answer["groups"]]


def test_groups_are_found_by_each_filter(run: RunData) -> None:
    assert len(keys(run)) == 13
    assert keys(run)[0] == (4, "train", 11)  # the newest first
    assert keys(run, step="2") == [(2, "validation", 9), (2, "dropped", 7), (2, "train", 1), (2, "train", 3)]
    assert keys(run, group="3", order="oldest") == [(0, "train", 3), (2, "train", 3), (4, "train", 3)]
    assert {kind for _, kind, _ in keys(run, kind="dropped")} == {"dropped"}
    assert keys(run, finish="length") == keys(run, reward_max="-1") == [(4, "train", 11)]
    # Most groups have rewards of 0, 0.25, 0.5 and 0.75. Only group 9 has one in this range.
    assert {group for _, _, group in keys(run, reward_min="0.55", reward_max="0.7")} == {9}
    assert keys(run, q="never ends") == [(4, "train", 11)]
    assert {group for _, _, group in keys(run, q="ÜNÏCODE")} == {9}
    assert keys(run, q="finish_reason") == []  # the name of a field, not text of a sample
    assert answers.answer_samples(run, {})["steps"] == [0, 2, 4]


def test_the_error_filter_finds_every_kind_of_failure(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    write_group(folder, 0, 0)
    write_group(folder, 0, 1, finish_reason="error")
    write_lines(folder / "samples.jsonl", [make_sample(0, 2, 0), make_sample(0, 2, 1, failures={"exact": "timed out"})])
    write_group(folder, 0, 3, finish_reason="abort")
    run = open_run(folder, tmp_path / "cache")
    assert [group for _, _, group in keys(run, finish="error", order="oldest")] == [1, 2, 3]
    assert [group for _, _, group in keys(run, finish="abort")] == [3]
    for group in answers.answer_samples(run, {"finish": "error"})["groups"]:
        assert any(sample["failed"] for sample in group["samples"])


def test_groups_are_paged(run: RunData) -> None:
    pages = [answers.answer_samples(run, {"offset": str(offset), "limit": "5"}) for offset in (0, 5, 10, 15)]
    assert [page["total"] for page in pages] == [13] * 4
    assert [len(page["groups"]) for page in pages] == [5, 5, 3, 0]
    order = [group["samples"][0]["id"] for page in pages for group in page["groups"]]
    assert len(set(order)) == 13


def test_samples_of_a_group_are_sorted_by_reward(run: RunData) -> None:
    (group,) = answers.answer_samples(run, {"step": "2", "group": "3"})["groups"]
    assert [sample["reward"] for sample in group["samples"]] == [0.75, 0.5, 0.25, 0.0]
    assert [sample["id"] for sample in group["samples"]] == [f"2.train.3.{index}" for index in (3, 2, 1, 0)]
    best = answers.answer_sample(run, "2.train.3.3")
    assert best["completion"] == "step 2 group 3 sample 3"
    assert best["notes"] == ["This run did not write values of single tokens."]


@pytest.mark.parametrize(
    "id",
    [
        "",
        "x",
        "2.train.3",
        "2.train.3.4",
        "2.train.3.-1",
        "2.nothing.3.0",
        "9.train.3.0",
        "../x",
        f"{10**30}.train.0.0",
    ],
)
def test_unknown_samples_are_not_found(run: RunData, id: str) -> None:
    with pytest.raises(NotFound):
        answers.answer_sample(run, id)


@pytest.mark.parametrize(
    "parameters", [{"step": "x"}, {"kind": "all"}, {"finish": "badly"}, {"reward_min": "nan"}, {"limit": "9" * 30}]
)
def test_invalid_parameters_are_named(run: RunData, parameters: dict[str, str]) -> None:
    with pytest.raises(BadRequest) as caught:
        answers.answer_samples(run, parameters)
    assert caught.value.parameter in parameters


def test_reasons_explain_dropped_truncated_and_failed_samples(run: RunData, tmp_path: Path) -> None:
    dropped = answers.answer_sample(run, "2.dropped.7.0")
    assert dropped["reasons"] == ["It was not trained on: the rewards of its group are all equal."]
    truncated = answers.answer_sample(run, "4.train.11.0")
    assert truncated["truncated"]
    assert truncated["reasons"] == ["The completion was cut off at a limit of tokens."]
    folder = write_run(tmp_path, steps=1)
    failures = {"environment": "KeyError: 'x'", "exact": "took longer than 3 s"}
    write_group(folder, 0, 0, size=1, finish_reason="error", failures=failures)
    failed = answers.answer_sample(open_run(folder), "0.train.0.0")
    assert failed["failed"]
    assert failed["reasons"] == [
        "The environment failed: KeyError: 'x'.",
        "The reward exact failed: took longer than 3 s.",
    ]


def test_samples_are_split_into_turns_and_tokens(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=1)
    spans = [
        {"start": 0, "end": 2, "kind": "turn", "text": "ab", "reward": 0.5},
        {"start": 2, "end": 3, "kind": "reply", "text": "c"},
    ]
    values = {
        "text": ["a", "b", "c"],
        "logprob": [-0.5, -1.0, None],
        "advantage": [1.0, 1.0, None],
        "kl": [0.1],  # not shown, because of its length
        "absent": {"entropy": "not kept"},
    }
    write_lines(folder / "samples.jsonl", [make_sample(0, 0, 0, spans=spans, token_values=values)])
    sample = answers.answer_sample(open_run(folder), "0.train.0.0")
    assert [(turn["role"], turn["text"], turn["reward"]) for turn in sample["turns"]] == [
        ("prompt", "prompt 0", None),
        ("policy", "ab", 0.5),
        ("environment", "c", None),
    ]
    first, second = sample["turns"][1]["tokens"]
    assert first == {"text": "a", "logprob": -0.5, "advantage": 1.0, "ratio": None, "entropy": None, "kl": None}
    assert second["logprob"] == -1.0
    assert sample["turns"][2]["tokens"][0]["logprob"] is None
    assert "No entropy of single tokens: not kept." in sample["notes"]


def test_a_prompt_is_followed_over_steps(run: RunData) -> None:
    answer = answers.answer_prompts(run, {"q": "ünïcode"})
    (entry,) = answer["prompts"]
    assert entry == {"key": entry["key"], "prompt": "Ünïcode İ", "groups": 3}
    followed = answers.answer_prompt(run, entry["key"], {})
    assert [group["step"] for group in followed["groups"]] == [0, 2, 4]
    assert {group["prompt_key"] for group in followed["groups"]} == {entry["key"]}
    assert answers.answer_prompts(run, {})["total"] == 5
    for key in ("zz", "f" * 17, "0" * 16, "\ud800"):
        with pytest.raises(NotFound):
            answers.answer_prompt(run, key, {})


def test_a_search_for_text_reads_no_more_than_its_budget(run: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SEARCH_BYTES", 3000)
    monkeypatch.setattr(samples, "SPAN_BYTES", 2000)
    before, parsed = run.counters.bytes_read, run.counters.lines_parsed
    answer = answers.answer_samples(run, {"q": "nowhere"})
    assert run.counters.bytes_read - before < 3000 + 2000  # plus the last read
    assert run.counters.lines_parsed == parsed  # lines without the text are not parsed
    assert answer["stopped"].startswith("The search stopped after ")
    assert answers.answer_prompts(run, {"q": "nowhere"})["stopped"]


def test_a_search_that_fills_its_page_is_not_reported_as_stopped(run: RunData) -> None:
    for answer in (
        answers.answer_samples(run, {"q": "p", "limit": "1"}),
        answers.answer_prompts(run, {"q": "p", "limit": "1"}),
    ):
        assert answer["total"] >= 1
        assert answer["stopped"] == ""
    assert answers.answer_samples(run, {"q": "nowhere"})["stopped"] == ""  # the search reached the end


def test_escaped_text_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=1)
    record = make_sample(0, 0, 0, completion='Ümlaut "quoted"\n')
    (folder / "samples.jsonl").write_text(json.dumps(record) + "\n")
    run = open_run(folder)
    for text in ("ümlaut", '"QUOTED"', '"\n', "ü"):
        assert answers.answer_samples(run, {"q": text})["total"] == 1, text
    assert answers.answer_samples(run, {"q": "ö"})["total"] == 0


def test_runs_are_compared_by_configuration_and_prompt(tmp_path: Path) -> None:
    for name, lr, prompt in (("a", "1.0e-6", 1), ("b", "2.0e-6", 2)):
        folder = write_run(tmp_path / name, steps=6)
        (folder / "config.yaml").write_text(f"steps: 60\noptimizer: {{lr: {lr}}}\nonly: {{{name}: 1}}\n")
        for group in (0, prompt):
            write_group(folder, 3, group)
    answer = answers.answer_compare(Catalog([tmp_path]), {"ids": f"{tmp_path.name}-a,{tmp_path.name}-b"})
    a, b = (run["id"] for run in answer["runs"])
    assert answer["config"] == [
        {"key": "only.a", "values": {a: 1, b: None}},
        {"key": "only.b", "values": {a: None, b: 1}},
        {"key": "optimizer.lr", "values": {a: 1e-6, b: 2e-6}},
    ]
    assert answer["equal_keys"] == 1
    assert [entry["prompt"] for entry in answer["prompts"]] == ["prompt 0"]


def test_summaries_are_read_once_while_the_run_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "CACHED_SUMMARIES", 4)
    folder = write_run(tmp_path / "run", steps=6)
    for step in range(3):
        write_group(folder, step, 0)
    run = open_run(folder)
    before = answers.answer_samples(run, {})["groups"]
    write_group(folder, 3, 0)
    run.update()
    parsed = run.counters.lines_parsed
    after = answers.answer_samples(run, {})["groups"]
    assert after[1:] == before
    assert run.counters.lines_parsed == parsed + 4  # the new group
    write_group(folder, 3, 0, size=1)  # the last group grows
    run.update()
    assert len(answers.answer_samples(run, {"limit": "1"})["groups"][0]["samples"]) == 5
    assert len(run.samples.summaries) == 4


def test_a_file_replaced_during_a_request_is_read_as_it_was_indexed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    path = folder / "samples.jsonl"
    path.unlink(missing_ok=True)
    write_group(folder, 2, 3)
    run = open_run(folder)
    with run.opened():
        before = answers.answer_sample(run, "2.train.3.1")
        rewritten = path.with_suffix(".part")
        write_lines(rewritten, [make_sample(1, 0, 0)])
        rewritten.replace(path)
        assert answers.answer_sample(run, "2.train.3.1") == before
    with run.opened(), pytest.raises(NotFound):
        answers.answer_sample(run, "2.train.3.1")


def test_a_sample_is_found_while_a_rewritten_file_is_indexed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    path = folder / "samples.jsonl"
    path.unlink(missing_ok=True)
    write_lines(path, [make_sample(step, 0, 0) for step in range(20)])
    run = index_all(open_run(folder))
    rewritten = path.with_suffix(".part")
    write_lines(rewritten, [make_sample(step, 0, 0, reward=9.0) for step in range(20)])
    rewritten.replace(path)
    monkeypatch.setattr("rollgraph.view.index.UPDATE_BYTES", 1000)
    with run.opened():
        assert not run.is_indexed
        assert answers.answer_sample(run, "19.train.0.0")["reward"] == 9.0
