"""The Triton softmax and log-softmax: arguments, registration, and a few cases against torch in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import softmax as module
from assay.kernels.triton.rows import CONFIGS
from assay.kernels.triton.softmax import log_softmax, softmax
from assay.verify.interpreter import faithful

KERNELS = pytest.mark.parametrize(
    ("kernel", "reference"),
    [(softmax, torch.softmax), (log_softmax, torch.log_softmax)],
    ids=["softmax", "log_softmax"],
)
Kernel = Callable[[Tensor], Tensor]
Reference = Callable[..., Tensor]


def assert_right(kernel: Kernel, reference: Reference, x: Tensor) -> None:
    """The logarithm of a number near one keeps an absolute error of its sum's rounding."""
    atol = 1e-6 if kernel is log_softmax else 1e-9
    expected = reference(x.double(), dim=-1)
    torch.testing.assert_close(kernel(x).double(), expected, rtol=1e-5, atol=atol, equal_nan=True)


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with faithful():
        yield


@KERNELS
@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), TypeError),
        (torch.zeros(2, 3, dtype=torch.int32), TypeError),
        ([[0.0]], TypeError),
        (torch.zeros(3), ValueError),
        (torch.zeros(1, 2, 3), ValueError),
    ],
)
def test_a_wrong_argument_is_named(kernel: Kernel, reference: Reference, x: Any, error: type[Exception]) -> None:
    """Another dtype, no tensor, and another number of dimensions raise an error that begins with the name."""
    with pytest.raises(error, match=r"^x: expected "):
        kernel(x)


@KERNELS
def test_the_operator_is_well_registered(kernel: Kernel, reference: Reference) -> None:
    """Schema, fake implementation and compilation with dynamic shapes agree with the operator."""
    operator = getattr(torch.ops.assay, kernel.__name__).default
    torch.library.opcheck(operator, (torch.randn(3, 37),))
    torch.library.opcheck(operator, (torch.randn(37, 3, dtype=torch.bfloat16).t(),))


@KERNELS
def test_compiled_code_gives_the_same_bits(kernel: Kernel, reference: Reference) -> None:
    """torch.compile keeps the kernel whole, without a graph break."""
    x = torch.randn(5, 65)
    compiled = torch.compile(lambda x: kernel(x) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), kernel(x) + 1)


@KERNELS
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kwargs["BLOCK_N"])
@pytest.mark.parametrize("shape", [(300, 33), (3, 5000), (2, 20001)], ids=str)
def test_every_configuration(
    kernel: Kernel, reference: Reference, config: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever configuration tuning picks, in one block or in pieces, the result is that of float64."""
    monkeypatch.setattr(module._softmax_kernel, "configs", [config])
    x = 4 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert_right(kernel, reference, x)


@KERNELS
def test_any_strides(kernel: Kernel, reference: Reference) -> None:
    """Transposed, sliced with a step, and expanded inputs are read where they lie."""
    x = torch.randn(70, 90)
    long = torch.randn(20001, 5)
    for view in (x.t(), x[3:, ::2], x[:1].expand(40, 90), x[:, 1:2].expand(70, 9), long.t(), long[:, ::2].t()):
        assert_right(kernel, reference, view)


@KERNELS
def test_a_row_is_the_same_in_any_batch(kernel: Kernel, reference: Reference) -> None:
    """A long row alone, and in batches of several sizes, has the same bits."""
    x = torch.randn(7, 5003)
    for rows in (1, 2, 5):
        assert torch.equal(kernel(x[2 : 2 + rows]), kernel(x)[2 : 2 + rows])


@KERNELS
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing_in_nothing_out(kernel: Kernel, reference: Reference, shape: tuple[int, int]) -> None:
    """An empty input gives an empty result of its shape and dtype."""
    y = kernel(torch.empty(shape, dtype=torch.float16))
    assert y.shape == shape
    assert y.dtype == torch.float16


@KERNELS
@pytest.mark.parametrize("columns", [7, 20001])
def test_infinities(kernel: Kernel, reference: Reference, columns: int) -> None:
    """-inf has weight zero wherever a row has a number, also where a whole block has none; a NaN spoils its row."""
    x = torch.randn(4, columns)
    x[0, :-1] = -torch.inf
    x[1, 1:] = -torch.inf
    x[2, :] = -torch.inf
    x[3, columns // 2] = torch.nan
    assert_right(kernel, reference, x)
