"""Inputs: every element is a function of (seed, tensor, coordinates), so that it stays the same while shapes shrink.

`random_bits` draws, `distributions` shapes the draws into numbers, `layouts` puts them into memory, `cases` says what
one call is made of, and `sampler` chooses cases.
"""
