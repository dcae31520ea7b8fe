"""What tests of fault models share: the pairs of spec and fault model, and cases drawn for them."""

from collections.abc import Iterator
from typing import Any

from assay.golden import spec, specs
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.fault_models.fault_model import FaultModel

DTYPES = ("bfloat16", "float16", "float32")


def sampler_of(op: str, settings: dict[str, Any]) -> Sampler:
    """The sampler of a campaign over a whole spec."""
    return Sampler(spec(op), settings["dtype"] or "float8_e4m3fn", settings["options"], settings["shapes"])


def settings_for(op: str, fault: FaultModel) -> dict[str, Any] | None:
    """Settings of an examination that admits the fault model, in the first dtype that does; None where none does."""
    for dtype in DTYPES:
        settings = spec(op).default_settings
        settings["dtype"] = settings["dtype"] and dtype
        sampler = sampler_of(op, settings)
        if any(fault.concerns(sampler.case(seeded(0), style="small", options=o)) for o in sampler.option_sets()):
            return settings
    return None


def pairs(step: int = 1, first: int = 0, *, side_effects: bool = True) -> list[tuple[str, FaultModel]]:
    """Every ``step``-th pair of a spec and one of its fault models."""
    every = [
        (op, fault) for op in specs() for fault in fault_models_of(op) if side_effects or fault.side_effects is None
    ]
    return every[first::step]


def names(pair: tuple[str, FaultModel]) -> str:
    """The name of a test of a pair."""
    return f"{pair[0]}-{pair[1].name}"


def drawn(op: str, fault: FaultModel, count: int) -> Iterator[Case]:
    """Cases that the fuzz phase may draw, under options that admit the fault model."""
    settings = settings_for(op, fault)
    assert settings is not None
    sampler = sampler_of(op, settings)
    choose = seeded(7)
    for place in range(count):
        case = sampler.case(choose, style=("tile", "small", "any")[place % 3])
        if fault.concerns(case):
            yield case
