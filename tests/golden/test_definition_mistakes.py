"""A definition that loses or keeps an axis is refused in one line that says how to mend it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from assay.golden import DefinitionError, define, evaluate

MISTAKES: dict[str, tuple[str, Callable[[Any, Any], Any], str]] = {
    "kept_axis": ("x[R,N] -> y[R]", lambda xp, x: xp.sum(x), r"y\[R\] came with the shape \[3, 1\]; xp.sum, xp.mean"),
    "added_axis": (
        "x[R,N] -> y[R,N]",
        lambda xp, x: x / xp.sum(x * x)[:, None],
        r"y\[R,N\] came with the shape \[3, 3, 4\]; xp.sum, xp.mean",
    ),
    "lost_axis": ("x[R,N] -> y[R]", lambda xp, x: xp.mean(x)[:, 0, 0], "IndexError: too many indices.*keep their axis"),
    "lost_result": ("x[R,N] -> y[R], z[R]", lambda xp, x: xp.sum(x)[..., 0], "gives 1 results; expected 2"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_with_axes_is_named(name: str) -> None:
    """Which result has which shape, and that sums keep their axis."""
    signature, definition, message = MISTAKES[name]
    define(f"{name}_of_test", signature, rows="R", public=False)(definition)
    with pytest.raises(DefinitionError, match=message):
        evaluate(f"{name}_of_test", torch.randn(3, 4))


def test_a_sum_whose_axis_is_dropped_is_right() -> None:
    """The remedy of the message works."""
    define("row_sum_of_test", "x[R,N] -> y[R]", rows="R", public=False)(lambda xp, x: xp.sum(x)[..., 0])
    golden = evaluate("row_sum_of_test", torch.ones(3, 4))
    assert not isinstance(golden, tuple)
    assert golden.value.tolist() == [4.0, 4.0, 4.0]
