"""compressed-tensors' configurations, alone and in checkpoints, read by the library and matched as engines match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from assay.configs.architectures import fused, products_of
from assay.precision.export.configurations.compressed_tensors import group_of
from assay.precision.export.manifest import OPTIONS
from assay.precision.export.verifying.verified import Asked, Verified, difference
from assay.precision.schemes import scheme_named
from assay.runtime.modules import optional


def configuration(asked: Asked, file: str) -> Verified:
    """The group of each linear in a ``quantization_config``. Raises NotInstalled, and what the library raises."""
    return _read(asked, file, asked.held["compressed-tensors"])


def checkpoint(asked: Asked, file: str) -> Verified:
    """The same of a checkpoint's config.json, and whether its tensors are quantised where they should be."""
    return _read(asked, file, asked.held["checkpoint"], tensors=True)


def _read(asked: Asked, file: str, held: Mapping[str, str], *, tensors: bool = False) -> Verified:
    library: Any = optional("compressed_tensors", purpose="--verify-export", extra="audit")
    quantization: Any = optional("compressed_tensors.quantization", purpose="--verify-export", extra="audit")
    match: Any = optional("compressed_tensors.utils.match", purpose="--verify-export", extra="audit")
    content = json.loads((asked.place / file).read_text(encoding="utf-8"))
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
            return wanted is None and scheme is None
        expected = quantization.QuantizationScheme.model_validate(group_of(scheme_named(wanted), [name]))
        parts = ("weights", "input_activations", "output_activations", "format")
        return all(getattr(scheme, part) == getattr(expected, part) for part in parts)

    every = {name: held.get(site) for site, several in asked.names.items() for name in several}
    wrong = [difference(name, wanted, got(name)) for name, wanted in every.items() if not same(got(name), name, wanted)]
    for name, members in products_of(every).items():
        wanted = every[members[0]]
        if len({every[member] for member in members}) == 1 and not same(got(name), name, wanted):
            wrong.append(difference(name, wanted, got(name)))
    caches = [scheme for scheme in held.values() if scheme_named(scheme).weight is None]
    cached = caches[0] if caches and OPTIONS not in asked.files else None
    if (config.kv_cache_scheme is None) != (cached is None):
        wrong.append(difference("KV caches", cached, config.kv_cache_scheme))
    if tensors:
        wrong += _tensors((asked.place / file).parent, every)
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
