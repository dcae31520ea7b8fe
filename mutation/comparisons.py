"""The wrapped comparison functions: their modules, how they answer, and which arguments they compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

Answer = Literal["raises", "bool", "elements", "either"]
"""How a comparison reports a difference: by raising, by False, by False elements, or by raising or False."""
Slot = int | str
"""The position or the keyword of an argument."""

_ACTUAL = ("actual", "input", "a", "x", "first", "tree1", "array1")
_EXPECTED = ("expected", "desired", "other", "b", "y", "second", "tree2", "array2")


@dataclass(frozen=True)
class Comparison:
    """A function or method that compares two values."""

    module: str
    """The module whose import makes it available."""
    name: str
    """Its attribute there; ``Class.method`` for a method."""
    answer: Answer
    actual: int = 0
    """Position of the value under test."""
    expected: int = 1

    @classmethod
    def named(cls, target: str) -> Comparison:
        """Return a user's comparison, ``module:function``, of the value under test and the expected one."""
        module, colon, name = target.partition(":")
        if not (colon and module and name.isidentifier()):
            raise ValueError(f"expected MODULE:FUNCTION as in tests.utils:assert_same, got {target!r}")
        return cls(module, name, "either")

    @property
    def title(self) -> str:
        """Return the function's public name."""
        return "pytest.approx" if self.module.startswith("_pytest") else f"{self.module}.{self.name}"


def _functions(module: str, answer: Answer, *names: str, actual: int = 0) -> list[Comparison]:
    return [Comparison(module, name, answer, actual, actual + 1) for name in names]


COMPARISONS: list[Comparison] = [
    *_functions("torch", "bool", "allclose", "equal", "Tensor.allclose", "Tensor.equal"),
    *_functions("torch", "elements", "isclose", "Tensor.isclose"),
    *_functions("torch.testing", "raises", "assert_close", "assert_allclose"),
    *_functions("torch.testing._internal.common_utils", "raises", "TestCase.assertEqual", actual=1),
    *_functions("numpy", "bool", "allclose", "array_equal"),
    *_functions("numpy", "elements", "isclose"),
    *_functions(
        "numpy.testing",
        "raises",
        *("assert_allclose", "assert_almost_equal", "assert_approx_equal", "assert_array_almost_equal"),
        *("assert_array_almost_equal_nulp", "assert_array_equal", "assert_array_max_ulp", "assert_equal"),
    ),
    *_functions("jax.numpy", "bool", "allclose", "array_equal"),
    *_functions("jax.numpy", "elements", "isclose"),
    *_functions("chex", "raises", "assert_trees_all_close", "assert_trees_all_equal"),
    *_functions("math", "bool", "isclose"),
    *_functions("unittest.case", "raises", "TestCase.assertAlmostEqual", actual=1),
]


def approximate_equality() -> list[Comparison]:
    """Return the comparisons of ``value == pytest.approx(...)``; their module depends on pytest's version."""
    import sys

    import pytest

    module = type(pytest.approx(1.0)).__module__
    owners = [item for name, item in vars(sys.modules[module]).items() if name.startswith("Approx")]
    return [
        Comparison(module, f"{owner.__name__}.__eq__", "bool", actual=1, expected=0)
        for owner in owners
        if isinstance(owner, type) and "__eq__" in vars(owner)
    ]


@dataclass(frozen=True)
class Call:
    """One call of a comparison; ``original`` is the function itself."""

    comparison: Comparison
    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def slots(self) -> tuple[Slot, Slot] | None:
        """Return the slots of the value under test and the expected one; None if one is missing."""
        actual = self._slot(self.comparison.actual, _ACTUAL)
        expected = self._slot(self.comparison.expected, _EXPECTED)
        return None if actual is None or expected is None else (actual, expected)

    def _slot(self, position: int, names: tuple[str, ...]) -> Slot | None:
        if len(self.args) > position:
            return position
        return next((name for name in names if name in self.kwargs), None)

    def argument(self, slot: Slot) -> Any:
        """Return the argument at ``slot``."""
        return self.args[slot] if isinstance(slot, int) else self.kwargs[slot]

    def with_argument(self, slot: Slot, value: Any) -> Call:
        """Return the call with another argument at ``slot``."""
        if isinstance(slot, int):
            return replace(self, args=(*self.args[:slot], value, *self.args[slot + 1 :]))
        return replace(self, kwargs={**self.kwargs, slot: value})


Wrapper = Callable[[Callable[..., Any], Comparison], Callable[..., Any]]
"""Makes the wrapper of a comparison function."""
