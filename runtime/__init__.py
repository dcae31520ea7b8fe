"""Execution of code: processes and their limits, torch's dispatch modes, imports on first use.

In: a list of tasks, or one process to query. Out: answers as they arrive, or how a process was lost. `engines` (this
machine's `pool`, or Ray) builds on `process`; every package above may use this one.
"""
