"""Every key of a run's configuration, with its type, limits, default and description.

Values are checked when the file is read, so code that uses a value does not check it again. Rules across several keys
are in `rules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rollgraph.config.fields import COMMA_SEPARATED, IS_PATH, Limit

# -- the largest model -----------------------------------------------------------------------------
# A config file with larger sizes is damaged. Building its model would take forever.

MAX_SIZES = {
    "layers": 1024,
    "hidden": 2**20,
    "mlp": 2**22,
    "heads": 2**14,
    "head_dim": 2**14,
    "vocabulary": 2**24,
    "length": 2**31 - 1,
    "rank": 1024,  # of an adapter
}


# -- shared types ----------------------------------------------------------------------------------

MIN_TEMPERATURE = 0.01  # logits are divided by the temperature, so tiny values overflow
PositiveInt = Annotated[int, Limit("minimum", 1)]
NonNegativeInt = Annotated[int, Limit("minimum", 0)]
ZeroOrOne = Annotated[NonNegativeInt, Limit("maximum", 1)]
Layers = Annotated[PositiveInt, Limit("maximum", MAX_SIZES["layers"])]
Width = Annotated[PositiveInt, Limit("maximum", MAX_SIZES["hidden"])]
Heads = Annotated[PositiveInt, Limit("maximum", MAX_SIZES["heads"])]
MlpWidth = Annotated[PositiveInt, Limit("maximum", MAX_SIZES["mlp"])]
TopK = Annotated[int, Limit("minimum", 0, "0 means all tokens")]
PositiveFloat = Annotated[float, Limit("exclusiveMinimum", 0)]
Temperature = Annotated[float, Limit("minimum", MIN_TEMPERATURE)]
LearningRate = Annotated[float, Limit("minimum", 0), Limit("maximum", 1)]
PositiveLearningRate = Annotated[float, Limit("exclusiveMinimum", 0), Limit("maximum", 1)]
Epsilon = Annotated[
    float,
    Limit("exclusiveMinimum", 0),
    Limit("maximum", 0.01, "this is Adam's, while the range of the clip is algorithm.options.clip_low and clip_high"),
]
NonNegativeFloat = Annotated[float, Limit("minimum", 0)]
Fraction = Annotated[float, Limit("minimum", 0), Limit("maximum", 1)]
PositiveFraction = Annotated[float, Limit("exclusiveMinimum", 0), Limit("maximum", 1)]
Beta = Annotated[float, Limit("minimum", 0), Limit("exclusiveMaximum", 1)]
Rank = Annotated[PositiveInt, Limit("maximum", MAX_SIZES["rank"])]
Scope = Literal["step", "layer", "attn", "mlp"]
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SinkName = Literal["jsonl", "tensorboard", "wandb", "mlflow"]
Options = Mapping[str, Any]
File = Annotated[str, IS_PATH]


# -- cluster ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    engine: Annotated[
        Literal["none", "ray"],
        "What starts the ranks. none: you or a launcher such as torchrun; ray: a Ray cluster, which replaces lost "
        "ranks (pip install 'rollgraph[ray]').",
    ] = "none"
    address: Annotated[
        str | None,
        "Address of the Ray cluster: host:port, auto on one of its nodes, or ray://host:10001 from elsewhere. null: "
        "RAY_ADDRESS, else the cluster that this machine belongs to, else a temporary cluster of this machine alone.",
    ] = None
    nodes: Annotated[PositiveInt, "Number of nodes. Each has the same number of ranks."] = 1
    gpus_per_node: Annotated[
        NonNegativeInt, "Number of GPUs to use on each node, with one rank for each. 0: ranks on CPUs."
    ] = 1
    ranks_per_node: Annotated[PositiveInt, "Number of ranks on each node if `gpus_per_node` is 0."] = 1
    cpus_per_rank: Annotated[
        PositiveInt,
        "CPU cores that Ray reserves for each rank. On a CPU, also its number of threads unless `cpu_threads` is set.",
    ] = 1
    working_dir: Annotated[
        File | None,
        "Folder with your modules. Ray copies it to all nodes, and ranks run in the copy. null: nodes share a file "
        "system, and ranks run in the current folder.",
    ] = None
    attempts: Annotated[
        PositiveInt,
        "The run gives up after more than this many attempts in a row that lost a rank before finishing a step.",
    ] = 3

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_on_node

    @property
    def ranks_on_node(self) -> int:
        return self.gpus_per_node or self.ranks_per_node


# -- reward ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    name: Annotated[File, "A built-in reward, package.module:function, or path/file.py:function."]
    weight: Annotated[float, "Weight of this function in the sum."] = 1.0
    options: Annotated[Options, "Keyword arguments for the function."] = field(default_factory=dict)
    label: Annotated[str, "Name in the metrics. Empty: the name of the function."] = ""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    functions: Annotated[
        tuple[RewardFunctionConfig, ...], "Reward functions. The reward is the weighted sum of their values."
    ] = ()
    chat: Annotated[
        Literal["messages", "text"],
        "Arguments of your functions for rows with `messages`. messages: lists of messages, as in TRL; text: the "
        "prompt as rendered by the chat template, and the completion as text. Built-in rewards always get text.",
    ] = "messages"
    workers: Annotated[
        NonNegativeInt, "Number of reward processes for each rank. 0: compute rewards in the rank's own process."
    ] = 0
    place: Annotated[
        Literal["local", "cluster"],
        "Where the reward processes run. local: on the rank's node; cluster: on any node of the Ray cluster with free "
        "CPU cores, such as nodes without GPUs.",
    ] = "local"
    timeout: Annotated[
        PositiveFloat,
        "Time limit in seconds for one call of a function, with all completions of the call. Without workers, only "
        "async functions can be stopped.",
    ] = 10.0
    on_failure: Annotated[
        float, "Value that replaces the result of a function that raises or times out. Such failures are counted."
    ] = 0.0


# -- train -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    token_buckets: Annotated[
        tuple[PositiveInt, ...] | None,
        "Microbatch sizes in tokens, with a graph for each. With a `graph.scope` below step, only the largest is used. "
        "null: `microbatch_tokens` (or less, if a minibatch cannot fill it), half of it and a quarter of it.",
    ] = None
    microbatch_tokens: Annotated[
        PositiveInt | None,
        "Largest microbatch in tokens, if `token_buckets` is null. null: 16,384, or less if memory requires it.",
    ] = None
    half_logits: Annotated[
        Literal["auto"] | bool,
        "Compute logits for only half of the tokens of a full microbatch if its completions fit into that half. "
        "This takes one more graph for scoring and for each loss. auto: if completions are at most half of the tokens "
        "at the largest lengths or, for `sft` and `dpo`, in the data.",
    ] = "auto"

    @property
    def largest_bucket(self) -> int | None:
        """The largest microbatch in tokens, or None if it is not configured."""
        return max(self.token_buckets) if self.token_buckets else self.microbatch_tokens


# -- all other sections ----------------------------------------------------------------------------

DEFAULT_MICROBATCH_TOKENS = 16_384  # the largest microbatch, unless it is configured or memory requires less


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    layers: Annotated[Layers, "Number of decoder layers."] = 2
    width: Annotated[Width, "Size of the hidden state."] = 64
    heads: Annotated[Heads, "Number of attention heads."] = 4
    kv_heads: Annotated[Heads, "Number of key/value heads; must divide `heads`."] = 2
    mlp: Annotated[MlpWidth, "Hidden size of the MLP."] = 128
    max_length: Annotated[PositiveInt, "Longest prompt plus completion, in tokens."] = 256


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: Annotated[
        File | None,
        "Folder of a Llama, Mistral, Qwen2 or Qwen3 model, or its id on the Hugging Face Hub: org/name or "
        "org/name@revision. Set either this or `model.tiny`.",
    ] = None
    tiny: Annotated[TinyModelConfig | None, "A small model with random weights, created for this run."] = None
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], "Data type of the weights. auto: as stored."] = "auto"
    checkpointing: Annotated[
        Literal["auto"] | bool | NonNegativeInt,
        "Number of layers whose activations are recomputed in the backward pass. This saves memory and costs time. "
        "true: all layers; auto: as many as memory requires.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    rank: Annotated[Rank, "Rank of each adapter. A higher rank can learn more and takes more memory."] = 32
    alpha: Annotated[PositiveFloat, "Scale: the output of an adapter is multiplied by alpha / rank."] = 32.0
    targets: Annotated[tuple[Target, ...], "Projections that get an adapter, in every layer."] = TARGETS
    dropout: Annotated[
        Beta,
        "Dropout probability for the inputs of adapters in training. Above 0, generation and training differ.",
    ] = 0.0
    rslora: Annotated[
        bool, "Multiply by alpha / sqrt(rank) instead, so that high ranks are not scaled down too much."
    ] = False
    path: Annotated[
        File | None,
        "Start from this adapter: a folder in PEFT's format, or an id on the Hugging Face Hub. Its rank, alpha, "
        "targets and rslora are used. null: start with adapters that add nothing.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    path: Annotated[
        File | None,
        "Folder of a tokenizer, its id on the Hugging Face Hub, or `bytes`. null: `model.path`, or `bytes` for a tiny "
        "model.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: Annotated[
        File,
        "A .jsonl or .parquet file with a column `prompt` or `messages`, or a dataset on the Hugging Face Hub: "
        "org/name, org/name:split or org/name@revision:config/split. Reward functions get all other columns. `sft` "
        "needs `completion` or the assistant's messages. `dpo` needs `chosen` and `rejected`.",
    ]
    validation: Annotated[
        File | None,
        "Validation data in the same format. If a dataset is named without a split, its validation or test split is "
        "used. null: no validation.",
    ] = None
    prompts_per_step: Annotated[
        PositiveInt, "Number of prompts per step, over all ranks. For `sft` and `dpo`, the number of rows."
    ] = 32
    max_prompt_tokens: Annotated[
        PositiveInt | None,
        "Longest prompt in tokens. null: the longest prompt in `data.train` when the run first started, rounded up.",
    ] = None
    max_tokens: Annotated[
        PositiveInt | None,
        "Longest prompt plus completion in tokens, for `sft` and `dpo`. null: limited by the model and the largest "
        "microbatch.",
    ] = None
    too_long: Annotated[
        Literal["error", "drop"], "What to do with rows that are too long. error: stop; drop: skip and count them."
    ] = "error"
    chat: Annotated[
        bool, "Apply the model's chat template to each prompt, and to its completion if the data has one."
    ] = False
    shuffle: Annotated[bool, "Shuffle the data anew in every epoch, with the run's seed."] = True


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    name: Annotated[File, "Import path of the environment: package.module:name or path/file.py:name."]
    options: Annotated[Options, "Keyword arguments for the environment."] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    samples_per_prompt: Annotated[PositiveInt, "Completions per prompt: the group size."] = 16
    max_tokens: Annotated[PositiveInt, "Longest completion in tokens."] = 512
    temperature: Annotated[
        Temperature, "Sampling temperature. Values near 0 overflow, and greedy sampling explores nothing."
    ] = 1.0
    top_k: Annotated[TopK, "Sample from the k most likely tokens. 0: from all tokens."] = 0
    top_p: Annotated[PositiveFraction, "Sample from the most likely tokens that together reach this probability."] = 1.0
    min_p: Annotated[
        Fraction, "Sample from tokens whose probability is at least this fraction of the most likely token's."
    ] = 0.0
    stop: Annotated[tuple[str, ...], "Strings that end a completion."] = ()
    rows: Annotated[PositiveInt, "Number of sequences decoded at the same time."] = 256
    environment: Annotated[
        EnvironmentConfig | None, "Environment for multi-turn rollouts. null: one completion per sample."
    ] = None

    @property
    def filtered(self) -> bool:
        """Whether a filter restricts sampling to some tokens, so that log-probabilities are not the policy's own."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    name: Annotated[File, "A built-in algorithm, package.module:name, or path/file.py:name."] = "grpo"
    options: Annotated[Options, "Options of the algorithm."] = field(default_factory=dict)
    teacher: Annotated[
        File | None,
        "Folder of the teacher model for `distillation`. It scores samples and must have the policy's tokenizer.",
    ] = None
    minibatches: Annotated[PositiveInt, "Optimizer steps per pass over the rollouts."] = 1
    epochs: Annotated[PositiveInt, "Passes over the rollouts of a step."] = 1
    kl_coef: Annotated[
        NonNegativeFloat, "Weight of the KL divergence from the reference policy. 0: no reference policy is needed."
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: Annotated[LearningRate, "Peak learning rate, after warm-up."] = 1e-6
    betas: Annotated[tuple[Beta, Beta], "Decay rates of the first and second moment."] = (0.9, 0.999)
    eps: Annotated[Epsilon, "Constant added to the denominator for numerical stability."] = 1e-8
    weight_decay: Annotated[NonNegativeFloat, "Decoupled weight decay, as in AdamW."] = 0.0
    clip_norm: Annotated[PositiveFloat | None, "Clip gradients to this norm. null: no clipping."] = 1.0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], "Learning rate schedule. linear and cosine end at 0."
    ] = "constant"
    warmup_steps: Annotated[
        NonNegativeInt,
        "Number of optimizer updates in which the learning rate rises from 0. A step can have several updates.",
    ] = 0
    state: Annotated[
        Literal["fp32", "bf16", "int8"],
        "Format of the two moments. fp32: 8 bytes per parameter; bf16: 4 bytes; int8: 2 bytes, with an exponent for "
        "each block of 64. bf16 and int8 use stochastic rounding, which is unbiased. The master weights are always "
        "fp32.",
    ] = "fp32"
    offload: Annotated[
        Literal["auto", "none", "host"],
        "Where moments and master weights stay between updates. none: on the device; host: in pinned host memory, "
        "streamed through the device during an update; auto: on the host if memory requires it. The results are the "
        "same.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    data: Annotated[
        File,
        "A .jsonl or .parquet file, or a dataset on the Hugging Face Hub, with columns `prompt` and `completion`, or "
        "`messages`. `data.chat` applies to it.",
    ]
    steps: Annotated[
        PositiveInt, "Maximum number of supervised training steps. Their loss also uses `rollout.temperature`."
    ] = 100
    lr: Annotated[PositiveLearningRate, "Learning rate of the warm start. It is constant."] = 1e-5
    batch_size: Annotated[PositiveInt, "Sequences per step, over all ranks."] = 32
    stop_at: Annotated[
        float | None, "Stop early when sampled completions reach this mean reward. null: take all steps."
    ] = None
    check_every: Annotated[PositiveInt, "Steps between two checks of the reward, if `stop_at` is set."] = 10


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    impl: Annotated[
        Literal["auto", "none", "cuda", "tape"],
        "Backend for graph capture. auto: cuda on a GPU, otherwise tape; none: run eagerly.",
    ] = "auto"
    scope: Annotated[
        Annotated[tuple[Scope, ...], COMMA_SEPARATED] | None,
        "What one training graph covers. null: step on one rank, layer on several.",
    ] = None
    warmup: Annotated[PositiveInt, "Number of warm-up runs before a capture."] = 2
    on_mismatch: Annotated[
        Literal["raise", "eager", "recapture"], "What to do when a call does not match its graph."
    ] = "raise"
    exact: Annotated[
        Literal["auto", "must", "off"],
        "Whether generation and training agree bit for bit. auto: if it costs little, and the run reports if they do "
        "not; must: always, or the run stops; off: use the library's default GEMMs.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    every: Annotated[PositiveInt, "Steps between two validations."] = 10
    samples: Annotated[PositiveInt, "Completions per prompt: the k of pass@k."] = 1
    temperature: Annotated[NonNegativeFloat, "Sampling temperature. 0: always take the most likely token."] = 0.0
    max_prompts: Annotated[PositiveInt | None, "Use the first prompts of the file, up to this many. null: all."] = 256


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Annotated[
        PositiveInt, "Steps between two checkpoints, also in a warm start. The last step is always saved."
    ] = 50
    keep_last: Annotated[PositiveInt, "How many of the latest regular checkpoints to keep."] = 2
    keep_best: Annotated[
        NonNegativeInt,
        ZeroOrOne,
        "How many of the best checkpoints to keep. The best has the highest validation reward or, without rewards, the "
        "lowest validation loss. A new best is saved at once.",
    ] = 1
    asynchronous: Annotated[bool, "Write checkpoints while training continues."] = True
    peers: Annotated[
        ZeroOrOne,
        "How many other ranks keep a copy of each rank's state in host memory, preferably on another node. It is "
        "updated after every step, so a lost rank costs no step. Needs `cluster.engine: ray`, because torchrun "
        "replaces all processes and so loses their memory.",
    ] = 0
    export_at_end: Annotated[bool, "After the last step, write a model folder that other tools can load."] = True


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    timeout: Annotated[
        PositiveFloat, "Seconds that ranks wait for each other. After that, the run ends and names the lost ranks."
    ] = 600.0
    heartbeat_timeout: Annotated[PositiveFloat, "Seconds without a heartbeat after which a rank counts as lost."] = 60.0
    backend: Annotated[
        Literal["auto", "gloo"],
        "Communication backend. auto: NCCL between GPUs, gloo between CPUs; gloo: also between GPUs, through host "
        "memory, which is slow but lets several ranks share a GPU.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    cache_gib: Annotated[
        PositiveFloat | None,
        "Size of the key/value cache in GiB. null: as much as `rollout.rows` sequences can use, or less if memory "
        "requires it.",
    ] = None
    reference: Annotated[
        Literal["auto", "device", "host"],
        "Where to keep the weights of the reference policy. auto: on the device, or on the host if memory requires it.",
    ] = "auto"
    verify_weights: Annotated[
        bool, "Compare checksums of the policy's weights before and after a swap to other weights."
    ] = False
    logits: Annotated[
        Literal["auto", "whole", "chunks"],
        "How the logits of a microbatch are stored. whole: from forward to backward; chunks: in pieces of 1 GiB that "
        "are computed twice; auto: whole on a GPU if they fit into memory.",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    every: Annotated[PositiveInt, "Steps between two lines of metrics."] = 1
    samples_every: Annotated[
        NonNegativeInt,
        "Write samples every this many steps. Samples of validation are always written. 0: write none at all.",
    ] = 10
    sample_groups: Annotated[
        PositiveInt,
        "Number of groups to write each time: prompts with all their completions, drawn with the seed and the step.",
    ] = 4
    token_values: Annotated[
        NonNegativeInt, "Write per-token values to samples.jsonl for completions up to this many tokens. 0: none."
    ] = 4096
    sinks: Annotated[
        tuple[SinkName, ...] | None, "Where to write metrics. null: jsonl, and tensorboard if it is installed."
    ] = None
    wandb: Annotated[Options, "Arguments of wandb.init."] = field(default_factory=dict)
    mlflow: Annotated[Options, "MLflow settings: tracking_uri, experiment and run_name."] = field(default_factory=dict)
    progress: Annotated[
        Literal["auto", "live", "plain", "none"],
        "Progress display. auto: live in a terminal or a notebook, otherwise plain; plain: one line for each step, and "
        "one every few seconds during set-up.",
    ] = "auto"
    verbose: Annotated[bool, "Show more details, such as how many graphs were replayed."] = False


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: Annotated[NonNegativeInt, "Seed for all random number generators."] = 0
    steps: Annotated[PositiveInt, "Number of steps. Each step samples rollouts and trains on them."] = 100
    output: Annotated[File, "Folder for the run's checkpoints, metrics and samples."] = "runs/default"
    resume: Annotated[
        Literal["auto", "never", "must"],
        "Whether to resume from the output folder. auto: resume if a checkpoint exists; never: stop if one exists; "
        "must: stop if none exists.",
    ] = "auto"
    allow_changes: Annotated[
        Annotated[tuple[str, ...], COMMA_SEPARATED],
        "Keys or sections that may change on resume, such as algorithm or data.train. Otherwise, a change of them is "
        "refused. See docs/run_folder.md.",
    ] = ()
    cpu_threads: Annotated[
        PositiveInt | None, "Number of PyTorch threads on a CPU. 1 is best for tiny models. null: PyTorch decides."
    ] = None
    shard: Annotated[
        Literal["optimizer", "parameters"],
        "What is sharded across ranks. optimizer: gradients and optimizer state, as in ZeRO-2; parameters: parameters "
        "as well, as in FSDP, and each layer is gathered when it is needed.",
    ] = "optimizer"
    tensor_parallel: Annotated[
        PositiveInt, "Size of a tensor parallel group, within a node. 1: no tensor parallelism."
    ] = 1
    model: Annotated[ModelConfig, "The model to train."] = field(default_factory=ModelConfig)
    adapter: Annotated[AdapterConfig | None, "Train only low-rank adapters (LoRA). null: train all weights."] = None
    tokenizer: Annotated[TokenizerConfig, "The tokenizer."] = field(default_factory=TokenizerConfig)
    data: Annotated[DataConfig, "Prompts for training and validation."]
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
    checkpoint: Annotated[CheckpointConfig, "When to write checkpoints and which to keep."] = field(
        default_factory=CheckpointConfig
    )
    ranks: Annotated[RanksConfig, "Communication between ranks."] = field(default_factory=RanksConfig)
    cluster: Annotated[ClusterConfig, "Runs on a Ray cluster; see docs/cluster.md."] = field(
        default_factory=ClusterConfig
    )
    memory: Annotated[
        MemoryConfig, "How device memory is used. Settings that you leave open are chosen: see docs/memory.md."
    ] = field(default_factory=MemoryConfig)
    log: Annotated[LogConfig, "Metrics, samples and progress."] = field(default_factory=LogConfig)

    @property
    def tokenizer_path(self) -> str:
        """The path or hub id of the tokenizer, or `bytes`."""
        return self.tokenizer.path or self.model.path or "bytes"
