"""From a configuration to the parts of a run.

Owns the order in which parts are made: what is cheap to check (`inputs.py`) before the model, the model before its
graphs. Nothing here takes a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollgraph.config import Config
from rollgraph.distributed.world import World
from rollgraph.model import Decoder, load_model
from rollgraph.model.adapter_files import load_adapter
from rollgraph.model.adapters import attach
from rollgraph.model.division import divide_model, hollow_decoder
from rollgraph.model.hf_weights import find_weights
from rollgraph.model.tensor_group import TensorGroup
from rollgraph.policy import PolicyWorker
from rollgraph.policy.exactness import describe
from rollgraph.policy.layer_division import LayerDivision
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.run.base_model import adapter_spec, base_is_reference, describe_base, resolve_adapter, restore_base
from rollgraph.run.checkpoints import Checkpoints, Saved
from rollgraph.run.chosen_memory import choose_memory
from rollgraph.run.folder_lock import LOCK, FolderLock
from rollgraph.run.given import NOTHING, Given
from rollgraph.run.host_memory import returning_freed_memory
from rollgraph.run.hub_cache import model_folder
from rollgraph.run.hub_pins import fetch_weights, pin_sources
from rollgraph.run.inputs import Inputs, check_inputs, read_architecture
from rollgraph.run.memory_choice import Choice
from rollgraph.run.progress import RunProgress
from rollgraph.run.shapes import recomputed_layers
from rollgraph.run.step_log import OnProgress, StepLog
from rollgraph.run.stop import StopSignals
from rollgraph.run.tenure import Tenure
from rollgraph.sharding import constant, cosine, linear, warm_up
from rollgraph.sharding.manifest import read_states
from rollgraph.sharding.peer_exchange import PeerExchange
from rollgraph.sharding.tensor_peers import TensorPeers
from rollgraph.tokenizer import Tokenizer
from rollgraph.tokenizer.detokenizer import make_token_texts

SUPERVISED = "sft"  # the loss of the warm start
POLICY_LOSS = "policy"
_CAPTURES = {  # what people are told, by phase
    "probe": "probe products",
    "score": "capture for scoring",
    "train": "capture for training",
    "generate": "capture for generation",
}


@dataclass(frozen=True)
class Run:
    """The parts of a run. None of them is ever replaced; what changes is inside `progress` and `log`."""

    config: Config
    memory: Choice  # how the run uses memory, and what was planned
    world: World
    inputs: Inputs
    policy: PolicyWorker
    checkpoints: Checkpoints
    peers: PeerExchange | None  # with checkpoint.peers
    progress: RunProgress
    log: StepLog
    stop: StopSignals
    lock: FolderLock  # of the run's folder, if this run writes
    close_policy: Callable[[], None]
    threads_before: int  # PyTorch's, restored when the run is closed

    def on_any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: all ranks have to act alike."""
        if self.world.size == 1:
            return flag
        return bool(self.policy.sharded.any_rank(torch.tensor(float(flag), device=self.world.device)))

    def restore_base(self, saved: Saved) -> None:
        """With adapters, put the base model of a checkpoint in place, or make sure that it is there."""
        state = read_states(saved.path)[0] if self.config.adapter is not None else {}
        self.progress.base_files = restore_base(self.config, self.policy, saved.path, state)

    def load_weights(self, saved: Saved) -> dict[str, Any]:
        """Put the weights and the optimizer of a checkpoint in place, and return the rest of what it holds."""
        self.restore_base(saved)
        state = self.checkpoints.load(saved)
        self.progress.taken = saved.step + 1
        return state

    def export(self, folder: Path, *, merge: bool = False) -> None:
        """Write the policy for other tools: the model, or its adapter, or with `merge` the model with the adapter."""
        self.policy.export(folder, merge=merge, base=describe_base(self.config))

    def close(self) -> None:
        with contextlib.ExitStack() as parts:  # each is closed even if another one fails
            parts.callback(torch.set_num_threads, self.threads_before)
            parts.callback(self.close_policy)
            parts.callback(self.inputs.rewards.close)
            parts.callback(self.checkpoints.close)
            if self.peers is not None:
                parts.callback(self.peers.close)


def make_run(
    config: Config,
    world: World,
    *,
    inputs: Inputs | None = None,
    given: Given = NOTHING,
    log: StepLog | None = None,
    stop: StopSignals | None = None,
    lock: FolderLock | None = None,
    tenure: Tenure | None = None,
    writes: bool = True,
    load: Callable[..., Decoder] = load_model,
) -> Run:
    """Check, load, allocate and capture everything. Nothing is trained, and no checkpoint is loaded.

    The run closes its `inputs`, which come from `check_inputs`; without them, they are made with what is `given`.
    Without `writes` nothing can be saved, and nothing in the output folder changes. `load` loads the model's folder.
    With a `tenure`, a policy that it kept is used again, and the policy is given back to it when the run is closed.
    `checkpoint.peers` needs one: what is to survive an attempt is kept there.
    """
    if inputs is None:
        config = resolve_adapter(pin_sources(config, world))
        inputs = check_inputs(config, world, given=given)
    log = log or StepLog(config, world)
    log.reward_weights = inputs.rewards.weights
    if inputs.written is None:
        log.token_texts = make_token_texts(inputs.tokenizer)
    torch.manual_seed(config.seed)  # for random weights
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_num_threads, threads)
        undo.callback(inputs.rewards.close)
        choice, inputs = choose_memory(config, world, inputs, log.note)
        config = choice.config
        log.config = config
        if config.cpu_threads is not None and world.device == "cpu":
            torch.set_num_threads(config.cpu_threads)
        fetch_weights(config.model.path, world, log.note)
        fetch_weights(config.algorithm.teacher, world, log.note)
        stop = stop or StopSignals(world)
        kept = None if tenure is None else tenure.take((config, inputs.limits))
        if kept is None:
            policy = make_captured_policy(config, world, inputs, log, stop, load)
        else:
            policy = kept
        close_policy = policy.close
        if tenure is not None:
            close_policy = partial(tenure.keep, policy, (config, inputs.limits))
        undo.callback(close_policy)
        if kept is not None:
            rejoin(config, world, policy)
        lock = lock or FolderLock(Path(config.output) / LOCK)
        peers = None
        if config.checkpoint.peers and tenure is not None:
            peers = PeerExchange(policy.sharded, policy.optimizer, tenure.copies)
            undo.callback(peers.close)
        checkpoints = Checkpoints(
            Path(config.output) / "checkpoints",
            policy.sharded,
            policy.optimizer,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            asynchronous=config.checkpoint.asynchronous,
            writes=writes,
            before_commit=lock.check,
            kept=None if peers is None else peers.snapshot,
        )
        undo.pop_all()
    return Run(
        config=config,
        memory=choice,
        world=world,
        inputs=inputs,
        policy=policy,
        checkpoints=checkpoints,
        peers=peers,
        progress=RunProgress(config, inputs.data, inputs.fingerprints),
        log=log,
        stop=stop,
        lock=lock,
        close_policy=close_policy,
        threads_before=threads,
    )


def make_captured_policy(
    config: Config, world: World, inputs: Inputs, log: StepLog, stop: StopSignals, load: Callable[..., Decoder]
) -> PolicyWorker:
    """Load the model, allocate everything, and capture every graph."""
    with contextlib.ExitStack() as undo:
        with log.phase("load model", in_bytes=True) as show:
            policy = load_policy(config, world, inputs, show, load)
        undo.callback(policy.close)
        stop.check_in_setup()
        if inputs.teacher is not None and (config.adapter or inputs.teacher != policy.model.whole):
            policy.add_frozen("reference", load_teacher(config, world.device))
        elif inputs.algorithm.needs_reference and base_is_reference(config):
            policy.adapted.name_base("reference")
        elif inputs.algorithm.needs_reference:
            policy.weights.save("reference", "host" if config.memory.reference == "host" else "device")
        with world.in_phase("capture"):
            capture_graphs(config, inputs, policy, log, stop)
        undo.pop_all()
    return policy


def rejoin(config: Config, world: World, policy: PolicyWorker) -> None:
    """Bring a policy of an earlier attempt to where a new one would be, but for its weights: those are loaded next."""
    policy.rejoin(world)
    settings = optimizer_settings(config)
    policy.optimizer.restart(settings["lr"], settings["schedule"])


def describes_tokens(config: Config, inputs: Inputs) -> bool:
    """Whether samples are written with values of their tokens."""
    log = config.log
    return inputs.written is None and min(log.sample_groups, log.samples_every, log.token_values) > 0


def capture_graphs(config: Config, inputs: Inputs, policy: PolicyWorker, log: StepLog, stop: StopSignals) -> None:
    """Capture every graph of every phase, and show how far this has come."""
    losses = {POLICY_LOSS: (inputs.algorithm.loss, inputs.algorithm.needs_entropy)}
    if config.warm_start is not None:
        losses[SUPERVISED] = (load_algorithm(SUPERVISED).loss, False)

    def show(phase: str, part: str, done: int, total: int) -> None:
        log.view.phase(_CAPTURES[phase], done, total, part)
        log.memory.capture(phase)
        stop.check_in_setup()

    with returning_freed_memory(policy.world.device):
        policy.capture_all(losses, show, generates=inputs.written is None, entropies=describes_tokens(config, inputs))
    log.memory.end_captures()
    log.view.end_phase()
    if config.adapter is not None and config.adapter.dropout:
        log.note("generation and training differ by what adapter.dropout leaves out in training")
    elif policy.products is not None and not config.rollout.filtered:  # a filter changes what is sampled from
        log.note(describe(policy.products))


def load_policy(
    config: Config, world: World, inputs: Inputs, on_bytes: OnProgress | None, load: Callable[..., Decoder] = load_model
) -> PolicyWorker:
    """Load the model and allocate what is trained. With sharded parameters, a rank never holds the whole model.

    `load` loads one that is whole, or divided by layers.
    """
    division = LayerDivision(world, config.tensor_parallel)
    path = config.model.path
    if config.shard == "parameters" and world.size > 1 and config.adapter is None and path is not None:
        found = find_weights(model_folder(path), _wanted_dtype(config))
        checkpointing = recomputed_layers(config, found.architecture)
        model = hollow_decoder(found.architecture, found.dtype, world.device, checkpointing=checkpointing)
        policy = make_policy(config, division.data, inputs, model)
        policy.sharded.flat.fill(partial(found.read, on_bytes=on_bytes))
        policy.optimizer.read_shards()
        return policy
    model = make_model(config, inputs.tokenizer, world.device, on_bytes, load, division.group)
    return make_policy(config, division.data, inputs, model, division.peers(model))


def make_policy(
    config: Config, world: World, inputs: Inputs, model: Decoder, tensor: TensorPeers | None = None
) -> PolicyWorker:
    return PolicyWorker(
        model,
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
        exact=config.graph.exact,
        shard=config.shard,
        tensor=tensor,
    )


def make_model(
    config: Config,
    tokenizer: Tokenizer,
    device: str,
    on_bytes: OnProgress | None = None,
    load: Callable[..., Decoder] = load_model,
    group: TensorGroup | None = None,
) -> Decoder:
    """Load the model, or make a tiny one with random weights, and give it its adapters. A `group` divides its layers.

    Random weights are those that one rank alone draws.
    """
    architecture, _ = read_architecture(config, tokenizer)
    checkpointing = recomputed_layers(config, architecture)
    dtype = _wanted_dtype(config)
    if config.model.path is not None:
        model = load(
            model_folder(config.model.path),
            dtype=dtype,
            device=device,
            checkpointing=checkpointing,
            on_bytes=on_bytes,
            group=group,
        )
        return _adapted(config, model)
    model = Decoder(architecture, checkpointing=checkpointing)
    model.reset_parameters(std=0.4 * architecture.hidden**-0.5)  # narrow layers learn faster from larger weights
    model = model.to(device, dtype or torch.float32)
    return _adapted(config, model if group is None else divide_model(model, group))


def _wanted_dtype(config: Config) -> torch.dtype | None:
    """The dtype of the weights; None: the one they are stored in."""
    return None if config.model.dtype == "auto" else getattr(torch, config.model.dtype)


def _adapted(config: Config, model: Decoder) -> Decoder:
    if config.adapter is not None:
        attach(model, adapter_spec(config.adapter), seed=config.seed)
        if config.adapter.path is not None:
            load_adapter(model, model_folder(config.adapter.path))
    return model


def load_teacher(config: Config, device: str) -> Decoder:
    """A teacher that is a model of its own, in the dtype it is stored in."""
    assert config.algorithm.teacher is not None
    return load_model(model_folder(config.algorithm.teacher), device=device)


def optimizer_settings(config: Config) -> dict[str, Any]:
    settings = config.optimizer
    updates = config.steps * config.algorithm.minibatches * config.algorithm.epochs
    decaying = max(1, updates - settings.warmup_steps)
    schedules = {"constant": constant(), "linear": linear(decaying), "cosine": cosine(decaying)}
    schedule = schedules[settings.schedule]
    if settings.warmup_steps:
        schedule = warm_up(settings.warmup_steps, schedule)
    return {
        "lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "schedule": schedule,
        "state": settings.state,
        "offload": "none" if settings.offload == "auto" else settings.offload,
    }
