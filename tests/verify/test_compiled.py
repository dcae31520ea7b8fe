"""Functions under torch.compile: what the compiler made is examined in every case, and its faults are found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.verify import examine
from assay.verify.compiled import compiled

SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "shapes": {"R": [1, 5], "N": [1, 7, 33]}, "examples": 0}


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


class Backend:
    """Runs a graph as it stands and counts; ``wrong_from`` on, a graph's results are doubled."""

    def __init__(self, wrong_from: int = 1 << 30) -> None:
        self.calls = self.graphs = 0
        self.wrong_from = wrong_from

    def __call__(self, graph: Any, examples: Any) -> Any:
        self.graphs += 1
        place = self.graphs

        def run(*inputs: Any) -> Any:
            self.calls += 1
            results = graph(*inputs)
            return results if place < self.wrong_from else tuple(2 * result for result in results)

        return run


def test_a_compiled_function_passes() -> None:
    """Captured as one graph, by way of AOT autograd."""
    verdict = examine(compiled(softmax, backend="aot_eager", fullgraph=True), "softmax", **SETTINGS)
    assert verdict.passed, str(verdict)


def test_every_call_runs_what_was_compiled() -> None:
    """torch.compile by itself runs most calls in eager mode, once it has met eight variants."""
    through, beside, asked = Backend(), Backend(), 0

    def counted(x: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        return kernel(x)

    kernel = compiled(softmax, backend=through, dynamic=False)
    assert examine(counted, "softmax", **SETTINGS).passed
    assert through.calls == asked
    assert through.graphs > 8

    torch.compiler.reset()
    asked, kernel = 0, torch.compile(softmax, backend=beside, dynamic=False)
    assert examine(counted, "softmax", **SETTINGS).passed
    assert beside.calls < asked


def test_a_fault_in_a_late_variant_is_found() -> None:
    """The ninth graph is wrong: seen by `compiled`, and never run by torch.compile itself."""
    late = {"dynamic": False, "backend": Backend(wrong_from=9)}
    assert examine(compiled(softmax, **late), "softmax", **SETTINGS).outcome == "FAIL"
    torch.compiler.reset()
    late["backend"] = Backend(wrong_from=9)
    assert examine(torch.compile(softmax, **late), "softmax", **SETTINGS).passed


@pytest.mark.evidence
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inductors_code_passes(dtype: str) -> None:
    """Compiled by the C++ compiler of this machine, with sizes that it knows and with symbolic ones."""
    verdict = examine(compiled(softmax), "softmax", **{**SETTINGS, "dtype": dtype, "timeout": 300.0})
    assert verdict.passed, str(verdict)
