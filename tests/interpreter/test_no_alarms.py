"""The sanitizer is silent on the kernels that come along and on Liger's."""

import pytest

from assay.verify.campaign.survey import examine_job, plan
from assay.verify.campaign.table import Entry, entries

ENTRIES = [entry for entry in entries() if entry.group == "assay" or entry.name.lower().startswith("liger")]
ENTRIES = [entry for entry in ENTRIES if not entry.absence("cpu")]


@pytest.mark.evidence
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_no_access_of_an_honest_kernel_is_a_finding(entry: Entry):
    for job in plan([entry], examples=2, timeout=120.0):
        failure = examine_job(job, lambda *told: None).failure
        assert failure is None or " (in program " not in failure.message, failure.message


def test_there_are_kernels_to_be_silent_on():
    names = [entry.name for entry in ENTRIES]
    assert any(name.startswith("assay.") for name in names)
    assert any(name.lower().startswith("liger") for name in names)
