"""Writes a quantised checkpoint in the compressed-tensors format that loads with exactly the simulated values."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from assay.precision.errors import CannotExport
from assay.precision.export.checkpoint.folding import Folded, folded
from assay.precision.export.checkpoint.pieces import Piece, pieces_of, rows_of, saved
from assay.precision.export.configurations.compressed_tensors import config_of, groups_of, tables_of, why_not
from assay.precision.export.configurations.vllm import cache_options
from assay.precision.export.lint import lint, lint_config, lint_scales
from assay.precision.export.plan import Plan, plan_of
from assay.precision.loading.quiet import quiet
from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Site
from assay.precision.observation.streaming import streamed_parameters
from assay.precision.schemes import FakeQuantizer, store
from assay.precision.targets import engines, kind_of
from assay.runtime.files import OwnFolder
from assay.runtime.modules import optional


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
    requested = plan_of(assignment, sites, dtype, experts=True, tables=tables_of(kind_of(model)))
    pieces = pieces_of(model, sites)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {
        name: (parameters[name] if name in parameters else parameters[f"{name}.weight"]).detach()
        for name in requested.weights
    }
    plan, into = _storable(model, requested, weights, sites=sites, pieces=pieces, fits=fits, partial=partial)
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
    kept = {name: scheme for name, scheme in assignment.items() if name in requested.left or name not in plan.left}
    notes = [*recipe.notes, *lint(kept, sites), *lint_config(recipe.content, held, sites, names)]
    notes += [*lint_scales(tensors, sites), *_warnings(plan, into, dtype)]
    if options:
        notes.append(f"{next(iter(plan.caches))}: KV caches stay as they are but in vLLM with {' '.join(options)}")
    with _whole(folder, overwrite) as (index, replaced):
        _save(index, tensors, config, model, origin)
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
            local = _compressed(piece.name, rows, part, groups[scheme.name])
            if name in into.rows:
                scale = local["weight_scale"]  # the codes are unchanged
                local["weight_scale"] = (scale.float() / into.rows[name][:, None]).to(scale.dtype)
            local |= _input_tensors(name, fits.input(name, scheme, weight, piece.expert))
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
            tensors[f"{attention}.{key}"] = _held_scales(stored).reshape(1)
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


def _compressed(
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
    packed = compressor.compress({"weight": weight, **_scales(stored)}, scheme)
    expected = store(weight, stored.quantizer, scales)
    read = compressor.decompress(packed, scheme)["weight"]  # bfloat16 for FP4 and MX formats
    if not torch.equal(read, expected.to(read.dtype)):
        raise CannotExport(
            f"{name}: compressed-tensors reads back {int((read != expected.to(read.dtype)).sum())} of {read.numel()} "
            "values otherwise than simulated; use the version that this one was tested with, or another scheme"
        )
    packed["weight_scale"] = _held_scales(stored, packed["weight_scale"])
    return {key: values.detach().clone(memory_format=torch.contiguous_format) for key, values in packed.items()}


def _held_scales(stored: FakeQuantizer, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return the scales, or ``scale``, in their storage dtype, which holds them exactly."""
    if scale is None:
        assert stored.scales is not None
        scale = stored.scales.scale
    return scale.to(torch.bfloat16) if stored.quantizer.scale_format == "bfloat16" else scale


def _input_tensors(name: str, stored: FakeQuantizer | None) -> dict[str, torch.Tensor]:
    """Return the static scale of a linear's input, or NVFP4's tensor scale; empty if all scales are dynamic."""
    fine = stored is not None and stored.quantizer.scale_format == "float8_e4m3fn"
    if stored is None or (stored.quantizer.dynamic and not fine):
        return {}
    if stored.divisor is None if fine else stored.scales is None:
        raise CannotExport(f"{name}: its input's scale needs calibration data, which showed none")
    if stored.divisor is not None:
        return {"input_global_scale": stored.divisor.reshape(1)}
    return {"input_scale": _held_scales(stored).reshape(1)}


def _scales(stored: FakeQuantizer) -> dict[str, torch.Tensor]:
    """Return scales (float32) and zero-points without the axes that `grouped` keeps."""
    scales, per = stored.scales, stored.quantizer.per
    assert scales is not None

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


def unstorable(model: torch.nn.Module, sites: Mapping[str, Site]) -> dict[str, str]:
    """Return the linears and embedding tables that can't be stored in any scheme, with the reasons.

    Pass their names as ``fixed`` to `Audit.recommend` when the model will be exported.
    """
    vllm, kind = engines()["vllm"], kind_of(model)
    reasons = _never(model, sites, pieces_of(model, sites))
    if kind not in vllm.tables_of:
        why = f"vLLM {vllm.version} loads no quantised table of {kind or 'such a model'}"
        reasons |= {name: why for name, site in sites.items() if site.type == "embedding"}
    return {name: reasons[name] for name in sites if name in reasons}


def _storable(
    model: torch.nn.Module,
    plan: Plan,
    weights: Mapping[str, torch.Tensor],
    *,
    sites: Mapping[str, Site],
    pieces: Mapping[str, list[Piece]],
    fits: QParams,
    partial: bool,
) -> tuple[Plan, Folded]:
    """Return the part of a plan that a checkpoint can hold, and the folded column factors.

    Without ``partial``, raises CannotExport unless it is the entire plan: a checkpoint with less would mislead. With
    it, linears that can't be stored keep their format, together with those that engines fuse with them, and are noted.
    """
    if streamed_parameters(model):
        raise CannotExport("a checkpoint is written from weights in memory; load the model without max_memory")
    refused, never = {}, _never(model, sites, pieces)
    for name, scheme in plan.weights.items():
        reason = why_not(scheme)
        factors = scheme.transform != "none" or (scheme.weight is not None and scheme.weight.rule == "awq")
        if reason is None and factors and name in plan.experts:
            reason = "experts share one input, which column factors of each can't divide"
        if reason := reason or never.get(name):
            refused[name] = reason
    if refused and not partial:
        name, reason = next(iter(refused.items()))
        scheme = plan.weights[name]
        more = f" (and {len(refused) - 1} more linears)" if len(refused) > 1 else ""
        raise CannotExport(f"{name} can't be stored in {scheme.name}: {reason}{more}")
    columns, rigid = {}, set()
    for name, scheme in plan.linears.items():
        stored = None if name in refused else fits.weight(name, scheme, weights[name])
        if stored is None:
            continue
        if stored.columns is not None:
            columns[name] = stored.columns
        quantizer = stored.quantizer
        if quantizer.per not in ("row", "group") or quantizer.scale_format not in ("float32", "bfloat16"):
            rigid.add(name)  # its rows can't be divided by dividing their scales
    into = folded(model, columns, rigid, refused if partial else None)
    if not refused:
        return plan, into
    plan = _without(plan, sites, refused)
    return plan, folded(model, {name: factors for name, factors in columns.items() if name in plan.linears}, rigid)


def _without(plan: Plan, sites: Mapping[str, Site], refused: dict[str, str]) -> Plan:
    """Return a plan without refused linears and those fused with them; note all of them."""
    every = plan.weights
    units = {sites[name].unit: name for name in reversed(refused)}
    left = {name for name in every if name in refused or sites[name].unit in units}
    for name in every:
        if name in left:
            beside = f"it is run as one with {units[sites[name].unit]}, which can't be stored"
            plan.note(name, every[name].name, f"stays as it is in the checkpoint: {refused.get(name, beside)}")
    return replace(
        plan,
        linears={name: scheme for name, scheme in plan.linears.items() if name not in left},
        experts={name: scheme for name, scheme in plan.experts.items() if name not in left},
        left=(*plan.left, *(name for name in every if name in left)),
    )


def _never(model: torch.nn.Module, sites: Mapping[str, Site], pieces: Mapping[str, list[Piece]]) -> dict[str, str]:
    """Return the linears and tables that can't be stored in any scheme, with the reasons."""
    shared: dict[int, list[str]] = {}
    for name, values in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(values), []).append(name)
    modules, results = dict(model.named_modules()), {}
    for name, site in sites.items():
        if site.type not in ("linear", "embedding"):
            continue
        module, two = modules.get(name), len(site.shape) == 2
        stored = torch.nn.Linear if site.type == "linear" else torch.nn.Embedding
        if two and type(module) is not stored:
            kind = "parameter" if module is None else type(module).__name__
            results[name] = f"it is a {kind}; compressed-tensors stores torch.nn.{stored.__name__}"
        elif two and len(tied := shared.get(id(getattr(module, "weight", None)), [])) > 1:
            results[name] = f"it shares its weight with {' and '.join(tied)}"
        elif not pieces.get(name):
            results[name] = "its rows are laid out otherwise in checkpoints of this architecture"
    return results


_COPIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
    "preprocessor_config.json",
)
"""Files of a model's directory that a checkpoint needs besides the weights."""


def _save(
    index: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], model: torch.nn.Module, origin: Path | None
) -> None:
    """Write tensors, config and the files copied from the model's directory into an empty folder."""
    hub = optional("huggingface_hub", purpose="a checkpoint", extra="audit")
    hub.save_torch_state_dict(tensors, index, max_shard_size="5GB", metadata={"format": "pt"})
    if origin is not None:
        for pattern in _COPIED:
            for file in origin.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, index / file.name)
    generation = getattr(model, "generation_config", None)
    if generation is not None and not (index / "generation_config.json").exists():
        generation.save_pretrained(index)
    (index / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in index.glob("*.safetensors"):  # safetensors creates files that only their owner can read
        shutil.copymode(index / "config.json", file)


def config_json(model: torch.nn.Module, origin: Path | None) -> dict[str, Any]:
    """Return the model's config.json from its directory, or as transformers writes it."""
    if origin is not None and (origin / "config.json").is_file():
        results: dict[str, Any] = json.loads((origin / "config.json").read_text(encoding="utf-8"))
        return results
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        raise CannotExport(
            "expected a model of transformers, which has a config, got none: export its configuration only"
        )
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**written, "architectures": [type(model).__name__]}


def dtype_of(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.dtype:
    """Return the checkpoint dtype in a config; else the model's."""
    said = config.get("dtype") or config.get("torch_dtype")
    result = getattr(torch, str(said).removeprefix("torch."), None)
    return result if isinstance(result, torch.dtype) else next(model.parameters()).dtype


def needed(*packages: str) -> None:
    """Raise NotInstalled if a package that checkpoints need is missing."""
    for package in packages:
        with quiet():
            optional(package, purpose="a checkpoint", extra="audit")


@contextmanager
def _whole(folder: Path, overwrite: bool) -> Iterator[tuple[Path, bool]]:
    """Yield a temporary folder that is renamed to ``folder`` at the end, and whether it replaces an existing one."""
    replaced = folder.exists()
    if replaced and not overwrite:
        raise CannotExport(f"{folder} exists: give another folder, or pass overwrite=True to replace it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with closing(OwnFolder(f".{folder.name}.assay-", folder.parent)) as room:
        index = room.path / "new"
        index.mkdir()  # has the permissions of a folder that the user makes; the temporary one has not
        yield index, replaced
        if replaced:
            os.rename(folder, room.path / "old")
        try:
            os.rename(index, folder)
        except BaseException:
            if replaced:
                os.rename(room.path / "old", folder)
            raise
