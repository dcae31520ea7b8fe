"""Judge `assay.compare`: `./dev bench compare`, or `benchmarks/compare/run.py [NAME ...]`.

It records both runs of each pair, planted mismatches (`mismatches.py`) and honest pairs (`honest.py`), compares them,
and prints a line for each: what was named first, its status in both runs, its cause, whether it is right, seconds. At
the end: mismatches that are named first by region, and by region and cause; honest pairs in which anything was named;
the median of |sum of shares - 1| over pairs without a region beyond its bound; runs that recording changed. A NAME is
a part of pairs' names, such as ``rotary`` or ``@llama``. ``--differences`` records nothing and prints by how much the
log-probabilities of the two runs differ. ``--json FILE`` appends every result as a line of JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.compare.honest import honest
from benchmarks.compare.mismatches import Mismatch, planted
from benchmarks.compare.models import Pair, Run

LONGEST = 120.0  # seconds that a pair may take
SUM = 0.15  # the most by which shares may miss the measured difference, in the median


def pairs(names: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[Mismatch | None, Pair]]:
    """Yield the pairs whose names have one of ``names`` in them, planted ones with their mismatch."""
    found = [*(planted() if "planted" in kinds else ()), *((None, pair) for pair in honest() if "honest" in kinds)]
    yield from ((mismatch, pair) for mismatch, pair in found if not names or any(name in pair.name for name in names))


def differences(pair: Pair) -> dict[str, Any]:
    """Return the largest and the mean difference of the log-probabilities of a pair's runs."""
    a, b = (run.log_probabilities(run.made()).double() for run in (pair.a, pair.b))
    difference = (a - b).abs()
    return {"max": float(difference.max()), "mean": float(difference.mean()), "finite": bool(b.isfinite().all())}


def judged_package() -> Any:
    """Return `assay.compare`; by its name, as these pairs are older than the package and can be measured without it."""
    return importlib.import_module("assay.compare")


def recorded(run: Run, folder: Path) -> bool:
    """Record a run; return whether it gave the bits that it gives unrecorded."""
    plain = run.log_probabilities(run.made())
    model = run.made()
    with judged_package().record(str(folder), model):
        observed = run.log_probabilities(model)
    return torch.equal(plain, observed)


def compared(mismatch: Mismatch | None, pair: Pair, folder: Path) -> dict[str, Any]:
    """Record and compare both runs of a pair, and judge the report."""
    a, b = folder / "run_a", folder / "run_b"
    undisturbed = [recorded(run, into) for run, into in ((pair.a, a), (pair.b, b))]
    start = time.perf_counter()
    report = judged_package().compare(str(a), str(b))
    seconds = round(time.perf_counter() - start, 1)
    judgement = judged(mismatch, pair.b.model, report)
    return judgement | {"undisturbed": all(undisturbed), "compare_seconds": seconds}


def judged(mismatch: Mismatch | None, model: str, report: Any) -> dict[str, Any]:
    """Return what a report says of a pair, and whether it is right; ``mismatch`` None: of an honest one."""
    first = report.first_beyond
    beyond = [region for region in report.regions if "beyond" in (region.status_a, region.status_b)]
    result = {
        "region": words(first),
        "statuses": None if first is None else (first.status_a, first.status_b),
        "cause": "" if first is None else str(first.cause or ""),
        "beyond": len(beyond),
        "unmatched": sum("unmatched" in (region.status_a, region.status_b) for region in report.regions),
        "regions": len(report.regions),
        "verdict": report.verdict,
        "difference": float(report.difference),
        "explained": float(report.explained),
    }
    if mismatch is None:
        return result | {"right": first is None and not beyond}
    by_region = (
        first is not None
        and named_rightly(mismatch, model, words(first))
        and first.status_b == "beyond"
        and first.status_a != "beyond"
    )
    return result | {"by_region": by_region, "right": by_region and has_any(result["cause"], mismatch.causes)}


def words(region: Any) -> str:
    """Return a region's name and kind, as far as it has them."""
    return "" if region is None else " ".join(str(getattr(region, name, "")) for name in ("name", "kind")).strip()


def named_rightly(mismatch: Mismatch, model: str, region: str) -> bool:
    """Return whether a region's name has one of the words that the mismatch allows, and stands in the right layer.

    The layer is the number after "layer", "layers", "h", "blk" or "blocks"; what stands outside of layers has none, or
    that of the first layer that uses it.
    """
    found = re.search(r"(?:\blayers?|\bh|\bblk|\bblocks?)[._ \[]?(\d+)", region)
    layer = None if found is None else int(found[1])
    right = {mismatch.layer(model)} if mismatch.at else {None, mismatch.used}
    return layer in right and has_any(region, mismatch.regions)


def has_any(text: str, parts: Sequence[str]) -> bool:
    """Return whether a text has one of the parts, in any case, with "-", "_" and " " as the same."""
    plain, *rest = (re.sub(r"[-_ ]+", " ", each.lower()) for each in (text, *parts))
    return any(part in plain for part in rest)


def line(name: str, result: dict[str, Any]) -> str:
    """Return the line of a pair."""
    if "error" in result:
        return f"{name:34} {result['seconds']:6.1f} s  ERROR {result['error']}"
    if "max" in result:
        return f"{name:34} {result['seconds']:6.1f} s  max {result['max']:.2e}  mean {result['mean']:.2e}" + (
            "" if result["finite"] else "  NOT FINITE"
        )
    mark = "right" if result["right"] else "by region alone" if result.get("by_region") else "WRONG"
    found = f"{result['region']} {result['statuses']}: {result['cause'][:90]}" if result["region"] else "nothing"
    others = f"{result['beyond']} of {result['regions']} beyond, {result['unmatched']} unmatched, {result['verdict']}"
    shares = f"{result['explained']:.3g} of {result['difference']:.3g}"
    disturbed = "" if result["undisturbed"] else ", RECORDING CHANGED IT"
    return f"{name:34} {result['seconds']:6.1f} s  {mark}: {found}  ({others}, {shares}{disturbed})"


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the totals over what was compared."""
    ended = [result for result in results if "right" in result]
    faults = [result for result in results if result["planted"]]
    honests = [result for result in results if not result["planted"]]
    sums = [abs(result["explained"] - 1.0) for result in ended if not result["beyond"] and result["difference"]]
    lines = [
        f"planted: {sum(result.get('by_region', False) for result in faults)} of {len(faults)} named first by region, "
        f"{sum(result.get('right', False) for result in faults)} by region and cause",
        f"honest: {sum(not result.get('right', False) for result in honests)} of {len(honests)} with anything named",
        f"pairs that ended in an error: {len(results) - len(ended)}",
        f"pairs of more than {LONGEST:.0f} s: {sum(result['seconds'] > LONGEST for result in results)}",
        f"pairs that recording changed: {sum(not result['undisturbed'] for result in ended)}",
    ]
    if sums:
        lines.append(
            f"median of |sum of shares - 1| over {len(sums)} pairs: {statistics.median(sums):.3f} (at most {SUM})"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pairs named on the command line; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--kind", choices=("planted", "honest"), action="append", help="of pairs; both by default")
    parser.add_argument("--one", action="store_true", help="pair of each case: the first")
    parser.add_argument("--differences", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    results = []
    cases = set[str]()
    for mismatch, pair in pairs(given.names, given.kind or ("planted", "honest")):
        if given.one and pair.case in cases:
            continue
        cases.add(pair.case)
        start, result = time.perf_counter(), {"name": pair.name, "planted": mismatch is not None}
        try:
            if given.differences:
                result |= differences(pair)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    result |= compared(mismatch, pair, Path(folder))
        except Exception as error:  # one pair that breaks leaves the others
            result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        result["seconds"] = time.perf_counter() - start
        results.append(result)
        print(line(pair.name, result), flush=True)
        if given.json:
            with given.json.open("a", encoding="utf-8") as file:
                print(json.dumps(result, default=str), file=file)
    if not results:
        print(f"no pair has one of {', '.join(given.names)} in its name", file=sys.stderr)
        return 2
    if given.differences:
        return int(any("error" in result for result in results))
    print(*summary(results), sep="\n")
    return int(not all(result.get("right", False) for result in results))


if __name__ == "__main__":
    sys.exit(main())
