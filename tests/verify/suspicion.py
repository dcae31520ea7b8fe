"""What tests of suspects share: the pairs of spec and suspect, and cases drawn for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from assay.golden import spec, specs
from assay.verify.calls import Call
from assay.verify.contract import Contract
from assay.verify.inputs.cases import Case
from assay.verify.inputs.sampler import Sampler, seeded
from assay.verify.suspects import suspects_of
from assay.verify.suspects.evaluation import kernel_of
from assay.verify.suspects.suspect import Suspect
from assay.verify.suspects.usual import usual
from assay.verify.trial import Bench, same_bits

Tensor = torch.Tensor
DTYPES = ("bfloat16", "float16", "float32")


def sampler_of(op: str, settings: dict[str, Any]) -> Sampler:
    """The sampler of a campaign over a whole spec."""
    return Sampler(spec(op), settings["dtype"] or "float8_e4m3fn", settings["options"], settings["shapes"])


def settings_for(op: str, suspect: Suspect) -> dict[str, Any] | None:
    """Settings of an examination that admits the suspect, in the first dtype that does; None where none does."""
    for dtype in DTYPES:
        settings = usual(op)
        settings["dtype"] = settings["dtype"] and dtype
        sampler = sampler_of(op, settings)
        if any(suspect.concerns(sampler.case(seeded(0), style="small", options=o)) for o in sampler.option_sets()):
            return settings
    return None


def pairs(step: int = 1, first: int = 0, *, conduct: bool = True) -> list[tuple[str, Suspect]]:
    """Every ``step``-th pair of a spec and one of its suspects."""
    every = [(op, suspect) for op in specs() for suspect in suspects_of(op) if conduct or suspect.conduct is None]
    return every[first::step]


def names(pair: tuple[str, Suspect]) -> str:
    """The name of a test of a pair."""
    return f"{pair[0]}-{pair[1].name}"


def drawn(op: str, suspect: Suspect, count: int) -> Iterator[Case]:
    """Cases that the fuzz phase may draw, under options that admit the suspect."""
    settings = settings_for(op, suspect)
    assert settings is not None
    sampler = sampler_of(op, settings)
    choose = seeded(7)
    for place in range(count):
        case = sampler.case(choose, style=("tile", "small", "any")[place % 3])
        if suspect.concerns(case):
            yield case


def give_the_same(op: str, first: Suspect, second: Suspect, cases: Iterator[Case]) -> bool:
    """Whether the kernels of two suspects give the same bits in all these calls, and so can't be told apart."""
    settings = settings_for(op, first)
    assert settings is not None
    listed = {name: [] for name in settings["options"]}
    benches = [Bench(Call(kernel_of(suspect, op), listed), Contract()) for suspect in (first, second)]
    for case in cases:
        a, b = (bench.outputs(replace(case, memory="nan")) for bench in benches)
        if a is None or b is None or not all(map(same_bits, a, b)):
            return False
    return True
