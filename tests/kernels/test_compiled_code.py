"""What a GPU's compiler makes of the bundled Triton kernels: no spills, tensor cores, nothing turned round."""

import pytest

pytest.importorskip("triton")

from triton.runtime.autotuner import Autotuner

from assay.bench.inspection.arch import arch_named
from assay.bench.inspection.calls import Request
from assay.bench.inspection.inspecting import Job, inspected
from assay.verify.campaign.table import Entry, entries
from assay.verify.settings import Settings

OURS = [entry for entry in entries() if entry.group == "assay" and entry.devices != ("cpu",)]
PRODUCTS = ("gemm", "attention", "mla", "moe", "linear")  # that names begin with
NONE = ("moe_route", "moe_route_backward")
WIDE = ("gemm", "attention", "moe", "quantize")  # all of whose loads of a thread's many bytes are wide
_BAD = {"not compiled", "no room", "none fits", "spills", "local memory", "tf32", "transposed", "no tensor cores"}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.evidence)], ids=["first", "every"])
@pytest.mark.parametrize("entry", OURS, ids=[entry.name for entry in OURS])
def test_a_bundled_kernel_is_compiled_to_good_code(entry: Entry, every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For Hopper, in its first dtype and the first of its options: the first configuration that its tuner would try
    (all of them as evidence) fits, keeps all in registers, turns no operand round in them, multiplies on tensor cores
    where the op has products, and where those are dense loads no tile by a few bytes at a time."""
    tried_by_tuner = Autotuner.prune_configs
    if not every:
        monkeypatch.setattr(Autotuner, "prune_configs", lambda tuner, given: tried_by_tuner(tuner, given)[:1])
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
    bad = _BAD | {"scalar loads"} if op.startswith(WIDE) else _BAD
    assert [str(found) for call in calls for found in call.findings(hopper) if found.kind in bad] == []
    assert any(facts.products for facts in tried) == (op.startswith(PRODUCTS) and op not in NONE)


@pytest.mark.parametrize("width", [*(pytest.param(width, marks=pytest.mark.evidence) for width in (64, 128)), 256])
def test_attention_of_float32_keeps_all_in_registers(width: int) -> None:
    """Forward and backward, whose products run on no tensor cores: no configuration that a tuner would try spills."""
    (entry,) = [entry for entry in OURS if entry.name == "assay.attention_backward"]
    first = {name: values[:1] for name, values in entry.settings.options.items()}
    settings = Settings(entry.settings.spec, dtype="float32", options=first, shapes=entry.settings.shapes)
    asked = Request(({"D": width, "Dv": width, "Sq": 512, "Sk": 512},))
    (call,) = inspected(Job(entry.name, entry.target, "sm_90a", settings, asked))
    assert {facts.kernel for facts in call.launches} == {
        *("_attention_kernel", "_attention_dq_kernel", "_attention_dkdv_kernel"),
    }
    assert [(facts.name, facts.spilled) for facts in call.launches if facts.spilled or facts.error] == []
