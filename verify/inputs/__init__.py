"""Inputs of a call: numbers come from `assay.golden.inputs`, and stay the same while shapes shrink.

`layouts` puts them into memory, `unused` spoils what nothing reads, `cases` says what one call is made of, and
`sampler` chooses cases.
"""
