"""Exports loaded again by their readers, and their errors beside that of the simulation they were chosen by."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from assay.precision.errors import CannotExport
from assay.precision.export.checkpoint import load_checkpoint
from assay.precision.export.configurations.mlx import layers_in
from assay.precision.export.gguf.model import write_gguf
from assay.precision.export.gguf.serving import LlamaCpp
from assay.precision.export.gguf.types import kinds_of, types_in
from assay.precision.export.manifest import RECORD, Part, Reloaded
from assay.precision.loading.quiet import quiet
from assay.precision.observation.streaming import device_of, streamed_parameters
from assay.precision.schemes.ggml import block_types
from assay.runtime.errors import AssayError, first_line
from assay.runtime.lazy import optional

if TYPE_CHECKING:
    from assay.precision.auditing import Audit


def reloaded(audit: Audit, part: Part) -> Reloaded | None:
    """Load a part of an export and measure it where the audit measures what it reports; None: nothing here reads it.

    A checkpoint is loaded by transformers; torchao and MLX quantise a copy of the model as their files say; llama.cpp
    runs a GGUF file of the model with the types that were written. Raises BadAssignment for sites the audit hasn't.
    """
    if part.format not in _READERS:
        return None
    packages, load = _READERS[part.format]
    try:
        reader = ", ".join(f"{name} {version(name)}" for name in packages)
    except PackageNotFoundError:
        return None
    indices = {str(site): site.type for site in audit.all_sites}
    simulated = audit.measure({name: scheme for name, scheme in part.held.items() if indices.get(name) != "kv_cache"})
    about = simulated, float(audit.noise_floor), audit.metric.power
    try:
        if streamed_parameters(audit.model):
            raise CannotExport("it is loaded beside a model in memory, and weights of this one are read as they pass")
        model = load(audit, part)
        error = audit.report_evaluator.error_of(model)
    except (AssayError, AssertionError, OSError, ValueError, TypeError, KeyError, RuntimeError) as refused:
        return Reloaded(reader, None, *about, first_line(refused))
    return Reloaded(reader, error, *about)


def _checkpoint(audit: Audit, part: Part) -> torch.nn.Module:
    return load_checkpoint(part.paths[0]).to(device_of(audit.model))


def _torchao(audit: Audit, part: Part) -> torch.nn.Module:
    with quiet():
        core: Any = optional("torchao.core.config", purpose="an export for torchao", extra="audit")
        quantization: Any = optional("torchao.quantization", purpose="an export for torchao", extra="audit")
        model = copy.deepcopy(audit.model)
        config = core.config_from_dict(json.loads(part.paths[0].read_text(encoding="utf-8")))
        quantization.quantize_(model, config, filter_fn=None)
    return model


def _gguf(audit: Audit, part: Part) -> torch.nn.Module:
    """The model with the types that the file has for its tensors; it stays open as long as it is run."""
    types = types_in(part.paths[0].read_text(encoding="utf-8"))
    tensors = json.loads((part.paths[0].parent / RECORD).read_text(encoding="utf-8"))["tensors"]
    named = {kind.ggml_name: name for name, kind in block_types().items() if kind.weights}
    given = {
        site: named[kind] for site, several in tensors.items() for kind in kinds_of(several[0], types) & named.keys()
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        sites = {str(site): site for site in audit.sites}
        write_gguf(audit.model, given, path, sites=sites, fits=audit.fits)
        return LlamaCpp(path)


def _mlx(audit: Audit, part: Part) -> torch.nn.Module:
    """A copy of the model with each weight as MLX stores it and reads it back."""
    with quiet():
        mlx: Any = optional("mlx.core", purpose="an export for MLX", extra="audit")
    model = copy.deepcopy(audit.model)
    for name, given in layers_in(part.paths[0].read_text(encoding="utf-8")).items():
        weight = model.get_parameter(f"{name}.weight")
        values = mlx.array(weight.detach().float().cpu().numpy()).astype(
            mlx.float32 if audit.bits == 32 else mlx.bfloat16
        )
        read = mlx.dequantize(*mlx.quantize(values, **given), **given).astype(mlx.float32)
        weight.data = torch.from_numpy(np.array(read)).to(weight)
    return model


_READERS: dict[str, tuple[tuple[str, ...], Callable[[Audit, Part], torch.nn.Module]]] = {
    "checkpoint": (("transformers", "compressed-tensors"), _checkpoint),
    "torchao": (("torchao",), _torchao),
    "gguf": (("xllamacpp",), _gguf),
    "mlx": (("mlx",), _mlx),
}
"""By the format: the packages that load it here, and how. A checkpoint's files are those that vLLM and SGLang read too,
its products are torch's."""
