"""The results of an audit as JSON, in a terminal and on a page.

In: an audit, its recommendation, findings and exports. Out: the record of audit.json as plain data, and renderings of
it that need nothing else. Called by `assay audit`.

record (audit.json and its schema) · content (fills the record from an audit) · comparison (of two assignments) ·
summary (for a terminal) · page (report.html) · words (names and numbers for readers).
"""

from assay.precision.report.content import content_of
from assay.precision.report.page import page
from assay.precision.report.summary import summary

__all__ = ["content_of", "page", "summary"]
