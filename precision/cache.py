"""Results of an audit, stored in a folder: the products of the backward pass and every error that was measured.

Each file has a fingerprint of everything that its results depend on; a file of another fingerprint is not read.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.precision.observation.running import tensors_in
from assay.precision.observation.streaming import streamed_parameters
from assay.precision.prediction.perturbations import Key, perturbations_of
from assay.precision.prediction.quadratic_form import Products
from assay.precision.schemes import SCHEMES
from assay.runtime.results import ResultStore, result_key, versions_of

_PRODUCTS, _MEASURED = "products", "measured"
_ANSWERED_BY = "assay.precision.auditing", "assay.precision.loading.pretrained"
_ARRAYS = ("sums", "squares", "sampling", "variance")
_AGAIN = ("again_sums", "again_squares")


class Cache:
    """Products and measured errors in ``folder``, of one fingerprint; ``fresh``: what is there is replaced, unread."""

    def __init__(self, folder: str | Path, fingerprint: str, *, fresh: bool = False) -> None:
        self.folder = Path(folder)
        self.fingerprint = fingerprint
        self._store = ResultStore(self.folder)
        self.reused = 0  # Errors measured by an earlier audit that this one reused
        self._fresh = fresh
        self._errors: dict[tuple[str, str], list[float]] = {
            (entry["part"], _line(entry["assignment"])): list(map(float, entry["distances"]))
            for entry in (() if fresh else self._store.get(_MEASURED, fingerprint) or ())
        }
        self._earlier = set(self._errors)

    @property
    def stored_key(self) -> str:
        """The fingerprint of the errors that are stored in the folder; empty where there are none."""
        return self._store.key_of(_MEASURED)

    def sequences(self, assignment: Mapping[str, str], part: str) -> np.ndarray | None:
        """What each sequence of a part of the data adds to an assignment's error, [N]; None if it wasn't measured."""
        distances = self._errors.get(key := (part, _line(assignment)))
        self.reused += key in self._earlier
        return None if distances is None else np.array(distances)

    def note(self, assignment: Mapping[str, str], distances: np.ndarray, part: str) -> None:
        """Keep what each sequence adds to the measured error of an assignment, [N]."""
        self._errors[part, _line(assignment)] = distances.tolist()
        measured = [
            {
                "part": part,
                "assignment": json.loads(line),
                "distances": [value if math.isfinite(value) else str(value) for value in values],
            }
            for (part, line), values in self._errors.items()
        ]
        self._store.put(_MEASURED, self.fingerprint, measured, versions_of(*_ANSWERED_BY))

    def products(self, menus: Mapping[str, Sequence[str]]) -> Products | None:
        """The products of all schemes of these menus, site names to scheme names; None: there are none, or others'."""
        stored = None if self._fresh else self._store.get_arrays(_PRODUCTS, self.fingerprint)
        if stored is None or stored[0]["menus"] != _menus(menus):
            return None
        named: dict[str, Key] = {
            repr((site, part)): (site, part)
            for site, schemes in menus.items()
            for scheme in schemes
            for part in perturbations_of(SCHEMES[scheme])
        }
        answer, arrays = stored
        again = (arrays[_AGAIN[0]], arrays[_AGAIN[1]]) if _AGAIN[0] in arrays else None
        keys = tuple(named[name] for name in answer["keys"])
        return Products(keys, **{name: arrays[name] for name in _ARRAYS}, again=again)

    def keep(self, products: Products, menus: Mapping[str, Sequence[str]]) -> None:
        """Keep the products of all schemes of these menus."""
        arrays = {name: np.ascontiguousarray(getattr(products, name)) for name in _ARRAYS}
        if products.again is not None:
            arrays |= dict(zip(_AGAIN, map(np.ascontiguousarray, products.again), strict=True))
        answer = {"keys": [repr((str(site), part)) for site, part in products.keys], "menus": _menus(menus)}
        self._store.put_arrays(_PRODUCTS, self.fingerprint, answer, versions_of(*_ANSWERED_BY), arrays)


def _menus(menus: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    return {str(site): sorted(schemes) for site, schemes in menus.items()}


def fingerprint(model: torch.nn.Module, batches: Sequence[Any], *settings: object) -> str:
    """Return the key of an audit's results: a digest of weights, inputs, settings, and the sources that compute.

    Those are the sources of the audit, the packages that it and the model's classes come from, and their versions.
    """
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
            parts = [(each.dtype, each.unbind() if each.is_nested else [each]) for each in held]
            sizes = [(dtype, [list(part.shape) for part in some]) for dtype, some in parts]
            digest.update(f"{key} {shown} {sizes}".encode())
            for each in held:
                digest.update(_bytes(each))
    classes = {f"{type(module).__module__}:" for module in model.modules()}
    return result_key([repr(settings), digest.hexdigest()], *_ANSWERED_BY, targets=classes)


def _bytes(tensor: Tensor) -> bytes:
    if tensor.is_nested:
        return b"".join(map(_bytes, tensor.unbind()))
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _line(assignment: Mapping[str, str]) -> str:
    return json.dumps(dict(sorted(assignment.items())))
