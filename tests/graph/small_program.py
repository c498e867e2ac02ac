"""Captures and replays a little of everything; run under compute-sanitizer by test_cuda.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollgraph.graph import GraphPool, capture, make_graphed_callables


def main() -> None:
    pool = GraphPool()
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)).cuda() for _ in range(2)]
    sample = torch.randn(4, 8, device="cuda", requires_grad=True)
    make_graphed_callables(tuple(blocks), ((sample,),) * 2, pool=pool)
    model = nn.Sequential(*blocks, nn.Linear(8, 1).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(4, 8, device="cuda")
    for _ in range(2):
        step(x)
    with pool.disabled():
        whole = capture(step, (x,))
    for _ in range(2):
        whole(torch.randn(4, 8, device="cuda"))
        torch.cuda.empty_cache()
    pool.reset()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
