"""Tensors that several sites share: roundings that repeat, factors and scales, tables that are heads."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.precision import audit
from assay.precision.auditing import Audit
from assay.precision.export.plan import plan_of
from assay.precision.prediction.perturbations import is_repeated
from assay.precision.schemes import SCHEMES
from tests.precision.small_models import FORMATS, Made
from tests.precision.tiny_models import MODELS

WHOLE = "bf16 tf32 fp8 a-fp8 a-int8 w8a8 fp8-tensor w4a16-g32-awq w8a8-smooth w-nvfp4"


def llama(**options: object) -> Audit:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (16, 24), generator=torch.Generator().manual_seed(1))
    return audit(MODELS["llama"](), [{"input_ids": ids}], **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def audited() -> Audit:
    return llama(formats=WHOLE.split())


def test_a_site_knows_whose_values_it_is_given(audited: Audit) -> None:
    source = {str(site): site.source for site in audited.sites}
    norm = "model.layers.0.input_layernorm:output"
    assert {source[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"} == {norm}
    assert source["model.layers.1.input_layernorm:input"] == "model.layers.0:residual"
    assert source["model.layers.0.self_attn:k"] == "model.layers.0.self_attn:kv_cache"
    assert source["lm_head"] == "model.norm:output"
    assert source["model.layers.0.self_attn:q"] == source["model.layers.0.mlp.down_proj"] == source[norm] == ""


@pytest.mark.parametrize(
    ("first", "then"),
    # The last is a quarter too low, since the second scale is smaller by half a step; twice if both counted.
    [
        pair.split()
        for pair in ("bf16 bf16", "bf16 tf32", "tf32 bf16", "a-fp8 fp8", "bf16 fp8", "a-fp8 bf16", "a-int8 w8a8")
    ],
)
def test_what_is_rounded_twice_is_counted_as_often_as_it_changes(audited: Audit, first: str, then: str) -> None:
    one, other = "model.norm:output", "lm_head"
    schemes = {one: SCHEMES[first], other: SCHEMES[then]}
    repeats = (first, then) in {("bf16", "bf16"), ("bf16", "tf32"), ("a-fp8", "fp8"), ("a-int8", "w8a8")}
    assert is_repeated(other, schemes, {other: one}) == repeats
    predicted, _ = audited.predictor.uncalibrated({one: first, other: then})
    assert predicted == pytest.approx(audited.measure({one: first, other: then}), rel=0.5)


def test_a_tensor_written_to_has_no_source() -> None:

    def in_place(m: Any, x: Tensor) -> Tensor:
        x = m.norm(x)
        y = m.one(x)
        x += 1
        return y + m.two(x)

    parts = {"norm": torch.nn.LayerNorm(32), "one": torch.nn.Linear(32, 32), "two": torch.nn.Linear(32, 32)}
    found = audit(Made(in_place, **parts), [torch.randn(4, 5, 32)], "relative", ["bf16"])
    source = {str(site): site.source for site in found.sites}
    assert (source["one"], source["two"]) == ("norm:output", "")


def test_factors_of_a_product_are_those_of_all_its_linears() -> None:
    for scheme in ("w4a16-g32-awq", "w8a8-smooth"):
        found = []
        for order in ("qkv", "vkq"):
            audited = llama(formats=[scheme])
            audited.fits._fitted.clear()
            names = [f"model.layers.0.self_attn.{name}_proj" for name in order]
            stored = [
                audited.fits.weight(name, SCHEMES[scheme], audited.observed.weights[name][None]) for name in names
            ]
            assert all(one is not None and torch.equal(one.columns, stored[0].columns) for one in stored)  # type: ignore[arg-type, union-attr]
            found.append(stored[0].columns)  # type: ignore[union-attr]
        assert torch.equal(*found)  # type: ignore[arg-type]


def test_a_tensors_scale_is_one_for_a_fused_product(audited: Audit) -> None:
    layer = "model.layers.0.self_attn"
    with torch.no_grad():
        audited.observed.weights[f"{layer}.v_proj"][None][0, 0] = 3.0
    audited.fits._fitted.clear()
    try:
        for scheme in ("fp8-tensor", "w-nvfp4"):
            stored = {
                name: audited.fits.weight(site, SCHEMES[scheme], audited.observed.weights[site][None])
                for name in "qkvo"
                if (site := f"{layer}.{name}_proj")
            }
            shared = {
                name: float((s.scales.scale.amax() if scheme == "fp8-tensor" else s.scales.divisor).reshape(()))  # type: ignore[union-attr]
                for name, s in stored.items()
            }
            assert shared["q"] == shared["k"] == shared["v"] != shared["o"]
    finally:
        audited.fits._fitted.clear()


def test_cross_attention_shares_factors_where_it_shares_inputs() -> None:

    def cross(m: Any, x: Tensor, memory: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(m.q_proj(x), m.k_proj(memory), m.v_proj(memory))

    torch.manual_seed(0)
    spread = torch.logspace(-2, 2, 32)
    model = Made(cross, **{f"{name}_proj": torch.nn.Linear(32, 32) for name in "qkv"})
    found = audit(model, [(torch.randn(4, 6, 32), torch.randn(4, 6, 32) * spread)], "relative", ["w4a16-g32-awq"])
    of = {
        name: found.fits.weight(name, SCHEMES["w4a16-g32-awq"], found.observed.weights[name][None]).columns  # type: ignore[union-attr]
        for name in ("q_proj", "k_proj", "v_proj")
    }
    assert torch.equal(of["k_proj"], of["v_proj"])  # type: ignore[arg-type]
    assert not torch.equal(of["q_proj"], of["k_proj"])  # type: ignore[arg-type]


class Gated(torch.nn.Module):
    """A mixture of two linears, its gate a plain linear; or a gated unit, whose gate isn't a router."""

    def __init__(self, *, routed: bool) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(16, 2 if routed else 16)
        if routed:
            self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        else:
            self.up = torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        if not hasattr(self, "experts"):
            return gate.sigmoid() * self.up(x)
        share = gate.softmax(-1)
        return sum(share[..., [place]] * expert(x) for place, expert in enumerate(self.experts))  # type: ignore[return-value, arg-type]


@pytest.mark.parametrize("routed", [True, False])
def test_a_gate_beside_experts_is_a_router(routed: bool) -> None:
    found = audit(Gated(routed=routed), [torch.randn(4, 5, 16)], "relative", ["bf16"])
    assert {str(site): site.role for site in found.sites}["gate"] == ("router" if routed else "linear")


def test_experts_are_counted_by_their_parameter() -> None:
    torch.manual_seed(0)
    model = MODELS["mixtral"]()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    found = audit(model, [{"input_ids": torch.randint(0, 256, (4, 12))}], formats=["w8a16"])
    experts = [site for site in found.sites if site.role == "experts"]
    assert experts
    assert all(site.shape[0] == 4 for site in experts)


def test_both_parts_of_a_sum_are_simulated() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("o_proj", torch.nn.Linear(128, 16, bias=False))
    x = torch.randn(64, 128)
    found = audit(model, [x], "relative", ["acc-fp16", "tp2-bf16"])
    exact, ranks = model(x).detach(), []
    for rank in (0, 64):
        first, second = (x[:, k : k + 32] @ model.o_proj.weight[:, k : k + 32].mT for k in (rank, rank + 32))
        ranks.append((first.half().float() + second).half().bfloat16().float())
    expected = ((ranks[0] + ranks[1]).detach().bfloat16().float() - exact).norm() / exact.norm()
    measured = found.measure({"o_proj:accumulator": "acc-fp16", "o_proj:all_reduce": "tp2-bf16"})
    assert measured == pytest.approx(float(expected), rel=1e-5)
    assert measured != pytest.approx(found.measure({"o_proj:all_reduce": "tp2-bf16"}), rel=1e-5)


def test_a_short_sum_is_rounded_too() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False)), torch.randn(4, 16)
    found = audit(model, [x], "relative", ["acc-fp16"])
    exact = model(x).detach()
    expected = float((exact.half().double() - exact.double()).norm() / exact.double().norm())
    assert found.measure({"0:accumulator": "acc-fp16"}) == pytest.approx(expected)


def test_the_noise_floor_doesn_t_depend_on_the_formats() -> None:
    assert llama(formats=["w4a16-g32"]).noise_floor == llama(formats=["bf16", "kv-fp8"]).noise_floor > 0


def test_random_assignments_with_repeated_roundings_are_predicted() -> None:
    audited = llama(formats=["bf16", "tf32", "fp16"])
    draw = random.Random(0)
    some = [audited.random_assignment(draw) for _ in range(12)]
    audited.measure_together(some)
    ratios = sorted(audited.predictor.uncalibrated(one)[0] / audited.measure(one) for one in some)
    assert 0.7 < ratios[6] < 1.4


def test_rows_of_a_table_that_are_stored_once_more_are_counted_once() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 16))
    found = audit(model, [torch.randint(0, 64, (16, 8))], "relative", ["bf16", "tf32", "w-nvfp4", "nvfp4"])
    assert {str(site): site.source for site in found.sites if site.type == "linear"} == {"1": "0"}
    for table, linear in (("bf16", "bf16"), ("bf16", "tf32"), ("w-nvfp4", "nvfp4")):
        both = {"0": table, "1": linear}
        assert is_repeated("1", {name: SCHEMES[scheme] for name, scheme in both.items()}, found.observed.sources)
        assert 2 / 3 < found.predictor.uncalibrated(both)[0] / found.trial(both) < 3 / 2
    assert not is_repeated("1", {"0": SCHEMES["tf32"], "1": SCHEMES["bf16"]}, found.observed.sources)


_IDS = [torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def _head(product: Callable[[Any, Tensor], Tensor], *, module: bool = False) -> Made:
    """A head that is the table, by a module or by a function."""
    parts = {"table": nn.Embedding(64, 32), "inner": nn.Linear(32, 32), "norm": nn.LayerNorm(32)}
    model: Any = Made(lambda m, ids: product(m, m.norm(m.inner(m.table(ids)))), **parts)
    if module:
        model.head = nn.Linear(32, 64, bias=False)
        model.head.weight = model.table.weight
    return model


@pytest.mark.parametrize(
    "product",
    [
        lambda m, x: functional.linear(x, m.table.weight),
        lambda m, x: x @ m.table.weight.T,
        lambda m, x: torch.einsum("btd,vd->btv", x, m.table.weight),
    ],
)
def test_a_head_that_is_tied_by_a_function_is_one_that_is_tied_by_a_module(product: Any) -> None:
    torch.manual_seed(0)
    model, other = _head(product), _head(lambda m, x: m.head(x), module=True)
    other.load_state_dict({**model.state_dict(), "head.weight": model.table.weight})
    found, expected = (audit(each.eval(), _IDS, "kl", [*FORMATS, "w8a8"], target="h200") for each in (model, other))
    called = {str(site): site for site in found.all_sites}
    assert (called["table:head"].type, called["table:head"].tied) == ("linear", "table")
    assert [name.replace("table:head", "head") for name in called] == list(map(str, expected.all_sites))
    assert found.menu("table") == expected.menu("table")
    assert found.cost({"table": "w8a8"}) == expected.cost({"table": "w8a8"})
    assert found.measure({"table": "w8a8"}) == pytest.approx(expected.measure({"table": "w8a8"}), rel=1e-4)
    assert found.predict({"table": "w8a8"}).error == pytest.approx(expected.predict({"table": "w8a8"}).error, rel=1e-3)


def _audited(*, looks_up: bool) -> Audit:
    """Of a codebook, which multiplies with a table before it looks rows up, if it does."""

    def run(m: Any, x: Tensor) -> Tensor:
        near = m.first(x) @ m.table.weight.T
        return m.last(m.back(near) + (m.table(near.argmax(-1)) if looks_up else 0.0))

    torch.manual_seed(0)
    parts = {"first": nn.Linear(16, 8), "table": nn.Embedding(32, 8), "last": nn.Linear(8, 8), "back": nn.Linear(32, 8)}
    return audit(Made(run, **parts).eval(), [torch.randn(6, 5, 16)], "relative", FORMATS)


def test_a_table_has_its_weight_whatever_comes_first() -> None:
    """A product with a table before it is looked up follows the table's scheme, one without a look-up is by itself;
    exports, which name modules, leave both out."""
    found = _audited(looks_up=True)
    sites = {str(site): site for site in found.all_sites}
    assert (sites["table"].tied, sites["table:head"].tied) == ("", "table")
    assert set(plan_of({"first": "w8a16"}, sites).left) == {"table", "back", "last"}
    found = _audited(looks_up=False)
    assert not found.observed.unaudited.shut
    sites = {str(site): site for site in found.all_sites}
    plan = plan_of({"table:head": "w8a16", "last": "w8a16"}, sites)
    assert (set(plan.linears), set(plan.left)) == ({"last"}, {"first", "back"})
