"""Every key of a run's configuration, with its type, limits, default and description.

Owns what can be configured; code that uses a value does not check it again. Rules that involve several keys are in
`rules.py`. Paths are relative to the working directory. Importing this module is instant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rollgraph.config.cluster_keys import ClusterConfig
from rollgraph.config.field_types import COMMAS
from rollgraph.config.key_types import (
    TARGETS,
    Beta,
    Count,
    File,
    Heads,
    Layers,
    Natural,
    Neighbours,
    NotNegative,
    Options,
    Positive,
    Rank,
    Scope,
    Share,
    ShareAboveZero,
    SinkName,
    Target,
    Temperature,
    Width,
    WidthOfMlp,
)
from rollgraph.config.reward_keys import RewardConfig
from rollgraph.config.train_keys import TrainConfig

MICROBATCH_TOKENS = 16_384  # the largest microbatch where neither the user nor memory says otherwise


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    layers: Annotated[Layers, "Number of decoder layers."] = 2
    width: Annotated[Width, "Size of the hidden state."] = 64
    heads: Annotated[Heads, "Number of attention heads."] = 4
    kv_heads: Annotated[Heads, "Number of key/value heads; must divide `heads`."] = 2
    mlp: Annotated[WidthOfMlp, "Hidden size of the MLP."] = 128
    max_length: Annotated[Count, "Longest prompt plus completion, in tokens."] = 256


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: Annotated[
        File | None,
        "Folder of a Llama, Mistral, Qwen2 or Qwen3 model, or its id on the Hugging Face Hub: org/name or "
        "org/name@revision. Either this or `model.tiny` is required.",
    ] = None
    tiny: Annotated[TinyModelConfig | None, "A small model with random weights, created for this run."] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], "Data type of the weights. auto: the type they are stored in."
    ] = "auto"
    checkpointing: Annotated[
        Literal["auto"] | bool | Natural,
        "Recompute the activations of so many layers in the backward pass, which saves memory and costs time. true: of "
        "all layers; auto: of as many as memory requires.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    rank: Annotated[Rank, "Rank of each adapter: more can learn more, and takes more memory."] = 32
    alpha: Annotated[Positive, "What an adapter adds is multiplied by alpha / rank."] = 32.0
    targets: Annotated[tuple[Target, ...], "The projections of every layer that get an adapter."] = TARGETS
    dropout: Annotated[
        Beta,
        "Share of an adapter's inputs that training leaves out at random. Above 0, generation and training differ.",
    ] = 0.0
    rslora: Annotated[
        bool, "Multiply by alpha / sqrt(rank) instead, so that a high rank adds as much as a low one."
    ] = False
    path: Annotated[
        File | None,
        "Folder of an adapter in PEFT's format to start from, or its id on the Hugging Face Hub. It decides rank, "
        "alpha, targets and rslora. null: adapters that change nothing yet.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    path: Annotated[
        File | None,
        "Folder of a tokenizer, its id on the hub, or `bytes`. null: `model.path`, or `bytes` for a tiny model.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: Annotated[
        File,
        "A .jsonl or .parquet file with a column `prompt` or `messages`, or a dataset of the Hugging Face Hub: "
        "org/name, org/name:split or org/name@revision:config/split. Reward functions see all other columns. `sft` "
        "needs `completion` or the assistant's messages, `dpo` needs `chosen` and `rejected`.",
    ]
    validation: Annotated[
        File | None,
        "Held-out data in the same format; a dataset without a split means its validation or test split. "
        "null: no validation.",
    ] = None
    prompts_per_step: Annotated[
        Count, "Number of prompts per step, over all ranks; for `sft` and `dpo`, the number of rows."
    ] = 32
    max_prompt_tokens: Annotated[Count | None, "Longest prompt, in tokens. null: as long as the model allows."] = None
    max_tokens: Annotated[
        Count | None,
        "Longest prompt plus completion of `sft` and `dpo`, in tokens. null: what the model and the largest microbatch "
        "allow.",
    ] = None
    too_long: Annotated[
        Literal["error", "drop"], "What to do with longer rows. error: stop; drop: leave them out and count them."
    ] = "error"
    chat: Annotated[bool, "Wrap each prompt, and what was written in reply to it, in the model's chat template."] = (
        False
    )
    shuffle: Annotated[bool, "Use a new order in every epoch, derived from the seed."] = True


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    name: Annotated[File, "Import path of the environment: package.module:name or path/file.py:name."]
    options: Annotated[Options, "Keyword arguments for the environment."] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    samples_per_prompt: Annotated[Count, "Completions per prompt, that is, the size of a group."] = 16
    max_tokens: Annotated[Count, "Longest completion, in tokens."] = 512
    temperature: Annotated[
        Temperature, "Sampling temperature. Values near 0 overflow, and greedy sampling explores nothing."
    ] = 1.0
    top_k: Annotated[Natural, "Sample from the k most likely tokens. 0: from all tokens."] = 0
    top_p: Annotated[ShareAboveZero, "Sample from the most likely tokens that together reach this probability."] = 1.0
    min_p: Annotated[
        Share, "Sample from tokens whose probability is at least this fraction of the most likely token's."
    ] = 0.0
    stop: Annotated[tuple[str, ...], "Strings that end a completion."] = ()
    rows: Annotated[Count, "Number of sequences decoded at a time."] = 256
    environment: Annotated[
        EnvironmentConfig | None, "Environment for several turns. null: one completion per sample."
    ] = None

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from a subset, so that their log-probabilities are not the policy's."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    name: Annotated[File, "A built-in algorithm, package.module:name, or path/file.py:name."] = "grpo"
    options: Annotated[Options, "Settings of the algorithm."] = field(default_factory=dict)
    teacher: Annotated[
        File | None, "Folder of the model that scores samples for `distillation`; it has the policy's tokenizer."
    ] = None
    minibatches: Annotated[Count, "Optimizer steps per pass over the rollouts."] = 1
    epochs: Annotated[Count, "Passes over the rollouts of a step."] = 1
    kl_coef: Annotated[
        NotNegative, "Weight of the KL divergence from the reference policy. 0: no reference policy is needed."
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: Annotated[NotNegative, "Learning rate after warm-up."] = 1e-6
    betas: Annotated[tuple[Beta, Beta], "Decay rates of the first and second moment."] = (0.9, 0.999)
    eps: Annotated[Positive, "Constant added to the denominator for numerical stability."] = 1e-8
    weight_decay: Annotated[NotNegative, "Decoupled weight decay, as in AdamW."] = 0.0
    clip_norm: Annotated[Positive | None, "Largest norm of the gradient. null: no clipping."] = 1.0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], "Schedule of the learning rate; linear and cosine end at 0."
    ] = "constant"
    warmup_steps: Annotated[
        Natural, "Number of optimizer updates in which the learning rate rises from 0. A step can have several updates."
    ] = 0
    state: Annotated[
        Literal["fp32", "bf16", "int8"],
        "Format of the two moments. fp32: 8 bytes for each parameter; bf16: 4 bytes; int8: 2 bytes, with an exponent "
        "for each block of 64. bf16 and int8 are rounded at random, without bias. The master weights are always fp32.",
    ] = "fp32"
    offload: Annotated[
        Literal["auto", "none", "host"],
        "Where moments and master weights wait between updates. none: on the device; host: in pinned host memory, "
        "streamed through the device during an update, which gives the same results; auto: on the host if memory "
        "requires it.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    data: Annotated[
        File,
        "A .jsonl or .parquet file, or a dataset of the hub, with columns `prompt` and `completion`, or `messages`. "
        "`data.chat` applies to it.",
    ]
    steps: Annotated[
        Count, "Largest number of supervised training steps. Their loss also uses `rollout.temperature`."
    ] = 100
    lr: Annotated[Positive, "Constant learning rate of the warm start."] = 1e-5
    batch_size: Annotated[Count, "Sequences per step, over all ranks."] = 32
    stop_at: Annotated[
        float | None, "Mean reward of sampled completions at which to stop early. null: take all steps."
    ] = None
    check_every: Annotated[Count, "Steps between two checks of the reward, if `stop_at` is given."] = 10


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    impl: Annotated[
        Literal["auto", "none", "cuda", "tape"],
        "Backend that captures graphs. auto: cuda on a GPU, otherwise tape; none: run eagerly.",
    ] = "auto"
    scope: Annotated[
        Annotated[tuple[Scope, ...], COMMAS] | None,
        "What one training graph contains. null: step on one rank, layer on several.",
    ] = None
    warmup: Annotated[Count, "Number of warm-up runs before a capture."] = 2
    on_mismatch: Annotated[
        Literal["raise", "eager", "recapture"], "What to do with a call that does not fit its graph."
    ] = "raise"
    exact: Annotated[
        Literal["auto", "must", "off"],
        "Whether generation and training agree bit for bit. auto: where it costs little, otherwise the run says so; "
        "must: always, or the run stops; off: products are left to the library.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    every: Annotated[Count, "Steps between two validations."] = 10
    samples: Annotated[Count, "Completions per prompt: the k of pass@k."] = 1
    temperature: Annotated[NotNegative, "Sampling temperature. 0: always take the most likely token."] = 0.0
    max_prompts: Annotated[Count | None, "Number of prompts to use, from the start of the file. null: all."] = 256


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Annotated[Count, "Steps between two checkpoints, in a warm start, too. The last step is always saved."] = 50
    keep_last: Annotated[Count, "How many of the latest regular checkpoints to keep."] = 2
    keep_best: Annotated[
        Natural,
        Neighbours,
        "How many of the best checkpoints to keep, by validation reward, or by validation loss where nothing is "
        "rewarded. A new best is saved at once.",
    ] = 1
    asynchronous: Annotated[bool, "Write checkpoints while training continues."] = True
    peers: Annotated[
        Neighbours,
        "How many other ranks keep a copy of each rank's state in host memory after every step, preferably on another "
        "node, so that a lost rank costs no step. Needs `cluster.engine: ray`: torchrun replaces all processes, and "
        "their memory with them.",
    ] = 0
    export_at_end: Annotated[bool, "Write a model folder for other tools after the last step."] = True


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    timeout: Annotated[Positive, "Seconds that ranks wait for each other; then the run ends and names the lost."] = (
        600.0
    )
    heartbeat_timeout: Annotated[Positive, "Seconds without a heartbeat after which a rank counts as lost."] = 60.0
    backend: Annotated[
        Literal["auto", "gloo"],
        "What ranks communicate with. auto: NCCL between GPUs, gloo between CPUs; gloo: between GPUs, too, through "
        "host memory, which is slow, but lets several ranks share a GPU.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    cache_gib: Annotated[
        Positive | None,
        "Size of the key/value cache in GiB. null: as much as all rows can use, or what fits into memory.",
    ] = None
    reference: Annotated[
        Literal["auto", "device", "host"],
        "Where the reference weights are kept. auto: on the device, or on the host if memory requires it.",
    ] = "auto"
    verify_weights: Annotated[
        bool, "Compare checksums of the policy's weights before and after other weights are used."
    ] = False
    logits: Annotated[
        Literal["auto", "whole", "chunks"],
        "How the logits of a microbatch are held. whole: kept from forward to backward; chunks: in pieces of 1 GiB, "
        "computed twice; auto: whole on a GPU if they fit into memory.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    every: Annotated[Count, "Steps between two lines of metrics."] = 1
    samples_every: Annotated[
        Natural, "Steps between two sets of samples; those of validation are always written. 0: write none at all."
    ] = 10
    sample_groups: Annotated[
        Count, "Groups in each set: prompts with all their completions, drawn by the seed and the step."
    ] = 4
    token_values: Annotated[Natural, "Longest completion with values of each token in samples.jsonl; 0: none."] = 4096
    sinks: Annotated[
        tuple[SinkName, ...] | None, "Where metrics are written. null: jsonl, and tensorboard if it is installed."
    ] = None
    wandb: Annotated[Options, "Arguments of wandb.init."] = field(default_factory=dict)
    mlflow: Annotated[Options, "MLflow settings: tracking_uri, experiment and run_name."] = field(default_factory=dict)
    progress: Annotated[
        Literal["auto", "live", "plain", "none"],
        "Progress display. auto: live in a terminal or a notebook, otherwise plain. plain: one line for each step, and "
        "during set-up one every few seconds.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: Annotated[Natural, "Seed for all random number generators."] = 0
    steps: Annotated[Count, "Number of steps; each samples rollouts and trains on them."] = 100
    output: Annotated[File, "Folder for the run's checkpoints, metrics and samples."] = "runs/default"
    resume: Annotated[
        Literal["auto", "never", "must"],
        "Whether to resume from the output folder. auto: resume if a checkpoint exists; never: stop if one exists; "
        "must: stop if none exists.",
    ] = "auto"
    allow_changes: Annotated[
        Annotated[tuple[str, ...], COMMAS],
        "Keys or sections that this start may change although a resumed run keeps them, such as algorithm or "
        "data.train. See docs/run_folder.md.",
    ] = ()
    cpu_threads: Annotated[
        Count | None, "Number of PyTorch threads on a CPU. null: PyTorch decides; 1 is best for tiny models."
    ] = None
    shard: Annotated[
        Literal["optimizer", "parameters"],
        "What the ranks divide among themselves. optimizer: gradients and the optimizer's state, while each rank has "
        "all parameters; parameters: those as well, and layers are gathered when they are needed.",
    ] = "optimizer"
    tensor_parallel: Annotated[
        Count, "Number of ranks of a node that divide each layer among themselves. 1: each rank computes whole layers."
    ] = 1
    model: Annotated[ModelConfig, "The model to train."] = field(default_factory=ModelConfig)
    adapter: Annotated[
        AdapterConfig | None, "Train low-rank adapters (LoRA), and no other weight. null: train all weights."
    ] = None
    tokenizer: Annotated[TokenizerConfig, "How text becomes tokens."] = field(default_factory=TokenizerConfig)
    data: Annotated[DataConfig, "The prompts to train on and to validate with."]
    rollout: Annotated[RolloutConfig, "How completions are sampled."] = field(default_factory=RolloutConfig)
    reward: Annotated[RewardConfig, "How completions are scored."] = field(default_factory=RewardConfig)
    algorithm: Annotated[AlgorithmConfig, "How rewards become a loss."] = field(default_factory=AlgorithmConfig)
    optimizer: Annotated[OptimizerConfig, "The AdamW optimizer."] = field(default_factory=OptimizerConfig)
    train: Annotated[TrainConfig, "How training batches are split into microbatches."] = field(
        default_factory=TrainConfig
    )
    warm_start: Annotated[WarmStartConfig | None, "Supervised training before the first step. null: none."] = None
    graph: Annotated[GraphConfig, "Graph capture and replay."] = field(default_factory=GraphConfig)
    validation: Annotated[ValidationConfig, "Validation on `data.validation`."] = field(
        default_factory=ValidationConfig
    )
    checkpoint: Annotated[CheckpointConfig, "When checkpoints are written and which are kept."] = field(
        default_factory=CheckpointConfig
    )
    ranks: Annotated[RanksConfig, "Runs with several processes."] = field(default_factory=RanksConfig)
    cluster: Annotated[ClusterConfig, "Runs on a Ray cluster; see docs/cluster.md."] = field(
        default_factory=ClusterConfig
    )
    memory: Annotated[MemoryConfig, "How device memory is used. What is left open is chosen: see docs/memory.md."] = (
        field(default_factory=MemoryConfig)
    )
    log: Annotated[LogConfig, "Metrics, samples and progress."] = field(default_factory=LogConfig)

    @property
    def tokenizer_path(self) -> str:
        """A folder, or `bytes`."""
        return self.tokenizer.path or self.model.path or "bytes"
