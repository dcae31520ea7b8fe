"""A record: one certified golden with the recipe of its inputs, as a safetensors file with a checksum.

The file's metadata has one entry, ``assay``: a JSON object with the recipe, the requested digits, the versions that
made it, a fingerprint of the inputs, and the SHA-256 of the whole file (taken with the digest's own 64 digits zero). A
tensor whose elements all are the same bits, such as the radius of an exact product, is stored as one element.
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
    """The goldens that `make_record` evaluated, one for each result of the op.

    - ``recipe``: the recipe of the inputs;
    - ``digits``: the requested decimal digits; None: as many as float64 certifies (about 13);
    - ``goldens``: one `Golden` for each result, in the order of the op's signature, on the CPU;
    - ``versions``: of the libraries, and two that enter the key: ``definition`` of the op's mathematics
      (`Spec.version`), ``inputs`` of the numbers that a seed gives (`assay.golden.inputs.values`);
    - ``inputs``: the SHA-256 of the input tensors' bytes: on some platform the recipe might give other numbers.
    """

    recipe: Recipe
    digits: int | None
    goldens: tuple[Golden, ...]
    versions: Mapping[str, str]
    inputs: str

    @cached_property
    def key(self) -> str:
        """The content address: SHA-256 of all that determines the exact result, and the digits."""
        return _key(self.recipe, self.digits, self.versions["definition"], self.versions["inputs"])

    def to_bytes(self) -> bytes:
        """Return the record as a safetensors file; equal records give equal bytes."""
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
        span = _digest_span(data)
        return data[: span.start] + hashlib.sha256(data).hexdigest().encode() + data[span.stop :]

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Record:
        """Return the record in ``data``; errors call it ``where``.

        Raises `DamagedRecord` if one bit isn't as it was written, `OtherFormat` for a record of another format.
        """
        try:
            span = _digest_span(data)
            written = data[span].decode()
            actual = hashlib.sha256(data[: span.start] + _PENDING.encode() + data[span.stop :]).hexdigest()
            if written != actual:
                raise ValueError(f"its SHA-256 is {actual[:16]}..., but {written[:16]}... was written down")
            return _parsed(data, where)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError, SafetensorError, RecipeError) as error:
            raise DamagedRecord(f"{where} is damaged: {error}; {REMAKE}") from None


def make_record(recipe: Recipe, digits: int | None = None) -> Record:
    """Draw the inputs of ``recipe`` and evaluate the op's golden to ``digits`` decimal digits."""
    tensors, keywords = recipe.tensors(), recipe.keywords()
    result = evaluate(recipe.spec, *tensors, digits=digits, **{**recipe.options, **keywords})
    goldens = result if isinstance(result, tuple) else (result,)
    return Record(recipe, digits, goldens, versions(recipe), fingerprint(tensors, keywords))


def record_key(recipe: Recipe, digits: int | None = None) -> str:
    """Return the key that `make_record` gives its record."""
    return _key(recipe, digits, str(recipe.definition.version), str(values.VERSION))


def is_outdated(record: Record) -> bool:
    """Whether the current definition, its options or the inputs differ from those of the record.

    Raises `UnknownSpec`.
    """
    definition = record.recipe.definition
    current = {"definition": str(definition.version), "inputs": str(values.VERSION)}
    return record.recipe.options.keys() != definition.options.keys() or any(
        record.versions.get(name) != version for name, version in current.items()
    )


def _key(recipe: Recipe, digits: int | None, definition: str, inputs: str) -> str:
    content = json.dumps([recipe.to_json(), digits, definition, inputs], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def versions(recipe: Recipe) -> dict[str, str]:
    """Return the versions of libraries, definition and inputs that make a record."""
    return _libraries() | {"definition": str(recipe.definition.version), "inputs": str(values.VERSION)}


@cache
def _libraries() -> dict[str, str]:
    names = {"assay": "kernel-assay", "numpy": "numpy", "python-flint": "python-flint", "torch": "torch"}
    return {name: installed_version(package) for name, package in names.items()} | {"python": platform.python_version()}


def fingerprint(tensors: tuple[torch.Tensor, ...], keywords: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over dtype, shape and bytes of each tensor."""
    digest = hashlib.sha256()
    for tensor in (*tensors, *(keywords[name] for name in sorted(keywords))):
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _digest_span(data: bytes) -> slice:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError(f"it has {len(data)} bytes, too few for a record")
    matches = list(_DIGEST.finditer(data, 8, 8 + length))
    if len(matches) != 1:
        raise ValueError("its header holds no SHA-256")
    return slice(*matches[0].span(1))


def _parsed(data: bytes, where: str) -> Record:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    content: dict[str, Any] = json.loads(header["__metadata__"][_ENTRY])
    if content.get("format") != FORMAT:
        written = content.get("format")
        raise OtherFormat(f"{where}: it has format {written!r}, and this version of assay reads format {FORMAT}")
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
    """Return one element if all have the same bits; NaN payloads and signed zeros differ."""
    raw = array.reshape(-1).view(np.dtype(f"u{array.itemsize}"))
    return array.reshape(-1)[:1] if len(raw) > 1 and (raw == raw[0]).all() else array
