"""`export`: writes an assignment as configuration files of serving stacks and as a checkpoint, into one folder.

Also the schemes that an audit may choose from when its recommendation is to be exported.
"""

import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay.formats.errors import UnknownOption
from assay.precision.errors import CannotExport
from assay.precision.export import manifest
from assay.precision.export.checkpoint.pieces import pieces_of
from assay.precision.export.checkpoint.writing import config_json, dtype_of, unstorable, write_checkpoint
from assay.precision.export.configurations import TARGETS
from assay.precision.export.configurations.compressed_tensors import tables_of
from assay.precision.export.lint import lint
from assay.precision.export.manifest import OPTIONS, Part
from assay.precision.export.plan import Request, plan_of
from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Site
from assay.precision.schemes import SCHEMES
from assay.precision.targets import formats_of, kind_of, target_named
from assay.runtime.files import OwnFolder

FORMATS = tuple(TARGETS)
"""The configurations that `export` can write."""
_NOTHING = "can express nothing of this assignment, so nothing is written for it"


@dataclass(frozen=True, slots=True)
class Exported:
    """The files written, and a line for each assigned feature that they lack or engines would change silently."""

    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    refused: str = ""
    """Why a requested checkpoint could not be written; empty otherwise."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the files and the checkpoint's folder."""
        return tuple(path for part in self.parts for path in part.paths)


def export(
    model: torch.nn.Module,
    assignment: Mapping[str, str],
    out: str | Path,
    formats: Collection[str] = FORMATS,
    *,
    sites: Mapping[str, Site],
    fits: QParams,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    target: str | None = None,
    checkpoint: bool = False,
    overwrite: bool = False,
    partial: bool = False,
) -> Exported:
    """Write an assignment of site names to scheme names into the folder ``out``, in each of ``formats``.

    Writes one file per format, with "vllm" also the command line; with ``checkpoint`` a quantised checkpoint in
    ``out/checkpoint``; and ``out/export.json``, which records the assignment. A format that can express none of the
    assignment is not written but noted. source: the directory or hub name of the model. dtype: of the weights that are
    not quantised; by default the dtype of ``source``, else the model's. target: the device that `lint` checks against.

    partial: linears that the checkpoint can't hold as assigned keep their format and are noted; if the checkpoint can't
    be written even then, only the checkpoint is missing. overwrite: first remove all files of an earlier export into
    ``out``. Other files in ``out`` are never touched. On an error, the folder is unchanged.

    Raises CannotExport, NotInstalled, UnknownDevice, UnknownScheme.
    """
    unknown = [name for name in formats if name not in TARGETS]
    if unknown:
        raise CannotExport(f"expected formats of {', '.join(FORMATS)}, got {unknown[0]!r}")
    folder = Path(out)
    origin = Path(source) if source is not None and Path(source).is_dir() else None
    if dtype is None:
        dtype = dtype_of(model, config_json(model, origin)) if hasattr(model, "config") else torch.bfloat16
    request = _request(model, sites, assignment=assignment, dtype=dtype, model=str(source or "MODEL"), fits=fits)
    fuses = checkpoint or not all(TARGETS[name].unfused for name in formats)
    said: dict[str, list[str]] = {line: ["lint"] for line in lint(assignment, sites, target, fuses=fuses)}

    def note(who: str, lines: Collection[str]) -> None:
        for line in lines:  # a note that several formats share is kept once
            said.setdefault(line, []).append(who)

    texts: dict[str, str | bytes] = {}
    parts: list[Part] = []
    tensors: dict[str, Sequence[str]] = {}
    refused = ""
    for name in dict.fromkeys(formats):
        recipe = TARGETS[name].recipe(request)
        files = TARGETS[name].files(request, recipe) if recipe.held else {}
        note(name, [*recipe.notes, *([] if files else [_NOTHING])])
        if files:
            parts.append(Part(name, tuple(folder / file for file in files), recipe.held))
            tensors |= recipe.tensors
        texts |= files
    plan = plan_of(assignment, sites, dtype, experts=True, tables=tables_of(kind_of(model)))
    if checkpoint and not (plan.linears or plan.experts or plan.cache == "kv-fp8"):
        note("checkpoint", [_NOTHING])
        checkpoint = False
    manifest.check(folder, texts, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with closing(OwnFolder(f".{folder.name}.assay-", folder.parent)) as room:
        index = room.path / "new"  # has the permissions of a folder that the user makes; the temporary one has not
        index.mkdir()
        for file, text in texts.items():
            (index / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        if checkpoint:
            try:
                options: dict[str, Any] = {"source": origin, "dtype": dtype, "partial": partial}
                made = write_checkpoint(model, assignment, index / "checkpoint", sites=sites, fits=fits, **options)
            except CannotExport as error:
                if not partial:
                    raise
                refused = str(error)
                note("checkpoint", [f"not written: {refused}"])
            else:
                paths = [folder / "checkpoint"]
                if made.options:
                    command = shlex.join(["vllm", "serve", "checkpoint", *made.options])
                    (index / OPTIONS).write_text(f"{command}\n", encoding="utf-8")
                    paths.append(folder / OPTIONS)
                parts.append(Part("checkpoint", tuple(paths), made.held, made.bytes))
                note("checkpoint", [line for line in made.notes if said.get(line) != ["lint"]])
        notes = tuple(f"{', '.join(who)}: {line}" for line, who in said.items())
        matrices = {name: site for name, site in sites.items() if site.type in ("linear", "embedding")}
        about = {
            "held": {part.format: part.held for part in parts},
            "names": {name: list(request.names.get(name) or [name]) for name in matrices},
            "tensors": tensors,
            "tied": [name for name, site in matrices.items() if site.tied],
            "tables": [name for name, site in matrices.items() if site.type == "embedding"],
        }
        manifest.move(index, folder, assignment, notes, overwrite, about)
    return Exported(tuple(parts), notes, refused)


def unexportable(
    model: torch.nn.Module,
    sites: Mapping[str, Site],
    formats: Collection[str],
    checkpoint: bool = False,
    target: str | None = None,
) -> list[str]:
    """Return the sites with a weight that one of ``formats``, or the checkpoint, can hold only in its original format.

    Pass them as ``fixed`` to `Audit.recommend` when the model will be exported. target: as in `audit`; without an
    engine, embedding tables are among them except for GGUF. Raises CannotExport, NotInstalled, UnknownDevice.
    """
    own = [TARGETS[name].fixed for name in formats]
    results = list(unstorable(model, sites)) if checkpoint or None in own else []
    plain = [TARGETS[name] for name in formats if TARGETS[name].fixed is None]
    if (checkpoint or plain) and not (target_named(target).engine and all(each.tables for each in plain)):
        results += [name for name, site in sites.items() if site.type == "embedding"]
    request = _request(model, sites, assignment={})
    return list(dict.fromkeys([*results, *(name for fixed in own if fixed is not None for name in fixed(request))]))


def clear(out: str | Path) -> bool:
    """Remove the files that an earlier export wrote into the folder ``out``; return whether there were any."""
    return manifest.remove(Path(out))


def _request(module: torch.nn.Module, sites: Mapping[str, Site], **rest: Any) -> Request:
    names = {name: [piece.name for piece in pieces] for name, pieces in pieces_of(module, sites).items()}
    return Request(sites=sites, names=names, module=module, **rest)


def offered(
    formats: Collection[str] | None, target: str | None, exports: Collection[str], checkpoint: bool = False
) -> tuple[str, ...]:
    """Return the names of the schemes that the target, every export and the ``checkpoint`` support.

    formats: the schemes requested by name; None: the default ones. Raises UnknownOption for a scheme that the target
    lacks, for an export that its engine doesn't read, and if no scheme is left; also the errors of `formats_of` of
    `precision.targets`.
    """
    requested = dict.fromkeys([*exports, *(["compressed-tensors"] if checkpoint else [])])
    engine = target_named(target).engine
    if formats is None and engine is None and "gguf" in requested:  # GGUF has types that no other format has
        names = formats_of(None, "llama.cpp")
    else:
        names = formats_of(formats, target)
    for export in requested:
        if engine is not None and export not in engine.exports:
            read = ", ".join(engine.exports)
            raise UnknownOption(f"{engine.name} reads no {export}: take its {read}, or leave the export away")
    results = tuple(name for name in names if not any(TARGETS[export].lacks(SCHEMES[name]) for export in requested))
    if not results:
        what = "none of the formats" if formats is not None else "no format"
        raise UnknownOption(f"{what} is in all of {', '.join(requested)}: export them apart, or choose others")
    return results


def allow_unfused(target: str | None, exports: Collection[str]) -> bool | None:
    """Return whether all exports allow a scheme per linear; None: the target decides."""
    if not exports or target_named(target).engine is not None:
        return None
    return all(TARGETS[name].unfused for name in exports) or None
