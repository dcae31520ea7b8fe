"""Block types of ggml against its own code and against gguf, which reads the files that hold them."""

import ctypes
import sys
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import xllamacpp.xllamacpp
from torch import Tensor

from assay.precision.errors import BadModel, WrongShape
from assay.precision.schemes import SCHEMES
from assay.precision.schemes import ggml as code
from assay.precision.schemes.fitting import fit_blocks, fit_values
from assay.precision.schemes.ggml import BlockType, block_types, pack, rounded, unpack
from assay.runtime.errors import NotInstalled

TYPES = block_types()
STORED = [name for name, kind in TYPES.items() if kind.weights]
COLUMNS = 512
LIBRARY = ctypes.CDLL(xllamacpp.xllamacpp.__file__)


def normal(rows: int = 8, seed: int = 3) -> Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))


def weights() -> list[Tensor]:
    """Values of many kinds: normal, wide, one-sided, powers of two, with blocks of zeros, tiny."""
    draw = torch.Generator().manual_seed(4)
    x = normal(3)
    holed = x.clone()
    holed[::3] = 0.0
    holed[1, :256] = 0.0
    exponents = torch.randint(-9, 9, x.shape, generator=draw).float()
    return [x * 0.02, x * torch.exp2(exponents), x.abs() + 3.0, torch.exp2(exponents) * x.sign(), holed, x * 1e-20]


def importance() -> Tensor:
    """Mean squares of inputs some of whose columns are much larger than others."""
    return torch.exp(2 * torch.randn(COLUMNS, generator=torch.Generator().manual_seed(5)))


def theirs(kind: BlockType) -> Any:
    """The type as gguf names it."""
    return gguf.GGMLQuantizationType[kind.ggml_name.upper()]


@pytest.mark.parametrize("kind", TYPES.values(), ids=list(TYPES))
def test_facts_are_the_library_s(kind: BlockType) -> None:
    number = theirs(kind)
    assert kind.number == int(number)
    assert (kind.block, kind.bytes) == gguf.GGML_QUANT_SIZES[number]
    required = LIBRARY.ggml_quantize_requires_imatrix
    required.restype = ctypes.c_bool
    assert required(kind.number) == (kind.importance == "required")
    if not kind.weights:
        return

    class Traits(ctypes.Structure):
        _fields_ = [("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p), ("vec_dot_type", ctypes.c_int)]

    traits = LIBRARY.ggml_get_type_traits_cpu
    traits.restype = ctypes.POINTER(Traits)
    LIBRARY.ggml_cpu_init()
    assert traits(kind.number).contents.vec_dot_type == TYPES[kind.activations].number


@pytest.mark.parametrize("name", STORED)
def test_values_are_those_that_gguf_reads(name: str) -> None:
    kind = TYPES[name]
    for x in weights():
        for weighted in [importance()] + [None] * (kind.importance != "required"):
            packed = pack(x, kind, weighted)
            assert packed.shape == (len(x), COLUMNS // kind.block * kind.bytes)
            read = gguf.dequantize(packed.numpy(), theirs(kind))
            assert np.array_equal(unpack(packed, kind).numpy(), read.reshape(x.shape))


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q8_0", "ggml-mxfp4"])
def test_blocks_are_those_that_gguf_writes(name: str) -> None:
    for x in weights():
        assert np.array_equal(pack(x, TYPES[name]).numpy(), gguf.quantize(x.numpy(), theirs(TYPES[name])))


@pytest.mark.parametrize("name", STORED)
def test_a_weight_is_nearer_under_an_importance_where_it_is_used(name: str) -> None:
    kind, x, weighted = TYPES[name], normal() * 0.02, importance()
    if kind.importance == "required":
        with pytest.raises(WrongShape, match="expected the inputs of a weight"):
            pack(x, kind)
        return
    plain, tuned = pack(x, kind), pack(x, kind, weighted)
    assert torch.equal(plain, tuned) == (kind.importance == "ignored")
    if kind.importance == "used":
        errors = [float(((unpack(packed, kind) - x).square() * weighted).sum()) for packed in (plain, tuned)]
        assert errors[1] < errors[0]


@pytest.mark.parametrize("name", ["q8_0", "q8_k"])
def test_inputs_are_rounded_to_eight_bits_of_the_largest_in_a_block(name: str) -> None:
    kind = TYPES[name]
    for x in weights()[:-1]:  # whose scales float16 holds
        laid = rounded(x, kind).unflatten(-1, (-1, kind.block))
        steps = x.unflatten(-1, (-1, kind.block)).abs().amax(-1, keepdim=True) / 127
        error = (laid - x.unflatten(-1, (-1, kind.block))).abs()
        assert bool((error <= steps * (0.5 + 127 * 2.0**-11)).all())  # the scale of q8_0 is rounded to float16
        assert bool((error > steps * 0.4).any())


def test_a_block_with_nan_in_it_is_nan() -> None:
    x = normal()
    x[0, 3], x[1, 40] = torch.nan, torch.inf
    found = rounded(x, TYPES["q8_0"])
    clean = rounded(normal(), TYPES["q8_0"])
    assert bool(found[0, :32].isnan().all())
    assert bool(found[1, 32:64].isnan().all())
    found[0, :32], found[1, 32:64] = clean[0, :32], clean[1, 32:64]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("name", STORED)
def test_rows_are_stored_each_for_itself(name: str) -> None:
    x, weighted = normal(6), importance()
    stored = fit_blocks(SCHEMES[name].weight, x, weighted)  # type: ignore[arg-type]
    whole = stored(x)
    assert torch.equal(stored.of_rows(2, 5)(x[2:5]), whole[2:5])
    index = torch.tensor([[4, 0], [1, 4]])
    assert torch.equal(stored.at_rows(index, x.shape[-1])(x[index]), whole[index])
    alone = torch.cat([fit_blocks(stored.quantizer, row[None], weighted)(row[None]) for row in x])
    assert torch.equal(alone, whole)
    experts = fit_blocks(stored.quantizer, x.view(2, 3, -1), weighted)
    assert torch.equal(experts(x.view(2, 3, -1)).view(6, -1), whole)
    assert stored.quantizer.bits(tuple(x.shape)) == pack(x, TYPES[name], weighted).numel() * 8


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that several threads store in turn are those of one."""
    x = normal(50)
    expected = pack(x, TYPES["q4_k"])
    monkeypatch.setattr(code, "_CHUNK", 3 * COLUMNS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(pack(x, TYPES["q4_k"]), expected)


@pytest.mark.parametrize("name", STORED)
def test_schemes_store_inputs_as_their_name_says(name: str) -> None:
    other = TYPES[name].activations
    alone, both = SCHEMES[name], SCHEMES[f"{name}-{other}"]
    assert alone.weight == both.weight
    assert alone.activation is None
    assert both.activation is not None
    assert torch.equal(fit_values(both.activation, None)(normal()), rounded(normal(), TYPES[other]))
    assert alone.on_request
    assert both.on_request


def test_what_has_no_place_is_refused_before_ggml_sees_it() -> None:
    with pytest.raises(WrongShape, match="multiple of 256 elements for q4_k, got 384"):
        pack(torch.ones(2, 384), TYPES["q4_k"])
    for value in (1e30, torch.inf, torch.nan):
        with pytest.raises(BadModel, match="expected weights up to 65504 for iq3_s"):
            pack(torch.full((1, 256), value), TYPES["iq3_s"])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp.xllamacpp", None)
    code.library.cache_clear()
    with pytest.raises(NotInstalled, match=r"a scheme of ggml needs xllamacpp.*kernel-assay\[gguf\]"):
        code.library()
    monkeypatch.undo()
    code.library.cache_clear()
    code.library()
