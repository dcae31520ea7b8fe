"""Input numbers: every element is a function of (seed, tensor, coordinates), bit for bit the same on every platform.

`random_bits` draws, `distributions` shapes the draws into numbers, `values` stores them in a tensor's dtype, and
`recipe` names everything that determines the inputs of one call.
"""
