"""The Triton FP8 product: arguments, registration, and a few cases against torch in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import gemm_fp8 as module
from assay.kernels.triton.gemm_fp8 import gemm_fp8
from assay.verify.interpreter import faithful

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRANULARITY = pytest.mark.parametrize("granularity", ["tensor", "row", "block"])


def tile(config: Any) -> str:
    return "x".join(str(config.kwargs[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    torch.manual_seed(0)
    with faithful():
        yield


def values(m: int, n: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(m, n).to(dtype)


def scales(m: int, k: int, n: int, granularity: str) -> tuple[Tensor, Tensor]:
    """Scales whose neighbours differ by up to a factor of eight."""
    blocks_k, blocks_n = -(-k // 128), -(-n // 128)
    shapes = {"tensor": ((), ()), "row": ((m, 1), (1, n)), "block": ((m, blocks_k), (blocks_k, blocks_n))}
    scale_a, scale_b = (torch.rand(shape) + 2.0 ** torch.randint(-3, 0, shape) for shape in shapes[granularity])
    return scale_a, scale_b


def assert_right(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, granularity: str) -> None:
    """Within a rounding of the output, and of float32 for each scale and term of the sum of absolute products."""
    c = gemm_fp8(a, b, scale_a, scale_b, granularity=granularity)
    (m, k), n = a.shape, b.shape[1]
    if granularity == "block":
        scale_a = scale_a.repeat_interleave(128, 1)[:, :k]
        scale_b = scale_b.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    left, right = a.double() * scale_a, b.double() * scale_b
    exact, size = left @ right, left.abs() @ right.abs()
    assert c.shape == (m, n)
    assert c.dtype == torch.bfloat16
    assert bool(((c.double() - exact).abs() <= 2**-8 * exact.abs() + (k + 4) * 2**-24 * size).all())


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("granularity", "group", ValueError),
        ("a", torch.zeros(2, 130), TypeError),
        ("a", torch.zeros(2, 130, dtype=torch.float8_e4m3fnuz), TypeError),
        ("a", torch.zeros(130, dtype=E4M3), ValueError),
        ("b", torch.zeros(130, 4, dtype=torch.uint8), TypeError),
        ("b", torch.zeros(2, 4, dtype=E5M2), ValueError),
        ("b", torch.zeros(130, 4, dtype=E5M2, device="meta"), ValueError),
        ("scale_a", torch.ones(2, 2, dtype=torch.bfloat16), TypeError),
        ("scale_a", torch.ones(2, 1), ValueError),
        ("scale_b", torch.ones(2, 1, dtype=torch.float64), TypeError),
        ("scale_b", torch.ones(1, 4), ValueError),
    ],
)
def test_a_wrong_argument_is_named(name: str, wrong: Any, error: type[Exception]) -> None:
    """A wrong granularity, dtype, shape or device raises an error that begins with the argument's name."""
    arguments = {"a": values(2, 130), "b": values(130, 4), "scale_a": torch.ones(2, 2), "scale_b": torch.ones(2, 1)}
    with pytest.raises(error, match=f"^{name}: expected "):
        gemm_fp8(**{"granularity": "block"} | arguments | {name: wrong})


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_scales_fit_the_granularity(granularity: str) -> None:
    """Scales by block are refused where others are due."""
    with pytest.raises(ValueError, match=r"^scale_a: expected shape "):
        gemm_fp8(values(2, 130), values(130, 4), *scales(2, 130, 4, "block"), granularity=granularity)


@GRANULARITY
def test_the_operator_is_well_registered(granularity: str) -> None:
    """Fake implementation and compilation with dynamic shapes agree with the operator."""
    arguments = (values(37, 3).t(), values(37, 5, E5M2), *scales(3, 37, 5, granularity), granularity)
    # Torch compares the arguments before and after to check the schema, which it can't do in 8 bits.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.assay.gemm_fp8.default, arguments, test_utils=utils)


@GRANULARITY
def test_compiled_code_gives_the_same_bits(granularity: str) -> None:
    """torch.compile keeps the kernel whole, without a graph break."""
    arguments = (values(5, 265), values(265, 7), *scales(5, 265, 7, granularity))
    compiled = torch.compile(
        lambda *arguments: gemm_fp8(*arguments, granularity=granularity) + 1, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*arguments), gemm_fp8(*arguments, granularity=granularity) + 1)


@GRANULARITY
@pytest.mark.parametrize("config", module._CONFIGS, ids=tile)
@pytest.mark.parametrize("shape", [(300, 300, 270), (1200, 5, 200), (3, 300, 5)], ids=str)
def test_every_configuration(
    granularity: str, config: Any, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever tile is picked, fitting or not, with several bands of tiles or one, the result is that of float64."""
    monkeypatch.setattr(module._gemm_fp8_kernel, "configs", [config])
    monkeypatch.setattr(module._gemm_fp8_kernel, "early_config_prune", None)
    m, k, n = shape
    assert_right(values(m, k), values(k, n), *scales(m, k, n, granularity), granularity)


@GRANULARITY
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
def test_any_strides_and_formats(granularity: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Operands of either format, transposed, sliced with a step, and expanded, and such scales are read as they are."""
    a, b = values(70, 290, dtypes[0]), values(290, 170, dtypes[1])
    transposed = values(290, 70, dtypes[0]).t(), values(170, 290, dtypes[1]).t()
    expanded = a[:1].expand(40, 290), b[:, 1:2].expand(290, 9)
    for x, y in (transposed, expanded, (a[3:, ::2], b[::2, 1::3])):
        (m, k), n = x.shape, y.shape[1]
        scale_a, scale_b = scales(m, k, n, granularity)
        assert_right(x, y, scale_a, scale_b, granularity)
        if granularity != "tensor":
            assert_right(x, y, scale_a.t().contiguous().t(), scale_b.repeat(2, 2)[::2, ::2], granularity)
            assert_right(x, y, scale_a[:1].expand(scale_a.shape), scale_b[:, :1].expand(scale_b.shape), granularity)


@GRANULARITY
@pytest.mark.parametrize("shape", [(0, 3, 4), (4, 3, 0), (0, 0, 0)], ids=str)
def test_nothing_in_nothing_out(granularity: str, shape: tuple[int, int, int]) -> None:
    """Without rows or columns the result is empty, of the right shape and dtype."""
    m, k, n = shape
    c = gemm_fp8(values(m, k), values(k, n), *scales(m, k, n, granularity), granularity=granularity)
    assert c.shape == (m, n)
    assert c.dtype == torch.bfloat16


@GRANULARITY
def test_a_sum_of_nothing_is_zero(granularity: str) -> None:
    """With K = 0 every element is zero, whatever the memory held."""
    c = gemm_fp8(values(70, 0), values(0, 130), *scales(70, 0, 130, granularity), granularity=granularity)
    assert torch.equal(c, torch.zeros(70, 130, dtype=torch.bfloat16))


@GRANULARITY
def test_nonfinite_numbers_come_through(granularity: str) -> None:
    """e4m3's NaN, and e5m2's infinities and NaN, reach the elements that are sums over them, and no other."""
    a, b = torch.ones(4, 150).to(E5M2), torch.ones(150, 3).to(E4M3)
    a[1, 149], a[2, 0], b[149, 2] = torch.inf, torch.nan, torch.nan
    c = gemm_fp8(a, b, *(torch.ones_like(scale) for scale in scales(4, 150, 3, granularity)), granularity=granularity)
    plain, inf, nan = 150.0, torch.inf, torch.nan
    expected = torch.tensor([[plain, plain, nan], [inf, inf, nan], [nan, nan, nan], [plain, plain, nan]])
    torch.testing.assert_close(c.float(), expected, rtol=0, atol=0, equal_nan=True)
