"""Verdicts kept in a folder, so that a campaign which was stopped goes on where it was.

A verdict is kept under a digest of everything that it depends on: the question, the kernel's source file, and the
versions of this package, torch and Triton. Of a kernel that has changed since, nothing is kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from assay.verify.inputs.cases import case_from_line
from assay.verify.picture import ErrorMap
from assay.verify.result import Failure
from assay.verify.sample import Comparison, Numbers, Sample
from assay.verify.survey import Job
from assay.verify.verdict import Explanation, Verdict, write_whole

_PACKAGES = ("kernel-assay", "torch", "triton", "jax")


def name_of(job: Job) -> str:
    """The name of a job's files, without their suffix."""
    words = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{job.entry.name}-{job.dtype_name}").strip("-")[:100]
    return f"{words}-{digest(job)}"


def digest(job: Job) -> str:
    """What tells this job from any other, and from itself after its kernel has changed."""
    question = asdict(replace(job, threads=0))
    question["entry"] |= {"effort": 0, "survey_dtypes": (), "dtypes": ()}
    content = [repr(_ordered(question)), _source(job.entry.target), *map(_version, _PACKAGES)]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:12]


def keep(folder: Path, job: Job, verdict: Verdict) -> Path:
    """Write the verdict as JSON and HTML; the page's path. A half-written one is never found."""
    base = folder / name_of(job)
    page = verdict.to_html(base.with_name(f"{base.name}.html"))
    write_whole(base.with_name(f"{base.name}.json"), verdict.to_json())
    return page


def kept(folder: Path, job: Job) -> Verdict | None:
    """The verdict that was kept of this very job, if any."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return verdict_of(json.loads((folder / f"{name_of(job)}.json").read_text(encoding="utf-8")))
    return None


def verdict_of(content: dict[str, Any]) -> Verdict:
    """The verdict that `Verdict.as_dict` wrote."""
    failure = content["failure"]
    if failure is not None:
        numbers = {name: _number(failure[name]) for name in ("got", "golden", "radius", "ratio")}
        failure = Failure(
            **{name: failure[name] for name in ("kind", "message", "output", "violations", "elements")},
            **numbers,
            case=case_from_line(json.dumps(failure["case"])),
            index=tuple(failure["index"]),
        )
    numbers = {name: _number(content[name]) for name in ("worst", "detectable")}
    explanations = tuple(Explanation(**explanation) for explanation in content["explanations"])
    pictures = {
        "histogram": tuple(content["histogram"]),
        "map": _map(content["map"]),
        "sample": _sample(content["sample"]),
    }
    return Verdict(**(content | numbers | pictures | {"failure": failure, "explanations": explanations}))


def _map(content: dict[str, Any] | None) -> ErrorMap | None:
    if content is None:
        return None
    lists = {"shape": tuple(content["shape"]), "block": tuple(content["block"])}
    return ErrorMap(**(content | lists | {"cells": tuple(map(_numbers, content["cells"]))}))


def _sample(content: dict[str, Any] | None) -> Sample | None:
    if content is None:
        return None
    inputs = tuple(Numbers(part["name"], tuple(part["shape"]), _numbers(part["values"])) for part in content["inputs"])
    output = content["output"]
    if output is not None:
        lists = {name: _numbers(output[name]) for name in ("got", "golden", "ratio")}
        output = Comparison(**(output | lists | {"shape": tuple(output["shape"])}))
    return Sample(inputs, output)


def _numbers(values: list[Any]) -> tuple[Any, ...]:
    return tuple(map(_number, values))


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((name, _ordered(inner)) for name, inner in value.items())
    return [_ordered(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _source(target: str) -> str:
    """The text of the file that a target stands in."""
    with suppress(ImportError, ValueError, OSError, AttributeError):
        found = importlib.util.find_spec(target.partition(":")[0])
        if found is not None and found.origin is not None:
            return Path(found.origin).read_text(encoding="utf-8", errors="replace")
    return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
