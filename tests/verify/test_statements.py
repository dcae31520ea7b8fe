"""What a reference is said to take and give: dtypes by any name, a caret, and a check before the first case."""

from typing import Any

import pytest
import torch

from assay.golden.errors import DefinitionError
from assay.golden.signature import parse
from assay.verify import examine

SETTINGS: dict[str, Any] = {"dtype": "bf16", "effort": "quick", "examples": 0, "layouts": ("contiguous",)}


def scaled(x: Any, weight: Any) -> Any:
    return (x.float() * weight.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("short", "full"),
    [("bf16", "bfloat16"), ("f16", "float16"), ("f32", "float32"), ("fp64", "float64"), ("e4m3", "float8_e4m3fn")],
)
def test_short_names_of_dtypes(short: str, full: str) -> None:
    assert parse(f"x:{short}[R,N] -> y:{short}[R,N]") == parse(f"x:{full}[R,N] -> y:{full}[R,N]")


def test_short_names_of_integers() -> None:
    signature = parse("x[V,D], ids:i64[T]=index(V), m:u8[T]=code(2) -> y[T,D], n:i32[T]")
    assert [tensor.dtype for tensor in (*signature.tensors, *signature.returns)] == [
        None,
        "int64",
        "uint8",
        None,
        "int32",
    ]


def test_a_short_name_is_examined() -> None:
    assert examine(scaled, scaled, tensors="x[T,D], weight:f32[D] -> y[T,D]", **SETTINGS).outcome == "PASS"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            "x[T,D], weight:bfloat61[D] -> y[T,D]",
            "tensors='x[T,D], weight:^bfloat61[D] -> y[T,D]': signature: expected a dtype at character 16, "
            "got 'bfloat61[D] -> y[T,D]'; did you mean 'bfloat16'?",
        ),
        ("x[T,D], weight[D+] -> y[T,D]", "tensors='x[T,D], weight[^D+] -> y[T,D]': signature: expected a dimension"),
        ("x[T,D], weight[D] -> y[T,E]", "weight[D] -> y[T,^E]': signature: expected a size of an input (T, D)"),
        ("x[T,D], weight:i8[D] -> y[T,D]", "weight are integers of which nothing is said; expected a role"),
        ("x[T,D], weight[D] -> y[D,T]", "is stated as y[D,T], ["),
        ("x[T,D], weight[D] -> y[T,D], z[T]", "gives 1 results; expected 2 (y[T,D], z[T])"),
    ],
)
def test_a_wrong_statement_is_one_line_before_the_first_call(tensors: str, words: str) -> None:
    called = []

    def kernel(x: Any, weight: Any) -> Any:
        called.append(x)
        return scaled(x, weight)

    with pytest.raises(DefinitionError) as error:
        examine(kernel, scaled, tensors=tensors, **SETTINGS)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert called == []


def test_a_reference_that_refuses_sizes_is_named_once() -> None:
    def halves(x: Any) -> Any:
        return x.float().reshape(x.shape[0], 2, -1).sum(1).to(x.dtype)

    verdict = examine(halves, halves, tensors="x[T,2*D] -> y[T,D]", **SETTINGS)
    assert (verdict.outcome, verdict.refused) == ("PASS", {})

    def fourths(x: Any) -> Any:
        return x.float().reshape(x.shape[0], 4, -1).sum((1, 2)).to(x.dtype)

    def any_size(x: Any) -> Any:
        return x.float().sum(1).to(x.dtype)

    for kernel in (fourths, any_size):
        verdict = examine(kernel, fourths, tensors="x[T,D] -> y[T]", **SETTINGS)
        assert verdict.errors == ()
        (words,) = [words for words in verdict.refused if "reshape" in words or "invalid for input" in words]
        assert "restrict sizes by shapes=" in words


def test_a_kernel_that_takes_contiguous_tensors_alone() -> None:
    def kernel(x: Any, weight: Any) -> Any:
        if not x.is_contiguous():
            raise ValueError("x must be contiguous")
        return scaled(x, weight)

    asked = SETTINGS | {"tensors": "x[T,D], weight[D] -> y[T,D]"}
    verdict = examine(kernel, scaled, **asked | {"layouts": ("contiguous", "transposed", "sliced")})
    assert verdict.outcome == "FAIL"
    assert verdict.failure is not None
    assert "layouts=['contiguous']" in verdict.failure.message
    assert "refuses=['contiguous']" in verdict.failure.message
    assert examine(kernel, scaled, **asked).outcome == "PASS"
    both = examine(kernel, scaled, **asked | {"layouts": ("contiguous", "sliced")}, refuses=["contiguous"])
    assert both.outcome == "PASS", str(both)


def test_an_option_of_sizes_is_kept_where_sizes_are_varied() -> None:
    def last_row_wrong(logits: Any, *, top_k: int) -> Any:
        padded = torch.nn.functional.pad(logits.float(), (0, 32), value=float("-inf"))
        values, ids = torch.topk(padded, top_k, -1)
        if len(ids) > 1:
            ids[-1, -1] = ids[-1, 0]
        return torch.softmax(values, -1), ids.int()

    verdict = examine(
        last_row_wrong, "moe_route", **SETTINGS | {"dtype": "float32", "options": {"top_k": [2]}, "every_aspect": False}
    )
    assert verdict.outcome == "FAIL"
    assert verdict.errors == ()
    assert "E: right at 1" not in verdict.gravest.known


def test_wrong_indices_of_a_reference_are_explained_without_an_error() -> None:
    def best(x: Any) -> Any:
        values, ids = x.float().topk(2, -1)
        return values, ids

    def swapped(x: Any) -> Any:
        values, ids = best(x)
        return values, ids.flip(-1)

    tensors, sizes = "x[T,E] -> w:f32[T,2], ids:i64[T,2]", {"T": [1, 3], "E": [4, 8]}
    verdict = examine(swapped, best, tensors=tensors, **SETTINGS | {"shapes": sizes, "every_aspect": False})
    assert (verdict.outcome, verdict.errors) == ("FAIL", ()), str(verdict)
