"""ggml's block types: the table of configs/ggml.toml, and tensors stored and read back by ggml's own code.

The code is the shared library of the wheel of xllamacpp, which llama-quantize calls, of that version and build. Rows
are stored independently: any of them may be stored, or read back, alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from assay.configs import table
from assay.formats.format import Format
from assay.precision.errors import BadModel, WrongShape
from assay.runtime.modules import optional

_LARGEST = 65504.0  # Scales are float16; some quantisers end the process where one overflows
_CHUNK = 1 << 16  # Minimum number of elements for a thread to store at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """A row of configs/ggml.toml."""

    name: str
    number: int
    block: int
    bytes: int
    code: int
    activations: str
    importance: Literal["used", "required", "ignored"]
    fallback: str = ""
    weights: bool = True

    @property
    def ggml_name(self) -> str:
        """Its name in ggml and in a tensor-type file."""
        return self.name.removeprefix("ggml-")

    @property
    def element(self) -> Format:
        """Its codes, as integers of this many bits; for some types indices of tables."""
        source = "ggml-common.h of llama.cpp"
        return Format(name=self.name, kind="integer", bits=self.code, precision=self.code, source=source)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row. Raises WrongShape unless it is whole blocks."""
        if columns % self.block:
            raise WrongShape(f"expected rows of a multiple of {self.block} elements for {self.name}, got {columns}")
        return columns // self.block * self.bytes


@cache
def block_types() -> dict[str, BlockType]:
    """All block types by name."""
    return {name: BlockType(name=name, **row) for name, row in table("ggml").items()}


def pack(x: Tensor, kind: BlockType, importance: Tensor | None = None) -> Tensor:
    """Return the blocks (uint8 [..., row bytes], on the CPU) of ggml's quantiser for a weight x [..., K].

    importance: [K], positive: weights of the squared error of each column, as with ``llama-quantize --imatrix``. Raises
    WrongShape for rows that aren't whole blocks and for a type that needs an importance without one, BadModel for
    values that aren't finite or beyond float16, NotInstalled.
    """
    if kind.importance == "required" and importance is None:
        raise WrongShape(f"expected the inputs of a weight that {kind.name} stores, got none: take another scheme")
    values, columns = _laid(x), x.shape[-1]
    largest = float(values.abs().amax()) if values.numel() else 0.0
    if not largest <= _LARGEST:
        raise BadModel(f"expected weights up to {_LARGEST:g} for {kind.name}, got {largest:g}: take another scheme")
    packed = torch.empty(*x.shape[:-1], kind.row_bytes(columns), dtype=torch.uint8)
    weights = None if importance is None else _laid(importance.expand(columns))
    quantize = library().ggml_quantize_chunk
    source, target = _address(values), _address(packed)

    def some(start: int, stop: int) -> None:
        quantize(kind.number, source, target, start * columns, stop - start, columns, _address(weights))

    rows = values.numel() // max(columns, 1)
    step = max(_CHUNK // max(columns, 1), 1)
    starts = range(0, rows, step)
    with ThreadPoolExecutor(max(min(torch.get_num_threads(), len(starts)), 1)) as pool:
        for done in [pool.submit(some, start, min(start + step, rows)) for start in starts]:
            done.result()
    return packed


def unpack(packed: Tensor, kind: BlockType) -> Tensor:
    """Return the values (float32 [..., K]) of blocks (uint8 [..., row bytes], on the CPU)."""
    blocks = packed.contiguous()
    values = torch.empty(*packed.shape[:-1], packed.shape[-1] // kind.bytes * kind.block)
    _function("dequantize_row", kind)(_address(blocks), _address(values), values.numel())
    return values


def rounded(x: Tensor, kind: BlockType) -> Tensor:
    """Return x [..., K] (float32) rounded to ``kind``, as ggml's CPU products round their other operand.

    A block with NaN or an infinity in it is NaN: ggml doesn't define its result.
    """
    laid = torch.unflatten(x, -1, (-1, kind.block)) if x.numel() else x
    spoilt = ~laid.isfinite().all(-1, keepdim=True)
    values = _laid(torch.where(spoilt, 0.0, laid))
    packed = torch.empty(*x.shape[:-1], kind.row_bytes(x.shape[-1]), dtype=torch.uint8)
    _function("quantize_row", kind)(_address(values), _address(packed), values.numel())
    values_read = unpack(packed, kind).to(x.device)
    return torch.where(spoilt, torch.nan, values_read.view(laid.shape)).view(x.shape) if x.numel() else x


@cache
def library(purpose: str = "a scheme of ggml") -> Any:
    """Return the code of ggml and llama.cpp. Raises NotInstalled."""
    code = ctypes.CDLL(optional("xllamacpp.xllamacpp", purpose=purpose, extra="gguf").__file__)
    code.ggml_quantize_chunk.restype = ctypes.c_size_t
    address, whole = ctypes.c_void_p, ctypes.c_int64
    code.ggml_quantize_chunk.argtypes = [ctypes.c_int, address, address, whole, whole, whole, address]
    return code


@cache
def _function(what: str, kind: BlockType) -> Callable[..., None]:
    """Return the library's function for a type, with the arguments source, target, number of elements."""
    name = kind.ggml_name.replace("_k", "_K")
    function: Any = getattr(library(), f"{what}_{name}")
    function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return function


def _laid(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float32).contiguous()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
