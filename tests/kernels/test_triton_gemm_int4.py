"""The Triton int4 product: arguments, registration, and a few cases against torch in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import gemm_int4 as module
from assay.kernels.triton.gemm_int4 import gemm_int4
from assay.verify.interpreter import faithful

PACKING = pytest.mark.parametrize("packing", ["plain", "awq", "gptq"])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def tile(config: Any) -> str:
    return "x".join(str(config.kwargs[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    torch.manual_seed(0)
    with faithful():
        yield


def pack(nibbles: Tensor, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 words of eight nibbles along ``axis``; nibble i of a word is number ``order[i]`` of its eight."""
    before, size, after = nibbles.shape[:axis], nibbles.shape[axis], nibbles.shape[axis + 1 :]
    words = nibbles.long().reshape(*before, size // 8, 8, *after).movedim(axis + 1, 0)
    packed = sum(words[number] << (4 * place) for place, number in enumerate(order))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def drawn(k: int, n: int, group: int, packing: str, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The exact weights [K,N] in float64, and the arguments that represent them."""
    codes, scale = torch.randint(16, (k, n)), (torch.rand(k // group, n) + 0.25).to(dtype)
    zero = torch.randint(16, (k // group, n)) + (packing == "gptq")
    weights = (codes - zero.repeat_interleave(group, 0)) * scale.double().repeat_interleave(group, 0)
    if packing == "plain":
        return weights, ((codes[::2] | codes[1::2] << 4).byte(), scale, zero.byte())
    if packing == "awq":
        return weights, (pack(codes, 1, AWQ_ORDER), scale, pack(zero, 1, AWQ_ORDER))
    return weights, (pack(codes, 0), scale, pack(zero - 1, 1))


def assert_right(x: Tensor, weights: Tensor, arguments: tuple[Tensor, ...], packing: str) -> None:
    """Of rounded weights: within a rounding of the output, and of float32 for each term of the sum."""
    y = gemm_int4(x, *arguments, packing=packing)
    stored = weights.to(x.dtype).double()
    exact, size = x.double() @ stored, x.double().abs() @ stored.abs()
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    assert bool(
        ((y.double() - exact).abs() <= torch.finfo(x.dtype).eps * exact.abs() + x.shape[1] * 2**-24 * size).all()
    )


@pytest.mark.parametrize(
    ("packing", "name", "wrong", "error"),
    [
        ("marlin", "packing", "marlin", ValueError),
        ("plain", "x", torch.zeros(2, 32, dtype=torch.float64), TypeError),
        ("plain", "x", torch.zeros(32), ValueError),
        ("plain", "qweight", torch.zeros(16, 8, dtype=torch.int32), TypeError),
        ("awq", "qweight", torch.zeros(16, 8, dtype=torch.uint8), TypeError),
        ("plain", "qweight", torch.zeros(32, 8, dtype=torch.uint8), ValueError),
        ("awq", "qweight", torch.zeros(4, 8, dtype=torch.int32), ValueError),
        ("gptq", "qweight", torch.zeros(32, 1, dtype=torch.int32), ValueError),
        ("plain", "scales", torch.ones(2, 8, dtype=torch.float16), TypeError),
        ("plain", "scales", torch.ones(8), ValueError),
        ("plain", "zeros", torch.zeros(2, 8), TypeError),
        ("gptq", "zeros", torch.zeros(2, 8, dtype=torch.int32), ValueError),
        ("plain", "zeros", torch.zeros(1, 8, dtype=torch.uint8), ValueError),
        ("plain", "zeros", torch.zeros(2, 8, dtype=torch.uint8, device="meta"), ValueError),
    ],
)
def test_a_wrong_argument_is_named(packing: str, name: str, wrong: Any, error: type[Exception]) -> None:
    """A wrong packing, dtype, shape or device raises an error that begins with the argument's name."""
    _, (qweight, scales, zeros) = drawn(32, 8, 16, packing, torch.float32)
    arguments: dict[str, Any] = {"x": torch.zeros(2, 32), "qweight": qweight, "scales": scales, "zeros": zeros}
    with pytest.raises(error, match=f"^{name}: expected "):
        gemm_int4(**arguments | {"packing": packing} | {name: wrong})


@PACKING
@pytest.mark.parametrize("groups", [0, 3, 5, 64])
def test_a_group_that_does_not_divide_k(packing: str, groups: int) -> None:
    """A number of scale rows that doesn't divide K is refused, naming the scales."""
    _, (qweight, _, _) = drawn(32, 8, 16, packing, torch.float32)
    zeros = torch.zeros(groups, 8 if packing == "plain" else 1, dtype=qweight.dtype)
    with pytest.raises(ValueError, match=r"^scales: expected a number of rows that divides K=32, got "):
        gemm_int4(torch.zeros(2, 32), qweight, torch.ones(groups, 8), zeros, packing=packing)


def test_sizes_that_fill_no_word() -> None:
    """An odd K in "plain", a K in "gptq" and an N in "awq" that are no multiple of eight are refused."""
    words, ones = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 8)
    with pytest.raises(ValueError, match=r"^x: expected K to be a multiple of 2"):
        gemm_int4(torch.zeros(2, 7), words.byte(), ones, words.byte())
    with pytest.raises(ValueError, match=r"^x: expected K to be a multiple of 8"):
        gemm_int4(torch.zeros(2, 12), words, ones, words, packing="gptq")
    with pytest.raises(ValueError, match=r"^scales: expected N to be a multiple of 8"):
        gemm_int4(torch.zeros(2, 8), words, torch.ones(1, 12), words, packing="awq")


@PACKING
def test_the_operator_is_well_registered(packing: str) -> None:
    """Schema, fake implementation and compilation with dynamic shapes agree with the operator."""
    _, arguments = drawn(64, 24, 32, packing, torch.bfloat16)
    x = torch.randn(64, 3, dtype=torch.bfloat16).t()
    torch.library.opcheck(torch.ops.assay.gemm_int4.default, (x, *arguments, packing))


@PACKING
def test_compiled_code_gives_the_same_bits(packing: str) -> None:
    """torch.compile keeps the kernel whole, without a graph break."""
    _, arguments = drawn(64, 24, 32, packing, torch.float32)
    x = torch.randn(5, 64)
    compiled = torch.compile(
        lambda *arguments: gemm_int4(*arguments, packing=packing) + 1, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(x, *arguments), gemm_int4(x, *arguments, packing=packing) + 1)


@PACKING
@pytest.mark.parametrize("config", module._CONFIGS, ids=tile)
@pytest.mark.parametrize("shape", [(3, 128, 136), (300, 64, 48)], ids=str)
def test_every_configuration(
    packing: str, config: Any, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever tile is picked, fitting or not, the result is that of float64."""
    monkeypatch.setattr(module._gemm_int4_kernel, "configs", [config])
    monkeypatch.setattr(module._gemm_int4_kernel, "early_config_prune", None)
    m, k, n = shape
    assert_right(torch.randn(m, k), *drawn(k, n, 32, packing, torch.float32), packing)


@PACKING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("k", "group"), [(256, 256), (512, 256), (256, 128), (192, 64), (96, 48), (336, 7), (120, 24), (40, 1), (8, 8)]
)
def test_any_group_size(packing: str, dtype: torch.dtype, k: int, group: int) -> None:
    """Groups longer and shorter than a tile, that don't begin with one, and of an odd size have their own scales."""
    for m, n in ((5, 40), (40, 8)):
        assert_right(torch.randn(m, k).to(dtype), *drawn(k, n, group, packing, dtype), packing)


@PACKING
def test_every_code_and_zero_point(packing: str) -> None:
    """Weights are exact for each of 16 codes with each of 16 zero-points, a stored 15 of GPTQ's being 16."""
    codes = torch.arange(16)[:, None].expand(16, 16)
    zero = torch.arange(16)[None, :] + (packing == "gptq")
    if packing == "plain":
        arguments = (codes[::2] | codes[1::2] << 4).byte(), torch.ones(1, 16), zero.byte()
    elif packing == "awq":
        arguments = pack(codes, 1, AWQ_ORDER), torch.ones(1, 16), pack(zero, 1, AWQ_ORDER)
    else:
        arguments = pack(codes, 0), torch.ones(1, 16), pack(zero - 1, 1)
    assert torch.equal(gemm_int4(torch.eye(16), *arguments, packing=packing), (codes - zero).float())


@PACKING
def test_any_strides(packing: str) -> None:
    """Transposed, sliced with a step, and expanded tensors are read where they lie."""
    weights, arguments = drawn(96, 48, 32, packing, torch.float32)
    for x in (torch.randn(96, 5).t(), torch.randn(10, 200)[::2, 3:195:2], torch.randn(1, 96).expand(7, 96)):
        assert_right(x, weights, tuple(part.t().contiguous().t() for part in arguments), packing)
        assert_right(x, weights, tuple(part.repeat_interleave(2, 1)[:, ::2] for part in arguments), packing)
    scale = arguments[1][:1, :1].expand(3, 48)
    expanded = drawn(96, 48, 32, packing, torch.float32)[1]
    packed = expanded[0], scale, expanded[2]
    dense = expanded[0], scale.contiguous(), expanded[2]
    x = torch.randn(4, 96)
    assert torch.equal(gemm_int4(x, *packed, packing=packing), gemm_int4(x, *dense, packing=packing))


@PACKING
@pytest.mark.parametrize("shape", [(0, 32, 8), (4, 32, 0), (0, 0, 0)], ids=str)
def test_nothing_in_nothing_out(packing: str, shape: tuple[int, int, int]) -> None:
    """Without rows or columns the result is empty, of the right shape and dtype."""
    m, k, n = shape
    _, arguments = drawn(k, n, 32, packing, torch.float16)
    y = gemm_int4(torch.ones(m, k, dtype=torch.float16), *arguments, packing=packing)
    assert y.shape == (m, n)
    assert y.dtype == torch.float16


@PACKING
@pytest.mark.parametrize("groups", [0, 1])
def test_a_sum_of_nothing_is_zero(packing: str, groups: int) -> None:
    """With K = 0 every element is zero, whatever the memory held and however many groups there are."""
    _, (qweight, scales, zeros) = drawn(32, 8, 32, packing, torch.float32)
    y = gemm_int4(torch.ones(70, 0), qweight[:0], scales[:groups], zeros[:groups], packing=packing)
    assert torch.equal(y, torch.zeros(70, 8))
