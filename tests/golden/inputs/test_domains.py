"""Domains of inputs: the grammar of signatures, and that what is drawn belongs to its domain."""

import math
import re
from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.golden.errors import RecipeError, ShapeError
from assay.golden.inputs.distributions import EVERY, names_of
from assay.golden.inputs.values import draw
from assay.golden.registry import spec, specs
from assay.golden.signature import DOMAINS, Interval, Signature, TensorSpec, dimension, parse

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
ENDS = st.sampled_from([-math.inf, -1e30, -448.0, -2.5, -1.0, -0.125, 0.0, 0.1, 1.0, 3.0, 65504.0, math.inf])


@st.composite
def intervals(draw: Any) -> Interval:
    low, high = sorted((draw(ENDS), draw(ENDS)))
    return Interval(low, high, (draw(st.booleans()), draw(st.booleans()))) if low < high else Interval(0.0, 1.0)


SIZE = st.integers(0, 70)
QUICK = settings(max_examples=40, deadline=None, database=None)


@QUICK
@given(interval=intervals(), dtype=st.sampled_from(DTYPES), size=SIZE, seed=st.integers(0, 2**20), data=st.data())
def test_numbers_of_an_interval_are_inside(interval: Interval, dtype: str, size: int, seed: int, data: Any) -> None:
    tensor = TensorSpec("x", ("N", "2"), role="in", interval=interval)
    name = data.draw(st.sampled_from((*names_of(tensor), *((EVERY,) if dtype not in ("float32", "float64") else ()))))
    with suppress(RecipeError):  # the format may have none
        values = draw(tensor, {"N": size}, dtype, name, seed, start=(data.draw(st.integers(0, 9)), 0))
        assert all(value in interval for value in values.double().flatten().tolist()), (name, values)


def test_an_interval_is_filled() -> None:
    """Both ends, several binades, and where it holds them both signs and zero."""
    tensor = TensorSpec("x", ("64",), role="in", interval=Interval(-math.inf, 0.0))
    drawn = torch.cat([draw(tensor, {}, "bfloat16", name, 1) for name in names_of(tensor)]).double()
    assert drawn.max() == -(2.0**-133)
    assert drawn.min() < -1e38
    assert len(set(torch.frexp(drawn)[1].tolist())) > 60
    closed = TensorSpec("x", ("64",), role="in", interval=Interval(-1.0, 1.0, (True, True)))
    drawn = torch.cat([draw(closed, {}, "float32", name, 1) for name in names_of(closed)])
    assert {-1.0, 0.0, 1.0} <= {*drawn.tolist()}
    empty = TensorSpec("x", ("4",), role="in", interval=Interval(0.1, 0.10001))
    with pytest.raises(RecipeError, match=r"x: no number of float16 is in\(0.1, 0.10001\); expected"):
        draw(empty, {}, "float16", "normal", 1)


@QUICK
@given(dtype=st.sampled_from(DTYPES), rows=st.integers(1, 3), size=st.integers(1, 600), seed=st.integers(0, 2**20))
def test_shares_add_up_to_exactly_one(dtype: str, rows: int, size: int, seed: int) -> None:
    tensor = TensorSpec("w", ("R", "N"), role="simplex")
    for name in names_of(tensor):
        values = draw(tensor, {"R": rows, "N": size}, dtype, name, seed).double()
        assert bool((values >= 0).all())
        assert values.sum(-1).tolist() == [1.0] * rows, name


@QUICK
@given(dtype=st.sampled_from(DTYPES), size=SIZE, seed=st.integers(0, 2**20), data=st.data())
def test_sorted_rows_ascend(dtype: str, size: int, seed: int, data: Any) -> None:
    tensor = TensorSpec("k", ("3", "N"), role="sorted")
    values = draw(tensor, {"N": size}, dtype, data.draw(st.sampled_from(names_of(tensor))), seed).double()
    assert bool((values.diff(dim=-1) >= 0).all())


def is_definite(matrix: list[list[Fraction]]) -> bool:
    """Whether all pivots of the exact elimination are positive."""
    for pivot in range(len(matrix)):
        if matrix[pivot][pivot] <= 0:
            return False
        for row in range(pivot + 1, len(matrix)):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, len(matrix)):
                matrix[row][column] -= factor * matrix[pivot][column]
    return True


@settings(max_examples=25, deadline=None, database=None)
@given(dtype=st.sampled_from(DTYPES), size=st.integers(0, 9), seed=st.integers(0, 2**20), start=st.integers(0, 5))
def test_matrices_are_symmetric_and_definite(dtype: str, size: int, seed: int, start: int) -> None:
    tensor = TensorSpec("m", ("2", "N", "N"), role="spd")
    for name in names_of(tensor):
        values = draw(tensor, {"N": size}, dtype, name, seed, start=(0, start, start)).double()
        assert torch.equal(values, values.mT)
        for matrix in values.tolist():
            assert is_definite([[Fraction(value) for value in row] for row in matrix]), (name, matrix)


def test_large_matrices_stay_definite_in_every_dtype() -> None:
    tensor = TensorSpec("m", ("N", "N"), role="spd")
    for name in names_of(tensor):
        for dtype in DTYPES:
            assert torch.linalg.eigvalsh(draw(tensor, {"N": 65}, dtype, name, 3).double()).min() > 0, (name, dtype)


def error_of(text: str) -> str:
    """The error of a text, empty if it is a signature."""
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return ""


EXAMPLE = "x[T,D], A[D]=in(-inf, 0), w[E]=simplex, k[E]=sorted, m[D,D]=spd, E=4*G -> y, ids:int64[T,K], z[B,2*L+1]"


def test_the_example_of_the_interface() -> None:
    signature = parse(EXAMPLE)
    assert [tensor.role for tensor in signature.tensors] == ["real", "in", "simplex", "sorted", "spd"]
    assert signature.tensors[1].interval == Interval(-math.inf, 0.0)
    assert signature.symbols == ("T", "D", "G")
    assert signature.tensors[2].shape({"G": 3}) == (12,)
    assert [tensor.has_shape for tensor in signature.returns] == [False, True, True]
    assert signature.returns[2].shape({"B": 2, "L": 5}) == (2, 11)
    assert signature.bind("op", [(3, 4), (4,), (8,), (8,), (4, 4)]) == {"T": 3, "D": 4, "G": 2}
    with pytest.raises(ShapeError, match=r"w has shape \(9,\)"):
        signature.bind("op", [(3, 4), (4,), (9,), (9,), (4, 4)])


def test_dimensions_are_solved_for_their_symbols() -> None:
    assert parse("x[2*L+1], y[B,L*B] -> z[L]").bind("op", [(11,), (2, 10)]) == {"L": 5, "B": 2}
    assert parse("x[H,g*4], E=H/g, y[E] -> z[E]").bind("op", [(6, 8), (3,)]) == {"H": 6, "g": 2}


NAMES = st.sampled_from(["x", "weight", "q_1", "_a"])
SIZES = st.sampled_from(["N", "K/2", "2*F", "2*L+1", "ceil(K/128)", "1", "B+1", "(A-B)*2", "max(A,2)"])
ROLES = st.sampled_from(
    ["", "=scale", "=code(16)", "=index(V)", "=length(P*S)", "=label(V,-100)", "=in(-inf, 0)", "=in[0, 1)", "=simplex",
     "=sorted", "=in(0.125, 4]"]
)  # fmt: skip


@st.composite
def texts(draw: Any) -> str:
    def tensor(role: str) -> str:
        dims = ",".join(draw(st.lists(SIZES, min_size=1, max_size=3)))
        return f"{draw(NAMES)}{draw(st.sampled_from(['', ':float8_e4m3fn']))}[{dims}]{role}"

    inputs = ", ".join(tensor(draw(ROLES)) for _ in range(draw(st.integers(1, 3))))
    return f"{inputs}{draw(st.sampled_from(['', ' , B = 2 * C']))} -> {tensor('')}{draw(st.sampled_from(['', ', y']))}"


@QUICK
@given(texts())
def test_a_signature_written_and_read_is_the_same(text: str) -> None:
    assert parse(str(parse(text))) == parse(text)


def test_signatures_of_all_ops_are_written_and_read() -> None:
    def plain(signature: Signature) -> list[str]:
        return [tensor.text for tensor in (*signature.tensors, *signature.returns)]

    for name in specs():
        for signature in spec(name).signatures:
            assert plain(parse(str(signature))) == plain(signature)


@QUICK
@given(st.one_of(st.text(alphabet="xyTD[](),:=->*+/ 12inf", max_size=30), st.text(max_size=12)))
def test_any_other_text_is_an_error_of_one_line(text: str) -> None:
    error = error_of(text)
    assert not error or re.fullmatch(r"signature: expected .* at character [^\n]*", error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x[T,D -> y[T]", ", or ] after the dimensions of x at character 7, got '-> y[T]'"),
        ("x[T] y[T]", ", or -> at character 6, got 'y[T]'"),
        ("x -> y", "[ and the dimensions of x at character 3, got '-> y'"),
        ("A[D]=in(0, -1)", "a lower end below the upper one at character 9, got '0, -1)'"),
        ("A[D]=inn(0, 1)", "at character 6, got 'inn(0, 1)'"),
        ("M[N,K]=spd", "a role for matrices that aren't square"),
        ("x[] = simplex", "a role for 0 dimensions (simplex needs 1) at character 7"),
        ("x[2L]", "a dimension of x at character 3, got '2L]'"),
        ("x[T], E=4*E", "E by other sizes at character 9, got '4*E'"),
        ("x[__import__('os')]", "at character 3"),
        ("i:int64[T]=in(0, 3)", "integers have code(n) or index(V) at character 12"),
    ],
)
def test_errors_point_at_the_character(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^signature: expected ") as error:
        parse(text)
    assert words in str(error.value)


def test_arithmetic_is_exact_and_nothing_else_is_evaluated() -> None:
    assert dimension("ceil((K+1)/128)*2", {"K": 128}) == 4
    with pytest.raises(ShapeError, match="K/2 must be a whole number, but K=3"):
        dimension("K/2", {"K": 3})
    with pytest.raises(ShapeError, match="the size of K/g is not determined"):
        dimension("K/g", {"K": 3})
    assert DOMAINS == ("in", "simplex", "sorted", "spd")
