"""The audit of a test-suite that already exists: ``pytest --assay-audit``.

The comparisons of torch, NumPy and others are wrapped while the suite runs. Those that pass are made again, after their
test, with values that are wrong on purpose; the report lists, assertion by assertion, what would have been let through.

===============  =====================================================================
`comparisons`    which functions compare, and how they are called
`patching`       wrapping them, whenever and under whatever name they are imported
`places`         where a comparison stands, and what becomes of its answer
`values`         the numbers in what was compared, and back
`corruptions`    what is done to them
`replay`         one comparison kept, and made again
`ledger`         what was found, by place; merged over processes
`page`           the terminal's table and the HTML page
`session`        the hooks of pytest
===============  =====================================================================
"""
