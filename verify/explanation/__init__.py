"""Explanation: which known faults account for a failure.

In: a shrunk failure and the harness that it was seen in. Out: ranked `Explanation`s. Called by `examination` once,
after shrinking; the fault models serve `mutation` too.
"""
