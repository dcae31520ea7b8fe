"""The registry of specs: each op's mathematics, written once, with every fact that is known of the op.

The built-in ops stand in `assay.golden.definitions`. Others come from modules of one's own, which call `define`: those
that installed distributions name as entry points of the group ``assay.ops``, those that a command line names by
``--ops``, and any that is imported. Other processes know an op of one's own by its `Spec.reference`.
"""

from __future__ import annotations

import math
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from assay.golden.errors import DefinitionError, OptionError, UnknownSpec
from assay.golden.options import Option
from assay.golden.signature import Inputs, Signature, TensorSpec, dimension, parse
from assay.runtime.errors import unknown
from assay.runtime.own_modules import import_own

_BUILT_IN = "assay.golden.definitions"
_REFERENCES = "assay.golden.lowering"
_REGISTRY: dict[str, Spec] = {}  # by name and by reference


@dataclass(frozen=True)
class Apart:
    """Neighbouring results as a call of their own: ``places`` along symbols (the first, and how many), and ``options``.

    ``tensors``, by name, stand in place of what would be cut of the whole's.
    """

    places: Mapping[str, tuple[int, int]]
    options: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)


Part = Callable[[int, int, Mapping[str, int], Mapping[str, Any], Mapping[str, Any]], Apart | None]
"""``part(first, count, sizes, options, tensors)``: what the results at so many places from the first on, or at fewer,
hang on; None where they can't stand alone. ``tensors`` are those of the call by name, none where they aren't known."""


@dataclass(frozen=True)
class Reduction:
    """The sum inside an op, as far as probes and fault models must know it.

    ``over`` is the symbol that it runs over, or an expression for its length where no one symbol is that.
    ``of`` names the tensors of whose numbers (of one tensor), or products (of two), the first result is the plain sum;
    ``mean``: divided by how many there are. ``under`` are the values of options under which it is.
    ``exponentials`` tells of a sum of exponentials of the first tensor's rows what it is less one, from a row's first
    result.
    """

    over: str
    of: tuple[str, ...] = ()
    mean: bool = False
    under: Mapping[str, Any] = field(default_factory=dict)
    exponentials: Callable[[float], float] | None = None


@dataclass(frozen=True)
class Fault:
    """A known fault of an op's kernels: ``definition`` is that of the op, altered as little as has the fault.

    ``description`` says what is wrong in the words of who writes kernels, ``origin`` where it was seen, ``needs`` the
    input that reveals it where not any does; ``family`` is one of docs/fault-models.md. ``emulated``: the fault is not
    one of the formula, and shows in what a float32 evaluation gives (overflow, cancellation).
    """

    name: str
    description: str
    definition: Callable[..., Any]
    family: str = "formula"
    origin: str = "common slip"
    needs: str = "any ordinary input"
    emulated: bool = False


@dataclass(frozen=True)
class Spec:
    """An op: what it takes and returns, its mathematics over any arithmetic, and every fact that is known of it.

    ``definition(xp, *tensors, **options)`` is evaluated by every arithmetic of `assay.golden.arithmetic`.
    ``stages`` are the places where a kernel may round on the way, with the default format (None: no rounding there).
    ``version`` is raised whenever the mathematics changes: stored goldens of earlier versions then no longer count.
    ``listed``: among `specs`; compositions that only a checker asks for are not. ``address`` names the op in any
    process, where its name and module don't. ``typed``: the definition takes ``dtypes=``, the tensors' in order.

    Axes. ``rows`` is the symbol along which rows are independent of each other, or a function of the options that gives
    it. ``columns`` is a second such symbol: of any rows, any columns may be evaluated apart. ``separable`` are further
    symbols along which results are independent, ``summed`` those along which the results that have them are, and the
    others sums. ``parts`` are symbols along which neighbouring results are apart from the rest under conditions: `Part`
    says which. Of a symbol in ``picked`` only those places count that an index of it names (experts, pages).
    ``elementwise``: an element of the result depends on that
    of the one tensor alone, so that in a format of 16 bits or fewer every number there is can be tried. ``groups``:
    the places of a symbol come in as many groups as another has (``{"H": "Hkv"}``: heads, which share keys). ``grid``
    are the symbols that kernels have programs for: rows, batches, pages; the first dimension where left out. ``dealt``
    is the symbol whose places ranks share out.

    Sizes. ``sizes`` and ``multiples`` say which sizes a symbol may take (``{"g": (32, 64, 128)}``) and which symbol,
    number or option it must be a multiple of (``{"K": "g"}``, ``{"K": "4"}``, ``{"C": "groups"}``).
    ``least`` names options that a symbol must not fall below (``{"E": "top_k"}``). ``empty`` are the symbols that
    fuzzing may set to zero, ``usual`` sizes that a campaign over the whole op keeps to, ``long`` such beyond ``sizes``
    of which one fixed case has the first that it can take (a sequence of many chunks). ``work`` is an expression for
    the cost of a call (the product of all sizes where left out), ``turns`` one for what a kernel in tiles of 16 does
    one after another where it is interpreted: its programs, times the places of a recurrence (None: few, or cheap).

    Inputs. ``inputs`` are distributions of a tensor by their names, the plainest first, in place of those of its role
    (see `assay.golden.signature.Inputs`). ``unused(*tensors)`` gives masks, by tensor's name, of the elements that no
    result depends on: they may hold NaN, and integers there are not held to their bounds. It must bear integers beyond
    their bounds elsewhere too.

    Results. ``chosen`` names those that others hang on and that are a kernel's own choice (top-k ids, zero-points): the
    definition takes them back as keywords. ``admissible(xp, *tensors, chosen, **options)`` tells, element for element,
    which choices of the first of them are right, where no interval of numbers does. ``gradient_of`` names the op whose
    gradients these are: each result bears the name of one of its tensors, after a ``d``.

    Inside. ``reduction`` is the sum. ``faults`` are faults of its kernels: those of its own, and names of fault models
    that it has beyond those of any op. ``exempt`` names fault models of any op that none of its results would show.
    """

    name: str
    definition: Callable[..., Any]
    signature_text: str | Callable[[Mapping[str, Any]], str]
    options: Mapping[str, Option] = field(default_factory=dict)
    stages: Mapping[str, str | None] = field(default_factory=dict)
    version: int = 1
    listed: bool = True
    rows: str | Callable[[Mapping[str, Any]], str | None] | None = None
    columns: str | None = None
    separable: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)
    picked: tuple[str, ...] = ()
    elementwise: bool = False
    groups: Mapping[str, str] = field(default_factory=dict)
    grid: tuple[str, ...] = ()
    dealt: str | None = None
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    multiples: Mapping[str, str] = field(default_factory=dict)
    least: Mapping[str, str] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    usual: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    long: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    work: str | None = None
    turns: str | None = None
    inputs: Mapping[str, Inputs] = field(default_factory=dict)
    unused: Callable[..., Mapping[str, Any]] | None = None
    chosen: tuple[str, ...] = ()
    admissible: Callable[..., Any] | None = None
    gradient_of: str | None = None
    reduction: Reduction | None = None
    faults: tuple[Fault | str, ...] = ()
    exempt: tuple[str, ...] = ()
    address: str = ""
    typed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", self.grid or self.signature().tensors[0].leading)
        object.__setattr__(self, "multiples", {**self.groups, **self.multiples})

    @property
    def reference(self) -> str:
        """What names the op in any process: its name, of an op of one's own ``module:name`` unless it is a script's."""
        if self.address:
            return self.address
        module = self.definition.__module__
        return self.name if _is_built_in(module) or module == "__main__" else f"{module}:{self.name}"

    def signature(self, options: Mapping[str, Any] | None = None) -> Signature:
        """The signature under ``options`` (defaults where left out)."""
        text = self.signature_text
        found = parse(text if isinstance(text, str) else text(self.complete(options or {})))
        steps = {symbol: name for symbol, name in self.multiples.items() if name in self.options}
        if steps:
            complete = self.complete(options or {})
            found = replace(found, steps={symbol: complete[name] for symbol, name in steps.items()})
        return found.with_inputs(self.inputs) if self.inputs else found

    @property
    def signatures(self) -> Iterator[Signature]:
        """The signatures under the defaults, and under each usual value of one option."""
        yield self.signature()
        if not isinstance(self.signature_text, str):
            for name, option in self.options.items():
                for value in option.usual:
                    yield self.signature({name: value})

    @property
    def usual_settings(self) -> dict[str, Any]:
        """What an examination of the op as a whole varies: a dtype, if there is one to choose, options and sizes."""
        return {
            "dtype": "bfloat16" if any(tensor.dtype is None for tensor in self.tensors) else None,
            "options": {name: list(option.usual) for name, option in self.options.items() if option.usual},
            "shapes": {name: list(sizes) for name, sizes in self.usual.items()},
        }

    def independent(self, options: Mapping[str, Any]) -> str | None:
        """The symbol along which rows are independent of each other under complete ``options``."""
        return self.rows(options) if callable(self.rows) else self.rows

    def step(self, signature: Signature, symbol: str, sizes: Mapping[str, int]) -> int:
        """What a symbol must be a multiple of: its divisors in the signature, and its partner of ``multiples``."""
        step = signature.divisor(symbol)
        partner = self.multiples.get(symbol, "")
        if partner.isdigit():
            return math.lcm(step, int(partner))
        return math.lcm(step, max(sizes.get(partner, 1), 1)) if partner in signature.symbols else step

    def cost(self, sizes: Mapping[str, int]) -> int:
        """About how many operations an evaluation takes."""
        if self.work is not None:
            return dimension(self.work, sizes)
        return math.prod(max(size, 1) for name, size in sizes.items() if name not in self.multiples.values())

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors that the op takes under its default options, in order."""
        return self.signature().tensors

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` with the defaults filled in; `OptionError` on an unknown name or a value out of place."""
        for name, value in options.items():
            if name not in self.options:
                raise OptionError(f"{self.name}: {unknown('option', name, self.options)}")
            self.options[name].check(self.name, name, value)
        return {name: option.normal(options.get(name, option.default)) for name, option in self.options.items()}


def define(
    name: str, signature: str | Callable[[Mapping[str, Any]], str], **fields: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: register the decorated definition as the spec ``name``; ``fields`` are those of `Spec`.

    Raises `DefinitionError` where the name is that of an op of another module.
    """

    def register(definition: Callable[..., Any]) -> Callable[..., Any]:
        module = definition.__module__
        if not _is_built_in(module):
            _load_built_in()
        if name in _REGISTRY and _REGISTRY[name].definition.__module__ != module:
            raise DefinitionError(
                f"op {name!r} is defined in {_REGISTRY[name].definition.__module__} already; choose another name"
            )
        rows = fields.get("rows")
        fields.setdefault("empty", (rows,) if isinstance(rows, str) else ())
        found = Spec(name, definition, signature, **fields)
        _REGISTRY[name] = _REGISTRY[found.reference] = found
        return definition

    return register


def register(found: Spec) -> Spec:
    """A spec that is known by its reference; one that is known already, and the same, stays."""
    known = _REGISTRY.get(found.reference)
    if known is not None and known == found:
        return known
    _REGISTRY[found.reference] = found
    return found


def _is_built_in(module: str) -> bool:
    return module == _BUILT_IN or module.startswith(f"{_BUILT_IN}.")


@cache
def _load_built_in() -> None:
    for module in pkgutil.iter_modules(import_module(_BUILT_IN).__path__):
        import_module(f"{_BUILT_IN}.{module.name}")


@cache
def _load() -> None:
    """The built-in ops, and those of installed distributions; one that is broken is named in a warning."""
    _load_built_in()
    for entry in entry_points(group="assay.ops"):
        try:
            import_module(entry.module)
        except Exception as error:
            owner = entry.dist.name if entry.dist else "an installed distribution"
            warnings.warn(
                f"{owner}: its ops ({entry.value}, entry point of assay.ops) can't be loaded: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


def load_ops(modules: Sequence[str] | None) -> Sequence[str]:
    """Import modules that define ops; those of the current folder count. Raises `DefinitionError`."""
    for module in modules or ():
        import_own(module, f"ops {module!r}", DefinitionError)
    return modules or ()


def specs() -> tuple[str, ...]:
    """The names of all specs that are listed."""
    _load()
    return tuple(sorted({found.name for found in _REGISTRY.values() if found.listed}))


def spec(name: str, target: str = "") -> Spec:
    """The spec called ``name``, or of one's own ``module:name``; `UnknownSpec` if there is none.

    ``target`` is a kernel's importable name, whose module may define the op.
    """
    if name not in _REGISTRY and "(" in name:
        made: Spec = import_module(_REFERENCES).named(name)
        return made
    if name not in _REGISTRY:
        _load()
    if name not in _REGISTRY and ":" in name:
        load_ops([name.partition(":")[0]])
    if name not in _REGISTRY and ":" in target:
        with suppress(DefinitionError):  # a module that isn't there defines no op
            load_ops([target.partition(":")[0]])
    if name not in _REGISTRY:
        raise UnknownSpec(unknown("spec", name, specs()))
    return _REGISTRY[name]


@contextmanager
def forgotten() -> Iterator[None]:
    """What `define` registers inside is known inside alone."""
    _load()
    known = dict(_REGISTRY)
    try:
        yield
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(known)


def gradients_of(op: str) -> list[Spec]:
    """The specs that say of themselves that they are the gradient of ``op``."""
    _load()
    return [found for name, found in _REGISTRY.items() if found.gradient_of == op and name == found.reference]
