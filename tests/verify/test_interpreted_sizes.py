"""Cases of interpreted kernels, which go program by program: fewer programs and places, and every kind of case."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from assay.golden.registry import spec, specs
from assay.golden.signature import dimension
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.contract import Contract
from assay.verify.examination import phases
from assay.verify.examination.lengths import length_cases

from .usual import only

OPS = [name for name in specs() if spec(name).sizes.sequential_steps is not None]
MOST, TILE = 1024, 16


def interpreted(op: str) -> Sampler:
    """The sampler of an interpreted kernel of the op."""
    usual = spec(op).default_settings
    return Sampler(spec(op), usual["dtype"], usual["options"], usual["shapes"]).for_interpreter()


@cache
def fixed_of(op: str) -> tuple[tuple[str, Case], ...]:
    """All fixed cases but series of an interpreted kernel of the op."""
    return tuple(fixed(interpreted(op)))


def fixed(sampler: Sampler) -> Iterator[tuple[str, Case]]:
    """All fixed cases but series, with their phases."""
    for phase in ("exact", "range", "single_operand", "block_boundary", "aligned", "special"):
        for case in getattr(phases, f"{phase}_cases")(sampler):
            yield phase, case
    for case in phases.invariant_cases(sampler, Contract(batch_invariant=True)):
        yield "invariants", case


def kind(phase: str, case: Case) -> tuple[Any, ...]:
    """What a case is about, but for its sizes and options."""
    edited = tuple((name, repr(value)) for name, _, value in case.edits[:1])
    return (phase, case.protocol, case.memory, tuple(sorted(case.values.items())), *edited, *case.layouts.values())


def turns(case: Case) -> int:
    """What an interpreter does one after another in a call."""
    assert case.definition.sizes.sequential_steps is not None
    return dimension(case.definition.sizes.sequential_steps, case.sizes)


USUAL = only(lambda op: "backward" not in op or op == "selective_scan_backward", OPS)


@pytest.mark.parametrize("op", USUAL)
def test_every_kind_of_case_is_drawn_within_the_bound(op: str) -> None:
    """A bound on turns takes no kind of case away: values, special ones, layouts, memory, calls in pairs."""
    few = interpreted(op)
    cases, others = fixed_of(op), list(fixed(replace(few, max_steps=None)))
    assert {kind(*each) for each in cases} >= {kind(*each) for each in others if each[0] != "block_boundary"}
    assert {phase for phase, _ in cases} == {phase for phase, _ in others}
    assert max(turns(case) for _, case in cases) <= MOST
    assert max(turns(case) for _, case in others) > min(turns(case) for _, case in cases)


@pytest.mark.parametrize("op", USUAL)
def test_every_size_is_drawn_small_with_a_tail_and_beyond_a_tile(op: str) -> None:
    """Each symbol that may take any size: one, no multiple of a tile, and more than one tile."""
    few = interpreted(op)
    cases = [case for _, case in fixed_of(op)]
    for symbol in few.free_symbols(cases[0]):
        sizes = {case.sizes[symbol] for case in cases if symbol in case.sizes}
        assert min(sizes - {0}) == 1, symbol
        assert any(size > TILE and size % TILE for size in sizes), (symbol, sizes)


@pytest.mark.parametrize(("op", "longest"), [("selective_scan", 257), ("selective_scan_backward", 257)])
def test_sequences_of_many_chunks_are_drawn(op: str, longest: int) -> None:
    """Of a recurrence, place by place, too: chunks of 16 among most cases, and a long one."""
    lengths = [case.sizes["L"] for _, case in fixed_of(op)]
    assert max(lengths) == longest
    assert sum(length > TILE for length in lengths) > len(lengths) / 8


def test_sums_grow_as_long_as_without_the_bound() -> None:
    for op in OPS:
        few = interpreted(op)
        found = [[length for length, _ in length_cases(s, quick=True)] for s in (few, replace(few, max_steps=None))]
        assert found[0] == found[1], op


def test_fuzzed_cases_keep_within_the_bound() -> None:
    """Drawn at random, none has more turns; one that is called as a whole has no bound on them."""
    choose = seeded(1)
    drawn = [interpreted("selective_scan").case(choose) for _ in range(200)]
    assert max(map(turns, drawn)) <= MOST
    whole = Sampler(spec("selective_scan"), "bfloat16")
    assert max(turns(whole.case(choose)) for _ in range(200)) > MOST
