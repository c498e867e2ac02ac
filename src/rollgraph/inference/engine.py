"""The engine: requests in, completions out.

    generate              submit every prompt, then step until all are done
      submit              encode and check a prompt, queue its n sequences      Scheduler.add
      step                one launch:
        schedule          choose what prefills, decodes, moves rows or waits    Scheduler.schedule
        run               upload the choice, replay the prefill and decode      DecodeGraphs
                          graphs, start copying the sampled tokens back
        postprocess       read the tokens of the PREVIOUS step: extend          Scheduler.update, TextStream
                          completions and their text, finish what has ended

The engine is one step behind: it launches a step before it reads the results of the one before, so the device never
waits for the host. It owns the requests and their text. The scheduler touches no tensor, and the graphs know nothing of
requests.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rollgraph.graph import GraphPool
from rollgraph.graph.capture import BackendName
from rollgraph.graph.hooks import Guard
from rollgraph.inference import decode_graphs as columns
from rollgraph.inference import scheduler
from rollgraph.inference import sizes as defaults
from rollgraph.inference.decode_graphs import DecodeGraphs, OnCapture
from rollgraph.inference.kv_cache import CachePlan, plan_cache
from rollgraph.inference.requests import Completion, OnToken, Output, Progress, RequestError, SamplingParams, TextStream
from rollgraph.inference.sampler import sample_seed
from rollgraph.inference.scheduler import EngineStep, RequestState, Scheduler, SequenceError
from rollgraph.model.decoder import Decoder
from rollgraph.model.gemm.autotune import autotune_gemms
from rollgraph.tokenizer import Detokenizer, Tokenizer


class _InFlight(NamedTuple):
    """A launched step whose results have not been read."""

    step: EngineStep
    results: torch.Tensor  # [rows, 3] int32 on the host; valid once `done` has happened
    done: torch.cuda.Event | None  # None on a CPU, where results are valid at once


@dataclass(eq=False)
class _RunningSample:
    """A completion that is not finished yet."""

    output: Output
    index: int
    params: SamplingParams
    stop_ids: frozenset[int]
    on_token: OnToken | None
    stream: TextStream | None  # None if the text is needed only at the end
    seed: tuple[int, int]

    @property
    def completion(self) -> Completion:
        return self.output.completions[self.index]


class Engine:
    """Generates with `model`, whose parameters may change between calls but never move.

    The constructor allocates everything. A step is captured when it is first needed, or by `capture`.

    `rows` is how many sequences decode at the same time, `max_length` limits a prompt with its completion, and
    `cache_bytes` limits the KV cache; defaults are in `sizes.py`. `cache` supplies the memory instead: a plan, and the
    pages of each layer, which others may use while nothing is generated (see `forget_cache`). `filters=False` leaves
    out the graphs for top-k, top-p, min-p and the repetition penalty; requests that need them are then refused. With
    `exact`, GEMM algorithms are chosen for the model (see `model/gemm/matmul.py`), so that the tokens of a request do
    not depend on what else is in the batch; pass False if they are chosen already.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        rows: int | None = None,
        max_length: int | None = None,
        cache_bytes: int | None = None,
        cache: tuple[CachePlan, Sequence[torch.Tensor]] | None = None,
        block_size: int = defaults.BLOCK_SIZE,
        prefill_tokens: int | None = None,
        filters: bool = True,
        exact: bool = True,
        pool: GraphPool | None = None,
        backend: BackendName = "auto",
        guards: Sequence[Guard] = (),
    ) -> None:
        architecture = model.architecture
        weight = model.embed_tokens.weight
        sizes = defaults.default_sizes(weight.device.type)
        rows = sizes.rows if rows is None else rows
        if rows < 1 or block_size < 1:
            raise ValueError(f"rows={rows}, block_size={block_size}: both must be at least 1")
        max_length = min(max_length or defaults.MAX_LENGTH, architecture.max_length)
        prefill_tokens = prefill_tokens or sizes.prefill_tokens
        prefill_sequences = min(defaults.PREFILL_SEQUENCES, rows)
        buckets = defaults.row_buckets(rows)
        if backend == "auto":
            backend = "cuda" if weight.is_cuda else "tape"

        self.model = model
        self.tokenizer = tokenizer
        self.pool = pool or GraphPool()
        if exact:
            # All engines share at least one number of rows for logits, so that their logits are the same.
            logit_row_counts = (*buckets, defaults.REFERENCE_ROWS)
            self.pool.notes += autotune_gemms(model, defaults.gemm_rows(rows, prefill_tokens), logit_row_counts).lines()
        self.max_length = max_length
        if cache is None:
            plan = plan_cache(model, rows=rows, max_length=max_length, block_size=block_size, nbytes=cache_bytes)
            cache = plan, plan.allocate(weight.device)
        self.plan, pages = cache
        self._filters = filters
        self._vocabulary = architecture.vocabulary
        # A model may have more ids than its tokenizer. The extra ones have no text.
        self._ids_with_text = frozenset(tokenizer.vocab.values()) if tokenizer is not None else frozenset()
        self._scheduler = Scheduler(
            blocks=self.plan.blocks,
            block_size=self.plan.block_size,
            max_rows=rows,
            buckets=buckets,
            prefill_tokens=prefill_tokens,
            prefill_sequences=prefill_sequences,
            max_length=max_length,
        )
        self._graphs = DecodeGraphs(
            model,
            self.plan,
            pages,
            buckets=buckets,
            prefill_buckets=defaults.prefill_buckets(prefill_tokens),
            prefill_sequences=prefill_sequences,
            max_length=max_length,
            filters=filters,
            pool=self.pool,
            backend=backend,
            guards=guards,
        )
        self._samples: dict[scheduler.Sequence, _RunningSample] = {}
        self._in_flight: _InFlight | None = None
        self._stepping = False
        # Two areas for results: the step in flight writes one while the host reads the other.
        self._host_results = [torch.empty((rows, 3), dtype=torch.int32, pin_memory=weight.is_cuda) for _ in range(2)]
        self._result_area = 0
        self._submitted = 0
        self._tokens = 0
        self._finished = 0

    def capture(self, on_capture: OnCapture) -> None:
        """Capture every step now, so that no request waits for it."""
        self._graphs.capture(on_capture)

    # -- requests --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 - frozen
        *,
        on_token: OnToken | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Output]:
        """Continue each prompt, text or token ids. A refused prompt gets an output with `error` set."""
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of prompts, not a single string")
        params_list = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(params_list) != len(prompts):
            raise ValueError(f"{len(params_list)} sampling parameters for {len(prompts)} prompts")
        if not self._samples:  # count from zero, unless requests were submitted outside of this call
            self._tokens = 0
            self._finished = 0
        outputs = []
        try:
            for prompt, prompt_params in zip(prompts, params_list, strict=True):
                try:
                    outputs.append(self.submit(prompt, prompt_params, on_token=on_token))
                except RequestError as error:
                    text = prompt if isinstance(prompt, str) else None
                    outputs.append(Output(text, [], error=str(error)))
            unfinished = True
            while unfinished:
                unfinished = self.step()
                if on_progress is not None:
                    on_progress(self.progress())
        except BaseException:
            self.reset()
            raise
        return outputs

    def submit(self, prompt: str | Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None) -> Output:
        """Queue a request; `step` fills its output. Raises RequestError, and changes nothing, if it is refused."""
        text, tokens = self._encode(prompt)
        if params.filtered and not self._filters:
            raise RequestError("this engine was made without filters: top_k, top_p, min_p and penalties do not work")
        output = Output(text, tokens, [Completion() for _ in range(params.n)])
        if params.max_tokens == 0:
            for completion in output.completions:
                completion.finish_reason = "length"
            self._finished += params.n
            return output
        wants_text = bool(params.stop) or on_token is not None
        if wants_text and self.tokenizer is None:
            raise RequestError("stop strings and streamed text need a tokenizer")
        stop_ids = frozenset(params.stop_ids)
        if self.tokenizer is not None and not params.ignore_eos:
            stop_ids |= self.tokenizer.stop_ids
        seed = secrets.randbits(63) if params.seed is None else params.seed
        for index in range(params.n):
            sequence = scheduler.Sequence(self._submitted + index, tuple(tokens), params.max_tokens)
            try:
                self._scheduler.add(sequence)
            except SequenceError as error:
                raise RequestError(error.reason) from None
            stream = None
            if wants_text and self.tokenizer is not None:
                stream = TextStream(Detokenizer(self.tokenizer), params.stop)
            self._samples[sequence] = _RunningSample(
                output, index, params, stop_ids, on_token, stream, sample_seed(seed, index)
            )
        self._submitted += params.n
        return output

    def abort(self, output: Output) -> None:
        """End the completions of a request that are still running. They keep the tokens they have."""
        for sequence, sample in list(self._samples.items()):
            if sample.output is output:
                self._finish(sequence, sample, "abort")

    def reset(self) -> None:
        """Abort all requests. Afterwards the engine is like new."""
        for sequence, sample in list(self._samples.items()):
            self._finish(sequence, sample, "abort")
        in_flight, self._in_flight = self._in_flight, None
        self._postprocess(in_flight)

    def forget_cache(self) -> None:
        """Tell the engine that its cache was overwritten: running requests keep their tokens and wait again."""
        in_flight, self._in_flight = self._in_flight, None
        self._postprocess(in_flight)
        self._scheduler.preempt_all()

    def progress(self) -> Progress:
        return Progress(self._tokens, self._scheduler.running, self._scheduler.waiting, self._finished)

    def _encode(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        """The text of a prompt, None for token ids, and its token ids."""
        text: str | None = None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer")
            text = prompt
            try:
                tokens = self.tokenizer.encode(prompt)
            except ValueError as error:
                raise RequestError(str(error)) from None
        else:
            try:
                tokens = [operator.index(token) for token in prompt]
            except TypeError:
                raise RequestError(f"a prompt must be text or token ids, not {str(prompt)[:60]!r}") from None
        if not tokens:
            raise RequestError("the prompt is empty")
        for token in tokens:
            if not 0 <= token < self._vocabulary:
                raise RequestError(f"token {token} is not in the model's vocabulary of {self._vocabulary}")
        return text, tokens

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch the next step and read the results of the previous one. Returns False when all work is done.

        If a callback or a guard raises, all requests are aborted before the exception is passed on.
        """
        if self._stepping:
            raise RuntimeError("the engine is within a step: a callback can submit and abort, but not wait for results")
        try:
            self._stepping = True
            step = self._scheduler.schedule()
            previous = self._in_flight
            self._in_flight = self._run(step) if step is not None else None
            self._postprocess(previous)
        except BaseException:
            self.reset()
            raise
        finally:
            self._stepping = False
        return self._in_flight is not None or self._scheduler.has_work

    def _run(self, step: EngineStep) -> _InFlight:
        """Launch a step on the device, without waiting for it."""
        graphs = self._graphs
        graphs.upload.switch_area()
        if step.chunks:
            graphs.prefill([(chunk.start, chunk.tokens, chunk.sequence.blocks) for chunk in step.chunks])
        if step.copies:
            graphs.copy(step.copies)
        if step.moves:
            graphs.move(step.moves)
        if step.starts:
            self._start_rows(step.starts)
        self._result_area = 1 - self._result_area
        results = self._host_results[self._result_area][: step.bucket]
        if step.bucket:
            filtered = self._filters and any(s is not None and self._samples[s].params.filtered for s in step.rows)
            graphs.decode(step.orders, filtered)
            results.copy_(graphs.results[: step.bucket], non_blocking=True)
        done = None
        if graphs.results.is_cuda:
            done = torch.cuda.Event()
            done.record()
        return _InFlight(step, results, done)

    def _start_rows(self, starts: Sequence[scheduler.Sequence]) -> None:
        """Upload the state with which each sequence starts to decode."""
        states = np.zeros((len(starts), self._graphs.state.shape[1]), dtype=np.int32)
        floats = states.view(np.float32)
        histories = []
        for i, sequence in enumerate(starts):
            sample = self._samples[sequence]
            params = sample.params
            states[i, columns.TOKEN] = sequence.tokens[-1]
            states[i, columns.POSITION] = sequence.length - 1
            states[i, columns.SEED : columns.SEED + 2] = sample.seed
            states[i, columns.TOP_K] = params.top_k
            floats[i, columns.TEMPERATURE] = params.temperature
            floats[i, columns.TOP_P] = params.top_p
            floats[i, columns.MIN_P] = params.min_p
            floats[i, columns.PENALTY] = params.repetition_penalty
            states[i, columns.TABLE : columns.TABLE + len(sequence.blocks)] = sequence.blocks
            if params.repetition_penalty != 1:
                histories.append((sequence.row, sequence.tokens))
        self._graphs.start([sequence.row for sequence in starts], states, histories)

    def _postprocess(self, in_flight: _InFlight | None) -> None:
        """Wait for a step and process its results."""
        if in_flight is None:
            return
        step, results, done = in_flight
        if done is not None:
            done.synchronize()
        tokens = results[:, 0].tolist()
        logprobs, policy_logprobs = results.view(torch.float32)[:, 1:].T.tolist()
        rows = {sequence: row for row, sequence in enumerate(step.rows) if sequence is not None}
        for sequence, token in self._scheduler.update(step, tokens):
            sample = self._samples.get(sequence)
            if sample is None:
                continue  # a callback aborted it
            if token < 0:
                sequence.generated.pop()
                sample.completion.error = "the model's logits are not finite"
                self._finish(sequence, sample, "error")
                continue
            row = rows[sequence]
            self._append(sequence, sample, token, logprobs[row], policy_logprobs[row])

    def _append(
        self, sequence: scheduler.Sequence, sample: _RunningSample, token: int, logprob: float, policy_logprob: float
    ) -> None:
        """Add a token to a completion, and finish the completion if it ends here."""
        self._tokens += 1
        completion = sample.completion
        completion.tokens.append(token)
        completion.logprobs.append(logprob)
        completion.policy_logprobs.append(policy_logprob)
        stopped = token in sample.stop_ids
        full = sequence.state is RequestState.FINISHED
        if sample.stream is not None:
            new = sample.stream.push(token if token in self._ids_with_text else None, last=stopped or full)
            completion.text = sample.stream.text
            if sample.on_token is not None:
                sample.on_token(sample.output, sample.index, token, new)
            stopped |= sample.stream.stopped
        if stopped:
            self._finish(sequence, sample, "stop")
        elif full:
            self._finish(sequence, sample, "length")

    def _finish(self, sequence: scheduler.Sequence, sample: _RunningSample, reason: str) -> None:
        if self._samples.pop(sequence, None) is None:
            return  # a callback aborted it
        self._scheduler.finish(sequence, reason)
        completion = sample.completion
        completion.finish_reason = reason
        if sample.stream is not None:
            if reason in ("abort", "error"):
                sample.stream.finish()
                completion.text = sample.stream.text
        elif self.tokenizer is not None:
            completion.text = self.tokenizer.decode(
                [token for token in completion.tokens if token in self._ids_with_text]
            )
        self._finished += 1
