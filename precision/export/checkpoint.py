"""A quantised checkpoint in the compressed-tensors format: what is loaded equals what was simulated."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from assay.precision.errors import CannotExport, NotInstalled
from assay.precision.export.compressed_tensors import config_of, groups_of, why_not
from assay.precision.export.folding import Folded, folded
from assay.precision.export.lint import lint, lint_config
from assay.precision.export.plan import Plan, plan_of
from assay.precision.export.tensors import compressed, input_tensors
from assay.precision.model.menu import Fits
from assay.precision.model.sites import Site
from assay.precision.schemes import Stored

__all__ = ["Written", "write_checkpoint"]

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
"""Files of a model's directory that belong beside its weights."""
_SHARD = "5GB"


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint on disk."""

    path: Path
    held: dict[str, str]
    """What of the assignment it holds: simulated, this gives what the loaded model computes."""
    notes: tuple[str, ...]
    """What it doesn't hold, and what loaders would do in silence, a line each."""


def write_checkpoint(
    model: torch.nn.Module,
    assignment: Mapping[str, str],
    out: str | Path,
    *,
    sites: Mapping[str, Site],
    fits: Fits,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Written:
    """Write ``model`` (of transformers, weights in float32) as ``assignment`` has it to the folder ``out``.

    fits: how the schemes store what, with the scales that the simulation used. source: the directory that the model
    was loaded from; its tokenizer, generation settings and config are taken over. dtype: of what isn't quantised; by
    default that which ``source`` says, else the model's.

    The folder appears whole or not at all; one that exists is replaced only with ``overwrite``, and that is noted.
    Notes tell which sites a checkpoint can't express. Raises CannotExport for a linear that can't be stored as
    assigned, NotInstalled.
    """
    _need("compressed_tensors", "transformers", "huggingface_hub")
    folder, origin = Path(out), None if source is None else Path(source)
    config = _config(model, origin)
    dtype = dtype or _dtype(model, config)
    plan = plan_of(assignment, sites, dtype)
    _refuse(model, plan)
    recipe = config_of(plan)
    fitted = {name: stored for name, stored, _ in _fitted(model, plan, fits)}
    columns = {name: stored.columns for name, stored in fitted.items() if stored.columns is not None}
    into = folded(model, columns)
    tensors = _quantised(model, plan, fits, into)
    tensors |= _caches(plan, fits, recipe.content)
    tensors |= _others(model, plan, into, dtype)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    content = recipe.content
    if content["config_groups"] or content["kv_cache_scheme"]:
        config["quantization_config"] = content
    cached = plan.caches if content["kv_cache_scheme"] is not None else {}
    held = {name: scheme for name, scheme in assignment.items() if name in plan.linears or name in cached}
    notes = [*recipe.notes, *lint(assignment, sites), *lint_config(content, held, sites)]
    notes += _warnings(plan, into, dtype)
    with _whole(folder, overwrite) as (place, replaced):
        _save(place, tensors, config, model, origin)
    if replaced:
        notes.append(f"{folder}: replaced the folder that was there")
    return Written(folder, held, tuple(notes))


def _refuse(model: torch.nn.Module, plan: Plan) -> None:
    """Raise where a linear can't be stored as assigned: a checkpoint that holds less than was asked would mislead."""
    reasons = []
    shared: dict[int, list[str]] = {}
    for parameter, values in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(values), []).append(parameter)
    for name, scheme in plan.linears.items():
        reason = why_not(scheme)
        module = model.get_submodule(name) if reason is None else None
        if module is not None and type(module) is not torch.nn.Linear:
            reason = f"it is a {type(module).__name__}; compressed-tensors stores torch.nn.Linear"
        elif module is not None and len(shared[id(module.get_parameter("weight"))]) > 1:
            reason = f"it shares its weight with {' and '.join(shared[id(module.get_parameter('weight'))])}"
        if reason is not None:
            reasons.append(f"{name} can't be stored in {scheme.name}: {reason}")
    if reasons:
        raise CannotExport(reasons[0] + (f" (and {len(reasons) - 1} more linears)" if len(reasons) > 1 else ""))


def _fitted(model: torch.nn.Module, plan: Plan, fits: Fits) -> Iterator[tuple[str, Stored, Stored | None]]:
    """How each quantised linear's weight and input are stored."""
    for name, scheme in plan.linears.items():
        weight = model.get_submodule(name).get_parameter("weight").detach()
        stored = fits.weight(name, scheme, weight)
        assert stored is not None
        yield name, stored, fits.input(name, scheme, weight)


def _quantised(model: torch.nn.Module, plan: Plan, fits: Fits, into: Folded) -> dict[str, torch.Tensor]:
    """Codes and scales of every quantised linear, and static scales of their inputs."""
    groups = groups_of(plan)
    tensors: dict[str, torch.Tensor] = {}
    for name, stored, of_input in _fitted(model, plan, fits):
        weight = model.get_submodule(name).get_parameter("weight").detach().float()
        if stored.columns is not None:
            weight = weight * stored.columns
        local = compressed(name, weight, stored, groups[plan.linears[name].name])
        if name in into.rows:
            local["weight_scale"] = _divided(name, stored, local["weight_scale"], into.rows[name])
        tensors |= {f"{name}.{key}": values for key, values in {**local, **input_tensors(name, of_input)}.items()}
    return tensors


def _divided(name: str, stored: Stored, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Scales [N, ...] of a weight whose rows are divided, rounded to their format again; its codes stay as they are."""
    quantizer = stored.quantizer
    if quantizer.per not in ("row", "group") or quantizer.scale_format not in ("float32", "bfloat16"):
        raise CannotExport(
            f"{name}: its scales can't take column factors of the linear behind; take another scheme there"
        )
    return (scale.float() / rows[:, None]).to(scale.dtype)


def _caches(plan: Plan, fits: Fits, content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Scales of keys and values, for each attention."""
    if content["kv_cache_scheme"] is None:
        return {}
    tensors = {}
    for name, scheme in plan.caches.items():
        attention = name.partition(":")[0]
        for part, key in (("keys", "k_scale"), ("values", "v_scale")):
            stored = fits.values(name, scheme, part)
            if stored is None or stored.scales is None:
                raise CannotExport(f"{name}: its scale needs calibration data, which showed none")
            tensors[f"{attention}.{key}"] = stored.scales.scale.reshape(1)
    return tensors


def _others(model: torch.nn.Module, plan: Plan, into: Folded, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Everything that isn't quantised, each tensor once, by the names that checkpoints of the architecture use."""
    conversion = import_module("transformers.core_model_loading")
    state = conversion.revert_weight_conversion(model, dict(model.state_dict()))
    renamed = [name for name in plan.linears if f"{name}.weight" not in state]
    if renamed:
        raise CannotExport(
            f"{renamed[0]} has another name in checkpoints of this architecture, which isn't supported yet"
        )
    kept: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for key, values in state.items():
        if key.removesuffix(".weight") in plan.linears:
            continue
        place = (values.untyped_storage().data_ptr(), values.storage_offset())
        if place in seen:  # loaded again, what is tied is tied again
            continue
        seen.add(place)
        kept[key] = _held(key, values, into, dtype)
    return kept


def _held(key: str, values: torch.Tensor, into: Folded, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that isn't quantised, as it is stored."""
    if key in into.vectors:
        values = into.vectors[key]
    elif key.removesuffix(".weight") in into.rows:
        values = values / into.rows[key.removesuffix(".weight")][:, None]
    return (values.to(dtype) if values.is_floating_point() else values).detach().clone().contiguous()


def _warnings(plan: Plan, into: Folded, dtype: torch.dtype) -> list[str]:
    found = []
    scaled = [
        name
        for name, scheme in plan.linears.items()
        if scheme.weight is not None and scheme.weight.scale_format == "float32"
    ]
    if scaled and dtype != torch.float32:
        kept = str(dtype).removeprefix("torch.")
        found.append(
            f"{scaled[0]} and all with float32 scales: transformers rounds them to {kept} unless it loads with "
            "dtype=torch.float32; serving engines keep them"
        )
    if into.vectors or into.rows:
        found.append(
            f"column factors are folded into norms and linears before, whose weights are rounded to {dtype} again"
        )
    packed = [
        name for name, scheme in plan.linears.items() if scheme.weight is not None and not scheme.weight.symmetric
    ]
    if packed:
        found.append(
            f"{packed[0]}: its zero-points are packed, as vLLM reads them; transformers 5.23 with compressed-tensors "
            "0.20 loads them with dequantize=True only"
        )
    return found


def _save(
    place: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], model: torch.nn.Module, origin: Path | None
) -> None:
    hub = import_module("huggingface_hub")
    hub.save_torch_state_dict(tensors, place, max_shard_size=_SHARD, metadata={"format": "pt"})
    if origin is not None:
        for pattern in _COPIED:
            for file in origin.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, place / file.name)
    generation = getattr(model, "generation_config", None)
    if generation is not None and not (place / "generation_config.json").exists():
        generation.save_pretrained(place)
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _config(model: torch.nn.Module, origin: Path | None) -> dict[str, Any]:
    """The model's config.json, as its directory has it, or as transformers writes it."""
    if origin is not None and (origin / "config.json").is_file():
        found: dict[str, Any] = json.loads((origin / "config.json").read_text(encoding="utf-8"))
        return found
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        raise CannotExport(
            "expected a model of transformers, which has a config, got none: export its configuration only"
        )
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**written, "architectures": [type(model).__name__]}


def _dtype(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.dtype:
    said = config.get("dtype") or config.get("torch_dtype")
    found = getattr(torch, str(said).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else next(model.parameters()).dtype


def _need(*packages: str) -> None:
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            raise NotInstalled(f"a checkpoint needs {package}: pip install kernel-assay[audit]") from None


@contextmanager
def _whole(folder: Path, overwrite: bool) -> Iterator[tuple[Path, bool]]:
    """A folder to write into that takes its name at the end, and whether it takes that of another."""
    replaced = folder.exists()
    if replaced and not overwrite:
        raise CannotExport(f"{folder} exists: give another folder, or pass overwrite=True to replace it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        place = room / "new"
        place.mkdir()  # with the rights that a folder of the user has
        yield place, replaced
        if replaced:
            os.rename(folder, room / "old")
        try:
            os.rename(place, folder)
        except OSError:
            if replaced:
                os.rename(room / "old", folder)
            raise
    finally:
        shutil.rmtree(room, ignore_errors=True)
