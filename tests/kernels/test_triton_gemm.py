"""The Triton matrix product: arguments, registration, and a few cases against torch in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import gemm as module
from assay.kernels.triton.gemm import gemm
from assay.verify.interpreter import faithful


def tile(config: Any) -> str:
    return "x".join(str(config.kwargs[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    torch.manual_seed(0)
    with faithful():
        yield


def assert_right(a: Tensor, b: Tensor) -> None:
    """Within a rounding of the output, and of float32 for each term of the sum of absolute products."""
    c = gemm(a, b)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    unit = torch.finfo(a.dtype).eps
    assert c.dtype == a.dtype
    assert bool(((c.double() - exact).abs() <= unit * exact.abs() + a.shape[1] * 2**-24 * size).all())


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("a", torch.zeros(2, 3, dtype=torch.float64), TypeError),
        ("a", torch.zeros(2, 3, dtype=torch.int8), TypeError),
        ("a", [[0.0]], TypeError),
        ("a", torch.zeros(3), ValueError),
        ("b", torch.zeros(3, 4, dtype=torch.float16), TypeError),
        ("b", torch.zeros(2, 4), ValueError),
        ("b", torch.zeros(1, 3, 4), ValueError),
        ("b", torch.zeros(3, 4, device="meta"), ValueError),
    ],
)
def test_a_wrong_argument_is_named(name: str, wrong: Any, error: type[Exception]) -> None:
    """A wrong dtype, shape or device raises an error that begins with the argument's name."""
    arguments = {"a": torch.zeros(2, 3), "b": torch.zeros(3, 4)} | {name: wrong}
    with pytest.raises(error, match=f"^{name}: expected "):
        gemm(**arguments)


def test_the_operator_is_well_registered() -> None:
    """Schema, fake implementation and compilation with dynamic shapes agree with the operator."""
    a, b = torch.randn(37, 3, dtype=torch.bfloat16).t(), torch.randn(37, 5, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.assay.gemm.default, (a, b))


def test_compiled_code_gives_the_same_bits() -> None:
    """torch.compile keeps the kernel whole, without a graph break."""
    a, b = torch.randn(5, 65), torch.randn(65, 7)
    compiled = torch.compile(lambda a, b: gemm(a, b) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a, b), gemm(a, b) + 1)


@pytest.mark.parametrize("config", module._CONFIGS, ids=tile)
@pytest.mark.parametrize("shape", [(300, 70, 270), (1200, 5, 200), (3, 300, 5)], ids=str)
def test_every_configuration(config: Any, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever tile is picked, fitting or not, with several bands of tiles or one, the result is that of float64."""
    monkeypatch.setattr(module._gemm_kernel, "configs", [config])
    monkeypatch.setattr(module._gemm_kernel, "early_config_prune", None)
    m, k, n = shape
    assert_right(torch.randn(m, k), torch.randn(k, n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_strides(dtype: torch.dtype) -> None:
    """Transposed, sliced with a step, and expanded operands are read where they lie."""
    a, b = torch.randn(70, 90).to(dtype), torch.randn(90, 70).to(dtype)
    assert_right(b.t(), a.t())
    assert_right(a[3:, ::2], b[::2, 1::3])
    assert_right(a[:1].expand(40, 90), b[:, 1:2].expand(90, 9))
    assert_right(a[:, :1].expand(70, 50), b[:1].expand(50, 70))


@pytest.mark.parametrize("shape", [(0, 3, 4), (4, 3, 0), (0, 0, 0)], ids=str)
def test_nothing_in_nothing_out(shape: tuple[int, int, int]) -> None:
    """Without rows or columns the result is empty, of the right shape and dtype."""
    m, k, n = shape
    c = gemm(torch.ones(m, k, dtype=torch.float16), torch.ones(k, n, dtype=torch.float16))
    assert c.shape == (m, n)
    assert c.dtype == torch.float16


def test_a_sum_of_nothing_is_zero() -> None:
    """With K = 0 every element is zero, whatever the memory held."""
    assert torch.equal(gemm(torch.ones(70, 0), torch.ones(0, 130)), torch.zeros(70, 130))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nonfinite_number_stays_in_its_row(value: float) -> None:
    """NaN and Inf reach the elements that are sums over them, and no other."""
    a, b = torch.ones(70, 67), torch.ones(67, 70)
    a[3, 66] = value
    c = gemm(a, b)
    assert bool((~c[3].isfinite()).all())
    assert bool((c[torch.arange(70) != 3] == 67).all())


def test_float32_is_not_cut_to_tf32() -> None:
    """A float32 product keeps all 24 bits of its operands."""
    a = torch.full((16, 1), 1 + 2**-23)
    assert torch.equal(gemm(a, torch.ones(1, 16)), a.expand(16, 16))
