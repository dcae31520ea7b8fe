"""Checking a store: every bit of every record, missing records, and a sample derived again by mpmath."""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest

from assay.golden.errors import CampaignError, DamagedRecord, DefinitionError, MissingRecord, StoreError, UnknownSpec
from assay.golden.jobs.build import read_plan
from assay.golden.jobs.oracle import DIGITS, derive
from assay.golden.store import Store, record_key
from assay.golden.store.record import fingerprint, is_outdated

SAMPLE = 20


@dataclass(frozen=True)
class Problem:
    """What is wrong with a record, by its key, or with a manifest, by its name."""

    where: str
    recipe: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}{f' ({self.recipe})' if self.recipe else ''}: {self.message}"


@dataclass(frozen=True)
class Findings:
    """The counts of a check, and the problems.

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
    """Check every record of ``store``, and derive ``sample`` of them again; call ``watch`` with the number read.

    Raises `StoreError` where there is no store.
    """
    store.require()
    problems: list[Problem] = []
    samples: dict[str, list[tuple[str, str]]] = {}  # by spec: digests, which make the choice random, and keys
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
                of_spec = samples.setdefault(record.recipe.spec, [])
                insort(of_spec, (hashlib.blake2b(key.encode(), digest_size=8).hexdigest(), key))
                del of_spec[sample:]
        except (DefinitionError, UnknownSpec) as error:
            problems.append(Problem(key, "", f"{error}; a spec of your own needs --ops MODULE"))
        findings = replace(findings, records=done)
        watch(done)
    round_robin = chain.from_iterable(zip_longest(*(of_spec for _, of_spec in sorted(samples.items()))))
    for _, key in islice(filter(None, round_robin), sample):
        findings = _derived(store, key, digits, findings, problems)
    problems += _missing(store, {problem.where for problem in problems})
    return replace(findings, problems=tuple(problems))


def _derived(store: Store, key: str, digits: int, findings: Findings, problems: list[Problem]) -> Findings:
    """Derive one record again; add to the problems and return the new counts."""
    record = store.read(key)
    if isinstance(record, StoreError):
        if not isinstance(record, MissingRecord):  # removed since it was listed
            problems.append(Problem(key, "", str(record)))
        return findings
    recipe = record.recipe
    try:
        if fingerprint(recipe.tensors(), recipe.keywords()) != record.inputs:
            message = "its inputs come out differently on this machine; please report it with `assay doctor`'s output"
            problems.append(Problem(key, str(recipe), message))
            return findings
        derived = derive(record, digits)
    except Exception as error:  # mpmath raises on division by zero, and a user's spec may raise anything
        message = f"could not be derived again: {type(error).__name__}: {error}"
        problems.append(Problem(key, str(recipe), message))
        return findings
    if derived.fault:
        mend = f"`assay golden discard STORE {key[:16]}` removes it; then build it again"
        problems.append(Problem(key, str(recipe), f"is wrong: {derived.fault}; {mend}"))
    if not derived.elements:
        return replace(findings, too_large=findings.too_large + 1)
    return replace(findings, derived=findings.derived + 1, elements=findings.elements + derived.elements)


def _missing(store: Store, reported: set[str]) -> Iterator[Problem]:
    """Yield records of manifests that aren't there, and builds that didn't finish."""
    for name in store.manifests():
        try:
            plan = read_plan(store, name)
        except MissingRecord:
            continue  # removed since it was listed
        except (DamagedRecord, CampaignError) as error:
            yield Problem(f"manifest {name}", "", str(error))
            continue
        missing = 0
        for number in plan.part.task_numbers(plan.campaign):
            task = plan.campaign.task(number)
            key = record_key(task.recipe, task.digits)
            if key in reported or key in store:
                continue
            missing += 1
            if plan.finished:
                why = plan.failed.get(key)
                message = f"failed when it was built: {why}" if why else "is missing; build it again"
                yield Problem(key, str(task), message)
        if missing and not plan.finished:
            message = f"its build was interrupted, and {missing} records are missing; run it again"
            yield Problem(f"campaign {name}", "", message)
