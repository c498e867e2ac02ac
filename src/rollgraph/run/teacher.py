"""The teacher of a run: which model it is, whether it can judge what the policy samples, and where its weights go.

A teacher of the policy's own architecture is a set of weights in the slot of the reference policy. Any other is a
second model, which is never trained and has graphs of its own for scoring.
"""

from __future__ import annotations

import torch

from rollgraph.config import Config, ConfigError
from rollgraph.model import Architecture, Decoder, hf_weights
from rollgraph.model.shapes_only import shapes_only
from rollgraph.run.hub_cache import model_folder
from rollgraph.run.key_errors import about
from rollgraph.tokenizer import Tokenizer, load_tokenizer


def read_teacher(config: Config) -> Architecture | None:
    if config.algorithm.teacher is None:
        return None
    with about("algorithm.teacher"):
        return hf_weights.read_architecture(model_folder(config.algorithm.teacher))


def shape_teacher(config: Config) -> Decoder | None:
    """The teacher on the meta device, for the memory plan."""
    architecture = read_teacher(config)
    if architecture is None:
        return None
    assert config.algorithm.teacher is not None
    dtype = hf_weights.read_dtype(model_folder(config.algorithm.teacher)) or "bfloat16"
    with shapes_only():
        return Decoder(architecture).to(dtype=getattr(torch, dtype))


def check_teacher(config: Config, tokenizer: Tokenizer, policy: Architecture, longest: int) -> Architecture | None:
    """The architecture of the teacher; raises if it cannot score sequences of the policy's tokens, of this length."""
    teacher = read_teacher(config)
    if teacher is None:
        return None
    folder = config.algorithm.teacher
    assert folder is not None
    with about("algorithm.teacher"):
        vocab = load_tokenizer(model_folder(folder)).vocab
    if vocab != tokenizer.vocab:
        raise ConfigError([f"algorithm.teacher: {folder} has another tokenizer: {_difference(vocab, tokenizer.vocab)}"])
    if teacher.vocabulary < policy.vocabulary:
        wrong = f"{folder} has a vocabulary of {teacher.vocabulary}, but the policy may sample {policy.vocabulary} ids"
        raise ConfigError([f"algorithm.teacher: {wrong}"])
    if teacher.max_length < longest:
        wrong = f"{folder} takes {teacher.max_length} tokens, but a prompt with its completion may have {longest}"
        raise ConfigError([f"algorithm.teacher: {wrong}"])
    return teacher


def _difference(theirs: dict[str, int], ours: dict[str, int]) -> str:
    for token, number in sorted(ours.items(), key=lambda entry: entry[1]):
        if theirs.get(token) != number:
            return f"{token!r} is {theirs.get(token, 'absent')} there and {number} here"
    return f"it has {len(theirs)} tokens, and that of this run has {len(ours)}"
