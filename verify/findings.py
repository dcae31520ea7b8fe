"""The findings of an examination, as data: failures, explanations, error maps, numbers of a case.

Everything here can be written as JSON (`assay.runtime.records.plain`) and read back; the annotations are the
descriptions in the JSON Schema of a verdict (`assay.verify.report.schema`). Nothing here renders anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from msgspec import Meta

from assay.verify.cases.case import Case

OUTCOMES = ("PASS", "WARN", "FAIL", "INCONCLUSIVE", "MISTRUSTED", "VACUOUS", "REFUSED")
KINDS = (
    "contract", "bias", "nonfinite", "exact", "shape", "dtype", "crash", "timeout", "nondeterministic",
    "batch_variant", "out_of_bounds_write", "input_mutated", "unwritten_output", "layout", "unlikely",
    "conduct", "refused", "not_interpreted",
)  # fmt: skip
"""The kinds of failures; the last two are none of the kernel's: a refusal that it documents is counted, and what isn't
interpreted makes an examination end as REFUSED."""
ASPECTS = (
    "numbers", "range", "subnormals", "special", "shapes", "layouts", "memory", "determinism", "bias", "conduct",
)  # fmt: skip
"""What a verdict tells apart, in the order that it is shown in."""
FACTS = ("relation", "reads", "arithmetic", "begins", "calls")
"""The kinds of facts that are measured about a failure."""
GRAVITY = (
    "conduct", "memory", "numbers", "layouts", "shapes", "range", "determinism", "bias", "special", "subnormals",
)  # fmt: skip
"""The aspects, the gravest to be broken first; the last two warn only (`Contract.promises`)."""
_INDICES = ("int32", "int64")  # dtypes of ids and positions
STATUSES = ("kept", "broken", "suspect", "not tried")
SIDES = ("", "downward", "upward", "toward zero", "away from zero")

MOST = 64
"""Tensors with more elements than this aren't shown."""
MOST_POINTS = 160
"""The most points of a picture."""
MAP_SHAPE = (48, 64)
"""The most rows and columns of cells that a map has."""
STEPS = 20
"""Equal bins of (0, 1] in a histogram."""
EDGES = (*(step / STEPS for step in range(STEPS + 1)), 2.0, 10.0)
"""Upper edges of a histogram's bins: exactly 0, `STEPS` equal ones of (0, 1], (1, 2], (2, 10]; the last has none."""

Outcome = Annotated[str, Meta(extra_json_schema={"enum": OUTCOMES})]
Kind = Annotated[str, Meta(extra_json_schema={"enum": KINDS})]
Side = Annotated[str, Meta(extra_json_schema={"enum": SIDES})]
FactKind = Annotated[str, Meta(extra_json_schema={"enum": FACTS})]
Status = Annotated[str, Meta(extra_json_schema={"enum": STATUSES})]
Count = Annotated[int, Meta(ge=0)]
Shape = tuple[Count, ...]
Number = Annotated[float, Meta(extra_json_schema={"type": ["number", "string"], "pattern": "^(nan|-?inf)$"})]
Ratio = Annotated[float, Meta(extra_json_schema={"type": ["number", "string"], "pattern": "^inf$", "minimum": 0})]
Few = Meta(max_length=MOST)


@dataclass(frozen=True)
class Difference:
    """The error of one element, and its index."""

    value: Ratio
    index: Shape


@dataclass(frozen=True)
class Failure:
    """A proved violation, or (of kind "unlikely") an error that rounding hardly explains.

    ``index`` is the element of ``output`` with the largest ``ratio``, |``got`` - ``golden``| / ``radius``; the radius
    includes the store's share of the spacing near ``golden``. ``violations`` of the ``elements`` are wrong.
    ``greatest_absolute`` is the largest |got - golden| among them, ``greatest_relative`` the largest |got - golden| /
    |golden|; None if no element has one. ``side`` is the direction of a bias. ``device_lost``: the process can't use
    the device any more. ``aspect`` is the one of `ASPECTS` that it breaks.
    """

    kind: Kind
    case: Case
    message: str
    output: str = ""
    index: Shape = ()
    got: Number | None = None
    golden: Number | None = None
    radius: Number | None = None
    ratio: Number | None = None
    violations: Count = 0
    elements: Count = 0
    greatest_absolute: Difference | None = None
    greatest_relative: Difference | None = None
    side: Side = ""
    device_lost: bool = False
    aspect: str = ""

    @property
    def is_of_index(self) -> bool:
        """Whether the output holds indices, such as ids, of which it says nothing how far one is from another."""
        names = [tensor.name for tensor in self.case.signature.returns]
        return self.output in names and self.case.result_dtypes[names.index(self.output)] in _INDICES

    @property
    def is_of_count(self) -> bool:
        """Whether a row keeps more or fewer numbers than the op, though each element by itself may be right."""
        return self.kind == "contract" and self.radius is None and self.ratio == float("inf")

    @property
    def percent(self) -> float:
        """The share of wrong elements, in percent."""
        return 100 * self.violations / max(self.elements, 1)


@dataclass(frozen=True)
class Explanation:
    """A known fault that explains a failure; ``ratio`` is how close the output comes to it."""

    name: str
    description: str
    ratio: Number


@dataclass(frozen=True)
class Picture:
    """A few points (x, y) that show a fact, and what the axes are.

    ``diagonal`` names the line on which both are equal; ``levels``: what the whole numbers of y mean, from 0 on.
    """

    x: str
    y: str
    points: Annotated[tuple[tuple[Number, Number], ...], Meta(max_length=MOST_POINTS)]
    diagonal: str = ""
    levels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fact:
    """Something measured on the kernel about a failure, in ``words`` of one line.

    ``kind``: a "relation" between wrong outputs and goldens, what it "reads", the "arithmetic" of its
    errors, where the fault "begins", or in
    which "calls" it is. ``aspect`` is the broken one, and ``picture``
    shows some kinds.
    """

    kind: FactKind
    words: str
    aspect: str = ""
    picture: Picture | None = None

    @property
    def is_telling(self) -> bool:
        """Whether another fault hardly has the same: wrong elements that are zero or no number have many causes."""
        return not re.search(r" are (0|NaN|infinite)( \(|$)", self.words)

    @property
    def subject(self) -> str:
        """What it says, whatever the calls were that it was measured in."""
        if self.kind == "reads":
            return " ".join(self.words.split()[:3])  # the tensor; which indices depends on the sizes
        words = self.words.rpartition(" (")[0] if self.kind == "relation" else self.words
        return words.removeprefix("all elements").removeprefix("the wrong elements")


@dataclass(frozen=True)
class ErrorMap:
    """A map of the errors of an output, seen as a matrix [product of the leading dimensions, last dimension].

    ``cells`` are the largest ratios of blocks of ``block`` (rows, columns) elements, to three digits and never rounded
    to below a limit that they exceed; None for blocks without judged elements. ``words`` describe the violations.
    """

    output: str
    shape: Shape
    block: tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=1)]]
    cells: Annotated[
        tuple[Annotated[tuple[Ratio | None, ...], Meta(max_length=MAP_SHAPE[1])], ...], Meta(max_length=MAP_SHAPE[0])
    ]
    words: str

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return extent(self.shape)


def extent(shape: Shape) -> tuple[int, int]:
    """Return the rows and columns of an output of this shape, seen as a matrix."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


@dataclass(frozen=True)
class Numbers:
    """An input's elements, in row-major order."""

    name: str
    shape: Shape
    values: Annotated[tuple[Number, ...], Few]


@dataclass(frozen=True)
class Comparison:
    """An output's elements in row-major order from the ``first`` on, with the goldens and their ratios.

    A ratio is None if the element isn't judged.
    """

    name: str
    shape: Shape
    first: Count
    got: Annotated[tuple[Number, ...], Few]
    golden: Annotated[tuple[Number, ...], Few]
    ratio: Annotated[tuple[Ratio | None, ...], Few]

    @property
    def pairs(self) -> list[tuple[float, float, float | None]]:
        """Return output, golden and ratio of each element."""
        return list(zip(self.got, self.golden, self.ratio, strict=True))

    def index(self, position: int) -> tuple[int, ...]:
        """Return the coordinates of the element at ``position`` of the lists."""
        return coordinates(self.first + position, self.shape)


def coordinates(flat: int, shape: Shape) -> tuple[int, ...]:
    """Return the coordinates of the element of this row-major number."""
    return tuple(int(index) for index in np.unravel_index(flat, shape))  # torch's imports sympy, for half a second


@dataclass(frozen=True)
class Sample:
    """The numbers of the shrunk case, in row-major order: small inputs, and the output with wrong numbers."""

    inputs: tuple[Numbers, ...]
    output: Comparison | None = None


@dataclass(frozen=True)
class Aspect:
    """The findings about one aspect.

    ``cases`` showed it; ``worst`` is the largest |kernel - golden| / radius among them. A broken or suspect aspect has
    the shrunk ``failure`` and the line that repeats it. A broken one also has its explanations and, for wrong numbers,
    a ``map`` of the wrong output before shrinking and a ``sample``, the numbers of the shrunk case. ``not_asked`` names
    fault models that themselves failed while it was explained. ``known`` says at which sizes it fails and at which not,
    and without an explanation on which data; ``facts`` were measured on the kernel. ``note`` says why it wasn't tried,
    or that the fault of a graver aspect broke it too. ``repeated`` says what the repeat line gave in a fresh process,
    if it was run there (`assay verify` and pytest run that of the gravest failure).
    """

    status: Status = "not tried"
    cases: Count = 0
    worst: Ratio = 0.0
    failure: Failure | None = None
    explanations: tuple[Explanation, ...] = ()
    not_asked: tuple[str, ...] = ()
    map: ErrorMap | None = None
    sample: Sample | None = None
    repro: str = ""
    note: str = ""
    known: str = ""
    facts: tuple[Fact, ...] = ()
    repeated: str = ""


_NOTHING = Aspect()


@dataclass(frozen=True)
class Detectable:
    """The relative error, common to a whole output, that the check detects at one ``length`` of a sum.

    Half of the judged elements detect it: as a broken contract, or as suspect. It is the largest over several outputs,
    and the smallest over several kinds of data. ``vacuous``: more than a tenth of the output may be wrong unseen.
    """

    length: Count
    broken: Ratio
    suspect: Ratio
    vacuous: bool = False


def vacuous_lengths(levels: Sequence[Detectable]) -> str:
    """Return the vacuous lengths in words, e.g. "1,024 terms or more"; empty if there are none."""
    lengths = [level.length for level in levels if level.vacuous]
    if not lengths:
        return ""
    further = all(level.vacuous for level in levels if level.length >= min(lengths))
    return f"{min(lengths):,} terms or more" if further else " and ".join(f"{n:,}" for n in lengths) + " terms"


class Coverage(float):
    """A share of pairs, from 0 to 1; ``left_out`` says in words what isn't covered."""

    left_out: str = ""


@dataclass(frozen=True)
class Pairs:
    """The pairs of levels of two factors of an examination: covered ones, and those that a case can have.

    A factor is a size, an option, the numbers or the layout of a tensor, the calls or the memory
    (`assay.verify.cases.factors`); ``left_out`` says what no case covered.
    """

    covered: Count = 0
    feasible: Count = 0
    left_out: str = ""

    @property
    def coverage(self) -> Coverage:
        """The share that is covered; 1 if there are no pairs to cover."""
        coverage = Coverage(self.covered / self.feasible if self.feasible else 1.0)
        coverage.left_out = self.left_out
        return coverage


@dataclass(frozen=True)
class Variant:
    """What calls at some sizes run: the same lines of the kernel's own host code, operators and programs.

    ``sizes`` are the first and last size of each symbol that reaches it by itself, or ``together`` with the others, as
    large as they, where none does; ``runs`` the series of neighbouring sizes between them that were observed.
    ``launches`` name the programs, or else the functions of torch, ``configs`` the programs' constants and options.
    ``tried``: a case of it was judged. ``refusal`` is the error with which the host's code refuses these sizes.
    """

    sizes: dict[str, tuple[Count, Count]]
    launches: tuple[str, ...]
    configs: tuple[str, ...] = ()
    tried: bool = False
    together: bool = False
    runs: dict[str, tuple[tuple[Count, Count], ...]] = field(default_factory=dict)
    refusal: str = ""


@dataclass(frozen=True)
class Findings:
    """What an examination found; `assay.verify.Verdict` with its reports.

    ``outcome``: PASS; FAIL, where an aspect is broken; WARN, where only `special` or `subnormals` is, and the contract
    doesn't name them, or one is suspect; INCONCLUSIVE, where goldens didn't resolve; MISTRUSTED, where almost only
    zeros were compared, or more than half of an output wasn't judged; VACUOUS, where the check would have let anything
    through, or nothing was decided; REFUSED, where the contract says nothing about what was asked, or the interpreter
    can't run the kernel. ``cases`` were decided; ``worst`` is the largest |kernel - golden| / radius. ``detectable`` is
    what the check notices at each length examined. ``note`` says why an outcome is neither PASS nor FAIL, or of which
    lengths it says nothing.
    ``errors`` are those of the examination's own steps (assay's, the reference's, the machine's), in one line each.
    ``remarks`` name the lines at which a reference's own formula is ill-conditioned, and what that costs; and of a
    failure on a device the reported faults of the compiler that it may come from.

    ``histogram`` counts the judged elements by ratio, in the bins of `EDGES`. ``aspects`` holds each of `ASPECTS`; a
    verdict's ``failure``, its explanations and so on are those of the ``gravest`` broken one.
    ``pairs`` counts the pairs of levels of factors (sizes, options, distributions, layouts, ...) that cases covered.
    ``at`` says of each case at the sizes of production what was judged of it, and what not.
    ``variants`` are what the kernel runs at which sizes (`Variant`), observed before sizes were chosen.
    ``cut`` says which cases the budget of seconds left out.
    ``left_out`` counts the elements that weren't judged, by reason. ``unlimited``: no time limit could act, since the
    kernel was called in a thread other than its process's main one.
    ``refused`` counts the cases that the kernel refused as it documents (``refuses=``), by its words.
    On a device ``compiled`` counts the Triton programs that were compiled before the first case, in ``compile_seconds``
    of the ``seconds``; ``refused_configs`` are the first lines of the compiler's messages by kernel and configuration.
    ``unrounded``: JAX was started before, and may leave out roundings on the way that a kernel asks for.
    ``left_changed`` names the settings of torch and NumPy that the kernel left changed (they were put back each time).
    ``target`` is the kernel's importable name, empty where it has none. ``about`` says when, where, on which device and
    by which versions the examination was made, for which test, and the line that the kernel's source begins at.
    """

    outcome: Outcome
    kernel: str
    spec: str
    dtype: str
    contract: str
    cases: Count = 0
    worst: Ratio = 0.0
    aspects: dict[str, Aspect] = field(default_factory=dict)
    phases: dict[str, Count] = field(default_factory=dict)
    elements: Count = 0
    unjudged: Count = 0
    left_out: dict[str, Count] = field(default_factory=dict)
    unresolved: Count = 0
    histogram: tuple[Count, ...] = ()
    detectable: tuple[Detectable, ...] = ()
    pairs: Pairs = Pairs()
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    seed: int = 0
    note: str = ""
    cut: str = ""
    remarks: tuple[str, ...] = ()
    at: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()
    left_changed: tuple[str, ...] = ()
    unlimited: bool = False
    unrounded: bool = False
    refused: dict[str, Count] = field(default_factory=dict)
    refused_configs: dict[str, str] = field(default_factory=dict)
    compiled: Count = 0
    compile_seconds: Annotated[float, Meta(ge=0)] = 0.0
    target: str = ""
    about: dict[str, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the outcome is PASS or WARN."""
        return self.outcome in ("PASS", "WARN")

    @property
    def vacuous(self) -> str:
        """The lengths of which an outcome that isn't VACUOUS itself says nothing, in words; empty if there are none."""
        return "" if self.outcome == "VACUOUS" else vacuous_lengths(self.detectable)

    @property
    def coverage(self) -> Coverage:
        """The share of pairs of levels of factors that cases covered, with what they left out in words."""
        return self.pairs.coverage

    @property
    def broken(self) -> dict[str, Aspect]:
        """The broken aspects, the gravest first."""
        results = {name: self.aspects[name] for name in GRAVITY if name in self.aspects}
        return {name: aspect for name, aspect in results.items() if aspect.status == "broken"}

    @property
    def violated(self) -> dict[str, Aspect]:
        """The broken aspects, the gravest first, and then the suspect ones."""
        suspect = {name: aspect for name, aspect in self.aspects.items() if aspect.status == "suspect"}
        return self.broken | suspect

    @property
    def gravest(self) -> Aspect:
        """The gravest broken aspect, or else the first suspect one; an empty one where none is."""
        return next(iter(self.violated.values()), _NOTHING)

    @property
    def failure(self) -> Failure | None:
        """The gravest failure."""
        return self.gravest.failure

    @property
    def explanations(self) -> tuple[Explanation, ...]:
        """The explanations of the gravest failure."""
        return self.gravest.explanations

    @property
    def facts(self) -> list[Fact]:
        """What was measured about the failures, of the gravest first."""
        return [fact for aspect in self.violated.values() for fact in aspect.facts]

    @property
    def map(self) -> ErrorMap | None:
        """The error map of the gravest failure, as first found."""
        return self.gravest.map

    @property
    def sample(self) -> Sample | None:
        """The numbers of the gravest failure."""
        return self.gravest.sample

    @property
    def not_asked(self) -> tuple[str, ...]:
        """Fault models that themselves failed while the gravest failure was explained."""
        return self.gravest.not_asked

    @property
    def repro(self) -> str:
        """The line that repeats the gravest failure."""
        return self.gravest.repro


def broken_by(failure: Failure, repro: str = "") -> dict[str, Aspect]:
    """Return the aspects of an examination that ended with this one failure."""
    status = "suspect" if failure.kind == "unlikely" else "broken"
    return {failure.aspect or "numbers": Aspect(status, 1, math.inf, failure, repro=repro)}
