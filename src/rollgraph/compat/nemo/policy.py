"""Translates NeMo-RL's `policy`: the backend, the model, sequence lengths, and CUDA graphs."""

from __future__ import annotations

from typing import Any

from rollgraph.compat.graph_keys import GRAPH_KEYS, SCOPE_KEYS, TRACKERS, contradictions, implementation, scopes
from rollgraph.compat.nemo.ledger import Ledger
from rollgraph.config import ConfigError

OUR_SCOPES = {"attn": "attn", "mlp": "mlp", "full_iteration": "step"}
EAGER_GENERATION = "policy.generation.vllm_cfg.enforce_eager"


def translate_backend(book: Ledger) -> None:
    used, other = "dtensor_cfg", "megatron_cfg"
    if book.megatron:
        used, other = other, used
    book.ignore(f"policy.{used}.enabled", "rollgraph has one backend")
    for key in book.below(f"policy.{other}."):
        book.ignore(key, f"policy.{used} is the backend in use")
    key = f"policy.{used}.activation_checkpointing"
    book.translate(key, "model.checkpointing", bool(book.get(key)))
    _translate_division(book, f"policy.{used}.tensor_{'model_' * book.megatron}parallel_size")


def _translate_division(book: Ledger, key: str) -> None:
    size = book.count(key) or 1
    on_node = book.count("cluster.gpus_per_node") or 1
    if on_node % size:
        book.refuse(key, f"ranks that divide layers have to be on one node, and each has {on_node}")
    elif size > 1:
        book.translate(key, "tensor_parallel", size)


def translate_model(book: Ledger) -> None:
    name = book.get("policy.model_name")
    if not isinstance(name, str):
        raise ConfigError([f"{book.node('policy.model_name').place}: policy.model_name: required, but missing"])
    book.translate("policy.model_name", "model.path", name)
    book.to_do.append(f"model.path is a folder: download {name} there, or name the folder you have")
    if book.get("policy.precision") in ("bfloat16", "float32"):
        book.translate("policy.precision", "model.dtype", book.get("policy.precision"))
    book.refuse("policy.precision", "weights are bfloat16 or float32")
    tokenizer = book.get("policy.tokenizer.name")
    if tokenizer in (None, name):
        book.ignore("policy.tokenizer.name", "the default is the model's own tokenizer")
    else:
        book.translate("policy.tokenizer.name", "tokenizer.path", tokenizer)
    key = "policy.tokenizer.chat_template"  # null means bare prompts; without the key, the model's template is used
    template = book.get(key)
    book.put("data.chat", key not in book.leaves or template is not None)
    if template in (None, "default"):
        book.translate(key, "data.chat", template is not None)
    book.refuse(key, "rollgraph uses the model's own template: edit it in the tokenizer's folder")


def translate_lengths(book: Ledger) -> None:
    total = book.count("policy.max_total_sequence_length")
    prompt = "data.max_input_seq_length"
    completion = "policy.generation.max_new_tokens"
    longest_prompt = book.count(prompt) or total
    longest_completion = book.count(completion) or total
    if longest_prompt is None or longest_completion is None:
        return
    both = longest_prompt + longest_completion
    book.put("data.max_prompt_tokens", longest_prompt)
    book.put("data.too_long", "drop")
    book.put("rollout.max_tokens", longest_completion)
    book.translate(prompt, "data.max_prompt_tokens", longest_prompt, "longer prompts are dropped and counted")
    book.translate(completion, "rollout.max_tokens", longest_completion)
    reason = f"prompt and completion have separate limits, together {both} tokens"
    book.ignore("policy.max_total_sequence_length", reason)
    _translate_microbatches(book, total or both, both)


def _translate_microbatches(book: Ledger, sequence: int, longest: int) -> None:
    """`sequence` is the length NeMo-RL computes microbatches with, `longest` the most tokens a sequence can have."""
    key = "policy.train_micro_batch_size"
    size = (book.count(key) or 1) * sequence
    for section in ("policy.dynamic_batching", "policy.sequence_packing"):
        packed = f"{section}.train_mb_tokens"
        if book.get(f"{section}.enabled") and book.count(packed):
            key = packed
            size = book.count(packed) or 0
    note = ""
    if size < longest:
        size = longest
        note = "the longest sequence has to fit"
    book.put("train.microbatch_tokens", size)
    book.translate(key, "train.microbatch_tokens", size, note)
    book.ignore("policy.train_micro_batch_size", "sequences are packed: train.microbatch_tokens")


def translate_graphs(book: Ledger) -> None:
    """Translate the implementation and scope of training's graphs. rollgraph's apply to generation too, by default."""
    section = f"policy.{'megatron' if book.megatron else 'dtensor'}_cfg"
    settings = book.get(section)
    model = {}
    if isinstance(settings, dict):
        model = {key: value for key, value in settings.items() if key in (*GRAPH_KEYS, *TRACKERS)}
    wrong = dict(contradictions(model, {}))
    for name in model:
        key = f"{section}.{name}"
        if name in wrong:
            book.refuse(key, wrong[name])
        elif name in TRACKERS:
            book.ignore(key, "every graph registers its generators")
        elif name in SCOPE_KEYS:
            _translate_scope(book, key, scopes(model), implementation(model))
        elif name == "cuda_graph_warmup_steps":
            book.translate(key, "graph.warmup", book.number(key))
        elif name == "cuda_graph_use_single_mempool":
            book.ignore(key, "all graphs of a worker share one pool")
        elif name == "cuda_graph_retain_backward_graph":
            book.ignore(key, "each backward runs once")
        else:
            _translate_implementation(book, key, model, bool(wrong))
    if implementation(model) == "none" and book.get(EAGER_GENERATION):
        book.translate(EAGER_GENERATION, "graph.impl", "none")


def _translate_implementation(book: Ledger, key: str, model: dict[str, Any], contradicted: bool) -> None:
    captures = implementation(model) != "none"
    if captures and contradicted:
        book.refuse(key, "other graph keys contradict it")
    elif captures:
        book.translate(key, "graph.impl", "auto")
    elif book.get(EAGER_GENERATION):
        book.translate(key, "graph.impl", "none")
    else:
        book.ignore(key, "graph.impl covers generation too, which NeMo-RL captures here; none would be eager in both")


def _translate_scope(book: Ledger, key: str, names: list[str], impl: str) -> None:
    if impl == "full_iteration":  # the later spelling, as an implementation
        names = ["full_iteration"]
    unknown = [name for name in names if name not in OUR_SCOPES]
    found = [OUR_SCOPES[name] for name in names if name in OUR_SCOPES] or ["layer"]
    if impl == "none":
        book.ignore(key, "there is no implementation")
    elif unknown:
        book.refuse(key, f"rollgraph has no scope {', '.join(unknown)}; graph.scope is step, layer, attn or mlp")
    elif found == ["step"] and book.ranks > 1:
        book.translate(key, "graph.scope", ["layer"], "a graph ends where ranks communicate")
    else:
        book.translate(key, "graph.scope", found)
