"""Train a small transformer with a captured step: forward, backward and optimizer in one graph.

It learns to reverse strings of digits. The same steps are run eagerly for comparison, and at the end the graph report
says what was captured and replayed. Runs anywhere: on CUDA graphs if there is a GPU, else on the tape.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollgraph.distributed.world import World
from rollgraph.graph import GraphPool, capture
from rollgraph.telemetry.metrics import JsonlSink, LineSink, Metrics

DIGITS, LENGTH, WIDTH, HEADS = 10, 8, 64, 4
SEPARATOR = DIGITS  # the token between a string and its reverse


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width]
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.mlp(self.norm2(x))


class Reverser(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(DIGITS + 1, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:  # [batch, tokens] -> logits [batch, tokens, vocabulary]
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def make_batch(generator: torch.Generator, batch: int, device: str) -> Tensor:
    """`31..7|7..13` as ids [batch, 2 * LENGTH + 1]."""
    digits = torch.randint(DIGITS, (batch, LENGTH), generator=generator)
    separator = torch.full((batch, 1), SEPARATOR)
    return torch.cat([digits, separator, digits.flip(1)], dim=1).to(device)


class Trainer:
    """A model and its optimizer. What varies from step to step, the learning rate, is a tensor."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model = model
        self.rate = torch.tensor(3e-3, device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, fused=True, capturable=True)

    def step(self, ids: Tensor) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        logits = self.model(ids[:, :-1])[:, LENGTH:]  # predictions of the reversed half
        target = ids[:, LENGTH + 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "accuracy": (logits.argmax(-1) == target).float().mean()}


def build() -> tuple[nn.Module, Callable[[Tensor], dict[str, Tensor]], tuple[Tensor]]:
    """What `rollgraph check examples/captured_training.py:build` looks at."""
    device = World.current().device
    trainer = Trainer(Reverser().to(device), device)
    return trainer.model, trainer.step, (make_batch(torch.Generator().manual_seed(1), 8, device),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "tape", "eager"))
    parser.add_argument("--metrics", type=Path, help="also write every step to this JSONL file")
    options = parser.parse_args()

    device = World.current().device
    torch.manual_seed(0)
    captured = Trainer(Reverser().to(device), device)
    eager = Trainer(copy.deepcopy(captured.model), device)
    data = torch.Generator().manual_seed(1)
    batches = [make_batch(data, options.batch, device) for _ in range(options.steps)]

    pool = GraphPool()
    step = capture(captured.step, (batches[0],), pool=pool, backend=options.backend, name="train step")

    lines, files = Metrics([LineSink()]), Metrics([JsonlSink(options.metrics)] if options.metrics else [])
    torch.manual_seed(2)
    start = time.perf_counter()
    for number, ids in enumerate(batches):
        captured.rate.fill_(3e-3 * (1 - number / options.steps))
        metrics = step(ids)
        if number % 50 == 0 or number == options.steps - 1:
            lines.log(number, metrics)
        if options.metrics:
            files.log(number, metrics)
    final = metrics["loss"].item()
    seconds = time.perf_counter() - start

    torch.manual_seed(2)
    start = time.perf_counter()
    for number, ids in enumerate(batches):
        eager.rate.fill_(3e-3 * (1 - number / options.steps))
        eager_metrics = eager.step(ids)
    eager_final = eager_metrics["loss"].item()
    eager_seconds = time.perf_counter() - start

    same = all(torch.equal(p, q) for p, q in zip(captured.model.parameters(), eager.model.parameters(), strict=True))
    print(f"\n{options.steps} captured steps in {seconds:.1f} s, the same steps eagerly in {eager_seconds:.1f} s")
    print(f"final loss {final:.6f}, eager {eager_final:.6f}; parameters {'bit-identical' if same else 'differ'}\n")
    print(pool.report())


if __name__ == "__main__":
    main()
