"""Whose fault an error is: the kernel's, which Triton's compiler refuses as well, or the interpreter's own."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from assay.interpreter import NotInterpreted, faithful, kernels
from assay.verify import examine
from tests.interpreter.triton_kernels import run

HALF, THREE, NOTHING, FLOAT = tl.constexpr(0.5), tl.constexpr(3), tl.constexpr(None), tl.constexpr(tl.float32)


class Constants:
    half, three = HALF, THREE


@triton.jit
def with_constants(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N.value)
    x = tl.load(x_ptr + i)
    if NOTHING is None:
        tl.store(y_ptr + i, HALF * x - Constants.half / x + (x > HALF).to(FLOAT) - x * HALF + HALF.value)
    b = Constants.three - i + Constants.three // (i + 1) + Constants.three % (i + 1) + (Constants.three & i)
    b += (Constants.three | i) + (Constants.three ^ i) + (Constants.three << i) + (Constants.three >> i)
    tl.store(y_ptr + N + i, b.to(FLOAT))
    tl.store(y_ptr + 2 * N + i, ((Constants.three == i) | (Constants.half >= x) & (Constants.three != i)).to(FLOAT))


def test_a_global_constant_stands_on_either_side_of_an_operator():
    """A global constexpr, by name or as an attribute, combines with tensors as its value does."""
    x, y = torch.tensor([0.25, 1.0, 2.0, 4.0]), torch.empty(3, 4)
    run(with_constants, x, y, N=4)
    i = range(4)
    values = x.tolist()
    assert y[0].tolist() == [0.5 * v - 0.5 / v + (v > 0.5) - v * 0.5 + 0.5 for v in values]
    assert y[1].tolist() == [
        3 - n + 3 // (n + 1) + 3 % (n + 1) + (3 & n) + (3 | n) + (3 ^ n) + (3 << n) + (3 >> n) for n in i
    ]
    assert y[2].tolist() == [float(n == 3 or (v <= 0.5 and n != 3)) for n, v in zip(i, values, strict=True)]


@triton.jit
def adds_blocks_of_two_sizes(x_ptr):
    tl.store(x_ptr, tl.sum(tl.arange(0, 8) + tl.arange(0, 16)))


@triton.jit
def lacks_a_method(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr).no_such_method())


@triton.jit
def asserts(x_ptr):
    tl.static_assert(x_ptr is None, "too small")


@triton.jit
def doubles(x_ptr):
    x = tl.load(x_ptr)
    tl.store(x_ptr, x + x)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [(adds_blocks_of_two_sizes, "8 and 16"), (lacks_a_method, "no_such_method"), (asserts, "too small")],
)
def test_what_a_compiler_or_a_gpu_refuses_is_the_kernels(kernel, words):
    with faithful(), pytest.raises(InterpreterError, match=rf"{words}.*in program \(0, 0, 0\)"):
        kernel[(1,)](torch.ones(1))


def broken_store(*_):
    raise TypeError("a store of\n" + "numbers " * 100 + "\nfailed")


def test_what_a_compiler_takes_is_the_interpreters(monkeypatch):
    monkeypatch.setattr(kernels.builder, "create_store", broken_store)
    with faithful(), pytest.raises(NotInterpreted, match="TypeError: a store of numbers") as caught:
        doubles[(1,)](torch.ones(1))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("failed (in program (0, 0, 0) of doubles)")


def test_after_an_error_the_interpreter_goes_on():
    y = torch.ones(1)
    with faithful():
        with pytest.raises(InterpreterError):
            lacks_a_method[(1,)](torch.ones(1))
        doubles[(1,)](y)
    assert y.item() == 2


def softmax(x):
    doubles[(1,)](torch.ones(1))
    return torch.softmax(x, -1)


def hides_it(x):
    try:
        return softmax(x)
    except NotImplementedError as error:
        raise ValueError("can't") from error


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("kernel", [softmax, hides_it])
def test_an_examination_refuses_what_is_not_interpreted(monkeypatch, kernel, isolate):
    monkeypatch.setattr(kernels.builder, "create_store", broken_store)
    verdict = examine(kernel, "softmax", dtype="float32", shapes={"R": [2], "N": [5]}, examples=3, isolate=isolate)
    assert verdict.outcome == "REFUSED"
    assert "store of numbers" in verdict.note
    assert "\n" not in verdict.note
    assert verdict.failure is None


def test_a_kernels_own_error_still_fails_it():
    def kernel(x):
        lacks_a_method[(1,)](torch.ones(1))
        return torch.softmax(x, -1)

    verdict = examine(kernel, "softmax", dtype="float32", shapes={"R": [2], "N": [5]}, examples=3)
    assert (verdict.outcome, verdict.failure.kind) == ("FAIL", "crash")
