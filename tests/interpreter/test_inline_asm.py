"""Kernels with inline assembly: how elements share registers, and published tricks."""

import random

import torch
import triton
import triton.language as tl

from assay.verify import examine
from tests.interpreter.triton_kernels import run


@triton.jit
def int4_to_half(x_ptr, y_ptr, N: tl.constexpr):
    packed = tl.load(x_ptr + tl.arange(0, N))
    low, high = tl.inline_asm_elementwise(
        """
        {
            .reg .b32 t;
            lop3.b32 $0, $2, 0x000f000f, 0x64006400, 0xea;  // (x & mask) | 1024
            sub.f16x2 $0, $0, 0x64086408;                   // minus 1032
            shr.u32 t, $2, 4;
            lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea;
            sub.f16x2 $1, t, 0x64086408;
        }
        """,
        "=r,=r,r",
        [packed],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    tl.store(y_ptr + tl.arange(0, N), low)
    tl.store(y_ptr + N + tl.arange(0, N), high)


def test_a_kernel_unpacks_int4_as_published_ones_do():
    """The usual trick with lop3 and packed halves gives the nibbles minus eight."""
    draw = random.Random(0)
    words = [draw.randrange(-(2**31), 2**31) for _ in range(16)]
    y = torch.empty(2, 16, dtype=torch.int32)
    run(int4_to_half, torch.tensor(words, dtype=torch.int32), y, N=16)
    halves = y.view(torch.float16).reshape(2, 16, 2)
    for place, word in enumerate(words):
        nibbles = [(word >> 4 * n & 15) - 8 for n in range(8)]
        assert halves[0, place].tolist() == [nibbles[0], nibbles[4]]
        assert halves[1, place].tolist() == [nibbles[1], nibbles[5]]


@triton.jit
def four_at_once(a_ptr, b_ptr, c_ptr, d_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    c, d = tl.inline_asm_elementwise(
        """
        { .reg .b8 t<4>;
          mov.b32 {t0, t1, t2, t3}, $8;
          cvt.u32.u8 $0, t0; cvt.u32.u8 $1, t1; cvt.u32.u8 $2, t2; cvt.u32.u8 $3, t3; }
        cvt.rn.f32.s32 $4, $0; cvt.rn.f32.s32 $5, $1; cvt.rn.f32.s32 $6, $2; cvt.rn.f32.s32 $7, $3;
        max.f32 $4, $4, $9; max.f32 $5, $5, $10; max.f32 $6, $6, $11; max.f32 $7, $7, $12;
        """,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r",
        [tl.load(a_ptr + i), tl.load(b_ptr + i)],
        dtype=(tl.int32, tl.float32),
        is_pure=True,
        pack=4,
    )
    tl.store(c_ptr + i, c)
    tl.store(d_ptr + i, d)


def test_elements_of_8_bits_share_a_register():
    """Four bytes lie in one register and four floats in four, in their order; results of two types come back."""
    a = torch.arange(250, 282).to(torch.uint8)
    b, c, d = torch.randn(32) * 100, torch.empty(32, dtype=torch.int32), torch.empty(32)
    run(four_at_once, a, b, c, d, N=32)
    assert c.tolist() == a.tolist()
    assert d.tolist() == torch.maximum(a.float(), b).tolist()


@triton.jit
def tanh_of_the_hardware(x_ptr, y_ptr, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=i < n)


def fast_tanh(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        tanh_of_the_hardware[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), N=256)
    return y


def test_an_examination_sees_what_the_hardware_loses():
    """tanh.approx keeps no contract of float32."""
    assert (
        examine(fast_tanh, "tanh", dtype="float32", examples=0, shrinking=False, shapes={"R": [3], "N": [70]}).outcome
        == "FAIL"
    )
