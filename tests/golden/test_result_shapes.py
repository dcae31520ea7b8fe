"""Results without dimensions have those that the definition gives them."""

from typing import Any

import pytest
import torch

from assay.golden.errors import DefinitionError
from assay.golden.lowering import reference_spec
from assay.golden.registry import define, forgotten, spec
from assay.golden.result_shapes import expression_of


def several(x: torch.Tensor, decay: torch.Tensor, total: bool = False) -> tuple[torch.Tensor, ...]:
    scaled = (x * torch.exp(decay)).sum(-1)
    padded = torch.nn.functional.pad(x, (1, 0)).repeat(1, 2)[:, 1:]
    return scaled.sum() if total else scaled, padded, x.reshape(-1), x[:, ::2]


def folded(x: torch.Tensor) -> torch.Tensor:
    return x.unfold(0, 4, 4).sum(-1)


def test_shapes_follow_from_the_function() -> None:
    made = reference_spec(several, "x[T,D], decay[D]=in(-inf, 0), T=2*H -> y, padded, flat, half")
    assert [str(each) for each in made.signature().returns] == [
        "y[2*H]", "padded[2*H,2*D+1]", "flat[2*H*D]", "half[2*H,ceil((D+0)/2)]"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "text", "options", "results"),
    [
        (several, "x[T,D], decay[D] -> y, p, flat, h", {}, "y[T], p[T,2*D+1], flat[T*D], h[T,ceil((D+0)/2)]"),
        (
            several,
            "x[T,D], decay[D] -> y, p, f[T*D], h",
            {"total": True},
            "y[], p[T,2*D+1], f[T*D], h[T,ceil((D+0)/2)]",
        ),
        (folded, "x[N,D], N=4*M -> y", {}, "y[M,D]"),
        (lambda x, index: x[index], "x[V,D], index:int64[T]=index(V) -> y", {}, "y[T,D]"),
        (lambda *parts: torch.cat(parts), "a[N], b[M], c[K] -> y", {}, "y[N+M+K]"),
    ],
)
def test_dimensions_are_fitted(function: Any, text: str, options: Any, results: str) -> None:
    assert ", ".join(map(str, reference_spec(function, text).signature(options).returns)) == results


def test_of_an_op_they_are_known_too() -> None:
    with forgotten():

        @define("halves_of_rows", "x[R,N] -> total, y", rows="R")
        def halves(xp: Any, x: Any) -> Any:
            return xp.sum(x)[..., 0], x[:, :3]

        assert [str(each) for each in spec("halves_of_rows").signature().returns] == ["total[R]", "y[R,3]"]


@pytest.mark.parametrize(
    ("function", "text", "words"),
    [
        (lambda x: x[: int(x.shape[0] ** 0.5)], "x[N] -> y", "the shape of y follows from no simple arithmetic"),
        (lambda x: x, "x[N] -> y, z", r"expected 2 result\(s\) \(y, z\), got 1"),
        (lambda x: x[:, :, 0], "x[N,K] -> y", "the shape of y isn't known, as the function runs at no sizes"),
    ],
)
def test_what_cannot_be_fitted_is_one_line(function: Any, text: str, words: str) -> None:
    with pytest.raises(DefinitionError, match=words) as error:
        reference_spec(function, text).signature()
    assert "\n" not in str(error.value)


def test_products_and_sums_of_several_sizes() -> None:
    sizes = {"a": 3, "b": 5, "c": 7}

    def fitted(function: Any) -> tuple[str, set[str]]:
        pairs = {name: [(n, function(**{**sizes, name: n})) for n in (11, 13)] for name in sizes}
        return expression_of(function(**sizes), pairs, sizes)

    assert fitted(lambda a, b, c: 2 * a * b * c) == ("2*a*b*c", set())
    assert fitted(lambda a, b, c: a + b + c + 1) == ("a+b+c+1", set())
    assert fitted(lambda a, b, c: a * b + c)[1]
