"""The parts of the audit by themselves: corruptions, replays, values, the wrapping of modules, merging."""

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from assay.mutation.comparisons import Call, Comparison
from assay.mutation.locations import Location
from assay.mutation.log import AuditLog
from assay.mutation.replay import Kept, corruptions, counts, replay
from assay.mutation.session import Patches
from assay.mutation.values import kept, largest_leaf, numbers_of, rebuilt, same_memory, thinned
from assay.mutation.words import ALL

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=20)
NUMBERS = arrays.arrays(np.float64, SHAPES, elements=st.floats(-1e6, 1e6, allow_subnormal=False))


@settings(deadline=None)
@given(NUMBERS)
def test_corruptions_keep_the_shape_and_the_original(right: Any) -> None:
    """Whatever is done to values, there are as many of them, under a known name, and the right ones are untouched."""
    before = right.copy()
    for name, wrong in corruptions(right):
        assert name in ALL
        assert wrong.shape == right.shape
        assert wrong.dtype == right.dtype
    np.testing.assert_array_equal(right, before)


@settings(deadline=None)
@given(NUMBERS)
def test_a_comparison_of_bits_lets_no_counted_corruption_through(right: Any) -> None:
    for name, wrong in corruptions(right):
        if counts(name, wrong, right):
            assert not np.array_equal(wrong, right, equal_nan=True)
        assert not counts(name, right.copy(), right)


def test_alike_rows_and_noise_say_nothing() -> None:
    right = np.ones((4, 5))
    right[:, -1] = 1e-17
    found = {name: counts(name, wrong, right) for name, wrong in corruptions(right)}
    assert not found["two rows swapped"]
    assert not found["last column zero"]
    assert found["one row zero"]


def call(original: Any, value: Any, expected: Any, **kwargs: Any) -> Kept:
    """A kept comparison of two values."""
    leaf = largest_leaf(value)
    assert leaf is not None
    return Kept(Call(Comparison("", "", "raises"), original, (value, expected), kwargs), 0, leaf)


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-6, 1.0), st.sampled_from([np.float32, np.float64]))
def test_the_gain_found_is_the_tolerance(rtol: float, dtype: Any) -> None:
    """By bisection, to 10 % and the spacing of the format."""
    x = np.linspace(1, 2, 50, dtype=dtype)
    found = replay(call(np.testing.assert_allclose, x, x, rtol=rtol))
    assert found.gain is not None
    assert rtol * 0.9 - 2e-7 <= found.gain <= rtol * 1.12 + 4e-7


def test_a_check_that_can_not_fail_has_no_gain() -> None:
    found = replay(call(lambda a, b: None, np.arange(1.0, 9.0), np.arange(1.0, 9.0)))
    assert found.gain == math.inf
    assert all(found.passed.values())
    assert "one NaN" in found.passed


def test_what_does_not_pass_again_is_not_judged() -> None:
    answers = iter([AssertionError, AssertionError])

    def moody(a: Any, b: Any) -> None:
        raise next(answers)

    assert replay(call(moody, np.ones(3), np.ones(3))) is None


@pytest.mark.parametrize(
    "value",
    [
        torch.linspace(0, 1, 6, dtype=torch.bfloat16).reshape(2, 3),
        torch.linspace(0, 1, 6).to(torch.float8_e4m3fn),
        torch.arange(6).t(),
        torch.complex(torch.ones(2), torch.zeros(2)),
        torch.linspace(0, 1, 6, requires_grad=True).reshape(2, 3).t(),
        np.float32(1.5),
        np.arange(6, dtype=np.uint8)[::-1],
        np.linspace(0, 1, 4, dtype=np.float16),
        [1.0, 2.5],
        (1, 2),
        [[1.0, 2.0], [3.0, 4.0]],
        2.5,
        3,
        1 + 2j,
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_values_go_out_and_come_back(value: Any) -> None:
    """Type, dtype and bits survive the way to float64 and back."""
    numbers = numbers_of(value)
    assert numbers is not None
    back = rebuilt(numbers, value)
    assert type(back) is type(value)
    if isinstance(value, torch.Tensor):
        assert back.dtype == value.dtype
        assert torch.equal(back.to(torch.complex128), value.detach().to(torch.complex128))
    else:
        assert getattr(back, "dtype", None) == getattr(value, "dtype", None)
        np.testing.assert_array_equal(back, value)


@pytest.mark.parametrize(
    "value",
    [
        "text",
        None,
        True,
        torch.tensor([True]),
        np.array(["a"]),
        np.ma.masked_array([1.0]),
        torch.ones(2, device="meta"),
    ],
    ids=repr,
)
def test_what_is_no_array_of_numbers_has_no_leaf(value: Any) -> None:
    assert largest_leaf(value) is None


def test_large_arrays_are_thinned_alike() -> None:
    x = np.arange(3 << 20).reshape(3, -1)
    a, b, thin = thinned(x, x + 1)
    assert thin
    assert a.shape == b.shape == (3, (1 << 20) // 3 + 1)
    assert (b - a == 1).all()
    assert thinned(x, x[0])[2] is False
    assert thinned(x[:, :9], x[:, :9])[2] is False


def test_one_memory_is_told_from_equal_values() -> None:
    for x in (np.ones(4), torch.ones(4)):
        assert same_memory(x, x[:])
        assert not same_memory(x, kept(x))
        assert not same_memory(x, x[1:])


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of one function and one class, not yet imported."""
    (tmp_path / "comparing.py").write_text(
        "def same(a, b): return a == b\nclass Case:\n    def same(self, b): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "comparing"
    sys.modules.pop("comparing", None)


@pytest.mark.parametrize("early", [True, False])
def test_functions_are_wrapped_under_every_name_and_put_back(module: str, early: bool) -> None:
    other = type(sys)("other")
    sys.modules["other"] = other
    names = [Comparison(module, name, "bool") for name in ("same", "Case.same", "absent")]
    patches = Patches(names, lambda original, comparison: lambda *args: "wrapped")
    if early:
        other.__dict__["alias"] = importlib.import_module(module).same
    patches.start()
    try:
        comparing = importlib.import_module(module)
        if not early:
            other.__dict__["alias"] = comparing.same
        assert other.alias(1, 1) == comparing.same(1, 2) == comparing.Case().same(3) == "wrapped"
        assert [item.name for item in patches.missing] == ["absent"]
    finally:
        patches.stop()
        del sys.modules["other"]
    assert other.alias(1, 1) is comparing.same(1, 1) is True
    assert comparing.Case().same(3) == 1
    assert comparing.__spec__.loader.get_source(module).startswith("def same")


def test_ledgers_merge_to_what_one_process_would_have_found() -> None:
    location = Location("test_x.py", 3, "assert_close(a, b)")
    halves = [AuditLog(), AuditLog()]
    for log, gain, seen in zip(halves, (0.5, math.inf), (False, True), strict=True):
        site = log.site(location, "torch.testing.assert_close")
        site.runs, site.examined = 2, 1
        site.tests["test_a"] += 2
        site.add({"all zeros": True, "times 1.05": seen}, gain)
    whole = AuditLog()
    for log in halves:
        whole.merge(json.loads(json.dumps(log.as_data())))
    (site,) = whole.ranked
    assert (site.runs, site.replays, site.gains, site.tests["test_a"]) == (4, 2, [0.5, math.inf], 4)
    assert site.never_noticed(ALL) == ["all zeros"]
    assert site.sometimes_noticed(ALL) == ["times 1.05"]
    assert site.grade == "blind"
