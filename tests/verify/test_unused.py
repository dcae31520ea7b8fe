"""Elements that no result depends on: they may hold NaN, and what is said of a kernel doesn't change."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden.registry import spec, specs
from assay.verify import Contract
from assay.verify.cases.case import Case, all_contents, build
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.comparison.oracle import Oracle
from assay.verify.examination.phases import ordinary_cases, special_cases
from tests.zoo.attention import decode

from .examined import fails, failure_of, first, quick

UNUSED = [op for op in specs() if spec(op).inputs.unused is not None]
INDEXED = [op for op in UNUSED if any(tensor.role == "index" for tensor in spec(op).tensors)]
CACHES = {"q": "bfloat16", "k_cache": "float8_e4m3fn", "v_cache": "float8_e4m3fn"}
DTYPES = ("float64", "float32", "bfloat16", "float16", CACHES, {**CACHES, "v_cache": "float8_e5m2"})


def sampled(op: str, count: int, dtype: Any = "float32", **sampler: Any) -> Iterator[Case]:
    """Cases of an op, and what is unused is NaN."""
    for seed in range(count):
        yield replace(Sampler(spec(op), dtype, **sampler).case(seeded(seed), style="small"), unused="nan")


def masks_of(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a case, and the masks of their unused elements."""
    assert case.definition.inputs.unused is not None
    values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
    return values, dict(case.definition.inputs.unused(*values.values()))


@pytest.mark.parametrize("op", UNUSED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_that_is_unused_is_nan(op: str, dtype: Any) -> None:
    spoiled = 0
    for case in sampled(op, 20, dtype, layouts=("contiguous",)):
        (values, masks), plain = masks_of(case), all_contents(replace(case, unused="plain"))
        for name, value in values.items():
            mask = masks.get(name, torch.zeros(value.shape, dtype=torch.bool))
            assert torch.equal(value.double()[~mask], plain[name].double()[~mask])
            if value.is_floating_point():
                assert torch.equal(value.double().isnan(), mask)
                spoiled += int(mask.sum())
    assert spoiled


@pytest.mark.parametrize("op", INDEXED)
def test_a_stale_index_leads_to_nan(op: str) -> None:
    """It lies in range, and where some place is unused by all, it is such a one: what is found there is NaN."""
    led = 0
    for case in sampled(op, 40, layouts=("contiguous",)):
        values, masks = masks_of(case)
        for tensor in case.signature.tensors:
            if tensor.role != "index" or tensor.name not in masks:
                continue
            stale = values[tensor.name][masks[tensor.name]].long()
            assert bool(((stale >= 0) & (stale < case.sizes[tensor.bound])).all())
            for other in case.signature.tensors:
                if other.dims[0] == tensor.bound and len(stale):
                    rows = values[other.name].flatten(1).isnan().all(1)
                    assert not bool(rows.any()) or bool(rows[stale].all())
                    led += int(rows[stale].sum())
    assert led


@pytest.mark.parametrize("op", UNUSED)
def test_the_tolerance_is_blind_to_what_is_unused(op: str) -> None:
    oracle = Oracle(Contract())
    for place, case in enumerate(sampled(op, 5 * len(LAYOUTS), "bfloat16")):
        laid = replace(case, layouts=dict.fromkeys(case.dtypes, LAYOUTS[place % len(LAYOUTS)]))
        limits = [
            oracle.tolerances(one, {name: guarded.tensor for name, guarded in build(one).guarded.items()})
            for one in (laid, replace(laid, unused="plain"))
        ]
        for spoiled, plain in zip(*limits, strict=True):
            for part in ("golden", "judged"):
                assert torch.equal(getattr(spoiled, part).nan_to_num(), getattr(plain, part).nan_to_num())
            for part in ("low", "high"):
                assert torch.equal(getattr(spoiled.ends, part).nan_to_num(), getattr(plain.ends, part).nan_to_num())


@pytest.mark.parametrize("op", UNUSED)
def test_the_phases_try_it(op: str) -> None:
    """Among the special cases there are some with NaN wherever nothing is read, and the gate's are plain."""
    sampler = Sampler(spec(op), "bfloat16")
    assert sum(case.unused == "nan" for case in special_cases(sampler)) >= 4
    assert {case.unused for case in ordinary_cases(sampler, "tile")} == {"plain"}


def test_ops_that_use_everything_are_drawn_as_before() -> None:
    case = Sampler(spec("softmax"), "float32").case(seeded(0))
    assert case.unused == "plain"
    assert "unused" not in case.as_dict()
    assert "nothing is read" not in str(case)


@pytest.mark.parametrize("op", UNUSED)
def test_a_line_keeps_it(op: str) -> None:
    for case in sampled(op, 3):
        assert Case.from_dict(json.loads(json.dumps(case.as_dict()))) == case
        assert "nan wherever nothing is read" in str(case)


def leaky(*tensors: Tensor, **options: Any) -> Tensor:
    """Decoding that is spoiled by NaN in what nothing reads."""
    out = decode(*tensors, **options)
    return out + 0 * tensors[2].double().isnan().any() * torch.nan if tensors[2].isnan().any() else out


def test_a_leak_is_found_even_where_nan_may_come_out_anywhere() -> None:
    """nonfinite="unspecified" excuses NaN only if some number that counts is NaN or infinite."""
    asked: dict[str, Any] = {"contract": Contract(nonfinite="unspecified"), "layouts": ["contiguous"]}
    failure = failure_of(fails(first(leaky, "attention_decode", "bfloat16", **asked)))
    assert failure.kind == "nonfinite"
    assert failure.case.unused == "nan"
    assert quick(decode, "attention_decode", "bfloat16", **asked).passed
