"""Other people's kernels under the specs' signatures, where that takes more than a line of `configs/others.toml`.

Nothing here is imported before the package that it adapts is known to be installed. None of their code is here.
"""
