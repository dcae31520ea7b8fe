"""`load`: a bundled model, a Hugging Face directory, a factory or an exported program, ready to be audited."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import torch

from assay import configs
from assay.formats.errors import UnknownOption
from assay.precision.errors import BadModel, UnknownModel, UntrustedModel
from assay.precision.loading.loaded import Loaded
from assay.precision.loading.pretrained import from_directory
from assay.precision.loading.user_code import from_exported, from_factory, from_pickle
from assay.precision.observation.streaming import streamed_parameters

_PICKLES = {".bin", ".ckpt", ".pkl", ".pickle", ".pt", ".pth"}
_PRODUCTS = ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d", "conv_transpose2d")
"""Of torch.ops.aten, what has a parameter as weight in an exported program."""


def bundled() -> dict[str, Path]:
    """The models that assay brings along, by name: small byte-level language models (docs/models.md)."""
    home = Path(str(files(configs))) / "models"
    return {entry.name: entry for entry in sorted(home.glob("*/")) if (entry / "config.json").is_file()}


def load(
    target: str | Path | torch.export.ExportedProgram,
    *,
    trust: bool = False,
    dtype: torch.dtype = torch.float32,
    max_memory: int | Mapping[int | str, int] | None = None,
) -> Loaded:
    """The model that ``target`` names, in eval mode on the CPU, its weights as they are stored but held in ``dtype``.

    target: a bundled model's name (see `bundled`), a Hugging Face directory (a causal language model, an encoder or a
    sequence classifier in safetensors, also in shards), ``package.module:factory`` (called without arguments, gives a
    torch.nn.Module, or a pair of one and its tokenizer; modules of the current folder count), a ``.pt2`` file of
    torch.export, or an ExportedProgram.

    trust: also run code that comes with the model: pickled weights or modules, and a directory's ``auto_map``. A
    factory and the module that it stands in are code of yours and run in any case. Without it a ``.pt2`` file is read
    with torch's restricted unpickler, but torch still advises against files from unknown sources.

    dtype: float32 holds the values of bfloat16 and float16 weights exactly. An exported program keeps its own dtypes.

    max_memory: of a safetensors directory, bytes of weights (as ``dtype``) that stay in memory; 0: none. The others are
    read from the files whenever their module runs, by accelerate. Bytes by device, {0: ..., 1: ..., "cpu": ...}, spread
    the model over GPUs (accelerate's device_map="auto"). Weights that transformers stores otherwise than it computes
    with them, such as experts, are rewritten into a temporary folder first (TMPDIR), in the dtype that they have. The
    process then returns blocks of 1 MiB and more to the system as soon as they are free (glibc's M_MMAP_THRESHOLD).

    Raises `UnknownModel`, `UnknownOption`, `UntrustedModel`, `BadModel` (damaged, incomplete or non-finite weights, or
    no weights of products), and `NotInstalled` where a Hugging Face directory meets no ``transformers``.
    """
    loaded = _load(target, trust, dtype, max_memory)
    _check_weights(loaded.model, loaded.name)
    _check_products(loaded.model, loaded.name)
    return loaded


def _load(
    target: str | Path | torch.export.ExportedProgram,
    trust: bool,
    dtype: torch.dtype,
    max_memory: int | Mapping[int | str, int] | None,
) -> Loaded:
    known = {} if isinstance(target, torch.export.ExportedProgram) else bundled()
    if str(target) in known:
        return from_directory(known[str(target)], str(target), trust, dtype, max_memory)
    if not isinstance(target, torch.export.ExportedProgram) and Path(target).is_dir():
        return from_directory(Path(target), Path(target).resolve().name, trust, dtype, max_memory)
    if max_memory is not None:
        raise UnknownOption(f"max_memory holds for a safetensors directory, got {target!s:.80}; leave it away")
    if isinstance(target, torch.export.ExportedProgram):
        return from_exported(target, "exported program", None)
    path = Path(target)
    if path.is_file():
        return _from_file(path, trust, dtype)
    module, colon, factory = str(target).partition(":")
    if colon and module and factory:
        return from_factory(module, factory, dtype)
    hub = f" (assay downloads nothing: `hf download {target} --local-dir DIR` first)" if _like_hub(str(target)) else ""
    raise UnknownModel(
        f"no model {str(target)!r}{hub}; expected {', '.join(known)}, a directory with config.json, "
        "or package.module:factory that gives a module and its tokenizer; in Python (assay.precision.loading.load) "
        "also one without a tokenizer, or a .pt2 file"
    )


def _from_file(path: Path, trust: bool, dtype: torch.dtype) -> Loaded:
    if path.suffix == ".pt2":
        return from_exported(path, path.stem, path, trust=trust)
    if path.suffix in _PICKLES:
        if not trust:
            raise UntrustedModel(
                f"{path} is a pickle, which runs code when it is read; "
                "store the model as a safetensors directory or .pt2, or allow it by trust=True"
            )
        return from_pickle(path, dtype)
    if path.suffix in {".safetensors", ".json"}:
        raise UnknownModel(f"{path} is one file of a model; give the directory that it stands in: {path.parent}")
    raise UnknownModel(f"{path} is no model file; expected a directory with config.json, in Python also a .pt2 file")


def _like_hub(target: str) -> bool:
    owner, slash, name = target.partition("/")
    return bool(slash and owner and name) and "/" not in name and owner.strip(".") != "" and ":" not in target


def _check_weights(model: torch.nn.Module, name: str) -> None:
    """Raise `BadModel`, naming the parameter, if a weight is NaN, infinite, or not there yet (a lazy module's).

    Weights that are read when their module runs are looked at then.
    """
    bad = []
    streamed = streamed_parameters(model)
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


def _check_products(model: torch.nn.Module, name: str) -> None:
    """Raise `BadModel` if the model has no weight of a product: nothing in it could take another format. What a module
    of parameters of its own does with them is seen when it runs."""
    if isinstance(model, torch.fx.GraphModule):
        calls = {str(node.target).split(".")[1] for node in model.graph.nodes if str(node.target).startswith("aten.")}
        found = not calls.isdisjoint(_PRODUCTS)
    else:
        tables = torch.nn.Embedding | torch.nn.EmbeddingBag
        owners = (module for module in model.modules() if not isinstance(module, tables))
        found = any(values.dim() > 1 for module in owners for values in module.parameters(recurse=False))
    if not found:
        raise BadModel(
            f"{name}: a {type(model).__name__} without linear layers or convolutions, "
            "so there is no format to choose in it"
        )
