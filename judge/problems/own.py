"""The reference as a solution of its own problem, with which solutions are compared in speed."""

from __future__ import annotations

from assay.judge.problems.problem import Answer, Entry, Problem

_ENTRIES = {
    "KernelBench": Entry("Model", "class"),
    "FlashInfer Trace": Entry("run", "function", "arguments"),
    "reference.py": Entry("ref_kernel", "function", "data"),
    "robust-kbench": Entry("forward_fn", "function", "arguments"),
}


def own_answer(problem: Problem) -> Answer:
    """Return the reference as a solution, with the files that it may import."""
    files = {**problem.companions, "solution.py": problem.source}
    return Answer("reference", files, "solution.py", _ENTRIES[problem.format])
