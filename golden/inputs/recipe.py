"""A recipe: everything that determines the input numbers of one call, in a line of JSON instead of the numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import torch

from assay.formats.errors import UnknownFormat
from assay.golden.errors import RecipeError, ShapeError
from assay.golden.inputs.distributions import names_of
from assay.golden.inputs.values import draw, dtype_of, stored
from assay.golden.registry import Spec, spec
from assay.golden.signature import Signature, TensorSpec
from assay.runtime.errors import unknown
from assay.runtime.records import structured


@dataclass(frozen=True, eq=False)
class Recipe:
    """The inputs of one call of an op; `recipe` makes one from less and checks it.

    - ``spec``: the op's name;
    - ``sizes``: the size of each symbol of its signature, in elements;
    - ``dtypes``: for each tensor by name the full name of its dtype (``"bfloat16"``, ``"int32"``);
    - ``options``: the op's options, complete;
    - ``values``: for each tensor the name of its distribution (`assay.golden.inputs.distributions`);
    - ``seed``: which draw from those distributions.

    A recipe is a value: equal ones have equal `key`s, and give equal bits on every platform. Nothing is checked before
    it is drawn from; `UnknownSpec` and `RecipeError` then say what isn't there.
    """

    spec: str
    sizes: Mapping[str, Annotated[int, msgspec.Meta(ge=0)]]
    dtypes: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}  # what follows from them is left behind

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

    def named(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return self._drawn(keyword=False) | self._drawn(keyword=True)

    def keywords(self) -> dict[str, torch.Tensor]:
        """The tensors that are handed over by keyword (``slopes``, ``sinks``)."""
        return self._drawn(keyword=True)

    def _drawn(self, keyword: bool) -> dict[str, torch.Tensor]:
        return {
            tensor.name: draw(tensor, self.sizes, self.dtypes[tensor.name], self.values.get(tensor.name, ""), self.seed)
            for tensor in self.signature.tensors
            if tensor.keyword == keyword
        }

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, as `from_dict` takes them; JSON makes lists of the tuples among the options."""
        return {name: getattr(self, name) for name in _FIELDS}

    @staticmethod
    def from_dict(content: Any) -> Recipe:
        """The recipe whose `as_dict`, or what JSON makes of it, is ``content``; `RecipeError` where it is none's."""
        read: Recipe = structured(content, Recipe, "recipe", RecipeError)
        for name in _FIELDS:
            if name not in content:
                raise RecipeError(f"recipe: expected the field {name!r}, got none")
        for name, value in read.options.items():
            if isinstance(value, Mapping):
                raise RecipeError(f"recipe.options.{name}: expected a number, name, flag, null or list, got {value!r}")
        return replace(read, options={name: tuples(value) for name, value in read.options.items()})

    def to_json(self) -> str:
        """Canonical JSON: keys sorted, no spaces; one text for each recipe."""
        return json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """The recipe that `to_json` wrote; `RecipeError` where the text is not that of a recipe."""
        try:
            content = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RecipeError(f"recipe: expected the JSON of a recipe, got {text[:60]!r} ({error})") from None
        return Recipe.from_dict(content)

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
    complete = definition.complete({name: tuples(value) for name, value in (options or {}).items()})
    signature = definition.signature(complete)
    names = [tensor.name for tensor in signature.tensors]
    for kind, given in (("dtype of", dtype), ("distribution of", values)):
        for name in given if isinstance(given, Mapping) else ():
            if name not in names:
                raise RecipeError(f"{op}: {kind} {unknown('tensor', name, names)}")
    check_sizes(definition, signature, complete, sizes)
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
    return Recipe(definition.qualified_name, dict(sizes), dtypes, complete, distributions, seed)


def _dtype(op: str, tensor: TensorSpec, dtype: str | Mapping[str, str]) -> str:
    if isinstance(dtype, Mapping) and not dtype:
        raise RecipeError(f"{op}: expected the dtype of at least one tensor, got none")
    try:
        name = dtype_of(tensor, dtype)
        stored(torch.zeros(1, dtype=torch.float64), name)
    except (UnknownFormat, TypeError, RuntimeError) as error:  # torch names dtypes that it can't fill
        reason = str(error).partition("\n")[0]
        raise RecipeError(f"{op}: {tensor.name}: no tensor of {dtype} can be made: {reason}") from None
    if tensor.dtype not in (None, "fp8", name):
        raise RecipeError(f"{op}: {tensor.name} is always {tensor.dtype}, got {name}")
    return name


def check_sizes(definition: Spec, signature: Signature, options: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """`ShapeError` unless the sizes are those of a call of the op under complete ``options``."""
    op, symbols = definition.name, signature.symbols
    for name, size in sizes.items():
        if name not in symbols:
            raise ShapeError(f"{op}: {unknown('dimension', name, symbols)}", name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ShapeError(f"{op}: {name}={size!r}; expected a whole number, zero or more", name)
    for name in symbols:
        if name not in sizes:
            raise ShapeError(f"{op}: no size for {name}; expected sizes for {', '.join(symbols)}")
        unit = definition.sizes.multiples.get(name, "1")
        if sizes[name] % max(int(unit) if unit.isdigit() else sizes.get(unit, 1), 1):
            expected = unit if unit.isdigit() else f"{unit}={sizes[unit]}"
            raise ShapeError(f"{op}: {name}={sizes[name]} must be a multiple of {expected}", name)
    for symbol, option in definition.sizes.minimum.items():
        if sizes[symbol] < options[option]:
            raise ShapeError(f"{op}: {symbol}={sizes[symbol]} must be at least {option}={options[option]}", symbol)
    for tensor in (*signature.tensors, *signature.returns):
        try:
            tensor.shape(sizes)
        except (ShapeError, ZeroDivisionError) as error:
            raise ShapeError(f"{op}: {tensor} has no shape under these sizes: {error}") from None


def tuples(value: Any) -> Any:
    """JSON knows lists only; an option is a tuple."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


_FIELDS = tuple(field.name for field in fields(Recipe))
