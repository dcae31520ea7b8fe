"""Lengths and tables of pages: as they are named, and at the boundaries."""

import pytest

from assay.golden.inputs.distributions import LENGTHS

from .test_inputs import tensors_of

PAGED = {"B": 400, "H": 1, "D": 1, "P": 5, "page": 16, "Hkv": 1, "max_pages": 3}


def lengths(kind: str, **sizes: int) -> list[int]:
    """Those of 400 sequences."""
    drawn: list[int] = tensors_of("attention_decode", {**PAGED, **sizes}, {}, "seq_lens", kind).tolist()
    return drawn


def test_lengths_lie_at_the_boundaries_of_pages() -> None:
    """Mixed ones reach none, one, all, and one position before, at and behind the end of a page."""
    assert all(lengths("mixed").count(n) > 4 for n in (0, 1, 15, 16, 17, 31, 32, 33, 47, 48))
    assert len(set(lengths("mixed"))) > 40


def test_lengths_are_what_their_names_say() -> None:
    """Uniform ones are any, full ones all that the table has room for, short ones a page and one position at most."""
    assert set(lengths("uniform")) == set(range(49))
    assert set(lengths("full")) == {48}
    assert set(lengths("short")) == set(range(18))


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(("page", "most"), [(1, 1), (64, 1), (5, 7)])
def test_lengths_fit_the_table(kind: str, page: int, most: int) -> None:
    drawn = lengths(kind, page=page, max_pages=most)
    assert min(drawn) >= 0
    assert max(drawn) <= page * most


def test_pages_are_all_there_and_are_shared() -> None:
    table = tensors_of("attention_decode", PAGED, {}, "block_table", "uniform")
    assert table.unique().tolist() == [0, 1, 2, 3, 4]
    assert not bool((table.diff(dim=1) >= 0).all())
