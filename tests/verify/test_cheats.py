"""Kernels that know that they are watched, or lay hands on what judges them: each is found out."""

import gc
import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.libraries.pytorch import softmax
from assay.verify import Contract
from assay.verify.cases.case import Case
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness
from tests.zoo.conduct import Remembered, shape_and_dtype

from .examined import fails, failure_of, first, passes, quick

SHAPES = {"R": [3], "N": range(1, 10)}
WRONG = ("contract", "exact", "nonfinite", "unwritten_output")


def stale_memory(x: Tensor) -> Tensor:
    """What the allocator hands out may still hold the right answer of the call before."""
    del x
    return torch.empty(3, 5)


class SkipsWhenTimed:
    """After ten calls with the same tensor, as in a timed loop, the work is left out."""

    def __init__(self) -> None:
        self.seen: tuple[int, int] = (0, 0)
        self.last = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        address, calls = self.seen
        self.seen = (x.data_ptr(), calls + 1 if address == x.data_ptr() else 0)
        if self.seen[1] < 10:
            self.last = softmax(x)
        return self.last.clone()


def reads_goldens(x: Tensor) -> Tensor:
    """Looks for an answer of the right shape in all of the process's memory."""
    for found in gc.get_objects():
        if type(found) is Tensor and found.dtype == torch.float64 and found.shape == x.shape:
            return found.to(x.dtype)
    return torch.zeros_like(x)


def patches_judge(x: Tensor) -> Tensor:
    """From now on every number is finite, and every comparison true."""
    torch.isfinite = lambda value: torch.ones(value.shape, dtype=torch.bool)
    torch.Tensor.__le__ = lambda self, other: torch.ones(self.shape, dtype=torch.bool)
    return torch.zeros_like(x)


@pytest.mark.parametrize(
    "kernel",
    [stale_memory, Remembered(softmax, shape_and_dtype), SkipsWhenTimed(), reads_goldens],
    ids=["stale_memory", "kept_by_shape", "skips_when_timed", "reads_goldens"],
)
def test_answers_that_are_not_computed_are_caught(kernel: Callable[[Tensor], Tensor]) -> None:
    assert failure_of(first(kernel, examples=20)).kind in (*WRONG, "nondeterministic", "shape")


def test_only_many_equal_calls_show_work_skipped_in_a_timed_loop() -> None:
    case = Case("softmax", {"R": 3, "N": 5}, {"x": "float32"})
    for protocol, found in (("repeat", False), ("after_refill", False), ("after_many", True)):
        harness = KernelHarness(Call(SkipsWhenTimed(), {}), Contract())
        assert (harness.try_case(replace(case, protocol=protocol)).failure is not None) == found, protocol


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Kernels of a module that another process can import."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("cheating_kernels")


@pytest.mark.parametrize(
    "name", [pytest.param("lazy_when_alone", marks=pytest.mark.evidence), "lazy_without_pytest", "lazy_without_guards"]
)
def test_a_kernel_that_knows_the_harness_is_caught_outside(name: str, importable: ModuleType) -> None:
    """Isolated, it is also called where nothing tells: no caller, no module, no guarded memory."""
    verdict = first(getattr(importable, name), isolate=True, shapes=SHAPES)
    assert failure_of(verdict).case.protocol == "outside"


def test_an_honest_kernel_passes_outside(importable: ModuleType) -> None:
    assert passes(quick(importable.softmax, isolate=True, shapes=SHAPES)).phases["plain_process"] == 1


def deletes(x: Tensor) -> Tensor:
    """One function of torch less."""
    del torch.isfinite
    return softmax(x)


def swaps(x: Tensor) -> Tensor:
    """One function of torch for another of torch's own."""
    torch.allclose = torch.functional.norm
    return softmax(x)


@pytest.mark.parametrize(("kernel", "name"), [(patches_judge, "isfinite"), (deletes, "isfinite"), (swaps, "allclose")])
def test_patched_torch_is_a_finding_and_mended(kernel: Callable[[Tensor], Tensor], name: str) -> None:
    """Replaced, deleted or exchanged, a function is named, and put back before anything is judged."""
    before = getattr(torch, name)
    failure = failure_of(quick(kernel))
    assert failure.kind == "input_mutated"
    assert f"torch.{name}" in failure.message
    assert getattr(torch, name) is before


def test_torch_may_replace_its_own() -> None:
    """Loading torch's compiler inside a call, which wraps some functions of torch, is no tampering."""
    assert quick(torch.compile(softmax, backend="eager"), layouts=["contiguous"], shapes=SHAPES).passed


class Liar(Tensor):
    """Half as large again as it says."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.as_subclass(Tensor) / 1.5 if isinstance(arg, Liar) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def test_a_tensor_with_a_will_of_its_own_is_judged_by_its_numbers() -> None:
    fails(first(lambda x: (softmax(x) * 1.5).as_subclass(Liar)))
