"""No false alarms: correct programs are clean, and compute the same with the sanitizer as without it."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollgraph.graph import GraphPool, capture, make_graphed_callables, sanitize
from tests.parity.models import BATCH, MODELS, TIME, WIDTH


def check_clean(program: Callable[[], Any]) -> None:
    """Check that the program is clean and computes the same with the sanitizer, random numbers included."""
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


GRAPHED = ["mlp", "dropout", "batch_norm", "lstm", "tied", "checkpointed_dropout", "transformer_layer"]
QUICK = {*GRAPHED, "in_place", "constants", "embedding", "tensor_lists", "autocast_checkpoint", "spectral_norm"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS]
)
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

    check_clean(program)


@pytest.mark.parametrize("name", GRAPHED)
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

    check_clean(program)


def recurrent() -> Any:
    cell = nn.GRUCell(4, 4)
    with torch.no_grad():
        graph = capture(lambda x, h: cell(x, h), (torch.randn(2, 4), torch.randn(2, 4)))
        h = torch.zeros(2, 4)
        for _ in range(3):
            h = graph(torch.randn(2, 4), h)  # reads its own last output before overwriting it
        return h.clone()


def residual_chain() -> Any:
    layers, pool = [nn.Linear(4, 4) for _ in range(3)], GraphPool()
    make_graphed_callables(tuple(layers), ((torch.randn(2, 4, requires_grad=True),),) * 3, pool=pool)
    for _ in range(2):
        first = layers[0](torch.randn(2, 4))
        last = layers[2](layers[1](first))
        (first + last).sum().backward()  # uses an output after later graphs of the pool were replayed
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
    """A hook whose operations are part of the graph runs at replay."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: output * 0.5)
    graph = capture(lambda x: model(x).detach(), (torch.randn(2, 4),))
    return graph(torch.randn(2, 4)).clone()


def user_generator() -> Any:
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
    keywords_and_trees, recorded_hook, user_generator, callable_object, checkpointed_layers,
]  # fmt: skip


CPU_ONLY = [autocast, user_generator, checkpointed_layers]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_correct_programs_are_clean(program: Callable[[], Any]) -> None:
    check_clean(program)


@pytest.mark.gpu
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p not in CPU_ONLY], ids=lambda program: program.__name__)
def test_correct_programs_are_clean_on_cuda(program: Callable[[], Any]) -> None:
    with torch.device("cuda"):
        check_clean(program)


def test_callables_of_every_kind_are_clean() -> None:
    """Names are followed into functions, and into nothing else."""
    linear, cached = functools.partial(nn.Linear(4, 4)), functools.lru_cache(lambda n: n + 1)
    method = types.MethodType(Sampler(), torch.randn(2, 5))

    def f(x: Tensor) -> Tensor:
        return linear(x).detach() * cached(1) + method().sum()

    with sanitize() as findings:
        capture(f, (torch.randn(3, 4),))(torch.randn(3, 4))
    assert not len(findings), findings


@pytest.mark.parametrize("policy", ["eager", "recapture"])
def test_a_mismatch_that_a_policy_handles_is_clean(policy: Any) -> None:
    with sanitize() as findings:
        capture(lambda x: x * 2, (torch.ones(2),), on_mismatch=policy)(torch.ones(3))
    assert not len(findings), findings


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_hooks_that_recompute_and_keep_a_weight_are_clean(norm: Any) -> None:
    model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 1))
    with sanitize() as findings, torch.no_grad():
        capture(lambda x: model(x), (torch.randn(2, 4),))(torch.randn(2, 4))
    assert not len(findings), findings


def test_a_host_read_in_the_first_run_only_is_not_reported() -> None:
    """The graph does not hold what a lazy initialisation reads."""
    cache: dict[str, float] = {}

    def f(x: Tensor) -> Tensor:
        if "norm" not in cache:
            cache["norm"] = x.norm().item()
        return x * 2

    with sanitize() as findings:
        capture(f, (torch.randn(3),))(torch.randn(3))
    assert not len(findings), findings
