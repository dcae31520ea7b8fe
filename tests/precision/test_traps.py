"""Each trap is found and named where it is planted, and the model without it does not raise it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.precision import advise, audit, reliability
from assay.precision.advice import Finding
from assay.precision.advice.routers import experts_of
from assay.precision.auditing import Audit
from assay.precision.loading import load
from tests.precision import traps

LINEARS = ("bf16", "fp16", "fp8", "fp8-tensor", "w8a8")


class Clean:
    """A bundled model with a few short sequences, and what is found in it as it is."""

    def __init__(self, name: str, sequences: int) -> None:
        loaded = load(name)
        self.model = loaded.model
        self.batches = loaded.batches(traps.HELD_OUT, sequence=48, sequences=sequences, batch=2)
        self.audit = audit(self.model, self.batches, formats=LINEARS)
        self.findings = advise(self.audit)

    def with_trap(
        self, trap: Callable[..., object], formats: Sequence[str] = LINEARS, **options: Any
    ) -> tuple[Audit, list[Finding]]:
        """The audit of the model with a trap that keeps its function, and what is found in it."""
        changed = traps.planted(self.model, trap, **options)
        assert traps.same_function(self.model, changed, self.batches)
        found = audit(changed, self.batches, formats=formats)
        return found, advise(found)


@pytest.fixture(scope="module")
def llama() -> Clean:
    return Clean("stdlib-llama", 6)


@pytest.fixture(scope="module")
def mixtral() -> Clean:
    return Clean("stdlib-mixtral", 8)


def kinds(findings: Sequence[Finding], site: str = "") -> set[str]:
    return {finding.kind for finding in findings if finding.site.startswith(site)}


def one(findings: Sequence[Finding], kind: str, site: str) -> Finding:
    """The only finding of a kind at a site."""
    found = [finding for finding in findings if finding.kind == kind and finding.site == site]
    assert len(found) == 1, [str(finding) for finding in findings]
    return found[0]


def test_clean_llama_raises_no_trap(llama: Clean) -> None:
    assert kinds(llama.findings) <= {"granularity", "scales", "bits"}


def test_outlier_channel(llama: Clean) -> None:
    """A channel that a norm makes 256 times larger is named, and balancing the channels repairs 8-bit integers."""
    found, findings = llama.with_trap(traps.outlier_channel, (*LINEARS, "w8a8-smooth"), layer=1, channel=17)
    finding = one(findings, "outlier_channel", "model.layers.1.self_attn.q_proj")
    assert finding.numbers["channels"] == [17]
    assert finding.numbers["ratio"] > 100
    assert finding.numbers["error_with_better"] < finding.numbers["error"] / 10
    linears = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    for site in linears:
        assert found.contribution(site, "w8a8") > 10 * llama.audit.contribution(site, "w8a8")
    smooth = audit(found.model, llama.batches, formats=("w8a8", "w8a8-smooth"))
    errors = [smooth.measure(dict.fromkeys(linears, scheme)) for scheme in ("w8a8", "w8a8-smooth")]
    assert errors[0] > 100 * errors[1]


def test_overflow(llama: Clean) -> None:
    """A hidden unit beyond 65504 is found as an overflow of fp16, and no error is predicted for it."""
    found, findings = llama.with_trap(traps.scaled_units, layer=2, units=[5], factor=2.0**20)
    site = "model.layers.2.mlp.down_proj"
    finding = one(findings, "overflow", site)
    assert finding.numbers["scheme"] == "fp16"
    assert finding.numbers["largest"] > finding.numbers["limit"] == 65504
    assert findings[0].kind == "overflow"
    (reason,) = reliability(found, {site: "fp16"})
    assert "infinities" in reason
    assert not torch.tensor(found.measure({site: "fp16"})).isfinite()


def test_underflow(llama: Clean) -> None:
    """Units whose values are below the smallest e4m3, once others have set the scale, are found as flushed to zero."""
    _, findings = llama.with_trap(
        traps.scaled_units, ("fp8", "fp8-tensor", "mxfp8"), layer=0, units=list(range(100)), factor=2.0**-20
    )
    site = "model.layers.0.mlp.down_proj"
    found = {finding.numbers["tensor"]: finding for finding in findings if finding.kind == "underflow"}
    assert {finding.site for finding in found.values()} == {site}
    assert found["input"].numbers["share"] > 0.2
    assert found["input"].numbers["range_bits"] > found["input"].numbers["span_bits"] > 17
    assert found["weight"].numbers["better"] == "mxfp8"


def test_huge_row(llama: Clean) -> None:
    """A row of a weight that is 4096 times larger is named."""
    _, findings = llama.with_trap(traps.scaled_units, ("w8a8", "fp8-tensor", "fp8"), layer=1, units=[9], factor=2.0**12)
    finding = one(findings, "outlier_row", "model.layers.1.mlp.up_proj")
    assert finding.numbers["rows"] == [9]
    assert finding.numbers["ratio"] > 1000


def test_outlier_keys(llama: Clean) -> None:
    """Two channels of a cache's keys that are 128 times larger are named."""
    _, findings = llama.with_trap(traps.key_channel, ("kv-fp8", "kv-int8"), layer=2, head=1, channel=20)
    finding = one(findings, "outlier_channel", "model.layers.2.self_attn:kv_cache")
    assert sorted(finding.numbers["channels"]) == [20, 52]


def test_massive_token(llama: Clean) -> None:
    """A token that starts every sequence with a residual far above all others is named with its position."""
    batches = traps.begun(llama.batches)
    clean = audit(llama.model, batches, formats=LINEARS)
    assert "massive_token" not in kinds(advise(clean))
    changed = traps.planted(llama.model, traps.massive_token)
    finding = one(advise(audit(changed, batches, formats=LINEARS)), "massive_token", "model.layers.0:residual")
    assert finding.numbers["position"] == 0
    assert finding.numbers["sequences"] == 6
    assert finding.numbers["ratio"] > 100


def test_tied_weight(llama: Clean) -> None:
    """A table that is the head's weight is noted, one that only equals it is not."""
    own = traps.planted(llama.model, traps.own_table)
    shared = traps.planted(own, traps.tied_table)
    assert traps.same_function(own, shared, llama.batches)
    assert "tied" not in kinds(advise(audit(own, llama.batches, formats=("fp8", "w8a16"))))
    findings = advise(audit(shared, llama.batches, formats=("fp8", "w8a16")))
    assert one(findings, "tied", "lm_head").numbers["owner"] == "model.embed_tokens"
    assert one(findings, "bits", "lm_head").numbers["scheme"] == "fp8"


def test_dead_layer(llama: Clean) -> None:
    """A layer that adds nothing is found, all of its linears, and nothing else."""
    _, findings = llama.with_trap(traps.dead_layer, after=1)
    dead = {finding.site: finding.numbers["zero"] for finding in findings if finding.kind == "dead"}
    assert {site.rpartition(".")[0] for site in dead} == {"model.layers.2.self_attn", "model.layers.2.mlp"}
    assert len(dead) == 7
    assert {site.rpartition(".")[2] for site, zero in dead.items() if zero} == {"o_proj", "down_proj"}


def test_idle_expert(mixtral: Clean) -> None:
    """An expert that no token reaches is named, and an assignment of its layer is to be measured."""
    number, layer = next(
        (n, each.name) for n, each in enumerate(experts_of(mixtral.audit.observed)) if min(each.loads) > 16
    )
    assert not kinds(mixtral.findings, layer) & {"unseen_expert"}
    found, findings = mixtral.with_trap(traps.idle_expert, layer=number, batches=mixtral.batches)
    finding = one(findings, "unseen_expert", layer)
    assert (finding.numbers["expert"], finding.numbers["tokens"]) == (8, 0)
    found.calibrate(8)
    assert any("expert 8" in reason for reason in reliability(found, {f"{layer}.down_proj": "fp8"}))


def test_router_near_ties(mixtral: Clean) -> None:
    """A router whose margins drown in what its rows have in common is named, and one of the model as it is is not."""
    assert "router_ties" not in kinds(mixtral.findings)
    _, findings = mixtral.with_trap(traps.common_router, layer=1)
    finding = one(findings, "router_ties", "model.layers.1.mlp.gate")
    assert finding.numbers["top"] == 2
    assert finding.numbers["flips"]["bf16"] > 0.02
    assert kinds(findings) - kinds(mixtral.findings) <= {"router_ties", "outlier_row", "granularity", "scales", "bits"}


def test_many_large_channels_are_no_outliers(values: list[Tensor]) -> None:
    torch.manual_seed(0)
    raised = []
    for count in (1, 4):
        batches = [value.clone() for value in values]
        for batch in batches:
            batch[:, :count] *= 100
        raised.append("outlier_channel" in kinds(advise(audit(Plain(), batches, "relative", formats=("w8a8",)))))
    assert raised == [True, False]


class Plain(torch.nn.Module):
    """Two linears with an unused norm of a quotient between them."""

    def __init__(self, quotient: bool = False) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)
        self.second = torch.nn.Linear(32, 8)
        self.quotient = quotient

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if self.quotient:
            self.norm(x / hidden)
        return self.second(hidden)


@pytest.fixture
def values() -> list[Tensor]:
    return list(torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0)))


def test_nonfinite_values(values: list[Tensor]) -> None:
    """Infinities that do not reach the output are found where they arise."""
    torch.manual_seed(0)
    assert "nonfinite" not in kinds(advise(audit(Plain(), values, "relative", formats=("fp8",))))
    torch.manual_seed(0)
    findings = advise(audit(Plain(quotient=True), values, "relative", formats=("fp8",)))
    assert findings[0].kind == "nonfinite"
    assert findings[0].site == "norm:input"


def test_static_scale_of_one_batch(values: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = Plain()
    lone = [values[0] * 16, *values[1:]]
    finding = one(advise(audit(model, lone, "relative", formats=("fp8-tensor",))), "static_scale", "first")
    assert 8 < finding.numbers["ratio"] < 32
    assert "static_scale" not in kinds(advise(audit(model, lone, "relative", formats=("fp8",))))
    assert "static_scale" not in kinds(advise(audit(model, values, "relative", formats=("fp8-tensor",))))
