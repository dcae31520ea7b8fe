"""The settings of an examination, in one frozen record.

The keywords of `examine`, the options of the command line and of pytest, the entries of a table, repro lines and the
messages to an isolated kernel's process are converted to it or made from it. It is checked once, when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from assay.formats.format import format_named
from assay.golden.registry import Spec, spec
from assay.golden.signature import INTEGERS, format_or_integer
from assay.interpreter import check_emulated
from assay.runtime.environment import changes, with_changes
from assay.runtime.errors import unknown
from assay.runtime.records import LARGEST_SEED, MOST_EXAMPLES
from assay.verify.cases.at_shape import checked_shapes
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.contract import Contract, contract_from_table
from assay.verify.errors import SettingError
from assay.verify.harness.refusals import checked

_LARGEST_SIZE = 1025  # where a range of sizes has no "max"
OF_THE_RUN = (
    "device",
    "timeout",
    "budget",
    "isolate",
    "memory",
    "goldens",
    "shrinking",
    "every_aspect",
    "faithful",
    "pretend",
    "emission",
    "environment",
)
"""The settings that say how and where a kernel is run, and not what it is asked."""

EFFORTS = {"quick": 12, "usual": 60, "thorough": 200}
"""How many cases are fuzzed by each effort; a quick one has fewer fixed cases too."""

_OF_A_CALL = (
    "refuses",
    "contract",
    "strict",
    "framework",
    "device",
    "timeout",
    "faithful",
    "pretend",
    "emission",
    "environment",
)

Text = Annotated[str, msgspec.Meta(description="text")]
Switch = Annotated[bool, msgspec.Meta(description="true or false")]
Whole = Annotated[int, msgspec.Meta(ge=0, description="a whole number of at least 0")]
Examples = Annotated[int, msgspec.Meta(ge=0, le=MOST_EXAMPLES)]
Number = Annotated[float, msgspec.Meta(gt=0, description="a number more than 0")]


@dataclass(frozen=True)
class Settings:
    """The settings of an examination of ``spec``; `assay.verify.examine` documents each one.

    After construction ``spec`` is the op's reference, sequences are tuples or ranges, and a single size is a list of
    one. ``faithful`` names the device whose tensor cores the interpreter emulates, ``pretend`` the device that "cuda"
    names during a call of the kernel (`assay.interpreter.pretend_cuda`; ``device`` is then the CPU), ``emission`` the
    compiler's changes to the kernel's arithmetic (`emission_named`), ``environment`` the changes to the standard
    numeric environment of the call (`assay.runtime.environment.changes`).

    Raises `UnknownSpec`, `OptionError`, `UnknownFormat` or `SettingError` for settings that no examination can have;
    `make_plan` reports what this machine lacks.
    """

    spec: str
    dtype: str | Mapping[str, str] | None = None
    out_dtype: str | None = None
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int] | str] = field(default_factory=dict)
    at: Sequence[Mapping[str, int]] = ()
    layouts: Sequence[str] = LAYOUTS
    contract: Contract = field(default_factory=Contract)
    effort: Literal["quick", "usual", "thorough"] = "usual"
    examples: Annotated[Examples | None, msgspec.Meta(description="a whole number from 0 to a million")] = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_SEED, description="a whole number from 0 to 2^63 - 1")] = 0
    device: Text = "cpu"
    framework: Text = "torch"
    timeout: Number = 30.0
    budget: Annotated[Number | None, msgspec.Meta(description="seconds, more than 0")] = None
    isolate: Switch = False
    memory: Number = 4.0
    goldens: Annotated[str | None, msgspec.Meta(description="the address of a store")] = None
    shrinking: Switch = True
    strict: Switch = False
    every_aspect: Switch = True
    faithful: Text = ""
    pretend: Text = ""
    emission: Text = ""
    environment: Mapping[str, Any] = field(default_factory=changes)
    refuses: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field, and convert it to its standard form."""
        definition = self.definition
        self._set("spec", definition.qualified_name)
        self._set("device", str(self.device))
        fitting(Settings, vars(self))
        if self.pretend or self.emission:
            check_emulated(self.faithful, self.pretend, self.emission)
        if self.pretend:
            self._set("device", "cpu" if self.device.partition(":")[0] == "cuda" else self.device)
        if self.effort not in EFFORTS:
            raise SettingError(f"effort={self.effort!r}; expected one of {', '.join(EFFORTS)}")
        given: Any = self.contract
        if isinstance(given, str):
            self._set("contract", contract_from_table(given))
        if not isinstance(self.contract, Contract):
            raise SettingError(
                f"contract: expected a Contract, e.g. Contract(accumulate='float16'), or a name, e.g. 'transformers', "
                f"got {self.contract!r}"
            )
        self._set("contract", self.contract.of(definition))
        if self.framework == "jax" and self.device == "cpu" and self.contract.subnormals is None:
            self._set("contract", replace(self.contract, subnormals="flush"))  # as XLA does there
        for name in ("options", "shapes", "environment"):
            if not isinstance(getattr(self, name), Mapping):
                given = getattr(self, name)
                raise SettingError(f"{name}: expected a mapping, e.g. {{'N': [64, 128]}}, got {given!r}")
        with_changes(self.environment)  # which checks it
        self._set("dtype", _dtypes(definition, self.dtype))
        self._set("out_dtype", self.out_dtype and format_or_integer(self.out_dtype))
        self._set("options", {name: _values(definition, name, values) for name, values in self.options.items()})
        self._set("shapes", {symbol: _sizes(symbol, sizes) for symbol, sizes in self.shapes.items()})
        sets = [dict(zip(self.options, values, strict=True)) for values in product(*self.options.values())]
        symbols = {symbol for options in sets for symbol in definition.signature(options).symbols}
        for symbol in (*self.shapes, *self.ties.values()):
            if symbol not in symbols:
                raise SettingError(f"shapes: {unknown('dimension', symbol, symbols)}")
        for symbol, other in self.ties.items():
            if other in self.ties:
                expected = "expected a symbol that has sizes of its own"
                raise SettingError(f"shapes: {symbol}={other!r}, which is as large as {self.ties[other]!r}; {expected}")
        self._set("at", checked_shapes(self.at, definition, sets, self.sizes, self.ties))
        self._set("layouts", _layouts(self.layouts))
        self._set("refuses", checked(self.refuses, symbols))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the record is frozen for everybody else

    @property
    def ties(self) -> dict[str, str]:
        """The symbols that ``shapes`` ties to another symbol, and that symbol."""
        return {symbol: sizes for symbol, sizes in self.shapes.items() if isinstance(sizes, str)}

    @property
    def sizes(self) -> dict[str, Sequence[int]]:
        """The sizes to which ``shapes`` restricts symbols."""
        return {symbol: sizes for symbol, sizes in self.shapes.items() if not isinstance(sizes, str)}

    @property
    def definition(self) -> Spec:
        """The spec of the op."""
        return spec(self.spec)

    @property
    def dtype_name(self) -> str:
        """The dtype as worded in reports; empty if the op fixes it."""
        return ", ".join(dict.fromkeys(self.dtype.values())) if isinstance(self.dtype, Mapping) else self.dtype or ""

    @property
    def unpromised(self) -> set[str]:
        """The aspects that cause only a warning when broken."""
        return set() if self.strict else {"special", "subnormals"} - self.contract.promises

    @property
    def fuzzed(self) -> int:
        """The number of fuzzed cases: ``examples``, or else the effort's."""
        return EFFORTS[self.effort] if self.examples is None else self.examples

    def anywhere(self) -> Settings:
        """Return the settings without those of the run: on this machine, with torch tensors, failures neither shrunk
        nor explained."""
        own = {name: getattr(self, name) for name in names() if name not in (*OF_THE_RUN, "framework")}
        return Settings(**own, shrinking=False)

    def as_table(self) -> dict[str, Any]:
        """Return plain data: the op, and the fields that differ from their defaults, for `from_table`."""
        given = {name: getattr(self, name) for name in names()}
        defaults = _defaults()
        return {name: _plain(value) for name, value in given.items() if value != defaults[name]}

    def of_call(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of `as_table` on which one call with these options depends."""
        listed = {name: [_plain(options[name])] for name in self.options}
        kept = {name: value for name, value in self.as_table().items() if name in _OF_A_CALL}
        return ({"options": listed} if listed else {}) | kept

    @staticmethod
    def from_table(row: Mapping[str, Any]) -> Settings:
        """Return the settings of a TOML or JSON table.

        An array among an option's values becomes a tuple, ``{min, max, multiple_of}`` a range of sizes, and a
        contract's name its fields. Raises as `Settings` does, and `ContractError`.
        """
        for name in row:
            if name not in names():
                raise SettingError(unknown("field", name, names()))
        made = {"environment": {}, **row}
        if isinstance(made.get("options"), Mapping):
            made["options"] = {name: _tuples(values) for name, values in made["options"].items()}
        if isinstance(made.get("shapes"), Mapping):
            made["shapes"] = {symbol: _range(symbol, sizes) for symbol, sizes in made["shapes"].items()}
        if "contract" in made:
            made["contract"] = contract_from_table(made["contract"])
        return Settings(**made)


@cache
def names() -> tuple[str, ...]:
    """Return the names of all settings."""
    return tuple(f.name for f in fields(Settings))


@cache
def _defaults() -> dict[str, Any]:
    made = {f.name: f.default for f in fields(Settings)}
    return made | {"options": {}, "shapes": {}, "contract": Contract(), "environment": {}, "refuses": {}}


def fitting(record: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` converted to the annotated types of the dataclass ``record``; fields without a description
    unchanged.

    Raises `SettingError` in the words of the description.
    """
    made = dict(given)
    for name, kind in _hints(record).items():
        if name in given and hasattr(kind, "__metadata__"):
            try:
                made[name] = msgspec.convert(given[name], kind)
            except msgspec.ValidationError:
                expected = kind.__metadata__[0].description
                raise SettingError(f"{name}={given[name]!r}; expected {expected}") from None
    return made


@cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)


def _dtypes(definition: Spec, dtype: Any) -> str | dict[str, str] | None:
    tensors = definition.tensors
    if dtype is None:
        return None
    if not isinstance(dtype, Mapping):
        name = format_or_integer(str(dtype).removeprefix("torch."))
        is_integer = name in INTEGERS or format_named(name).kind == "integer"
        if is_integer and any(tensor.dtype is None for tensor in tensors):
            raise SettingError(f"dtype={name!r}; {definition.name} takes floating-point numbers")
        return name
    known = {tensor.name for tensor in tensors}
    for name in dtype:
        if name not in known:
            raise SettingError(f"dtype: {definition.name} has no tensor {name!r}; it has {', '.join(sorted(known))}")
    if not dtype:
        raise SettingError("dtype={}; expected a name, or a name for each tensor")
    return {name: format_or_integer(str(value).removeprefix("torch.")) for name, value in dtype.items()}


def _values(definition: Spec, name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise SettingError(f"options: {name}={values!r}; expected a list of the values to vary over")
    for value in values:
        definition.complete({name: value})
    return tuple(values)


def _sizes(symbol: str, sizes: Any) -> Sequence[int] | str:
    if isinstance(sizes, str):
        return sizes
    sizes = (sizes,) if isinstance(sizes, int) else sizes
    if not isinstance(sizes, Sequence) or not sizes or not all(isinstance(s, int) and s >= 0 for s in sizes):
        raise SettingError(f"shapes: {symbol}={sizes!r}; expected a list or range of whole numbers, or a symbol")
    return sizes if isinstance(sizes, range) else tuple(sizes)


def _layouts(layouts: Any) -> tuple[str, ...]:
    if isinstance(layouts, str) or not isinstance(layouts, Sequence) or not layouts:
        raise SettingError(f"layouts={layouts!r}; expected a list of layouts, e.g. {list(LAYOUTS[:1])}")
    for layout in layouts:
        if layout not in LAYOUTS:
            raise SettingError(f"layouts: {unknown('layout', layout, LAYOUTS)}")
    return tuple(layouts)


def _range(symbol: str, sizes: Any) -> Any:
    """Return the sizes of a table as a range."""
    if not isinstance(sizes, Mapping):
        return sizes
    if not set(sizes) <= {"min", "max", "multiple_of"} or not all(type(size) is int for size in sizes.values()):
        raise SettingError(f"shapes: {symbol}={sizes!r}; expected a list of sizes, or {{ min, max, multiple_of }}")
    step = max(sizes.get("multiple_of", 1), 1)
    first = -(-sizes.get("min", step) // step) * step
    return range(first, sizes.get("max", max(_LARGEST_SIZE, first)) + 1, step)


def _tuples(values: Any) -> Any:
    """Return an option's values with arrays as tuples."""
    return [tuple(v) if isinstance(v, list) else v for v in values] if isinstance(values, list) else values


def _plain(value: Any) -> Any:
    """Return a setting's value as TOML or JSON holds it."""
    if isinstance(value, Contract):
        return value.changed()
    if isinstance(value, range) and value and value.step > 0 and value.start % value.step == 0:
        return {"min": value[0], "max": value[-1], "multiple_of": value.step}
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (tuple, list, range)) else value
