"""The base of modes that see every operation, without what PyTorch's own base costs at the first one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is never compiled.

    PyTorch's own base makes sure of that by importing the compiler, which takes seconds. A process that has not
    imported it compiles nothing, so that here, only one that has does more than call the function.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is done here instead

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in cls.__dict__:
            cls.__torch_dispatch__ = _never_compiled(cls.__dict__["__torch_dispatch__"])  # type: ignore[method-assign]


def _never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    uncompiled = torch._disable_dynamo(function)  # imports the compiler when it is called

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return uncompiled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
