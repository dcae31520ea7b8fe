"""Where a failure begins: boundaries and multiples are named if the kernel has them, and else nothing is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.verify.explanation.begins import beginning

SIZES = (1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 256, 257)


@given(st.integers(1, 256), st.booleans())
def test_a_boundary_is_found_exactly(last: int, rising: bool) -> None:
    def is_wrong(size: int, draw: int = 0) -> bool:
        return (size > last) == rising

    right, wrong = ([size for size in SIZES if is_wrong(size) == it] for it in (False, True))
    first, second = ("right", "wrong") if rising else ("wrong", "right")
    assert beginning(right, wrong, is_wrong) == f"{first} up to {last}, {second} from {last + 1} on"


@pytest.mark.parametrize("step", [2, 3, 8, 16, 32])
@pytest.mark.parametrize("of_multiples", [True, False])
def test_a_rule_of_multiples_is_found(step: int, of_multiples: bool) -> None:
    sizes = [*range(1, 200, 3), *(step * k for k in range(1, 6))]
    right, wrong = ([size for size in sizes if (size % step == 0) is (of_multiples is it)] for it in (False, True))
    expected = f"wrong where it is {'a' if of_multiples else 'no'} multiple of {step}"
    assert beginning(right, wrong, lambda size, draw: None) == expected


def test_what_has_no_rule_has_no_words() -> None:
    """Scattered sizes, a boundary that other data move or that can't be reached, and a kernel that is always wrong."""
    assert beginning([1, 5, 64], [3, 8, 100], lambda size, draw: True) == ""
    assert beginning([1, 2], [64], lambda size, draw: draw == 0 and size > 9) == ""
    assert beginning([1, 2], [64], lambda size, draw: None) == ""
    assert beginning([], [1, 2], lambda size, draw: True) == ""
