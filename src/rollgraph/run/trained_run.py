"""What a program has after training: the policy, ready to generate and to be evaluated, and everything that was logged.

The policy is the one that was trained, still in memory; if the run was finished before, its last checkpoint is loaded
when it is first needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast, overload

from rollgraph.config import Config
from rollgraph.distributed.world import World
from rollgraph.errors import InvalidInput
from rollgraph.policy import PolicyWorker
from rollgraph.rl.rows import is_chat, is_text
from rollgraph.run.given import Given, read_rows
from rollgraph.run.inputs import with_validation
from rollgraph.run.model_source import none_found
from rollgraph.run.rollouts import evaluate
from rollgraph.run.setup import Run, make_run
from rollgraph.tokenizer import Message

Chat = Sequence[Message]


class TrainedRun:
    """A run after its last step. With several ranks, all of them call its methods together."""

    def __init__(self, config: Config, world: World, given: Given, run: Run | None, connection: ExitStack) -> None:
        self.config = config
        self.finished = run is None or run.progress.taken >= config.steps  # if not, it was asked to stop
        self._folder = Path(config.output).absolute()  # a notebook may change its folder
        self._world = world
        self._given = given
        self._run = run
        self._connection = connection  # to the other ranks
        self._closed = False

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, from the first step of the run; `pandas.DataFrame(run.metrics)` is a table."""
        return self._read("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The rows of samples.jsonl: completions that were sampled, with their rewards."""
        return self._read("samples.jsonl")

    @property
    def policy(self) -> PolicyWorker:
        """The model with its weights, its engine and its graphs."""
        return self._opened().policy

    @overload
    def generate(self, prompts: str | Chat, **sampling: Any) -> str: ...

    @overload
    def generate(self, prompts: Sequence[str | Chat], **sampling: Any) -> list[str]: ...

    def generate(self, prompts: str | Chat | Sequence[str | Chat], **sampling: Any) -> str | list[str]:
        """Continue a prompt or several, as in training: with its chat template, if it has one, and its settings.

        A prompt is text or a list of messages. `sampling` are fields of SamplingParams, such as temperature=0 or
        max_tokens=100.
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
        room = policy.engine.max_length
        if longest >= room:
            detail = f"one has {longest} tokens, and this run has room for {room}, completion included"
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
        """What validation measures, on the validation data or on all rows of other data of the same form."""
        run = self._opened()
        if data is not None:
            path, rows = read_rows(data, "data")
            every_row = replace(run.config.validation, max_prompts=None)
            config = replace(run.config, data=replace(run.config.data, validation=path), validation=every_row)
            given = replace(self._given, rows={path: rows} if rows is not None else {})
            run = replace(run, config=config, inputs=with_validation(config, run.inputs, given))
        if not run.inputs.can_validate:
            raise ValueError("the run has no validation data: give evaluate() some")
        return evaluate(run, "eval")

    def export(self, folder: str | os.PathLike[str], *, merge: bool = False) -> Path:
        """Write a model folder that transformers and other tools can load.

        Of a run with adapters, write the adapter alone, which PEFT can load; with `merge`, the model with the adapter.
        """
        target = Path(folder)
        self._opened().export(target, merge=merge)
        return target

    def close(self) -> None:
        """Free the model and the graphs, and leave the other ranks. Metrics and samples can still be read."""
        self._closed = True
        if self._run is not None:
            self._run.close()
        self._run = None
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> Run:
        if self._closed:  # by now its folder may hold the weights of later steps
            raise RuntimeError("this run is closed: train() opens it again, and takes no step if none is left")
        if self._run is None:
            run = make_run(self.config, self._world, given=self._given, writes=False)
            saved = run.checkpoints.latest()
            if saved is None:
                run.close()
                raise none_found(self.config.output, unscored=False, broken=bool(run.checkpoints.broken))
            run.load_weights(saved)
            self._run = run
        return self._run

    def _encode(self, prompt: Any) -> list[int]:
        if not is_text(prompt) and not is_chat(prompt):
            detail = f"expected text, or messages with a role and a content, got {prompt!r:.80}"
            raise InvalidInput(detail, argument="prompts")
        _, tokens = self._opened().inputs.data.encode(prompt)
        return tokens

    def _read(self, name: str) -> list[dict[str, Any]]:
        file = self._folder / name
        if not file.exists():
            return []
        with file.open(encoding="utf-8") as lines:  # not `splitlines`: a completion may hold other line separators
            return [json.loads(line) for line in lines]
