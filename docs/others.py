"""Write docs/results/others.md, the findings in other people's kernels.

``assay survey --table others``, then ``python -P docs/others.py report/survey.json``: copies the verdicts of that
report into docs/results/others.json (rows of kernels that were not installed stay unchanged), and writes the page.
Without a report it only writes the page.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.verify.campaign.table import Entry, entries
from assay.verify.findings import OUTCOMES
from assay.verify.named_contracts import fields_of_base

DATA = Path(__file__).parent / "results" / "others.json"
PAGE = Path(__file__).parent / "results" / "others.md"
_EXAMINED = (*OUTCOMES, "ERROR")
_KEPT = ("PASS", "WARN")
_HEAD = """# Other people's kernels

Results of `assay survey --table others` on kernels that other people published, at quick effort, on a CPU without a
GPU: Triton kernels in the faithful interpreter, packages that ask for CUDA with a pretended device, all as installed.
The table is `configs/others.toml`: each row has its package, the adapter, usually in one line, and the contract with
its source. To repeat it for one package:

```
pip install fla-core
assay survey --table others --only fla.
```

Missing packages are listed with the command that installs them. A row here is of the version and the day of its
package; none was tried on a GPU. FAIL means that a kernel doesn't keep the contract of its row, which is its documented
promise, or else the default; WARN, that only NaN, infinities or subnormals differ, which that contract doesn't mention.
The cause comes from reading the source, or, in quotes, from assay itself.
This page is made by `python -P docs/others.py`.
"""


def taken_over(report: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``known`` updated with the verdicts of a report, by kernel and dtype."""
    results: dict[str, Any] = {name: dict(rows) for name, rows in known.items()}
    for row in report["rows"]:
        if row["outcome"] not in _EXAMINED:
            continue
        verdict = row["verdict"] or {"aspects": {}, "worst": None, "cases": 0}
        broken = {name: result for name, result in verdict["aspects"].items() if result["status"] == "broken"}
        said = [result["explanations"][0]["description"] for result in broken.values() if result["explanations"]]
        results.setdefault(row["name"], {})[row["dtype"]] = {
            "version": row["version"],
            "date": report["made"][:10],
            "outcome": row["outcome"],
            "cases": verdict["cases"],
            "breaks": list(broken),
            "words": row["words"],
            "said": said[0] if said else "",
        }
    return results


def page(data: Mapping[str, Any], table: Sequence[Entry]) -> str:
    """Return the page: counts, then kernels that keep their contract and kernels that don't, by package."""
    rows = [(entry, dtype, row) for entry in table for dtype, row in _of(entry, data).items()]
    groups = list(dict.fromkeys(entry.group for entry in table))
    counts = Counter(row["outcome"] for _, _, row in rows)
    outcomes = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _EXAMINED if counts[outcome])
    examined = f"{len({entry.name for entry, _, _ in rows})} examined, {len(rows)} examinations: {outcomes}."
    counted, kept, broken = [], dict[str, list[str]](), list[tuple[str, ...]]()
    for group in groups:
        own = [row for entry, _, row in rows if entry.group == group]
        last = max(own, key=lambda row: row["date"], default={"version": "", "date": "not run"})
        named = [Counter(row["outcome"] for row in own)[outcome] for outcome in ("PASS", "WARN", "FAIL")]
        kernels = sum(entry.group == group for entry in table)
        cells = (group, last["version"], last["date"], kernels, *named, len(own) - sum(named))
        counted.append(tuple(map(str, cells)))
    for entry, dtype, row in rows:
        if row["outcome"] in _KEPT:
            kept.setdefault(entry.name, []).append(dtype + (" (WARN)" if row["outcome"] == "WARN" else ""))
        else:
            cause = entry.cause or (f'"{row["said"]}"' if row["said"] else "")
            cells = (entry.name, dtype, row["outcome"], ", ".join(row["breaks"]), row["words"], cause)
            broken.append(tuple(map(_cell, cells)))
    keeping = [
        (
            entry.name,
            entry.settings.definition.name,
            ", ".join(kept[entry.name]),
            _contract(entry),
            _cell(entry.promised),
        )
        for entry in table
        if entry.name in kept
    ]
    warned = [(entry.name, dtype, _cell(row["words"])) for entry, dtype, row in rows if row["outcome"] == "WARN"]
    parts = [
        ("Counts", ["package", "version", "day", "kernels", "PASS", "WARN", "FAIL", "other"], counted),
        ("What keeps its contract", ("kernel", "op", "dtypes", "contract", "where it comes from"), keeping),
        ("What does not", ("kernel", "dtype", "outcome", "breaks", "smallest case", "cause"), broken),
        ("Warnings", ("kernel", "dtype", "smallest case"), warned),
    ]
    lines = [_HEAD]
    for title, head, content in parts:
        lines += [f"## {title}\n" if title == "Counts" else f"\n## {title}\n"]
        lines += [f"{len(table)} kernels of {len(groups)} packages; {examined}\n"] if title == "Counts" else []
        lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in content)]
    return "\n".join(lines) + "\n"


def _of(entry: Entry, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known verdicts of an entry, in its dtypes."""
    known = data.get(entry.name, {})
    return {dtype: row for dtype, row in known.items() if entry.dtypes == (None,) or dtype in entry.dtypes}


def _contract(entry: Entry) -> str:
    """Return the base of an entry's contract, and the fields that the entry changes."""
    changed = entry.settings.contract.changed()
    base = changed.pop("base", "")
    of_base = fields_of_base(base, entry.settings.definition.name) if base else {}
    own = [f"{name}={value!r}" for name, value in changed.items() if name not in of_base]
    return _cell(", ".join([base, *own] if base else own) or "default")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("*", "\\*").split())


def main(reports: Sequence[str]) -> None:
    data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for path in reports:
        data = taken_over(json.loads(Path(path).read_text(encoding="utf-8")), data)
    table = entries("others")
    known = {entry.name: _of(entry, data) for entry in table if entry.name in data}
    DATA.write_text(_as_json(known), encoding="utf-8")
    PAGE.write_text(page(known, table), encoding="utf-8")


def _as_json(data: Mapping[str, Any]) -> str:
    rows = [
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(dtype)}: {json.dumps(row, ensure_ascii=False)}" for dtype, row in by_dtype.items())
        + "\n }"
        for name, by_dtype in data.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    main(sys.argv[1:])
