"""Functions that ranks call, importable in their processes: kernels with a fault, gradients, and parts of tensors."""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.kernels.parallel import collectives
from assay.kernels.parallel.collectives import shard
from assay.kernels.parallel.linear import column_parallel_linear, row_parallel_linear
from assay.kernels.parallel.moe import moe_dispatched, moe_reduced

FOLDER = Path(collectives.__file__).parent


def with_fault(file: str, name: str, old: str, new: str, *tensors: Tensor, **options: Any) -> Any:
    """The function ``name`` of kernels/parallel/FILE.py, ``old`` of its source replaced by ``new``."""
    source = (FOLDER / f"{file}.py").read_text(encoding="utf-8")
    if old not in source:
        raise LookupError(f"{file}.py has no {old!r}: the fault can't be planted")
    module = types.ModuleType(f"assay.kernels.parallel.{file}")
    exec(compile(source.replace(old, new), f"faulty {file}", "exec"), vars(module))
    return getattr(module, name)(*tensors, **options)


def with_faulty_collective(file: str, name: str, old: str, new: str, *tensors: Tensor, **options: Any) -> Any:
    """The same, the replacement being made in collectives.py."""
    source = (FOLDER / "collectives.py").read_text(encoding="utf-8")
    if old not in source:
        raise LookupError(f"collectives.py has no {old!r}: the fault can't be planted")
    right = sys.modules[collectives.__name__]
    faulty = sys.modules[collectives.__name__] = types.ModuleType(collectives.__name__)
    try:
        exec(compile(source.replace(old, new), "faulty collectives", "exec"), vars(faulty))
        return with_fault(file, name, "import torch", "import torch", *tensors, **options)
    finally:
        sys.modules[collectives.__name__] = right


def of_whole(module: str, name: str, dims: dict[int, int], *tensors: Tensor, **options: Any) -> Any:
    """A kernel of this module, called with this rank's parts of whole tensors, divided as ``dims`` says by number."""
    function = getattr(importlib.import_module(module), name)
    return function(*(shard(x, dims[i]) if i in dims else x for i, x in enumerate(tensors)), **options)


def refusal(function: Any, *tensors: Tensor, **options: Any) -> str:
    """What the function raises for these, in words."""
    try:
        function(*tensors, **options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def column_gradients(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    """Of x and of this rank's weight and bias, where all ranks gather the columns and have the gradient dy of them."""
    return _gradients((x, weight, bias), dy, column_parallel_linear, gather=True)


def column_gradients_of_rows(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    """The same of this rank's rows x, and dy of its columns."""
    return _gradients((x, weight, bias), dy, column_parallel_linear, sequence=True)


def row_gradients(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    """Of this rank's columns of x and weight, and of the bias."""
    return _gradients((x, weight, bias), dy, row_parallel_linear)


def row_gradients_of_rows(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
    """The same where a rank has dy of its rows of the result alone."""
    return _gradients((x, weight, bias), dy, row_parallel_linear, sequence=True)


def dispatched_gradients(
    x: Tensor, first: Tensor, last: Tensor, weights: Tensor, ids: Tensor, dy: Tensor
) -> list[Tensor]:
    """Of this rank's tokens, experts and weights."""
    return _gradients((x, first, last, weights), dy, lambda *given: moe_dispatched(*given, ids))


def reduced_gradients(x: Tensor, first: Tensor, last: Tensor, weights: Tensor, ids: Tensor, dy: Tensor) -> list[Tensor]:
    """Of all tokens and weights, and of this rank's experts."""
    return _gradients((x, first, last, weights), dy, lambda *given: moe_reduced(*given, ids))


def _gradients(tensors: tuple[Tensor, ...], dy: Tensor, function: Any, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return list(torch.autograd.grad(function(*leaves, **options), leaves, dy))
