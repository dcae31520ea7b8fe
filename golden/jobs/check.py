"""Checking a store: every bit of every record, that none is missing, and a sample derived again by mpmath."""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest

from assay.golden.errors import CampaignError, DamagedRecord, DefinitionError, MissingRecord, StoreError, UnknownSpec
from assay.golden.jobs.build import read_plan
from assay.golden.jobs.witness import DIGITS, derive
from assay.golden.store import Store, record_key
from assay.golden.store.record import fingerprint, is_outdated

SAMPLE = 20


@dataclass(frozen=True)
class Problem:
    """What is wrong: with the record of a key, or with a manifest by its name."""

    where: str
    recipe: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}{f' ({self.recipe})' if self.recipe else ''}: {self.message}"


@dataclass(frozen=True)
class Findings:
    """What a check looked at and found.

    ``outdated`` records were made by an earlier definition or of other inputs and can't be derived again;
    ``too_large`` ones of the sample would take too long.
    """

    records: int = 0
    derived: int = 0
    elements: int = 0
    too_large: int = 0
    outdated: int = 0
    problems: tuple[Problem, ...] = ()


def check(
    store: Store, *, sample: int = SAMPLE, digits: int = DIGITS, watch: Callable[[int], None] = lambda done: None
) -> Findings:
    """Check every record of ``store``, and derive ``sample`` of them again; ``watch`` is told how many are read.

    Raises `StoreError` where there is no store.
    """
    store.require()
    problems: list[Problem] = []
    lots: dict[str, list[tuple[str, str]]] = {}  # of each spec the records that chance has put first, in its order
    findings = Findings()
    for done, key in enumerate(store.keys(), 1):
        record = store.read(key)
        if isinstance(record, MissingRecord):
            continue  # removed since it was listed
        try:
            if isinstance(record, StoreError):
                problems.append(Problem(key, "", str(record)))
            elif is_outdated(record):
                findings = replace(findings, outdated=findings.outdated + 1)
            else:
                lot = lots.setdefault(record.recipe.spec, [])
                insort(lot, (hashlib.blake2b(key.encode(), digest_size=8).hexdigest(), key))
                del lot[sample:]
        except (DefinitionError, UnknownSpec) as error:
            problems.append(Problem(key, "", f"{error}; a spec of your own needs --ops MODULE"))
        findings = replace(findings, records=done)
        watch(done)
    in_turn = chain.from_iterable(zip_longest(*(lot for _, lot in sorted(lots.items()))))  # one of each spec
    for _, key in islice(filter(None, in_turn), sample):
        findings = _derived(store, key, digits, findings, problems)
    problems += _missing(store, {problem.where for problem in problems})
    return replace(findings, problems=tuple(problems))


def _derived(store: Store, key: str, digits: int, findings: Findings, problems: list[Problem]) -> Findings:
    """One record derived again; whatever is odd about it is a problem of its own."""
    record = store.read(key)
    if isinstance(record, StoreError):
        if not isinstance(record, MissingRecord):  # one removed since it was listed is no problem
            problems.append(Problem(key, "", str(record)))
        return findings
    recipe = record.recipe
    try:
        if fingerprint(recipe.tensors(), recipe.keywords()) != record.inputs:
            message = "its inputs come out differently on this machine; please report it with `assay doctor`'s output"
            problems.append(Problem(key, str(recipe), message))
            return findings
        derived = derive(record, digits)
    except Exception as error:  # mpmath has no infinity to divide by, and a spec of a user's own may raise anything
        message = f"could not be derived again: {type(error).__name__}: {error}"
        problems.append(Problem(key, str(recipe), message))
        return findings
    if derived.fault:
        mend = f"`assay golden discard STORE {key[:16]}` removes it; then build it again"
        problems.append(Problem(key, str(recipe), f"is wrong: {derived.fault}; {mend}"))
    if not derived.elements:
        return replace(findings, too_large=findings.too_large + 1)
    return replace(findings, derived=findings.derived + 1, elements=findings.elements + derived.elements)


def _missing(store: Store, known: set[str]) -> Iterator[Problem]:
    """Records that a manifest speaks of and that aren't there, and builds that didn't come to their end."""
    for name in store.manifests():
        try:
            plan = read_plan(store, name)
        except MissingRecord:
            continue  # removed since it was listed
        except (DamagedRecord, CampaignError) as error:
            yield Problem(f"manifest {name}", "", str(error))
            continue
        missing = 0
        for place in plan.part.places(plan.campaign):
            task = plan.campaign.task(place)
            key = record_key(task.recipe, task.digits)
            if key in known or key in store:
                continue
            missing += 1
            if plan.finished:
                why = plan.failed.get(key)
                yield Problem(
                    key, str(task), f"failed when it was built: {why}" if why else "is missing; build it again"
                )
        if missing and not plan.finished:
            message = f"its build was interrupted, and {missing} records are missing; run it again"
            yield Problem(f"campaign {name}", "", message)
