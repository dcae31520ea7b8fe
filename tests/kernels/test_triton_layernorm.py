"""The Triton layer norm: arguments, registration, and a few cases against torch in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import layernorm as module
from assay.kernels.triton.layernorm import layernorm
from assay.kernels.triton.rows import CONFIGS
from assay.verify.interpreter import faithful


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with faithful():
        yield


def exact(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), eps)


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("x", torch.zeros(2, 3, dtype=torch.float64), TypeError),
        ("x", torch.zeros(3), ValueError),
        ("weight", torch.zeros(3, dtype=torch.int8), TypeError),
        ("weight", torch.zeros(2), ValueError),
        ("weight", torch.zeros(3, device="meta"), ValueError),
        ("bias", None, TypeError),
        ("bias", torch.zeros(1, 3), ValueError),
        ("bias", torch.zeros(3, device="meta"), ValueError),
    ],
)
def test_a_wrong_argument_is_named(name: str, wrong: Any, error: type[Exception]) -> None:
    """A wrong dtype, shape or device raises an error that begins with the argument's name."""
    arguments = {"x": torch.zeros(2, 3), "weight": torch.zeros(3), "bias": torch.zeros(3)} | {name: wrong}
    with pytest.raises(error, match=f"^{name}: expected "):
        layernorm(**arguments)


def test_the_operator_is_well_registered() -> None:
    """Schema, fake implementation and compilation with dynamic shapes agree with the operator."""
    arguments = (torch.randn(37, 3, dtype=torch.bfloat16).t(), torch.randn(37), torch.randn(37), 1e-5)
    torch.library.opcheck(torch.ops.assay.layernorm.default, arguments)


def test_compiled_code_gives_the_same_bits() -> None:
    """torch.compile keeps the kernel whole, without a graph break."""
    arguments = (torch.randn(5, 65), torch.randn(65), torch.randn(65))
    compiled = torch.compile(lambda *a: layernorm(*a, eps=0.1) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), layernorm(*arguments, eps=0.1) + 1)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kwargs["BLOCK_N"])
@pytest.mark.parametrize("shape", [(300, 33), (3, 5000), (2, 20001)], ids=str)
def test_every_configuration(config: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever configuration tuning picks, in one block or in pieces, the result is that of float64."""
    monkeypatch.setattr(module._layernorm_kernel, "configs", [config])
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=random) for size in (shape, shape[1], shape[1]))
    torch.testing.assert_close(
        layernorm(x, weight, bias, eps=0.5).double(), exact(x, weight, bias, 0.5), rtol=1e-5, atol=1e-5
    )


def test_any_strides() -> None:
    """Transposed, sliced with a step, and expanded inputs are read where they lie."""
    x, long, weight, bias = torch.randn(70, 90), torch.randn(20001, 5), torch.randn(40002), torch.randn(1)
    for view in (x.t(), x[3:, ::2], x[:1].expand(40, 90), long.t(), long[:, ::2].t()):
        weights, biases = weight[1::2][: view.shape[1]], bias.expand(view.shape[1])
        torch.testing.assert_close(
            layernorm(view, weights, biases).double(), exact(view, weights, biases), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("columns", [100, 20001])
def test_a_mean_far_from_zero(columns: int) -> None:
    """With a mean of 4096 and a spread of one, four digits are left; E[x^2] - E[x]^2 would have none."""
    x = 4096 + torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.ones(columns), torch.zeros(columns)
    torch.testing.assert_close(layernorm(x, weight, bias).double(), exact(x, weight, bias), rtol=1e-3, atol=1e-3)


def test_a_row_is_the_same_in_any_batch() -> None:
    """A long row alone, and in batches of several sizes, has the same bits."""
    x, weight, bias = torch.randn(7, 5003), torch.randn(5003), torch.randn(5003)
    for rows in (1, 2, 5):
        assert torch.equal(layernorm(x[2 : 2 + rows], weight, bias), layernorm(x, weight, bias)[2 : 2 + rows])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing_in_nothing_out(shape: tuple[int, int]) -> None:
    """An empty input gives an empty result of its shape and dtype."""
    y = layernorm(torch.empty(shape, dtype=torch.float16), torch.ones(shape[1]), torch.ones(shape[1]))
    assert y.shape == shape
    assert y.dtype == torch.float16
