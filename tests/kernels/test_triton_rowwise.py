"""The Triton kernels that work along the rows of a matrix, against torch in float64: softmaxes, norms, SwiGLU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton.layernorm import _layernorm_kernel, layernorm
from assay.kernels.triton.rmsnorm import _rmsnorm_kernel, add_rmsnorm, rmsnorm
from assay.kernels.triton.softmax import _softmax_kernel, log_softmax, softmax
from assay.kernels.triton.swiglu import _swiglu_kernel, swiglu
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")


def tupled(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True)
class Rowwise:
    """A kernel of some matrices [R, N] and vectors [N], and what is tuned of it."""

    kernel: Callable[..., Any]
    tuned: Any
    matrices: int = 1
    vectors: int = 0
    options: Mapping[str, float] = field(default_factory=dict)
    atol: float = 1e-9

    def __str__(self) -> str:
        return " ".join([self.kernel.__name__, *map(str, self.options.values())])

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tupled(self.kernel(*tensors, **self.options))

    def assert_right(self, *tensors: Tensor) -> None:
        expected = reference(self.kernel.__name__)(*tensors, **self.options)
        for found, right in zip(self.run(*tensors), expected, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=self.atol, equal_nan=True)


SOFTMAX = Rowwise(softmax, _softmax_kernel)
# The logarithm of a number near one keeps an absolute error of its sum's rounding.
LOG_SOFTMAX = Rowwise(log_softmax, _softmax_kernel, atol=1e-6)
LAYERNORM = Rowwise(layernorm, _layernorm_kernel, vectors=2, options={"eps": 0.5}, atol=1e-5)
SWIGLU = Rowwise(swiglu, _swiglu_kernel, matrices=2)
KERNELS = [
    *(SOFTMAX, LOG_SOFTMAX, LAYERNORM, SWIGLU),
    Rowwise(swiglu, _swiglu_kernel, matrices=2, options={"limit": 0.5}),
    Rowwise(rmsnorm, _rmsnorm_kernel, vectors=1, options={"eps": 0.5, "offset": 1.0}),
    Rowwise(add_rmsnorm, _rmsnorm_kernel, matrices=2, vectors=1),
]
EVERY = pytest.mark.parametrize("kernel", KERNELS, ids=str)


@pytest.mark.parametrize(
    ("kernel", "config"),
    [pytest.param(kernel, config, id=f"{kernel} {config}") for kernel in KERNELS for config in kernel.tuned.configs],
)
@pytest.mark.parametrize("shape", [(300, 33), (3, 5000), (2, 20001)], ids=str)
def test_every_configuration(
    kernel: Rowwise, config: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever configuration tuning picks, in one block or in pieces, the result is that of float64."""
    monkeypatch.setattr(kernel.tuned, "configs", [config])
    matrices = [4 * torch.randn(shape) for _ in range(kernel.matrices)]
    kernel.assert_right(*matrices, *(torch.randn(shape[1]) for _ in range(kernel.vectors)))


@EVERY
def test_any_strides(kernel: Rowwise) -> None:
    """Transposed, sliced with a step, and expanded inputs are read where they lie, also a half of a matrix."""
    x, long, weights, bias = torch.randn(70, 90), torch.randn(20001, 5), torch.randn(40002), torch.randn(1)
    slices = x[3:, ::2], x[:, 45:], x[:1].expand(40, 90), x[:, 1:2].expand(70, 9)
    for view in (x.t(), *slices, long.t(), long[:, ::2].t()):
        second = torch.randn(view.shape[::-1]).t()
        vectors = weights[1::2][: view.shape[1]], bias.expand(view.shape[1])
        kernel.assert_right(*(view, second)[: kernel.matrices], *vectors[: kernel.vectors])


@EVERY
def test_a_row_is_the_same_in_any_batch(kernel: Rowwise) -> None:
    """A long row alone, and in batches of several sizes, has the same bits."""
    matrices = [torch.randn(7, 5003) for _ in range(kernel.matrices)]
    vectors = [torch.randn(5003) for _ in range(kernel.vectors)]
    whole = kernel.run(*matrices, *vectors)
    for part in (slice(2, 3), slice(2, 4), slice(2, 7)):
        found = kernel.run(*(matrix[part] for matrix in matrices), *vectors)
        assert all(torch.equal(some, every[part]) for some, every in zip(found, whole, strict=True))


@EVERY
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing_in_nothing_out(kernel: Rowwise, shape: tuple[int, int]) -> None:
    """Empty inputs give empty results of their shape and dtype."""
    matrices = [torch.empty(shape, dtype=torch.float16)] * kernel.matrices
    for result in kernel.run(*matrices, *[torch.ones(shape[1])] * kernel.vectors):
        assert (result.shape, result.dtype) == (shape, torch.float16)


@pytest.mark.parametrize("kernel", [SOFTMAX, LOG_SOFTMAX], ids=str)
@pytest.mark.parametrize("columns", [7, 20001])
def test_infinities_in_a_softmax(kernel: Rowwise, columns: int) -> None:
    """-inf has weight zero wherever a row has a number, also where a whole block has none; a NaN spoils its row."""
    x = torch.randn(4, columns)
    x[0, :-1] = -torch.inf
    x[1, 1:] = -torch.inf
    x[2, :] = -torch.inf
    x[3, columns // 2] = torch.nan
    kernel.assert_right(x)


@pytest.mark.parametrize("columns", [100, 20001])
def test_a_mean_far_from_zero(columns: int) -> None:
    """With a mean of 4096 and a spread of one, four digits are left; E[x^2] - E[x]^2 would have none."""
    x, weight, bias = 4096 + torch.randn(3, columns), torch.ones(columns), torch.zeros(columns)
    expected = reference("layernorm")(x, weight, bias)[0]
    torch.testing.assert_close(layernorm(x, weight, bias).double(), expected, rtol=1e-3, atol=1e-3)


def test_the_norm_is_that_of_the_unrounded_sum() -> None:
    """In bfloat16, 256 + 1 is stored as 256 but normalised as 257; the results have the dtype of x."""
    x = torch.tensor([[256.0, -256.0, 3.0, 0.0]], dtype=torch.bfloat16)
    residual = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    y, total = add_rmsnorm(x, residual, 1000 * torch.ones(4))
    assert total.tolist() == [[256.0, -256.0, 3.0, 0.0]]
    assert torch.equal(y, reference("rmsnorm")(x.double() + residual, 1000 * torch.ones(4))[0].to(torch.bfloat16))
    assert y[0, 0] != -y[0, 1]


def test_the_sum_beside_the_norm_is_rounded_once() -> None:
    """It has the bits of torch's own sum."""
    x, residual = torch.randn(7, 5003), torch.randn(7, 5003)
    assert torch.equal(add_rmsnorm(x, residual, torch.ones(5003))[1], x + residual)


def test_swiglu_far_from_zero() -> None:
    """silu keeps its digits where exp(-gate) would overflow, and is zero at -inf."""
    gate = torch.tensor([[-86.0, -87.5, -88.5, -95.0, -torch.inf, 88.0, 1e30]])
    up = torch.full_like(gate, 2.0**20)
    y = swiglu(gate, up).double()
    torch.testing.assert_close(y, reference("swiglu")(gate, up)[0], rtol=1e-2, atol=0.0)
    assert y[0, 4] == 0


def test_nan_survives_the_clamps() -> None:
    """A NaN in gate or in up is a NaN in the result, with a limit and without."""
    gate, up = torch.tensor([[torch.nan, 1.0, 1.0]]), torch.tensor([[1.0, torch.nan, torch.inf]])
    assert swiglu(gate, up).isnan().tolist() == [[True, True, False]]
    assert swiglu(gate, up, limit=7.0).isnan().tolist() == [[True, True, False]]
