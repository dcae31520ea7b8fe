"""Reports: one verdict or several as text, HTML, JSON and Markdown.

In: data alone. Out: text. Called by the command line, the pytest plugin and `Verdict` itself.
"""
