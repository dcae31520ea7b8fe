"""Judgement: a case's outputs against its goldens, by a contract.

In: a `Case`, its inputs and outputs. Out: a `Result`, with a `Failure` where the contract is provably broken, and where
in an output the errors lie. Called by `execution` for each case, and by `explanation`.
"""
