"""Everything in the process that a capture must not change, and programs that fail at a given point."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rollgraph.graph import capture
from rollgraph.graph import make_graphed_callables as graph
from tests.graph.marked_lines import line_of

WARMUP = 3
CLASSES = (nn.Module, Tensor, nn.Parameter, torch.optim.Optimizer, torch.Generator, torch.autograd.Function)


# -- photographs -----------------------------------------------------------------------------------


def raw(tensor: Tensor | None) -> Any:
    """Identity, address and bytes."""
    if tensor is None:
        return None
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return id(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.requires_grad, values


def photograph(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *generators: torch.Generator
) -> dict[str, Any]:
    """Everything in the process that a capture may not change, by name."""
    photo: dict[str, Any] = {
        "torch rng": raw(torch.get_rng_state())[-1],
        "cuda rng": [raw(s)[-1] for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else None,
        "python rng": random.getstate(),
        "numpy rng": np.random.get_state()[1].tobytes() + bytes([np.random.get_state()[2] % 256]),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "default dtype": torch.get_default_dtype(),
        "dispatch modes": [id(m) for m in _get_current_dispatch_mode_stack()],
        "function modes": [id(m) for m in torch.overrides._get_current_function_mode_stack()],
        "capturing": torch.cuda.is_current_stream_capturing() if torch.cuda.is_available() else None,
        "hooks on all modules": [len(d) for n, d in vars(nn.modules.module).items() if n.startswith("_global_")
                                 and isinstance(d, dict)],
        "trace": (sys.gettrace(), sys.getprofile()),
    }  # fmt: skip
    for kind in CLASSES:
        photo[f"class {kind.__name__}"] = {k: id(v) for k, v in vars(kind).items() if not k.startswith("__abc")}
    for index, generator in enumerate(generators):
        photo[f"generator {index}"] = raw(generator.get_state())[-1]
    for name, module in model.named_modules():
        photo[f"attributes of {name!r}"] = {k: id(v) for k, v in vars(module).items()}
        photo[f"hooks of {name!r}"] = {k: list(v) for k, v in vars(module).items() if k.endswith("hooks") and v}
        photo[f"training of {name!r}"] = module.training
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        photo[f"tensor {name}"] = raw(tensor)
        photo[f"hooks of tensor {name}"] = len(tensor._backward_hooks or {})
        photo[f"grad {name}"] = raw(tensor.grad)
    if optimizer is not None:
        for index, group in enumerate(optimizer.param_groups):
            photo[f"group {index}"] = {k: raw(v) if isinstance(v, Tensor) else repr(v) for k, v in group.items()}
        for index, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                photo[f"state {index} {key}"] = raw(value) if isinstance(value, Tensor) else value
    return photo


def assert_same(before: dict[str, Any], after: dict[str, Any], *, apart_from: tuple[str, ...] = ()) -> None:
    names = [n for n in {**before, **after} if not n.startswith(apart_from or ("nothing",))]
    assert [n for n in names if before.get(n, "absent") != after.get(n, "absent")] == []


def bomb_line(which: str) -> str:
    """`file:line` where a Bomb raises, in "forward" or "backward"."""
    return line_of(f"bomb {which}", __file__)


# -- a model that fails in a chosen call -----------------------------------------------------------


class Explosion(Exception):
    pass


class Bomb(nn.Module):
    """Passes its input through; raises in the n-th forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"forward": 0, "backward": 0}
        self.fuse: tuple[str, int] | None = None
        self.error: type[BaseException] = Explosion

    def count(self, which: str) -> bool:
        self.calls[which] += 1
        return self.fuse == (which, self.calls[which])

    def forward(self, x: Tensor) -> Tensor:
        if self.count("forward"):
            raise self.error("in forward")  # here: bomb forward
        return _Pass.apply(x, self)

    def set(self, which: str, number: int, error: type[BaseException] = Explosion) -> None:
        self.calls, self.fuse, self.error = {"forward": 0, "backward": 0}, (which, number), error


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bomb: Bomb) -> Tensor:
        ctx.bomb = bomb
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.bomb.count("backward"):
            raise ctx.bomb.error("in backward")  # here: bomb backward
        return gradient * 1, None


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), Bomb(), nn.Linear(6, 3))


class Trainer:
    """A model and its optimizer. `step` is captured as a whole; `step_outside` runs around graphed modules."""

    def __init__(self, device: torch.device, make: Callable[[], nn.Module] = make_model) -> None:
        self.model = make()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.05, fused=True, capturable=True, weight_decay=0.1
        )
        self.device = device

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step_outside(self, x: Tensor) -> Tensor:
        """The same step, but it sets gradients to None."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach().clone()


def inputs(n: int = 5) -> Tensor:
    return torch.linspace(-1, 1, n * 4).view(n, 4).sin()


def run(step: Callable[[Tensor], Tensor], trainer: Trainer, steps: int, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    losses = [step(inputs() * (i + 1)).clone() for i in range(steps)]
    return [raw(t)[-1] for t in [*losses, *trainer.model.state_dict().values()]]


def assert_goes_on(trainer: Trainer, twin: Trainer, backend: str) -> None:
    """Eager training continues as if there had been no capture; then a capture succeeds and is correct."""
    bomb = next(m for m in trainer.model.modules() if isinstance(m, Bomb))
    bomb.fuse = None
    assert run(trainer.step, trainer, 2, 11) == run(twin.step, twin, 2, 11)
    step = capture(trainer.step, (inputs(),), backend=backend)
    assert run(step, trainer, 3, 12) == run(twin.step, twin, 3, 12)
    assert step.record.replays == 3


def graph_layers(trainer: Trainer, backend: str, **options: Any) -> Any:
    """Every layer of the model as a graph of its own."""
    x, samples = inputs().requires_grad_(), []
    with torch.no_grad():
        mean, var = [b.clone() for b in (trainer.model[1].running_mean, trainer.model[1].running_var)]
        number = trainer.model[1].num_batches_tracked.clone()
        rng = torch.get_rng_state(), torch.cuda.get_rng_state_all() if x.is_cuda else None
        for layer in trainer.model:
            samples.append((x.detach().requires_grad_(),))
            x = layer(x) if not isinstance(layer, Bomb) else x
        trainer.model[1].running_mean.copy_(mean)
        trainer.model[1].running_var.copy_(var)
        trainer.model[1].num_batches_tracked.copy_(number)
        torch.set_rng_state(rng[0])
        if rng[1]:
            torch.cuda.set_rng_state_all(rng[1])
    return graph(tuple(trainer.model), tuple(samples), backend=backend, **options)
