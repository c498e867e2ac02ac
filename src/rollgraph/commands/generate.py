"""`rollgraph generate`: continue prompts with a model, and write one JSON line for each prompt."""

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

from rollgraph.commands.arguments import choose_device
from rollgraph.log.streams import note_to_stderr

if TYPE_CHECKING:
    from rollgraph.inference import Engine, Output, SamplingParams
    from rollgraph.run.model_source import StoredModel
    from rollgraph.tokenizer import Tokenizer

# Exit codes.
DONE = 0
REFUSED = 1
BROKEN = 2
INTERRUPTED = 130


class InputError(Exception):
    """The input cannot be used, so nothing was generated."""


def add_parser(commands: Any) -> None:
    """Add the command and its options to the command line."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts with a model",
        description="Continue prompts with a model. The model may be a model folder (config.json, safetensors, "
        "tokenizer.json), an adapter folder (adapter_config.json, which names its base model), a checkpoint, or a "
        "run, whose latest checkpoint is used. Writes one JSON line for each prompt, in order, as soon as it is done. "
        f"Exit code: {DONE} if all prompts were served, {REFUSED} if some were refused or failed (their lines have an "
        f"`error`), {BROKEN} if nothing could be generated.",
    )
    parser.add_argument(
        "model",
        help="folder of a Llama, Mistral, Qwen2 or Qwen3 model, or its id on the Hugging Face Hub, org/name@revision; "
        "or an adapter in PEFT's format, or its id; or a checkpoint, "
        "runs/mine/checkpoints/step_00000099; or the output folder of a run, runs/mine",
    )
    parser.add_argument("--which", choices=("latest", "best"), help="checkpoint of a run (default: latest)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", help="a prompt; can be repeated")
    source.add_argument("--prompts", help="file of JSON lines with `prompt` or `messages`; other fields are copied")
    parser.add_argument("--out", help="file to write the JSON lines to (default: standard output)")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to each prompt")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("-n", type=int, default=1, help="completions for each prompt (default: 1)")
    sampling.add_argument("--max-tokens", type=int, default=256, help="longest completion (default: 256)")
    sampling.add_argument(
        "--temperature", type=float, default=1.0, help="0: always take the most likely token (default: 1)"
    )
    sampling.add_argument("--top-k", type=int, default=0, help="sample from the k most likely tokens (default: all)")
    sampling.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most likely tokens that add up to this probability"
    )
    sampling.add_argument(
        "--min-p", type=float, default=0.0, help="drop tokens below this fraction of the most likely one's probability"
    )
    sampling.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="values above 1 make repetition less likely (default: 1)"
    )
    sampling.add_argument("--stop", action="append", default=[], help="string that ends a completion; can be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", help="do not stop at the end-of-sequence token")
    sampling.add_argument("--seed", type=int, help="seed for all completions (default: random)")
    output = parser.add_argument_group("output and resources")
    output.add_argument("--logprobs", action="store_true", help="also write tokens and their log-probabilities")
    output.add_argument("--quiet", action="store_true", help="show no progress bar")
    output.add_argument("--device", help="cuda or cpu (default: cuda if available)")
    output.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="dtype of the weights (default: as stored)"
    )
    output.add_argument("--rows", type=int, default=64, help="sequences to decode at the same time (default: 64)")
    output.add_argument("--max-length", type=int, help="longest prompt plus completion (default: as needed)")
    output.add_argument(
        "--cache-gib", type=float, help="size of the key/value cache (default: most of the free memory)"
    )
    parser.set_defaults(run=run)


@dataclass
class _Request:
    """One input prompt."""

    location: str  # file:line, or `prompt 1` for the first --prompt
    row: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    error: str | None = None  # why it could not be encoded


def run(options: argparse.Namespace) -> int:
    try:
        requests = _read_requests(options)
        if options.out is not None:
            open(options.out, "a").close()  # if it cannot be written, fail before the model is loaded
        engine, params = _make_engine(options, requests)
        with _open_output(options.out) as target:
            return _generate(engine, params, requests, options, target)
    except BrokenPipeError:  # the reader of our output stopped, as `head` does; cli.py ends quietly
        raise
    except (InputError, ValueError, OSError) as error:
        print(f"rollgraph generate: {error}", file=sys.stderr)
        return BROKEN
    except KeyboardInterrupt:
        print("rollgraph generate: interrupted; the lines written so far are complete", file=sys.stderr)
        return INTERRUPTED


def _read_requests(options: argparse.Namespace) -> list[_Request]:
    """The prompts from the command line or the file."""
    from rollgraph.rl.data.rows import read_jsonl

    if options.prompt is not None:
        return [_Request(f"prompt {i}", {"prompt": prompt}) for i, prompt in enumerate(options.prompt, 1)]
    requests = []
    for number, row in read_jsonl(Path(options.prompts)):
        location = f"{options.prompts}:{number}"
        requests.append(_Request(location, _check_row(location, row)))
    if not requests:
        raise InputError(f"{options.prompts} has no prompts")
    return requests


def _check_row(location: str, row: Any) -> dict[str, Any]:
    from rollgraph.rl.data.rows import is_text

    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise InputError(f"{location}: expected an object with `prompt` or `messages`")
    messages = row.get("messages", [{}])
    is_chat = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not is_chat or not isinstance(row.get("prompt", ""), str):
        raise InputError(f"{location}: expected a string as `prompt`, or a list of `messages`")
    if not is_text(json.dumps(row.get("prompt", messages), ensure_ascii=False)):
        raise InputError(f"{location}: `prompt` or `messages` has half a surrogate pair, which is not valid text")
    return row


def _encode(requests: list[_Request], tokenizer: Tokenizer, chat: bool) -> None:
    """Set the tokens or the error of each request. Raises only if no request could be encoded."""
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
        raise InputError(f"{failed[0].location}: {failed[0].error}")


def _make_engine(options: argparse.Namespace, requests: list[_Request]) -> tuple[Engine, SamplingParams]:
    """Check the options, encode the prompts, and make an engine. The model is loaded last, after all checks."""
    import torch

    from rollgraph.inference import Engine

    params = _make_params(options)
    stored = _open_model(options)
    _encode(requests, stored.tokenizer, options.chat)
    was_chat = stored.config is not None and stored.config.data.chat
    if was_chat and not options.chat and not options.quiet and any("prompt" in request.row for request in requests):
        print("the run has data.chat: true, so its prompts were chats; --chat asks the same way", file=sys.stderr)
    device = choose_device(options.device)
    if options.cache_gib is not None and not options.cache_gib > 0:
        raise InputError(f"--cache-gib {options.cache_gib:g}: must be more than 0")
    if options.rows < 1:
        raise InputError(f"--rows {options.rows}: must be at least 1")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    with _load_bar(options.quiet) as on_bytes:
        model = stored.load(dtype, device, on_bytes)
    needed = max(len(request.tokens) for request in requests) + params.max_tokens
    engine = Engine(
        model,
        stored.tokenizer,
        rows=max(1, min(options.rows, len(requests) * params.n)),
        max_length=options.max_length or max(needed, 2),
        cache_bytes=int(options.cache_gib * 2**30) if options.cache_gib else None,
        filters=params.filtered,
    )
    return engine, params


def _open_model(options: argparse.Namespace) -> StoredModel:
    """Find the model. For a run, print the step of the checkpoint."""
    from rollgraph.checkpoint.format import CheckpointError
    from rollgraph.rl.data.hub import ignore_note, model_folder
    from rollgraph.run.model_source import open_model

    problems: list[str] = []  # notes about skipped checkpoints, printed even if no other one can be opened
    try:
        folder = model_folder(options.model, weights=True, note=ignore_note if options.quiet else note_to_stderr)
        stored = open_model(str(folder), options.which, problems)
    except CheckpointError as error:
        raise InputError(str(error)) from error
    finally:
        for problem in problems:
            print(problem, file=sys.stderr)
    if stored.step is not None and not options.quiet:
        print(f"step {stored.step} of {options.model}", file=sys.stderr)
    return stored


def _make_params(options: argparse.Namespace) -> SamplingParams:
    from rollgraph.inference import SamplingParams

    return SamplingParams(
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


def _generate(
    engine: Engine, params: SamplingParams, requests: list[_Request], options: argparse.Namespace, target: TextIO
) -> int:
    """Serve all requests. Each line is written once it and all lines before it are done. Returns the exit code."""
    outputs = [_submit(engine, request, params) for request in requests]
    waiting = deque(zip(requests, outputs, strict=True))
    served = sum(output.error is None for output in outputs)
    try:
        with _progress_bar(served * params.n, options.quiet) as show:
            has_work = True
            while has_work:
                has_work = engine.step()
                while waiting and waiting[0][1].done:
                    _write(target, *waiting.popleft(), options.logprobs)
                show(engine)
    except BaseException:
        with contextlib.suppress(OSError):
            for request, output in waiting:  # finished prompts that waited for an unfinished one before them
                if _is_finished(output):
                    _write(target, request, output, options.logprobs)
        raise
    failed = any(completion.error is not None for output in outputs for completion in output.completions)
    for request, output in zip(requests, outputs, strict=True):
        if output.error is not None:
            failed = True
            print(f"rollgraph generate: {request.location}: {output.error}", file=sys.stderr)
    return REFUSED if failed else DONE


def _submit(engine: Engine, request: _Request, params: SamplingParams) -> Output:
    from rollgraph.inference import Output, RequestError

    if request.error is not None:
        return Output(None, [], error=request.error)
    try:
        return engine.submit(request.tokens, params)
    except RequestError as error:
        return Output(None, request.tokens, error=str(error))


def _is_finished(output: Output) -> bool:
    """Whether an output is complete. An aborted one is `done`, too, but not complete."""
    return output.done and all(completion.finish_reason != "abort" for completion in output.completions)


def _write(target: TextIO, request: _Request, output: Output, logprobs: bool) -> None:
    """Write a line of JSON. If the target cannot encode it, escape it (UTF-8 has no half surrogate pairs)."""
    entry = _make_entry(request.row, output, logprobs)
    line = json.dumps(entry, ensure_ascii=False)
    try:
        line.encode(target.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(entry)
    print(line, file=target, flush=True)


def _make_entry(row: dict[str, Any], output: Output, logprobs: bool) -> dict[str, Any]:
    """The fields of the input row, with either `completions` or `error`."""
    if output.error is not None:
        return {**row, "error": output.error}
    completions = []
    for completion in output.completions:
        entry: dict[str, Any] = {"text": completion.text, "finish_reason": completion.finish_reason}
        if completion.error is not None:
            entry["error"] = completion.error
        if logprobs:
            entry["tokens"] = completion.tokens
            entry["logprobs"] = completion.logprobs
            entry["policy_logprobs"] = completion.policy_logprobs
        completions.append(entry)
    return {**row, "completions": completions}


@contextlib.contextmanager
def _open_output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8") as file:
        yield file


@contextlib.contextmanager
def _load_bar(quiet: bool) -> Iterator[Any]:
    """Show the progress and speed of loading weights."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    console = _console()
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _progress_bar(total: int, quiet: bool) -> Iterator[Any]:
    """Show the number of finished completions."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.perf_counter()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=_console(), disable=quiet) as bar:
        task = bar.add_task("", total=total)

        def show(engine: Engine) -> None:
            now = engine.progress()
            rate = now.tokens / (time.perf_counter() - start)
            description = f"{rate:,.0f} tokens/s, {now.running} running, {now.waiting} waiting"
            bar.update(task, completed=now.finished, description=description)

        yield show


def _console() -> Any:
    from rich.console import Console

    class PipedConsole(Console):
        """On a broken pipe, as in `2>&1 | head`, raises BrokenPipeError like `print`. rich would exit with code 1."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipedConsole(stderr=True)
