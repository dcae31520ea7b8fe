"""Functions under torch.compile: what the compiler made is examined in every case, and its faults are found."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.verify.harness.compiled import compiled

from .examined import fails, passes, quick

SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "shapes": {"R": [1, 5], "N": [1, 7, 33]}}


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
    assert quick(compiled(softmax, backend="aot_eager", fullgraph=True), **SETTINGS).passed


@pytest.mark.parametrize("compiler", [torch.compile, compiled])
def test_every_call_runs_what_was_compiled(compiler: Any) -> None:
    backend, eager = Backend(), 0

    def counted(x: Tensor) -> Tensor:
        nonlocal eager
        eager += not torch.compiler.is_compiling()
        return softmax(x)

    kernel = compiler(counted, backend=backend, dynamic=False)
    verdict = passes(quick(kernel, **SETTINGS))
    assert eager == 0
    assert backend.graphs > 8
    assert backend.calls > verdict.cases


@pytest.mark.parametrize("compiler", [torch.compile, compiled])
def test_a_fault_in_a_late_variant_is_found(compiler: Any) -> None:
    fails(quick(compiler(softmax, dynamic=False, backend=Backend(wrong_from=9)), **SETTINGS))


def test_the_limit_is_the_callers_again() -> None:
    config = torch._dynamo.config
    before = config.recompile_limit, config.fail_on_recompile_limit_hit
    assert quick(torch.compile(softmax, backend="eager"), **SETTINGS).passed
    assert (config.recompile_limit, config.fail_on_recompile_limit_hit) == before


@pytest.mark.evidence
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inductors_code_passes(dtype: str) -> None:
    assert quick(compiled(softmax), **{**SETTINGS, "dtype": dtype, "timeout": 300.0}).passed
