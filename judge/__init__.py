"""Judging solutions of `assay.judge.problems`: in a process of their own, by numbers, sizes, conduct and speed.

In: a problem's and a solution's path. Out: a `SolutionVerdict`. Called by users (`assay.verify.judge`), and by
`assay judge`.
"""
