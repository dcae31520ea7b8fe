"""Runs of pytest inside of pytest."""

from __future__ import annotations

import importlib
from textwrap import dedent
from typing import Any

import pytest
import torch

from assay.interpreter import faithful
from assay.verify import examine

KERNELS = """
import pytest
import torch

def softmax(x):
    return torch.softmax(x, -1)

def doubled(x):
    return torch.softmax(x, -1) * 2
"""


@pytest.fixture(scope="session")
def everything_imported() -> None:
    """What a run inside of this process imports is forgotten after it; torch can't be imported twice."""
    importlib.import_module("torch._dynamo")  # which registers libraries of torch's, and can only once
    with faithful():
        examine(lambda x: torch.softmax(x, -1), "softmax", dtype="float32", effort="quick", examples=1).to_json()


@pytest.fixture
def run(everything_imported: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of pytest over a file of tests, in this process or in one of its own."""

    def run_tests(tests: str, *options: str, apart: bool = False) -> pytest.RunResult:
        worker = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
        for name in (*worker, "GITHUB_STEP_SUMMARY"):
            monkeypatch.delenv(name, raising=False)
        pytester.makepyfile(test_kernels=(KERNELS if "softmax" in tests else "") + dedent(tests))
        start = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        return start("-p", "no:cacheprovider", *options)

    return run_tests
