"""Matrix units: the bounds of their models, and kernels that keep a contract of the name of one."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from assay.formats.accumulator import Accumulator, accumulator_named
from assay.formats.rounding import round_to

from .examined import fails, passes
from .test_contract import VECTOR, short, verdict_of


def truncated(x: Tensor, largest: Tensor, bits: int) -> Tensor:
    """x cut off ``bits`` places below the leading one of ``largest``."""
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - bits)
    return torch.where(largest == 0, 0.0, torch.trunc(x / unit) * unit)


def accumulated(products: Tensor, model: Accumulator) -> Tensor:
    """The sum over the last axis as a matrix unit forms it: blocks aligned to the largest exponent, all truncated."""
    register, chunk = torch.zeros(products.shape[:-1], dtype=torch.float64), model.promotion or products.shape[-1]
    for part in products.split(max(chunk, 1), -1):
        total = torch.zeros_like(register)
        for block in part.split(model.block, -1):
            operands = torch.cat([total[..., None], block], -1)
            total = truncated(operands, operands.abs().amax(-1, keepdim=True), model.fraction).sum(-1)
            total = truncated(total, total, model.output)
        register = round_to(register + total, "float32")
    plain = products.sum(-1)
    return torch.where(plain.isfinite(), register, plain)


def gemm_on(model: Accumulator, a: Tensor, b: Tensor) -> Tensor:
    """A matrix product on such a unit, its accumulator returned."""
    return accumulated(a.double()[:, None, :] * b.double().T[None], model).to(torch.float32)


def worse_than(model: Accumulator, bits: int = 3) -> Accumulator:
    return replace(model, fraction=model.fraction - bits, output=model.output - bits)


def adversarial(model: Accumulator, terms: int) -> list[Tensor]:
    """Products, exact in every 16-bit format, that a unit which keeps ``model``'s bits loses almost whole."""
    generator = torch.Generator().manual_seed(1)
    swallowed = torch.full((terms,), 2.0 ** (12 - model.fraction) * (1 - 2.0**-7), dtype=torch.float64)
    swallowed[0] = 2.0**12
    alternating = swallowed * (-1.0) ** torch.arange(terms)
    cut = torch.full((terms,), 1 + 2.0**-7 - 2.0**-14, dtype=torch.float64)
    spread = torch.randn(terms, generator=generator, dtype=torch.float64) * 2.0 ** (torch.arange(terms) % 23 - 11)
    return [swallowed, -swallowed, alternating, cut, cut.cumsum(0), spread, spread.abs(), -spread.abs()]


MODELS = ["volta-fp16", "ampere-16bit", "hopper-16bit", "hopper-fp8", "hopper-fp8-promoted", "blackwell-fp8"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("terms", [1, 3, 32, 33, 257, 1024])
def test_the_bound_holds_the_matrix_unit(name: str, terms: int) -> None:
    """No data makes the emulated unit lose more than the bound; data made for it come to a third of it or more."""
    model = accumulator_named(name)
    ratios = {}
    for kind, products in enumerate(adversarial(model, terms) + adversarial(worse_than(model), terms)):
        exact, magnitude = math.fsum(products.tolist()), math.fsum(products.abs().tolist())
        lost = abs(float(accumulated(products, model)) - exact)
        ratios[kind] = lost / (model.gamma(terms) * magnitude)
    assert max(ratios.values()) <= 1, ratios
    assert max(ratios.values()) > 0.3 or terms < 32


@pytest.mark.parametrize("name", MODELS)
def test_a_worse_unit_breaks_the_bound(name: str) -> None:
    """Three bits less, on data made for that: more is lost than the better unit's bound allows."""
    model = accumulator_named(name)
    products = adversarial(worse_than(model), 128)[0]
    lost = abs(float(accumulated(products, worse_than(model))) - math.fsum(products.tolist()))
    assert lost > 2 * model.gamma(128) * float(products.abs().sum())


UNITS = [("volta-fp16", "float16", 256), ("hopper-16bit", "bfloat16", 256), ("hopper-fp8", "float8_e4m3fn", 96),
         ("blackwell-fp8", "float8_e4m3fn", 256)]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "longest"), UNITS, ids=[unit[0] for unit in UNITS])
def test_a_kernel_on_the_unit_keeps_its_contract(name: str, dtype: str, longest: int) -> None:
    """Examined under the unit's name it passes, on a unit with three bits less it fails."""
    settings = {"dtype": dtype, "out_dtype": "float32", "shapes": short(dtype, longest)["shapes"]}
    model, named = accumulator_named(name), {"accumulate": name}
    passes(verdict_of("gemm", partial(gemm_on, model), settings, named))
    fails(verdict_of("gemm", partial(gemm_on, worse_than(model)), settings, named))


def test_fp8_on_hopper_is_not_float32() -> None:
    """Fourteen bits don't pass for a float32 accumulator."""
    settings = {"dtype": "float8_e4m3fn", "out_dtype": "float32", "shapes": VECTOR}
    kernel = partial(gemm_on, accumulator_named("hopper-fp8"))
    fails(verdict_of("gemm", kernel, settings, {}))
    passes(verdict_of("gemm", partial(gemm_on, accumulator_named("hopper-16bit")), settings, {}))


def of_ranks(parts: list[torch.Tensor], wire: torch.dtype) -> float:
    """Float32 sums of parts, rounded to a dtype and added in it one after the other."""
    total = torch.zeros((), dtype=wire)
    for part in parts:
        own = part.float().cumsum(0)[-1].to(wire) if len(part) else torch.zeros((), dtype=wire)
        total = total + own
    return float(total)


@pytest.mark.parametrize(("name", "ranks"), [("bfloat16-2-ranks", 2), ("bfloat16-8-ranks", 8), ("float16-8-ranks", 8)])
def test_the_bound_holds_sums_of_ranks(name: str, ranks: int) -> None:
    """However the terms are dealt out; data made for it come to a third of it, and one rank more goes beyond."""
    model, u = accumulator_named(name), accumulator_named(name).format.unit_roundoff
    generator = torch.Generator().manual_seed(0)
    wire = getattr(torch, model.format.name)
    ratios = []
    for terms in (1, 8, 257):
        for _ in range(20):
            products = torch.randn(terms, generator=generator).abs()
            ends = torch.randint(0, terms + 1, (ranks - 1,), generator=generator).sort().values.tolist()
            lost = abs(of_ranks(list(products.tensor_split(ends)), wire) - math.fsum(products.tolist()))
            ratios.append(lost / (model.gamma(terms) * math.fsum(products.tolist())))
    midpoints = [torch.tensor([1 + u * 0.999])] + [torch.tensor([u * 0.999])] * (ranks - 1)
    exact = math.fsum(float(part) for part in midpoints)
    ratios.append(abs(of_ranks(midpoints, wire) - exact) / (model.gamma(ranks) * exact))
    assert max(ratios) <= 1
    assert max(ratios) > 0.3
    more = midpoints + [torch.tensor([u * 0.999])] * 3 * ranks
    exact = math.fsum(float(part) for part in more)
    assert abs(of_ranks(more, wire) - exact) > model.gamma(ranks) * exact
