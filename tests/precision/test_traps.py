"""Each trap is found and named where it is planted, and the model without it does not raise it."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from assay.precision import Audit, advise, audit, reliability
from assay.precision.advice import Finding
from assay.precision.advice.routers import experts_of
from tests.precision import traps
from tests.precision.small_models import Made
from tests.precision.traps import LINEARS


@cache
def without(name: str) -> list[Finding]:
    """What is found in a bundled model as it is."""
    return advise(traps.clean(name))


def with_trap(
    name: str, trap: Callable[..., object], formats: Sequence[str] = LINEARS, **options: Any
) -> tuple[Audit, list[Finding]]:
    """The audit of a bundled model with a trap that keeps its function, and what is found in it."""
    clean = traps.clean(name)
    changed = traps.planted(clean.model, trap, **options)
    assert traps.same_function(clean.model, changed, clean.batches)
    found = audit(changed, clean.batches, formats=formats)
    return found, advise(found)


def kinds(findings: Sequence[Finding], site: str = "") -> set[str]:
    return {finding.kind for finding in findings if finding.site.startswith(site)}


def one(findings: Sequence[Finding], kind: str, site: str) -> Finding:
    found = [finding for finding in findings if finding.kind == kind and finding.site == site]
    assert len(found) == 1, [str(finding) for finding in findings]
    return found[0]


def test_clean_llama_raises_no_trap() -> None:
    assert kinds(without("stdlib-llama")) <= {"granularity", "scales", "bits"}


def test_outlier_channel() -> None:
    """A channel that a norm makes 256 times larger is named, and balancing the channels repairs 8-bit integers."""
    found, findings = with_trap("stdlib-llama", traps.outlier_channel, ("w8a8", "w8a8-smooth"), layer=1, channel=17)
    finding = one(findings, "outlier_channel", "model.layers.1.self_attn.q_proj")
    assert finding.numbers["channels"] == [17]
    assert finding.numbers["ratio"] > 100
    assert finding.numbers["error_with_better"] < finding.numbers["error"] / 10
    linears = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    for site in linears:
        assert found.contribution(site, "w8a8") > 10 * traps.clean("stdlib-llama").contribution(site, "w8a8")
    errors = [found.measure(dict.fromkeys(linears, scheme)) for scheme in ("w8a8", "w8a8-smooth")]
    assert errors[0] > 100 * errors[1]


def test_overflow() -> None:
    """A hidden unit beyond 65504 is found as an overflow of fp16, and no error is predicted for it."""
    formats = ("fp16", "fp8")
    found, findings = with_trap("stdlib-llama", traps.scaled_units, formats, layer=2, units=[5], factor=2.0**20)
    site = "model.layers.2.mlp.down_proj"
    finding = one(findings, "overflow", site)
    assert finding.numbers["scheme"] == "fp16"
    assert finding.numbers["largest"] > finding.numbers["limit"] == 65504
    assert findings[0].kind == "overflow"
    (reason,) = reliability(found, {site: "fp16"})
    assert "infinities" in reason
    assert not torch.tensor(found.measure({site: "fp16"})).isfinite()


def test_underflow() -> None:
    """Units whose values are below the smallest e4m3, once others have set the scale, are found as flushed to zero."""
    _, findings = with_trap(
        "stdlib-llama",
        traps.scaled_units,
        ("fp8", "fp8-tensor", "mxfp8"),
        layer=0,
        units=list(range(100)),
        factor=2.0**-20,
    )
    site = "model.layers.0.mlp.down_proj"
    found = {finding.numbers["tensor"]: finding for finding in findings if finding.kind == "underflow"}
    assert {finding.site for finding in found.values()} == {site}
    assert found["input"].numbers["share"] > 0.2
    assert found["input"].numbers["range_bits"] > found["input"].numbers["span_bits"] > 17
    assert found["weight"].numbers["better"] == "mxfp8"


def test_huge_row() -> None:
    _, findings = with_trap(
        "stdlib-llama", traps.scaled_units, ("w8a8", "fp8-tensor", "fp8"), layer=1, units=[9], factor=2.0**12
    )
    finding = one(findings, "outlier_row", "model.layers.1.mlp.up_proj")
    assert finding.numbers["rows"] == [9]
    assert finding.numbers["ratio"] > 1000


def test_outlier_keys() -> None:
    """Two channels of a cache's keys that are 128 times larger are named."""
    _, findings = with_trap("stdlib-llama", traps.key_channel, ("kv-fp8", "kv-int8"), layer=2, head=1, channel=20)
    finding = one(findings, "outlier_channel", "model.layers.2.self_attn:kv_cache")
    assert sorted(finding.numbers["channels"]) == [20, 52]


def test_massive_token() -> None:
    model, begun = traps.clean("stdlib-llama").model, traps.begun(traps.clean("stdlib-llama").batches)
    _, _, findings = traps.new_findings(model, traps.planted(model, traps.massive_token), begun, "kl", ("bf16",))
    finding = one(findings, "massive_token", "model.layers.0:residual")
    assert (finding.numbers["position"], finding.numbers["sequences"]) == (0, 8)
    assert finding.numbers["ratio"] > 100


def test_tied_weight() -> None:
    own = traps.planted(traps.clean("stdlib-llama").model, traps.own_table)
    shared = traps.planted(own, traps.tied_table)
    assert traps.same_function(own, shared, traps.clean("stdlib-llama").batches)
    before, findings = (
        advise(audit(each, traps.clean("stdlib-llama").batches, formats=("fp8", "w8a16"))) for each in (own, shared)
    )
    assert "tied" not in kinds(before)
    assert one(findings, "tied", "lm_head").numbers["owner"] == "model.embed_tokens"
    assert one(findings, "bits", "lm_head").numbers["scheme"] == "fp8"


def test_dead_layer() -> None:
    _, findings = with_trap("stdlib-llama", traps.dead_layer, ("w8a8",), after=1)
    dead = {finding.site: finding.numbers["zero"] for finding in findings if finding.kind == "dead"}
    assert {site.rpartition(".")[0] for site in dead} == {"model.layers.2.self_attn", "model.layers.2.mlp"}
    assert len(dead) == 7
    assert {site.rpartition(".")[2] for site, zero in dead.items() if zero} == {"o_proj", "down_proj"}


def test_idle_expert() -> None:
    number, layer = next(
        (n, each.name)
        for n, each in enumerate(experts_of(traps.clean("stdlib-mixtral").observed))
        if min(each.loads) > 16
    )
    assert not kinds(without("stdlib-mixtral"), layer) & {"unseen_expert"}
    found, findings = with_trap(
        "stdlib-mixtral", traps.idle_expert, ("fp8",), layer=number, batches=traps.clean("stdlib-mixtral").batches
    )
    finding = one(findings, "unseen_expert", layer)
    assert (finding.numbers["expert"], finding.numbers["tokens"]) == (8, 0)
    found.calibrate(4)
    assert any("expert 8" in reason for reason in reliability(found, {f"{layer}.down_proj": "fp8"}))


def test_router_near_ties() -> None:
    assert "router_ties" not in kinds(without("stdlib-mixtral"))
    _, findings = with_trap("stdlib-mixtral", traps.common_router, ("bf16", "fp8"), layer=1)
    finding = one(findings, "router_ties", "model.layers.1.mlp.gate")
    assert finding.numbers["top"] == 2
    assert finding.numbers["flips"]["bf16"] > 0.02
    assert kinds(findings) - kinds(without("stdlib-mixtral")) <= {
        "router_ties",
        "outlier_row",
        "granularity",
        "scales",
        "bits",
    }


def test_many_large_channels_are_no_outliers(values: list[Tensor]) -> None:
    raised = []
    for count in (1, 4):
        batches = [value.clone() for value in values]
        for batch in batches:
            batch[:, :count] *= 100
        raised.append("outlier_channel" in kinds(advise(audit(plain(), batches, "relative", formats=("w8a8",)))))
    assert raised == [True, False]


def plain(quotient: bool = False) -> Made:
    """Two linears with an unused norm of a quotient between them."""

    def run(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x).relu()
        if quotient:
            m.norm(x / hidden)
        return m.second(hidden)

    torch.manual_seed(0)
    return Made(run, first=torch.nn.Linear(32, 32), norm=torch.nn.LayerNorm(32), second=torch.nn.Linear(32, 8))


@pytest.fixture
def values() -> list[Tensor]:
    return list(torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0)))


def test_nonfinite_values(values: list[Tensor]) -> None:
    assert "nonfinite" not in kinds(advise(audit(plain(), values, "relative", formats=("fp8",))))
    findings = advise(audit(plain(quotient=True), values, "relative", formats=("fp8",)))
    assert findings[0].kind == "nonfinite"
    assert findings[0].site == "norm:input"


def test_static_scale_of_one_batch(values: list[Tensor]) -> None:
    model = plain()
    lone = [values[0] * 16, *values[1:]]
    finding = one(advise(audit(model, lone, "relative", formats=("fp8-tensor",))), "static_scale", "first")
    assert 8 < finding.numbers["ratio"] < 32
    assert "static_scale" not in kinds(advise(audit(model, lone, "relative", formats=("fp8",))))
    assert "static_scale" not in kinds(advise(audit(model, values, "relative", formats=("fp8-tensor",))))


FORMATS = ("bf16", "fp16", "fp8", "w8a8")
SIZES: dict[str, Any] = {"vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 256, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def llama4() -> Any:
    """Its experts are two parameters [E, K, N], which torch.bmm multiplies all tokens with."""
    more = {"hidden_size": 128, "intermediate_size": 128, "intermediate_size_mlp": 128, "head_dim": 32}
    config = transformers.Llama4TextConfig(**SIZES, **more, num_key_value_heads=4, num_local_experts=4)
    return transformers.Llama4ForCausalLM(config)


def normed_channel(model: Any, channel: int, factor: float = 2.0**8) -> None:
    """A channel of the second layer's first norm is larger, and the weight [K, N] that reads it makes up for that."""
    block = model.transformer.h[1]
    block.ln_1.weight[channel] *= factor
    block.ln_1.bias[channel] *= factor
    block.attn.c_attn.weight[channel] /= factor


def value_channel(model: Any, channel: int, factor: float = 2.0**22) -> None:
    """A channel of the values is huge, and what reads attention's output makes up for that."""
    attention, width = model.transformer.h[0].attn, model.config.n_embd
    attention.c_attn.weight[:, 2 * width + channel] *= factor
    attention.c_attn.bias[2 * width + channel] *= factor
    attention.c_proj.weight[channel] /= factor


def experts_channel(model: Any, channel: int, factor: float = 2.0**8) -> None:
    """A channel of the norm before the experts is larger, and all that reads it makes up for that."""
    layer = model.model.layers[1]
    layer.post_attention_layernorm.weight[channel] *= factor
    feed = layer.feed_forward
    feed.experts.gate_up_proj[:, channel] /= factor
    for weight in (feed.router.weight, feed.shared_expert.gate_proj.weight, feed.shared_expert.up_proj.weight):
        weight[:, channel] /= factor


def expert_unit(model: Any, unit: int, factor: float = 2.0**26) -> None:
    """A hidden unit of every expert is huge, and the second parameter makes up for that."""
    experts = model.model.layers[0].feed_forward.experts
    hidden = experts.down_proj.shape[1]
    experts.gate_up_proj[:, :, hidden + unit] *= factor
    experts.down_proj[:, unit] /= factor


def found_with(build: Callable[[], Any], trap: Callable[..., None], **options: Any) -> tuple[Audit, list[Finding]]:
    """The audit of a model with a trap that keeps its function, and what is found in it but not without."""
    torch.manual_seed(0)
    model = build().eval()
    batches = [{"input_ids": torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(1))}]
    changed = traps.planted(model, trap, **options)
    assert traps.same_function(model, changed, batches)
    return traps.new_findings(model, changed, batches, "kl", FORMATS)[1:]


CHANNELS = {
    "GPT-2": (gpt2, normed_channel, "transformer.h.1.attn.c_attn"),
    "experts": (llama4, experts_channel, "model.layers.1.feed_forward.experts.gate_up_proj"),
}
UNITS = {
    "GPT-2": (gpt2, value_channel, {"channel": 9}, "transformer.h.0.attn.c_proj"),
    "experts": (llama4, expert_unit, {"unit": 9}, "model.layers.0.feed_forward.experts.down_proj"),
}


@pytest.mark.parametrize("case", CHANNELS)
def test_an_outlier_channel_is_found(case: str) -> None:
    build, trap, site = CHANNELS[case]
    found, findings = found_with(build, trap, channel=17)
    told = [finding for finding in findings if finding.kind == "outlier_channel"]
    assert told
    assert all(finding.numbers["channels"] == [17] and finding.numbers["ratio"] > 50 for finding in told)
    assert {finding.site.split(".")[2] for finding in told} == {"1"}
    assert found.contribution(site, "w8a8") > 3 * found.contribution(site, "fp8")


@pytest.mark.parametrize("case", UNITS)
def test_a_site_that_breaks_at_a_format_is_found(case: str) -> None:
    build, trap, options, site = UNITS[case]
    found, findings = found_with(build, trap, **options)
    told = [finding for finding in findings if finding.kind == "overflow" and finding.site == site]
    assert [finding.numbers["scheme"] for finding in told] == ["fp16"]
    assert not torch.tensor(float(found.measure({site: "fp16"}))).isfinite()
    assert torch.tensor(float(found.measure({site: "bf16"}))).isfinite()
