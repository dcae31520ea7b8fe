"""The record in audit.json, and its JSON schema, which ships as audit.schema.json.

A test compares that file with `schema`; after a change of the record, write the new text into the file.
"""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from assay.precision.schemes.scheme import SiteType

Count = Annotated[int, Meta(ge=1)]
Number = float | Literal["inf", "-inf"]
"""JSON has no infinities: they are strings."""
Measured = Number | None
"""None: not measured."""
SiteNames = list[str]
Assignment = Annotated[dict[str, str], Meta(description="site names to scheme names")]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of audit.json."""


class Model(Record, frozen=True):
    """What was audited; ``stored``: the dtype of most weights."""

    name: str
    kind: str
    stored: str
    parameters: int

    @property
    def decodes(self) -> bool:
        """Whether the model has a KV cache and decode steps, which encoders and classifiers don't."""
        return self.kind not in ("encoder", "classifier")


class UnauditedParameter(Record, frozen=True):
    """A parameter in no site, its elements, and what has it."""

    name: str
    parameters: int
    why: str


class Unaudited(Record, frozen=True):
    """Elements of matrices that are in no site, their ``share`` of all of the model's, and the largest; ``words``: the
    same as a sentence, empty where there are none."""

    parameters: int
    share: float
    largest: list[UnauditedParameter]
    words: str


class Data(Record, frozen=True):
    """Sequences of a text."""

    text: str
    sequences: Count
    tokens: Count


class Budgets(Record, frozen=True):
    """Limits that were given; ``time``: seconds of a decode step, or of a pass where there is none."""

    error: float | UnsetType = UNSET
    bytes: float | UnsetType = UNSET
    time: float | UnsetType = UNSET


class Settings(Record, frozen=True):
    """What was asked. ``assumed``: nobody gave a budget, it is half of the model's bytes. ``fixed``: sites that keep
    their format because something is exported."""

    metric: str
    unit: str
    target: str | None
    formats: list[str]
    context: Count
    budgets: Budgets
    assumed: bool
    fixed: SiteNames


class Prediction(Record, frozen=True):
    """A predicted error with its interval; ``level``: the share of assignments that it is to hold for, 0: a guess."""

    error: Number
    low: Number
    high: Number
    level: float


class Costs(Record, frozen=True):
    """Bytes of weights and KV cache, seconds of a prefill and of a decode step; null: the model has none, or no device
    is known."""

    bytes: int
    kv_bytes: int | None
    prefill: Number | None
    decode: Number | None


class Interval(Record, frozen=True):
    """The ends of a 95 % interval over sequences."""

    low: Number
    high: Number


class Assigned(Costs, frozen=True):
    """An assignment, its predicted and measured error, and what it costs. ``interval``: of the measured error."""

    assignment: Assignment
    prediction: Prediction
    measured: Measured
    interval: Interval | None


class Recommended(Assigned, frozen=True):
    """The recommended assignment; ``met``: whether every budget is kept. ``agreement``: the share of tokens, or of a
    classifier's sequences, of which the most likely one stays the same; null: outputs have none."""

    met: bool
    why: str
    agreement: float | None


class Baseline(Costs, frozen=True):
    """What needs no audit to think of, measured over the same sequences. ``difference``: its error minus that of the
    recommended assignment, ``apart`` the interval of that. ``instead``: as good at no more bytes, so to be taken."""

    name: str
    assignment: Assignment
    measured: Measured
    interval: Interval | None
    difference: Measured
    apart: Interval | None
    instead: bool
    words: str


class Step(Record, frozen=True):
    """The error of the positions up to ``end``, counted from 1, from the end of the step before on."""

    end: Count
    error: Measured
    interval: Interval | None


class Positions(Record, frozen=True):
    """The recommended assignment over the positions of long sequences. ``growth``: the error of the last step over that
    of the step that ends at ``base``, ``apart`` the interval of that."""

    steps: list[Step]
    base: Count
    growth: Measured
    apart: Interval | None


class Coverage(Record, frozen=True):
    """Of ``count`` assignments of the front to which no interval was fitted, how many were measured inside of it."""

    inside: int
    count: int


class Loaded(Record, frozen=True):
    """An export that was loaded again: its error over the sequences that errors are reported on, null where its
    reader refuses it, and that of the simulation of what it holds, KV caches aside. ``agrees``: as close as rounding
    every site to bfloat16 leaves them."""

    reader: str
    error: Measured
    interval: Interval | None
    simulated: Measured
    agrees: bool
    words: str


class Export(Record, frozen=True):
    """What was written for one serving stack: how many sites it expresses, and the bytes of weights as it has them, of
    a checkpoint those of its tensors."""

    format: str
    paths: Annotated[list[str], Meta(min_length=1)]
    sites: Count
    bytes: int
    loaded: Annotated[Loaded | None, Meta(description="null: it isn't loaded again")]


class Change(Record, frozen=True):
    """Units of one kind that take one scheme: bytes of weights and KV cache saved, and their predicted error alone."""

    kind: str
    layers: list[int]
    scheme: str | None
    sites: SiteNames
    saved: int
    error: Number
    words: str


class Pair(Record, frozen=True):
    """An assignment of so many sites that was measured to calibrate, with its prediction."""

    prediction: Prediction
    measured: Measured
    sites: Count


class Site(Record, frozen=True):
    """A place that can take a format. ``scheme``: recommended, null: as it is. ``alone``: its predicted error by
    scheme, before calibration. ``largest``: magnitude over the calibration data. ``outlier``: largest over median
    channel."""

    name: str
    place: SiteType
    role: str
    shape: list[int]
    unit: str
    tied: str | None
    layer: int | None
    kind: str
    scheme: str | None
    alone: dict[str, Number]
    largest: Number | None
    outlier: Number | None


class Outlier(Record, frozen=True):
    """The largest magnitudes of a site's channels; of more than 1024, of equal runs."""

    site: str
    outlier: float
    channels: int
    largest: list[float]


class Finding(Record, frozen=True):
    """What `advise` found at a site."""

    kind: str
    site: str
    words: str
    numbers: dict[str, Any]
    remedy: str


class Content(Record, frozen=True):
    """audit.json of assay audit. Errors are in settings.unit, sizes in bytes, times in seconds."""

    schema: Literal[1]
    made: str
    versions: dict[str, str | None]
    model: Model
    unaudited: Unaudited
    data: Annotated[Data, Meta(description="that was fitted, predicted and chosen on")]
    held_out: Annotated[Data | None, Meta(description="that what is reported is measured on; null: on data too")]
    settings: Settings
    fingerprint: str
    command: Annotated[str, Meta(description="that made it, as a shell takes it; empty: it was made in Python")]
    seconds: Annotated[dict[str, float], Meta(description="wall time of each stage")]
    noise_floor: Annotated[Number, Meta(description="the error with every site rounded to bfloat16")]
    device: Annotated[str | None, Meta(description="that times are of; null: no target's, so there are none")]
    untouched: Annotated[Costs, Meta(description="the model without an assignment")]
    recommended: Recommended
    baselines: list[Baseline]
    positions: Annotated[Positions | None, Meta(description="null: nobody asked for a context")]
    coverage: Coverage
    exports: list[Export]
    pareto: list[Assigned]
    changes: list[Change]
    calibration: list[Pair]
    sites: Annotated[list[Site], Meta(min_length=1)]
    outliers: list[Outlier]
    findings: list[Finding]


def schema() -> str:
    """Return the JSON schema of `Content`, as text."""
    result = msgspec.json.schema(Content)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **result}, indent=2) + "\n"
