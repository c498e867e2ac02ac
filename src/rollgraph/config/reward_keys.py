"""The section `reward` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rollgraph.config.key_types import File, Natural, Options, Positive


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    name: Annotated[File, "A built-in reward, package.module:function, or path/file.py:function."]
    weight: Annotated[float, "Factor of this function in the weighted sum."] = 1.0
    options: Annotated[Options, "Keyword arguments for the function."] = field(default_factory=dict)
    label: Annotated[str, "Name in the metrics. Empty: the function's own name."] = ""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    functions: Annotated[
        tuple[RewardFunctionConfig, ...], "Reward functions; the reward is the weighted sum of their values."
    ] = ()
    chat: Annotated[
        Literal["messages", "text"],
        "What your functions get for rows with `messages`. messages: lists of messages, as in TRL; text: the prompt as "
        "the chat template renders it, and the completion as text. Built-in rewards always read text.",
    ] = "messages"
    workers: Annotated[
        Natural, "Number of processes, for each rank, that compute rewards. 0: compute them in the run's process."
    ] = 0
    place: Annotated[
        Literal["local", "cluster"],
        "Where these processes run. local: beside the rank; cluster: wherever the Ray cluster has a free CPU core for "
        "each, such as on nodes without GPUs.",
    ] = "local"
    timeout: Annotated[
        Positive,
        "Seconds that one call of a function may take for all its completions. Without workers, only async functions "
        "can be stopped.",
    ] = 10.0
    on_failure: Annotated[float, "Value of a function that raises or runs out of time; such failures are counted."] = (
        0.0
    )
