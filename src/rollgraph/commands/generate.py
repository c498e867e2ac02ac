"""`rollgraph generate`: continue prompts with a model folder, JSON lines out."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rollgraph.inference import Engine, Output, SamplingParams
    from rollgraph.tokenizer import Tokenizer

DONE, REFUSED, BROKEN = 0, 1, 2


class InputError(Exception):
    """Something is wrong with the command's input; nothing was generated."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue prompts with a model",
        description="Continue prompts with a model folder (config.json, safetensors, tokenizer.json). Writes one JSON "
        f"line for each prompt, in order, as soon as it is done. Exit code: {DONE} all served, {REFUSED} some refused "
        f"or failed (their lines have an error), {BROKEN} nothing could be generated.",
    )
    parser.add_argument("model", help="folder of a Llama, Mistral, Qwen2 or Qwen3 model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    source.add_argument("--prompts", help="JSON lines with `prompt` or `messages`; other fields are passed through")
    parser.add_argument("--out", help="file for the JSON lines (default: standard output)")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("-n", type=int, default=1, help="samples for each prompt (default: 1)")
    sampling.add_argument("--max-tokens", type=int, default=256, help="of a completion (default: 256)")
    sampling.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (default: 1)")
    sampling.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens (default: all)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="keep the most likely tokens up to this share")
    sampling.add_argument("--min-p", type=float, default=0.0, help="keep tokens with this share of the likeliest's")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: repeat less (default: 1)")
    sampling.add_argument("--stop", action="append", default=[], help="a string that ends a completion; repeatable")
    sampling.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's own end")
    sampling.add_argument("--seed", type=int, help="the same seed, the same completions")
    output = parser.add_argument_group("output and resources")
    output.add_argument("--logprobs", action="store_true", help="with tokens and their log-probabilities")
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    output.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    output.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: as stored")
    output.add_argument("--rows", type=int, default=64, help="sequences that decode at a time (default: 64)")
    output.add_argument("--max-length", type=int, help="of a prompt with its completion (default: as needed)")
    output.add_argument("--cache-gib", type=float, help="of the key/value cache (default: by what is free)")
    parser.set_defaults(run=run)


@dataclass
class _Request:
    """A prompt on its way."""

    place: str  # file:line, or which one of the command line
    row: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    error: str | None = None  # why it has no tokens


def run(options: argparse.Namespace) -> int:
    try:
        requests = _read(options)
        if options.out is not None:
            open(options.out, "a").close()  # whether it can be written is known before the model is loaded
        engine, params = _prepare(options, requests)
        with _opened(options.out) as target:
            return _generate(engine, params, requests, options, target)
    except (InputError, ValueError, OSError) as error:
        print(f"rollgraph generate: {error}", file=sys.stderr)
        return BROKEN
    except KeyboardInterrupt:
        print("rollgraph generate: interrupted; the lines written so far are complete", file=sys.stderr)
        return 130


def _read(options: argparse.Namespace) -> list[_Request]:
    from rollgraph.rl.data import read_jsonl

    if options.prompt is not None:
        return [_Request(f"prompt {i}", {"prompt": prompt}) for i, prompt in enumerate(options.prompt, 1)]
    lines = ((f"{options.prompts}:{number}", row) for number, row in read_jsonl(Path(options.prompts)))
    requests = [_Request(place, _check_row(place, row)) for place, row in lines]
    if not requests:
        raise InputError(f"{options.prompts} has no prompts")
    return requests


def _check_row(place: str, row: Any) -> dict[str, Any]:
    from rollgraph.rl.data import is_text

    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise InputError(f"{place}: expected an object with `prompt` or `messages`")
    messages = row.get("messages", [{}])
    chat = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not chat or not isinstance(row.get("prompt", ""), str):
        raise InputError(f"{place}: expected a text as `prompt`, or a list of `messages`")
    if not is_text(json.dumps(row.get("prompt", messages), ensure_ascii=False)):
        raise InputError(f"{place}: half of a surrogate pair in `prompt` or `messages`, which is no text")
    return row


def _encode(requests: list[_Request], tokenizer: Tokenizer, chat: bool) -> None:
    """Fill in tokens. A prompt that has none costs itself, unless there is no other."""
    for request in requests:
        row = request.row
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        try:
            if chat or "messages" in row:
                request.tokens = tokenizer.encode_chat(messages)
            else:
                request.tokens = tokenizer.encode(row["prompt"])
        except ValueError as error:
            request.error = str(error)
    failed = [request for request in requests if request.error is not None]
    if len(failed) == len(requests):
        raise InputError(f"{failed[0].place}: {failed[0].error}")


def _prepare(options: argparse.Namespace, requests: list[_Request]) -> tuple[Engine, SamplingParams]:
    import torch

    from rollgraph.inference import Engine, SamplingParams
    from rollgraph.model import load_model
    from rollgraph.tokenizer import load_tokenizer

    params = SamplingParams(
        n=options.n,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        stop=tuple(options.stop),
        ignore_eos=options.ignore_eos,
        seed=options.seed,
    )
    tokenizer = load_tokenizer(options.model)
    _encode(requests, tokenizer, options.chat)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] not in ("cuda", "cpu"):
        raise InputError(f"--device {device}: expected cuda or cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--device {device}: there is no CUDA device here; use --device cpu")
    if options.cache_gib is not None and not options.cache_gib > 0:
        raise InputError(f"--cache-gib {options.cache_gib:g}: expected more than 0")
    if options.rows < 1:
        raise InputError(f"--rows {options.rows}: at least one sequence has to decode at a time")
    model = load_model(options.model, dtype=dtype, device=device)
    needed = max(len(request.tokens) for request in requests) + params.max_tokens
    with _capture_bar(options.quiet) as on_capture:
        engine = Engine(
            model,
            tokenizer,
            rows=max(1, min(options.rows, len(requests) * params.n)),
            max_length=options.max_length or max(needed, 2),
            cache_bytes=int(options.cache_gib * 2**30) if options.cache_gib else None,
            filters=params.filtered,
            on_capture=on_capture,
        )
    return engine, params


def _generate(
    engine: Engine, params: SamplingParams, requests: list[_Request], options: argparse.Namespace, target: TextIO
) -> int:
    outputs = [_submit(engine, request, params) for request in requests]
    waiting = deque(zip(requests, outputs, strict=True))
    served = sum(output.error is None for output in outputs)
    try:
        with _progress_bar(served * params.n, options.quiet) as show:
            more = True
            while more:
                more = engine.step()
                while waiting and waiting[0][1].done:
                    _write(target, *waiting.popleft(), options.logprobs)
                show(engine)
    except BaseException:
        with contextlib.suppress(OSError):
            for request, output in waiting:  # what is finished, and stands behind what is not
                if _is_finished(output):
                    _write(target, request, output, options.logprobs)
        raise
    for request, output in zip(requests, outputs, strict=True):
        if output.error is not None:
            print(f"rollgraph generate: {request.place}: {output.error}", file=sys.stderr)
    failed = any(completion.error is not None for output in outputs for completion in output.completions)
    return REFUSED if failed or any(output.error is not None for output in outputs) else DONE


def _submit(engine: Engine, request: _Request, params: SamplingParams) -> Output:
    from rollgraph.inference import Output, RequestError

    if request.error is not None:
        return Output(None, [], error=request.error)
    try:
        return engine.submit(request.tokens, params)
    except RequestError as error:
        return Output(None, request.tokens, error=str(error))


def _is_finished(output: Output) -> bool:
    """By itself: what is aborted is done as well."""
    return output.done and all(completion.finish_reason != "abort" for completion in output.completions)


def _write(target: TextIO, request: _Request, output: Output, logprobs: bool) -> None:
    """A line of JSON, with escapes where the target cannot spell it: half of a surrogate pair is no UTF-8."""
    entry = _make_entry(request.row, output, logprobs)
    line = json.dumps(entry, ensure_ascii=False)
    try:
        line.encode(target.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(entry)
    print(line, file=target, flush=True)


def _make_entry(row: dict[str, Any], output: Output, logprobs: bool) -> dict[str, Any]:
    if output.error is not None:
        return {**row, "error": output.error}
    completions = []
    for completion in output.completions:
        entry: dict[str, Any] = {"text": completion.text, "finish_reason": completion.finish_reason}
        if completion.error is not None:
            entry["error"] = completion.error
        if logprobs:
            entry |= {
                "tokens": completion.tokens,
                "logprobs": completion.logprobs,
                "policy_logprobs": completion.policy_logprobs,
            }
        completions.append(entry)
    return {**row, "completions": completions}


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8") as file:
        yield file


@contextlib.contextmanager
def _capture_bar(quiet: bool) -> Iterator[Any]:
    """A bar over the graphs that are captured before the first request."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("capturing {task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=_console(), transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


@contextlib.contextmanager
def _progress_bar(total: int, quiet: bool) -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.perf_counter()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=_console(), disable=quiet) as bar:
        task = bar.add_task("", total=total)

        def show(engine: Engine) -> None:
            now = engine.progress()
            rate = now.tokens / (time.perf_counter() - start)
            text = f"{rate:,.0f} tokens/s, {now.running} running, {now.waiting} waiting"
            bar.update(task, completed=now.finished, description=text)

        yield show


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True)
