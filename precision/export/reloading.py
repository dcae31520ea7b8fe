"""Loads exports with their readers and compares their errors with that of the simulation.

GGUF files run in llama.cpp on a CPU, from the wheel xllamacpp, which returns logits.
"""

from __future__ import annotations

import copy
import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from assay.precision.errors import BadModel, CannotExport
from assay.precision.export.checkpoint import load_checkpoint
from assay.precision.export.configurations.gguf import kinds_of, types_in, write_gguf
from assay.precision.export.configurations.mlx import layers_in
from assay.precision.export.manifest import RECORD, Part, Reloaded
from assay.precision.loading.quiet import quiet
from assay.precision.observation.streaming import device_of, streamed_parameters
from assay.precision.schemes.ggml import block_types, library
from assay.runtime.errors import AssayError, first_line
from assay.runtime.files import OwnFolder
from assay.runtime.modules import optional
from assay.runtime.results import installed_version

if TYPE_CHECKING:
    from assay.precision.auditing import Audit

_ADDRESS = ctypes.c_void_p
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _ADDRESS)(lambda *_: None)


class _Params(ctypes.Structure):
    """Parameters of a model or a context: a buffer larger than the struct of any version, as only defaults are used."""

    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", _ADDRESS),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class LlamaCpp(torch.nn.Module):
    """A GGUF file run by llama.cpp on a CPU, one sequence at a time, with KV caches in float16.

    Called like a causal model of transformers. Raises BadModel for a file that llama.cpp can't load, NotInstalled.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        _function("llama_log_set", None, type(_SILENT), _ADDRESS)(_SILENT, None)
        self._model = _function("llama_model_load_from_file", _ADDRESS, ctypes.c_char_p, _Params)(
            str(path).encode(), _function("llama_model_default_params", _Params)()
        )
        if not self._model:
            raise BadModel(f"llama.cpp can't load {path}: write it anew")
        vocabulary = _function("llama_model_get_vocab", _ADDRESS, _ADDRESS)(self._model)
        self._words = int(_function("llama_vocab_n_tokens", ctypes.c_int32, _ADDRESS)(vocabulary))

    def __del__(self) -> None:
        if self.__dict__.get("_model"):
            _function("llama_model_free", None, _ADDRESS)(self._model)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> Any:
        """Return ``logits`` (float32 [B, T, V]) of tokens [B, T]; zero where the mask [B, T] is zero."""
        valid = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = torch.zeros(*input_ids.shape, self._words)
        for row, ids, kept in zip(logits, input_ids.cpu(), valid.cpu().bool(), strict=True):
            row[kept] = self._sequence(ids[kept].tolist())
        return SimpleNamespace(logits=logits.to(input_ids.device))

    def _sequence(self, ids: list[int]) -> torch.Tensor:
        """Return the logits [T, V] of one sequence."""
        settings = _function("llama_context_default_params", _Params)()
        # The first fields are the context's length and the batch sizes.
        sizes = (ctypes.c_uint32 * 3)(len(ids), len(ids), len(ids))
        ctypes.memmove(ctypes.byref(settings), sizes, ctypes.sizeof(sizes))
        context = _function("llama_init_from_model", _ADDRESS, _ADDRESS, _Params)(self._model, settings)
        if not context:
            raise BadModel(f"llama.cpp has no context of {len(ids)} tokens for the model: give shorter sequences")
        tokens = _function("llama_batch_init", _Batch, *[ctypes.c_int32] * 3)(len(ids), 0, 1)
        try:
            for index, token in enumerate(ids):
                tokens.token[index], tokens.pos[index], tokens.n_seq_id[index] = token, index, 1
                tokens.seq_id[index][0] = 0
                tokens.logits[index] = 1
            tokens.n_tokens = len(ids)
            if _function("llama_decode", ctypes.c_int32, _ADDRESS, _Batch)(context, tokens):
                raise BadModel(f"llama.cpp computes nothing for {len(ids)} tokens: give shorter sequences")
            start = _function("llama_get_logits", ctypes.POINTER(ctypes.c_float), _ADDRESS)(context)
            values = bytearray(ctypes.string_at(start, len(ids) * self._words * 4))
            return torch.frombuffer(values, dtype=torch.float32).view(len(ids), self._words)
        finally:
            _function("llama_batch_free", None, _Batch)(tokens)
            _function("llama_free", None, _ADDRESS)(context)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    results = getattr(library("llama.cpp"), name)
    results.restype, results.argtypes = result, list(arguments)
    return results


def reloaded(audit: Audit, part: Part) -> Reloaded | None:
    """Load a part of an export and measure its error over the audit's reported sequences; None without a reader.

    A checkpoint is loaded by transformers; torchao and MLX quantise a copy of the model as their files say; llama.cpp
    runs a GGUF file of the model with the types that were written. Raises BadAssignment for sites that the audit lacks.
    """
    if part.format not in _READERS:
        return None
    packages, load = _READERS[part.format]
    versions = {name: installed_version(name) for name in packages}
    if not all(versions.values()):
        return None
    reader = ", ".join(f"{name} {number}" for name, number in versions.items())
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


def _torchao(audit: Audit, part: Part) -> torch.nn.Module:
    with quiet():
        core: Any = optional("torchao.core.config", purpose="an export for torchao", extra="audit")
        quantization: Any = optional("torchao.quantization", purpose="an export for torchao", extra="audit")
        model = copy.deepcopy(audit.model)
        config = core.config_from_dict(json.loads(part.paths[0].read_text(encoding="utf-8")))
        quantization.quantize_(model, config, filter_fn=None)
    return model


def _gguf(audit: Audit, part: Part) -> torch.nn.Module:
    """Return llama.cpp with the model in the types of the file; its temporary GGUF file stays mapped after deletion."""
    types = types_in(part.paths[0].read_text(encoding="utf-8"))
    tensors = json.loads((part.paths[0].parent / RECORD).read_text(encoding="utf-8"))["tensors"]
    named = {kind.ggml_name: name for name, kind in block_types().items() if kind.weights}
    given = {
        site: named[kind] for site, several in tensors.items() for kind in kinds_of(several[0], types) & named.keys()
    }
    with OwnFolder("assay-gguf-") as folder:
        path = folder / "model.gguf"
        sites = {str(site): site for site in audit.sites}
        write_gguf(audit.model, given, path, sites=sites, fits=audit.fits)
        return LlamaCpp(path)


def _mlx(audit: Audit, part: Part) -> torch.nn.Module:
    """Return a copy of the model with each weight quantised and dequantised by MLX."""
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
    "checkpoint": (
        ("transformers", "compressed-tensors"),
        lambda audit, part: load_checkpoint(part.paths[0]).to(device_of(audit.model)),
    ),
    "torchao": (("torchao",), _torchao),
    "gguf": (("xllamacpp",), _gguf),
    "mlx": (("mlx",), _mlx),
}
"""For each format, the packages that load it here and the function that does. vLLM and SGLang read the same checkpoint
files, but the products here are computed by torch."""
