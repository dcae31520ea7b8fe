"""A checkpoint's folder: the files besides the weights, and its atomic creation under a temporary name."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from assay.precision.errors import CannotExport
from assay.precision.loading.quiet import quiet
from assay.runtime.modules import optional

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
_SHARD = "5GB"


def save(
    index: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], model: torch.nn.Module, origin: Path | None
) -> None:
    """Write tensors, config and the files copied from the model's directory into an empty folder."""
    hub = optional("huggingface_hub", purpose="a checkpoint", extra="audit")
    hub.save_torch_state_dict(tensors, index, max_shard_size=_SHARD, metadata={"format": "pt"})
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
def whole(folder: Path, overwrite: bool) -> Iterator[tuple[Path, bool]]:
    """Yield a temporary folder that is renamed to ``folder`` at the end, and whether it replaces an existing one."""
    replaced = folder.exists()
    if replaced and not overwrite:
        raise CannotExport(f"{folder} exists: give another folder, or pass overwrite=True to replace it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        index = room / "new"
        index.mkdir()  # has the permissions of a folder that the user makes; the temporary one has not
        yield index, replaced
        if replaced:
            os.rename(folder, room / "old")
        try:
            os.rename(index, folder)
        except OSError:
            if replaced:
                os.rename(room / "old", folder)
            raise
    finally:
        shutil.rmtree(room, ignore_errors=True)
