"""Recurrent layers: sites with torch's own outputs, predicted as they are measured, traps found in their inputs."""

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from assay.precision import Audit, audit
from assay.precision.export import quantization_config
from assay.precision.observation.sites import Observer
from tests.precision import opened
from tests.precision.opened import drawn
from tests.precision.recurrent_models import (
    Recurrent,
    assert_stored_weights_give_torchs_error,
    next_symbol,
    sentences,
    trained,
)
from tests.precision.small_models import Made
from tests.precision.traps import new_findings, planted

FORMATS = ("bf16", "w8a16", "fp8", "w8a8", "w8a8-smooth", "w4a16-g32", "w-nvfp4", "nvfp4", "mxfp8")
LAYERS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}
CELLS = (torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell)


observed = partial(opened.observed, rtol=1e-5, atol=1e-6)


def weights_of(observer: Observer) -> list[str]:
    return [str(site) for site in observer.sites.values() if site.shape]


@pytest.fixture(scope="module", params=["lstm", "gru"])
def case(request: pytest.FixtureRequest) -> Audit:
    model = trained(
        lambda: Recurrent(LAYERS[request.param], num_layers=2), [sentences(16, s) for s in range(6)], next_symbol
    )
    batches, check = ([sentences(16, seed)[:, :-1] for seed in range(first, first + 3)] for first in (10, 20))
    found = audit(model, batches, "kl", FORMATS, check=check)
    found.calibrate(24)
    return found


@pytest.mark.parametrize("kind", LAYERS)
def test_every_form_of_a_recurrent_layer_gives_what_torch_gives(kind: str) -> None:
    """Of one or two layers, one or both directions, with and without biases, batch first or not, one sequence alone,
    a given state, a projection: the same numbers within rounding, and every matrix is a site."""
    forms = itertools.product((1, 2), (False, True), (False, True), (False, True), (0, 3) if kind == "lstm" else (0,))
    for layers, both, first, bias, projected in forms:
        more = {"proj_size": projected} if projected else {}
        options = {"bidirectional": both, "batch_first": first, "bias": bias, **more}
        model = LAYERS[kind](4, 8, layers, **options).eval()
        matrices = [name for name, values in model.named_parameters() if values.dim() > 1]
        assert weights_of(observed(model, drawn(2, 5, 4))) == matrices
        states = [drawn(layers * (1 + both), 3, size) for size in ((projected or 8, 8) if kind == "lstm" else (8,))]
        x = drawn(*((3, 5) if first else (5, 3)), 4)
        assert weights_of(observed(model, x, tuple(states) if kind == "lstm" else states[0])) == matrices
        observed(model, drawn(5, 4))


def test_a_rectified_recurrence_is_torchs() -> None:
    assert weights_of(observed(torch.nn.RNN(4, 8, nonlinearity="relu"), drawn(5, 2, 4)))


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_cells_give_what_torch_gives(kind: Any, bias: bool) -> None:
    assert weights_of(observed(kind(4, 8, bias=bias), drawn(5, 4))) == ["weight_ih", "weight_hh"]


@pytest.mark.parametrize("kind", LAYERS)
def test_an_exported_layer_has_the_sites_of_the_module(kind: str) -> None:
    model = torch.nn.Sequential(LAYERS[kind](4, 8, batch_first=True)).eval()
    with pytest.warns(UserWarning, match="_flat_weights"):
        program = torch.export.export(model, (drawn(2, 5, 4),)).module(check_guards=False)
    assert weights_of(observed(program, drawn(2, 5, 4))) == ["0.weight_ih_l0", "0.weight_hh_l0"]


def test_weights_within_one_storage_are_told_apart() -> None:
    model = torch.nn.LSTM(4, 8, 2)
    whole = torch.cat([values.detach().flatten() for values in model.parameters()])
    start = 0
    for values in model.parameters():
        values.data = whole[start : start + values.numel()].view_as(values)
        start += values.numel()
    shapes = {str(site): site.shape for site in observed(model, drawn(5, 2, 4)).sites.values() if site.shape}
    assert shapes == {name: tuple(values.shape) for name, values in model.named_parameters() if values.dim() > 1}


def test_a_packed_sequence_runs_as_it_is_and_is_told() -> None:

    def packed(m: Any, x: Tensor) -> Tensor:
        lengths = [5 - index % 3 for index in range(len(x))]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return m.head(pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0])

    model = Made(packed, rnn=torch.nn.LSTM(8, 16, batch_first=True), head=torch.nn.Linear(16, 4))
    told = str(audit(model, [drawn(6, 5, 8)], "relative", ["bf16"]).observed.unaudited)
    assert "rnn.weight_hh_l0" in told
    assert "packed sequences of LSTM" in told


def test_outputs_with_stored_weights_are_torchs_own(case: Audit) -> None:
    assert_stored_weights_give_torchs_error(case, *(str(site) for site in case.sites if site.role == "recurrence"))


def test_inputs_and_state_are_stored_at_every_step() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.LSTM(6, 8, batch_first=True), drawn(4, 7, 6)

    def rounded(values: Tensor) -> Tensor:
        return values.bfloat16().float()

    w_ih, w_hh, b_ih, b_hh = (values.detach() for values in model.parameters())
    h, c, outputs = torch.zeros(4, 8), torch.zeros(4, 8), []
    for step in range(7):
        h, c = torch.lstm_cell(rounded(x[:, step]), (rounded(h), c), rounded(w_ih), rounded(w_hh), b_ih, b_hh)
        outputs.append(h)
    found = audit(model, [x], "relative", ["bf16"])
    expected = model(x)[0].detach()
    change = float((torch.stack(outputs, 1) - expected).norm() / expected.norm())
    assert float(found.trial({"weight_ih_l0": "bf16", "weight_hh_l0": "bf16"})) == pytest.approx(change, rel=0.02)


def test_what_is_measured_lies_within_what_is_predicted(case: Audit) -> None:
    draw = random.Random(1)
    drawn_ones = [case.random_assignment(draw, (1.0, 0.3, 0.1)[turn % 3]) for turn in range(30)]
    predictions = [(case.predict(each), case.measure(each)) for each in drawn_ones]
    inside = [told.low <= measured <= told.high for told, measured in predictions if told.error > 0]
    assert sum(inside) >= 0.9 * len(inside), predictions


def test_each_scheme_alone_is_predicted_within_a_factor_of_two(case: Audit) -> None:
    for site in case.sites:
        for scheme in case.menu(site) if site.role == "recurrence" else ():
            ratio = float(case.trial({str(site): scheme})) / case.predictor.site_error(str(site), scheme)
            assert 1 / 2 < ratio < 2, (site, scheme, ratio)


def test_nothing_of_such_a_model_is_left_out(case: Audit) -> None:
    assert str(case.observed.unaudited) == ""
    recipe = quantization_config({"rnn.weight_hh_l0": "w8a16"}, {str(site): site for site in case.sites})
    assert not recipe.held
    assert "no serving stack loads a quantised recurrent layer" in recipe.notes[0]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_an_outlier_channel_before_a_recurrence_is_found(kind: str) -> None:
    model = trained(lambda: Recurrent(LAYERS[kind]), [sentences(16, seed) for seed in range(3)], next_symbol)

    def trap(model: Any) -> None:
        model.embedding.weight[:, 5] *= 2.0**8
        model.rnn.weight_ih_l0[:, 5] /= 2.0**8

    batches = [sentences(16, seed)[:, :-1] for seed in (10, 11)]
    changed = planted(model, trap)
    torch.testing.assert_close(changed(batches[0]), model(batches[0]), rtol=1e-4, atol=1e-4)
    clean, found, new = new_findings(model, changed, batches, "kl", FORMATS)
    new = [each for each in new if each.kind == "outlier_channel"]
    assert [each.site for each in new] == ["rnn.weight_ih_l0"]
    assert new[0].numbers["channels"] == [5]
    assert "w8a8-smooth" in new[0].remedy
    assert found.contribution("rnn.weight_ih_l0", "w8a8") > 10 * clean.contribution("rnn.weight_ih_l0", "w8a8")
