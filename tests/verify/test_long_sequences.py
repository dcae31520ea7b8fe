"""Sequences of many chunks, convolutions of more taps, and places of sparse groups in any order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden.inputs.distributions import names_of
from assay.golden.registry import spec
from assay.verify import examine
from assay.verify.cases.sampler import Sampler
from assay.verify.examination.phases import block_boundary_cases, exact_cases
from assay.verify.explanation.fault_models.evaluation import kernel_of

from .test_structured import drawn

ASKED: dict[str, Any] = {"effort": "quick", "examples": 2, "shrinking": False}


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
    verdict = examine(partial(scan, chunk=chunk), "selective_scan", dtype="bfloat16", every_aspect=False, **ASKED)
    assert verdict.outcome == "FAIL", str(verdict)
    assert [*verdict.broken] == ["shapes"]


def test_a_scan_in_sequence_passes() -> None:
    verdict = examine(scan, "selective_scan", dtype="bfloat16", **ASKED)
    assert verdict.outcome == "PASS", str(verdict)


def test_a_linear_attention_whose_chunks_of_128_stand_apart_is_found() -> None:
    honest = kernel_of(None, "linear_attention")

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [honest(*(x[:, first : first + 128] for x in (q, k, v))) for first in range(0, q.shape[1], 128)]
        return torch.cat(parts, 1)

    assert examine(honest, "linear_attention", dtype="float32", **ASKED).outcome == "PASS"
    verdict = examine(apart, "linear_attention", dtype="float32", every_aspect=False, **ASKED)
    assert verdict.outcome == "FAIL", str(verdict)


def convolution(x: Tensor, weight: Tensor, bias: Tensor, *, taps: int = 1 << 10) -> Tensor:
    """A causal convolution of the last ``taps`` taps at most."""
    kept = weight[:, max(weight.shape[1] - taps, 0) :].float()
    found = bias.float()[:, None].expand(x.shape).clone()
    for back in range(min(kept.shape[1], x.shape[2])):  # what lies before the beginning meets no tap, infinite or not
        found[:, :, back:] += x.float()[:, :, : x.shape[2] - back] * kept[:, kept.shape[1] - 1 - back, None]
    return found.to(x.dtype)


@pytest.mark.parametrize(("taps", "outcome"), [(1 << 10, "PASS"), (4, "FAIL")])
def test_a_convolution_has_more_than_four_taps(taps: int, outcome: str) -> None:
    verdict = examine(partial(convolution, taps=taps), "causal_conv1d", dtype="float32", **ASKED)
    assert verdict.outcome == outcome, str(verdict)


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
    verdict = examine(kernel, "gemm_2to4", dtype="float32", **ASKED)
    assert verdict.outcome == outcome, str(verdict)


def test_places_of_any_order() -> None:
    pairs = drawn("gemm_2to4", "any", "index", M=20, K=80, N=1).reshape(-1, 2).tolist()
    assert len({tuple(pair) for pair in pairs}) == 16
    plain = drawn("gemm_2to4", "uniform", "index", M=20, K=80, N=1).reshape(-1, 2)
    assert bool((plain[:, 0] < plain[:, 1]).all())
    (index,) = (tensor for tensor in spec("gemm_2to4").tensors if tensor.role == "pair")
    assert names_of(index)[0] == "uniform"


def test_few_cases_are_long_and_none_where_the_caller_says_how_long() -> None:
    """One of a selective scan, shorter where it is interpreted, and none where its length is restricted; pairs of any
    order in two of gemm_2to4."""
    plain = Sampler(spec("selective_scan"), "bfloat16")
    for sampler, length in ((plain, 2049), (plain.for_interpreter(), 257)):
        assert [case.sizes["L"] for case in block_boundary_cases(sampler) if case.sizes["L"] > 100] == [length]
    asked = Sampler(spec("selective_scan"), "bfloat16", shapes={"L": [7, 64]})
    assert {case.sizes["L"] for case in block_boundary_cases(asked)} <= {7, 64}
    pairs = [case for case in exact_cases(Sampler(spec("gemm_2to4"), "float32")) if case.values["index"] == "any"]
    assert len(pairs) == 2
