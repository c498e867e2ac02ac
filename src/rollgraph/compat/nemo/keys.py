"""NeMo-RL's keys, and the keys here that do the same.

Keys that depend on one another are translated in `sections.py` and `translation.py`. Patterns are shell patterns, and
the first match wins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class To(NamedTuple):
    """Translated to one of rollgraph's keys."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value


class Ignored(NamedTuple):
    reason: str


class Unless(NamedTuple):
    """Unsupported, unless the value is one of these, with which NeMo-RL and rollgraph do the same."""

    values: tuple[Any, ...]
    reason: str


Rule = To | Ignored | Unless
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
ONE_ENGINE = "rollgraph generates with the model that it trains; there is no second engine to set up"
NO_PARALLEL = "rollgraph has data parallelism (shard) and tensor parallelism (tensor_parallel), but not this one"
ADAPTER = "LoRA is the section `adapter`, which you have to write: see docs/lora.md"
NO_EXPERTS = "rollgraph has no mixture-of-experts models"
PACKED = "sequences are always packed, into microbatches of up to train.microbatch_tokens"
SHARDED = "gradients are summed in fp32, optimizer state is sharded, and communication overlaps with compute"
DECODING = "rollout.rows is how many sequences decode at a time"
VALIDATES = "with data.validation, rollgraph always validates before the first step and after the last"
BEST = "the best checkpoints are those with the highest validation reward"
LOGITS = "memory.logits decides whether the logits of a microbatch exist as a whole or in chunks"
PLANNED = "the memory of all phases is planned at the start; `rollgraph plan` shows it"
CONFIG_JSON = "the model's config.json decides"
TABLE: tuple[tuple[str, Rule], ...] = (
    # grpo
    ("grpo.num_prompts_per_step", To("data.prompts_per_step")),
    ("grpo.num_generations_per_prompt", To("rollout.samples_per_prompt")),
    ("grpo.max_num_steps", To("steps")),
    ("grpo.max_num_epochs", Ignored("a run ends after `steps`: lower it if yours ended by epochs")),
    ("grpo.max_rollout_turns", Unless((None, 1), "several turns need an environment: rollout.environment")),
    ("grpo.seed", To("seed")),
    ("grpo.max_val_samples", To("validation.max_prompts")),
    ("grpo.val_batch_size", Ignored(DECODING)),
    ("grpo.val_at_start", Ignored(VALIDATES)),
    ("grpo.val_at_end", Ignored(VALIDATES)),
    ("grpo.overlong_filtering", To("algorithm.options.mask_truncated", bool)),
    ("grpo.use_dynamic_sampling", To("algorithm.options.dynamic_sampling", bool)),
    ("grpo.dynamic_sampling_max_gen_batches", Ignored("dynamic sampling has a fixed limit of rounds per step")),
    ("grpo.batch_multiplier", Unless((None, 1), "a round of dynamic sampling has data.prompts_per_step prompts")),
    ("grpo.async_grpo.enabled", Unless(OFF, "generation and training take turns with one set of weights")),
    ("grpo.async_grpo.*", Ignored("belongs to asynchronous training")),
    ("grpo.reward_scaling.enabled", Unless(OFF, "scale rewards in your own reward function")),
    ("grpo.reward_scaling.*", Ignored("belongs to reward scaling")),
    # loss_fn
    ("loss_fn.reference_policy_kl_penalty", To("algorithm.kl_coef", lambda weight: float(weight or 0))),
    ("loss_fn.reference_policy_kl_type", To("algorithm.options.kl_estimator")),
    ("loss_fn.kl_input_clamp_value", Ignored("k3 limits log-ratios to 20; k1 and k2 do not limit them")),
    ("loss_fn.kl_output_clamp_value", Ignored("KL estimates are not limited")),
    ("loss_fn.ratio_clip_min", To("algorithm.options.clip_low", float)),
    ("loss_fn.ratio_clip_max", To("algorithm.options.clip_high", float)),
    ("loss_fn.ratio_clip_c", To("algorithm.options.dual_clip")),
    ("loss_fn.use_on_policy_kl_approximation", Unless(OFF, "the KL term is not weighted by importance")),
    ("loss_fn.force_on_policy_ratio", Unless(OFF, "with one minibatch and one epoch, the ratio is 1 anyway")),
    # checkpointing
    ("checkpointing.checkpoint_dir", To("output")),
    ("checkpointing.metric_name", Ignored(BEST)),
    ("checkpointing.higher_is_better", Ignored(BEST)),
    ("checkpointing.keep_top_k", To("checkpoint.keep_best")),
    ("checkpointing.checkpoint_must_save_by", Unless(OFF, "a run saves and ends when it gets SIGTERM")),
    ("checkpointing.*", Ignored("a checkpoint is complete, in safetensors, and written while training goes on")),
    # policy
    ("policy.tokenizer.chat_template_kwargs", Unless(OFF, "the chat template gets no arguments: edit the template")),
    ("policy.hf_config_overrides", Unless(OFF, "edit the config.json in the model's folder")),
    ("policy.generation_batch_size", Ignored(DECODING)),
    ("policy.logprob_batch_size", Ignored(PACKED)),
    ("policy.logprob_chunk_size", Ignored(LOGITS)),
    ("policy.offload_optimizer_for_logprob", Ignored(PLANNED)),
    ("policy.make_sequence_length_divisible_by", Ignored("sequences are never split among ranks")),
    ("policy.dynamic_batching.*", Ignored(PACKED)),
    ("policy.sequence_packing.*", Ignored(PACKED)),
    ("policy.reward_model_cfg.enabled", Unless(OFF, "call the reward model in your own reward function")),
    ("policy.draft.enabled", Unless(OFF, "rollgraph has no speculative decoding")),
    # generation
    ("policy.generation.backend", Ignored(ONE_ENGINE)),
    ("policy.generation.temperature", To("rollout.temperature", float)),
    ("policy.generation.top_p", To("rollout.top_p", float)),
    ("policy.generation.top_k", To("rollout.top_k", lambda k: max(0, k or 0))),
    ("policy.generation.stop_strings", To("rollout.stop", lambda words: words or [])),
    ("policy.generation.stop_token_ids", Unless(OFF, "give strings in rollout.stop; the model's end token is known")),
    ("policy.generation.vllm_kwargs", Unless(OFF, ONE_ENGINE)),
    ("policy.generation.vllm_kwargs.*", Ignored(ONE_ENGINE)),
    ("policy.generation.vllm_cfg.*", Ignored(ONE_ENGINE)),
    ("policy.generation.sglang_cfg.*", Ignored(ONE_ENGINE)),
    ("policy.generation.mcore_generation_config.*", Ignored(ONE_ENGINE)),
    ("policy.generation.colocated.enabled", Unless((None, True), ONE_ENGINE)),
    ("policy.generation.colocated.*", Ignored(ONE_ENGINE)),
    # training backends
    ("policy.*_cfg.*parallel_size", Unless((None, 1), NO_PARALLEL)),
    ("policy.*_cfg.sequence_parallel", Unless(OFF, NO_PARALLEL)),
    ("policy.*_cfg.*pipeline*", Ignored(NO_PARALLEL)),
    ("policy.*_cfg.custom_parallel_plan", Unless(OFF, NO_PARALLEL)),
    ("policy.*_cfg.cpu_offload", Unless(OFF, "only the reference weights can be kept on the host: memory.reference")),
    ("policy.*_cfg.lora_cfg.enabled", Unless(OFF, ADAPTER)),
    ("policy.*_cfg.peft.enabled", Unless(OFF, ADAPTER)),
    ("policy.*_cfg.lora_cfg.*", Ignored("belongs to LoRA")),
    ("policy.*_cfg.peft.*", Ignored("belongs to LoRA")),
    ("policy.dtensor_cfg._v2", Ignored("rollgraph has one backend")),
    ("policy.megatron_cfg.converter_type", Ignored(CONFIG_JSON)),
    ("policy.megatron_cfg.megatron_recipe", Unless(OFF, CONFIG_JSON)),
    ("policy.megatron_cfg.fp8_cfg", Unless(OFF, "rollgraph has no FP8")),
    ("policy.megatron_cfg.fp8_cfg.enabled", Unless(OFF, "rollgraph has no FP8")),
    ("policy.megatron_cfg.fp8_cfg.*", Ignored("belongs to FP8")),
    ("policy.megatron_cfg.env_vars", Unless(OFF, "set environment variables when you start the run")),
    ("policy.megatron_cfg.*moe*", Ignored(NO_EXPERTS)),
    ("policy.megatron_cfg.*fusion", Ignored("rollgraph chooses its kernels by the device")),
    ("policy.megatron_cfg.distributed_data_parallel_config.*", Ignored(SHARDED)),
    ("policy.megatron_cfg.empty_unused_memory_level", Ignored(PLANNED)),
    ("policy.megatron_cfg.defer_fp32_logits", Ignored(LOGITS)),
    ("policy.megatron_cfg.optimizer.optimizer_cpu_offload", Unless(OFF, "use optimizer.offload: host")),
    (
        "policy.megatron_cfg.optimizer.*",
        Ignored("the optimizer is AdamW, with sharded state; see optimizer.state"),
    ),
    ("policy.megatron_cfg.scheduler.weight_decay_incr_style", Unless((None, "constant"), "weight decay is constant")),
    ("policy.megatron_cfg.scheduler.*weight_decay*", Ignored("weight decay is constant: optimizer.weight_decay")),
    ("policy.megatron_cfg.scheduler.lr_warmup_init", Ignored("in warm-up, the learning rate rises from 0")),
    ("policy.optimizer.kwargs.*", Ignored("the optimizer is AdamW over flat buffers")),
    # data
    ("data.shuffle", To("data.shuffle", bool)),
    ("data.num_workers", Ignored("prompts are read into memory once")),
    ("data.train.seed", Ignored("belongs to the split of the dataset")),
    # env
    ("env.math.num_workers", To("reward.workers")),
    ("env.math.verifier_type", Unless((None, "math"), "math_verify compares expressions; write a reward function")),
    # logger and cluster
    ("logger.log_dir", Ignored("metrics are written to `output`")),
    ("logger.num_val_samples_to_print", Ignored("samples are written to samples.jsonl: log.sample_groups")),
    ("logger.swanlab_enabled", Unless(OFF, "the sinks are jsonl, tensorboard, wandb and mlflow")),
    ("logger.*", Ignored("belongs to a sink that is off, or that needs no setting")),
    ("cluster.*", Ignored("start a run with torchrun --nproc-per-node N -m rollgraph train FILE")),
)
