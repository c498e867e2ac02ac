"""From a configuration to the parts of a run: what the loop in `train.py` is given.

Owns the order in which things come to be: what is cheap to check (`inputs.py`) before the model, the model before its
graphs. Nothing here runs a step.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollgraph.config import Config
from rollgraph.distributed.world import World
from rollgraph.model import Decoder, load_model
from rollgraph.policy import PolicyWorker
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.run.checkpoints import Checkpoints
from rollgraph.run.inputs import Inputs, check_inputs, read_architecture
from rollgraph.sharding import constant, cosine, linear, warm_up
from rollgraph.sharding.manifest import FileRecord
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import Rollout

SUPERVISED = "sft"  # the loss of the warm start
POLICY_LOSS = "policy"


@dataclass(frozen=True)
class StepEnd:
    """What a checkpoint holds of the end of a step beside weights, and which weights those are."""

    step: int
    updates: int  # that the optimizer had made; after another one the weights are no longer those of this moment
    data: dict[str, Any]
    surplus: list[list[Rollout]]


@dataclass
class Run(Inputs):
    """The parts of a run: its inputs, what was made for them, and what it remembers from step to step."""

    config: Config
    world: World
    policy: PolicyWorker
    checkpoints: Checkpoints
    threads_before: int  # of PyTorch, which are its again when the run is closed
    surplus: list[list[Rollout]] = field(default_factory=list)  # groups that were sampled and not used yet
    end: StepEnd | None = None  # of the last step that this process took
    reference: list[FileRecord] = field(default_factory=list)  # on rank 0: the files of the reference, for checkpoints
    save_failed: bool = False
    uninterrupted: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # for Ctrl-C
    pending: dict[str, float] = field(default_factory=dict)  # metrics of the step that is being taken
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of this step, by phase

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.world.device.startswith("cuda"):
                torch.cuda.synchronize()
            self.seconds[phase] += time.perf_counter() - start

    def on_any_rank(self, flag: bool) -> bool:
        """Whether it is set on one of them: all ranks have to do the same."""
        if self.world.size == 1:
            return flag
        return bool(self.policy.sharded.any_rank(torch.tensor(float(flag), device=self.world.device)))

    def close(self) -> None:
        with contextlib.ExitStack() as all_of_them:  # each, even if another one fails
            all_of_them.callback(torch.set_num_threads, self.threads_before)
            all_of_them.callback(self.policy.close)
            all_of_them.callback(self.rewards.close)
            all_of_them.callback(self.checkpoints.close)


def make_run(
    config: Config,
    world: World,
    on_capture: Callable[[str, int, int], None] | None = None,
    *,
    inputs: Inputs | None = None,
    writes: bool = True,
) -> Run:
    """Check, load, allocate and capture everything; nothing has been trained, and nothing of a checkpoint loaded.

    `inputs` are those of `check_inputs`, which the run closes, where they have been checked. Without `writes` nothing
    can be saved, and nothing in the output folder changes.
    """
    inputs = inputs or check_inputs(config, world)
    torch.manual_seed(config.seed)  # of random weights
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_num_threads, threads)
        if config.cpu_threads is not None and world.device == "cpu":
            torch.set_num_threads(config.cpu_threads)
        undo.callback(inputs.rewards.close)
        policy = make_policy(config, world, inputs)
        undo.callback(policy.close)
        if inputs.algorithm.needs_reference:
            policy.weights.save("reference", _reference_place(config, policy))
        losses = {POLICY_LOSS: (inputs.algorithm.loss, inputs.algorithm.needs_entropy)}
        if config.warm_start is not None:
            losses[SUPERVISED] = (load_algorithm(SUPERVISED).loss, False)
        policy.capture_all(losses, on_capture)
        checkpoints = Checkpoints(
            Path(config.output) / "checkpoints",
            policy.sharded,
            policy.optimizer,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            asynchronous=config.checkpoint.asynchronous,
            writes=writes,
        )
        undo.pop_all()
    return Run(
        **vars(inputs), config=config, world=world, policy=policy, checkpoints=checkpoints, threads_before=threads
    )


def make_policy(config: Config, world: World, inputs: Inputs) -> PolicyWorker:
    return PolicyWorker(
        make_model(config, inputs.tokenizer, world.device),
        inputs.tokenizer,
        world,
        inputs.limits,
        sampling=inputs.sampling,
        optimizer=optimizer_settings(config),
        clip_norm=config.optimizer.clip_norm,
        backend="eager" if config.graph.impl == "none" else config.graph.impl,
        scopes=inputs.scopes,
        on_mismatch=config.graph.on_mismatch,
        warmup=config.graph.warmup,
        reduction="ordered" if world.device == "cpu" else "library",
        verify_weights=config.memory.verify_weights,
    )


def make_model(config: Config, tokenizer: Tokenizer, device: str) -> Decoder:
    """Loaded, or with random weights."""
    dtype = None if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    if config.model.path is not None:
        return load_model(config.model.path, dtype=dtype, device=device, checkpointing=config.model.checkpointing)
    architecture, _ = read_architecture(config, tokenizer)
    model = Decoder(architecture, checkpointing=config.model.checkpointing)
    model.reset_parameters(std=0.4 * architecture.hidden**-0.5)  # narrow layers learn sooner from larger weights
    return model.to(device, dtype or torch.float32)


def optimizer_settings(config: Config) -> dict[str, Any]:
    o = config.optimizer
    total = max(1, config.steps * config.algorithm.minibatches * config.algorithm.epochs - o.warmup_steps)
    schedule = {"constant": constant(), "linear": linear(total), "cosine": cosine(total)}[o.schedule]
    return {
        "lr": o.lr,
        "betas": o.betas,
        "eps": o.eps,
        "weight_decay": o.weight_decay,
        "schedule": warm_up(o.warmup_steps, schedule) if o.warmup_steps else schedule,
    }


def _reference_place(config: Config, policy: PolicyWorker) -> Any:
    """On the device if there is room for it beside everything else, else in host memory."""
    if config.memory.reference != "auto" or not policy.world.device.startswith("cuda"):
        return "device" if config.memory.reference == "auto" else config.memory.reference
    free = torch.cuda.mem_get_info(policy.world.device)[0]
    return "device" if policy.sharded.plan().parameters < free // 8 else "host"
