"""A record: one certified golden with the recipe of its inputs, as a safetensors file that proves itself undamaged.

The file's metadata has one entry, ``assay``: a JSON object with the recipe, the digits asked for, the versions that
made it, a fingerprint of the inputs, and the SHA-256 of the whole file (taken with the digest's own 64 places zero), so
that no bit can change unseen. A tensor whose elements all are the same bits, such as the radius of an exact product, is
stored as one element.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save

from assay.golden.errors import DamagedRecord, OtherFormat, RecipeError
from assay.golden.evaluation import evaluate
from assay.golden.evaluation.golden import Golden
from assay.golden.inputs import values
from assay.golden.inputs.recipe import Recipe
from assay.runtime.results import installed_version

FORMAT = 1
REMAKE = "`assay golden build CAMPAIGN --store URL --recheck` makes it again"

_ENTRY = "assay"
_PENDING = "0" * 64
_DIGEST = re.compile(rb'\\"sha256\\":\\"([0-9a-f]{64})\\"')
_FIELDS = ("digits", "format", "inputs", "recipe", "sha256", "shapes", "versions")


@dataclass(frozen=True, eq=False)
class Record:
    """What `make_record` evaluated: the goldens, one for each result of the op.

    - ``recipe``: what its inputs are drawn from;
    - ``digits``: how many decimal digits were asked for; None: as many as float64 certifies (about 13);
    - ``goldens``: one `Golden` for each result, in the order of the op's signature, on the CPU;
    - ``versions``: of the libraries, and two that enter the key: ``definition`` of the op's mathematics
      (`Spec.version`), ``inputs`` of the numbers that a seed stands for (`assay.golden.inputs.values`);
    - ``inputs``: the SHA-256 of the input tensors' bytes, by which a platform on which the recipe gives other numbers
      is found out.
    """

    recipe: Recipe
    digits: int | None
    goldens: tuple[Golden, ...]
    versions: Mapping[str, str]
    inputs: str

    @cached_property
    def key(self) -> str:
        """The content address: SHA-256 of what determines the exact answer and the digits asked for."""
        return _key(self.recipe, self.digits, self.versions["definition"], self.versions["inputs"])

    def to_bytes(self) -> bytes:
        """The record as a safetensors file; equal records give equal bytes."""
        tensors, shapes = {}, {}
        for order, golden in enumerate(self.goldens):
            for part in fields(Golden):
                tensor = getattr(golden, part.name)
                if tensor is not None:
                    name = f"{order}.{part.name}"
                    shapes[name] = list(tensor.shape)
                    tensors[name] = _folded(tensor.detach().cpu().contiguous().numpy())
        content = {
            "digits": self.digits,
            "format": FORMAT,
            "inputs": self.inputs,
            "recipe": self.recipe.as_dict(),
            "sha256": _PENDING,
            "shapes": shapes,
            "versions": dict(self.versions),
        }
        data = save(tensors, {_ENTRY: json.dumps(content, sort_keys=True, separators=(",", ":"))})
        place = _digest_place(data)
        return data[: place.start] + hashlib.sha256(data).hexdigest().encode() + data[place.stop :]

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Record:
        """The record in ``data``; `DamagedRecord`, which names ``where``, if one bit isn't as it was written.

        Raises `OtherFormat` where it is a record, but of another format.
        """
        try:
            place = _digest_place(data)
            found = data[place].decode()
            expected = hashlib.sha256(data[: place.start] + _PENDING.encode() + data[place.stop :]).hexdigest()
            if found != expected:
                raise ValueError(f"its SHA-256 is {expected[:16]}..., but {found[:16]}... was written down")
            return _parsed(data, where)
        except (ValueError, KeyError, TypeError, SafetensorError, RecipeError) as error:
            raise DamagedRecord(f"{where} is damaged: {error}; {REMAKE}") from None


def make_record(recipe: Recipe, digits: int | None = None) -> Record:
    """The record of ``recipe``: its inputs are drawn, and the op's golden evaluated to ``digits`` decimal digits."""
    tensors, keywords = recipe.tensors(), recipe.keywords()
    result = evaluate(recipe.spec, *tensors, digits=digits, **{**recipe.options, **keywords})
    goldens = result if isinstance(result, tuple) else (result,)
    return Record(recipe, digits, goldens, versions(recipe), fingerprint(tensors, keywords))


def record_key(recipe: Recipe, digits: int | None = None) -> str:
    """The key that `make_record` will give its record."""
    return _key(recipe, digits, str(recipe.definition.version), str(values.VERSION))


def is_outdated(record: Record) -> bool:
    """Whether today's definition, its options or the inputs are others than those of the record.

    Raises `UnknownSpec`.
    """
    definition = record.recipe.definition
    now = {"definition": str(definition.version), "inputs": str(values.VERSION)}
    return record.recipe.options.keys() != definition.options.keys() or any(
        record.versions.get(name) != version for name, version in now.items()
    )


def _key(recipe: Recipe, digits: int | None, definition: str, inputs: str) -> str:
    content = json.dumps([recipe.to_json(), digits, definition, inputs], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def versions(recipe: Recipe) -> dict[str, str]:
    """What made a record: libraries, the definition's version, and that of the inputs."""
    return _libraries() | {"definition": str(recipe.definition.version), "inputs": str(values.VERSION)}


@cache
def _libraries() -> dict[str, str]:
    names = {"assay": "kernel-assay", "numpy": "numpy", "python-flint": "python-flint", "torch": "torch"}
    return {name: installed_version(package) for name, package in names.items()} | {"python": platform.python_version()}


def fingerprint(tensors: tuple[torch.Tensor, ...], keywords: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over dtype, shape and bytes of each tensor."""
    digest = hashlib.sha256()
    for tensor in (*tensors, *(keywords[name] for name in sorted(keywords))):
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _digest_place(data: bytes) -> slice:
    """Where in the file the digest stands."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError(f"it has {len(data)} bytes, too few for a record")
    places = list(_DIGEST.finditer(data, 8, 8 + length))
    if len(places) != 1:
        raise ValueError("its header holds no SHA-256")
    return slice(*places[0].span(1))


def _parsed(data: bytes, where: str) -> Record:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    content: dict[str, Any] = json.loads(header["__metadata__"][_ENTRY])
    if content.get("format") != FORMAT:
        found = content.get("format")
        raise OtherFormat(f"{where}: it has format {found!r}, and this version of assay reads format {FORMAT}")
    if tuple(sorted(content)) != _FIELDS:
        raise ValueError(f"its metadata has the fields {', '.join(sorted(content))}")
    tensors = load(data)
    goldens: list[dict[str, torch.Tensor]] = []
    for name, shape in content["shapes"].items():
        order, _, part = name.partition(".")
        goldens.extend({} for _ in range(int(order) + 1 - len(goldens)))
        goldens[int(order)][part] = torch.from_numpy(np.broadcast_to(tensors[name], shape).copy())
    return Record(
        Recipe.from_dict(content["recipe"]),
        content["digits"],
        tuple(Golden(**parts) for parts in goldens),
        content["versions"],
        content["inputs"],
    )


def _folded(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One element where all are the same bits, NaN and signed zeros told apart."""
    raw = array.reshape(-1).view(np.dtype(f"u{array.itemsize}"))
    return array.reshape(-1)[:1] if len(raw) > 1 and (raw == raw[0]).all() else array
