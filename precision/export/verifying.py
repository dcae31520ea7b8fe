"""Exports read again by their readers' own code: which scheme each linear gets there, beside what it was to get."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from assay.configs.architectures import fused
from assay.precision.errors import CannotExport
from assay.precision.export.configurations.compressed_tensors import group_of
from assay.precision.export.configurations.torchao import entry_of
from assay.precision.export.manifest import RECORD
from assay.precision.loading.quiet import quiet
from assay.precision.schemes import scheme_named
from assay.runtime.errors import first_line, listed
from assay.runtime.lazy import optional


@dataclass(frozen=True, slots=True)
class Verified:
    """A file of an export, as its reader reads it."""

    file: str
    reader: str
    """The package and its version; empty: none is installed here, so nothing was read."""
    checked: int = 0
    """Linears that were asked for, those that stay as they are too."""
    wrong: tuple[str, ...] = ()
    """A line for each that gets another scheme than it was to."""

    def __str__(self) -> str:
        if not self.reader:
            return f"{self.file}: not verified, no reader of it is installed"
        if self.wrong:
            return f"{self.file}: {len(self.wrong)} lines differ, of {self.checked} linears ({self.reader})"
        return f"{self.file}: {self.checked} linears get what they were to get ({self.reader})"


def verify_export(folder: str | Path) -> list[Verified]:
    """Read the files of an export (a folder with export.json) by the code of those that load them.

    compressed-tensors' own classes parse its configuration and match each linear, and the fused ones of vLLM; of a
    checkpoint its tensors are looked for too. torchao parses its file. Raises CannotExport for another folder,
    NotInstalled.
    """
    place = Path(folder)
    try:
        record = json.loads((place / RECORD).read_text(encoding="utf-8"))
        names, held, files = record["names"], record["held"], record["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CannotExport(f"{place} has no {RECORD} that names linears: give the folder of an export") from None
    found = []
    for file in files:
        for pattern, (format, read) in _READERS.items():
            if file == pattern:
                try:
                    with quiet():
                        found.append(read(place, file, names, held.get(format, {})))
                except (ValueError, TypeError, KeyError) as error:
                    found.append(Verified(file, format, 0, (f"its reader refuses it: {first_line(error)}",)))
    others = [name for name in ("vllm.json", "gguf-types.txt", "mlx_convert.py") if name in files]
    return [*found, *(Verified(name, "") for name in others)]


def _compressed(place: Path, file: str, names: Mapping[str, Sequence[str]], held: Mapping[str, str]) -> Verified:
    library: Any = optional("compressed_tensors", purpose="--verify-export", extra="audit")
    quantization: Any = optional("compressed_tensors.quantization", purpose="--verify-export", extra="audit")
    match: Any = optional("compressed_tensors.utils.match", purpose="--verify-export", extra="audit")
    content = json.loads((place / file).read_text(encoding="utf-8"))
    content = content.get("quantization_config", content)
    config = quantization.QuantizationConfig.model_validate(content)
    linear = torch.nn.Linear(1, 1, device="meta")

    def got(name: str) -> Any:
        """The one scheme that the library gives a linear, or several."""
        groups = config.config_groups.values()
        hits = [each for each in groups if match.is_match(name, linear, each.targets, config.ignore, fused=fused())]
        return hits[0] if len(hits) == 1 else hits or None

    def same(scheme: Any, name: str, wanted: str | None) -> bool:
        if wanted is None or scheme is None or isinstance(scheme, list):
            return bool(wanted is None and scheme is None)
        expected = quantization.QuantizationScheme.model_validate(group_of(scheme_named(wanted), [name]))
        parts = ("weights", "input_activations", "output_activations", "format")
        return all(getattr(scheme, part) == getattr(expected, part) for part in parts)

    every = {name: held.get(site) for site, several in names.items() for name in several}
    wrong = [_line(name, wanted, got(name)) for name, wanted in every.items() if not same(got(name), name, wanted)]
    for name, wanted in _fused(every).items():
        if not same(got(name), name, wanted):
            wrong.append(_line(name, wanted, got(name)))
    if "/" in file:
        wrong += _tensors(place / Path(file).parent, every)
    return Verified(file, f"compressed-tensors {library.__version__}", len(every), tuple(wrong))


def _tensors(folder: Path, every: Mapping[str, str | None]) -> list[str]:
    """A line for each linear whose weight has scales where it shouldn't, or none where it should."""
    safe: Any = optional("safetensors", purpose="--verify-export", extra="audit")
    keys: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe.safe_open(file, "pt") as opened:
            keys |= set(opened.keys())
    return [
        f"{name}: its tensors are {'not ' * (wanted is not None)}quantised"
        for name, wanted in every.items()
        if (f"{name}.weight_scale" in keys) != (wanted is not None)
    ]


def _torchao(place: Path, file: str, names: Mapping[str, Sequence[str]], held: Mapping[str, str]) -> Verified:
    core: Any = optional("torchao.core.config", purpose="--verify-export", extra="audit")
    read = core.config_from_dict(json.loads((place / file).read_text(encoding="utf-8"))).fqn_to_config
    wrong = []
    for site in names:
        entry = entry_of(scheme_named(held[site])) if site in held else None
        expected = None if entry is None else core.config_to_dict(core.config_from_dict(entry))
        given = None if read.get(site) is None else core.config_to_dict(read[site])
        if given != expected:
            wrong.append(_line(site, held.get(site), given and given["_type"]))
    return Verified(file, f"torchao {version('torchao')}", len(names), tuple(wrong))


def _fused(every: Mapping[str, str | None]) -> dict[str, str | None]:
    """Linears that vLLM runs as one, by its names for them, and the scheme that all have."""
    found = {}
    for together, parts in fused().items():
        for name in every:
            head, _, last = name.rpartition(".")
            members = [f"{head}.{part}" for part in parts]
            if last != parts[0] or "experts" in head or not all(member in every for member in members):
                continue
            if len({every[member] for member in members}) == 1:
                found[f"{head}.{together}"] = every[name]
    return found


def _line(name: str, wanted: str | None, got: Any) -> str:
    given = "none" if got is None else listed([str(each) for each in got]) if isinstance(got, list) else str(got)
    return f"{name}: expected {wanted or 'none'}, gets {' '.join(given.split())[:160]}"


_READERS: dict[str, tuple[str, Callable[[Path, str, Mapping[str, Sequence[str]], Mapping[str, str]], Verified]]] = {
    "quantization_config.json": ("compressed-tensors", _compressed),
    "checkpoint/config.json": ("checkpoint", _compressed),
    "torchao.json": ("torchao", _torchao),
}
"""Files of an export that something installed here reads: the format, and what reads it."""
