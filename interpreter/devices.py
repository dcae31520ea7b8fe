"""Devices whose tensor cores can be emulated: which accumulator model a dot meets there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from assay.configs import table
from assay.formats.accumulator import Accumulator, accumulator_named
from assay.runtime.errors import SettingError, unknown

_WGMMA_ROWS, _WARP_GROUP, _WGMMA_TERMS = 64, 4, 32


@dataclass(frozen=True)
class Device:
    """The tensor cores of a device: accumulator models by what is multiplied, see ``configs/tensor_cores.toml``."""

    name: str
    units: Mapping[str, Accumulator]
    imprecise: int = 0

    def converts_fp8(self, shape: tuple[int, ...], warps: int, promotion: int) -> bool:
        """Whether Triton multiplies a dot of FP8 with a result of this shape in float16."""
        whole_groups = shape[-2] % _WGMMA_ROWS == 0 and warps % _WARP_GROUP == 0 and len(shape) == 2
        sooner = bool(self.imprecise) and promotion < _WGMMA_TERMS
        return "small" in self.units and (sooner or not whole_groups)


@cache
def device_named(name: str) -> Device:
    """The device of that name, in any case; `SettingError`, listing those that there are, for an unknown one."""
    tables: dict[str, dict[str, Any]] = table("tensor_cores")
    known = tables["devices"]
    if name.lower() not in known:
        raise SettingError(unknown("device of the interpreter", name, known))
    row = tables[known[name.lower()]]
    units = {operands: accumulator_named(model) for operands, model in row.items() if operands != "imprecise"}
    return Device(name.lower(), units, row.get("imprecise", 0))
