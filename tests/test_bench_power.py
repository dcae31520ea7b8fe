"""`./dev bench power`: cases count by themselves, and its figures are those of the kernels."""

from __future__ import annotations

import torch

from assay.verify.examination.plan import make_plan
from assay.verify.explanation.fault_models.evaluation import kernel_of
from assay.verify.settings import Settings
from benchmarks.verify.power import Measured, Watched, faulty, honest, shown, summary

SHAPES = {"R": [1, 3], "N": [1, 5, 17]}


def ramp(x: torch.Tensor) -> torch.Tensor:
    """A silu that is wrong for 17 columns."""
    y: torch.Tensor = kernel_of(None, "silu")(x)
    return y * 1.5 if x.shape[1] == 17 else y


def watched(seconds: float) -> Watched:
    settings = Settings("silu", dtype="bfloat16", shapes=SHAPES, effort="quick", examples=0)
    run = Watched(make_plan(ramp, settings), lambda *_: None, seconds=seconds)
    run.execute(("fixed",))
    return run


def test_every_failing_case_counts() -> None:
    """One failure neither ends the run nor takes an aspect from later cases."""
    run = watched(60.0)
    failing = [case for _, case, failed in run.tried if failed]
    assert len(failing) > 2
    assert {case.sizes["N"] for case in failing} == {17}
    assert any(case.sizes["N"] != 17 for _, case, failed in run.tried if not failed)
    assert run.share is not None
    assert 0 < run.share < 1


def test_time_ends_a_run() -> None:
    run = watched(0.0)
    assert not run.tried
    assert run.cut_short


def test_figures_are_those_of_the_kernels() -> None:
    both = {"quick": "PASS", "usual": "FAIL"}
    seconds, coverage = {"quick": 2.0, "usual": 4.0}, {"quick": 0.5}
    needed = [("phase", "fuzz"), ("size of N", "2 to 8"), ("size of M", "1")]
    one = Measured("zoo", "late", False, both, seconds, coverage, needed, 0.6)
    two = Measured("zoo", "early", False, dict.fromkeys(both, "FAIL"), seconds, {}, [], 0.1)
    right = Measured("zoo", "right", True, {"quick": "PASS", "usual": "VACUOUS"}, seconds, {})
    figures = summary([one, two, right])
    assert (figures["quick"]["found"], figures["usual"]["found"], figures["usual"]["of"]) == (1, 2, 2)
    assert figures["quick"]["missed"] == ["late"]
    assert figures["usual"]["finds a second"] == 0.25
    assert (figures["quick"]["honest flagged"], figures["usual"]["honest undecided"]) == ([], ["right"])
    assert figures["finds of one phase alone"] == {"fuzz": 1}
    assert figures["finds of one level alone, by factor"] == {"size": 1}
    assert figures["found by share of pairs"] == {"0.25": 1, "0.5": 1, "0.75": 2, "1.0": 2}
    assert shown(figures, figures).row_count == shown(figures).row_count > 20


def test_all_sources_take_turns() -> None:
    first = [source for source, _, _ in (item for _, item in zip(range(4), faulty(), strict=False))]
    assert sorted(first) == ["fault models", "other styles", "references", "zoo"]
    assert {source for source, _, _ in (item for _, item in zip(range(2), honest(), strict=False))} == {
        "references",
        "zoo",
    }
