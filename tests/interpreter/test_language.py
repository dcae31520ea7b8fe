"""Where Python means something else by a kernel's source than Triton's compiler does."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from assay.interpreter import NotInterpreted, faithful
from tests.interpreter.triton_kernels import run


@triton.jit
def logic(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, ((x > 1) and (x < 3)).to(tl.float32))
    tl.store(y_ptr + N + i, ((x < 1) or (x > 3)).to(tl.float32))
    tl.store(y_ptr + 2 * N + i, (not (x > 1)).to(tl.float32))
    tl.store(y_ptr + 3 * N + i, max(x, 1.0))
    tl.store(y_ptr + 4 * N + i, min(x, 3.0))


def test_logic_and_extremes_of_blocks_are_elementwise():
    x, y = torch.tensor([0.0, 2.0, 4.0, 1.0]), torch.empty(5, 4)
    run(logic, x, y, N=4)
    assert y.tolist() == [[0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [1, 2, 4, 1], [0, 2, 3, 1]]


@triton.jit
def branches_on_a_block(x_ptr, N: tl.constexpr):
    if tl.load(x_ptr + tl.arange(0, N)) > 0:
        tl.store(x_ptr, 1.0)


def test_a_branch_on_a_block_is_refused():
    with faithful(), pytest.raises(InterpreterError, match="no truth to branch on"):
        branches_on_a_block[(1,)](torch.ones(4), N=4)


@triton.jit
def product(y_ptr, n: tl.int64, m):
    tl.store(y_ptr, n * m)


@triton.jit
def double(y_ptr, n):
    tl.store(y_ptr, n + n)


def test_whole_numbers_have_the_width_of_a_launch():
    y = torch.empty(1, dtype=torch.int64)
    with faithful():
        product[(1,)](y, 2**30, 8)
        assert int(y) == 2**33
        double[(1,)](y, 3_000_000_000)
        assert int(y) == 6_000_000_000


def test_numpy_numbers_are_refused():
    with faithful(), pytest.raises(TypeError, match=r"numpy\.int64"):
        double[(1,)](torch.empty(1), np.int64(3))


@triton.jit
def through_e4b15(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr).to(tl.float8e4b15).to(tl.float32))


def test_a_format_that_is_not_here_is_refused():
    with faithful(), pytest.raises(NotInterpreted, match="fp8e4b15 is not interpreted"):
        through_e4b15[(1,)](torch.ones(1), torch.ones(1))


@triton.jit
def fma64(x_ptr, y_ptr):
    x = tl.load(x_ptr)
    tl.store(y_ptr, tl.fma(x, x, tl.load(y_ptr)))


def test_fma_of_float64_rounds_once():
    x, y = (torch.tensor([value], dtype=torch.float64) for value in (1 + 2.0**-30, -(1 + 2.0**-29)))
    run(fma64, x, y)
    assert float(y) == 2.0**-60


WIDTH = 7


def kernel_with(width):
    WIDTH = tl.constexpr(width)

    @triton.jit
    def closure(y_ptr, times: tl.constexpr = width):
        tl.store(y_ptr, WIDTH * times)

    return closure


def test_a_kernel_sees_the_function_around_it():
    y = torch.empty(1)
    run(kernel_with(5), y)
    assert float(y) == 25


@triton.jit
def count(y_ptr, start, stop):
    for i in range(start, stop):
        tl.store(y_ptr + (i - start), i)


def test_a_loop_beyond_31_bits():
    y = torch.empty(2, dtype=torch.int64)
    run(count, y, 2**40, 2**40 + 2)
    assert y.tolist() == [2**40, 2**40 + 1]


SOURCE = """
import triton
import triton.language as tl

@triton.jit
def kernel(y_ptr):
    tl.store(y_ptr, {value})
"""


def test_a_kernel_is_what_it_was_when_it_was_defined(tmp_path: Path):
    path = tmp_path / "kernel_in_a_file.py"
    path.write_text(SOURCE.format(value=1.0))
    spec = importlib.util.spec_from_file_location("kernel_in_a_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_text(SOURCE.format(value=22.0))
    y = torch.empty(1)
    run(module.kernel, y)
    assert float(y) == 1.0


LAZY = """
import torch
from assay.verify import examine

def softmax(x):
    from assay.kernels.triton.softmax import softmax
    return softmax(x)

print(examine(softmax, "softmax", dtype="float32", examples=0, shapes={"R": [2], "N": [5]}).outcome)
"""


def test_a_kernel_that_imports_triton_in_its_first_call():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "PASS", done.stdout + done.stderr


@triton.jit
def target_is_hopper(y_ptr):
    tl.store(y_ptr, 1.0 if tl.target_info.cuda_capability_geq(9, 0) else math.nan)


def test_the_target_is_one_of_nvidias():
    y = torch.empty(1)
    run(target_is_hopper, y)
    assert float(y) == 1.0
