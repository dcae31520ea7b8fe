"""What an audit computed, kept in a folder: the products of the backward pass and every error that was measured.

A fingerprint of all that they depend on stands in each file; what another fingerprint has is not looked at.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from assay.precision.observation.running import tensors_in
from assay.precision.observation.streaming import streamed_parameters
from assay.precision.prediction.perturbations import Key, perturbations_of
from assay.precision.prediction.quadratic_form import Products
from assay.precision.schemes import SCHEMES
from assay.runtime.files import write_bytes_atomically, write_text_atomically

_PRODUCTS, _MEASURED = "products.safetensors", "measured.json"
_ARRAYS = ("sums", "squares", "sampling", "variance")
_AGAIN = ("again_sums", "again_squares")


class Cache:
    """Products and measured errors in ``folder``, of one fingerprint; ``fresh``: what is there is replaced, unread."""

    def __init__(self, folder: str | Path, fingerprint: str, *, fresh: bool = False) -> None:
        self.folder = Path(folder)
        self.fingerprint = fingerprint
        self.reused = 0  # How many errors that an earlier audit measured were asked for
        self._fresh = fresh
        self._errors = {} if fresh else self._read()
        self._earlier = set(self._errors)

    def sequences(self, assignment: Mapping[str, str], part: str) -> np.ndarray | None:
        """What each sequence of a part of the data adds to an assignment's error, [N]; None if it wasn't measured."""
        distances = self._errors.get(key := (part, _line(assignment)))
        self.reused += key in self._earlier
        return None if distances is None else np.array(distances)

    def note(self, assignment: Mapping[str, str], distances: np.ndarray, part: str) -> None:
        """Keep what each sequence adds to the measured error of an assignment, [N]."""
        self._errors[part, _line(assignment)] = distances.tolist()
        measured = [
            {"part": part, "assignment": json.loads(line), "distances": [_plain(value) for value in values]}
            for (part, line), values in self._errors.items()
        ]
        text = json.dumps({"fingerprint": self.fingerprint, "measured": measured})
        write_text_atomically(self.folder / _MEASURED, text)

    def products(self, menus: Mapping[str, Sequence[str]]) -> Products | None:
        """The products of all schemes of these menus, site names to scheme names; None: there are none, or others'."""
        if self._fresh:
            return None
        with suppress(OSError, SafetensorError), safe_open(self.folder / _PRODUCTS, framework="numpy") as file:
            about = file.metadata() or {}
            if about.get("fingerprint") != self.fingerprint:
                return None
            named: dict[str, Key] = {
                repr((site, part)): (site, part)
                for site, schemes in menus.items()
                for scheme in schemes
                for part in perturbations_of(SCHEMES[scheme])
            }
            if about.get("menus") == _menus(menus):
                names = json.loads(about["keys"])
                arrays = {name: file.get_tensor(name) for name in _ARRAYS}
                held = file.keys()
                again = tuple(file.get_tensor(name) for name in _AGAIN) if _AGAIN[0] in held else None
                return Products(tuple(named[name] for name in names), **arrays, again=again)
        return None

    def keep(self, products: Products, menus: Mapping[str, Sequence[str]]) -> None:
        """Keep the products of all schemes of these menus."""
        arrays = {name: np.ascontiguousarray(getattr(products, name)) for name in _ARRAYS}
        if products.again is not None:
            arrays |= dict(zip(_AGAIN, map(np.ascontiguousarray, products.again), strict=True))
        keys = json.dumps([repr((str(site), part)) for site, part in products.keys])
        about = {"fingerprint": self.fingerprint, "keys": keys, "menus": _menus(menus)}
        write_bytes_atomically(self.folder / _PRODUCTS, save(arrays, about))

    def _read(self) -> dict[tuple[str, str], list[float]]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads((self.folder / _MEASURED).read_text(encoding="utf-8"))
            if content["fingerprint"] == self.fingerprint:
                return {
                    (entry["part"], _line(entry["assignment"])): [float(value) for value in entry["distances"]]
                    for entry in content["measured"]
                }
        return {}


def _menus(menus: Mapping[str, Sequence[str]]) -> str:
    return json.dumps({str(site): sorted(schemes) for site, schemes in menus.items()}, sort_keys=True)


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def fingerprint(model: torch.nn.Module, batches: Sequence[Any], *settings: object) -> str:
    """A digest of weights, inputs, settings, the sources of this package and the versions of what computes."""
    digest = hashlib.sha256()
    streamed = streamed_parameters(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(streamed[name].read().to(tensor.dtype) if name in streamed else tensor))
    digest.update(f"{type(model).__qualname__} {getattr(model, 'config', '')}".encode())
    for batch in batches:
        several = isinstance(batch, tuple | list)
        entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if several else [("", batch)]
        for key, value in entries:
            held = tensors_in(value)
            shown = repr(value) if not isinstance(value, Tensor) else ""
            digest.update(f"{key} {shown} {[(each.dtype, _size(each)) for each in held]}".encode())
            for each in held:
                digest.update(_bytes(each))
    digest.update(repr(settings).encode())
    for name in ("torch", "numpy", "transformers", "xllamacpp"):
        with suppress(PackageNotFoundError):
            digest.update(f"{name} {version(name)}".encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _size(tensor: Tensor) -> list[list[int]]:
    """The shape; of a nested tensor those of its parts."""
    return [list(each.shape) for each in (tensor.unbind() if tensor.is_nested else [tensor])]


def _bytes(tensor: Tensor) -> bytes:
    if tensor.is_nested:
        return b"".join(map(_bytes, tensor.unbind()))
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _line(assignment: Mapping[str, str]) -> str:
    return json.dumps(dict(sorted(assignment.items())))
