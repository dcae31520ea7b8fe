"""A recipe: everything that determines the input numbers of one call, in a line of JSON instead of the numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from assay.golden.errors import RecipeError, ShapeError, unknown
from assay.golden.inputs.distributions import names_of
from assay.golden.inputs.values import draw, dtype_of, stored
from assay.golden.registry import Spec, spec
from assay.golden.signature import Signature, TensorSpec
from assay.precision.errors import UnknownFormat


@dataclass(frozen=True, eq=False)
class Recipe:
    """The inputs of one call of the spec ``spec``; `recipe` makes one from less and checks it.

    ``sizes`` are those of the signature's symbols, ``dtypes`` and ``values`` (the distributions) stand for each tensor
    by name, ``options`` are complete. Equal recipes give equal bits on every platform.
    """

    spec: str
    sizes: Mapping[str, int]
    dtypes: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def definition(self) -> Spec:
        """The spec; `UnknownSpec` if there is none of that name."""
        return spec(self.spec)

    @property
    def signature(self) -> Signature:
        """The signature under this recipe's options."""
        return self.definition.signature(self.options)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are handed over by position, in the order of the signature."""
        return tuple(self._drawn(keyword=False).values())

    def keywords(self) -> dict[str, torch.Tensor]:
        """The tensors that are handed over by keyword (``slopes``, ``sinks``)."""
        return self._drawn(keyword=True)

    def _drawn(self, keyword: bool) -> dict[str, torch.Tensor]:
        return {
            tensor.name: draw(tensor, self.sizes, self.dtypes[tensor.name], self.values.get(tensor.name, ""), self.seed)
            for tensor in self.signature.tensors
            if tensor.keyword == keyword
        }

    def to_json(self) -> str:
        """Canonical JSON: keys sorted, no spaces; one text for each recipe."""
        return json.dumps(
            {name: getattr(self, name) for name in _FIELDS}, sort_keys=True, separators=(",", ":"), allow_nan=False
        )

    @staticmethod
    def from_json(text: str) -> Recipe:
        """The recipe that `to_json` wrote; `RecipeError` where the text is not that of a recipe."""
        try:
            content = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_each_once)
        except ValueError as error:
            raise RecipeError(f"recipe: expected the JSON of a recipe, got {text[:60]!r} ({error})") from None
        if not isinstance(content, dict):
            raise RecipeError(f"recipe: expected a JSON object, got {text[:60]!r}")
        for name in content:
            if name not in _FIELDS:
                raise RecipeError(f"recipe: {unknown('field', name, _FIELDS)}")
        for name, (expected, fits) in _FIELDS.items():
            if name not in content:
                raise RecipeError(f"recipe: expected the field {name!r} ({expected}), got none")
            if not fits(content[name]):
                raise RecipeError(f"recipe: {name} must be {expected}, got {content[name]!r}")
        return Recipe(**(content | {"options": {name: _tuples(value) for name, value in content["options"].items()}}))

    @cached_property
    def key(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        kinds = ", ".join(f"{name} {dtype} {self.values.get(name, '')}".rstrip() for name, dtype in self.dtypes.items())
        return f"{self.spec}: {sizes}{options}; {kinds}; seed {self.seed}"


def recipe(
    op: str,
    sizes: Mapping[str, int],
    dtype: str | Mapping[str, str] = "float32",
    *,
    options: Mapping[str, Any] | None = None,
    values: str | Mapping[str, str] = "",
    seed: int = 0,
) -> Recipe:
    """A recipe whose options, dtypes and distributions are filled in, checked against the signature of ``op``.

    ``dtype`` is that of every tensor whose dtype the op leaves open, or stands for each by name. ``values`` is the
    distribution of every tensor that can have it, or stands for each by name; the plainest where left out.

    Raises `UnknownSpec`, `OptionError`, `ShapeError` or `RecipeError`.
    """
    definition = spec(op)
    complete = definition.complete({name: _tuples(value) for name, value in (options or {}).items()})
    signature = definition.signature(complete)
    names = [tensor.name for tensor in signature.tensors]
    for kind, given in (("dtype of", dtype), ("distribution of", values)):
        for name in given if isinstance(given, Mapping) else ():
            if name not in names:
                raise RecipeError(f"{op}: {kind} {unknown('tensor', name, names)}")
    _check_sizes(definition, signature, sizes)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise RecipeError(f"{op}: seed must be a whole number, got {seed!r}")
    distributions, dtypes = {}, {}
    known = {kind for tensor in signature.tensors for kind in names_of(tensor)}
    if isinstance(values, str) and values and values not in known:
        raise RecipeError(f"{op}: {unknown('distribution', values, known)}")
    for tensor in signature.tensors:
        kinds = names_of(tensor)
        given = values.get(tensor.name, kinds[0]) if isinstance(values, Mapping) else values
        if isinstance(values, Mapping) and given not in kinds:
            raise RecipeError(f"{op}: {tensor.name}: {unknown('distribution', given, kinds)}")
        distributions[tensor.name] = given if given in kinds else kinds[0]
        dtypes[tensor.name] = _dtype(op, tensor, dtype)
    return Recipe(op, dict(sizes), dtypes, complete, distributions, seed)


def _dtype(op: str, tensor: TensorSpec, dtype: str | Mapping[str, str]) -> str:
    if isinstance(dtype, Mapping) and not dtype:
        raise RecipeError(f"{op}: expected the dtype of at least one tensor, got none")
    try:
        found = dtype_of(tensor, dtype)
        stored(torch.zeros(1, dtype=torch.float64), found)
    except (UnknownFormat, TypeError, RuntimeError) as error:  # torch names dtypes that it can't fill
        reason = str(error).partition("\n")[0]
        raise RecipeError(f"{op}: {tensor.name}: no tensor of {dtype} can be made: {reason}") from None
    if tensor.dtype not in (None, "fp8", found):
        raise RecipeError(f"{op}: {tensor.name} is always {tensor.dtype}, got {found}")
    return found


def _check_sizes(definition: Spec, signature: Signature, sizes: Mapping[str, int]) -> None:
    op, symbols = definition.name, signature.symbols
    for name, size in sizes.items():
        if name not in symbols:
            raise ShapeError(f"{op}: {unknown('dimension', name, symbols)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ShapeError(f"{op}: {name}={size!r}; expected a whole number, zero or more")
    for name in symbols:
        if name not in sizes:
            raise ShapeError(f"{op}: no size for {name}; expected sizes for {', '.join(symbols)}")
        unit = definition.multiples.get(name, "1")
        if sizes[name] % max(int(unit) if unit.isdigit() else sizes.get(unit, 1), 1):
            expected = unit if unit.isdigit() else f"{unit}={sizes[unit]}"
            raise ShapeError(f"{op}: {name}={sizes[name]} must be a multiple of {expected}")
    for tensor in (*signature.tensors, *signature.returns):
        try:
            tensor.shape(sizes)
        except (ShapeError, ZeroDivisionError) as error:
            raise ShapeError(f"{op}: {tensor} has no shape under these sizes: {error}") from None


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} stands there twice")
        found[name] = value
    return found


def _mapping_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(fits(item) for item in value.values())


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_option(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_option(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _tuples(value: Any) -> Any:
    """JSON knows lists only; an option is a tuple."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "spec": ("a name", _is_string),
    "sizes": ("whole numbers by symbol", _mapping_of(lambda size: _is_whole(size) and size >= 0)),
    "dtypes": ("names by tensor", _mapping_of(_is_string)),
    "options": ("numbers, names, flags, null or lists of them by option", _mapping_of(_is_option)),
    "values": ("names by tensor", _mapping_of(_is_string)),
    "seed": ("a whole number", _is_whole),
}
