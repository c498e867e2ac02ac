"""The same seed gives the same draws, graphed or eager, and each replay draws new numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rollgraph.graph import CaptureError, GraphPool, capture
from tests.graph.comparisons import example

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rand": lambda x: torch.rand(4, 4) + x,
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: torch.randint(0, 9, (4,)),
    "randperm": lambda x: torch.randperm(8),
    "normal": lambda x: torch.normal(x, 1.0),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 2),
    "exponential_": lambda x: x.clone().exponential_(),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.5),
    "unused draw": lambda x: (torch.rand(3), x + torch.rand(4))[1],
    "init": lambda x: nn.init.kaiming_uniform_(torch.empty(4, 4)),
    "fork": lambda x: _fork(x),
    "checkpoint": lambda x: checkpoint(F.dropout, x, use_reentrant=False) + torch.rand(4),
}


def _fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        first = torch.rand(4)
    return x * first + torch.rand(4)


@pytest.mark.parametrize("name", DRAWS)
def test_equal_seeds_give_equal_draws_and_each_replay_new_ones(backend: str, device: torch.device, name: str) -> None:
    if backend == "cuda" and name in ("randperm", "fork", "multinomial"):
        pytest.skip("CUDA: reads on the host, or forks the CPU's generator only")
    function, x = DRAWS[name], example()
    with torch.no_grad():
        graphed = capture(function, (x,), backend=backend)
        seen = []
        for seed in (0, 1, 0):
            torch.manual_seed(seed)
            draws = [graphed(x).clone() for _ in range(3)] + [torch.rand(2)]
            torch.manual_seed(seed)
            assert all(map(torch.equal, draws, [function(x) for _ in range(3)] + [torch.rand(2)]))
            seen.append(draws)
        assert not torch.equal(seen[0][0], seen[0][1]), "a replay draws fresh numbers"
        assert torch.equal(seen[0][0], seen[2][0])
        assert not torch.equal(seen[0][0], seen[1][0])


def test_two_graphs_and_eager_code_share_a_stream(backend: str, device: torch.device) -> None:
    """Replays and eager draws alternate on one generator and give the numbers of an eager program."""
    x = example()
    first, second = (lambda x: F.dropout(x, 0.5) + 1), (lambda x: torch.rand(4, 4) * F.dropout(x, 0.3))
    pool = GraphPool()
    a, b = capture(first, (x,), backend=backend, pool=pool), capture(second, (x,), backend=backend, pool=pool)
    torch.manual_seed(4)
    state = None
    graphed_draws = []
    for i in range(3):
        graphed_draws += [a(x).clone(), torch.rand(3), b(x).clone(), b(x).clone(), torch.randn(2), a(x).clone()]
        if i == 0:
            state = torch.cuda.get_rng_state() if x.is_cuda else torch.get_rng_state()
    torch.manual_seed(4)
    eager_draws = []
    for _ in range(3):
        eager_draws += [first(x), torch.rand(3), second(x), second(x), torch.randn(2), first(x)]
    assert all(map(torch.equal, graphed_draws, eager_draws))
    (torch.cuda.set_rng_state if x.is_cuda else torch.set_rng_state)(state)  # a checkpoint was resumed
    assert torch.equal(a(x), graphed_draws[6])


def test_a_generator_of_the_user_gives_the_draws_of_eager(backend: str, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(3)
    before = generator.get_state()
    graphed = capture(lambda: torch.rand(4, generator=generator), (), backend=backend)
    assert torch.equal(generator.get_state(), before)
    graphed_draws = [graphed().clone(), graphed().clone(), torch.rand(2, generator=generator)]
    generator.manual_seed(3)
    eager_draws = [
        torch.rand(4, generator=generator),
        torch.rand(4, generator=generator),
        torch.rand(2, generator=generator),
    ]
    assert all(map(torch.equal, graphed_draws, eager_draws))


def _seed_first(x: Tensor, _: torch.Generator) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand(4)


def _seed_last(x: Tensor, _: torch.Generator) -> Tensor:
    x = x + torch.rand(4)
    torch.manual_seed(3)
    return x


def _seed_in_a_fork(x: Tensor, _: torch.Generator) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        x = x + torch.rand(4)
    return x


def _set_state(x: Tensor, generator: torch.Generator) -> Tensor:
    torch.set_rng_state(_STATE)
    return x + torch.rand(4)


def _seed_generator(x: Tensor, generator: torch.Generator) -> Tensor:
    generator.manual_seed(3)
    return x + torch.rand(4, generator=generator)


def _local_generator(x: Tensor, _: torch.Generator) -> Tensor:
    return x + torch.rand(4, generator=torch.Generator().manual_seed(3))


_STATE = torch.get_rng_state()


@pytest.mark.parametrize(
    "function", [_seed_first, _seed_last, _seed_in_a_fork, _set_state, _seed_generator, _local_generator]
)
def test_seeding_inside_is_refused_or_correct(function: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    generator, x = torch.Generator(), example()
    try:
        graphed = capture(function, (x, generator), backend="tape")
    except CaptureError:
        return
    for _ in range(3):
        assert torch.equal(graphed(x, generator), function(x, generator))
