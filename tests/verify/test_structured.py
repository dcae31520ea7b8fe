"""Numbers that hang together: midpoints, offsets, places in sparse groups, log-sum-exps, and scales in e8m0."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.formats.codes import all_values
from assay.formats.rounding import round_to
from assay.golden.inputs.distributions import STRUCTURED, names_of
from assay.golden.registry import spec
from assay.verify import Contract, examine
from assay.verify.cases.case import Case, build, contents
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.errors import SettingError
from assay.verify.examination.phases import exact_cases
from tests.zoo.products import gemm_mxfp8
from tests.zoo.quantizers import quantize, quantize_int4, quantize_int8

CODES = {"quantize_fp8": ("float8_e4m3fn", 448), "quantize_int8": ("int8", 127)}


def case(op: str, kind: str, name: str, seed: int = 0, dtype: str = "bfloat16", **sizes: int) -> Case:
    """A case of an op in which one tensor is of one kind."""
    signature = spec(op).signature()
    dtypes = {tensor.name: tensor.dtype or dtype for tensor in signature.tensors}
    return Case(op, sizes, dtypes, spec(op).complete({}), {name: kind}, seed=seed)


def drawn(op: str, kind: str, name: str, seed: int = 0, dtype: str = "bfloat16", **sizes: int) -> Tensor:
    """That tensor."""
    one = case(op, kind, name, seed, dtype, **sizes)
    return contents(one, next(tensor for tensor in one.signature.tensors if tensor.name == name))


@pytest.mark.parametrize("op", CODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_midpoints_lie_between_codes(op: str, dtype: str) -> None:
    """The scale is a power of two, and each number beside the largest lies half-way between two neighbours."""
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
    """Of a quantiser, and of no other op."""
    for op in ("quantize_fp8", "quantize_int4", "softmax"):
        kinds = {value for one in exact_cases(Sampler(spec(op), "bfloat16")) for value in one.values.values()}
        assert ("midpoints" in kinds) == (op != "softmax")


@pytest.mark.parametrize("kind", STRUCTURED["offsets"])
@pytest.mark.parametrize(("parts", "total"), [(1, 0), (1, 9), (5, 3), (8, 300)])
def test_offsets_rise_from_zero_to_the_end(kind: str, parts: int, total: int) -> None:
    """Never descending, whatever the seed; the first zero and the last the total."""
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
    """Mixed ones: earlier sequences are the same in a shorter batch, so that a failure survives shrinking."""
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
    """Powers of two in every layout, and what is written beside them or into them is seen."""
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
    verdict = examine(kept_as_they_are, "quantize_fp8", dtype="bfloat16", effort="quick", examples=5)
    assert verdict.failure is not None
    assert verdict.failure.kind == "dtype"
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

    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "effort": "quick",
        "examples": 0,
        "shapes": {"R": [1, 3], "N": [5, 33]},
    }
    for up in (False, True):

        def kernel(x: Tensor, up: bool = up) -> tuple[Tensor, Tensor]:
            return rounded(x, up=up)

        assert examine(kernel, "quantize_int8", **settings).outcome == "FAIL"
        stochastic = Contract(rounding="stochastic", overflow="saturate")
        assert examine(kernel, "quantize_int8", contract=stochastic, **settings).passed
        truncating = examine(kernel, "quantize_int8", contract=Contract(rounding="toward_zero"), **settings)
        assert truncating.passed is not up


def test_honest_quantisers_pass_in_numpy() -> None:
    """Codes and scales cross to arrays and back, e4m3 and e8m0 by their bits."""

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
        verdict = examine(
            to_torch(kernel), op, dtype=dtype, framework="numpy", shapes=sizes, effort="quick", examples=3
        )
        assert verdict.passed, str(verdict)


def test_a_case_of_codes_can_be_drawn_for_every_option() -> None:
    """Groups of any size, with a tail."""
    sampler = Sampler(spec("quantize_int4"), "float32", {"group": [1, 7, 128], "symmetric": [True, False]})
    for seed in range(10):
        one = sampler.case(seeded(seed), style="small")
        scale = one.signature.returns[1]
        assert one.shape(scale) == (one.sizes["R"], -(-one.sizes["N"] // one.options["group"]))
