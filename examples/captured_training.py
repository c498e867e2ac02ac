"""Train a small transformer with a captured step: forward, backward and optimizer in one graph.

The model learns to reverse strings of digits. The same steps also run eagerly, for comparison, and at the end the graph
report counts captures and replays. It runs anywhere: with CUDA graphs on a GPU, with the tape on a CPU.
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

from rollgraph.graph import GraphPool, capture
from rollgraph.log.metrics import JsonlSink, LineSink, Metrics
from rollgraph.parallel.ranks.world import World

DIGITS = 10
LENGTH = 8  # digits in a string
WIDTH = 64
HEADS = 4
SEPARATOR = DIGITS  # the token between a string and its reverse
LEARNING_RATE = 3e-3  # in the first step; it falls to 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH)
        self.norm2 = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
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
        self.tokens = nn.Embedding(DIGITS + 1, WIDTH)
        self.places = nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:  # [batch, tokens] -> logits [batch, tokens, vocabulary]
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def make_batch(generator: torch.Generator, batch: int, device: str) -> Tensor:
    """Return random strings with their reverse, `31..7|7..13`, as ids [batch, 2 * LENGTH + 1]."""
    digits = torch.randint(DIGITS, (batch, LENGTH), generator=generator)
    separator = torch.full((batch, 1), SEPARATOR)
    return torch.cat([digits, separator, digits.flip(1)], dim=1).to(device)


class Trainer:
    """A model and its optimizer. The learning rate changes from step to step, so it is a tensor."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model = model
        self.rate = torch.tensor(LEARNING_RATE, device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, fused=True, capturable=True)

    def set_rate(self, done: float) -> None:
        """Set the learning rate for a moment of training, from 0 (the start) to 1 (the end)."""
        self.rate.fill_(LEARNING_RATE * (1 - done))

    def step(self, ids: Tensor) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        logits = self.model(ids[:, :-1])[:, LENGTH:]  # predictions of the reversed half
        target = ids[:, LENGTH + 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "accuracy": (logits.argmax(-1) == target).float().mean()}


def build() -> tuple[nn.Module, Callable[[Tensor], dict[str, Tensor]], tuple[Tensor]]:
    """Return what `rollgraph check examples/captured_training.py:build` checks."""
    device = World.current().device
    trainer = Trainer(Reverser().to(device), device)
    batch = make_batch(torch.Generator().manual_seed(1), 8, device)
    return trainer.model, trainer.step, (batch,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="number of steps (default: 400)")
    parser.add_argument("--batch", type=int, default=64, help="strings in a batch (default: 64)")
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

    printed = Metrics([LineSink()])
    written = Metrics([JsonlSink(options.metrics)]) if options.metrics else None
    torch.manual_seed(2)
    start = time.perf_counter()
    for number, ids in enumerate(batches):
        captured.set_rate(number / options.steps)
        metrics = step(ids)
        if number % 50 == 0 or number == options.steps - 1:
            printed.log(number, metrics)
        if written is not None:
            written.log(number, metrics)
    final = metrics["loss"].item()
    seconds = time.perf_counter() - start

    torch.manual_seed(2)  # the same dropout masks
    start = time.perf_counter()
    for number, ids in enumerate(batches):
        eager.set_rate(number / options.steps)
        eager_metrics = eager.step(ids)
    eager_final = eager_metrics["loss"].item()
    eager_seconds = time.perf_counter() - start

    pairs = zip(captured.model.parameters(), eager.model.parameters(), strict=True)
    verdict = "bit-identical" if all(torch.equal(ours, theirs) for ours, theirs in pairs) else "differ"
    print(f"\n{options.steps} captured steps in {seconds:.1f} s, the same steps eagerly in {eager_seconds:.1f} s")
    print(f"final loss {final:.6f}, eager {eager_final:.6f}; parameters {verdict}\n")
    print(pool.report())


if __name__ == "__main__":
    main()
