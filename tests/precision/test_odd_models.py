"""Odd models: what an audit makes of them, and the line in which it refuses the rest."""

from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from assay.precision import audit
from assay.precision.auditing import Audit
from assay.precision.cache import fingerprint
from assay.precision.errors import BadModel, NoData, WrongShape
from assay.precision.observation.observing import _sources
from assay.precision.observation.running import batch_size, call, normalised
from assay.precision.observation.sites import Site, Statistics
from tests.precision.small_models import FORMATS, Between, Made

_IDS = [torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


class _Tokens(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


class TransformerPreNorm(_Tokens):
    """A whole model whose name ends as a norm's."""


def _audited(model: nn.Module, batches: Any = None, metric: str = "relative", **options: Any) -> Audit:
    torch.manual_seed(0)
    batches = [torch.randn(6, 5, 16) for _ in range(2)] if batches is None else batches
    return audit(model.eval(), batches, metric, FORMATS, **options)


def _linears(found: Audit) -> set[str]:
    """The names of the linears, whose errors are predicted and measured."""
    names = {str(site) for site in found.sites if site.shape and not site.tied}
    assignment = dict.fromkeys(names, "w8a16")
    prediction, measured = found.predict(assignment), found.trial(assignment)
    assert prediction.low <= measured <= prediction.high
    return names


def _parameter(between: Callable[[Any, Tensor], Tensor], *shape: int) -> Between:
    model = Between(between)
    model.weight = nn.Parameter(torch.randn(shape) / 4)
    return model


def _nested(model: Any, x: Tensor, **layout: Any) -> Tensor:
    nested = torch.nested.as_nested_tensor([x[0], x[1, :3], *x[2:]], **layout)
    return torch.nested.to_padded_tensor(model.inner(model.norm(nested)), 0.0)


_PARTLY: dict[str, Callable[[], Between]] = {
    "by heads": lambda: Between(
        lambda m, x: torch.einsum("bthd,hdc->bthc", x.unflatten(-1, (4, 4)), m.inner.weight.view(4, 4, 4)).flatten(2),
        inner=nn.Linear(4, 16),
    ),
    "by heads in bmm": lambda: Between(
        lambda m, x: (
            (x.unflatten(-1, (4, 4)).transpose(1, 2) @ m.inner.weight.view(4, 4, 4)).transpose(1, 2).flatten(2)
        ),
        inner=nn.Linear(4, 16),
    ),
    "ensemble": lambda: _parameter(
        lambda m, x: torch.vmap(lambda w: functional.linear(x, w))(m.weight).mean(0), 3, 16, 16
    ),
    "mapped": lambda: Between(lambda m, x: torch.vmap(m.inner)(x), inner=nn.Linear(16, 16)),
    "derived": lambda: Between(lambda m, x: torch.func.jvp(m.inner, (x,), (x,))[1], inner=nn.Linear(16, 16)),
    "nested": lambda: Between(_nested, inner=nn.Linear(16, 16), norm=nn.LayerNorm(16)),
    "jagged": lambda: Between(
        lambda m, x: _nested(m, x, layout=torch.jagged), inner=nn.Linear(16, 16), norm=nn.LayerNorm(16)
    ),
    "scripted": lambda: Between(lambda m, x: m.inner(x), inner=torch.jit.script(nn.Sequential(nn.Linear(16, 16)))),
    "recorded": lambda: Between(
        lambda m, x: m.inner(x), inner=torch.jit.trace(nn.Linear(16, 16), torch.ones(2, 16), check_trace=False)
    ),
}


@pytest.mark.parametrize("name", _PARTLY)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_seen_into_runs_as_it_is_and_is_told(name: str) -> None:
    found = _audited(_PARTLY[name]())
    assert _linears(found) == {"first", "last"}
    (shut,) = found.observed.unaudited.shut
    assert shut.name in ("inner.weight", "inner.0.weight", "weight")
    assert ("TorchScript" in shut.why) == (name in ("scripted", "recorded"))


def test_matrices_of_a_parameter_are_experts_all_the_same() -> None:
    model = _parameter(
        lambda m, x: torch.einsum("bthd,hdc->bthc", x.unflatten(-1, (4, 4)), m.weight).flatten(2), 4, 4, 4
    )
    assert _linears(_audited(model)) == {"first", "weight", "last"}


class _Graph(nn.Module):
    """A graph convolution, its adjacency an argument and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 8)
        self.register_buffer("own", torch.eye(12).to_sparse())

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.own @ self.last(adjacency @ self.first(x).relu())


def test_sparse_tensors_are_no_weights() -> None:
    batches = [(torch.randn(12, 16), torch.eye(12).to_sparse()) for _ in range(2)]
    assert _linears(_audited(_Graph(), batches)) == {"first", "last"}
    others = [(x, adjacency * 2) for x, adjacency in batches]
    assert fingerprint(_Graph(), batches[:1]) != fingerprint(_Graph(), others[:1])


def test_a_head_right_behind_its_table_is_audited() -> None:
    found = _audited(_Tokens(tied=True), _IDS, "kl")
    assert _linears(found) == {"table"}
    assert found.observed.sources == {}


def test_sources_never_lead_back() -> None:
    sites = [
        Site("table", "embedding", "embedding"),
        Site("0:residual", "activation", "residual", source="table"),
        Site("norm:input", "activation", "input", source="0:residual"),
        Site("head", "linear", "linear", source="0:residual", tied="table"),
    ]
    found = _sources({str(site): site for site in sites}, {"head": "table"})
    assert found == {"0:residual": "table", "norm:input": "0:residual"}


def test_a_model_whose_name_ends_as_a_norm_takes_tokens() -> None:
    found = _audited(TransformerPreNorm(), _IDS, "kl")
    assert _linears(found) == {"table", "head"}


class _Masked(Between):
    """Takes a mask, and leaves it to whoever compares."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(x)


def _batch(mask: Tensor) -> dict[str, Tensor]:
    return {"x": torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(0)), "attention_mask": mask}


def test_a_batch_of_padding_alone_adds_nothing() -> None:
    tokens, padding = _batch(torch.ones(6, 5)), _batch(torch.zeros(6, 5))
    found, expected = (_audited(_Masked(lambda m, x: x.relu()), some) for some in ([tokens, padding], [tokens]))
    assert _linears(found) == {"first", "last"}
    for key, seen in expected.observed.statistics.items():
        assert found.observed.statistics[key].valid_rows == seen.valid_rows
        assert torch.equal(found.observed.statistics[key].largest, seen.largest)
    with pytest.raises(NoData, match=r"none but padding .* above 0 at tokens"):
        _audited(_Masked(lambda m, x: x.relu()), [_batch(torch.zeros(6, 5))])


def test_statistics_of_no_rows_are_empty() -> None:
    seen = Statistics()
    seen.add(torch.randn(2, 3, 4), sequences=2, kept=torch.zeros(6, dtype=torch.bool))
    assert (seen.count, seen.valid_rows, seen.rows, seen.largest) == (6, 0, [], None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_audited_as_plain_ones(reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    model = Between(lambda m, x: checkpoint(m.inner, x, use_reentrant=reentrant), inner=inner)
    found = _audited(model)
    assert _linears(found) == {"first", "inner.0", "inner.2", "last"}
    model.between = lambda m, x: m.inner(x)
    plain, everything = _audited(model), dict.fromkeys(map(str, found.sites), "bf16")
    assert found.predict(everything) == plain.predict(everything)
    x = torch.randn(2, 16, requires_grad=True)
    checkpoint(inner, x, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None, "checkpoints are left as they were"


_Pair = namedtuple("_Pair", "x y")


@dataclass(frozen=True)
class _Inputs:
    x: Tensor
    rest: list[Tensor]


class _Given(Between):
    """Takes what holds two tensors."""

    def __init__(self, of: Callable[[Any], list[Tensor]]) -> None:
        super().__init__(lambda m, x: x.relu())
        self.of = of

    def forward(self, given: Any) -> Tensor:
        return super().forward(torch.cat(self.of(given), 1))


def _held() -> list[tuple[Callable[[Any], list[Tensor]], Any]]:
    x, y = torch.randn(6, 2, 16), torch.randn(6, 3, 16, dtype=torch.float64)
    return [
        (lambda given: [*given, given.pop()], {"given": [x, y]}),
        (lambda given: [given.x, given.y], {"given": _Pair(x, y)}),
        (lambda given: [given.x, *given.rest], {"given": _Inputs(x, [y])}),
        (lambda given: [given.x, *given.rest], _Inputs(x, [y])),
        (lambda given: [given["x"], given["y"][0]], ({"x": x, "y": (y,)},)),
    ]


@pytest.mark.parametrize("case", range(5))
def test_batches_keep_their_kind_however_deep(case: int) -> None:
    of, batch = _held()[case]
    assert _linears(_audited(_Given(of), [batch])) == {"first", "last"}
    assert batch_size(batch) == 6
    model = _Given(of)
    (given,) = normalised([batch], model)
    assert type(given) is type(batch)
    assert torch.equal(call(model, given), call(model, given))


def test_what_is_kept_is_kept_by_every_value_of_a_batch() -> None:
    x, other = torch.zeros(2, 2000), torch.zeros(2, 2000)
    other[0, 1000] = 1.0
    model = nn.Linear(2, 2)
    assert fingerprint(model, [{"xs": [x]}]) == fingerprint(model, [{"xs": [x.clone()]}])
    assert fingerprint(model, [{"xs": [x]}]) != fingerprint(model, [{"xs": [other]}])


class _Energy(nn.Module):
    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.first, self.last, self.backward = nn.Linear(16, 16), nn.Linear(16, 1), backward

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_(True)
            energy = self.last(self.first(x).tanh()).sum()
            if not self.backward:
                return torch.autograd.grad(energy, x)[0]
            energy.backward()
        assert x.grad is not None
        return x.grad


def _weight_normed() -> nn.Module:
    return Between(lambda m, x: m.inner(x), inner=nn.utils.weight_norm(nn.Linear(16, 16))).bfloat16()


_REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: Between(lambda m, x: m.inner(x), inner=nn.LazyLinear(16)), "inner.weight .*run the model once"),
    "scripted": (lambda: torch.jit.script(nn.Linear(16, 8)), "TorchScript"),
    "recorded": (lambda: torch.jit.trace(nn.Linear(16, 8), torch.ones(2, 16)), "TorchScript"),
    "weight norm": (_weight_normed, r"copied .*parametrizations\.weight_norm"),
    "cast": (lambda: Between(lambda m, x: x.to(torch.bfloat16)).bfloat16(), "float32.*BFloat16.*cast to that of"),
    "forces": (lambda: _Energy(backward=False), "gradients in it, as forces"),
    "backward": (lambda: _Energy(backward=True), "gradients in it, as forces"),
}


@pytest.mark.parametrize("name", _REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_audited_is_refused_in_a_line(name: str) -> None:
    build, expected = _REFUSED[name]
    with pytest.raises(BadModel, match=expected) as caught:
        _audited(build())
    assert str(caught.value).startswith("expected ")
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_what_the_refusals_advise_is_audited() -> None:
    normed = Between(lambda m, x: m.inner(x), inner=nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))).bfloat16()
    lazy = Between(lambda m, x: m.inner(x), inner=nn.LazyLinear(16))
    lazy(torch.ones(2, 16))
    cast = Between(lambda m, x: x.to(m.last.weight.dtype)).bfloat16()
    assert _linears(_audited(normed)) >= {"first", "last"}
    assert _linears(_audited(lazy)) == {"first", "inner", "last"}
    assert _linears(_audited(cast)) == {"first", "last"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Shared:
    """What blocks leave for those after them, elsewhere than in what they return."""

    values: Tensor


class Layer(torch.nn.Module):
    def __init__(self, shared: Shared, first: bool) -> None:
        super().__init__()
        self.shared, self.first = shared, first
        self.v, self.o = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.shared.values = self.v(x)
        return x + self.o(torch.tanh(x * self.shared.values))


class Sharing(torch.nn.Module):
    """Four layers, of which the first makes what all multiply with, as where layers share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        shared = Shared()
        self.layers = torch.nn.ModuleList(Layer(shared, number == 0) for number in range(4))
        self.head = torch.nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_blocks_that_share_a_state_are_measured_as_the_model_is() -> None:
    torch.manual_seed(0)
    model = Sharing().eval()
    found = audit(model, [normal(4, 8, 32, seed=seed) for seed in range(2)], "relative", FORMATS)
    assert found.choice_evaluator.chain is None
    one, other = {"layers.3.o": "bf16"}, {"layers.0.v": "w4a16-g32"}
    found.choice_evaluator.measure_all([one, other])
    alone = audit(model, [normal(4, 8, 32, seed=seed) for seed in range(2)], "relative", FORMATS)
    assert float(found.trial(one)) == pytest.approx(float(alone.trial(one)), rel=1e-6)


def test_a_parameter_of_all_layers_is_told_as_unaudited() -> None:

    def stacked(m: Any, x: Tensor) -> Tensor:
        for layer in m.w:
            x = x + torch.einsum("btd,dhk->bthk", x, layer).flatten(-2).tanh()
        return m.head(x)

    model = Made(stacked, w=torch.nn.Parameter(0.2 * normal(3, 32, 4, 8)), head=torch.nn.Linear(32, 16))
    found = audit(model, [normal(4, 8, 32)], "relative", FORMATS)
    assert [str(site) for site in found.sites] == ["head"]
    assert "w (3,072" in str(found.observed.unaudited)


@pytest.mark.parametrize("columns", [32, 16])
def test_a_weight_that_is_multiplied_from_both_sides_is_refused(columns: int) -> None:
    linear, w = torch.nn.functional.linear, torch.nn.Parameter(normal(columns, 32))
    model = Made(lambda m, x: linear(linear(x, m.w).tanh(), m.w.t()), w=w)
    with pytest.raises(BadModel, match="expected products with w from one side, got some with its transpose too"):
        audit(model, [normal(4, 8, 32)], "relative", FORMATS)


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 5, 6, 7)])
def test_outputs_that_are_no_distributions_have_no_divergence(shape: tuple[int, ...]) -> None:
    proj = torch.nn.Linear(32, torch.Size(shape[1:]).numel())
    model = Made(lambda m, x: m.proj(x).reshape(shape), proj=proj)
    with pytest.raises(WrongShape, match=r"expected logits .* take metric='relative' or a loss of your own"):
        audit(model, [normal(8, 32)], "kl", FORMATS)
    assert audit(model, [normal(8, 32)], "relative", FORMATS).trial({"proj": "w4a16-g32"}) > 0


class Mixed(torch.nn.Module):
    """A table in float32, a linear in bfloat16, a buffer that is a weight, a complex parameter that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 32).bfloat16()
        self.register_buffer("features", normal(48, 32))
        self.shift = torch.nn.Parameter(normal(1, 32))
        self.turn = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.shift * self.turn.real.mean()
        return torch.nn.functional.linear(x + self.inner(x.to(self.inner.weight.dtype)).float(), self.features)


def test_bytes_are_those_of_each_tensor() -> None:
    model = Mixed().eval()
    tensors = [*model.parameters(), *model.buffers()]
    found = audit(model, [torch.arange(32).view(4, 8)], "relative", FORMATS)
    assert found.cost({}).bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert found.cost({"table": "bf16"}).bytes == found.cost({}).bytes - 2 * 64 * 32
    assert found.cost({"inner": "bf16"}).bytes == found.cost({}).bytes


def test_a_batch_of_more_than_the_model_takes_is_refused() -> None:
    x, labels = normal(8, 32), torch.arange(8)
    with pytest.raises(BadModel, match=r"got more \(.*'labels'\): what a loss of your own needs from a batch, forward"):
        audit(torch.nn.Linear(32, 16), [{"input": x, "labels": labels}], lambda out, batch: out.sum(1), FORMATS)


def test_products_within_autocast_are_audited() -> None:

    def within(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.inner(x)
        return m.head(y.float())

    torch.manual_seed(0)
    model = Made(within, inner=torch.nn.Linear(32, 32), head=torch.nn.Linear(32, 16))
    found = audit(model, [normal(16, 8, 32)], "relative", FORMATS)
    assert 0.5 < found.contribution("inner", "w4a16-g32") / found.trial({"inner": "w4a16-g32"}) < 2


def test_a_gradient_that_is_nan_at_padding_closes_no_site() -> None:

    def normed(m: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = m.table(input_ids)
        return m.head(x / torch.sqrt(x.pow(2).sum(-1, keepdim=True)).clamp(min=1e-6))

    torch.manual_seed(0)
    model = Made(normed, table=torch.nn.Embedding(64, 32, padding_idx=0), head=torch.nn.Linear(32, 64))
    mask = torch.ones(8, 8, dtype=torch.long)
    mask[:4, 5:] = 0
    batches: list[Mapping[str, Any]] = [
        {"input_ids": (torch.arange(64).view(8, 8) * step % 63 + 1) * mask, "attention_mask": mask} for step in (1, 5)
    ]
    found = audit(model.eval(), batches, "kl", FORMATS)
    for scheme in ("w8a16", "w4a16-g32"):
        assert 0.5 < found.contribution("table", scheme) / found.trial({"table": scheme}) < 2
