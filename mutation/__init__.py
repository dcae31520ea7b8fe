"""The mutation audit of an existing test suite: ``pytest --assay-audit``.

The comparison functions of torch, NumPy and others are wrapped while the suite runs. Comparisons that pass are repeated
after their test with wrong values; the report lists for each assertion the corruptions that it would let through.

In: a pytest session. Out: a terminal table, an HTML page and JSON. Called by the pytest plugin (`session.Audit`).
"""
