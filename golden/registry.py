"""The specs of the ops: each op's mathematics, written once, with the facts that goldens, checks and fault models use.

The built-in ops are in `assay.golden.definitions`. Other modules add ops with `define`: modules that
installed distributions name as entry points of the group ``assay.ops``, that a command line names by ``--ops``, or that
are imported. Other processes find such an op by its `Spec.qualified_name`.
"""

from __future__ import annotations

import inspect
import math
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from assay.golden.arithmetic import Real
from assay.golden.errors import DefinitionError, OptionError, UnknownSpec
from assay.golden.inputs.values import draw, dtype_of
from assay.golden.options import Option
from assay.golden.result_shapes import with_result_shapes
from assay.golden.signature import Inputs, Signature, TensorSpec, dimension, parse
from assay.runtime.errors import unknown
from assay.runtime.modules import import_users_module

_BUILT_IN = "assay.golden.definitions"
_REFERENCES = "assay.golden.lowering"
_REGISTRY: dict[str, Spec] = {}  # by name and by qualified name


@dataclass(frozen=True)
class Tile:
    """A smaller call whose results are a tile of a larger call's results.

    ``ranges``: (first, count) along each symbol that is cut; ``options``: the smaller call's; ``tensors``, by name:
    tensors to use instead of slices of the larger call's.
    """

    ranges: Mapping[str, tuple[int, int]]
    options: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)


TilingRule = Callable[[int, int, Mapping[str, int], Mapping[str, Any], Mapping[str, Any]], Tile | None]
"""``rule(first, count, sizes, options, tensors)``: the `Tile` with the results at ``count`` indices from ``first``,
or at fewer of them; None if they can't be computed alone. ``tensors`` are the call's by name; empty if unknown."""


@dataclass(frozen=True)
class Axes:
    """How results depend on the indices along each symbol of the signature.

    rows: the symbol along which results are independent, or a function of the options that returns it.
    columns: a second one; results of any rows at any columns can be computed alone.
    independent: further symbols along which results are independent.
    reduced: symbols along which some results are independent and the others, which lack the symbol, are sums.
    tiling: symbols whose neighbouring indices can be computed alone under conditions, each with its `TilingRule`.
    gathered: symbols of which only the indices in an index tensor are read (experts, pages).
    elementwise: each element depends on the same element of the only tensor, so that formats of up to 16 bits can be
        tried exhaustively.
    groups: symbols whose indices form as many groups as another symbol has (``{"H": "Hkv"}``: grouped-query heads).
    grid: symbols over which kernels launch programs (rows, batches, pages); default: those of the first dimension.
    sharded: the symbol that is split across ranks.
    """

    rows: str | Callable[[Mapping[str, Any]], str | None] | None = None
    columns: str | None = None
    independent: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    tiling: Mapping[str, TilingRule] = field(default_factory=dict)
    gathered: tuple[str, ...] = ()
    elementwise: bool = False
    groups: Mapping[str, str] = field(default_factory=dict)
    grid: tuple[str, ...] = ()
    sharded: str | None = None


@dataclass(frozen=True)
class Sizes:
    """Which sizes the symbols of the signature may have, and what a call of those sizes costs.

    allowed: sizes that a symbol may have (``{"g": (32, 64, 128)}``).
    multiples: the symbol, number or option that a symbol must be a multiple of (``{"K": "g"}``, ``{"K": "4"}``,
        ``{"C": "groups"}``); includes `Axes.groups`.
    minimum: the option that a symbol must not be less than (``{"E": "top_k"}``).
    may_be_zero: symbols that fuzzing may set to zero.
    default: sizes that a campaign over the whole op uses.
    work: an expression for the operations of a call; default: the product of all sizes.
    sequential_steps: an expression for what the interpreter runs one after another where a kernel has tiles of 16: its
        programs, times the steps of a recurrence; None if few or cheap.
    """

    allowed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    multiples: Mapping[str, str] = field(default_factory=dict)
    minimum: Mapping[str, str] = field(default_factory=dict)
    may_be_zero: tuple[str, ...] = ()
    default: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    work: str | None = None
    sequential_steps: str | None = None


@dataclass(frozen=True)
class InputRules:
    """What the tensors of an op contain.

    distributions: those of a tensor by their names, the plainest first, in place of those of its role
        (see `assay.golden.signature.Inputs`).
    unused: ``unused(*tensors)`` returns masks, by tensor name, of the elements that no result depends on. Those may
        hold NaN, and integers beyond their bounds. It must accept integers beyond their bounds elsewhere too.
    """

    distributions: Mapping[str, Inputs] = field(default_factory=dict)
    unused: Callable[..., Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class OutputRules:
    """Which results a kernel may choose, and whose gradients the results are.

    chosen: results that other results depend on and that a kernel may choose freely (top-k ids, zero-points); the
        definition takes the kernel's own as keywords.
    accepts: ``accepts(xp, *tensors, chosen, **options)`` returns a mask of the right choices of the first of
        ``chosen``, for choices that no interval of numbers describes.
    gradient_of: the op whose gradients these are; each result is named after one of its tensors, after a ``d``.
    fills: the infinity that the op itself writes where it leaves a number out, such as a filtered logit. Of finite
        tensors it is judged like a number, whatever a contract says of NaN and infinities.
    keeps: ``keeps(xp, *tensors, **options)`` returns the least and the most numbers of each row of the first result
        that aren't ``fills``, where equal ones leave each of them open and yet so many stay.
    """

    chosen: tuple[str, ...] = ()
    accepts: Callable[..., Any] | None = None
    gradient_of: str | None = None
    fills: float | None = None
    keeps: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Reduction:
    """The sum inside an op, as probes and fault models need it.

    over: the symbol that the sum runs over, or an expression for its length.
    of: tensors of whose elements (one tensor) or products (two) the first result is the plain sum.
    mean: the sum is divided by its length.
    under: values of options under which ``of`` holds.
    exponentials: for a sum of exponentials of the first tensor's rows, relative to the largest: a function from a row's
        first result to that sum minus one.
    """

    over: str
    of: tuple[str, ...] = ()
    mean: bool = False
    under: Mapping[str, Any] = field(default_factory=dict)
    exponentials: Callable[[float], float] | None = None


@dataclass(frozen=True)
class Fault:
    """A known fault of an op's kernels: ``definition`` is the op's, changed only by the fault.

    ``description`` says what is wrong, for authors of kernels; ``origin`` where it was seen; ``needs`` the input that
    reveals it, if not every input does; ``family`` is one of docs/fault-models.md. ``emulated``: the formula is right,
    and the fault shows in a float32 evaluation (overflow, cancellation).
    """

    name: str
    description: str
    definition: Callable[..., Any]
    family: str = "formula"
    origin: str = "common slip"
    needs: str = "any ordinary input"
    emulated: bool = False


def altered(op: str, **changes: Any) -> Callable[..., Any]:
    """Return the definition of ``op`` with some of its tensors, options or results replaced, as most faults do.

    A change is the new value, or a function of what its parameters name: ``xp``, tensors and options of the call, and
    ``value``, what is replaced. That of a result may also name results, and ``again``: ``again(**replaced)`` is the
    result of a call with other tensors or options. A change of what the call's options leave out has no effect.
    """

    def definition(xp: Any, *tensors: Any, **options: Any) -> Any:
        altered_op = _REGISTRY[op]
        given = {name: options[name] for name in options.keys() & altered_op.options.keys()}
        signature = altered_op.signature(given)
        positional = [tensor.name for tensor in signature.tensors if not tensor.keyword]
        call = {"xp": xp, **dict(zip(positional, tensors, strict=True)), **options}

        def evaluated(**replaced: Any) -> dict[str, Any]:
            keywords = call | replaced
            arguments = [keywords.pop(name) for name in ("xp", *positional)]
            results = altered_op.definition(*arguments, **keywords)
            names = (tensor.name for tensor in signature.returns)
            return dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))

        def changed(name: str, context: Mapping[str, Any]) -> Any:
            if not callable(change := changes[name]):
                return change
            known = {**context, "value": context[name]}
            return change(**{needed: known[needed] for needed in inspect.signature(change).parameters})

        results = evaluated(**{name: changed(name, call) for name in call.keys() & changes.keys()})
        context = call | results
        for name in results.keys() & changes.keys():
            again = {"again": lambda name=name, **replaced: evaluated(**replaced)[name]}
            results[name] = changed(name, context | again)
        return tuple(results.values()) if len(results) > 1 else results.popitem()[1]

    return definition


@dataclass(frozen=True)
class Spec:
    """An op: its tensors and results, its mathematics over any arithmetic, and the facts about it; `define` makes one.

    definition: ``definition(xp, *tensors, **options)``, evaluated by every arithmetic of `assay.golden.arithmetic`.
    signature_text: see `assay.golden.signature`; or a function of the options that returns it.
    stages: the rounding points inside kernels, each with its default format (None: not rounded).
    version: raised whenever the mathematics changes, so that goldens stored earlier no longer count.
    public: whether `specs` lists the op; compositions that only a checker uses are not listed.
    faults: the op's own faults, and names of fault models that not every op has; ``exempt``: general fault models that
        none of its results would show.
    import_name: identifies the op in any process, if its name and module don't.
    needs_dtypes: the definition takes ``dtypes=``, the tensors' dtypes in order.
    """

    name: str
    definition: Callable[..., Any]
    signature_text: str | Callable[[Mapping[str, Any]], str]
    options: Mapping[str, Option] = field(default_factory=dict)
    stages: Mapping[str, str | None] = field(default_factory=dict)
    version: int = 1
    public: bool = True
    axes: Axes = Axes()
    sizes: Sizes = Sizes()
    inputs: InputRules = InputRules()
    outputs: OutputRules = OutputRules()
    reduction: Reduction | None = None
    faults: tuple[Fault | str, ...] = ()
    exempt: tuple[str, ...] = ()
    import_name: str = ""
    needs_dtypes: bool = False
    _shapes: dict[str, tuple[TensorSpec, ...]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        grid = self.axes.grid or self._written_signature({}).tensors[0].leading
        object.__setattr__(self, "axes", replace(self.axes, grid=grid))
        multiples = {**self.axes.groups, **self.sizes.multiples}
        object.__setattr__(self, "sizes", replace(self.sizes, multiples=multiples))

    @property
    def qualified_name(self) -> str:
        """The op's name in any process: ``module:name`` unless it is built in, or defined in a script."""
        if self.import_name:
            return self.import_name
        module = self.definition.__module__
        return self.name if _is_built_in(module) or module == "__main__" else f"{module}:{self.name}"

    def signature(self, options: Mapping[str, Any] | None = None) -> Signature:
        """Return the signature under ``options`` (defaults where left out).

        Results without dimensions get those that the definition gives them; `DefinitionError` if none fit.
        """
        signature = self._written_signature(options or {})
        if all(tensor.has_shape for tensor in signature.returns):
            return signature
        complete = self.complete(options or {})
        key = repr((self.version, self.signature_text, sorted(complete.items())))
        if key not in self._shapes:
            self._shapes[key] = with_result_shapes(
                self.name,
                signature,
                self._sizes_to_try(signature, complete),
                lambda sizes: self._result_shapes(signature, complete, sizes),
            ).returns
        return replace(signature, returns=self._shapes[key])

    def _written_signature(self, options: Mapping[str, Any]) -> Signature:
        text = self.signature_text
        signature = parse(text if isinstance(text, str) else text(self.complete(options)))
        by_option = {symbol: name for symbol, name in self.sizes.multiples.items() if name in self.options}
        if by_option:
            complete = self.complete(options)
            signature = replace(signature, steps={symbol: complete[name] for symbol, name in by_option.items()})
        return signature.with_inputs(self.inputs.distributions) if self.inputs.distributions else signature

    def _sizes_to_try(self, signature: Signature, options: Mapping[str, Any]) -> Iterator[dict[str, int]]:
        """Yield sizes that the definition may run at: all different, all in tiles, all equal."""
        partners = self.sizes.multiples.values()
        for choose in (
            lambda index: (5, 7, 11, 13, 17, 19)[index % 6],
            lambda index: 16 * (index + 2),
            lambda index: 16,
        ):
            sizes: dict[str, int] = {}
            for index, symbol in enumerate(sorted(signature.symbols, key=lambda name: name not in partners)):
                allowed = [size for size in self.sizes.allowed.get(symbol, ()) if size]
                step = self.step(signature, symbol, sizes)
                size = allowed[min(index, len(allowed) - 1)] if allowed else choose(index) * step
                least = int(options[self.sizes.minimum[symbol]]) if symbol in self.sizes.minimum else 1
                sizes[symbol] = -(-max(size, least) // step) * step
            yield {symbol: sizes[symbol] for symbol in signature.symbols}

    def _result_shapes(
        self, signature: Signature, options: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> list[tuple[int, ...]]:
        """Return the shapes of the results of the definition, evaluated in float64 at these sizes."""
        xp, drawn = Real(), {t.name: draw(t, sizes, dtype_of(t, "float32"), "", 0) for t in signature.tensors}
        numbers = {
            t.name: xp.integers(drawn[t.name]) if t.is_integer else xp.exact(drawn[t.name].double())
            for t in signature.tensors
        }
        keywords = {tensor.name: numbers.pop(tensor.name) for tensor in signature.tensors if tensor.keyword}
        plain: dict[str, Any] = {name: value for name, value in options.items() if name not in keywords}
        if self.needs_dtypes:
            plain["dtypes"] = [value.dtype for value in drawn.values()]
        results = self.definition(xp, *numbers.values(), **keywords, **plain)
        return [tuple(map(int, each.shape)) for each in (results if isinstance(results, tuple) else (results,))]

    @property
    def signatures(self) -> Iterator[Signature]:
        """The signatures under the defaults, and under each usual value of one option."""
        yield self.signature()
        if not isinstance(self.signature_text, str):
            for name, option in self.options.items():
                for value in option.usual:
                    yield self.signature({name: value})

    @property
    def default_settings(self) -> dict[str, Any]:
        """The dtype (None if the op fixes all), options and sizes that an examination of the whole op varies."""
        return {
            "dtype": "bfloat16" if any(tensor.dtype is None for tensor in self.tensors) else None,
            "options": {name: list(option.usual) for name, option in self.options.items() if option.usual},
            "shapes": {name: list(sizes) for name, sizes in self.sizes.default.items()},
        }

    def row_axis(self, options: Mapping[str, Any]) -> str | None:
        """Return the symbol along which rows are independent of each other under complete ``options``."""
        rows = self.axes.rows
        return rows(options) if callable(rows) else rows

    def step(self, signature: Signature, symbol: str, sizes: Mapping[str, int]) -> int:
        """Return the number that a symbol must be a multiple of, by the signature and by `Sizes.multiples`."""
        step = signature.divisor(symbol)
        partner = self.sizes.multiples.get(symbol, "")
        if partner.isdigit():
            return math.lcm(step, int(partner))
        return math.lcm(step, max(sizes.get(partner, 1), 1)) if partner in signature.symbols else step

    def cost(self, sizes: Mapping[str, int]) -> int:
        """Return roughly how many operations an evaluation takes."""
        if self.sizes.work is not None:
            return dimension(self.sizes.work, sizes)
        divisors = self.sizes.multiples.values()
        return math.prod(max(size, 1) for name, size in sizes.items() if name not in divisors)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors that the op takes under its default options, in order."""
        return self.signature().tensors

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``options`` with the defaults filled in; `OptionError` on an unknown name or an invalid value."""
        for name, value in options.items():
            if name not in self.options:
                raise OptionError(f"{self.name}: {unknown('option', name, self.options)}")
            self.options[name].check(self.name, name, value)
        return {name: option.normal(options.get(name, option.default)) for name, option in self.options.items()}


_RECORDS = {"axes": Axes, "sizes": Sizes, "inputs": InputRules, "outputs": OutputRules}
_KEYWORDS = {part.name: (name, part.name) for name, record in _RECORDS.items() for part in fields(record)} | {
    "sizes": ("sizes", "allowed"),
    "min_sizes": ("sizes", "minimum"),
    "default_sizes": ("sizes", "default"),
    "inputs": ("inputs", "distributions"),
    # Names of earlier versions, which definitions outside of this repository may use.
    "separable": ("axes", "independent"),
    "summed": ("axes", "reduced"),
    "parts": ("axes", "tiling"),
    "picked": ("axes", "gathered"),
    "dealt": ("axes", "sharded"),
    "least": ("sizes", "minimum"),
    "empty": ("sizes", "may_be_zero"),
    "usual": ("sizes", "default"),
    "turns": ("sizes", "sequential_steps"),
    "admissible": ("outputs", "accepts"),
    "listed": ("", "public"),
}  # keyword of `define`: the record (none: `Spec` itself) and its field


def define(
    name: str, signature: str | Callable[[Mapping[str, Any]], str], **facts: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a definition to register it as the spec ``name``.

    ``facts`` are fields of `Spec`, and those of its `Axes`, `Sizes`, `InputRules` and `OutputRules` by their own names,
    except that `Sizes` takes ``sizes``, ``min_sizes`` and ``default_sizes``, and `InputRules` ``inputs``.
    ``may_be_zero`` defaults to the rows. Raises `DefinitionError` if an op of another module has that name.
    """

    def register(definition: Callable[..., Any]) -> Callable[..., Any]:
        module = definition.__module__
        if not _is_built_in(module):
            _load_built_in()
        if name in _REGISTRY and _REGISTRY[name].definition.__module__ != module:
            raise DefinitionError(
                f"op {name!r} is defined in {_REGISTRY[name].definition.__module__} already; choose another name"
            )
        of_spec: dict[str, Any] = {}
        of_records: dict[str, dict[str, Any]] = {record: {} for record in _RECORDS}
        for keyword, value in facts.items():
            record, attribute = _KEYWORDS.get(keyword, ("", keyword))
            (of_records[record] if record else of_spec)[attribute] = value
        rows = facts.get("rows")
        of_records["sizes"].setdefault("may_be_zero", (rows,) if isinstance(rows, str) else ())
        records = {record: _RECORDS[record](**values) for record, values in of_records.items()}
        made = Spec(name, definition, signature, **of_spec, **records)
        _REGISTRY[name] = _REGISTRY[made.qualified_name] = made
        return definition

    return register


def register(made: Spec) -> Spec:
    """Register a spec under its qualified name; return the registered one if it is equal."""
    known = _REGISTRY.get(made.qualified_name)
    if known is not None and known == made:
        return known
    _REGISTRY[made.qualified_name] = made
    return made


def _is_built_in(module: str) -> bool:
    return module == _BUILT_IN or module.startswith(f"{_BUILT_IN}.")


@cache
def _load_built_in() -> None:
    for module in pkgutil.iter_modules(import_module(_BUILT_IN).__path__):
        import_module(f"{_BUILT_IN}.{module.name}")


@cache
def _load() -> None:
    """Load the built-in ops and those of installed distributions; warn of a distribution that fails to load."""
    _load_built_in()
    for entry in entry_points(group="assay.ops"):
        try:
            import_module(entry.module)
        except Exception as error:
            distribution = entry.dist.name if entry.dist else "an installed distribution"
            warnings.warn(
                f"{distribution}: its ops ({entry.value}, entry point of assay.ops) can't be loaded: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


def load_ops(modules: Sequence[str] | None) -> Sequence[str]:
    """Import modules that define ops, also from the current folder. Raises `DefinitionError`."""
    for module in modules or ():
        import_users_module(module, f"ops {module!r}", DefinitionError)
    return modules or ()


def specs() -> tuple[str, ...]:
    """Return the names of all public specs."""
    _load()
    return tuple(sorted({op.name for op in _REGISTRY.values() if op.public}))


def spec(name: str, target: str = "") -> Spec:
    """Return the spec ``name``, or ``module:name`` of an op that is not built in; `UnknownSpec` if there is none.

    ``target`` is a kernel's importable name; its module may define the op.
    """
    if name not in _REGISTRY and "(" in name:
        made: Spec = import_module(_REFERENCES).named(name)
        return made
    if name not in _REGISTRY:
        _load()
    if name not in _REGISTRY and ":" in name:
        load_ops([name.partition(":")[0]])
    if name not in _REGISTRY and ":" in target:
        with suppress(DefinitionError):  # a module that doesn't exist defines no op
            load_ops([target.partition(":")[0]])
    if name not in _REGISTRY:
        raise UnknownSpec(unknown("spec", name, specs()))
    return _REGISTRY[name]


@contextmanager
def forgotten() -> Iterator[None]:
    """Return a context after which specs registered inside are forgotten."""
    _load()
    known = dict(_REGISTRY)
    try:
        yield
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(known)


def gradients_of(op: str) -> list[Spec]:
    """Return the specs whose results are the gradients of ``op``."""
    _load()
    return [s for name, s in _REGISTRY.items() if s.outputs.gradient_of == op and name == s.qualified_name]
