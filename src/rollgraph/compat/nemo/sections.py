"""Translates the sections of a NeMo-RL config: policy, loss and optimizer, data and environments."""

from __future__ import annotations

import re
from typing import Any

from rollgraph.compat.graph_keys import GRAPH_KEYS, SCOPE_KEYS, TRACKERS, find_contradictions, read_impl, read_scopes
from rollgraph.compat.nemo.ledger import Ledger, Status
from rollgraph.config import Config, ConfigError, RolloutConfig

# -- policy ----------------------------------------------------------------------------------------

OUR_SCOPES = {"attn": "attn", "mlp": "mlp", "full_iteration": "step"}
EAGER_GENERATION = "policy.generation.vllm_cfg.enforce_eager"


def translate_backend(ledger: Ledger) -> None:
    used_section, unused_section = "dtensor_cfg", "megatron_cfg"
    if ledger.uses_megatron:
        used_section, unused_section = unused_section, used_section
    ledger.ignore(f"policy.{used_section}.enabled", "rollgraph has one backend")
    for key in ledger.keys_below(f"policy.{unused_section}."):
        ledger.ignore(key, f"policy.{used_section} is the backend in use")
    key = f"policy.{used_section}.activation_checkpointing"
    ledger.translate(key, "model.checkpointing", bool(ledger.get(key)))
    _translate_tensor_parallel(ledger, f"policy.{used_section}.tensor_{'model_' * ledger.uses_megatron}parallel_size")


def _translate_tensor_parallel(ledger: Ledger, key: str) -> None:
    size = ledger.positive_int(key) or 1
    gpus_per_node = ledger.positive_int("cluster.gpus_per_node") or 1
    if gpus_per_node % size:
        ledger.refuse(key, f"ranks of a tensor parallel group must be on one node, and each has {gpus_per_node}")
    elif size > 1:
        ledger.translate(key, "tensor_parallel", size)


def translate_model(ledger: Ledger) -> None:
    name = ledger.get("policy.model_name")
    if not isinstance(name, str):
        raise ConfigError([f"{ledger.node('policy.model_name').location}: policy.model_name: required, but missing"])
    ledger.translate("policy.model_name", "model.path", name)
    ledger.to_do.append(f"model.path is a folder: download {name} there, or name the folder you have")
    if ledger.get("policy.precision") in ("bfloat16", "float32"):
        ledger.translate("policy.precision", "model.dtype", ledger.get("policy.precision"))
    ledger.refuse("policy.precision", "weights are bfloat16 or float32")
    tokenizer = ledger.get("policy.tokenizer.name")
    if tokenizer in (None, name):
        ledger.ignore("policy.tokenizer.name", "the default is the model's own tokenizer")
    else:
        ledger.translate("policy.tokenizer.name", "tokenizer.path", tokenizer)
    key = "policy.tokenizer.chat_template"  # null means bare prompts; without the key, the model's template is used
    template = ledger.get(key)
    ledger.set_key("data.chat", key not in ledger.leaves or template is not None)
    if template in (None, "default"):
        ledger.translate(key, "data.chat", template is not None)
    ledger.refuse(key, "rollgraph uses the model's own template: edit it in the tokenizer's folder")


def translate_lengths(ledger: Ledger) -> None:
    total = ledger.positive_int("policy.max_total_sequence_length")
    prompt = "data.max_input_seq_length"
    completion = "policy.generation.max_new_tokens"
    longest_prompt = ledger.positive_int(prompt) or total
    longest_completion = ledger.positive_int(completion) or total
    if longest_prompt is None or longest_completion is None:
        return
    both = longest_prompt + longest_completion
    ledger.set_key("data.max_prompt_tokens", longest_prompt)
    ledger.set_key("data.too_long", "drop")
    ledger.set_key("rollout.max_tokens", longest_completion)
    ledger.translate(prompt, "data.max_prompt_tokens", longest_prompt, "longer prompts are dropped and counted")
    ledger.translate(completion, "rollout.max_tokens", longest_completion)
    reason = f"prompt and completion have separate limits, together {both} tokens"
    ledger.ignore("policy.max_total_sequence_length", reason)
    _translate_microbatches(ledger, total or both, both)


def _translate_microbatches(ledger: Ledger, sequence: int, longest: int) -> None:
    """`sequence` is the length from which NeMo-RL computes microbatches, `longest` the most tokens of a sequence."""
    key = "policy.train_micro_batch_size"
    size = (ledger.positive_int(key) or 1) * sequence
    for section in ("policy.dynamic_batching", "policy.sequence_packing"):
        packed = f"{section}.train_mb_tokens"
        if ledger.get(f"{section}.enabled") and ledger.positive_int(packed):
            key = packed
            size = ledger.positive_int(packed) or 0
    note = ""
    if size < longest:
        size = longest
        note = "the longest sequence has to fit"
    ledger.set_key("train.microbatch_tokens", size)
    ledger.translate(key, "train.microbatch_tokens", size, note)
    ledger.ignore("policy.train_micro_batch_size", "sequences are packed: train.microbatch_tokens")


def translate_graphs(ledger: Ledger) -> None:
    """Translate the implementation and scope of training's graphs. rollgraph's apply to generation too by default."""
    section = f"policy.{'megatron' if ledger.uses_megatron else 'dtensor'}_cfg"
    settings = ledger.get(section)
    model = {}
    if isinstance(settings, dict):
        model = {key: value for key, value in settings.items() if key in (*GRAPH_KEYS, *TRACKERS)}
    conflicts = dict(find_contradictions(model, {}))
    for name in model:
        key = f"{section}.{name}"
        if name in conflicts:
            ledger.refuse(key, conflicts[name])
        elif name in TRACKERS:
            ledger.ignore(key, "every graph registers its generators")
        elif name in SCOPE_KEYS:
            _translate_scope(ledger, key, read_scopes(model), read_impl(model))
        elif name == "cuda_graph_warmup_steps":
            ledger.translate(key, "graph.warmup", ledger.integer(key))
        elif name == "cuda_graph_use_single_mempool":
            ledger.ignore(key, "all graphs of a worker share one pool")
        elif name == "cuda_graph_retain_backward_graph":
            ledger.ignore(key, "each backward runs once")
        else:
            _translate_implementation(ledger, key, model, bool(conflicts))
    if read_impl(model) == "none" and ledger.get(EAGER_GENERATION):
        ledger.translate(EAGER_GENERATION, "graph.impl", "none")


def _translate_implementation(ledger: Ledger, key: str, model: dict[str, Any], has_conflicts: bool) -> None:
    captures = read_impl(model) != "none"
    if captures and has_conflicts:
        ledger.refuse(key, "other graph keys contradict it")
    elif captures:
        ledger.translate(key, "graph.impl", "auto")
    elif ledger.get(EAGER_GENERATION):
        ledger.translate(key, "graph.impl", "none")
    else:
        ledger.ignore(key, "graph.impl covers generation too, which NeMo-RL captures here; none would be eager in both")


def _translate_scope(ledger: Ledger, key: str, names: list[str], impl: str) -> None:
    """Translate the scopes of an implementation. Without any scope, it captures whole layers."""
    if impl == "full_iteration":  # in later versions, full_iteration is an implementation
        names = ["full_iteration"]
    unknown = [name for name in names if name not in OUR_SCOPES]
    our_scopes = [OUR_SCOPES[name] for name in names if name in OUR_SCOPES] or ["layer"]
    if impl == "none":
        ledger.ignore(key, "there is no implementation")
    elif unknown:
        ledger.refuse(key, f"rollgraph has no scope {', '.join(unknown)}; graph.scope is step, layer, attn or mlp")
    elif our_scopes == ["step"] and ledger.ranks > 1:
        ledger.translate(key, "graph.scope", ["layer"], "a graph ends where ranks communicate")
    else:
        ledger.translate(key, "graph.scope", our_scopes)


# -- loss, optimizer and schedule ------------------------------------------------------------------

STYLES = ("constant", "linear", "cosine")
LATER_STAGES = {"": "constant", "ConstantLR": "constant", "CosineAnnealingLR": "cosine"}
SCHEDULES = "optimizer.schedule has a linear warm-up from 0, then is constant or falls to 0 as a cosine"


def translate_algorithm(ledger: Ledger) -> None:
    """The loss decides: gspo has sequence-level ratios, dapo averages over all tokens, grpo over samples."""
    tokens = "loss_fn.token_level_loss"
    sequences = "loss_fn.sequence_level_importance_ratios"
    if ledger.get(sequences):
        name = "gspo"
        ledger.translate(sequences, "algorithm.name", name)
        ledger.ignore(tokens, "gspo averages over samples")
    else:
        name, note = "grpo", "the loss is the mean over samples of each sample's mean"
        if ledger.get(tokens):
            name, note = "dapo", "the loss is the mean over all tokens"
        ledger.set_key("algorithm.name", name)
        ledger.translate(tokens, "algorithm.name", name, note)
        ledger.ignore(sequences, "each token has its own ratio")
    if name == "dapo":
        ledger.set_key("algorithm.options.dynamic_sampling", False)  # dapo's default is true
    _translate_advantages(ledger)
    _translate_correction(ledger)
    _translate_shaping(ledger, name)
    _translate_minibatches(ledger)


def _translate_minibatches(ledger: Ledger) -> None:
    key = "policy.train_global_batch_size"
    size = ledger.positive_int(key)
    prompts = ledger.positive_int("grpo.num_prompts_per_step") or 0
    rollouts = prompts * (ledger.positive_int("grpo.num_generations_per_prompt") or 0)
    if size and rollouts and rollouts % size == 0:
        ledger.translate(key, "algorithm.minibatches", rollouts // size)
    ledger.refuse(key, f"does not divide the {rollouts} samples of a step")


def _translate_advantages(ledger: Ledger) -> None:
    name = "grpo.adv_estimator.name"
    if ledger.get(name) == "grpo":
        ledger.ignore(name, "the algorithm computes its own advantages")
    ledger.refuse(name, "advantages are part of algorithm.name; see docs/algorithms.md")
    for section in ("grpo", "grpo.adv_estimator"):  # earlier versions of NeMo-RL, later ones
        normalized = f"{section}.normalize_rewards"
        leave_one_out = f"{section}.use_leave_one_out_baseline"
        ledger.translate(normalized, "algorithm.options.normalize_std", bool(ledger.get(normalized)))
        if ledger.get(leave_one_out):
            ledger.refuse(leave_one_out, _why_no_leave_one_out(ledger, bool(ledger.get(normalized))))
        ledger.ignore(leave_one_out, "the baseline is the mean of the whole group")


def _why_no_leave_one_out(ledger: Ledger, normalized: bool) -> str:
    """NeMo-RL has the leave-one-out baseline for any loss; in rollgraph, only `rloo` has it, with its own loss."""
    if normalized:
        return "NeMo-RL uses the mean and standard deviation of the other samples, rollgraph those of the whole group"
    samples = ledger.integer("grpo.num_generations_per_prompt") or RolloutConfig.samples_per_prompt
    return (
        f"rollgraph subtracts the mean of the whole group, so advantages are {samples - 1}/{samples} of NeMo-RL's; "
        "rloo subtracts the mean of the others, but sums over the tokens of a sample where this loss takes means"
    )


def _translate_correction(ledger: Ledger) -> None:
    key = "loss_fn.use_importance_sampling_correction"
    cap = "loss_fn.truncated_importance_sampling_ratio"
    limit = ledger.get(cap)
    if ledger.get(key) and isinstance(limit, int | float):
        for name in (key, cap):
            ledger.translate(name, "algorithm.options.importance_cap", float(limit))
    elif ledger.get(key):
        ledger.refuse(key, "the correction needs a limit: algorithm.options.importance_cap")
    ledger.ignore(key, "off")
    ledger.ignore(cap, "there is no correction, or it has no limit")


def _translate_shaping(ledger: Ledger, name: str) -> None:
    section = "grpo.reward_shaping"
    enabled = f"{section}.enabled"
    penalty = f"{section}.overlong_buffer_penalty"
    length = ledger.integer(f"{section}.max_response_length")
    buffer = ledger.integer(f"{section}.overlong_buffer_length")
    if not ledger.get(enabled):
        for key in ledger.keys_below(f"{section}."):
            ledger.ignore(key, "reward shaping is off")
    elif name == "dapo" and length and buffer and ledger.get(penalty) in (None, 1):
        ledger.translate(enabled, "algorithm.options.overlong_buffer", buffer)
        ledger.translate(f"{section}.max_response_length", "algorithm.options.max_tokens", length)
        ledger.translate(f"{section}.overlong_buffer_length", "algorithm.options.overlong_buffer", buffer)
        ledger.ignore(penalty, "dapo's penalty is 1")
    for key in ledger.keys_below(f"{section}."):
        ledger.refuse(key, "only dapo shapes rewards, from 0 to -1; loss_fn.token_level_loss: true selects it")


def translate_optimizer(ledger: Ledger) -> None:
    if ledger.uses_megatron:
        for key in ledger.keys_below("policy.optimizer", "policy.scheduler"):
            ledger.ignore(key, "policy.megatron_cfg is the backend in use")
        _translate_megatron_optimizer(ledger, "policy.megatron_cfg.optimizer")
        _translate_styles(ledger, "policy.megatron_cfg.scheduler")
    else:
        _translate_torch_optimizer(ledger, "policy.optimizer")
        _translate_stages(ledger, "policy.scheduler")


def _translate_megatron_optimizer(ledger: Ledger, section: str) -> None:
    _translate_numbers(ledger, lr=f"{section}.lr", weight_decay=f"{section}.weight_decay", eps=f"{section}.adam_eps")
    beta_keys = (f"{section}.adam_beta1", f"{section}.adam_beta2")
    betas = [ledger.get(key) for key in beta_keys]
    if None not in betas:
        for key in beta_keys:
            ledger.translate(key, "optimizer.betas", betas)
    clip = f"{section}.clip_grad"
    ledger.translate(clip, "optimizer.clip_norm", ledger.get(clip) or None)
    ledger.ignore("policy.max_grad_norm", f"{clip} is what counts")
    _expect_adamw(ledger, f"{section}.optimizer", "adam")


def _translate_torch_optimizer(ledger: Ledger, section: str) -> None:
    arguments = f"{section}.kwargs"
    _translate_numbers(ledger, lr=f"{arguments}.lr", weight_decay=f"{arguments}.weight_decay", eps=f"{arguments}.eps")
    betas = f"{arguments}.betas"
    if ledger.get(betas) is not None:
        ledger.translate(betas, "optimizer.betas", ledger.get(betas))
    clip = "policy.max_grad_norm"
    ledger.translate(clip, "optimizer.clip_norm", ledger.get(clip) or None)
    _expect_adamw(ledger, f"{section}.name", "torch.optim.AdamW")


def _translate_numbers(ledger: Ledger, **keys: str) -> None:
    for name, key in keys.items():
        if ledger.get(key) is not None:
            ledger.translate(key, f"optimizer.{name}", ledger.get(key))


def _expect_adamw(ledger: Ledger, key: str, expected: str) -> None:
    if ledger.get(key) == expected:
        ledger.ignore(key, "the optimizer is always AdamW")
    ledger.refuse(key, "the optimizer is always AdamW")


def _translate_styles(ledger: Ledger, section: str) -> None:
    """Megatron's schedule: a style, and the length of the warm-up."""
    style = ledger.get(f"{section}.lr_decay_style")
    if style in STYLES:
        ledger.translate(f"{section}.lr_decay_style", "optimizer.schedule", style)
    ledger.refuse(f"{section}.lr_decay_style", f"the schedules are {', '.join(STYLES)}")
    warmup = f"{section}.lr_warmup_iters"
    ledger.translate(warmup, "optimizer.warmup_steps", ledger.integer(warmup) or 0)
    ledger.ignore(f"{section}.lr_decay_iters", "the learning rate decays over all of `steps`, if at all")
    lowest = "policy.megatron_cfg.optimizer.min_lr"
    if style == "constant":
        ledger.ignore(lowest, "the learning rate is constant")
    elif not ledger.get(lowest):
        ledger.ignore(lowest, "the learning rate ends at 0")
    ledger.refuse(lowest, "the learning rate ends at 0")


def _translate_stages(ledger: Ledger, key: str) -> None:
    """PyTorch's schedule: LinearLR as a warm-up, then ConstantLR or CosineAnnealingLR."""
    stages = ledger.get(key)
    if not stages:
        ledger.ignore(key, "no scheduler: the learning rate is constant")
        return
    named_stages = [stage for stage in _as_list(stages) if isinstance(stage, dict) and "name" in stage]
    warmup: dict[str, Any] = {"total_iters": 0}
    if named_stages and _class_name(named_stages[0]) == "LinearLR":
        warmup = _arguments(named_stages.pop(0))
    schedule = LATER_STAGES.get("+".join(map(_class_name, named_stages)))
    steps = warmup.get("total_iters")
    if schedule is None or type(steps) is not int or steps < 0:
        ledger.refuse(key, SCHEDULES)
        return
    later_arguments = _arguments(named_stages[0]) if named_stages else {}
    full_rate = warmup.get("end_factor", 1) == 1
    if schedule == "constant" and named_stages:
        full_rate = full_rate and later_arguments.get("factor", 1 / 3) == 1
    if not full_rate:
        ledger.refuse(key, f"{SCHEDULES}; LinearLR has to end, and ConstantLR to stay, at a factor of 1")
        return
    note = "from 0"
    if later_arguments.get("eta_min"):
        note = "from 0; the cosine ends at 0, not at eta_min"
    ledger.set_key("optimizer.schedule", schedule)
    ledger.set_key("optimizer.warmup_steps", steps)
    text = f"optimizer.schedule: {schedule}, optimizer.warmup_steps: {steps} ({note})"
    ledger.add_line(Status.TRANSLATED, key, text)


def _as_list(stages: Any) -> list[Any]:
    return stages if isinstance(stages, list) else [stages]


def _class_name(stage: dict[str, Any]) -> str:
    return str(stage["name"]).rpartition(".")[2]


def _arguments(stage: dict[str, Any]) -> dict[str, Any]:
    arguments = stage.get("kwargs")
    return arguments if isinstance(arguments, dict) else {}


# -- data and rewards ------------------------------------------------------------------------------

FILE_IS_PREPARED = "the file holds finished prompts, and `reward` names the reward functions"
OTHER_SCORES = (
    "math_verify compares expressions anywhere in a completion, as hf_math_verify does: its rewards are higher than "
    "those of dapo_math_verify, which compares the text after `Answer:`"
)
SETTINGS = ("processor", "env_name", "task_name", "input_key", "split", "train_split", "val_split", "subset", "seed")
PROMPT_FILES = ("prompt_file", "system_prompt_file")


def translate_data(ledger: Ledger) -> None:
    train_names = ("data.train.dataset_name", "data.dataset_name", "data.default.dataset_name")
    _translate_dataset(ledger, "train", ("data.train.data_path", "data.train_data_path"), train_names)
    validation_names = ("data.validation.dataset_name",)
    _translate_dataset(ledger, "validation", ("data.validation.data_path", "data.val_data_path"), validation_names)
    if "train" not in ledger.settings["data"]:
        ledger.set_key("data.train", "data/train.jsonl")
        ledger.to_do.append("data.train is a .jsonl or .parquet file with a column `prompt`")
    _translate_validation(ledger)
    for key in ledger.keys_below("data."):
        name = key.rpartition(".")[2]
        if name in PROMPT_FILES and ledger.get(key) is not None:
            ledger.refuse(key, "put it into the column `prompt`, or into `messages`")
        elif name == "input_key" and ledger.get(key) != "prompt":
            ledger.refuse(key, "the column must be called `prompt`: rename it in the file")
        elif name == "split_validation_size" and ledger.get(key):
            ledger.refuse(
                key, "split the file with rollgraph.rl.data.prompts.split, and name the second part data.validation"
            )
        elif name in (*SETTINGS, *PROMPT_FILES, "split_validation_size"):
            ledger.ignore(key, FILE_IS_PREPARED)


def _translate_validation(ledger: Ledger) -> None:
    """NeMo-RL validates every `val_period` steps and, optionally, at the start and the end. rollgraph always validates
    before the first step and after the last, if there is a validation file."""
    key = "grpo.val_period"
    period = ledger.integer(key) or 0
    at_start_or_end = ledger.get("grpo.val_at_start") or ledger.get("grpo.val_at_end")
    if period > 0:
        ledger.translate(key, "validation.every", period)
    elif at_start_or_end and ledger.settings["data"].get("validation") is not None:
        steps = ledger.positive_int("grpo.max_num_steps") or Config.steps
        ledger.translate(key, "validation.every", steps, "only before the first step and after the last")
    else:
        ledger.translate(key, "data.validation", None, "no validation")


def _translate_dataset(ledger: Ledger, part: str, paths: tuple[str, ...], names: tuple[str, ...]) -> None:
    our_key = f"data.{part}"
    dataset = ledger.get(our_key)
    for key in paths:
        if isinstance(ledger.get(key), str):
            ledger.translate(key, our_key, ledger.get(key))
        elif ledger.get(key) is not None:
            ledger.refuse(key, "expected the path of a file")
    for key in names:
        if part in ledger.settings["data"] or ledger.get(key) is None:
            ledger.ignore(key, "the file counts, not the name")
            continue
        file = f"data/{_file_name(ledger.get(key))}.jsonl"
        ledger.translate(key, our_key, file)
        ledger.to_do.append(f"{our_key}: write {ledger.get(key)} to {file}, with columns `prompt` and `answer`")
    if isinstance(dataset, list):
        ledger.refuse(our_key, "rollgraph reads one file: concatenate the datasets")
    elif part == "validation" and dataset is None:
        ledger.translate(our_key, our_key, None, "no validation")


def _file_name(dataset: object) -> str:
    return re.sub(r"[^\w.-]+", "_", str(dataset))


def translate_rewards(ledger: Ledger) -> None:
    """The environment `math` becomes the reward math_verify on the answer column; others need a reward function."""
    keys = [key for key in ledger.keys_below("data.") if key.endswith(".output_key")]
    used_environments = {str(ledger.get(key)) for key in ledger.keys_below("data.") if key.endswith("env_name")}
    if not used_environments:
        used_environments = {key.split(".")[1] for key in ledger.keys_below("env.")}
    if used_environments <= {"math"}:
        _translate_math(ledger, keys)
    else:
        ledger.set_key("reward.functions", [{"name": "rewards.py:reward"}])
        words = ", ".join(sorted(used_environments))
        ledger.to_do.append(f"reward.functions: write rewards.py:reward for {words}; see docs/rewards.md")
        for key in keys:
            ledger.ignore(key, "a reward function gets every column of the file")
    for key in ledger.keys_below("env."):
        name = key.split(".")[1]
        if name not in used_environments:
            ledger.ignore(key, "no dataset uses it")
        elif name != "math":
            ledger.refuse(key, "write a reward function, or give rollout.environment")


def _translate_math(ledger: Ledger, column_keys: list[str]) -> None:
    columns = [ledger.get(key) for key in column_keys if isinstance(ledger.get(key), str)]
    column = columns[0] if columns else "answer"
    functions = [{"name": "math_verify", "options": {"column": column}}]
    ledger.set_key("reward.functions", functions)
    for key in column_keys:
        ledger.translate(key, "reward.functions", functions)
    key = "env.math.math_verify_impl"
    if ledger.get(key) in (None, "hf_math_verify"):
        ledger.translate(key, "reward.functions", functions, "pip install 'rollgraph[math]'")
    elif key in ledger.leaves:
        ledger.refuse(key, OTHER_SCORES)
        ledger.to_do.append(f"reward.functions: {OTHER_SCORES}; to score as {ledger.get(key)}, write a function")
