"""The sanitizer: the gallery of its documentation, no false alarms, the same numbers, and its command."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import random
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollgraph.graph import Findings, GraphPool, ReplayMismatch, capture, make_graphed_callables, sanitize
from rollgraph.graph.observer import watching
from rollgraph.graph.sanitizer.kinds import KINDS
from rollgraph.graph.tape import TapeRecording
from tests.forked import run_command
from tests.parity.models import BATCH, MODELS, TIME, WIDTH

ROOT = Path(__file__).parents[3]


# -- the gallery -----------------------------------------------------------------------------------


def read_preamble(text: str) -> str:
    """The imports that all programs of the gallery share."""
    (preamble,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(preamble)


def read_gallery(text: str) -> dict[str, tuple[str, str, str]]:
    """Title -> (program, report, fixed program). A diff holds both programs."""
    entries = {}
    for section in text.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        (diff,) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
        (report,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
        lines = diff.splitlines(keepends=True)
        program = "".join(line[1:] or line for line in lines if not line.startswith("+"))
        fixed = "".join(line[1:] or line for line in lines if not line.startswith("-"))
        entries[title] = (program, report, fixed)
    return entries


GALLERY_PAGE = (ROOT / "docs/sanitizer_gallery.md").read_text()
PREAMBLE = read_preamble(GALLERY_PAGE)
GALLERY = read_gallery(GALLERY_PAGE)


def documented_kinds() -> dict[str, tuple[str, str]]:
    """Kind -> (why, fix), as the documentation's table has them."""
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \| (.*) \|$", (ROOT / "docs/sanitizer.md").read_text(), re.MULTILINE)
    return {kind: (why, fix) for kind, why, fix in rows}


def complete(report: str) -> str:
    """A report of the gallery with the lines that it leaves out, taken from the table of kinds."""
    why, fix = documented_kinds()[report.partition(":")[0]]
    finding, summary = report.split("\n\n")
    return f"{finding}\n  why:   {why}\n  fix:   {fix}\n\n{summary}"


def run(program: str) -> Findings:
    names: dict[str, Any] = {"__name__": "gallery"}
    exec(PREAMBLE, names)
    exec(compile(program, "program.py", "exec"), names)
    findings = names["findings"]
    assert isinstance(findings, Findings)
    return findings


def test_the_documentation_has_every_kind() -> None:
    assert documented_kinds() == {kind.name: (kind.why, kind.fix) for kind in KINDS.values()}


@pytest.mark.parametrize("title", GALLERY)
def test_gallery(title: str) -> None:
    program, report, fixed = GALLERY[title]
    findings = run(program)
    (marked,) = [i for i, line in enumerate(program.splitlines(), 1) if line.endswith("# <-")]
    assert findings.items[0].where.line == marked
    assert str(findings) + "\n" == complete(report)
    clean = run(fixed)
    assert not len(clean), clean
    assert clean.replays or clean.graphs


def test_the_gallery_has_every_kind_and_the_known_failures_of_the_field() -> None:
    found = {report.partition(":")[0] for _, report, _ in GALLERY.values()}
    assert found >= {
        "host-read", "escape", "moved", "hook", "constant", "stale-output", "orphan", "generator", "tree", "collective",
        "differs",
    }  # fmt: skip
    titles = " ".join(GALLERY).lower()
    for known in (
        "weak reference",
        "hook that records nothing",
        "graph manager",
        "after the next replay",
        "learning rate",
    ):
        assert known in titles


# -- no false alarms, and the same numbers ---------------------------------------------------------


def both(program: Callable[[], Any]) -> None:
    """The program is clean, and gives the same with the sanitizer as without it, random numbers included."""
    torch.manual_seed(0)
    plain = (program(), torch.rand(3))
    torch.manual_seed(0)
    with sanitize() as findings:
        watched = (program(), torch.rand(3))
    assert not len(findings), findings
    assert findings.graphs
    assert findings.compared
    assert not findings.notes
    torch.testing.assert_close(watched, plain, rtol=0, atol=0)


def total(output: Any) -> Tensor:
    leaves = torch.utils._pytree.tree_leaves(output)
    return sum(leaf.float().square().mean() for leaf in leaves if torch.is_tensor(leaf) and leaf.is_floating_point())  # type: ignore[return-value]


@pytest.mark.parametrize("name", MODELS)
def test_training_steps_are_clean(name: str) -> None:
    def program() -> Any:
        torch.manual_seed(0)
        model = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = total(model(x))
            loss.backward()
            optimizer.step()
            return loss.detach()

        graph = capture(step, (torch.randn(BATCH, TIME, WIDTH),))
        losses = [graph(torch.randn(BATCH, TIME, WIDTH)).clone() for _ in range(2)]
        return losses, [p.detach().clone() for p in model.parameters()]

    both(program)


@pytest.mark.parametrize(
    "name", ["mlp", "dropout", "batch_norm", "lstm", "tied", "checkpointed_dropout", "transformer_layer"]
)
def test_modules_as_graphs_are_clean(name: str) -> None:
    def program() -> Any:
        torch.manual_seed(0)
        model = MODELS[name]()
        sample = torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
        make_graphed_callables(model, (sample,), allow_unused_input=True)
        x = torch.randn(BATCH, TIME, WIDTH, requires_grad=True)
        for _ in range(2):
            total(model(x)).backward()
        return [p.grad for p in (x, *model.parameters())]

    both(program)


def recurrent() -> Any:
    cell = nn.GRUCell(4, 4)
    with torch.no_grad():
        graph = capture(lambda x, h: cell(x, h), (torch.randn(2, 4), torch.randn(2, 4)))
        h = torch.zeros(2, 4)
        for _ in range(3):
            h = graph(torch.randn(2, 4), h)  # reads its own last output before it writes over it
        return h.clone()


def residual_chain() -> Any:
    layers, pool = [nn.Linear(4, 4) for _ in range(3)], GraphPool()
    make_graphed_callables(tuple(layers), ((torch.randn(2, 4, requires_grad=True),),) * 3, pool=pool)
    for _ in range(2):
        first = layers[0](torch.randn(2, 4))
        last = layers[2](layers[1](first))
        (first + last).sum().backward()  # an output after later graphs of the pool were replayed
    return [p.grad for layer in layers for p in layer.parameters()]


def graphs_of_one_pool() -> Any:
    model, pool = nn.Linear(4, 4), GraphPool()

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    with torch.no_grad():
        score = capture(lambda x: model(x).log_softmax(-1), (torch.randn(2, 4),), pool=pool)
    step = capture(train, (torch.randn(2, 4),), pool=pool)
    results = []
    for _ in range(2):
        with torch.no_grad():
            results.append(score(torch.randn(2, 4)).clone())
        results.append(step(torch.randn(2, 4)).clone())
    pool.reset()
    return results


def accumulation() -> Any:
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    micro = capture(lambda x: model(x).square().sum().backward(), (torch.randn(2, 4),))
    for _ in range(3):
        micro(torch.randn(2, 4))
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def scheduled_rate() -> Any:
    model, rate = nn.Linear(4, 1), torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    graph = capture(step, (torch.randn(8, 4),))
    for _ in range(3):
        rate.mul_(0.5)
        graph(torch.randn(8, 4))
    return [p.detach().clone() for p in model.parameters()]


def inference_mode() -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    with torch.inference_mode():
        graph = capture(model, (torch.randn(3, 4),))
        return [graph(torch.randn(3, 4)).clone() for _ in range(2)]


def autocast() -> Any:
    model = nn.Linear(4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        graph = capture(lambda x: model(x).float(), (torch.randn(3, 4),))
        return [graph(torch.randn(3, 4)).clone() for _ in range(2)]


def keywords_and_trees() -> Any:
    def f(batch: dict[str, Tensor], *, scale: float) -> dict[str, Any]:
        return {"sum": batch["a"] + batch["b"] * scale, "parts": (batch["a"].exp(), None)}

    batch = {"a": torch.randn(3), "b": torch.randn(3)}
    graph = capture(f, (batch,), {"scale": 2.0})
    return copy.deepcopy(graph({"a": torch.ones(3), "b": torch.ones(3)}, scale=2.0))


def recorded_hook() -> Any:
    """A hook whose operations are part of the graph does run at replay."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: output * 0.5)
    graph = capture(lambda x: model(x).detach(), (torch.randn(2, 4),))
    return graph(torch.randn(2, 4)).clone()


def own_generator() -> Any:
    generator = torch.Generator().manual_seed(1)
    graph = capture(lambda x: x + torch.randn(4, generator=generator), (torch.zeros(4),))
    return [graph(torch.zeros(4)).clone() for _ in range(2)]


class Sampler:
    """A callable object with plain attributes that stay as they are."""

    def __init__(self) -> None:
        self.temperature, self.names = 0.7, ["a", "b"]

    def __call__(self, logits: Tensor) -> Tensor:
        return self._pick((logits / self.temperature).softmax(-1))

    def _pick(self, p: Tensor) -> Tensor:
        return p.multinomial(1)


def callable_object() -> Any:
    graph = capture(Sampler(), (torch.randn(2, 5),))
    return [graph(torch.randn(2, 5)).clone() for _ in range(2)]


def checkpointed_layers() -> Any:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2))

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.square().sum().backward()
        return x.detach()

    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    graph = capture(step, (torch.randn(2, 4),))
    return [graph(torch.randn(2, 4)).clone() for _ in range(2)], [p.grad.clone() for p in layers.parameters()]


PROGRAMS = [
    recurrent, residual_chain, graphs_of_one_pool, accumulation, scheduled_rate, inference_mode, autocast,
    keywords_and_trees, recorded_hook, own_generator, callable_object, checkpointed_layers,
]  # fmt: skip


CPU_ONLY = [autocast, own_generator, checkpointed_layers]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_correct_programs_are_clean(program: Callable[[], Any]) -> None:
    both(program)


# -- on CUDA ---------------------------------------------------------------------------------------

ON_CUDA = [  # the others name a generator or a tensor of the CPU
    title
    for title in GALLERY
    if not any(word in title for word in ("generator made", "collective", "differs from eager"))
]


@pytest.mark.gpu
@pytest.mark.parametrize("title", ON_CUDA)
def test_gallery_on_cuda(title: str) -> None:
    program, report, fixed = GALLERY[title]
    (marked,) = [i for i, line in enumerate(program.splitlines(), 1) if line.endswith("# <-")]
    with torch.device("cuda"):
        found = run(program).items[0]
        clean = run(fixed)
    assert (found.kind, found.where.line) == (report.partition(":")[0], marked)
    assert not len(clean), clean
    assert clean.graphs


@pytest.mark.gpu
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p not in CPU_ONLY], ids=lambda program: program.__name__)
def test_correct_programs_are_clean_on_cuda(program: Callable[[], Any]) -> None:
    with torch.device("cuda"):
        both(program)


@pytest.mark.gpu
def test_a_replay_that_differs_is_found_on_cuda() -> None:
    scale = [1.0]

    def f(x: Tensor) -> Tensor:
        y = x + 1
        return y * sum(scale)

    with sanitize() as findings:
        graph = capture(f, (torch.ones(2, device="cuda"),))
        scale[0] = 2.0
        graph(torch.ones(2, device="cuda"))
    differs = [found for found in findings if found.kind == "differs"]
    assert [found.where.line for found in differs] == [f.__code__.co_firstlineno + 2]


# -- what it leaves behind, and what it is not there for -------------------------------------------


def test_nothing_is_left_behind_and_nothing_is_there_without_it() -> None:
    with sanitize():
        inside = capture(lambda x: x + 1, (torch.zeros(2),))
        inside(torch.zeros(2))
    assert watching.get() is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    outside = capture(lambda x: x + 1, (torch.zeros(2),))
    assert type(outside._variants[0].recording) is TapeRecording
    assert torch.equal(inside(torch.ones(2)), torch.full((2,), 2.0))  # goes on, unwatched


def test_other_exceptions_pass_through() -> None:
    with pytest.raises(ZeroDivisionError), sanitize():
        _ = 1 / 0
    assert watching.get() is None
    assert torch._C._len_torch_dispatch_stack() == 0


def test_all_host_reads_are_named_at_once() -> None:
    def f(x: Tensor) -> Tensor:
        a = x.sum().item()
        b = x.mean().tolist()
        return x * a * b

    with sanitize() as findings:
        capture(f, (torch.randn(3),))
    first = f.__code__.co_firstlineno
    assert [(found.kind, found.where.line) for found in findings] == [
        ("host-read", first + 1),
        ("host-read", first + 2),
    ]


def test_a_read_of_the_first_run_only_is_not_told() -> None:
    """Lazy initialisation: the graph does not hold it."""
    cache: dict[str, float] = {}

    def f(x: Tensor) -> Tensor:
        if "norm" not in cache:
            cache["norm"] = x.norm().item()
        return x * 2

    with sanitize() as findings:
        capture(f, (torch.randn(3),))(torch.randn(3))
    assert not len(findings), findings


def test_an_output_of_a_later_graph_dies_with_the_replay_of_an_earlier_one() -> None:
    """On a GPU the first graph's temporaries lie where the second one's output is."""
    pool = GraphPool()
    with sanitize() as findings:
        first = capture(lambda x: (x * 2).sum(), (torch.ones(2),), pool=pool)
        second = capture(lambda x: x * 3, (torch.ones(2),), pool=pool)
        kept = second(torch.ones(2))
        first(torch.ones(2))
        assert torch.isnan(kept).all()
    assert [f.kind for f in findings] == ["stale-output"]


def test_a_reset_graph_takes_its_outputs_with_it() -> None:
    with sanitize() as findings:
        graph = capture(lambda x: x * 2, (torch.ones(2),))
        kept = graph(torch.ones(2))
        graph.reset()
        _ = kept + 1
    assert [f.kind for f in findings] == ["stale-output"]


def test_backwards_are_compared_too() -> None:
    factors = [1.0]

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.tensor(factors)

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Scale.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    with sanitize() as findings:
        layer = make_graphed_callables(Layer(), (torch.ones(1, requires_grad=True),))
        for _ in range(2):
            layer(torch.ones(1, requires_grad=True)).sum().backward()
            factors[0] += 1
    assert [f.kind for f in findings] == ["differs"]


def test_outputs_are_not_kept_alive() -> None:
    with sanitize():
        graph = capture(lambda x: x * 2, (torch.ones(2),))
        kept = weakref.ref(graph(torch.ones(2)).untyped_storage())
        for _ in range(2):
            graph(torch.ones(2))
        gc.collect()
        assert kept() is None


def test_a_kernel_that_is_not_reproducible_is_said_and_not_compared() -> None:
    state = iter(range(1000))

    @torch.library.custom_op("rollgraph_tests::noisy", mutates_args=())
    def noisy(x: Tensor) -> Tensor:
        return x + next(state)

    with sanitize() as findings:
        capture(lambda x: noisy(x), (torch.zeros(2),))(torch.zeros(2))
    assert not len(findings), findings
    assert len(findings.notes) == 1


@pytest.mark.parametrize("draw", ["rng.random()", "next(numbers)", "own.random()"])
def test_python_values_that_differ_from_run_to_run(draw: str) -> None:
    names = {"rng": numpy.random.default_rng(0), "numbers": iter(range(1000)), "own": random.Random(0)}
    with sanitize() as findings:
        capture(eval(f"lambda x: x * {draw}", names), (torch.ones(2),))(torch.ones(2))
    assert [found.kind for found in findings] == ["constant"]


def test_callables_of_every_kind() -> None:
    """Names are followed into what is a function, and nothing else."""
    linear, cached = functools.partial(nn.Linear(4, 4)), functools.lru_cache(lambda n: n + 1)
    method = types.MethodType(Sampler(), torch.randn(2, 5))

    def f(x: Tensor) -> Tensor:
        return linear(x).detach() * cached(1) + method().sum()

    with sanitize() as findings:
        capture(f, (torch.randn(3, 4),))(torch.randn(3, 4))
    assert not len(findings), findings


def test_state_that_a_function_returns_is_not_copied() -> None:
    state = torch.zeros(2)

    def f(x: Tensor) -> Tensor:
        return state.add_(x)

    with sanitize() as findings:
        graph = capture(f, (torch.ones(2),))
        graph(torch.ones(2)).zero_()
        graph(torch.ones(2))
    assert torch.equal(state, torch.ones(2))
    assert not len(findings), findings


@pytest.mark.parametrize("policy", ["eager", "recapture"])
def test_a_mismatch_that_is_provided_for_is_no_mistake(policy: Any) -> None:
    with sanitize() as findings:
        capture(lambda x: x * 2, (torch.ones(2),), on_mismatch=policy)(torch.ones(3))
    assert not len(findings), findings


def test_a_value_that_makes_no_difference_is_a_note() -> None:
    config = {"debug": False, "steps": 0}

    def f(x: Tensor) -> Tensor:
        if config["debug"]:
            x = x + config["steps"]
        return x * 2

    with sanitize() as findings:
        graph = capture(f, (torch.ones(2),))
        for _ in range(3):
            config["steps"] += 1
            graph(torch.ones(2))
    assert not len(findings), findings
    assert len(findings.notes) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_hooks_that_keep_a_weight_they_make_anew(norm: Any) -> None:
    model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 1))
    with sanitize() as findings, torch.no_grad():
        capture(lambda x: model(x), (torch.randn(2, 4),))(torch.randn(2, 4))
    assert not len(findings), findings


def test_hooks_of_every_kind() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []

    @torch.no_grad()
    def decorated(module: nn.Module, args: Any) -> None:
        seen.append(1)

    def everywhere(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(2)

    model[0].register_forward_pre_hook(lambda module, args: (args[0].view(-1, 4),))  # a view: recorded
    model[1].register_forward_pre_hook(decorated)
    model[1].weight.register_hook(lambda gradient: seen.append(3))
    handle = nn.modules.module.register_module_forward_hook(everywhere)
    try:
        with sanitize() as findings:
            capture(lambda x: model(x).sum().backward(), (torch.randn(2, 4),))
    finally:
        handle.remove()
    assert [found.kind for found in findings] == ["hook"] * 3
    assert {found.where.module for found in findings} == {"1", "every module", "1.weight"}


def test_what_reads_no_value_of_an_ended_output_is_fine() -> None:
    with sanitize() as findings:
        graph = capture(lambda x: x * 2, (torch.ones(2),))
        old = graph(torch.ones(2))
        graph(torch.ones(2))
        torch.zeros_like(old)
        old.new_empty(3)
        torch.add(torch.ones(2), 1, out=old)
        old.copy_(torch.ones(2))
        _ = old + 1  # its own again
    assert not len(findings), findings


def test_a_stale_read_is_told_once() -> None:
    with sanitize() as findings:
        graph, other = (capture(lambda x: x * 2, (torch.ones(1),)) for _ in range(2))
        old = graph(torch.ones(1))
        graph(torch.ones(1))
        old.item()
        other(old)
    assert [found.kind for found in findings] == ["stale-output"] * 2
    assert len({found.where.line for found in findings}) == 2


def test_an_output_saved_by_autograd() -> None:
    weight, seen = torch.ones(2, requires_grad=True), []

    def program() -> None:
        with sanitize() as findings:
            seen.append(findings)
            graph = capture(lambda x: x * 2, (torch.ones(2),))
            loss = (graph(torch.ones(2)) * weight).sum()
            graph(torch.ones(2))
            loss.backward()

    with pytest.raises(RuntimeError, match="inplace"):
        program()
    assert [found.kind for found in seen[0]] == ["stale-output"]


def test_an_argument_that_is_kept() -> None:
    history = []

    def f(x: Tensor) -> Tensor:
        history.append(x)
        return x * 2

    with sanitize() as findings:
        capture(f, (torch.ones(2),))
    assert [(found.kind, found.where.line) for found in findings] == [("escape", f.__code__.co_firstlineno)]


def test_a_tensor_in_a_local_is_no_orphan() -> None:
    box = [torch.ones(4)]
    reference = weakref.ref(box[0])
    with sanitize() as findings:
        graph = capture(lambda x: x * reference(), (torch.ones(4),))
        mask = box.pop()
        graph(torch.ones(4))
        assert not len(findings), findings
        del mask
        graph(torch.ones(4))
    assert [found.kind for found in findings] == ["orphan"]


def test_an_optimizer_that_reads_is_named_at_its_own_line() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with sanitize() as findings:
        capture(step, (torch.randn(2, 4),))
    assert {(found.kind, found.where.line) for found in findings} == {("host-read", step.__code__.co_firstlineno + 3)}


def test_findings_end_with_the_block() -> None:
    with sanitize() as findings:
        graph = capture(lambda x: x * 2, (torch.ones(2),))
    with pytest.raises(ReplayMismatch):
        graph(torch.ones(3))
    assert not len(findings)


class TellsApart(nn.Module):
    """Does something else while it is captured, because new leaves stand for its parameters then."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.held = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 if self.held[0] is self.weight else 2
        return x * self.weight * factor


def test_replays_are_compared_with_the_untouched_module() -> None:
    with sanitize() as findings:
        model = make_graphed_callables(TellsApart(), (torch.ones(4),))
        model(torch.ones(4)).sum().backward()
    assert findings.items[0].kind == "differs"


LINES = {
    "an argument that is written": """
def f(x):
    y = x * 2
    x.add_(1)  # <-
    return y
""",
    "a parameter that is replaced": """
model = nn.Linear(2, 2)
def f(x):
    new = torch.ones(2, 2)
    y = model(x)
    model.weight = nn.Parameter(new)  # <-
    return y.detach()
""",
    "memory that is replaced": """
model = nn.Linear(2, 2)
def f(x):
    new = torch.ones(2, 2)
    y = model(x)
    model.weight.data = new  # <-
    return y.detach()
""",
    "a state that is made anew": """
class State:
    h = torch.zeros(2, 2)
def f(x):
    y = x + 1
    State.h = State.h + y  # <-
    return State.h * 1
""",
}


@pytest.mark.parametrize("title", LINES)
def test_a_refused_capture_names_the_line_that_is_to_blame(title: str) -> None:
    program = LINES[title]
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(compile(program, "program.py", "exec"), names)
    (marked,) = [i for i, line in enumerate(program.splitlines(), 1) if line.endswith("# <-")]
    with sanitize() as findings:
        capture(names["f"], (torch.ones(2, 2),))
    (found,) = findings
    assert (found.kind, found.where.file, found.where.line) == ("refused", "program.py", marked)


def through(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


def test_a_decorated_hook_is_named_at_its_def() -> None:
    @through
    def hook(module: nn.Module, args: Any, output: Tensor) -> None: ...

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(hook)
    with sanitize() as findings, torch.no_grad():
        capture(lambda x: model(x), (torch.ones(1, 4),))
    assert findings.items[0].where.line == hook.__wrapped__.__code__.co_firstlineno + 1  # type: ignore[attr-defined]


# -- the command -----------------------------------------------------------------------------------

TARGETS = """
import torch
from rollgraph.graph import capture
model = torch.nn.Linear(4, 1)

def clean():
    print("building")
    return model, lambda x: model(x).sum().detach(), (torch.randn(3, 4),)

def module():
    return model, (torch.randn(3, 4),)

def dirty():
    return (lambda x: x * x.sum().item()), torch.randn(3)

def itself():
    capture(lambda x: x + 1, (torch.zeros(2),))(torch.zeros(2))

def broken():
    return (lambda x: x @ x), torch.randn(3, 4)

def wrong():
    return 3

def raising():
    raise OSError("no such model")

def nothing():
    pass

def itself_and_fails():
    capture(lambda x: x * x.sum().item(), (torch.zeros(2),))

def itself_and_misuses():
    g = capture(lambda x: x + 1, (torch.zeros(2),))
    g(torch.zeros(3))

def leaving():
    raise SystemExit(0)

def offsets():
    weight = torch.randn(10, 3)
    bag = lambda x, o: torch.nn.functional.embedding_bag(x, weight, o, mode="sum")
    return bag, (torch.arange(6), torch.tensor([0, 3]))
"""


def command(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=900
    )


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    (folder / "targets.py").write_text(TARGETS)
    return folder


@pytest.fixture(scope="module")
def odd_targets(targets: Path) -> Path:
    """A file with the name of a module that exists, and one that imports from its package."""
    folder = targets / "odd"
    (folder / "package").mkdir(parents=True)
    (folder / "random.py").write_text(TARGETS)
    (folder / "package/__init__.py").touch()
    (folder / "package/targets.py").write_text(TARGETS)
    (folder / "package/inner.py").write_text("from .targets import module")
    return folder


@pytest.mark.parametrize(
    ("target", "code", "says"),
    [
        ("targets:clean", 0, "clean: 1 graph"),
        ("targets.py:module", 0, "clean: 1 graph"),
        ("targets:itself", 0, "clean: 1 graph"),
        ("targets:itself_and_fails", 1, "host-read"),
        ("targets:itself_and_misuses", 1, "mismatch"),
        ("targets:dirty", 1, "host-read"),
        ("targets:broken", 2, "the function itself fails"),
        ("targets:wrong", 2, "returned a value of type int"),
        ("targets:raising", 2, "OSError: no such model"),
        ("targets:nothing", 2, "captured nothing"),
        ("targets:leaving", 2, "sys.exit(0)"),
        ("targets:offsets", 0, "clean: 1 graph"),
        ("random.py:module", 0, "clean: 1 graph"),
        ("package/inner.py:module", 0, "clean: 1 graph"),
        ("missing.py:module", 2, "no such file"),
        ("targets:missing", 2, "no function 'missing'"),
        ("absent:f", 2, "cannot import absent"),
        ("targets", 2, "expected package.module:function"),
    ],
)
def test_check(targets: Path, odd_targets: Path, tmp_path: Path, target: str, code: int, says: str) -> None:
    if target.startswith(("random", "package")):
        target = f"{odd_targets}/{target}"
    done = run_command(targets, tmp_path, "check", target)
    assert done.returncode == code, done.stderr
    assert says in (done.stdout if code < 2 else done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_check_on_cuda_without_a_gpu(targets: Path) -> None:
    """Nothing was checked, so there is no finding; the target is not even built."""
    done = command(targets, "-m", "rollgraph", "check", "targets:raising", "--backend", "cuda")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "rollgraph check: --backend cuda needs a CUDA device, and there is none; use --backend tape\n"


def test_check_json(targets: Path) -> None:
    clean = command(targets, "-m", "rollgraph", "check", "--json", "--replays", "2", "targets:clean")
    report = json.loads(clean.stdout)
    assert report["clean"] is True
    assert report["replays"] == 2
    dirty = json.loads(command(targets, "-m", "rollgraph", "check", "--json", "targets:dirty").stdout)
    (finding,) = dirty["findings"]
    assert finding["kind"] == "host-read"
    assert finding["where"]["line"] == 14
    assert {"what", "why", "fix"} <= set(finding)


def test_examples_are_clean() -> None:
    programs = [path for path in sorted((ROOT / "examples").glob("*.py")) if "def build(" in path.read_text()]
    assert programs
    for example in programs:
        done = command(ROOT, "-m", "rollgraph", "check", f"{example.relative_to(ROOT)}:build")
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_whole_process(targets: Path) -> None:
    script = (
        "import torch; from rollgraph.graph import capture\n"
        "g = capture(lambda x: x * 2, (torch.ones(2),))\n"
        "a = g(torch.ones(2)); b = g(torch.ones(2)); print('sum', (a + b).isnan().all().item())\n"
    )
    done = command(targets, "-c", script, ROLLGRAPH_SANITIZE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sum True\n"
    assert done.stderr.count("stale-output: ") == 2  # as it comes, and in the summary
    assert "1 finding" in done.stderr
    off = command(targets, "-c", script, ROLLGRAPH_SANITIZE="0")
    assert off.stdout == "sum False\n"
    assert off.stderr == ""
