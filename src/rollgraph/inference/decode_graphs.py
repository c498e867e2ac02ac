"""The device side of the engine: captured prefill and decode steps, and the state they share.

A decode step is one graph: it appends blocks to the tables, embeds the tokens, runs all layers, samples, computes
log-probabilities and advances the positions. The host sends one number per row. There is one graph for each prefill
bucket, and two for each batch bucket: with and without filters. Graphs stay valid when weights change, because
parameters never move. Knows nothing of requests, queues or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollgraph.graph import GraphPool, capture_lazily
from rollgraph.graph.capture import BackendName
from rollgraph.graph.hooks import Guard
from rollgraph.inference.kv_cache import CachePlan, copy_blocks
from rollgraph.inference.sampler import SamplingTensors, sample_filtered, sample_into
from rollgraph.inference.scheduler import IDLE
from rollgraph.model.decoder import Angles, Decoder
from rollgraph.model.gemm.matmul import TORCH_GEMM
from rollgraph.model.kernels.launch import compiling_together

# Columns of the rows' state, [rows, columns] int32.
TOKEN = 0
POSITION = 1
TOP_K = 2
SEED = 3  # two columns
TEMPERATURE = 5  # this column and the next three hold the bits of a float32
TOP_P = 6
MIN_P = 7
PENALTY = 8
TABLE = 9  # the block table takes all columns from here on

OnCapture = Callable[[str, int, int], None]  # (name of the next graph, number done, total)

# The key of a captured step: the tokens of a prefill, or the rows of a decode and whether it has filters.
_StepKey = int | tuple[int, bool]


class Upload:
    """Copies numbers from the host to the device asynchronously, through pinned memory.

    Launches alternate between two pinned areas. Before an area is written again, the engine has read the results of the
    launch that last used it, so the device is done with it.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._areas = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._area = 0
        self._used = 0

    def switch_area(self) -> None:
        """Start a new launch, in the other area."""
        self._area = 1 - self._area
        self._used = 0

    def copy_into(self, target: Tensor, values: np.ndarray) -> Tensor:
        """Copy int32 values into a tensor of the same shape."""
        end = self._used + values.size
        area = self._areas[self._area][self._used : end]
        area.numpy()[:] = values.reshape(-1)
        self._used = end
        return target.copy_(area.view(values.shape), non_blocking=True)

    def __call__(self, values: np.ndarray) -> Tensor:
        """Copy int32 values into a new tensor."""
        return self.copy_into(torch.empty(values.shape, dtype=torch.int32, device=self._device), values)


class DecodeGraphs:
    """The state of all rows, the cache, and the captured steps over them."""

    def __init__(
        self,
        model: Decoder,
        plan: CachePlan,
        pages: Sequence[Tensor],
        *,
        buckets: Sequence[int],
        prefill_buckets: Sequence[int],
        prefill_sequences: int,
        max_length: int,
        filters: bool,
        pool: GraphPool,
        backend: BackendName,
        guards: Sequence[Guard] = (),
    ) -> None:
        device = model.embed_tokens.weight.device
        rows = buckets[-1]
        self.blocks_of_row = -(-max_length // plan.block_size)
        self._model = model
        self._block_size = plan.block_size
        self._prefill_sequences = prefill_sequences
        self._prefill_buckets = tuple(prefill_buckets)
        self.pages = list(pages)  # one tensor per layer
        for layer in self.pages:
            pool.leave_unsaved(layer)
        self.state = torch.zeros((rows, TABLE + self.blocks_of_row), dtype=torch.int32, device=device)
        self.history = torch.zeros((rows, max_length if filters else 1), dtype=torch.int32, device=device)
        self.orders = torch.full((rows,), IDLE, dtype=torch.int32, device=device)  # see `scheduler.IDLE`
        # Per row, a token and the bits of two float32. The rows of a bucket are contiguous, so one copy transfers them.
        self.results = torch.zeros((rows, 3), dtype=torch.int32, device=device)
        self._angles: Angles | None = None  # of every position, for the kernels that prepare rows
        if device.type == "cuda":
            self._angles = model.angles(torch.arange(max_length, device=device))
        self._batches = {}
        for tokens in prefill_buckets:
            self._batches[tokens] = torch.zeros(self._batch_size(tokens), dtype=torch.int32, device=device)
        largest = self._batch_size(prefill_buckets[-1])
        # Of each row up to 8 numbers more: its order and index, and its part of the moves and copies of blocks.
        self.upload = Upload(device, largest + self.state.numel() + self.history.numel() + 8 * rows)

        self._graphs = {}
        for key, (name, step) in self._list_steps(buckets, filters).items():
            self._graphs[key] = capture_lazily(
                step,
                pool=pool,
                backend=backend,
                guards=guards,
                name=name,
                warmup=2,
                warmup_in_pool=True,
                first_run=compiling_together,
            )

    def capture(self, on_capture: OnCapture) -> None:
        """Capture every step now, before it is needed."""
        for done, graph in enumerate(self._graphs.values()):
            on_capture(graph.name, done, len(self._graphs))
            graph.capture()

    def _list_steps(self, buckets: Sequence[int], filters: bool) -> dict[_StepKey, tuple[str, Callable[[], None]]]:
        """The name and the function of every step, in the order of capture."""
        steps: dict[_StepKey, tuple[str, Callable[[], None]]] = {}
        for tokens in self._prefill_buckets:
            steps[tokens] = (f"prefill {tokens}", partial(self._prefill_step, tokens))
        variants = (False, True) if filters else (False,)
        for filtered in variants:
            for bucket in reversed(buckets):  # largest first: the smaller ones fit into its memory
                name = f"decode {bucket} filtered" if filtered else f"decode {bucket}"
                steps[bucket, filtered] = (name, partial(self._decode_step, bucket, filtered))
        return steps

    # -- decode ----------------------------------------------------------------------------------

    def decode(self, orders: Sequence[int], filtered: bool) -> None:
        """Sample one token into `results` for each row that is not idle."""
        step = self._graphs[len(orders), filtered]
        if self._angles is not None and step.enabled and not step.captured:
            self.orders.fill_(IDLE)  # a capture runs the step, and cannot undo its kernels' changes to rows
            step.capture()
        self.upload.copy_into(self.orders[: len(orders)], np.array(orders, dtype=np.int32))
        step()

    @torch.no_grad()
    def _decode_step(self, rows: int, filtered: bool) -> None:
        state = self.state[:rows]
        token = state[:, TOKEN]
        position = state[:, POSITION]
        table = state[:, TABLE:]
        slots, lengths, angles = self._prepare_rows(self.orders[:rows], position, table)
        hidden = self._model.decode(token, position, slots, self.pages, table, lengths, angles)
        sampling = self._sampling_tensors(state, lengths)  # the new token's position is the length
        logits = self._model.logits(hidden)
        results = self.results[:rows]
        if filtered:
            self.history[:rows].scatter_(1, position.long()[:, None], token[:, None])
            sample_filtered(logits, sampling, self.history[:rows]).write_to(results)
        else:
            pdl = self._model.head_algos.get(rows, TORCH_GEMM).kind == "fixed"
            sample_into(results, logits, sampling, pdl=pdl)
        if self._model.group is not None:  # all tensor parallel ranks must feed the same tokens
            results.copy_(self._model.group.from_first_rank(results))
        self._advance_rows(self.orders[:rows], results, token, position)

    def _prepare_rows(self, orders: Tensor, position: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Angles | None]:
        """Append new blocks to the table. Returns cache slots, lengths and, on a GPU, rotary angles."""
        size = self._block_size
        if self._angles is not None:
            from rollgraph.inference.kernels import prepare_rows

            return prepare_rows(orders, position, table, self._angles, size, IDLE)
        active = orders > IDLE
        column = (position // size).long()[:, None]
        block = torch.where(orders >= 0, orders, table.gather(1, column)[:, 0])
        table.scatter_(1, column, block[:, None])
        slots = torch.where(active, block * size + position % size, 0)
        return slots, torch.where(active, position + 1, 1), None

    def _advance_rows(self, orders: Tensor, results: Tensor, token: Tensor, position: Tensor) -> None:
        if self._angles is not None:
            from rollgraph.inference.kernels import advance_rows

            advance_rows(orders, results, token, position, IDLE)
            return
        active = orders > IDLE
        token.copy_(torch.where(active, results[:, 0].clamp_min(0), token))
        position.add_(active)

    def _sampling_tensors(self, state: Tensor, position: Tensor) -> SamplingTensors:
        numbers = state.view(torch.float32)
        return SamplingTensors(
            seed=state[:, SEED : SEED + 2],
            temperature=numbers[:, TEMPERATURE],
            position=position,
            top_k=state[:, TOP_K],
            top_p=numbers[:, TOP_P],
            min_p=numbers[:, MIN_P],
            penalty=numbers[:, PENALTY],
        )

    def start(self, rows: Sequence[int], states: np.ndarray, histories: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Write the state of new rows. `histories` are (row, tokens) of rows with a repetition penalty."""
        index = self.upload(np.array(rows, dtype=np.int32))
        self.state.index_copy_(0, index.long(), self.upload(states))
        for row, tokens in histories:
            self.upload.copy_into(self.history[row, : len(tokens)], np.array(tokens, dtype=np.int32))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move rows, all at once. `moves` are (source row, target row)."""
        sources, targets = self.upload(np.array(moves, dtype=np.int32).T.copy())
        for tensor in (self.state, self.history):
            tensor.index_copy_(0, targets.long(), tensor.index_select(0, sources))

    # -- prefill ---------------------------------------------------------------------------------

    def prefill(self, chunks: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        """Prefill: write the keys and values of chunks, (first position, tokens, block table), to the cache."""
        count = sum(len(tokens) for _, tokens, _ in chunks)
        bucket = next(size for size in self._prefill_buckets if size >= count)
        batch = np.zeros(self._batch_size(bucket), dtype=np.int32)
        ids, positions, slots, cu_seqlens, lengths, table = self._batch_views(batch, bucket)
        size = self._block_size
        offset = 0
        for i, (start, tokens, blocks) in enumerate(chunks):
            end = offset + len(tokens)
            chunk_positions = np.arange(start, start + len(tokens), dtype=np.int32)
            table[i, : len(blocks)] = blocks
            ids[offset:end] = tokens
            positions[offset:end] = chunk_positions
            slots[offset:end] = table[i, chunk_positions // size] * size + chunk_positions % size
            lengths[i] = start + len(tokens)
            cu_seqlens[i + 1 :] = end  # sequences without a chunk stay empty
            offset = end
        self.upload.copy_into(self._batches[bucket], batch)
        self._graphs[bucket]()

    @torch.no_grad()
    def _prefill_step(self, tokens: int) -> None:
        ids, positions, slots, cu_seqlens, lengths, table = self._batch_views(self._batches[tokens], tokens)
        self._model.prefill(ids, positions, slots, self.pages, table, cu_seqlens, lengths)

    def _batch_size(self, tokens: int) -> int:
        return 3 * tokens + 1 + self._prefill_sequences * (2 + self.blocks_of_row)

    def _batch_views(self, batch: Any, tokens: int) -> tuple[Any, ...]:
        """Views into a batch: ids, positions, slots, cu_seqlens, lengths and table.

        A batch of zeros is all padding, which goes to block 0.
        """
        sequences = self._prefill_sequences
        ids = batch[:tokens]
        positions = batch[tokens : 2 * tokens]
        slots = batch[2 * tokens : 3 * tokens]
        per_sequence = batch[3 * tokens :]
        cu_seqlens = per_sequence[: sequences + 1]
        lengths = per_sequence[sequences + 1 : 2 * sequences + 1]
        table = per_sequence[2 * sequences + 1 :].reshape(sequences, -1)
        return ids, positions, slots, cu_seqlens, lengths, table

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the cache, all at once. `copies` are (source block, target block)."""
        sources, targets = self.upload(np.array(copies, dtype=np.int32).T.copy())
        copy_blocks(self.pages, sources, targets)
