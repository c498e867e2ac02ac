"""Packing: which samples share a microbatch.

Pure Python. Samples of one prompt share it: the prompt without its last token is a sequence that is computed once. Each
sample then is a sequence of that last token, which predicts the sample's first token, and its own tokens; its attention
sees the keys of the shared prompt before its own. `packed_arrays.py` lays the samples of a microbatch out in arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from rollgraph.types import Sample

PromptTokens = tuple[int, ...]


class PackedSize(NamedTuple):
    """What samples occupy in a token bucket. `repeated` counts the keys that occur again for a shared prompt."""

    tokens: int
    sequences: int
    repeated: int

    def with_sample(self, prompt: int, completion: int, siblings: int) -> PackedSize:
        """The size with one more sample: the lengths of its prompt and completion, and how many share the prompt."""
        if not siblings or prompt == 1:
            return PackedSize(self.tokens + prompt + completion, self.sequences + 1, self.repeated)
        added = 1
        if siblings == 1:  # only now does the prompt become a sequence of its own, which both samples repeat
            added = 2
        return PackedSize(self.tokens + 1 + completion, self.sequences + added, self.repeated + added * (prompt - 1))

    def fits(self, tokens: int, sequences: int) -> bool:
        return self.tokens <= tokens and self.sequences <= sequences and self.repeated <= tokens


EMPTY = PackedSize(0, 0, 0)


def measure(samples: Iterable[Sample]) -> PackedSize:
    """What samples occupy in the given order, in which samples of one prompt must be neighbours."""
    size = EMPTY
    for prompt, siblings in groupby(samples, key=prompt_of):
        for index, sample in enumerate(siblings):
            size = size.with_sample(len(prompt), len(sample.tokens), index)
    return size


@dataclass
class _Microbatch:
    size: PackedSize = EMPTY
    members: dict[PromptTokens, list[int]] = field(default_factory=dict)  # indices of samples, by prompt

    def size_with(self, prompt: PromptTokens, completion: int) -> PackedSize:
        siblings = len(self.members.get(prompt, ()))
        return self.size.with_sample(len(prompt), completion, siblings)


def pack(samples: Sequence[Sample], tokens: int, sequences: int) -> list[list[int]]:
    """Divide samples into microbatches that fit a bucket; return their indices, samples of one prompt side by side.

    Prompts with the most tokens come first, and of each prompt the longest samples. A sample goes into the first
    microbatch that has its prompt and room for it, otherwise into the first that has room. The result does not depend
    on the order of `samples`.
    """
    by_prompt: dict[PromptTokens, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(prompt_of(sample), []).append(index)
    least = 1 + min((len(sample.tokens) for sample in samples), default=0)  # with less room a microbatch is full
    microbatches: list[_Microbatch] = []
    unfilled: list[_Microbatch] = []

    def total_tokens(prompt: PromptTokens) -> int:
        return len(prompt) + sum(len(samples[index].tokens) for index in by_prompt[prompt])

    for prompt in sorted(by_prompt, key=lambda prompt: (-total_tokens(prompt), prompt)):
        with_prompt: list[_Microbatch] = []
        for index in _longest_first(samples, by_prompt[prompt]):
            length = len(prompt) + len(samples[index].tokens)
            if length > tokens:
                raise ValueError(f"a sequence of {length} tokens does not fit a microbatch of {tokens}")
            completion = len(samples[index].tokens)
            for microbatch in (*with_prompt, *unfilled, _Microbatch()):
                size = microbatch.size_with(prompt, completion)
                if size.fits(tokens, sequences):
                    break
            if not microbatch.members:
                microbatches.append(microbatch)
                unfilled.append(microbatch)
            if prompt not in microbatch.members:
                with_prompt.append(microbatch)
            microbatch.size = size
            microbatch.members.setdefault(prompt, []).append(index)
            if size.tokens + least > tokens:
                unfilled = [other for other in unfilled if other is not microbatch]
    return [_flatten(microbatch.members.values()) for microbatch in microbatches]


def prompt_of(sample: Sample) -> PromptTokens:
    return tuple(sample.prompt)


def _longest_first(samples: Sequence[Sample], indices: Iterable[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-len(samples[index].tokens), tuple(samples[index].tokens)))


def _flatten(lists: Iterable[list[int]]) -> list[int]:
    return [index for indices in lists for index in indices]


def share_of(minibatch: Sequence[Sample], rank: int, ranks: int) -> list[Sample]:
    """A rank's samples: as many as on any other rank, give or take one, those of one prompt side by side."""
    ordered = sorted(minibatch, key=lambda sample: tuple(sample.prompt))
    start = len(ordered) * rank // ranks
    end = len(ordered) * (rank + 1) // ranks
    return ordered[start:end]


def unweighted(prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> Sample:
    """A sample to be scored, not trained on."""
    zeros = [0.0] * len(tokens)
    return Sample(prompt, tokens, zeros, zeros, logprobs)
