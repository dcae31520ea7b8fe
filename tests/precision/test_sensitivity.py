"""Products of one backward pass: against the model's own derivative, and whose sequence they are of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.precision.auditing import audit
from assay.precision.metrics import metric_named
from assay.precision.observation.qparams import QParams
from assay.precision.prediction.perturbations import perturbations_of
from assay.precision.prediction.row_sampling import RowSampler
from assay.precision.prediction.sensitivity import Sensitivity
from assay.precision.schemes import SCHEMES
from tests.precision.opened import Opened, drawn
from tests.precision.small_models import Made
from tests.precision.test_grouped import MODELS as GROUPED
from tests.precision.test_operations import Picture
from tests.precision.tiny_models import MODELS


def ids(sequences: int, length: int = 12) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 256, (sequences, length), generator=torch.Generator().manual_seed(1))}


def encoder() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


CASES: dict[str, tuple[Callable[[], torch.nn.Module], Any, tuple[tuple[str, str], ...]]] = {
    "llama": (
        MODELS["llama"],
        ids(3),
        (
            ("model.layers.0.self_attn.k_proj", "bf16"),
            ("model.layers.1.mlp.down_proj", "bf16"),
            ("model.layers.0.self_attn:kv_cache", "bf16"),
            ("model.layers.0.self_attn:scores", "bf16"),
            ("model.layers.0.self_attn:probabilities", "bf16"),
            ("model.layers.0:residual", "bf16"),
            ("model.norm:input", "bf16"),
            ("model.embed_tokens", "bf16"),
            ("lm_head", "w8a8"),
            ("lm_head:logits", "bf16"),
        ),
    ),
    "gpt2": (MODELS["gpt2"], ids(3), (("transformer.h.0.attn.c_attn", "bf16"), ("transformer.wte", "w8a16"))),
    "bert": (
        MODELS["bert"],
        ids(3),
        (("embeddings.position_embeddings", "bf16"), ("encoder.layer.0.output.dense", "bf16")),
    ),
    "multi-head": (
        encoder,
        drawn(3, 8, 32, seed=2),
        (("layers.0.self_attn.in_proj_weight", "bf16"), ("layers.0.self_attn:v", "bf16")),
    ),
    "convolutions": (
        Picture,
        drawn(3, 3, 8, 8),
        (("down", "bf16"), ("down", "w8a16"), ("up", "bf16"), ("up", "w8a16")),
    ),
    **{name: (build, drawn(3, 3, 8, 8), ((site, "bf16"), (site, "w8a16"))) for name, (build, site) in GROUPED.items()},
    "through time": (
        lambda: torch.nn.LSTM(8, 12, batch_first=True, bidirectional=True, proj_size=8),
        drawn(3, 6, 8),
        (
            ("weight_ih_l0", "bf16"),
            *((f"weight_{name}", "w8a16") for name in ("ih_l0", "hh_l0", "hh_l0_reverse", "hr_l0")),
        ),
    ),
}


@pytest.mark.parametrize(("case", "site", "scheme"), [(c, s, q) for c, (_, _, some) in CASES.items() for s, q in some])
def test_products_are_the_models_own_derivative(case: str, site: str, scheme: str) -> None:
    torch.manual_seed(0)
    build, batch, _ = CASES[case]
    opened = Opened(build(), batch, 3)
    cotangent = drawn(*opened.reference.shape, seed=3)
    change = cotangent.double() * (opened.simulated({site: scheme}) - opened.reference).double()
    expected, size = change.flatten(1).sum(1), change.flatten(1).abs().sum(1)
    terms, parts = opened.terms(cotangent), perturbations_of(SCHEMES[scheme])
    found = torch.stack([terms[site, part].sums for part in parts if (site, part) in terms]).sum(0).double()
    assert bool(((found - expected).abs() <= 0.02 * expected.abs() + 0.01 * size).all()), (found, expected, size)
    assert float(expected.abs().max()) > 0


def test_routed_tokens_are_given_to_their_sequences() -> None:
    torch.manual_seed(0)
    model = MODELS["mixtral"]()
    model.config._experts_implementation = "eager"
    batch = ids(4)
    together = Opened(model, batch, 4)
    cotangent = drawn(*together.reference.shape, seed=3)
    terms = together.terms(cotangent)
    for sequence in range(4):
        alone = Opened(model, {"input_ids": batch["input_ids"][sequence : sequence + 1]}, 1)
        alone.fits = together.fits
        for (site, part), term in alone.terms(cotangent[sequence : sequence + 1]).items():
            if "experts" in site and part[0] == "weight":
                torch.testing.assert_close(term.sums[0], terms[site, part].sums[sequence], rtol=1e-3, atol=1e-6)
    assert any("experts" in site for site, _ in terms)


def test_calls_by_keyword_are_seen_too() -> None:

    def named(m: Any, ids: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(input=ids, weight=m.table.weight)
        x = torch.nn.functional.linear(input=x, weight=m.proj.weight, bias=m.proj.bias)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(query=x, key=x, value=x)[:, 0]

    torch.manual_seed(0)
    model = Made(named, table=torch.nn.Embedding(16, 8), proj=torch.nn.Linear(8, 8))
    batch = torch.randint(0, 16, (2, 5))
    found = Opened(model, batch, 2)
    assert {"table", "proj", ":scores"} <= set(found.sites)
    torch.testing.assert_close(found.reference, model(batch).detach())


def eager() -> Made:
    """Attention by hand: rows of one weight for q, k and v, and a softmax of scores that are masked already."""

    def attention(m: Any, x: Tensor) -> Tensor:
        q, k, v = (torch.nn.functional.linear(x, part) for part in m.weight.split(8))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return m.out(torch.softmax((q @ k.mT).masked_fill(hidden, -torch.inf), -1) @ v)

    torch.manual_seed(0)
    return Made(attention, out=torch.nn.Linear(8, 8), weight=torch.nn.Parameter(torch.randn(24, 8) / 3))


def test_a_mask_before_a_softmax_makes_no_infinity() -> None:
    model = Made(lambda m, x: m.attention(x), attention=eager())
    found = audit(model, [torch.randn(4, 6, 8)], "relative", ["bf16", "a-fp8"])
    for scheme in ("bf16", "a-fp8"):
        predicted, measured = (f({"attention:scores": scheme}) for f in (found.predictor.squares, found.measure))
        assert 0 < predicted < torch.inf
        assert 0 < measured < 1


def test_rows_of_a_weight_are_not_taken_for_the_whole() -> None:
    found = audit(eager(), [torch.randn(4, 6, 8)], "relative", ["bf16"])
    assert {str(site) for site in found.sites if site.type == "linear"} == {"out"}


def test_subsampled_values_keep_the_size_of_the_error() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8))
    x = drawn(16, 256, 256, seed=0)
    found = Opened(model, x, 16, ("w8a8",))
    cotangent = drawn(*found.reference.shape)
    term = found.terms(cotangent)["0", perturbations_of(SCHEMES["w8a8"])[1]]
    assert term.sampling > 1
    stored = found.fits.values("0", SCHEMES["w8a8"])
    assert stored is not None
    gx = (cotangent @ model[1].weight @ model[0].weight).detach()  # type: ignore[operator]
    exact = float((gx * (stored(x) - x)).sum(-1).square().sum())
    assert float(term.squares.sum()) == pytest.approx(exact, rel=0.3)  # of 256 rows: 9 % standard error


@pytest.mark.parametrize("seed", range(3))
def test_large_first_tokens_are_never_left_out(seed: int) -> None:
    x = drawn(16, 256, 256, seed=seed)
    x[:, 0] *= 300
    visitor = Sensitivity({}, QParams({}), {}, 16, RowSampler(seed=seed))
    subsample = visitor._subsample(x)
    assert subsample.index is not None
    assert subsample.root_weights is not None
    squares = x.square().sum(-1).flatten()
    assert float((squares[subsample.index] * subsample.root_weights.square()).sum()) == pytest.approx(
        float(squares.sum()), rel=0.01
    )
    assert len(subsample.index) < 2 * 16 * 256 / subsample.step


def test_errors_that_go_together_in_a_row_are_added_first() -> None:
    linear = torch.nn.Linear(64, 8, bias=False)
    x = drawn(4, 5, 64, seed=0)
    found = Opened(torch.nn.Sequential(linear), x, 4, ("w4a16-g32",))
    cotangent = drawn(*found.reference.shape)
    stored = found.fits.weight("0", SCHEMES["w4a16-g32"], linear.weight)
    assert stored is not None
    change = (stored(linear.weight) - linear.weight).detach()
    products = torch.einsum("btn,btk,nk->bn", cotangent, x, change)
    (term,) = found.terms(cotangent).values()
    torch.testing.assert_close(term.sums, products.sum(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(term.squares, products.square().sum(1), rtol=1e-4, atol=1e-6)


@given(rows=st.integers(1, 2000), count=st.integers(1, 12), cotangents=st.integers(1, 5))
@settings(deadline=None)
def test_batches_and_cotangents_take_turns_with_a_weights_rows(rows: int, count: int, cotangents: int) -> None:
    looked = torch.zeros(rows, dtype=torch.int64)
    weight = torch.empty(rows, 1)
    for index in range(count):
        for cotangent in range(cotangents):
            turns, mine = RowSampler(index, count, cotangents).parts(weight, cotangent, 128)
            for part in mine:
                assert isinstance(part.rows, slice)
                assert part.rows.start % 128 == 0
                looked[part.rows] += int(turns)
    assert bool((looked == count * cotangents).all())


def test_the_cotangents_of_kl_have_its_curvature() -> None:
    metric = metric_named("kl")
    logits = torch.randn(1, 2, 5, generator=torch.Generator().manual_seed(0)) * 2
    batch = {"attention_mask": torch.tensor([[1, 0]])}
    generator = torch.Generator().manual_seed(1)
    drawn = torch.cat([metric.cotangent(logits, batch, generator) for _ in range(20000)])
    p = logits[0, 0].softmax(-1)
    expected = torch.diag(p) - torch.outer(p, p)
    torch.testing.assert_close(drawn[:, 0].T @ drawn[:, 0] / len(drawn), expected, rtol=0, atol=0.01)
    assert not bool(drawn[:, 1].any())


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    found = audit(model, [ids(2)], formats=["bf16", "w8a8"])
    found.measure({"lm_head": "w8a8"})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config.to_dict() == config


def test_sites_have_names_roles_and_units() -> None:
    torch.manual_seed(0)
    found = {str(site): site for site in audit(MODELS["mixtral"](), [ids(2)], formats=["bf16"]).sites}
    attention = "model.layers.0.self_attn"
    assert {found[f"{attention}.{name}_proj"].unit for name in "qkv"} == {f"{attention}.qkv"}
    assert found["model.layers.0.mlp.gate"].role == "router"
    assert found["model.layers.0.mlp.gate:logits"].role == found["lm_head:logits"].role == "logits"
    assert {found[f"model.layers.0.mlp.experts.{name}_proj"].role for name in ("gate_up", "down")} == {"experts"}
    assert found["model.layers.0.mlp.experts.down_proj"].shape == (4, 32, 48)
    assert found[f"{attention}:kv_cache"].type == "kv_cache"
    tied = {str(s): s for s in audit(MODELS["gpt2"](), [ids(2)], formats=["bf16"]).sites}
    assert tied["lm_head"].tied == "transformer.wte"
