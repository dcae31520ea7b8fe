"""Writes a quantised checkpoint in the compressed-tensors format that loads with exactly the simulated values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay.precision.errors import CannotExport
from assay.precision.export.checkpoint.folder import config_json, dtype_of, needed, save, whole
from assay.precision.export.checkpoint.folding import Folded
from assay.precision.export.checkpoint.pieces import Piece, pieces_of, rows_of, saved
from assay.precision.export.checkpoint.storable import storable
from assay.precision.export.configurations.compressed_tensors import config_of, groups_of, tables_of
from assay.precision.export.configurations.vllm import cache_options
from assay.precision.export.lint import lint, lint_config, lint_scales
from assay.precision.export.plan import Plan, plan_of
from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Site
from assay.precision.schemes import FakeQuantizer, Scales, store
from assay.precision.targets import kind_of


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint on disk."""

    path: Path
    held: dict[str, str]
    """The part of the assignment that it holds: its simulation equals the loaded model."""
    bytes: int
    """Bytes of all tensors; the files' headers add to them."""
    notes: tuple[str, ...]
    """A line for each thing that it doesn't hold or that loaders would change silently."""
    options: tuple[str, ...] = ()
    """Options of ``vllm serve``, without which the KV caches in ``held`` stay unquantised."""


def write_checkpoint(
    model: torch.nn.Module,
    assignment: Mapping[str, str],
    out: str | Path,
    *,
    sites: Mapping[str, Site],
    fits: QParams,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    partial: bool = False,
) -> Written:
    """Write ``model`` (of transformers, weights in float32), quantised as in ``assignment``, to the folder ``out``.

    fits: the fitted parameters of the schemes, with the scales that the simulation used. source: the directory that the
    model was loaded from; its tokenizer, generation settings and config are copied. dtype: of weights that are not
    quantised; by default that of ``source``, else the model's.

    The folder is created atomically; an existing one is replaced only with ``overwrite``, and that is noted. Notes name
    sites that a checkpoint can't express. partial: linears that can't be stored as assigned keep their format and are
    noted. Raises CannotExport for such a linear without ``partial`` and if there is nothing to quantise, NotInstalled.
    """
    needed("compressed_tensors", "transformers", "huggingface_hub")
    folder, origin = Path(out), None if source is None else Path(source)
    config = config_json(model, origin)
    dtype = dtype or dtype_of(model, config)
    asked = plan_of(assignment, sites, dtype, experts=True, tables=tables_of(kind_of(model)))
    pieces = pieces_of(model, sites)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {
        name: (parameters[name] if name in parameters else parameters[f"{name}.weight"]).detach()
        for name in asked.weights
    }
    plan, into = storable(model, asked, weights, sites=sites, pieces=pieces, fits=fits, partial=partial)
    names = {name: [piece.name for piece in some] for name, some in pieces.items()}
    options = cache_options(plan, sites) if plan.weights and plan.cache != "kv-fp8" else []
    recipe = config_of(plan, names, optional=bool(options))
    if not recipe.held:
        raise CannotExport("expected a linear or all KV caches to quantise, got none: the model is such a checkpoint")
    tensors = _quantised(weights, plan, pieces, names, fits, into)
    tensors |= _caches(plan, fits) if recipe.held.keys() & plan.caches.keys() else {}
    tensors |= _others(model, tensors, {names[name][0]: name for name in into.rows}, into, dtype)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    config["quantization_config"] = recipe.content
    held = {name: scheme for name, scheme in assignment.items() if name in recipe.held}
    kept = {name: scheme for name, scheme in assignment.items() if name in asked.left or name not in plan.left}
    notes = [*recipe.notes, *lint(kept, sites), *lint_config(recipe.content, held, sites, names)]
    notes += [*lint_scales(tensors, sites), *_warnings(plan, into, dtype)]
    if options:
        notes.append(f"{next(iter(plan.caches))}: KV caches stay as they are but in vLLM with {' '.join(options)}")
    with whole(folder, overwrite) as (index, replaced):
        save(index, tensors, config, model, origin)
    if replaced:
        notes.append(f"{folder}: replaced the folder that was there")
    return Written(folder, held, sum(values.nbytes for values in tensors.values()), tuple(notes), tuple(options))


def _quantised(
    weights: Mapping[str, torch.Tensor],
    plan: Plan,
    pieces: Mapping[str, list[Piece]],
    names: Mapping[str, list[str]],
    fits: QParams,
    into: Folded,
) -> dict[str, torch.Tensor]:
    """Return codes and scales of every quantised linear, and static scales of their inputs, by checkpoint names."""
    groups = groups_of(plan, names)
    tensors: dict[str, torch.Tensor] = {}
    for name, scheme in plan.weights.items():
        for piece in pieces[name]:
            weight = weights[name] if piece.expert is None else weights[name][piece.expert]
            stored = fits.weight(name, scheme, weight, piece.expert)
            assert stored is not None
            part = rows_of(piece.name, stored, piece.start, piece.stop, weight.shape[0])
            rows = weight[piece.start : piece.stop].float()
            rows = rows if stored.columns is None else rows * stored.columns
            local = compressed(piece.name, rows, part, groups[scheme.name])
            if name in into.rows:
                scale = local["weight_scale"]  # the codes are unchanged
                local["weight_scale"] = (scale.float() / into.rows[name][:, None]).to(scale.dtype)
            local |= input_tensors(name, fits.input(name, scheme, weight, piece.expert))
            tensors |= {f"{piece.name}.{key}": values for key, values in local.items()}
    return tensors


def _caches(plan: Plan, fits: QParams) -> dict[str, torch.Tensor]:
    """Return fixed scales of keys and values, for each attention whose cache has them."""
    tensors = {}
    for name, scheme in plan.caches.items():
        if scheme.activation is None or scheme.activation.dynamic:
            continue
        attention = name.partition(":")[0]
        for part, key in (("keys", "k_scale"), ("values", "v_scale")):
            stored = fits.values(name, scheme, part)
            if stored is None or stored.scales is None:
                raise CannotExport(f"{name}: its scale needs calibration data, which showed none")
            tensors[f"{attention}.{key}"] = held_scales(stored.scales.scale, stored).reshape(1)
    return tensors


def _others(
    model: torch.nn.Module,
    quantised: Mapping[str, torch.Tensor],
    divided: Mapping[str, str],
    into: Folded,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return all tensors that aren't quantised, each once, by the architecture's checkpoint names."""
    state = dict(model.state_dict())
    seen: set[tuple[int, int, torch.Size]] = set()
    for key, values in list(state.items()):
        index = (values.untyped_storage().data_ptr(), values.storage_offset(), values.shape)
        if index in seen:  # loading ties tied parameters again
            del state[key]
        seen.add(index)
        if key in into.vectors:
            state[key] = into.vectors[key]
    state = saved(model, state)
    linears = {key.rpartition(".")[0] for key in quantised}
    kept: dict[str, torch.Tensor] = {}
    for key, values in state.items():
        name = key.removesuffix(".weight")
        if name in linears and name != key:
            continue
        if name in divided and name != key:
            values = values / into.rows[divided[name]][:, None]
        values = values.to(dtype) if values.is_floating_point() else values
        kept[key] = values.detach().clone(memory_format=torch.contiguous_format)
    return kept


def _warnings(plan: Plan, into: Folded, dtype: torch.dtype) -> list[str]:
    results = []
    if into.vectors or into.rows:
        results.append(
            f"column factors are folded into norms and linears before, whose weights are rounded to {dtype} again"
        )
    if len({scheme.name for scheme in plan.weights.values()}) > 1:
        results.append(
            f"{next(iter(plan.experts or plan.weights))}: of several schemes transformers 5.23 reads only one right, "
            "in silence, or none, with dequantize=True: open it by assay.precision.export.load_checkpoint"
        )
    if plan.tables & plan.linears.keys():
        results.append(
            f"{next(iter(plan.tables))}: transformers 5.23 makes no quantised table of embeddings: open it by "
            "assay.precision.export.load_checkpoint"
        )
    packed = [name for name, scheme in plan.weights.items() if scheme.weight and not scheme.weight.symmetric]
    if packed:
        results.append(
            f"{packed[0]}: its zero-points are packed, as vLLM reads them; with compressed-tensors 0.20 transformers "
            "loads them by assay.precision.export.load_checkpoint"
        )
    return results


def compressed(
    name: str, weight: torch.Tensor, stored: FakeQuantizer, group: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight [N, K] (float32) by their local names: codes, scales, zero-points.

    stored: has the scales that the codes are computed with. group: the linear's config group. The tensors are
    decompressed with the library as a check. Raises CannotExport if that gives other values than the simulation.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scales = stored.scales
    if scales is None:
        raise CannotExport(f"{name}: expected fitted scales, got none; fit its scheme on calibration data first")
    scheme = QuantizationScheme.model_validate({**group, "targets": [name]})
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    packed = compressor.compress({"weight": weight, **_scales(scales, stored)}, scheme)
    expected = store(weight, stored.quantizer, scales)
    read = compressor.decompress(packed, scheme)["weight"]  # bfloat16 for FP4 and MX formats
    if not torch.equal(read, expected.to(read.dtype)):
        raise CannotExport(
            f"{name}: compressed-tensors reads back {int((read != expected.to(read.dtype)).sum())} of {read.numel()} "
            "values otherwise than simulated; use the version that this one was tested with, or another scheme"
        )
    packed["weight_scale"] = held_scales(packed["weight_scale"], stored)
    return {key: values.detach().clone(memory_format=torch.contiguous_format) for key, values in packed.items()}


def held_scales(scale: torch.Tensor, stored: FakeQuantizer) -> torch.Tensor:
    """Return scales in their storage dtype, which holds them exactly."""
    return scale.to(torch.bfloat16) if stored.quantizer.scale_format == "bfloat16" else scale


def input_tensors(name: str, stored: FakeQuantizer | None) -> dict[str, torch.Tensor]:
    """Return the static scale of a linear's input, or NVFP4's tensor scale; empty if all scales are dynamic."""
    if stored is None:
        return {}
    if stored.quantizer.scale_format == "float8_e4m3fn":
        if stored.divisor is None:
            raise CannotExport(f"{name}: its input's scale needs calibration data, which showed none")
        return {"input_global_scale": stored.divisor.reshape(1)}
    if stored.quantizer.dynamic:
        return {}
    if stored.scales is None:
        raise CannotExport(f"{name}: its input's scale needs calibration data, which showed none")
    return {"input_scale": held_scales(stored.scales.scale, stored).reshape(1)}


def _scales(scales: Scales, stored: FakeQuantizer) -> dict[str, torch.Tensor]:
    """Return scales (float32) and zero-points without the axes that `grouped` keeps."""
    per = stored.quantizer.per

    def laid(x: torch.Tensor) -> torch.Tensor:
        if per == "tensor":
            return x.reshape(1)
        if per == "block":
            return x.squeeze(-1).squeeze(-2)
        return x.squeeze(-1) if per == "group" else x

    tensors = {"weight_scale": laid(scales.scale)}
    if scales.divisor is not None:
        exact = (scales.scale * scales.divisor).to(torch.float8_e4m3fn).to(torch.float32)
        tensors = {"weight_scale": laid(exact), "weight_global_scale": scales.divisor.reshape(1)}
    if scales.zero is not None:
        tensors["weight_zero_point"] = laid(scales.zero).to(torch.int8)
    return tensors
