"""`assay compare`: records a run of a model, and compares two recorded runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from assay.runtime.errors import SettingError
from assay.runtime.files import write_text_atomically

_RUNS = "Two folders that `record` wrote; or: record --out FOLDER -- python SCRIPT ARGUMENTS."


def compare(
    runs: Annotated[list[str], Argument(metavar="A B", help=_RUNS)],
    out: Annotated[Path | None, Option(help="Folder of report.json and index.html; of the recorded run.")] = None,
    max_kl: Annotated[float | None, Option(min=0.0, help="Exit with 1 above this KL (k3, per token).")] = None,
    bits: Annotated[bool, Option("--bits", help="Name the first region whose bits differ for equal inputs.")] = False,
    contract: Annotated[str, Option(help="What both promise: a named contract.")] = "torch",
    weights: Annotated[Path | None, Option(help="A recorded run whose weights and configuration count.")] = None,
) -> int:
    """Say which of two runs of one model is right, the first region that leaves its bound, and what differs.

    `assay compare record --out A -- python SCRIPT` runs a script and records the first model that takes token ids.
    `assay compare A B` judges each region of both runs on the inputs that it had, and explains the difference of their
    log-probabilities. Exits with 1 if a region is beyond its bound, --max-kl is exceeded, or --bits differ.
    """
    if runs[0] == "record":
        return _record(runs[1:], out)
    if len(runs) != 2:
        raise SettingError(f"expected two recorded runs, `assay compare A B`, got {len(runs)}: {' '.join(runs)}")
    from assay.compare.comparing import compare as compared
    from assay.compare.comparing import different_bits

    if bits:
        region = different_bits(*runs)
        if region is None:
            print("all regions have equal bits")
            return 0
        print(f"first region with other bits: {region.name} ({region.kind}): {region.cause}")
        return 1
    report = compared(*runs, contract=contract, weights=weights)
    print(report)
    if out is not None:
        from assay.compare.page import page

        out.mkdir(parents=True, exist_ok=True)
        write_text_atomically(out / "report.json", json.dumps(report.as_dict(), indent=1))
        write_text_atomically(out / "index.html", page(report))
        print(f"written to {out / 'index.html'}")
    divergence = report.divergence
    exceeded = max_kl is not None and (divergence is None or not divergence.k3 <= max_kl)
    if exceeded:
        measured = "not known" if divergence is None else f"{divergence.k3:.3g}"
        print(f"KL divergence {measured}, expected at most {max_kl:g}")
    return int(exceeded or report.first_beyond is not None)


def _record(command: list[str], out: Path | None) -> int:
    if out is None:
        raise SettingError("record: expected --out FOLDER, `assay compare record --out FOLDER -- python SCRIPT`")
    if len(command) < 2 or not Path(command[0]).name.startswith("python"):
        raise SettingError(
            f"record: expected python and a script behind --, got {' '.join(command) or 'nothing'}; for other "
            "launchers use assay.compare.record in the script"
        )
    if out.exists():
        raise SettingError(f"{out} exists; record into a new folder, or remove this one")
    interpreter = sys.executable if Path(command[0]).name == command[0] else command[0]
    return subprocess.run(
        [interpreter, "-m", "assay.compare.runs.command", str(out), *command[1:]], check=False
    ).returncode
