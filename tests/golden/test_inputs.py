"""Wrong calls of `evaluate`, and wrong definitions: one clear line names what is wrong with what."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from assay.golden import DefinitionError, define, evaluate, spec, specs
from assay.golden.errors import InputError, OptionError, ShapeError, UnknownSpec
from assay.precision import AssayError

NAN, INF = float("nan"), float("inf")
Call = Callable[[], Any]


def of(op: str, *tensors: Any, **options: Any) -> Call:
    return lambda: evaluate(op, *tensors, **options)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def attend(**options: Any) -> Call:
    return of("attention", zeros(1, 2, 3, 4), zeros(1, 1, 3, 4), zeros(1, 1, 3, 4), **options)


def experts(ids: Any, rows: int = 4) -> Call:
    weights = torch.ones(2, 1)
    return of("moe", zeros(2, 3), zeros(2, rows, 3), zeros(2, 3, 2), weights, ids)


def decode(entry: int, length: int, heads: int = 2, *, table: torch.dtype = torch.int32) -> Call:
    """Two pages of four slots and a table of two columns, the second of which holds ``entry``."""
    cache, pages = zeros(2, 4, 2, 3), torch.tensor([[0, entry]]).to(table)
    return of("attention_decode", zeros(1, heads, 3), cache, cache, pages, torch.tensor([length]).int())


def unpacked(inner: int, packed: int, groups: int, zero_points: torch.Tensor) -> Call:
    return of("gemm_int4", zeros(2, inner), codes(packed, 2), zeros(groups, 2), zero_points)


def packed(*offsets: int) -> Call:
    """Four positions of a head, cut at the offsets."""
    x, cuts = zeros(4, 1, 2), torch.tensor(offsets).int()
    return of("attention_varlen", x, x, x, cuts, torch.tensor([0, 1, 2, 4]).int())


IDS = torch.zeros(2, 1, dtype=torch.int32)
WRONG: dict[str, tuple[Call, type[AssayError], tuple[str, ...]]] = {
    "an unknown spec": (of("sofmax", zeros(2, 2)), UnknownSpec, ("'sofmax'", "did you mean 'softmax'")),
    "an unknown option": (
        of("gelu", zeros(2, 2), aproximate="tanh"),
        OptionError,
        ("gelu", "'aproximate'", "did you mean 'approximate'"),
    ),
    "an option of an op without any": (of("silu", zeros(2, 2), eps=1.0), OptionError, ("silu", "'eps'")),
    "a value that is no choice": (attend(causal=True), OptionError, ("attention", "causal=True", "'bottom_right'")),
    "a flag that is a number": (attend(return_lse=1), OptionError, ("return_lse=1", "True or False")),
    "half a window": (attend(window=(1,)), OptionError, ("window=(1,)", "(left, right)")),
    "a window to the wrong side": (attend(window=(-1, 2)), OptionError, ("window=(-1, 2)",)),
    "a window of flags": (attend(window=(True, 2)), OptionError, ("window=(True, 2)",)),
    "a scale that is NaN": (attend(scale=NAN), OptionError, ("scale=nan", "a number")),
    "a softcap of zero": (attend(softcap=0.0), OptionError, ("softcap=0.0", "a positive number")),
    "an eps of zero": (of("rmsnorm", zeros(2, 2), zeros(2), eps=0), OptionError, ("rmsnorm", "eps=0")),
    "an infinite eps": (of("rmsnorm", zeros(2, 2), zeros(2), eps=INF), OptionError, ("eps=inf",)),
    "no experts at all": (of("moe_route", zeros(2, 3), top_k=0), OptionError, ("moe_route", "top_k=0")),
    "a flag for top_k": (of("moe_route", zeros(2, 3), top_k=True), OptionError, ("top_k=True",)),
    "too many experts": (of("moe_route", zeros(2, 3), top_k=5), ShapeError, ("top_k=5", "3 experts")),
    "a tensor missing": (of("gemm", zeros(2, 2)), ShapeError, ("gemm", "2 tensors", "b[K,N]", "got 1")),
    "a tensor too many": (of("softmax", zeros(2, 2), zeros(2)), ShapeError, ("softmax", "x[R,N]", "got 2")),
    "a dimension missing": (of("softmax", zeros(2)), ShapeError, ("x[R,N]", "x of shape (2,)")),
    "no tensor": (of("softmax", None), InputError, ("softmax", "x is no tensor of numbers")),
    "rows of several lengths": (of("exp", [[1, 2], [3]]), InputError, ("exp", "is no tensor of numbers")),
    "sizes at odds": (of("gemm", zeros(2, 3), zeros(4, 2)), ShapeError, ("gemm", "b has K=4", "K=3")),
    "a bias too long": (
        of("layernorm", zeros(2, 3), zeros(3), zeros(4)),
        ShapeError,
        ("layernorm", "bias has N=4", "N=3"),
    ),
    "an odd head": (of("rope", zeros(1, 2, 1, 5), zeros(2, 2), zeros(2, 2)), ShapeError, ("rope", "cos", "D/2", "D=5")),
    "angles for the whole head": (
        of("rope", zeros(1, 2, 1, 4), zeros(2, 4), zeros(2, 4)),
        ShapeError,
        ("rope", "cos has shape (2, 4)", "(2, 2)"),
    ),
    "a scale of another granularity": (
        of("gemm_fp8", zeros(2, 3), zeros(3, 2), zeros(2, 1), zeros(1, 2)),
        ShapeError,
        ("gemm_fp8", "scale_a[]", "(2, 1)"),
    ),
    "too few blocks": (
        of("gemm_fp8", zeros(2, 130), zeros(130, 2), zeros(2, 1), zeros(2, 1), granularity="block"),
        ShapeError,
        ("scale_a has shape (2, 1)", "(2, 2)"),
    ),
    "half a byte": (unpacked(63, 31, 1, codes(1, 2)), ShapeError, ("gemm_int4", "qweight", "K/2", "K=63")),
    "groups that do not fit": (unpacked(64, 32, 3, codes(3, 2)), ShapeError, ("gemm_int4", "scales", "K/g", "K=64")),
    "fewer zeros than scales": (unpacked(64, 32, 2, codes(1, 2)), ShapeError, ("zeros has shape (1, 2)", "(2, 2)")),
    "zero-points that are floats": (
        unpacked(64, 32, 2, zeros(2, 2)),
        InputError,
        ("zeros must be integers", "float32"),
    ),
    "heads that share nothing": (
        of("attention", zeros(1, 3, 3, 4), zeros(1, 2, 3, 4), zeros(1, 2, 3, 4)),
        ShapeError,
        ("attention", "3 query heads", "2 key/value heads"),
    ),
    "sinks promised": (attend(sinks=True), OptionError, ("attention", "sinks[H]", "got none")),
    "slopes promised": (attend(alibi=True), OptionError, ("attention", "slopes[H]", "got none")),
    "slopes unasked for": (attend(slopes=zeros(2)), OptionError, ("attention", "slopes=")),
    "a mask that is no argument": (of("softmax", zeros(2, 2), mask=zeros(2, 2)), OptionError, ("softmax", "mask=")),
    "slopes for other heads": (attend(alibi=True, slopes=zeros(3)), ShapeError, ("slopes has H=3", "H=2")),
    "sinks in a column": (attend(sinks=zeros(2, 1)), ShapeError, ("sinks[H]", "(2, 1)")),
    "float ids": (experts(IDS.float()), InputError, ("moe", "ids must be integers", "float32")),
    "ids that are flags": (experts(IDS.bool()), InputError, ("moe", "ids must be integers", "bool")),
    "ids too large": (experts(IDS + 2), InputError, ("moe", "ids must lie in 0..1", "2..2")),
    "ids below zero": (experts(IDS - 1), InputError, ("moe", "ids must lie in 0..1", "-1..-1")),
    "an odd number of gate and up rows": (experts(IDS, rows=3), ShapeError, ("w_gate_up has shape (2, 3, 3)",)),
    "heads that share no page's": (decode(1, 8, 3), ShapeError, ("attention_decode", "3 query heads", "2 key/value")),
    "more positions than pages": (decode(1, 9), InputError, ("attention_decode", "seq_lens must lie in 0..8", "9..9")),
    "fewer positions than none": (decode(1, -1), InputError, ("seq_lens must lie in 0..8", "-1..-1")),
    "a page that is none": (decode(2, 5), InputError, ("block_table must lie in 0..1", "0..2")),
    "a page below zero": (decode(-1, 8), InputError, ("block_table must lie in 0..1", "-1..0")),
    "a table of floats": (decode(1, 8, table=torch.float32), InputError, ("block_table must be integers", "float32")),
    "complex numbers": (of("softmax", zeros(2, 2) + 1j), InputError, ("softmax", "x must be real")),
    "complex arrays": (of("silu", np.ones((2, 2)) * 1j), InputError, ("silu", "x must be real")),
    "whole numbers that float64 lacks": (
        of("linear", [[2**53 + 1]], [[1]], [-(2**53)]),
        InputError,
        ("linear: x holds whole numbers beyond 2^53",),
    ),
    "offsets that fall": (packed(0, 3, 2, 4), InputError, ("cu_seqlens_q must rise from 0 to 4, got 2 after 3",)),
    "offsets that end early": (packed(0, 1, 2, 3), InputError, ("cu_seqlens_q must rise from 0 to 4, got 0..3",)),
    "sinks in a list": (attend(sinks=[0.1]), OptionError, ("sinks=[0.1]", "True, False or a tensor")),
    "flags": (of("softmax", zeros(2, 2) > 0), InputError, ("x must be real numbers", "bool")),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("digits", [None, 30])
def test_a_wrong_call_gets_one_clear_line(name: str, digits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is of the class that says what to mend, one line long, and names the op's argument and what came."""
    call, kind, parts = WRONG[name]
    monkeypatch.setitem(globals(), "evaluate", lambda *rest, **named: REAL_EVALUATE(*rest, digits=digits, **named))
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    assert [part for part in parts if part not in message] == []


REAL_EVALUATE = evaluate


@pytest.mark.parametrize("entry", [-1, 2, 2**31 - 1])
def test_what_is_not_used_is_not_checked(entry: int) -> None:
    """Behind the last position the table may hold what it likes."""
    assert decode(entry, 4)().value.tolist() == zeros(1, 2, 3).tolist()


@pytest.mark.parametrize("digits", [-3, 0, "30", 30.5, True])
def test_digits_are_a_positive_whole_number(digits: Any) -> None:
    """A number of digits that is none is refused by name."""
    with pytest.raises(OptionError, match="digits"):
        evaluate("softmax", zeros(2, 2), digits=digits)


def test_zero_points_beyond_four_bits_are_refused() -> None:
    """A plain zero-point of 16 or more is none."""
    with pytest.raises(InputError, match="zeros"):
        unpacked(64, 32, 2, codes(2, 2) + 16)()


def test_whole_numbers_up_to_2_53_are_numbers() -> None:
    """What float64 holds exactly is taken as it is, to the last unit."""
    golden = evaluate("linear", [[2**53]], [[1]], [1 - 2**53], digits=30)
    assert not isinstance(golden, tuple)
    assert (golden.value.item(), golden.radius.item()) == (1.0, 0.0)


def test_lists_keep_their_digits() -> None:
    """A list's numbers are taken as the float64 that they are, or not at all."""
    golden = evaluate("gemm", [[0.1]], [[1.0]])
    assert not isinstance(golden, tuple)
    assert golden.value.item() == 0.1


def test_arrays_are_as_good_as_tensors() -> None:
    """NumPy arrays, and tensors that ask for gradients, give the same golden without one."""
    x = np.random.default_rng(0).standard_normal((3, 4))
    golden = evaluate("softmax", x)
    tracked = evaluate("softmax", torch.from_numpy(x).requires_grad_())
    assert not isinstance(golden, tuple)
    assert not isinstance(tracked, tuple)
    assert torch.equal(golden.value, tracked.value)
    assert not tracked.value.requires_grad


@pytest.mark.parametrize("op", specs())
def test_every_spec_tells_its_tensors_options_and_stages(op: str) -> None:
    """Each spec has a signature with tensors and results, defaults that it accepts itself, and a definition."""
    definition = spec(op)
    assert [tensor.name for tensor in definition.tensors]
    assert definition.signature().returns
    assert definition.complete({}) == {name: option.default for name, option in definition.options.items()}
    for name, option in definition.options.items():
        option.check(op, name, option.default)
    assert set(definition.stages.values()) <= {"input", None}
    assert callable(definition.definition)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.full((1, 1), 127, dtype=torch.uint8), r"scale_a must be numbers, got bytes; give codes as .view"),
        (torch.ones(1, 1, device="meta"), "scale_a is no tensor of numbers"),
        (torch.ones(1, 1).to_sparse(), "scale_a is sparse"),
    ],
)
def test_a_scale_that_holds_no_numbers_is_refused(value: torch.Tensor, message: str) -> None:
    """Bytes of codes, tensors without memory and sparse ones: one line says what is expected."""
    a, b = torch.ones(1, 32).to(torch.float8_e4m3fn), torch.ones(32, 1).to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match=message):
        evaluate("gemm_mxfp8", a, b, value, torch.ones(1, 1))


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
