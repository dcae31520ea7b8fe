"""The results of an audit as JSON, in a terminal and on a page.

record (audit.json and its schema) · content (fills it from an audit) · comparison (of two assignments) · summary (for a
terminal; names and numbers) · page (report.html)
"""

from assay.precision.report.content import content_of
from assay.precision.report.page import page
from assay.precision.report.summary import summary

__all__ = ["content_of", "page", "summary"]
