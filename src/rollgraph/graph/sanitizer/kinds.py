"""The kinds of mistakes that the sanitizer knows: why each matters, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    name: str
    checked: str  # what was looked at, for the report that finds nothing
    why: str
    fix: str


_ALL = (
    Kind(
        "host-read",
        "host reads and data-dependent shapes",
        "Python reads the value once, at capture, and every replay reuses it",
        "keep the value in a tensor (torch.where, masked arithmetic, a static shape), or read it after the call",
    ),
    Kind(
        "escape",
        "tensors that escape from the graph's memory",
        "the tensor lives in the graph's memory: any replay of a graph in the same pool may overwrite it",
        "return the tensor, and keep a clone in the caller",
    ),
    Kind(
        "moved",
        "parameters and buffers that moved",
        "the graph still uses the memory that it was captured with, not the tensor's new memory",
        "copy into the existing tensor (copy_, or load_state_dict without assign=True), or capture again",
    ),
    Kind(
        "hook",
        "Python hooks that ran at capture",
        "a replay runs no Python: the hook ran during capture and will not run again",
        "pass it in GraphHooks with 'replay' in `when`, or register it on the graphed module itself",
    ),
    Kind(
        "constant",
        "Python values read at capture (closures, globals, attributes)",
        "the graph holds the value from capture; a replay does not read it again",
        "pass a value that changes as a tensor argument, or keep it in a tensor that is updated in place",
    ),
    Kind(
        "stale-output",
        "outputs read after a replay overwrote them",
        "an output is valid until a replay overwrites it; without the sanitizer, this reads another step's values",
        "use or clone the output before that replay",
    ),
    Kind(
        "orphan",
        "tensors that only the graph keeps alive",
        "plain CUDA graphs would read freed memory here; rollgraph keeps it alive, but the program can no longer "
        "change what the graph reads",
        "keep a reference for as long as the graph lives (an attribute, a module's buffer), or pass the tensor as an "
        "argument",
    ),
    Kind(
        "generator",
        "random numbers that a replay cannot draw again",
        "the numbers were drawn at capture; a replay repeats them or fails",
        "draw with PyTorch, from a generator that exists before the capture, and seed it outside the function",
    ),
    Kind(
        "tree",
        "modules added to or removed from the module tree",
        "the graph holds the old tree: a replay does not run new modules, and still runs removed ones",
        "capture once the tree is final, or capture again; keep managers and wrappers outside the tree",
    ),
    Kind(
        "collective",
        "collectives inside a graph",
        "every rank must replay it at the same point and with the same group; a rank that does not hangs the others",
        "communicate between two graphs, in a hook or in plain code",
    ),
    Kind(
        "differs",
        "replays compared with eager, bit for bit",
        "on the same inputs and random numbers, the replay computed something other than the function does now",
        "find what this operation reads that is neither an argument nor a tensor updated in place",
    ),
    Kind(
        "mismatch",
        "calls that do not match the capture",
        "the arguments or modes are not those of the capture, or the call needs memory that is still in use",
        "see the message",
    ),
    Kind(
        "refused",
        "functions that cannot be captured",
        "a graph cannot hold this function as it is",
        "see the message",
    ),
)

KINDS = {kind.name: kind for kind in _ALL}
