"""What `compare` returns: each region's status in both runs, causes, shares of the difference, and who is right."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

STATUSES = ("within", "beyond", "open", "unmatched")
VERDICTS = {
    "a": "run a is right: run b leaves its bounds",
    "b": "run b is right: run a leaves its bounds",
    "both": "both runs keep their contracts: what differs is rounding that these allow",
    "neither": "both runs leave their bounds",
    "open": "who is right can't be said",
}


@dataclass
class Side:
    """A region in one run.

    ``error``: its errors over the contract's tolerance (above 1: proved beyond); ``times``: over those that its own
    dtype explains; ``tokens``: the latter, token by token, of at most 64 groups.
    """

    status: str = "unmatched"
    error: float = 0.0
    times: float = 0.0
    dtype: str = ""
    tokens: list[float] = field(default_factory=list)


@dataclass
class Region:
    """A region: ``kind`` of operation, what it is in each run, and why it is beyond.

    ``share``: of the difference of log-probabilities, None where it can't be said. ``where``: which tokens are beyond,
    or why it isn't judged.
    """

    name: str
    kind: str
    a: Side = field(default_factory=Side)
    b: Side = field(default_factory=Side)
    cause: str = ""
    share: float | None = None
    where: str = ""

    @property
    def status_a(self) -> str:
        """The status in run a, one of `STATUSES`."""
        return self.a.status

    @property
    def status_b(self) -> str:
        """The status in run b, one of `STATUSES`."""
        return self.b.status

    @property
    def statuses(self) -> tuple[str, str]:
        """The status in both runs."""
        return self.a.status, self.b.status

    @property
    def is_beyond(self) -> bool:
        """Whether it is beyond in either run."""
        return "beyond" in self.statuses

    @property
    def runs(self) -> str:
        """Which runs are beyond: "a", "b", "a and b", or empty."""
        return " and ".join(run for run, status in zip("ab", self.statuses, strict=True) if status == "beyond")


@dataclass(frozen=True)
class Divergence:
    """How far the runs' log-probabilities of the same tokens are apart, run b less run a.

    ``mean`` and ``greatest`` of |difference|; ``k1`` and ``k3``: estimates of KL(a || b) from a's tokens (Schulman
    2020); ``clipped``: share of tokens whose ratio of probabilities leaves [1 - 0.2, 1 + 0.2]; ``routing``: share of
    tokens and layers that chose the same experts, None without experts.
    """

    tokens: int
    mean: float
    greatest: float
    k1: float
    k3: float
    clipped: float
    routing: float | None = None


@dataclass
class Report:
    """The comparison of two runs.

    ``explained``: the sum of the regions' shares, 1 where all of the difference is found. ``settings``: differences of
    the runs' configurations and switches. ``unmatched``: what could not be compared, first to be read.
    """

    run_a: str
    run_b: str
    regions: list[Region] = field(default_factory=list)
    divergence: Divergence | None = None
    explained: float | None = None
    settings: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    @property
    def first_beyond(self) -> Region | None:
        """The first region, in the order of the forward pass, that leaves its bound in one run alone, else in both."""
        beyond = [region for region in self.regions if region.is_beyond]
        return next((region for region in beyond if region.status_a != region.status_b), next(iter(beyond), None))

    @property
    def difference(self) -> float:
        """The mean of |difference of log-probabilities| over the tokens; NaN where it can't be said."""
        return float("nan") if self.divergence is None else self.divergence.mean

    @property
    def verdict(self) -> str:
        """Who is right: "a", "b", "both", "neither" or "open"."""
        alone = [region.runs for region in self.regions if region.is_beyond and region.status_a != region.status_b]
        beyond = {*alone} or {run for region in self.regions for run in region.runs.split(" and ") if run}
        if beyond:
            return "neither" if len(beyond) > 1 else "a" if beyond == {"b"} else "b"
        judged = [region for region in self.regions if region.status_a == region.status_b == "within"]
        return "both" if judged else "open"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data; the schema is assay/compare/report.schema.json."""
        first = self.first_beyond
        content: dict[str, Any] = _finite(
            {
                "version": 1,
                "run_a": self.run_a,
                "run_b": self.run_b,
                "verdict": self.verdict,
                "first_beyond": None if first is None else first.name,
                "divergence": None if self.divergence is None else vars(self.divergence),
                "explained": self.explained,
                "settings": self.settings,
                "unmatched": self.unmatched,
                "regions": [asdict(region) for region in self.regions],
            }
        )
        return content

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the report as text, the gravest first."""
        out = [f"{self.run_a} (a) and {self.run_b} (b): {VERDICTS[self.verdict]}"]
        if self.divergence is not None:
            d = self.divergence
            out.append(
                f"log-probabilities of {d.tokens} tokens differ by {d.mean:.3g} in the mean, {d.greatest:.3g} at most; "
                f"KL by k1 {d.k1:.3g}, by k3 {d.k3:.3g}; {d.clipped:.1%} of the tokens beyond the clip range 0.2"
                + ("" if d.routing is None else f"; {d.routing:.1%} routed alike")
            )
        out += [f"not compared: {words}" for words in self.unmatched]
        out += [f"differs: {words}" for words in self.settings]
        first = self.first_beyond
        beyond = [region for region in self.regions if region.is_beyond]
        beyond.sort(key=lambda region: region is not first)
        for region in beyond[:8]:
            out.append(f"{'first ' if region is first else ''}beyond its bound: {in_words(region)}")
        if len(beyond) > 8:
            out.append(f"and {len(beyond) - 8} more regions beyond")
        shares = sorted((r for r in self.regions if r.share is not None), key=lambda r: -abs(r.share or 0.0))
        if shares and self.explained is not None:
            out.append(f"the regions' own errors explain {self.explained:.0%} of the difference; most of it:")
            out += [f"  {region.share:+.1%}  {region.name} ({region.kind})" for region in shares[:6]]
            out += [f"  {words}" for words in self.by_kind()]
        return out

    def by_kind(self) -> list[str]:
        """Return the share of each kind of region in words, the largest first."""
        shares: dict[str, float] = {}
        for region in self.regions:
            if region.share is not None:
                shares[region.kind] = shares.get(region.kind, 0.0) + region.share
        ordered = sorted(shares.items(), key=lambda pair: -abs(pair[1]))
        return [f"{share:+.1%}  all of kind {kind}" for kind, share in ordered if abs(share) >= 5e-3]


def _finite(value: Any) -> Any:
    """Return plain data with null for infinities and NaN, which JSON doesn't have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def in_words(region: Region) -> str:
    """Return what is beyond in a region, by how much, why and where."""
    off = []
    for run, side in (("a", region.a), ("b", region.b)):
        if side.status == "beyond" and side.error > 1:
            off.append(f"in {run} by {side.error:.3g} times what its contract allows (proved)")
        elif side.status == "beyond" and side.times <= 1:
            off.append(f"in {run}, whose errors are those of another definition")
        elif side.status == "beyond":
            off.append(f"in {run} by {side.times:.3g} times the error that its dtype explains")
    cause = f": {region.cause}" if region.cause else ""
    return f"{region.name} ({region.kind}), {', '.join(off)}{cause}" + (f"; {region.where}" if region.where else "")
