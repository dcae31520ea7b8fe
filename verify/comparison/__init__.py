"""Comparison: a case's outputs against its goldens, under a contract.

In: a `Case`, its inputs and outputs. Out: a `Result`, with a `Failure` if the contract is provably broken, and the
positions of the errors. Called by `harness` for each case, and by `explanation`.
"""
