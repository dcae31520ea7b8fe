"""The reference as a solution of its own problem: what others are timed against."""

from __future__ import annotations

from assay.judge.problems.problem import Answer, Entry, Problem

_ENTRIES = {
    "KernelBench": Entry("Model", "class"),
    "FlashInfer Trace": Entry("run", "function", "arguments"),
    "reference.py": Entry("ref_kernel", "function", "data"),
    "robust-kbench": Entry("forward_fn", "function", "arguments"),
}


def own_answer(problem: Problem) -> Answer:
    """The reference's text, with the files that it may import, called as a solution is."""
    files = {**problem.companions, "solution.py": problem.source}
    return Answer("reference", files, "solution.py", _ENTRIES[problem.format])
