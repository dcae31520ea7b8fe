"""The Triton RMS norms: arguments, registration, and a few cases against torch in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import rmsnorm as module
from assay.kernels.triton.rmsnorm import add_rmsnorm, rmsnorm
from assay.kernels.triton.rows import CONFIGS
from assay.verify.interpreter import faithful


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with faithful():
        yield


def exact(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (weight + offset)


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("x", torch.zeros(2, 3, dtype=torch.float64), TypeError),
        ("x", torch.zeros(3), ValueError),
        ("residual", torch.zeros(2, 3, dtype=torch.int8), TypeError),
        ("residual", torch.zeros(1, 3), ValueError),
        ("residual", torch.zeros(2, 3, device="meta"), ValueError),
        ("weight", None, TypeError),
        ("weight", torch.zeros(2), ValueError),
        ("weight", torch.zeros(1, 3), ValueError),
        ("weight", torch.zeros(3, device="meta"), ValueError),
    ],
)
def test_a_wrong_argument_is_named(name: str, wrong: Any, error: type[Exception]) -> None:
    """A wrong dtype, shape or device raises an error that begins with the argument's name."""
    arguments = {"x": torch.zeros(2, 3), "residual": torch.zeros(2, 3), "weight": torch.zeros(3)} | {name: wrong}
    with pytest.raises(error, match=f"^{name}: expected "):
        add_rmsnorm(**arguments)
    if name != "residual":
        with pytest.raises(error, match=f"^{name}: expected "):
            rmsnorm(arguments["x"], arguments["weight"])


def test_the_operators_are_well_registered() -> None:
    """Schema, fake implementation and compilation with dynamic shapes agree with the operators."""
    x, residual, weight = torch.randn(37, 3).t(), torch.randn(3, 37), torch.randn(37)
    torch.library.opcheck(torch.ops.assay.rmsnorm.default, (x, weight, 1e-6, 1.0))
    torch.library.opcheck(torch.ops.assay.add_rmsnorm.default, (x, residual, weight, 1e-6))


def test_compiled_code_gives_the_same_bits() -> None:
    """torch.compile keeps the kernels whole, without a graph break."""
    x, residual, weight = torch.randn(5, 65), torch.randn(5, 65), torch.randn(65)

    def block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y, total = add_rmsnorm(x, residual, weight, eps=1e-5)
        return rmsnorm(total + y, weight, offset=1.0)

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, residual, weight), block(x, residual, weight))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kwargs["BLOCK_N"])
@pytest.mark.parametrize("shape", [(300, 33), (3, 5000), (2, 20001)], ids=str)
def test_every_configuration(config: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever configuration tuning picks, in one block or in pieces, the results are those of float64."""
    monkeypatch.setattr(module._rmsnorm_kernel, "configs", [config])
    random = torch.Generator().manual_seed(0)
    x, residual, weight = (torch.randn(size, generator=random) for size in (shape, shape, shape[1]))
    torch.testing.assert_close(
        rmsnorm(x, weight, eps=0.5, offset=1.0).double(), exact(x, weight, 0.5, 1.0), rtol=1e-5, atol=1e-9
    )
    y, total = add_rmsnorm(x, residual, weight)
    torch.testing.assert_close(y.double(), exact(x + residual, weight), rtol=1e-5, atol=1e-9)
    assert torch.equal(total, x + residual)


def test_any_strides() -> None:
    """Transposed, sliced with a step, and expanded inputs are read where they lie."""
    x, long, weights = torch.randn(70, 90), torch.randn(20001, 5), torch.randn(40002)
    for view in (x.t(), x[3:, ::2], x[:1].expand(40, 90), x[:, 1:2].expand(70, 9), long.t(), long[:, ::2].t()):
        weight = weights[1::2][: view.shape[1]]
        torch.testing.assert_close(rmsnorm(view, weight).double(), exact(view, weight), rtol=1e-5, atol=1e-9)
        residual = torch.randn(view.shape[::-1]).t()
        y, total = add_rmsnorm(view, residual, weight)
        torch.testing.assert_close(y.double(), exact(view + residual, weight), rtol=1e-5, atol=1e-9)
        assert torch.equal(total, view + residual)


def test_the_norm_is_that_of_the_unrounded_sum() -> None:
    """In bfloat16, 256 + 1 is stored as 256 but normalised as 257; the results have the dtype of x."""
    x = torch.tensor([[256.0, -256.0, 3.0, 0.0]], dtype=torch.bfloat16)
    residual = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    y, total = add_rmsnorm(x, residual, 1000 * torch.ones(4))
    assert total.tolist() == [[256.0, -256.0, 3.0, 0.0]]
    expected = exact(x.double() + residual, 1000 * torch.ones(4))
    assert torch.equal(y, expected.to(torch.bfloat16))
    assert y[0, 0] != -y[0, 1]


def test_a_row_is_the_same_in_any_batch() -> None:
    """A long row alone, and in batches of several sizes, has the same bits."""
    x, residual, weight = torch.randn(7, 5003), torch.randn(7, 5003), torch.randn(5003)
    for rows in (1, 2, 5):
        part = slice(2, 2 + rows)
        assert torch.equal(rmsnorm(x[part], weight), rmsnorm(x, weight)[part])
        assert torch.equal(add_rmsnorm(x[part], residual[part], weight)[0], add_rmsnorm(x, residual, weight)[0][part])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing_in_nothing_out(shape: tuple[int, int]) -> None:
    """Empty inputs give empty results of their shape and dtype."""
    x, weight = torch.empty(shape, dtype=torch.float16), torch.ones(shape[1])
    for result in (rmsnorm(x, weight), *add_rmsnorm(x, x, weight)):
        assert result.shape == shape
        assert result.dtype == torch.float16
