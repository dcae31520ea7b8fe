"""The Triton int8 product: arguments, registration, and a few cases against exact sums."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import gemm_int8 as module
from assay.kernels.triton.gemm_int8 import gemm_int8
from assay.verify.interpreter import faithful


def tile(config: Any) -> str:
    return "x".join(str(config.kwargs[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    torch.manual_seed(0)
    with faithful():
        yield


def codes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def scales(m: int, n: int) -> tuple[Tensor, Tensor]:
    return torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5


def expected(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """In float64 the sums are exact; then the kernel's roundings."""
    return ((a.double() @ b.double()).float() * scale_a * scale_b).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("a", torch.zeros(2, 3, dtype=torch.uint8), TypeError),
        ("a", torch.zeros(3, dtype=torch.int8), ValueError),
        ("b", torch.zeros(3, 4), TypeError),
        ("b", torch.zeros(2, 4, dtype=torch.int8), ValueError),
        ("b", torch.zeros(3, 4, dtype=torch.int8, device="meta"), ValueError),
        ("scale_a", torch.ones(2, 1, dtype=torch.float16), TypeError),
        ("scale_a", torch.ones(2), ValueError),
        ("scale_b", torch.ones(1, 4, dtype=torch.float64), TypeError),
        ("scale_b", torch.ones(4, 1), ValueError),
    ],
)
def test_a_wrong_argument_is_named(name: str, wrong: Any, error: type[Exception]) -> None:
    """A wrong dtype, shape or device raises an error that begins with the argument's name."""
    arguments = {"a": codes(2, 3), "b": codes(3, 4), "scale_a": torch.ones(2, 1), "scale_b": torch.ones(1, 4)}
    with pytest.raises(error, match=f"^{name}: expected "):
        gemm_int8(**arguments | {name: wrong})


def test_the_operator_is_well_registered() -> None:
    """Schema, fake implementation and compilation with dynamic shapes agree with the operator."""
    torch.library.opcheck(torch.ops.assay.gemm_int8.default, (codes(37, 3).t(), codes(37, 5), *scales(3, 5)))


def test_compiled_code_gives_the_same_bits() -> None:
    """torch.compile keeps the kernel whole, without a graph break."""
    arguments = (codes(5, 65), codes(65, 7), *scales(5, 7))
    compiled = torch.compile(lambda *arguments: gemm_int8(*arguments) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), gemm_int8(*arguments) + 1)


@pytest.mark.parametrize("config", module._CONFIGS, ids=tile)
@pytest.mark.parametrize("shape", [(300, 130, 270), (1200, 5, 200), (3, 300, 5)], ids=str)
def test_every_configuration(config: Any, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever tile is picked, fitting or not, with several bands of tiles or one, the result is exact."""
    monkeypatch.setattr(module._gemm_int8_kernel, "configs", [config])
    monkeypatch.setattr(module._gemm_int8_kernel, "early_config_prune", None)
    m, k, n = shape
    arguments = (codes(m, k), codes(k, n), *scales(m, n))
    assert torch.equal(gemm_int8(*arguments), expected(*arguments))


def test_any_strides() -> None:
    """Transposed, sliced with a step, and expanded operands and scales are read where they lie."""
    a, b = codes(70, 90), codes(90, 70)
    for x, y in ((b.t(), a.t()), (a[3:, ::2], b[::2, 1::3]), (a[:1].expand(40, 90), b[:, 1:2].expand(90, 9))):
        m, n = x.shape[0], y.shape[1]
        for scale_a, scale_b in (
            scales(m, n),
            (torch.rand(1, 1).expand(m, 1), torch.rand(1, 1).expand(1, n)),
            (torch.rand(2 * m, 3)[::2, 1:2], torch.rand(n, 2)[:, :1].t()),
        ):
            assert torch.equal(gemm_int8(x, y, scale_a, scale_b), expected(x, y, scale_a, scale_b))


@pytest.mark.parametrize("k", [65536, 65537, 131072, 200001])
def test_sums_beyond_an_int32_are_exact(k: int) -> None:
    """The largest products of one sign add up beyond 2^31 without wrapping; those of both signs cancel."""
    a = torch.full((2, k), -128, dtype=torch.int8)
    a[1, ::2] = 127
    b = torch.full((k, 1), -128, dtype=torch.int8)
    arguments = (a, b, torch.ones(2, 1), torch.ones(1, 1))
    assert torch.equal(gemm_int8(*arguments), expected(*arguments))


def test_offsets_beyond_an_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element more than 2^31 bytes from the first is found along M, N and K, also in a second block of K."""
    monkeypatch.setattr(module._gemm_int8_kernel, "configs", module._CONFIGS[:1])
    monkeypatch.setattr(module._gemm_int8_kernel, "early_config_prune", None)
    count, far = 130, 2**24
    memory = torch.empty((count - 1) * far + 1, dtype=torch.int8)  # pages that are not touched take no memory
    spread = memory.as_strided((count,), (far,))
    spread.copy_(codes(count))
    column, row = spread[:, None], spread[None, :]
    outer = (column, row, *scales(count, count))
    inner = (row, column, *scales(1, 1))
    assert torch.equal(gemm_int8(*outer), expected(*outer))
    assert torch.equal(gemm_int8(*inner), expected(*inner))


@pytest.mark.parametrize("shape", [(0, 3, 4), (4, 3, 0), (0, 0, 0)], ids=str)
def test_nothing_in_nothing_out(shape: tuple[int, int, int]) -> None:
    """Without rows or columns the result is empty, of the right shape and dtype."""
    m, k, n = shape
    c = gemm_int8(codes(m, k), codes(k, n), *scales(m, n))
    assert c.shape == (m, n)
    assert c.dtype == torch.bfloat16


def test_a_sum_of_nothing_is_zero() -> None:
    """With K = 0 every element is zero, whatever the memory held."""
    zeros = torch.zeros(70, 130, dtype=torch.bfloat16)
    assert torch.equal(gemm_int8(codes(70, 0), codes(0, 130), *scales(70, 130)), zeros)
