"""What is measured to calibrate predictions, and models whose predictions are hard."""

import math
from collections.abc import Callable
from itertools import count as counting
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from assay.precision import advise, audit
from assay.precision.auditing import Audit
from assay.precision.errors import BadAssignment, BadModel
from tests.precision.small_models import Between, Made, made


def steep() -> Audit:
    """Of two linears; one sequence has activations so large that its distributions flip under small changes."""
    torch.manual_seed(0)
    x, one, two = torch.randn(16, 8, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 16)
    x[3] *= 200
    model = Made(lambda m, x: m.two(m.one(x).tanh() * x.abs().amax((1, 2), keepdim=True)), one=one, two=two)
    return audit(model, [x], "kl", ["w8a8", "w8a16", "w4a16-g32"])


def test_what_few_sequences_decide_is_in_the_interval() -> None:
    found = steep()
    found.calibrate(12)
    for site in ("one", "two"):
        prediction, measured = found.predict({site: "w4a16-g32"}), found.measure({site: "w4a16-g32"})
        assert prediction.low <= measured <= prediction.high


def test_an_error_that_one_sequence_makes_is_told_as_uncertain() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 32)), torch.randn(16, 8, 32)
    noise = []
    for factor in (1.0, 200.0):
        x[3] *= factor
        predictor = audit(model, [x.clone()], "relative", ["w8a16"]).predictor
        noise.append(4 * predictor.calibration_point({"0": "w8a16"}, 0.0).noise)
    assert noise == [pytest.approx(1 / 64, rel=0.2), pytest.approx(1 / 4, rel=0.3)]


def test_a_correction_is_given_to_the_part_that_was_measured() -> None:
    found = steep()
    predictor = found.predictor
    for scheme in ("w8a16", "w8a8"):
        predictor = predictor.corrected({"one": scheme}, found.measure({"one": scheme}))
    for scheme in ("w8a16", "w8a8"):
        assert predictor.site_error("one", scheme) == pytest.approx(found.measure({"one": scheme}), rel=0.1)


def test_what_breaks_when_it_is_measured_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = steep()
    before = found.trial
    monkeypatch.setattr(found, "trial", lambda chosen: math.nan if chosen.get("one") == "w4a16-g32" else before(chosen))
    found.calibrate(12)
    assert found.predict({"two": "w8a8"}).high == math.inf
    assert found.recommend(max_bytes=0.5 * found.cost({}).bytes).get("one", "") != "w4a16-g32"


def test_what_is_measured_is_as_many_as_were_asked_for() -> None:
    found, whole = steep(), steep()
    found.calibrate(6)
    assert len(found.measured) == 6
    found.calibrate(6)
    assert len(found.measured) == 6
    found.calibrate(14)
    whole.calibrate(14)
    assert len(found.measured) == len(whole.measured) == 14
    front = [dict(one) for *_, one in whole.pareto(4)]
    assert any(assignment in front for assignment, _ in whole.measured)


def in_place(*, first: bool) -> Made:
    """A residual stream that is added to in place, with norms before or after."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.clone() if first else m.norm(x)
        x += m.fc(m.norm(x) if first else x)
        return m.head(x)

    return Made(run, norm=torch.nn.LayerNorm(16), fc=torch.nn.Linear(16, 16), head=torch.nn.Linear(16, 8))


def test_what_is_predicted_to_break_the_model_is_not_measured_to_calibrate() -> None:
    model, batches = made()
    with torch.no_grad():
        model.layers[0].proj.weight *= 1e6
    found = audit(model, batches, "relative", ["fp16", "bf16", "fp8", "w8a8"])
    assert any(math.isinf(found.contribution(site, "fp16")) for site in found.sites if "fp16" in found.menu(site))
    found.calibrate(20)
    assert all(math.isfinite(pair.predicted) for _, pair in found.measured)


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(inplace=True), torch.nn.Linear(16, 8)),
        lambda: in_place(first=True),
        lambda: in_place(first=False),
    ],
)
def test_a_model_that_writes_over_its_values_is_audited(build: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    found = audit(build(), [torch.randn(16, 6, 16) for _ in range(2)], "relative", ["fp8", "a-fp8"])
    for site in map(str, found.sites):
        (scheme,) = found.menu(site)
        assert found.contribution(site, scheme) == pytest.approx(found.measure({site: scheme}), rel=0.4), site


def test_divergences_are_never_negative() -> None:
    found = steep()
    logits = torch.randn(4, 3, 16)
    for place in range(50):
        other = logits * (1 + 2e-7 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(place)))
        assert found.metric.compare(logits, other, {}).min() >= 0


def rounded() -> Between:
    return Between(lambda m, x: (x * 8).round() / 8)


def test_what_no_gradient_leads_back_to_is_no_site() -> None:
    torch.manual_seed(0)
    found = audit(rounded(), [torch.randn(16, 4, 16)], "relative", ["w8a16", "w4a8-g128", "fp8"])
    assert [str(site) for site in found.sites] == ["last"]
    assert [str(site) for site in found.sites_without_gradient] == ["first"]
    with pytest.raises(BadAssignment, match="no gradient leads back"):
        found.predict({"first": "fp8"})
    assert set(found.recommend(max_bytes=0.9 * found.cost({}).bytes)) == {"last"}
    (told,) = [finding for finding in advise(found) if finding.kind == "no_gradient"]
    assert told.numbers["sites"] == ["first"]
    assert "comes back to it is zero" in told.words
    detached = Between(lambda m, x: x.detach().requires_grad_())
    (told,) = [
        finding
        for finding in advise(audit(detached, [torch.randn(16, 4, 16)], "relative", ["w8a16", "fp8"]))
        if finding.kind == "no_gradient"
    ]
    assert "no gradient comes" in told.words


@pytest.mark.parametrize("formats", [None, ["nvfp4", "fp32"], ["fp32", "nvfp4"]])
def test_a_cut_site_is_found_by_a_scheme_that_changes_it(formats: list[str] | None) -> None:
    torch.manual_seed(0)
    found = audit(rounded(), [torch.randn(16, 4, 16)], "relative", formats)
    assert [str(site) for site in found.sites_without_gradient if site.type == "linear"] == ["first"]


class SkippedOnce(torch.nn.Module):
    """Two blocks, of which the first doesn't run where what comes before it is larger than it was."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(16, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in "ab")
        self.head, self.bar = torch.nn.Linear(16, 4), None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.bar is None:
            self.bar = float(x.detach().mean())
        for place, layer in enumerate(self.layers):
            if place or float(x.detach().mean()) <= self.bar:
                x = layer(x)
        return self.head(x)


def test_a_model_that_skips_its_first_block_in_some_formats_is_run_as_a_whole() -> None:
    torch.manual_seed(0)
    found = audit(SkippedOnce(), [torch.randn(8, 4, 16)], "relative", ["fp32", "bf16", "w4a16-g32", "nvfp4"])
    for scheme in found.menu("embed"):
        assert float(found.measure({"embed": scheme})) >= 0


def test_a_model_that_is_no_function_of_its_input_is_refused() -> None:
    calls = counting(1)
    with pytest.raises(BadModel, match="same outputs at every call"):
        audit(Between(lambda m, x: x * next(calls)), [torch.randn(4, 3, 16)], "relative", ["fp8"])
    x = torch.randn(4, 3, 8)
    before = x.clone()
    writes = torch.nn.Sequential(torch.nn.CELU(inplace=True), torch.nn.Linear(8, 8))
    assert audit(writes, [x], "relative", ["fp8"]).measure({}) == 0
    assert torch.equal(x, before)


def test_outputs_without_gradient_are_refused() -> None:
    model = torch.nn.Linear(8, 8)
    model.forward = torch.no_grad()(model.forward)  # type: ignore[method-assign]
    with pytest.raises(BadModel, match="gradients lead back"):
        audit(model, [torch.randn(4, 3, 8)], "relative", ["fp8"])


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda x: x.argmax(-1), "floating point"),
        (lambda x: x > 0, "floating point"),
        (lambda x: x.to(torch.complex64), "floating point"),
        (torch.sum, "floating point"),
        (lambda x: x.chunk(2, -1)[0].mul_(x.chunk(2, -1)[1]), "gradients lead back"),
    ],
)
def test_outputs_that_no_error_is_taken_of_are_refused(end: Callable[..., Tensor], words: str) -> None:
    ending = torch.nn.Linear(8, 8)
    plain = ending.forward
    ending.forward = lambda x: end(plain(x))  # type: ignore[method-assign]
    with pytest.raises(BadModel, match=words) as found:
        audit(ending, [torch.randn(4, 3, 8)], "relative", ["fp8"])
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("kind", ["gptj", "gemma2", "mpnet"])
def test_eager_attention_stays_what_it_is(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}
    more = {"num_hidden_layers": 1, "intermediate_size": 48}
    models: dict[str, Callable[[], torch.nn.Module]] = {
        "gptj": lambda: transformers.GPTJForCausalLM(
            transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=8)
        ),
        "gemma2": lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**sizes, **more, num_key_value_heads=1, head_dim=16, attn_implementation="eager")
        ),
        "mpnet": lambda: transformers.MPNetModel(transformers.MPNetConfig(**sizes, **more)),
    }
    model = models[kind]().eval()
    ids = torch.randint(0, 64, (8, 10))
    found = audit(model, [{"input_ids": ids}], "relative" if kind == "mpnet" else "kl", ["bf16", "a-fp8"])
    own = model(ids)[0]
    (reference,) = found.observed.references or ()
    torch.testing.assert_close(reference, own.detach(), rtol=1e-4, atol=1e-5)
    assert any(site.endswith(":scores") for site in found.sites)
