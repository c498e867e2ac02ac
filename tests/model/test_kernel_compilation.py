"""Triton kernels are compiled in parallel: their launches are skipped meanwhile, and all are ready afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from rollgraph.graph import GraphPool, capture
from rollgraph.model.kernels.launch import compiling_together

ON_THE_CPU = """
import torch
from rollgraph.graph import GraphPool, capture
from rollgraph.model.kernels.launch import compiling_together

graph = capture(lambda x: x + 1, (torch.ones(()),), pool=GraphPool(), first_run=compiling_together)
print(graph(torch.tensor(4.0)).item(), torch.cuda.is_initialized())
"""


def test_a_run_on_the_cpu_does_not_initialize_cuda() -> None:
    done = subprocess.run([sys.executable, "-c", ON_THE_CPU], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5.0", "False"]


@contextmanager
def record_compilations() -> Iterator[list[str]]:
    from triton import knobs

    names: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


@pytest.mark.gpu
def test_launches_are_skipped_until_all_kernels_are_compiled() -> None:
    from tests.model.unique_kernels import add

    x = torch.ones(64, device="cuda")
    with record_compilations() as compiled:
        with compiling_together("tests"):
            for shift in (1, 2, 1):
                assert not add(x, shift).any()  # zeros, though `add` takes its memory from torch.empty
        assert len(compiled) == 2
        assert [add(x, shift).unique().tolist() for shift in (1, 2)] == [[2.0], [3.0]]
        assert len(compiled) == 2, "a kernel was compiled again when it was launched"
        with compiling_together("tests"):
            assert add(x, 2).unique().tolist() == [3.0]  # it is compiled, so it runs
    from triton import knobs

    assert knobs.runtime.jit_cache_hook is None


@pytest.mark.gpu
def test_a_kernel_that_does_not_fit_is_refused_only_at_its_launch() -> None:
    from triton import OutOfResources

    from tests.model.unique_kernels import take_too_much

    x = torch.ones(64, 64, device="cuda")
    with compiling_together("tests"):
        take_too_much(x)
    with pytest.raises(OutOfResources):
        take_too_much(x)


@pytest.mark.gpu
def test_a_capture_compiles_in_its_first_run_and_records_every_kernel() -> None:
    from tests.model.unique_kernels import add

    x = torch.zeros(64, device="cuda")
    with record_compilations() as compiled:
        graph = capture(
            lambda y: add(add(y, 5), 6),
            (x,),
            pool=GraphPool(),
            backend="cuda",
            first_run=partial(compiling_together, "tests"),
        )
        assert len(compiled) == 2
        assert graph(torch.full_like(x, 2.0)).unique().tolist() == [13.0]


@pytest.mark.gpu
def test_an_error_inside_removes_the_hook() -> None:
    from triton import knobs

    from tests.model.unique_kernels import add

    x = torch.ones(64, device="cuda")

    def fail() -> None:
        with compiling_together("tests"):
            add(x, 9)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert knobs.runtime.jit_cache_hook is None
    assert add(x, 9).unique().tolist() == [10.0]


@pytest.mark.gpu
def test_kernels_of_other_packages_are_launched_as_usual() -> None:
    from tests.model.unique_kernels import add

    with compiling_together():
        assert add(torch.ones(64, device="cuda"), 20).unique().tolist() == [21.0]
