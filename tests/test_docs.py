"""What the docs say of the code is what the code says."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize("name", ["interface.md", "judge.md", "kernels.md", "ops.md"])
def test_the_interface_is_described_as_it_is(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert runpy.run_path(str(DOCS / "generate.py"))["written"](page) == page


def test_a_stale_page_is_written_anew() -> None:
    page = (DOCS / "interface.md").read_text(encoding="utf-8")
    stale = page.replace("`batch_invariant`", "`batch_variant`")
    assert stale != page
    assert runpy.run_path(str(DOCS / "generate.py"))["written"](stale) == page
