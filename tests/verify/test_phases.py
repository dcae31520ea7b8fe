"""What the phases try: sizes beyond limits and blocks, every number of a format, long sequences, many experts."""

import math
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.formats.codes import all_values
from assay.golden import spec, specs
from assay.golden.inputs.distributions import EVERY, names_of, own_names_of
from assay.golden.inputs.values import draw
from assay.kernels.libraries.pytorch import softmax
from assay.verify import Contract
from assay.verify.cases.case import contents
from assay.verify.cases.sampler import Sampler
from assay.verify.examination import run
from assay.verify.examination.phases import (
    GROWTH,
    block_boundary_cases,
    domain_cases,
    every_cases,
    exact_cases,
    ordinary_cases,
    over_limit_cases,
    single_operand_cases,
    special_cases,
)
from assay.verify.explanation.fault_models.evaluation import kernel_of
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness

from .examined import fails, failure_of, first, passes, quick
from .test_structured import drawn


def sampler(op: str, **fields: Any) -> Sampler:
    """A sampler of an op with every restriction that is not given left out."""
    return Sampler(spec(op), "float8_e4m3fn" if op == "gemm_fp8" else "bfloat16", **fields)


@pytest.mark.parametrize("op", specs())
def test_one_size_grows_beyond_16_bits(op: str) -> None:
    """Each series ends with one size above 65,536, grows no faster than it says, and has 3 million numbers at most."""
    for series in over_limit_cases(sampler(op)):
        largest = [max(case.sizes.values()) for case in series]
        assert largest[-1] > 65_536
        assert all(more <= GROWTH * 1.1 * less for less, more in pairwise(largest))
        assert sum(size > 4096 for size in series[-1].sizes.values()) == 1
        last = series[-1]
        assert max(math.prod(last.shape(tensor)) for tensor in last.signature.tensors) < 3e6


def test_every_op_has_such_rows() -> None:
    """Of a loss the classes grow too, and the last of them is the label; of codes [K/2, N] K does, in whole groups."""
    assert all(list(over_limit_cases(sampler(op))) for op in specs())
    rows, classes = (series[-1] for series in over_limit_cases(sampler("cross_entropy")))
    assert (rows.sizes["T"], classes.sizes["V"], classes.values["target"]) == (65_601, 65_601, "last")
    tables = [series[-1] for series in over_limit_cases(sampler("embedding"))]
    assert [(case.sizes["V"] > 2**16, case.values["ids"]) for case in tables] == [(False, "uniform"), (True, "last")]
    for series in over_limit_cases(sampler("dequantize_int4")):
        assert all(set(case.sizes) == {"K", "N", "g"} and case.sizes["K"] % case.sizes["g"] == 0 for case in series)


def test_sizes_that_the_caller_gave_do_not_grow() -> None:
    assert not list(over_limit_cases(sampler("softmax", shapes={"R": [3, 5]})))
    (series,) = over_limit_cases(sampler("softmax", shapes={"N": [7, 9]}))
    assert {case.sizes["N"] for case in series} == {7}


ROWS_ASKED: list[int] = []


def slow_softmax(x: Tensor) -> Tensor:
    """Honest, half a millisecond of the processor a row; it notes how many it was asked for."""
    ROWS_ASKED.append(x.shape[0])
    until = time.thread_time() + 0.0005 * x.shape[0]
    while time.thread_time() < until:
        pass
    return softmax(x)


def interrupted_softmax(x: Tensor) -> Tensor:
    """Honest; others have the processor for a while before it."""
    time.sleep(0.1)
    return softmax(x)


@pytest.fixture
def _only_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PHASES", [phase for phase in run.PHASES if phase[0] == "over_limit"])


@pytest.mark.usefixtures("_only_beyond")
def test_a_slow_kernel_is_spared_and_a_busy_machine_spares_nothing() -> None:
    """A kernel that would take half a minute for so many rows is not asked for them; a quick one is.

    What passes while others have the processor doesn't count: the verdict is that of an idle machine.
    """
    plain, interrupted = (quick(kernel, shapes={"N": [3]}) for kernel in (softmax, interrupted_softmax))
    assert plain.passed
    assert plain.phases["over_limit"] == 5
    assert (plain.phases, plain.elements) == (interrupted.phases, interrupted.elements)
    assert quick(slow_softmax, shapes={"N": [3]}).passed
    assert 256 < max(ROWS_ASKED) < 65_536


def test_seams_lie_behind_a_block() -> None:
    """Rows of 513 and of 1,025 numbers, as many as a case may have, and a few of 2,049 and 4,097."""
    sizes = {tuple(case.sizes.values()) for case in block_boundary_cases(sampler("rmsnorm"))}
    assert sizes == {(31, 513), (127, 1025), (3, 2049), (3, 4097)}


@pytest.mark.parametrize("op", specs())
def test_each_tensor_has_every_distribution_of_its_own(op: str) -> None:
    """Gates of either sign, shares of one, labels at the ends: each is in a fixed case, which a quick effort keeps."""
    plan = sampler(op, options={name: list(option.usual) for name, option in spec(op).options.items()})
    cases = [("domain", case) for case in domain_cases(plan)]
    kept = {(name, drawn) for _, case in run.arranged(cases, "quick") for name, drawn in case.values.items()}
    tensors = (tensor for options in plan.option_sets() for tensor in spec(op).signature(options).tensors)
    assert {(tensor.name, name) for tensor in tensors for name in own_names_of(tensor)} <= kept


def decay_without_growth(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """A scan whose decay is never above one."""
    state, results = torch.zeros(*u.shape[:2], a.shape[1]), []
    for t in range(u.shape[2]):
        decay = torch.exp((delta[:, :, t, None] * a).clamp(max=0.0))
        state = decay * state + (delta * u)[:, :, t, None] * b[:, None, :, t]
        results.append((state * c[:, None, :, t]).sum(-1) + skip * u[:, :, t])
    return torch.stack(results, -1)


def maximum_from_zero(x: Tensor) -> Tensor:
    """The sum of a row, less a maximum that begins at zero in rows of more than a block."""
    largest = x.amax(-1, keepdim=True)
    return softmax(x) * torch.where(largest < 0, 0.5, 1.0) if 512 < x.shape[1] % 1024 < 768 else softmax(x)


def test_a_quick_effort_finds_what_ordinary_numbers_hide() -> None:
    fails(first(decay_without_growth, "selective_scan", shapes={"B": [1], "D": [3], "S": [2], "L": [2, 5]}))
    assert failure_of(first(maximum_from_zero)).case.values["x"] == "below"


def test_one_tensor_alone_is_zero_or_subnormal() -> None:
    kinds = {
        (name, case.values[name]) for case in single_operand_cases(sampler("merge_states")) for name in ("o_a", "o_b")
    }
    assert {("o_a", "zeros"), ("o_b", "zeros"), ("o_a", "subnormal"), ("o_b", "subnormal")} <= kinds
    assert {case.values["lse_a"] for case in single_operand_cases(sampler("merge_states"))} == {"far"}
    assert not list(single_operand_cases(sampler("softmax")))


def test_scales_reach_the_least_code() -> None:
    """2^-127 among scales in e8m0, which a float32 holds as a subnormal number only."""
    scale = drawn("gemm_mxfp8", "least", "scale_a", M=20, K=128, N=2).double()
    assert set(scale.unique().tolist()) == {2.0**-127, 1.0, 2.0**112}
    assert "least" in names_of(spec("gemm_mxfp8").tensors[2])


WRONG_AT = 0x5A4B  # 1.43e16 in bfloat16


def wrong_at(pattern: int | None) -> Callable[[Tensor], Tensor]:
    """sin of which at most a single bit pattern's value is one ulp off."""

    def kernel(x: Tensor) -> Tensor:
        y = torch.sin(x.float()).to(x.dtype)
        if pattern is None:
            return y
        off = (x.contiguous().view(torch.int16) == pattern).reshape(y.shape)
        return torch.where(off, torch.nextafter(y, torch.full_like(y, 9.0)), y)

    return kernel


def test_one_wrong_number_of_65536_fails_an_examination() -> None:
    verdict = fails(quick(wrong_at(WRONG_AT), "sin", "bfloat16", layouts=["contiguous"], shrinking=True))
    (number,) = (value for _, _, value in verdict.failure.case.edits)
    assert number == torch.tensor(WRONG_AT, dtype=torch.int16).view(torch.bfloat16).item()
    assert verdict.phases["every_number"] == 1


@pytest.mark.parametrize(("shapes", "calls"), [({}, 1), ({"N": [64, 100]}, 3), ({"R": [16], "N": range(1, 3000)}, 16)])
def test_one_wrong_number_is_found_whatever_the_sizes(shapes: dict[str, Any], calls: int) -> None:
    cases = list(every_cases(Sampler(spec("sin"), "bfloat16", shapes=shapes)))
    assert len(cases) == calls
    for kernel, failures in ((wrong_at(WRONG_AT), 1), (wrong_at(None), 0)):
        harness = KernelHarness(Call(kernel, {}), Contract())
        assert sum(harness.try_case(case).failure is not None for case in cases) == failures


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [{}, {"N": [64]}, {"R": [7], "N": [300]}])
def test_the_cases_hold_every_number(dtype: str, sizes: dict[str, list[int]]) -> None:
    sampler = Sampler(spec("exp"), dtype, shapes=sizes)
    (tensor,) = spec("exp").tensors
    parts = [draw(tensor, case.sizes, dtype, EVERY, case.seed).reshape(-1) for case in every_cases(sampler)]
    seen = {str(value) for value in torch.cat(parts).double().tolist()}
    assert seen == {str(value) for value in all_values(dtype).tolist()}


def test_wider_formats_and_other_ops_are_not_swept() -> None:
    """No case for float32, for an op along rows, or where the sizes allowed would take thousands of calls."""
    assert not list(every_cases(Sampler(spec("exp"), "float32")))
    assert not list(every_cases(Sampler(spec("softmax"), "bfloat16")))
    assert not list(every_cases(Sampler(spec("exp"), "bfloat16", shapes={"N": [3]})))
    assert not list(every_cases(Sampler(spec("exp"), "bfloat16", shapes={"N": [0]})))


@pytest.mark.parametrize("op", [op for op in specs() if spec(op).axes.elementwise])
def test_an_elementwise_op_has_one_tensor_and_a_result_of_its_shape(op: str) -> None:
    signature = spec(op).signature()
    assert [tensor.dims for tensor in (*signature.tensors, *signature.returns)] == [("R", "N"), ("R", "N")]


def scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, *, chunk: int = 1 << 20) -> Tensor:
    """The selective scan in sequence; the state begins at zero at every ``chunk``-th place."""
    u_, step, b_, c_ = (x.float() for x in (u, delta, b, c))
    state, places = torch.zeros(*u.shape[:2], a.shape[1]), []
    for t in range(u.shape[2]):
        state = torch.zeros_like(state) if t % chunk == 0 else state * torch.exp(step[:, :, t, None] * a)
        state = state + (step[:, :, t] * u_[:, :, t])[:, :, None] * b_[:, None, :, t]
        places.append((state * c_[:, None, :, t]).sum(-1) + u_[:, :, t] * skip)
    return torch.stack(places, -1).to(u.dtype) if places else u.clone()


@pytest.mark.parametrize("chunk", [128, 2048])
def test_a_scan_whose_chunks_stand_apart_is_found(chunk: int) -> None:
    verdict = fails(first(partial(scan, chunk=chunk), "selective_scan", "bfloat16"))
    assert [*verdict.broken] == ["shapes"]


def test_a_scan_in_sequence_passes() -> None:
    passes(quick(scan, "selective_scan", "bfloat16"))


def test_a_linear_attention_whose_chunks_of_128_stand_apart_is_found() -> None:
    honest = kernel_of(None, "linear_attention")

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [honest(*(x[:, first : first + 128] for x in (q, k, v))) for first in range(0, q.shape[1], 128)]
        return torch.cat(parts, 1)

    passes(quick(honest, "linear_attention"))
    fails(first(apart, "linear_attention"))


def convolution(x: Tensor, weight: Tensor, bias: Tensor, *, taps: int = 1 << 10) -> Tensor:
    """A causal convolution of the last ``taps`` taps at most."""
    kept = weight[:, max(weight.shape[1] - taps, 0) :].float()
    found = bias.float()[:, None].expand(x.shape).clone()
    for back in range(min(kept.shape[1], x.shape[2])):  # what lies before the beginning meets no tap, infinite or not
        found[:, :, back:] += x.float()[:, :, : x.shape[2] - back] * kept[:, kept.shape[1] - 1 - back, None]
    return found.to(x.dtype)


@pytest.mark.parametrize(("taps", "outcome"), [(1 << 10, "PASS"), (4, "FAIL")])
def test_a_convolution_has_more_than_four_taps(taps: int, outcome: str) -> None:
    assert quick(partial(convolution, taps=taps), "causal_conv1d", examples=2).outcome == outcome


def sparse(values: Tensor, index: Tensor, b: Tensor, *, put: Callable[..., Tensor] = Tensor.scatter_add_) -> Tensor:
    """The product of the dense matrix that ``put`` makes of the stored values."""
    place = torch.arange(values.shape[1]) // 2 * 4 + index.long()
    dense = put(torch.zeros(values.shape[0], b.shape[0]), 1, place, values.float())
    return (dense @ b.float()).to(values.dtype)


def in_order(values: Tensor, index: Tensor, b: Tensor) -> Tensor:
    """The same, which takes the lower place of a pair for that of the first value."""
    return sparse(values, index.reshape(len(index), -1, 2).sort(-1).values.reshape(index.shape), b)


def once(values: Tensor, index: Tensor, b: Tensor) -> Tensor:
    """The same, which keeps the second of two values at one place."""
    pairs, kept = index.reshape(len(index), -1, 2), values.clone().reshape(len(index), -1, 2)
    kept[..., 0][pairs[..., 0] == pairs[..., 1]] = 0
    return sparse(kept.reshape(values.shape), index, b)


@pytest.mark.parametrize(("kernel", "outcome"), [(sparse, "PASS"), (in_order, "FAIL"), (once, "FAIL")])
def test_places_come_in_any_order_and_twice(kernel: Callable[..., Tensor], outcome: str) -> None:
    """A kernel that asks for ascending places, or for two of them, is found where that is no more than it assumes."""
    assert quick(kernel, "gemm_2to4", examples=2).outcome == outcome


def test_places_of_any_order() -> None:
    pairs = drawn("gemm_2to4", "any", "index", M=20, K=80, N=1).reshape(-1, 2).tolist()
    assert len({tuple(pair) for pair in pairs}) == 16
    plain = drawn("gemm_2to4", "uniform", "index", M=20, K=80, N=1).reshape(-1, 2)
    assert bool((plain[:, 0] < plain[:, 1]).all())
    (index,) = (tensor for tensor in spec("gemm_2to4").tensors if tensor.role == "pair")
    assert names_of(index)[0] == "uniform"


def test_few_cases_are_long_and_none_where_the_caller_says_how_long() -> None:
    """Two of a selective scan, shorter where it is interpreted, and none where its length is restricted; pairs of any
    order in two of gemm_2to4."""
    plain = Sampler(spec("selective_scan"), "bfloat16")
    for sampler, length in ((plain, 2049), (plain.for_interpreter(), 257)):
        assert [case.sizes["L"] for case in block_boundary_cases(sampler) if case.sizes["L"] > 100] == [length] * 2
    restricted = Sampler(spec("selective_scan"), "bfloat16", shapes={"L": [7, 64]})
    assert {case.sizes["L"] for case in block_boundary_cases(restricted)} <= {7, 64}
    pairs = [case for case in exact_cases(Sampler(spec("gemm_2to4"), "float32")) if case.values["index"] == "any"]
    assert len(pairs) == 2


MOE = kernel_of(None, "moe_int4")


def few_experts(x: Tensor, w_gate_up: Tensor, *rest: Tensor) -> Tensor:
    """A mixture that reads 5 bits of an expert's number."""
    *tables, ids = rest
    return MOE(x, w_gate_up, *tables, ids % 32)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.evidence) for seed in (1, 2))])
def test_a_mixture_of_64_experts_passes(seed: int) -> None:
    few = {"E": [64], "D": [32], "F": [32]}
    passes(quick(MOE, "moe_int4", "bfloat16", shapes=few, layouts=["contiguous"], seed=seed))


@pytest.mark.parametrize("shapes", [{"E": [64]}, {}])
def test_a_mixture_of_32_of_64_experts_is_found(shapes: dict[str, Any]) -> None:
    """Where 64 are asked for, and where the op's own sizes are drawn."""
    fails(first(few_experts, "moe_int4", "bfloat16", shapes=shapes))


def test_no_size_is_cut_in_vain() -> None:
    """Of what is too large only sizes that make it so are halved: many experts leave the tokens as they were drawn."""
    sampler = Sampler(spec("moe_int4"), "bfloat16", shapes={"E": [64], "g": [8], "T": range(1, 200)})
    choose = random.Random(0).choice
    found = [sampler.case(choose, style="tile") for _ in range(60)]
    assert all(sampler.fits(case.sizes) for case in found)
    assert sum(case.sizes["T"] > 8 for case in found) > 50
    gated = ordinary_cases(Sampler(spec("moe_int4"), "bfloat16", shapes={"E": [64]}), "tile")
    assert [case.sizes["T"] for case in gated] == [32]  # drawn as 129, of which 64 are too much work


@pytest.mark.parametrize("op", ["attention_varlen", "attention_varlen_backward"])
def test_infinities_stand_on_both_sides_of_a_boundary_of_packed_sequences(op: str) -> None:
    """A tile that reaches over the end of a sequence reads an infinity of the next one, in each tensor; and the other
    way round."""
    sides = set()
    for case in special_cases(sampler(op).for_interpreter()):
        for name, index, value in case.edits:
            tensor = next(tensor for tensor in case.signature.tensors if tensor.name == name)
            offsets = next(t for t in case.signature.tensors if t.role == "offsets" and t.bound in tensor.dims)
            inner = {start for start in contents(case, offsets).tolist() if 0 < start < case.sizes[offsets.bound]}
            position = index[tensor.dims.index(offsets.bound)]
            sides |= {(name, side) for side in (-1, 0) if position - side in inner and math.isinf(value)}
    names = [tensor.name for tensor in spec(op).tensors if tensor.role == "real"]
    assert sides >= {(name, side) for name in names for side in (-1, 0)}
