"""A JAX function as a function of torch tensors: its jaxpr, equation by equation, in PyTorch.

So a reference that is written with `jax.numpy`, `jax.nn` or `jax.lax` is evaluated as one that is written with torch,
and every rule, bound and question is shared. Functions that JAX calls by name and for which torch has one with a sharp
bound of its own (`NAMED`), and the softmax that JAX writes out, are computed by that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.golden.errors import MissingOperation
from assay.golden.lowering.jax.primitives import PRIMITIVES, torch_dtype

Tensor = torch.Tensor

NAMED: dict[str, Callable[..., Tensor]] = {
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
}


def from_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of JAX arrays as one of torch tensors, with options as keywords; its results as torch tensors.

    It is traced at each call, for the shapes, dtypes and options of the call; whole numbers are traced too, unless an
    option holds them. Raises `MissingOperation`, which names the line of the reference, where a primitive isn't known.
    """

    def torch_function(*tensors: Tensor, **options: Any) -> Any:
        import jax

        shapes = [
            jax.ShapeDtypeStruct(tuple(x.shape), _jax_dtype(x.dtype))  # type: ignore[no-untyped-call]
            for x in tensors
        ]
        traced, results = jax.make_jaxpr(lambda *x: function(*x, **options), return_shape=True)(*shapes)
        values = run(traced.jaxpr, [constant(value) for value in traced.consts], tensors)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(results), values)

    torch_function.__module__, torch_function.__qualname__ = function.__module__, function.__qualname__
    torch_function.__name__ = getattr(function, "__name__", "reference")
    return torch_function


def _jax_dtype(dtype: torch.dtype) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(str(dtype).removeprefix("torch."))


def constant(value: Any) -> Tensor:
    """An array that a jaxpr holds, as a tensor of its dtype."""
    array, dtype = np.asarray(value), torch_dtype(value.dtype)
    if dtype.is_floating_point and dtype.itemsize < 4:  # which NumPy has as types of its own
        return torch.tensor(array.astype(np.float64).tolist(), dtype=dtype)
    return torch.from_numpy(np.array(array, dtype=str(dtype).removeprefix("torch.")))


def run(jaxpr: Any, constants: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a jaxpr (without its closed-over constants, which are ``constants``)."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= dict(zip(jaxpr.invars, tensors, strict=True))
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}

    def value(atom: Any) -> Tensor:
        return constant_of(atom) if hasattr(atom, "val") else known[atom]

    for equation in jaxpr.eqns:
        rows = _softmax_of(equation, makers)
        if rows is not None:
            results: Any = torch.softmax(value(rows[0]), rows[1])
        else:
            results = _apply(equation, [value(atom) for atom in equation.invars])
        several = equation.primitive.multiple_results
        for variable, result in zip(equation.outvars, results if several else [results], strict=True):
            known[variable] = result
    return [value(atom) for atom in jaxpr.outvars]


def constant_of(literal: Any) -> Tensor:
    """The scalar that stands in an equation, in its dtype."""
    dtype = torch_dtype(literal.aval.dtype)
    return torch.tensor(literal.val.item() if hasattr(literal.val, "item") else literal.val, dtype=dtype)


def _apply(equation: Any, operands: Sequence[Tensor]) -> Any:
    name, parameters = equation.primitive.name, dict(equation.params)
    if name in CALLS:
        try:
            return CALLS[name](operands, **parameters)
        except MissingOperation as error:  # what JAX's own functions ask for has no line, their call has
            raise MissingOperation(f"{line_of(equation) if str(error).startswith(': ') else ''}{error}") from None
    if name not in PRIMITIVES:
        raise MissingOperation(f"{line_of(equation)}: {_refusal(name)}")
    for key in ("reduce", "cum", "arg", "scatter"):
        if name.startswith(key):
            parameters["primitive"] = name
    try:
        return PRIMITIVES[name](*operands, **parameters)
    except NotImplementedError as error:
        raise MissingOperation(f"{line_of(equation)}: {name}: {error}; write it another way") from None


def _refusal(name: str) -> str:
    if name.startswith(("random", "threefry", "rng")):
        return f"{name} draws random numbers; take them as a tensor"
    if name == "pallas_call":
        return "a Pallas kernel is no reference; write it with jax.numpy"
    return f"{name} has no lowering rule; add one in assay.golden.lowering.jax.primitives: @primitive({name!r})"


def line_of(equation: Any) -> str:
    """Where a reference asks for an equation: file and line."""
    from jax._src import source_info_util

    return source_info_util.summarize(equation.source_info)


def _softmax_of(equation: Any, makers: Mapping[Any, Any]) -> tuple[Any, int] | None:
    """x and the axis, where the equation is e / sum e with e = exp(x - max x), as `jax.nn.softmax` has it.

    Both the maximum and the sum stand for the row that they are of: put back along another axis they are no softmax.
    """
    if equation.primitive.name != "div":
        return None
    above, below = equation.invars
    summed, back = _made_by(below, makers, "reduce_sum", through=("broadcast_in_dim",))
    exponential, _ = _made_by(above, makers, "exp")
    if summed is None or exponential is None or summed.invars[0] is not above or len(summed.params["axes"]) != 1:
        return None
    difference, _ = _made_by(exponential.invars[0], makers, "sub")
    if difference is None:
        return None
    x, axis = difference.invars[0], summed.params["axes"][0]
    through = ("stop_gradient", "broadcast_in_dim", "max")
    most, also = _made_by(difference.invars[1], makers, "reduce_max", through=through)
    if most is None or most.invars[0] is not x or tuple(most.params["axes"]) != (axis,):
        return None
    own = [place for place in range(len(x.aval.shape)) if place != axis]
    return (x, axis) if own == _places(own, back) == _places(own, also) else None


def _made_by(atom: Any, makers: Mapping[Any, Any], name: str, through: Sequence[str] = ()) -> tuple[Any, list[Any]]:
    """The equation of that name that made an atom, None where another did; and those seen through, the last first."""
    passed: list[Any] = []
    while not hasattr(atom, "val") and atom in makers:
        equation = makers[atom]
        if equation.primitive.name == name:
            return equation, passed
        if equation.primitive.name not in through or (equation.primitive.name == "max" and not _with_least(equation)):
            return None, passed
        passed.append(equation)
        atom = equation.invars[-1] if equation.primitive.name == "max" else equation.invars[0]
    return None, passed


def _places(axes: Sequence[int], passed: Sequence[Any]) -> list[int]:
    """Along which axes those that are left of a reduction come to lie where it is put back."""
    places = list(range(len(axes)))
    for equation in reversed(passed):
        if equation.primitive.name == "broadcast_in_dim":
            places = [equation.params["broadcast_dimensions"][place] for place in places]
    return places


def _with_least(equation: Any) -> bool:
    """Whether it is the maximum with minus infinity, which changes nothing."""
    return hasattr(equation.invars[0], "val") and float(equation.invars[0].val) == -np.inf


def _closed(jaxpr: Any, operands: Sequence[Tensor]) -> list[Tensor]:
    """A jaxpr, with or without closed-over constants, applied."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return run(inner, [constant(value) for value in getattr(jaxpr, "consts", ())], operands)


def _call(operands: Sequence[Tensor], **parameters: Any) -> list[Tensor]:
    jaxpr = next(parameters[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in parameters)
    name = str(parameters.get("name", "")) if _is_own(jaxpr) else ""
    if name == "log_softmax":
        axes = next(part.params["axes"] for part in jaxpr.eqns if part.primitive.name == "reduce_max")
        return [torch.log_softmax(operands[0], axes[0])] if len(axes) == 1 else _closed(jaxpr, operands)
    if name in NAMED and len(jaxpr.out_avals) == 1 and all(x.is_floating_point() for x in operands):
        return [NAMED[name](*operands)]
    return _closed(jaxpr, operands)


def _is_own(jaxpr: Any) -> bool:
    """Whether a function is one of JAX itself, and not a reference's of the same name."""
    import jax

    source = getattr(getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None), "func_src_info", None)
    return f" at {Path(jax.__file__).parent}{os.sep}" in str(source)


def _cond(operands: Sequence[Tensor], *, branches: Sequence[Any], **_: Any) -> list[Tensor]:
    place = min(max(int(operands[0]), 0), len(branches) - 1)
    return _closed(branches[place], operands[1:])


def _while(
    operands: Sequence[Tensor], *, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int, **_: Any
) -> list[Tensor]:
    asked, done = operands[:cond_nconsts], operands[cond_nconsts : cond_nconsts + body_nconsts]
    state = list(operands[cond_nconsts + body_nconsts :])
    while bool(_closed(cond_jaxpr, [*asked, *state])[0]):
        state = _closed(body_jaxpr, [*done, *state])
    return state


def _scan(
    operands: Sequence[Tensor], *, jaxpr: Any, length: int, num_consts: int, num_carry: int, reverse: bool, **_: Any
) -> list[Tensor]:
    constants, state = operands[:num_consts], list(operands[num_consts : num_consts + num_carry])
    rows = operands[num_consts + num_carry :]
    parts: list[list[Tensor]] = []
    steps = reversed(range(length)) if reverse else range(length)
    for step in steps:
        results = _closed(jaxpr, [*constants, *state, *(row[step] for row in rows)])
        state = results[:num_carry]
        parts.append(results[num_carry:])
    if reverse:
        parts.reverse()
    if not parts:
        like = jaxpr.out_avals[num_carry:]
        return [*state, *(torch.empty((0, *part.shape), dtype=torch_dtype(part.dtype)) for part in like)]
    return [*state, *(torch.stack(column) for column in zip(*parts, strict=True))]


_SUBROUTINES = (
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat2 remat"
)
CALLS: dict[str, Callable[..., list[Tensor]]] = dict.fromkeys(_SUBROUTINES.split(), _call)
"""Equations that hold jaxprs."""
CALLS |= {"cond": _cond, "while": _while, "scan": _scan}
