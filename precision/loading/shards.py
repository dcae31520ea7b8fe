"""The safetensors files of a directory, read as far as their headers."""

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from assay.precision.errors import BadModel, UntrustedModel
from assay.precision.loading.quiet import one_line

__all__ = ["headers_of", "json_of"]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def json_of(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises `BadModel` if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel(f"{path.parent} has no {path.name}; expected a model in the form of save_pretrained") from None
    except (OSError, ValueError) as error:
        raise BadModel(f"{path} can't be read as JSON ({one_line(error)}); fetch it again") from None
    if not isinstance(content, dict):
        raise BadModel(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def headers_of(path: Path, trust: bool) -> dict[str, tuple[torch.dtype | None, int]]:
    """Dtype (None where it isn't one of the usual floating ones) and count of values of each tensor in ``path``.

    Empty where there are only pickled weights and ``trust`` allows them. Raises `BadModel` for files that are missing,
    damaged or not what the index says, `UntrustedModel` for pickled weights.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return _header(single)
    if not index.is_file():
        return _without_safetensors(path, trust)
    places = json_of(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise BadModel(f"{index} has no weight_map of tensors to files; fetch it again")
    found: dict[str, tuple[torch.dtype | None, int]] = {}
    for file in sorted(set(places.values())):
        if not (path / file).is_file():
            raise BadModel(f"{path} lacks {file}, which {index.name} names; fetch it again")
        header = _header(path / file)
        lost = [name for name, place in places.items() if place == file and name not in header]
        if lost:
            raise BadModel(f"{path / file} lacks {_named(lost)}, which {index.name} says it has; fetch both again")
        found |= header
    return found


def _without_safetensors(path: Path, trust: bool) -> dict[str, tuple[torch.dtype | None, int]]:
    pickles = sorted(file.name for file in path.glob("*.bin"))
    if pickles and trust:
        return {}
    if pickles:
        raise UntrustedModel(
            f"{path} has its weights only as pickle ({pickles[0]}), which runs code when it is read; "
            "store them as model.safetensors (save_pretrained does), or allow it by trust=True"
        )
    raise BadModel(f"{path} has no weights; expected model.safetensors, or its shards and their index")


def _header(file: Path) -> dict[str, tuple[torch.dtype | None, int]]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {name: (_DTYPES.get(s.get_dtype()), math.prod(s.get_shape())) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise BadModel(f"{file} is no safetensors file, or is cut off ({one_line(error)}); fetch it again") from None


def _named(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
