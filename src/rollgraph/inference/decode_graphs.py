"""What runs on the device for the engine: prefill and decode steps, captured once, and the state they share.

A decode step is one graph: append blocks to the tables, embed, all layers, sample, log-probabilities, advance. What
it needs from the host is one number for each row. There is one graph for each batch bucket and variant, and one for
each prefill bucket. They stay valid when weights change, because parameters never move. Knows nothing of requests,
queues or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollgraph.graph import GraphPool, capture
from rollgraph.graph.capture import BackendName
from rollgraph.graph.hooks import Guard
from rollgraph.inference.kv_cache import CachePlan, copy_blocks
from rollgraph.inference.sampler import Rows, sample, sample_filtered
from rollgraph.model.decoder import Decoder

# Columns of a row's state. Those after SEED are float32, by their bits; the block table follows.
TOKEN, POSITION, TOP_K, SEED, TEMPERATURE, TOP_P, MIN_P, PENALTY, TABLE = 0, 1, 2, 3, 5, 6, 7, 8, 9

OnCapture = Callable[[str, int, int], None]  # name, how many are done, of how many


class Upload:
    """Numbers from the host to the device, without waiting for either.

    Each launch writes to one of two pinned areas; the engine has seen the results of the launch before the last one,
    so nobody reads that area any more.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._areas = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._turn, self._used = 0, 0

    def begin(self) -> None:
        self._turn, self._used = 1 - self._turn, 0

    def into(self, target: Tensor, values: np.ndarray) -> Tensor:
        """Copy int32 values to a tensor of the same shape."""
        end = self._used + values.size
        area = self._areas[self._turn][self._used : end]
        area.numpy()[:] = values.reshape(-1)
        self._used = end
        return target.copy_(area.view(values.shape), non_blocking=True)

    def __call__(self, values: np.ndarray) -> Tensor:
        return self.into(torch.empty(values.shape, dtype=torch.int32, device=self._device), values)


class DecodeGraphs:
    """The state of all rows, the cache, and the captured steps over them."""

    def __init__(
        self,
        model: Decoder,
        plan: CachePlan,
        *,
        buckets: Sequence[int],
        prefill_buckets: Sequence[int],
        prefill_sequences: int,
        max_length: int,
        filters: bool,
        pool: GraphPool,
        backend: BackendName,
        guards: Sequence[Guard] = (),
        on_capture: OnCapture | None = None,
    ) -> None:
        device = model.embed.weight.device
        rows, self.blocks_of_row = buckets[-1], -(-max_length // plan.block_size)
        self._model, self._block_size = model, plan.block_size
        self._prefill_sequences, self._prefill_buckets = prefill_sequences, tuple(prefill_buckets)
        self.pages = plan.allocate(device)
        self.state = torch.zeros((rows, TABLE + self.blocks_of_row), dtype=torch.int32, device=device)
        self.history = torch.zeros((rows, max_length if filters else 1), dtype=torch.int32, device=device)
        self.orders = torch.full((rows,), -2, dtype=torch.int32, device=device)
        # Token, and two float32 by their bits. The rows of a bucket lie together, so that they cross in one copy.
        self.results = torch.zeros((rows, 3), dtype=torch.int32, device=device)
        self._batches = {tokens: torch.zeros(self._batch_size(tokens), dtype=torch.int32, device=device)
                         for tokens in prefill_buckets}  # fmt: skip
        largest = self._batch_size(prefill_buckets[-1])
        self.upload = Upload(device, largest + self.state.numel() + self.history.numel() + 8 * rows)
        steps: dict[Any, tuple[str, Callable[[], None]]] = {
            tokens: (f"prefill {tokens}", partial(self._prefill_step, tokens)) for tokens in prefill_buckets
        }
        for filtered in (False, True) if filters else (False,):
            for bucket in reversed(buckets):  # the largest first: the smaller ones fit into its memory
                name = f"decode {bucket} filtered" if filtered else f"decode {bucket}"
                steps[bucket, filtered] = (name, partial(self._decode_step, bucket, filtered))
        self._graphs = {}
        for done, (key, (name, step)) in enumerate(steps.items()):
            self._graphs[key] = capture(step, pool=pool, backend=backend, guards=guards, name=name, warmup=2)
            if on_capture is not None:
                on_capture(name, done + 1, len(steps))

    # -- decode ----------------------------------------------------------------------------------

    def decode(self, orders: Sequence[int], filtered: bool) -> None:
        """Sample one token in each row that is not idle; the results are in `results`."""
        self.upload.into(self.orders[: len(orders)], np.array(orders, dtype=np.int32))
        self._graphs[len(orders), filtered]()

    @torch.no_grad()
    def _decode_step(self, rows: int, filtered: bool) -> None:
        state, orders, size = self.state[:rows], self.orders[:rows], self._block_size
        token, position, table = state[:, TOKEN], state[:, POSITION], state[:, TABLE:]
        active = orders > -2
        column = (position // size).long()[:, None]
        block = torch.where(orders >= 0, orders, table.gather(1, column)[:, 0])
        table.scatter_(1, column, block[:, None])
        slots = torch.where(active, block * size + position % size, 0)
        lengths = torch.where(active, position + 1, 1)
        hidden = self._model.decode(token, position, slots, self.pages, table, lengths)
        sampling = self._sampling(state, position + 1)
        if filtered:
            self.history[:rows].scatter_(1, position.long()[:, None], token[:, None])
            drawn = sample_filtered(self._model.logits(hidden), sampling, self.history[:rows])
        else:
            drawn = sample(self._model.logits(hidden), sampling)
        token.copy_(torch.where(active, drawn.token.clamp_min(0), token))
        position.add_(active)
        logprobs = torch.stack((drawn.logprob, drawn.policy_logprob), 1).view(torch.int32)
        self.results[:rows] = torch.cat((drawn.token[:, None], logprobs), 1)

    def _sampling(self, state: Tensor, position: Tensor) -> Rows:
        numbers = state.view(torch.float32)
        return Rows(
            seed=state[:, SEED : SEED + 2],
            temperature=numbers[:, TEMPERATURE],
            position=position,
            top_k=state[:, TOP_K],
            top_p=numbers[:, TOP_P],
            min_p=numbers[:, MIN_P],
            penalty=numbers[:, PENALTY],
        )

    def start(self, rows: Sequence[int], states: np.ndarray, histories: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Begin rows with the given states; `histories` are the tokens of those that have a repetition penalty."""
        index = self.upload(np.array(rows, dtype=np.int32))
        self.state.index_copy_(0, index.long(), self.upload(states))
        for row, tokens in histories:
            self.upload.into(self.history[row, : len(tokens)], np.array(tokens, dtype=np.int32))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """(from row, to row) pairs, at once."""
        sources, targets = self.upload(np.array(moves, dtype=np.int32).T.copy())
        for tensor in (self.state, self.history):
            tensor.index_copy_(0, targets.long(), tensor.index_select(0, sources))

    # -- prefill ---------------------------------------------------------------------------------

    def prefill(self, chunks: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        """Put keys and values of chunks (first position, tokens, block table) into the cache."""
        count = sum(len(tokens) for _, tokens, _ in chunks)
        bucket = next(size for size in self._prefill_buckets if size >= count)
        batch = np.zeros(self._batch_size(bucket), dtype=np.int32)
        ids, positions, slots, cu_seqlens, lengths, table = self._parts(batch, bucket)
        at = 0
        for i, (start, tokens, blocks) in enumerate(chunks):
            end, places = at + len(tokens), np.arange(start, start + len(tokens), dtype=np.int32)
            table[i, : len(blocks)] = blocks
            ids[at:end], positions[at:end] = tokens, places
            slots[at:end] = table[i, places // self._block_size] * self._block_size + places % self._block_size
            lengths[i] = start + len(tokens)
            cu_seqlens[i + 1 :] = at = end
        self.upload.into(self._batches[bucket], batch)
        self._graphs[bucket]()

    @torch.no_grad()
    def _prefill_step(self, tokens: int) -> None:
        ids, positions, slots, cu_seqlens, lengths, table = self._parts(self._batches[tokens], tokens)
        self._model.prefill(ids, positions, slots, self.pages, table, cu_seqlens, lengths)

    def _batch_size(self, tokens: int) -> int:
        return 3 * tokens + 1 + self._prefill_sequences * (2 + self.blocks_of_row)

    def _parts(self, batch: Any, tokens: int) -> tuple[Any, ...]:
        """Ids, positions, slots, cu_seqlens, lengths and table of a batch; padding goes to block 0."""
        sequences = self._prefill_sequences
        ids, positions, slots = (batch[i * tokens : (i + 1) * tokens] for i in range(3))
        rest = batch[3 * tokens :]
        cu_seqlens, lengths = rest[: sequences + 1], rest[sequences + 1 : 2 * sequences + 1]
        return ids, positions, slots, cu_seqlens, lengths, rest[2 * sequences + 1 :].reshape(sequences, -1)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source block, target block) pairs, at once."""
        copy_blocks(self.pages, *self.upload(np.array(copies, dtype=np.int32).T.copy()))
