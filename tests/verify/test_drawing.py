"""Fuzzed cases depend on the seed alone, and drawing them leaves nothing in the user's folder."""

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from assay.golden import spec
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler
from assay.verify.examination.phases import fuzz


def fuzzed(seed: int) -> list[Case]:
    """The cases of one search whose ratios are all equal."""
    cases: list[Case] = []

    def attempt(case: Case) -> float:
        cases.append(case)
        return 0.5

    fuzz(Sampler(spec("softmax"), "bfloat16", seed=seed), 60, attempt)
    return cases


def test_cases_depend_on_the_seed_and_not_on_the_users_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of a module nearby are drawn by the user's own tests, and by no examination."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    set_hypothesis_home_dir(tmp_path / ".hypothesis")  # where it is if Hypothesis is first imported in that folder
    before = fuzzed(1)
    constants = [2**20 + 37 * number for number in range(200)]  # seeds of cases have 24 bits
    (tmp_path / "kernels_nearby.py").write_text(f"NUMBERS = {constants}\n")
    importlib.import_module("kernels_nearby")
    try:
        assert fuzzed(1) == before
        assert fuzzed(2) != before
        assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["kernels_nearby.py"]
        seen: set[int] = set()

        @settings(max_examples=400, database=None, derandomize=True)
        @given(st.integers(0, 2**24))
        def own(number: int) -> None:
            seen.add(number)

        own()
        assert seen & set(constants)
    finally:
        set_hypothesis_home_dir(None)
        del sys.modules["kernels_nearby"]
