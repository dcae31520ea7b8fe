"""The contract: what a kernel promises about its arithmetic. The tolerance follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from assay.configs import table
from assay.golden.arithmetic import Accumulator, RoundingModel
from assay.golden.errors import unknown
from assay.golden.registry import Spec
from assay.precision.errors import UnknownFormat
from assay.precision.formats import FORMATS, Format, format_named
from assay.verify.errors import ContractError

DEFAULT_ULPS: Mapping[str, float] = {"exp": 2, "log": 2, "rsqrt": 2, "div": 2}

_CHOICES = {
    "rounding": ("nearest", "toward_zero", "stochastic"),
    "overflow": ("inf", "saturate", "nan"),
    "subnormals": ("keep", "flush"),
    "nonfinite": ("ieee", "unspecified"),
    "masked_rows": ("zero", "nan", "any"),
    "deterministic": (True, False),
    "batch_invariant": (True, False),
}
_FUNCTIONS = frozenset(
    "exp exp2 expm1 log log2 log1p tanh erf sigmoid softplus sqrt rsqrt reciprocal div sin cos".split()  # noqa: SIM905
)
_EMPTY_ROWS = {"zero": 0.0, "nan": float("nan"), "any": None}


@dataclass(frozen=True)
class Contract:
    """What a kernel promises; the default is IEEE round-to-nearest in float32 inside, and one rounding at the end.

    ``accumulate`` is a format or an accumulator model of ``configs/accumulators.toml``; ``compute`` the format of
    elementwise intermediates; ``stages`` the roundings on the way by stage name ("input": the dtype of the first
    tensor; None: the spec's default; an empty mapping: none); ``ulps`` the errors of elementary functions in ulps of
    ``compute`` (4 for those it doesn't name). Raises `ContractError` on a value that no contract can have.
    """

    accumulate: str = "float32"
    compute: str = "float32"
    stages: Mapping[str, str | None] | None = None
    ulps: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_ULPS))
    rounding: str = "nearest"
    overflow: str = "inf"
    subnormals: str = "keep"
    nonfinite: str = "ieee"
    masked_rows: str = "zero"
    deterministic: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                expected = ", ".join(map(repr, allowed))
                raise ContractError(f"contract: {name}={getattr(self, name)!r}; expected one of {expected}")
        accumulator(self.accumulate)
        _format("compute", self.compute)
        for function, error in self.ulps.items():
            if function not in _FUNCTIONS:
                raise ContractError(f"contract: ulps: {unknown('function', function, _FUNCTIONS)}")
            if not isinstance(error, (int, float)) or not error >= 0:
                raise ContractError(f"contract: ulps[{function!r}]={error!r}; expected a number of at least 0")
        for stage, format in (self.stages or {}).items():
            if format is not None and format != "input":
                _format(f"stages[{stage!r}]", format)

    def model(self, definition: Spec, input_format: Format) -> RoundingModel:
        """The rounding model of the contract for an op whose first tensor is in ``input_format``."""
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
            compute=format_named(self.compute),
            accumulate=accumulator(self.accumulate),
            ulps={**DEFAULT_ULPS, **self.ulps},
            stages=stages,
            flush=self.subnormals == "flush",
            empty_row=_EMPTY_ROWS[self.masked_rows],
            rounding=self.rounding,
        )

    def changed(self) -> dict[str, Any]:
        """The fields that differ from the default contract."""
        default = Contract()
        return {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        }

    def __str__(self) -> str:
        changed = ", ".join(f"{name}={value!r}" for name, value in self.changed().items())
        return changed or "float32 inside, one rounding to nearest at the end"


@cache
def _models() -> dict[str, Any]:
    return table("accumulators")


def accumulator(name: str) -> Accumulator:
    """The accumulator that a contract names: a format, or a model of ``configs/accumulators.toml``."""
    models = _models()
    if name in models:
        row = {key: value for key, value in models[name].items() if key != "source"}
        row["inputs"] = tuple(row.get("inputs", ()))
        return Accumulator(format=format_named(row.pop("format", "float32")), **row)
    try:
        return Accumulator(format_named(name))
    except UnknownFormat:
        raise ContractError(f"contract: {unknown('accumulator', name, [*FORMATS, *models])}") from None


def _format(role: str, name: str) -> Format:
    try:
        return format_named(name)
    except UnknownFormat:
        raise ContractError(f"contract: {role}: {unknown('format', name, FORMATS)}") from None


def contract_from_table(row: Mapping[str, Any]) -> Contract:
    """A contract from a table of ``configs/contracts``; ``source`` and ``reason`` are for readers."""
    known = {f.name for f in fields(Contract)}
    settings = {name: value for name, value in row.items() if name not in ("source", "reason", "title")}
    for name in settings:
        if name not in known:
            raise ContractError(f"contract: {unknown('field', name, known)}")
    return Contract(**settings)
