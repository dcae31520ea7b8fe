"""The inputs of a workload: random, scalar, of a file, or made by the definition's own function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from assay.judge.problems.axes import value_of
from assay.judge.problems.problem import ProblemError, Sizes

_INDICES = ("id", "ids", "idx", "idxs", "topk")
_FEW = 1024  # random integers lie below it, of either sign


def drawn(
    content: Mapping[str, Any],
    sizes: Sizes,
    axes: Mapping[str, int],
    namespace: Mapping[str, Any],
    root: Path,
) -> tuple[Any, ...]:
    """The arguments of a definition, in its order, by the random generators as they are.

    What a workload has in a file can only be had at that workload's own sizes. Raises `ProblemError`.
    """
    stated: Mapping[str, Any] = sizes.get("@inputs", {})
    scalars = {name: part["value"] for name, part in stated.items() if part.get("type") == "scalar"}
    made: Mapping[str, Any] = {}
    function = content.get("custom_inputs_entrypoint")
    if function and any(part.get("type") == "custom" for part in stated.values()):
        made = namespace[function]({**axes, **scalars}, torch.device("cpu"))
    results = []
    for name, part in content["inputs"].items():
        how = stated.get(name, {}).get("type", "random")
        shape = None if part["shape"] is None else tuple(_length(axis, axes) for axis in part["shape"])
        dtype = getattr(torch, part["dtype"])
        if how == "scalar":
            results.append(scalars[name])
        elif how == "custom":
            if name not in made:
                raise ProblemError(f"{function} makes no {name}, which the workload takes from it")
            results.append(made[name])
        elif how == "safetensors" and (value := _of_file(stated[name], root, shape)) is not None:
            results.append(value.to(dtype))
        else:
            results.append(_random(name, shape, dtype, axes, content))
    return tuple(results)


def _length(axis: Any, axes: Mapping[str, int]) -> int:
    return axes[axis] if axis in axes else int(value_of(str(axis), axes))


def _of_file(stated: Mapping[str, Any], root: Path, shape: tuple[int, ...] | None) -> torch.Tensor | None:
    """A tensor of a safetensors file, if that is there and has this shape."""
    from safetensors.torch import load_file

    path = root / stated["path"]
    if not path.is_file():
        return None
    value = load_file(path)[stated["tensor_key"]]
    return value if tuple(value.shape) == shape else None


def _random(name: str, shape: Any, dtype: torch.dtype, axes: Mapping[str, int], content: Mapping[str, Any]) -> Any:
    """Random numbers; integers whose name tells what they are (offsets, indices, lengths) are such."""
    if shape is None:
        return 1e-6 if name.startswith("eps") else float(torch.rand(())) + 0.5 if dtype.is_floating_point else 1
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    if dtype.is_floating_point:
        if "probs" in name:
            return torch.rand(shape).softmax(-1).to(dtype)
        values = torch.randn(shape)
        values = values.clamp(-2, 2) if dtype.itemsize == 1 else values
        return values.abs().to(dtype) if "scale" in name else values.to(dtype)
    return _integers(name, shape, axes, content).to(dtype)


def _integers(name: str, shape: tuple[int, ...], axes: Mapping[str, int], content: Mapping[str, Any]) -> torch.Tensor:
    last = {**_last(content)}
    if name in last or name.endswith("indptr") or "cu_seqlens" in name:
        total = axes.get(last.get(name, ""), 4 * (shape[0] - 1))
        cuts = torch.randint(0, total + 1, (max(shape[0] - 2, 0),)).sort().values
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.full((1,), total)])
        return ends[-shape[0] :]
    words = name.lower().split("_")
    if any(word in _INDICES or word.startswith(("ind", "page")) for word in words) or "block_table" in name:
        bounds = [size for axis, size in axes.items() if "page" in axis or "expert" in axis or "vocab" in axis]
        return torch.randint(0, max(min(bounds, default=2), 1), shape)
    if any(word.startswith(("len", "seqlen", "seqlens")) for word in words):
        return torch.randint(1, 9, shape)
    return torch.randint(-_FEW, _FEW, shape)


def _last(content: Mapping[str, Any]) -> dict[str, str]:
    """Which axis is a tensor's last element."""
    from assay.judge.problems.axes import Axes

    return dict(Axes.of(content, Path(content["name"])).last)
