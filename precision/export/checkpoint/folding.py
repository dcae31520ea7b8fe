"""Folding of a weight's column factors into the preceding module: a norm's weight, or the rows of another linear.

AWQ and SmoothQuant store W diag(c), which needs the input divided by c. If the input is a norm's output, c divides the
norm's weight; if it is v_proj's (attention averages its rows) or up_proj's (an elementwise product), c divides the rows
of that linear. The result is checked by running the model with and without the factors.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from assay.configs.architectures import norms_before, producers
from assay.precision.errors import CannotExport

_AGREES = 1e-4
"""Allowed relative difference in float32 between logits of two equivalent computations."""


@dataclass(slots=True)
class Folded:
    """Changes that remove the column factors from the inputs."""

    vectors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Norm weights and biases, by parameter name."""
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    """Divisors of the rows of a linear's weight, [N], by the linear's name."""


def folded(
    model: torch.nn.Module,
    columns: Mapping[str, torch.Tensor],
    rigid: Collection[str] = (),
    refused: dict[str, str] | None = None,
) -> Folded:
    """Fold the factors [K] of linears, by name. Raises CannotExport if the model has no parameter to fold them into.

    rigid: linears whose scales can't be divided. refused: if given, collects linears that can't be folded, with the
    reason, instead of raising.
    """
    result = Folded()
    done: set[str] = set()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, factors in columns.items():
        if name in done:
            continue
        block, _, last = name.rpartition(".")
        try:
            if last in producers():
                _into_linear(model, f"{block}.{producers()[last]}", name, factors, parameters, result, rigid)
            else:
                done |= _into_norm(model, name, columns, parameters, result)
        except CannotExport as error:
            if refused is None:
                raise
            whole = [name]
            if last not in producers():  # and all others that take their input from the norm before this block
                inside = (each.rpartition(".")[2] for each in columns)
                beside = zip(columns, inside, strict=True)
                whole += [each for each, own in beside if each.startswith(f"{block}.") and own not in producers()]
            done.update(whole)
            refused |= dict.fromkeys(whole, str(error).partition(": ")[2])
    left = {name: factors for name, factors in columns.items() if name not in (refused or ())}
    if not left:
        return Folded()
    try:
        _check(model, left, result)
    except CannotExport as error:
        if refused is None:
            raise
        refused |= dict.fromkeys(left, str(error).partition(": ")[2])
        return Folded()
    return result


def _into_norm(
    model: torch.nn.Module,
    name: str,
    columns: Mapping[str, torch.Tensor],
    parameters: Collection[str],
    result: Folded,
) -> set[str]:
    """Divide the weight of the norm before a linear's block by the factors that all of its readers share."""
    block = name.rpartition(".")[0]
    above = block.rpartition(".")[0]
    norm = next((f"{above}.{name}" for name in norms_before(block) if f"{above}.{name}.weight" in parameters), None)
    if norm is None:
        raise CannotExport(
            f"{block or name}: column factors need a norm before it, and none is known; take a scheme without them"
        )
    takers = [
        f"{block}.{name}"
        for name, module in model.get_submodule(block).named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] not in producers()
    ]
    given = [columns.get(taker) for taker in takers]
    first = next(factors for factors in given if factors is not None)
    if any(factors is None or not torch.equal(factors, first) for factors in given):
        names = ", ".join(taker.rpartition(".")[2] for taker in takers)
        raise CannotExport(
            f"{block}: {names} take one input, so its column factors must be one and the same; these differ"
        )
    for parameter, values in model.get_submodule(norm).named_parameters(recurse=False):
        result.vectors[f"{norm}.{parameter}"] = values.detach() / first
    return set(takers)


def _into_linear(
    model: torch.nn.Module,
    producer: str,
    name: str,
    factors: torch.Tensor,
    parameters: Collection[str],
    result: Folded,
    rigid: Collection[str],
) -> None:
    """Divide the rows of the preceding linear by the factors, which heads that share a value head must share."""
    if producer in rigid:
        raise CannotExport(f"{name}: the scales of {producer} can't take its column factors; take another scheme there")
    if f"{producer}.weight" not in parameters:
        raise CannotExport(f"{name}: column factors need {producer} before it; take a scheme without them")
    module = model.get_submodule(producer)
    assert isinstance(module, torch.nn.Linear)
    repeats, rest = divmod(factors.numel(), module.out_features)
    heads = factors
    if repeats != 1 and not rest:  # grouped-query attention: each value head serves several query heads
        size = int(getattr(model.get_submodule(producer.rpartition(".")[0]), "head_dim", module.out_features))
        heads = factors.view(-1, repeats, size)
        if not torch.equal(heads, heads[:, :1].expand_as(heads)):
            raise CannotExport(
                f"{name}: {repeats} query heads share a value head, so their column factors must be one and the same; "
                "these differ"
            )
        heads = heads[:, 0].flatten()
    if heads.numel() != module.out_features:
        raise CannotExport(f"{name}: has {factors.numel()} columns, {producer} {module.out_features} rows")
    result.rows[producer] = heads
    if module.bias is not None:
        result.vectors[f"{producer}.bias"] = module.bias.detach() / heads


def _check(model: torch.nn.Module, columns: Mapping[str, torch.Tensor], result: Folded) -> None:
    """Check that the model's outputs with and without the factors agree."""
    own: Any = getattr(model, "dummy_inputs", {"input_ids": torch.arange(8)[None]})
    device = next(model.parameters()).device
    ids: Any = {name: values.to(device) if isinstance(values, torch.Tensor) else values for name, values in own.items()}
    changed = dict(result.vectors)
    for name in {*columns, *result.rows}:
        weight = model.get_submodule(name).get_parameter("weight").detach()
        weight = weight * columns[name] if name in columns else weight
        changed[f"{name}.weight"] = weight / result.rows[name][:, None] if name in result.rows else weight
    with torch.no_grad():
        before, after = model(**ids)[0], torch.func.functional_call(model, changed, kwargs=ids)[0]
    difference = float((after - before).norm() / before.norm())
    if not difference <= _AGREES:
        raise CannotExport(
            f"{next(iter(columns))}: folding column factors changes the model's output by {difference:.1e} of its "
            "norm, so the model isn't built as its names say; take a scheme without column factors"
        )
