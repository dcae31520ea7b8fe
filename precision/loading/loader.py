"""`load`: loads a bundled model, a Hugging Face directory, a factory, an exported program or a pickled module."""

import difflib
import os
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from assay import configs
from assay.formats.errors import UnknownOption
from assay.precision.errors import BadModel, UnknownModel, UntrustedModel
from assay.precision.loading.loaded import Loaded, commonest_dtype
from assay.precision.loading.pretrained import from_directory
from assay.precision.loading.quiet import one_line, quiet
from assay.precision.observation.streaming import streamed_parameters
from assay.runtime.modules import import_users_module

_PICKLED = ("custom_obj_", "opaque_obj_")
"""Names of an archive's entries that torch.export reads with the unrestricted unpickler."""
_PICKLES = {".bin", ".ckpt", ".pkl", ".pickle", ".pt", ".pth"}
_LARGE = 256 << 20
"""Bytes of weights above which saving memory is worth the time of the casts."""
_PRODUCTS = (
    *("linear", "addmm", "mm", "matmul", "bmm", "baddbmm"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
"""Operators of torch.ops.aten whose parameter counts as a weight in an exported program."""


def bundled() -> dict[str, Path]:
    """Return the bundled models, by name: small byte-level language models (docs/models.md)."""
    home = Path(str(files(configs))) / "models"
    return {entry.name: entry for entry in sorted(home.glob("*/")) if (entry / "config.json").is_file()}


def load(
    target: str | Path | torch.export.ExportedProgram,
    *,
    trust: bool = False,
    dtype: torch.dtype = torch.float32,
    max_memory: int | Mapping[int | str, int] | None = None,
    as_stored: bool = False,
    device: str | torch.device = "cpu",
) -> Loaded:
    """Load the model that ``target`` names, in eval mode on ``device``, with the weights of its files in ``dtype``.

    target: a bundled model's name (see `bundled`), a Hugging Face directory (a causal language model, an encoder or a
    sequence classifier in safetensors, also sharded), ``package.module:factory`` (called without arguments; returns a
    torch.nn.Module, or a pair of one and its tokenizer; modules of the current folder count), a ``.pt2`` file of
    torch.export, or an ExportedProgram.

    trust: also run code that comes with the model: pickled weights or modules, and a directory's ``auto_map``. A
    factory and its module are the user's code and run in any case. Without ``trust`` a ``.pt2`` file is read with
    torch's restricted unpickler, but torch still advises against files from unknown sources.

    dtype: float32 holds the values of bfloat16 and float16 weights exactly. An exported program keeps its own dtypes.

    max_memory: for a safetensors directory, the bytes of weights (in ``dtype``) that stay in memory; 0: none.
    accelerate reads the others from the files whenever their module runs. Bytes by device, {0: ..., 1: ..., "cpu":
    ...}, distribute the model over GPUs (accelerate's device_map="auto"). Weights that transformers stores in another
    layout than it computes with, such as experts, are first rewritten into a temporary folder (TMPDIR), in their stored
    dtype. The process then returns freed blocks of 1 MiB and more to the system at once (glibc's M_MMAP_THRESHOLD).

    as_stored: for a safetensors directory, hold 16-bit weights in their stored dtype and cast them to ``dtype`` one
    module at a time, whenever it runs: half the memory, for the time of the casts.

    device: as torch names it, "cuda" or "cuda:1". With ``max_memory`` in bytes, the device of these bytes.

    Raises `UnknownModel`, `UnknownOption`, `UntrustedModel`, `BadModel` (damaged, incomplete or non-finite weights, or
    no weights of matrix products), and `NotInstalled` for a Hugging Face directory without ``transformers``.
    """
    result = device_named(device)
    if max_memory is not None and not isinstance(max_memory, Mapping) and result.type != "cpu":
        max_memory = {result.index or 0: max_memory}
    known = {} if isinstance(target, torch.export.ExportedProgram) else bundled()
    folder = None if isinstance(target, torch.export.ExportedProgram) else known.get(str(target), Path(target))
    if folder is not None and folder.is_dir():
        name = str(target) if str(target) in known else folder.resolve().name
        loaded = from_directory(folder, name, trust, dtype, max_memory, as_stored, result)
    elif max_memory is not None or as_stored:
        option = "as_stored" if max_memory is None else "max_memory"
        raise UnknownOption(f"{option} holds for a safetensors directory, got {target!s:.80}; leave it away")
    else:
        loaded = _of_user(target, trust, dtype, known)
        if result.type != "cpu" and loaded.kind == "exported":
            raise UnknownOption(f"device={device}: an exported program runs on the device that it was exported on")
        loaded = loaded if result.type == "cpu" else replace(loaded, model=loaded.model.to(result))
    _check(loaded.model, loaded.name)
    return loaded


def _of_user(
    target: str | Path | torch.export.ExportedProgram, trust: bool, dtype: torch.dtype, known: Mapping[str, Path]
) -> Loaded:
    if isinstance(target, torch.export.ExportedProgram):
        return _exported(target, "exported program", None)
    path, text = Path(target), str(target)
    if path.is_file():
        return _from_file(path, trust, dtype)
    module, _, factory = text.partition(":")
    if module and factory:
        return _from_factory(module, factory, dtype)
    owner, _, name = text.partition("/")
    like_hub = owner and name and "/" not in name and owner.strip(".") != "" and ":" not in text
    hub = f" (assay downloads nothing: `hf download {target} --local-dir DIR` first)" if like_hub else ""
    raise UnknownModel(
        f"no model {text!r}{hub}; expected {', '.join(known)}, a directory with config.json, "
        "or package.module:factory that gives a module and its tokenizer; in Python (assay.precision.loading.load) "
        "also one without a tokenizer, or a .pt2 file"
    )


def _from_factory(module: str, factory: str, dtype: torch.dtype) -> Loaded:
    """Return the model that ``module:factory`` makes: a module, an exported program, or a module and its tokenizer."""
    target = f"{module}:{factory}"
    made: Any = import_users_module(module, f"model {target!r}", UnknownModel)
    for part in factory.split("."):
        if not hasattr(made, part):
            near = difflib.get_close_matches(part, dir(made), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownModel(f"model {target!r}: {module} has no {part!r}{hint}")
        made = getattr(made, part)
    if not isinstance(made, torch.nn.Module):
        if not callable(made):
            kind = type(made).__name__
            raise BadModel(f"model {target!r} is of type {kind}; expected a function that gives a Module")
        try:
            made = made()
        except Exception as error:
            reason = one_line(error)
            raise BadModel(f"model {target!r} fails when it is called without arguments ({reason})") from error
    if isinstance(made, torch.export.ExportedProgram):
        return _exported(made, target, None)
    if not isinstance(made, tuple) or len(made) != 2:
        return _module(made, target, None, dtype)
    loaded, tokenizer = _module(made[0], target, None, dtype), made[1]
    if not callable(tokenizer) or not hasattr(tokenizer, "pad_token_id"):
        given = type(tokenizer).__name__
        raise BadModel(f"model {target!r} gives {given} beside its module; expected a tokenizer of transformers")
    config = getattr(loaded.model, "config", None)
    sizes = (getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None))
    return replace(loaded, tokenizer=tokenizer, vocabulary=sizes[0], positions=sizes[1])


def _module(made: Any, name: str, path: Path | None, dtype: torch.dtype) -> Loaded:
    if not isinstance(made, torch.nn.Module):
        raise BadModel(f"model {name!r} gives {type(made).__name__}; expected a torch.nn.Module")
    weights = [weight for weight in made.parameters() if weight.is_floating_point()]
    lazy = any(torch.nn.parameter.is_lazy(weight) for weight in weights)
    stored = torch.float32 if lazy else commonest_dtype((weight.dtype, weight.numel()) for weight in weights)
    return Loaded(made.to(dtype=dtype).eval(), None, "module", name, path, stored)


def _exported(program: torch.export.ExportedProgram, name: str, path: Path | None) -> Loaded:
    stored = commonest_dtype((weight.dtype, weight.numel()) for weight in program.parameters())
    return Loaded(program.module(), None, "exported", name, path, stored)


def _from_file(path: Path, trust: bool, dtype: torch.dtype) -> Loaded:
    """Return an exported program or, if ``trust`` allows it, a pickled module; reading one runs code from the file."""
    if path.suffix == ".pt2":
        return _exported(_read_exported(path, trust), path.stem, path)
    if path.suffix in {".safetensors", ".json"}:
        raise UnknownModel(f"{path} is one file of a model; give the directory that it stands in: {path.parent}")
    if path.suffix not in _PICKLES:
        raise UnknownModel(
            f"{path} is no model file; expected a directory with config.json, in Python also a .pt2 file"
        )
    if not trust:
        raise UntrustedModel(
            f"{path} is a pickle, which runs code when it is read; "
            "store the model as a safetensors directory or .pt2, or allow it by trust=True"
        )
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
    return _module(made, path.stem, path, dtype)


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
        # Tensors only: torch would otherwise fall back to unpickling any object.
        with quiet(), patch.dict(os.environ, {} if trust else {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}):
            return torch.export.load(path)
    except Exception as error:
        raise BadModel(
            f"{path} can't be read by torch {torch.__version__} ({one_line(error)}); export the model again"
        ) from None


def exceeds_limit(target: str | Path) -> bool:
    """Return whether a directory's weights should be held as stored: more than `_LARGE` bytes of files."""
    sizes = (file.stat().st_size for file in Path(target).glob("*.safetensors"))
    return Path(target).is_dir() and sum(sizes) > _LARGE


def device_named(device: str | torch.device) -> torch.device:
    """Return the torch device. Raises `UnknownOption` for one that this machine lacks."""
    try:
        torch.empty(0, device=(result := torch.device(device)))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        expected = f"expected a device that torch has here, such as cpu or cuda, got {device!s}"
        raise UnknownOption(f"{expected}: {one_line(error)}") from None
    if result.type == "meta":
        raise UnknownOption("expected a device that holds values, such as cpu or cuda, got meta")
    return result


def _check(model: torch.nn.Module, name: str) -> None:
    """Raise `BadModel` for a weight that is NaN, infinite or of no shape yet, or a model without matrix products.

    Weights that are read when their module runs are checked at that time, and so is how a module uses its parameters.
    """
    bad, streamed = [], streamed_parameters(model)
    for parameter, values in model.named_parameters():
        if parameter in streamed:
            continue
        if torch.nn.parameter.is_lazy(values):
            raise BadModel(f"{name}: {parameter} has no shape yet; run the model once before it is audited")
        if values.is_floating_point() and not bool(values.isfinite().all()):
            nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
            bad.append(f"{parameter} holds {nans} NaN and {infinities} infinite among {values.numel()} values")
    if bad:
        others = f", and so do {len(bad) - 1} more parameters" if len(bad) > 1 else ""
        raise BadModel(f"{name}: {bad[0]}{others}; an audit needs finite weights, so store the model again")
    if isinstance(model, torch.fx.GraphModule):
        calls = {str(node.target).split(".")[1] for node in model.graph.nodes if str(node.target).startswith("aten.")}
        products = not calls.isdisjoint(_PRODUCTS)
    else:
        tables = torch.nn.Embedding | torch.nn.EmbeddingBag
        owners = (module for module in model.modules() if not isinstance(module, tables))
        products = any(values.dim() > 1 for module in owners for values in module.parameters(recurse=False))
    if not products:
        raise BadModel(
            f"{name}: a {type(model).__name__} without linear, convolutional or recurrent "
            "layers, so there is no format to choose in it"
        )
