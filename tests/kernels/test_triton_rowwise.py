"""The row-wise Triton kernels, softmaxes, norms and SwiGLU, against torch in float64; and sums of their columns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.triton.layernorm import _layernorm_kernel, layernorm, layernorm_backward
from assay.kernels.triton.norm_backward import rows_per_partial
from assay.kernels.triton.reduction import sum_partials
from assay.kernels.triton.rmsnorm import _rmsnorm_kernel, add_rmsnorm, rmsnorm, rmsnorm_backward
from assay.kernels.triton.softmax import _softmax_kernel, log_softmax, softmax
from assay.kernels.triton.swiglu import _swiglu_kernel, swiglu
from tests.kernels.conftest import distinct
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")


def tupled(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True)
class Rowwise:
    """A function of matrices [R, N] and vectors [N], and its autotuned kernel."""

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
        for result, right in zip(self.run(*tensors), expected, strict=True):
            torch.testing.assert_close(result.double(), right, rtol=1e-5, atol=self.atol, equal_nan=True)


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
    [(kernel, config) for kernel in KERNELS for config in distinct(kernel.tuned.configs)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(300, 33), (3, 5000), (2, 20001)], ids=str)
def test_every_configuration(
    kernel: Rowwise, config: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block and in several."""
    monkeypatch.setattr(kernel.tuned, "configs", [config])
    matrices = [4 * torch.randn(shape) for _ in range(kernel.matrices)]
    kernel.assert_right(*matrices, *(torch.randn(shape[1]) for _ in range(kernel.vectors)))


@EVERY
def test_any_strides(kernel: Rowwise) -> None:
    x, long, weights, bias = torch.randn(70, 90), torch.randn(20001, 5), torch.randn(40002), torch.randn(1)
    slices = x[3:, ::2], x[:, 45:], x[:1].expand(40, 90), x[:, 1:2].expand(70, 9)
    for view in (x.t(), *slices, long.t(), long[:, ::2].t()):
        second = torch.randn(view.shape[::-1]).t()
        vectors = weights[1::2][: view.shape[1]], bias.expand(view.shape[1])
        kernel.assert_right(*(view, second)[: kernel.matrices], *vectors[: kernel.vectors])


@EVERY
def test_a_row_is_the_same_in_any_batch(kernel: Rowwise) -> None:
    matrices = [torch.randn(7, 5003) for _ in range(kernel.matrices)]
    vectors = [torch.randn(5003) for _ in range(kernel.vectors)]
    whole = kernel.run(*matrices, *vectors)
    for part in (slice(2, 3), slice(2, 4), slice(2, 7)):
        results = kernel.run(*(matrix[part] for matrix in matrices), *vectors)
        assert all(torch.equal(some, every[part]) for some, every in zip(results, whole, strict=True))


@EVERY
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing_in_nothing_out(kernel: Rowwise, shape: tuple[int, int]) -> None:
    matrices = [torch.empty(shape, dtype=torch.float16)] * kernel.matrices
    for result in kernel.run(*matrices, *[torch.ones(shape[1])] * kernel.vectors):
        assert (result.shape, result.dtype) == (shape, torch.float16)


@pytest.mark.parametrize("kernel", [SOFTMAX, LOG_SOFTMAX], ids=str)
@pytest.mark.parametrize("columns", [7, 20001])
def test_infinities_in_a_softmax(kernel: Rowwise, columns: int) -> None:
    """-inf has probability zero beside a number, also in a block of -inf alone; a NaN makes its whole row NaN."""
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


def test_the_sum_of_add_rmsnorm_has_the_bits_of_torch() -> None:
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
    gate, up = torch.tensor([[torch.nan, 1.0, 1.0]]), torch.tensor([[1.0, torch.nan, torch.inf]])
    assert swiglu(gate, up).isnan().tolist() == [[True, True, False]]
    assert swiglu(gate, up, limit=7.0).isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize("count", [0, 1, 31, 33, 256, 257, 288, 300, 9000])
@pytest.mark.parametrize("columns", [0, 1, 130])
def test_every_partial_sum_is_added_once(count: int, columns: int) -> None:
    """Of whole numbers, whose sums are exact."""
    partials = torch.randint(-8, 9, (count, columns)).float()
    y = torch.full((columns,), 7.0)
    sum_partials(partials, y)
    assert torch.equal(y, partials.sum(0))


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (1, 1), (300, 64), (70, 600), (9, 4097), (3, 8192), (3, 8193)])
def test_norm_gradients_of_rows_of_any_length(rows: int, columns: int) -> None:
    x, dy = torch.randn(rows, columns) + 1.0, torch.randn(rows, columns)
    weight, bias = (torch.randn(columns) for _ in range(2))
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    for y, gradients in (
        (F.layer_norm(leaves[0], [columns], *leaves[1:], 1e-5), layernorm_backward(x, weight, dy)),
        (F.rms_norm(leaves[0], [columns], leaves[1], 1e-6), rmsnorm_backward(x, weight, dy)),
    ):
        expected = torch.autograd.grad(y, leaves[: len(gradients)], dy.double())
        for gradient, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient.double(), right, rtol=2e-5, atol=2e-5)


def test_rows_beyond_the_last_add_nothing() -> None:
    """With an eps of zero their rstd is infinite, and zero times that is NaN."""
    x, dy = torch.randn(5, 37), torch.randn(5, 37)
    _, dweight = rmsnorm_backward(x, torch.ones(37), dy, eps=0.0)
    torch.testing.assert_close(dweight, (dy * F.rms_norm(x, [37], eps=0.0)).sum(0), rtol=2e-5, atol=2e-5)


def test_the_shape_alone_decides_the_partial_sums() -> None:
    """Whole tiles of short rows, at most 512 partial sums of many rows, and none of long rows."""
    expected = {(5, 64): 128, (70000, 64): 256, (4096, 4096): 8, (8, 8192): 1, (8, 8193): 0, (8, 0): 8192}
    assert {shape: rows_per_partial(torch.empty(shape)) for shape in expected} == expected
