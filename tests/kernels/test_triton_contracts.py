"""Every bundled Triton kernel keeps its contract, interpreted on a CPU.

With fewer examples than `assay verify` has by default: that is the run that counts, and takes minutes. A usual run
takes the first entry and dtype of each file, at quick effort, with few heads, sequences, places and experts, each of
which an interpreter goes through one by one; ``-m "slow or evidence"`` takes all, as the table has them.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from assay.verify.campaign.survey import examine_job, plan
from assay.verify.campaign.table import Entry, entries

BUNDLED = [entry for entry in entries() if entry.group == "assay"]
FIRST = {entry.target.partition(":")[0]: entry for entry in reversed(BUNDLED)}.values()
HEADS = {"B": [1, 2], "Hkv": [1, 2], "H": [2, 4]}
FEW = {  # by the beginnings of an op's name: sizes of what is a program each, or several, or a step of its loops
    "attention": HEADS,
    "selective_scan": {"B": [1, 2], "D": [1, 17], "S": [1, 3], "L": [1, 2, 19, 40]},  # one and several tiles and blocks
    "moe": {"T": [1, 5, 70], "E": [1, 3], "k": [1, 2], "F": [1, 8, 40]},
}
ONE = {"scale": (0.3,)}  # options that take no path of their own


def with_few_programs(entry: Entry) -> Entry:
    """The entry with fewer of what an interpreter goes through; the same entry where it has none of that."""
    own = entry.settings
    symbols = own.definition.signature().symbols
    begins = next((name for name in FEW if own.definition.name.startswith(name)), "")
    few = {symbol: sizes for symbol, sizes in FEW.get(begins, {}).items() if symbol in {*symbols} - {*own.shapes}}
    options = {name: ONE.get(name, values) for name, values in own.options.items()}
    return replace(entry, settings=replace(own, shapes={**own.shapes, **few}, options=options))


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
