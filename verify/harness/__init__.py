"""Harness: calls a kernel on one case, and watches everything that the call may touch.

In: a `Case`. Out: the kernel's outputs, or a finding (crash, time-out, write out of bounds, changed input, ...), in
this process or in an isolated one. Called by `examination`, `explanation`, `fingerprint` and repro lines.
"""
