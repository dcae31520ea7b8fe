"""Products with a table of embeddings that no module stands for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.precision import audit
from assay.precision.auditing import Audit
from assay.precision.export.plan import plan_of
from tests.precision.small_models import FORMATS

_IDS = [torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


class _Head(nn.Module):
    """A head that is the table, by a module or by a function."""

    def __init__(self, product: Callable[[Any, Tensor], Tensor], *, module: bool = False) -> None:
        super().__init__()
        self.table, self.inner, self.norm = nn.Embedding(64, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.product = product
        if module:
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.product(self, self.norm(self.inner(self.table(ids))))


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
    model, other = _Head(product), _Head(lambda m, x: m.head(x), module=True)
    other.load_state_dict({**model.state_dict(), "head.weight": model.table.weight})
    found, expected = (audit(each.eval(), _IDS, "kl", [*FORMATS, "w8a8"], target="h200") for each in (model, other))
    called = {str(site): site for site in found.all_sites}
    assert (called["table:head"].type, called["table:head"].tied) == ("linear", "table")
    assert [name.replace("table:head", "head") for name in called] == list(map(str, expected.all_sites))
    assert found.menu("table") == expected.menu("table")
    assert found.cost({"table": "w8a8"}) == expected.cost({"table": "w8a8"})
    assert found.measure({"table": "w8a8"}) == pytest.approx(expected.measure({"table": "w8a8"}), rel=1e-4)
    assert found.predict({"table": "w8a8"}).error == pytest.approx(expected.predict({"table": "w8a8"}).error, rel=1e-3)


class _Codebook(nn.Module):
    """Multiplies with a table before it looks rows up, if it does."""

    def __init__(self, *, looks_up: bool) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(16, 8), nn.Embedding(32, 8), nn.Linear(8, 8)
        self.back = nn.Linear(32, 8)
        self.looks_up = looks_up

    def forward(self, x: Tensor) -> Tensor:
        near = self.first(x) @ self.table.weight.T
        rows = self.table(near.argmax(-1)) if self.looks_up else 0.0
        return self.last(self.back(near) + rows)


def _audited(*, looks_up: bool) -> Audit:
    torch.manual_seed(0)
    return audit(_Codebook(looks_up=looks_up).eval(), [torch.randn(6, 5, 16)], "relative", FORMATS)


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
