"""Builds the parts of a run from its configuration.

Owns the order: inputs that are cheap to check (`inputs/inputs.py`) come before the model, and the model before its
graphs. Nothing here takes a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollgraph.checkpoint.format import read_states
from rollgraph.checkpoint.keep import Checkpoints, SavedCheckpoint
from rollgraph.checkpoint.lock import LOCK, Claim, FolderLock
from rollgraph.checkpoint.peer_exchange import PeerCopies, PeerExchange
from rollgraph.config import Config
from rollgraph.inputs.base_model import adapter_spec, base_is_reference, describe_base, resolve_adapter, restore_base
from rollgraph.inputs.inputs import Inputs, check_inputs, resolve_architecture
from rollgraph.inputs.sampled_data import describe_prompt_lengths
from rollgraph.inputs.shapes import recomputed_layers
from rollgraph.model import Decoder, load_model
from rollgraph.model.lora import attach
from rollgraph.model.meta import unallocated_decoder
from rollgraph.model.tensor_parallel import TensorParallelGroup
from rollgraph.model.tensor_shards import shard_model
from rollgraph.model.weights.adapter_files import load_adapter
from rollgraph.model.weights.hf import find_model_weights
from rollgraph.parallel.optim.schedules import constant, cosine, linear, warm_up
from rollgraph.parallel.ranks.stop import StopSignals
from rollgraph.parallel.ranks.world import World
from rollgraph.parallel.tensor.peers import TensorPeers
from rollgraph.plan.choose import Choice
from rollgraph.plan.chosen_memory import choose_memory
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.policy.exactness import describe_exactness
from rollgraph.policy.worker import ParallelGroups
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.rl.data.hub import model_folder
from rollgraph.rl.data.hub_pins import fetch_weights, pin_sources
from rollgraph.rl.data.python_objects import NO_OBJECTS, PythonObjects
from rollgraph.run.progress import RunProgress
from rollgraph.run.step_log import OnProgress, StepLog
from rollgraph.tokenizer import Tokenizer
from rollgraph.tokenizer.detokenizer import make_token_texts

# -- pauses of the garbage collector ---------------------------------------------------------------
# A full collection visits every object of the process. Most are rows of data and PyTorch modules, which live as long as
# the run; visiting them makes about one step in 25 take twice as long. A shorter run has no such step.

_FULL_COLLECTION_INTERVAL = 25  # steps, approximately


@contextmanager
def gc_frozen(steps: int) -> Iterator[None]:
    """Inside, collections skip all objects that exist now. If objects are already frozen, this changes nothing."""
    is_short = steps < _FULL_COLLECTION_INTERVAL
    if is_short or gc.get_freeze_count():  # unfreezing would also unfreeze objects that others have frozen
        yield
        return
    gc.collect()  # frozen garbage would keep its memory
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# -- free memory of a CPU run ----------------------------------------------------------------------
# A capture allocates and frees tensors of all sizes between long-lived objects. glibc takes up to 32 MiB from its heap,
# where a single live object keeps everything below it: after the captures, a process could hold twice the memory it
# uses. Tensors that are mapped one by one return their memory when freed, but each allocation is slower.

# From glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_MIB = 2**20


@contextmanager
def returning_freed_memory(device: str) -> Iterator[None]:
    """Inside, large CPU tensors return their memory to the system when freed. Without glibc, do nothing."""
    libc = ctypes.CDLL(None)
    if device != "cpu" or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _MIB)
    try:
        yield
    finally:  # the largest values that glibc would reach by itself
        libc.mallopt(_MMAP_THRESHOLD, 32 * _MIB)
        libc.mallopt(_TRIM_THRESHOLD, 64 * _MIB)
        libc.malloc_trim(0)


# -- the warm worker: what a process keeps between attempts ----------------------------------------
# Building a policy is slow: it loads weights, allocates memory and captures graphs. After another rank was lost, all of
# that is still valid. The next attempt loads a checkpoint into the same memory or, with `checkpoint.peers`, the copies
# of the state that the ranks hold. Nothing here communicates.

PolicyKey = tuple[Config, Limits]  # an attempt can reuse a policy that was built for the same key


class WarmWorker:
    """Keeps a captured policy and peer copies for the next attempt in the same process.

    `run` is a hexadecimal id, the same for all attempts and ranks of a run, and unique to it.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.copies = PeerCopies()
        self._policy: PolicyWorker | None = None
        self._policy_key: PolicyKey | None = None

    def claim(self, world: World) -> Claim:
        return Claim(self.run, world.attempt)

    def keep_policy(self, policy: PolicyWorker, policy_key: PolicyKey) -> None:
        """Keep a policy with all its graphs instead of closing it."""
        self._policy = policy
        self._policy_key = policy_key

    def wait_for_collectives(self, seconds: float) -> bool:
        """Wait for collectives to stop writing to the policy's memory. False if one still does after `seconds`."""
        return self._policy is None or self._policy.sharded.collectives.wait_until_failed(seconds)

    def take_policy(self, policy_key: PolicyKey) -> PolicyWorker | None:
        """Return the kept policy if this attempt can reuse it; otherwise free it and return None.

        A tensor parallel policy cannot be reused: its graphs contain collectives with the other ranks, and a
        replacement rank cannot capture its graphs without them.
        """
        policy, self._policy = self._policy, None
        gc.collect()  # what an exception kept alive, such as a forward pass without its backward pass
        if policy is not None and (self._policy_key != policy_key or policy.sharded.tensor is not None):
            _close_abandoned(policy)
            return None
        return policy

    def discard_policy(self) -> None:
        """Free the kept policy. Peer copies stay."""
        if self._policy is not None:
            _close_abandoned(self._policy)
        self._policy = None


def _close_abandoned(policy: PolicyWorker) -> None:
    """Close a policy without waiting for its other ranks, which may be gone."""
    policy.sharded.gathers.abandon()
    policy.close()


# -- the parts of a run ----------------------------------------------------------------------------

SUPERVISED = "sft"  # the loss and algorithm of the warm start
POLICY_LOSS = "policy"
_PHASE_LABELS = {  # shown during capture, by phase
    "probe": "autotune matmuls",
    "score": "capture for scoring",
    "train": "capture for training",
    "generate": "capture for generation",
}


@dataclass(frozen=True)
class Run:
    """The parts of a run. No part is ever replaced; mutable state lives inside `progress` and `log`."""

    config: Config
    memory: Choice  # the memory settings, and the plan behind them
    world: World
    inputs: Inputs
    policy: PolicyWorker
    checkpoints: Checkpoints
    peers: PeerExchange | None  # None without checkpoint.peers
    progress: RunProgress
    log: StepLog
    stop: StopSignals
    lock: FolderLock  # of the run folder, if this run writes
    release_policy: Callable[[], None]  # closes the policy, or hands it to the warm worker
    initial_threads: int  # PyTorch's thread count, restored by `close`

    def on_any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank, so that all ranks act alike."""
        if self.world.size == 1:
            return flag
        return bool(self.policy.sharded.any_rank(torch.tensor(float(flag), device=self.world.device)))

    def restore_base(self, saved: SavedCheckpoint) -> None:
        """With adapters, load the base model of a checkpoint, or check that it is the loaded one."""
        state = read_states(saved.path)[0] if self.config.adapter is not None else {}
        self.progress.base_files = restore_base(self.config, self.policy, saved.path, state)

    def load_weights(self, saved: SavedCheckpoint) -> dict[str, Any]:
        """Load weights and optimizer state from a checkpoint, and return the rest of its state."""
        self.restore_base(saved)
        state = self.checkpoints.load(saved)
        self.progress.finished_steps = saved.step + 1
        return state

    def export(self, folder: Path, *, merge: bool = False) -> None:
        """Write the policy for other tools: the model, or its adapter; with `merge`, the merged model."""
        self.policy.export(folder, merge=merge, base=describe_base(self.config))

    def close(self) -> None:
        with contextlib.ExitStack() as parts:  # each part is closed even if another one fails
            parts.callback(torch.set_num_threads, self.initial_threads)
            parts.callback(self.release_policy)
            parts.callback(self.inputs.rewards.close)
            parts.callback(self.checkpoints.close)
            if self.peers is not None:
                parts.callback(self.peers.close)


def make_run(
    config: Config,
    world: World,
    *,
    inputs: Inputs | None = None,
    objects: PythonObjects = NO_OBJECTS,
    log: StepLog | None = None,
    stop: StopSignals | None = None,
    lock: FolderLock | None = None,
    warm_worker: WarmWorker | None = None,
    writes: bool = True,
    load: Callable[..., Decoder] = load_model,
) -> Run:
    """Check, load, allocate and capture everything. Takes no step and loads no checkpoint.

    `inputs` come from `check_inputs`, and the run closes them; without them, they are read here, with `objects`. If not
    `writes`, nothing can be saved and the output folder does not change. `load` loads the folder of the model. With a
    `warm_worker`, the run reuses the policy it kept, if possible, and hands the policy back when it is closed.
    `checkpoint.peers` needs a warm worker, because the peer copies must survive an attempt.
    """
    if inputs is None:
        config = resolve_adapter(pin_sources(config, world))
        inputs = check_inputs(config, world, objects=objects)
    log = log or StepLog(config, world)
    log.reward_weights = inputs.rewards.weights
    if inputs.offline_data is None:
        log.token_texts = make_token_texts(inputs.tokenizer)
    torch.manual_seed(config.seed)  # for random weights
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_num_threads, threads)
        undo.callback(inputs.rewards.close)
        if inputs.prompt_lengths is not None:
            log.note(describe_prompt_lengths(inputs.prompt_lengths, inputs.data))
        choice, inputs = choose_memory(config, world, inputs, log.note)
        config = choice.config
        log.config = config
        if config.cpu_threads is not None and world.device == "cpu":
            torch.set_num_threads(config.cpu_threads)
        fetch_weights(config.model.path, world, log.note)
        fetch_weights(config.algorithm.teacher, world, log.note)
        stop = stop or StopSignals(world)
        warm_policy = None if warm_worker is None else warm_worker.take_policy((config, inputs.limits))
        if warm_policy is None:
            policy = make_captured_policy(config, world, inputs, log, stop, load)
        else:
            policy = warm_policy
        release_policy = policy.close
        if warm_worker is not None:
            release_policy = partial(warm_worker.keep_policy, policy, (config, inputs.limits))
        undo.callback(release_policy)
        if warm_policy is not None:
            reset_policy(config, world, policy)
        lock = lock or FolderLock(Path(config.output) / LOCK)
        peers = None
        if config.checkpoint.peers and warm_worker is not None:
            peers = PeerExchange(policy.sharded, policy.optimizer, warm_worker.copies)
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
            find_snapshot=None if peers is None else peers.snapshot,
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
        progress=RunProgress(config, inputs.data, inputs.fingerprints, inputs.max_prompt_tokens),
        log=log,
        stop=stop,
        lock=lock,
        release_policy=release_policy,
        initial_threads=threads,
    )


def make_captured_policy(
    config: Config, world: World, inputs: Inputs, log: StepLog, stop: StopSignals, load: Callable[..., Decoder]
) -> PolicyWorker:
    """Load the model, allocate all memory, and capture every graph."""
    with contextlib.ExitStack() as undo:
        with log.phase("load model", in_bytes=True) as show:
            policy = load_policy(config, world, inputs, show, load)
        undo.callback(policy.close)
        stop.check_in_setup()
        if inputs.teacher is not None and (config.adapter or inputs.teacher != policy.model.full_architecture):
            policy.add_frozen("reference", load_teacher(config, world.device))
        elif inputs.algorithm.needs_reference and base_is_reference(config):
            policy.adapted.name_base("reference")
        elif inputs.algorithm.needs_reference:
            policy.weights.save("reference", "host" if config.memory.reference == "host" else "device")
        with world.in_phase("capture"):
            capture_graphs(config, inputs, policy, log, stop)
        undo.pop_all()
    return policy


def reset_policy(config: Config, world: World, policy: PolicyWorker) -> None:
    """Reset a policy of an earlier attempt to the state of a new one, except for its weights: load those next."""
    policy.rejoin(world)
    settings = optimizer_settings(config)
    policy.optimizer.restart(settings["lr"], settings["schedule"])


def logs_token_values(config: Config, inputs: Inputs) -> bool:
    """Whether samples are logged with per-token values (log-probabilities, entropies)."""
    log = config.log
    return inputs.offline_data is None and min(log.sample_groups, log.samples_every, log.token_values) > 0


def capture_graphs(config: Config, inputs: Inputs, policy: PolicyWorker, log: StepLog, stop: StopSignals) -> None:
    """Capture every graph of every phase, and show progress."""
    losses = {POLICY_LOSS: (inputs.algorithm.loss, inputs.algorithm.needs_entropy)}
    if config.warm_start is not None:
        losses[SUPERVISED] = (load_algorithm(SUPERVISED).loss, False)

    def show(phase: str, part: str, done: int, total: int) -> None:
        log.display.phase(_PHASE_LABELS[phase], done, total, part)
        log.memory.start_capture(phase)
        stop.check_in_setup()

    with returning_freed_memory(policy.world.device):
        policy.capture_all(
            losses, show, generates=inputs.offline_data is None, entropies=logs_token_values(config, inputs)
        )
    log.memory.end_captures()
    log.display.end_phase()
    if config.adapter is not None and config.adapter.dropout:
        log.note("generation and training differ, because adapter.dropout applies only in training")
    elif policy.gemm_report is not None and not config.rollout.filtered:  # a filter changes the distribution
        log.note(describe_exactness(policy.gemm_report))


def load_policy(
    config: Config, world: World, inputs: Inputs, on_bytes: OnProgress | None, load: Callable[..., Decoder] = load_model
) -> PolicyWorker:
    """Load the model and allocate gradients and optimizer state.

    With sharded parameters, a rank never holds the full model. Otherwise `load` loads it, or the rank's tensor parallel
    shard.
    """
    parallel_groups = ParallelGroups(world, config.tensor_parallel)
    path = config.model.path
    if config.shard == "parameters" and world.size > 1 and config.adapter is None and path is not None:
        weights = find_model_weights(model_folder(path), _configured_dtype(config))
        checkpointing = recomputed_layers(config, weights.architecture)
        model = unallocated_decoder(weights.architecture, weights.dtype, world.device, checkpointing=checkpointing)
        policy = make_policy(config, parallel_groups.data, inputs, model)
        policy.sharded.flat.fill(partial(weights.read, on_bytes=on_bytes))
        policy.optimizer.read_shards()
        return policy
    model = make_model(config, inputs.tokenizer, world.device, on_bytes, load, parallel_groups.group)
    return make_policy(config, parallel_groups.data, inputs, model, parallel_groups.peers(model))


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
    group: TensorParallelGroup | None = None,
) -> Decoder:
    """Load the model, or make a tiny one with random weights, and attach adapters.

    With a tensor parallel `group`, this is the rank's shard. Random weights do not depend on the size of the group.
    """
    architecture, _ = resolve_architecture(config, tokenizer)
    checkpointing = recomputed_layers(config, architecture)
    dtype = _configured_dtype(config)
    if config.model.path is not None:
        model = load(
            model_folder(config.model.path),
            dtype=dtype,
            device=device,
            checkpointing=checkpointing,
            on_bytes=on_bytes,
            group=group,
        )
        return _attach_adapters(config, model)
    model = Decoder(architecture, checkpointing=checkpointing)
    model.reset_parameters(std=0.4 * architecture.hidden**-0.5)  # narrow layers learn faster from larger weights
    model = model.to(device, dtype or torch.float32)
    return _attach_adapters(config, model if group is None else shard_model(model, group))


def _configured_dtype(config: Config) -> torch.dtype | None:
    """The configured dtype of the weights; None: keep the stored one."""
    return None if config.model.dtype == "auto" else getattr(torch, config.model.dtype)


def _attach_adapters(config: Config, model: Decoder) -> Decoder:
    if config.adapter is not None:
        attach(model, adapter_spec(config.adapter), seed=config.seed)
        if config.adapter.path is not None:
            load_adapter(model, model_folder(config.adapter.path))
    return model


def load_teacher(config: Config, device: str) -> Decoder:
    """A teacher that is a separate model, in its stored dtype."""
    assert config.algorithm.teacher is not None
    return load_model(model_folder(config.algorithm.teacher), device=device)


def optimizer_settings(config: Config) -> dict[str, Any]:
    settings = config.optimizer
    total_updates = config.steps * config.algorithm.minibatches * config.algorithm.epochs
    decay_steps = max(1, total_updates - settings.warmup_steps)
    schedules = {"constant": constant(), "linear": linear(decay_steps), "cosine": cosine(decay_steps)}
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
