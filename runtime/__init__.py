"""What runs code: processes and their limits, torch's dispatch modes, names that are imported on first use.

In: tasks as a list, or one process to ask. Out: answers as they come, or how a process was lost. `engines` (this
machine's `pool`, or Ray) stands on `process`; every floor above may call them.
"""
