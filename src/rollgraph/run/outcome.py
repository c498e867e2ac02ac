"""The outcome of a run: its last lines in the terminal, and `TrainedRun`, the trained policy for Python programs.

The policy is still in memory after training. If the run was already finished, its last checkpoint is loaded when the
policy is first needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast, overload

from rollgraph.checkpoint.start import MODEL
from rollgraph.config import Config
from rollgraph.errors import InvalidInput
from rollgraph.inputs.inputs import replace_validation_data
from rollgraph.log.progress import describe_step_count, format_number
from rollgraph.log.samples import first_of_each_group, format_one_line
from rollgraph.log.streams import command_line
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PolicyWorker
from rollgraph.rl.data.python_objects import PythonObjects, read_rows
from rollgraph.rl.data.rows import is_chat, is_text
from rollgraph.run.model_source import no_checkpoint_error
from rollgraph.run.setup import Run, make_run
from rollgraph.run.validation import evaluate_policy
from rollgraph.tokenizer import Message

# -- the last lines --------------------------------------------------------------------------------

OUTCOME_METRICS = (
    "validation/reward",
    "validation/loss",
    "reward",
    "loss",
)  # the first one that was logged is shown
RUN_FILES = ("metrics.jsonl", "samples.jsonl", "checkpoints", MODEL)
SHOWN_SAMPLES = 3
MAX_PROMPT_CHARACTERS = 60  # in a suggested command


def show_outcome(run: Run) -> None:
    if run.world.rank == 0:
        run.log.show_last_lines([*_metric_lines(run), *_sample_lines(run), *_file_lines(run), *_command_lines(run)])


def _metric_lines(run: Run) -> Iterator[str]:
    file = Path(run.config.output) / "metrics.jsonl"
    if not file.exists():  # it was written elsewhere
        return
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for name in OUTCOME_METRICS:
        rows_with_metric = [row for row in rows if name in row]
        if len(rows_with_metric) > 1:
            first, last = rows_with_metric[0], rows_with_metric[-1]
            yield f"{name}: {_format_metric(first, name)}, {_format_metric(last, name)}"
            return


def _format_metric(row: Mapping[str, Any], name: str) -> str:
    return f"{format_number(float(row[name]))} {describe_step_count(row['step'] + 1)}"


def _sample_lines(run: Run) -> Iterator[str]:
    for row in first_of_each_group(run.log.last_samples)[:SHOWN_SAMPLES]:
        yield f"  {format_one_line(row)}"


def _file_lines(run: Run) -> Iterator[str]:
    output = Path(run.config.output)
    yield f"in {output}: {', '.join(part for part in RUN_FILES if (output / part).exists())}"


def _command_lines(run: Run) -> Iterator[str]:
    """Suggested commands: look at samples and generate; after an early stop, resume."""
    config = run.config
    if run.progress.finished_steps < config.steps:
        yield f"next: {command_line('rollgraph', 'train', Path(config.output) / 'config.yaml')}"
        return
    yield f"next: {command_line('rollgraph', 'samples', config.output)}"
    for row in run.log.last_samples[:1]:
        prompt = row["prompt"]
        if prompt.isprintable() and len(prompt) <= MAX_PROMPT_CHARACTERS:
            limit = config.rollout.max_tokens
            option = [f"--prompt={prompt}"] if prompt.startswith("-") else ["--prompt", prompt]
            yield f"  or: {command_line('rollgraph', 'generate', config.output, *option, '--max-tokens', limit)}"


# -- a trained run ---------------------------------------------------------------------------------

Chat = Sequence[Message]


class TrainedRun:
    """A run after its last step. With several ranks, all of them call its methods together."""

    def __init__(
        self, config: Config, world: World, objects: PythonObjects, run: Run | None, connection: ExitStack
    ) -> None:
        self.config = config
        self.finished = run is None or run.progress.finished_steps >= config.steps  # if not, it was stopped early
        self._folder = Path(config.output).absolute()  # absolute, because a notebook may change its directory
        self._world = world
        self._objects = objects  # data and functions that the program passed instead of paths
        self._run = run
        self._connection = connection  # to the other ranks
        self._is_closed = False

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, from the first step of the run; `pandas.DataFrame(run.metrics)` is a table."""
        return self._read("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The rows of samples.jsonl: sampled completions with their rewards."""
        return self._read("samples.jsonl")

    @property
    def policy(self) -> PolicyWorker:
        """The model with its weights, its engine and its graphs."""
        return self._open().policy

    @overload
    def generate(self, prompts: str | Chat, **sampling: Any) -> str: ...

    @overload
    def generate(self, prompts: Sequence[str | Chat], **sampling: Any) -> list[str]: ...

    def generate(self, prompts: str | Chat | Sequence[str | Chat], **sampling: Any) -> str | list[str]:
        """Continue one prompt or several with the chat template and sampling settings of training.

        A prompt is text or a list of messages. `sampling` overrides fields of SamplingParams, such as temperature=0
        or max_tokens=100.
        """
        if isinstance(prompts, str) or is_chat(prompts):
            return self.generate([cast("str | Chat", prompts)], **sampling)[0]
        policy = self.policy
        if policy.engine is None:
            name = self.config.algorithm.name
            raise ValueError(f"{name} samples nothing, so this run cannot: `rollgraph generate` can, from its folder")
        tokens = [self._encode(prompt) for prompt in prompts]
        params = replace(policy.sampling, **sampling)
        if params.n != 1:
            raise InvalidInput("each prompt gets one completion; give a prompt several times", argument="n")
        longest = max(map(len, tokens), default=0)
        max_length = policy.engine.max_length
        if longest >= max_length:
            detail = f"one has {longest} tokens, and this run has room for {max_length}, completion included"
            raise InvalidInput(f"{detail}; `rollgraph generate` makes room as needed", argument="prompts")
        with policy.phases.enter("generate"):
            outputs = policy.engine.generate(tokens, params)
        texts = []
        for output in outputs:
            if output.error is not None:
                raise ValueError(output.error)
            texts.append(output.completions[0].text)
        return texts

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Validate, and return the metrics: on the validation data, or on all rows of other data in the same format."""
        run = self._open()
        if data is not None:
            source, rows = read_rows(data, "data")  # a path; or a name for data in memory, with its rows
            every_row = replace(run.config.validation, max_prompts=None)
            config = replace(run.config, data=replace(run.config.data, validation=source), validation=every_row)
            objects = replace(self._objects, rows={} if rows is None else {source: rows})
            run = replace(run, config=config, inputs=replace_validation_data(config, run.inputs, objects))
        if not run.inputs.can_validate:
            raise ValueError("the run has no validation data: pass some to evaluate()")
        return evaluate_policy(run, "eval")

    def export(self, folder: str | os.PathLike[str], *, merge: bool = False) -> Path:
        """Write a model folder that transformers and other tools can load.

        A LoRA run writes only the adapter, which PEFT can load; with `merge`, the merged model.
        """
        target = Path(folder)
        self._open().export(target, merge=merge)
        return target

    def close(self) -> None:
        """Free the model and the graphs, and disconnect from the other ranks. `metrics` and `samples` still work."""
        self._is_closed = True
        if self._run is not None:
            self._run.close()
        self._run = None
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Run:
        if self._is_closed:  # its folder may hold later steps by now
            raise RuntimeError("this run is closed: train() opens it again, and takes no step if none is left")
        if self._run is None:
            run = make_run(self.config, self._world, objects=self._objects, writes=False)
            saved = run.checkpoints.latest()
            if saved is None:
                run.close()
                raise no_checkpoint_error(self.config.output, unscored=False, broken=bool(run.checkpoints.broken))
            run.load_weights(saved)
            self._run = run
        return self._run

    def _encode(self, prompt: Any) -> list[int]:
        if not is_text(prompt) and not is_chat(prompt):
            detail = f"expected text, or messages with a role and a content, got {prompt!r:.80}"
            raise InvalidInput(detail, argument="prompts")
        _, tokens = self._open().inputs.data.encode(prompt)
        return tokens

    def _read(self, name: str) -> list[dict[str, Any]]:
        file = self._folder / name
        if not file.exists():
            return []
        with file.open(encoding="utf-8") as lines:  # not `splitlines`: completions may hold other line separators
            return [json.loads(line) for line in lines]
