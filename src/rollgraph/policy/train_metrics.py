"""What a call of `train` reports: sums that stay on the device until the end, then means over all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollgraph.rl.losses import means
from rollgraph.sharding import Collectives
from rollgraph.telemetry.metrics import to_host

# What a loss reports of its tokens is shown under `policy/`, and these two names apart from it.
OF_THE_LOSS = {"loss": "loss", "weight": "loss/weight"}
# How far the log-probabilities of rollout and training differ: the mean of exp(|difference|), and the largest.
AGREEMENT = ("policy/token_mult_prob_error", "policy/token_mult_prob_error_max")


@dataclass
class TrainTotals:
    """The sums of one call of `train`. It `compares` log-probabilities if samples have those they were drawn with."""

    compares: bool = True
    metrics: dict[str, Tensor] = field(default_factory=dict)
    agreement: list[Tensor] = field(default_factory=list)  # [3] of each microbatch before the first update
    updates: int = 0
    samples: int = 0
    tokens: int = 0
    capacity: int = 0  # tokens and padding
    norms: list[Tensor] = field(default_factory=list)

    def add_microbatch(
        self, agreement: Tensor, metrics: Mapping[str, Tensor], tokens: int, bucket: int, samples: int
    ) -> None:
        """The tensors are copied: a graph will overwrite them."""
        if self.updates == 0:
            self.agreement.append(agreement.clone())
        for name, value in metrics.items():
            if name in self.metrics:
                self.metrics[name] = self.metrics[name] + value
            else:
                self.metrics[name] = value.clone()
        self.tokens += tokens
        self.capacity += bucket
        self.samples += samples


def summarize(
    totals: TrainTotals, collectives: Collectives, ranks: int, more: Mapping[str, Tensor]
) -> dict[str, float]:
    """Means over all ranks. One transfer from the device, and another one if ranks exchange their sums."""
    agreement = torch.stack(totals.agreement)  # [microbatches, 3]
    largest = agreement[:, 2].max()
    sums = torch.stack([*agreement[:, :2].sum(0), *totals.metrics.values()])
    tokens = totals.tokens
    capacity = totals.capacity
    if ranks > 1:
        mine = [tokens, capacity, *torch.stack([largest, *sums]).tolist()]
        everyone = [json.loads(text) for text in collectives.all_gather_text(json.dumps(mine))]
        tokens = sum(theirs[0] for theirs in everyone)
        capacity = sum(theirs[1] for theirs in everyone)
        gathered = torch.tensor([theirs[2:] for theirs in everyone], device=sums.device)
        largest = gathered[:, 0].max()
        sums = gathered[:, 1:].sum(0)
    values = {}
    for name, value in means(dict(zip(totals.metrics, sums[2:], strict=True))).items():
        if name in OF_THE_LOSS:
            values[OF_THE_LOSS[name]] = value / totals.updates  # of one minibatch
        else:
            values[f"policy/{name}"] = value
    if totals.compares:
        mean_error = sums[0] / sums[1].clamp_min(1)
        values |= dict(zip(AGREEMENT, (mean_error, largest), strict=True))
    values |= more
    if totals.norms:
        values["optimizer/grad_norm"] = torch.stack(totals.norms).mean()
    return {**to_host(values), "tokens/padding": 1 - tokens / max(1, capacity), "tokens/train": float(tokens)}
