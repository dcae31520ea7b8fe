"""How weights and values are stored, apart from what other libraries do: parts of a weight, and what is left alone."""

import pytest
import torch
from torch import Tensor

from assay.formats.format import format_named
from assay.formats.rounding import round_float32
from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Statistics
from assay.precision.schemes import SCHEMES, FakeQuantizer, store
from assay.precision.schemes.quantizer import Extremes, scales_of

WEIGHTS = {
    scheme.weight: scheme
    for scheme in SCHEMES.values()
    if "linear" in scheme.site_types
    and scheme.weight is not None
    and (scheme.weight.blocks is None or scheme.name in ("q4_k", "q8_0"))  # others take long
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("keep", [None, 0, 10_000])
def test_some_rows_of_a_weight_are_stored_as_in_the_whole(keep: int | None) -> None:
    weight, seen = drawn(300, 256), Statistics()
    weight[200] *= 30  # which scales of the tensor depend on, and the rows below 128 must know of
    seen.add(drawn(64, 256) * torch.linspace(0.1, 3, 256))
    schemes = [*WEIGHTS.values(), SCHEMES["nvfp4-hadamard"], SCHEMES["w8a8-smooth"]]
    whole = [QParams({("x", ""): seen}).weight("x", scheme, weight) for scheme in schemes]
    of_rows = QParams({("x", ""): seen}, keep=keep).by_rows("x", schemes, weight, None)
    for rows in (slice(0, 128), slice(128, 256), slice(256, 300)):
        for scheme, stored, alone in zip(schemes, whole, of_rows(rows), strict=True):
            assert stored is not None
            assert alone is not None
            expected = stored(weight)[rows]
            assert torch.equal(alone(weight[rows]), expected), scheme.name
            assert torch.equal(expected, weight[rows]) == (scheme.name == "fp32"), scheme.name


@pytest.mark.parametrize("columns", [256, 320])
@pytest.mark.parametrize("keep", [None, 0, 10_000])
def test_rows_of_an_index_are_stored_as_in_the_whole(keep: int | None, columns: int) -> None:
    weight, seen = drawn(300, columns), Statistics()
    weight[200] *= 30
    seen.add(drawn(64, columns) * torch.linspace(0.1, 3, columns))
    schemes = [*WEIGHTS.values(), SCHEMES["nvfp4-hadamard"], SCHEMES["w8a8-smooth"]]
    schemes = [
        each for each in schemes if each.weight and (each.weight.per != "group" or not columns % each.weight.size)
    ]
    index = torch.tensor([299, 3, 3, 130, 256, 7, 200])
    fits = QParams({("x", ""): seen}, keep=keep)
    of_rows = fits.by_rows("x", schemes, weight, None, few=True)
    for _ in range(2):
        for scheme, alone in zip(schemes, of_rows(index), strict=True):
            whole = QParams({("x", ""): seen}).weight("x", scheme, weight)
            assert whole is not None
            assert alone is not None
            assert torch.equal(alone(weight[index]), whole(weight)[index]), scheme.name


@pytest.mark.parametrize("columns", [256, 96, 48, 40])
def test_scales_from_shared_extremes_are_the_tensors_own(columns: int) -> None:
    weight = drawn(200, columns) + 0.3
    extremes = Extremes(weight)
    for quantizer in WEIGHTS:
        if quantizer.blocks or quantizer.per == "element" or (quantizer.per == "group" and columns % quantizer.size):
            continue
        own, shared = scales_of(weight, quantizer), scales_of(extremes, quantizer)
        assert torch.equal(own.scale, shared.scale), quantizer
        assert own.zero is shared.zero is None or torch.equal(own.zero, shared.zero), quantizer  # type: ignore[arg-type]


def test_what_is_stored_is_not_written_over() -> None:
    for quantizer, scheme in WEIGHTS.items():
        if quantizer.blocks:
            continue
        x = drawn(128, 256)
        first = store(x, quantizer).clone()
        FakeQuantizer(quantizer, columns=torch.full((256,), 2.0))(x)
        assert torch.equal(x, drawn(128, 256)), scheme.name
        assert torch.equal(store(x, quantizer), first), scheme.name


def test_tf32_keeps_what_is_no_number() -> None:
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x400000, -1], dtype=torch.int32).view(torch.float32)
    found = round_float32(payloads, format_named("tf32"))
    assert bool(found.isnan().all())
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([torch.inf, -torch.inf, -0.0, 0.0, largest, 1 + 2**-11, 1 + 3 * 2**-11])
    expected = torch.tensor([torch.inf, -torch.inf, -0.0, 0.0, torch.inf, 1.0, 1 + 2**-9])
    found = round_float32(x, format_named("tf32"))
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())
