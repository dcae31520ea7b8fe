"""`load`: a bundled model, a Hugging Face directory, a factory or an exported program, ready to be audited."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import torch

from assay import configs
from assay.precision.errors import UnknownModel, UnknownOption, UntrustedModel
from assay.precision.loading.checks import check_linears, check_weights
from assay.precision.loading.loaded import Kind, Loaded
from assay.precision.loading.modules import from_exported, from_factory, from_pickle
from assay.precision.loading.pretrained import from_directory

__all__ = ["Kind", "Loaded", "bundled", "load"]

_PICKLES = {".bin", ".ckpt", ".pkl", ".pickle", ".pt", ".pth"}


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
    torch.nn.Module; modules of the current folder count), a ``.pt2`` file of torch.export, or an ExportedProgram.

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
    no linear layers), and `NotInstalled` where a Hugging Face directory meets no ``transformers``.
    """
    loaded = _load(target, trust, dtype, max_memory)
    check_weights(loaded.model, loaded.name)
    check_linears(loaded.model, loaded.name)
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
        f"no model {str(target)!r}{hub}; expected {', '.join(known)} or a directory with config.json, "
        "in Python (assay.precision.loading.load) also package.module:factory or a .pt2 file"
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
