"""Execution: one case through a kernel, with everything watched that it may touch.

In: a `Case`. Out: the kernel's outputs, or a finding (crash, time-out, write out of bounds, changed input, ...), in
this process or in an isolated one. Called by `examination`, `explanation`, `fingerprint` and repro lines.
"""
