"""A model as a GGUF file, each weight in the blocks that the simulation stored it in.

llama-quantize makes such a file of a converter's, which has the tokenizer too. This one is made here, of architectures
whose tensors are the model's own but for the order of rows, so that llama.cpp can be asked what it computes. It holds
no tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.configs.architectures import quantised_by_gguf
from assay.precision.errors import CannotExport
from assay.precision.export.checkpoint.pieces import Piece, pieces_of
from assay.precision.export.configurations.gguf import tensor_types
from assay.precision.export.gguf.names import TensorNames, library
from assay.precision.export.target import Request
from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Site
from assay.precision.schemes import scheme_named

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Those whose hyperparameters `_describe` knows."""
_KEYS = {
    "add_context_length": "max_position_embeddings",
    "add_embedding_length": "hidden_size",
    "add_block_count": "num_hidden_layers",
    "add_feed_forward_length": "intermediate_size",
    "add_head_count": "num_attention_heads",
    "add_head_count_kv": "num_key_value_heads",
    "add_layer_norm_rms_eps": "rms_norm_eps",
    "add_vocab_size": "vocab_size",
    "add_expert_count": "num_local_experts",
    "add_expert_used_count": "num_experts_per_tok",
}
"""What writes a hyperparameter, and its name in a configuration of transformers."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What a GGUF file holds."""

    path: Path
    held: dict[str, str]
    """What of the assignment it expresses; the rest stays in the model's dtype."""
    notes: tuple[str, ...]
    bytes: int
    """Of its tensors."""


def write_gguf(
    model: torch.nn.Module,
    assignment: Mapping[str, str],
    path: str | Path,
    *,
    sites: Mapping[str, Site],
    fits: QParams,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
) -> WrittenFile:
    """Write a model of transformers with an assignment of site names to scheme names; ``dtype``: of what has none.

    Raises CannotExport for other architectures, for RoPE that is scaled, a window, and where ``path`` exists;
    NotInstalled.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise CannotExport(f"{target} exists: give another name, or pass overwrite=True to replace it")
    gguf, names = library(), TensorNames(model)
    pieces = pieces_of(model, sites)
    called = {name: [piece.name for piece in several] for name, several in pieces.items()}
    request = Request(assignment=assignment, sites=sites, dtype=dtype, names=called, module=model, fits=fits)
    recipe = tensor_types(request)
    beside = target.with_name(f".{target.name}.part")
    writer = gguf.GGUFWriter(beside, names.architecture)
    _describe(writer, model, names.architecture)
    parameters, total, stored = dict(model.named_parameters()), 0, set()
    for name, site in sites.items():
        key = name if name in parameters else f"{name}.weight"
        if site.shape and not site.tied and key in parameters:
            stored.add(key)
            scheme = recipe.held.get(name)
            own = pieces.get(name) or [Piece(name, None, 0, site.shape[0])]
            for tensor, values in _tensors(names, own, parameters[key].detach(), name, scheme, fits).items():
                total += _add(writer, tensor, _ordered(model, tensor, values), scheme, dtype)
    for key, parameter in parameters.items():
        if key not in stored:
            named = _named(names, key)
            total += _add(writer, named, _ordered(model, named, parameter.detach()), None, dtype)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return WrittenFile(target, dict(recipe.held), recipe.notes, total)


def _describe(writer: Any, model: torch.nn.Module, architecture: str) -> None:
    config: Any = model.config
    if architecture not in _ARCHITECTURES:
        raise CannotExport(
            f"expected a model of {', '.join(_ARCHITECTURES)}, got {architecture}: convert it with llama.cpp's own "
            "converter, then quantise it with the files of --export gguf"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise CannotExport(
            f"expected RoPE as it is, got {rope['rope_type']!r}: convert it with llama.cpp's own converter"
        )
    if getattr(config, "sliding_window", None) is not None:
        raise CannotExport("expected attention to all that came before, got a window: set sliding_window=None")
    for add, key in _KEYS.items():
        if (value := getattr(config, key, None)) is not None:
            getattr(writer, add)(value)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_tokenizer_model("none")


def _tensors(
    names: TensorNames, pieces: list[Piece], weight: torch.Tensor, site: str, scheme: str | None, fits: QParams
) -> dict[str, torch.Tensor]:
    """The tensors that a site's weight is in: values, or blocks where it has a scheme; experts one below the other."""
    experts = range(weight.shape[0]) if weight.dim() == 3 else [None]
    whole: dict[int | None, torch.Tensor] = {}
    for expert in experts:
        values = weight if expert is None else weight[expert]
        result = None if scheme is None else fits.weight(site, scheme_named(scheme), values, expert)
        whole[expert] = values if result is None or result.packed is None else result.packed
    parts: dict[str, list[torch.Tensor]] = {}
    for piece in pieces:
        tensor = _named(names, f"{piece.name}.weight")
        parts.setdefault(tensor, []).append(whole[piece.expert][piece.start : piece.stop])
    return {name: torch.stack(rows) if weight.dim() == 3 else torch.cat(rows) for name, rows in parts.items()}


def _ordered(model: torch.nn.Module, tensor: str, values: torch.Tensor) -> torch.Tensor:
    """Rows as llama.cpp's RoPE of a Llama has them: neighbours turn together, where here the halves of a head do."""
    config: Any = model.config
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(tensor.split(".")[-2])
    if heads is None or config.model_type not in ("llama", "mistral", "mixtral"):
        return values
    return torch.unflatten(values, 0, (getattr(config, heads), 2, -1)).transpose(1, 2).flatten(0, 2)


def _named(names: TensorNames, parameter: str) -> str:
    tensor = names[parameter]
    if tensor is None:
        raise CannotExport(f"gguf has no name for {parameter}: convert the model with llama.cpp's own converter")
    return tensor


def _add(writer: Any, name: str, values: torch.Tensor, scheme: str | None, dtype: torch.dtype) -> int:
    """Hand a tensor to the writer; vectors and what llama-quantize leaves are float32, as the converter has them."""
    gguf = library()
    kinds = gguf.GGMLQuantizationType
    if scheme is not None and (weight := scheme_named(scheme).weight) is not None and weight.blocks is not None:
        data, kind = values.numpy(), kinds(weight.blocks.number)
    else:
        plain = values.dim() < 2 or not quantised_by_gguf(name) or dtype == torch.float32
        kind = kinds.F32 if plain else kinds.F16 if dtype == torch.float16 else kinds.BF16
        data = gguf.quantize(np.ascontiguousarray(values.float().cpu().numpy()), kind)
    writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    return int(data.nbytes)
