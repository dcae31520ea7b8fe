"""What mlx_lm is given, quantised by MLX, and the folder that it makes, read back by MLX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.precision.export.configurations.mlx import layers_in, parameters_of
from assay.precision.export.verifying.verified import Asked, Verified, difference
from assay.precision.schemes import scheme_named
from assay.runtime.modules import optional
from assay.runtime.results import installed_version

FOLDER = "mlx_model"
"""Where the program of an export has mlx_lm write."""
_COLUMNS, _ROWS = 128, 8
"""Of the linears that stand for a model's: whole groups of every size that MLX has."""


def program(asked: Asked, file: str) -> Verified:
    """What MLX makes of a linear of each layer's name by the predicate of the program, which isn't run.

    Raises ValueError where it has no layers, NotInstalled, and what MLX raises.
    """
    nn: Any = optional("mlx.nn", purpose="--verify-export", extra="audit")
    layers = layers_in((asked.place / file).read_text(encoding="utf-8"))
    model = nn.Module()
    for name in asked.names:
        *above, last = name.split(".")
        index = model
        for word in above:
            index = index.setdefault(word, {})
        index[last] = nn.Linear(_COLUMNS, _ROWS, bias=False)
    nn.quantize(model, class_predicate=lambda path, module: layers.get(path, False))
    results = {
        path: {key: getattr(module, key) for key in ("group_size", "bits", "mode")}
        for path, module in model.named_modules()
        if isinstance(module, nn.QuantizedLinear)
    }
    return Verified(file, f"mlx {installed_version('mlx')}", len(asked.names), _differing(asked, results))


def converted(asked: Asked, folder: Path) -> Verified:
    """The parameters that mlx_lm loads each layer by, from config.json, with which MLX must read its tensors.

    Raises NotInstalled, and what MLX raises.
    """
    mlx: Any = optional("mlx.core", purpose="--verify-export", extra="audit")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization"]
    tensors = {name: each for path in folder.glob("*.safetensors") for name, each in mlx.load(str(path)).items()}
    usual = {"group_size": config["group_size"], "bits": config["bits"], "mode": config.get("mode", "affine")}
    results: dict[str, dict[str, Any]] = {}
    wrong = []
    for name in asked.names:
        if f"{name}.scales" in tensors:
            results[name] = {**usual, **(config[name] if isinstance(config.get(name), dict) else {})}
            parts = [tensors.get(f"{name}.{part}") for part in ("weight", "scales", "biases")]
            try:
                mlx.eval(mlx.dequantize(*parts, **results[name]))
            except (TypeError, ValueError, RuntimeError) as error:
                wrong.append(f"{name}: MLX can't read its tensors ({error})")
        elif f"{name}.weight" not in tensors and name not in asked.tied:
            wrong.append(f"{name}: it has no weight")
    differing = _differing(asked, results)
    return Verified(folder.name, f"mlx {installed_version('mlx')}", len(asked.names), (*differing, *wrong))


def _differing(asked: Asked, result: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """A line for each layer whose parameters aren't those of its scheme."""
    held = asked.held["mlx"]
    lines = []
    for name in asked.names:
        if name in asked.tied:
            continue
        expected = parameters_of(scheme_named(held[name]))[0] if name in held else None
        if result.get(name) != expected:
            lines.append(difference(name, held.get(name), result.get(name)))
    return tuple(lines)
