"""Memory: what a kernel reads before it writes, writes beside its own tensors, or keeps from call to call, is found."""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.verify import Verdict, examine
from assay.verify.cases.case import Case, build
from assay.verify.findings import Failure
from assay.verify.harness.call import Call, PoisonedMemory, poison_value
from tests.zoo.conduct import silu_tail_unwritten
from tests.zoo.functions import silu
from tests.zoo.products import gemm
from tests.zoo.softmax import softmax_shifted

from .examined import failure_of, first, passes, quick

X = torch.ones(3, 4)
ALLOCATIONS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(3, 4),
    "empty-channels_last": lambda: torch.empty(2, 3, 4, 5, memory_format=torch.channels_last),
    "empty_like": lambda: torch.empty_like(X),
    "empty_strided": lambda: torch.empty_strided((3, 4), (1, 5)),
    "empty_permuted": lambda: torch.empty_permuted((3, 4), (1, 0)),
    "new_empty": lambda: X.new_empty(3, 4),
    "new_empty_strided": lambda: X.new_empty_strided((3, 4), (4, 1)),
    "Tensor": lambda: torch.Tensor(3, 4),
    "new": lambda: X.new(3, 4),
    "scalar": lambda: torch.empty(()),
}


def test_poisoned_memory_needs_no_compiler() -> None:
    """torch's own imports for a dispatch mode take seconds, in each process that examines a kernel; so does a call of
    one of its custom operators, which the bundled kernels aren't, and `torch.unravel_index` where one fails."""
    script = """
import sys, torch
from assay.interpreter import faithful
from assay.kernels.triton.softmax import softmax
from assay.verify import examine
from assay.verify.harness.call import PoisonedMemory
memory = PoisonedMemory("nan")
before = len(sys.modules)
with memory:
    torch.softmax(torch.ones(3, 4), -1)
print(len(sys.modules) - before)
with faithful(), memory:
    softmax(torch.ones(3, 4))
first = {"effort": "quick", "every_aspect": False, "examples": 0}
assert examine(lambda x: 2 * torch.softmax(x, -1), "softmax", dtype="float32", **first).outcome == "FAIL"
assert not {"torch._dynamo", "sympy"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert int(done.stdout) < 10


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("memory", ["nan", "huge"])
def test_fresh_tensors_are_poisoned(name: str, memory: str) -> None:
    """Whatever way torch hands out uninitialised memory, it holds NaN or 2^100, with the right strides."""
    plain = ALLOCATIONS[name]()
    with PoisonedMemory(memory) as poison:
        fresh = ALLOCATIONS[name]()
    assert bool(fresh.isnan().all() if memory == "nan" else (fresh == 2.0**100).all())
    assert (fresh.shape, fresh.stride(), fresh.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert not poison.overrun()


def test_what_is_initialised_is_left_alone() -> None:
    with PoisonedMemory("nan"):
        made = [torch.zeros(3), torch.ones_like(X), torch.full((2,), 3.0), X + 1, X.clone(), torch.arange(4.0)]
    assert not any(bool(tensor.isnan().any()) for tensor in made)


@pytest.mark.parametrize(
    ("memory", "dtype", "value"),
    [
        ("nan", torch.float8_e4m3fn, math.nan),
        ("huge", torch.float8_e4m3fn, 448.0),
        ("huge", torch.float16, 65504.0),
        ("huge", torch.bfloat16, 2.0**100),
        ("nan", torch.int32, 0.0),
        ("huge", torch.int32, 1.0),
        ("huge", torch.uint8, 1.0),
        ("huge", torch.bool, 1.0),
    ],
)
def test_every_dtype_has_its_poison(memory: str, dtype: torch.dtype, value: float) -> None:
    """2^100 or the largest value below it; integers stay small, so that an index out of them is no crash."""
    assert poison_value(memory, dtype) == pytest.approx(value, nan_ok=True)
    with PoisonedMemory(memory):
        fresh = torch.empty(5, dtype=dtype)
    assert fresh.double().tolist() == pytest.approx([value] * 5, nan_ok=True)


@pytest.mark.parametrize("shape", [(3, 5), (1,), (0, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_write_beyond_an_allocated_tensor_is_found(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One element before the first or behind the last changes a guard zone; the whole tensor written does not."""
    with PoisonedMemory("nan") as poison:
        fresh = torch.empty(shape, dtype=dtype)
        fresh.copy_(torch.ones(shape))
    assert not poison.overrun()
    for place in (fresh.storage_offset() - 1, fresh.storage_offset() + fresh.numel()):
        with PoisonedMemory("nan") as poison:
            fresh = torch.empty(shape, dtype=dtype)
        fresh.as_strided((1,), (1,), place).copy_(torch.zeros(1))
        assert poison.overrun()


def written_whole(make: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An honest kernel that allocates its output and writes all of it."""
    out = make(x)
    out.copy_(silu(x))
    return out


HONEST: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "empty_like": lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    "new_empty": lambda x: x.new_empty(x.shape),
    "padded": lambda x: torch.empty(x.shape[0] + 1, x.shape[1] + 3, dtype=x.dtype)[1:, 3:],
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_kernel_may_allocate_as_it_likes(name: str) -> None:
    """Memory that is written before it is read, padding that never is, and any strides of the output: no finding."""
    passes(quick(partial(written_whole, HONEST[name]), "silu", "bfloat16", examples=5))


def accumulates_into_fresh_memory(a: Tensor, b: Tensor) -> Tensor:
    """The accumulator is never set to zero."""
    total = torch.empty(a.shape[0], b.shape[1])
    total += gemm(a.float(), b.float())
    return total.to(a.dtype)


def maximum_of_fresh_memory(x: Tensor) -> Tensor:
    """The running maximum starts with what is there; NaN is skipped, so only a large number shows it."""
    start = torch.fmax(torch.empty(x.shape[0], 1), x.float().amax(1, keepdim=True))
    weights = torch.exp(x.float() - start)
    return (weights / weights.sum(1, keepdim=True)).to(x.dtype)


def masked_by_fresh_memory(x: Tensor) -> Tensor:
    """A flag that nobody set decides whether anything is computed."""
    flag = torch.empty(1, dtype=torch.int32)
    return silu(x) if int(flag) != 1 else silu(x) * 2


UNWRITTEN: list[tuple[str, Callable[..., Tensor]]] = [
    ("silu", silu_tail_unwritten),
    ("gemm", accumulates_into_fresh_memory),
    ("softmax", maximum_of_fresh_memory),
    ("silu", masked_by_fresh_memory),
]


@pytest.mark.parametrize(("op", "kernel"), UNWRITTEN, ids=[kernel.__name__ for _, kernel in UNWRITTEN])
def test_what_was_never_written_is_named(op: str, kernel: Callable[..., Tensor]) -> None:
    """A result that changes with what fresh memory holds is an unwritten output, whether NaN or 2^100 shows it."""
    verdict = first(kernel, op, examples=20, shrinking=True)
    if verdict.failure.kind != "nondeterministic":  # which it is too, where memory happens to change between two calls
        assert verdict.failure.kind == "unwritten_output", str(verdict)
        assert "what was in memory before the call" in verdict.failure.message


@torch.library.custom_op("assay_tests::unfilled", mutates_args=())
def unfilled(x: Tensor) -> Tensor:
    """An operator of a library that forgets to compute."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("assay_tests::filled", mutates_args=())
def filled(x: Tensor) -> Tensor:
    """An operator that allocates its output and fills it."""
    return written_whole(HONEST["empty"], x)


library = torch.library.Library("assay_tests_too", "FRAGMENT")
library.define("unfilled(Tensor x) -> Tensor")
library.impl("unfilled", lambda x: torch.empty(x.shape, dtype=x.dtype), "CPU")

OPERATORS: dict[str, Callable[..., Tensor]] = {
    "custom_op": unfilled,
    "custom_op in a function": lambda x: unfilled(x).clone(),
    "Library.impl": torch.ops.assay_tests_too.unfilled,
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("gradients", [False, True])
def test_what_an_operator_allocates_is_poisoned(name: str, gradients: bool) -> None:
    for memory, expected in (("nan", math.nan), ("huge", 2.0**100)):
        with torch.set_grad_enabled(gradients), PoisonedMemory(memory):
            fresh = OPERATORS[name](X)
        assert fresh.tolist() == [pytest.approx([expected] * 4, nan_ok=True)] * 3


def test_memory_that_holds_right_numbers_when_tried_again_is_named() -> None:
    calls = count()

    def kernel(x: Tensor) -> Tensor:
        fresh = torch.empty(x.shape)
        poisoned = fresh.isnan() | (fresh.abs() == 2.0**100)
        left = torch.full_like(fresh, 1e15) if next(calls) == 1 else torch.nn.functional.silu(x)
        return torch.where(poisoned, fresh, left)

    assert failure_of(first(kernel, "silu", shrinking=True)).kind == "unwritten_output"


def test_an_operator_that_fills_nothing_is_named() -> None:
    assert failure_of(first(unfilled, "silu", shrinking=True)).kind == "unwritten_output"
    assert quick(filled, "silu", "bfloat16", examples=5).passed


def test_an_operator_that_is_not_there_is_left_to_torch() -> None:
    """An operator without a kernel for the device raises what torch raises, and goes on to be poisoned elsewhere."""
    library.define("nowhere(Tensor x) -> Tensor")
    with PoisonedMemory("nan"):
        with pytest.raises(NotImplementedError, match="nowhere"):
            torch.ops.assay_tests_too.nowhere(X)
        assert bool(torch.empty(3).isnan().all())


def test_a_wrong_number_is_not_blamed_on_memory() -> None:
    assert failure_of(first(lambda x: written_whole(HONEST["empty"], x) * 2, "silu", shrinking=True)).kind in (
        "contract",
        "exact",
    )


class Static:
    """A kernel that returns the same buffer from every call of one shape, as a captured graph does."""

    def __init__(self, kernel: Callable[..., Tensor], *, cloned: bool) -> None:
        self.kernel, self.cloned = kernel, cloned
        self.buffers: dict[Any, Tensor] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        result = self.kernel(*inputs)
        buffer = self.buffers.setdefault((result.shape, result.dtype), torch.zeros_like(result))
        buffer.copy_(result)
        return buffer.clone() if self.cloned else buffer


def test_a_result_in_a_static_buffer_is_found() -> None:
    failure = failure_of(quick(Static(softmax_shifted, cloned=False)))
    assert (failure.kind, "earlier call's result" in failure.message) == ("nondeterministic", True)
    passes(quick(Static(softmax_shifted, cloned=True), examples=5))


def beyond_own_output(x: Tensor, *, behind: int) -> Tensor:
    """A store that runs past the end of the output that the kernel allocated, or starts before it."""
    out = torch.empty(x.shape, dtype=x.dtype)
    out.copy_(silu(x))
    first = out.storage_offset() + (out.numel() if behind > 0 else behind)
    if out.numel() and first >= 0 and (first + 1) * out.element_size() <= out.untyped_storage().nbytes():
        out.as_strided((1,), (1,), first).fill_(1.0)
    return out


@pytest.mark.parametrize("behind", [1, -1])
def test_a_store_beyond_the_kernels_own_output_is_found(behind: int) -> None:
    few: dict[str, Any] = {"effort": "quick", "examples": 0, "shrinking": False}
    verdict: Verdict = examine(partial(beyond_own_output, behind=behind), "silu", dtype="bfloat16", **few)
    assert verdict.failure.kind == "out_of_bounds_write", str(verdict)
    assert "a tensor that it had allocated" in verdict.failure.message


def test_memory_is_poisoned_as_the_case_says() -> None:
    call = Call(lambda x: torch.full_like(x, float(torch.empty(64).isnan().all())), {})
    seen = {}
    for memory in ("nan", "huge"):
        case = Case("silu", {"R": 3, "N": 4}, {"x": "float32"}, memory=memory)
        result = call(case, build(case))
        assert not isinstance(result, Failure)
        seen[memory] = float(result[0][0, 0])
    assert seen == {"nan": 1.0, "huge": 0.0}
