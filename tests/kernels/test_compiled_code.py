"""What a GPU's compiler makes of the bundled Triton kernels: no spills, tensor cores, nothing turned round."""

import pytest

pytest.importorskip("triton")

from assay.verify.campaign.table import Entry, entries
from assay.verify.inspection.arch import arch_named
from assay.verify.inspection.inspecting import Job, inspected
from assay.verify.settings import Settings

OURS = [entry for entry in entries() if entry.group == "assay" and entry.devices != ("cpu",)]
PRODUCTS = ("gemm", "attention", "moe", "linear")  # that names begin with
NONE = ("moe_route", "moe_route_backward")
_BAD = {"not compiled", "no room", "none fits", "spills", "local memory", "tf32", "transposed", "no tensor cores"}


@pytest.mark.parametrize("entry", OURS, ids=[entry.name for entry in OURS])
def test_a_bundled_kernel_is_compiled_to_good_code(entry: Entry) -> None:
    """For Hopper, in its first dtype and the first of its options: every configuration that its tuner would try fits,
    keeps all in registers, turns no operand round in them, and multiplies on tensor cores where the op has products."""
    hopper = arch_named("sm_90a")
    first = {name: values[:1] for name, values in entry.settings.options.items()}
    dtype = (entry.survey_dtypes or entry.dtypes)[0]
    own = entry.settings
    settings = Settings(own.spec, dtype=dtype, options=first, shapes=own.shapes)
    calls = list(inspected(Job(entry.name, entry.target, "sm_90a", settings)))
    tried = [facts for call in calls for facts in call.launches if not facts.pruned]
    assert tried
    assert [call.problem for call in calls if call.problem] == []
    op = own.definition.name
    assert [str(found) for call in calls for found in call.findings(hopper) if found.kind in _BAD] == []
    assert any(facts.products for facts in tried) == (op.startswith(PRODUCTS) and op not in NONE)
