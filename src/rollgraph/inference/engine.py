"""The engine: requests in, completions out. Continuous batching over a paged cache.

Owns requests and their text, and drives `Scheduler` (who runs) and `DecodeGraphs` (what the device does). It is one
step behind: it launches a step before it has read the results of the one before, so the device never waits.
"""

from __future__ import annotations

import hashlib
import operator
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollgraph.graph import GraphPool
from rollgraph.graph.capture import BackendName
from rollgraph.graph.hooks import Guard
from rollgraph.inference import decode_graphs as columns
from rollgraph.inference import scheduler
from rollgraph.inference.decode_graphs import DecodeGraphs, OnCapture
from rollgraph.inference.kv_cache import CachePlan
from rollgraph.inference.requests import Completion, OnToken, Output, Progress, RequestError, SamplingParams
from rollgraph.inference.scheduler import EngineStep, RequestState, Scheduler
from rollgraph.model.decoder import Decoder
from rollgraph.tokenizer import Detokenizer, Tokenizer

_InFlight = tuple[EngineStep, torch.Tensor, torch.cuda.Event | None]


@dataclass(eq=False)
class _RunningSample:
    """A completion in the making."""

    output: Output
    index: int
    params: SamplingParams
    stop_ids: frozenset[int]
    on_token: OnToken | None
    detokenizer: Detokenizer | None  # None if nobody wants text before the end
    seed: tuple[int, int]
    given: int = 0  # characters of the text that were certain so far

    @property
    def completion(self) -> Completion:
        return self.output.completions[self.index]


class Engine:
    """Generates with `model`, whose parameters may change between calls but never move.

    Everything is allocated and captured here, before the first request. `rows` is how many sequences decode at a time
    (256 on a GPU, else 16), `max_length` bounds a prompt with its completion, `cache_bytes` the key/value cache.
    `filters=False` leaves out the graphs for top-k, top-p, min-p and repetition penalty; requests with those are then
    refused.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        rows: int | None = None,
        max_length: int | None = None,
        cache_bytes: int | None = None,
        block_size: int = 16,
        prefill_tokens: int | None = None,
        filters: bool = True,
        pool: GraphPool | None = None,
        backend: BackendName = "auto",
        guards: Sequence[Guard] = (),
        on_capture: OnCapture | None = None,
    ) -> None:
        architecture, weight = model.architecture, model.embed.weight
        max_length = min(max_length or 4096, architecture.max_length)
        cuda = weight.device.type == "cuda"
        rows = (256 if cuda else 16) if rows is None else rows
        if rows < 1 or block_size < 1:
            raise ValueError(f"rows={rows}, block_size={block_size}: at least 1")
        prefill_tokens = prefill_tokens or (8192 if cuda else 512)
        prefill_buckets = _powers(prefill_tokens, first=64, factor=4)
        prefill_sequences = min(64, rows)
        plan = _plan_cache(model, rows, max_length, block_size, cache_bytes)
        buckets = _powers(rows, first=1, factor=2)
        self.model, self.tokenizer, self.plan, self.pool = model, tokenizer, plan, pool or GraphPool()
        self.max_length, self._filters = max_length, filters
        self._vocabulary = architecture.vocabulary
        # A model may have more ids than its tokenizer: they have no text.
        self._known = frozenset(tokenizer.vocab.values()) if tokenizer is not None else frozenset()
        self._scheduler = Scheduler(
            blocks=plan.blocks,
            block_size=block_size,
            max_rows=rows,
            buckets=buckets,
            prefill_tokens=prefill_tokens,
            prefill_sequences=prefill_sequences,
            max_length=max_length,
        )
        self._graphs = DecodeGraphs(
            model,
            plan,
            buckets=buckets,
            prefill_buckets=prefill_buckets,
            prefill_sequences=prefill_sequences,
            max_length=max_length,
            filters=filters,
            pool=self.pool,
            backend=("cuda" if cuda else "tape") if backend == "auto" else backend,
            guards=guards,
            on_capture=on_capture,
        )
        self._samples: dict[scheduler.Sequence, _RunningSample] = {}
        self._in_flight: _InFlight | None = None
        self._stepping = False
        self._pinned = [torch.empty((rows, 3), dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._turn = 0
        self._counts = {"submitted": 0, "tokens": 0, "finished": 0}

    # -- requests --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 - frozen
        *,
        on_token: OnToken | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Output]:
        """Continue each prompt, a text or token ids. A prompt that cannot be served gives an output with an `error`."""
        if isinstance(prompts, str):
            raise TypeError("prompts is a list of prompts, not one string")
        several = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(several) != len(prompts):
            raise ValueError(f"{len(several)} sampling parameters for {len(prompts)} prompts")
        outputs = []
        if not self._samples:  # progress is of this call, unless others have submitted something
            self._counts |= {"tokens": 0, "finished": 0}
        try:
            for prompt, own in zip(prompts, several, strict=True):
                try:
                    outputs.append(self.submit(prompt, own, on_token=on_token))
                except RequestError as error:
                    outputs.append(Output(prompt if isinstance(prompt, str) else None, [], error=str(error)))
            more = True
            while more:
                more = self.step()
                if on_progress is not None:
                    on_progress(self.progress())
        except BaseException:
            self.reset()
            raise
        return outputs

    def submit(self, prompt: str | Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None) -> Output:
        """Queue a request; its output fills as `step` is called. Raises RequestError, and nothing has changed."""
        text, tokens = self._encode(prompt)
        if params.filtered and not self._filters:
            raise RequestError("the engine was made without filters: top_k, top_p, min_p and penalties are not there")
        output = Output(text, tokens, [Completion() for _ in range(params.n)])
        if params.max_tokens == 0:
            for completion in output.completions:
                completion.finish_reason = "length"
            self._counts["finished"] += params.n
            return output
        sequences = [
            scheduler.Sequence(self._counts["submitted"] + i, tuple(tokens), params.max_tokens) for i in range(params.n)
        ]
        stop_ids = frozenset(params.stop_ids)
        if self.tokenizer is not None and not params.ignore_eos:
            stop_ids |= self.tokenizer.stop_ids
        seed = secrets.randbits(63) if params.seed is None else params.seed
        wants_text = bool(params.stop) or on_token is not None
        if wants_text and self.tokenizer is None:
            raise RequestError("stop strings and streamed text need a tokenizer")
        for index, sequence in enumerate(sequences):
            try:
                self._scheduler.add(sequence)
            except ValueError as error:
                raise RequestError(str(error).partition(": ")[2] or str(error)) from None
            detokenizer = Detokenizer(self.tokenizer) if wants_text and self.tokenizer is not None else None
            self._samples[sequence] = _RunningSample(
                output, index, params, stop_ids, on_token, detokenizer, _row_seed(seed, index)
            )
        self._counts["submitted"] += params.n
        return output

    def abort(self, output: Output) -> None:
        """End what is not finished of a request; it keeps the tokens it has."""
        for sequence, sample in list(self._samples.items()):
            if sample.output is output:
                self._finish(sequence, sample, "abort")

    def reset(self) -> None:
        """Abort everything; the engine is as new."""
        for sequence, sample in list(self._samples.items()):
            self._finish(sequence, sample, "abort")
        in_flight, self._in_flight = self._in_flight, None
        self._collect(in_flight)

    def progress(self) -> Progress:
        done = self._counts
        return Progress(done["tokens"], self._scheduler.running, self._scheduler.waiting, done["finished"])

    def _encode(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a prompt of text needs a tokenizer")
            try:
                text, tokens = prompt, self.tokenizer.encode(prompt)
            except ValueError as error:
                raise RequestError(str(error)) from None
        else:
            try:
                text, tokens = None, [operator.index(token) for token in prompt]
            except TypeError:
                raise RequestError(f"a prompt is a text or token ids, not {str(prompt)[:60]!r}") from None
        if not tokens:
            raise RequestError("the prompt is empty")
        unknown = next((t for t in tokens if not 0 <= t < self._vocabulary), None)
        if unknown is not None:
            raise RequestError(f"token {unknown} is not in the model's vocabulary of {self._vocabulary}")
        return text, tokens

    # -- the loop --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch the next step and read the results of the one before; False when there is nothing left to do.

        Whatever is raised here, by a callback or a guard, everything is aborted first.
        """
        if self._stepping:
            raise RuntimeError("the engine is within a step: a callback can submit and abort, not wait for results")
        self._stepping = True
        try:
            step = self._scheduler.schedule()
            before, self._in_flight = self._in_flight, self._launch(step) if step is not None else None
            self._collect(before)
        except BaseException:
            self.reset()
            raise
        finally:
            self._stepping = False
        return self._in_flight is not None or self._scheduler.has_work

    def _launch(self, step: EngineStep) -> _InFlight:
        graphs = self._graphs
        graphs.upload.begin()
        if step.chunks:
            graphs.prefill([(chunk.start, chunk.tokens, chunk.sequence.blocks) for chunk in step.chunks])
        if step.copies:
            graphs.copy(step.copies)
        if step.moves:
            graphs.move(step.moves)
        if step.starts:
            self._start(step.starts)
        self._turn = 1 - self._turn
        host = self._pinned[self._turn][: step.bucket]
        if step.bucket:
            filtered = self._filters and any(s is not None and self._samples[s].params.filtered for s in step.rows)
            graphs.decode(step.orders, filtered)
            host.copy_(graphs.results[: step.bucket], non_blocking=True)
        if not graphs.results.is_cuda:
            return step, host, None
        event = torch.cuda.Event()
        event.record()
        return step, host, event

    def _start(self, starts: Sequence[scheduler.Sequence]) -> None:
        states = np.zeros((len(starts), self._graphs.state.shape[1]), dtype=np.int32)
        numbers = states.view(np.float32)
        histories = []
        for state, number, sequence in zip(states, numbers, starts, strict=True):
            sample = self._samples[sequence]
            params = sample.params
            state[columns.TOKEN], state[columns.POSITION] = sequence.tokens[-1], sequence.length - 1
            state[columns.SEED : columns.SEED + 2] = sample.seed
            state[columns.TOP_K] = params.top_k
            number[columns.TEMPERATURE], number[columns.TOP_P] = params.temperature, params.top_p
            number[columns.MIN_P], number[columns.PENALTY] = params.min_p, params.repetition_penalty
            state[columns.TABLE : columns.TABLE + len(sequence.blocks)] = sequence.blocks
            if params.repetition_penalty != 1:
                histories.append((sequence.row, sequence.tokens))
        self._graphs.start([sequence.row for sequence in starts], states, histories)

    def _collect(self, in_flight: _InFlight | None) -> None:
        """Wait for a step and take in its results."""
        if in_flight is None:
            return
        step, host, event = in_flight
        if event is not None:
            event.synchronize()
        tokens = host[:, 0].tolist()
        logprobs, policy_logprobs = host.view(torch.float32)[:, 1:].T.tolist()
        rows = {sequence: row for row, sequence in enumerate(step.rows) if sequence is not None}
        for sequence, token in self._scheduler.update(step, tokens):
            row, sample = rows[sequence], self._samples.get(sequence)
            if sample is None:
                continue  # a callback aborted it
            if token < 0:
                sequence.generated.pop()
                sample.completion.error = "the model's logits are not finite"
                self._finish(sequence, sample, "error")
                continue
            self._counts["tokens"] += 1
            completion = sample.completion
            completion.tokens.append(token)
            completion.logprobs.append(logprobs[row])
            completion.policy_logprobs.append(policy_logprobs[row])
            stopped = token in sample.stop_ids
            if sample.detokenizer is not None:
                ends = stopped or sequence.state is RequestState.FINISHED
                stopped |= _stream(sample, sample.detokenizer, token, token in self._known, ends)
            if stopped:
                self._finish(sequence, sample, "stop")
            elif sequence.state is RequestState.FINISHED:
                self._finish(sequence, sample, "length")

    def _finish(self, sequence: scheduler.Sequence, sample: _RunningSample, reason: str) -> None:
        if self._samples.pop(sequence, None) is None:
            return  # it was aborted by a callback
        self._scheduler.finish(sequence, reason)
        completion = sample.completion
        completion.finish_reason = reason
        if sample.detokenizer is not None and reason in ("abort", "error"):
            completion.text += sample.detokenizer.finish()
        elif sample.detokenizer is None and self.tokenizer is not None:
            completion.text = self.tokenizer.decode([token for token in completion.tokens if token in self._known])
        self._counts["finished"] += 1


def _stream(sample: _RunningSample, detokenizer: Detokenizer, token: int, known: bool, last: bool) -> bool:
    """Add to the text; True if a stop string is complete."""
    completion, stops = sample.completion, sample.params.stop
    before = len(completion.text)
    completion.text += (detokenizer.push(token) if known else "") + (detokenizer.finish() if last else "")
    text = completion.text + (detokenizer.pending() if stops and not last else "")
    longest = max(map(len, stops), default=0)
    found = [text.find(stop, max(0, before - longest)) for stop in stops]
    ends = [place for place in found if place >= 0]
    if ends:
        completion.text = text[: min(ends)]
    certain = len(completion.text)
    if not ends and not last:
        certain -= max((_begun(completion.text, stop) for stop in stops), default=0)
    new, sample.given = completion.text[sample.given : certain], certain
    if sample.on_token is not None:
        sample.on_token(sample.output, sample.index, token, new)
    return bool(ends)


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop string."""
    return next(size for size in range(min(len(stop) - 1, len(text)), -1, -1) if text.endswith(stop[:size]))


def _row_seed(seed: int, index: int) -> tuple[int, int]:
    """Two 32-bit numbers for sample `index` of a request."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    low, high = np.frombuffer(digest, dtype=np.int32).tolist()
    return low, high


def _powers(last: int, first: int, factor: int) -> tuple[int, ...]:
    """first, first * factor, ... and `last`."""
    sizes, size = [], first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)


def _plan_cache(model: Decoder, rows: int, max_length: int, block_size: int, cache_bytes: int | None) -> CachePlan:
    """As many blocks as all rows could ever use, within `cache_bytes`, or most of what is free."""
    weight = model.embed.weight
    if cache_bytes is None:
        free = torch.cuda.mem_get_info(weight.device)[0] if weight.is_cuda else 10 * 2**30
        cache_bytes = free * 8 // 10 if weight.is_cuda else free // 10
    plan = CachePlan.within(model.architecture, weight.dtype, block_size, cache_bytes)
    most = rows * -(-max_length // block_size) + 1
    if plan.blocks < 2:
        one = CachePlan(plan.architecture, plan.dtype, block_size, 1).nbytes
        raise ValueError(f"cache_bytes={cache_bytes}: one block takes {one} bytes, and a cache has two at least")
    return CachePlan(plan.architecture, plan.dtype, block_size, min(plan.blocks, most))
