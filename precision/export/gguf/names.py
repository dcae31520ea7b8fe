"""What the tensors of a model are called in GGUF: by the tables of the package gguf, those of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from assay.configs import architectures
from assay.precision.errors import CannotExport
from assay.precision.observation.sites import Site
from assay.runtime.lazy import optional


def library() -> Any:
    """The package gguf. Raises NotInstalled."""
    return optional("gguf", purpose="--export gguf", extra="gguf")


class TensorNames:
    """Names in GGUF by those of a model's parameters. Raises CannotExport for an architecture that gguf hasn't."""

    def __init__(self, model: torch.nn.Module) -> None:
        gguf = library()
        config = getattr(model, "config", None)
        kind = str(getattr(config, "model_type", type(model).__name__))
        known = {_letters(name): architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
        result = known.get(_letters(architectures.gguf_type(kind)))
        layers = getattr(config, "num_hidden_layers", None)
        if result is None or layers is None:
            raise CannotExport(f"expected a model whose architecture gguf {_version()} has names for, got {kind!r}")
        self.architecture = str(gguf.MODEL_ARCH_NAMES[result])
        self._map = gguf.get_tensor_name_map(result, layers)

    def __getitem__(self, parameter: str) -> str | None:
        """The tensor that a parameter, or that of one expert, is in; None where gguf has no name for it."""
        together = architectures.without_expert(parameter)
        name: str | None = self._map.get_name(together, try_suffixes=(".weight", ".bias"))
        return name

    def of_sites(self, sites: Mapping[str, Site], names: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
        """The tensors of each site with a weight of its own; none where gguf has no name. ``names``: of checkpoints."""
        results = {}
        for name, site in sites.items():
            if site.shape and not site.tied:
                several = [self[f"{piece}.weight"] for piece in names.get(name) or [name]]
                results[name] = tuple(dict.fromkeys(each for each in several if each)) if all(several) else ()
        return results


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")
