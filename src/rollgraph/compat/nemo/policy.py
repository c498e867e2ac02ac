"""Their `policy`: the backend, the model, how long sequences are, and what is captured."""

from __future__ import annotations

from rollgraph.compat.graph_keys import GRAPH_KEYS, SCOPE_KEYS, TRACKERS, contradictions, implementation, scopes
from rollgraph.compat.nemo.ledger import Ledger
from rollgraph.config import ConfigError

OUR_SCOPES = {"attn": "attn", "mlp": "mlp", "full_iteration": "step"}


def translate_backend(book: Ledger) -> None:
    used, other = ("megatron_cfg", "dtensor_cfg") if book.megatron else ("dtensor_cfg", "megatron_cfg")
    book.ignore(f"policy.{used}.enabled", "there is one backend here")
    for key in book.below(f"policy.{other}."):
        book.ignore(key, f"policy.{used} is the backend in use")
    key = f"policy.{used}.activation_checkpointing"  # taken back where several ranks or the scope forbid it
    book.translate(key, "model.checkpointing", bool(book.get(key)), "on one rank only" if book.get(key) else "")


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
        book.ignore("policy.tokenizer.name", "it is the model's own")
    else:
        book.translate("policy.tokenizer.name", "tokenizer.path", tokenizer)
    key = "policy.tokenizer.chat_template"  # null is the bare prompt; without the key, the model's template is used
    template = book.get(key)
    book.put("data.chat", key not in book.leaves or template is not None)
    if template in (None, "default"):
        book.translate(key, "data.chat", template is not None)
    book.refuse(key, "the model's own template is used: edit it in the tokenizer's folder")


def translate_lengths(book: Ledger) -> None:
    total = book.count("policy.max_total_sequence_length")
    prompt, completion = "data.max_input_seq_length", "policy.generation.max_new_tokens"
    longest_prompt, longest = book.count(prompt) or total, book.count(completion) or total
    if longest_prompt is None or longest is None:
        return
    both = longest_prompt + longest
    book.put("data.max_prompt_tokens", longest_prompt)
    book.put("data.too_long", "drop")
    book.put("rollout.max_tokens", longest)
    book.translate(prompt, "data.max_prompt_tokens", longest_prompt, "longer ones are left out and counted")
    book.translate(completion, "rollout.max_tokens", longest)
    reason = f"prompt and completion are bounded one by one, to {both} tokens together"
    book.ignore("policy.max_total_sequence_length", reason)
    key = "policy.train_micro_batch_size"
    size = (book.count(key) or 1) * (total or both)
    for section in ("policy.dynamic_batching", "policy.sequence_packing"):
        tokens = f"{section}.train_mb_tokens"
        if book.get(f"{section}.enabled") and book.count(tokens):
            key, size = tokens, book.count(tokens) or 0
    book.put("train.microbatch_tokens", max(size, both))
    note = "" if size >= both else "the longest sequence has to fit"
    book.translate(key, "train.microbatch_tokens", max(size, both), note)
    book.ignore("policy.train_micro_batch_size", "sequences are packed: train.microbatch_tokens")


def translate_graphs(book: Ledger) -> None:
    """Training's implementation and scope. Ours is for generation too, and on unless it is switched off."""
    section = f"policy.{'megatron' if book.megatron else 'dtensor'}_cfg"
    model = {key: value for key, value in (book.get(section) or {}).items() if key in (*GRAPH_KEYS, *TRACKERS)}
    wrong, impl = dict(contradictions(model, {})), implementation(model)
    eager = "policy.generation.vllm_cfg.enforce_eager"
    for name in model:
        key = f"{section}.{name}"
        if name in wrong:
            book.refuse(key, wrong[name])
        elif name in TRACKERS:
            book.ignore(key, "every graph has its generators registered")
        elif name in SCOPE_KEYS:
            _translate_scope(book, key, scopes(model), impl)
        elif name == "cuda_graph_warmup_steps":
            book.translate(key, "graph.warmup", book.number(key))
        elif name.startswith("cuda_graph_") and name != "cuda_graph_impl":
            book.ignore(key, "the graphs of a worker share one pool")
        elif impl != "none" and not wrong:
            book.translate(key, "graph.impl", "auto")
        elif impl != "none":
            book.refuse(key, "beside keys that contradict it")
        elif not book.get(eager):
            book.ignore(key, "graph.impl is for generation as well, which captures there, too; none is eager")
        else:
            book.translate(key, "graph.impl", "none")
    if impl == "none" and book.get(eager):
        book.translate(eager, "graph.impl", "none")


def _translate_scope(book: Ledger, key: str, names: list[str], impl: str) -> None:
    if impl == "full_iteration":  # as versions say it that have cuda_graph_modules
        names = ["full_iteration"]
    found = [OUR_SCOPES[name] for name in names if name in OUR_SCOPES] or ["layer"]
    if impl == "none":
        book.ignore(key, "there is no implementation")
    elif unknown := [name for name in names if name not in OUR_SCOPES]:
        book.refuse(key, f"there is no scope {', '.join(unknown)} here; graph.scope is step, layer, attn or mlp")
    elif found == ["step"] and book.ranks > 1:
        book.translate(key, "graph.scope", ["layer"], "a graph ends where ranks communicate")
    else:
        book.translate(key, "graph.scope", found)
