"""What an audit keeps in its folder, and when the next one takes it from there."""

from pathlib import Path

import pytest
import torch

from assay.precision.auditing import audit
from assay.precision.cache import Cache, fingerprint
from tests.precision.small_models import FORMATS, made


def test_a_second_audit_computes_nothing_again(tmp_path: Path) -> None:
    model, batches = made()
    digest = fingerprint(model, batches, "relative", FORMATS)
    first = audit(model, batches, "relative", FORMATS, cache=Cache(tmp_path, digest))
    first.calibrate(12)
    whole, model.calls = model.calls, 0
    kept = Cache(tmp_path, digest)
    second = audit(model, batches, "relative", FORMATS, cache=kept)
    second.calibrate(12)
    distinct = len({tuple(sorted(assignment.items())) for assignment, _ in first.measured})
    # Beside a pass as it is, in which the blocks are found, they take three of one batch to be checked; predicting
    # calls the model for what comes before the blocks and for what comes after them.
    assert (whole, model.calls) == (2 * (3 + distinct) + 4, 3)
    assert kept.reused == distinct
    assert second.predict({"head": "fp8"}) == first.predict({"head": "fp8"})


def test_what_is_kept_of_another_audit_is_left_alone(tmp_path: Path) -> None:
    model, batches = made()
    digest = fingerprint(model, batches, "relative")
    first = audit(model, batches, "relative", FORMATS, cache=Cache(tmp_path, digest))
    first.measure({"head": "fp8"})
    menus = {str(site): first.menu(site) for site in first.sites}
    assert Cache(tmp_path, digest).products(menus) is not None
    assert Cache(tmp_path, digest).sequences({"head": "fp8"}, "choice") is not None
    assert fingerprint(model, batches[:1], "relative") != digest
    assert fingerprint(model, batches, "kl") != digest
    with torch.no_grad():
        model.head.weight[0, 0] += 1
    assert fingerprint(model, batches, "relative") != digest
    for other in (Cache(tmp_path, "f" * 64), Cache(tmp_path, digest, fresh=True)):
        assert other.products(menus) is None
        assert other.sequences({"head": "fp8"}, "choice") is None
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert Cache(tmp_path, digest).products(menus) is None
    assert Cache(tmp_path, digest).sequences({"head": "fp8"}, "choice") is None


def test_products_of_other_formats_are_computed_anew(tmp_path: Path) -> None:
    model, batches = made()
    site = "layers.0.proj"
    for formats in (FORMATS[:1], FORMATS):
        found = audit(model, batches, "relative", formats, cache=Cache(tmp_path, "the same"))
    assert all(found.contribution(site, scheme) > 0 for scheme in found.menu(site))


def test_what_was_measured_before_a_stop_is_kept(tmp_path: Path) -> None:
    model, batches = made()
    found = audit(model, batches, "relative", FORMATS, cache=Cache(tmp_path, "one"))
    found.choice_evaluator.chain = None  # as of a model that is no chain of blocks
    scheme = found.menu("layers.0.proj")[0]
    asked, done = [{site: scheme} for site in ("layers.0.proj", "layers.1.proj", "head")], iter(range(1))
    with pytest.raises(StopIteration):
        found.choice_evaluator.measure_all(asked, lambda: next(done))
    kept = Cache(tmp_path, "one", fresh=False)
    assert [kept.sequences(each, "choice") is not None for each in asked] == [True, True, False]
