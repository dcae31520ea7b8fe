"""Inputs that hang together, factors of any sign and size: drawn as their names say, and faults found by them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.formats.codes import all_values
from assay.formats.format import format_named
from assay.formats.rounding import round_to
from assay.golden.inputs.distributions import LENGTHS, STRUCTURED, names_of
from assay.golden.registry import spec, specs
from assay.verify import Contract, examine
from assay.verify.cases.case import Case, build, contents
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.errors import SettingError
from assay.verify.examination.phases import exact_cases, range_cases
from assay.verify.explanation.fault_models.evaluation import kernel_of
from tests.zoo import products
from tests.zoo.products import gemm_mxfp8
from tests.zoo.quantizers import quantize, quantize_int4, quantize_int8

from .examined import fails, failure_of, passes, quick

CODES = {"quantize_fp8": ("float8_e4m3fn", 448), "quantize_int8": ("int8", 127)}


def case(op: str, kind: str, name: str, seed: int = 0, dtype: str = "bfloat16", **sizes: int) -> Case:
    """A case of an op in which one tensor is of one kind."""
    signature = spec(op).signature()
    dtypes = {tensor.name: tensor.dtype or dtype for tensor in signature.tensors}
    return Case(op, sizes, dtypes, spec(op).complete({}), {name: kind}, seed=seed)


def drawn(op: str, kind: str, name: str, seed: int = 0, dtype: str = "bfloat16", **sizes: int) -> Tensor:
    one = case(op, kind, name, seed, dtype, **sizes)
    return contents(one, next(tensor for tensor in one.signature.tensors if tensor.name == name))


@pytest.mark.parametrize("op", CODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_midpoints_lie_between_codes(op: str, dtype: str) -> None:
    format, largest = CODES[op]
    codes = all_values(format)
    codes = codes[codes.isfinite()].unique()
    for seed in range(6):
        x = drawn(op, "midpoints", "x", seed, dtype, R=3, N=20).double()
        scale = float(x.abs().max()) / largest
        assert math.frexp(scale)[0] == 0.5
        below = round_to(x / scale, format, "down")
        above = round_to(x / scale, format, "up")
        assert torch.equal(torch.where(below == above, below, (below + above) / 2), x / scale)
        assert (below == above).double().mean() < 0.3


def test_midpoints_of_codes_from_zero() -> None:
    """The range of quantize_int4's is 15 steps of a power of two, about zero or on one side of it."""
    ends = set()
    for seed in range(60):
        x = drawn("quantize_int4", "midpoints", "x", seed, R=2, N=16).double()
        low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
        ends.add((high - low) / 2.0 ** math.floor(math.log2(high - low)))
    assert ends == {15 / 8, 14 / 8}


def test_the_exact_phase_tries_midpoints() -> None:
    for op in ("quantize_fp8", "quantize_int4", "softmax"):
        kinds = {value for one in exact_cases(Sampler(spec(op), "bfloat16")) for value in one.values.values()}
        assert ("midpoints" in kinds) == (op != "softmax")


@pytest.mark.parametrize("kind", STRUCTURED["offsets"])
@pytest.mark.parametrize(("parts", "total"), [(1, 0), (1, 9), (5, 3), (8, 300)])
def test_offsets_rise_from_zero_to_the_end(kind: str, parts: int, total: int) -> None:
    for seed in range(10):
        cu = drawn("attention_varlen", kind, "cu_seqlens_k", seed, B=parts, Tk=total, Tq=4, H=1, Hkv=1, D=8)
        assert cu.dtype == torch.int32
        assert (int(cu[0]), int(cu[-1]), len(cu)) == (0, total, parts + 1)
        assert not bool((cu.diff() < 0).any())


def test_offsets_are_what_their_names_say() -> None:
    """Even ones differ by one at most, of one kind a single part has all, mixed ones have empty parts and long ones."""
    sizes = {"B": 8, "Tk": 300, "Tq": 4, "H": 1, "Hkv": 1, "D": 8}
    lengths = {
        kind: torch.cat(
            [drawn("attention_varlen", kind, "cu_seqlens_k", s, **sizes).diff() for s in range(30)]
        ).tolist()
        for kind in STRUCTURED["offsets"]
    }
    assert set(lengths["even"]) == {37, 38}
    assert set(lengths["one"]) == {0, 300}
    assert {0, 1, 2, 33, 64} <= set(lengths["mixed"])
    assert len(set(lengths["uniform"])) > 50


def test_offsets_stay_where_they_are_when_the_end_is_cut() -> None:
    sizes = {"Tq": 4, "H": 1, "Hkv": 1, "D": 8}
    long = drawn("attention_varlen", "mixed", "cu_seqlens_k", 3, B=8, Tk=300, **sizes)
    short = drawn("attention_varlen", "mixed", "cu_seqlens_k", 3, B=8, Tk=100, **sizes)
    assert torch.equal(long.clamp(max=100)[:-1], short[:-1])


@pytest.mark.parametrize("kind", [kind for kind in STRUCTURED["pair"] if kind != "any"])
def test_places_in_a_group_ascend(kind: str) -> None:
    """Two places below four, the first the lesser, but where they are any; of the uniform kind all six pairs."""
    index = drawn("gemm_2to4", kind, "index", M=20, K=64, N=1).long().reshape(-1, 2)
    assert bool((index[:, 0] < index[:, 1]).all())
    assert (int(index.min()), int(index.max())) in {(0, 3), (0, 1), (2, 3)}
    assert len(index.unique(dim=0)) == (6 if kind == "uniform" else 1)


def test_some_states_are_empty() -> None:
    """Log-sum-exps hold -inf in two kinds, and no other kind does; near ones of both states lie next to each other."""
    sizes = {"T": 50, "H": 2, "D": 1}
    for kind in names_of(spec("merge_states").tensors[1]):
        lse = [drawn("merge_states", kind, name, **sizes) for name in ("lse_a", "lse_b")]
        assert all(bool((part == -math.inf).any()) == (kind in ("plain", "empty")) for part in lse)
        if kind == "near":
            assert float((lse[0] - lse[1]).abs().max()) < 0.02


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_in_e8m0_are_stored_and_guarded(layout: str) -> None:
    one = case("gemm_mxfp8", "uneven", "scale_a", M=3, K=128, N=2)
    one = Case(**{**vars(one), "layouts": {"scale_a": layout}})
    inputs = build(one)
    scale = inputs.guarded["scale_a"].tensor
    assert scale.dtype == torch.float8_e8m0fnu
    assert bool((torch.frexp(scale.double())[0] == 0.5).all())
    assert inputs.damage() is None
    scale.view(torch.uint8).as_strided((1,), (1,), scale.storage_offset()).add_(1)
    assert inputs.damage() == ("scale_a", "input_mutated")


def kept_as_they_are(x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Honest codes of the wrong dtype."""
    codes, scale = quantize(x, **options)
    return codes.float(), scale


def test_codes_have_the_dtype_of_the_table() -> None:
    """float32 codes fail by their dtype; another one cannot be asked for."""
    assert failure_of(quick(kept_as_they_are, "quantize_fp8", "bfloat16", examples=5)).kind == "dtype"
    with pytest.raises(SettingError, match="the codes of quantize_fp8 are float8_e4m3fn"):
        examine(quantize, "quantize_fp8", dtype="bfloat16", out_dtype="float8_e5m2", effort="quick", examples=5)


def test_a_contract_may_leave_the_rounding_to_chance() -> None:
    """rounding="stochastic" allows either neighbour, which the default does not; "toward_zero" asks for truncation."""

    def rounded(x: Tensor, *, up: bool) -> tuple[Tensor, Tensor]:
        amax = x.float().abs().amax(dim=1, keepdim=True)
        scale = torch.where(amax == 0, 1.0, amax / 127)
        quotient = x.float() / scale
        code = torch.ceil(quotient) if up else torch.trunc(quotient)
        return code.nan_to_num().clamp(-127, 127).to(torch.int8), amax / 127

    stochastic, truncating = Contract(rounding="stochastic", overflow="saturate"), Contract(rounding="toward_zero")
    for up in (False, True):
        for contract, right in ((Contract(), False), (stochastic, True), (truncating, not up)):
            verdict = quick(
                partial(rounded, up=up), "quantize_int8", "bfloat16", contract=contract,
                shapes={"R": [1, 3], "N": [5, 33]},
            )  # fmt: skip
            assert verdict.passed is right, str(verdict)


def test_honest_quantisers_pass_in_numpy() -> None:
    def to_torch(kernel: Any) -> Any:
        from assay.verify.harness.frameworks import from_numpy, to_numpy

        def call(*arrays: Any, **options: Any) -> Any:
            out = kernel(*(from_numpy(array) for array in arrays), **options)
            return tuple(map(to_numpy, out)) if isinstance(out, tuple) else to_numpy(out)

        return call

    for kernel, op, dtype in (
        (quantize, "quantize_fp8", "float32"),
        (quantize_int8, "quantize_int8", "bfloat16"),
        (quantize_int4, "quantize_int4", "float16"),
        (gemm_mxfp8, "gemm_mxfp8", None),
    ):
        sizes = {symbol: [32, 64] if symbol == "K" else [3, 33] for symbol in spec(op).signature().symbols}
        assert quick(to_torch(kernel), op, dtype, framework="numpy", shapes=sizes, examples=3).passed


def test_a_case_of_codes_can_be_drawn_for_every_option() -> None:
    sampler = Sampler(spec("quantize_int4"), "float32", {"group": [1, 7, 128], "symmetric": [True, False]})
    for seed in range(10):
        one = sampler.case(seeded(seed), style="small")
        scale = one.signature.returns[1]
        assert one.shape(scale) == (one.sizes["R"], -(-one.sizes["N"] // one.options["group"]))


PAGED = {"B": 400, "H": 1, "D": 1, "P": 5, "page": 16, "Hkv": 1, "max_pages": 3}


def lengths(kind: str, **sizes: int) -> list[int]:
    return drawn("attention_decode", kind, "seq_lens", 1, "float32", **{**PAGED, **sizes}).tolist()


def test_lengths_are_what_their_names_say() -> None:
    """Mixed ones reach none, one, all, and one position before, at and behind the end of a page; uniform ones are any,
    full ones all that the table has room for, short ones a page and one position at most."""
    mixed = lengths("mixed")
    assert all(mixed.count(n) > 4 for n in (0, 1, 15, 16, 17, 31, 32, 33, 47, 48))
    assert len(set(mixed)) > 40
    assert set(lengths("uniform")) == set(range(49))
    assert set(lengths("full")) == {48}
    assert set(lengths("short")) == set(range(18))
    for kind in LENGTHS:
        for page, most in ((1, 1), (64, 1), (5, 7)):
            assert set(lengths(kind, page=page, max_pages=most)) <= set(range(page * most + 1))


def test_pages_are_all_there_and_are_shared() -> None:
    """Every page of the cache is named, by more sequences than one and in no order."""
    table = drawn("attention_decode", "uniform", "block_table", 1, "float32", **PAGED)
    assert table.unique().tolist() == [0, 1, 2, 3, 4]
    assert not bool((table.diff(dim=1) >= 0).all())


FACTORS = ("scale", "weight", "slope")


def sampler_of(op: str) -> Sampler:
    """The sampler of an op with its usual options."""
    options = {name: list(option.usual) for name, option in spec(op).options.items() if option.usual}
    return Sampler(spec(op), "float8_e4m3fn" if op == "gemm_fp8" else "bfloat16", options)


def as_two_halves(scale: Tensor) -> Tensor:
    """The scale as two numbers of float16, which have its digits and not its range."""
    high = scale.to(torch.float16)
    return high.float() + (scale - high.float()).to(torch.float16).float()


def dequantize(codes: Tensor, scale: Tensor, *, narrow: bool = False) -> Tensor:
    """Codes times their block's scale."""
    kept = as_two_halves(scale) if narrow else scale
    rows, columns = codes.shape
    whole = kept.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (codes.float() * whole).to(torch.bfloat16)


def gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, narrow: bool = False) -> Tensor:
    """An 8-bit product, scaled by row and column."""
    kept = as_two_halves(scale_a) if narrow else scale_a
    return ((a.double() @ b.double()).float() * kept * scale_b).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("op", "dtype", "kernel"), [("dequantize_fp8", "float8_e4m3fn", dequantize), ("gemm_int8", None, gemm)]
)
def test_a_scale_that_is_cast_to_float16_is_found(op: str, dtype: Any, kernel: Any) -> None:
    passes(quick(kernel, op, dtype, examples=2))
    assert "range" in fails(quick(partial(kernel, narrow=True), op, dtype, examples=2)).broken


@pytest.mark.parametrize("op", specs())
def test_every_factor_reaches_its_ends(op: str) -> None:
    """Each op with scales, weights or slopes has such cases, in which all of them are drawn so and nothing else is."""
    factors = {t.name for signature in spec(op).signatures for t in signature.tensors if t.role in FACTORS}
    found = [{name for name, kind in case.values.items() if kind == "vast"} for case in range_cases(sampler_of(op))]
    reached = set().union(*found) if found else set()
    drawn_so = {t.name for s in spec(op).signatures for t in s.tensors if "vast" in names_of(t)}
    assert reached <= factors
    assert bool(reached) == bool(factors & drawn_so)


def test_the_range_is_that_of_the_dtype() -> None:
    """e8m0 to both ends, float32 beyond both ends of float16 and to its own; all are positive numbers of it."""
    scale = drawn("gemm_mxfp8", "vast", "scale_a", M=200, K=256, N=2).double()
    assert {scale.min().item(), scale.max().item()} == {2.0**-127, 2.0**127}
    wide = drawn("gemm_int8", "vast", "scale_a", M=500, K=2, N=2).double()
    float16, float32 = format_named("float16"), format_named("float32")
    assert float32.smallest_normal <= wide.min() < float16.smallest_subnormal
    assert float16.largest < 2.0**126 < wide.max() <= float32.largest


HONEST = {
    "gemm_int8": products.gemm_int8,
    "gemm_int4": products.gemm_int4,
    "gemm_fp8": products.gemm_fp8_dequantised,
    "moe_int4": kernel_of(None, "moe_int4"),
    "dequantize_int4": kernel_of(None, "dequantize_int4"),
    "gemm_nvfp4": kernel_of(None, "gemm_nvfp4"),
}
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the size alone": torch.abs,
    "at least a little": lambda scale: scale.clamp(min=1e-8),
    "one where zero": lambda scale: torch.where(scale == 0, torch.ones_like(scale), scale),
}


def altered(op: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The honest kernel of changed scales."""

    def kernel(*tensors: Tensor, **options: Any) -> Any:
        own = {name: value for name, value in options.items() if name in spec(op).options}
        changed = [
            change(tensor.float()).to(tensor.dtype) if known.role == "scale" else tensor
            for tensor, known in zip(tensors, spec(op).signature(own).tensors, strict=True)
        ]
        return HONEST[op](*changed, **options)

    return kernel


def asked_of(op: str) -> dict[str, Any]:
    """A quick examination of the whole op."""
    return {**spec(op).default_settings, "effort": "quick", "shrinking": False, "every_aspect": False}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("op", HONEST)
def test_a_kernel_of_other_scales_is_found(op: str, fault: str) -> None:
    verdict = fails(examine(altered(op, FAULTS[fault]), op, **asked_of(op)))
    assert "cycled" in failure_of(verdict).case.values.values()
    assert set(verdict.broken) <= {"numbers", "shapes"}


@pytest.mark.parametrize("op", HONEST)
def test_a_kernel_of_the_scales_as_they_are_passes(op: str) -> None:
    passes(examine(HONEST[op], op, **asked_of(op)))


@pytest.mark.parametrize("op", specs())
def test_each_signed_scale_is_drawn_so_by_itself(op: str) -> None:
    """Under each set of options, in a small case and a larger one; one of e8m0, which has no sign, in none."""
    sampler = sampler_of(op)
    seen: dict[str, int] = {}
    for case in (case for case in range_cases(sampler) if "cycled" in case.values.values()):
        (name,) = (name for name, kind in case.values.items() if kind == "cycled")
        assert format_named(case.dtypes[name]).signed
        seen[name] = seen.get(name, 0) + 1
    scales = [t for t in spec(op).tensors if t.role == "scale" and t.dtype != "float8_e8m0fnu"]
    assert set(seen) == {tensor.name for tensor in scales}
    assert set(seen.values()) <= {2 * min(len(sampler.option_sets()), 4)}


def test_every_axis_and_a_single_scale_have_all_three() -> None:
    scale = drawn("dequantize_fp8", "cycled", "scale", M=1024, N=1024)
    assert scale.sign()[0].tolist() == [-1, 0, 1, -1, 0, 1, -1, 0] == scale.sign()[:, 0].tolist()
    single = [float(drawn("gemm_fp8", "cycled", "scale_a", seed, M=1, K=1, N=1).sign()) for seed in range(3)]
    assert single == [-1, 0, 1]
    assert (drawn("gemm_mxfp8", "cycled", "scale_a", M=4, K=64, N=1).double() > 0).all()
