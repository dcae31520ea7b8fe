"""Models that are code of the user or files of torch: a factory, an exported program, a pickled module."""

import difflib
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from assay.precision.errors import BadModel, UnknownModel, UntrustedModel
from assay.precision.loading.loaded import Loaded, commonest_dtype
from assay.precision.loading.quiet import one_line, quiet
from assay.runtime.own_modules import import_own

_PICKLED = ("custom_obj_", "opaque_obj_")
"""Names of an archive's entries that torch.export reads with the plain unpickler."""


def from_factory(module: str, factory: str, dtype: torch.dtype) -> Loaded:
    """What ``module:factory`` makes when it is called without arguments: a module, an exported program, or a module and
    its tokenizer of transformers, with which a text can be cut. Raises `UnknownModel` and `BadModel`."""
    target = f"{module}:{factory}"
    result: Any = import_own(module, f"model {target!r}", UnknownModel)
    for part in factory.split("."):
        if not hasattr(result, part):
            near = difflib.get_close_matches(part, dir(result), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownModel(f"model {target!r}: {module} has no {part!r}{hint}")
        result = getattr(result, part)
    made = _called(result, target)
    if isinstance(made, torch.export.ExportedProgram):
        return from_exported(made, target, None)
    if isinstance(made, tuple) and len(made) == 2:
        made, tokenizer = made
        return _with(_loaded(made, target, None, dtype), tokenizer)
    return _loaded(made, target, None, dtype)


def _with(loaded: Loaded, tokenizer: Any) -> Loaded:
    """The model with a tokenizer, checked against its vocabulary and length as far as its config tells them."""
    if not callable(tokenizer) or not hasattr(tokenizer, "pad_token_id"):
        given = type(tokenizer).__name__
        raise BadModel(f"model {loaded.name!r} gives {given} beside its module; expected a tokenizer of transformers")
    config = getattr(loaded.model, "config", None)
    sizes = (getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None))
    return replace(loaded, tokenizer=tokenizer, vocabulary=sizes[0], positions=sizes[1])


def _called(factory: Any, target: str) -> Any:
    if isinstance(factory, torch.nn.Module):
        return factory
    if not callable(factory):
        raise BadModel(f"model {target!r} is of type {type(factory).__name__}; expected a function that gives a Module")
    try:
        return factory()
    except Exception as error:
        raise BadModel(f"model {target!r} fails when it is called without arguments ({one_line(error)})") from error


def _loaded(made: Any, name: str, path: Path | None, dtype: torch.dtype) -> Loaded:
    if not isinstance(made, torch.nn.Module):
        raise BadModel(f"model {name!r} gives {type(made).__name__}; expected a torch.nn.Module")
    weights = [weight for weight in made.parameters() if weight.is_floating_point()]
    lazy = any(torch.nn.parameter.is_lazy(weight) for weight in weights)
    stored = torch.float32 if lazy else commonest_dtype((weight.dtype, weight.numel()) for weight in weights)
    return Loaded(made.to(dtype=dtype).eval(), None, "module", name, path, stored)


def from_pickle(path: Path, dtype: torch.dtype) -> Loaded:
    """The module pickled in a file of torch.save; reading it runs code that the file brings. Raises `BadModel`."""
    try:
        with quiet():
            made = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise BadModel(f"{path} can't be read ({one_line(error)}); expected a Module stored by torch.save") from None
    if isinstance(made, dict):
        raise BadModel(
            f"{path} holds a dict of {len(made)} entries without the model's code; "
            "give package.module:factory, a function that builds the Module and loads them"
        )
    return _loaded(made, path.stem, path, dtype)


def from_exported(
    program: torch.export.ExportedProgram | Path, name: str, path: Path | None, *, trust: bool = False
) -> Loaded:
    """An exported program as a module; a ``.pt2`` file with pickled objects needs ``trust``.

    Raises `BadModel` for a damaged file, `UntrustedModel`.
    """
    if isinstance(program, Path):
        program = _read_exported(program, trust)
    stored = commonest_dtype((weight.dtype, weight.numel()) for weight in program.parameters())
    return Loaded(program.module(), None, "exported", name, path, stored)


def _read_exported(path: Path, trust: bool) -> torch.export.ExportedProgram:
    try:
        entries = zipfile.ZipFile(path).namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise BadModel(f"{path} is no .pt2 file, or is cut off ({one_line(error)}); export the model again") from None
    pickled = [entry for entry in entries if entry.rpartition("/")[2].startswith(_PICKLED)]
    if pickled and not trust:
        raise UntrustedModel(
            f"{path} holds a pickle ({pickled[0]}), which runs code when it is read; "
            "export a model without them, or allow it by trust=True"
        )
    try:
        # Tensors only, where torch would fall back to reading any object.
        with quiet(), patch.dict(os.environ, {} if trust else {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}):
            return torch.export.load(path)
    except Exception as error:
        raise BadModel(
            f"{path} can't be read by torch {torch.__version__} ({one_line(error)}); export the model again"
        ) from None
