"""llama.cpp: the ggml type of each tensor for llama-quantize, the importance matrix, and a GGUF file of the model.

Tensor names are from the tables of the package gguf, which llama.cpp's converter uses. The file made here has the
blocks that the simulation stored, but no tokenizer, which llama-quantize takes over from a converted file.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.configs import architectures
from assay.configs.architectures import quantised_by_gguf
from assay.precision.errors import CannotExport
from assay.precision.export.checkpoint.pieces import Piece, pieces_of
from assay.precision.export.plan import Recipe, Request, Target, of_linears, plan_of
from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Site
from assay.precision.schemes import scheme_named
from assay.precision.schemes.ggml import BlockType, block_types
from assay.runtime.files import OwnFolder
from assay.runtime.modules import optional
from assay.runtime.results import installed_version


def library() -> Any:
    """Return the package gguf. Raises NotInstalled."""
    return optional("gguf", purpose="--export gguf", extra="gguf")


class TensorNames:
    """GGUF names of a model's parameters. Raises CannotExport for an architecture that gguf lacks."""

    def __init__(self, model: torch.nn.Module) -> None:
        gguf = library()
        config = getattr(model, "config", None)
        kind = str(getattr(config, "model_type", type(model).__name__))

        def letters(name: str) -> str:
            return re.sub(r"[^a-z0-9]", "", name.lower())

        known = {letters(name): architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
        result = known.get(letters(architectures.gguf_type(kind)))
        layers = getattr(config, "num_hidden_layers", None)
        if result is None or layers is None:
            version = installed_version("gguf")
            raise CannotExport(f"expected a model whose architecture gguf {version} has names for, got {kind!r}")
        self.architecture = str(gguf.MODEL_ARCH_NAMES[result])
        self._map = gguf.get_tensor_name_map(result, layers)

    def __getitem__(self, parameter: str) -> str | None:
        """Return the tensor of a parameter, or of a single expert's; None if gguf has no name for it."""
        together = architectures.without_expert(parameter)
        name: str | None = self._map.get_name(together, try_suffixes=(".weight", ".bias"))
        return name

    def of_sites(self, sites: Mapping[str, Site], names: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """Return the tensors of each site that has its own weight and a name in gguf. ``names``: checkpoint names."""
        results = {}
        for name, site in sites.items():
            if site.shape and not site.tied:
                several = [self[f"{piece}.weight"] for piece in names.get(name) or [name]]
                results[name] = tuple(dict.fromkeys(each for each in several if each)) if all(several) else ()
        return results


_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures whose hyperparameters `_describe` knows."""
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
"""The writer's method for a hyperparameter, and the parameter's name in transformers' configurations."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """The contents of a GGUF file."""

    path: Path
    held: dict[str, str]
    """The part of the assignment that it expresses; the rest stays in the model's dtype."""
    notes: tuple[str, ...]
    bytes: int
    """Bytes of its tensors."""


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
    """Write a transformers model with an assignment of site names to scheme names; ``dtype``: of unassigned weights.

    Raises CannotExport for other architectures, for scaled RoPE, for sliding windows, and if ``path`` exists;
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
    parameters, total = dict(model.named_parameters()), 0
    others = dict(parameters)
    for name, site in sites.items():
        key = name if name in parameters else f"{name}.weight"
        if site.shape and not site.tied and key in parameters:
            others.pop(key)
            scheme = recipe.held.get(name)
            own = pieces.get(name) or [Piece(name, None, 0, site.shape[0])]
            for tensor, values in _tensors(names, own, parameters[key].detach(), name, scheme, fits).items():
                total += _add(writer, tensor, _ordered(model, tensor, values), scheme, dtype)
    for key, parameter in others.items():
        named = _named(names, key)
        total += _add(writer, named, _ordered(model, named, parameter.detach()), None, dtype)
    try:
        _finish(writer)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return WrittenFile(target, dict(recipe.held), recipe.notes, total)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    """Return the tensors of a site's weight: values, or blocks if it has a scheme; experts are stacked."""
    whole: dict[int | None, torch.Tensor] = {}
    for expert in range(weight.shape[0]) if weight.dim() == 3 else [None]:
        values = weight if expert is None else weight[expert]
        result = None if scheme is None else fits.weight(site, scheme_named(scheme), values, expert)
        whole[expert] = values if result is None or result.packed is None else result.packed
    parts: dict[str, list[torch.Tensor]] = {}
    for piece in pieces:
        tensor = _named(names, f"{piece.name}.weight")
        parts.setdefault(tensor, []).append(whole[piece.expert][piece.start : piece.stop])
    return {name: torch.stack(rows) if weight.dim() == 3 else torch.cat(rows) for name, rows in parts.items()}


def _ordered(model: torch.nn.Module, tensor: str, values: torch.Tensor) -> torch.Tensor:
    """Reorder rows for llama.cpp's RoPE of a Llama, which rotates neighbouring rows instead of a head's two halves."""
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
    """Add a tensor to the writer; vectors and tensors that llama-quantize skips are float32, as in the converter."""
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


def types_in(text: str) -> list[tuple[str, str]]:
    """Return the file's patterns, in lower case, and types: words split at their first equals sign."""
    return [(pattern.lower(), kind) for pattern, _, kind in (word.partition("=") for word in text.split())]


def kinds_of(tensor: str, types: list[tuple[str, str]]) -> set[str]:
    """Return the types of the patterns found in a tensor's name: one if first and last match agree."""
    return {kind for pattern, kind in types if re.search(pattern, tensor)}


def _imatrix(fits: QParams, sites: Mapping[str, Site], tensors: Mapping[str, Sequence[str]]) -> bytes:
    """Return the file: for the tensors of each site with an input, sums of squares of the input's columns, and counts.

    llama-quantize divides them in float32, as the simulation does, so both weight errors identically. Experts of a
    layer have the same sums, as in the simulation. Raises NotInstalled.
    """
    gguf = library()
    # The importance matrix has no architecture.
    without = type("ImatrixWriter", (gguf.GGUFWriter,), {"add_architecture": lambda self: None})
    with OwnFolder("assay-gguf-") as folder:
        path = folder / "imatrix.gguf"
        writer = without(path, "")
        most = 0
        for site, names in tensors.items():
            if (seen := fits.squares(site)) is None:
                continue
            sums, count = seen
            most = max(most, count)
            experts = sites[site].shape[0] if len(sites[site].shape) == 3 else 1
            rows = sums.detach().float().cpu().expand(experts, -1).contiguous()
            for name in names:
                writer.add_tensor(f"{name}.in_sum2", rows.numpy())
                writer.add_tensor(f"{name}.counts", torch.full((experts, 1), float(count)).numpy())
        writer.add_type("imatrix")
        writer.add_array(gguf.Keys.IMatrix.DATASETS, ["the calibration data of an audit"])
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, 1)
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, most)
        _finish(writer)
        return path.read_bytes()


TYPES, IMATRIX, COMMANDS = "gguf-types.txt", "gguf-imatrix.gguf", "gguf.txt"
"""The files that are written."""
_KEPT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_MIXES = {"q5_k": "Q5_K_M", "q4_k": "Q4_K_M", "q3_k": "Q3_K_M", "mxfp4": "MXFP4_MOE"}
"""llama-quantize's names of files of mostly one type, if they differ from the type's name."""
_NO_BLOCKS = "GGUF holds types of ggml, such as q4_k"


def tensor_types(request: Request) -> Recipe:
    """Return a type for each tensor with a weight that llama-quantize would quantise (``types``), and the bytes of all.

    Raises CannotExport and UnknownScheme as `plan_of` does, NotInstalled.
    """
    plan = plan_of(request.assignment, request.sites, request.dtype, experts=True, tables=lambda scheme, tied: "")
    plan.note_caches("llama.cpp's caches have types of their own (--cache-type-k, --cache-type-v)")
    wanted: dict[str, BlockType] = {}
    for name, scheme in plan.weights.items():
        if scheme.weight is None or scheme.weight.blocks is None:
            plan.note(name, scheme.name, _NO_BLOCKS)
        else:
            wanted[name] = scheme.weight.blocks
    if not wanted:
        return plan.recipe({}, ())
    try:
        tensors = TensorNames(request.module)
    except CannotExport as error:
        for name in wanted:
            plan.note(name, plan.weights[name].name, str(error))
        return plan.recipe({}, ())
    indices = tensors.of_sites(request.sites, request.names)
    requested: dict[str, set[str]] = {}
    for name, several in indices.items():
        for each in several:
            requested.setdefault(each, set()).add(wanted[name].ggml_name if name in wanted else "")
    types: dict[str, str] = {}
    held, total = [], 0
    for name, several in indices.items():
        kind, site = wanted.get(name), request.sites[name]
        columns = site.shape[-1]
        if kind is not None:
            mixed = any(len(requested[each]) > 1 for each in several)
            if reason := _refused(site, several, kind, mixed):
                plan.note(name, plan.weights[name].name, reason)
                # llama-quantize's fallback has smaller blocks, for rows that aren't multiples of the block.
                fallback = block_types().get(kind.fallback) if columns % kind.block and not mixed else None
                kind = fallback if fallback is not None and columns % fallback.block == 0 else None
            else:
                held.append(name)
        if kind is None:
            total += site.parameters * request.dtype.itemsize
        else:
            total += site.parameters // columns * kind.row_bytes(columns)
        kept = _KEPT[request.dtype] if kind is None else kind.ggml_name
        types |= {each: kept for each in several if quantised_by_gguf(each)}
    total += _others(request, tensors, indices, types)
    return replace(plan.recipe({"types": types, "bytes": total}, held), tensors=indices)


def unquantised(request: Request) -> list[str]:
    """Return sites whose weights llama-quantize never quantises, such as routers.

    Raises CannotExport, NotInstalled.
    """
    indices = TensorNames(request.module).of_sites(request.sites, request.names)
    return [name for name, several in indices.items() if not several or not all(map(quantised_by_gguf, several))]


def _commands(request: Request, recipe: Recipe) -> str:
    """Return the commands of llama.cpp that make the file and compare it with the unquantised model."""
    kept = _KEPT[request.dtype]
    kinds = list(recipe.content["types"].values())
    most = max(dict.fromkeys(kinds), key=lambda kind: kinds.count(kind) * (kind != kept))
    mix, wide, narrow = _MIXES.get(most, most.upper()), f"model-{kept}.gguf", "model.gguf"
    texts = (
        ["python", "convert_hf_to_gguf.py", request.model, "--outtype", kept, "--outfile", wide],
        ["llama-quantize", "--imatrix", IMATRIX, "--tensor-type-file", TYPES, wide, narrow, mix],
        ["llama-perplexity", "-m", wide, "-f", "TEXT", "--kl-divergence-base", "logits.kld"],
        ["llama-perplexity", "-m", narrow, "-f", "TEXT", "--kl-divergence-base", "logits.kld", "--kl-divergence"],
    )
    size = f"# tensors of {recipe.content['bytes']:,} bytes, which llama-quantize --dry-run tells too\n"
    return size + "".join(shlex.join(words) + "\n" for words in texts)


def _refused(site: Site, tensors: tuple[str, ...], kind: BlockType, mixed: bool) -> str:
    """Return why the tensors of a site can't have a type; empty if they can."""
    if not tensors:
        return "gguf has no name for it"
    if not all(map(quantised_by_gguf, tensors)):
        return f"llama-quantize leaves {tensors[0]} as it is"
    if mixed:
        return f"{tensors[0]} holds the weights of other experts too, which have another type"
    if site.shape[-1] % kind.block:
        return f"rows of {site.shape[-1]} aren't whole blocks: llama-quantize takes {kind.fallback or 'f16'} instead"
    return ""


def _others(
    request: Request, tensors: TensorNames, indices: Mapping[str, tuple[str, ...]], types: dict[str, str]
) -> int:
    """Return the bytes of parameters outside of all sites; add types that keep them unquantised to ``types``."""
    total = 0
    for name, parameter in request.module.named_parameters():
        if name.removesuffix(".weight") in indices or name in indices:
            continue
        tensor = tensors[name] or ""
        if parameter.dim() > 1 and quantised_by_gguf(tensor):
            types.setdefault(tensor, _KEPT[request.dtype])
        # The converter holds vectors in float32.
        total += parameter.numel() * (4 if parameter.dim() < 2 else request.dtype.itemsize)
    return total


def _files(request: Request, recipe: Recipe) -> dict[str, str | bytes]:
    # Each pattern is a full name: some versions use the first pattern found in a tensor's name, others the last.
    types = "".join(f"^{re.escape(tensor)}$={kind}\n" for tensor, kind in recipe.content["types"].items())
    files: dict[str, str | bytes] = {TYPES: types, COMMANDS: _commands(request, recipe)}
    if request.fits is not None:
        files[IMATRIX] = _imatrix(request.fits, request.sites, recipe.tensors)
    return files


TARGET = Target(
    tensor_types,
    _files,
    of_linears(lambda scheme: "" if scheme.weight and scheme.weight.blocks else _NO_BLOCKS),
    fixed=unquantised,
    unfused=True,
)
