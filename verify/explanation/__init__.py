"""Explain a failure by known faults.

In: a shrunk failure and the harness that produced it. Out: ranked `Explanation`s. `examination` calls it once, after
shrinking; `mutation` uses the fault models too.
"""
