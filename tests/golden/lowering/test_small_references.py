"""References of all families: their goldens hold the exact values, their tolerances what PyTorch gives in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from assay.formats.accumulator import accumulator_named
from assay.formats.format import format_named
from assay.golden.arithmetic import BallArithmetic, Multiprecision, RoundingModel
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import golden_of
from assay.golden.lowering import reference_spec
from assay.golden.lowering.spec import NARROW
from tests.golden.lowering.small_references import SMALL

FLOAT32 = RoundingModel(
    format_named("float32"),
    accumulator_named("float32"),
    ulps={"exp": 2, "log": 2, "rsqrt": 2, "div": 2},
    stages={name: format_named(name) for name in NARROW},
)


def inputs(tensors: str, sizes: dict[str, int], seed: int = 0) -> list[torch.Tensor]:
    from assay.golden.signature import parse

    generator = torch.Generator().manual_seed(seed)
    made = []
    for tensor in parse(tensors).tensors:
        shape = tensor.shape(sizes)
        if tensor.is_integer:
            made.append(torch.randint(tensor.most(sizes) + 1, shape, generator=generator))
        else:
            made.append(torch.randn(shape, generator=generator))
    return made


def tuple_of(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


@pytest.mark.parametrize("name", SMALL)
def test_golden_holds_multiprecision(name: str) -> None:
    reference, tensors, sizes = SMALL[name]
    definition, given = reference_spec(reference, tensors), inputs(tensors, sizes)
    witness = Multiprecision(40)
    for ball, right in zip(
        run(definition, BallArithmetic(), given, {}), run(definition, witness, given, {}), strict=True
    ):
        golden = golden_of(ball)
        exact = torch.from_numpy(np.vectorize(float, otypes=[float])(right)).double()
        assert golden.value.shape == exact.shape
        assert bool(((golden.value - exact).abs() <= golden.radius + 2.0**-53 * exact.abs()).all())
        assert float(golden.radius.max()) < 1e-9


@pytest.mark.parametrize("name", SMALL)
def test_tolerance_admits_eager_float32(name: str) -> None:
    reference, tensors, sizes = SMALL[name]
    definition = reference_spec(reference, tensors)
    for seed in range(3):
        given = inputs(tensors, sizes, seed)
        eager = tuple_of(reference(*[x.clone() for x in given]))
        for ball, got in zip(run(definition, BallArithmetic(FLOAT32), given, {}), eager, strict=True):
            allowed = golden_of(ball)
            assert tuple(allowed.value.shape) == tuple(got.shape)
            assert bool(((allowed.value - got.double()).abs() <= allowed.radius + 2.0**-24 * got.abs()).all())
            finite = allowed.radius.isfinite()
            assert bool(finite.all())
