"""Instructions of inline assembly against the PTX ISA, in rational and integer arithmetic."""

import math
import operator
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from assay.interpreter import NotInterpreted
from assay.interpreter.numerics.ptx_floats import run_inline
from assay.verify import examine
from tests.interpreter.exact_floats import FLOATS, Float
from tests.interpreter.triton_kernels import run

UNSIGNED = {8: tl.uint8, 16: tl.uint16, 32: tl.uint32, 64: tl.uint64}


def asm(text: str, *arguments: tuple[int, list[int]], out: int = 32, pack: int = 1, outputs: int = 1) -> list[int]:
    """The patterns that a program gives, of ``out`` bits, for arguments of (bits, patterns)."""
    operands = [TensorHandle(np.array(data, f"u{bits // 8}"), UNSIGNED[bits]) for bits, data in arguments]
    registers = sum(pack // min(max(32 // bits, 1), pack) for bits, _ in arguments)
    constraints = ",".join(["=r"] * outputs + ["r"] * registers)
    with np.errstate(all="ignore"):
        found = run_inline(text, constraints, operands, [UNSIGNED[out]], pack)
    return found.get_result(0).data.tolist()


def patterns(format: Float, count: int, seed: int) -> list[int]:
    """Random patterns, and the ends of the format: zeros, subnormals, one, the largest, infinities."""
    draw = random.Random(seed)
    one = format.bias << format.trailing
    ends = [0, 1, one, one + 1, one - 1, 1 << format.trailing, (1 << format.trailing) - 1]
    near = [one + draw.randrange(-(4 << format.trailing), 4 << format.trailing) for _ in range(count // 2)]
    ends += [pattern | 1 << (format.bits - 1) for pattern in ends]
    chosen = [draw.randrange(2**format.bits) for _ in range(count)]
    return [*(draw.choice(ends) for _ in range(count // 2)), *near, *chosen]


EXACT: dict[str, Callable[..., Fraction]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "fma": lambda x, y, z: x * y + z,
}


WIDE = [(name, kind, mode) for name in EXACT for kind in ("f32", "f64") for mode in ("rn", "rz", "rm", "rp")]
HALVES = [(name, kind, "rn") for name in EXACT if name != "div" for kind in ("f16", "bf16")]
PACKED = [("fma", "f16x2", "rn"), ("fma", "bf16x2", "rn")]


@pytest.mark.parametrize(("name", "kind", "mode"), [*WIDE, *HALVES, *PACKED])
def test_arithmetic_is_rounded_once_as_its_mode_says(name, kind, mode):
    format, pack = FLOATS[kind.removesuffix("x2")], 2 if kind.endswith("x2") else 1
    columns = [patterns(format, 40, index) for index in range(3 if name == "fma" else 2)]
    columns[-1] = columns[-1][::-1]
    operands = ", ".join(f"${index + 1}" for index in range(len(columns)))
    arguments = [(format.bits, column) for column in columns]
    got = asm(f"{name}.{mode}.{kind} $0, {operands};", *arguments, out=format.bits, pack=pack)
    checked = 0
    for pattern, *given in zip(got, *columns, strict=True):
        values = [format.value(each) for each in given]
        if all(isinstance(value, Fraction) for value in values) and (right := EXACT[name](*values)):
            checked += 1
            assert format.value(pattern) == format.rounded(right, mode), (name, given)
    assert checked > 20


@pytest.mark.parametrize(
    ("source", "target"), [("f32", kind) for kind in ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")] + [("f16", "e4m3")]
)
def test_pairs_become_few_bits(source, target):
    """cvt.rn.satfinite of a pair rounds and saturates each; of two operands the first is the upper one."""
    narrow, wide = FLOATS[target], FLOATS[source]
    left, right = patterns(wide, 200, 0), patterns(wide, 200, 1)
    near = [narrow.value(code) for code in range(2 ** (narrow.bits - 1) - 2) if narrow.value(code)]
    middles = [(a + b) / 2 for a, b in pairwise(near)]
    if source == "f32":
        left[: len(middles)] = [int(np.float32(float(each)).view(np.uint32)) for each in middles]
        body = f"cvt.rn.satfinite.{target}x2.f32 t, $1, $2;"
        arguments = ((32, left), (32, right))
    else:
        body = f"mov.b32 u, {{$2, $1}}; cvt.rn.satfinite.{target}x2.f16x2 t, u;"
        arguments = ((16, left), (16, right))
    got = asm(f"{{ .reg .b16 t; .reg .b32 u; {body} cvt.u32.u16 $0, t; }}", *arguments)
    place = 4 if narrow.bits == 4 else 8
    for pattern, *given in zip(got, left, right, strict=True):
        for code, each in zip((pattern >> place, pattern & (2**place - 1)), given, strict=True):
            value = wide.value(each)
            if isinstance(value, float) and math.isnan(value):
                assert code == (0x7F if narrow.nans else 2 ** (narrow.bits - 1) - 1)
            elif isinstance(value, float) and math.isinf(value):
                assert narrow.value(code) == math.copysign(1, value) * narrow.largest
            elif value:
                assert narrow.value(code) == narrow.rounded(value, "rn", saturate=True)


@pytest.mark.parametrize("source", ["e4m3", "e5m2", "e2m1"])
def test_few_bits_become_pairs_of_halves(source):
    format = FLOATS[source]
    codes = list(range(2**format.bits))
    width = 4 if format.bits == 4 else 8
    both = [code << width | (7 * code + 3) % 2**format.bits for code in codes]
    register = "b8" if width == 4 else "b16"
    text = f"{{ .reg .{register} t; cvt.u16.u32 t, $1; cvt.rn.f16x2.{source}x2 $0, t; }}"
    for pattern, code in zip(asm(text, (32, both)), codes, strict=True):
        for got, want in ((pattern >> 16, code), (pattern & 0xFFFF, (7 * code + 3) % 2**format.bits)):
            value, found = format.value(want), FLOATS["f16"].value(got)
            assert found == value or (math.isnan(found) and math.isnan(value))


def test_conversions_between_floats_and_integers():
    numbers = [0.5, 1.5, 2.5, -0.5, -1.5, 127.5, 128.5, -129.0, 1e10, -1e10, math.inf, math.nan]
    bits = np.array(numbers, np.float32).view(np.uint32).tolist()
    for mode, whole in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
        for width in (8, 16, 32):
            low, high = -(2 ** (width - 1)), 2 ** (width - 1) - 1
            got = asm(f"cvt.{mode}.s{width}.f32 $0, $1;", (32, bits))
            for pattern, number in zip(got, numbers, strict=True):
                right = 0 if math.isnan(number) else high if number == math.inf else min(max(whole(number), low), high)
                assert pattern == right % 2**32, (mode, width, number)
    wide = [0, 1, 2**53 + 1, 2**62 + 2**38, 2**62 + 2**38 + 1, 2**63 - 1, 2**64 - 1, -(2**62) - 2**38 - 1]
    for mode in ("rn", "rz", "rm", "rp"):
        for got, number in zip(asm(f"cvt.{mode}.f32.s64 $0, $1;", (64, [n % 2**64 for n in wide])), wide, strict=True):
            number = (number + 2**63) % 2**64 - 2**63
            if number:
                assert FLOATS["f32"].value(got) == FLOATS["f32"].rounded(Fraction(number), mode)
    assert asm("cvt.rna.tf32.f32 $0, $1;", (32, [0x3F801000, 0x3F800FFF])) == [0x3F802000, 0x3F800000]
    assert asm("cvt.sat.u8.s32 $0, $1;", (32, [300, 2**32 - 5])) == [255, 0]


def test_scales_are_powers_of_two():
    numbers = [1.0, 1.0001, 3.0, 2.0**-127, 0.0, math.inf, math.nan, 2.0**127 * 1.5]
    bits = np.array(numbers, np.float32).view(np.uint32).tolist()
    text = "{{ .reg .b16 t; cvt.{}.satfinite.ue8m0x2.f32 t, 0f00000000, $1; cvt.u32.u8 $0, t; }}"
    assert asm(text.format("rp"), (32, bits)) == [127, 128, 129, 0, 0, 254, 255, 254]
    assert asm(text.format("rz"), (32, bits)) == [127, 127, 128, 0, 0, 254, 255, 254]
    text = "{ .reg .b16 t; cvt.u16.u32 t, $1; cvt.rn.bf16x2.ue8m0x2 $0, t; }"
    assert asm(text, (32, [127, 254 << 8 | 1, 255])) == [0x00403F80, 0x7F000080, 0x00407FFF]


WORDS = [0, 1, 2**32 - 1, 0x80000000, 0x7FFFFFFF, 0x12345678, 0xDEADBEEF, 0x0F0F00FF]


def test_any_function_of_three_bits():
    a, b, c = 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA
    for table in range(256):
        (got,) = asm(f"lop3.b32 $0, $1, $2, $3, {table};", (32, [a]), (32, [b]), (32, [c]))
        assert got == table * 0x01010101
    assert asm(
        "{.reg .b32 t; not.b32 t, $1; and.b32 t, t, $2; xor.b32 $0, t, 0xff;}", (32, WORDS), (32, WORDS[::-1])
    ) == [(~x & y ^ 0xFF) % 2**32 for x, y in zip(WORDS, WORDS[::-1], strict=True)]


def test_bytes_are_permuted():
    draw = random.Random(0)
    triples = [(draw.randrange(2**32), draw.randrange(2**32), draw.randrange(2**16)) for _ in range(50)]
    a, b, selectors = (list(column) for column in zip(*triples, strict=True))
    for got, x, y, selector in zip(
        asm("prmt.b32 $0, $1, $2, $3;", (32, a), (32, b), (32, selectors)), a, b, selectors, strict=True
    ):
        source = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        want = []
        for place in range(4):
            nibble = selector >> 4 * place & 15
            byte = source[nibble & 7]
            want.append((255 if byte > 127 else 0) if nibble > 7 else byte)
        assert got == int.from_bytes(bytes(want), "little")


def test_integers():
    """Shifts, fields, products, quotients, counts and funnels of words are those of Python's integers."""
    amounts = [0, 1, 4, 31, 32, 40, 8, 16]
    signed = [(word + 2**31) % 2**32 - 2**31 for word in WORDS]
    pairs = list(zip(WORDS, amounts, strict=True))
    both = (32, WORDS), (32, amounts)
    assert asm("shl.b32 $0, $1, $2;", *both) == [(w << min(n, 32)) % 2**32 for w, n in pairs]
    assert asm("shr.u32 $0, $1, $2;", *both) == [w >> min(n, 32) for w, n in pairs]
    assert asm("shr.s32 $0, $1, $2;", *both) == [
        (w >> min(n, 32)) % 2**32 for w, n in zip(signed, amounts, strict=True)
    ]
    assert asm("bfe.u32 $0, $1, $2, 5;", *both) == [w >> n & 31 for w, n in pairs]
    assert asm("bfi.b32 $0, $1, 0xabcdef01, $2, 8;", *both) == [
        (0xABCDEF01 & ~(255 << n) | (w & 255) << n) % 2**32 for w, n in pairs
    ]
    assert asm("bfe.s32 $0, $1, 4, 8;", (32, WORDS)) == [(((w >> 4 & 255) ^ 128) - 128) % 2**32 for w in WORDS]
    assert asm("mul.hi.u32 $0, $1, $1;", (32, WORDS)) == [w * w >> 32 for w in WORDS]
    assert asm("mul.wide.s32 $0, $1, $1;", (32, WORDS), out=64) == [w * w for w in signed]
    assert asm("mad.lo.s32 $0, $1, 3, $2;", *both) == [(w * 3 + n) % 2**32 for w, n in pairs]
    assert asm("div.s32 $0, $1, 7;", (32, WORDS)) == [math.trunc(Fraction(w, 7)) % 2**32 for w in signed]
    assert asm("rem.s32 $0, $1, 7;", (32, WORDS)) == [int(math.fmod(w, 7)) % 2**32 for w in signed]
    assert asm("popc.b32 $0, $1;", (32, WORDS)) == [f"{w:b}".count("1") for w in WORDS]
    assert asm("clz.b32 $0, $1;", (32, WORDS)) == [32 - w.bit_length() for w in WORDS]
    assert asm("brev.b32 $0, $1;", (32, WORDS)) == [int(f"{w:032b}"[::-1], 2) for w in WORDS]
    assert asm("shf.l.wrap.b32 $0, $1, $1, $2;", *both) == [
        ((w << n % 32 | w >> (32 - n % 32)) if n % 32 else w) % 2**32 for w, n in pairs
    ]
    assert asm("sub.sat.s32 $0, $1, 1;", (32, [0x80000000, 5])) == [0x80000000, 4]
    assert asm("add.s16x2 $0, $1, $1;", (32, [0x7FFF8001])) == [0xFFFE0002]


def test_predicates_choose():
    text = """{
        .reg .pred p, q;
        setp.lt.f32 p|q, $1, 0f3F800000;  // 1.0
        selp.b32 $0, 7, 8, p;
        @!p add.u32 $0, $0, 100;
    }"""
    bits = np.array([0.5, 1.0, math.nan], np.float32).view(np.uint32).tolist()
    assert asm(text, (32, bits)) == [7, 108, 108]
    assert asm("{.reg .pred p; setp.ltu.f32 p, $1, 1.0; selp.u32 $0, 1, 0, p;}", (32, bits)) == [1, 0, 1]
    assert asm("{.reg .pred p; setp.hi.and.u32 p, $1, 5, 1; selp.u32 $0, 1, 0, p;}", (32, [5, 6])) == [0, 1]


def test_extremes_pass_nan_over_unless_told():
    one, nan, minus = 0x3F800000, 0x7FC00000, 0x80000000
    assert asm("max.f32 $0, $1, $2;", (32, [one, nan, minus, nan]), (32, [nan, one, 0, nan])) == [
        one, one, 0, 0x7FFFFFFF,
    ]  # fmt: skip
    assert asm("min.NaN.f32 $0, $1, $2;", (32, [one, 0]), (32, [nan, minus])) == [0x7FFFFFFF, minus]


def test_subnormals_are_flushed_where_the_instruction_says_so():
    assert asm("add.f32 $0, $1, $1;", (32, [1])) == [2]
    assert asm("add.ftz.f32 $0, $1, $1;", (32, [1, 0x80000001])) == [0, 0x80000000]
    assert asm("ex2.approx.ftz.f32 $0, $1;", (32, [0xC2FE0000, 0xC3000000])) == [0, 0]  # 2^-127 and 2^-128


def test_tanh_loses_what_it_may():
    """tanh.approx.f32 is wrong by up to 2^-11 of the result, as PTX ISA says; of halves by half an ulp."""
    x = np.linspace(-6, 6, 4001, dtype=np.float32)
    got = np.array(asm("tanh.approx.f32 $0, $1;", (32, x.view(np.uint32).tolist())), np.uint32).view(np.float32)
    right = np.tanh(x.astype(np.float64))
    error = np.abs(got - right) / np.maximum(np.abs(right), 1e-300)
    assert 2.0**-12 < error.max() <= 2.0**-11
    half = np.array([0.3, -1.7], np.float16)
    bits = asm("tanh.approx.f16 $0, $1;", (16, half.view(np.uint16).tolist()), out=16)
    right = np.tanh(half.astype(np.float64)).astype(np.float16)
    assert np.array(bits, np.uint16).view(np.float16).tolist() == right.tolist()


REFUSED = {
    "ld.global.u32 $0, [$1];": "ld.global.u32",
    "mov.u32 $0, %laneid;": "%laneid is the hardware's",
    "L: add.u32 $0, $1, 1;": "L: add",
    "bra done;": "bra done",
    "add.cc.u32 $0, $1, 1;": "add.cc.u32",
    "cvt.rs.f16x2.f32 $0, $1, $1, $1;": "cvt.rs",
    "mov.b32 $0, nothing;": "what is 'nothing'",
    "shfl.sync.bfly.b32 $0, $1, 1, 31, -1;": "shfl.sync",
}


@pytest.mark.parametrize("text", REFUSED)
def test_another_instruction_is_refused_by_name(text):
    with pytest.raises(NotInterpreted, match="inline assembly") as caught:
        asm(text, (32, [1]))
    assert REFUSED[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_oracle_knows_its_formats():
    largest = {name: float(format.largest) for name, format in FLOATS.items()}
    published = {"f16": 65504, "e4m3": 448, "e5m2": 57344, "e2m1": 6, "e2m3": 7.5, "e3m2": 28}
    assert {name: largest[name] for name in published} == published


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
    shapes = {"R": [3], "N": [70]}
    assert examine(fast_tanh, "tanh", dtype="float32", examples=0, shrinking=False, shapes=shapes).outcome == "FAIL"
