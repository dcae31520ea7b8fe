"""Every bundled Triton kernel keeps its contract, interpreted on a CPU.

With fewer examples than `assay verify` has by default: that is the run that counts, and takes minutes. A usual run
takes the first entry and dtype of each file, with few heads and sequences, each of which is a program to interpret;
``-m "slow or evidence"`` takes all, as the table has them.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from assay.verify.campaign.survey import examine_job, plan
from assay.verify.campaign.table import Entry, entries

BUNDLED = [entry for entry in entries() if entry.group == "assay"]
FIRST = {entry.target.partition(":")[0]: entry for entry in reversed(BUNDLED)}.values()
FEW = {"B": [1, 2], "Hkv": [1, 2], "H": [2, 4]}


def with_few_programs(entry: Entry) -> Entry:
    """The entry with fewer of what numbers don't depend on; the same entry where it has none of that."""
    definition = entry.settings.definition
    symbols = definition.signature().symbols
    each = "Hkv" in symbols or definition.name.startswith("selective_scan")  # a program, or several, for each sequence
    few = {symbol: sizes for symbol, sizes in FEW.items() if symbol in symbols and each}
    return replace(entry, settings=replace(entry.settings, shapes={**entry.settings.shapes, **few}))


CASES = [
    *(pytest.param(with_few_programs(entry), entry.dtypes[0], "quick", id=entry.name) for entry in FIRST),
    *(
        pytest.param(entry, dtype, "usual", id=f"{entry.name}-{dtype}", marks=pytest.mark.evidence)
        for entry in BUNDLED
        for dtype in entry.dtypes
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "dtype", "effort"), CASES)
def test_a_bundled_kernel_keeps_its_contract(entry: Entry, dtype: object, effort: str) -> None:
    """The kernel passes in the dtype."""
    entry = replace(entry, dtypes=(dtype,), settings=replace(entry.settings, effort=effort))
    (job,) = plan([entry], examples=6, threads=1)
    verdict = examine_job(job, lambda *told: None)
    assert verdict.outcome == "PASS", str(verdict)


def test_every_file_of_kernels_is_examined() -> None:
    """Each file that holds a kernel's operator has entries in the survey's table, of the file or of the op so named."""
    folder = Path(__file__).resolve().parents[2] / "kernels" / "triton"
    files = {path.stem for path in folder.glob("*.py") if "@custom_op(" in path.read_text()}
    targets = {tuple(entry.target.rpartition(".")[2].split(":")) for entry in BUNDLED}
    assert {file for file, _ in targets} <= files <= {name for target in targets for name in target}
