"""Rewards: the arguments of functions, failures that never end a run, and the built-in functions."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgraph.rl.algorithms import load_algorithm
from rollgraph.rl.paths import LoadError, load_object
from rollgraph.rl.rewards.loading import RewardSpec
from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.types import Prompt, Rollout
from tests.processes import wait_until_gone

FUNCTIONS = """
import os, signal, subprocess, sys, time
from decimal import Decimal
from fractions import Fraction
import numpy

def ones(completions, **columns):
    return [1.0] * len(completions)

def lengths(prompts, completions):
    return [len(p) + len(c) for p, c in zip(prompts, completions)]

def bad_number(completions, **columns):
    return [float(text) for text in completions]

def some(completions, kind, **columns):
    return [float(k) if k else None for k in kind]

def seen(completions, answer, missing=None, *, completion_ids):
    assert missing is None
    return [float(a) + 100 * len(ids) for a, ids in zip(answer, completion_ids, strict=True)]

def scaled(completions, factor):
    return [factor * len(text) for text in completions]

def arrays(completions, **columns):
    import torch
    return torch.arange(len(completions))

def too_few(completions, **columns):
    return [1.0] * (len(completions) - 1)

def nothing(completions, **columns):
    pass

def odd(completions, **columns):
    results = {"nan": float("nan"), "inf": numpy.float32("inf"), "text": "1.0", "list": [1]}
    return [results.get(text, True) for text in completions]

def huge(completions, **columns):
    values = {"large": 1e154, "larger": -1e300, "whole": 10**400, "fraction": Fraction(10**400), "digits": 10**5000,
              "decimal": Decimal("1e20"), "limit": Fraction(10**15), "numpy": numpy.float64(1e200), "true": True}
    return [values.get(text, 0.5) for text in completions]

def values_of(value):
    return lambda completions, **columns: [value] * len(completions)

class Raising:
    def __float__(self):
        raise MemoryError

one_byte, decimal_nan, raising = values_of(b"1.0"), values_of(Decimal("sNaN")), values_of(Raising())
async def later(count):
    return [1.0] * count

as_coroutine = lambda completions, **columns: later(len(completions))
as_dict = lambda completions, **columns: {text: 1.0 for text in completions}
as_bytes = lambda completions, **columns: bytes(len(completions))
as_text = lambda completions, **columns: "1" * len(completions)
as_set = lambda completions, **columns: set(range(len(completions)))
as_generator = lambda completions, **columns: (1.0 for _ in completions)
as_tuple = lambda completions, **columns: tuple(2 for _ in completions)

def spoil(prompts, completions, completion_ids, answer, facts, limits, **columns):
    limits.pop()
    answer.sort()
    completions.clear()
    prompts.reverse()
    columns.clear()
    for ids, fact in zip(completion_ids, facts):
        ids.pop()
        fact["list"].append(1)
        fact["inner"]["x"] = 0
    if len(limits) == 0:
        raise RuntimeError("after it has changed everything")
    return [float(len(answer))] * len(answer)

def look(prompts, completions, completion_ids, answer, facts, **columns):
    clean = [fact == {"list": [], "inner": {"x": 1}} and len(ids) == 3 for fact, ids in zip(facts, completion_ids)]
    return [float(a) if ok and len(completions) == len(answer) else -1.0 for a, ok in zip(answer, clean)]

class Panic(BaseException):
    pass

def panics(completions, **columns):
    raise Panic("like a library in Rust")

def exits(completions, **columns):
    sys.exit(3)

def pid(completions, **columns):
    time.sleep(0.02)
    return [os.getpid()] * len(completions)

def risky(completions, **columns):
    for text in completions:
        if text == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            with open(os.environ["PIDS"], "a") as file:
                print(os.getpid(), child.pid, file=file)
            while True:
                time.sleep(1)
        if text == "die":
            os._exit(7)
        if text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "raise":
            raise RuntimeError("no idea")
    return [1.0] * len(completions)

def only_position(completions, /):
    return []

def no_completions(prompts):
    return []

constant = 5
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pids"
    path.touch()
    monkeypatch.setenv("PIDS", str(path))
    return path


def rollout(text: str, columns: Mapping[str, Any] | None = None, tokens: int = 3) -> Rollout:
    prompt = Prompt(7, (1, 2), "p?", columns or {})
    return Rollout(prompt, [*range(tokens), 99], [True] * tokens + [False], [0.0] * (tokens + 1), text)


def score(specs: list[Any], *rollouts: Rollout, **options: Any) -> tuple[list[float], RewardFunctions]:
    with RewardFunctions(specs, **options) as rewards:
        rewards.score(rollouts)
    return [r.reward for r in rollouts], rewards


# Arguments of functions.


def test_columns_weights_and_labels(functions: str) -> None:
    samples = [rollout("abc", {"answer": "4", "kind": 0}), rollout("a", {"answer": 5, "kind": 2}, tokens=1)]
    specs = [
        f"{functions}:lengths",
        {"name": f"{functions}:some", "weight": 10.0},
        {"name": f"{functions}:seen", "weight": 0, "label": "seen"},
        RewardSpec(f"{functions}:scaled", weight=-1, options={"factor": 2}),
    ]
    score(specs, *samples)
    assert samples[0].rewards == {"lengths": 5.0, "seen": 304.0, "scaled": 6.0}  # `some` has none for this one
    assert samples[0].reward == 5.0 - 6.0
    assert samples[1].rewards == {"lengths": 3.0, "some": 2.0, "seen": 105.0, "scaled": 2.0}
    assert samples[1].reward == 3.0 + 20.0 - 2.0
    score([f"{functions}:ones"], *samples)  # nothing is left of the first time
    assert [s.rewards for s in samples] == [{"ones": 1.0}, {"ones": 1.0}]


def test_numbers_of_any_library_are_rewards(functions: str) -> None:
    values, rewards = score([f"{functions}:arrays"], rollout("a"), rollout("b"))
    assert values == [0.0, 1.0]
    assert all(type(value) is float for value in values)
    rewards.score([])
    assert not rewards.failures


def test_a_column_may_be_missing_in_some_rows(functions: str) -> None:
    values, _ = score([f"{functions}:some"], rollout("a", {"kind": 3}), rollout("b", {"other": 1}), on_failure=-1.0)
    assert values == [3.0, -1.0]


def test_required_columns_are_checked(functions: str) -> None:
    rewards = RewardFunctions([f"{functions}:seen", {"name": "exact_match", "options": {"column": "gold"}}])
    rewards.check_columns(["gold", "answer"])
    with pytest.raises(LoadError, match="'seen' needs the column 'answer'; did you mean 'answers'"):
        rewards.check_columns(["answers", "gold"])
    with pytest.raises(LoadError, match=r"'exact_match' needs the column 'gold' \(the data has \['answer'\]\)"):
        rewards.check_columns(["answer"])


# Failures, in this process.


@pytest.mark.parametrize("workers", [0, 1])
def test_one_bad_rollout_does_not_affect_the_others(functions: str, workers: int) -> None:
    specs = [f"{functions}:bad_number", f"{functions}:ones"]
    samples = [rollout(text) for text in ("1", "two", "3", "four")]
    values, rewards = score(specs, *samples, on_failure=-5.0, workers=workers)
    assert values == [2.0, -4.0, 4.0, -4.0]
    assert samples[1].rewards == {"bad_number": -5.0, "ones": 1.0}
    assert rewards.failures == {"raised": 2}
    assert rewards.messages["raised"].startswith("bad_number: ValueError: could not convert string to float: 'two'")
    assert "functions.py:14" in rewards.messages["raised"]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("too_few", "wrong_length", "too_few: 1 rewards for 2 completions"),
        ("nothing", "raised", "nothing: TypeError: 'NoneType' object is not iterable"),
        ("exits", "raised", "exits: SystemExit: 3"),
        ("panics", "raised", "panics: Panic: like a library in Rust"),
        ("as_dict", "wrong_type", "as_dict: returned a dict instead of a list of numbers"),
        ("as_bytes", "wrong_type", "as_bytes: returned a bytes instead"),
        ("as_text", "wrong_type", "as_text: returned a str instead"),
        ("as_set", "wrong_type", "as_set: returned a set instead"),
        ("as_coroutine", "wrong_type", "as_coroutine: returned a coroutine, which only an `async def` function may"),
        ("one_byte", "not_finite", "one_byte: b'1.0' is not a finite number (a sample of prompt 7)"),
        ("decimal_nan", "not_finite", "decimal_nan: Decimal('sNaN') is not a finite number"),
        ("raising", "not_finite", "raising: <"),
    ],
)
def test_results_that_are_not_rewards_are_failures(functions: str, name: str, kind: str, message: str) -> None:
    values, rewards = score([f"{functions}:{name}"], rollout("a"), rollout("b"), on_failure=-1.0)
    assert values == [-1.0, -1.0]
    assert rewards.failures == {kind: 2}
    assert rewards.messages[kind].startswith(message)


def test_values_that_are_not_numbers_are_failures(functions: str) -> None:
    samples = [rollout(text) for text in ("fine", "nan", "inf", "text", "list")]
    values, rewards = score([f"{functions}:odd"], *samples, on_failure=-1.0)
    assert values == [1.0, -1.0, -1.0, -1.0, -1.0]
    assert rewards.failures == {"not_finite": 4}
    assert samples[0].failures == {}
    assert samples[1].failures == {"odd": "nan is not a finite number"}


def test_any_sequence_or_generator_of_numbers_is_accepted(functions: str) -> None:
    samples = [rollout("a"), rollout("b")]
    values, rewards = score([f"{functions}:as_generator", f"{functions}:as_tuple"], *samples)
    assert values == [3.0, 3.0]
    assert not rewards.failures


def test_a_reward_that_is_too_large_is_a_failure(functions: str) -> None:
    texts = ["fine", "large", "larger", "whole", "fraction", "digits", "decimal", "numpy", "limit", "true"]
    samples = [rollout(text) for text in texts]
    values, rewards = score([f"{functions}:huge"], *samples, on_failure=-1.0)
    assert values == [0.5, *[-1.0] * 7, 1e15, 1.0]
    assert rewards.failures == {"too_large": 7}
    assert rewards.messages["too_large"] == "huge: 1e+154 is beyond 1e+15 (a sample of prompt 7)"
    for name, settings in (("grpo", {}), ("rloo", {}), ("dr_grpo", {"max_tokens": 4}), ("reinforce_pp", {})):
        batch = load_algorithm(name, settings).make_batch(samples)
        assert all(math.isfinite(value) for value in batch.metrics.values())
        assert any(sample.advantages[0] for sample in batch.samples)


def test_a_sum_that_is_too_large_is_a_failure_of_its_sample(functions: str) -> None:
    specs = [{"name": f"{functions}:some", "weight": 1e15, "label": name} for name in ("a", "b")]
    samples = [rollout("x", {"kind": kind}) for kind in (0, 1e-3, 1, -1, 1e15)]
    values, rewards = score(specs, *samples, on_failure=-1.0)
    assert values == [-1.0, 2e12, -1.0, -1.0, -1.0]
    assert rewards.failures == {"unscored": 1, "too_large": 3}
    assert rewards.messages["too_large"] == "the weighted sum of a, b is 2e+15, beyond 1e+15 (a sample of prompt 7)"
    assert rewards.unrewarded == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e16, 10**400, -(10**5000)], ids=range(5))
def test_settings_that_would_spoil_every_sum_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="on_failure: expected a number from"):
        RewardFunctions(["exact_match"], on_failure=value)
    with pytest.raises(LoadError, match=r"weight: reward 'exact_match' needs a number from"):
        RewardFunctions([{"name": "exact_match", "weight": value}])


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_cannot_change_the_arguments_of_others(functions: str, workers: int) -> None:
    """Neither in the same step, nor in a repeated call, nor in the data of later epochs."""
    columns = [{"answer": a, "facts": {"list": [], "inner": {"x": 1}}} for a in ("3", "1", "2")]
    samples = [rollout("abc", each) for each in columns]
    specs = [
        {"name": f"{functions}:spoil", "label": "first", "options": {"limits": [1]}},
        {"name": f"{functions}:spoil", "label": "second", "options": {"limits": [1, 2]}},
        f"{functions}:look",
    ]
    with RewardFunctions(specs, workers=workers) as rewards:
        for _ in range(2):
            rewards.score(samples)
            assert [s.rewards["look"] for s in samples] == [3.0, 1.0, 2.0]
            assert [s.rewards["second"] for s in samples] == [3.0] * 3
        assert rewards.failures == {"raised": 6}
        assert rewards.messages["raised"].startswith("first: RuntimeError: after it has changed everything")
    assert [s.prompt.columns for s in samples] == columns
    assert columns[0] == {"answer": "3", "facts": {"list": [], "inner": {"x": 1}}}
    assert [len(s.tokens) for s in samples] == [4] * 3


def test_a_function_that_forks_does_not_duplicate_this_process(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text("import os\ndef f(completions, **columns):\n    os.fork()\n    return [1]\n")
    program = """
from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.types import Prompt, Rollout
rollout = Rollout(Prompt(0, (), ""), [], [], [], "x")
RewardFunctions(["forking.py:f"]).score([rollout])
print("scored:", rollout.reward, flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.stdout == "scored: 1.0\n", found.stderr


def test_a_rollout_that_no_function_scores_is_counted(functions: str) -> None:
    values, rewards = score(
        [f"{functions}:some"], rollout("a", {"kind": 0}), rollout("a", {"kind": 1}), on_failure=-2.0
    )
    assert values == [-2.0, 1.0]
    assert rewards.failures == {"unscored": 1}


# Failures, in workers.


@pytest.mark.slow
def test_functions_that_hang_crash_or_raise_do_not_affect_others(functions: str, pids: Path) -> None:
    texts = ["hang", "fine", "die", "fine", "raise", "crash", "fine", "fine"]
    samples = [rollout(text) for text in texts]
    specs = [f"{functions}:risky", f"{functions}:ones"]
    options: dict[str, Any] = {"workers": 2, "timeout": 10.0, "on_failure": -1.0, "batch_size": 1}
    with RewardFunctions(specs, **options) as rewards:
        rewards.score(samples)
        assert [s.rewards["risky"] for s in samples] == [1.0 if text == "fine" else -1.0 for text in texts]
        assert all(s.rewards["ones"] == 1.0 for s in samples)
        assert rewards.failures == {"timeout": 1, "died": 2, "raised": 1}
        assert rewards.messages["timeout"] == "risky: no result after 10.0 s"
        assert rewards.messages["died"] in ("risky: ended with exit code 7", "risky: killed by SIGSEGV")
        assert "RuntimeError: no idea" in rewards.messages["raised"]
        hung = [int(pid) for pid in pids.read_text().split()]
        wait_until_gone(hung)  # killed with the process that it started, while the pool is still open
        assert len(hung) == 2
        rewards.score([rollout("die"), rollout("fine")])  # a dead worker is replaced
        rewards.score(samples[1:2])
        assert samples[1].reward == 2.0
        assert rewards.failures["died"] == 3


def test_workers_are_reused_and_do_not_outlive_the_pool(functions: str) -> None:
    samples = [rollout(str(i)) for i in range(16)]
    with RewardFunctions([f"{functions}:pid"], workers=2, batch_size=1) as rewards:
        used = set()
        for _ in range(3):
            rewards.score(samples)
            used |= {int(s.reward) for s in samples}
        assert len(used) == 2
        assert os.getpid() not in used
        victim = used.pop()
        os.kill(victim, 9)  # while idle, as the kernel does when memory runs out
        wait_until_gone([victim])
        rewards.score(samples)
        used = {victim, *used, *(int(s.reward) for s in samples)}
        assert len(used) == 3
        assert not rewards.failures
    wait_until_gone(sorted(used))
    rewards.close()
    with pytest.raises(RuntimeError, match="closed"):
        rewards.score(samples)


def test_a_batch_is_spread_over_workers(functions: str) -> None:
    samples = [rollout(str(i)) for i in range(5)]
    score([f"{functions}:pid"], *samples, workers=2)
    first, *_, last = pids = [s.reward for s in samples]
    assert first != last
    assert pids == [first] * 3 + [last] * 2


def test_workers_end_with_a_process_that_is_killed(functions: str, pids: Path) -> None:
    """No process is left to close the pool, and a worker is in a call that would never end."""
    pids.write_text("")
    program = """
import sys
sys.path[:] = eval(sys.argv[1])
from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.types import Prompt, Rollout
rewards = RewardFunctions([sys.argv[2]], workers=1, timeout=1000)
rewards.score([Rollout(Prompt(0, (), ""), [], [], [], "hang")])
"""
    parent = subprocess.Popen([sys.executable, "-c", program, repr(sys.path), f"{functions}:risky"])
    limit = time.monotonic() + 300
    while not pids.read_text() and time.monotonic() < limit:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    hung = [int(pid) for pid in pids.read_text().split()]
    assert len(hung) == 2
    wait_until_gone(hung)


# Loading.


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact_mach", "did you mean 'exact_match'"),
        ({"name": "length", "weigth": 1}, "weigth: a reward has no such key; did you mean 'weight'"),
        ({"weight": 1}, "needs a name"),
        ({"name": "length", "weight": "much"}, "weight: reward 'length' needs a number from .*, got 'much'"),
        (
            {"name": "exact_match", "options": {"colum": "a"}},
            r"options\.colum: .* has no such option; its signature is exact_match\(column",
        ),
        ({"name": "regex_format"}, "missing a required argument: 'pattern'"),
        ({"name": "regex_format", "options": {"pattern": "("}}, "not a regular expression"),
        ({"name": "length", "options": {"limit": 5, "target": 5}}, "either a limit or a target"),
        ("FILE:nowhere", "functions.py has no 'nowhere'"),
        ("FILE:lenghts", "did you mean 'lengths'"),
        ("FILE:constant", "is 5, not a function"),
        ("FILE:only_position", "is called with keyword arguments"),
        ("FILE:no_completions", r"has the signature \(prompts\)"),
        ({"name": "FILE:lengths", "options": {"x": 1}}, "signature of reward .* cannot be used"),
        ("no_such_package.rewards:f", "there is no module 'no_such_package'"),
        ("rollgraph.rl.no_such:f", "there is no module 'rollgraph.rl.no_such'"),
        ("missing.py:f", r"there is no file missing\.py"),
        ("file.py:", "expected 'package.module:name'"),
    ],
)
def test_functions_that_cannot_be_loaded_are_refused(functions: str, spec: Any, message: str) -> None:
    if isinstance(spec, str):
        spec = {"name": spec}
    spec = {key: value.replace("FILE", functions) if key == "name" else value for key, value in spec.items()}
    with pytest.raises(ValueError, match=message):
        RewardFunctions([spec])


def test_labels_must_differ() -> None:
    spec = {"name": "regex_format", "options": {"pattern": "a"}}
    with pytest.raises(LoadError, match="two rewards are called 'regex_format'"):
        RewardFunctions([spec, spec])
    values, _ = score([spec, spec | {"label": "again"}], rollout("a"))
    assert values == [2.0]


def test_objects_are_loaded_from_files_and_modules(tmp_path: Path) -> None:
    assert load_object("os.path:join") is os.path.join
    assert load_object("collections:Counter.most_common").__name__ == "most_common"
    path = tmp_path / "mine.py"
    path.write_text("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\n")
    assert load_object(f"{path}:A") is load_object(f"{path}:A")
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_thing")
    for _ in range(2):  # a module that failed is not kept
        with pytest.raises(LoadError, match=r"broken\.py failed \(ModuleNotFoundError: .*no_such_thing"):
            load_object(f"{broken}:f")


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("runs = []\ndef f(completions): return 1\n")
    first = load_object(f"{path}:f")
    load_object(f"{path}:runs").append("kept")
    written = path.stat()
    path.write_text("runs = []\ndef f(completions): return 2\n")
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))  # same size and time: only the content differs
    second = load_object(f"{path}:f")
    assert (first([]), second([])) == (1, 2)  # objects that were loaded before do not change
    assert load_object(f"{path}:runs") == []
    assert pickle.loads(pickle.dumps(second)) is second
    os.utime(path)  # touched, not changed
    assert load_object(f"{path}:f") is second
    path.write_text("runs = ]\n")
    for _ in range(2):
        with pytest.raises(LoadError, match=r"mine\.py failed \(SyntaxError"):
            load_object(f"{path}:f")
    path.write_text("runs = []\ndef f(completions): return 2\n")
    assert load_object(f"{path}:f") is second


def test_a_module_that_exits_is_an_error_and_does_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_program.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path in (f"{tmp_path / 'a_program.py'}:f", "a_program:f"):
        with pytest.raises(LoadError, match=r"failed \(SystemExit: 0, .*a_program.py:2\)"):
            load_object(path)


# Built in.


def graded(name: str, text: str, answer: Any, **options: Any) -> float | None:
    sample = rollout(text, {"answer": answer})
    with RewardFunctions([{"name": name, "options": options}]) as rewards:
        rewards.score([sample])
        assert set(rewards.failures) <= {"unscored"}, rewards.messages
    return sample.rewards.get(name)


def test_exact_match() -> None:
    assert graded("exact_match", " 42\n", 42) == 1.0
    assert graded("exact_match", "42.", "42") == 0.0
    assert graded("exact_match", "Yes", "yes") == 0.0
    assert graded("exact_match", "Yes", "yes", ignore_case=True) == 1.0
    assert graded("exact_match", "a <x>1</x> b <x> 2 </x>", "2", extract="<x>(.*?)</x>") == 1.0
    assert graded("exact_match", "2", "2", extract="<x>(.*?)</x>") == 0.0
    assert graded("exact_match", "42", None) is None


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("so 6*7 = 42.", "42", 1.0),
        ("42 and not 43", "42", 0.0),
        ("$1,234,567.50", 1234567.5, 1.0),
        ("1,2,3", "3", 1.0),
        ("1,2345", "2345", 1.0),
        ("it is -5", "-5", 1.0),
        ("it is \N{MINUS SIGN}5", "-5", 1.0),
        ("8-5", "5", 1.0),
        (".5", "1/2", 1.0),
        ("3/4", "0.75", 1.0),
        (r"\frac{3}{4}", "0.75", 1.0),
        (r"-\dfrac{3}{4}", "-0.75", 1.0),
        ("6.02e23", "602" + "0" * 21, 1.0),
        ("1/0", "1", 0.0),
        ("no number", "1", 0.0),
        ("9" * 5000, "1", 0.0),
        ("1e999", "1", 0.0),
        ("42", "6 * 7 = 42\n#### 42", 1.0),
        ("100.4", "100", 0.0),
    ],
)
def test_numeric_match(text: str, answer: Any, expected: float) -> None:
    assert graded("numeric_match", text, answer) == expected


def test_numeric_match_tolerance_and_bad_answers() -> None:
    assert graded("numeric_match", "100.4", "100", tolerance=0.005) == 1.0
    assert graded("numeric_match", "0.004", "0", tolerance=0.005) == 1.0
    _, rewards = score(["numeric_match"], rollout("1", {"answer": "none"}), rollout("1", {"answer": "1"}))
    assert rewards.failures == {"raised": 1}


@given(st.integers(-(10**12), 10**12), st.text(alphabet="abc .,\n", max_size=20))
def test_numeric_match_reads_what_python_writes(number: int, before: str) -> None:
    assert graded("numeric_match", f"{before} {number:,}.", number, tolerance=0) == 1.0
    assert graded("numeric_match", f"{before} {number / 8!r}", f"{number}/8", tolerance=0) == 1.0


def test_regex_format() -> None:
    pattern = "^<think>.*</think>\\s*<answer>.*</answer>$"
    assert graded("regex_format", "<think>a\nb</think>\n<answer>1</answer>", None, pattern=pattern) == 1.0
    assert graded("regex_format", "so <think>a</think><answer>1</answer>", None, pattern=pattern) == 0.0


def test_length() -> None:
    def lengths(**options: int) -> list[float]:
        samples = [rollout("x", tokens=tokens) for tokens in (0, 4, 6, 8, 20)]
        return score([{"name": "length", "options": options}], *samples)[0]

    assert lengths(limit=8, free=4) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert lengths(target=8) == [-1.0, -0.5, -0.25, 0.0, -1.0]


def test_without_math_verify_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"pip install 'rollgraph\[math\]'"):
        RewardFunctions(["math_verify"])


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"so it is $\frac{2}{4}$", "1/2", 1.0),
        ("so it is $3$", "1/2", 0.0),
        (r"Therefore \boxed{0.5}.", r"\frac{1}{2}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+2", 0.0),
        ("first $7$, no, the answer is $12$", "12", 1.0),
        ("1,234", "$1234$", 1.0),
        ("I do not know", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_math_verify(completion: str, answer: str, score: float) -> None:
    pytest.importorskip("math_verify")
    assert graded("math_verify", completion, answer) == score


def test_math_verify_works_in_workers() -> None:
    """It sets alarm signals, which is only possible in a main thread."""
    pytest.importorskip("math_verify")
    rollouts = [rollout(rf"\boxed{{{i}}}", {"answer": "2"}) for i in range(4)]
    found, rewards = score(["math_verify"], *rollouts, workers=2, timeout=60.0)
    assert found == [0.0, 0.0, 1.0, 0.0]
    assert not rewards.failures
