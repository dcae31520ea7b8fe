"""Effort and order: what is tried, how much of it, and in which order."""

from typing import Any

import pytest
import torch

from assay.verify import examine
from assay.verify.errors import SettingError
from assay.verify.examination.plan import Plan, make_plan
from assay.verify.examination.run import arranged, fixed_cases, kind_of
from assay.verify.findings import ASPECTS
from assay.verify.settings import EFFORTS, Settings


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


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
    def cases_of_seed(seed: int) -> list[str]:
        lines: list[str] = []
        examine(
            softmax, "softmax", dtype="float32", effort="quick", seed=seed, watch=lambda line, _: lines.append(line)
        )
        return lines

    first, again, other = cases_of_seed(3), cases_of_seed(3), cases_of_seed(4)
    assert first == again
    assert first != other


def test_an_interpreted_kernel_gets_cases_of_its_size() -> None:
    pytest.importorskip("triton")
    from assay.kernels.triton.softmax import softmax as interpreted

    largest: list[int] = []

    def measuring(x: torch.Tensor) -> torch.Tensor:
        largest.append(x.numel())
        return interpreted(x)

    assert examine(measuring, "softmax", dtype="float32", effort="usual", examples=5, contract=None).cases > 50
    beyond = sorted(largest)[-8:]  # the series of growing rows has limits of its own
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

    found = examine(softmax, "softmax", dtype="float32", effort="quick", shrinking=False, every_aspect=False)
    assert found.outcome == "FAIL", str(found)
