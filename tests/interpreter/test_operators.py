"""Operators of tensors in one step give what Triton's own way gives, for every pair of types that meet in kernels."""

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as plain

from assay.interpreter import kernels
from assay.interpreter.language import language
from assay.interpreter.operators import np_dtype
from tests.interpreter.triton_kernels import run

METHODS = {
    "add": "add", "sub": "sub", "mul": "mul", "lt": "less_than", "le": "less_equal", "gt": "greater_than",
    "ge": "greater_equal", "eq": "equal", "ne": "not_equal", "and": "and_", "or": "or_", "xor": "xor_",
}  # fmt: skip
TYPES = (tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64)
SHAPES = ((), (4,), (2, 4), (2, 1), (1, 4), (8, 4))
COMMON = ((tl.int32, tl.int32), (tl.int32, tl.int64), (tl.int64, tl.int32), (tl.float32, tl.float32))
NUMBERS = (0, 3, -1, 2**23 + 1, 2**40, 0.5, -0.0, 1e-40, 1e300, float("nan"), float("inf"), True)


def tensor(dtype, shape, seed=0):
    """Numbers of a type, the greatest among them."""
    data = np.random.default_rng(seed).integers(-3, 4, shape or (1,)).astype(np_dtype(dtype))
    if dtype.is_int() and dtype != tl.int1:
        data.flat[0] = np.iinfo(data.dtype).max
    return tl.tensor(plain.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(compute):
    """Type, shape and bits of a result, or the error."""
    try:
        with np.errstate(all="ignore"):
            result = compute()
    except Exception as error:
        return type(error)
    data = result.handle.data
    return str(result.type), result.handle.dtype.name, [int(n) for n in result.shape], str(data.dtype), data.tobytes()


@pytest.mark.parametrize("name", METHODS)
def test_two_tensors(name):
    """Types, shapes, bits and refusals are Triton's."""
    method = getattr(kernels.semantic, METHODS[name])
    flags = (False,) if name in ("add", "sub", "mul") else ()
    with language:
        for left, right in itertools.product(TYPES, TYPES):
            shapes = itertools.product(SHAPES, SHAPES) if (left, right) in COMMON else [((4,), (4,)), ((4,), ())]
            for a, b in shapes:
                x, y = tensor(left, a), tensor(right, b, 1)
                found = outcome(lambda x=x, y=y: getattr(x, f"__{name}__")(y))
                assert found == outcome(lambda x=x, y=y: method(x, y, *flags)), (left, a, right, b)


@pytest.mark.parametrize("name", METHODS)
def test_a_tensor_and_a_number(name):
    """On either side of the operator."""
    method = getattr(kernels.semantic, METHODS[name])
    flags = (False,) if name in ("add", "sub", "mul") else ()
    with language:
        for dtype, shape, number in itertools.product(TYPES, ((), (4,)), NUMBERS):
            x = tensor(dtype, shape)
            found = outcome(lambda x=x, number=number: getattr(x, f"__{name}__")(number))
            assert found == outcome(lambda x=x, number=number: method(x, number, *flags)), (dtype, shape, number)
            if flags:
                found = outcome(lambda x=x, number=number: getattr(x, f"__r{name}__")(number))
                assert found == outcome(lambda x=x, number=number: method(number, x, *flags)), (dtype, shape, number)


@triton.jit
def strides_by_pointers(x_ptr, y_ptr, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    pointers = x_ptr + rows[:, None] * n + columns[None, :].to(tl.int64)
    pointers += 1
    out = rows[:, None] * COLUMNS + y_ptr + columns[None, :]
    tl.store(out, tl.load(pointers) + tl.load(x_ptr + 0))


def test_pointers_and_offsets():
    x, y = torch.arange(40, dtype=torch.int32), torch.empty(4, 8, dtype=torch.int32)
    run(strides_by_pointers, x, y, 9, ROWS=4, COLUMNS=8)
    assert y.tolist() == [[row * 9 + column + 1 for column in range(8)] for row in range(4)]


@triton.jit
def reads_askew(x_ptr, y_ptr):
    byte = x_ptr.to(tl.pointer_type(tl.int8)) + 1
    tl.store(y_ptr, tl.load(byte.to(tl.pointer_type(tl.int16))))


def test_elements_between_elements_are_read_as_they_lie():
    """What an address that is no multiple of the element's size holds."""
    x, y = torch.tensor([0x0201, 0x0403], dtype=torch.int16), torch.empty(1, dtype=torch.int16)
    run(reads_askew, x, y)
    assert y.item() == 0x0302


@triton.jit
def loads_transposed(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    whole = tl.load(x_ptr + i[:, None] * N + i[None, :])
    turned = tl.load(x_ptr + i[None, :] * N + i[:, None], mask=i[:, None] > i[None, :], other=tl.trans(-whole))
    tl.store(y_ptr + i[:, None] * N + i[None, :], turned)


def test_what_stands_in_for_masked_elements_may_lie_in_any_order():
    """Loaded elements and those that stand in for others come out in their places."""
    x, y = torch.arange(1.0, 17.0).reshape(4, 4), torch.empty(4, 4)
    run(loads_transposed, x, y, N=4)
    assert torch.equal(y, torch.where(torch.ones(4, 4).tril(-1) > 0, x.T, -x.T))
