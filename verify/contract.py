"""The contract: a kernel's promise about its arithmetic, from which the tolerance follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from assay.formats.accumulator import Accumulator, accumulator_named
from assay.formats.errors import UnknownFormat
from assay.formats.format import FORMATS, Format, format_named
from assay.formats.rounding import Mode
from assay.golden.arithmetic import RoundingModel
from assay.golden.registry import Spec
from assay.runtime.errors import did_you_mean, names_checked, unknown
from assay.verify.errors import ContractError
from assay.verify.named_contracts import FOR_READERS, contract_named, fields_of_base

DEFAULT_ULPS: Mapping[str, float] = {"exp": 2, "log": 2, "rsqrt": 2, "div": 2}

CHOICES = {
    "rounding": ("nearest", "nearest_away", "toward_zero", "stochastic"),
    "overflow": ("inf", "saturate", "nan"),
    "subnormals": ("keep", "flush", None),
    "nonfinite": ("ieee", "masked", "unspecified", None),
    "masked_rows": ("zero", "nan", "any"),
    "order": ("written", "any", "chunked"),
    "deterministic": (True, False),
    "batch_invariant": (True, False),
}
_FUNCTIONS = frozenset(
    "exp exp2 expm1 log log_near_one log2 log1p tanh erf sigmoid softplus sqrt rsqrt reciprocal div sin cos".split()  # noqa: SIM905
)
_EMPTY_ROWS = {"zero": 0.0, "nan": float("nan"), "any": None}


@dataclass(frozen=True)
class Contract:
    """A kernel's promise; the default is float32 inside with IEEE round-to-nearest, and one rounding at the end.

    With a ``base``, such as "transformers", fields at their defaults come from the contract of that name, and
    ``stages`` and ``ulps`` are added to its own: ``Contract(base="transformers", ulps={"exp": 4})``.

    Raises `ContractError` for a name or a value that no contract can have.
    """

    accumulate: str = "float32"
    """The accumulator: a format, or a model of ``configs/accumulators.toml``; "tf32-dot", and a device's "hopper-tf32",
    cut operands of products of float32 tensors to TF32."""
    compute: str = "float32"
    """The format of elementwise intermediates; "input": the first tensor's, as in compositions of operations."""
    stages: Mapping[str, str | None] | None = None
    """Intermediate roundings by stage; "input": the first tensor's dtype, ``{}``: none, None: the op's default."""
    ulps: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_ULPS))
    """Errors of elementary functions in ulps of ``compute``; 4 for functions without an entry. "log_near_one": a
    further error of a logarithm inside an op, in ulps of one (default 0)."""
    rounding: str = "nearest"
    """How the output is rounded; "nearest_away": to nearest, ties away from zero."""
    overflow: str = "inf"
    """The result for a value beyond the output format."""
    subnormals: str | None = None
    """Whether subnormals are kept; "flush" allows zero for a subnormal, inside and in the output. None: as "keep", but
    a violation is only a warning."""
    nonfinite: str | None = None
    """Whether NaN and infinities propagate as in IEEE 754; "masked" also allows those of masked or unread elements (0
    NaN; -inf added to a score that overflows), "unspecified" doesn't judge such elements. None: as "ieee", but a
    violation is only a warning."""
    rescale_every: int = 16
    """Least number of keys or columns between rescalings of a running sum of exponentials to a new maximum (online
    softmax, log-sum-exp, attention); 1: at each one, as for increasing rows in a kernel without blocks."""
    order: str = "written"
    """How sums and products are grouped; "any" also lets them be distributed and regrouped, of a reference too: chunks
    of a recurrence, a parallel scan, c b first as in Mamba-2, a row in parts. What cancels then widens the bound;
    where a factor that comes last lets a part overflow, an element is open. "chunked": as "any", and products of decays
    may be exponentials of differences of prefix sums within a chunk."""
    chunk: int = 64
    """Most positions of a recurrence that a kernel goes through at once, as a chunk; 1: position by position."""
    masked_rows: str = "zero"
    """The value of an attention row without a visible key."""
    deterministic: bool = True
    """The same call twice gives the same bits."""
    batch_invariant: bool = False
    """A row alone has the same bits as in any batch."""
    base: str = ""
    """The named contract whose fields are the defaults (docs/interface.md)."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                expected, got = ", ".join(map(repr, allowed)), getattr(self, name)
                hint = did_you_mean(got, [word for word in allowed if isinstance(word, str)])
                raise ContractError(f"contract: {name}={got!r}; expected one of {expected}{hint}")
        for name in ("rescale_every", "chunk"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                expected = "expected a whole number of at least 1"
                raise ContractError(f"contract: {name}={getattr(self, name)!r}; {expected}")
        if self.base:
            fields_of_base(self.base, "")
        _accumulator(self.accumulate)
        if self.compute != "input":
            _format("compute", self.compute)
        for function, error in self.ulps.items():
            if function not in _FUNCTIONS:
                raise ContractError(f"contract: ulps: {unknown('function', function, _FUNCTIONS)}")
            if not isinstance(error, (int, float)) or not error >= 0:
                raise ContractError(f"contract: ulps[{function!r}]={error!r}; expected a number of at least 0")
        for stage, format in (self.stages or {}).items():
            if format is not None and format != "input":
                _format(f"stages[{stage!r}]", format)

    def of(self, definition: Spec) -> Contract:
        """Return the contract for an op, with the fields of its base filled in."""
        if not self.base:
            return self
        given, own = fields_of_base(self.base, definition.name), self.changed()
        stages = {stage: f for stage, f in given.pop("stages", {}).items() if stage in definition.stages}
        if stages or "stages" in own:
            own["stages"] = {**definition.stages, **stages, **(self.stages or {})}
        ulps = {**DEFAULT_ULPS, **given.pop("ulps", {}), **own.get("ulps", {})}
        return Contract(**{**given, **own, "ulps": ulps})

    def model(self, definition: Spec, input_format: Format) -> RoundingModel:
        """Return the rounding model of the contract for an op whose first tensor is in ``input_format``."""
        if self.base and self.of(definition) != self:
            return self.of(definition).model(definition, input_format)
        wanted = definition.stages if self.stages is None else self.stages
        for stage in wanted:
            if stage not in definition.stages:
                raise ContractError(f"contract: {definition.name}: {unknown('stage', stage, definition.stages)}")
        stages = {
            stage: input_format if name == "input" else format_named(name)
            for stage, name in wanted.items()
            if name is not None
        }
        return RoundingModel(
            compute=input_format if self.compute == "input" else format_named(self.compute),
            accumulate=_accumulator(self.accumulate).meeting(input_format),
            ulps={**DEFAULT_ULPS, **self.ulps},
            stages=stages,
            flush=self.subnormals == "flush",
            empty_row=_EMPTY_ROWS[self.masked_rows],
            rounding=self.rounding,
            rescale_every=self.rescale_every,
            regroup=self.order != "written",
            chunk=self.chunk,
            prefix_sums=self.order == "chunked",
        )

    @property
    def code_rounding(self) -> Mode:
        """The rounding of an exact quotient to a code; "nearest" for stochastic rounding, which may take either
        neighbour."""
        return cast(Mode, "nearest" if self.rounding == "stochastic" else self.rounding)

    @property
    def promises(self) -> set[str]:
        """The aspects that the contract promises only because it names them."""
        named = {"special": self.nonfinite, "subnormals": self.subnormals}
        return {aspect for aspect, value in named.items() if value is not None}

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from the default contract."""
        default = Contract()
        return {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        }

    def __str__(self) -> str:
        fields = self.changed()
        base = fields.pop("base", "")
        changed = ", ".join(([base] if base else []) + [f"{name}={value!r}" for name, value in fields.items()])
        return changed or "float32 inside, one rounding to nearest at the end"


Contract.__init__ = names_checked("contract", "field", ContractError)(Contract.__init__)  # type: ignore[method-assign]


def _accumulator(name: str) -> Accumulator:
    try:
        return accumulator_named(name)
    except UnknownFormat as error:
        raise ContractError(f"contract: {error}") from None


def _format(role: str, name: str) -> Format:
    try:
        return format_named(name)
    except UnknownFormat:
        raise ContractError(f"contract: {role}: {unknown('format', name, FORMATS)}") from None


def contract_from_table(row: str | Mapping[str, Any]) -> Contract:
    """Return the contract of a name (`assay.verify.named_contracts`), or of a table of its fields.

    The entries ``source`` and ``reason`` are for readers and ignored. Raises `ContractError`.
    """
    if isinstance(row, str):
        row = contract_named(row)
    if not isinstance(row, Mapping):
        raise ContractError(f"contract={row!r}; expected the name of a contract, or a table of its fields")
    try:
        return Contract(**{name: value for name, value in row.items() if name not in FOR_READERS})
    except (AttributeError, TypeError):
        raise ContractError(f"contract={row!r}; expected fields of assay.verify.Contract") from None
