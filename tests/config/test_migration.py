"""Names of other frameworks get the answers of the migration pages, from Python and from YAML, and never a guess."""

from __future__ import annotations

import re

import pytest

from rollgraph import Trainer
from rollgraph.config import ConfigError, list_keys, parse_config
from rollgraph.config.loading import argument_key, argument_name
from rollgraph.config.names import counterpart_of_algorithm, option_keys
from rollgraph.rl.algorithms import ALGORITHMS
from tools.migration_table import PAGES, TABLE, make_table, rows_of

SMALL = "model: {tiny: {}}\ndata: {train: train.jsonl}\nrollout: {max_tokens: 32}\nreward: {functions: [{name: f}]}\n"
ROWS = [row for page in PAGES for row in rows_of(page)]

# The fields of GRPOConfig and its bases: TRL 1.16 with transformers 5.23, which has added `activation_checkpointing`
# and `activation_checkpointing_kwargs` to the 189 fields of 5.22.
GRPO_CONFIG = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm
    label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha
    torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps logging_first_step
    log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica
    disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
    save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
    parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
    local_rank model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32
    num_generations num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset
    pad_to_multiple_of generation_batch_size steps_per_generation temperature top_p top_k min_p
    generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode
    vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
    vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high sapo_temperature_neg
    sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level
    reward_weights multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model
    ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy
    entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions
    log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
    use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
    vllm_importance_sampling_cap
"""
FIELDS = GRPO_CONFIG.split()

SAME = {  # fields that are arguments of ours, with the same meaning
    "min_p": "rollout.min_p",
    "seed": "seed",
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}


def problem_of_argument(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Trainer("org/model", **{name: 1})
    (problem,) = caught.value.problems
    return str(problem)


def problem_of_key(key: str) -> str:
    """The problem of a key; those of the sections around it come before."""
    with pytest.raises(ConfigError) as caught:
        parse_config(SMALL, [f"{key}=1"])
    return str(caught.value.problems[-1])


def test_the_table_matches_the_pages() -> None:
    assert TABLE.read_text(encoding="utf-8") == make_table(), "run python tools/migration_table.py"


def test_the_page_has_each_field_of_trl_once() -> None:
    on_page = [name for framework, name, _, _ in ROWS if framework == "GRPOConfig"]
    assert len(set(FIELDS)) == len(FIELDS) == 191
    assert sorted(on_page) == sorted(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_trl_gets_the_answer_of_the_page(field: str) -> None:
    ((_, _, ours, remark),) = [row for row in ROWS if row[:2] == ("GRPOConfig", field)]
    keys = ours.split()
    if field in SAME:
        assert keys == [SAME[field]] == [argument_key(field)]
        assert parse_config(SMALL, [f"{SAME[field]}=1"])
        return
    in_python = problem_of_argument(field)
    assert in_python.startswith(f"argument {field}: there is no such key; GRPOConfig's {field} is ")
    assert all(part in in_python for part in (*map(argument_name, keys), remark))
    for section in ("", "algorithm.", "rollout.", "args."):
        in_yaml = problem_of_key(section + field)
        assert f": {section}{field}: unknown key; GRPOConfig's {field} is " in in_yaml
        assert all(part in in_yaml for part in (*keys, remark))
        assert "did you mean" not in in_python + in_yaml


@pytest.mark.parametrize(("field", "key"), SAME.items())
def test_a_name_of_ours_in_the_wrong_section_leads_to_the_right_one(field: str, key: str) -> None:
    assert f"reward.{field}: unknown key; did you mean {key}?" in problem_of_key(f"reward.{field}")


@pytest.mark.parametrize(
    ("field", "key", "argument"),
    [
        ("beta", "algorithm.kl_coef", "kl_coef"),
        ("learning_rate", "optimizer.lr", "lr"),
        ("max_completion_length", "rollout.max_tokens", "max_tokens"),
        ("num_generations", "rollout.samples_per_prompt", "samples_per_prompt"),
        ("report_to", "log.sinks", "log_sinks"),
        ("loss_type", "algorithm.name", "algorithm"),
        ("reward_weights", "reward.functions[].weight", "rewards"),
        ("save_steps", "checkpoint.every", "checkpoint_every"),
        ("delta", "algorithm.options.dual_clip", 'algorithm_options={"dual_clip": ...}'),
    ],
)
def test_an_answer_names_the_key_in_yaml_and_the_argument_in_python(field: str, key: str, argument: str) -> None:
    assert f" is {key} here" in problem_of_key(field)
    assert f" is {argument} here" in problem_of_argument(field)


def test_every_argument_in_an_answer_exists() -> None:
    for key in {key for framework, _, ours, _ in ROWS if framework != "algorithm" for key in ours.split()}:
        argument = argument_name(key)
        assert argument in ("algorithm", "model", "rewards", "tokenizer", "train", "validation") or (
            argument.startswith("algorithm_options=") or argument_key(argument) == key
        )


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("algorithm.beta", "algorithm.beta: unknown key; GRPOConfig's beta is algorithm.kl_coef here"),
        ("epsilon", "GRPOConfig's epsilon is algorithm.options.clip_low and algorithm.options.clip_high here"),
        ("actor_rollout_ref.rollout.n", "is rollout.samples_per_prompt here"),
        ("rollout.n", "rollout.n: unknown key; verl's actor_rollout_ref.rollout.n is rollout.samples_per_prompt here"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "is validation.temperature here"),
        (
            "actor_rollout_ref.actor.fsdp_config.param_offload",
            "verl's actor_rollout_ref.actor.fsdp_config is automatic",
        ),
        ("actor_rollout_ref.model.unheard_of", "verl's actor_rollout_ref is not a section here"),
        ("algorithm.kl_ctrl.kl_coef", "verl's algorithm.kl_ctrl.kl_coef is algorithm.kl_coef here"),
        ("algorithm.adv_estimator", "verl's algorithm.adv_estimator is algorithm.name here"),
        ("data.train_batch_size", "verl's data.train_batch_size is data.prompts_per_step here"),
        ("trainer.total_epochs", "verl's trainer.total_epochs is steps here"),
        ("grpo.num_prompts_per_step", "NeMo-RL's grpo.num_prompts_per_step is data.prompts_per_step here"),
        ("policy.unheard_of", "NeMo-RL's policy is not a section here: rollgraph config import translates"),
        ("policy.generation_batch_size", "NeMo-RL's policy is not a section here"),  # GRPOConfig's means another
        ("loss_fn.ratio_clip_max", "NeMo-RL's loss_fn.ratio_clip_max is algorithm.options.clip_high here"),
        ("adapter.r", "Hugging Face's r is adapter.rank here"),
        ("callbacks", "GRPOTrainer's callbacks is callbacks=[f] of rollgraph.Trainer"),
        ("algorithm.clip_low", "did you mean algorithm.options.clip_low?"),  # a name of ours in the wrong section
        ("rollout.steps", "did you mean steps?"),
        ("rolout.temperature", "rolout: unknown key; did you mean rollout?"),
    ],
)
def test_a_key_of_another_framework_is_answered_in_its_section(key: str, answer: str) -> None:
    assert answer in problem_of_key(key)


def test_no_name_of_the_pages_gets_a_spelling_guess() -> None:
    ours = {key.name for key in list_keys()}
    for name in {name for framework, name, _, _ in ROWS if framework != "algorithm"} - ours:
        same_name = name.rpartition(".")[2]
        answer = rf"'s {name} is |did you mean ([a-z_]+\.)*{same_name}\?"
        assert re.search(answer, problem_of_key(name)), problem_of_key(name)


def test_each_key_in_a_section_of_another_framework_is_answered() -> None:
    text = "actor_rollout_ref:\n  rollout:\n    n: 8\n    name: vllm\n  unheard_of: 1\n"
    with pytest.raises(ConfigError) as caught:
        parse_config(SMALL + text, name="run.yaml")
    assert [str(problem).partition(": unknown key")[0] for problem in caught.value.problems] == [
        "run.yaml:5: actor_rollout_ref",
        "run.yaml:7: actor_rollout_ref.rollout.n",
        "run.yaml:8: actor_rollout_ref.rollout.name",
    ]


def test_a_script_of_trl_is_answered_argument_by_argument() -> None:
    arguments = {"reward_funcs": [len], "args": object(), "train_dataset": [{"prompt": "?"}], "peft_config": object()}
    with pytest.raises(ConfigError) as caught:
        Trainer("org/model", **arguments)
    beginnings = [str(problem).partition(" (")[0] for problem in caught.value.problems]
    assert beginnings == [
        "argument reward_funcs: there is no such key; GRPOTrainer's reward_funcs is rewards here",
        "argument args: there is no such key; GRPOTrainer's args is not an object here: each of its fields is an "
        "argument",
        "argument train_dataset: there is no such key; GRPOTrainer's train_dataset is train here",
        "argument peft_config: there is no such key; GRPOTrainer's peft_config is adapter here",
    ]


def test_names_of_algorithms_elsewhere_are_answered() -> None:
    rows = [(name, ours.split()) for framework, name, ours, _ in ROWS if framework == "algorithm"]
    assert {name for name, _ in rows} & ALGORITHMS.keys() == set()
    assert {ours for _, names in rows for ours in names} <= ALGORITHMS.keys()
    assert str(counterpart_of_algorithm("PPO")).startswith("algorithm's ppo is not supported: it needs a critic")
    assert counterpart_of_algorithm("grop") is None


def test_option_keys_include_the_options_of_algorithms() -> None:
    assert {"algorithm.options.clip_low", "algorithm.options.dynamic_sampling"} <= set(option_keys())
