"""What every model must have before it is audited: finite weights, and linears to choose formats for."""

from collections import Counter
from collections.abc import Iterable

import torch

from assay.precision.errors import BadModel
from assay.precision.model.streaming import streamed_parameters

__all__ = ["check_linears", "check_weights", "commonest_dtype"]

_PRODUCTS = ("aten.linear.", "aten.addmm.", "aten.mm.", "aten.matmul.", "aten.bmm.")


def check_weights(model: torch.nn.Module, name: str) -> None:
    """Raise `BadModel`, naming the parameter, if a weight is NaN, infinite, or not there yet (a lazy module's).

    Weights that are read when their module runs are looked at then.
    """
    bad = []
    streamed = streamed_parameters(model)
    for parameter, values in model.named_parameters():
        if parameter in streamed:
            continue
        if torch.nn.parameter.is_lazy(values):
            raise BadModel(f"{name}: {parameter} has no shape yet; run the model once before it is audited")
        if values.is_floating_point() and not bool(values.isfinite().all()):
            nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
            bad.append(f"{parameter} holds {nans} NaN and {infinities} infinite among {values.numel()} values")
    if bad:
        others = f", and so do {len(bad) - 1} more parameters" if len(bad) > 1 else ""
        raise BadModel(f"{name}: {bad[0]}{others}; an audit needs finite weights, so store the model again")


def check_linears(model: torch.nn.Module, name: str) -> None:
    """Raise `BadModel` if the model has no linear layer: nothing in it could take another format."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":  # GPT-2's transposed linear
            return
        if isinstance(module, torch.fx.GraphModule) and any(
            str(node.target).startswith(_PRODUCTS) for node in module.graph.nodes
        ):
            return
    raise BadModel(f"{name}: a {type(model).__name__} without linear layers, so there is no format to choose in it")


def commonest_dtype(weights: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype of most values, given dtype and count of each tensor; float32 where there are none."""
    counts: Counter[torch.dtype] = Counter()
    for dtype, count in weights:
        counts[dtype] += count
    return counts.most_common(1)[0][0] if counts else torch.float32
