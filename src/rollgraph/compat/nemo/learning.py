"""Translates the loss, advantages, optimizer and schedule into rollgraph's algorithm and optimizer."""

from __future__ import annotations

from typing import Any

from rollgraph.compat.nemo.ledger import Ledger, Status
from rollgraph.config import RolloutConfig

STYLES = ("constant", "linear", "cosine")
LATER_STAGES = {"": "constant", "ConstantLR": "constant", "CosineAnnealingLR": "cosine"}
SCHEDULES = "optimizer.schedule has a linear warm-up from 0, then is constant or falls to 0 as a cosine"


def translate_algorithm(book: Ledger) -> None:
    """The average in the loss decides: over all tokens, dapo; over samples, grpo; with sequence-level ratios, gspo."""
    tokens = "loss_fn.token_level_loss"
    sequences = "loss_fn.sequence_level_importance_ratios"
    if book.get(sequences):
        name = "gspo"
        book.translate(sequences, "algorithm.name", name)
        book.ignore(tokens, "gspo averages over samples")
    else:
        name, note = "grpo", "the loss is the mean over samples of each sample's mean"
        if book.get(tokens):
            name, note = "dapo", "the loss is the mean over all tokens"
        book.put("algorithm.name", name)
        book.translate(tokens, "algorithm.name", name, note)
        book.ignore(sequences, "each token has its own ratio")
    if name == "dapo":
        book.put("algorithm.options.dynamic_sampling", False)  # dapo's default is true
    _translate_advantages(book)
    _translate_correction(book)
    _translate_shaping(book, name)
    _translate_minibatches(book)


def _translate_minibatches(book: Ledger) -> None:
    key = "policy.train_global_batch_size"
    size = book.count(key)
    prompts = book.count("grpo.num_prompts_per_step") or 0
    rollouts = prompts * (book.count("grpo.num_generations_per_prompt") or 0)
    if size and rollouts and rollouts % size == 0:
        book.translate(key, "algorithm.minibatches", rollouts // size)
    book.refuse(key, f"does not divide the {rollouts} samples of a step")


def _translate_advantages(book: Ledger) -> None:
    name = "grpo.adv_estimator.name"
    if book.get(name) == "grpo":
        book.ignore(name, "the algorithm computes its own advantages")
    book.refuse(name, "advantages are part of algorithm.name; see docs/algorithms.md")
    for section in ("grpo", "grpo.adv_estimator"):  # earlier versions of NeMo-RL, later ones
        normalized = f"{section}.normalize_rewards"
        others = f"{section}.use_leave_one_out_baseline"
        book.translate(normalized, "algorithm.options.normalize_std", bool(book.get(normalized)))
        if book.get(others):
            book.refuse(others, _why_no_leave_one_out(book, bool(book.get(normalized))))
        book.ignore(others, "the baseline is the mean of the whole group")


def _why_no_leave_one_out(book: Ledger, normalized: bool) -> str:
    """NeMo-RL changes the advantage of any loss; rollgraph's `rloo` is an advantage with a loss of its own."""
    if normalized:
        return "NeMo-RL uses the mean and standard deviation of the other samples, rollgraph those of the whole group"
    samples = book.number("grpo.num_generations_per_prompt") or RolloutConfig.samples_per_prompt
    return (
        f"rollgraph subtracts the mean of the whole group, so advantages are {samples - 1}/{samples} of NeMo-RL's; "
        "rloo subtracts the mean of the others, but sums over the tokens of a sample where this loss takes means"
    )


def _translate_correction(book: Ledger) -> None:
    key = "loss_fn.use_importance_sampling_correction"
    cap = "loss_fn.truncated_importance_sampling_ratio"
    limit = book.get(cap)
    if book.get(key) and isinstance(limit, int | float):
        for name in (key, cap):
            book.translate(name, "algorithm.options.importance_cap", float(limit))
    elif book.get(key):
        book.refuse(key, "the correction needs a limit: algorithm.options.importance_cap")
    book.ignore(key, "off")
    book.ignore(cap, "there is no correction, or it has no limit")


def _translate_shaping(book: Ledger, name: str) -> None:
    section = "grpo.reward_shaping"
    on = f"{section}.enabled"
    penalty = f"{section}.overlong_buffer_penalty"
    length = book.number(f"{section}.max_response_length")
    buffer = book.number(f"{section}.overlong_buffer_length")
    if not book.get(on):
        for key in book.below(f"{section}."):
            book.ignore(key, "reward shaping is off")
    elif name == "dapo" and length and buffer and book.get(penalty) in (None, 1):
        book.translate(on, "algorithm.options.overlong_buffer", buffer)
        book.translate(f"{section}.max_response_length", "algorithm.options.max_tokens", length)
        book.translate(f"{section}.overlong_buffer_length", "algorithm.options.overlong_buffer", buffer)
        book.ignore(penalty, "dapo's penalty is 1")
    for key in book.below(f"{section}."):
        book.refuse(key, "only dapo shapes rewards, from 0 to -1; loss_fn.token_level_loss: true selects it")


def translate_optimizer(book: Ledger) -> None:
    if book.megatron:
        for key in book.below("policy.optimizer", "policy.scheduler"):
            book.ignore(key, "policy.megatron_cfg is the backend in use")
        _translate_megatron_optimizer(book, "policy.megatron_cfg.optimizer")
        _translate_styles(book, "policy.megatron_cfg.scheduler")
    else:
        _translate_torch_optimizer(book, "policy.optimizer")
        _translate_stages(book, "policy.scheduler")


def _translate_megatron_optimizer(book: Ledger, section: str) -> None:
    _translate_numbers(book, lr=f"{section}.lr", weight_decay=f"{section}.weight_decay", eps=f"{section}.adam_eps")
    betas = (f"{section}.adam_beta1", f"{section}.adam_beta2")
    pair = [book.get(key) for key in betas]
    if None not in pair:
        for key in betas:
            book.translate(key, "optimizer.betas", pair)
    clip = f"{section}.clip_grad"
    book.translate(clip, "optimizer.clip_norm", book.get(clip) or None)
    book.ignore("policy.max_grad_norm", f"{clip} is what counts")
    _expect_adamw(book, f"{section}.optimizer", "adam")


def _translate_torch_optimizer(book: Ledger, section: str) -> None:
    arguments = f"{section}.kwargs"
    _translate_numbers(book, lr=f"{arguments}.lr", weight_decay=f"{arguments}.weight_decay", eps=f"{arguments}.eps")
    betas = f"{arguments}.betas"
    if book.get(betas) is not None:
        book.translate(betas, "optimizer.betas", book.get(betas))
    clip = "policy.max_grad_norm"
    book.translate(clip, "optimizer.clip_norm", book.get(clip) or None)
    _expect_adamw(book, f"{section}.name", "torch.optim.AdamW")


def _translate_numbers(book: Ledger, **keys: str) -> None:
    for ours, key in keys.items():
        if book.get(key) is not None:
            book.translate(key, f"optimizer.{ours}", book.get(key))


def _expect_adamw(book: Ledger, key: str, expected: str) -> None:
    if book.get(key) == expected:
        book.ignore(key, "the optimizer is always AdamW")
    book.refuse(key, "the optimizer is always AdamW")


def _translate_styles(book: Ledger, section: str) -> None:
    """Megatron's schedule: a style, and the length of the warm-up."""
    style = book.get(f"{section}.lr_decay_style")
    if style in STYLES:
        book.translate(f"{section}.lr_decay_style", "optimizer.schedule", style)
    book.refuse(f"{section}.lr_decay_style", f"the schedules are {', '.join(STYLES)}")
    warmup = f"{section}.lr_warmup_iters"
    book.translate(warmup, "optimizer.warmup_steps", book.number(warmup) or 0)
    book.ignore(f"{section}.lr_decay_iters", "the learning rate decays over all of `steps`, if at all")
    lowest = "policy.megatron_cfg.optimizer.min_lr"
    if style == "constant":
        book.ignore(lowest, "the learning rate is constant")
    elif not book.get(lowest):
        book.ignore(lowest, "the learning rate ends at 0")
    book.refuse(lowest, "the learning rate ends at 0")


def _translate_stages(book: Ledger, key: str) -> None:
    """PyTorch's schedule: LinearLR as a warm-up, then ConstantLR or CosineAnnealingLR."""
    stages = book.get(key)
    if not stages:
        book.ignore(key, "no scheduler: the learning rate is constant")
        return
    named = [stage for stage in _as_list(stages) if isinstance(stage, dict) and "name" in stage]
    warmup: dict[str, Any] = {"total_iters": 0}
    if named and _class_name(named[0]) == "LinearLR":
        warmup = _arguments(named.pop(0))
    schedule = LATER_STAGES.get("+".join(map(_class_name, named)))
    steps = warmup.get("total_iters")
    if schedule is None or type(steps) is not int or steps < 0:
        book.refuse(key, SCHEDULES)
        return
    later = _arguments(named[0]) if named else {}
    full_rate = warmup.get("end_factor", 1) == 1
    if schedule == "constant" and named:
        full_rate = full_rate and later.get("factor", 1 / 3) == 1
    if not full_rate:
        book.refuse(key, f"{SCHEDULES}; LinearLR has to end, and ConstantLR to stay, at a factor of 1")
        return
    note = "from 0"
    if later.get("eta_min"):
        note = "from 0; the cosine ends at 0, not at eta_min"
    book.put("optimizer.schedule", schedule)
    book.put("optimizer.warmup_steps", steps)
    text = f"optimizer.schedule: {schedule}, optimizer.warmup_steps: {steps} ({note})"
    book.write(Status.TRANSLATED, key, text)


def _as_list(stages: Any) -> list[Any]:
    return stages if isinstance(stages, list) else [stages]


def _class_name(stage: dict[str, Any]) -> str:
    return str(stage["name"]).rpartition(".")[2]


def _arguments(stage: dict[str, Any]) -> dict[str, Any]:
    arguments = stage.get("kwargs")
    return arguments if isinstance(arguments, dict) else {}
