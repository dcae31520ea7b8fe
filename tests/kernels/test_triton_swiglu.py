"""The Triton SwiGLU: arguments, registration, and a few cases against torch in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import swiglu as module
from assay.kernels.triton.swiglu import swiglu
from assay.verify.interpreter import faithful


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with faithful():
        yield


def exact(gate: Tensor, up: Tensor, limit: float = torch.inf) -> Tensor:
    return torch.nn.functional.silu(gate.double().clamp(max=limit)) * up.double().clamp(-limit, limit)


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("gate", torch.zeros(2, 3, dtype=torch.float64), TypeError),
        ("gate", torch.zeros(3), ValueError),
        ("up", torch.zeros(2, 3, dtype=torch.int8), TypeError),
        ("up", torch.zeros(1, 3), ValueError),
        ("up", torch.zeros(2, 3, device="meta"), ValueError),
        ("limit", 0.0, ValueError),
        ("limit", -7.0, ValueError),
        ("limit", float("nan"), ValueError),
    ],
)
def test_a_wrong_argument_is_named(name: str, wrong: Any, error: type[Exception]) -> None:
    """A wrong dtype, shape, device or limit raises an error that begins with the argument's name."""
    arguments = {"gate": torch.zeros(2, 3), "up": torch.zeros(2, 3), "limit": None} | {name: wrong}
    with pytest.raises(error, match=f"^{name}: expected "):
        swiglu(**arguments)


@pytest.mark.parametrize("limit", [None, 7.0])
def test_the_operator_is_well_registered(limit: float | None) -> None:
    """Schema, fake implementation and compilation with dynamic shapes agree with the operator."""
    gate, up = torch.randn(37, 3, dtype=torch.bfloat16).t(), torch.randn(3, 37)
    torch.library.opcheck(torch.ops.assay.swiglu.default, (gate, up, limit))


def test_compiled_code_gives_the_same_bits() -> None:
    """torch.compile keeps the kernel whole, without a graph break."""
    gate, up = torch.randn(5, 65), torch.randn(5, 65)
    compiled = torch.compile(
        lambda gate, up: swiglu(gate, up) + swiglu(gate, up, limit=0.5), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(gate, up), swiglu(gate, up) + swiglu(gate, up, limit=0.5))


@pytest.mark.parametrize("config", module._CONFIGS, ids=str)
@pytest.mark.parametrize("shape", [(300, 33), (3, 5000), (2, 20001)], ids=str)
def test_every_configuration(config: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever configuration tuning picks, in one tile across or in several, the result is that of float64."""
    monkeypatch.setattr(module._swiglu_kernel, "configs", [config])
    random = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(shape, generator=random) for _ in range(2))
    torch.testing.assert_close(swiglu(gate, up).double(), exact(gate, up), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(swiglu(gate, up, limit=0.5).double(), exact(gate, up, 0.5), rtol=1e-5, atol=1e-9)


def test_any_strides() -> None:
    """Transposed, sliced with a step, and expanded inputs are read where they lie, also both halves of one matrix."""
    x = torch.randn(70, 90)
    views = [(x.t(), torch.randn(90, 70)), (x[3:, ::2], x[3:, 1::2]), (x[:1].expand(40, 90), x[:40])]
    for gate, up in [*views, x.chunk(2, dim=1)]:
        torch.testing.assert_close(swiglu(gate, up).double(), exact(gate, up), rtol=1e-5, atol=1e-9)


def test_far_from_zero() -> None:
    """silu keeps its digits where exp(-gate) would overflow, and is zero at -inf."""
    gate = torch.tensor([[-86.0, -87.5, -88.5, -95.0, -torch.inf, 88.0, 1e30]])
    y = swiglu(gate, torch.full_like(gate, 2.0**20)).double()
    torch.testing.assert_close(y, exact(gate, torch.full_like(gate, 2.0**20)).nan_to_num(), rtol=1e-2, atol=0.0)
    assert y[0, 4] == 0


def test_nan_survives_the_clamps() -> None:
    """A NaN in gate or in up is a NaN in the result, with a limit and without."""
    gate, up = torch.tensor([[torch.nan, 1.0, 1.0]]), torch.tensor([[1.0, torch.nan, torch.inf]])
    assert swiglu(gate, up).isnan().tolist() == [[True, True, False]]
    assert swiglu(gate, up, limit=7.0).isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing_in_nothing_out(shape: tuple[int, int]) -> None:
    """Empty inputs give an empty result of their shape and dtype."""
    y = swiglu(torch.empty(shape, dtype=torch.float16), torch.empty(shape))
    assert y.shape == shape
    assert y.dtype == torch.float16
