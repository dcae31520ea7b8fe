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
from tests.precision.small_models import FORMATS, Made

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
