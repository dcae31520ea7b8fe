"""MLX: a program that converts a model with mlx-lm 0.32, with each layer quantised as assigned.

mlx_lm takes parameters per layer only from a Python function, so the export is a program that calls it.
"""

import ast
from collections.abc import Mapping
from typing import Any

import torch

from assay.precision.export.plan import Recipe, Request, Target, of_linears, plan_of
from assay.precision.observation.sites import Site
from assay.precision.schemes import Scheme

_MODES = {"w-mxfp4": ("mxfp4", 32), "w-nvfp4": ("nvfp4", 16)}
_LEAST = 32
"""mlx_lm quantises only layers whose rows are a multiple of this number of columns."""

_PROGRAM = '''"""Quantises each layer as an audit chose: mlx-lm, on a machine with MLX."""

from mlx_lm import convert

LAYERS = {{
{layers}}}

convert(
    {model!r},
    "mlx_model",
    quantize=True,
    q_group_size={least},
    quant_predicate=lambda path, module: LAYERS.get(path, False),
)
'''


def quant_predicate(
    assignment: Mapping[str, str], sites: Mapping[str, Site], dtype: torch.dtype = torch.bfloat16
) -> Recipe:
    """Return the values of mlx_lm's ``quant_predicate`` for each linear and embedding path; False for others.

    MLX searches its own scales and biases. Raises CannotExport and UnknownScheme as `plan_of` does.
    """
    plan = plan_of(assignment, sites, dtype, tables=lambda scheme, tied: "")
    layers = plan.expressed(parameters_of)
    plan.note_caches("mlx_lm takes a quantised cache where it generates, not from a file")
    for name in [name for name in layers if sites[name].shape[-1] % _LEAST]:
        plan.note(name, plan.linears[name].name, f"MLX quantises rows of a multiple of {_LEAST}")
        del layers[name]
    return plan.recipe({"layers": layers}, layers)


def layers_in(program: str) -> dict[str, dict[str, Any]]:
    """Return the parameters of each layer in such a program without running it. Raises ValueError if it has none."""
    for line in ast.parse(program).body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "LAYERS":
            return dict(ast.literal_eval(line.value))
    raise ValueError("expected LAYERS in it, got none: export anew")


def parameters_of(scheme: Scheme) -> tuple[dict[str, Any] | None, str]:
    """Return MLX's parameters for a scheme, or None and the reason."""
    weight = scheme.weight
    if scheme.name in _MODES:
        mode, size = _MODES[scheme.name]
        return {"group_size": size, "bits": 4, "mode": mode}, ""
    if (
        weight is None
        or scheme.activation is not None
        or weight.per != "group"
        or weight.element.kind != "integer"
        or weight.blocks is not None
        or weight.symmetric
        or weight.rule != "absmax"
    ):
        return None, "MLX has groups of integers with a bias (-asym), MXFP4 and NVFP4, of weights alone"
    return {"group_size": weight.size, "bits": weight.element.bits, "mode": "affine"}, ""


def _files(request: Request, recipe: Recipe) -> dict[str, str]:
    layers = "".join(f"    {name!r}: {each!r},\n" for name, each in recipe.content["layers"].items())
    return {"mlx_convert.py": _PROGRAM.format(layers=layers, model=request.model, least=_LEAST)}


TARGET = Target(
    lambda request: quant_predicate(request.assignment, request.sites, request.dtype),
    _files,
    of_linears(lambda scheme: parameters_of(scheme)[1]),
    unfused=True,
    tables=True,
)
