"""What becomes of each key of a NeMo-RL GRPO config that can be looked at by itself.

Owns the table and nothing else; keys that depend on one another are translated in `policy.py`, `learning.py` and
`prompts.py`. Patterns are as in a shell, and the first that fits wins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class To(NamedTuple):
    """Becomes a key of ours."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value


class Ignored(NamedTuple):
    reason: str


class Unless(NamedTuple):
    """Ignored if the value is one of these, which ask for nothing; otherwise not supported."""

    values: tuple[Any, ...]
    reason: str


Rule = To | Ignored | Unless
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})

ONE_ENGINE = "generation and training are one model here; there is no second engine to set up"
NO_PARALLEL = "models are replicated and optimizer state is sharded; there is no such parallelism"
NO_EXPERTS = "there are no mixtures of experts here"
PACKED = "sequences are always packed, into microbatches of up to train.microbatch_tokens"
OVERLAP = "gradients and parameters are always sharded and overlapped"

TABLE: tuple[tuple[str, Rule], ...] = (
    # grpo
    ("grpo.num_prompts_per_step", To("data.prompts_per_step")),
    ("grpo.num_generations_per_prompt", To("rollout.samples_per_prompt")),
    ("grpo.max_num_steps", To("steps")),
    ("grpo.max_num_epochs", Ignored("a run ends after `steps`: lower that if theirs ended by epochs")),
    ("grpo.max_rollout_turns", Unless((None, 1), "several turns are an environment: rollout.environment")),
    ("grpo.seed", To("seed")),
    ("grpo.max_val_samples", To("validation.max_prompts")),
    ("grpo.val_batch_size", Ignored("rollout.rows says how many sequences decode at a time")),
    ("grpo.val_at_start", Unless(OFF, "validation comes every validation.every steps")),
    ("grpo.val_at_end", Unless(OFF, "validation comes every validation.every steps")),
    ("grpo.overlong_filtering", To("algorithm.options.mask_truncated", bool)),
    ("grpo.use_dynamic_sampling", To("algorithm.options.dynamic_sampling", bool)),
    ("grpo.dynamic_sampling_max_gen_batches", Ignored("dynamic sampling has a fixed limit of rounds here")),
    ("grpo.batch_multiplier", Unless((None, 1), "a round of dynamic sampling has data.prompts_per_step prompts")),
    ("grpo.async_grpo.enabled", Unless(OFF, "generation and training take turns with one set of weights")),
    ("grpo.async_grpo.*", Ignored("of asynchronous training")),
    ("grpo.reward_scaling.enabled", Unless(OFF, "scale in a reward function of your own")),
    ("grpo.reward_scaling.*", Ignored("of reward scaling")),
    # loss_fn
    ("loss_fn.reference_policy_kl_penalty", To("algorithm.kl_coef", lambda weight: float(weight or 0))),
    ("loss_fn.reference_policy_kl_type", To("algorithm.options.kl_estimator")),
    ("loss_fn.kl_*_clamp_value", Ignored("log-ratios are limited to 20 here")),
    ("loss_fn.ratio_clip_min", To("algorithm.options.clip_low", float)),
    ("loss_fn.ratio_clip_max", To("algorithm.options.clip_high", float)),
    ("loss_fn.ratio_clip_c", To("algorithm.options.dual_clip")),
    ("loss_fn.use_on_policy_kl_approximation", Unless(OFF, "there is no such term here")),
    ("loss_fn.force_on_policy_ratio", Unless(OFF, "the ratio is 1 by itself with one minibatch and one epoch")),
    # checkpointing
    ("checkpointing.checkpoint_dir", To("output")),
    ("checkpointing.metric_name", Ignored("the best are by validation reward")),
    ("checkpointing.higher_is_better", Ignored("the best are by validation reward")),
    ("checkpointing.keep_top_k", To("checkpoint.keep_best")),
    ("checkpointing.checkpoint_must_save_by", Unless(OFF, "asked to stop, a run saves and ends")),
    ("checkpointing.*", Ignored("a checkpoint is safetensors, whole, and written while training goes on")),
    # policy
    (
        "policy.tokenizer.chat_template_kwargs",
        Unless(OFF, "the template gets no arguments: put them into the template"),
    ),
    ("policy.hf_config_overrides", Unless(OFF, "edit the config.json of the model's folder")),
    ("policy.generation_batch_size", Ignored("rollout.rows says how many sequences decode at a time")),
    ("policy.logprob_batch_size", Ignored(PACKED)),
    ("policy.logprob_chunk_size", Ignored("log-probabilities never take the whole logits")),
    ("policy.offload_optimizer_for_logprob", Ignored("the memory of all phases is planned: rollgraph plan")),
    ("policy.make_sequence_length_divisible_by", Ignored(NO_PARALLEL)),
    ("policy.dynamic_batching.*", Ignored(PACKED)),
    ("policy.sequence_packing.*", Ignored(PACKED)),
    ("policy.reward_model_cfg.enabled", Unless(OFF, "a reward model is a reward function of your own")),
    ("policy.draft.enabled", Unless(OFF, "there is no speculative decoding here")),
    # generation
    ("policy.generation.backend", Ignored(ONE_ENGINE)),
    ("policy.generation.temperature", To("rollout.temperature", float)),
    ("policy.generation.top_p", To("rollout.top_p", float)),
    ("policy.generation.top_k", To("rollout.top_k", lambda k: max(0, k or 0))),
    ("policy.generation.stop_strings", To("rollout.stop", lambda words: words or [])),
    ("policy.generation.stop_token_ids", Unless(OFF, "give the strings: rollout.stop; the model's own ends are known")),
    ("policy.generation.vllm_kwargs", Unless(OFF, ONE_ENGINE)),
    ("policy.generation.vllm_kwargs.*", Ignored(ONE_ENGINE)),
    ("policy.generation.vllm_cfg.*", Ignored(ONE_ENGINE)),
    ("policy.generation.sglang_cfg.*", Ignored(ONE_ENGINE)),
    ("policy.generation.mcore_generation_config.*", Ignored(ONE_ENGINE)),
    ("policy.generation.colocated.enabled", Unless((None, True), ONE_ENGINE)),
    ("policy.generation.colocated.*", Ignored(ONE_ENGINE)),
    # its backends
    ("policy.*_cfg.*parallel_size", Unless((None, 1), NO_PARALLEL)),
    ("policy.*_cfg.sequence_parallel", Unless(OFF, NO_PARALLEL)),
    ("policy.*_cfg.*pipeline*", Ignored(NO_PARALLEL)),
    ("policy.*_cfg.custom_parallel_plan", Unless(OFF, NO_PARALLEL)),
    ("policy.*_cfg.cpu_offload", Unless(OFF, "only the reference weights can wait on the host: memory.reference")),
    ("policy.*_cfg.lora_cfg.enabled", Unless(OFF, "all weights are trained")),
    ("policy.*_cfg.peft.enabled", Unless(OFF, "all weights are trained")),
    ("policy.*_cfg.lora_cfg.*", Ignored("of LoRA")),
    ("policy.*_cfg.peft.*", Ignored("of LoRA")),
    ("policy.dtensor_cfg._v2", Ignored("there is one backend here")),
    ("policy.megatron_cfg.converter_type", Ignored("the model's config.json says what it is")),
    ("policy.megatron_cfg.megatron_recipe", Unless(OFF, "the model's config.json says what it is")),
    ("policy.megatron_cfg.fp8_cfg", Unless(OFF, "there is no FP8 here")),
    ("policy.megatron_cfg.fp8_cfg.enabled", Unless(OFF, "there is no FP8 here")),
    ("policy.megatron_cfg.fp8_cfg.*", Ignored("of FP8")),
    ("policy.megatron_cfg.env_vars", Unless(OFF, "set them when you start the run")),
    ("policy.megatron_cfg.*moe*", Ignored(NO_EXPERTS)),
    ("policy.megatron_cfg.*fusion", Ignored("kernels are chosen by what is installed")),
    ("policy.megatron_cfg.distributed_data_parallel_config.*", Ignored(OVERLAP)),
    ("policy.megatron_cfg.empty_unused_memory_level", Ignored("the memory of all phases is planned: rollgraph plan")),
    ("policy.megatron_cfg.defer_fp32_logits", Ignored("log-probabilities never take the whole logits")),
    ("policy.megatron_cfg.optimizer.optimizer_cpu_offload", Unless(OFF, "optimizer state stays on the device")),
    ("policy.megatron_cfg.optimizer.*", Ignored("AdamW in fp32 with its state sharded; nothing to choose")),
    ("policy.megatron_cfg.scheduler.*weight_decay*", Ignored("weight decay is constant here")),
    ("policy.megatron_cfg.scheduler.lr_warmup_init", Ignored("the learning rate rises from 0")),
    ("policy.optimizer.kwargs.*", Ignored("AdamW over flat buffers; nothing to choose")),
    # data
    ("data.shuffle", To("data.shuffle", bool)),
    ("data.num_workers", Ignored("prompts are read into memory once")),
    ("data.train.seed", Ignored("of the split")),
    # env
    ("env.math.num_workers", To("reward.workers")),
    ("env.math.verifier_type", Unless((None, "math"), "math_verify compares expressions; write a reward function")),
    # logger and cluster
    ("logger.log_dir", Ignored("metrics are in `output`")),
    ("logger.num_val_samples_to_print", Ignored("samples are in samples.jsonl: log.samples_every")),
    ("logger.swanlab_enabled", Unless(OFF, "sinks are jsonl, tensorboard, wandb and mlflow")),
    ("logger.*", Ignored("of a sink that is off, or that needs no setting here")),
    ("cluster.*", Ignored("a run is started by torchrun --nproc-per-node N -m rollgraph train FILE")),
)
