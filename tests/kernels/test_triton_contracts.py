"""Every bundled Triton kernel keeps its contract, interpreted on a CPU.

With fewer examples than `assay verify` has by default: that is the run that counts, and takes minutes. A usual run
takes the first entry and dtype of each file; ``-m "slow or evidence"`` all.
"""

from pathlib import Path

import pytest

from assay.verify.survey import Job, examine_job
from assay.verify.survey_table import Entry, entries

BUNDLED = [entry for entry in entries() if entry.group == "assay"]
FIRST = {entry.target.partition(":")[0]: entry for entry in reversed(BUNDLED)}.values()
DTYPES = [
    pytest.param(
        entry, dtype, id=f"{entry.name}-{dtype}", marks=pytest.mark.evidence if place or entry not in FIRST else ()
    )
    for entry in BUNDLED
    for place, dtype in enumerate(entry.dtypes)
]


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "dtype"), DTYPES)
def test_a_bundled_kernel_keeps_its_contract(entry: Entry, dtype: object) -> None:
    """The kernel passes in the dtype."""
    verdict = examine_job(Job(entry, dtype, examples=6, threads=1), lambda line: None)
    assert verdict.outcome == "PASS", str(verdict)


def test_every_file_of_kernels_is_examined() -> None:
    """Each file that holds a kernel's operator has entries in the survey's table."""
    folder = Path(__file__).resolve().parents[2] / "kernels" / "triton"
    files = {path.stem for path in folder.glob("*.py") if "custom_op(" in path.read_text()}
    assert files == {entry.target.partition(":")[0].rpartition(".")[2] for entry in BUNDLED}
