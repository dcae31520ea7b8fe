"""Inputs: the same on every platform, the same while shapes shrink, and shaped as their names say."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.formats.codes import all_values
from assay.formats.format import FORMATS, format_named
from assay.formats.rounding import round_to
from assay.golden.inputs.distributions import GENERAL, INTEGERS, REAL, names_of
from assay.golden.inputs.random_bits import bits, integers, normal, uniform
from assay.golden.inputs.values import stored, torch_dtype
from assay.golden.registry import spec, specs
from assay.verify.cases.case import Case, build, contents
from assay.verify.cases.sampler import Sampler, seeded

FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
NARROWING = ("float32", "bfloat16", "float8_e4m3fn")
WIDE = ("float32", "bfloat16", "float16")


def drawn(kind: str, dtype: str, rows: int = 64, columns: int = 96, seed: int = 3, **fields: Any) -> Tensor:
    """A tensor of one distribution, in its dtype."""
    case = Case("softmax", {"R": rows, "N": columns}, {"x": dtype}, values={"x": kind}, seed=seed, **fields)
    return contents(case, case.signature.tensors[0])


def numbers(kind: str, dtype: str = "float32", rows: int = 64, columns: int = 96) -> Tensor:
    return drawn(kind, dtype, rows, columns).double()


def test_random_bits_are_frozen() -> None:
    """The generator gives these 64 bits for these coordinates, for ever: stored repro lines depend on it."""
    assert bits(0, "x", (3,)).astype(">u8").tobytes().hex() == "902d9832b11595903a2f272600776aae33ff657a1b1c5dca"
    assert bits(12345, "weight", (1, 2)).astype(">u8").tobytes().hex() == "e28d0549ebf327e7d47e3aa0115d17e8"
    assert bits(7, "scale", ()).astype(">u8").tobytes().hex() == "9eebbb3bb9d68caf"


def test_bits_are_even_and_depend_on_seed_name_and_every_coordinate() -> None:
    """Each of the 64 bits is set in half of 40,000 elements, within five standard deviations.

    Along an ignored axis all are equal, and along the other they are not.
    """
    here = bits(0, "x", (200, 200))
    shares = [float(np.mean((here >> np.uint64(place)) & np.uint64(1))) for place in range(64)]
    assert all(abs(share - 0.5) < 5 * 0.5 / 200 for share in shares)
    assert len(np.unique(here)) == here.size
    for other in (bits(1, "x", (200, 200)), bits(0, "y", (200, 200)), here.T):
        assert not np.array_equal(here, other)
    tied = bits(0, "x", (4, 5), ignore=[1])
    assert (tied == tied[:, :1]).all()
    assert len(np.unique(tied)) == 4


def test_numbers_made_of_bits_keep_their_ranges() -> None:
    """Uniforms lie in [0, 1), integers in 0..below-1 and hit all of them, normals have mean 0 and deviation 1."""
    draw = bits(1, "x", (300, 300))
    assert 0 <= uniform(draw).min() < 1e-4
    assert 1 - 1e-4 < uniform(draw).max() < 1
    assert set(np.unique(integers(draw, 7))) == set(range(7))
    assert uniform(np.array([2**64 - 1], dtype=np.uint64))[0] < 1
    assert integers(np.array([2**64 - 1], dtype=np.uint64), 2**32)[0] == 2**32 - 1
    assert abs(normal(draw).mean()) < 0.02
    assert abs(normal(draw).std() - 1) < 0.02


ROLE_CASES = [
    ("gemm_fp8", {"M": 5, "K": 67, "N": 3}, {"granularity": "row"}, "scale_a"),
    ("moe", {"T": 9, "D": 4, "F": 3, "E": 5, "k": 2}, {}, "weights"),
    ("moe", {"T": 9, "D": 4, "F": 3, "E": 5, "k": 2}, {}, "ids"),
    ("rope", {"B": 1, "S": 9, "H": 1, "D": 8}, {}, "cos"),
    ("attention", {"B": 1, "H": 6, "Hkv": 2, "Sq": 3, "Sk": 3, "D": 8, "Dv": 8}, {"alibi": True}, "slopes"),
    ("gemm_int4", {"M": 2, "K": 64, "N": 8, "g": 32}, {"packing": "plain"}, "zeros"),
    ("gemm_int4", {"M": 2, "K": 64, "N": 8, "g": 32}, {"packing": "plain"}, "qweight"),
    ("gemm_int4", {"M": 2, "K": 64, "N": 8, "g": 32}, {"packing": "awq"}, "qweight"),
]


def tensors_of(op: str, sizes: dict[str, int], options: dict[str, Any], name: str, kind: str) -> Tensor:
    """One tensor of a case of ``op``."""
    definition = spec(op)
    sampler = Sampler(definition, "float8_e4m3fn" if op == "gemm_fp8" else "float32")
    plain = sampler.case(seeded(0), options=options)
    case = Case(op, sizes, plain.dtypes, definition.complete(options), values={name: kind}, seed=1)
    return contents(case, next(tensor for tensor in case.signature.tensors if tensor.name == name))


LIMITS: dict[str, Callable[[Tensor], Tensor]] = {
    "scale_a": lambda x: (x != 0) & x.isfinite(),
    "weights": lambda x: (x >= 0) & x.isfinite(),
    "ids": lambda x: (x >= 0) & (x < 5),
    "cos": lambda x: x.abs() <= 1,
    "slopes": lambda x: (x > 0) & x.isfinite(),
    "zeros": lambda x: (x >= 0) & (x < 16),
    "qweight": lambda x: x == x,
}


@pytest.mark.parametrize(
    ("op", "sizes", "options", "name"), ROLE_CASES, ids=[f"{case[0]}-{case[3]}" for case in ROLE_CASES]
)
def test_a_role_keeps_its_range(op: str, sizes: dict[str, int], options: dict[str, Any], name: str) -> None:
    """Scales are zero where they cycle alone, weights and slopes not negative, angles within one, codes in range."""
    for kind in names_of(next(t for t in spec(op).signature(options).tensors if t.name == name)):
        found = tensors_of(op, sizes, options, name, kind)
        assert bool(LIMITS[name](found[found != 0] if kind == "cycled" else found).all()), kind


@pytest.mark.parametrize(("packing", "codes"), [("plain", 256), ("awq", 2**32)])
def test_packed_words_take_every_pattern(packing: str, codes: int) -> None:
    words = tensors_of("gemm_int4", {"M": 1, "K": 2048, "N": 64, "g": 32}, {"packing": packing}, "qweight", "uniform")
    unsigned = words.to(torch.int64) % codes
    assert int(unsigned.min()) <= codes // 1000
    assert int(unsigned.max()) >= codes - 1 - codes // 1000


def test_integer_distributions_are_what_they_say() -> None:
    sizes = {"T": 400, "D": 1, "F": 1, "E": 5, "k": 2}
    ids = {kind: tensors_of("moe", sizes, {}, "ids", kind) for kind in INTEGERS}
    assert {kind: ids[kind].unique().tolist() for kind in ("first", "last")} == {"first": [0], "last": [4]}
    assert ids["uniform"].unique().tolist() == ids["skewed"].unique().tolist() == [0, 1, 2, 3, 4]
    assert 0.8 < float((ids["skewed"] == 2).double().mean()) < 1


@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("dtype", NARROWING)
def test_an_element_keeps_its_value_while_shapes_shrink(kind: str, dtype: str) -> None:
    whole = drawn(kind, dtype, 20, 70).view(torch.uint8)
    width = torch_dtype(dtype).itemsize
    end = drawn(kind, dtype, 9, 41)
    assert torch.equal(end.view(torch.uint8), whole[:9, : 41 * width])
    front = drawn(kind, dtype, 9, 41, origin={"R": 11, "N": 29})
    assert torch.equal(front.view(torch.uint8), whole[11:, 29 * width :])
    assert not torch.equal(drawn("normal", dtype, 9, 41, seed=4).view(torch.uint8), end.view(torch.uint8))


@pytest.mark.parametrize("op", specs())
def test_every_tensor_of_every_op_can_be_drawn(op: str) -> None:
    """Each input has its case's dtype and is finite (a log-sum-exp may be -inf), and a seed decides the case."""
    definition = spec(op)
    sampler = Sampler(definition, "float8_e4m3fn" if op == "gemm_fp8" else "bfloat16")
    for place in range(4):
        case = replace(sampler.case(seeded(place), style="small"), unused="plain")
        roles = {tensor.name: tensor.role for tensor in case.signature.tensors}
        for name, guarded in build(case).guarded.items():
            assert str(guarded.tensor.dtype).removeprefix("torch.") == case.dtypes[name]
            values = guarded.tensor.double()
            empty = (values == -math.inf) if roles[name] == "lse" else torch.zeros_like(values, dtype=torch.bool)
            assert bool((values.isfinite() | empty).all()), (name, case)
    assert sampler.case(seeded(1)) == sampler.case(seeded(1)) != sampler.case(seeded(2))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_distribution_varies(dtype: str) -> None:
    assert [kind for kind in GENERAL if len(numbers(kind, dtype).unique()) == 1] == (
        ["above", "below", "remote"] if dtype == "float8_e4m3fn" else []  # beyond its range
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_exact_distributions_are_whole_numbers_or_powers_of_two(dtype: str) -> None:
    """Sums and products of a few hundred of these are exact in float32."""
    unit = 16.0 if dtype == "float8_e4m3fn" else 1.0
    assert set((numbers("integers", dtype) / unit).unique().tolist()) == set(range(-4, 5))
    assert set((numbers("ties", dtype) / unit).unique().tolist()) == {-1, 0, 1}
    assert set((numbers("powers", dtype).abs() / unit).unique().tolist()) == {0.25, 0.5, 1, 2, 4}
    rows = numbers("one_hot", dtype)
    assert bool(((rows != 0).sum(-1) == 1).all())
    assert rows[:61].argmax(-1).tolist() == list(range(61))
    assert not bool(numbers("zeros", dtype).any())


@pytest.mark.parametrize("dtype", FLOATS)
def test_extremes_lie_at_both_ends_of_the_range(dtype: str) -> None:
    """Near overflow all magnitudes lie in the top binade or at its lower end, of both signs, some in the last tenth.

    Of subnormals at least a tenth lie strictly between zero and the smallest normal value, none above four of these.
    """
    values, largest = numbers("near_overflow", dtype), format_named(dtype).largest
    assert bool((values.abs() >= 0.4999 * largest).all())
    assert float(values.max()) > 0.9 * largest
    assert float(values.min()) < -0.9 * largest
    assert float((values.abs() == largest).double().mean()) < 0.2
    small, least = numbers("subnormal", dtype).abs(), format_named(dtype).smallest_normal
    assert float(((small > 0) & (small < least)).double().mean()) > 0.1
    assert float(small.max()) <= 4 * least
    assert bool((small >= least).any())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_patterns_cover_the_codes_of_narrow_formats(dtype: str) -> None:
    """Drawn evenly from all finite bit patterns: every fp8 value within 40,000 draws, and a third of 16-bit ones."""
    values, format = numbers("patterns", dtype, 200, 200), format_named(dtype)
    codes = all_values(format)
    share = len(values.unique()) / len(codes[codes.isfinite()].unique())
    assert share == 1 if format.bits == 8 else share > 0.3
    assert bool(((values != 0) & (values.abs() < format.smallest_normal)).any())


def test_patterns_of_int8_cover_every_code() -> None:
    """Integers too: 256 codes, none of them favoured."""
    case = Case("gemm_int8", {"M": 100, "K": 100, "N": 1}, dict.fromkeys(("a", "b"), "int8"), values={"a": "patterns"})
    values = contents(case, case.signature.tensors[0]).double()
    assert len(values.unique()) == 256
    assert float((values.abs() >= 127).double().mean()) < 0.05


@pytest.mark.parametrize("dtype", WIDE)
def test_distributions_have_the_shapes_of_their_names(dtype: str) -> None:
    draw = {kind: numbers(kind, dtype) for kind in REAL}
    assert bool((draw["positive"] > 0).all())
    mean = draw["large_mean"].mean(-1).abs()
    assert bool((mean > 30 * draw["large_mean"].std(-1)).all())
    assert set(mean.log2().round().tolist()) == {6, 8, 10, 12}
    cancelling = draw["cancelling"]
    assert bool((cancelling.sum(-1).abs() < 0.01 * cancelling.abs().sum(-1)).all())
    assert bool((draw["constant_rows"] == draw["constant_rows"][:, :1]).all())
    assert len(draw["constant_rows"][:, 0].unique()) > 32
    assert bool((draw["ascending"].diff(dim=-1) >= -0.13).all())
    assert bool((draw["ascending"][:, -1] > draw["ascending"][:, 0] + 5).all())
    assert bool((draw["descending"].diff(dim=-1) <= 0.01).all())
    assert bool((draw["descending"][:, -1] < draw["descending"][:, 0] - 5).all())
    loud = draw["outliers"].abs().mean(0)
    assert 1 <= int((loud > 10).sum()) <= 15
    assert bool((loud[loud <= 10] < 2).all())
    blocks = draw["blocks"].abs().reshape(64, 3, 32).mean((0, 2)).log2()
    plain = draw["normal"].abs().reshape(64, 3, 32).mean((0, 2)).log2()
    assert blocks.diff().round().tolist() == [4, -10] != plain.diff().round().tolist()
    assert float(draw["wide"].std()) == pytest.approx(6, rel=0.1)
    assert float(draw["steep"].std()) == pytest.approx(64, rel=0.1)
    assert float(draw["small"].abs().max()) < 2.0**-3
    assert 0.05 < float((draw["peaked"] > 12).double().mean()) < 0.13
    assert float(draw["lognormal"].abs().log2().std()) > 2
    assert float(draw["above"].min()) > 88 > -88 > float(draw["below"].max())
    assert float(draw["lowest"].max()) < -0.49 * format_named(dtype).largest


HARD = st.builds(
    lambda sign, significand, exponent, nudge: sign * math.ldexp(significand + nudge, exponent),
    st.sampled_from([1.0, -1.0]),
    st.integers(0, 2**13),
    st.integers(-40, 12),
    st.sampled_from([0.0, 0.5, 0.5 + 2.0**-26, 0.5 - 2.0**-26, 2.0**-38, -(2.0**-38)]),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(HARD | st.floats(-1e5, 1e5), min_size=1, max_size=30), st.sampled_from([*FLOATS, "int8"]))
def test_stored_rounds_once(values: list[float], dtype: str) -> None:
    """What is stored is the number of the format nearest to the float64 value, saturated; never by way of float32."""
    exact = torch.tensor(values, dtype=torch.float64)
    kept = stored(exact, dtype)
    assert kept.dtype == torch_dtype(dtype)
    assert torch.equal(kept.double(), round_to(exact, dtype, overflow="saturate"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_a_double_rounding_would_be_seen(dtype: str) -> None:
    """Just above a midpoint by less than float32 shows, the next value is stored; torch's own cast is one too low."""
    epsilon = format_named(dtype).epsilon
    x = torch.tensor([1 + epsilon / 2 + 2.0**-40], dtype=torch.float64)
    assert float(stored(x, dtype)) == 1 + epsilon
    assert float(x.to(torch.float32).to(torch_dtype(dtype))) == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_stored_keeps_special_values(dtype: str) -> None:
    """NaN stays NaN, an infinity stays one where the format has it, and what is finite beside them saturates."""
    format = FORMATS[dtype]
    infinities = [math.inf, -math.inf] if format.infinities else []
    kept = stored(torch.tensor([math.nan, 1e308, -1e308, *infinities], dtype=torch.float64), dtype).double().tolist()
    assert math.isnan(kept[0])
    assert kept[1:] == [min(1e308, format.largest), -min(1e308, format.largest), *infinities]


def test_edits_set_single_elements() -> None:
    plain = drawn("normal", "bfloat16", 4, 5)
    edited = drawn("normal", "bfloat16", 4, 5, edits=(("x", (1, 2), math.inf), ("x", (9, 9), 1.0), ("y", (0, 0), 7.0)))
    assert edited[1, 2] == math.inf
    edited[1, 2] = plain[1, 2]
    assert torch.equal(edited, plain)
