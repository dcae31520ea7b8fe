"""Faults of kernels that have a reference: common mistakes at each of its operations.

Each is the reference with one operation altered, described with that operation and its line. Such faults name no op:
`of_reference` derives them from a small call of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from assay.golden.evaluation.call import run
from assay.golden.lowering.alteration import CallSite, Change, altered, call_sites
from assay.golden.registry import Spec, spec
from assay.runtime.errors import AssayError
from assay.verify.cases.case import all_contents
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.single import Single

_TRIES = 8  # random cases: some have a size below 2, or are refused
_Alteration = tuple[str, str, str, Change]  # name, family, words, what is computed instead


def of_reference(op: Spec) -> tuple[FaultModel, ...]:
    """Return the faults of a reference's operations; none if no small call of it succeeds."""
    return _of(op.qualified_name, op.version)


@cache
def _of(reference: str, version: int) -> tuple[FaultModel, ...]:
    op, result = spec(reference), []
    for number, (site, (args, kwargs)) in enumerate(_call_sites(op).items(), 1):
        for name, family, words, change in _alterations(site.operation, args, kwargs):
            result.append(
                FaultModel(
                    f"{name}_{number}",
                    family,
                    f"{words} ({site})",
                    (op.name,),
                    definition=altered(op.definition, site, change),
                )
            )
    return tuple(result)


def _call_sites(op: Spec) -> dict[CallSite, tuple[Any, Any]]:
    """Return the reference's operations in a small case."""
    sampler = Sampler(op, "float32")
    for seed in range(_TRIES):
        case = sampler.case(seeded(seed), style="small")
        if min(case.sizes.values(), default=2) < 2 and seed < _TRIES - 1:
            continue
        values = list(all_contents(case).values())

        def call(recording: Any, values: list[Any] = values, case: Any = case) -> Any:
            return run(replace(op, definition=recording), Single(), values, case.options)

        try:
            return call_sites(op.definition, call)
        except AssayError:
            continue
    return {}


def _alterations(operation: Any, args: Any, kwargs: Any) -> Iterator[_Alteration]:
    """Yield the alterations of an operation with such arguments."""
    name = operation._schema.name.partition("::")[2].removesuffix("_")
    for names, alterations in _TABLE.items():
        if name in names.split():
            for title, family, words, change in alterations(args, kwargs):
                yield title, family, words.replace("the function", name.strip("_")), change


def _is_tensor(args: Any, index: int) -> bool:
    return len(args) > index and isinstance(args[index], torch.Tensor)


def _alike(args: Any) -> bool:
    return _is_tensor(args, 1) and args[0].shape == args[1].shape


def _nothing(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0


def _one(x: Any) -> Any:
    return torch.ones_like(x) if isinstance(x, torch.Tensor) else 1


def _sums(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    second = "the second term" if _is_tensor(args, 1) else f"{args[1]:g}" if len(args) > 1 else "the term"
    yield ("term_left_out", "formula", f"{second} is left out", lambda f, x, y, **k: f(x, _nothing(y), **k))
    yield ("term_subtracted", "formula", f"{second} has the other sign", lambda f, x, y, **k: f(x, -y, **k))
    if _is_tensor(args, 1):
        yield ("first_term_left_out", "formula", "the first term is left out",
               lambda f, x, y, **k: f(_nothing(x), y, **k))  # fmt: skip
        yield ("term_doubled", "formula", "the second term is added twice", lambda f, x, y, **k: f(x, 2 * y, **k))


def _products(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    second = "the second factor" if _is_tensor(args, 1) else f"the factor {args[1]:g}"
    yield ("factor_left_out", "scale", f"{second} is left out", lambda f, x, y: f(x, _one(y)))
    if _is_tensor(args, 1):
        yield ("first_factor_left_out", "scale", "the first factor is left out", lambda f, x, y: f(_one(x), y))
        yield ("factor_squared", "scale", "the second factor comes twice", lambda f, x, y: f(x, y * y))


def _quotients(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    second = "the divisor" if _is_tensor(args, 1) else f"the divisor {args[1]:g}"
    yield ("divisor_left_out", "scale", f"{second} is left out", lambda f, x, y, **k: f(x, _one(y), **k))
    yield ("multiplied", "scale", f"{second} multiplies", lambda f, x, y, **k: x * y)
    if _alike(args):
        yield ("operands_swapped", "formula", "the operands are swapped", lambda f, x, y, **k: f(y, x, **k))


def _axes(x: Any, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.ndim))
    return [axis % max(x.ndim, 1) for axis in (dim if isinstance(dim, (list, tuple)) else [dim])]


def _shortened(x: Any, dim: Any) -> Any:
    """Return x without the last element along the last of the axes."""
    axes = _axes(x, dim)
    return x.narrow(axes[-1], 0, x.shape[axes[-1]] - 1) if axes and x.shape[axes[-1]] > 1 else x


def _count(x: Any, dim: Any) -> int:
    count = 1
    for axis in _axes(x, dim):
        count *= int(x.shape[axis])
    return count


def _tail(f: Any, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    short = _shortened(x, dim)
    return f(short, *args, **kwargs) if dim is None else f(short, dim, *args, **kwargs)


def _other_axis(f: Any, x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Apply f along the previous axis, if the two have the same size."""
    axes = _axes(x, dim)
    other = axes[-1] - 1 if axes else -1
    if len(axes) != 1 or other < 0 or x.shape[other] != x.shape[axes[0]]:
        return f(x, dim, *args, **kwargs)
    return f(x, [other] if isinstance(dim, (list, tuple)) else other, *args, **kwargs)


def _reductions(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    yield ("last_left_out", "tail", "the last element is left out", _tail)
    yield ("other_axis", "formula", "it runs along the axis before", _other_axis)


def _means(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    def scaled(factor: Callable[[int], float], short: bool = False) -> Change:
        def change(f: Any, x: Any, dim: Any = None, *rest: Any, **k: Any) -> Any:
            taken, count = (_shortened(x, dim) if short else x), _count(x, dim)
            result = f(taken, *rest, **k) if dim is None else f(taken, dim, *rest, **k)
            return result * (factor(count) * (_count(taken, dim) / count if short else 1.0))

        return change

    yield ("not_divided", "scale", "the sum is not divided by the number of terms", scaled(float))
    yield ("divided_by_one_less", "scale", "the sum is divided by one less", scaled(lambda n: n / max(n - 1, 1)))
    yield ("last_left_out", "tail", "the last term is left out, and counted", scaled(lambda n: 1.0, short=True))
    yield ("other_axis", "formula", "it runs along the axis before", _other_axis)


def _extremes(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    yield from _reductions(args, kwargs)
    if len(args) < 2 or isinstance(args[1], (list, tuple)):
        yield ("starts_at_zero", "formula", "the running maximum starts at zero",
               lambda f, *a, **k: f(*a, **k).clamp(min=0))  # fmt: skip


def _along(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    def other(f: Any, x: Any, dim: int, *rest: Any, **k: Any) -> Any:
        return f(x, dim % x.ndim - 1, *rest, **k) if x.ndim > 1 else f(x, dim, *rest, **k)

    yield ("other_axis", "formula", "it runs along the axis before", other)


def _running(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    yield from _along(args, kwargs)
    yield ("exclusive", "formula", "each sum leaves out its own element", lambda f, x, d, **k: f(x, d, **k) - x)
    yield ("reversed", "formula", "it runs from the end", lambda f, x, d, **k: f(x.flip(d), d, **k).flip(d))


def _variances(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    def other(f: Any, x: Any, dim: Any = None, *, correction: Any = None, **k: Any) -> Any:
        return f(x, dim, correction=0 if correction is None or correction else 1, **k)

    yield (
        "other_correction",
        "scale",
        "it is divided by the number of terms instead of one less, or the reverse",
        other,
    )


def _norms(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    def without(index: int) -> Change:
        return lambda f, *a, **k: f(*a[:index], None, *a[index + 1 :], **k)

    if _is_tensor(args, 2):
        yield ("weight_left_out", "scale", "the weight is left out", without(2))
    if _is_tensor(args, 3):
        yield ("bias_left_out", "formula", "the bias is left out", without(3))


def _selections(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    yield ("unmasked", "mask", "the mask is not applied: the first is taken everywhere",
           lambda f, m, x, y: f(torch.ones_like(m), x, y))  # fmt: skip
    yield (
        "masked_everywhere",
        "mask",
        "the second is taken everywhere",
        lambda f, m, x, y: f(torch.zeros_like(m), x, y),
    )
    yield ("mask_inverted", "mask", "the mask is inverted", lambda f, m, x, y: f(~m, x, y))


def _fills(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    yield ("unmasked", "mask", "the mask is not applied", lambda f, x, m, v: f(x, torch.zeros_like(m), v))
    yield ("mask_inverted", "mask", "the mask is inverted", lambda f, x, m, v: f(x, ~m, v))


def _orders(other: Callable[..., Any], words: str) -> Callable[[Any, Any], Iterator[_Alteration]]:
    def alterations(args: Any, kwargs: Any) -> Iterator[_Alteration]:
        yield ("bound_off_by_one", "mask", f"it compares by {words}", lambda f, x, y: other(x, y))

    return alterations


def _matrices(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    def short(f: Any, *operands: Any, **k: Any) -> Any:
        *before, a, b = operands
        inner = a.shape[-1] - 1
        if inner < 1:
            return f(*operands, **k)
        return f(*before, a.narrow(-1, 0, inner), b.narrow(-2 if b.ndim > 1 else -1, 0, inner), **k)

    yield ("last_product_left_out", "tail", "the last product of each sum is left out", short)
    if len(args) == 3:
        yield ("bias_left_out", "formula", "the term that is added is left out",
               lambda f, c, a, b, **k: f(torch.zeros_like(c), a, b, **k))  # fmt: skip
    a, b = args[-2:]
    if a.ndim > 1 and b.ndim > 1 and b.shape[-1] == b.shape[-2]:
        yield ("operand_transposed", "layout", "the second operand is read transposed",
               lambda f, *o, **k: f(*o[:-1], o[-1].transpose(-1, -2), **k) if o[-1].shape[-1] == o[-1].shape[-2]
               else f(*o, **k))  # fmt: skip


def _convolutions(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    if _is_tensor(args, 2):
        yield ("bias_left_out", "formula", "the bias is left out", lambda f, x, w, b, *r: f(x, w, None, *r))
    yield ("kernel_flipped", "formula", "the kernel's window is mirrored",
           lambda f, x, w, *r: f(x, w.flip(tuple(range(2, w.ndim))), *r))  # fmt: skip


def _gelus(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    other = "none" if kwargs.get("approximate", "none") == "tanh" else "tanh"
    words = "it is approximated by tanh" if other == "tanh" else "it is not approximated by tanh"
    yield ("other_approximation", "formula", words, lambda f, x, **k: f(x, approximate=other))
    yield from _functions(args, kwargs)


def _functions(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    yield ("function_left_out", "formula", "the function is left out", lambda f, x, *a, **k: x * 1.0)


def _exponentials(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    yield ("other_base", "formula", "powers of two are taken for those of e", lambda f, x: torch.exp2(x))


def _clamps(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    yield ("unclamped", "formula", "nothing is clamped", lambda f, x, *a, **k: x * 1.0)


def _triangles(args: Any, kwargs: Any) -> Iterator[_Alteration]:
    for shift, words in ((1, "later"), (-1, "earlier")):
        yield (f"diagonal_{words}", "mask", f"the mask begins one diagonal {words}",
               lambda f, x, diagonal=0, shift=shift: f(x, diagonal + shift))  # fmt: skip


_TABLE: dict[str, Callable[[Any, Any], Iterator[_Alteration]]] = {
    "add sub rsub": _sums,
    "mul": _products,
    "div": _quotients,
    "sum logsumexp": _reductions,
    "mean": _means,
    "amax": _extremes,
    "_softmax _log_softmax": _along,
    "cumsum": _running,
    "var std var_mean": _variances,
    "native_layer_norm _fused_rms_norm": _norms,
    "where": _selections,
    "masked_fill": _fills,
    "lt": _orders(torch.le, "<= instead of <"),
    "le": _orders(torch.lt, "< instead of <="),
    "gt": _orders(torch.ge, ">= instead of >"),
    "ge": _orders(torch.gt, "> instead of >="),
    "mm bmm addmm mv": _matrices,
    "convolution": _convolutions,
    "gelu": _gelus,
    "relu sigmoid tanh silu softplus sqrt abs neg square log log1p leaky_relu elu hardtanh": _functions,
    "exp": _exponentials,
    "clamp clamp_min clamp_max": _clamps,
    "tril triu": _triangles,
}
