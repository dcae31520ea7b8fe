"""Variants: each program and path of host code that some size reaches is observed, tried, and listed."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from assay.cli.main import app
from assay.golden.evaluation.cutting import Cut
from assay.golden.registry import spec
from assay.interpreter import lasting
from assay.runtime.environment import standard_environment
from assay.verify import examine
from assay.verify.examination.plan import make_plan
from assay.verify.examination.procedure import observed_variants
from assay.verify.harness.constants import compared_constants, joint_constants
from assay.verify.harness.variants import Axis, Explorer, probes
from assay.verify.settings import Settings
from tests.verify import variant_kernels as kernels

pytest.importorskip("triton")

WRONG = {
    "wrong_bucket": ("gemm", lambda sizes: 512 < sizes["M"] <= 1024),
    "wrong_islands": ("gemm", lambda sizes: sizes["M"] in (24, 48, 96, 100, 192)),
    "wrong_table": ("gemm", lambda sizes: sizes["M"] == 192),
    "wrong_tail": ("gemm", lambda sizes: 64 < sizes["M"] <= 96 and sizes["K"] % 64),
    "wrong_row": ("gemm", lambda sizes: sizes["M"] == 1 and sizes["K"] % 8),
    "wrong_wide": ("gemm", lambda sizes: sizes["M"] > 200 and sizes["N"] > 200),
    "wrong_block": ("silu", lambda sizes: 1024 < sizes["N"] <= 2048),
    "wrong_inside": ("silu", lambda sizes: sizes["N"] == 417),
    "wrong_joint": ("rmsnorm", lambda sizes: sizes["R"] == 1 and sizes["N"] > 4096),
    "wrong_shared": ("attention", lambda sizes: sizes["D"] == 80 and sizes["H"] > sizes["Hkv"] > 1),
    "wrong_heads": ("attention", lambda sizes: sizes["H"] > 64 and sizes["Hkv"] > 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_of_one_variant_is_found(name):
    """Quick effort finds kernels that are wrong for one bucket, table entry, block size or compared size alone."""
    op, is_wrong = WRONG[name]
    verdict = examine(
        getattr(kernels, name), op, dtype="float32", effort="quick", examples=0, shrinking=False, every_aspect=False
    )
    assert verdict.outcome == "FAIL"
    assert is_wrong(verdict.failure.case.sizes)


@pytest.mark.parametrize(("name", "op"), [("bucketed", "gemm"), ("silu", "silu")])
def test_honest_variants_pass_and_are_tried(name, op):
    """A dispatcher whose buckets are all right passes, and every bucket was tried."""
    verdict = examine(getattr(kernels, name), op, dtype="float32", effort="quick", examples=0)
    assert verdict.outcome == "PASS"
    assert verdict.variants
    assert all(variant.tried for variant in verdict.variants)
    assert "variants" in verdict.phases


def test_buckets_are_listed_with_their_ends():
    """The two paths of a dispatcher over M, each with its ranges."""
    variants = observed_variants(kernels.bucketed, Settings("gemm", dtype="float32"))
    runs = {variant.runs["M"] for variant in variants if "M" in variant.runs}
    assert ((129, 700),) in runs
    assert ((1, 128), (701, 8192)) in runs


def test_block_sizes_are_programs():
    """Each power of two of the block is a program of its own, with the sizes that reach it."""
    variants = observed_variants(kernels.silu, Settings("silu", dtype="float32"))
    spans = {next(iter(each.configs)): each.runs.get("N") for each in variants if each.launches == ("_scale",)}
    assert spans["BLOCK=2048, FACTOR=1.0, SECOND=False"] == ((1025, 2048),)
    assert spans["BLOCK=8192, FACTOR=1.0, SECOND=False"] == ((4097, 8192),)


def test_refused_sizes_are_a_variant():
    """Sizes that the host's code refuses are listed with its words."""
    variants = observed_variants(kernels.refusing, Settings("gemm", dtype="float32"))
    refused = [variant for variant in variants if variant.refusal]
    assert [(variant.sizes, variant.refusal) for variant in refused] == [
        ({"M": (301, 8192)}, "NotImplementedError: M must be at most 300")
    ]


def test_observing_leaves_no_trace_in_the_kernel():
    """The kernel is observed in a process of its own: its state is that of the judged calls."""
    kernels.calls.clear()
    observed_variants(kernels.counting, Settings("gemm", dtype="float32"))
    assert len(kernels.calls) == 1  # the first case, which is judged


def test_isolated_kernels_are_observed_where_they_run():
    """An isolated kernel has the same variants."""
    names = {"dtype": "float32", "effort": "quick", "examples": 0, "shrinking": False}
    verdict = examine(kernels.wrong_bucket, "gemm", isolate=True, **names)
    assert verdict.outcome == "FAIL"
    assert {variant.runs.get("M") for variant in verdict.variants} >= {((513, 1024),)}


def test_the_command_lists_variants():
    """``assay verify TARGET --variants`` lists them as text and as JSON, and examines nothing."""
    target = ["verify", "tests.verify.variant_kernels:bucketed", "--spec", "gemm", "--dtype", "float32", "--variants"]
    shown = CliRunner().invoke(app, target)
    assert shown.exit_code == 0
    assert "M 129-700: contiguous, float, matmul" in shown.output
    listed = json.loads(CliRunner().invoke(app, [*target, "--json"]).output)
    assert [129, 700] in [run for each in listed[0]["variants"] for run in each["runs"].get("M", [])]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(2, 8000), min_size=1, max_size=4, unique=True))
def test_every_boundary_of_a_long_run_is_found(bounds):
    """Between series that hold an observed size each boundary is found exactly, wherever it is."""
    bounds = sorted(bounds)

    def kernel(a, b):
        for bound in bounds:
            if a.shape[0] < bound:
                break
        else:
            bound = 0
        return kernels.PATHS[bounds.index(bound) if bound else len(bounds)](a, b)

    with lasting(), standard_environment():
        plan = make_plan(kernel, Settings("gemm", dtype="float32"))
        base = plan.sampler.case(lambda values: values[0], style="small")
        values = range(1, 8193)
        found = Explorer(plan.harness, [Axis(base, {"M": 1}, {}, values)], 60.0, dense=True).result()
    edges = [1, *bounds, 8193]
    seen = set(probes(values, found.constants, dense=True))
    expected = [(first, last - 1) for first, last in itertools.pairwise(edges) if seen & {*range(first, last)}]
    runs = sorted(run for variant in found.variants for run in variant.runs[0])
    if len(expected) == len(edges) - 1:  # a short series between two observed sizes is not seen
        assert runs == expected


SOURCE = """
LIMIT = 3 * 128
TABLE = {24: 1, 48: 2}
def kernel(x, cutoff=777):
    m, n = x.shape
    if 512 < m <= 1 << 10 or n in (100, 192) or m > LIMIT:
        return TABLE.get(m, 5000)
    for start in range(0, n, 333):
        pass
    match m:
        case 96:
            return 4242
    return min(n, 11) + x.view(9999)
"""


def test_constants_that_are_compared(tmp_path):
    """Comparisons (where the other path begins), ranges, minima, keys, cases and defaults; other numbers don't."""
    path = tmp_path / "kernel.py"
    path.write_text(SOURCE)
    found = compared_constants({str(path): [4]})
    assert {513, 1025, 100, 192, 385, 24, 48, 333, 96, 11, 777} <= {*found}
    assert not {*found} & {5000, 4242, 9999, 1, 0}
    assert compared_constants({str(tmp_path / "missing.py"): [1], __file__ + "x": []}) == []


def test_moduli_shifts_and_masks_are_constants(tmp_path):
    """An index wraps around at the size beyond; small moduli are sizes of ordinary cases."""
    source = tmp_path / "wrapping.py"
    source.write_text("def wraps(p):\n    return p % 4096, p >> 11, p & 511, p // 64, p % 8, p & 1, p[:9], p[::3]\n")
    assert sorted(compared_constants({str(source): [1]})) == [10, 65, 513, 2049, 4097]


def test_constants_of_one_condition_are_joint(tmp_path):
    """With the names that they are compared with; those of two conditions aren't."""
    source = tmp_path / "joint.py"
    source.write_text(
        "LONG = 4096\n"
        "def path(rows, n, x):\n"
        "    if rows == 1 and n > LONG:\n        return 1\n"
        "    if rows == 5:\n        return 2\n"
        "    i = rows // 128 * 5 + n % 64 - 1\n"
        "    return x.shape[0] <= 32 or n == 7\n"
    )
    assert {*joint_constants({str(source): [2]})} == {
        (("rows", 1), ("n", 4097)),
        (("", 129), ("", 65)),
        (("", 33), ("n", 7)),
    }
    assert joint_constants({str(source): []}) == []


def test_a_sample_of_grouped_heads_is_cut_with_its_group():
    """A search along heads evaluates one with its group alone, and along groups one with all its heads."""
    definition, sizes = spec("attention"), {"B": 1, "H": 12, "Hkv": 4, "Sq": 2, "Sk": 2, "D": 8, "Dv": 8}
    head = Cut({"B": torch.tensor([0])}).at(definition, sizes, "H", 7)
    assert {symbol: index.tolist() for symbol, index in head.index.items()} == {"B": [0], "H": [7], "Hkv": [2]}
    group = Cut().at(definition, sizes, "Hkv", 3)
    assert group.index["H"].tolist() == [9, 10, 11]
    assert Cut().at(definition, sizes, "Sq", 1).index["Sq"].tolist() == [1]
