"""A case: everything that one call of a kernel depends on, small enough to be written on one line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from assay.golden.inputs.values import draw
from assay.golden.registry import Spec, spec
from assay.golden.signature import Signature, TensorSpec, dimension
from assay.precision.formats import format_named
from assay.verify.errors import ReproError, SettingError
from assay.verify.inputs.layouts import Guarded, place, tied_axes
from assay.verify.inputs.unused import spoiled

Edit = tuple[str, tuple[int, ...], float]


@dataclass(frozen=True)
class Case:
    """One call: sizes of the symbols, dtypes, options, and per tensor a distribution and a layout.

    ``edits`` set single elements, ``(tensor, coordinates, value)``. ``memory`` is what fresh memory holds: "plain"
    (whatever was there), "nan" or "huge" (2^100). ``protocol`` says which calls are made, see `assay.verify.trial`.
    ``unused`` is what elements hold that no result depends on: "plain" (numbers as elsewhere) or "nan".
    ``origin`` are the first coordinates along a symbol: elements keep their values while shapes are cut at the front.
    """

    spec: str
    sizes: Mapping[str, int]
    dtypes: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    edits: tuple[Edit, ...] = ()
    memory: str = "plain"
    protocol: str = "once"
    unused: str = "plain"
    origin: Mapping[str, int] = field(default_factory=dict)
    out_dtype: str | None = None

    @property
    def definition(self) -> Spec:
        """The spec under examination."""
        return spec(self.spec)

    @property
    def signature(self) -> Signature:
        """The signature under this case's options."""
        return self.definition.signature(self.options)

    @property
    def result_dtypes(self) -> tuple[str, ...]:
        """The dtype of each result: stated, fixed by the op, or that of the first floating input of 16 bits or more.

        Raises `SettingError` where none of these says it.
        """
        wide = [name for name in self.dtypes.values() if _is_wide_float(name)]
        found = []
        for order, tensor in enumerate(self.signature.returns):
            stated = self.out_dtype if order == 0 or tensor.dtype is None else None
            if tensor.role == "rounded" and stated not in (None, tensor.dtype):
                raise SettingError(f"out_dtype={stated!r}; the codes of {self.spec} are {tensor.dtype}")
            dtype = stated or tensor.dtype or next(iter(wide), None)
            if dtype is None:
                raise SettingError(f"out_dtype: no input has 16 bits or more; state the dtype of {tensor.name}")
            found.append(dtype)
        return tuple(found)

    def shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        """The shape of one of the signature's tensors."""
        return tensor.shape(self.sizes)

    def line(self) -> str:
        """The case as one line of JSON, without what is at its default."""
        content = {name: value for name, value in asdict(self).items() if value or name in ("sizes", "dtypes")}
        for name, default in (("memory", "plain"), ("protocol", "once"), ("unused", "plain")):
            if content[name] == default:
                del content[name]
        edits = [[tensor, list(index), str(value)] for tensor, index, value in self.edits]
        return json.dumps(content | ({"edits": edits} if edits else {}), separators=(",", ":"))

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        kinds = ", ".join(
            f"{name} {self.dtypes[name]} {self.values.get(name, '')}"
            + ("" if self.layouts.get(name, "contiguous") == "contiguous" else f" ({self.layouts[name]})")
            for name in self.dtypes
        )
        origin = "".join(f"; {name} from {first}" for name, first in self.origin.items() if first)
        edits = origin + "".join(f"; {name}{list(index)} = {value:g}" for name, index, value in self.edits)
        unused = "" if self.unused == "plain" else f"; {self.unused} wherever nothing is read"
        return f"{self.spec}: {sizes}{options}; {kinds}{edits}{unused}; seed {self.seed}"


def case_from_line(line: str) -> Case:
    """The case that `Case.line` wrote; `ReproError` where it doesn't parse."""
    try:
        content = json.loads(line)
        content["edits"] = tuple((name, tuple(index), float(value)) for name, index, value in content.get("edits", ()))
        content["options"] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content.get("options", {}).items()
        }
        case = Case(**content)
        definition = spec(case.spec)
        definition.complete(case.options)
        missing = set(case.signature.symbols) - set(case.sizes)
        if missing:
            raise ReproError(f"repro line: no size for {', '.join(sorted(missing))}")
        return case
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, ReproError):
            raise
        raise ReproError(
            f"repro line: expected the JSON of a report's repro line, got {line[:60]!r} ({error})"
        ) from None


def _is_wide_float(dtype: str) -> bool:
    if dtype in ("int32", "int64"):
        return False
    format = format_named(dtype)
    return format.kind == "float" and format.bits >= 16


def contents(case: Case, tensor: TensorSpec) -> torch.Tensor:
    """The values of a tensor, contiguous, in its dtype."""
    shape = case.shape(tensor)
    tied = tied_axes(case.layouts.get(tensor.name, "contiguous"), shape)
    start = [case.origin.get(symbol, 0) for symbol in tensor.dims]
    kind = case.values.get(tensor.name, "")
    result = draw(tensor, case.sizes, case.dtypes[tensor.name], kind, case.seed, start=start, tied=tied)
    for name, index, value in case.edits:
        if name == tensor.name and all(0 <= place < size for place, size in zip(index, shape, strict=True)):
            result[_tied_index(index, tied)] = value
    return result


def _tied_index(index: tuple[int, ...], tied: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(slice(None) if axis in tied else place for axis, place in enumerate(index))


def all_contents(case: Case) -> dict[str, torch.Tensor]:
    """The values of all tensors, by name; where nothing is read they are as ``case.unused`` says."""
    tensors = case.signature.tensors
    values = {tensor.name: contents(case, tensor) for tensor in tensors}
    if case.unused == "plain" or case.definition.unused is None:
        return values
    masks = dict(case.definition.unused(*values.values()))
    for name, mask in masks.items():
        for axis in tied_axes(case.layouts.get(name, "contiguous"), mask.shape):  # one element for all of them
            masks[name] = mask.all(axis, keepdim=True).expand(mask.shape)
    return spoiled(values, masks, tensors)


@dataclass(frozen=True)
class Inputs:
    """A case's tensors in memory, by name, in the order of the signature."""

    guarded: Mapping[str, Guarded]
    keywords: tuple[str, ...]

    @property
    def positional(self) -> list[torch.Tensor]:
        """The tensors that a kernel is called with by position."""
        return [guarded.tensor for name, guarded in self.guarded.items() if name not in self.keywords]

    def damage(self) -> tuple[str, str] | None:
        """The first input whose memory has changed: (name, what happened)."""
        for name, guarded in self.guarded.items():
            kind = guarded.damage()
            if kind is not None:
                return name, kind
        return None


def build(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The case's tensors, each placed in memory as its layout says."""
    guarded = {
        name: place(values, case.layouts.get(name, "contiguous"), device) for name, values in all_contents(case).items()
    }
    return Inputs(guarded, tuple(tensor.name for tensor in case.signature.tensors if tensor.keyword))


def work(definition: Spec, sizes: Mapping[str, int]) -> float:
    """A measure of a call's cost."""
    if definition.work is not None:
        return float(dimension(definition.work, sizes))
    return float(math.prod(max(size, 1) for name, size in sizes.items() if name not in definition.multiples.values()))
