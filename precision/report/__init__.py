"""What an audit tells, in JSON, in a terminal and on a page.

In: an audit, what it recommends, findings and exports. Out: the record of audit.json as plain data, and its renderings,
which take nothing else. Called by `assay audit`.

record (audit.json and its schema) · content (the record, filled from an audit) · comparison (of two assignments) ·
summary (a terminal) · page (report.html) · words (names and numbers as readers take them).
"""

from assay.precision.report.content import content_of
from assay.precision.report.page import page
from assay.precision.report.summary import summary

__all__ = ["content_of", "page", "summary"]
