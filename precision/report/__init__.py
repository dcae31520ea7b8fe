"""What an audit tells: content (audit.json, by audit.schema.json), summary (a terminal), page (report.html).

words: names and numbers as readers take them.
"""

from assay.precision.report.content import About, content_of
from assay.precision.report.page import page
from assay.precision.report.summary import summary

__all__ = ["About", "content_of", "page", "summary"]
