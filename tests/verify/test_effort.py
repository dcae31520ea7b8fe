"""Effort, order and sizes: what is tried, how much of it, which sizes hang on others, and fewer where interpreted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.cli.settings import shapes
from assay.golden.registry import spec, specs
from assay.golden.signature import dimension
from assay.kernels.libraries.pytorch import softmax
from assay.verify import Verdict, examine
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.contract import Contract
from assay.verify.errors import SettingError
from assay.verify.examination import phases
from assay.verify.examination.phases import length_cases
from assay.verify.examination.plan import Plan, make_plan
from assay.verify.examination.run import arranged, fixed_cases, kind_of
from assay.verify.findings import ASPECTS
from assay.verify.settings import EFFORTS, Settings
from tests.zoo.attention import attention_rows

from .examined import fails, failure_of, passes, quick
from .usual import only


def plan_for(op: str = "softmax", **settings: Any) -> Plan:
    """What is asked of a kernel that isn't called."""
    return make_plan(softmax, Settings(op, dtype="bfloat16", **settings))


@pytest.mark.parametrize("op", ["softmax", "gemm", "rmsnorm", "attention", "cross_entropy"])
def test_a_quick_effort_tries_a_part_of_the_fixed_cases(op: str) -> None:
    cases = list(fixed_cases(plan_for(op)))
    usual, quick = (arranged(cases, effort) for effort in ("usual", "quick"))
    assert sorted(map(id, usual)) == sorted(map(id, cases))
    assert 0 < 3 * len(quick) < 2 * len(usual)
    assert quick == [fixed for fixed in usual if fixed in quick]


def test_all_kinds_of_softmax_were_measured() -> None:
    """Cases of a kind stand together: the table knows every kind that softmax's phases have."""
    kinds = [kind_of(fixed) for fixed in arranged(fixed_cases(plan_for()), "usual")]
    met = dict.fromkeys(kinds)
    assert kinds == sorted(kinds, key=list(met).index)


def test_a_quick_effort_tries_every_aspect() -> None:
    verdict = examine(softmax, "softmax", dtype="bfloat16", effort="quick")
    assert verdict.passed
    assert {name for name, aspect in verdict.aspects.items() if aspect.status == "kept"} == set(ASPECTS)


def test_the_effort_says_how_much_is_fuzzed() -> None:
    assert [plan_for(effort=effort).settings.fuzzed for effort in EFFORTS] == [12, 60, 200]
    assert plan_for(effort="quick", examples=7).settings.fuzzed == 7
    with pytest.raises(SettingError, match="expected one of quick, usual, thorough"):
        plan_for(effort="enough")


def test_the_same_seed_gives_the_same_cases() -> None:
    lines: dict[int, list[str]] = {}
    for place, seed in enumerate((3, 3, 4)):
        said = lines.setdefault(place, [])
        quick(softmax, examples=None, seed=seed, watch=lambda line, _, said=said: said.append(line))
    assert lines[0] == lines[1] != lines[2]


def test_an_interpreted_kernel_gets_cases_of_its_size() -> None:
    pytest.importorskip("triton")
    from assay.kernels.triton.softmax import softmax as interpreted

    largest: list[int] = []

    def measuring(x: torch.Tensor) -> torch.Tensor:
        largest.append(x.numel())
        return interpreted(x)

    assert examine(measuring, "softmax", dtype="float32", effort="usual", examples=5, contract=None).cases > 50
    beyond = sorted(largest)[-16:]  # the series of growing rows and sizes of models have limits of their own
    assert max(size for size in largest if size not in beyond) <= 2**14


@pytest.mark.parametrize("long", [False, True])
def test_a_way_of_its_own_for_whole_tiles_is_taken(long: bool) -> None:
    """What is wrong only where every size is a multiple of 16 at once, or there and in long sums, is found quickly."""

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        tiled = all(size and size % 16 == 0 for size in (*a.shape, *b.shape))
        if tiled and (a.shape[1] > 500 or not long):
            a, b = (((x.contiguous().view(torch.int32) >> 13) << 13).view(torch.float32) for x in (a, b))
        return a @ b

    assert examine(gemm, "gemm", dtype="float32", effort="quick", shrinking=False).outcome == "FAIL"


def test_a_peak_in_the_last_place_is_met() -> None:
    def softmax(x: torch.Tensor) -> torch.Tensor:
        blocks = max((x.shape[1] - 1) // 512 * 512, 1)
        weights = (x - x[:, :blocks].amax(1, keepdim=True)).exp() if x.shape[1] > 512 else torch.softmax(x, 1)
        return weights / weights.sum(1, keepdim=True)

    fails(examine(softmax, "softmax", dtype="float32", effort="quick", shrinking=False, every_aspect=False))


SELF = {"Sk": "Sq", "Dv": "D", "D": [8, 16], "B": [1]}


def self_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Only takes as many keys as queries."""
    assert q.shape[2] == k.shape[2], f"{q.shape[2]} queries, {k.shape[2]} keys"
    assert v.shape[3] == q.shape[3]
    out = attention_rows(q, k, v)
    assert isinstance(out, Tensor)
    return out


def wrong_from_nine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last of nine keys or more is left out."""
    if k.shape[2] < 9:
        return self_attention(q, k, v)
    return self_attention(q, torch.cat([k[:, :, :-1], k[:, :, -2:-1]], 2), v)


def attention_of(kernel: Any, sizes: Mapping[str, Any]) -> Verdict:
    return quick(kernel, "attention", shapes=sizes, examples=4, shrinking=kernel is wrong_from_nine)


def test_equal_lengths_are_equal_in_every_case() -> None:
    passes(attention_of(self_attention, SELF))
    assert "keys" in failure_of(attention_of(self_attention, {**SELF, "Sk": range(1, 40)})).message
    failure = failure_of(attention_of(wrong_from_nine, SELF))
    assert failure.kind == "contract"
    assert failure.case.sizes["Sk"] == failure.case.sizes["Sq"] == 9


def sizes_of(op: str, given: Mapping[str, Sequence[int]], **options: Any) -> list[dict[str, int]]:
    sampler = Sampler(spec(op), "bfloat16", shapes=given, options={name: [value] for name, value in options.items()})
    cases: list[Case] = [sampler.case(seeded(seed)) for seed in range(50)]
    return [dict(case.sizes) for case in cases]


def test_lists_that_hang_on_each_other_are_combined() -> None:
    found = {(sizes["H"], sizes["Hkv"]) for sizes in sizes_of("attention_varlen", {"H": [1, 2], "Hkv": [1, 2]})}
    assert found == {(1, 1), (2, 1), (2, 2)}
    found = {(sizes["H"], sizes["Hkv"]) for sizes in sizes_of("attention", {"H": [4, 6], "Hkv": [2, 5, 3]})}
    assert found == {(4, 2), (6, 2), (6, 3)}
    rows = sizes_of("gemm_int4", {"K": [32, 64]})
    assert {sizes["K"] for sizes in rows} == {32, 64}
    assert all(sizes["K"] % sizes["g"] == 0 for sizes in rows)


@pytest.mark.parametrize(
    ("op", "given", "words"),
    [
        ("attention", {"H": [3, 5], "Hkv": [2, 4]}, "H=3, 5, Hkv=2, 4; attention needs H to be a multiple of Hkv"),
        ("gemm_int4", {"K": [33]}, r"K=33; gemm_int4 needs a multiple of 32 or 64 or 128 \(g\)"),
    ],
)
def test_what_fits_nothing_is_told_with_the_other(op: str, given: dict[str, list[int]], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        sizes_of(op, given)


def test_ties_are_settings() -> None:
    """Through tables and the command line; a symbol that isn't there, or a chain, is refused."""
    settings = Settings("attention", dtype="float32", shapes=SELF)
    assert settings.ties == {"Sk": "Sq", "Dv": "D"}
    assert Settings.from_table(settings.as_table()) == settings
    assert shapes(["Sk=Sq", "D=8"]) == {"Sk": "Sq", "D": [8]}
    with pytest.raises(SettingError, match="did you mean 'Sq'"):
        Settings("attention", dtype="float32", shapes={"Sk": "Sqq"})
    with pytest.raises(SettingError, match="expected a symbol that has sizes of its own"):
        Settings("attention", dtype="float32", shapes={"Sk": "Sq", "Sq": "Sk"})


def test_a_symbol_left_out_of_at_is_as_large_as_its_other() -> None:
    at = {"B": 1, "H": 1, "Hkv": 1, "Sq": 300, "D": 8}
    assert Settings("attention", dtype="float32", shapes=SELF, at=[at]).at[0]["Sk"] == 300


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
    few = interpreted(op)
    cases, others = fixed_of(op), list(fixed(replace(few, max_steps=None)))
    assert {kind(*each) for each in cases} >= {kind(*each) for each in others if each[0] != "block_boundary"}
    assert {phase for phase, _ in cases} == {phase for phase, _ in others}
    assert max(turns(case) for _, case in cases) <= MOST
    assert max(turns(case) for _, case in others) > min(turns(case) for _, case in cases)


@pytest.mark.parametrize("op", USUAL)
def test_every_size_is_drawn_small_with_a_tail_and_beyond_a_tile(op: str) -> None:
    few = interpreted(op)
    cases = [case for _, case in fixed_of(op)]
    for symbol in few.free_symbols(cases[0]):
        sizes = {case.sizes[symbol] for case in cases if symbol in case.sizes}
        assert min(sizes - {0}) == 1, symbol
        batches = few.is_batch(cases[0].signature, symbol)
        assert batches or any(size > TILE and size % TILE for size in sizes), (symbol, sizes)


@pytest.mark.parametrize(("op", "longest"), [("selective_scan", 257), ("selective_scan_backward", 257)])
def test_sequences_of_many_chunks_are_drawn(op: str, longest: int) -> None:
    """Of a recurrence, place by place, too: chunks of 16 among most cases, and a long one."""
    lengths = [case.sizes["L"] for _, case in fixed_of(op)]
    assert max(lengths) >= longest
    assert sum(length > TILE for length in lengths) > len(lengths) / 8


def test_sums_grow_as_long_as_without_the_bound() -> None:
    """But for those along a recurrence, whose steps are bound."""
    for op in OPS:
        few = interpreted(op)
        found = [[length for length, _ in length_cases(s, quick=True)] for s in (few, replace(few, max_steps=None))]
        if op == "selective_scan_backward":
            assert found[0] == [8, 1024]
        else:
            assert found[0] == found[1], op


def test_fuzzed_cases_keep_within_the_bound() -> None:
    choose = seeded(1)
    drawn = [interpreted("selective_scan").case(choose) for _ in range(200)]
    assert max(map(turns, drawn)) <= MOST
    whole = Sampler(spec("selective_scan"), "bfloat16")
    assert max(turns(whole.case(choose)) for _ in range(200)) > MOST
