"""The Triton GEMMs, of floating-point and quantised operands, against float64."""

import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import gemm_int8 as int8_module
from assay.kernels.triton.gemm import _gemm_kernel, _gemm_tma_kernel, gemm, matmul_into, uses_tma
from assay.kernels.triton.gemm_fp8 import gemm_fp8
from assay.kernels.triton.gemm_int4 import gemm_int4
from assay.kernels.triton.gemm_int8 import gemm_int8
from assay.kernels.triton.layouts import k_major
from assay.kernels.triton.linear_cross_entropy import linear_cross_entropy_backward
from tests.kernels.conftest import distinct
from tests.reference import reference
from tests.reference.products import AWQ_ORDER, dequantized

pytestmark = pytest.mark.usefixtures("interpreted")

Tensors = tuple[Tensor, ...]
Sizes = tuple[int, int, int]
Draw = Callable[[int, int, int], Tensors]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def floats(m: int, k: int, n: int) -> Tensors:
    return torch.randn(m, k), torch.randn(k, n)


def fp8_scales(m: int, k: int, n: int, granularity: str) -> Tensors:
    """Scales whose neighbours differ by up to a factor of eight."""
    blocks_k, blocks_n = -(-k // 128), -(-n // 128)
    shapes = {"tensor": ((), ()), "row": ((m, 1), (1, n)), "block": ((m, blocks_k), (blocks_k, blocks_n))}
    return tuple(torch.rand(shape) + 2.0 ** torch.randint(-3, 0, shape) for shape in shapes[granularity])


def fp8(granularity: str) -> Draw:
    return lambda m, k, n: (*(x.to(E4M3) for x in floats(m, k, n)), *fp8_scales(m, k, n, granularity))


def codes(rows: int, columns: int, dtype: torch.dtype = torch.int8) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, (rows, columns)).to(dtype)


def int8_scales(m: int, n: int) -> Tensors:
    return torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5


def int8(m: int, k: int, n: int) -> Tensors:
    return codes(m, k), codes(k, n), *int8_scales(m, n)


def words(k: int, n: int, group: int, packing: str, dtype: torch.dtype = torch.float32) -> Tensors:
    """Packed weights [K,N], scales and zero-points."""
    per_k, per_n, per_zero = {"plain": (2, 1, 1), "awq": (1, 8, 8), "gptq": (8, 1, 8)}[packing]
    scales, points = (torch.rand(k // group, n) + 0.25).to(dtype), (k // group, n // per_zero)
    if packing == "plain":
        return torch.randint(256, (k // per_k, n // per_n)).byte(), scales, torch.randint(16, points).byte()
    return codes(k // per_k, n // per_n, torch.int32), scales, codes(*points, torch.int32)


def int4(packing: str) -> Draw:
    return lambda m, k, n: (torch.randn(m, k), *words(k, n, 32, packing))


def within(y: Tensor, exact: Tensor, size: Tensor, terms: int) -> None:
    """Within a rounding of the output, and one of float32 for each of ``terms``, relative to the sum of magnitudes."""
    unit = torch.finfo(y.dtype).eps
    assert y.shape == exact.shape
    assert bool(((y.double() - exact).abs() <= unit * exact.abs() + terms * 2**-24 * size).all())


def gemm_is_right(a: Tensor, b: Tensor) -> None:
    c = gemm(a, b)
    assert c.dtype == a.dtype
    within(c, a.double() @ b.double(), a.double().abs() @ b.double().abs(), a.shape[1])


def fp8_is_right(a: Tensor, b: Tensor, *scales: Tensor, granularity: str) -> None:
    c = gemm_fp8(a, b, *scales, granularity=granularity)
    signed, absolute = ((a.float(), b.float()), (a.float().abs(), b.float().abs()))
    exact, size = (reference("gemm_fp8")(*x, *scales, granularity=granularity)[0] for x in (signed, absolute))
    assert c.dtype == torch.bfloat16
    within(c, exact, size, a.shape[1] + 4)


def int8_is_right(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    """Sums are exact in float64; the roundings after them are the kernel's."""
    expected = ((a.double() @ b.double()).float() * scale_a * scale_b).to(torch.bfloat16)
    assert torch.equal(gemm_int8(a, b, scale_a, scale_b), expected)


def int4_is_right(x: Tensor, *weights: Tensor, packing: str) -> None:
    y = gemm_int4(x, *weights, packing=packing)
    stored = dequantized(*weights, packing).to(x.dtype).double()
    assert y.dtype == x.dtype
    within(y, x.double() @ stored, x.double().abs() @ stored.abs(), x.shape[1])


SIZES: tuple[Sizes, ...] = ((300, 130, 270), (1200, 5, 200), (3, 300, 5))


@dataclass(frozen=True)
class Product:
    """A kernel, its arguments for M, K and N, the check against float64, and sizes."""

    kernel: Callable[..., Tensor]
    draw: Draw
    assert_right: Callable[..., None]
    options: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[Sizes, ...] = SIZES
    smallest_k: int = 3

    def __str__(self) -> str:
        return " ".join([self.kernel.__name__, *self.options.values()])

    @property
    def module(self) -> Any:
        return importlib.import_module(f"assay.kernels.triton.{self.kernel.__name__}")


PRODUCTS = [
    Product(gemm, floats, gemm_is_right),
    Product(gemm_int8, int8, int8_is_right),
    *(
        Product(gemm_fp8, fp8(granularity), fp8_is_right, {"granularity": granularity}, ((300, 300, 270), *SIZES[1:]))
        for granularity in ("tensor", "row", "block")
    ),
    *(
        Product(gemm_int4, int4(packing), int4_is_right, {"packing": packing}, ((3, 128, 136), (300, 64, 48)), 32)
        for packing in ("plain", "awq", "gptq")
    ),
]
EVERY = pytest.mark.parametrize("product", PRODUCTS, ids=str)
GRANULARITY = pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
PACKING = pytest.mark.parametrize("packing", ["plain", "awq", "gptq"])


def tile_id(value: Any) -> str | None:
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    return "x".join(str(value.kwargs[name]) for name in names) if hasattr(value, "kwargs") else str(value)


@pytest.mark.parametrize(
    ("product", "config", "sizes"),
    [(each, config, sizes) for each in PRODUCTS for config in distinct(each.module._CONFIGS) for sizes in each.sizes],
    ids=tile_id,
)
def test_every_configuration(product: Product, config: Any, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that pruning rules out, with one group of tiles and several."""
    autotuner = getattr(product.module, f"_{product.kernel.__name__}_kernel")
    monkeypatch.setattr(autotuner, "configs", [config])
    monkeypatch.setattr(autotuner, "early_config_prune", None)
    product.assert_right(*product.draw(*sizes), **product.options)


@EVERY
@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0), (0, 0)])
def test_nothing_in_nothing_out(product: Product, m: int, n: int) -> None:
    product.assert_right(*product.draw(m, product.smallest_k, n), **product.options)
    assert product.kernel(*product.draw(m, product.smallest_k, n), **product.options).shape == (m, n)


@EVERY
def test_without_k_the_result_is_zero(product: Product) -> None:
    c = product.kernel(*product.draw(70, 0, 128), **product.options)
    assert torch.equal(c, torch.zeros(70, 128, dtype=c.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_strides(dtype: torch.dtype) -> None:
    """Transposed, sliced with a step, and expanded."""
    a, b = torch.randn(70, 90).to(dtype), torch.randn(90, 70).to(dtype)
    gemm_is_right(b.t(), a.t())
    gemm_is_right(a[3:, ::2], b[::2, 1::3])
    gemm_is_right(a[:1].expand(40, 90), b[:, 1:2].expand(90, 9))
    gemm_is_right(a[:, :1].expand(70, 50), b[:1].expand(50, 70))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nonfinite_number_stays_in_its_row(value: float) -> None:
    """NaN and Inf reach the elements that are sums over them, and no other."""
    a, b = torch.ones(70, 67), torch.ones(67, 70)
    a[3, 66] = value
    c = gemm(a, b)
    assert bool((~c[3].isfinite()).all())
    assert bool((c[torch.arange(70) != 3] == 67).all())


def test_float32_is_not_rounded_to_tf32() -> None:
    a = torch.full((16, 1), 1 + 2**-23)
    assert torch.equal(gemm(a, torch.ones(1, 16)), a.expand(16, 16))


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_scales_fit_the_granularity(granularity: str) -> None:
    """Scales by block are refused for another granularity."""
    with pytest.raises(ValueError, match=r"^scale_a: expected shape "):
        gemm_fp8(*fp8("block")(2, 130, 4), granularity=granularity)


@GRANULARITY
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
def test_any_strides_and_formats_of_fp8(granularity: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Transposed, sliced with a step, and expanded; scales too."""
    a, b = (x.to(dtype) for x, dtype in zip(floats(70, 290, 170), dtypes, strict=True))
    transposed = (x.t().contiguous().t() for x in (a, b))
    expanded = a[:1].expand(40, 290), b[:, 1:2].expand(290, 9)
    for x, y in (transposed, expanded, (a[3:, ::2], b[::2, 1::3])):
        scale_a, scale_b = fp8_scales(*x.shape, y.shape[1], granularity)
        fp8_is_right(x, y, scale_a, scale_b, granularity=granularity)
        if granularity != "tensor":
            for views in (
                (scale_a.t().contiguous().t(), scale_b.repeat(2, 2)[::2, ::2]),
                (scale_a[:1].expand(scale_a.shape), scale_b[:, :1].expand(scale_b.shape)),
            ):
                fp8_is_right(x, y, *views, granularity=granularity)


@GRANULARITY
def test_nonfinite_fp8_numbers_stay_in_their_row_or_column(granularity: str) -> None:
    """e4m3's NaN, and e5m2's infinities and NaN, reach the elements that are sums over them, and no other."""
    a, b = torch.ones(4, 150).to(E5M2), torch.ones(150, 3).to(E4M3)
    a[1, 149], a[2, 0], b[149, 2] = torch.inf, torch.nan, torch.nan
    c = gemm_fp8(
        a, b, *(torch.ones_like(scale) for scale in fp8_scales(4, 150, 3, granularity)), granularity=granularity
    )
    plain, inf, nan = 150.0, torch.inf, torch.nan
    expected = torch.tensor([[plain, plain, nan], [inf, inf, nan], [nan, nan, nan], [plain, plain, nan]])
    torch.testing.assert_close(c.float(), expected, rtol=0, atol=0, equal_nan=True)


def test_any_strides_of_int8() -> None:
    """Transposed, sliced with a step, and expanded; scales too."""
    a, b = codes(70, 90), codes(90, 70)
    for x, y in ((b.t(), a.t()), (a[3:, ::2], b[::2, 1::3]), (a[:1].expand(40, 90), b[:, 1:2].expand(90, 9))):
        m, n = x.shape[0], y.shape[1]
        for scale_a, scale_b in (
            int8_scales(m, n),
            (torch.rand(1, 1).expand(m, 1), torch.rand(1, 1).expand(1, n)),
            (torch.rand(2 * m, 3)[::2, 1:2], torch.rand(n, 2)[:, :1].t()),
        ):
            int8_is_right(x, y, scale_a, scale_b)


@pytest.mark.parametrize("k", [65537, 131073])  # the tail of one whole chunk, and of two
def test_sums_beyond_an_int32_are_exact(k: int) -> None:
    """The largest products of one sign add up beyond 2^31 without wrapping; those of both signs cancel."""
    a = torch.full((2, k), -128, dtype=torch.int8)
    a[1, ::2] = 127
    b = torch.full((k, 1), -128, dtype=torch.int8)
    int8_is_right(a, b, torch.ones(2, 1), torch.ones(1, 1))


def test_offsets_beyond_an_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements more than 2^31 bytes from the first, along M, N and K, and in a second block of K."""
    monkeypatch.setattr(int8_module._gemm_int8_kernel, "configs", int8_module._CONFIGS[:1])
    monkeypatch.setattr(int8_module._gemm_int8_kernel, "early_config_prune", None)
    count, far = 130, 2**24
    memory = torch.empty((count - 1) * far + 1, dtype=torch.int8)  # pages that are not touched take no memory
    spread = memory.as_strided((count,), (far,))
    spread.copy_(codes(1, count)[0])
    column, row = spread[:, None], spread[None, :]
    int8_is_right(column, row, *int8_scales(count, count))
    int8_is_right(row, column, *int8_scales(1, 1))


@PACKING
@pytest.mark.parametrize("groups", [0, 3, 5, 64])
def test_a_group_that_does_not_divide_k(packing: str, groups: int) -> None:
    qweight = words(32, 8, 16, packing)[0]
    zeros = torch.zeros(groups, 8 if packing == "plain" else 1, dtype=qweight.dtype)
    with pytest.raises(ValueError, match=r"^scales: expected a number of rows that divides K=32, got "):
        gemm_int4(torch.zeros(2, 32), qweight, torch.ones(groups, 8), zeros, packing=packing)


def test_sizes_must_fill_the_packed_words() -> None:
    words, ones = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 8)
    with pytest.raises(ValueError, match=r"^x: expected K to be a multiple of 2"):
        gemm_int4(torch.zeros(2, 7), words.byte(), ones, words.byte())
    with pytest.raises(ValueError, match=r"^x: expected K to be a multiple of 8"):
        gemm_int4(torch.zeros(2, 12), words, ones, words, packing="gptq")
    with pytest.raises(ValueError, match=r"^scales: expected N to be a multiple of 8"):
        gemm_int4(torch.zeros(2, 8), words, torch.ones(1, 12), words, packing="awq")


@PACKING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("k", "group"), [(256, 256), (512, 256), (256, 128), (192, 64), (96, 48), (336, 7), (120, 24), (40, 1), (8, 8)]
)
def test_any_group_size(packing: str, dtype: torch.dtype, k: int, group: int) -> None:
    """Groups longer and shorter than a tile, that don't begin with one, and of an odd size have their own scales."""
    for m, n in ((5, 40), (40, 8)):
        int4_is_right(torch.randn(m, k).to(dtype), *words(k, n, group, packing, dtype), packing=packing)


def pack(nibbles: Tensor, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return int32 words of eight nibbles along ``axis``; nibble i of a word is element ``order[i]`` of the eight."""
    before, size, after = nibbles.shape[:axis], nibbles.shape[axis], nibbles.shape[axis + 1 :]
    words = nibbles.long().reshape(*before, size // 8, 8, *after).movedim(axis + 1, 0)
    packed = sum(words[number] << (4 * position) for position, number in enumerate(order))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


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
def test_any_strides_of_int4(packing: str) -> None:
    """Transposed, sliced with a step, and expanded; weights too."""
    arguments = words(96, 48, 32, packing)
    for x in (torch.randn(96, 5).t(), torch.randn(10, 200)[::2, 3:195:2], torch.randn(1, 96).expand(7, 96)):
        int4_is_right(x, *(part.t().contiguous().t() for part in arguments), packing=packing)
        int4_is_right(x, *(part.repeat_interleave(2, 1)[:, ::2] for part in arguments), packing=packing)
    qweight, scales, zeros = arguments
    int4_is_right(torch.randn(4, 96), qweight, scales[:1, :1].expand(3, 48), zeros, packing=packing)


@PACKING
def test_without_k_but_with_scales_the_int4_product_is_zero(packing: str) -> None:
    qweight, scales, zeros = words(32, 8, 32, packing)
    y = gemm_int4(torch.ones(70, 0), qweight[:0], scales, zeros, packing=packing)
    assert torch.equal(y, torch.zeros(70, 8))


TRANSPOSED = pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)), ids=str)


def operand(rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> Tensor:
    return torch.randn(columns, rows).to(dtype).t() if transposed else torch.randn(rows, columns).to(dtype)


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        pytest.param(200, 72, 136, id="whole and partial blocks"),
        pytest.param(40, 392, 136, id="split-K"),
        pytest.param(72, 40, 16, id="few columns"),
        pytest.param(72, 0, 40, id="K = 0"),
    ],
)
@TRANSPOSED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c_is_written_or_accumulated(m: int, k: int, n: int, transposed: tuple[bool, bool], dtype: torch.dtype) -> None:
    """c is a view of a wider matrix and has another dtype; elements around it don't change."""
    a, b = operand(m, k, dtype, transposed[0]), operand(k, n, dtype, transposed[1])
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    wider = torch.full((m, n + 8), 7.0)
    c = wider[:, 3 : n + 3]
    c.copy_(torch.randn(m, n))
    before = c.clone()
    for accumulate in (True, False):
        matmul_into(a, b, c, accumulate=accumulate)
        expected = exact + before.double() if accumulate else exact
        assert bool(((c.double() - expected).abs() <= (k + 2) * 2**-23 * (size + before.abs())).all())
    assert bool((wider[:, :3] == 7.0).all() and (wider[:, n + 3 :] == 7.0).all())


@TRANSPOSED
def test_tma_loads_16_bit_operands_transposed_or_not(transposed: tuple[bool, bool]) -> None:
    a, b = operand(80, 72, torch.bfloat16, transposed[0]), operand(72, 64, torch.bfloat16, transposed[1])
    assert uses_tma(a, b)
    assert not uses_tma(a.float(), b.float())


@pytest.mark.parametrize("kernel", [_gemm_kernel, _gemm_tma_kernel], ids=lambda kernel: kernel.base_fn.__name__)
def test_autotuning_restores_c(kernel: Any) -> None:
    """After each timed launch that accumulates; where c is only written, it is not copied."""
    c = torch.randn(4, 4)
    before = c.clone()
    for _ in range(2):
        kernel.pre_hook({"c_ptr": c, "ACCUMULATE": True})
        c += 1.0
        kernel.post_hook({"c_ptr": c, "ACCUMULATE": True}, exception=None)
        assert torch.equal(c, before)
    kernel.pre_hook({"c_ptr": c, "ACCUMULATE": True}, reset_only=True)
    kernel.pre_hook({"c_ptr": c, "ACCUMULATE": False})
    c += 1.0
    kernel.post_hook({"c_ptr": c, "ACCUMULATE": False}, exception=None)
    assert torch.equal(c, before + 1.0)


@pytest.mark.parametrize("tokens", [0, 1, 64, 130, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weight_gradient_is_the_sum_over_chunks(tokens: int, dtype: torch.dtype) -> None:
    """Of none, one and several chunks of tokens, and of a last chunk of one token."""
    x, weight = torch.randn(tokens, 64).to(dtype), torch.randn(136, 64).to(dtype)
    target = torch.arange(tokens) % 136
    dx, dweight = linear_cross_entropy_backward(x, weight, target, reduction="sum")
    logits = (x.double() @ weight.double().t()).to(dtype).double()
    dlogits = (logits.softmax(-1) - torch.nn.functional.one_hot(target, 136)).to(dtype).double()
    tolerance = {"rtol": 2e-5, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(dweight.double(), dlogits.t() @ x.double(), **tolerance)
    torch.testing.assert_close(dx.double(), dlogits @ weight.double(), **tolerance)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (64, 64), (63, 130), (200, 1), (1, 65)])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_k_major_copies_are_exact(k: int, n: int, dtype: torch.dtype) -> None:
    """Of contiguous, transposed and strided operands."""
    codes = torch.randint(-128, 128, (2 * max(k, 40), 2 * max(n, k)), dtype=torch.int8).view(dtype)
    for a in (codes[:40, :k], codes[:k, :40].t(), codes[:80:2, : 2 * k : 2]):
        for b in (codes[:k, :n], codes[:n, :k].t() if n <= codes.shape[0] else codes[:k, :n], codes[: 2 * k : 2, :n]):
            for before, after, k_dim in zip((a, b), k_major(a, b), (1, 0), strict=True):
                assert torch.equal(before.view(torch.int8), after.view(torch.int8))
                assert after.stride(k_dim) == 1 or after.shape[k_dim] == 1


def test_operands_of_few_rows_are_not_copied() -> None:
    a, b = torch.zeros(32, 64, dtype=torch.int8), torch.zeros(64, 48, dtype=torch.int8)
    assert k_major(a, b)[1] is b
