"""A JAX function as a function of torch tensors: its jaxpr, equation by equation, in PyTorch.

So references that are written with `jax.numpy`, `jax.nn` or `jax.lax` share the lowering rules of PyTorch's operations.
Functions that JAX calls by name and for which torch has one with a sharp error bound (`NAMED`), and the softmax that
JAX writes out, are computed by PyTorch's function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.golden.errors import MissingOperation
from assay.golden.lowering.jax_primitives import PRIMITIVES, torch_dtype

Tensor = torch.Tensor

NAMED: dict[str, Callable[..., Tensor]] = {"silu": torch.nn.functional.silu, "softplus": torch.nn.functional.softplus}


def from_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of JAX arrays as one of torch tensors; its options stay keywords.

    It is traced at each call, for the shapes, dtypes and options of the call; integers are traced too, unless they are
    options. Raises `MissingOperation`, which names the line of the reference, for an unknown primitive.
    """

    def torch_function(*tensors: Tensor, **options: Any) -> Any:
        import jax
        import jax.numpy as jnp

        shapes = [
            jax.ShapeDtypeStruct(tuple(x.shape), jnp.dtype(str(x.dtype).removeprefix("torch.")))  # type: ignore[no-untyped-call]
            for x in tensors
        ]
        closed, results = jax.make_jaxpr(lambda *x: function(*x, **options), return_shape=True)(*shapes)
        values = _run_closed(closed, tensors)
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(results), values)

    torch_function.__module__, torch_function.__qualname__ = function.__module__, function.__qualname__
    torch_function.__name__ = getattr(function, "__name__", "reference")
    return torch_function


def _constant(value: Any) -> Tensor:
    """Return an array that a jaxpr holds as a tensor of its dtype."""
    array, dtype = np.asarray(value), torch_dtype(value.dtype)
    if dtype.is_floating_point and dtype.itemsize < 4:  # torch.from_numpy doesn't know ml_dtypes' scalar types
        return torch.tensor(array.astype(np.float64).tolist(), dtype=dtype)
    return torch.from_numpy(np.array(array, dtype=str(dtype).removeprefix("torch.")))


def _literal(literal: Any) -> Tensor:
    dtype = torch_dtype(literal.aval.dtype)
    return torch.tensor(literal.val.item() if hasattr(literal.val, "item") else literal.val, dtype=dtype)


def _run_closed(jaxpr: Any, operands: Sequence[Tensor]) -> list[Tensor]:
    """Run a jaxpr, with or without closed-over constants."""
    return _run(getattr(jaxpr, "jaxpr", jaxpr), [_constant(value) for value in getattr(jaxpr, "consts", ())], operands)


def _run(jaxpr: Any, constants: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    env |= dict(zip(jaxpr.invars, tensors, strict=True))
    producers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}

    def value(atom: Any) -> Tensor:
        return _literal(atom) if hasattr(atom, "val") else env[atom]

    for equation in jaxpr.eqns:
        softmax = _match_softmax(equation, producers)
        if softmax is not None:
            results: Any = torch.softmax(value(softmax[0]), softmax[1])
        else:
            results = _apply(equation, [value(atom) for atom in equation.invars])
        several = equation.primitive.multiple_results
        env |= dict(zip(equation.outvars, results if several else [results], strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, operands: Sequence[Tensor]) -> Any:
    name, parameters = equation.primitive.name, dict(equation.params)
    if name in CALLS:
        try:
            return CALLS[name](operands, **parameters)
        except MissingOperation as error:  # equations of JAX's own functions have no line, but their call has
            raise MissingOperation(f"{_line_of(equation) if str(error).startswith(': ') else ''}{error}") from None
    if name not in PRIMITIVES:
        raise MissingOperation(f"{_line_of(equation)}: {_why_unsupported(name)}")
    if name.startswith(("reduce", "cum", "arg", "scatter")):
        parameters["primitive"] = name
    try:
        return PRIMITIVES[name](*operands, **parameters)
    except NotImplementedError as error:
        raise MissingOperation(f"{_line_of(equation)}: {name}: {error}; write it another way") from None


def _why_unsupported(name: str) -> str:
    if name.startswith(("random", "threefry", "rng")):
        return f"{name} draws random numbers; take them as a tensor"
    if name == "pallas_call":
        return "a Pallas kernel is no reference; write it with jax.numpy"
    return f"{name} has no lowering rule; add one in assay.golden.lowering.jax_primitives: @primitive({name!r})"


def _line_of(equation: Any) -> str:
    from jax._src import source_info_util

    return source_info_util.summarize(equation.source_info)


def _match_softmax(equation: Any, producers: Mapping[Any, Any]) -> tuple[Any, int] | None:
    """Match e / sum e with e = exp(x - max x), as `jax.nn.softmax` has it; return x and the axis.

    Maximum and sum must be broadcast back along the axis that they reduce: along another it is no softmax.
    """
    if equation.primitive.name != "div":
        return None
    numerator, denominator = equation.invars
    total, total_path = _producer(denominator, producers, "reduce_sum", through=("broadcast_in_dim",))
    exponential, _ = _producer(numerator, producers, "exp")
    if total is None or exponential is None or total.invars[0] is not numerator or len(total.params["axes"]) != 1:
        return None
    difference, _ = _producer(exponential.invars[0], producers, "sub")
    if difference is None:
        return None
    x, axis = difference.invars[0], total.params["axes"][0]
    through = ("stop_gradient", "broadcast_in_dim", "max")
    maximum, maximum_path = _producer(difference.invars[1], producers, "reduce_max", through=through)
    if maximum is None or maximum.invars[0] is not x or tuple(maximum.params["axes"]) != (axis,):
        return None
    axes = [a for a in range(len(x.aval.shape)) if a != axis]
    return (x, axis) if axes == _broadcast_axes(axes, total_path) == _broadcast_axes(axes, maximum_path) else None


def _producer(atom: Any, producers: Mapping[Any, Any], name: str, through: Sequence[str] = ()) -> tuple[Any, list[Any]]:
    """Return the equation of that name that produced an atom, or None, and those passed through, the last first."""
    passed: list[Any] = []
    while not hasattr(atom, "val") and atom in producers:
        equation = producers[atom]
        if equation.primitive.name == name:
            return equation, passed
        is_max = equation.primitive.name == "max"
        if equation.primitive.name not in through or (is_max and not _is_max_with_minus_infinity(equation)):
            return None, passed
        passed.append(equation)
        atom = equation.invars[-1] if is_max else equation.invars[0]
    return None, passed


def _broadcast_axes(axes: Sequence[int], passed: Sequence[Any]) -> list[int]:
    """Return to which axes those that a reduction leaves are broadcast back."""
    targets = list(range(len(axes)))
    for equation in reversed(passed):
        if equation.primitive.name == "broadcast_in_dim":
            targets = [equation.params["broadcast_dimensions"][target] for target in targets]
    return targets


def _is_max_with_minus_infinity(equation: Any) -> bool:
    return hasattr(equation.invars[0], "val") and float(equation.invars[0].val) == -np.inf


def _call(operands: Sequence[Tensor], **parameters: Any) -> list[Tensor]:
    jaxpr = next(parameters[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in parameters)
    name = str(parameters.get("name", "")) if _is_of_jax(jaxpr) else ""
    if name == "log_softmax":
        axes = next(part.params["axes"] for part in jaxpr.eqns if part.primitive.name == "reduce_max")
        return [torch.log_softmax(operands[0], axes[0])] if len(axes) == 1 else _run_closed(jaxpr, operands)
    if name in NAMED and len(jaxpr.out_avals) == 1 and all(x.is_floating_point() for x in operands):
        return [NAMED[name](*operands)]
    return _run_closed(jaxpr, operands)


def _is_of_jax(jaxpr: Any) -> bool:
    """Whether a function is JAX's own and not a reference's of the same name."""
    import jax

    source = getattr(getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None), "func_src_info", None)
    return f" at {Path(jax.__file__).parent}{os.sep}" in str(source)


def _cond(operands: Sequence[Tensor], *, branches: Sequence[Any], **_: Any) -> list[Tensor]:
    index = min(max(int(operands[0]), 0), len(branches) - 1)
    return _run_closed(branches[index], operands[1:])


def _while(
    operands: Sequence[Tensor], *, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int, **_: Any
) -> list[Tensor]:
    split = cond_nconsts + body_nconsts
    cond_constants, body_constants, state = operands[:cond_nconsts], operands[cond_nconsts:split], operands[split:]
    while bool(_run_closed(cond_jaxpr, [*cond_constants, *state])[0]):
        state = _run_closed(body_jaxpr, [*body_constants, *state])
    return list(state)


def _scan(
    operands: Sequence[Tensor], *, jaxpr: Any, length: int, num_consts: int, num_carry: int, reverse: bool, **_: Any
) -> list[Tensor]:
    constants, carry = operands[:num_consts], list(operands[num_consts : num_consts + num_carry])
    inputs = operands[num_consts + num_carry :]
    outputs: list[list[Tensor]] = []
    for step in reversed(range(length)) if reverse else range(length):
        results = _run_closed(jaxpr, [*constants, *carry, *(x[step] for x in inputs)])
        carry = results[:num_carry]
        outputs.append(results[num_carry:])
    if reverse:
        outputs.reverse()
    if not outputs:
        like = jaxpr.out_avals[num_carry:]
        return [*carry, *(torch.empty((0, *part.shape), dtype=torch_dtype(part.dtype)) for part in like)]
    return [*carry, *(torch.stack(parts) for parts in zip(*outputs, strict=True))]


_SUBROUTINES = (
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat2 remat"
)
CALLS: dict[str, Callable[..., list[Tensor]]] = dict.fromkeys(_SUBROUTINES.split(), _call)
"""Primitives whose parameters hold jaxprs."""
CALLS |= {"cond": _cond, "while": _while, "scan": _scan}
