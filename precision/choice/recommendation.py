"""The recommended assignment: chosen by prediction under budgets, the best candidates measured, the best of them
returned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from assay.formats.errors import UnknownOption
from assay.precision.choice.choosing import choose, closest, front
from assay.precision.choice.problem import Choice, Group, Option, Quantity, Totals
from assay.precision.choice.roofline import Cost, Roofline
from assay.precision.prediction.predictor import Predictor
from assay.precision.prediction.quadratic_form import Prediction
from assay.precision.sampling import MeasuredError
from assay.precision.units import format_bytes, format_error, format_seconds


class Assignment(dict[str, str]):
    """Site names to scheme names, with prediction, measurement and cost. Printed in a line; `dict(a)` shows all
    sites."""

    prediction: Prediction
    measured: float = math.nan
    """The error with the assignment simulated, over the held-out data where there are any; NaN: not measured."""
    cost: Cost
    """Bytes of weights and KV cache; seconds of a prefill and of a decode step."""
    met: bool = True
    """Whether every budget is kept."""
    why: str = ""
    """In words: what bound the choice, or which budgets can't be met together."""

    def __str__(self) -> str:
        counted = Counter(self.values()).most_common()
        parts = [f"{len(self)} site{'s' * (len(self) != 1)}"]
        if self:
            parts[0] += ": " + ", ".join(f"{count} {scheme}" for scheme, count in counted)
        if hasattr(self, "prediction"):
            low, high = format_error(self.prediction.low), format_error(self.prediction.high)
            parts.append(f"error predicted {format_error(self.prediction.error)} ({low} to {high})")
        if not math.isnan(self.measured):
            parts.append(f"measured {format_error(self.measured)}")
        if hasattr(self, "cost"):
            parts.append(f"weights {format_bytes(self.cost.bytes)}, KV cache {format_bytes(self.cost.kv_bytes)}")
            if not math.isnan(self.cost.prefill):
                parts.append(
                    f"prefill {format_seconds(self.cost.prefill)}, decode step {format_seconds(self.cost.decode)}"
                )
        return "; ".join(parts if self.met else [*parts, "budgets not met"])

    def __repr__(self) -> str:
        return f"Assignment({self})"


ARGUMENTS: Mapping[Quantity, str] = {
    "error": "max_error",
    "bytes": "max_bytes",
    "kv_bytes": "max_kv_bytes",
    "prefill": "max_prefill",
    "decode": "max_time",
}
"""The argument of `recommend` that limits each quantity."""


def untrusted(reasons: Sequence[str]) -> str:
    """Return a clause with the reasons, sentences, not to trust a prediction; empty without any."""
    if not reasons:
        return ""
    return f"; go by what was measured, not by the prediction: {' '.join(reasons).removesuffix('.')}"


def _distinguished(quantity: Quantity, total: float, limit: float, unit: str) -> tuple[str, str]:
    """Return a total with its unit and its limit, with as many digits as distinguish them, up to nine."""
    words = {"error": format_error, "bytes": format_bytes, "kv_bytes": format_bytes}.get(quantity, format_seconds)
    pairs = [(words(total, digits), words(limit, digits)) for digits in (3, 6, 9)]
    has, ask = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    return f"{has} {unit}" if quantity == "error" else has, ask


_SURE = 1.645  # Standard errors of margin to an error budget: 95 % of normal errors are below


@dataclass(frozen=True, slots=True)
class Judge:
    """Measures choices on held-out data."""

    measure: Callable[[Mapping[str, str]], MeasuredError]
    """An assignment to its error over the held-out data."""
    sampling: float
    """Standard error of the logarithm of the ratio of the two errors, by the sequences that each is over."""

    @property
    def margin(self) -> float:
        """The divisor of an error budget for the choice, so that the held-out error mostly meets it too."""
        return math.exp(_SURE * self.sampling)


_MEASURED = 4  # Candidates measured for one recommendation
_OFF = 1.2  # Ratio of measured to predicted error from which a choice's fusion groups are measured
_ROUNDS = 4  # New choices with corrected predictions
_RUNS = 24  # Measurements to find the mispredicted groups, in each round
_COSTS = tuple(field.name for field in fields(Cost))
_NEAR = 0.97  # Share of a budget from which it counts as used up


def groups_of(predictor: Predictor, roofline: Roofline, fixed: Collection[str] = ()) -> list[Group]:
    """Return the fusion groups, sites that take one scheme together, with the schemes that all of their sites support.

    fixed: names of sites that keep their own format, and their groups with them. Schemes that break the model are left
    out, as are any that save nothing, which would cost accuracy without any gain.
    """
    observed = predictor.observed
    members: dict[str, list[str]] = {}
    sharing: dict[str, list[str]] = {}
    for site in observed.sites:
        if site.tied:
            sharing.setdefault(site.tied, []).append(str(site))
        else:
            members.setdefault(site.unit, []).append(str(site))

    def option(sites: Sequence[str], scheme: str) -> Option:
        every = [*sites, *(other for site in sites for other in sharing.get(site, ()))]
        cost = sum((roofline.cost(site, scheme) for site in every), Cost())
        return Option(scheme, predictor.squares(dict.fromkeys(sites, scheme)) if scheme else 0.0, **asdict(cost))

    groups = []
    for name, sites in members.items():
        if not set(fixed).isdisjoint(sites):
            continue
        shared = [s for s in observed.menus[sites[0]] if all(s in observed.menus[site] for site in sites)]
        unchanged, *others = (option(sites, scheme) for scheme in ["", *shared])
        whole = [each for each in others if math.isfinite(each.error)]
        saving = [each for each in whole if any(getattr(each, what) < getattr(unchanged, what) for what in _COSTS)]
        if saving:
            groups.append(Group(name, tuple(sites), (unchanged, *saving)))
    return groups


@dataclass(eq=False)
class Recommender:
    """Implements `Audit.recommend` and `Audit.pareto`."""

    predictor: Predictor
    """It is replaced as measurements of candidates correct it."""
    measure: Callable[[Mapping[str, str]], float]
    """An assignment to its error."""
    roofline: Roofline
    fixed: Collection[str] = ()
    """Names of sites that keep their own format."""
    judge: Judge | None = None
    """Measures the recommendation on held-out data; None: `measure` does."""
    refitted: Callable[[Predictor], Predictor] = lambda predictor: predictor
    """Returns a corrected predictor with a newly fitted interval."""

    def __post_init__(self) -> None:
        formats = len({scheme for menu in self.predictor.observed.menus.values() for scheme in menu})
        what = f"the {formats} formats that this audit looked at" if formats > 1 else "this audit's only format"
        self._among = f"with {what}"  # fewer where `audit` got formats or a target
        self._unit = self.predictor.metric.unit
        self._renew()

    def _renew(self) -> None:
        """Compute options with current predictions; one more group holds the rest of the model, so that budgets are of
        all of it."""
        groups, whole = groups_of(self.predictor, self.roofline, self.fixed), self.roofline.total({})
        left = {
            what: max(math.fsum([getattr(whole, what), *(-getattr(each.options[0], what) for each in groups)]), 0.0)
            for what in _COSTS
        }
        self._groups = (*groups, Group("", (), (Option("", 0.0, **left),)))
        self._sites = {group.name: group.sites for group in groups}

    def recommend(self, budgets: Mapping[Quantity, float | None]) -> Assignment:
        """Return the assignment of least error within the budgets; of fewest bytes where only the error has one.

        An error budget limits the measured error: where the prediction was too low, the choice is made again, with the
        measured errors of the mispredicted groups.
        """
        limits = _checked(budgets)
        margin = self.judge.margin if self.judge else 1.0
        choice_limits = {name: limit / margin if name == "error" else limit for name, limit in limits.items()}
        minimise: Quantity = "bytes" if set(choice_limits) == {"error"} else "error"
        choices = self._choices(choice_limits, 1.0, minimise)
        if not choices:
            return self._closest(limits)
        before: list[Choice] = []
        while len(before) < _ROUNDS and self._learn(choices[0].schemes):
            before.append(choices[0])
            choices = self._choices(choice_limits, 1.0, minimise) or choices
        share, choices = 1.0, [*choices[:_MEASURED], *before]
        while True:
            tried = [self._measured(choice) for choice in choices]
            kept = [each for each in tried if not _over(_totals(each.measured, each.cost), choice_limits)]
            if kept:
                best = min(kept, key=lambda each: (each.cost.bytes if minimise == "bytes" else 0.0, each.measured))
                return self._judged(best, limits, minimise)
            nearest = min(tried, key=lambda each: each.measured if math.isfinite(each.measured) else math.inf)
            off = nearest.measured / choice_limits["error"] if "error" in choice_limits else math.nan
            share *= 0.9 / off if 1 < off < math.inf else 0.5
            choices = []
            if "error" in choice_limits and share > 0.05:
                choices = self._choices(choice_limits, share, minimise)[:_MEASURED]
            if not choices:
                if not _over(_totals(nearest.measured, nearest.cost), limits):  # only the margin is not kept
                    return self._judged(nearest, limits, minimise)
                nearest.met = False
                nearest.why = (
                    f"predicted to keep the budgets, but measured {format_error(nearest.measured)} {self._unit}"
                )
                if "error" in limits:
                    has, ask = _distinguished("error", nearest.measured, limits["error"], self._unit)
                    what = f"{has} where at most {ask} was asked for; none tried did better"
                    nearest.why = f"predicted to keep max_error, but measured {what}"
                return self._reported(nearest)

    def _judged(self, best: Assignment, limits: Totals, minimise: Quantity) -> Assignment:
        on_choice = best.measured
        best = self._reported(best)
        best.met = not _over(totals := _totals(best.measured, best.cost), limits)
        if best.met:
            best.why = self._bound(best, limits, minimise)
        else:
            has, ask = _distinguished("error", totals["error"], limits.get("error", math.inf), self._unit)
            best.why = (
                f"max_error is kept on the data that was chosen on ({format_error(on_choice)}), but not on the "
                f"held-out data: {has} of at most {ask}; give more text, which narrows the gap, or a smaller max_error"
            )
        return best

    def _reported(self, best: Assignment) -> Assignment:
        if self.judge:
            best.measured = self.judge.measure(best)
        return best

    def front(self, points: int) -> list[dict[str, str]]:
        """Return assignments that none is predicted to beat in bytes and error, by bytes."""
        choices = front(self._groups, minimise=("bytes", "error"), points=points, error_of=self._squares)
        return [self._assignment(choice.schemes) for choice in choices]

    def evaluated(self, assignment: Mapping[str, str]) -> Assignment:
        """Return an assignment with its prediction and cost."""
        result = Assignment(assignment)
        result.prediction, result.cost = self.predictor.predict(result), self.roofline.cost_of(result)
        return result

    def _learn(self, schemes: Mapping[str, str]) -> bool:
        """Find the mispredicted groups by halving, where a choice measures worse than predicted; return if any are.

        Among many options a choice selects those whose errors are predicted too small: measured ones replace them.
        """
        taken = {group: scheme for group, scheme in schemes.items() if scheme}
        whole, suspects, runs, learnt = self._squares(taken), [taken], 0, False
        if not taken or self._measured_squares(taken) <= _OFF * whole:
            return False
        while suspects and runs < _RUNS:
            names = list(suspect := suspects.pop(0))
            for some in (names[: len(names) // 2], names[len(names) // 2 :]):
                half = {name: suspect[name] for name in some}
                runs += 1
                if not half or self._measured_squares(half) - self._squares(half) <= (_OFF - 1) / 2 * whole:
                    continue
                if len(half) > 1:
                    suspects.append(half)
                else:
                    assignment, before = self._assignment(half), self._squares(half)
                    self.predictor = self.predictor.corrected(assignment, self.measure(assignment))
                    learnt = learnt or self._squares(half) != before
        if learnt:
            self.predictor = self.refitted(self.predictor)
        self._renew()
        return learnt

    def _squares(self, schemes: Mapping[str, str]) -> float:
        return self.predictor.squares(self._assignment(schemes))

    def _measured_squares(self, schemes: Mapping[str, str]) -> float:
        error = self.measure(self._assignment(schemes))
        return self.predictor.squares_at(error) if 0 < error < math.inf else 0.0 if error == 0 else math.inf

    def _assignment(self, schemes: Mapping[str, str]) -> dict[str, str]:
        return {site: scheme for group, scheme in schemes.items() if scheme for site in self._sites[group]}

    def _choices(self, limits: Totals, share: float, minimise: Quantity) -> list[Choice]:
        return choose(self._groups, self._squared(limits, share), minimise=minimise, error_of=self._squares)

    def _squared(self, limits: Totals, share: float = 1.0) -> Totals:
        """Return limits on the sums over groups: a share of the error becomes a sum of squares."""
        return {
            name: self.predictor.squares_at(limit * share) if name == "error" else limit
            for name, limit in limits.items()
        }

    def _measured(self, choice: Choice) -> Assignment:
        result = self.evaluated(self._assignment(choice.schemes))
        result.measured = self.measure(result)
        return result

    def _closest(self, limits: Totals) -> Assignment:
        """Return the closest assignment where none is predicted to meet the limits. An amplitude's excess is that of
        its square."""
        choice, binding = closest(self._groups, self._squared(limits), error_of=self._squares)
        best = self._reported(self._measured(choice))
        totals = _totals(best.measured, best.cost)
        over = _over(totals, limits)
        best.met = not over
        if best.met:
            best.why = self._bound(best, limits, "error")
            return best
        binding = binding or over
        alone = [name for name in binding if self._least(name) > limits[name]]
        together = [name for name in binding if name not in alone]
        sets = [*([name] for name in alone), *([together] if together else [])]
        shown = [name for name in limits if name in binding or name in over]
        names = [[ARGUMENTS[name] for name in each] for each in sets]
        first, *others = [" and ".join(each) + "{}" + " together" * (len(each) > 1) for each in names]
        kept = ", nor ".join([first.format(" can't be kept"), *(other.format("") for other in others)])
        pairs = {name: _distinguished(name, totals[name], limits[name], self._unit) for name in shown}
        has = " and ".join(
            f"{has} where {ARGUMENTS[name]} asks for at most {ask}" for name, (has, ask) in pairs.items()
        )
        best.why = f"{kept}{',' * bool(others)} {self._among}; the closest has {has}"
        return best

    def _least(self, quantity: Quantity) -> float:
        return math.fsum(min(getattr(option, quantity) for option in group.options) for group in self._groups)

    def _bound(self, best: Assignment, limits: Totals, minimise: Quantity) -> str:
        """Return in words the used-up budgets, of the ones that the unchanged model does not meet."""
        totals, near = _totals(best.measured, best.cost), list[Quantity](["error"])
        if minimise == "bytes" and best.cost.bytes <= self._least("bytes") * (1 + 1e-9):
            return f"no budget binds: the fewest bytes that there are {self._among}"
        if minimise != "bytes":
            whole = _totals(0.0, self.roofline.total({}))
            used = {name: totals[name] / limit for name, limit in limits.items() if whole[name] > limit}
            if not used:
                return "no budget binds: the model as it is keeps them"
            near = [name for name in used if used[name] >= min(_NEAR, max(used.values()))]
        pairs = {name: _distinguished(name, totals[name], limits[name], self._unit) for name in near}
        return "bound by " + " and ".join(
            f"{ARGUMENTS[name]} ({has} of at most {ask})" for name, (has, ask) in pairs.items()
        )


def _checked(budgets: Mapping[Quantity, float | None]) -> Totals:
    """Return the finite limits. Raises UnknownOption for one that is not above 0, and where there are none."""
    given = {name: float(limit) for name, limit in budgets.items() if limit is not None}
    for name, limit in given.items():
        if not limit > 0:
            raise UnknownOption(f"expected {ARGUMENTS[name]} above 0, got {limit:g}")
    limits = {name: limit for name, limit in given.items() if math.isfinite(limit)}
    if not limits:
        raise UnknownOption(f"expected a finite budget, got none: give {', '.join(ARGUMENTS.values())}, or several")
    return limits


def _totals(error: float, cost: Cost) -> dict[Quantity, float]:
    return {name: error if name == "error" else getattr(cost, name) for name in ARGUMENTS}


def _over(totals: Totals, limits: Totals) -> list[Quantity]:
    """Return the budgets that totals with the measured error exceed; all where the model breaks."""
    if not math.isfinite(totals["error"]):
        return list(limits)
    return [name for name, limit in limits.items() if totals[name] > limit * (1 + 1e-9)]
