"""Their loss, advantages, optimizer and schedule as our algorithm and optimizer."""

from __future__ import annotations

from rollgraph.compat.nemo.ledger import Ledger, Status
from rollgraph.config import RolloutConfig

STYLES = ("constant", "linear", "cosine")
LATER_STAGES = {"": "constant", "ConstantLR": "constant", "CosineAnnealingLR": "cosine"}


def translate_algorithm(book: Ledger) -> None:
    """By how the loss is averaged: over all tokens it is DAPO's, over samples GRPO's, with one ratio each GSPO's."""
    tokens, sequences = "loss_fn.token_level_loss", "loss_fn.sequence_level_importance_ratios"
    if book.get(sequences):
        name = "gspo"
        book.translate(sequences, "algorithm.name", name)
        book.ignore(tokens, "gspo averages over samples")
    else:
        name = "dapo" if book.get(tokens) else "grpo"
        book.put("algorithm.name", name)
        note = "the loss is the mean over all tokens" if name == "dapo" else "the mean over samples of their means"
        book.translate(tokens, "algorithm.name", name, note)
        book.ignore(sequences, "each token has its own ratio")
    if name == "dapo":
        book.put("algorithm.options.dynamic_sampling", False)  # it would, unless told otherwise
    _translate_advantages(book)
    _translate_correction(book)
    _translate_shaping(book, name)
    total = book.number("policy.train_global_batch_size")
    rollouts = (book.number("grpo.num_prompts_per_step") or 0) * (book.number("grpo.num_generations_per_prompt") or 0)
    if total and rollouts and rollouts % total == 0:
        book.translate("policy.train_global_batch_size", "algorithm.minibatches", rollouts // total)
    book.refuse("policy.train_global_batch_size", f"does not divide the {rollouts} samples of a step")


def _translate_advantages(book: Ledger) -> None:
    name = "grpo.adv_estimator.name"
    if book.get(name) == "grpo":
        book.ignore(name, "it is the algorithm's own")
    book.refuse(name, "advantages are part of algorithm.name; see docs/algorithms.md")
    for section in ("grpo", "grpo.adv_estimator"):  # earlier versions, later ones
        normalized, others = f"{section}.normalize_rewards", f"{section}.use_leave_one_out_baseline"
        book.translate(normalized, "algorithm.options.normalize_std", bool(book.get(normalized)))
        if book.get(others):
            book.refuse(others, _why_no_leave_one_out(book, bool(book.get(normalized))))
        book.ignore(others, "the baseline is the mean of the whole group")


def _why_no_leave_one_out(book: Ledger, normalized: bool) -> str:
    """Theirs changes the advantage of whichever loss there is; our `rloo` is an advantage with a loss of its own."""
    if normalized:
        return "theirs has the mean and standard deviation of the other samples, ours those of the whole group"
    samples = book.number("grpo.num_generations_per_prompt") or RolloutConfig.samples_per_prompt
    return (
        f"ours has the mean of the whole group: advantages are {samples - 1}/{samples} of theirs; "
        "rloo has the mean of the others, but sums over the tokens of a sample where this loss takes means"
    )


def _translate_correction(book: Ledger) -> None:
    key, cap = "loss_fn.use_importance_sampling_correction", "loss_fn.truncated_importance_sampling_ratio"
    limit = book.get(cap)
    if book.get(key) and isinstance(limit, int | float):
        for name in (key, cap):
            book.translate(name, "algorithm.options.importance_cap", float(limit))
    elif book.get(key):
        book.refuse(key, "needs a bound here: algorithm.options.importance_cap")
    book.ignore(key, "off")
    book.ignore(cap, "there is no correction, or no bound")


def _translate_shaping(book: Ledger, name: str) -> None:
    section = "grpo.reward_shaping"
    on, penalty = f"{section}.enabled", f"{section}.overlong_buffer_penalty"
    length, buffer = book.number(f"{section}.max_response_length"), book.number(f"{section}.overlong_buffer_length")
    if not book.get(on):
        for key in book.below(f"{section}."):
            book.ignore(key, "reward shaping is off")
    elif name == "dapo" and length and buffer and book.get(penalty) in (None, 1):
        book.translate(on, "algorithm.options.overlong_buffer", buffer)
        book.translate(f"{section}.max_response_length", "algorithm.options.max_tokens", length)
        book.translate(f"{section}.overlong_buffer_length", "algorithm.options.overlong_buffer", buffer)
        book.ignore(penalty, "it is 1 here")
    for key in book.below(f"{section}."):
        book.refuse(key, "there is dapo's punishment, from 0 to -1, with loss_fn.token_level_loss: true")


def translate_optimizer(book: Ledger) -> None:
    if book.megatron:
        for key in book.below("policy.optimizer", "policy.scheduler"):
            book.ignore(key, "policy.megatron_cfg is the backend in use")
        section, clip = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.optimizer.clip_grad"
        eps, name, expected = f"{section}.adam_eps", f"{section}.optimizer", "adam"
        betas = [f"{section}.adam_beta1", f"{section}.adam_beta2"]
        pair = [book.get(key) for key in betas]
        _translate_styles(book, "policy.megatron_cfg.scheduler")
    else:
        section, clip = "policy.optimizer.kwargs", "policy.max_grad_norm"
        eps, name, expected = f"{section}.eps", "policy.optimizer.name", "torch.optim.AdamW"
        betas = [f"{section}.betas"]
        pair = book.get(betas[0])
        _translate_stages(book, "policy.scheduler")
    for key, ours in ((f"{section}.lr", "lr"), (f"{section}.weight_decay", "weight_decay"), (eps, "eps")):
        if book.get(key) is not None:
            book.translate(key, f"optimizer.{ours}", book.get(key))
    if all(book.get(key) is not None for key in betas):
        for key in betas:
            book.translate(key, "optimizer.betas", pair)
    book.translate(clip, "optimizer.clip_norm", book.get(clip) or None)
    book.ignore("policy.max_grad_norm", f"{clip} is what counts")
    if book.get(name) == expected:
        book.ignore(name, "AdamW is what there is")
    book.refuse(name, "AdamW is what there is")


def _translate_styles(book: Ledger, section: str) -> None:
    """Megatron's: a style and how long the warm-up is."""
    style, warmup = book.get(f"{section}.lr_decay_style"), f"{section}.lr_warmup_iters"
    if style in STYLES:
        book.translate(f"{section}.lr_decay_style", "optimizer.schedule", style)
    book.refuse(f"{section}.lr_decay_style", "schedules are constant, linear and cosine")
    book.translate(warmup, "optimizer.warmup_steps", book.number(warmup) or 0)
    book.ignore(f"{section}.lr_decay_iters", "the learning rate decays over all of `steps`, if at all")
    lowest = "policy.megatron_cfg.optimizer.min_lr"
    if style == "constant" or not book.get(lowest):
        book.ignore(lowest, "the learning rate is constant" if style == "constant" else "it ends at 0")
    book.refuse(lowest, "the learning rate ends at 0")


def _translate_stages(book: Ledger, key: str) -> None:
    """PyTorch's: LinearLR as a warm-up, then ConstantLR or CosineAnnealingLR."""
    stages = book.get(key)
    if not stages:
        return book.ignore(key, "none: the learning rate is constant")
    stages = stages if isinstance(stages, list) else [stages]
    named = [stage for stage in stages if isinstance(stage, dict) and "name" in stage]
    names = [str(stage["name"]).rpartition(".")[2] for stage in named]
    warms_up = names[:1] == ["LinearLR"]
    steps = (named[0].get("kwargs") or {}).get("total_iters") if warms_up else 0
    schedule = LATER_STAGES.get("+".join(names[warms_up:]))
    if schedule is None or type(steps) is not int or steps < 0:
        return book.refuse(key, "there is a linear warm-up, then constant or cosine: optimizer.schedule")
    book.put("optimizer.schedule", schedule)
    book.put("optimizer.warmup_steps", steps)
    text = f"optimizer.schedule: {schedule}, optimizer.warmup_steps: {steps} (from 0)"
    return book.write(Status.TRANSLATED, key, text)
