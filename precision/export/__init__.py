"""What serving stacks load: configurations of an assignment, and a checkpoint that equals its simulation.

compressed_tensors · modelopt · torchao · vllm (configurations) · checkpoint (with folder, folding, pieces, tensors) ·
lint · plan and targets (what they share).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from assay.precision.errors import CannotExport
from assay.precision.export.checkpoint import Written, write_checkpoint
from assay.precision.export.compressed_tensors import quantization_config
from assay.precision.export.folder import config_json, dtype_of
from assay.precision.export.lint import lint, lint_config
from assay.precision.export.modelopt import hf_quant_config
from assay.precision.export.pieces import pieces_of
from assay.precision.export.plan import Recipe
from assay.precision.export.torchao import fqn_to_config
from assay.precision.export.vllm import command_line, online_config
from assay.precision.model.menu import Fits
from assay.precision.model.sites import Site

__all__ = [
    "FORMATS",
    "Exported",
    "Recipe",
    "Written",
    "command_line",
    "export",
    "fqn_to_config",
    "hf_quant_config",
    "lint",
    "lint_config",
    "online_config",
    "quantization_config",
    "write_checkpoint",
]

_FILES = {
    "compressed-tensors": "quantization_config.json",
    "modelopt": "hf_quant_config.json",
    "torchao": "torchao.json",
    "vllm": "vllm.json",
}
_RECIPES = {"modelopt": hf_quant_config, "torchao": fqn_to_config, "vllm": online_config}
FORMATS = tuple(_FILES)
"""The configurations that can be written."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The files and folders that were written, and what they don't express or would do in silence, a line each."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...]


def export(
    model: torch.nn.Module,
    assignment: Mapping[str, str],
    out: str | Path,
    formats: Collection[str] = FORMATS,
    *,
    sites: Mapping[str, Site],
    fits: Fits,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    supported: Collection[str] | None = None,
    checkpoint: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Write an assignment of site names to scheme names into the folder ``out``, as ``formats`` have it.

    One file a format, and with "vllm" the command line too; with ``checkpoint`` a quantised checkpoint in
    ``out/checkpoint``. source: the directory or hub name of the model. dtype: of what isn't quantised; by default
    that of ``source``, else the model's. supported: as `lint` has it. Files of the same names are replaced only with
    ``overwrite``; if the checkpoint is refused, nothing is written.

    Raises CannotExport, NotInstalled, UnknownScheme.
    """
    unknown = [name for name in formats if name not in _FILES]
    if unknown:
        raise CannotExport(f"expected formats of {', '.join(FORMATS)}, got {unknown[0]!r}")
    folder = Path(out)
    origin = Path(source) if source is not None and Path(source).is_dir() else None
    if dtype is None:
        dtype = dtype_of(model, config_json(model, origin)) if hasattr(model, "config") else torch.bfloat16
    files: dict[Path, str] = {}
    names = {name: [piece.name for piece in pieces] for name, pieces in pieces_of(model, sites).items()}
    notes = [f"lint: {line}" for line in lint(assignment, sites, supported)]
    for name in dict.fromkeys(formats):
        if name == "compressed-tensors":
            recipe = quantization_config(assignment, sites, dtype, names)
        else:
            recipe = _RECIPES[name](assignment, sites, dtype)
        files[folder / _FILES[name]] = json.dumps(recipe.content, indent=2) + "\n"
        notes += [f"{name}: {line}" for line in recipe.notes]
        if name == "vllm":
            files[folder / "vllm.txt"] = command_line(str(source or "MODEL"), assignment, sites) + "\n"
    present = [path for path in files if path.exists()]
    if present and not overwrite:
        raise CannotExport(f"{present[0]} exists: give another folder, or pass overwrite=True to replace it")
    paths = list(files)
    if checkpoint:
        written = write_checkpoint(
            model,
            assignment,
            folder / "checkpoint",
            sites=sites,
            fits=fits,
            source=origin,
            dtype=dtype,
            overwrite=overwrite,
        )
        paths.append(written.path)
        notes += [f"checkpoint: {line}" for line in written.notes]
    for path, text in files.items():
        _write(path, text)
    return Exported(tuple(paths), tuple(dict.fromkeys(notes)))


def _write(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as room:
        place = Path(room) / path.name
        place.write_text(text, encoding="utf-8")
        os.replace(place, path)
