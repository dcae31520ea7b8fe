"""Block pointers, in the versions of Triton that have them (up to 3.8)."""

import math

import pytest
import torch
import triton
import triton.language as tl

from assay.interpreter import NotInterpreted, SanitizerError, sanitized
from tests.interpreter.triton_kernels import run

HERE = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
here = pytest.mark.skipif(not HERE, reason="this Triton has no block pointers")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@triton.jit
def doubled(x_ptr, y_ptr, M, N, stride, PADDING: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (M, N), (stride, 1), (0, 0), (16, 16), (1, 0))
    y = tl.make_block_ptr(y_ptr, (32, 32), (32, 1), (0, 0), (16, 16), (1, 0))
    x, y = tl.advance(x, (16, 0)), tl.advance(y, (16, 0))
    for _ in range(2):
        block = tl.load(x, boundary_check=(0, 1), padding_option=PADDING)
        tl.store(y, (2 * block.to(tl.float32)).to(y_ptr.dtype.element_ty), boundary_check=(0, 1))
        x, y = tl.advance(x, (0, 16)), tl.advance(y, (0, 16))


@here
@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_padded_and_move_on(dtype, padding):
    """What lies beyond the tensor is zero or NaN, in every format, and the pointer moves by elements."""
    x = (torch.arange(20 * 24).reshape(20, 24) % 7 - 3).to(dtype)
    y = torch.full((32, 32), 0.5).to(dtype)
    run(doubled, x, y, 20, 24, 24, PADDING=padding)
    expected = torch.full((32, 32), 0.5)
    expected[16:] = 0.0 if padding == "zero" else math.nan
    expected[16:20, :24] = 2 * x[16:].float()
    got = y.float()
    assert bool(((got == expected) | (got.isnan() & expected.isnan())).all())


@triton.jit
def unchecked(x_ptr, y_ptr, M, N):
    x = tl.make_block_ptr(x_ptr, (M, N), (N, 1), (0, 0), (16, 16), (1, 0))
    y = tl.make_block_ptr(y_ptr, (16, 16), (16, 1), (0, 0), (16, 16), (1, 0))
    tl.store(y, tl.load(x))


@here
def test_a_block_without_a_check_is_sanitized():
    """A load of a block beyond its tensor without boundary_check is found."""
    with sanitized(), pytest.raises(SanitizerError, match="x_ptr"):
        unchecked[(1,)](torch.ones(10, 16), torch.ones(16, 16), 10, 16)


@pytest.mark.skipif(HERE, reason="this Triton has block pointers")
def test_where_triton_has_none_its_own_words_say_so():
    """A Triton without block pointers is what fails, and neither the kernel nor the interpreter."""
    with pytest.raises(NotInterpreted, match=rf"^Triton {triton.__version__} can't do this: Block pointers have been"):
        run(unchecked, torch.ones(10, 16), torch.ones(16, 16), 10, 16)
